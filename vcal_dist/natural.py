"""Natural-gradient steps of the joint Gaussian q(θ̃, w), for any likelihood.

With ℓ_i the expected log likelihood of row i, a_i = ∂ℓ_i/∂mean_i and c_i = ∂ℓ_i/∂var_i (one pass backwards), rows
J_i = [∂f/∂θ̃, (∂f/∂η)·φ_η, φ_δ], and sums scaled by N/B (runs) and n/b (observations), the step of size ρ is

    Λ ← (1 − ρ)Λ + ρ(Λ_prior − 2 Σ c_i J_iJ_iᵀ),        μ ← μ + ρ Λ⁻¹ ∇_μ ELBO.

For weights alone (J_i = φ_i) it is the natural gradient itself, h ← (1 − ρ)h + ρ(h_prior + Σ (a_i − 2c_i φ_iᵀμ)φ_i),
and for Gaussian noise with ρ = 1 the exact posterior. Through θ̃ and g it is generalised Gauss–Newton: the curvature
of f is left out of Λ, while the gradient is exact. For several outputs under g, entries between the outputs are left
out of Λ too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from vcal_dist.batches import Observations, Runs
from vcal_dist.calibration import CalibrationModel, join
from vcal_dist.collective import sum_over_ranks
from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Arrow, FullRank, factorise
from vcal_dist.gp import Draw
from vcal_dist.objective import Key, Samples, expected_y, sample_theta, weigh

HALVINGS = 30  # of a step that would lose positive definiteness, before it is left out
LONGEST_STEP = 1.0  # of any θ̃, in prior standard deviations: beyond, the linearisation means nothing


class Statistics(NamedTuple):
    """What rows add to the precision and to the gradient, in q's frame, and their expected log likelihood.

    `log_likelihood` keeps its graph, for the hyperparameters; the others are numbers.
    """

    curvature: Arrow  # −2 Σ c JJᵀ
    gradient_theta: Tensor  # (d2,)
    gradient_weights: Tensor  # (K, D)
    log_likelihood: Tensor

    def scaled(self, factor: float) -> Statistics:
        return Statistics(Arrow(*(part * factor for part in self.curvature)), *(part * factor for part in self[1:]))

    def plus(self, other: Statistics) -> Statistics:
        return Statistics(
            Arrow(*(mine + its for mine, its in zip(self.curvature, other.curvature, strict=True))),
            *(mine + its for mine, its in zip(self[1:], other[1:], strict=True)),
        )

    def over_ranks(self) -> Statistics:
        """The sums over all processes, in one call. The log likelihood stays this process' own: it has a graph."""
        parts = sum_over_ranks([*self.curvature, self.gradient_theta, self.gradient_weights])
        return Statistics(Arrow(*parts[:3]), parts[3], parts[4], self.log_likelihood)


class Step(NamedTuple):
    """How a step went."""

    size: float  # ρ after damping; 0 where the step was left out
    damped: int  # halvings that positive definiteness asked for
    decrement: float  # ½ gᵀΛ⁻¹g, the gain in the bound that the step promised, in nats


def runs_statistics(
    model: CalibrationModel,
    q: FullRank,
    runs: Runs,
    *,
    key: Key = (0,),
    samples: Samples = Samples(),  # noqa: B008
) -> Statistics:
    """From a batch of runs, which know nothing of θ̃."""
    phi = model.eta(runs.u, Draw(key, samples.hidden, runs.row))
    mean, var = q.moments(phi, model.columns_eta)

    def expected(mean: Tensor, var: Tensor) -> Tensor:
        return weigh(model.likelihood_z.expected_log_prob(runs.z, mean, var), runs)

    with torch.enable_grad():
        leaves = mean.detach().requires_grad_(), var.detach().requires_grad_()
        a, c = torch.autograd.grad(expected(*leaves), leaves)
    with torch.no_grad():
        M = phi.shape[-1]
        curvature, gradient = _no_curvature(q), torch.zeros_like(q.mean)
        for k in range(q.outputs):
            rows = flat(phi.double()) @ q.frame_root[k, :M, :M]
            curvature.weights[k, :M, :M] = rows.mT @ (rows * (-2 * flat(c[..., k : k + 1])))
            gradient[k, :M] = (rows * flat(a[..., k : k + 1])).sum(0)
    return Statistics(curvature, torch.zeros_like(q.theta_mean), gradient, expected(mean, var))


