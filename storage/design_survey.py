"""One pass over a store's blocks for what a design is judged by: ranges, distinct values, correlations, a few runs.

Everything here can be merged with the same of other rows and has a bounded size, however many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
from numpy.typing import NDArray

from storage.run_identity import Hashes, distinct, hash_rows
from storage.table import Table
from storage.workers import Task, Workers, parts_of

Numbers = NDArray[np.float64]

MOST_VALUES = 101  # distinct values of a column that are told apart; one more gap than a hundredth of the range has
MOST_RUNS = 8192  # of which the calibration inputs are kept
MOST_PARTS = 64  # tasks of a pass: their results lie in memory together


@dataclass(frozen=True)
class RunsSurvey:
    """The runs table in numbers that do not grow with it."""

    rows: int
    low: Numbers  # (d1 + d2 + d_out,) of x, t and z, NaN where all are missing
    high: Numbers
    mean: Numbers  # (d1 + d2,) of x and t
    products: Numbers  # (d1 + d2, d1 + d2) sums of products of deviations from the mean
    values: tuple[Numbers, ...]  # distinct values of each of x and t, sorted; MOST_VALUES of them stand for more
    settings: Hashes  # of the distinct t, sorted: all, or the smallest MOST_RUNS, a random sample of them
    t: Numbers  # (settings, d2)
    numbers: Hashes | None = None  # of the distinct runs, where rows are numbered
    numbered_settings: Hashes | None = None  # of the distinct pairs of run and t

    def merge(self, other: RunsSurvey) -> RunsSurvey:
        """The survey of the rows of both (Chan et al. 1979)."""
        rows = self.rows + other.rows
        shift = other.mean - self.mean
        settings, t = _smallest(self.settings, self.t, other.settings, other.t)
        return RunsSurvey(
            rows,
            np.fmin(self.low, other.low),
            np.fmax(self.high, other.high),
            self.mean + other.rows / rows * shift,
            self.products + other.products + self.rows * other.rows / rows * np.outer(shift, shift),
            tuple(_distinct_values(a, b) for a, b in zip(self.values, other.values, strict=True)),
            settings,
            t,
            _smallest_hashes(self.numbers, other.numbers),
            _smallest_hashes(self.numbered_settings, other.numbered_settings),
        )


@dataclass(frozen=True)
class ObservationsSurvey:
    """The observations, compared with limits."""

    rows: int
    known: NDArray[np.int64]  # (d1 + d_out,) values of x and y that are not missing
    outside: NDArray[np.int64]  # of them, those below the lower or above the upper limit
    low: Numbers
    high: Numbers

    def merge(self, other: ObservationsSurvey) -> ObservationsSurvey:
        """The survey of the rows of both."""
        return ObservationsSurvey(
            self.rows + other.rows,
            self.known + other.known,
            self.outside + other.outside,
            np.fmin(self.low, other.low),
            np.fmax(self.high, other.high),
        )


def survey_runs(table: Table, pool: Workers) -> RunsSurvey:
    """The survey of a table of runs that has rows."""
    parts = parts_of(range(table.blocks), min(MOST_PARTS, 4 * pool.count))
    found: list[RunsSurvey] = pool.run([Task(partial(_runs_part, table, part)) for part in parts])
    return reduce(RunsSurvey.merge, found)


def survey_observations(table: Table, lower: Numbers, upper: Numbers, pool: Workers) -> ObservationsSurvey:
    """The survey of a table of observations that has rows; the limits are those of x and y."""
    tasks = [
        Task(partial(_observations_part, table, part, lower, upper))
        for part in parts_of(range(table.blocks), MOST_PARTS)
    ]
    parts: list[ObservationsSurvey] = pool.run(tasks)
    return reduce(ObservationsSurvey.merge, parts)


def _runs_part(table: Table, blocks: Sequence[int]) -> RunsSurvey:
    found: RunsSurvey | None = None
    for block in blocks:
        new = _runs_block(table, block, found)
        found = new if found is None else found.merge(new)
    assert found is not None
    return found


def _runs_block(table: Table, block: int, before: RunsSurvey | None) -> RunsSurvey:
    """A block's survey; what would be cut when it is merged with the one before is left out at once."""
    rows = table.read_block(block, ["x", "t", "z", *(["run"] if table.numbered else [])])
    # Whole columns lie contiguously, which makes everything below faster; x and t are never missing.
    inputs = np.concatenate([rows["x"].T, rows["t"].T], dtype=np.float64).T
    low, high = (np.concatenate([a, b]) for a, b in zip((inputs.min(0), inputs.max(0)), _range(rows["z"]), strict=True))
    mean = inputs.mean(axis=0)
    deviations = inputs - mean
    known = [np.empty(0)] * inputs.shape[1] if before is None else before.values
    t_rows = inputs[:, rows["x"].shape[1] :]
    hashes = hash_rows(t_rows)
    numbers = pairs = None
    if table.numbered:
        numbers = _few(hash_rows(rows["run"]))
        pairs = _few(hash_rows(np.concatenate([rows["run"], t_rows], axis=1)))
    if before is not None and len(before.settings) == MOST_RUNS:
        chosen = np.flatnonzero(hashes < before.settings[-1])
    else:
        chosen = np.flatnonzero(np.concatenate([[True], hashes[1:] != hashes[:-1]]))
    settings, t = _smallest(hashes[chosen], t_rows[chosen])
    return RunsSurvey(
        len(inputs),
        low,
        high,
        mean,
        deviations.T @ deviations,
        tuple(_new_values(column, seen) for column, seen in zip(inputs.T, known, strict=True)),
        settings,
        t,
        numbers,
        pairs,
    )


