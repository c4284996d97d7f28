"""The orderly end of training elsewhere: a signal to the driver makes the processes write a checkpoint and stop."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from vcal_dist.checkpoints import Checkpoints
from vcal_dist.errors import Preempted

LOOK_SECONDS = 5.0  # between looks at what is waited for
END_SECONDS = 60.0  # that the processes get to write their checkpoint


class StopWhenAsked(Callback):
    """Looks now and then, in the first process, whether training is to stop; it then stops as after a signal."""

    def __init__(self, asked: Callable[[], bool], seconds: float) -> None:
        """`seconds` lie between two looks."""
        self.asked, self.seconds = asked, seconds
        self._looked = time.monotonic()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not trainer.is_global_zero or time.monotonic() - self._looked < self.seconds:
            return
        self._looked = time.monotonic()
        if self.asked():
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, Checkpoints):
                    callback.stopping = True


def run_until_told(
    run: Callable[[], object], stop: Callable[[], None], where: str, look: Callable[[], None] = lambda: None
) -> None:
    """Runs something that ends early when `stop` is called, which SIGTERM and Ctrl-C do; raises `Preempted` then.

    `look` is called now and then meanwhile; what it raises ends the waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        run()
        return
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run()
        except BaseException as error:  # told in the main thread
            failed.append(error)

    thread = threading.Thread(target=work, name="training", daemon=True)
    with _signals() as told:
        thread.start()
        looked = time.monotonic()
        while thread.is_alive() and not told:
            thread.join(0.1)
            if time.monotonic() - looked > LOOK_SECONDS:
                looked = time.monotonic()
                look()
        if told:
            with contextlib.suppress(Exception):  # an object store that does not answer: it ends without a checkpoint
                stop()
            end = time.monotonic() + END_SECONDS
            while (
                thread.is_alive() and told.count(signal.SIGINT) < 2 and time.monotonic() < end
            ):  # Ctrl-C twice: at once
                thread.join(0.1)
    if told:
        raise Preempted(f"stopped by a signal; the same command goes on from the last checkpoint, in {where}", told[0])
    if failed:
        raise failed[0]


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """The signals that came meanwhile. (Ray's own handlers end the process with a dump, or with status 1.)"""
    told: list[int] = []
    before = {n: signal.signal(n, lambda number, _: told.append(number)) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
