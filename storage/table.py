"""One table of a store, as it was when it was opened: its columns, its rows, and whole blocks of them.

A block is what one file of each array holds: the unit of reading, shuffling and dealing to processes.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.metadata import ArrayV3Metadata
from zarr.storage import StorePath

from storage.bounded_zstd import bounded
from storage.chunks import ChunkReader, ZarrArray
from storage.layout import TABLES
from storage.problem import RUN, Column

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore

Floats = NDArray[np.floating]


def open_array(store: ZarrStore, path: str, metadata: dict[str, Any]) -> ZarrArray:
    """An array with exactly this metadata, whatever stands in its own file."""
    # Every chunk is written, also one that equals the fill value: a chunk without a file is a lost chunk.
    config = {"write_empty_chunks": True}
    parsed = ArrayV3Metadata.from_dict(metadata)
    parsed = dataclasses.replace(parsed, codecs=bounded(parsed.codecs))
    return zarr.Array(zarr.AsyncArray(metadata=parsed, store_path=StorePath(store, path), config=config))  # type: ignore[call-overload]


class Table:
    """The committed rows of `runs` or `observations`."""

    def __init__(
        self, name: str, columns: dict[str, tuple[Column, ...]], store: ZarrStore, members: dict[str, dict[str, Any]]
    ) -> None:
        self.name = name
        present = [array for array in TABLES[name] if f"{name}/{array}" in members]
        # What rows are made of. The number of a run only says which rows belong together: nothing is learned from it.
        self.columns = {array: [column.name for column in columns[array]] for array in present if array != RUN}
        self.arrays = {array: open_array(store, f"{name}/{array}", members[f"{name}/{array}"]) for array in present}
        self.readers = {array: ChunkReader(self.arrays[array]) for array in present}
        first = self.readers["x"]
        self.rows = int(first.array.shape[0])
        self.block_rows = first.rows
        self.chunk_rows = int(first.array.chunks[0])
        self.dtype = first.dtype
        self.compression = "zstd" if "zstd" in str(members[f"{name}/x"]["codecs"]) else "none"

    def __len__(self) -> int:
        return self.rows

    def __repr__(self) -> str:
        shape = ", ".join(f"{array} {reader.array.shape}" for array, reader in self.readers.items())
        return f"<{self.name}: {self.rows} rows in {self.blocks} blocks; {shape}>"

    @property
    def names(self) -> list[str]:
        """The names of all columns, array by array."""
        return [name for names in self.columns.values() for name in names]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in memory."""
        return len(self.names) * self.dtype.itemsize

    @property
    def blocks(self) -> int:
        """How many blocks hold the rows; the last one may be short."""
        return -(-self.rows // self.block_rows)

    def block_range(self, index: int) -> range:
        """The rows of a block."""
        start = index * self.block_rows
        return range(start, min(start + self.block_rows, self.rows))

    @property
    def numbered(self) -> bool:
        """Whether rows carry the number of their run, in the array `run`."""
        return RUN in self.arrays

    def read_block(self, index: int, arrays: Sequence[str] | None = None) -> dict[str, Floats]:
        """The rows of one block in all of `columns`, or in these arrays; a damaged chunk raises DamagedChunk."""
        rows = len(self.block_range(index))
        return {a: self.readers[a].read(index, rows).copy() for a in (self.columns if arrays is None else arrays)}

    def first(self, rows: int) -> Table:
        """The table as it was when it had so many rows."""
        found = copy.copy(self)
        found.rows = min(rows, self.rows)
        return found

    def numbers(self) -> Table:
        """The same rows without their values: what is left are their numbers."""
        found = copy.copy(self)
        found.columns = {}
        return found

    def read(
        self, start: int = 0, stop: int | None = None, *, arrays: Sequence[str] | None = None
    ) -> dict[str, Floats]:
        """Rows start to stop of all of `columns`, or of these arrays (`["run"]` where the table is `numbered`)."""
        stop = self.rows if stop is None else min(stop, self.rows)
        readers = {a: self.readers[a] for a in (self.columns if arrays is None else arrays)}
        found = {a: np.empty((max(0, stop - start), r.width), r.dtype) for a, r in readers.items()}
        for index in range(start // self.block_rows, -(-stop // self.block_rows) if stop > start else 0):
            rows = self.block_range(index)
            low, high = max(start, rows.start), min(stop, rows.stop)
            for array, values in self.read_block(index, arrays).items():
                found[array][low - start : high - start] = values[low - rows.start : high - rows.start]
        return found
