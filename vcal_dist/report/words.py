"""Numbers and lists as a person writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

MINUS = "−"
GAP = "\N{NO-BREAK SPACE}"  # between a number and what belongs to it


def figure(value: float, digits: int = 3) -> str:
    """A number with so many significant digits, without an exponent where it can be read without."""
    if not math.isfinite(value):
        return "∞" if value > 0 else f"{MINUS}∞" if value < 0 else "–"
    rounded = float(f"{value:.{digits}g}")
    size = abs(rounded)
    if size and not 1e-4 <= size < 1e7:
        mantissa, exponent = f"{rounded:.{digits - 1}e}".split("e")
        return f"{_signed(_trimmed(mantissa))}·10{_raised(int(exponent))}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size))) if size else 0
    return _signed(f"{rounded:,.{decimals}f}")


def plain(value: float, digits: int = 6) -> str:
    """A number that someone chose, such as a bound: without the zeros at its end."""
    text = figure(value, digits)
    return _trimmed(text) if "·" not in text else text


def to_the_digit(value: float, spread: float) -> str:
    """A number down to the second digit of its spread: more of them would say nothing."""
    if not (math.isfinite(value) and math.isfinite(spread)) or spread <= 0:
        return figure(value, 4)
    decimals = 1 - math.floor(math.log10(spread))
    if decimals > 6 or abs(value) >= 1e7:
        magnitude = math.floor(math.log10(abs(value))) if value else 0
        return figure(value, min(max(2, magnitude + decimals + 1), 9))
    rounded = round(value, decimals) + 0.0  # no minus before a zero
    return _signed(f"{rounded:,.{max(0, decimals)}f}")


def percent(share: float) -> str:
    """A share in whole percent; one decimal where rounding would hide that it is not all, or not none."""
    rounded = round(100 * share)
    if rounded in (0, 100) and share not in (0.0, 1.0):
        text = f"{100 * share:.1f}" if 0.0005 <= share <= 0.9995 else "< 0.1" if share < 0.5 else "> 99.9"
        return f"{text}{GAP}%"
    return f"{rounded}{GAP}%"


def plural(count: int, noun: str) -> str:
    """A count of things: 1 row, 2 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(items: Sequence[str], most: int = 12) -> str:
    """Items as in a sentence: a, b and c; of many the first, and how many more."""
    if len(items) > most:
        return f"{', '.join(items[:most])} and {len(items) - most} more"
    return " and ".join([*([", ".join(items[:-1])] if len(items) > 1 else []), *items[-1:]])


def with_unit(text: str, unit: str) -> str:
    """A figure with its unit."""
    return f"{text} {unit}" if unit else text


def signed(value: float, decimals: int = 2) -> str:
    """A number with its sign, also if that is a plus."""
    return _signed(f"{value:+.{decimals}f}")


def _trimmed(mantissa: str) -> str:
    return mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa


def _signed(text: str) -> str:
    return text.replace("-", MINUS)


def _raised(exponent: int) -> str:
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
