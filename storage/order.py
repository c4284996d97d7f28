"""Which row of a table comes when: a pure function of (seed, epoch), the same for any number of processes.

Blocks belong to *logical shards*: contiguous runs of blocks, a fixed number of them. In each epoch every shard goes
through its blocks in a permuted order, a *window* of blocks at a time, and through a window's rows in a permuted
order. Every global batch takes its share from every shard, so that a batch is a sample stratified over the whole
table however it is sorted on disk. Processes own whole shards: each block is read by one process only, and the
batches are the same for one process or many.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import StreamError

MOST_SHARDS = 64
EXACT_STEPS = 4096  # up to so many batches in an epoch, the largest part is found by counting
THREADS = 4  # at most, for reading; part of the memory plan, so it does not depend on the machine
GOLDEN = (5**0.5 - 1) / 2
# Purposes of random numbers, so that no two share a key.
_BLOCKS, _ROWS = 0, 1

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """The order of a table's rows. Everything that decides it stands here, and travels in a checkpoint."""

    rows: int  # frozen when the stream was made; rows appended later do not enter
    block_rows: int
    shards: int
    window: int  # blocks that a shard shuffles together
    batch: int  # rows of a global batch, as asked for
    seed: int
    shuffle: bool = True
    stream: int = 0  # which table: each has permutations of its own

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.block_rows)

    @property
    def steps(self) -> int:
        """Global batches in an epoch; the last one may be short."""
        return -(-self.rows // self.batch)

    def shard_blocks(self, shard: int) -> range:
        """The blocks of a shard: contiguous, so that shards are strata of a sorted table."""
        return range(self.blocks * shard // self.shards, self.blocks * (shard + 1) // self.shards)

    def block_range(self, block: int) -> range:
        start = block * self.block_rows
        return range(start, min(start + self.block_rows, self.rows))

    @cached_property
    def shard_rows(self) -> Integers:
        """Rows of each shard."""
        starts = [min(self.shard_blocks(s).start * self.block_rows, self.rows) for s in range(self.shards)]
        stops = [*starts[1:], self.rows]
        return np.array(stops, dtype=np.int64) - np.array(starts, dtype=np.int64)

    def taken(self, positions: Integers) -> Integers:
        """How many rows each shard has given when so many rows of the epoch are out: (positions, shards).

        Row i of a shard with n rows comes at time (i + phase)/n, and the epoch is all rows sorted by time: shards
        give in proportion to their size, and the counts of neighbouring shards stay close to it.
        """
        sizes = self.shard_rows
        positions = np.minimum(positions, self.rows)
        # No shard is larger than twice the mean, so that a count is within 3 of its proportional share.
        first = np.maximum(sizes * positions[:, None] // self.rows - 4, 0)
        candidates = first[:, :, None] + np.arange(9)
        times = (candidates + self._phases[:, None]) / sizes[:, None]
        times[candidates >= sizes[:, None]] = np.inf
        times = times.reshape(len(positions), -1)
        rank = np.empty(times.shape, np.int64)
        np.put_along_axis(rank, np.argsort(times, axis=1, kind="stable"), np.arange(times.shape[1])[None], axis=1)
        chosen = rank < (positions - first.sum(axis=1))[:, None]
        counts: Integers = first + chosen.reshape(candidates.shape).sum(axis=2)
        return counts

    @cached_property
    def _phases(self) -> NDArray[np.float64]:
        """Evenly spread offsets, so that not all shards give their odd row in the same batch."""
        return np.array([shard * GOLDEN % 1.0 for shard in range(1, self.shards + 1)])

    def shard_windows(self, shard: int, epoch: int) -> list[tuple[range, ...]]:
        """A shard's windows in the order of this epoch: the rows of the blocks of each."""
        blocks = self.shard_blocks(shard)
        permuted = self._permutation(len(blocks), _BLOCKS, epoch, shard, 0)
        ranges = [self.block_range(blocks[i]) for i in permuted.tolist()]
        return [tuple(ranges[i : i + self.window]) for i in range(0, len(ranges), self.window)]

    def window_permutation(self, shard: int, epoch: int, window: int, rows: int) -> Integers:
        """The order of a window's rows, its blocks laid one after the other."""
        return self._permutation(rows, _ROWS, epoch, shard, window)

    def _permutation(self, n: int, purpose: int, epoch: int, shard: int, window: int) -> Integers:
        if not self.shuffle:
            return np.arange(n)
        return permutation(n, key=(self.seed, 2 * self.stream + purpose), counter=(0, window, shard, epoch))

    def rank_shards(self, rank: int, world_size: int) -> range:
        """The shards of a process: neighbours, so that batches of all processes line up in the order of shards."""
        return range(self.shards * rank // world_size, self.shards * (rank + 1) // world_size)

    def rank_rows(self, rank: int, world_size: int) -> range:
        """The rows of a process: neighbours too."""
        shards = self.rank_shards(rank, world_size)
        blocks = range(self.blocks * shards.start // self.shards, self.blocks * shards.stop // self.shards)
        return range(*(min(block * self.block_rows, self.rows) for block in (blocks.start, blocks.stop)))

    def capacity(self, rank: int, world_size: int) -> int:
        """Rows that a process' part of a batch can have; every part is padded to it."""
        if world_size == 1:
            return min(self.batch, self.rows)
        own = self.rank_shards(rank, world_size)
        if self.steps <= EXACT_STEPS:
            return max(1, int(self._shares[:, own.start : own.stop].sum(axis=1).max()))
        share = int(self.shard_rows[own.start : own.stop].sum())
        # A shard's part of a batch differs by less than 1 from its share of at most batch + shards rows.
        return max(1, min(self.batch, share * (self.batch + self.shards) // self.rows + len(own), share))

    @cached_property
    def _shares(self) -> Integers:
        """What each shard gives to each batch: (steps, shards)."""
        edges = np.arange(self.steps + 1) * self.batch
        parts = [self.taken(edges[i : i + 257]) for i in range(0, self.steps, 256)]  # a part at a time: it is large
        return np.concatenate([np.diff(part, axis=0) for part in parts])


def permutation(n: int, key: tuple[int, int], counter: tuple[int, int, int, int]) -> Integers:
    """A permutation of n that depends on key and counter only: not on a history, a platform or a version of NumPy.

    Philox is counter-based and its raw stream is fixed. The index fills the low bits of each random number, so that
    all numbers differ and every sorting algorithm gives the same order.
    """
    mask = (1 << 64) - 1
    generator = np.random.Philox(
        key=np.array([part & mask for part in key], dtype=np.uint64),
        counter=np.array([part & mask for part in counter], dtype=np.uint64),
    )
    tagged = generator.random_raw(n)
    bits = np.uint64((1 << max(1, n - 1).bit_length()) - 1)
    tagged &= ~bits
    tagged |= _count(n)
    tagged.sort()
    tagged &= bits
    return tagged.view(np.int64)


@lru_cache(maxsize=8)
def _count(n: int) -> NDArray[np.uint64]:
    return np.arange(n, dtype=np.uint64)


def memory_need(order: Order, row_bytes: int) -> int:
    """Bytes that windows need: each shard holds two, a reading thread one before it is shuffled and a chunk twice."""
    window_rows = min(order.window * order.block_rows, order.rows)
    readers = min(THREADS, order.blocks)
    return (2 * order.shards * window_rows + readers * (window_rows + 2 * order.block_rows)) * row_bytes


def window_memory(memory: int) -> int:
    """The part of a budget that windows may use; the rest is for putting batches together."""
    return memory - memory // 4


def plan(
    rows: int, block_rows: int, row_bytes: int, *, batch: int, seed: int, shuffle: bool, memory: int, stream: int = 0
) -> Order:
    """The order that a memory budget allows: as many shards as possible, then as large windows as possible."""
    if batch < 1:
        raise StreamError(f"batch size is {batch}; accepted: 1 or more")
    if rows < 1:
        raise StreamError("there are no rows to stream; ingest some, or leave this table out")
    blocks = -(-rows // block_rows)

    def order(shards: int, window: int) -> Order:
        return Order(rows, block_rows, shards, window, batch, seed, shuffle, stream)

    def fits(shards: int, window: int) -> bool:
        return memory_need(order(shards, window), row_bytes) <= window_memory(memory)

    if not fits(1, 1):
        block, least = block_rows * row_bytes / 1e6, memory_need(order(1, 1), row_bytes) * 4 / 3 / 1e6
        raise StreamError(
            f"a memory budget of {memory / 1e6:.3g} MB is too small for blocks of {block:.3g} MB; give at least "
            f"{least:.3g} MB, or make the store with smaller chunks or shards"
        )
    shards = bisect.bisect_left(range(min(MOST_SHARDS, blocks)), True, key=lambda i: not fits(i + 1, 1))
    window = bisect.bisect_left(range(-(-blocks // shards)), True, key=lambda i: not fits(shards, i + 1))
    return order(shards, window)


def check_state(
    order: Order, state: Mapping[str, Any], table: str, rows: int, block_rows: int, row_bytes: int, memory: int
) -> Order:
    """The order of a checkpoint, if it continues what was asked for, the store has its rows, and they fit."""
    try:
        saved = Order(**state)
    except TypeError as error:
        raise StreamError(f"{table}: the state is not one of a stream: {error}") from None
    for name in ("batch", "seed", "shuffle", "stream"):
        asked, before = getattr(order, name), getattr(saved, name)
        if asked != before:
            raise StreamError(f"{table}: cannot resume with {name} {asked!r}, the checkpoint has {before!r}")
    if saved.block_rows != block_rows or saved.rows > rows:
        raise StreamError(
            f"{table}: the checkpoint is from a store with {saved.rows} rows in blocks of {saved.block_rows}, "
            f"this one has {rows} in blocks of {block_rows}; resume with the store it began with"
        )
    need = memory_need(saved, row_bytes)
    if need > window_memory(memory):
        raise StreamError(
            f"{table}: the checkpoint needs a memory budget of {need * 4 / 3 / 1e6:.3g} MB, given are "
            f"{memory / 1e6:.3g} MB; resume with at least the memory that the stream began with"
        )
    return saved
