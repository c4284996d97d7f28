"""The paper's illustrative example: its data come from the stated processes, and its model states the same ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from vcal_dist.analytic import ExactPosterior
from vcal_dist.initialise import start_model
from vcal_dist.likelihoods import Gaussian
from vcal_dist.problems import illustrative

Array = NDArray[np.float64]


def kernel(u: Array, v: Array, sigma: float, lengthscale: float) -> Array:
    """σ²·exp(−|d|²/(2ℓ²)) with a loop over pairs; A = 1/ℓ²."""
    return np.array([[sigma**2 * math.exp(-sum((a - b) ** 2) / (2 * lengthscale**2)) for b in v] for a in u])


def rows(count: int, seed: int) -> Array:
    """Points (x, t) in the user's units."""
    return np.random.default_rng(seed).random((count, 2)) * [1, 5] - [0, 2.5]


def unit(u: Array) -> torch.Tensor:
    return torch.from_numpy((u - [0, -2.5]) / [1, 5])


def test_kernels_have_the_papers_constants() -> None:
    u, v = rows(5, 0), rows(4, 1)
    np.testing.assert_allclose(illustrative.kernel_eta(u, v), kernel(u, v, 1.0, math.sqrt(2)), rtol=1e-12)
    x, w = u[:, :1], v[:, :1]
    np.testing.assert_allclose(illustrative.kernel_delta(x, w), kernel(x, w, 0.2, math.sqrt(20)), rtol=1e-12)
    # By hand: d = (1, 2), so exp(−½·½·5); d = 1, so 0.04·exp(−½/20).
    assert illustrative.kernel_eta([[0, 0]], [[1, 2]]) == pytest.approx(math.exp(-1.25))
    assert illustrative.kernel_delta([[0]], [[1]]) == pytest.approx(0.04 * math.exp(-0.025))


@torch.no_grad()
def test_the_models_kernels_are_those_of_the_data_in_the_users_units() -> None:
    model = illustrative.model()
    u, v = rows(20, 2), rows(15, 3)
    eta = model.eta.last
    np.testing.assert_allclose(eta.kernel(unit(u), unit(v)), illustrative.kernel_eta(u, v), rtol=1e-12)
    assert model.delta is not None
    delta = model.delta.last
    x, w = torch.from_numpy(u[:, :1]), torch.from_numpy(v[:, :1])
    np.testing.assert_allclose(delta.kernel(x, w), illustrative.kernel_delta(u[:, :1], v[:, :1]), rtol=1e-12)
    # The features themselves: an error of about 1/√500, far less with orthogonal frequencies.
    np.testing.assert_allclose(eta(unit(u)) @ eta(unit(v)).mT, illustrative.kernel_eta(u, v), atol=0.1)
    np.testing.assert_allclose(delta(x) @ delta(w).mT, illustrative.kernel_delta(u[:, :1], v[:, :1]), atol=0.002)


