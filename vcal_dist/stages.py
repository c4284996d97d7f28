"""The stages of training: what each reads, what Adam moves in it, and its loss as a function of a batch.

    collapsed   emulator (evidence of batches of runs) · compression · θ̃ and discrepancy (evidence of batches of
                observations) · joint SVI · closing pass
    fullrank    the same with the ELBO and natural gradients in place of evidences: for likelihoods not Gaussian
    meanfield   the paper's four stages, by Adam on the ELBO

A stage knows nothing of loops, devices or files: `vcal_dist.phases` takes its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vcal_dist import gaussian
from vcal_dist.batches import Observations, Runs
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collective import sum_over_ranks, world_size
from vcal_dist.fullrank import Frame, FullRank
from vcal_dist.gp import DeepGP, Draw
from vcal_dist.likelihoods import Gaussian
from vcal_dist.natural import judged_step, natural_step, runs_statistics
from vcal_dist.objective import CollapsedTheta, Key, collapsed_observations, collapsed_runs, elbo
from vcal_dist.plan import Chosen, FitSettings, Totals
from vcal_dist.weights import MeanField

COLLAPSED_SAMPLES = 4  # of hidden layers, at least: weights must fit them all (vcal_dist.objective.over_samples)
Loss = Callable[[Runs | None, Observations | None, int], Tensor]


@dataclass
class Stage:
    """One stage: `loss(runs, observations, step)` is minimised by Adam over `groups`."""

    name: str
    steps: int
    groups: list[dict[str, Any]]
    loss: Loss
    runs: int | None = None  # rows of a global batch; None: the stage reads none
    observations: int | None = None
    learned: nn.Module | None = None  # what it moves beside the model: q, or θ̃ as a point
    natural: bool = False  # whether the loss also moves q, with or without anything for Adam
    counts: dict[str, int] = field(default_factory=dict)  # what the loss counted, such as damped steps


def choose(
    model: CalibrationModel, totals: Totals, settings: FitSettings, name: str, *, runs: bool, observations: bool
) -> Chosen:
    """A stage's settings, with what nobody chose decided by the sizes of model and data."""
    return settings.choose(name, totals, model.eta.width, model.width, runs=runs, observations=observations)


def collapsed_emulator(model: CalibrationModel, totals: Totals, settings: FitSettings, seed: int) -> Stage:
    """η's hyperparameters, frequencies and hidden layers by the evidence of batches of runs."""
    chosen = choose(model, totals, settings, "emulator", runs=True, observations=False)
    samples = max(chosen.samples.hidden, COLLAPSED_SAMPLES)

    def loss(runs: Runs | None, _: Observations | None, step: int) -> Tensor:
        assert runs is not None
        evidence, rows = collapsed_runs(model, runs, Draw((seed, 1, step), samples))
        return -(evidence / rows + (model.eta.log_prior() - model.eta.kl()) / totals.runs)

    return Stage("emulator", chosen.steps, emulator_groups(model, chosen.rate), loss, runs=chosen.runs)


def collapsed_theta(
    model: CalibrationModel, point: CollapsedTheta, totals: Totals, settings: FitSettings, seed: int
) -> Stage:
    """θ̃, the discrepancy's hyperparameters and σ_y by the evidence of batches of observations; η stays."""
    chosen = choose(model, totals, settings, "theta", runs=False, observations=True)
    samples = max(chosen.samples.hidden, COLLAPSED_SAMPLES)

    def loss(_: Runs | None, observations: Observations | None, step: int) -> Tensor:
        assert observations is not None
        evidence, rows = collapsed_observations(model, point, observations, Draw((seed, 3, step), samples))
        prior = point.log_prior() + model.log_prior_of_nature()
        if model.delta is not None:
            prior = prior - model.delta.kl()
        return -(evidence / rows + prior / totals.observations)

    groups = _groups((_of_nature(model), settings.discrepancy_rate), (_trainable(point), chosen.rate))
    return Stage("theta", chosen.steps, groups, loss, observations=chosen.observations, learned=point)


def natural_stage(
    chosen: Chosen,
    model: CalibrationModel,
    q: FullRank,
    totals: Totals,
    seed: int,
    *,
    groups: list[dict[str, Any]],
    rho: float,
    settled: bool = False,
) -> Stage:
    """q by natural gradients, hyperparameters by Adam, both on the ELBO of batches of runs, observations or both.

    The step size falls as 1/(step + 1), a running mean over batches, down to `rho`; a stage that starts `settled` has
    it from the first step. Under noise that is not Gaussian a step must not lower the bound of its batch.
    """
    counts = {"damped": 0}
    runs, observations = chosen.runs is not None, chosen.observations is not None
    samples = chosen.samples
    used = [model.likelihood_z] * runs + [model.likelihood_y] * observations
    judged = not all(isinstance(likelihood, Gaussian) for likelihood in used)

    def loss(of_runs: Runs | None, of_observations: Observations | None, step: int) -> Tensor:
        key: Key = (seed, 4, step)
        scale_runs, scale_observations = scales(totals, of_runs, of_observations)
        parts = []
        if of_runs is not None:
            parts.append(runs_statistics(model, q, of_runs, key=key, samples=samples).scaled(scale_runs))
        if of_observations is not None:
            found = gaussian.statistics(model, q, of_observations, key=key, samples=samples)
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
                samples=samples,
            )
            (total,) = sum_over_ranks([likelihood.runs + likelihood.observations])
            return float(total - likelihood.kl)

        kl = q.kl()
        size = rho if settled else max(rho, 1 / (step + 1))
        if judged:
            counts["damped"] += judged_step(q, statistics.over_ranks(), size, bound).damped
        else:
            counts["damped"] += natural_step(q, statistics.over_ranks(), size).damped
        value = world_size() * statistics.log_likelihood - kl + model.log_prior() - model.kl()
        return -value / (totals.runs * runs + totals.observations * observations)

    return Stage(
        chosen.name,
        chosen.steps,
        groups,
        loss,
        runs=chosen.runs,
        observations=chosen.observations,
        learned=q,
        natural=True,
        counts=counts,
    )


