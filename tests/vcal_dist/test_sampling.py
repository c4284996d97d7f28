"""The sampler draws from the density that it is given, repeats itself, and passes errors on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from vcal_dist.errors import ModelError
from vcal_dist.sampling import Draws, sample

COVARIANCE = torch.tensor([[1.0, 0.8, 0.02], [0.8, 2.0, 0.03], [0.02, 0.03, 0.005]], dtype=torch.float64)
MEAN = torch.tensor([3.0, -1.0, 0.2], dtype=torch.float64)
PRECISION = torch.linalg.inv(COVARIANCE)


def gaussian(point: Tensor) -> Tensor:
    deviation = point - MEAN
    return -0.5 * deviation @ PRECISION @ deviation


def standard_normal(point: Tensor) -> Tensor:
    return -0.5 * point.square().sum()


def starts(chains: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(chains, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def drawn() -> Draws:
    return sample(gaussian, MEAN + 0.1 * starts(2, 3), draws=500, tune=200, seed=1)


def test_a_correlated_gaussian_has_its_mean_and_covariance(drawn: Draws) -> None:
    assert drawn.values.shape == (2, 500, 3)
    assert drawn.values.dtype == torch.float64
    assert drawn.divergences == 0
    flat = drawn.values.flatten(0, 1)
    error = COVARIANCE.diag().sqrt() / drawn.effective.sqrt()  # standard error of a mean
    assert ((flat.mean(0) - MEAN).abs() < 4 * error).all()
    # var of a sample covariance: (Σ_ii Σ_jj + Σ_ij²)/size; squares mix more slowly than the values, hence /3
    diagonal = COVARIANCE.diag()
    error = ((torch.outer(diagonal, diagonal) + COVARIANCE.square()) / (drawn.effective.min() / 3)).sqrt()
    assert ((flat.T.cov() - COVARIANCE).abs() < 4 * error).all()


def test_the_diagnostics_of_good_chains_are_good(drawn: Draws) -> None:
    assert drawn.rhat.shape == drawn.effective.shape == (3,)
    assert (drawn.rhat < 1.03).all()
    assert (drawn.effective > 200).all()


def test_chains_in_different_modes_show_in_rhat() -> None:
    def two_modes(point: Tensor) -> Tensor:
        return torch.logaddexp(-0.5 * (point[0] - 30).square(), -0.5 * (point[0] + 30).square())

    far = torch.tensor([[30.1], [-30.1]], dtype=torch.float64)
    drawn = sample(two_modes, far, draws=100, tune=100, seed=0)
    assert drawn.rhat.item() > 1.5
    assert drawn.effective.item() < 20
    assert drawn.values.mean(1).flatten().tolist() == pytest.approx([30, -30], abs=1)  # each chain has its own start


def test_a_bounded_density_behind_a_bijection_has_its_moments() -> None:
    # θ ~ Beta(2, 5) through θ = sigmoid(point): the density of the point carries the Jacobian θ(1 − θ).
    def beta(point: Tensor) -> Tensor:
        log_theta, log_rest = torch.nn.functional.logsigmoid(point), torch.nn.functional.logsigmoid(-point)
        return (2 * log_theta + 5 * log_rest).sum()

    drawn = sample(beta, starts(2, 1), draws=500, tune=200, seed=2)
    theta = drawn.values.sigmoid().flatten()
    exact = stats.beta(2, 5)
    assert abs(theta.mean().item() - exact.mean()) < 4 * exact.std() / drawn.effective.item() ** 0.5
    for level in (0.1, 0.5, 0.9):
        below = (theta < exact.ppf(level)).double().mean().item()
        assert abs(below - level) < 4 * (level * (1 - level) / (drawn.effective.item() / 2)) ** 0.5


def test_a_banana_has_its_moments() -> None:
    # x ~ N(0, 1), y | x ~ N(x²/2, 1): E y = 1/2, var y = 1/2 + 1.
    def banana(point: Tensor) -> Tensor:
        x, y = point
        return -0.5 * x.square() - 0.5 * (y - 0.5 * x.square()).square()

    drawn = sample(banana, starts(2, 2), draws=500, tune=200, seed=3)
    flat = drawn.values.flatten(0, 1)
    error = torch.tensor([1.0, 1.5]).sqrt() / drawn.effective.sqrt()
    assert ((flat.mean(0) - torch.tensor([0.0, 0.5])).abs() < 4 * error).all()
    assert flat.var(0).tolist() == pytest.approx([1.0, 1.5], rel=0.25)


def test_a_seed_gives_the_same_draws_and_another_seed_others() -> None:
    first, again, other = (sample(gaussian, MEAN + starts(2, 3), draws=20, tune=50, seed=s).values for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.isclose(first[:, -1], other[:, -1]).any()
    assert not torch.isclose(first[0, -1], first[1, -1]).any()


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    sample(standard_normal, starts(1, 2), draws=10, tune=10, seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_start_at_the_mode_works() -> None:
    drawn = sample(standard_normal, torch.zeros(2, 2), draws=200, tune=100, seed=0)
    assert (drawn.values.flatten(0, 1).std(0) - 1).abs().max() < 0.3


def test_sampling_works_where_gradients_are_off() -> None:
    with torch.no_grad():
        assert sample(standard_normal, starts(1, 1), draws=10, tune=10, seed=0).values.shape == (1, 10, 1)


def test_a_region_without_density_is_not_entered() -> None:
    def half_normal(point: Tensor) -> Tensor:  # NaN below zero, as a careless density has it
        return -0.5 * point.square().sum() + 0 * point.sqrt().sum()

    drawn = sample(half_normal, torch.ones(2, 1), draws=100, tune=100, seed=0)
    assert (drawn.values > 0).all()
    assert drawn.divergences > 0


def test_a_gradient_that_is_a_broadcast_view_works() -> None:
    def exponential(point: Tensor) -> Tensor:
        return torch.where((point > 0).all(), -point.sum(), -torch.inf)

    assert (sample(exponential, torch.ones(1, 2), draws=20, tune=20, seed=0).values > 0).all()


def tasks() -> int:
    """Threads of this process, those of native libraries too where the system tells."""
    folder = Path("/proc/self/task")
    return len(list(folder.iterdir())) if folder.exists() else threading.active_count()


def test_no_thread_stays_behind() -> None:
    def all_ways() -> None:
        sample(standard_normal, starts(2, 1), draws=10, tune=10, seed=0)
        with pytest.raises(LookupError):
            sample(fails_at(10), torch.full((1, 2), 0.5), draws=1000, tune=10, seed=0)

    all_ways()  # starts what lives as long as the process
    before = tasks()
    for _ in range(5):
        all_ways()
    ends = time.monotonic() + 10  # threads may need a moment to end
    while tasks() > before + 1 and time.monotonic() < ends:
        time.sleep(0.05)
    assert tasks() <= before + 1


def fails_at(call: int) -> Callable[[Tensor], Tensor]:
    calls = 0

    def log_density(point: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise LookupError("the table has no such row")
        return standard_normal(point)

    return log_density


@pytest.mark.parametrize("call", [1, 2, 3, 5, 100])
def test_an_exception_of_the_log_density_reaches_the_caller(call: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LookupError, match="the table has no such row"):
        sample(fails_at(call), torch.full((1, 2), 0.5), draws=100, tune=100, seed=0)
    assert "panicked" not in capfd.readouterr().err


def test_a_start_without_density_is_named() -> None:
    start = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    with pytest.raises(ModelError, match=r"nan .* at start 1, \[-1"):
        sample(lambda point: point.log().sum() - point.sum(), start, seed=0)


def test_a_coordinate_that_does_not_matter_is_an_error() -> None:
    with pytest.raises(ModelError, match="leave out coordinates"):
        sample(lambda point: -(point[0] ** 2), torch.ones(1, 2), seed=0)


@pytest.mark.parametrize(
    ("start", "settings", "message"),
    [
        (torch.zeros(3), {}, r"start must have the shape \(chains, dim\)"),
        (torch.zeros(0, 3), {}, r"it has \(0, 3\)"),
        (torch.zeros(1, 3), {"draws": 3}, "draws is 3"),
        (torch.zeros(1, 3), {"tune": 0}, "tune is 0"),
    ],
)
def test_settings_that_cannot_be_are_named(start: Tensor, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        sample(standard_normal, start, seed=0, **settings)


def test_a_log_density_that_is_no_scalar_is_an_error() -> None:
    with pytest.raises(ModelError, match="must return a scalar"):
        sample(lambda point: -point.square(), torch.ones(1, 2), seed=0)
