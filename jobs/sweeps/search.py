"""Which settings a trial gets, from Optuna.

Both kinds of search are functions of the sweep's seed, the trial's number and, for `optuna`, of what is known of the
other trials: nothing else has to be remembered from one command to the next. With `random`, trial k has the same
settings whatever happened before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jobs.sweeps.settings import Sweep
from jobs.sweeps.space import Dimension, same
from jobs.sweeps.trial import Trial

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

LEAST_RANDOM, MOST_RANDOM = 4, 10  # trials before earlier ones guide the search: a quarter of all, within these


def propose(sweep: Sweep, number: int, trials: Sequence[Trial]) -> dict[str, Any]:
    """Settings for a trial, by dotted key; `trials` are those that have begun."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = int(np.random.SeedSequence([sweep.settings.seed, number]).generate_state(1)[0])
    if sweep.settings.search == "random":
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    else:
        first = min(max(sweep.settings.trials // 4, LEAST_RANDOM), MOST_RANDOM)
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=first)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        study.add_trials([_told(sweep, trial) for trial in trials if trial.number != number])
    asked = study.ask()

    def pick(key: str, dimension: Dimension) -> Any:
        if dimension.choice is not None:
            return dimension.choice[asked.suggest_categorical(key, range(len(dimension.choice)))]
        if dimension.int is not None:
            return asked.suggest_int(key, *dimension.int, step=dimension.step)
        low, high = dimension.ends
        return asked.suggest_float(key, low, high, log=dimension.loguniform is not None)

    return sweep.space.settle(pick)


def _told(sweep: Sweep, trial: Trial) -> optuna.trial.FrozenTrial:
    """A trial as Optuna knows it; one that was stopped counts by how far it came, and how good it was there."""
    import optuna

    states = optuna.trial.TrialState
    state = {"done": states.COMPLETE, "stopped": states.PRUNED, "failed": states.FAIL, "running": states.RUNNING}
    distributions = {key: _distribution(sweep.space.dimensions[key]) for key in trial.settings}
    return optuna.trial.create_trial(
        state=state[trial.state],
        value=trial.rungs[-1].metric if trial.state == "done" else None,
        params={key: _drawn(sweep.space.dimensions[key], value) for key, value in trial.settings.items()},
        distributions=distributions,
        intermediate_values={rung.budget: rung.metric for rung in trial.rungs},
    )


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if dimension.choice is not None:
        return CategoricalDistribution(range(len(dimension.choice)))  # Optuna's choices may not be lists or mappings
    if dimension.int is not None:
        return IntDistribution(*dimension.int, step=dimension.step)
    low, high = dimension.ends
    return FloatDistribution(low, high, log=dimension.loguniform is not None)


def _drawn(dimension: Dimension, value: Any) -> Any:
    """What Optuna drew for a value."""
    if dimension.choice is None:
        return value
    return next(i for i, choice in enumerate(dimension.choice) if same(choice, value))
