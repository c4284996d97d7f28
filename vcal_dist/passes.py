"""Passes over all rows, each once: the runs' compression, and the closing Gauss–Newton iterations.

Both are natural-gradient steps of size one. They take blocks of rows as an iterable (or a function that gives one
anew for every pass), sum float64 statistics over blocks and processes, and hold nothing that grows with the rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from vcal_dist.batches import Observations, Runs
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collapsed import Gram, log_evidence, posterior
from vcal_dist.collective import sum_over_ranks
from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Arrow, Frame, FullRank
from vcal_dist.gp import Draw
from vcal_dist.likelihoods import Gaussian
from vcal_dist.natural import Statistics, Step, natural_step, observations_statistics, runs_statistics
from vcal_dist.objective import CollapsedTheta, Key, Samples, observations_gram, runs_gram

GRAM_NUMBERS = 4_000_000  # held at once: 32 MB
HIDDEN_SAMPLES = 8  # of hidden layers in a pass
PATIENCE = 5  # steps that hold before a longer one is tried again
SETTLED = 1e-6  # nats
SMALLEST_STEP = 1 / 64  # of Gauss–Newton: below, no step raises the bound


class Compressed(NamedTuple):
    """The runs as what they say of η's weights, N(m, RRᵀ), and the log of their evidence."""

    frame: Frame
    log_evidence: Tensor  # with hidden layers, its lower bound but for their KL


class Closing(NamedTuple):
    """How the closing iterations ended."""

    log_evidence: float  # of y near this mode: Laplace's in θ̃, a bound (exact for Gaussian noise) in w; or of z
    iterations: int
    damped: int
    converged: bool


@torch.no_grad()
def compress(model: CalibrationModel, blocks: Iterable[Runs], *, key: Key = (0,)) -> Compressed:
    """p(W_η | all runs), exactly, from one pass under Gaussian noise.

    Hidden layers enter by the mean over samples: the result is then the best q(W_η) given q of the hidden layers.
    """
    draw = Draw(key, HIDDEN_SAMPLES)
    total: Gram | None = None
    jacobian = torch.zeros((), dtype=torch.float64, device=model.kappa.device)
    for runs in blocks:
        sums = runs_gram(model, runs, draw)
        total = sums if total is None else total.plus(sums)
        jacobian += (runs.log_jacobian.sum(-1) * runs.weight).sum()
    if total is None:
        raise ModelError("there are no runs to compress; the emulator needs at least one")
    *parts, jacobian = sum_over_ranks([*total, jacobian])
    total = Gram(*parts)
    return Compressed(Frame(*posterior(total)), log_evidence(total).sum() + jacobian)


def settle(
    model: CalibrationModel, q: FullRank, blocks: Callable[[], Iterable[Runs]], *, iterations: int = 30
) -> Closing:
    """q(W_η) for any likelihood of runs: natural-gradient steps of size one over all runs until they stand still."""
    samples = Samples(1, HIDDEN_SAMPLES)

    def statistics() -> Statistics:
        with torch.no_grad():
            return _sum(runs_statistics(model, q, runs, samples=samples) for runs in blocks())

    def bound(found: Statistics) -> float:
        return float(found.log_likelihood - q.kl())

    return _climb(model, q, statistics, bound, iterations=iterations, tolerance=SETTLED, relax=False)


def close(
    model: CalibrationModel,
    q: FullRank,
    blocks: Callable[[], Iterable[Observations]],
    *,
    iterations: int = 30,
    tolerance: float = 1e-3,
    key: Key = (0,),
) -> Closing:
    """q(θ̃, w) given all observations and, through q's frame, all runs: Gauss–Newton, f linearised at the mean of θ̃.

    An iteration has two passes. The first finds w at θ̃ as it is, exactly where the noise is Gaussian and f linear in
    w; the second moves θ̃ and w together. So it climbs log p(y, θ̃) with w integrated out. The posterior is exact where
    f is linear in θ̃. (Steps on the ELBO itself, with θ̃ spread out, end in a θ̃ that is too narrow where f is curved:
    weights that are linear in θ̃ cannot follow.)
    """
    hidden = HIDDEN_SAMPLES if model.random or model.kind == "general" else 1

    def statistics() -> Statistics:
        theta = q.theta_mean.expand(hidden, -1)
        return _sum(observations_statistics(model, q, block, key=key, theta=theta) for block in blocks())

    def log_joint(found: Statistics) -> float:
        return float(found.log_likelihood - q.kl_weights() - 0.5 * q.theta_mean.square().sum())

    closing = _climb(model, q, statistics, log_joint, iterations=iterations, tolerance=tolerance, relax=True)
    return closing._replace(log_evidence=_laplace(closing.log_evidence, q))


