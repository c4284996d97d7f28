"""How well a model predicts each observation from all others, without fitting it again.

Given what the sampler or the posterior draws, observations are jointly Gaussian, and so p(y_i | y₋ᵢ, draw) is closed
form. Draws come from the posterior given *all* observations; in p(y_i | y₋ᵢ) = 1/E[1/p(y_i | y₋ᵢ, draw)] that cancels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gaussian_leave_one_out(residual: Tensor, covariance: Tensor) -> Tensor:
    """log p(r_i | r₋ᵢ) for r ~ N(0, K), (..., n) and (..., n, n) → (..., n).

    With κ = [K⁻¹]_ii and α = K⁻¹r the density is that of N(0, 1/κ) at α_i/κ.
    """
    inverse = torch.linalg.inv(covariance)
    kappa = inverse.diagonal(dim1=-2, dim2=-1)
    alpha = (inverse @ residual.unsqueeze(-1)).squeeze(-1)
    return 0.5 * (kappa / (2 * math.pi)).log() - 0.5 * alpha.square() / kappa


def harmonic(each: Tensor) -> Tensor:
    """log p(y_i | y₋ᵢ) (n,) from log p(y_i | y₋ᵢ, draw) (S, n): the harmonic mean over draws."""
    return math.log(len(each)) - torch.logsumexp(-each, 0)
