"""What can be told of a sweep once its data are there, before any trial begins."""

from __future__ import annotations

import torch

from jobs.sweeps.settings import Sweep
from jobs.sweeps.trial import NOTHING_TO_JUDGE_BY
from storage.validation import show
from vcal_dist.errors import ConfigError, ModelError
from vcal_dist.initialise import place_start
from vcal_dist.priors import ThetaPrior
from vcal_dist.rows import LEAVE_ONE_OUT
from vcal_dist.training import Prepared, open_or_make, prepare


def check_with_data(sweep: Sweep) -> None:
    """Makes the store if need be, and refuses what does not go with it: names of parameters, values of outputs."""
    store = open_or_make(sweep.config)  # once, and not in every trial
    prior = ThetaPrior.from_problem(store.problem)
    for key, value, values in sweep.space.corners():
        config = sweep.configured(values)
        where = "sweep.space" if key is None else f"sweep.space.{key}: the value {show(value)}"
        try:
            if key is None:
                _check_rows(sweep, prepare(config, store))
            place_start(prior, config.fit.start, torch.zeros(prior.dim, dtype=torch.float64))
        except ModelError as error:
            raise ConfigError(f"{where} does not go with the data: {error}") from None


def _check_rows(sweep: Sweep, prepared: Prepared) -> None:
    held, rows = len(prepared.at_hand.held_observations), prepared.store.observations.rows
    if sweep.settings.metric == "log_predictive_density" and not held and rows > LEAVE_ONE_OUT:
        raise ConfigError(NOTHING_TO_JUDGE_BY)
    if sweep.settings.scheduler == "pbt" and not held:  # what has not learned from a row cannot leave it out either
        raise ConfigError(
            "sweep.scheduler is 'pbt', which judges in the middle of training, by observations that are held out; of "
            f"the {rows} in the store none is. Give data.holdout above 0 and more than {LEAVE_ONE_OUT} observations, "
            "or sweep.scheduler=asha"
        )
