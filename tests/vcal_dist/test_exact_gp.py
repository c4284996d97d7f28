"""Exact Gaussian processes of few rows, against dense computations and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct, Matern, WhiteKernel
from torch import Tensor

from tests.vcal_dist.conftest import F64, Kit
from vcal_dist import exact_gp
from vcal_dist.exact_gp import KINDS, Hyperparameters, Kind
from vcal_dist.problems.functions import FUNCTIONS


def hyperparameters(processes: int, d: int) -> Hyperparameters:
    scales = torch.linspace(0.3, 0.9, d, dtype=F64).log().repeat(processes, 1)
    every = torch.ones(processes, dtype=F64)
    return Hyperparameters(scales, every * math.log(1.3), every * math.log(0.4), every * math.log(0.05))


def data(rows: int = 14, d: int = 2) -> tuple[Tensor, Tensor]:
    u = Kit.rand(1, rows, d)
    return u, torch.stack([(3 * u[:, 0]).sin(), u.prod(-1)], -1)


def reference(kind: Kind, h: Hyperparameters, u: Tensor, z: Tensor) -> GaussianProcessRegressor:
    """The same process, with everything known, by scikit-learn."""
    ell, var = h.lengthscale[0].exp().numpy(), float((2 * h.amplitude[0]).exp())
    slope = float((2 * h.slope[0]).exp())
    stationary = RBF(ell) if kind == "gaussian" else Matern(ell, nu=2.5)
    # DotProduct is σ₀² + u·v at u − ½.
    kernel = ConstantKernel(var) * stationary + ConstantKernel(slope) * DotProduct(sigma_0=1 / math.sqrt(slope))
    noise = float(h.noise_variance()[0])
    found = GaussianProcessRegressor(kernel + WhiteKernel(noise), optimizer=None, alpha=0.0)
    return found.fit(u.numpy() - 0.5, z.numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_moments_and_evidence_are_those_of_scikit_learn(kind: Kind) -> None:
    u, z = data()
    h, new = hyperparameters(1, 2), Kit.rand(2, 5, 2)
    counted = torch.ones(1, len(u), dtype=torch.bool)
    mean, var = exact_gp.condition(kind, h, u, z, counted).moments(new)
    other = reference(kind, h, u, z)
    expected, sd = other.predict(new.numpy() - 0.5, return_std=True)
    np.testing.assert_allclose(mean[0].numpy(), expected, atol=1e-8)
    noise = float(h.noise_variance()[0])
    np.testing.assert_allclose((var[0] + noise).sqrt().numpy(), sd[:, 0], rtol=1e-6)
    evidence = exact_gp.log_evidence(kind, h, u, z, counted)
    assert float(evidence) == pytest.approx(other.log_marginal_likelihood_value_, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_do_not_count_are_as_if_they_were_not_there(kind: Kind) -> None:
    u, z = data()
    counted = torch.ones(2, len(u), dtype=torch.bool)
    counted[1, 3:7] = False
    both = exact_gp.condition(kind, hyperparameters(2, 2), u, z, counted)
    fewer = counted[1]
    alone = exact_gp.condition(kind, hyperparameters(1, 2), u[fewer], z[fewer], counted[1:, fewer])
    new = Kit.rand(3, 4, 2)
    for found, expected in zip(both.moments(new), alone.moments(new), strict=True):
        torch.testing.assert_close(found[1], expected[0])
    torch.testing.assert_close(
        exact_gp.log_evidence(kind, hyperparameters(2, 2), u, z, counted)[1:],
        exact_gp.log_evidence(kind, hyperparameters(1, 2), u[fewer], z[fewer], counted[1:, fewer]),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_slopes_of_the_posterior_are_its_differences(kind: Kind) -> None:
    u, z = data(12)
    counted = torch.ones(2, len(u), dtype=torch.bool)
    counted[1, ::4] = False
    rows, h = counted.sum(-1), hyperparameters(2, 2)
    value, slopes = exact_gp._log_posterior(kind, h, u, z, counted, rows)
    torch.testing.assert_close(value, exact_gp.log_evidence(kind, h, u, z, counted) + exact_gp.log_prior(h, rows))
    step = 1e-5
    for i, slope in enumerate(slopes):
        for j in range(slope[0].numel()):
            ahead, behind = ([part.clone() for part in h] for _ in range(2))
            ahead[i].reshape(2, -1)[:, j] += step
            behind[i].reshape(2, -1)[:, j] -= step
            values = [
                exact_gp._log_posterior(kind, Hyperparameters(*parts), u, z, counted, rows)[0]
                for parts in (ahead, behind)
            ]
            torch.testing.assert_close(
                slope.reshape(2, -1)[:, j], (values[0] - values[1]) / (2 * step), rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("kind", KINDS)
def test_learning_ends_at_a_mode_of_all_rows(kind: Kind) -> None:
    """Also with more rows than Adam takes, and where the noise of the mode is next to nothing."""
    function = FUNCTIONS["wing_weight"]
    u = torch.from_numpy(np.random.default_rng(1).random((130, function.inputs)))
    z = torch.from_numpy(function(u.numpy()))
    z = ((z - z.mean()) / z.std())[:, None]
    counted = torch.ones(2, len(u), dtype=torch.bool)
    counted[1, ::4] = False
    h = exact_gp.learn(kind, u, z, counted)
    assert float(h.noise.exp().max()) < 0.01
    value, slopes = exact_gp._log_posterior(kind, h, u, z, counted, counted.sum(-1))
    # Nats that a Newton step could still gain, along each hyperparameter with a curvature of one or more.
    assert max(float(slope.abs().max()) for slope in slopes) < 1.0
    generator = Kit.generator(5)
    for _ in range(20):  # a maximum: every direction leads down, but for what the last iterations leave
        moved = Hyperparameters(*(part + 0.3 * torch.randn(part.shape, generator=generator, dtype=F64) for part in h))
        there = exact_gp._log_posterior(kind, moved, u, z, counted, counted.sum(-1))[0]
        assert bool((there < value + 0.05).all())


def test_the_prior_widens_with_the_rows() -> None:
    """Of 20 rows near what is usual; of 100 the length scales' is that of Hvarfner, Hellsten and Nardi (2024)."""
    d = 3

    def at(log_lengthscale: float, rows: int) -> float:
        h = Hyperparameters(torch.full((1, d), log_lengthscale, dtype=F64), *(torch.zeros(1, dtype=F64),) * 3)
        return float(exact_gp.log_prior(h, torch.tensor([rows])))

    for rows, median, spread in (
        (5, math.log(0.5 * math.sqrt(d)), 1.0),
        (20, math.log(0.5 * math.sqrt(d)), 1.0),
        (100, math.sqrt(2) + 0.5 * math.log(d), math.sqrt(3)),
        (5000, math.sqrt(2) + 0.5 * math.log(d), math.sqrt(3)),
    ):
        assert at(median + 2 * spread, rows) - at(median, rows) == pytest.approx(-0.5 * d * 4)
    assert at(2.0, 20) - at(0.0, 20) < at(2.0, 45) - at(0.0, 45) < at(2.0, 100) - at(0.0, 100)


