"""The next batches made ready in a thread, in pinned memory, while the GPU works on the present one.

Training on a CPU has no use for it: the thread would take the cores from the step itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import Any

from vcal_dist.phases import Batch

AHEAD = 2


def prefetched(batches: Iterator[Batch], ahead: int = AHEAD, *, pin: bool = True) -> Generator[Batch]:
    """The same batches; an exception comes where its batch would have come. Closing it ends the thread."""
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(ahead)
    stop = threading.Event()

    def put(item: Batch | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for batch in batches:
                if not put(pinned(batch) if pin else batch):
                    return
            put(None)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, name="vcal-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()


def pinned(batch: Batch) -> Batch:
    """The batch in page-locked memory, from which a copy to the GPU need not be waited for."""
    return Batch(*(None if part is None else _pinned(part) for part in batch))


def _pinned(table: Any) -> Any:
    on_host = [None if part is None or part.is_cuda else part for part in table]
    return type(table)(*(own if host is None else host.pin_memory() for own, host in zip(table, on_host, strict=True)))
