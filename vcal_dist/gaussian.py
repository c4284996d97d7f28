"""The statistics of observations under Gaussian noise in closed form.

The same numbers as `natural.observations_statistics` for f = κη + δ, at half the cost: everything follows from ψ, the
residuals r and V = ψΣ, Σ being the covariance of w given θ̃,

    ∂ℓ/∂ψ = p(r·w − V),        ∂ℓ/∂p = ½(1/p − r² − ψ·V),

so that autodiff has to pass through the features alone, once, and never through products with D × D matrices. Where
nothing but q is learned, V is needed for η's features only: the sum of pψ·V is tr(Σ G), and G = Σ pψψᵀ is at hand.

A residual that depends on the inputs makes p depend on θ̃. Its slope joins the gradient, and ½(∂ log p/∂θ̃)², what noise
of another size says of θ̃ in the mean, joins the curvature: this, `natural` leaves out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vcal_dist.batches import Observations
from vcal_dist.calibration import CalibrationModel
from vcal_dist.fullrank import Arrow, FullRank
from vcal_dist.gp import Draw
from vcal_dist.likelihoods import Gaussian
from vcal_dist.natural import Statistics, flat, observations_statistics, unit_slope
from vcal_dist.objective import Key, Samples, sample_theta
from vcal_dist.quadrature import LOG_2PI


def statistics(
    model: CalibrationModel,
    q: FullRank,
    observations: Observations,
    *,
    key: Key = (0,),
    samples: Samples = Samples(),  # noqa: B008 - immutable
    theta: Tensor | None = None,
    learn: bool = True,
) -> Statistics:
    """`natural.observations_statistics`, in closed form where there is one; hyperparameters have a graph to `learn`."""
    if not is_gaussian(model):
        return observations_statistics(model, q, observations, key=key, samples=samples, theta=theta)
    theta = sample_theta(q, samples, key) if theta is None else theta
    return gaussian_statistics(model, q, observations, theta, key=key, learn=learn)


def is_gaussian(model: CalibrationModel) -> bool:
    """Whether the noise is Gaussian and f linear in all weights."""
    return isinstance(model.likelihood_y, Gaussian) and model.kind != "general"


def gaussian_statistics(
    model: CalibrationModel, q: FullRank, observations: Observations, theta: Tensor, *, key: Key, learn: bool
) -> Statistics:
    """From a block of observations, at given θ̃ (S, d2)."""
    assert isinstance(model.likelihood_y, Gaussian)
    x, y, E = observations.x, observations.y, model.eta.width
    S, draw = len(theta), Draw(key, len(theta), observations.row)
    with torch.enable_grad():
        unit = model.rows_of_theta(theta, len(x)).detach().contiguous().requires_grad_()
        phi_eta = model.phi_eta(x, unit, draw)  # (S, B, E)
    with torch.set_grad_enabled(learn):
        design = model.design(phi_eta, None if model.delta is None else model.delta(x, draw))  # ψ (S, B, D)
        # (B, K), or (S, B, K) where the residual depends on θ; its own features are not learned from observations
        precision = model.likelihood_y.precision(y, observations.noise, model.residual_variance(phi_eta.detach()))
    with torch.no_grad():
        slope = unit_slope(model, theta).unsqueeze(-2)  # (S, 1, d2)
        psi, p = design.double(), precision.detach()
        weights, rows = q.mean_given(theta), flat(psi)  # (S, K, D), (SB, D)
        known, weight = p > 0, observations.weight.unsqueeze(-1) / S
        residual = torch.where(known, y - psi @ weights.mT, 0.0)  # (S, B, K)
        square = residual.square()  # r² (S, B, K); with `every`, r² + ψ·V
        spread = torch.zeros_like(p.sum())  # else Σ pψ·V
        every = learn or model.varying is not None
        columns = psi.shape[-1] if every else E
        by_design = torch.zeros_like(psi[..., :columns])
        curvature = Arrow(*(torch.zeros_like(part) for part in q.precision))
        gradient_theta, gradient = torch.zeros_like(q.theta_mean), torch.zeros_like(q.mean)
        for k in range(q.outputs):
            p_k = p[..., k : k + 1] * weight  # (B, 1) or (S, B, 1)
            scaled = flat(psi * p_k)
            w = weights[:, k].unsqueeze(-2)  # (S, 1, D)
            V = psi @ (q.raw_root[k] @ q.raw_root[k, :columns].mT)  # (S, B, D) or (S, B, E)
            by_design += p_k * (residual[..., k : k + 1] * w[..., :columns] - V)
            upstream = (model.kappa * w[..., :E]).expand(-1, len(x), -1).to(phi_eta.dtype)
            J, T = flat(_back(phi_eta, unit, upstream) * slope), q.frame_root[k]  # ∂f/∂θ̃ (SB, d2)
            curvature.weights[k] = T.mT @ (rows.mT @ scaled) @ T
            curvature.cross[k] = (J.mT @ scaled) @ T
            curvature.theta.add_(J.mT @ (J.view(S, -1, J.shape[-1]) * p_k).view_as(J))
            gradient[k] = T.mT @ (scaled.mT @ residual[..., k].reshape(-1))
            if every:
                square[..., k] += torch.linalg.vecdot(psi, V)
            else:
                inner = q.factors.root[k]  # in the frame, where both are of order one
                spread += ((inner @ inner.mT) * curvature.weights[k]).sum()
        by_features = (model.kappa * by_design[..., :E]).to(phi_eta.dtype)
        gradient_theta += (_back(phi_eta, unit, by_features) * slope).sum((0, 1))
        log_density = torch.where(known, 0.5 * (p.log() - LOG_2PI), 0.0) + observations.log_jacobian
        ell = ((log_density - 0.5 * p * square) * weight).sum() - 0.5 * spread
        by_precision = torch.where(known, 0.5 * (1 / p - square) * weight, 0.0)  # (S, B, K)
    if model.varying is not None:
        for k in range(q.outputs):
            J = _slope_of_log_precision(model, observations, phi_eta, unit, k) * slope  # ∂ log p/∂θ̃ (S, B, d2)
            gradient_theta += ((by_precision[..., k] * p[..., k]).unsqueeze(-1) * J).sum((0, 1))
            counted = known[..., k : k + 1] * weight  # (S, B, 1)
            curvature.theta.add_(0.5 * flat(J).mT @ flat(J * counted))
    if learn:  # the value of ℓ, with its gradient
        along = (design * by_design.to(design.dtype)).sum(dtype=torch.float64) + (precision * by_precision).sum()
        ell = ell + (along - along.detach())
    return Statistics(curvature, gradient_theta, gradient, ell)


def _slope_of_log_precision(
    model: CalibrationModel, observations: Observations, phi: Tensor, unit: Tensor, k: int
) -> Tensor:
    """∂ log p_k/∂unit for every row (S, B, d2), where the residual depends on θ; 0 where y is missing."""
    assert isinstance(model.likelihood_y, Gaussian)
    with torch.enable_grad():
        p = model.likelihood_y.precision(observations.y, observations.noise, model.residual_variance(phi))[..., k]
        log_p = torch.where(p > 0, p, 1.0).log().sum()
        return torch.autograd.grad(log_p, unit, retain_graph=True)[0].double()


def _back(phi: Tensor, unit: Tensor, upstream: Tensor) -> Tensor:
    """Σ_m upstream_m ∂φ_m/∂unit for every row, (S, B, d2), in float64."""
    return torch.autograd.grad(phi, unit, upstream, retain_graph=True)[0].double()
