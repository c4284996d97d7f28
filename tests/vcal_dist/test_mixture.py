"""A mixture that follows a density: moments, modes, evidence and total variation against closed forms and grids."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from vcal_dist.mixture import LIGHT_PIECES, Adapted, Mixture, _tempered, adapt, divided

F64 = torch.float64


def mixture_of(means: Any, covariances: Any, weights: Any) -> Mixture:
    covariances = torch.tensor(np.asarray(covariances), dtype=F64)
    return Mixture(torch.tensor(means, dtype=F64), covariances, torch.tensor(weights, dtype=F64).log())


def one(dim: int, centre: float = 0.0, variance: float = 1.0) -> Mixture:
    """A first guess with one component."""
    return mixture_of(np.full((1, dim), centre), [variance * np.eye(dim)], [1.0])


def moments(mixture: Mixture) -> tuple[Tensor, Tensor]:
    weights = mixture.log_weights.exp()
    mean = weights @ mixture.means
    away = mixture.means - mean
    return mean, torch.einsum("c,cij->ij", weights, mixture.covariances) + away.mT @ (weights[:, None] * away)


def sample_moments(found: Adapted) -> tuple[Tensor, Tensor]:
    weights = found.log_weights.exp()
    mean = weights @ found.points
    away = found.points - mean
    return mean, away.mT @ (weights[:, None] * away)


# --- the mixture itself ---------------------------------------------------------------------------------------------

THREE = mixture_of(
    [[0.0, 1.0], [-2.0, 0.5], [3.0, -1.0]],
    [[[1.0, 0.6], [0.6, 0.5]], [[0.2, 0.0], [0.0, 2.0]], [[0.5, -0.3], [-0.3, 0.4]]],
    [0.5, 0.2, 0.3],
)


def test_the_density_is_that_of_scipy() -> None:
    points = 3 * torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    expected = sum(
        float(log_weight.exp()) * scipy.stats.multivariate_normal(mean.numpy(), covariance.numpy()).pdf(points)
        for mean, covariance, log_weight in zip(*THREE, strict=True)
    )
    np.testing.assert_allclose(THREE.log_density(points), np.log(expected), rtol=1e-10)


def test_far_from_every_component_the_log_density_stays_finite() -> None:
    far = torch.tensor([[1e3, -1e3]], dtype=F64)
    assert -1e8 < float(THREE.log_density(far)) < -1e5


def test_draws_have_the_distribution_of_each_component_in_the_share_of_its_weight() -> None:
    uniform = torch.rand(40_000, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
    drawn = THREE.draw(uniform)
    ends = [0.0, 0.5, 0.7, 1.0]
    for c, (mean, covariance, log_weight) in enumerate(zip(*THREE, strict=True)):
        chosen = (uniform[:, 0] > ends[c]) & (uniform[:, 0] < ends[c + 1])
        assert float(chosen.double().mean()) == pytest.approx(math.exp(log_weight), abs=0.01)
        root = np.linalg.inv(np.linalg.cholesky(covariance.numpy()))
        standard = (drawn[chosen] - mean).numpy() @ root.T
        for column in standard.T:
            assert scipy.stats.kstest(column, "norm").pvalue > 1e-3
        assert abs(np.corrcoef(standard.T)[0, 1]) < 0.05


def test_every_number_in_the_unit_interval_draws_a_point() -> None:
    uniform = torch.full((3, 3), 0.5, dtype=F64)
    uniform[:, 0] = torch.tensor([1e-12, 0.5, 1 - 1e-16])
    drawn = THREE.draw(uniform)
    torch.testing.assert_close(drawn[0], THREE.means[0])
    torch.testing.assert_close(drawn[2], THREE.means[2])


# --- following a density --------------------------------------------------------------------------------------------


def correlated(scale: float) -> tuple[Tensor, Tensor]:
    """A Gaussian in three dimensions, its first scale much smaller than the others, all correlated."""
    scales = torch.tensor([scale, 1.0, 1.0], dtype=F64)
    correlation = torch.tensor([[1.0, 0.8, -0.3], [0.8, 1.0, 0.2], [-0.3, 0.2, 1.0]], dtype=F64)
    return torch.tensor([0.4, -0.3, 0.5], dtype=F64), scales[:, None] * correlation * scales


@pytest.mark.parametrize("guess", ["exact", "too wide", "too narrow"])
def test_a_correlated_gaussian_with_one_small_scale_is_found_with_its_evidence(guess: str) -> None:
    mean, covariance = correlated(0.01)
    target = Mixture(mean[None], covariance[None], torch.zeros(1, dtype=F64))
    factor = {"exact": 1.0, "too wide": 2.0, "too narrow": 0.5}[guess]
    start = Mixture(mean[None], factor * covariance[None], torch.zeros(1, dtype=F64))
    found = adapt(lambda points: target.log_density(points) - 7.5, start, evaluations=600, seed=0)
    assert found.log_evidence == pytest.approx(-7.5, abs=0.03)
    assert found.effective > 200
    sd = covariance.diagonal().sqrt()
    for found_mean, found_covariance in (moments(found.mixture), sample_moments(found)):
        assert float(((found_mean - mean) / sd).abs().max()) < 0.05
        ratio = found_covariance / (sd[:, None] * sd)
        torch.testing.assert_close(ratio, covariance / (sd[:, None] * sd), rtol=0, atol=0.06)


def test_expectations_with_the_importance_weights_are_those_of_the_density() -> None:
    mean, covariance = correlated(1.0)
    target = Mixture(mean[None], covariance[None], torch.zeros(1, dtype=F64))
    found = adapt(target.log_density, one(3), evaluations=1200, seed=1)
    assert float(found.log_weights.exp().sum()) == pytest.approx(1.0)
    weights = found.log_weights.exp()
    inside = float(weights[(found.points[:, 0] < 0.4)].sum())
    assert inside == pytest.approx(0.5, abs=0.03)
    # E exp(θ_2) = exp(μ + σ²/2)
    assert float(weights @ found.points[:, 1].exp()) == pytest.approx(math.exp(-0.3 + 0.5), rel=0.05)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("seed", [0, 1])
def test_both_modes_are_found_from_one_of_them_with_their_weights(dim: int, seed: int) -> None:
    centres = np.array([[-1.5, 0.5], [1.2, -0.6]])[:, :dim]
    target = mixture_of(centres, [0.04 * np.eye(dim), 0.09 * np.eye(dim)], [0.35, 0.65])
    start = mixture_of(centres[:1], [0.04 * np.eye(dim)], [1.0])
    found = adapt(lambda points: target.log_density(points) + 3.0, start, evaluations=600, seed=seed)
    assert found.log_evidence == pytest.approx(3.0, abs=0.03)
    left = found.mixture.means[:, 0] < 0
    # √(0.35·0.65/S) is 0.03 for the 250 effective points that there are
    assert float(found.mixture.log_weights[left].exp().sum()) == pytest.approx(0.35, abs=0.06)
    weights = found.log_weights.exp()
    assert float(weights[found.points[:, 0] < 0].sum()) == pytest.approx(0.35, abs=0.06)
    for side, mean, variance in ((left, centres[0], 0.04), (~left, centres[1], 0.09)):
        part = Mixture(*(x[side] for x in found.mixture[:2]), torch.log_softmax(found.mixture.log_weights[side], 0))
        found_mean, found_covariance = moments(part)
        np.testing.assert_allclose(found_mean, mean, atol=0.06)
        np.testing.assert_allclose(found_covariance.diagonal(), variance, rtol=0.25)


GRID = torch.linspace(-12, 8, 4001, dtype=F64)
STEP = float(GRID[1] - GRID[0])


def total_variation(log_p: Tensor, log_q: Tensor) -> float:
    return float(0.5 * (log_p.exp() - log_q.exp()).abs().sum()) * STEP


def log_gamma(shape: float) -> Tensor:
    """The log of a gamma variate, with a long tail on the left, on the grid."""
    return torch.tensor(scipy.stats.loggamma(shape).logpdf(GRID.numpy()))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_skewed_density_is_followed_where_no_gaussian_can(seed: int) -> None:
    shape = 0.5
    target = log_gamma(shape)
    moment = scipy.stats.loggamma(shape)
    best = min(
        total_variation(target, torch.tensor(scipy.stats.norm(mean, sd).logpdf(GRID.numpy())))
        for mean in np.linspace(-2.5, 0.5, 25)
        for sd in np.linspace(0.7, 2.5, 25)
    )
    assert best > 0.12
    found = adapt(lambda points: torch.tensor(moment.logpdf(points[:, 0].numpy())), one(1), evaluations=1200, seed=seed)
    assert len(found.mixture.means) > 1
    assert total_variation(target, found.mixture.log_density(GRID[:, None])) < 0.05
    assert found.log_evidence == pytest.approx(0.0, abs=0.05)


def test_a_density_that_is_zero_on_a_half_space_is_followed() -> None:
    def half_normal(points: Tensor) -> Tensor:
        return torch.where(points[:, 0] > 0.5, -0.5 * points.square().sum(-1), -torch.inf)

    found = adapt(half_normal, one(2), evaluations=1200, seed=0)
    share = scipy.stats.norm.sf(0.5)
    assert found.log_evidence == pytest.approx(math.log(2 * math.pi * share), abs=0.05)
    weights = found.log_weights.exp()
    assert float(weights[found.points[:, 0] <= 0.5].sum()) == 0.0
    mean = scipy.stats.norm.pdf(0.5) / share
    assert float(sample_moments(found)[0][0]) == pytest.approx(mean, abs=0.05)
    assert float(moments(found.mixture)[0][0]) == pytest.approx(mean, abs=0.05)
    assert all(bool(part.isfinite().all()) for part in found.mixture)


def test_the_seed_decides_everything() -> None:
    first, again, other = (adapt(THREE.log_density, one(2), evaluations=240, seed=seed) for seed in (5, 5, 6))
    for mine, its in zip((*first.mixture, first.points), (*again.mixture, again.points), strict=True):
        assert torch.equal(mine, its)
    assert first.log_evidence == again.log_evidence
    assert not torch.equal(first.points, other.points)


def test_the_density_is_evaluated_as_often_as_allowed() -> None:
    counted = []

    def count(points: Tensor) -> Tensor:
        counted.append(len(points))
        return -0.5 * points.square().sum(-1)

    found = adapt(count, one(2), evaluations=600, seed=0, rounds=4)
    assert counted == [150] * 4
    assert found.points.shape == (600, 2)


# --- tempering ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 3, 8])
@pytest.mark.parametrize("gap", [10.0, 1e3, 1e8])
def test_tempering_spreads_the_weight_of_one_point_over_enough_of_them(dim: int, gap: float) -> None:
    log_weight = -gap - torch.linspace(0, 1, 200, dtype=F64)
    log_weight[7] = 0.0
    weights = _tempered(log_weight, dim)
    assert float(weights.sum()) == pytest.approx(1.0)
    assert int(weights.argmax()) == 7
    assert 1 - 1e-9 <= float(1 / weights.square().sum()) / (4 * (dim + 1)) < 2


def box(size: float) -> Callable[[Tensor], Tensor]:
    """One inside a square around (0.8, 0.8), zero elsewhere."""
    return lambda points: torch.where(((points - 0.8).abs() < size / 2).all(-1), 0.0, -torch.inf).double()


def test_a_density_that_is_zero_at_all_but_a_few_points_is_still_found() -> None:
    found = adapt(box(0.5), one(2), evaluations=1200, seed=0)
    assert found.log_evidence == pytest.approx(2 * math.log(0.5), abs=0.3)
    torch.testing.assert_close(moments(found.mixture)[0], torch.full((2,), 0.8, dtype=F64), rtol=0, atol=0.1)


@pytest.mark.parametrize("size", [0.2, 0.05, 0.0])
def test_a_density_that_is_zero_at_nearly_all_points_or_all_does_no_harm(size: float) -> None:
    """The mixture stays usable, and the effective size says how little was found."""
    found = adapt(box(size), one(2), evaluations=600, seed=0)
    assert all(bool(part.isfinite().all()) for part in found.mixture)
    assert found.effective < 12 if size else found.effective == 0.0
    if not size:
        assert found.log_evidence == -math.inf
        torch.testing.assert_close(found.mixture.means, torch.zeros(1, 2, dtype=F64))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_density_that_fails_at_some_points_is_zero_there(value: float) -> None:
    def failing(points: Tensor) -> Tensor:
        return torch.where(points[:, 0] > 1.0, value, -0.5 * points.square().sum(-1))

    found = adapt(failing, one(2), evaluations=600, seed=0)
    assert found.log_evidence == pytest.approx(math.log(2 * math.pi * scipy.stats.norm.cdf(1.0)), abs=0.05)
    assert float(found.log_weights[found.points[:, 0] > 1.0].exp().sum()) == 0.0


def test_weights_that_enough_points_carry_are_left_alone() -> None:
    log_weight = torch.randn(200, generator=torch.Generator().manual_seed(0), dtype=F64)
    torch.testing.assert_close(_tempered(log_weight, 2), torch.softmax(log_weight, 0))


@pytest.mark.parametrize("sd", [1e-2, 1e-4])
def test_a_needle_far_from_the_guess_does_no_harm(sd: float) -> None:
    """At first one point carries all the weight; the mixture closes in on it."""

    def needle(points: Tensor) -> Tensor:
        return -0.5 * ((points - 0.7) / sd).square().sum(-1)

    found = adapt(needle, one(2), evaluations=1200, seed=0)
    assert all(bool(part.isfinite().all()) for part in (*found.mixture, found.log_weights))
    assert found.effective >= 1
    assert float((moments(found.mixture)[0] - 0.7).abs().max()) < 0.1


# --- pieces -----------------------------------------------------------------------------------------------------------


def principal(mixture: Mixture, place: int = -1) -> Tensor:
    """One principal axis of each component, as long as its standard deviation."""
    values, vectors = torch.linalg.eigh(mixture.covariances)
    return vectors[..., place] * values[:, place, None].sqrt()


@pytest.mark.parametrize("pieces", [12, 24, 64])
@pytest.mark.parametrize("place", [0, 1])
def test_pieces_are_narrower_along_their_axis_and_add_up_to_the_whole(pieces: int, place: int) -> None:
    axes = principal(THREE, place)
    found = divided(THREE, axes, pieces)
    assert pieces - 2 <= len(found.means) <= pieces + 2 * LIGHT_PIECES  # light ones have more than their share
    for mine, whole in zip(moments(found), moments(THREE), strict=True):
        torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-9)
    assert float(found.log_weights.exp().sum()) == pytest.approx(1)
    heaviest = int(THREE.log_weights.argmax())
    unit = axes[heaviest] / axes[heaviest].norm()
    across = torch.stack([-unit[1], unit[0]])
    whole, piece = THREE.covariances[heaviest], found.covariances[0]  # THREE's first is its heaviest
    assert float(unit @ piece @ unit) < 0.6**2 * float(unit @ whole @ unit)
    assert float(across @ piece @ across) == pytest.approx(float(across @ whole @ across))
    points = THREE.draw(torch.rand(2000, 3, generator=torch.Generator().manual_seed(1), dtype=F64))
    ratio = (found.log_density(points) - THREE.log_density(points)).exp()
    assert float((ratio - 1).abs().mean()) < 0.04  # twice the total variation


def test_too_few_pieces_leave_a_mixture_whole() -> None:
    for pieces in (0, 3):
        for mine, whole in zip(divided(THREE, principal(THREE), pieces), THREE, strict=True):
            torch.testing.assert_close(mine, whole)
