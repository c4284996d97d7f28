"""Windows of shuffled rows in memory: read by Dask, in a thread ahead of their use, into memory that is used again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from storage.errors import StreamError
from storage.order import Integers, Order
from storage.table import Floats, Table

if TYPE_CHECKING:
    from distributed import Client

THREADS = 4  # at most, for reading; part of the memory plan, so it does not depend on the machine
_scratch = threading.local()


@dataclass(frozen=True)
class Window:
    """Which window, and the memory that takes its rows and their numbers in the table."""

    shard: int
    epoch: int
    number: int
    rows: Floats
    index: Integers


@dataclass(frozen=True)
class Source:
    """Reads the blocks of a table, or finds them in memory where they were read before."""

    table: Table
    order: Order
    cache: Floats | None = None
    first_row: int = 0  # of the cache

    def fill(self, window: Window) -> None:
        """Puts a window's rows and numbers into its memory, in the order of the epoch."""
        order = self.order
        blocks = [order.block_range(int(b)) for b in order.window_blocks(window.shard, window.epoch, window.number)]
        permutation = order.window_permutation(window.shard, window.epoch, window.number, sum(map(len, blocks)))
        numbers = np.concatenate([np.arange(block.start, block.stop) for block in blocks])
        np.take(numbers, permutation, out=window.index[: len(permutation)], mode="clip")
        rows = window.rows[: len(permutation)]
        if self.cache is not None:
            np.take(self.cache, window.index[: len(permutation)] - self.first_row, axis=0, out=rows, mode="clip")
            return
        packed, start = _scratch_rows(len(permutation), self.table), 0
        for block in blocks:
            self.read_block(block, packed[start : start + len(block)])
            start += len(block)
        np.take(packed, permutation, axis=0, out=rows, mode="clip")

    def read_block(self, block: range, out: Floats) -> None:
        """The rows of one block that are in the order; a block that has grown since is cut."""
        index = block.start // self.order.block_rows
        if len(self.table.block_range(index)) == len(block):
            self.table.read_block(index, out)
        else:
            out[:] = self.table.read_block(index)[: len(block)]


def _scratch_rows(rows: int, table: Table) -> Floats:
    """This thread's memory for unshuffled rows."""
    buffer: Floats | None = getattr(_scratch, "rows", None)
    if buffer is None or len(buffer) < rows or buffer.shape[1] != table.width or buffer.dtype != table.dtype:
        buffer = np.empty((rows, table.width), table.dtype)
        _scratch.rows = buffer
    return buffer[:rows]


class Pending(Protocol):
    """Work under way; `result` waits for it and raises what went wrong."""

    def result(self) -> Any: ...


class Assembler(Protocol):
    """A way to get windows filled and blocks read."""

    def fill(self, source: Source, window: Window) -> Pending: ...
    def read(self, source: Source, blocks: Sequence[range], into: Sequence[Floats]) -> None: ...
    def close(self) -> None: ...


class Synchronous:
    """Reads when the rows are needed, in the thread that needs them. The reference for the others."""

    def fill(self, source: Source, window: Window) -> Pending:
        return _Later(lambda: source.fill(window))

    def read(self, source: Source, blocks: Sequence[range], into: Sequence[Floats]) -> None:
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
        self.workers = min(THREADS, len(os.sched_getaffinity(0)))
        self.client = _connect(address) if address else None
        self._waiting: list[tuple[Source, Window, Future[None]]] = []
        self._lock = threading.Lock()
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="vcal-windows")

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
            near = [partial(source.fill, window) for source, window, _ in jobs if self._is_near(source)]
            far = [(source, window) for source, window, _ in jobs if not self._is_near(source)]
            self._run(near)
            self._fetch(
                [(_shuffled, source, window.shard, window.epoch, window.number) for source, window in far],
                [(window.rows, window.index) for _, window in far],
            )
        except BaseException as error:
            for _, _, done in jobs:
                done.set_exception(error)  # to be raised where the window is used
        else:
            for _, _, done in jobs:
                done.set_result(None)

    def read(self, source: Source, blocks: Sequence[range], into: Sequence[Floats]) -> None:
        if self.client is None:
            self._run([partial(source.read_block, block, out) for block, out in zip(blocks, into, strict=True)])
        else:
            self._fetch([(_block, source, block) for block in blocks], [(out,) for out in into])

    def _is_near(self, source: Source) -> bool:
        return self.client is None or source.cache is not None

    def _run(self, calls: Sequence[Callable[[], None]]) -> None:
        """Calls with side effects on memory of this process, on Dask's threads."""
        import dask

        tasks = [dask.delayed(call, pure=False)() for call in calls]
        dask.compute(*tasks, scheduler="threads", num_workers=self.workers, optimize_graph=False)

    def _fetch(self, calls: Sequence[tuple[Any, ...]], into: Sequence[tuple[NDArray[Any], ...]]) -> None:
        """Calls on the workers of the distributed scheduler; what they return is copied into memory given."""
        if not calls:
            return
        futures = [self.client.submit(*call, pure=False) for call in calls]  # type: ignore[union-attr]
        for arrays, memory in zip(self.client.gather(futures), into, strict=True):  # type: ignore[union-attr]
            for array, out in zip(arrays, memory, strict=True):
                out[: len(array)] = array

    def close(self) -> None:
        self._ahead.shutdown(wait=True, cancel_futures=True)
        if self.client is not None:
            self.client.close()


def _shuffled(source: Source, shard: int, epoch: int, number: int) -> tuple[Floats, Integers]:
    """A window's rows and their numbers, on another machine."""
    blocks = source.order.window_blocks(shard, epoch, number)
    rows = sum(len(source.order.block_range(int(block))) for block in blocks)
    table = source.table
    window = Window(shard, epoch, number, np.empty((rows, table.width), table.dtype), np.empty(rows, np.int64))
    source.fill(window)
    return window.rows, window.index


def _block(source: Source, block: range) -> tuple[Floats]:
    """A block's rows, on another machine."""
    out = np.empty((len(block), source.table.width), source.table.dtype)
    source.read_block(block, out)
    return (out,)


def _connect(address: str) -> Client:
    from distributed import Client

    try:
        return Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError) as error:
        raise StreamError(f"no Dask scheduler answers at '{address}': {error}; start one, or leave it out") from error
