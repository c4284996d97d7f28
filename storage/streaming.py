"""The stream: global batches of runs and observations, in the order that `storage.order` defines.

    with storage.stream(store, runs=4096, observations=1024, seed=1) as stream:
        for batch in stream:                  # one epoch; iterate again for the next
            batch.runs.x, batch.runs.t, batch.runs.z, batch.runs.weight

Each process gets its part of every global batch, padded with rows of weight zero to a size that never changes. The
state is a small dictionary; a stream made from it goes on with the next batch at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from storage.errors import StreamError
from storage.order import Integers, Order, check_state, plan
from storage.store import Store
from storage.table import Floats, Table
from storage.windows import THREADS, Assembler, Dask, Pending, Rows, Source, Synchronous, Window, new_rows

ROWS_TOGETHER = 65536  # assembled at once, which keeps the cost of a small batch low
INDEX_BYTES = 8  # a row's number travels with it
DEFAULT_MEMORY = "1 GB"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Runs(NamedTuple):
    """This process' part of a batch of runs. Rows of weight zero only fill it up; their number is -1."""

    x: Floats
    t: Floats
    z: Floats
    row: Integers
    weight: Floats


class Observations(NamedTuple):
    """This process' part of a batch of observations."""

    x: Floats
    y: Floats
    noise: Floats | None
    row: Integers
    weight: Floats


class Batch(NamedTuple):
    """One step's data, and which step of which epoch it is."""

    runs: Runs | None
    observations: Observations | None
    epoch: int
    step: int


