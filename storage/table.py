"""One table of a store, as it was when it was opened: its columns, its rows, and whole blocks of them.

A block is what one file of each array holds: the unit of reading, shuffling and dealing to processes. Its rows come
*packed*: the arrays side by side in one matrix, so that a row is one piece of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.storage import StorePath

from storage.chunks import ChunkReader, ZarrArray
from storage.layout import TABLES
from storage.problem import Column

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore

Floats = NDArray[np.floating]


def open_array(store: ZarrStore, path: str, metadata: dict[str, Any]) -> ZarrArray:
    """An array with exactly this metadata, whatever stands in its own file."""
    # Every chunk is written, also one that equals the fill value: a chunk without a file is a lost chunk.
    config = {"write_empty_chunks": True}
    return zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=StorePath(store, path), config=config))  # type: ignore[call-overload]


class Table:
    """The committed rows of `runs` or `observations`."""

    def __init__(
        self, name: str, columns: dict[str, tuple[Column, ...]], store: ZarrStore, members: dict[str, dict[str, Any]]
    ) -> None:
        self.name = name
        present = [array for array in TABLES[name] if f"{name}/{array}" in members]
        self.columns = {array: [column.name for column in columns[array]] for array in present}
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
        """The names of a packed row's columns."""
        return [name for names in self.columns.values() for name in names]

    @property
    def width(self) -> int:
        """Columns of a packed row."""
        return sum(reader.width for reader in self.readers.values())

    @property
    def slices(self) -> dict[str, slice]:
        """Where each array stands in a packed row."""
        stops = np.cumsum([reader.width for reader in self.readers.values()])
        return {
            array: slice(int(stop) - reader.width, int(stop))
            for (array, reader), stop in zip(self.readers.items(), stops, strict=True)
        }

    @property
    def blocks(self) -> int:
        """How many blocks hold the rows; the last one may be short."""
        return -(-self.rows // self.block_rows)

    def block_range(self, index: int) -> range:
        """The rows of a block."""
        start = index * self.block_rows
        return range(start, min(start + self.block_rows, self.rows))

    def read_block(self, index: int, out: Floats | None = None) -> Floats:
        """The packed rows of one block, into `out` if given; a damaged chunk raises DamagedChunk."""
        rows = len(self.block_range(index))
        packed = np.empty((rows, self.width), self.dtype) if out is None else out
        for array, columns in self.slices.items():
            packed[:, columns] = self.readers[array].read(index, rows)
        return packed

    def read(self, start: int = 0, stop: int | None = None) -> dict[str, Floats]:
        """Rows start to stop of every array."""
        stop = self.rows if stop is None else min(stop, self.rows)
        packed = np.empty((max(0, stop - start), self.width), self.dtype)
        for index in range(start // self.block_rows, -(-stop // self.block_rows) if stop > start else 0):
            rows = self.block_range(index)
            low, high = max(start, rows.start), min(stop, rows.stop)
            packed[low - start : high - start] = self.read_block(index)[low - rows.start : high - rows.start]
        return {array: packed[:, columns] for array, columns in self.slices.items()}

    def iter_blocks(self) -> Iterator[Floats]:
        """The packed rows of all blocks, one after the other."""
        for index in range(self.blocks):
            yield self.read_block(index)