def natural_emulator(model: CalibrationModel, q: FullRank, totals: Totals, settings: FitSettings, seed: int) -> Stage:
    """η and its weights by the ELBO of batches of runs."""
    chosen = choose(model, totals, settings, "emulator", runs=True, observations=False)
    groups = emulator_groups(model, chosen.rate)
    return natural_stage(chosen, model, q, totals, seed, groups=groups, rho=settings.rho)


def natural_theta(model: CalibrationModel, q: FullRank, totals: Totals, settings: FitSettings, seed: int) -> Stage:
    """q(θ̃, w), the discrepancy and σ_y by the ELBO of batches of observations."""
    chosen = choose(model, totals, settings, "theta", runs=False, observations=True)
    groups = nature_groups(model, settings.discrepancy_rate)
    return natural_stage(chosen, model, q, totals, seed, groups=groups, rho=settings.rho)


def scales(totals: Totals, runs: Runs | None, observations: Observations | None) -> tuple[float, float]:
    """N/B and n/b, with the rows of the global batches."""
    weights = [
        torch.zeros((), dtype=torch.float64) if part is None else part.weight.sum() for part in (runs, observations)
    ]
    device = next(part.weight.device for part in (runs, observations) if part is not None)
    rows = sum_over_ranks([weight.to(device) for weight in weights])
    return totals.runs / max(float(rows[0]), 1.0), totals.observations / max(float(rows[1]), 1.0)


def joint_stage(model: CalibrationModel, q: FullRank, totals: Totals, settings: FitSettings, seed: int) -> Stage:
    """Mini-batch SVI of the ELBO on q(θ̃, w), with a small rate for the hyperparameters.

    The runs are in q's prior, exactly, as long as η's features stay. With `free_emulator` these move too: batches of
    runs come along, and q must be one whose prior is N(0, I) (`freed`).
    """
    chosen = choose(model, totals, settings, "joint", runs=settings.free_emulator, observations=True)
    groups = nature_groups(model, chosen.rate)
    if settings.free_emulator:
        groups = [*emulator_groups(model, chosen.rate), *groups]
    return natural_stage(chosen, model, q, totals, seed, groups=groups, rho=settings.rho, settled=True)


def freed(q: FullRank) -> FullRank:
    """The same Gaussian in the same frame, with N(0, I) as its prior again: what runs say comes from batches."""
    free = FullRank(q.theta_dim, q.outputs, q.width, frame=Frame(q.frame_mean, q.frame_root))
    free.move(q.theta_mean, q.mean, q.precision, q.factors)
    return free


def meanfield_stages(
    model: CalibrationModel, q: MeanField, totals: Totals, settings: FitSettings, seed: int
) -> Iterable[Stage]:
    """The paper's four stages: runs alone, then everything; in each first q, then all parameters at a smaller rate."""
    for number in range(4):
        yield meanfield_stage(number, model, q, totals, settings, seed)


def meanfield_stage(
    number: int, model: CalibrationModel, q: MeanField, totals: Totals, settings: FitSettings, seed: int
) -> Stage:
    """One of the paper's four stages, by Adam on the ELBO."""
    emulator = _trainable(model.eta, model.likelihood_z)
    stacks = [stack for stack in (model.eta, model.delta) if stack is not None]
    hidden = _trainable(
        *(layer.weights for stack in stacks if isinstance(stack, DeepGP) for layer in stack.hidden)
    )  # these are in q as well
    name, both, hyperparameters = [
        ("emulator_weights", False, hidden),
        ("emulator", False, emulator),
        ("weights_and_theta", True, hidden),
        ("everything", True, [*emulator, *_of_nature(model)]),
    ][number]
    chosen = choose(model, totals, settings, name, runs=True, observations=both)

    def loss(runs: Runs | None, observations: Observations | None, step: int) -> Tensor:
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
            samples=chosen.samples,
        )
        return -(bound.total + model.log_prior()) / (totals.runs + totals.observations * both)

    groups = _groups((_trainable(q), chosen.rate), (hyperparameters, chosen.rate))
    return Stage(name, chosen.steps, groups, loss, runs=chosen.runs, observations=chosen.observations, learned=q)


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
