"""q(θ̃, w): what is believed about the calibration inputs and the weights of the last layers.

Every family answers the same questions (`Weights`). w has K rows, one for each output, and D columns, those of η's
last layer first, then those of δ's or g's. θ̃ has d2 entries (none for a layer on its own); its prior, like that of
every weight, is N(0, 1). `ψ` are feature rows: the outputs are ψ·w_k.

    MeanField   q(θ̃) ∏ q(w_kj), the paper's choice, trained by Adam
    FullRank    one Gaussian over θ̃ and all of w, moved by natural gradients (vcal_dist.fullrank)

The third way, weights that are integrated out on every batch (vcal_dist.collapsed), holds no state while it trains;
what it finds is a FullRank.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn

ALL = slice(None)


class Weights(Protocol):
    """The questions that every family answers. S is the number of Monte Carlo samples, B of rows."""

    theta_dim: int
    outputs: int
    width: int

    def theta(self, noise: Tensor) -> Tensor:
        """Samples of θ̃ (S, d2) from standard normal noise (S, d2)."""

    def theta_moments(self) -> tuple[Tensor, Tensor]:
        """Mean (d2,) and covariance (d2, d2) of θ̃."""

    def moments(self, psi: Tensor, columns: slice = ALL, theta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean and variance (..., B, K) of ψ·w for rows ψ (..., B, C) over `columns` of w.

        With θ̃ (S, d2) they are those given θ̃, and ψ is (S, B, C) or (B, C); without, θ̃ is integrated out.
        """

    def moments_given(self, psi: Tensor, first: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The same over the last columns of w, given θ̃ and the first columns' values (S, K, E)."""

    def sample(self, noise: Tensor, theta: Tensor) -> Tensor:
        """Samples of w (S, K, D) given θ̃ (S, d2), from standard normal noise (S, K, D)."""

    def kl(self) -> Tensor:
        """KL(q(θ̃, w) ‖ N(0, I))."""


class MeanField(nn.Module):
    """Every entry of θ̃ and w is an independent Gaussian; started at the prior, as in the paper, unless told."""

    def __init__(
        self, theta_dim: int, outputs: int, width: int, *, sd: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.theta_dim, self.outputs, self.width = theta_dim, outputs, width
        self.theta_mean = nn.Parameter(torch.zeros(theta_dim, dtype=dtype))
        self.theta_log_sd = nn.Parameter(torch.zeros(theta_dim, dtype=dtype))
        self.mean = nn.Parameter(torch.zeros(outputs, width, dtype=dtype))
        self.log_sd = nn.Parameter(torch.full((outputs, width), math.log(sd), dtype=dtype))

    def theta(self, noise: Tensor) -> Tensor:
        return self.theta_mean + self.theta_log_sd.exp() * noise

    def theta_moments(self) -> tuple[Tensor, Tensor]:
        return self.theta_mean, torch.diag_embed((2 * self.theta_log_sd).exp())

    def moments(self, psi: Tensor, columns: slice = ALL, theta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return psi @ self.mean[:, columns].mT, psi.square() @ (2 * self.log_sd[:, columns]).exp().mT

    def moments_given(self, psi: Tensor, first: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.moments(psi, slice(first.shape[-1], None))  # independent of what is given

    def sample(self, noise: Tensor, theta: Tensor) -> Tensor:
        return self.mean + self.log_sd.exp() * noise

    def kl(self) -> Tensor:
        return diagonal_kl(self.theta_mean, self.theta_log_sd) + diagonal_kl(self.mean, self.log_sd)


def diagonal_kl(mean: Tensor, log_sd: Tensor) -> Tensor:
    """KL(N(mean, sd²) ‖ N(0, 1)) = ½ Σ (mean² + sd² − 1) − log sd."""
    return (0.5 * (mean.square() + (2 * log_sd).exp() - 1) - log_sd).sum()
