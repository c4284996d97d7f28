"""An ensemble of emulators with learned frequencies, each trained without one fold of the runs.

Learned frequencies often have the best mean of all emulators, and by far the narrowest intervals: with few runs they
over-fit, and neither the evidence nor leave-one-out with those frequencies can see it. What a member says of the runs
that it never saw is honest, and how far members are apart from each other says where the runs leave them free.

All members are trained together, by the sum of their collapsed evidences. Shapes: m members, B rows, M features,
K outputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vcal_dist.cholesky import cholesky
from vcal_dist.collapsed import half_quadratic_minus_log_det, weighted_gram
from vcal_dist.features import FeatureSettings, draw_frequencies

FLOOR = 1e-4  # the noise never falls below it, as that of a likelihood
SEPARATE_NOISE = 4  # up to this many outputs have a noise of their own; more share one
BLOCK = 4096


class Posterior(NamedTuple):
    """What their rows say of the members' weights: N(mean, (LLᵀ)⁻¹)."""

    lower: Tensor  # L (m, K or 1, M, M)
    mean: Tensor  # (m, K, M)

    def draw(self, generator: torch.Generator) -> Tensor:
        """One draw of the weights of every member, (m, K, M)."""
        noise = torch.randn(self.mean.shape, generator=generator, dtype=self.mean.dtype).to(self.mean.device)
        if self.lower.shape[1] == 1:
            return self.mean + torch.linalg.solve_triangular(self.lower.mT, noise.mT.unsqueeze(1), upper=True)[:, 0].mT
        return self.mean + torch.linalg.solve_triangular(self.lower.mT, noise.unsqueeze(-1), upper=True).squeeze(-1)


class Members(nn.Module):
    """m expansions φ(u)·W in cosines and sines, W ~ N(0, I)."""

    counted: Tensor  # (m, N) which rows each member learns from

    def __init__(
        self,
        counted: Tensor,
        outputs: int,
        settings: FeatureSettings,
        lengthscale: Tensor,
        *,
        noise: float,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        m, d = len(counted), len(lengthscale)
        self.features = settings.features
        self.separate = outputs <= SEPARATE_NOISE
        omega = torch.stack([draw_frequencies(d, settings, seed * 1009 + 7919 * (i + 1)) for i in range(m)])
        device = counted.device
        self.register_buffer("counted", counted, persistent=False)  # follows from the folds
        self.omega = nn.Parameter(omega.to(device, dtype))  # Ω (m, d, F)
        self.log_lengthscale = nn.Parameter(lengthscale.log().to(device, dtype).repeat(m, 1))  # (m, d)
        self.log_amplitude = nn.Parameter(torch.zeros(m, dtype=dtype, device=device))
        start = math.log(noise)
        columns = outputs if self.separate else 1
        self.log_noise = nn.Parameter(torch.full((m, columns), start, dtype=torch.float64, device=device))

    def forward(self, u: Tensor) -> Tensor:
        """φ at u (B, d): (m, B, M), in float64."""
        P = u.to(self.omega.dtype) @ self.stretched()
        scale = self.log_amplitude.exp() * math.sqrt(2 / self.features)
        return (torch.cat([P.cos(), P.sin()], -1) * scale[:, None, None]).double()

    def stretched(self) -> Tensor:
        """Ω/ℓ (m, d, F)."""
        return self.omega * (-self.log_lengthscale).exp().unsqueeze(-1)

    def noise_variance(self) -> Tensor:
        """σ² (m, K), or (m, 1) where outputs share it."""
        return FLOOR**2 + (2 * self.log_noise).exp()

    def log_prior(self) -> Tensor:
        """log p(Ω) of each member, up to a constant: (m,)."""
        return -0.5 * self.omega.double().square().sum((1, 2))

    def sums(self, u: Tensor, z: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Σφφᵀ (m, K or 1, M, M), Σφz (m, K, M), Σz² (m, K) and numbers of rows (m, K), over the rows that count.

        z is NaN where it is missing. Outputs that miss none share the first.
        """
        known = ~z.isnan()
        weight = counted.double()  # (m, B)
        phi, filled = self(u), torch.where(known, z, 0.0)
        if bool(known.all()):
            squares = weight @ filled.square()
            return (
                weighted_gram(phi, weight).unsqueeze(1),
                ((weight.unsqueeze(-1) * filled).mT @ phi),
                squares,
                weight.sum(-1, keepdim=True).expand_as(squares),
            )
        weights = weight.unsqueeze(1) * known.mT  # (m, K, B)
        G = torch.stack([(phi * weights[:, k].unsqueeze(-1)).mT @ phi for k in range(z.shape[1])], 1)
        b = torch.einsum("mbf,mkb->mkf", phi, weights * filled.mT)
        return G, b, (weights * filled.mT.square()).sum(-1), weights.sum(-1)

    def log_evidence(self, u: Tensor, z: Tensor, counted: Tensor) -> Tensor:
        """log p(z of the rows that count), weights integrated out, in nats for each of them: (m,)."""
        G, b, square, rows = self.sums(u, z, counted)
        p = 1 / self.noise_variance()  # (m, K or 1)
        scaled, weighted = p[..., None, None] * G, p.unsqueeze(-1) * b
        shared = scaled.shape[1] == 1  # one factor for all outputs
        fit = half_quadratic_minus_log_det(scaled, weighted.unsqueeze(1 if shared else 2)).sum(-1)
        total = fit + 0.5 * (rows * (p.log() - math.log(2 * math.pi)) - p * square).sum(-1)
        return total / rows.sum(-1).clamp_min(1.0)

    @torch.no_grad()
    def posterior(self, u: Tensor, z: Tensor) -> Posterior:
        """W of every member given all its rows."""
        total: list[Tensor] | None = None
        for rows in range(0, len(u), BLOCK):
            some = slice(rows, rows + BLOCK)
            G, b, *_ = self.sums(u[some], z[some], self.counted[:, some])
            # A block without missing outputs has one Gram for all of them.
            total = [G, b] if total is None else [total[0] + G, total[1] + b]
        assert total is not None
        return Posterior(*_posterior(total[0], total[1], 1 / self.noise_variance()))

    @torch.no_grad()
    def predict(self, u: Tensor, weights: Tensor) -> Tensor:
        """Every member's value at u for weights (m, K, M): (m, B, K)."""
        return torch.cat([self(block) @ weights.mT for block in u.split(BLOCK)], 1)

    @torch.no_grad()
    def variance(self, u: Tensor, given: Posterior) -> Tensor:
        """The variance of every member's value at u: (m, B, K or 1)."""
        found = []
        for block in u.split(BLOCK):
            phi = self(block).mT.unsqueeze(1)  # (m, 1, M, B)
            solved = torch.linalg.solve_triangular(
                given.lower, phi.expand(-1, given.lower.shape[1], -1, -1), upper=False
            )
            found.append(solved.square().sum(-2).mT)
        return torch.cat(found, 1)


def _posterior(G: Tensor, b: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The factor of I + pG, (m, K or 1, M, M), and the mean of W, (m, K, M)."""
    identity = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
    lower = cholesky(identity + p[..., None, None] * G)
    weighted = p.unsqueeze(-1) * b  # (m, K, M)
    if lower.shape[1] == 1:  # one factor, the outputs as columns
        return lower, torch.cholesky_solve(weighted.mT.unsqueeze(1), lower).squeeze(1).mT
    return lower, torch.cholesky_solve(weighted.unsqueeze(-1), lower).squeeze(-1)
