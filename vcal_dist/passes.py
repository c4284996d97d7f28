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
from torch.quasirandom import SobolEngine

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
SMALLEST_STEP = 1 / 64  # of Gauss–Newton: below, no step raises the bound


class Compressed(NamedTuple):
    """The runs as what they say of η's weights, N(m, RRᵀ), and the log of their evidence."""

    frame: Frame
    log_evidence: Tensor  # with hidden layers, its lower bound but for their KL


class Closing(NamedTuple):
    """How the closing iterations ended."""

    bound: float  # log p(runs) is not in it
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
        if sums.G.ndim == 4:  # (S, K, M, M)
            sums = sums._replace(G=sums.G.mean(0), b=sums.b.mean(0))
        total = sums if total is None else total.plus(sums)
        jacobian += (runs.log_jacobian.sum(-1) * runs.weight).sum()
    if total is None:
        raise ModelError("there are no runs to compress; the emulator needs at least one")
    *parts, jacobian = sum_over_ranks([*total, jacobian])
    total = Gram(*parts)
    return Compressed(Frame(*posterior(total)), log_evidence(total).sum() + jacobian)


def settle(model: CalibrationModel, q: FullRank, blocks: Callable[[], Iterable[Runs]], *, iterations: int = 20) -> Step:
    """q(W_η) for any likelihood of runs: natural-gradient steps of size one over all runs until they stand still."""
    step = Step(1.0, 0, float("inf"))
    for _ in range(iterations):
        with torch.no_grad():
            statistics = _sum(runs_statistics(model, q, runs, samples=Samples(1, HIDDEN_SAMPLES)) for runs in blocks())
        step = natural_step(q, statistics, 1.0)
        if step.decrement < 1e-8:
            break
    return step


def close(
    model: CalibrationModel,
    q: FullRank,
    blocks: Callable[[], Iterable[Observations]],
    *,
    points: int = 0,
    iterations: int = 30,
    tolerance: float | None = None,
    key: Key = (0,),
    seed: int = 0,
) -> Closing:
    """q(θ̃, w) given all observations and, through q's frame, all runs: Gauss–Newton until the bound stands still.

    Without `points`, f is linearised at the mean of θ̃ (the exact posterior where f is linear in θ̃). With them, the
    bound and its gradient are means over that many fixed points of q(θ̃), which follows what is curved.

    A step that lowers the bound by more than the tolerance is taken back and halved. Converged: a step promised less
    than the tolerance, and moved the bound by less. It is 10⁻³ nats at the mean; over points, where the curvature of
    f that Λ leaves out keeps the last digits from settling, 10⁻², a seventh of a standard deviation.
    """
    tolerance = tolerance or (1e-2 if points else 1e-3)
    hidden = HIDDEN_SAMPLES if model.random or model.kind == "general" else 1
    noise = standard_points(points, q.theta_dim, seed).to(q.theta_mean.device)
    kept: tuple[Tensor, Tensor, Arrow] | None = None
    statistics: Statistics | None = None
    step = Step(1.0, 0, float("inf"))
    bound, rho, damped = -float("inf"), 1.0, 0
    for iteration in range(1, iterations + 1):
        theta = q.theta(noise).repeat_interleave(hidden, 0)
        found = _sum(observations_statistics(model, q, block, key=key, theta=theta) for block in blocks())
        now = float(found.log_likelihood - q.kl())
        if kept is not None and not now > bound - tolerance:
            rho, damped = rho / 2, damped + 1
            q.move(*kept)
            if rho < SMALLEST_STEP:
                return Closing(bound, iteration, damped, converged=False)
        else:
            if abs(now - bound) < tolerance and step.decrement < tolerance:
                return Closing(now, iteration, damped, converged=True)
            statistics, bound = found, now
            kept = (q.theta_mean, q.mean, q.precision)
        assert statistics is not None
        step = natural_step(q, statistics, rho)
        damped += step.damped
    return Closing(bound, iterations, damped, converged=False)


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
        statistics = _sum(observations_statistics(model, q, block, theta=theta.unsqueeze(0)) for block in blocks())
        prior = q.prior()
        P = prior.weights + statistics.curvature.weights
        gradient = q.prior_gradient()[1] + statistics.gradient_weights
        mean = q.mean + torch.linalg.solve(P, gradient.unsqueeze(-1)).squeeze(-1)
        C = statistics.curvature.cross
        A = torch.linalg.inv(covariance) + (C @ torch.linalg.solve(P, C.mT)).sum(0)
        q.move(q.theta_mean, mean, Arrow(0.5 * (A + A.mT), C, P))


def standard_points(count: int, dim: int, seed: int) -> Tensor:
    """Points (count, dim) that stand for N(0, I): symmetric, with unit covariance; the origin alone for count 0."""
    if count == 0 or dim == 0:
        return torch.zeros(1, dim, dtype=torch.float64)
    half = (count + 1) // 2
    if dim == 1:  # the middles of equal slices
        uniform = 0.5 + (torch.arange(half, dtype=torch.float64) + 0.5).unsqueeze(-1) / (2 * half)
    else:
        uniform = SobolEngine(dim, scramble=True, seed=seed).draw(half, dtype=torch.float64)
    points = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
    points = torch.cat([points, -points])
    if len(points) >= 2 * dim:
        lower = torch.linalg.cholesky(points.mT @ points / len(points))
        points = torch.linalg.solve_triangular(lower, points.mT, upper=False).mT
    return points


def _sum(parts: Iterable[Statistics]) -> Statistics:
    """Over blocks and processes."""
    total: Statistics | None = None
    for part in parts:
        part = part._replace(log_likelihood=part.log_likelihood.detach())
        total = part if total is None else total.plus(part)
    if total is None:
        raise ModelError("there are no rows to learn from; give at least one run and one observation")
    return total.over_ranks()
