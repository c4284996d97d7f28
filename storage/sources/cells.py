"""Text that should be numbers: which cells are, and what stands in those that are not."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

# An empty cell and the usual words for "no value" are NaN, as in pandas and R.
EMPTY = ["", "#n/a", "-nan", "n/a", "na", "nan", "null", "none"]
# Fortran writes 1.5D+03 for 1.5e3.
NUMBER = r"^[-+]?((\d+\.?\d*|\.\d+)([ed][-+]?\d+)?|inf|infinity)$"


def numbers(column: pa.ChunkedArray) -> tuple[NDArray[np.float64], tuple[NDArray[np.intp], str] | None]:
    """A column as float64 with NaN for what is empty, and the rows whose text is not a number with the first text."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return _float64(column.cast(pa.float64(), safe=False)), None
    if pa.types.is_boolean(kind):
        return _float64(column.cast(pa.uint8()).cast(pa.float64())), None
    return _parse(column)


def _float64(column: pa.ChunkedArray) -> NDArray[np.float64]:
    values: NDArray[np.float64] = column.to_numpy()  # nulls become NaN
    return values


def _parse(column: pa.ChunkedArray) -> tuple[NDArray[np.float64], tuple[NDArray[np.intp], str] | None]:
    original = _text(column)
    text = pc.utf8_lower(pc.utf8_trim_whitespace(original))
    empty = pc.or_(pc.is_null(text), pc.is_in(text, value_set=pa.array(EMPTY)))
    number = pc.fill_null(pc.match_substring_regex(text, NUMBER), False)
    readable = pc.if_else(number, pc.replace_substring_regex(text, r"(\d|\.)d([-+]?\d)", r"\1e\2"), None)
    values = _float64(readable.cast(pa.float64()))
    bad = np.flatnonzero(~np.asarray(pc.or_(number, empty)))
    if not len(bad):
        return values, None
    return values, (bad, original[int(bad[0])].as_py())


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return column
    try:
        return column.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        # Bytes that are not UTF-8, or a nested type.
        return pa.chunked_array([pa.array([_shown(v) for v in column.to_pylist()], pa.string())])


def _shown(value: object) -> str | None:
    if value is None:
        return None
    return value.decode(errors="replace") if isinstance(value, bytes) else repr(value)
