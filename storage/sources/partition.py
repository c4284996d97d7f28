"""Rows on their way from a file: partitions that a task reads, and the pieces that it holds at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from storage.sources.columns import Selection
from storage.sources.files import SourceFile

PIECE_BYTES = 16 << 20  # of a piece's numbers in memory


@dataclass
class Piece:
    """Consecutive rows. A cell that is not a number holds NaN and is listed in `texts`, a broken row in `broken`."""

    values: NDArray[np.float64]  # (rows, columns), each column contiguous
    texts: dict[int, tuple[NDArray[np.intp], str]]  # column → rows, and what stands in the first of them
    broken: NDArray[np.intp]  # rows with a wrong number of fields
    broken_text: str = ""  # the first of them


class Partition(Protocol):
    """Consecutive rows of a file that one task reads; small and picklable."""

    @property
    def file(self) -> SourceFile:
        """The file that the rows are in."""

    def pieces(self) -> Iterator[Piece]:
        """The rows in order, in pieces that fit in memory."""


@dataclass(frozen=True)
class Plan:
    """A file cut into partitions."""

    file: SourceFile
    partitions: tuple[Partition, ...]
    selection: Selection
    note: str = ""  # what the user should know of the file


def blank(rows: int, columns: int) -> NDArray[np.float64]:
    """An array for a piece: whole columns are contiguous, because that is how files are read and checks are made."""
    return np.empty((columns, rows)).T


def whole(values: NDArray[np.float64]) -> Piece:
    """A piece without unreadable cells."""
    return Piece(values, {}, np.empty(0, np.intp))


def piece_rows(columns: int) -> int:
    """Rows of a piece with this many columns."""
    return max(1, PIECE_BYTES // (8 * columns))
