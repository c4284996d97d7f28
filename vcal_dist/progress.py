"""Progress on the terminal: a bar with the phase, the bound, the emulator's error, θ so far and rows per second.

Where no terminal is, a line at the end of every phase.
"""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from vcal_dist.module import CalibrationModule
from vcal_dist.records import Records

REFRESH = 4  # a second


class Progress(Callback):
    """Shows what `Records` recorded last."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._bar: Any = None
        self._task: Any = None
        self._phase: tuple[int, str] | None = None
        self._shown = self._begun = 0.0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        assert isinstance(module, CalibrationModule)
        module.schedule.announce = self._announce
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True, markup=False, highlight=False)
        if self._console.is_terminal:
            columns = (TextColumn("{task.description:<18}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
            # Refreshed by hand: a thread of its own would take a core from the step.
            self._bar = Progress(
                *columns, TextColumn("{task.fields[said]}"), console=self._console, auto_refresh=False, transient=True
            )
            self._bar.start()

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, CalibrationModule)
        phase = module.schedule.phase
        if not trainer.is_global_zero or phase is None:
            return
        now = (module.schedule.number, phase.name)
        if now != self._phase:
            self._finish_phase()
            self._phase, self._begun = now, time.perf_counter()
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            leg = f", pass {module.schedule.leg + 1}" if module.outcome.loss is None and module.schedule.leg else ""
            self._task = self._bar.add_task(f"{phase.name}{leg}", total=module.leg_batches, said="")

    def _announce(self, name: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name, total=None, said="")
            self._bar.refresh()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is None or self._task is None or time.perf_counter() - self._shown < 1 / REFRESH:
            return
        assert isinstance(module, CalibrationModule)
        self._shown = time.perf_counter()
        self._bar.update(self._task, completed=module.schedule.batch, said=self.said())
        self._bar.refresh()

    def said(self) -> str:
        """The last record in words."""
        found = self.records.latest
        parts = []
        if found.get("loss") is not None:
            parts.append(f"bound/row {-found['loss']:.3f}")
        if found.get("emulator_error") is not None:
            parts.append(f"emulator error {found['emulator_error']:.2g}")
        theta = [f"{name[6:]} {value:.3g}" for name, value in found.items() if name.startswith("theta.")]
        if theta:
            parts.append("θ " + ", ".join(theta[:4]) + (" …" if len(theta) > 4 else ""))
        if found.get("rows_per_second"):
            parts.append(f"{_short(found['rows_per_second'])} rows/s")
        return " · ".join(parts)

    def _finish_phase(self) -> None:
        if self._phase is not None:
            seconds = time.perf_counter() - self._begun
            self._console.print(f"{self._phase[1]:<18} {seconds:6.1f} s  {self.said()}", soft_wrap=True)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._finish_phase()

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        """Gives the terminal back, whatever happened."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, module, "fit")


def _short(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"
