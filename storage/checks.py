"""What is wrong with rows: NaN, infinite and out-of-bounds values, by column. Used by every way into a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.problem import MOST_WHOLE, Column

NOT_WHOLE = "not a whole number below 2**53"


@dataclass(frozen=True)
class Fault:
    """One kind of fault in one column: how often, and where and what the first one is."""

    column: str
    kind: str
    count: int
    row: int
    value: str

    def __str__(self) -> str:
        values = "value" if self.count == 1 else "values"
        return f"column '{self.column}': {self.count} {values} {self.kind}, first in row {self.row}: {self.value}"


def find_faults(values: NDArray[np.floating], columns: Sequence[Column]) -> tuple[list[Fault], NDArray[np.bool_]]:
    """The faults of a table (rows, columns), rows counted from 0, and which rows have none."""
    faults: list[Fault] = []
    valid = np.ones(len(values), dtype=bool)
    names = [column.name for column in columns]
    with np.errstate(over="ignore"):
        for column, cells in zip(columns, values.T, strict=True):
            nan = np.isnan(cells)
            infinite = np.isinf(cells)
            outside = (cells < column.low - column.slack) | (cells > column.high + column.slack)
            kinds = [
                ("infinite", infinite),
                (f"out of bounds [{column.low:.10g}, {column.high:.10g}]", outside & ~infinite),
            ]
            if column.whole:
                inexact = (cells != np.rint(cells)) | (np.abs(cells) > MOST_WHOLE)
                kinds.append((NOT_WHOLE, inexact & ~infinite & ~nan))
            if column.noise_of is not None:
                kinds.append(("not positive", cells <= 0))
                nan &= ~np.isnan(values[:, names.index(column.noise_of)])
                kinds.append(("missing (NaN) where the output is known", nan))
            elif not column.missing:
                kinds.append(("missing (NaN)", nan))
            for kind, bad in kinds:
                if count := int(bad.sum()):
                    row = int(bad.argmax())
                    faults.append(Fault(column.name, kind, count, row, f"{cells[row]:.10g}"))
                    valid &= ~bad
    return faults, valid
