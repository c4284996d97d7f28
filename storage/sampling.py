"""A part of a table's rows, spread evenly over it: the same rows for everyone who asks."""

from __future__ import annotations

from functools import partial

import numpy as np

from storage.order import Integers
from storage.table import Floats, Table
from storage.workers import Task, workers

MOST_BLOCKS = 64


def sample(table: Table, rows: int) -> tuple[dict[str, Floats], Integers]:
    """All rows of a small table, or about so many of a large one, with their numbers.

    They come from up to 64 blocks at even distances, and lie at even distances in each.
    """
    if table.rows <= rows:
        return table.read(), np.arange(table.rows)
    blocks = np.unique(np.linspace(0, table.blocks - 1, min(table.blocks, MOST_BLOCKS)).round().astype(int)).tolist()
    each = max(1, rows // len(blocks))
    with workers(None) as pool:
        parts = pool.run([Task(partial(_part, table, block, each)) for block in blocks])
    found = {array: np.concatenate([part[array] for part, _ in parts]) for array in table.columns}
    return found, np.concatenate([numbers for _, numbers in parts])


def _part(table: Table, block: int, count: int) -> tuple[dict[str, Floats], Integers]:
    here = table.block_range(block)
    chosen = np.unique(np.linspace(0, len(here) - 1, min(count, len(here))).round().astype(np.int64))
    return {array: values[chosen] for array, values in table.read_block(block).items()}, chosen + here.start
