"""Population based training: rates change while a population trains, and the worst go on from copies of the best.

Training is cut into segments of equally many steps (jobs.sweeps.member). After each, the posterior of that moment is
judged, which only `meanfield` has. A member among the worst quarter then takes the run of one among the best in place
of its own, with rates that are that one's times 0.8 or 1.2, or drawn anew. Members that wait for others hold no
resources, so that a population may be larger than what the cluster runs at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from ray.tune.schedulers import PopulationBasedTraining
from ray.tune.search import BasicVariantGenerator

from jobs.sweeps.member import rates_of
from jobs.sweeps.space import Dimension
from jobs.sweeps.worker import BUDGET, METRIC

if TYPE_CHECKING:
    from jobs.sweeps.tune import Driver

KEPT = 3  # of a member's copies for others: one that is about to be taken must not go
QUANTILE = 0.25  # of the members that go on from others
ANEW = 0.25  # probability of a rate that is drawn anew


class Population(PopulationBasedTraining):
    """Ray's own, but for who is compared: members after the same segment only, whatever became of the others.

    A metric after other segments says little: it may fall from one stage to the next. All that is drawn follows from
    the sweep's seed.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver, self.sweep = driver, driver.sweep
        self.space, self.last = self.sweep.space.dimensions, self.sweep.budget(self.sweep.last_rung)
        self.compared = {0}  # segments after which members were
        super().__init__(
            time_attr=BUDGET,
            metric=METRIC,
            mode="max",
            hyperparam_mutations={key: dimension.ends for key, dimension in self.space.items()},
            log_config=False,
            synch=True,
        )

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        """They are known already."""
        return True

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        """A member begins, or goes on, with its own rates."""
        number = trial.config["number"]
        self.driver.numbers[trial.trial_id] = number
        trial.config |= rates_of(self.sweep, number)
        super().on_trial_add(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Lets a member wait for the others, unless it is done."""
        if BUDGET not in result or result.get("done"):  # Tune repeats the last result at the end
            return str(self.CONTINUE)
        done = result[BUDGET] == self.last
        part = "" if done else f" at {result[BUDGET]}/{self.last}"
        metric = f"{self.sweep.settings.metric} {result[METRIC]:.5g}"
        self.driver.say(f"trial {trial.config['number']}{part}: {metric}{', done' if done else ''}")
        if done:
            return str(self.CONTINUE)
        self._save_trial_state(self._trial_state[trial], result[BUDGET], result, trial)
        return str(self.PAUSE)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """What came of it lies in its files."""
        self.driver.ended(trial.config["number"])

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """The next of those that are the least far, once they are all there; one that failed is not waited for."""
        live = [trial for trial in tune_controller.get_trials() if not trial.is_finished()]
        least = min((self._trial_state[trial].last_train_time for trial in live), default=0)
        behind = [trial for trial in live if self._trial_state[trial].last_train_time == least]
        if least not in self.compared:
            if any(trial.status != trial.PAUSED for trial in behind):  # its copy is not written yet
                return None
            self.compared.add(least)
            self._compare(behind, tune_controller)
        return next((trial for trial in behind if trial.status in (trial.PENDING, trial.PAUSED)), None)

    def _compare(self, members: list[Any], tune_controller: Any) -> None:
        """The worst go on from the best."""
        states = self._trial_state
        ranked = sorted(members, key=lambda trial: states[trial].last_score or 0.0)
        count = min(math.ceil(QUANTILE * len(ranked)), len(ranked) // 2)
        for i, worse in enumerate(ranked[:count]):
            better = ranked[-1 - i]
            if states[better].last_score != states[worse].last_score and better.checkpoint is not None:
                states[better].last_checkpoint = better.checkpoint
                self._exploit(tune_controller, worse, better)

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        number, segment = trial.config["number"], self._trial_state[trial].last_train_time
        drawn = np.random.default_rng([self.sweep.settings.seed, number, segment])
        found = {key: changed(trial_to_clone.config[key], dimension, drawn) for key, dimension in self.space.items()}
        rates = ", ".join(f"{key}={value:.3g}" for key, value in found.items() if value is not None)
        self.driver.say(f"trial {number} goes on from trial {trial_to_clone.config['number']}: {rates}")
        return {**found, "number": number}, {}


class Members(BasicVariantGenerator):
    """Gives Tune the members, and calls it a day when all have ended: else no process is kept while they wait."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self.driver = driver

    def is_finished(self) -> bool:
        """Whether no process is needed any more."""
        return bool(super().is_finished()) and (self.driver.broken is not None or not self._live_trials)

    def save_to_dir(self, dirpath: str, *session: Any, **kwargs: Any) -> None:
        """Nothing that is not in the trials' files."""


def changed(value: Any, dimension: Dimension, drawn: np.random.Generator) -> Any:
    """A rate that was good, a little changed within its range or its choices, or another one."""
    anew, up, ends = drawn.random() < ANEW, bool(drawn.integers(2)), dimension.ends
    if dimension.choice is not None:
        near = min(max(ends.index(value) + (1 if up else -1), 0), len(ends) - 1)
        return ends[int(drawn.integers(len(ends)))] if anew else ends[near]
    low, high = ends
    if not anew:
        return min(max(value * (1.2 if up else 0.8), low), high)
    if dimension.loguniform is None:
        return float(drawn.uniform(low, high))
    return min(max(math.exp(drawn.uniform(math.log(low), math.log(high))), low), high)