def test_nothing_of_the_model_is_learned_or_started_anew() -> None:
    model = illustrative.model(features=20)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert all(part.dtype == torch.float64 for part in model.state_dict().values())
    assert model.eta.width == 20
    assert model.width == 40  # no constant in δ
    assert model.residual_variance() is None
    for likelihood in (model.likelihood_z, model.likelihood_y):
        assert isinstance(likelihood, Gaussian)
        assert likelihood.noise_variance().item() == pytest.approx(1e-4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data, scaling = illustrative.generate(0), illustrative.scaling()
    runs = scaling.runs(*(torch.from_numpy(a) for a in (data.x_runs, data.t, data.z)))
    observations = scaling.observations(torch.from_numpy(data.x), torch.from_numpy(data.y))
    start_model(model, runs, observations, seed=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(illustrative.model(20, seed=1).eta.last.omega, model.eta.last.omega)


def test_the_scaling_moves_inputs_to_the_unit_cube_and_leaves_outputs() -> None:
    data, scaling = illustrative.generate(1), illustrative.scaling()
    runs = scaling.runs(*(torch.from_numpy(a) for a in (data.x_runs, data.t, data.z)))
    np.testing.assert_allclose(runs.u, np.column_stack([data.x_runs, (data.t + 2.5) / 5]), rtol=1e-12)
    np.testing.assert_array_equal(runs.z, data.z)
    assert not runs.log_jacobian.any()
    prior = illustrative.model(2).prior
    assert prior.theta(torch.tensor([0.8])).item() == pytest.approx(0.8)  # θ̃ is θ
    assert prior.unit(torch.tensor([0.8])).item() == pytest.approx(3.3 / 5)


def joint_covariance(data: illustrative.Data) -> Array:
    """Of (z, y), with noise."""
    u = np.column_stack([data.x_runs, data.t])
    v = np.column_stack([data.x, np.full(len(data.x), data.theta_true)])
    both = np.concatenate([u, v])
    covariance = kernel(both, both, 1.0, math.sqrt(2)) + 1e-4 * np.eye(len(both))
    covariance[len(u) :, len(u) :] += kernel(data.x, data.x, 0.2, math.sqrt(20))
    return covariance


def test_the_data_are_draws_of_the_stated_processes() -> None:
    white = []
    for seed in range(200):
        data = illustrative.generate(seed)
        rows_ = np.concatenate([data.z, data.y])[:, 0]
        white.append(np.linalg.solve(np.linalg.cholesky(joint_covariance(data)), rows_))
    values = np.array(white)  # (200, 11), independent and standard normal
    assert values.shape == (200, 11)
    assert stats.kstest(values.ravel(), "norm").pvalue > 1e-3
    for column in values.T:  # the last ones are y given z
        assert 0.7 < column.var() < 1.4
        assert abs(column.mean()) < 4 / math.sqrt(200)


def test_theta_comes_from_its_prior_between_the_bounds() -> None:
    thetas = [illustrative.generate(seed).theta_true for seed in range(200)]
    assert stats.kstest(thetas, stats.truncnorm(-2.5, 2.5).cdf).pvalue > 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_designs_fill_the_space(seed: int) -> None:
    data = illustrative.generate(seed, runs=8, observations=6)
    assert data.x_runs.shape == data.t.shape == data.z.shape == (8, 1)
    assert data.x.shape == data.y.shape == (6, 1)
    for column, count in ((data.x_runs, 8), ((data.t + 2.5) / 5, 8), (data.x, 6)):  # one in every cell
        assert sorted(np.floor(column[:, 0] * count).astype(int)) == list(range(count))
    u = unit(np.column_stack([data.x_runs, data.t])).numpy()
    distances = np.linalg.norm(u[:, None] - u[None], axis=-1) + 10 * np.eye(8)
    assert distances.min() > 0.25  # 1/√8 = 0.35 on a square grid; 0.1 is typical of one hypercube
    assert np.diff(np.sort(data.x[:, 0])).min() > 0.3 / 6


def test_the_seed_decides() -> None:
    first, same, other = (illustrative.generate(seed) for seed in (5, 5, 6))
    for a, b, c in zip(first, same, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)


def test_the_exact_posterior_of_features_is_that_of_the_processes() -> None:
    data, scaling, model = illustrative.generate(2), illustrative.scaling(), illustrative.model()
    runs = scaling.runs(*(torch.from_numpy(a) for a in (data.x_runs, data.t, data.z)))
    observations = scaling.observations(torch.from_numpy(data.x), torch.from_numpy(data.y))
    exact = ExactPosterior(model, runs, observations)
    thetas = np.linspace(-3, 3, 61)
    by_features = exact.log_density(torch.from_numpy(thetas)[:, None]).exp().numpy()
    values = np.concatenate([data.z, data.y])[:, 0]
    by_kernels = [
        stats.multivariate_normal(np.zeros(11), joint_covariance(data._replace(theta_true=theta))).pdf(values)
        * stats.norm.pdf(theta)
        for theta in thetas
    ]
    p, q = by_features / by_features.sum(), np.array(by_kernels) / np.sum(by_kernels)
    assert 0.5 * np.abs(p - q).sum() < 0.05
