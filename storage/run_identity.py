"""Which rows of the runs table belong to one run of the simulator.

In long form a run gives many rows, one for each time or place. Rows with the same number in the array `run` are one
run; where the table does not have that array, rows with the same calibration inputs t are.

Rows are compared by 64-bit hashes of their values. Two of n different runs then share a hash, and count as one, with a
probability of about n² / 2⁶⁵: 3e-8 for a million runs, 3e-4 for a hundred million. A single column cannot collide at
all, because the hash of one number is a bijection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
    hashes = np.concatenate([np.empty(0, np.uint64), *_over_blocks(table, _hash_blocks)])
    if not len(hashes):
        return np.empty(0, np.int64)
    # Neighbours are often of one run: only the first of them is sorted.
    starts = _changes(hashes)
    _, first, which = np.unique(hashes[starts], return_index=True, return_inverse=True)
    number = np.empty(len(first), np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return np.repeat(number[which], np.diff(starts, append=len(hashes)))


def count_runs(table: Table) -> int:
    """How many runs the rows of the runs table belong to; memory grows with the runs, not with the rows."""
    parts = _over_blocks(table, _distinct_in_blocks)
    return len(distinct(np.concatenate(parts))) if parts else 0


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


def _over_blocks(table: Table, work: Callable[[Table, Sequence[int]], Hashes]) -> list[Any]:
    with workers(None) as pool:
        return pool.run([Task(partial(work, table, part)) for part in parts_of(range(table.blocks))])


def _hash_blocks(table: Table, blocks: Sequence[int]) -> Hashes:
    array = identity_array(table)
    return np.concatenate([hash_rows(table.read_block(block, [array])[array]) for block in blocks])


def _distinct_in_blocks(table: Table, blocks: Sequence[int]) -> Hashes:
    hashes = _hash_blocks(table, blocks)
    return distinct(hashes[_changes(hashes)])
