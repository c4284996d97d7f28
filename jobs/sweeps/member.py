"""A member of a population: trains segment after segment, and goes on from its own run or from a copy of another.

What a run was trained with, by whom and how well, lies as `history.json` in its directory, and travels with it.
"""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from ray import tune

from jobs.sweeps.resources import Share
from jobs.sweeps.settings import Sweep
from jobs.sweeps.space import placed
from jobs.sweeps.trial import Folder, Rung, alone
from jobs.sweeps.worker import BUDGET, METRIC, train_alone
from storage import documents, strict_yaml
from storage.errors import VcalError
from storage.places import write_durably
from vcal_dist.checkpoints import Checkpoints
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, ModelError, Preempted
from vcal_dist.module import CalibrationModule
from vcal_dist.phases import LinAlgError
from vcal_dist.run_directory import CONFIG, LOCK, ROWS, keep_rows, read_mapping, read_rows
from vcal_dist.stages import meanfield_stages
from vcal_dist.training import moment
from vcal_dist.weights import MeanField

HISTORY, SEGMENTS = "history.json", "segments"
WORST = -1e300  # a metric that has no value in the middle of training: another run may take the place of this one


def member(asked: dict[str, Any], plain: dict[str, Any], shared: Share) -> None:
    """The process of a member: trains segment after segment, until Tune stops it or gives it another's run."""
    sweep, number = Sweep.parse(plain, "the sweep sent by Ray"), asked["number"]
    folder = Folder(sweep, number)
    with folder.held():
        run = run_of(sweep, number)
        mend(run)
        given = tune.get_checkpoint()
        if given is not None:
            with given.as_directory() as source:
                take_over(run, Path(source), {key: asked[key] for key in sweep.space.dimensions})
        trial = replace(folder.begin(rates_of(sweep, number)), history=tuple(history(run)))
        try:
            while trial.state == "running":
                found = segment(sweep, number, Share(*shared))
                trial = replace(trial, history=found)
                last = sweep.budget(sweep.last_rung) == found[-1]["segment"]
                if last:
                    seconds = sum(one["seconds"] for one in found)
                    rung = Rung(sweep.last_rung, found[-1]["segment"], found[-1]["metric"], seconds)
                    trial = replace(trial, state="done", rungs=(rung,))
                folder.write(trial)
                copy = None if last else tune.Checkpoint.from_directory(run)
                tune.report({METRIC: found[-1]["metric"], BUDGET: found[-1]["segment"]}, checkpoint=copy)
        except (ModelError, LinAlgError, torch.OutOfMemoryError) as error:  # it diverged
            folder.write(replace(trial, state="failed", reason=str(error).partition("\n")[0]))
        except VcalError as error:  # nothing to do with its rates: the next command tries again
            folder.write(replace(trial, reason=str(error)))


def segment(sweep: Sweep, number: int, shared: Share) -> tuple[dict[str, Any], ...]:
    """Trains a member's next segment; what led to the posterior that it has then, and how good that is."""
    run, rates, last = run_of(sweep, number), rates_of(sweep, number), sweep.budget(sweep.last_rung)
    before = history(run)
    current = min(len(before) + 1, last)
    config = sweep.configured(rates).model_copy(update={"output": str(run)})
    begun = time.perf_counter()
    try:
        found = train_alone(config, shared, [Segment(current, last)]).record["assessment"]
        current = last
    except Preempted:
        found = moment(alone(config, shared.cpus))
    value = found["observations"]["log_predictive_density"]
    if not math.isfinite(value):
        if current == last:
            raise ModelError(f"the metric {sweep.settings.metric} is {value}")
        value = WORST
    seconds = time.perf_counter() - begun
    entry = {"segment": current, "trial": number, "rates": rates, "metric": value, "seconds": seconds}
    after = (*before[: current - 1], entry)
    write_durably(run / HISTORY, documents.to_bytes({SEGMENTS: after}))
    return after


class Segment(Callback):
    """Stops training, as a signal would, where a segment ends; the last one ends with the training itself."""

    def __init__(self, number: int, of: int) -> None:
        self.number, self.of = number, of
        self.end = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, CalibrationModule)
        q = module.schedule.work.found.q
        assert isinstance(q, MeanField)
        stages = meanfield_stages(module.model, q, module.totals, module.settings, module.seed)
        self.end = sum(stage.steps for stage in stages) * self.number // self.of

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(module, CalibrationModule)
        if self.number < self.of and module.schedule.steps + 1 >= self.end:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, Checkpoints):
                    callback.stopping = True


# --- the run directory of a member ----------------------------------------------------------------------------------


def run_of(sweep: Sweep, number: int) -> Path:
    """Where a member trains."""
    return Folder(sweep, number).rung(sweep.last_rung)


def history(run: Path) -> list[dict[str, Any]]:
    """What led to a run, segment by segment."""
    path = run / HISTORY
    if not path.exists():
        return []
    found = documents.read(path, ConfigError, _again(run)).get(SEGMENTS)
    if not isinstance(found, list) or not all(isinstance(one, dict) and "rates" in one for one in found):
        raise ConfigError(f"{path} is damaged (it has no list of segments with their rates); {_again(run)}")
    return found


def _again(run: Path) -> str:
    return f"delete {run}, and that member trains again"


def rates_of(sweep: Sweep, number: int) -> dict[str, Any]:
    """The rates that a member trains with: those of its run, or what it is to begin with."""
    path = run_of(sweep, number) / CONFIG
    if path.exists():
        return _rates(path, sweep.space.dimensions)
    trial = Folder(sweep, number).read()
    assert trial is not None, f"trial {number} has not begun"
    return trial.settings


def _rates(path: Path, keys: Any) -> dict[str, Any]:
    """Values of a configuration, by keys fit.<stage>.rate."""
    try:
        fit = strict_yaml.read(path, ConfigError)["fit"]
        return {key: fit[key.split(".")[1]].get("rate") for key in keys}
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} has no rates ({error}); delete {path.parent}, and that member trains again"
        ) from None


def take_over(run: Path, source: Path, rates: dict[str, Any]) -> None:
    """Puts a copy of another run in the place of this one, with these rates; does nothing if it is the same already."""
    if (run / CONFIG).exists() and history(run) == history(source) and _rates(run / CONFIG, rates) == rates:
        return
    partial, old = _beside(run)
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=shutil.ignore_patterns(LOCK, "*.partial"))
    plain = read_mapping(partial / CONFIG) | {"output": str(run)}
    for key, value in rates.items():
        plain = placed(plain, key, value)
    write_durably(partial / CONFIG, strict_yaml.dump(Config.parse(plain, "the trial").plain()).encode())
    keep_rows(partial, read_rows(partial / ROWS))  # which hold a checksum of the configuration
    if run.exists():
        run.rename(old)
    partial.rename(run)
    shutil.rmtree(old, ignore_errors=True)


def mend(run: Path) -> None:
    """Brings back the run that was put aside, if the copy has not come in its place."""
    partial, old = _beside(run)
    if old.exists() and not run.exists():
        old.rename(run)
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)


def _beside(run: Path) -> tuple[Path, Path]:
    return run.with_name(f".{run.name}.partial"), run.with_name(f".{run.name}.old")
