"""Windows of shuffled rows in memory: read by Dask, in a thread ahead of their use, into memory that is used again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from storage.order import THREADS, Order
from storage.table import Floats, Table
from storage.workers import Task, workers

_scratch = threading.local()


# Rows in memory: the arrays of a table in its order, and last the numbers of the rows in the table.
Rows = tuple[NDArray[Any], ...]


def new_rows(table: Table, count: int) -> Rows:
    """Memory for so many rows."""
    arrays = [np.empty((count, len(names)), table.dtype) for names in table.columns.values()]
    return (*arrays, np.empty(count, np.int64))


@dataclass(frozen=True)
class Window:
    """Which window of which epoch, its blocks, and the memory that takes its rows."""

    shard: int
    epoch: int
    number: int
    blocks: tuple[range, ...]
    rows: Rows

    @cached_property
    def count(self) -> int:
        """How many rows it has."""
        return sum(map(len, self.blocks))


@dataclass(frozen=True)
class Source:
    """Reads the blocks of a table, or finds them in memory where they were read before."""

    table: Table
    order: Order
    cache: Rows | None = None

    def fill(self, window: Window) -> None:
        """Puts a window's rows and their numbers into its memory, in the order of the epoch."""
        blocks, (*arrays, number) = window.blocks, window.rows
        order = self.order.window_permutation(window.shard, window.epoch, window.number, window.count)
        if len(blocks) == 1:
            np.add(order, blocks[0].start, out=number)
        else:
            numbers = np.concatenate([np.arange(block.start, block.stop) for block in blocks])
            np.take(numbers, order, out=number, mode="clip")
        if self.cache is not None:
            order = number - self.cache[-1][0]
        for i, (array, out) in enumerate(zip(self.table.columns, arrays, strict=True)):
            rows = self._unshuffled(array, blocks, out) if self.cache is None else self.cache[i]
            np.take(rows, order, axis=0, out=out, mode="clip")

    def _unshuffled(self, array: str, blocks: Sequence[range], like: Floats) -> Floats:
        """The rows of some blocks, until this thread reads again."""
        if len(blocks) == 1:
            return self.read(array, blocks[0])
        rows, start = _scratch_rows(like), 0
        for block in blocks:
            rows[start : start + len(block)] = self.read(array, block)
            start += len(block)
        return rows

    def read(self, array: str, block: range) -> Floats:
        """A block's rows of one array, until this thread reads again; rows that came later are left out."""
        return self.table.readers[array].read(block.start // self.order.block_rows, len(block))

    def read_block(self, block: range, into: Rows) -> None:
        """A block as it is on disk."""
        for array, out in zip(self.table.columns, into, strict=False):
            out[:] = self.read(array, block)
        into[-1][:] = np.arange(block.start, block.stop)


def _scratch_rows(like: Floats) -> Floats:
    """This thread's memory for rows that are not yet shuffled."""
    buffer: NDArray[np.uint8] | None = getattr(_scratch, "rows", None)
    if buffer is None or len(buffer) < like.nbytes:
        buffer = _scratch.rows = np.empty(like.nbytes, np.uint8)
    return buffer[: like.nbytes].view(like.dtype).reshape(like.shape)


class Pending(Protocol):
    """Work under way; `result` waits for it and raises what went wrong."""

    def result(self) -> Any: ...


class Assembler(Protocol):
    """A way to get windows filled and blocks read."""

    def fill(self, source: Source, window: Window) -> Pending: ...
    def read(self, source: Source, blocks: Sequence[range], into: Sequence[Rows]) -> None: ...
    def close(self) -> None: ...


class Synchronous:
    """Reads when the rows are needed, in the thread that needs them. The reference for the others."""

    def fill(self, source: Source, window: Window) -> Pending:
        return _Later(lambda: source.fill(window))

    def read(self, source: Source, blocks: Sequence[range], into: Sequence[Rows]) -> None:
        for block, out in zip(blocks, into, strict=True):
            source.read_block(block, out)

    def close(self) -> None:
        """There is nothing to stop."""


@dataclass(frozen=True)
class _Later:
    work: Callable[[], None]

    def result(self) -> None:
        self.work()


class Dask:
    """Fills windows ahead of their use: one thread collects what is asked for, Dask reads and shuffles it.

    Dask's threads write straight into the windows. With the address of a distributed scheduler, its workers read and
    shuffle, and the rows come over the network; the workers must see the store under the same path or URL.
    """

    def __init__(self, address: str | None = None) -> None:
        self.here = workers(None, threads=THREADS)
        self.there = workers(address) if address else None
        self._waiting: list[tuple[Source, Window, Future[None]]] = []
        self._lock = threading.Lock()
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="vcal-ahead")

    def fill(self, source: Source, window: Window) -> Pending:
        done: Future[None] = Future()
        with self._lock:
            self._waiting.append((source, window, done))
        self._ahead.submit(self._fill_waiting)
        return done

    def _fill_waiting(self) -> None:
        with self._lock:
            jobs, self._waiting = self._waiting, []
        try:
            far = [(source, window) for source, window, _ in jobs if self.there and source.cache is None]
            near = [(source, window) for source, window, _ in jobs if not self.there or source.cache is not None]
            self.here.run([Task(partial(source.fill, window)) for source, window in near])
            calls = [partial(_shuffled, source, replace(window, rows=())) for source, window in far]
            self._fetch(calls, [window.rows for _, window in far])
        except BaseException as error:
            for _, _, done in jobs:
                done.set_exception(error)  # to be raised where the window is used
        else:
            for _, _, done in jobs:
                done.set_result(None)

    def read(self, source: Source, blocks: Sequence[range], into: Sequence[Rows]) -> None:
        if self.there:
            self._fetch([partial(_block, source, block) for block in blocks], into)
        else:
            pairs = zip(blocks, into, strict=True)
            self.here.run([Task(partial(source.read_block, block, out)) for block, out in pairs])

    def _fetch(self, calls: Sequence[Callable[[], Rows]], into: Sequence[Rows]) -> None:
        """What calls on the cluster return, copied into memory of this process."""
        if calls and self.there:
            for found, rows in zip(self.there.run([Task(call) for call in calls]), into, strict=True):
                for array, out in zip(found, rows, strict=True):
                    out[:] = array

    def close(self) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
        self.here.close()
        if self.there:
            self.there.close()


def _shuffled(source: Source, window: Window) -> Rows:
    """A window's rows and their numbers, on another machine."""
    rows = new_rows(source.table, window.count)
    source.fill(replace(window, rows=rows))
    return rows


def _block(source: Source, block: range) -> Rows:
    """A block's rows, on another machine."""
    rows = new_rows(source.table, len(block))
    source.read_block(block, rows)
    return rows
