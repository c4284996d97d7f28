"""Where Dask runs tasks: threads of this process, or a distributed scheduler at an address."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from dask.callbacks import Callback
from dask.threaded import get

from storage.errors import VcalError

if TYPE_CHECKING:
    from distributed import Client

CONNECT_SECONDS = 10
ADDRESSES = ("tcp://", "tls://", "ucx://", "ws://", "wss://", "inproc://")

T = TypeVar("T")
Graph = dict[str, tuple[Any, ...]]  # as Dask documents it: a call, and the names of what it needs
Advance = Callable[[Any], None]  # called with the result of every finished task


@dataclass(frozen=True, eq=False)
class Task:
    """A call without arguments or, if it needs the results of other tasks, with the list of them."""

    call: Callable[..., Any]
    needs: Sequence[Task] = ()


class Workers:
    """Runs lists of tasks and returns their results in order. Threads last as long as this object, with what they keep.

    A task's cost beside its work is about 0.2 ms: give it at least a few milliseconds to do.
    """

    def __init__(self, client: Client | None = None, *, threads: int | None = None, progress: bool = False) -> None:
        self.client = client
        self.progress = progress and sys.stderr.isatty()
        cores = len(os.sched_getaffinity(0))
        self._threads = min(threads or cores, cores)
        self._pool: ThreadPoolExecutor | None = None

    @property
    def count(self) -> int:
        """How many tasks run at a time."""
        return max(1, sum(self.client.nthreads().values())) if self.client else self._threads

    def run(self, tasks: Sequence[Task], label: str = "", rows: Callable[[Any], int] = lambda _: 0) -> list[Any]:
        """The results of tasks, in order; a progress bar has the label, and `rows` says what a result stands for."""
        # A plain graph: dask.compute needs a time that grows with the square of the number of Delayed objects.
        names = _names(tasks)
        graph = {name: (task.call, *_argument(task, names)) for task, name in names.items()}
        keys = [names[task] for task in tasks]
        with self._bar(label, len(tasks), rows) as advance:
            return self._on_cluster(graph, keys, advance) if self.client else self._on_threads(graph, keys, advance)

    def close(self) -> None:
        """Waits for running tasks and lets go of threads and cluster."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None
        if self.client is not None:
            self.client.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _on_threads(self, graph: Graph, keys: list[str], advance: Advance) -> list[Any]:
        wanted = set(keys)

        def finished(key: str, result: Any, *_: Any) -> None:
            if key in wanted:
                advance(result)

        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="vcal")
        try:
            with Callback(posttask=finished):
                return list(get(graph, keys, pool=self._pool))
        except BaseException:
            # Tasks that have begun go on: after an error nobody must write behind the caller's back.
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
            raise

    def _on_cluster(self, graph: Graph, keys: list[str], advance: Advance) -> list[Any]:
        from distributed import as_completed, wait

        assert self.client is not None
        with self.client.as_current():
            futures = self.client.get(graph, keys, sync=False)
            try:
                results = {}
                for future, result in as_completed(futures, with_results=True):
                    results[future.key] = result
                    advance(result)
                return [results[key] for key in keys]
            except BaseException:
                # A running task cannot be stopped: what has not started is cancelled, for the rest we wait.
                active = {key for keys in self.client.processing().values() for key in keys}
                self.client.cancel([future for future in futures if future.key not in active])
                wait([future for future in futures if future.key in active])
                raise

    @contextlib.contextmanager
    def _bar(self, label: str, total: int, rows: Callable[[Any], int]) -> Iterator[Advance]:
        if not self.progress:
            yield lambda _: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:<24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        done = 0
        with Progress(*columns, TextColumn("{task.fields[rate]}"), console=Console(stderr=True)) as bar:
            task = bar.add_task(label, total=total, rate="")

            def advance(result: Any) -> None:
                nonlocal done
                done += rows(result)
                elapsed = bar.tasks[0].elapsed or 0
                rate = f"{done:,} rows, {done / elapsed:,.0f}/s" if done and elapsed else ""
                bar.update(task, advance=1, rate=rate)

            yield advance


def _names(tasks: Sequence[Task]) -> dict[Task, str]:
    """A name for every task and whatever it needs; a scheduler may be shared, so no run repeats another's names."""
    run = uuid.uuid4().hex
    everything = dict.fromkeys([*(needed for task in tasks for needed in task.needs), *tasks])
    return {task: f"{_function_name(task.call)}-{run}-{i}" for i, task in enumerate(everything)}


def _argument(task: Task, names: dict[Task, str]) -> list[list[str]]:
    return [[names[needed] for needed in task.needs]] if task.needs else []


def _function_name(call: Callable[..., Any]) -> str:
    return str(getattr(getattr(call, "func", call), "__name__", "task"))


def parts_of(items: Sequence[T], most: int = 256) -> list[Sequence[T]]:
    """Consecutive parts of many items, so that each can be one task."""
    count = min(len(items), most)
    return [items[len(items) * i // count : len(items) * (i + 1) // count] for i in range(count)]


def workers(scheduler: str | None, *, threads: int | None = None, progress: bool = False) -> Workers:
    """Threads of this process, or the workers of a distributed scheduler at an address."""
    if scheduler is None:
        return Workers(threads=threads, progress=progress)
    if not scheduler.startswith(ADDRESSES):
        raise VcalError(
            f"scheduler is {scheduler!r}; accepted: the address of a Dask scheduler such as tcp://host:8786, or none"
        )
    from distributed import Client

    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        raise VcalError(f"no Dask scheduler answers at {scheduler}: {error}; start one, or leave it out") from error
    return Workers(client, progress=progress)
