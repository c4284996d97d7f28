"""What training was like, as it goes: rows of `metrics.csv`, and the same for TensorBoard."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from storage.places import write_durably
from vcal_dist.datamodule import StoreData
from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Frame
from vcal_dist.metrics import METRICS, read_metrics
from vcal_dist.module import CalibrationModule
from vcal_dist.phases import learned_theta

BOARD = "tensorboard"
RECORDS = 50  # of a stage, at least where it has so many steps: fewer cannot tell whether its loss has settled
COLUMNS = ["step", "phase", "leg", "batch", "seconds", "rows_per_second", "wait_fraction", "loss", "emulator_error"]


class Records(Callback):
    """A record every so many steps of a stage, and at the end of every leg. Only the first process writes.

    `latest` is the last record, for whoever shows progress.
    """

    def __init__(self, directory: Path | None, every: int, parameters: list[str]) -> None:
        self.directory, self.every, self.parameters = directory, every, parameters
        self.latest: dict[str, Any] = {}
        self.rows = 0.0  # taken by this process since the last record
        self._frame: Frame | None = None  # what the runs said when the emulator's error was found
        self._error: float | None = None
        self._file: Any = None
        self._board: Any = None

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Opens the files; of an earlier attempt stays what came before the checkpoint."""
        assert isinstance(module, CalibrationModule)
        self._begun = self._mark = time.perf_counter()
        self._waited = 0.0
        if self.directory is None or not trainer.is_global_zero:
            return
        from tensorboardX import SummaryWriter

        step, path = module.schedule.steps, self.directory / METRICS
        kept = records_until(self.directory, step)
        self._offset = seconds_of(kept)
        columns = [*COLUMNS, *(f"theta.{name}" for name in self.parameters)]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(kept)
        with _writing(path):
            write_durably(path, text.getvalue().encode())  # in one step: a crash here must not lose what was recorded
            self._file = path.open("a", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._file, columns)
        with _writing(self.directory / BOARD):
            self._board = SummaryWriter(str(self.directory / BOARD), purge_step=step + 1)

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(module, CalibrationModule)
        self.rows += sum(len(part.weight) for part in batch if part is not None)
        schedule, last = module.schedule, module.schedule.batch == module.leg_batches
        # Where runs are read, a record costs as much as a step: it finds the emulator's error.
        reads_runs = schedule.phase is not None and schedule.phase.feed.runs is not None
        every = self.every if reads_runs else min(self.every, max(1, module.leg_batches // RECORDS))
        if last or (module.outcome.loss is not None and schedule.batch % every == 0):
            self._record(trainer, module)

    def _record(self, trainer: Trainer, module: CalibrationModule) -> None:
        data, schedule = trainer.datamodule, module.schedule  # type: ignore[attr-defined]
        assert isinstance(data, StoreData)
        phase = schedule.phase
        assert phase is not None
        now = time.perf_counter()
        passed = max(now - self._mark, 1e-9)
        waited, self._waited = data.waiting.seconds - self._waited, data.waiting.seconds
        self.latest = {
            "step": schedule.steps,
            "phase": phase.name,
            "leg": schedule.leg,
            "batch": schedule.batch,
            "seconds": now - self._begun,
            "rows_per_second": self.rows * trainer.world_size / passed,
            "wait_fraction": waited / passed,
            "loss": module.outcome.loss,
            "emulator_error": self._emulator_error(module),
        }
        theta = learned_theta(phase)
        if theta is not None:
            values = module.model.prior.theta(theta.double()).tolist()
            self.latest |= {f"theta.{name}": value for name, value in zip(self.parameters, values, strict=True)}
        self._mark, self.rows = now, 0.0
        if self._file is not None and self.directory is not None:
            row = {k: v if isinstance(v, str | int) else f"{v:.6g}" for k, v in self.latest.items() if v is not None}
            row["seconds"] = f"{self._offset + self.latest['seconds']:.3f}"
            with _writing(self.directory / METRICS):
                self._writer.writerow(row)
                self._file.flush()
            with _writing(self.directory / BOARD):
                for name, value in self.latest.items():
                    if isinstance(value, float) and math.isfinite(value):
                        self._board.add_scalar(f"{phase.name}/{name}".replace(" ", "_"), value, schedule.steps)

    def _emulator_error(self, module: CalibrationModule) -> float | None:
        """Found anew as long as runs are read, which is what changes it; afterwards it stays as it is."""
        frame, phase = module.schedule.work.found.frame, module.schedule.phase
        reads_runs = phase is not None and phase.feed.runs is not None
        if reads_runs or frame is not self._frame:
            self._frame, self._error = frame, module.emulator_error()
        return self._error

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Closes the files, each also if the other cannot be."""
        file, board, self._file, self._board = self._file, self._board, None, None
        if self.directory is None or file is None:
            return
        try:
            with _writing(self.directory / METRICS):
                file.close()
        finally:
            if board is not None:
                with _writing(self.directory / BOARD):
                    board.close()

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        """Likewise: after an exception, Lightning tears nothing down. What cannot be closed now is no news."""
        with contextlib.suppress(ModelError):
            self.teardown(trainer, module, "fit")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """An error of the disk names the file and the cure."""
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"cannot write {path}: {error.strerror or error}; make room or choose another output; the same command "
            "resumes from the last checkpoint"
        ) from error


def records_until(directory: Path, step: int) -> list[dict[str, str]]:
    """What was recorded up to a step."""
    return [row for row in read_metrics(directory) if int(row["step"]) <= step]


def seconds_of(records: list[dict[str, str]]) -> float:
    """How long training had taken by the last of some records, all attempts together."""
    return float(records[-1]["seconds"]) if records else 0.0
