"""float32 or float64: the smaller one where it loses nothing that matters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from storage.errors import IngestError

ROUNDING = 2.0**-24  # of float32, relative to a value
SMALLEST = 2.0**-150  # half of float32's smallest step, near zero
LOSS = 1e-6  # of a column's range that rounding may cost
LARGEST = float(np.finfo(np.float32).max)

Range = tuple[str, float, float]  # a column's name and its smallest and largest value, NaN if it has none


def too_large(ranges: Sequence[Range]) -> str | None:
    """Says which column does not fit into float32 at all."""
    for name, low, high in ranges:
        if max(abs(low), abs(high)) > LARGEST:
            return f"column '{name}' reaches {max(low, high, key=abs):g}, beyond float32"
    return None


def too_fine(ranges: Sequence[Range]) -> str | None:
    """Says which column float32 would round by more than a millionth of the column's range."""
    for name, low, high in ranges:
        rounding = max(ROUNDING * max(abs(low), abs(high)), SMALLEST)
        if low < high and rounding > LOSS * (high - low):
            return f"float32 would round column '{name}' by {rounding:.2g}, its range is only {high - low:.2g}"
    return None


def choose(wanted: str, ranges: Sequence[Range], stored: str | None = None) -> tuple[str, str]:
    """The type to store numbers in, and why; an existing store's type is kept."""
    known = [r for r in ranges if not math.isnan(r[1])]
    large, fine = too_large(known), too_fine(known)
    dtype = stored or wanted
    if dtype == "auto":
        return ("float64", large or fine or "") if large or fine else ("float32", "it keeps a millionth of every range")
    if dtype == "float32" and large:
        cure = "ingest into a new store with dtype float64" if stored else "use dtype float64 or auto"
        raise IngestError(f"{large}; {cure}")
    why = "as the store has it" if stored else "as asked for"
    return dtype, f"{why}, though {fine}" if dtype == "float32" and fine else why
