"""zstd that writes as much as the chunk has room for, no more and no less.

Zarr's codec takes what the compressed bytes ask for: 20 KB may stand for gigabytes. A chunk's size is known from its
array, so the bytes are decompressed into memory of that size, or not at all. Fewer bytes would leave what the memory
held before, and are refused too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from zarr.abc.codec import Codec
from zarr.codecs import ShardingCodec, ZstdCodec

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.buffer import Buffer


class BoundedZstd(ZstdCodec):
    """The same codec, with the same name in metadata."""

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        size = math.prod(chunk_spec.shape) * chunk_spec.dtype.to_native_dtype().itemsize
        decoded = np.empty(size, np.uint8)
        decompress(chunk_bytes.as_numpy_array(), decoded)
        return chunk_spec.prototype.buffer.from_bytes(decoded.tobytes())

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._decode_sync, chunk_bytes, chunk_spec)


def decompress(data: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    """Fills the target with what the data stand for, or raises ValueError or RuntimeError."""
    held = _content_size(data[:18].tobytes())
    if held is not None and held != len(target):  # without it, numcodecs compares the sizes itself
        raise ValueError(f"it holds {held} bytes instead of {len(target)}")
    Zstd().decode(data, target)


def _content_size(head: bytes) -> int | None:
    """What the header of a zstd frame says of its content: RFC 8878, section 3.1.1.1."""
    if len(head) < 6:
        raise ValueError("it is shorter than a header")
    descriptor = head[4]
    alone = descriptor >> 5 & 1  # one segment: there is no byte for the size of the window
    width = (alone, 2, 4, 8)[descriptor >> 6]
    start = 5 + (1 - alone) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(head[start : start + width], "little")
    return None if not width else size + 256 * (width == 2)


def bounded(codecs: Iterable[Codec]) -> tuple[Codec, ...]:
    """The codecs of an array, also inside shards, with zstd bounded."""
    return tuple(map(_bounded, codecs))


def _bounded(codec: Codec) -> Codec:
    if isinstance(codec, ZstdCodec):
        return BoundedZstd(level=codec.level, checksum=codec.checksum)
    if isinstance(codec, ShardingCodec):
        return dataclasses.replace(codec, codecs=bounded(codec.codecs))
    return codec
