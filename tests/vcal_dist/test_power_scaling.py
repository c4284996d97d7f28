"""Sensitivity to a prior, against normal distributions whose power-scaled posteriors are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.quasirandom import SobolEngine

from vcal_dist.power_scaling import DRAWS, cumulative_distance, power_scaling_sensitivity

F64 = torch.float64
NOISE = 0.3


def exact_distance(mean: float, sd: float, other_mean: float, other_sd: float) -> float:
    """CJS of two normal distributions by quadrature, over the range of the first one's draws."""
    x = np.linspace(*(mean + sign * sd * stats.norm.isf(1 / DRAWS) for sign in (-1, 1)), 20_001)
    found = []
    for F, G in (
        (stats.norm.cdf(x, mean, sd), stats.norm.cdf(x, other_mean, other_sd)),
        (stats.norm.sf(x, mean, sd), stats.norm.sf(x, other_mean, other_sd)),
    ):
        middle = (F + G) / 2
        apart = np.trapezoid(F * np.log2(F / middle) + G * np.log2(G / middle), x)
        found.append(math.sqrt(apart / np.trapezoid(F + G, x)))
    return max(found)


class Conjugate:
    """y = θ + ζ + ε with θ ~ N(0, 1) and ζ ~ N(0, spread²): the prior of ζ to the power α is N(0, spread²/α)."""

    def __init__(self, y: float, spread: float) -> None:
        self.y, self.spread = y, spread

    def theta(self, alpha: float) -> tuple[float, float]:
        """Mean and sd of θ given y."""
        other = self.spread**2 / alpha + NOISE**2
        return self.y / (1 + other), math.sqrt(other / (1 + other))

    def sensitivity(self) -> float:
        steps = [exact_distance(*self.theta(1.0), *self.theta(alpha)) for alpha in (0.99, 1 / 0.99)]
        return sum(steps) / 2 / math.log2(1 / 0.99)

    def sample(self, points: int) -> tuple[Tensor, Tensor, Tensor]:
        """θ and a parameter that has nothing to do with it (P, 2), log weights, and the log prior of ζ.

        Points come from a proposal that is wider than the posterior, with some of no weight at all far away.
        """
        normal = torch.special.ndtri(
            SobolEngine(3, scramble=True, seed=1).draw(points, dtype=F64).clamp(1e-9, 1 - 1e-9)
        )
        theta, zeta, idle = (1.5 * normal).unbind(-1)
        zeta = zeta * self.spread
        log_prior = -0.5 * (zeta / self.spread) ** 2
        target = -0.5 * theta**2 + log_prior - 0.5 * ((self.y - theta - zeta) / NOISE) ** 2 - 0.5 * idle**2
        log_weights = target + 0.5 * normal.square().sum(-1)
        both = torch.stack([theta, idle], -1)
        far = torch.tensor([[50.0, 50.0], [-80.0, 9.0]], dtype=F64)
        nothing = torch.full((2,), -torch.inf, dtype=F64)
        return torch.cat([both, far]), torch.cat([log_weights, nothing]), torch.cat([log_prior, nothing])


@pytest.mark.parametrize(("y", "spread"), [(0.5, 1.0), (3.0, 1.0), (3.0, 0.1)])
def test_sensitivity_is_that_of_the_closed_form(y: float, spread: float) -> None:
    case = Conjugate(y, spread)
    found = power_scaling_sensitivity(*case.sample(2**16))
    assert found[0].item() == pytest.approx(case.sensitivity(), rel=0.03, abs=2e-4)
    assert found[1].item() < 0.01


def test_a_prior_that_decides_is_told_from_one_that_does_not() -> None:
    # What ζ may be explains y = 3 or leaves it to θ; where its prior is narrow, its power changes nothing.
    strong, weak = (power_scaling_sensitivity(*Conjugate(3.0, spread).sample(512))[0].item() for spread in (1.0, 0.05))
    assert weak < 0.05 < strong


def test_points_without_weight_change_nothing() -> None:
    points, log_weights, log_prior = Conjugate(3.0, 1.0).sample(256)
    with_far = power_scaling_sensitivity(points, log_weights, log_prior)
    light = torch.where(log_weights.isfinite(), log_weights, log_weights.max() - 200)
    heavy = power_scaling_sensitivity(points, light, log_prior.nan_to_num(neginf=-1.0))
    np.testing.assert_allclose(with_far, heavy, rtol=1e-12)


def test_the_distance_has_no_side_and_no_units() -> None:
    values = torch.linspace(-6, 6, 1201, dtype=F64)
    p, q = (torch.softmax(-0.5 * (values - mean) ** 2, 0) for mean in (0.0, 0.7))
    found = cumulative_distance(values, p, q)
    for other in (cumulative_distance(-values, p, q), cumulative_distance(7 * values + 2, p, q)):
        assert other.item() == pytest.approx(found.item(), rel=1e-12)
    assert found.item() == pytest.approx(exact_distance(0, 1, 0.7, 1), rel=0.02)
    assert cumulative_distance(values, p, p).item() == 0
