"""The trials of a sweep on a Ray cluster, by Ray Tune.

Tune starts and stops processes; what was tried and what came of it lies in the trials' own files, so that a sweep can
go on, or grow, whatever became of Tune. A trial reports the metric of a complete posterior after each of its rungs:
figures of one rung can be compared, and a trial may be stopped after any.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher

from jobs.ray_cluster import capacity
from jobs.sweeps.checks import check_with_data
from jobs.sweeps.member import member
from jobs.sweeps.pbt import KEPT, Members, Population
from jobs.sweeps.resources import Share, share
from jobs.sweeps.search import propose
from jobs.sweeps.settings import Sweep
from jobs.sweeps.trial import Folder, Rung, Trial, decided, left, read_trials
from jobs.sweeps.worker import BUDGET, METRIC, work
from vcal_dist.errors import ConfigError

SCRATCH = ".ray"  # Tune's own files, while a sweep runs
SEEN_SECONDS = 90.0  # until a network file system shows what another node wrote
RETRIES = 2  # after a trial's process or node died; it goes on from its checkpoint
ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # our own files say more
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C ends at once: trials have their checkpoints
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
}
Say = Callable[[str], None]


def run(sweep: Sweep, say: Say) -> None:
    """Runs the trials that are missing. Call it with a connection to Ray, and the sweep's directory begun."""
    unfinished, missing = left(sweep)
    count = len(unfinished) + len(missing)
    shared = share(sweep, capacity(), count)  # refuses what cannot be
    check_with_data(sweep)
    say(f"{count} trial{'s' if count > 1 else ''} to run, {shared}")
    driver = Driver(sweep, say)
    function, space, way = _way(driver, unfinished, missing, shared)
    scratch = sweep.output / SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)
    with _quietly():
        tuner = tune.Tuner(
            tune.with_resources(partial(function, plain=sweep.plain(), shared=shared), _resources(shared)),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric=METRIC,
                mode="max",
                reuse_actors=True,  # a new process would spend seconds to import torch
                **way,
            ),
            run_config=tune.RunConfig(
                name="tune",
                storage_path=str(scratch),
                failure_config=tune.FailureConfig(max_failures=RETRIES),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=KEPT),
                callbacks=[Errors(driver)],
                stop=Broken(driver),
                verbose=0,
            ),
        )
        try:
            tuner.fit()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    if driver.broken:
        raise ConfigError(f"{driver.broken}. The same command goes on once that is mended")


def _way(
    driver: Driver, unfinished: list[int], missing: list[int], shared: Share
) -> tuple[Callable[..., None], dict[str, Any], dict[str, Any]]:
    """What the trials' processes do, what they are given, and what decides on them."""
    sweep = driver.sweep
    way: dict[str, Any]
    if sweep.settings.scheduler != "pbt":
        way = {"search_alg": Proposals(driver, unfinished, missing), "scheduler": Rungs(driver, read_trials(sweep))}
        return work, {}, way | {"num_samples": len(unfinished + missing), "max_concurrent_trials": shared.concurrent}
    for number in missing:
        Folder(sweep, number).begin(propose(sweep, number, []))
    # All at once, so that they take turns: a limit on their number would let some begin after others have ended.
    way = {"search_alg": Members(driver), "scheduler": Population(driver)}
    return member, {"number": tune.grid_search([*unfinished, *missing])}, way


class Driver:
    """What the parts of Tune that are ours share: which trial is which, and what is worth a line."""

    def __init__(self, sweep: Sweep, say: Say) -> None:
        self.sweep, self.say = sweep, say
        self.numbers: dict[str, int] = {}  # of trials, by Tune's names for them
        self.told: dict[int, int] = {}  # the budget of the last line about a trial
        self.broken: str | None = None  # what stops all trials alike

    def rung(self, number: int, budget: int, stops: bool) -> None:
        """A trial has finished a rung, and it was decided whether it goes on."""
        if self.told.get(number) == budget:  # Tune repeats the last result at the end
            return
        folder = Folder(self.sweep, number)
        trial, rung = _reported(folder, budget)
        if stops and trial.state == "running":
            trial = folder.write(replace(trial, state="stopped"))
        self.say(described(self.sweep, trial, rung) + ("" if number in self.told else f" ({_settings(trial)})"))
        self.told[number] = budget

    def ended(self, number: int) -> None:
        """A trial has ended, well or not."""
        trial = Folder(self.sweep, number).read()
        if trial is None:
            return
        if trial.state == "failed":
            self.say(f"trial {number} failed: {trial.reason} ({_settings(trial)})")
        elif trial.state == "running" and trial.reason is not None:
            self.broken = f"trial {number}: {trial.reason}"


def _reported(folder: Folder, budget: int) -> tuple[Trial, Rung]:
    """A trial with the rung that it has reported; a file of another node may come to be seen a while later."""
    end = time.monotonic() + SEEN_SECONDS
    while True:
        trial = folder.read()
        for rung in () if trial is None else trial.rungs:
            if trial is not None and rung.budget == budget:
                return trial, rung
        if time.monotonic() > end:
            raise ConfigError(
                f"{folder.path} does not show what a process has written there; a sweep needs a directory that all "
                "nodes see"
            )
        time.sleep(0.5)


