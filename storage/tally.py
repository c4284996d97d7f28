"""What a partition holds: rows, faults and ranges on the first reading, sound rows on the second."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from storage.checks import Fault, find_faults
from storage.errors import IngestError
from storage.problem import Column
from storage.sources import Partition, Piece, pieces

BROKEN = "wrong number of fields"
TEXT = "not a number"


@dataclass(frozen=True)
class Tally:
    """A partition in a few numbers."""

    rows: int
    kept: int  # rows without a fault
    faults: tuple[Fault, ...]  # rows counted from 0 within the partition
    low: NDArray[np.float64]  # smallest and largest sound value of every column, NaN where there is none
    high: NDArray[np.float64]
    checksum: int  # of the numbers, to notice a file that changes


@dataclass(frozen=True)
class FileFault:
    """One kind of fault in one column of one file, rows counted from 1."""

    file: str
    fault: Fault

    def __str__(self) -> str:
        if self.fault.kind != BROKEN:
            return f"{self.file}: {self.fault}"
        rows = "row" if self.fault.count == 1 else "rows"
        return f"{self.file}: {self.fault.count} {rows} with a {BROKEN}, first row {self.fault.row}: {self.fault.value}"


def tally(partition: Partition, columns: Sequence[Column]) -> Tally:
    """Reads a partition and judges every row."""
    rows = kept = checksum = 0
    faults: list[Fault] = []
    low, high = np.full((2, len(columns)), np.nan)
    for piece, found, valid in _judged(partition, columns):
        faults += [replace(fault, row=fault.row + rows) for fault in found]
        values = piece.values if not found else piece.values[valid]
        if len(values):
            low, high = np.fmin(low, np.fmin.reduce(values)), np.fmax(high, np.fmax.reduce(values))
        rows, kept = rows + len(piece.values), kept + len(values)
        checksum = _checksum(piece, checksum)
    return Tally(rows, kept, tuple(_together(faults)), low, high, checksum)


def kept_rows(
    partition: Partition, columns: Sequence[Column], expected: Tally, dtype: np.dtype[np.floating]
) -> NDArray[np.floating]:
    """Reads a partition again: its sound rows (rows, columns), which must be those of the first reading."""
    out = np.empty((expected.kept, len(columns)), dtype)
    kept = checksum = 0
    for piece, found, valid in _judged(partition, columns):
        values = piece.values if not found else piece.values[valid]
        room = out[kept : kept + len(values)]
        room[...] = values[: len(room)]
        kept += len(values)
        checksum = _checksum(piece, checksum)
    if (kept, checksum) != (expected.kept, expected.checksum):
        raise IngestError(f"{partition.file}: changed while it was read; wait until it is complete, then ingest again")
    return out


def of_file(file: str, tallies: Sequence[Tally]) -> list[FileFault]:
    """The faults of a file from those of its partitions, rows counted from 1 through the file."""
    faults: list[Fault] = []
    row = 1
    for part in tallies:
        faults += [replace(fault, row=fault.row + row) for fault in part.faults]
        row += part.rows
    return [FileFault(file, fault) for fault in _together(faults)]


def _judged(partition: Partition, columns: Sequence[Column]) -> Iterator[tuple[Piece, list[Fault], NDArray[np.bool_]]]:
    for piece in pieces(partition):
        yield piece, *judge(piece, columns)


def judge(piece: Piece, columns: Sequence[Column]) -> tuple[list[Fault], NDArray[np.bool_]]:
    """The faults of a piece, rows counted from 0, and which rows have none."""
    if not piece.texts and not len(piece.broken):
        return find_faults(piece.values, columns)
    # A cell that could not be read is one fault, not also a missing value: something harmless stands in for it.
    harmless = np.clip(0.0, [c.low for c in columns], [c.high for c in columns])
    values = piece.values.copy(order="K")
    values[piece.broken] = harmless
    faults: list[Fault] = []
    if len(piece.broken):
        faults.append(Fault("", BROKEN, len(piece.broken), int(piece.broken[0]), repr(piece.broken_text[:60])))
    for i, (rows, text) in piece.texts.items():
        values[rows, i] = harmless[i]
        faults.append(Fault(columns[i].name, TEXT, len(rows), int(rows[0]), repr(text[:60])))
    found, valid = find_faults(values, columns)
    for rows in (piece.broken, *(rows for rows, _ in piece.texts.values())):
        valid[rows] = False
    return faults + found, valid


def _together(faults: Sequence[Fault]) -> list[Fault]:
    """Faults of the same kind in the same column as one; they come in the order of their rows."""
    found: dict[tuple[str, str], Fault] = {}
    for fault in faults:
        first = found.setdefault((fault.column, fault.kind), fault)
        if first is not fault:
            found[fault.column, fault.kind] = replace(first, count=first.count + fault.count)
    return list(found.values())


def _checksum(piece: Piece, before: int) -> int:
    return zlib.crc32(np.ascontiguousarray(piece.values.T).data, before)
