"""Zarr's local store, which reads regular files only, and writes files that are on disk before they replace another's.

Zarr waits for a pipe that stands in a chunk's place, and takes memory for a file of any size. It replaces a file by
rename but does not wait for the disk: after a power failure the new name may hold nothing, and an append writes the
last, partly filled chunk again, which holds rows that were committed long ago.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import LocalStore

from storage.places import write_durably
from storage.regular import open_regular

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype

GIB = 2**30


class FoundStore(LocalStore):
    """A directory that somebody else may have made."""

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """A value or a part of it, or None where there is none."""
        return await asyncio.to_thread(self._value, key, prototype, byte_range)

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Likewise."""
        return self._value(key, prototype, byte_range)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Likewise, for many."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    def _value(self, key: str, prototype: BufferPrototype | None, byte_range: ByteRequest | None) -> Buffer | None:
        prototype = prototype or default_buffer_prototype()
        try:
            with open_regular(self.root / key) as file:
                start, stop = _part(byte_range, os.fstat(file.fileno()).st_size)
                _check_memory(self.root / key, stop - start)
                file.seek(start)
                return prototype.buffer.from_bytes(file.read(stop - start))
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None


class DurableStore(FoundStore):
    """A directory in which a value is either the old one or the new one, also after a power failure."""

    async def set(self, key: str, value: Buffer) -> None:
        """Replaces a value."""
        self._check_writable()
        await asyncio.to_thread(write_durably, self.root / key, value.as_buffer_like())


def _part(asked: ByteRequest | None, size: int) -> tuple[int, int]:
    """Where what is asked for begins and ends in a file of that size."""
    match asked:
        case RangeByteRequest():
            return asked.start, max(asked.start, min(asked.end, size))
        case OffsetByteRequest():
            return asked.offset, max(asked.offset, size)
        case SuffixByteRequest():
            return max(0, size - asked.suffix), size
    return 0, size


def _check_memory(path: Path, size: int) -> None:
    """Raises for what would not fit: a hole in a file takes no room on a disk."""
    if size < GIB:  # which nobody asks the system for
        return
    import psutil

    free = psutil.virtual_memory().available
    if size > free:
        why = f"{size / GIB:,.1f} GiB of it are needed at once, and {free / GIB:,.1f} GiB of memory are free"
        raise OSError(errno.ENOMEM, why, str(path))