def described(sweep: Sweep, trial: Trial, rung: Rung) -> str:
    """A line about a rung that is finished."""
    outcome = {"running": "goes on", "stopped": "stopped", "done": "done", "failed": "failed"}[trial.state]
    part = "" if rung.rung == sweep.last_rung else f" at 1/{sweep.budget(sweep.last_rung - rung.rung)}"
    return f"trial {trial.number}{part}: {sweep.settings.metric} {rung.metric:.5g}, {outcome}"


def _settings(trial: Trial) -> str:
    def short(value: Any) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{key}={short(value)}" for key, value in trial.settings.items())


class Proposals(Searcher):
    """Gives Tune the numbers of trials: first those that were interrupted, then new ones with settings of their own."""

    def __init__(self, driver: Driver, unfinished: list[int], missing: list[int]) -> None:
        super().__init__(metric=METRIC, mode="max")
        self.driver, self.unfinished, self.missing = driver, unfinished, missing

    def suggest(self, trial_id: str) -> dict[str, Any] | str:  # type: ignore[override] # FINISHED is a text
        """The next trial; its settings are on disk before it starts."""
        if self.unfinished:
            number = self.unfinished.pop(0)
        elif self.missing:
            number, sweep = self.missing.pop(0), self.driver.sweep
            Folder(sweep, number).begin(propose(sweep, number, read_trials(sweep)))
        else:
            return Searcher.FINISHED
        self.driver.numbers[trial_id] = number
        return {"number": number}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """What came of it lies in its files."""
        self.driver.ended(self.driver.numbers[trial_id])

    def save(self, checkpoint_path: str) -> None:
        """Nothing that is not in the trials' files."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing."""


class Rungs(ASHAScheduler):
    """Asynchronous successive halving over the rungs, which also knows what earlier commands found.

    A sweep without stops has one rung only.
    """

    def __init__(self, driver: Driver, known: list[Trial]) -> None:
        settings, rungs = driver.sweep.settings, driver.sweep.rungs
        super().__init__(
            time_attr=BUDGET,
            metric=METRIC,
            mode="max",
            grace_period=driver.sweep.budget(rungs[0]),
            max_t=driver.sweep.budget(rungs[-1]),
            reduction_factor=settings.reduction,
        )
        self.driver = driver
        nobody: Any = None  # asks: this is from before
        for trial in known:
            super().on_trial_add(nobody, _named(trial.number))
            for rung in decided(driver.sweep, trial):
                result = {BUDGET: rung.budget, METRIC: rung.metric}
                super().on_trial_result(nobody, _named(trial.number), result)

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """They are known already."""
        return True

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Whether a trial goes on."""
        number = self.driver.numbers[trial.trial_id]
        action: str = super().on_trial_result(tune_controller, _named(number), result)
        if BUDGET in result:
            self.driver.rung(number, result[BUDGET], action == ASHAScheduler.STOP)
        return action

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """As the trial that it may have been before."""
        super().on_trial_add(tune_controller, _named(self.driver.numbers[trial.trial_id]))

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Nothing new: its last result was judged when it came."""

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """What is known of it stays."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing that is not in the trials' files."""


def _named(number: int) -> Any:
    """A trial under a name that it keeps from one command to the next: each of its results is then counted once."""
    return SimpleNamespace(trial_id=f"trial-{number}")


class Errors(tune.Callback):
    """Hears of trials whose process died more often than it is started again."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Its files stay as they are: the same command tries it again."""
        number = self.driver.numbers[trial.trial_id]
        lines = [line for line in str(trial.get_error() or "its process died").splitlines() if line.strip()]
        self.driver.say(f"trial {number} was interrupted: {lines[-1].strip()}")


class Broken(tune.Stopper):
    """Ends the sweep when all trials would meet the same: no store, no room on the disk."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Not for a single trial."""
        return False

    def stop_all(self) -> bool:
        """Whether nothing can go on."""
        return self.driver.broken is not None


def _resources(shared: Share) -> tune.PlacementGroupFactory:
    """Of a trial's own process. If others do the work, it must not take a CPU from them: a byte, as Tune wants some."""
    own = {"memory": 1.0} if shared.workers > 1 else {"CPU": float(shared.cpus), "GPU": shared.gpus}
    return tune.PlacementGroupFactory([{name: amount for name, amount in own.items() if amount}])


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    log = logging.getLogger("ray.tune")
    level = log.level
    log.setLevel(logging.CRITICAL)  # of a trial's error we say what matters ourselves
    try:
        # What Tune prints, verbose or not, would mix with the result.
        with Path(os.devnull).open("w") as null, contextlib.redirect_stdout(null), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"ray\..*")
            warnings.filterwarnings("ignore", category=FutureWarning)
            yield
    finally:
        log.setLevel(level)
