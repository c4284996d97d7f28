"""One process' parts of the global batches of one table, put together from windows of shuffled rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from storage.order import Integers, Order, check_state, window_memory
from storage.table import Floats, Table
from storage.windows import Assembler, Pending, Rows, Source, Window, new_rows

ROWS_TOGETHER = 65536  # assembled at once, which keeps the cost of a small batch low
INDEX_BYTES = 8  # a row's number travels with it


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


class Numbers(NamedTuple):
    """This process' part of a batch as numbers of rows, which are kept elsewhere."""

    row: Integers
    weight: Floats


class TableStream:
    """One process' parts of the batches of one table."""

    def __init__(
        self, table: Table, order: Order, memory: int, assembler: Assembler, rank: int, world_size: int
    ) -> None:
        self.table, self.memory, self.assembler = table, memory, assembler
        self.rank, self.world_size = rank, world_size
        # Batches that are assembled at once exist up to four times: gathered, arranged, and arranged before.
        self.rows_together = min(
            ROWS_TOGETHER, (memory - window_memory(memory)) // (4 * (table.row_bytes + INDEX_BYTES))
        )
        self._use(order)

    def _use(self, order: Order) -> None:
        self.order = order
        self.shards = order.rank_shards(self.rank, self.world_size)
        self.capacity = order.capacity(self.rank, self.world_size)
        self._source: Source | None = None
        self._memory: Rows | None = None

    def resume(self, state: dict[str, Any]) -> None:
        """Takes the order of a checkpoint instead of its own."""
        table = self.table
        order = check_state(
            self.order, state, table.name, table.rows, table.block_rows, table.row_bytes + INDEX_BYTES, self.memory
        )
        self._use(order)

    def close(self) -> None:
        self._source = self._memory = None
        self.assembler.close()

    def parts(self, done: int, end: int | None) -> Iterator[Runs | Observations | Numbers]:
        """The parts of all batches from number `done` on, over epochs without a stop, or before number `end`."""
        order = self.order
        last_epoch = None if end is None else (end - 1) // order.steps
        source = self._open_source()
        epoch, step = divmod(done, order.steps)
        cursors = [
            Cursor(source, self.assembler, shard, epoch, int(position), last_epoch)
            for shard, position in zip(self.shards, self._taken(step, step)[0], strict=True)
        ]
        together = max(1, self.rows_together // order.batch)
        while end is None or done < end:
            step = done % order.steps
            stop = min(step + together, order.steps)
            yield from self._assemble(cursors, np.diff(self._taken(step, stop), axis=0))
            done += stop - step

    def _taken(self, first: int, last: int) -> Integers:
        """What this process' shards have given before each of these steps: (steps, shards)."""
        return self.order.taken(np.arange(first, last + 1) * self.order.batch)[:, self.shards.start : self.shards.stop]

    def _assemble(self, cursors: list[Cursor], counts: Integers) -> Iterator[Runs | Observations | Numbers]:
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
            if not self.table.columns:
                yield Numbers(row[batch], weight[batch])
                continue
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
            if rows and (rows + windows) * (self.table.row_bytes + INDEX_BYTES) <= window_memory(self.memory):
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
        most = min(source.order.window * source.order.block_rows, int(source.order.shard_rows[shard]))
        self.memory = [new_rows(source.table, most) for _ in range(2)]
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
