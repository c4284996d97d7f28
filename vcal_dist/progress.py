"""Progress on the terminal: a bar with the phase, the bound, θ so far, the emulator's error and rows per second.

A narrow terminal shows fewer of these figures. Where no terminal is, a line at the end of every phase.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich import progress as bars
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column
from rich.text import Text

from storage.text import cleaned
from vcal_dist.module import CalibrationModule
from vcal_dist.records import Records

REFRESH = 4  # a second
MOST_PARAMETERS = 4  # of θ that are shown
BETWEEN = " · "
Figure = list[str]  # in words, from many to few


class Progress(Callback):
    """Shows what `Records` recorded last."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._bar: bars.Progress | None = None
        self._task: bars.TaskID | None = None
        self._phase: tuple[int, str] | None = None
        self._shown = self._begun = 0.0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        assert isinstance(module, CalibrationModule)
        module.schedule.announce = self._announce
        self._console = Console(stderr=True, markup=False, highlight=False)
        if self._console.is_terminal:
            self._bar = make_bar(self._console)
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
            self._task = self._bar.add_task(f"{phase.name}{leg}", total=module.leg_batches, figures=[])

    def _announce(self, name: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name, total=None, figures=[])
            self._bar.refresh()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._bar is None or self._task is None or time.perf_counter() - self._shown < 1 / REFRESH:
            return
        assert isinstance(module, CalibrationModule)
        self._shown = time.perf_counter()
        self._bar.update(self._task, completed=module.schedule.batch, figures=self.figures())
        self._bar.refresh()

    def figures(self) -> list[Figure]:
        """The last record, what matters most first."""
        found = self.records.latest
        figures = []
        if found.get("loss") is not None:
            figures.append([f"bound/row {-found['loss']:.3f}"])
        theta = [f"{cleaned(name[6:])} {value:.3g}" for name, value in found.items() if name.startswith("theta.")]
        if theta:
            counts = range(min(len(theta), MOST_PARAMETERS), 0, -1)
            figures.append([f"θ {', '.join(theta[:n])}{' …' if n < len(theta) else ''}" for n in counts])
        if found.get("emulator_error") is not None:
            figures.append([f"emulator error {found['emulator_error']:.2g}"])
        if found.get("rows_per_second"):
            figures.append([f"{_short(found['rows_per_second'])} rows/s"])
        return figures

    def _finish_phase(self) -> None:
        if self._phase is not None:
            seconds = time.perf_counter() - self._begun
            self._console.print(f"{self._phase[1]:<18} {seconds:6.1f} s  {said(self.figures())}", soft_wrap=True)

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


def make_bar(console: Console) -> bars.Progress:
    """Name, bar, count and time keep their room; figures, the field of a task, take what is left."""
    fixed = Column(no_wrap=True)
    return bars.Progress(
        bars.TextColumn("{task.description:<18}", table_column=fixed),
        bars.BarColumn(20, table_column=fixed),
        bars.MofNCompleteColumn(table_column=fixed),
        bars.TimeElapsedColumn(table_column=fixed),
        _Figures(),
        console=console,
        auto_refresh=False,  # refreshed by hand: a thread of its own would take a core from the step
        transient=True,
    )


class _Figures(bars.ProgressColumn):
    """The figures of a task."""

    def render(self, task: bars.Task) -> _Fitting:
        return _Fitting(task.fields["figures"])


@dataclass(frozen=True)
class _Fitting:
    """As many figures as there is room for."""

    figures: Sequence[Figure]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(0, cell_len(said(self.figures)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(said(self.figures, options.max_width), no_wrap=True)


def said(figures: Sequence[Figure], room: int | None = None) -> str:
    """The figures in a line; where room is short, with fewer words or without those that do not fit."""
    line = ""
    for wordings in figures:
        longer = [f"{line}{BETWEEN}{words}" if line else words for words in wordings]
        line = next((text for text in longer if room is None or cell_len(text) <= room), line)
    return line


def _short(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"
