"""One trial: its settings, its trainings from the shortest schedule to the whole one, and what came of them.

<sweep>/trials/<number>/
  settings.json    what is tried, written before anything else
  result.json      the metric after every rung, and how it ended
  rung-<k>/        the run directory of rung k; the last is what `vcal train` makes of these settings

Nothing here needs Ray. A trial that was interrupted goes on from its own files.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from jobs.sweeps.settings import Sweep
from storage import documents
from storage.places import write_durably
from storage.priors import Finite
from storage.validation import show
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, ModelError
from vcal_dist.run_directory import held

if TYPE_CHECKING:
    from vcal_dist.posterior import Posterior

TRIALS, SETTINGS, RESULT, LOCK = "trials", "settings.json", "result.json", "trial.lock"
PATIENCE = 60.0  # seconds that the process of an interrupted sweep may take to end
NOTHING_TO_JUDGE_BY = (
    "no observations are held out to judge trials by; give data.holdout above 0, or sweep.metric=bound"
)
State = Literal["running", "done", "stopped", "failed"]
Train = Callable[[Config], "Posterior"]


@dataclass(frozen=True)
class Rung:
    """A complete training and how good its posterior is."""

    rung: int
    budget: int
    metric: Finite
    seconds: Finite | None  # that the training took, in one go


@dataclass(frozen=True)
class Trial:
    """What is known of a trial."""

    number: int
    settings: dict[str, Any]  # by dotted key
    state: State = "running"
    reason: str | None = None  # why it failed; of a running one, why it cannot go on
    rungs: tuple[Rung, ...] = field(default_factory=tuple)
    history: tuple[dict[str, Any], ...] = ()  # of one whose rates may change: what led to it (jobs.sweeps.pbt)

    @property
    def changed(self) -> bool:
        """Whether its settings are only the last ones that it was trained with."""
        return any(segment["rates"] != self.history[0]["rates"] for segment in self.history)

    @property
    def last(self) -> Rung | None:
        """The rung that it came to."""
        return self.rungs[-1] if self.rungs else None


class Folder:
    """The files of a trial."""

    def __init__(self, sweep: Sweep, number: int) -> None:
        self.sweep, self.number = sweep, number
        self.path = sweep.output / TRIALS / str(number)

    def rung(self, rung: int) -> Path:
        """The run directory of a rung."""
        return self.path / f"rung-{rung}"

    def read(self) -> Trial | None:
        """What is known, or None if there is no such trial yet."""
        if not (self.path / SETTINGS).exists():
            return None
        cure = f"delete {self.path}, and the trial runs again"
        try:
            trial = Trial(self.number, documents.read(self.path / SETTINGS, ConfigError, cure))
            if (self.path / RESULT).exists():
                found = documents.read(self.path / RESULT, ConfigError, cure)
                rungs = tuple(Rung(**rung) for rung in found["rungs"])
                history = tuple(found.get("history", ()))
                trial = replace(trial, state=found["state"], reason=found["reason"], rungs=rungs, history=history)
        except (TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{self.path / RESULT} is damaged ({error}); {cure}") from None
        for key, value in trial.settings.items():
            dimension = self.sweep.space.dimensions.get(key)
            if dimension is None or not dimension.takes(value):
                why = "which is not tried" if dimension is None else f"as {show(value)}, which is not tried"
                raise ConfigError(f"{self.path / SETTINGS} is damaged (it has {key}, {why}); {cure}")
        return _sound(self.path, trial)

    def begin(self, settings: dict[str, Any]) -> Trial:
        """Writes down what is tried."""
        write_durably(self.path / SETTINGS, documents.to_bytes(settings))
        return Trial(self.number, settings)

    def write(self, trial: Trial) -> Trial:
        """Writes down what came of it."""
        rungs = [asdict(rung) for rung in trial.rungs]
        found: dict[str, Any] = {"state": trial.state, "reason": trial.reason, "rungs": rungs}
        if trial.history:
            found["history"] = list(trial.history)
        write_durably(self.path / RESULT, documents.to_bytes(found))
        return trial

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the trial for one process; that of an interrupted sweep may take a while to end."""
        with held(self.path, PATIENCE, LOCK):
            yield