class Stream:
    """Endless batches, an epoch for each iteration. Make one with `stream`."""

    def __init__(self, tables: dict[str, TableStream], epochs: int | None) -> None:
        self.tables = tables
        self.epochs = epochs
        self.epoch = 0
        self.step = 0
        self._parts: dict[str, Iterator[Any]] = {}

    @property
    def steps(self) -> int:
        """Batches in an epoch: those of the table that needs more; the other one is cycled."""
        return max(table.order.steps for table in self.tables.values())

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the current epoch that are still to come."""
        if self.epochs is not None and self.epoch >= self.epochs:
            return
        if not self._parts:
            done = self.epoch * self.steps + self.step
            ends = None if self.epochs is None else self.epochs * self.steps
            self._parts = {name: table.parts(done, ends) for name, table in self.tables.items()}
        epoch = self.epoch
        while self.epoch == epoch:
            parts = {name: next(part) for name, part in self._parts.items()}
            batch = Batch(parts.get("runs"), parts.get("observations"), epoch, self.step)
            self.step += 1
            if self.step == self.steps:
                self.epoch, self.step = epoch + 1, 0
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on after the last batch given, on any number of processes."""
        orders = {name: asdict(table.order) for name, table in self.tables.items()}
        return {"epoch": self.epoch, "step": self.step, **orders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken."""
        if {"epoch", "step", *self.tables} != set(state):
            given = sorted(set(state) - {"epoch", "step"})
            raise StreamError(f"the state is of a stream of {given}, this one has {sorted(self.tables)}")
        self._stop_parts()
        for name, table in self.tables.items():
            table.resume(state[name])
        self.epoch, self.step = int(state["epoch"]), int(state["step"])

    def _stop_parts(self) -> None:
        for part in self._parts.values():
            part.close()  # type: ignore[attr-defined]
        self._parts = {}

    def close(self) -> None:
        """Stops reading ahead and frees the memory."""
        self._stop_parts()
        for table in self.tables.values():
            table.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class TableStream:
    """One process' parts of the batches of one table."""

    def __init__(
        self, table: Table, order: Order, memory: int, assembler: Assembler, rank: int, world_size: int
    ) -> None:
        self.table, self.memory, self.assembler = table, memory, assembler
        self.rank, self.world_size = rank, world_size
        self._use(order)

    def _use(self, order: Order) -> None:
        self.order = order
        self.shards = order.rank_shards(self.rank, self.world_size)
        self.capacity = order.capacity(self.rank, self.world_size)
        self._source: Source | None = None
        self._memory: Rows | None = None

    def resume(self, state: dict[str, Any]) -> None:
        """Takes the order of a checkpoint instead of its own."""
        self._use(check_state(self.order, state, self.table.name, self.table.rows, self.table.block_rows))

    def close(self) -> None:
        self._source = self._memory = None
        self.assembler.close()

    def parts(self, done: int, end: int | None) -> Iterator[Runs | Observations]:
        """The parts of all batches from number `done` on, over epochs without a stop, or before number `end`."""
        order = self.order
        last_epoch = None if end is None else (end - 1) // order.steps
        source = self._open_source()
        epoch, step = divmod(done, order.steps)
        cursors = [
            Cursor(source, self.assembler, shard, epoch, int(position), last_epoch)
            for shard, position in zip(self.shards, self._taken(step, step)[0], strict=True)
        ]
        together = max(1, ROWS_TOGETHER // order.batch)
        while end is None or done < end:
            step = done % order.steps
            stop = min(step + together, order.steps)
            yield from self._assemble(cursors, np.diff(self._taken(step, stop), axis=0))
            done += stop - step

    def _taken(self, first: int, last: int) -> Integers:
        """What this process' shards have given before each of these steps: (steps, shards)."""
        return self.order.taken(np.arange(first, last + 1) * self.order.batch)[:, self.shards.start : self.shards.stop]

    def _assemble(self, cursors: list[Cursor], counts: Integers) -> Iterator[Runs | Observations]:
        """Parts of several batches at once, from how many rows each shard gives to each: (batches, shards)."""
        total = int(counts.sum())
        gathered = self._gathered(total)
        bounds = np.concatenate([[0], np.cumsum(counts.sum(axis=0))])
        for cursor, start, stop in zip(cursors, bounds.tolist(), bounds[1:].tolist(), strict=False):
            cursor.take(gathered, start, stop)
        # Rows lie shard by shard; a batch takes its piece of each shard's.
        pieces = (bounds[:-1] + np.cumsum(counts, axis=0) - counts).ravel()
        lengths = counts.ravel()
        source = np.repeat(pieces - np.cumsum(lengths) + lengths, lengths) + np.arange(total)
        real = np.arange(self.capacity) < counts.sum(axis=1)[:, None]
        # Padding repeats a row, so that nothing that is computed from it overflows before its weight makes it vanish.
        places = np.zeros(real.shape, np.int64)
        places[real] = source
        *arrays, row = [np.take(rows, places, axis=0) for rows in gathered]
        row[~real] = -1
        weight = real.astype(self.table.dtype)
        for batch in range(len(counts)):
            part = {name: array[batch] for name, array in zip(self.table.columns, arrays, strict=True)}
            if self.table.name == "runs":
                yield Runs(**part, row=row[batch], weight=weight[batch])
            else:
                yield Observations(part["x"], part["y"], part.get("noise"), row[batch], weight[batch])

    def _gathered(self, total: int) -> Rows:
        """Memory, used again each time, for the rows of several batches; ones for a process that has none."""
        if self._memory is None or len(self._memory[-1]) < max(1, total):
            self._memory = new_rows(self.table, max(1, total))
            for array in self._memory:
                array.fill(1)
        return self._memory

    def _open_source(self) -> Source:
        """Where windows are filled from: the store, or memory if all rows of this process fit."""
        if self._source is None:
            order = self.order
            self._source = Source(self.table, order)
            blocks = [order.block_range(block) for shard in self.shards for block in order.shard_blocks(shard)]
            rows = sum(map(len, blocks))
            windows = 2 * len(self.shards) * order.window * order.block_rows
            if rows and (rows + windows) * (self.table.row_bytes + INDEX_BYTES) <= self.memory:
                cache, first = new_rows(self.table, rows), blocks[0].start
                into = [tuple(array[b.start - first : b.stop - first] for array in cache) for b in blocks]
                self.assembler.read(self._source, blocks, into)
                self._source = Source(self.table, order, cache)
        return self._source


class Cursor:
    """A place in the sequence of one shard: the window in use, and the next one being filled meanwhile."""

    def __init__(
        self, source: Source, assembler: Assembler, shard: int, epoch: int, position: int, last_epoch: int | None
    ) -> None:
        self.source, self.assembler, self.shard, self.last_epoch = source, assembler, shard, last_epoch
        if position == source.order.shard_rows[shard]:  # all given in this epoch already
            epoch, position = epoch + 1, 0
        self.epoch, self.windows = epoch, source.order.shard_windows(shard, epoch)
        rows = [sum(map(len, blocks)) for blocks in self.windows]
        starts = np.cumsum([0, *rows])
        number = int(np.searchsorted(starts, position, side="right")) - 1
        self.memory = [new_rows(source.table, max(rows)) for _ in range(2)]
        self.used = position - int(starts[number])
        self.window: Window | None = None
        self.filling = self._fill(epoch, number)

    def _fill(self, epoch: int, number: int) -> tuple[Window, Pending] | None:
        if self.last_epoch is not None and epoch > self.last_epoch:
            return None
        if epoch != self.epoch:
            self.epoch, self.windows = epoch, self.source.order.shard_windows(self.shard, epoch)
        blocks, memory = self.windows[number], self.memory[0]
        self.memory.reverse()
        count = sum(map(len, blocks))
        window = Window(self.shard, epoch, number, blocks, tuple(array[:count] for array in memory))
        return window, self.assembler.fill(self.source, window)

    def take(self, out: Rows, start: int, stop: int) -> None:
        """Puts the next rows of the shard into a range of `out`."""
        while start < stop:
            window = self.window
            if window is None or self.used == window.count:
                window = self._next_window()
            count = min(stop - start, window.count - self.used)
            for target, rows in zip(out, window.rows, strict=True):
                target[start : start + count] = rows[self.used : self.used + count]
            self.used += count
            start += count

    def _next_window(self) -> Window:
        assert self.filling is not None, "rows are taken only as long as the last epoch has some"
        window, pending = self.filling
        pending.result()
        if self.window is not None:
            self.used = 0
        self.window = window
        last = window.number + 1 == len(self.windows)
        self.filling = self._fill(window.epoch + 1, 0) if last else self._fill(window.epoch, window.number + 1)
        return window


def stream(
    store: Store,
    *,
    runs: int | None = None,
    observations: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    memory: int | str = DEFAULT_MEMORY,
    scheduler: str = "threads",
    state: dict[str, Any] | None = None,
) -> Stream:
    """Batches of `runs` rows of the runs and/or `observations` rows of the observations, over all processes together.

    With `shuffle=False` rows come in a fixed order: an exactly-once pass with `epochs=1`. `memory` is the budget of
    this process ("256 MB"); it decides how far rows are shuffled, and data that fit are read once. `scheduler` is
    "threads", the address of a Dask distributed scheduler, or "synchronous" (nothing is read ahead). `state`
    continues an earlier stream.
    """
    sizes = {name: size for name, size in (("runs", runs), ("observations", observations)) if size is not None}
    if not sizes:
        raise StreamError("nothing to stream; give a batch size for runs, for observations, or for both")
    if not 0 <= rank < world_size:
        raise StreamError(f"rank is {rank} of {world_size} processes; accepted: 0 to {world_size - 1}")
    if epochs is not None and epochs < 1:
        raise StreamError(f"epochs is {epochs}; accepted: 1 or more, or None for no end")
    budgets = _share_memory(store, list(sizes), parse_bytes(memory))
    tables = {}
    for name, size in sizes.items():
        table: Table = getattr(store, name)
        order = plan(
            table.rows,
            table.block_rows,
            table.row_bytes + INDEX_BYTES,
            batch=size,
            seed=seed,
            shuffle=shuffle,
            memory=budgets[name],
            threads=THREADS,
        )
        tables[name] = TableStream(table, order, budgets[name], _assembler(scheduler), rank, world_size)
    made = Stream(tables, epochs)
    if state is not None:
        made.load_state_dict(state)
    return made


def _share_memory(store: Store, names: list[str], memory: int) -> dict[str, int]:
    """Half of the budget at most for the smaller table, which then mostly fits; the rest for the other."""
    if len(names) == 1:
        return {names[0]: memory}
    # Enough to keep a table in memory, with two windows over all of it and the readers' scratch.
    needs = {
        table.name: (4 * table.blocks + 3 * THREADS) * table.block_rows * (table.row_bytes + INDEX_BYTES)
        for table in (store.runs, store.observations)
    }
    small, large = sorted(names, key=lambda name: needs[name])
    share = min(memory // 2, max(needs[small], memory // 8))
    return {small: share, large: memory - share}


def _assembler(scheduler: str) -> Assembler:
    if scheduler == "synchronous":
        return Synchronous()
    return Dask(None if scheduler == "threads" else scheduler)


def parse_bytes(size: int | str) -> int:
    """A number of bytes, from a number or a text such as "256 MB" or "1 GiB"."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?B?)\s*", size.upper())
    unit = match and (match[2] if match[2] in _UNITS else f"{match[2]}B")
    if not match or unit not in _UNITS:
        raise StreamError(f"memory is '{size}'; accepted: a number of bytes, or a text such as '256 MB' or '2 GiB'")
    return int(float(match[1]) * _UNITS[unit])
