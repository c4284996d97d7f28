"""Checkpoints by steps and by seconds, and the orderly end after SIGTERM or Ctrl-C.

Every process votes in every step: to stop (it was signalled), to write (it is due; the first process' clock decides).
The votes travel with the gradients, so that all processes stop and write at the same batch; they also write when a
phase has ended. A checkpoint is written by the first process alone, in one atomic replacement: a crash at any moment
leaves the one before.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from vcal_dist import tensorfile
from vcal_dist.config import CheckpointSettings
from vcal_dist.datamodule import StoreData
from vcal_dist.module import CalibrationModule
from vcal_dist.phases import Descent
from vcal_dist.schedule import Schedule
from vcal_dist.tensorfile import is_finite

LAST, BEST = "last.safetensors", "best.safetensors"
SCHEMA = 4  # 3: before emulators of few runs were stacked, and whole runs held out


class Checkpoints(Callback):
    """Writes `last` and, for the stage under way, `best` (lowest smoothed loss) into a directory."""

    def __init__(
        self,
        directory: Path,
        settings: CheckpointSettings,
        before: dict[str, Any] | None,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """`before` is the checkpoint that training goes on from, if it does; `written` hears of each new one."""
        self.directory, self.settings, self.written = directory, settings, written
        self.signal: int = signal.SIGTERM  # that told this process to stop, if one did
        self.stopping = False  # it was told to
        self.stopped = False  # all of them have
        # The number of the stage that `best` is of, and its lowest loss so far.
        self.lowest: tuple[int, float] = (-1, math.inf) if before is None else tuple(before["lowest"])
        self._phase = -1  # whose number the last epoch had
        self._written = time.monotonic()
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Takes the signals over. (Lightning's own handler sends a collective message from inside the handler.)"""
        assert isinstance(module, CalibrationModule)
        self._written, self._phase = time.monotonic(), module.schedule.number
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.stopping and number == signal.SIGINT:  # a second Ctrl-C: at once
            raise KeyboardInterrupt
        self.stopping, self.signal = True, number

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(module, CalibrationModule)
        module.votes = (float(self.stopping), float(trainer.is_global_zero and self._due(module.schedule.steps + 1)))

    def _due(self, step: int) -> bool:
        steps, seconds = self.settings.every_steps, self.settings.every_seconds
        by_steps = steps is not None and step % steps == 0
        return by_steps or (seconds is not None and time.monotonic() - self._written >= seconds)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes, unless the leg is complete: then it is turned first."""
        assert isinstance(module, CalibrationModule)
        if any(module.outcome.votes) and module.schedule.batch < module.leg_batches:
            self._obey(trainer, module)

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        """What was voted for in the last batch of a leg is done now that it is turned; a new phase is written too."""
        assert isinstance(module, CalibrationModule)
        before, self._phase = self._phase, module.schedule.number
        if any(module.outcome.votes) or before != self._phase:
            self._obey(trainer, module)

    def _obey(self, trainer: Trainer, module: CalibrationModule) -> None:
        stop = module.outcome.votes[0] > 0
        module.outcome = module.outcome._replace(votes=(0.0, 0.0))
        self.save(trainer, module)
        if stop:
            self.stopped = True
            trainer.should_stop = True

    def save(self, trainer: Trainer, module: CalibrationModule) -> None:
        """Writes where training is; all processes must call it."""
        schedule = module.schedule
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, StoreData)
        orders = {} if data.feeder is None else data.feeder.orders
        state: dict[str, Any] = {"schema": SCHEMA, "orders": orders, "schedule": schedule.state()}
        # Nothing leads on from what is not finite: the next loss says so, and the checkpoint before stays.
        if trainer.is_global_zero and is_finite(state):
            self.directory.mkdir(parents=True, exist_ok=True)
            best = self._is_best(schedule)
            state["lowest"] = list(self.lowest)
            if best:
                tensorfile.write(self.directory / BEST, state)
            tensorfile.write(self.directory / LAST, state)
            self.written()
        self._written = time.monotonic()

    def _is_best(self, schedule: Schedule) -> bool:
        """Whether no loss of this stage, smoothed, was lower at a checkpoint; remembers it then."""
        phase, (number, lowest) = schedule.phase, self.lowest
        if not self.settings.keep_best or not isinstance(phase, Descent) or not phase.done:
            return False
        if schedule.number == number and not phase.smooth < lowest:
            return False
        self.lowest = (schedule.number, phase.smooth)
        return True

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Gives the signals back, before Lightning does: it had them before."""
        for number, handler in self._before.items():
            with contextlib.suppress(ValueError, TypeError):  # not in the main thread any more
                signal.signal(number, handler)
        self._before = {}

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        """Likewise."""
        self.on_train_end(trainer, module)
