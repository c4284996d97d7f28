"""One trial in this process and without Ray: a task of a job array."""

from __future__ import annotations

from jobs.sweeps.search import propose
from jobs.sweeps.settings import Sweep
from jobs.sweeps.trial import Folder, Trial, alone, run_trial
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError
from vcal_dist.training import Say, train


def run_alone(sweep: Sweep, number: int, say: Say) -> Trial:
    """Trains a trial with the whole schedule; the sweep's directory must have begun."""
    if number >= sweep.settings.trials:
        raise ConfigError(f"the sweep has {sweep.settings.trials} trials, from 0; got --trial {number}")
    if sweep.settings.search != "random":
        raise ConfigError(
            f"sweep.search is '{sweep.settings.search}', which needs to know the other trials; a trial alone needs "
            "sweep.search=random"
        )
    if sweep.settings.scheduler == "pbt":
        raise ConfigError(
            "sweep.scheduler is 'pbt', where trials take over from each other while they train; a trial alone needs "
            "sweep.scheduler=asha or none"
        )
    folder = Folder(sweep, number)
    folder.path.mkdir(parents=True, exist_ok=True)
    with folder.held():
        if folder.read() is None:
            folder.begin(propose(sweep, number, []))
        return run_trial(sweep, number, sweep.last_rung, lambda config: train(_placed(config), say=say))


def _placed(config: Config) -> Config:
    return alone(config, config.devices.threads)
