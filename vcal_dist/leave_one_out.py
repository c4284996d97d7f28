"""How well a model predicts each observation from all others, without fitting it again.

Given what the sampler or the posterior draws, observations are jointly Gaussian, and so p(y_i | y₋ᵢ, draw) is closed
form. Draws come from the posterior given *all* observations: one counts for those without y_i in proportion to
1/p(y_i | y₋ᵢ, draw), smoothed, and k̂ of these ratios says whether that can be relied on.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

EVEN = 0.1  # nats between the greatest and the least ratio, below which they need no smoothing
RELIABLE = 0.7  # k̂


def gaussian_leave_one_out(residual: Tensor, covariance: Tensor) -> Tensor:
    """log p(r_i | r₋ᵢ) for r ~ N(0, K), (..., n) and (..., n, n) → (..., n).

    With κ = [K⁻¹]_ii and α = K⁻¹r the density is that of N(0, 1/κ) at α_i/κ.
    """
    inverse = torch.linalg.inv(covariance)
    kappa = inverse.diagonal(dim1=-2, dim2=-1)
    alpha = (inverse @ residual.unsqueeze(-1)).squeeze(-1)
    return 0.5 * (kappa / (2 * math.pi)).log() - 0.5 * alpha.square() / kappa


def smoothed(log_ratios: Tensor, efficiency: float = 1.0) -> tuple[Tensor, Tensor]:
    """Normalised log weights (S, B) of importance ratios and k̂ (B,), by PSIS (Vehtari et al. 2024).

    `efficiency` is the number of effective draws for each: the less, the longer a tail k̂ needs.
    """
    from vcal_dist.inference_data import import_arviz

    with np.errstate(over="ignore"):  # of a tail that is too heavy; it is cut to the largest ratio
        weights, shape = import_arviz().psislw(log_ratios.mT.cpu().numpy(), reff=efficiency)
    # Ratios that are nearly the same have no tail to fit a distribution to: its k̂ would mean nothing, or be infinite.
    even = (log_ratios.amax(0) - log_ratios.amin(0)) < EVEN
    return torch.from_numpy(weights.T).to(log_ratios), torch.from_numpy(shape).to(log_ratios).masked_fill(even, 0.0)
