"""What is assumed of δ decides the measure: the cell's θ with the exact simulator in place of an emulator.

Scaled as in training, with δ's amplitude a and length scale ℓ given and C the Matérn 5/2 correlations of the 19 x,

    y | θ, σ ~ N(η(x, θ), a²C + σ²I),    θ uniform,    log σ ~ N, as KOH has it: a median of 0.03, and e to either side.

θ̃ and the standardised log σ are drawn by adaptive importance sampling, which gives the evidence of (a, ℓ) too. The
design enters by the scale of the output only.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcal_dist.koh import PRIORS, Known, matern52
from vcal_dist.mixture import Mixture, adapt
from vcal_dist.priors import ThetaPrior
from vcal_dist.problems import cell
from vcal_dist.transforms import OutputScaling

Array = NDArray[np.float64]


class Assumed(NamedTuple):
    """What follows from a δ that is known."""

    amplitude: float  # of δ, in standard deviations of the output
    lengthscale: float
    measure: float
    log_evidence: float  # log p(y | a, ℓ) in the user's units
    effective: float  # of the importance sample (Kish)
    sd: list[float]  # of θ
    seconds: float


class ExactSimulator:
    """log p(y, θ̃, σ̃) where δ is known."""

    def __init__(self, outputs: OutputScaling, delta: Known) -> None:
        self.prior, self.outputs = ThetaPrior.from_problem(cell.problem()), outputs
        self.x, y = cell.observed()
        self.y = outputs(torch.as_tensor(y))[:, 0]  # (n,)
        self.log_jacobian = float(outputs.log_jacobian(torch.as_tensor(y)).sum())
        values, self.vectors = torch.linalg.eigh(matern52(torch.as_tensor(self.x) / delta.lengthscale))
        self.variances = delta.amplitude**2 * values.clamp_min(0)  # (n,) of δ along the eigenvectors

    def log_density(self, points: Tensor) -> Tensor:
        """Of points (P, 4), normalised but for y: (P,)."""
        theta = self.prior.theta(points[:, :-1]).numpy()
        eta = torch.as_tensor(cell.curves(self.x, theta))  # (P, n)
        away = (self.y - self.outputs(eta.reshape(-1, 1)).reshape(eta.shape)) @ self.vectors
        median, spread = PRIORS["noise_y"]
        noise = median * (spread * points[:, -1:]).exp()
        log_likelihood = _log_normal(away, self.variances + noise.square())
        return log_likelihood + _log_normal(points, torch.ones_like(points))


def assumed(outputs: OutputScaling, delta: Known, *, evaluations: int, seed: int = 0) -> Assumed:
    """θ, the measure and the evidence under this δ."""
    begun = time.perf_counter()
    exact = ExactSimulator(outputs, delta)
    dim = exact.prior.dim + 1
    start = Mixture(*(part.double() for part in (torch.zeros(1, dim), torch.eye(dim)[None], torch.zeros(1))))
    found = adapt(exact.log_density, start, evaluations=evaluations, seed=seed)
    theta: Array = exact.prior.theta(found.points[:, :-1]).numpy()
    weights: Array = found.log_weights.exp().numpy()
    return Assumed(
        *delta,
        measure=cell.squared_error(theta, weights),
        log_evidence=found.log_evidence + exact.log_jacobian,
        effective=found.effective,
        sd=np.sqrt(weights @ np.square(theta - weights @ theta)).tolist(),
        seconds=time.perf_counter() - begun,
    )


def _log_normal(away: Tensor, variances: Tensor) -> Tensor:
    """log N(away; 0, diag(variances)), (P, n) → (P,)."""
    return -0.5 * (away.square() / variances + variances.log() + math.log(2 * math.pi)).sum(-1)
