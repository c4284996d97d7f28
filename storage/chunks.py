"""Reading one chunk of one array, as fast as the medium allows, and saying so when it is damaged.

Zarr's general pipeline takes 4 ms for a chunk whose reading, checking and decompressing take 1 ms (640 KB, zstd, two
cores): event loop, thread hops and fresh memory for every stage. A chunk of our own layout on a local disk is
therefore decoded straight from the file, with the same codecs; sharded and remote chunks go through Zarr.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import google_crc32c
import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec
from zarr.core.metadata import ArrayV3Metadata
from zarr.storage import LocalStore

from storage.bounded_zstd import BoundedZstd, decompress
from storage.errors import DamagedChunk, StoreError
from storage.regular import open_regular
from storage.room import because

ZarrArray = zarr.Array[ArrayV3Metadata]
# What codecs raise on bytes that they did not write.
UNDECODABLE = (ValueError, RuntimeError, LookupError, ArithmeticError, TypeError, AssertionError, BufferError)
# Memory that each reading thread uses again and again: fresh pages cost more than decoding.
_scratch = threading.local()


class ChunkReader:
    """Reads chunks of a two-dimensional array that is chunked along its rows only."""

    def __init__(self, array: ZarrArray) -> None:
        self.array = array
        self.rows = int((array.shards or array.chunks)[0])  # of one file
        self.width = int(array.shape[1])
        self.dtype = np.dtype(array.dtype)
        codecs = array.metadata.codecs  # type: ignore[union-attr]  # a store is Zarr v3
        self.sharded = isinstance(codecs[0], ShardingCodec)
        kinds = [type(codec) for codec in codecs]
        plain = kinds in ([BytesCodec, Crc32cCodec], [BytesCodec, BoundedZstd, Crc32cCodec])
        self.compressed = BoundedZstd in kinds
        self._folder: Path | None = None
        if plain and isinstance(array.store, LocalStore):
            self._folder = array.store.root / array.path

    def read(self, index: int, rows: int) -> NDArray[np.floating]:
        """The first rows of a chunk. The memory belongs to this thread's next read: copy what must stay."""
        if self._folder is not None:
            return self._read_file(self._folder / f"c.{index}.0", index)[:rows]
        start = index * self.rows
        return self._read_zarr(index, start, start + rows)

    def read_rows(self, start: int, stop: int) -> NDArray[np.floating]:
        """Rows inside one chunk, through Zarr; used to find the damaged part of a shard."""
        return self._read_zarr(start // self.rows, start, stop)

    def _read_file(self, path: Path, index: int) -> NDArray[np.floating]:
        size = self.rows * self.width * self.dtype.itemsize
        try:
            with open_regular(path) as file:
                stored = os.fstat(file.fileno()).st_size
                if stored > size + size // 64 + 1024:  # zstd adds less to what it cannot compress
                    raise self.damaged(index, f"it has {stored} bytes for rows of {size}")
                raw = _buffer("raw", stored)
                if file.raw.readinto(raw.data) != len(raw):
                    raise self.damaged(index, "it changed while being read")
        except FileNotFoundError:
            raise self.damaged(index, "its file is missing") from None
        except OSError as error:  # a passing fault of disk or network is not damage
            raise StoreError(f"cannot read {path}: {because(error)}") from error
        body, checksum = raw[:-4], raw[-4:]
        if len(raw) < 4 or google_crc32c.value(body) != int.from_bytes(checksum.tobytes(), "little"):
            raise self.damaged(index, "its checksum does not match")
        if self.compressed:
            decoded = _buffer("decoded", size)
            try:
                decompress(body, decoded)
            except UNDECODABLE as error:
                raise self.damaged(index, f"it cannot be decompressed: {error}") from error
            body = decoded
        if len(body) != size:
            raise self.damaged(index, f"it holds {len(body)} bytes instead of {size}")
        return body.view(self.dtype).reshape(self.rows, self.width)

    def _read_zarr(self, index: int, start: int, stop: int) -> NDArray[np.floating]:
        try:
            values = np.asarray(self.array[start:stop])
        except OSError as error:
            raise StoreError(f"cannot read {self.array.store}/{self.array.path}: {error}") from error
        except UNDECODABLE as error:
            raise self.damaged(index, f"it cannot be decoded: {error}") from error
        # Zarr fills in what it does not find; we write every chunk, so that a chunk of nothing but NaN is suspicious.
        if len(values) and np.isnan(values[0, 0]) and np.isnan(values).all() and not self._size(index):
            raise self.damaged(index, "its file is missing or empty")
        return values

    def _size(self, index: int) -> int:
        from zarr.core.sync import sync

        try:
            return int(sync(self.array.store.getsize(f"{self.array.path}/c.{index}.0")))
        except FileNotFoundError:
            return 0

    def damaged(self, index: int, why: str) -> DamagedChunk:
        """The error for a chunk, with its file and its rows."""
        first = index * self.rows
        last = min(first + self.rows, int(self.array.shape[0])) - 1
        error = DamagedChunk(
            f"{self.array.store}/{self.array.path}/c.{index}.0 (rows {first} to {last}) is damaged: {why}; "
            "see all damage with 'vcal inspect --verify', then restore the file from a copy or ingest into a new store"
        )
        error.reason = why
        return error


def _buffer(name: str, size: int) -> NDArray[np.uint8]:
    """This thread's buffer of that name, at least as large as asked."""
    buffer: NDArray[np.uint8] | None = getattr(_scratch, name, None)
    if buffer is None or len(buffer) < size:
        buffer = np.empty(size, dtype=np.uint8)
        setattr(_scratch, name, buffer)
    return buffer[:size]
