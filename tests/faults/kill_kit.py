"""Processes that write to a store until they are killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import storage
from tests.storage.conftest import numbered


def write_for_ever(url: str, seed: int, report: Connection) -> None:
    """Appends pieces of numbered rows until killed, and says after each how many rows it has committed."""
    pieces = random.Random(seed)
    store = storage.open(url)
    while True:
        start = store.refresh().runs.rows
        store.append_runs(*numbered(pieces.randint(1, 60), start=start))
        report.send(store.runs.rows)


def start(target: Callable[..., None], *arguments: object) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """A real process of its own; the fork server has imported what it needs, so that many are cheap."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["storage.store", "storage.chunks", "xarray", __name__])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, send), daemon=True)
    process.start()
    send.close()
    return process, receive


def kill(process: multiprocessing.process.BaseProcess) -> None:
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # it may have come to its end
        os.kill(process.pid, signal.SIGKILL)
    process.join()


def reports(receive: Connection) -> list[int]:
    found = []
    while receive.poll():
        try:
            found.append(receive.recv())
        except EOFError:
            break
    return found
