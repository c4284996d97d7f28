"""A finished run with its posterior of θ refined: more points of the exact posterior, and how far they moved it.

The runs are compressed again, which takes one pass, and so any family of weights can be refined, `meanfield` too; the
emulator's features and, where rows are many, the discrepancy's length scales stay as training left them. Rows are
streamed from the run's store, by as many processes as `devices` says.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from storage.store import Store
from vcal_dist.config import Config
from vcal_dist.errors import ModelError
from vcal_dist.plan import FitSettings
from vcal_dist.posterior import FILE, Posterior
from vcal_dist.refinement import impossible
from vcal_dist.report.gathering import config_of_run, store_of_run
from vcal_dist.run_directory import GLANCE, held
from vcal_dist.run_place import RunPlace
from vcal_dist.stacked_emulator import StackedEmulator
from vcal_dist.theta import ThetaPosterior
from vcal_dist.training import Prepared, Say, assess, fit, is_first, prepare
from vcal_dist.way import way
from vcal_dist.work import Fitted, Found, Work

EVALUATIONS = 2048
NODES, REACH = 200_000, 6.0  # at the most where two densities are compared, so many standard deviations from all


@dataclass(frozen=True)
class Moved:
    """What refinement changed of one parameter, in the user's units."""

    name: str
    mean_before: float
    sd_before: float
    mean: float
    sd: float
    shift: float  # of the mean, in standard deviations of before
    ratio: float  # of the standard deviations, after over before
    distance: float  # total variation between the two densities, from 0 to 1


def refine(
    place: RunPlace,
    *,
    evaluations: int = EVALUATIONS,
    changes: dict[str, Any] | None = None,
    store: str | None = None,
    trust_locations: bool = False,
    progress: bool = True,
    say: Say = lambda _: None,
) -> tuple[Posterior, list[Moved]]:
    """The run's posterior, refined and written in its place, and how far each parameter moved.

    `changes` are sections of the configuration that say where and how it is computed: `devices`, `data`. `store` is
    where the rows are if not where the run's record says; a store on the network that only the record names is opened
    with `trust_locations`.
    """
    before = Posterior.load(place.path)
    if not (place.path / FILE).is_file():
        raise ModelError(f"{place.url} has no {FILE}; refine a run that is finished")
    config = config_of_run(before.record)
    rows, _, unreachable = store_of_run(place.path, before, config, store, trust_locations=trust_locations)
    if config is None or rows is None:
        raise ModelError(f"the run in {place.url} cannot be refined: {unreachable}")
    prepared = _prepared(place, before, config, rows, evaluations, changes or {})
    work = Work(prepared.model, prepared.config.fit, prepared.totals, prepared.config.seed, None)
    why = impossible(work)
    if why:
        raise ModelError(f"the run in {place.url} cannot be refined: {why}")
    found = Found(components=list(before.components), log_weights=before.log_weights, validation=before.validation)
    say(f"refining with {evaluations:,} points and {prepared.totals.observations:,} observations")
    begun = time.perf_counter()
    if not is_first():
        fitted = fit(prepared, None, None, progress=progress, found=found)
        return before, _moved(before, fitted)
    with held(place.path, patience=GLANCE):
        fitted = fit(prepared, None, None, progress=progress, found=found)
        if fitted.unrefined:
            raise ModelError(
                f"the run in {place.url} is left as it was: {fitted.unrefined}; try with more (--evaluations), or "
                "train again from other starts"
            )
        moved = _moved(before, fitted)
        record = _record(before, prepared, fitted, moved, time.perf_counter() - begun)
        after = Posterior.from_fitted(before.problem, before.scaling, fitted, record)
        after.save(place.path)
        place.send()
    return after, moved


def _prepared(
    place: RunPlace, before: Posterior, config: Config, store: Store, evaluations: int, changes: dict[str, Any]
) -> Prepared:
    """What training began with, the model being as it ended."""
    data = config.plain()
    for section, values in changes.items():
        data[section] = {**data[section], **values}
    config = Config.parse(data, f"the configuration of {place.url}")
    before_fit = config.fit
    settings = FitSettings(
        evaluations=evaluations, starts=before_fit.starts, screening=before_fit.screening, start=before_fit.start
    )
    stacked = isinstance(before.model.eta, StackedEmulator)
    prepared = prepare(config.model_copy(update={"fit": settings}), store, stacked=stacked)
    prepared.model.adopt(before.model.state_dict())
    return prepared


def _record(
    before: Posterior, prepared: Prepared, fitted: Fitted, moved: list[Moved], seconds: float
) -> dict[str, Any]:
    """That of training, with what is new."""
    family = (before.record.get("config") or {}).get("fit", {}).get("weights", "collapsed")
    return {
        **before.record,
        "assessment": assess(prepared, fitted),
        "theta": way(fitted, "collapsed"),
        "refined": {"from": family, "seconds": seconds, "moved": [asdict(each) for each in moved]},
    }


def _moved(before: Posterior, fitted: Fitted) -> list[Moved]:
    """Each parameter before and after."""
    old, new = before.theta, fitted.theta
    found = []
    for j, name in enumerate(before.model.prior.names):
        mean_before, sd_before, mean, sd = (float(value[j]) for value in (old.mean(), old.sd(), new.mean(), new.sd()))
        shift, ratio = (mean - mean_before) / sd_before, sd / sd_before
        found.append(Moved(name, mean_before, sd_before, mean, sd, shift, ratio, total_variation(old, new, j)))
    return found


def total_variation(first: ThetaPosterior, second: ThetaPosterior, parameter: int) -> float:
    """½∫|p − q| of one parameter's two densities; it is the same in θ̃, where both are smooth."""
    both = [
        (q.means[:, parameter], q.covariances[:, parameter, parameter].sqrt(), q.log_weights) for q in (first, second)
    ]
    low = min(float((mean - REACH * sd).min()) for mean, sd, _ in both)
    high = max(float((mean + REACH * sd).max()) for mean, sd, _ in both)
    narrowest = min(float(sd.min()) for _, sd, _ in both)
    nodes = torch.linspace(low, high, min(max(int(50 * (high - low) / narrowest), 100), NODES), dtype=torch.float64)

    def density(mean: Tensor, sd: Tensor, log_weights: Tensor) -> Tensor:
        white = (nodes[:, None] - mean) / sd
        return torch.exp(log_weights - 0.5 * white.square() - sd.log()).sum(-1) / math.sqrt(2 * math.pi)

    apart = (density(*both[0]) - density(*both[1])).abs()
    return min(1.0, 0.5 * float(torch.trapezoid(apart, nodes)))
