"""The statistics of observations under Gaussian noise in closed form, for passes over all rows.

The same numbers as `natural.observations_statistics` for f = κη + δ, at half the cost: with Gaussian noise the
spread of the weights enters the bound only as tr(Σ G), G = Σ pψψᵀ being at hand, and its slope in θ̃ only through η's
features. Nothing is learned from a pass but q, so there is no graph for hyperparameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vcal_dist.batches import Observations
from vcal_dist.calibration import CalibrationModel, join
from vcal_dist.fullrank import Arrow, FullRank
from vcal_dist.gp import Draw
from vcal_dist.likelihoods import Gaussian
from vcal_dist.natural import Statistics, flat, unit_slope
from vcal_dist.objective import Key
from vcal_dist.quadrature import LOG_2PI


def is_gaussian(model: CalibrationModel) -> bool:
    """Whether the noise is Gaussian and f linear in all weights."""
    return isinstance(model.likelihood_y, Gaussian) and model.kind != "general"


@torch.no_grad()
def gaussian_statistics(
    model: CalibrationModel, q: FullRank, observations: Observations, theta: Tensor, *, key: Key = (0,)
) -> Statistics:
    """From a block of observations, at given θ̃ (S, d2)."""
    assert isinstance(model.likelihood_y, Gaussian)
    x, y, E = observations.x, observations.y, model.eta.width
    S, draw = len(theta), Draw(key, len(theta), observations.row)
    slope = unit_slope(model, theta).unsqueeze(-2)  # (S, 1, d2)
    mean_weights = q.mean_given(theta)  # (S, K, D)
    with torch.enable_grad():
        unit = model.rows_of_theta(theta, len(x)).detach().contiguous().requires_grad_()
        phi_eta = model.phi_eta(x, unit, draw)  # (S, B, E)
    psi = join(phi_eta.double() * model.kappa, None if model.delta is None else model.delta(x, draw))  # (S, B, D)
    precision = model.likelihood_y.precision(y, observations.noise, model.residual_variance())  # (B, K)
    known, weighted = precision > 0, precision * observations.weight.unsqueeze(-1)
    residual = torch.where(known, y - psi @ mean_weights.mT, 0.0)  # (S, B, K)
    a = weighted * residual / S
    log_density = torch.where(known, 0.5 * precision.log() - 0.5 * LOG_2PI, 0.0) + observations.log_jacobian
    ell = (log_density.sum(-1) * observations.weight).sum() - 0.5 * (a * residual).sum()
    rows = flat(psi)
    curvature = Arrow(*(torch.zeros_like(part) for part in q.precision))
    gradient_theta, gradient = torch.zeros_like(q.theta_mean), torch.zeros_like(q.mean)
    for k in range(q.outputs):
        p, a_k = (weighted[:, k] / S).expand(S, -1), a[..., k]  # (S, B)
        Sigma = q.raw_root[k] @ q.raw_root[k].mT  # of w given θ̃
        scaled = rows * p.reshape(-1, 1)
        G = rows.mT @ scaled
        by_theta = (
            _slope(phi_eta, unit, (model.kappa * mean_weights[:, k, :E]).unsqueeze(-2).expand_as(phi_eta)) * slope
        )
        # ∂ℓ/∂φ_η = κ(a·w_η − p·(Σψ)_η)
        by_features = a_k.unsqueeze(-1) * mean_weights[:, k, None, :E] - p.unsqueeze(-1) * (psi @ Sigma[:, :E])
        gradient_theta += (_slope(phi_eta, unit, model.kappa * by_features) * slope).sum((0, 1))
        J, T = flat(by_theta), q.frame_root[k]
        curvature.weights[k] = T.mT @ G @ T
        curvature.cross[k] = (J.mT @ scaled) @ T
        curvature.theta.add_(J.mT @ (J * p.reshape(-1, 1)))
        gradient[k] = T.mT @ (rows.mT @ a_k.reshape(-1))
        inner = q.factors.root[k]  # tr(Σ G) in the frame, where both are of order one
        ell = ell - 0.5 * ((inner @ inner.mT) * curvature.weights[k]).sum()
    return Statistics(curvature, gradient_theta, gradient, ell)


def _slope(phi: Tensor, unit: Tensor, upstream: Tensor) -> Tensor:
    """Σ_m upstream_m ∂φ_m/∂unit for every row, (S, B, d2), in float64."""
    return torch.autograd.grad(phi, unit, upstream.to(phi.dtype), retain_graph=True)[0].double()