def observations_statistics(
    model: CalibrationModel,
    q: FullRank,
    observations: Observations,
    *,
    key: Key = (0,),
    samples: Samples = Samples(),  # noqa: B008
    theta: Tensor | None = None,
) -> Statistics:
    """From a batch of observations, at samples of θ̃ (drawn here, unless they are given)."""
    theta = sample_theta(q, samples, key) if theta is None else theta
    slope = unit_slope(model, theta)  # (S, d2)
    with torch.enable_grad():
        unit = model.rows_of_theta(theta, len(observations.x)).detach().contiguous().requires_grad_()
        f = model.predict(q, observations.x, theta, unit, Draw(key, len(theta), observations.row))
        ell = weigh(expected_y(model, observations, f), observations)
        a, c, by_unit = torch.autograd.grad(ell, [f.mean, f.var, unit], retain_graph=True)
        # Under g, η reaches the bound through the mean and the variance of g both.
        by_eta = None if f.eta is None else torch.autograd.grad(ell, f.eta, retain_graph=True)[0]
        jacobians = [_row_jacobian(f.mean[..., k], unit, f.eta, k) for k in range(q.outputs)]
    with torch.no_grad():
        curvature, gradient = _no_curvature(q), torch.zeros_like(q.mean)
        phi_eta = f.phi_eta.double()
        phi_delta = None if f.phi_delta is None else f.phi_delta.double()
        for k, (by_theta, link) in enumerate(jacobians):
            a_k, c_k = flat(a[..., k : k + 1]), flat(c[..., k : k + 1])
            design = flat(join(phi_eta * (model.kappa if link is None else link.unsqueeze(-1)), phi_delta))  # ∂f/∂w
            J_theta = flat(by_theta.double() * slope.unsqueeze(-2))  # ∂f/∂θ̃ (SB, d2)
            T, weighted = q.frame_root[k], design * (-2 * c_k)  # (D, D), (SB, D)
            curvature.weights[k] = T.mT @ (design.mT @ weighted) @ T
            curvature.cross[k] = (J_theta.mT @ weighted) @ T
            curvature.theta.add_(J_theta.mT @ (J_theta * (-2 * c_k)))
            if by_eta is None:
                by_weights = design.mT @ a_k
            else:
                assert phi_delta is not None
                by_weights = flat(join(phi_eta * by_eta[..., k : k + 1], phi_delta * a[..., k : k + 1])).sum(0)
            gradient[k] = T.mT @ by_weights.reshape(-1)
        gradient_theta = (by_unit.double().sum(-2) * slope).sum(0)
    return Statistics(curvature, gradient_theta, gradient, ell)


def natural_step(q: FullRank, statistics: Statistics, rho: float, *, hold_theta: bool = False) -> Step:
    """Moves q by a step of size ρ; the mean of θ̃ stays where it is with `hold_theta`.

    A step that would lose positive definiteness is halved, at last left out, like one that is not finite.
    """
    prior, (prior_theta, prior_weights) = q.prior(), q.prior_gradient()
    target = Arrow(*(mine + its for mine, its in zip(prior, statistics.curvature, strict=True)))
    gradient_theta = prior_theta + statistics.gradient_theta
    gradient_weights = prior_weights + statistics.gradient_weights
    damped = 0
    while (factors := factorise(precision := q.precision.mix(target, rho))) is None:
        rho, damped = rho / 2, damped + 1
        if damped == HALVINGS:
            return Step(0.0, damped, float("nan"))
    if hold_theta:
        theta = torch.zeros_like(gradient_theta)
        weights = torch.cholesky_solve(gradient_weights.unsqueeze(-1), factors.lower).squeeze(-1)
    else:
        theta, weights = factors.solve(gradient_theta, gradient_weights)
    if not bool(theta.isfinite().all() and weights.isfinite().all()):
        return Step(0.0, damped, float("nan"))
    decrement = 0.5 * float(gradient_theta @ theta + (gradient_weights * weights).sum())
    longest = float(theta.abs().max()) * rho if len(theta) else 0.0
    shorten = min(1.0, LONGEST_STEP / max(longest, 1e-300))
    q.move(q.theta_mean + rho * shorten * theta, q.mean + rho * shorten * weights, precision, factors)
    return Step(rho, damped, decrement)


def judged_step(q: FullRank, statistics: Statistics, rho: float, bound: Callable[[], float]) -> Step:
    """A step that does not lower the bound on the same rows: it is taken back and halved until it does not.

    Under Gaussian noise no step of weights does; under others a step from far away can, without end.
    """
    before, start = bound(), (q.theta_mean, q.mean, q.precision)
    damped = 0
    while True:
        step = natural_step(q, statistics, rho)
        damped += step.damped
        if step.size == 0.0 or bound() >= before:
            return step._replace(damped=damped)
        q.move(*start)
        rho, damped = rho / 2, damped + 1
        if damped >= HALVINGS:
            return Step(0.0, damped, float("nan"))


def _row_jacobian(mean: Tensor, unit: Tensor, eta: Tensor | None, k: int) -> tuple[Tensor, Tensor | None]:
    """∂mean_i/∂unit (S, B, d2) of each row, and ∂mean_i/∂η_k (S, B) where η is sampled. Rows are independent."""
    if eta is None:
        return torch.autograd.grad(mean.sum(), unit, retain_graph=True)[0], None
    by_unit, by_eta = torch.autograd.grad(mean.sum(), [unit, eta], retain_graph=True)
    return by_unit, by_eta[..., k]


def unit_slope(model: CalibrationModel, theta: Tensor) -> Tensor:
    """d unit/dθ̃, (S, d2): both are componentwise."""
    with torch.enable_grad():
        leaf = theta.detach().clone().requires_grad_()
        return torch.autograd.grad(model.prior.unit(leaf).sum(), leaf)[0]


def _no_curvature(q: FullRank) -> Arrow:
    return Arrow(*(torch.zeros_like(part) for part in q.precision))


def flat(rows: Tensor) -> Tensor:
    """Samples and rows in one dimension."""
    return rows.reshape(-1, rows.shape[-1])


def flatten(statistics: Statistics) -> list[Tensor]:
    """The parts, as sums over blocks take them."""
    *parts, log_likelihood = statistics[1:]
    return [*statistics.curvature, *parts, log_likelihood.detach()]


def statistics_of(parts: list[Tensor]) -> Statistics:
    """What `flatten` took apart."""
    return Statistics(Arrow(*parts[:3]), *parts[3:])


def summed_statistics(sums: list[Tensor] | None) -> Statistics:
    """Over all processes, in one call."""
    if sums is None:
        raise ModelError("there are no rows to learn from; give at least one run and one observation")
    return statistics_of(sum_over_ranks(sums))
