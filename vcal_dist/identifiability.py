"""How far θ and the discrepancy make up for each other: what knowing δ would tell of θ (Kennedy and O'Hagan 2001).

Where the simulator can do by a change of θ what δ does too, the observations know only their sum. Brynjarsdóttir and
O'Hagan (2014) and Tuo and Wu (2015) show what follows; here it is measured in the posterior that was found. Of each
parameter,

    R²_j = 1 − Var(θ̃_j | W_δ) / Var(θ̃_j),        VIF_j = 1 / (1 − R²_j),

is the share of its variance that goes with δ, and the variance inflation factor of a regression with so much in common.
Directions of W_δ that no observation sees are independent of θ̃ in the posterior, and so count for nothing: R² is also
that of δ's values at the observations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vcal_dist.fullrank import FullRank


def shared_with_discrepancy(components: Sequence[FullRank], log_weights: Tensor, columns_eta: slice) -> Tensor:
    """R² of every parameter, (d2,), δ's columns of w being those after η's; of a mixture, that of its moments.

    The moments of a mixture follow from the laws of total variance and covariance: they are those of

        θ̃ = P·ε,        W_δ = U·ε + ξ,        ε ~ N(0, I),   ξ_k ~ N(0, Σ_c p_c cov_c(w_k | θ̃))

    in which ε holds d2 numbers for the spread of θ̃ in each component, and one for the component's place. So the best
    linear prediction of θ̃ from W_δ leaves P(I + Uᵀcov(ξ)⁻¹U)⁻¹Pᵀ. (That a component is known would tell too much:
    where a mixture follows a curved posterior, each is narrow.)
    """
    weights = log_weights.softmax(0)  # (C,)
    later = slice(columns_eta.stop, None)
    theta_mean = sum(p * q.theta_mean for p, q in zip(weights, components, strict=True))
    delta_mean = sum(p * q.raw_mean[:, later] for p, q in zip(weights, components, strict=True))  # (K, M_δ)
    theta_parts, delta_parts, spreads = [], [], []
    for p, q in zip(weights, components, strict=True):
        scale, gain, root = p.sqrt(), q.raw_gain[:, later], q.raw_root[:, later]
        theta_parts += [scale * q.theta_root, scale * (q.theta_mean - theta_mean)[:, None]]
        delta_parts += [scale * gain @ q.theta_root, scale * (q.raw_mean[:, later] - delta_mean)[..., None]]
        spreads.append(p * root @ root.mT)  # (K, M_δ, M_δ)
    P, U = torch.cat(theta_parts, -1), torch.cat(delta_parts, -1)  # (d2, R), (K, M_δ, R), R = C·(d2 + 1)
    lower = torch.linalg.cholesky(torch.stack(spreads).sum(0))
    half = torch.linalg.solve_triangular(lower, U, upper=False)
    told = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device) + (half.mT @ half).sum(0)
    left = (P * torch.linalg.solve(told, P.mT).mT).sum(-1)
    return (1 - left / P.square().sum(-1)).clamp(0, 1)


def variance_inflation(share: Tensor) -> Tensor:
    """VIF = 1/(1 − R²)."""
    return 1 / (1 - share)
