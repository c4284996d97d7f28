"""zstd that writes no more than the chunk has room for.

Zarr's codec takes what the compressed bytes ask for: 20 KB may stand for gigabytes. A chunk's size is known from its
array, so the bytes are decompressed into memory of that size, or not at all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numcodecs.zstd import Zstd
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
        Zstd().decode(chunk_bytes.as_numpy_array(), decoded)
        return chunk_spec.prototype.buffer.from_bytes(decoded.tobytes())

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._decode_sync, chunk_bytes, chunk_spec)


def bounded(codecs: Iterable[Codec]) -> tuple[Codec, ...]:
    """The codecs of an array, also inside shards, with zstd bounded."""
    return tuple(map(_bounded, codecs))


def _bounded(codec: Codec) -> Codec:
    if isinstance(codec, ZstdCodec):
        return BoundedZstd(level=codec.level, checksum=codec.checksum)
    if isinstance(codec, ShardingCodec):
        return dataclasses.replace(codec, codecs=bounded(codec.codecs))
    return codec
