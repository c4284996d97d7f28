"""Numbers behind the charts of θ: quantiles and densities before and after calibration, and where to draw them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vcal_dist.answers import Array, to_numpy
from vcal_dist.priors import ThetaPrior
from vcal_dist.theta import ThetaPosterior

LEVEL = 0.9
NARROW = 0.2  # of the prior's range: a posterior that takes less is shown on a range of its own
POINTS = 201  # of a density


def quantiles(theta: ThetaPosterior, j: int, probabilities: Sequence[float]) -> list[float]:
    """Of one parameter, in the user's units."""
    found: list[float] = theta.quantile(j, theta.means.new_tensor(list(probabilities))).tolist()
    return found


def prior_quantiles(prior: ThetaPrior, j: int, probabilities: Sequence[float]) -> Array:
    """The same of its prior."""
    tilde = torch.special.ndtri(torch.tensor(probabilities, dtype=torch.float64))
    return to_numpy(prior.column(j).theta(tilde[:, None])[:, 0])


def prior_rank(prior: ThetaPrior, j: int, values: Array) -> Array:
    """The share of a parameter's prior below values; 0 and 1 outside its support."""
    low, high = prior.support[j]
    inside = torch.from_numpy(np.clip(values, low, high))
    return to_numpy(torch.special.ndtr(prior.column(j).tilde(inside[:, None])[:, 0]))


def contraction(theta: ThetaPosterior) -> Array:
    """How much of the prior's 90 % is ruled out, (d2,): 0 where calibration told nothing, 1 where it told all."""
    ends = [prior_rank(theta.prior, j, np.array(quantiles(theta, j, [0.05, 0.95]))) for j in range(theta.dim)]
    return np.array([1 - (high - low) / LEVEL for low, high in ends])


def axis_values(theta: ThetaPosterior, j: int, truth: float | None) -> tuple[Array, list[float], bool]:
    """Where to draw a parameter's densities, the axis, and whether that leaves most of the prior out."""
    p = np.concatenate([[0.0005, 0.002], np.linspace(0.005, 0.995, 100), [0.998, 0.9995]])
    dense = np.array(quantiles(theta, j, [*p.tolist(), 0.05, 0.95]))
    low, high = dense.min(), dense.max()
    before = prior_quantiles(theta.prior, j, [0.001, 0.999])
    narrow = bool(high - low < NARROW * (before[1] - before[0]))
    if narrow:  # the posterior in the middle, with the prior's limits as the chart's
        margin = (high - low) / 2
        ends = np.clip([low - margin, high + margin], *theta.prior.support[j])
    else:
        ends = np.array([min(low, before[0]), max(high, before[1])])
    if truth is not None and np.isfinite(truth):
        margin = 0.03 * (ends[1] - ends[0])
        ends = np.array([min(ends[0], truth - margin), max(ends[1], truth + margin)])
    values = np.unique(np.concatenate([np.linspace(ends[0], ends[1], POINTS), dense]))
    # Densities may be infinite at an end of the support, so they stop short of it; the axis does not.
    reach = 0.01 * (ends[1] - ends[0])
    axis = [
        float(limit if abs(limit - end) < reach else end)
        for end, limit in zip(ends, theta.prior.support[j], strict=True)
    ]
    return values, axis, narrow


def densities(theta: ThetaPosterior, j: int, values: Array) -> tuple[Array, Array]:
    """Prior and posterior."""
    at = torch.from_numpy(values)
    return to_numpy(theta.prior.column(j).log_density(at[:, None])[:, 0].exp()), to_numpy(theta.marginal_density(j, at))
