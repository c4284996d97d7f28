"""Which rows of the runs table belong to one run of the simulator.

In long form a run gives many rows, one for each time or place. Rows with the same number in the array `run` are one
run; where the table does not have that array, rows with the same calibration inputs t are.

Rows are compared by 64-bit hashes of their values. Two of n different runs then share a hash, and count as one, with a
probability of about n² / 2⁶⁵: 3e-8 for a million runs, 3e-4 for a hundred million. A single column cannot collide at
all, because the hash of one number is a bijection.

float32 has only some million values in a range, so that of many runs with a single calibration input a few are the
same by rounding. Where that accounts for all rows with the same t, every row is a run of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from storage.table import Table
from storage.workers import Task, parts_of, workers

Hashes = NDArray[np.uint64]

# SplitMix64: its finalizer is a bijection in which every bit of the input changes half of the bits of the output.
_STEP, _FIRST, _SECOND = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def run_numbers(table: Table) -> NDArray[np.int64]:
    """For each row of the runs table the number of its run: 0, 1, 2 … in order of first appearance. (rows,)

    >>> import storage, tempfile
    >>> problem = {"name": "line", "control_inputs": [{"name": "time", "bounds": [0, 9]}],
    ...            "calibration_inputs": [{"name": "k", "bounds": [0, 1]}], "outputs": [{"name": "f"}]}
    >>> store = storage.create(tempfile.mkdtemp() + "/line.zarr", problem)
    >>> store.append_runs(x=[0, 5, 0, 5, 9], t=[0.3, 0.3, 0.1, 0.1, 0.3], z=[1, 2, 3, 4, 5])
    >>> run_numbers(store.runs)
    array([0, 0, 1, 1, 0])
    """
    parts = _over_blocks(table, _hash_blocks)
    if not parts:
        return np.empty(0, np.int64)
    hashes = np.concatenate([part.hashes for part in parts])
    # Neighbours are often of one run: only the first of them is sorted.
    starts = _changes(hashes)
    _, first, which = np.unique(hashes[starts], return_index=True, return_inverse=True)
    if _same_by_rounding(table, parts, len(first)):
        return np.arange(table.rows, dtype=np.int64)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return np.repeat(number[which], np.diff(starts, append=len(hashes)))


def count_runs(table: Table) -> int:
    """How many runs the rows of the runs table belong to; memory grows with the runs, not with the rows."""
    parts = _over_blocks(table, _distinct_in_blocks)
    if not parts:
        return 0
    count = len(distinct(np.concatenate([part.hashes for part in parts])))
    return table.rows if _same_by_rounding(table, parts, count) else count


def hash_rows(values: NDArray[np.floating]) -> Hashes:
    """A 64-bit hash of every row; 0.0 and -0.0 are the same value, and so are a float32 and the equal float64."""
    found = np.zeros(len(values), np.uint64)
    for column in values.T:
        bits = (column.astype(np.float64) + 0.0).view(np.uint64)  # -0.0 + 0.0 is 0.0
        # h ← mix(h ⊕ bits), a bijection in h and in bits.
        found ^= bits
        found += _STEP
        found ^= found >> np.uint64(30)
        found *= _FIRST
        found ^= found >> np.uint64(27)
        found *= _SECOND
        found ^= found >> np.uint64(31)
    return found


def distinct(hashes: Hashes) -> Hashes:
    """The different ones among hashes, sorted."""
    found = np.sort(hashes)  # np.unique takes many times as long
    return found[_changes(found)]


def identity_array(table: Table) -> str:
    """The array that tells the runs of a table apart."""
    return "run" if table.numbered else "t"


def _changes(hashes: Hashes) -> NDArray[np.intp]:
    """The rows that differ from the row before them, and the first one."""
    return np.flatnonzero(np.concatenate([[True] * (len(hashes) > 0), hashes[1:] != hashes[:-1]]))


class _Part(NamedTuple):
    """The hashes of some blocks' rows, and the range of what was hashed."""

    hashes: Hashes
    low: NDArray[np.floating]
    high: NDArray[np.floating]


def _over_blocks(table: Table, work: Callable[[Table, Sequence[int]], _Part]) -> list[_Part]:
    with workers(None) as pool:
        found: list[_Part] = pool.run([Task(partial(work, table, part)) for part in parts_of(range(table.blocks))])
    return found


def _hash_blocks(table: Table, blocks: Sequence[int]) -> _Part:
    array = identity_array(table)
    parts = []
    for block in blocks:
        values = table.read_block(block, [array])[array]
        parts.append(_Part(hash_rows(values), values.min(axis=0), values.max(axis=0)))
    hashes, low, high = zip(*parts, strict=True)
    return _Part(np.concatenate(hashes), np.minimum.reduce(low), np.maximum.reduce(high))


def _distinct_in_blocks(table: Table, blocks: Sequence[int]) -> _Part:
    part = _hash_blocks(table, blocks)
    return part._replace(hashes=distinct(part.hashes[_changes(part.hashes)]))


def _same_by_rounding(table: Table, parts: Sequence[_Part], count: int) -> bool:
    """Whether rounding alone explains that rows have only so many different t."""
    repeated = table.rows - count
    if table.numbered or not repeated:
        return False
    low, high = np.minimum.reduce([part.low for part in parts]), np.maximum.reduce([part.high for part in parts])
    step = np.spacing(np.maximum(np.abs(low), np.abs(high)))
    sizes = np.log(np.maximum(1.0, (high - low).astype(np.float64) / step))
    values = math.exp(min(float(sizes.sum()), 700.0))  # that t can have
    # n runs at random have about S (1 − exp(−n/S)) different ones of S values; uneven priors have up to thrice as many
    # repetitions. Where half of the rows would repeat others, nothing can be said.
    expected = table.rows + values * math.expm1(-table.rows / values)
    return expected < 0.5 * table.rows and repeated <= 3 * (expected + math.sqrt(max(expected, 0.0)))
