"""What the data said of each parameter: its posterior beside its prior."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcal_dist.answers import Answers
from vcal_dist.plots.densities import contraction
from vcal_dist.theta import ThetaPosterior

Kind = Literal["learned", "partly", "not learned"]
SAME = 0.1  # total variation between prior and posterior, below which the data said nothing
HALF = 0.5  # of the prior's 90 %: a parameter whose interval rules out so much is learned
EDGE = 0.02  # share of the bounds' width that counts as being at a bound
REACH, POINTS = 8.0, 4001  # of the grid of θ̃, in prior standard deviations
VALLEY = 0.8  # modes are apart where the density between them falls below so much of the lower one's,
LEAST_MASS = 0.05  # and each holds so much of the probability


@dataclass(frozen=True)
class Learned:
    """A parameter's posterior (mean, sd, 90 % interval) beside its prior's 90 % interval."""

    name: str
    unit: str
    description: str
    prior: str
    mean: float
    sd: float
    low: float
    high: float
    prior_low: float
    prior_high: float
    narrowed: float  # how much of the prior's 90 % its interval rules out; negative where that holds more of the prior
    contraction: float  # 1 − Var(posterior)/Var(prior)
    moved: float  # total variation between prior and posterior
    at_bound: float  # probability near the nearer bound
    prior_at_bound: float
    outside: float  # probability outside the bounds

    @property
    def kind(self) -> Kind:
        """In a word."""
        if self.moved < SAME:
            return "not learned"
        return "learned" if self.narrowed >= HALF else "partly"


@lru_cache(maxsize=4)
def learned(posterior: Answers) -> tuple[Learned, ...]:
    """Every parameter in the order of the problem."""
    theta, inputs = posterior.theta, posterior.problem.calibration_inputs
    prior = prior_of(theta)
    told = contraction(theta).tolist()
    before_sd = prior.sd().tolist()
    rows = []
    for j, (row, v) in enumerate(zip(posterior.summary(), inputs, strict=True)):
        before = prior.interval(j)
        (near, outside), (prior_near, _) = (_ends(q, j, v.bounds) for q in (theta, prior))
        rows.append(
            Learned(
                row.name, row.unit, v.description, row.prior, row.mean, row.sd, row.low, row.high, *before,
                told[j], 1 - (row.sd / before_sd[j]) ** 2, total_variation(theta, j), near, prior_near, outside,
            )
        )  # fmt: skip
    return tuple(rows)


def prior_of(theta: ThetaPosterior) -> ThetaPosterior:
    """The prior in the posterior's clothes: θ̃ ~ N(0, I)."""
    means = torch.zeros(1, theta.dim, dtype=torch.float64)
    return ThetaPosterior(theta.prior, means, torch.eye(theta.dim, dtype=torch.float64).unsqueeze(0))


def total_variation(theta: ThetaPosterior, parameter: int) -> float:
    """½∫|q(θ̃_j) − N(θ̃_j; 0, 1)|: 0 where the posterior is the prior, 1 where they are apart. The same in θ and θ̃."""
    grid = _grid(theta, parameter)
    prior = np.exp(-(grid**2) / 2) / np.sqrt(2 * np.pi)
    return float(np.trapezoid(np.abs(_density(theta, parameter, grid) - prior), grid) / 2)


def mode_count(posterior: Answers, parameter: int) -> int:
    """How many separate regions of high density the marginal of θ̃_j has.

    In θ̃, where a component is a Gaussian: in θ, the ends of a bounded prior would look like modes.
    """
    grid = _grid(posterior.theta, parameter)
    density = _density(posterior.theta, parameter, grid)
    inner = density[1:-1]
    peaks = (np.flatnonzero((inner > density[:-2]) & (inner >= density[2:])) + 1).tolist()
    while len(peaks) > 1:  # of two with a shallow valley between them, the lower one is a shoulder of the other
        depth, i = max(
            (density[one:other].min() / min(density[one], density[other]), i)
            for i, (one, other) in enumerate(pairwise(peaks))
        )
        if depth < VALLEY:
            break
        peaks.pop(i if density[peaks[i]] < density[peaks[i + 1]] else i + 1)
    cuts = [int(one + density[one:other].argmin()) for one, other in pairwise(peaks)]
    edges = [0, *cuts, len(grid) - 1]
    masses = [float(np.trapezoid(density[a : b + 1], grid[a : b + 1])) for a, b in pairwise(edges)]
    return max(1, sum(mass >= LEAST_MASS for mass in masses))


def _grid(theta: ThetaPosterior, parameter: int) -> NDArray[np.float64]:
    """Points of θ̃_j that hold prior and posterior, dense where the posterior is narrow."""
    means = theta.means[:, parameter].numpy()
    sds = theta.covariances[:, parameter, parameter].sqrt().numpy()
    offsets = np.linspace(-REACH, REACH, POINTS)
    return np.unique(np.concatenate([offsets, *(m + s * offsets for m, s in zip(means, sds, strict=True))]))


def _density(theta: ThetaPosterior, parameter: int, grid: NDArray[np.float64]) -> NDArray[np.float64]:
    """q(θ̃_j) = Σ_c w_c N(m_c, s_c²)."""
    means = theta.means[:, parameter].numpy()
    sds = theta.covariances[:, parameter, parameter].sqrt().numpy()
    weights = theta.log_weights.exp().numpy()
    white = (grid[:, None] - means) / sds
    density: NDArray[np.float64] = (np.exp(-(white**2) / 2) / (sds * np.sqrt(2 * np.pi))) @ weights
    return density


def _ends(theta: ThetaPosterior, parameter: int, bounds: tuple[float, float]) -> tuple[float, float]:
    """Probability near the end that has more of it, on its inner side, and outside both."""
    low, high = bounds
    edge = EDGE * (high - low)
    points: Tensor = theta.means.new_tensor([low, low + edge, high - edge, high])
    below, lower, upper, above = theta.marginal_cdf(parameter, points).tolist()
    # A bound that is the end of the prior's support has nothing beyond.
    return max(lower - below, above - upper), below + 1 - above