def _observations_part(table: Table, blocks: Sequence[int], lower: Numbers, upper: Numbers) -> ObservationsSurvey:
    return reduce(ObservationsSurvey.merge, (_observations_block(table, block, lower, upper) for block in blocks))


def _observations_block(table: Table, block: int, lower: Numbers, upper: Numbers) -> ObservationsSurvey:
    rows = table.read_block(block, ["x", "y"])
    values = np.concatenate([rows["x"], rows["y"]], axis=1, dtype=np.float64)
    outside = ((values < lower) | (values > upper)).sum(axis=0)  # a missing value is neither
    return ObservationsSurvey(len(values), (~np.isnan(values)).sum(axis=0), outside, *_range(values))


def _range(values: NDArray[np.floating]) -> tuple[Numbers, Numbers]:
    """Smallest and largest value of every column, NaN where there is none."""
    return np.fmin.reduce(values).astype(np.float64), np.fmax.reduce(values).astype(np.float64)


def _new_values(column: Numbers, seen: Numbers) -> Numbers:
    """Distinct values of a column that are not among those seen, or none if enough have been seen."""
    if len(seen) == MOST_VALUES:
        return np.empty(0)
    if len(seen):
        place = np.minimum(np.searchsorted(seen, column), len(seen) - 1)
        column = column[seen[place] != column]
    few = _distinct_values(column[: 8 * MOST_VALUES], seen)  # mostly there are enough among a few rows
    return few if len(few) == MOST_VALUES else _distinct_values(column, np.empty(0))


def _distinct_values(first: Numbers, second: Numbers) -> Numbers:
    values: Numbers = np.sort(np.concatenate([first, second]))
    new = np.concatenate([[True] * (len(values) > 0), values[1:] != values[:-1]]).astype(bool)
    found: Numbers = values[new][:MOST_VALUES]
    return found


def _smallest(
    first: Hashes, first_rows: Numbers, second: Hashes | None = None, second_rows: Numbers | None = None
) -> tuple[Hashes, Numbers]:
    """The smallest distinct hashes, with their rows: hashes are random, so that this is a random sample of all."""
    hashes = first if second is None else np.concatenate([first, second])
    rows = first_rows if second_rows is None else np.concatenate([first_rows, second_rows])
    found, where = np.unique(hashes, return_index=True)
    return found[:MOST_RUNS], rows[where[:MOST_RUNS]]


def _few(hashes: Hashes) -> Hashes:
    return distinct(hashes)[:MOST_RUNS]


def _smallest_hashes(first: Hashes | None, second: Hashes | None) -> Hashes | None:
    return None if first is None or second is None else _few(np.concatenate([first, second]))


def estimated_count(hashes: Hashes) -> float:
    """How many distinct hashes there were before the smallest were kept: exact below MOST_RUNS, else within 3 %."""
    if len(hashes) < MOST_RUNS:
        return len(hashes)
    return (MOST_RUNS - 1) * 2.0**64 / float(hashes[-1])
