"""Numbers are written as a person would write them."""

from __future__ import annotations

import math

import pytest

from vcal_dist.report.words import figure, listed, percent, plain, to_the_digit


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.08734, 3, "0.0873"),
        (0.0051, 3, "0.00510"),
        (12345.6, 3, "12,300"),
        (-2.5, 2, "−2.5"),
        (9.999, 2, "10"),
        (0.0, 3, "0"),
        (7.11e-5, 3, "7.11·10⁻⁵"),
        (3e12, 2, "3·10¹²"),
        (math.inf, 2, "∞"),
        (math.nan, 2, "–"),
    ],
)
def test_significant_digits(value: float, digits: int, text: str) -> None:
    assert figure(value, digits) == text


@pytest.mark.parametrize(
    ("value", "spread", "text"),
    [
        (0.087341, 0.00163, "0.0873"),
        (0.49812, 0.288, "0.50"),
        (123456.0, 321.0, "123,460"),
        (-0.00004, 0.29, "0.00"),
        (1.0, 0.0, "1.000"),
    ],
)
def test_no_digit_beyond_the_second_of_the_spread(value: float, spread: float, text: str) -> None:
    assert to_the_digit(value, spread) == text


def test_a_share_that_is_not_all_is_not_called_all() -> None:
    found = [percent(share).replace("\N{NO-BREAK SPACE}", " ") for share in (0.0, 0.0001, 0.004, 0.85, 0.997, 1.0)]
    assert found == ["0 %", "< 0.1 %", "0.4 %", "85 %", "99.7 %", "100 %"]


def test_bounds_are_written_without_zeros_at_their_end() -> None:
    assert [plain(value) for value in (0.0, 1.0, 0.25, 50_000.0, 1e9)] == ["0", "1", "0.25", "50,000", "1·10⁹"]


def test_lists_read_as_sentences() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(["a", "b", "c"], most=2) == "a, b and 1 more"