def _climb(
    model: CalibrationModel,
    q: FullRank,
    statistics: Callable[[], Statistics],
    height: Callable[[Statistics], float],
    *,
    iterations: int,
    tolerance: float,
    relax: bool,
) -> Closing:
    """Steps of size one until the height stands still; with `relax`, the weights are found anew before each is judged.

    A step that lowers it by more than the tolerance (nats, and what the features' precision leaves uncertain of the
    value) is taken back and halved. Converged: a step promised less than the tolerance, and moved it by less.
    """
    kept: tuple[tuple[Tensor, Tensor, Arrow], Statistics] | None = None
    step = Step(1.0, 0, math.inf)
    best, rho, damped, held = -math.inf, 1.0, 0, 0
    for iteration in range(1, iterations + 1):
        if relax:
            damped += natural_step(q, statistics(), 1.0, hold_theta=True).damped
        found = statistics()
        now = height(found)
        if kept is None and not math.isfinite(now):
            raise ModelError(
                f"the bound is {now} at the start of a pass over all rows; check the outputs for outliers, "
                "or lower the learning rates"
            )
        slack = tolerance + torch.finfo(model.dtype).eps * abs(now)
        if kept is not None and not now > best - slack:
            rho, damped, held = rho / 2, damped + 1, 0
            q.move(*kept[0])
            if rho < SMALLEST_STEP:
                return Closing(best, iteration, damped, converged=False)
        else:
            converged = abs(now - best) < slack and step.decrement < slack
            best, kept, held = now, ((q.theta_mean, q.mean, q.precision), found), held + 1
            if converged or iteration == iterations:
                return Closing(best, iteration, damped, converged)
            if held % PATIENCE == 0:  # sooner, every other step would be taken back where f is curved
                rho = min(1.0, 2 * rho)
        step = natural_step(q, kept[1], rho)
        damped += step.damped
    assert kept is not None
    q.move(*kept[0])  # the last step was never judged
    return Closing(best, iterations, damped, converged=False)


def _laplace(log_joint: float, q: FullRank) -> float:
    """log ∫ p(y, θ̃) dθ̃ around the mean: p(y, θ̃ = μ) but for (2π)^(−d2/2), times √|Σ_θθ|."""
    return log_joint + float(torch.linalg.slogdet(q.theta_root).logabsdet)


@torch.no_grad()
def collapsed_log_density(
    model: CalibrationModel, frame: Frame, blocks: Callable[[], Iterable[Observations]], theta: Tensor
) -> Tensor:
    """log p(y | θ̃, runs) + log p(θ̃) at points θ̃ (P, d2), every weight integrated out: (P,).

    Exact where hidden layers and g are absent (`is_exact`), up to the Jacobian of the scaling, a constant.
    """
    values = []
    for some in theta.split(max(1, GRAM_NUMBERS // (model.outputs * model.width**2))):
        total: Gram | None = None
        for block in blocks():
            sums = observations_gram(model, CollapsedTheta(model, frame, some), block, None)
            total = sums if total is None else total.plus(sums)
        if total is None:
            raise ModelError("there are no observations; θ needs at least 1")
        values.append(log_evidence(Gram(*sum_over_ranks(total))).sum(-1))  # (S,)
    return torch.cat(values) - 0.5 * theta.square().sum(-1) - 0.5 * theta.shape[-1] * math.log(2 * math.pi)


def is_exact(model: CalibrationModel) -> bool:
    """Whether all weights integrate out: Gaussian noise, no hidden layers, no g."""
    gaussian = isinstance(model.likelihood_z, Gaussian) and isinstance(model.likelihood_y, Gaussian)
    return gaussian and not model.random and model.kind != "general"


def pin(
    model: CalibrationModel,
    q: FullRank,
    blocks: Callable[[], Iterable[Observations]],
    theta: Tensor,
    covariance: Tensor,
) -> None:
    """Gives q the marginal N(theta, covariance) of θ̃, and w given θ̃ from the observations, linearised at its mean."""
    q.move(theta.clone(), q.mean, q.precision)
    for _ in range(2):  # the slopes in θ̃ belong to the weights that the first pass finds
        found = _sum(observations_statistics(model, q, block, theta=theta.unsqueeze(0)) for block in blocks())
        natural_step(q, found, 1.0, hold_theta=True)
    C, gain = q.precision.cross, q.factors.gain
    A = torch.linalg.inv(covariance) + (C @ gain).sum(0)
    q.move(q.theta_mean, q.mean, q.precision._replace(theta=0.5 * (A + A.mT)))


def _sum(parts: Iterable[Statistics]) -> Statistics:
    """Over blocks and processes."""
    total: Statistics | None = None
    for part in parts:
        part = part._replace(log_likelihood=part.log_likelihood.detach())
        total = part if total is None else total.plus(part)
    if total is None:
        raise ModelError("there are no rows to learn from; give at least one run and one observation")
    (log_likelihood,) = sum_over_ranks([total.log_likelihood])
    return total.over_ranks()._replace(log_likelihood=log_likelihood)
