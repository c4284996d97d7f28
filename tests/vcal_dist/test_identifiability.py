"""What knowing δ tells of θ̃: against dense matrices, for one Gaussian and for mixtures of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.vcal_dist.conftest import Kit
from vcal_dist.fullrank import Arrow, FullRank
from vcal_dist.identifiability import shared_with_discrepancy, variance_inflation

F64 = torch.float64
Array = NDArray[np.float64]
ONE = torch.zeros(1, dtype=F64)


def explained(covariance: Array, theta: int, known: Array) -> Array:
    """R² of the first `theta` entries given linear functions `known` (F, ·) of all, by the Schur complement."""
    own, cross = covariance[:theta, :theta], covariance[:theta] @ known.T
    left = own - cross @ np.linalg.pinv(known @ covariance @ known.T, rcond=1e-10) @ cross.T
    found: Array = 1 - np.diag(left) / np.diag(own)
    return found


def columns_of_delta(theta: int, outputs: int, width: int, eta: int) -> Array:
    """The rows of the identity that pick δ's weights out of (θ̃, w_1, …, w_K)."""
    picked = [theta + k * width + j for k in range(outputs) for j in range(eta, width)]
    chosen: Array = np.eye(theta + outputs * width)[picked]
    return chosen


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("absorbed", [False, True])
def test_one_gaussian_is_that_of_the_dense_covariance(outputs: int, absorbed: bool) -> None:
    frame = Kit.frame(outputs, 7, seed=4) if absorbed else None
    q = Kit.full_rank(2, outputs, 7, frame=frame, absorbed=absorbed)
    _, covariance = Kit.dense(q)
    expected = explained(covariance, 2, columns_of_delta(2, outputs, 7, 4))
    found = shared_with_discrepancy([q], ONE, slice(0, 4))
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert (expected > 0.01).all()
    np.testing.assert_allclose(variance_inflation(found), 1 / (1 - expected), rtol=1e-8)


def test_a_mixture_is_that_of_its_dense_moments() -> None:
    components = [Kit.full_rank(2, 2, 6, seed=seed) for seed in (5, 50, 500)]
    weights = np.array([0.5, 0.3, 0.2])
    moments = [Kit.dense(q) for q in components]
    mean = sum(p * m for p, (m, _) in zip(weights, moments, strict=True))
    total = sum(p * (c + np.outer(m - mean, m - mean)) for p, (m, c) in zip(weights, moments, strict=True))
    assert isinstance(total, np.ndarray)
    found = shared_with_discrepancy(components, torch.from_numpy(weights).log(), slice(0, 4))
    np.testing.assert_allclose(found, explained(total, 2, columns_of_delta(2, 2, 6, 4)), rtol=1e-9)


def observed(phi_theta: Tensor, phi_eta: Tensor, phi_delta: Tensor, noise: float) -> FullRank:
    """The posterior of y = ψ_θ·θ̃ + φ_η·w_η + φ_δ·w_δ + ε, under N(0, I)."""
    d, rows = phi_theta.shape[1], torch.cat([phi_theta, phi_eta, phi_delta], 1)
    precision = torch.eye(rows.shape[1], dtype=F64) + rows.mT @ rows / noise**2
    q = FullRank(d, 1, rows.shape[1] - d)
    q.move(q.theta_mean, q.mean, Arrow(precision[:d, :d], precision[None, :d, d:], precision[None, d:, d:]))
    return q


def test_only_values_of_delta_at_the_observations_count() -> None:
    # Ten weights of δ and six observations: four directions of w_δ do nothing, and the last two columns not at all.
    phi_delta = torch.cat([Kit.randn(3, 6, 8), torch.zeros(6, 2, dtype=F64)], 1)
    q = observed(Kit.randn(1, 6, 2), Kit.randn(2, 6, 3), phi_delta, noise=0.3)
    _, covariance = Kit.dense(q)
    at_observations = np.concatenate([np.zeros((6, 2 + 3)), phi_delta.numpy()], 1)
    found = shared_with_discrepancy([q], ONE, slice(0, 3))
    np.testing.assert_allclose(found, explained(covariance, 2, at_observations), rtol=1e-8)
    fewer = observed(Kit.randn(1, 6, 2), Kit.randn(2, 6, 3), phi_delta[:, :8], noise=0.3)
    np.testing.assert_allclose(found, shared_with_discrepancy([fewer], ONE, slice(0, 3)), rtol=1e-8)


def test_what_delta_does_too_is_shared_and_what_it_cannot_do_is_not() -> None:
    x = torch.linspace(0, 1, 50, dtype=F64)[:, None]
    offset, wave = torch.ones_like(x), torch.sin(40 * x)
    q = observed(torch.cat([offset, wave], 1), torch.zeros(50, 1, dtype=F64), torch.cat([offset, x], 1), noise=0.05)
    same, other = variance_inflation(shared_with_discrepancy([q], ONE, slice(0, 1))).tolist()
    assert same > 1000  # θ̃_1 and δ's constant are known as a sum only
    assert 1 <= other < 1.1


def test_pieces_of_a_gaussian_share_no_more_than_the_whole() -> None:
    # θ̃ and δ are independent: that θ̃ is in one narrow piece or another says nothing of δ.
    def piece(mean: float) -> FullRank:
        q = FullRank(1, 1, 4)
        q.move(
            torch.tensor([mean], dtype=F64), q.mean, q.precision._replace(theta=torch.full((1, 1), 400.0, dtype=F64))
        )
        return q

    pieces = [piece(mean) for mean in np.linspace(-1, 1, 20)]
    found = shared_with_discrepancy(pieces, torch.zeros(20, dtype=F64), slice(0, 2))
    assert found.item() == pytest.approx(0, abs=1e-12)
