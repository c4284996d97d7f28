"""An emulator's residual that depends on the inputs: what η's features cannot follow, more of it in some places.

Training gives it one variance σ_z² everywhere. For an output that is flat in most places and sharp in few, that is too
much for most observations and too little for some. Once η has been learned, and the mean m of its weights is known,
residuals r = z − φ(u)·m of all runs tell where it is large:

    r ~ N(0, s²(u)),    log s²(u) = ψ(u)·v,    ψ = [φ/|φ|, 1],    v ~ N(0, SPREAD²·I) but for the constant,

one v for each output. Runs that η was fitted to are too near it: r² counts as r²/(1 − h), h being a run's leverage.
log p(r, v) is concave: the first pass over the runs regresses log r², the others take Newton's steps. η itself does not
change: noise that could vary while η is learned would explain what η has not learned yet.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from vcal_dist.batches import Runs
from vcal_dist.collective import carried, plus, sum_over_ranks
from vcal_dist.fullrank import Frame
from vcal_dist.gp import DeepGP
from vcal_dist.likelihoods import Gaussian

SPREAD = 3.0  # prior sd of log s²: a standard deviation four times as large, or as small, is nothing unusual
MEAN_LOG, VAR_LOG = -1.2703628454614782, math.pi**2 / 2  # of log χ² with one degree of freedom: ψ(½) + log 2, ψ′(½)
NOTHING = 1e-9  # precision of the constant's prior
SMALLEST = 1e-6  # residual, in standard deviations of the output
LEAST = 0.05  # of 1 − h
PASSES = 10
CLOSE = 0.02  # root mean square change of log s² that ends them


class VaryingResidual(nn.Module):
    """s²(u) = exp(ψ·v) from features of η, and never below `floor`²."""

    weights: Tensor  # v (K, M + 1)

    def __init__(self, outputs: int, width: int, noise: float, floor: float) -> None:
        super().__init__()
        self.floor = floor
        start = torch.zeros(outputs, width + 1, dtype=torch.float64)
        start[:, -1] = 2 * math.log(noise)
        self.register_buffer("weights", start)

    def forward(self, phi: Tensor) -> Tensor:
        """s² at features φ (..., B, M): (..., B, K)."""
        return (directions(phi) @ self.weights.mT).exp().clamp_min(self.floor**2)


def directions(phi: Tensor) -> Tensor:
    """ψ (..., B, M + 1) of features (..., B, M)."""
    unit = nn.functional.normalize(phi.double(), dim=-1)
    return torch.cat([unit, torch.ones_like(unit[..., :1])], -1)


class ResidualFit:
    """The passes over all runs that find v."""

    def __init__(self, residual: VaryingResidual, eta: DeepGP, noise: Gaussian, frame: Frame) -> None:
        self.residual, self.eta, self.noise, self.frame = residual, eta, noise, frame
        self.passes = 0
        self.sums: list[Tensor] | None = None

    @torch.no_grad()
    def take(self, runs: Runs) -> None:
        """Adds a block: curvature H (K, M + 1, M + 1) and gradient g (K, M + 1), Σψψᵀ and the number of rows."""
        phi = self.eta(runs.u, None).double()
        psi, v = directions(phi), self.residual.weights
        weight = runs.weight.double().unsqueeze(-1) * ~runs.z.isnan()  # (B, K)
        leverage = (phi @ self.frame.root).square().sum(-1).mT / self.noise.noise_variance()  # φ·RRᵀ·φ/σ_z² (B, K)
        square = (runs.z.double() - phi @ self.frame.mean.mT).square().nan_to_num().clamp_min(SMALLEST**2)
        square = square / (1 - leverage).clamp_min(LEAST)
        if self.passes == 0:
            target = (square.log() - MEAN_LOG) / VAR_LOG  # of log s², over its variance
            pull, steepness = weight * target, weight / VAR_LOG
        else:
            ratio = square * torch.exp(-psi @ v.mT)  # r²/s²
            pull, steepness = 0.5 * weight * (ratio - 1), 0.5 * weight * ratio.clamp_min(1.0)
        parts = [
            torch.stack([psi.mT @ (psi * steepness[:, k : k + 1]) for k in range(len(v))]),
            pull.mT @ psi,
            torch.stack([psi.mT @ (psi * weight[:, k : k + 1]) for k in range(len(v))]),
            weight.sum(0),
        ]
        self.sums = plus(self.sums, parts)

    @torch.no_grad()
    def turn(self) -> bool:
        """Ends a pass; whether it was the last."""
        assert self.sums is not None
        H, g, metric, rows = sum_over_ranks(self.sums)
        v = self.residual.weights
        prior = torch.full_like(v[0], SPREAD**-2)
        prior[-1] = NOTHING
        if self.passes > 0:
            g = g - prior * v
        step = torch.linalg.solve(H + torch.diag(prior), g)  # in the first pass v itself
        if self.passes == 0:
            v.zero_()
        v += step
        change = (torch.einsum("km,kmn,kn->k", step, metric, step) / rows.clamp_min(1.0)).sqrt()
        self.sums, self.passes = None, self.passes + 1
        return self.passes == PASSES or (self.passes > 1 and float(change.max()) < CLOSE)

    def state(self) -> dict[str, Any]:
        """Where it is, in the middle of a pass too; every process must ask."""
        return {"passes": self.passes, "sums": None if self.sums is None else sum_over_ranks(self.sums)}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state; the first process carries the sums on."""
        self.passes, self.sums = state["passes"], carried(state["sums"])
