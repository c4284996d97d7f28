"""The process of a trial on Ray: climbs from rung to rung, and reports to Tune after each."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import tune

from jobs.sweeps.resources import Share
from jobs.sweeps.settings import Sweep
from jobs.sweeps.trial import Folder, alone, decided, run_trial
from storage.errors import VcalError
from vcal_dist.config import Config
from vcal_dist.posterior import Posterior

if TYPE_CHECKING:
    from lightning.pytorch import Callback

METRIC, BUDGET = "metric", "budget"  # what is reported


def work(asked: dict[str, Any], plain: dict[str, Any], shared: Share) -> None:
    """One trial: climbs from rung to rung until Tune stops it."""
    sweep, number = Sweep.parse(plain, "the sweep sent by Ray"), asked["number"]
    folder = Folder(sweep, number)
    with folder.held():
        before = folder.read()
        assert before is not None
        if before.reason is not None:  # why it could not go on before
            before = folder.write(replace(before, reason=None))
        known = {rung.rung for rung in decided(sweep, before)}
        train = partial(_train, shared=Share(*shared))
        for rung in sweep.rungs:
            if rung in known:
                continue
            try:
                trial = run_trial(sweep, number, rung, train)
            except VcalError as error:  # nothing to do with its settings: the next command tries again
                folder.write(replace(folder.read() or before, reason=str(error)))
                return
            if trial.state == "failed":
                return
            last = next(found for found in trial.rungs if found.rung == rung)
            tune.report({METRIC: last.metric, BUDGET: last.budget})


def _train(config: Config, shared: Share) -> Posterior:
    if shared.workers > 1:
        from jobs.ray_training import train_on_ray

        return train_on_ray(
            config,
            workers=(shared.workers, shared.workers),
            gpus_per_worker=shared.gpus,
            cpus_per_worker=shared.cpus,
            retries=1,
            progress=False,
        )
    return train_alone(config, shared)


def train_alone(config: Config, shared: Share, callbacks: Iterable[Callback] = ()) -> Posterior:
    """Trains in this process."""
    from vcal_dist.training import train

    _alone()
    return train(alone(config, shared.cpus), progress=False, callbacks=callbacks)


def _alone() -> None:
    """This process is the only one of its training, whatever launcher started the node that it runs on."""
    from lightning.pytorch.utilities import rank_zero_only

    ranks = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "JSM_NAMESPACE_RANK")
    for name in [name for name in os.environ if name in ranks or name.startswith("SLURM_")]:
        del os.environ[name]
    known: Any = rank_zero_only
    known.rank = 0