@pytest.mark.parametrize("name", ["ridge", "ishigami"])
@pytest.mark.parametrize("kind", KINDS)
def test_learning_finds_the_best_mode(kind: Kind, name: str) -> None:
    """As good as the best of several starts of a quasi-Newton method."""
    function, rng = FUNCTIONS[name], np.random.default_rng(3)
    u = torch.from_numpy(rng.random((60, function.inputs)))
    z = torch.from_numpy(function(u.numpy()))
    z = ((z - z.mean()) / z.std())[:, None]
    counted = torch.ones(1, len(u), dtype=torch.bool)
    d = function.inputs

    def value(h: Hyperparameters) -> float:
        return float(exact_gp.log_evidence(kind, h, u, z, counted) + exact_gp.log_prior(h, counted.sum(-1)))

    def unpacked(flat: np.ndarray) -> Hyperparameters:
        t = torch.from_numpy(flat)
        return Hyperparameters(t[None, :d], t[d : d + 1], t[d + 1 : d + 2], t[d + 2 :])

    best = -math.inf
    for lengthscale, noise in ((0.1, 0.1), (0.3, 0.1), (0.3, 0.01), (1.0, 0.1)):
        start = np.log(np.r_[np.full(d, lengthscale * math.sqrt(d)), 1.0, 0.5, noise])
        found = minimize(lambda flat: -value(unpacked(flat)), start, method="L-BFGS-B", bounds=[(-9, 9)] * (d + 3))
        best = max(best, -found.fun)
    assert value(exact_gp.learn(kind, u, z, counted)) > best - 1.0


def test_no_rows_think_better_of_the_mode_of_others() -> None:
    """Of twenty inputs, folds of the same rows lead to modes that are a hundred nats apart: the best one is for all."""
    function, rows = FUNCTIONS["welch"], 120
    u = torch.from_numpy(np.random.default_rng(0).random((rows, function.inputs)))
    z = torch.from_numpy(function(u.numpy()))
    z = ((z - z.mean()) / z.std())[:, None]
    counted = torch.ones(4, rows, dtype=torch.bool)
    for fold in range(3):
        counted[1 + fold, fold::5] = False
    h = exact_gp.learn("gaussian", u, z, counted)
    for p, own in enumerate(counted):
        every = torch.ones(1, int(own.sum()), dtype=torch.bool)
        values = [
            float(exact_gp.log_evidence("gaussian", h.take(q), u[own], z[own], every))
            + float(exact_gp.log_prior(h.take(q), own.sum()[None]))
            for q in range(len(counted))
        ]
        assert values[p] > max(values) - exact_gp.BETTER


@pytest.mark.parametrize("kind", KINDS)
def test_paths_have_the_covariance_of_the_process(kind: Kind) -> None:
    u, z = data(12)
    process = exact_gp.condition(kind, hyperparameters(1, 2), u, z, torch.ones(1, 12, dtype=torch.bool))
    new = Kit.rand(4, 200, 2)
    h = process.hyperparameters
    across = exact_gp.covariance(kind, h, u, new)[0]
    solved = torch.linalg.solve_triangular(process.lower[0], across, upper=False)
    exact = exact_gp.covariance(kind, h, new, new)[0] - solved.mT @ solved
    path = exact_gp.paths(process, seed=1)
    left = path.prior(new) - across.mT @ path.solved
    found = left @ left.mT
    assert float(found.diagonal().mean() / exact.diagonal().mean()) == pytest.approx(1.0, abs=0.1)
    off = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert float(off) < 0.35
