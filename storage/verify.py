"""Reading everything, to name every damaged chunk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from storage import layout
from storage.chunks import UNDECODABLE, ChunkReader
from storage.errors import DamagedChunk, StoreError
from storage.layout import chunk_key
from storage.table import Table, open_array
from storage.workers import Task, parts_of, workers

if TYPE_CHECKING:
    from storage.store import Store


class Damage(NamedTuple):
    """A chunk that cannot be read: its file, its rows (last one included) and why."""

    file: str
    first_row: int
    last_row: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file} (rows {self.first_row} to {self.last_row}): {self.reason}"


def verify(store: Store) -> list[Damage]:
    """Every damaged chunk of a store, in order; an empty list says that all of it can be read."""
    tasks = [
        Task(partial(_check_chunks, table, array, part))
        for table in (store.runs, store.observations)
        for array in table.arrays
        for part in parts_of(range(table.blocks), 64)
    ]
    with workers(None) as pool:
        found = pool.run(tasks)
    return [*_check_labels(store), *(damage for part in found for damage in part)]


def _check_labels(store: Store) -> list[Damage]:
    """The names that xarray shows along the columns must be the problem's."""
    readable, found = store.place.zarr_store(read_only=True), []
    for path, metadata in layout.members(store.document).items():
        variables = layout.labelled(store.problem).get(path.rpartition("/")[2])
        if variables is not None:
            try:
                labels = np.asarray(open_array(readable, path, metadata)[:]).tolist()
            except (OSError, *UNDECODABLE) as error:
                labels = [str(error)]
            if labels != [v.name for v in variables]:
                reason = "the columns' names are damaged; the rows are not concerned"
                found.append(Damage(f"{path}/c.0", 0, len(variables) - 1, reason))
    return found


def _check_chunks(table: Table, array: str, blocks: Sequence[int]) -> list[Damage]:
    return [damage for index in blocks for damage in _check_chunk(table, array, index)]


def _check_chunk(table: Table, array: str, index: int) -> list[Damage]:
    reader, rows = table.readers[array], table.block_range(index)
    file = chunk_key(table.name, array, index)
    try:
        reader.read(index, len(rows))
    except DamagedChunk as error:
        parts = _damaged_parts(reader, rows) if reader.sharded else []
        return [Damage(file, part[0], part[-1], error.reason) for part in parts or [rows]]
    except StoreError as error:
        return [Damage(file, rows[0], rows[-1], str(error))]
    return []


def _damaged_parts(reader: ChunkReader, rows: range) -> list[range]:
    """The chunks inside a shard that cannot be read; none or all mean that the shard's index is gone."""
    size = int(reader.array.chunks[0])
    parts = [range(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)]
    return [part for part in parts if not _readable(reader, part)]


def _readable(reader: ChunkReader, rows: range) -> bool:
    try:
        reader.read_rows(rows.start, rows.stop)
    except DamagedChunk:
        return False
    return True
