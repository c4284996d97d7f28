"""What came of a sweep: trials in the order of their merit, the best one as a run and as a configuration, a page."""

from __future__ import annotations

import csv
import io
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.sweeps.page import page
from jobs.sweeps.plot import picture
from jobs.sweeps.settings import Sweep
from jobs.sweeps.trial import Folder, Trial, read_trials
from storage import strict_yaml
from storage.places import write_durably
from storage.text import no_formula
from vcal_dist.plots.style import write
from vcal_dist.posterior import FILE, Posterior
from vcal_dist.run_directory import CONFIG, LOCK, read_mapping

TABLE, PICTURE, PAGE = "trials.csv", "sweep.png", "sweep.html"
BEST_CONFIG, BEST, MIXTURE = "best.yaml", "best", "mixture"
CHANGED = b"""\
# The rates below are only the last of those that the run in best/ was trained with: they changed on the way
# (sweep.scheduler=pbt; the trial's result.json has all of them). `vcal train` of this file trains with these from the
# start, and finds another posterior.
"""
ORDER = ("done", "stopped", "running", "failed")


@dataclass(frozen=True)
class Outcome:
    """The trials, best first, and where the results lie."""

    sweep: Sweep
    trials: list[Trial]
    mixed: tuple[int, ...]  # numbers of the trials in the mixture

    @property
    def best(self) -> Trial | None:
        """The best of those that were trained in full."""
        return self.trials[0] if self.trials and self.trials[0].state == "done" else None

    def plain(self) -> dict[str, Any]:
        """For programs."""
        output, best = self.sweep.output, self.best
        return {
            "output": str(output),
            "metric": self.sweep.settings.metric,
            "best": None if best is None else best.number,
            "best_config": None if best is None else str(output / BEST_CONFIG),
            "best_run": None if best is None else str(output / BEST),
            "mixture": str(output / MIXTURE) if self.mixed else None,
            "mixed": list(self.mixed),
            "trials": [_whole(trial) for trial in self.trials],
        }


def collect(sweep: Sweep) -> Outcome:
    """Ranks what is there, and writes it down."""
    trials = ranked(read_trials(sweep))
    done = [trial for trial in trials if trial.state == "done"]
    _write_table(sweep, trials)
    chart = picture(sweep, trials)
    if chart is not None:
        write(chart, sweep.output / PICTURE)
    if done:
        _keep_best(sweep, done[0])
    mixed = done[: sweep.settings.mixture]
    if mixed:
        _mix(sweep, mixed)
    numbers = tuple(trial.number for trial in mixed)
    write_durably(sweep.output / PAGE, page(sweep, trials, numbers).encode())
    return Outcome(sweep, trials, numbers)


def ranked(trials: list[Trial]) -> list[Trial]:
    """Those trained in full by their metric; then those that were stopped, by how far they came; failed ones last."""

    def merit(trial: Trial) -> tuple[float, ...]:
        last = trial.last
        return (ORDER.index(trial.state), *((0.0, 0.0) if last is None else (-last.budget, -last.metric)), trial.number)

    return sorted(trials, key=merit)


def row(trial: Trial) -> dict[str, Any]:
    """A trial in plain values, without its settings."""
    last = trial.last
    return {
        "trial": trial.number,
        "state": trial.state,
        "metric": None if last is None else last.metric,
        "rung": None if last is None else last.rung,
        "seconds": sum(rung.seconds or 0.0 for rung in trial.rungs),
        "reason": trial.reason,
    }


def _whole(trial: Trial) -> dict[str, Any]:
    history = {"history": list(trial.history)} if trial.history else {}
    return row(trial) | {"settings": trial.settings} | history


def _write_table(sweep: Sweep, trials: list[Trial]) -> None:
    rungs = {f"metric of rung {rung}": rung for rung in range(sweep.settings.rungs)}
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["rank", "trial", "state", "metric", "rung", "seconds", "reason", *rungs, *sweep.space.dimensions])
    for rank, trial in enumerate(trials, 1):
        found = {rung.rung: rung.metric for rung in trial.rungs}
        settings = [_cell(trial.settings[key]) if key in trial.settings else "" for key in sweep.space.dimensions]
        metrics = [_cell(found.get(rung)) for rung in rungs.values()]
        writer.writerow([rank, *map(_cell, row(trial).values()), *metrics, *settings])
    write_durably(sweep.output / TABLE, text.getvalue().encode())


def _cell(value: Any) -> Any:
    if isinstance(value, str):
        return no_formula(value)
    return "" if value is None else repr(value) if isinstance(value, float) else value


def _keep_best(sweep: Sweep, best: Trial) -> None:
    """Copies the best run, and writes the configuration that makes it; the old one goes when the new one is whole."""
    source, target = Folder(sweep, best.number).rung(sweep.last_rung), sweep.output / BEST
    plain = read_mapping(source / CONFIG) | {"output": str(target)}
    if not _same(source / FILE, target / FILE):
        partial = sweep.output / f".{BEST}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(LOCK, "*.partial"))
        write_durably(partial / CONFIG, strict_yaml.dump(plain).encode())
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    write_durably(sweep.output / BEST_CONFIG, (CHANGED if best.changed else b"") + strict_yaml.dump(plain).encode())


def _same(file: Path, other: Path) -> bool:
    """Whether one is a copy of the other: copies keep the time."""
    if not other.exists():
        return False
    return (file.stat().st_size, file.stat().st_mtime_ns) == (other.stat().st_size, other.stat().st_mtime_ns)


def _mix(sweep: Sweep, trials: list[Trial]) -> None:
    """Combines posteriors, weighted by their evidence."""
    from vcal_dist.mixed import Averaged

    runs = [Folder(sweep, trial.number).rung(sweep.last_rung) for trial in trials]
    Averaged.by_evidence([Posterior.load(run) for run in runs]).save(sweep.output / MIXTURE)