_TRIAL: TypeAdapter[Trial] = TypeAdapter(Trial)


def _sound(path: Path, trial: Trial) -> Trial:
    """The trial, if its files hold what is written there, and not only what Python can hold."""
    try:
        checked = _TRIAL.validate_json(json.dumps(asdict(trial)), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"the trial in {path} is damaged ({where}: {first['msg']}); delete that directory, and it runs again"
        ) from None
    if any("rates" not in segment for segment in checked.history):
        raise ConfigError(f"the trial in {path} is damaged (its history names no rates); delete that directory")
    return checked


def read_trials(sweep: Sweep) -> list[Trial]:
    """All trials that have begun, by their numbers."""
    folder = sweep.output / TRIALS
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    found = (Folder(sweep, int(name)).read() for name in names if name.isdecimal())
    return sorted((trial for trial in found if trial is not None), key=lambda trial: trial.number)


def left(sweep: Sweep) -> tuple[list[int], list[int]]:
    """Numbers of the trials that have begun and not ended, and of those that have not begun."""
    known = read_trials(sweep)
    unfinished = [trial.number for trial in known if trial.state == "running"]
    return unfinished, sorted(set(range(sweep.settings.trials)) - {trial.number for trial in known})


def decided(sweep: Sweep, trial: Trial) -> tuple[Rung, ...]:
    """The rungs after which it is known whether the trial goes on; the last one of an interrupted trial may not be."""
    if trial.state == "running" and trial.last is not None and not _went_on(sweep, trial):
        return trial.rungs[:-1]
    return trial.rungs


def _went_on(sweep: Sweep, trial: Trial) -> bool:
    assert trial.last is not None
    return Folder(sweep, trial.number).rung(trial.last.rung + 1).exists()


def run_trial(sweep: Sweep, number: int, rung: int, train: Train) -> Trial:
    """Trains one rung of a trial, or finds that it is done; what is wrong with its settings becomes its result.

    The trial must have begun. An error that has nothing to do with its settings is raised.
    """
    import torch

    from vcal_dist.phases import LinAlgError

    folder = Folder(sweep, number)
    trial = folder.read()
    assert trial is not None, f"trial {number} has not begun"
    if trial.state != "running" or any(known.rung == rung for known in trial.rungs):
        return trial
    try:
        config = sweep.configured(trial.settings, rung)
    except ConfigError as error:  # a combination that no end of a range showed
        return folder.write(replace(trial, state="failed", reason=str(error)))
    config = config.model_copy(update={"output": str(folder.rung(rung))})
    try:
        posterior = train(config)
        value = metric(sweep, posterior)
    except (ModelError, LinAlgError, torch.OutOfMemoryError) as error:
        # It diverged, or its settings do not go with the data, or with the size of a GPU.
        return folder.write(replace(trial, state="failed", reason=_first_line(error)))
    done = Rung(rung, sweep.budget(rung), value, posterior.record.get("seconds"))
    state: State = "done" if rung == sweep.last_rung else "running"
    return folder.write(replace(trial, state=state, reason=None, rungs=(*trial.rungs, done)))


def alone(config: Config, threads: int | None) -> Config:
    """The configuration for one process on one device."""
    devices = config.devices.model_copy(update={"devices": 1, "num_nodes": 1, "threads": threads})
    return config.model_copy(update={"devices": devices})


def metric(sweep: Sweep, posterior: Posterior) -> float:
    """How good a posterior is; raises ModelError if it is not finite."""
    name, record = sweep.settings.metric, posterior.record
    if name == "bound":
        value = record.get("bound")
    else:
        judged = (record.get("assessment") or {}).get("observations")
        if judged is None:
            raise ConfigError(NOTHING_TO_JUDGE_BY)
        value = judged["log_predictive_density"]
    if value is None or not math.isfinite(value):
        raise ModelError(f"the metric {name} is {value}")
    return float(value)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
