"""One-pass statistics of every column of a store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING

import numpy as np

from storage.table import Floats, Table
from storage.workers import Task, parts_of, workers

if TYPE_CHECKING:
    from storage.store import Store


@dataclass(frozen=True)
class ColumnSummary:
    """Statistics of one column; NaN counts as missing and enters nothing else."""

    count: int
    missing: int
    minimum: float
    maximum: float
    mean: float
    sd: float


@dataclass(frozen=True)
class Summary:
    """Statistics by column name, and how many rows they come from."""

    runs: dict[str, ColumnSummary] = field(default_factory=dict)
    observations: dict[str, ColumnSummary] = field(default_factory=dict)
    rows_read: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Moments:
    """Count, mean, sum of squared deviations and range of columns; two of them can be merged (Chan et al. 1979)."""

    rows: int
    count: Floats
    mean: Floats
    squares: Floats
    minimum: Floats
    maximum: Floats

    def merge(self, other: _Moments) -> _Moments:
        count = self.count + other.count
        share = np.divide(other.count, count, out=np.zeros_like(count), where=count > 0)
        shift = other.mean - self.mean
        return _Moments(
            self.rows + other.rows,
            count,
            self.mean + share * shift,
            self.squares + other.squares + shift**2 * self.count * share,
            np.fmin(self.minimum, other.minimum),
            np.fmax(self.maximum, other.maximum),
        )


def summarise(store: Store, *, most_blocks: int | None = None) -> Summary:
    """Statistics of both tables; with `most_blocks`, from that many blocks spread evenly over each table."""
    summary = Summary()
    for table, found in ((store.runs, summary.runs), (store.observations, summary.observations)):
        moments = _table_moments(table, most_blocks)
        summary.rows_read[table.name] = moments.rows
        found.update(zip(table.names, _columns(moments), strict=True))
    return summary


def _table_moments(table: Table, most_blocks: int | None) -> _Moments:
    blocks = np.arange(table.blocks)
    if most_blocks is not None and table.blocks > most_blocks:
        blocks = np.linspace(0, table.blocks - 1, most_blocks).astype(int)
    with workers(None) as pool:
        parts = pool.run([Task(partial(_part_moments, table, part)) for part in parts_of(blocks.tolist())])
    return reduce(_Moments.merge, parts, _nothing(table))


def _nothing(table: Table) -> _Moments:
    zeros, unknown = np.zeros(len(table.names)), np.full(len(table.names), np.nan)
    return _Moments(0, zeros, zeros, zeros, unknown, unknown)


def _part_moments(table: Table, blocks: Sequence[int]) -> _Moments:
    return reduce(_Moments.merge, (_block_moments(table, block) for block in blocks), _nothing(table))


def _block_moments(table: Table, index: int) -> _Moments:
    values = np.concatenate(list(table.read_block(index).values()), axis=1, dtype=np.float64)
    known = ~np.isnan(values)
    count = known.sum(axis=0).astype(np.float64)
    mean = np.divide(np.where(known, values, 0.0).sum(axis=0), count, out=np.zeros_like(count), where=count > 0)
    squares = np.where(known, (values - mean) ** 2, 0.0).sum(axis=0)
    low = np.where(known, values, np.inf).min(axis=0)
    high = np.where(known, values, -np.inf).max(axis=0)
    empty = count == 0
    return _Moments(len(values), count, mean, squares, np.where(empty, np.nan, low), np.where(empty, np.nan, high))


def _columns(moments: _Moments) -> list[ColumnSummary]:
    return [
        ColumnSummary(
            count=int(count),
            missing=moments.rows - int(count),
            minimum=float(low),
            maximum=float(high),
            mean=float(mean) if count else math.nan,
            sd=math.sqrt(squares / count) if count else math.nan,
        )
        for count, mean, squares, low, high in zip(
            moments.count, moments.mean, moments.squares, moments.minimum, moments.maximum, strict=True
        )
    ]
