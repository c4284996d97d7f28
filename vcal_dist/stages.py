"""The stages of training: what each reads, what Adam moves in it, and its loss as a function of a batch.

    collapsed   emulator (evidence of batches of runs) · compression · θ̃ and discrepancy (evidence of batches of
                observations) · joint SVI · closing pass
    fullrank    the same with the ELBO and natural gradients in place of evidences: for likelihoods not Gaussian
    meanfield   the paper's four stages, by Adam on the ELBO

A stage knows nothing of loops, devices or files: `vcal_dist.fitting` runs it over arrays in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from vcal_dist.batches import Observations, Runs
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collective import sum_over_ranks, world_size
from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Frame, FullRank
from vcal_dist.gp import Draw
from vcal_dist.likelihoods import Gaussian
from vcal_dist.natural import judged_step, natural_step, observations_statistics, runs_statistics
from vcal_dist.objective import (
    CollapsedTheta,
    Key,
    Samples,
    collapsed_observations,
    collapsed_runs,
    elbo,
)
from vcal_dist.weights import MeanField

Family = Literal["collapsed", "fullrank", "meanfield"]
ROWS_PER_WEIGHT, SMALLEST_BATCH = 20, 2048
COLLAPSED_SAMPLES = 4  # of hidden layers, at least: weights must fit them all (vcal_dist.objective.over_samples)
Loss = Callable[[Runs | None, Observations | None, int], Tensor]


class Totals(NamedTuple):
    """N runs and n observations in all, frozen when training starts."""

    runs: int
    observations: int


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How training goes. Rates are Adam's.

    Batches of None have twenty rows for each weight that they decide on, and 2048 at least: a batch's evidence
    over-weighs the prior of the weights, and more so the fewer its rows are.
    """

    weights: Family = "collapsed"
    batch_runs: int | None = None
    batch_observations: int | None = None
    emulator_steps: int = 1000
    emulator_rate: float = 0.03
    theta_steps: int = 250
    theta_rate: float = 0.02
    discrepancy_rate: float = 0.05
    joint_steps: int = 50
    joint_rate: float = 0.002
    free_emulator: bool = False  # whether η's features move in the joint stage
    rho: float = 0.05  # step size of natural gradients once they have settled
    samples: Samples = field(default_factory=lambda: Samples(theta=2, hidden=1))
    screening: int = 4096  # points of θ's prior that are scored
    starts: int = 3  # of them that are followed to a mode each
    evaluations: int = 512  # of the exact posterior of θ̃, which a mixture then follows; fewer for many observations
    meanfield_steps: int = 2000  # in each of the paper's four stages
    meanfield_rate: float = 0.01

    def __post_init__(self) -> None:
        if self.weights not in get_args(Family):
            raise ModelError(f"weights is '{self.weights}'; accepted: {', '.join(get_args(Family))}")
        for name in ("batch_runs", "batch_observations", "screening", "starts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ModelError(f"{name} is {value}; accepted: 1 or more")
        for name in (
            "emulator_steps",
            "theta_steps",
            "joint_steps",
            "meanfield_steps",
            "evaluations",
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ModelError(f"{name} is {value}; accepted: 0 or more")
        for name in ("emulator_rate", "theta_rate", "discrepancy_rate", "joint_rate", "meanfield_rate"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelError(f"{name} is {getattr(self, name)}; accepted: a positive number")
        if not 0 < self.rho <= 1:
            raise ModelError(f"rho is {self.rho}; accepted: above 0 and up to 1")
        if min(self.samples) < 1:
            raise ModelError(f"samples is {tuple(self.samples)}; accepted: 1 or more of θ̃ and of hidden layers")

    def batch(self, chosen: int | None, rows: int, weights: int) -> int:
        """Rows of a global batch."""
        return min(rows, chosen or max(ROWS_PER_WEIGHT * weights, SMALLEST_BATCH))


@dataclass
class Stage:
    """One stage: `loss(runs, observations, step)` is minimised by Adam over `groups`."""

    name: str
    steps: int
    groups: list[dict[str, Any]]
    loss: Loss
    runs: int | None = None  # rows of a global batch; None: the stage reads none
    observations: int | None = None
    natural: bool = False  # whether the loss also moves q, with or without anything for Adam
    counts: dict[str, int] = field(default_factory=dict)  # what the loss counted, such as damped steps


def collapsed_emulator(model: CalibrationModel, totals: Totals, settings: FitSettings, seed: int) -> Stage:
    """η's hyperparameters, frequencies and hidden layers by the evidence of batches of runs."""

    def loss(runs: Runs | None, _: Observations | None, step: int) -> Tensor:
        assert runs is not None
        evidence, rows = collapsed_runs(
            model, runs, Draw((seed, 1, step), max(settings.samples.hidden, COLLAPSED_SAMPLES))
        )
        return -(evidence / rows + (model.eta.log_prior() - model.eta.kl()) / totals.runs)

    groups = _groups((_trainable(model.eta, model.likelihood_z), settings.emulator_rate))
    batch = settings.batch(settings.batch_runs, totals.runs, model.eta.width)
    return Stage("emulator", settings.emulator_steps, groups, loss, runs=batch)


def collapsed_theta(
    model: CalibrationModel, point: CollapsedTheta, totals: Totals, settings: FitSettings, seed: int
) -> Stage:
    """θ̃, the discrepancy's hyperparameters and σ_y by the evidence of batches of observations; η stays."""

    def loss(_: Runs | None, observations: Observations | None, step: int) -> Tensor:
        assert observations is not None
        draw = Draw((seed, 3, step), max(settings.samples.hidden, COLLAPSED_SAMPLES))
        evidence, rows = collapsed_observations(model, point, observations, draw)
        prior = point.log_prior()
        if model.delta is not None:
            prior = prior + model.delta.log_prior() - model.delta.kl()
        return -(evidence / rows + prior / totals.observations)

    groups = _groups((_of_nature(model), settings.discrepancy_rate), (_trainable(point), settings.theta_rate))
    batch = settings.batch(settings.batch_observations, totals.observations, model.width)
    return Stage("theta", settings.theta_steps, groups, loss, observations=batch)


def natural_stage(
    name: str,
    model: CalibrationModel,
    q: FullRank,
    totals: Totals,
    settings: FitSettings,
    seed: int,
    *,
    steps: int,
    groups: list[dict[str, Any]],
    runs: bool,
    observations: bool,
    settled: bool = False,
) -> Stage:
    """q by natural gradients, hyperparameters by Adam, both on the ELBO of batches of runs, observations or both.

    The step size falls as 1/(step + 1), a running mean over batches, down to `rho`; a stage that starts `settled` has
    it from the first step. Under noise that is not Gaussian a step must not lower the bound of its batch.
    """
    counts = {"damped": 0}
    used = [model.likelihood_z] * runs + [model.likelihood_y] * observations
    judged = not all(isinstance(likelihood, Gaussian) for likelihood in used)

    def loss(of_runs: Runs | None, of_observations: Observations | None, step: int) -> Tensor:
        key: Key = (seed, 4, step)
        scale_runs, scale_observations = scales(totals, of_runs, of_observations)
        parts = []
        if of_runs is not None:
            parts.append(runs_statistics(model, q, of_runs, key=key, samples=settings.samples).scaled(scale_runs))
        if of_observations is not None:
            found = observations_statistics(model, q, of_observations, key=key, samples=settings.samples)
            parts.append(found.scaled(scale_observations))
        statistics = parts[0] if len(parts) == 1 else parts[0].plus(parts[1])

        @torch.no_grad()
        def bound() -> float:
            likelihood = elbo(
                model,
                q,
                of_runs,
                of_observations,
                scale_runs=scale_runs,
                scale_observations=scale_observations,
                key=key,
                samples=settings.samples,
            )
            (total,) = sum_over_ranks([likelihood.runs + likelihood.observations])
            return float(total - likelihood.kl)

        kl = q.kl()
        rho = settings.rho if settled else max(settings.rho, 1 / (step + 1))
        if judged:
            counts["damped"] += judged_step(q, statistics.over_ranks(), rho, bound).damped
        else:
            counts["damped"] += natural_step(q, statistics.over_ranks(), rho).damped
        value = world_size() * statistics.log_likelihood - kl + model.log_prior() - model.kl()
        return -value / (totals.runs * runs + totals.observations * observations)

    return Stage(
        name,
        steps,
        groups,
        loss,
        runs=settings.batch(settings.batch_runs, totals.runs, model.eta.width) if runs else None,
        observations=settings.batch(settings.batch_observations, totals.observations, model.width)
        if observations
        else None,
        natural=True,
        counts=counts,
    )


def scales(totals: Totals, runs: Runs | None, observations: Observations | None) -> tuple[float, float]:
    """N/B and n/b, with the rows of the global batches."""
    weights = [
        torch.zeros((), dtype=torch.float64) if part is None else part.weight.sum() for part in (runs, observations)
    ]
    device = next(part.weight.device for part in (runs, observations) if part is not None)
    rows = sum_over_ranks([weight.to(device) for weight in weights])
    return totals.runs / max(float(rows[0]), 1.0), totals.observations / max(float(rows[1]), 1.0)


def joint_stage(
    model: CalibrationModel, q: FullRank, totals: Totals, settings: FitSettings, seed: int
) -> tuple[FullRank, Stage]:
    """Mini-batch SVI of the ELBO on q(θ̃, w), with a small rate for the hyperparameters.

    The runs are in q's prior, exactly, as long as η's features stay. With `free_emulator` these move too: the prior
    is then N(0, I) again, in the same frame, and batches of runs come along.
    """
    groups = nature_groups(model, settings.joint_rate)
    if settings.free_emulator:
        free = FullRank(q.theta_dim, q.outputs, q.width, frame=Frame(q.frame_mean, q.frame_root))
        free.move(q.theta_mean, q.mean, q.precision, q.factors)
        q, groups = free, [*emulator_groups(model, settings.joint_rate), *groups]
    return q, natural_stage(
        "joint",
        model,
        q,
        totals,
        settings,
        seed,
        steps=settings.joint_steps,
        groups=groups,
        runs=settings.free_emulator,
        observations=True,
        settled=True,
    )


def meanfield_stages(
    model: CalibrationModel, q: MeanField, totals: Totals, settings: FitSettings, seed: int
) -> Iterable[Stage]:
    """The paper's four stages: runs alone, then everything; in each first q, then all parameters at a smaller rate."""
    n_runs = settings.batch(settings.batch_runs, totals.runs, model.eta.width)
    n_observations = settings.batch(settings.batch_observations, totals.observations, model.width)
    emulator = _trainable(model.eta, model.likelihood_z)
    stacks = [stack for stack in (model.eta, model.delta) if stack is not None]
    hidden = _trainable(*(layer.weights for stack in stacks for layer in stack.hidden))  # these are in q as well
    for number, (name, both, hyperparameters) in enumerate(
        [
            ("emulator weights", False, hidden),
            ("emulator", False, emulator),
            ("weights and theta", True, hidden),
            ("everything", True, [*emulator, *_of_nature(model)]),
        ]
    ):

        def loss(
            runs: Runs | None, observations: Observations | None, step: int, number: int = number, both: bool = both
        ) -> Tensor:
            assert runs is not None
            scale_runs, scale_observations = scales(totals, runs, observations)
            bound = elbo(
                model,
                q,
                runs,
                observations,
                scale_runs=world_size() * scale_runs,
                scale_observations=world_size() * scale_observations,
                key=(seed, 10 + number, step),
                samples=settings.samples,
            )
            return -(bound.total + model.log_prior()) / (totals.runs + totals.observations * both)

        rate = settings.meanfield_rate * (1.0 if hyperparameters is hidden else 0.3)
        groups = _groups((_trainable(q), rate), (hyperparameters, rate))
        yield Stage(
            name, settings.meanfield_steps, groups, loss, runs=n_runs, observations=n_observations if both else None
        )


def is_collapsible(model: CalibrationModel, settings: FitSettings) -> tuple[bool, bool]:
    """Whether the emulator's and the observations' stage can integrate weights out: both, under Gaussian noise."""
    collapsed = settings.weights == "collapsed"
    return (
        collapsed and isinstance(model.likelihood_z, Gaussian),
        collapsed and isinstance(model.likelihood_y, Gaussian),
    )


def emulator_groups(model: CalibrationModel, rate: float) -> list[dict[str, Any]]:
    """Adam's groups for what belongs to the runs."""
    return _groups((_trainable(model.eta, model.likelihood_z), rate))


def nature_groups(model: CalibrationModel, rate: float) -> list[dict[str, Any]]:
    """Adam's groups for what belongs to the observations."""
    return _groups((_of_nature(model), rate))


def _of_nature(model: CalibrationModel) -> list[nn.Parameter]:
    parts: list[nn.Module] = [model.likelihood_y]
    if model.delta is not None:
        parts.append(model.delta)
    kappa = [model.kappa] if isinstance(model.kappa, nn.Parameter) and model.kappa.requires_grad else []
    return [*_trainable(*parts), *kappa]


def _trainable(*modules: nn.Module) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters() if p.requires_grad and p.numel()]


def _groups(*parts: tuple[list[nn.Parameter], float]) -> list[dict[str, Any]]:
    return [{"params": parameters, "lr": rate} for parameters, rate in parts if parameters]
