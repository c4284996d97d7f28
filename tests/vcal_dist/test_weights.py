"""One conformance test for all families of q(θ̃, w), and what FullRank promises beyond: frames, arrows, state."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from vcal_dist.collapsed import gram
from vcal_dist.fullrank import Arrow, Frame, FullRank, factorise
from vcal_dist.weights import MeanField

F64 = torch.float64
D2, K, E, D = 2, 2, 3, 5  # E columns of η, D − E of δ
DRAWS = 40_000
Family = FullRank | MeanField

FAMILIES = ["meanfield_prior", "meanfield", "fullrank_prior", "fullrank", "fullrank_framed", "fullrank_absorbed"]
every_family = pytest.mark.parametrize("name", FAMILIES)


def build(kit: Any, name: str, theta_dim: int = D2) -> Family:
    return _build(kit, name, theta_dim).requires_grad_(False)


def _build(kit: Any, name: str, theta_dim: int) -> Family:
    frame = kit.frame(K, E, 20).widen(D - E)
    match name:
        case "meanfield_prior":
            return MeanField(theta_dim, K, D, dtype=F64)
        case "meanfield":
            return kit.mean_field(theta_dim, K, D)
        case "fullrank_prior":
            return FullRank(theta_dim, K, D)
        case "fullrank":
            return kit.full_rank(theta_dim, K, D)
        case "fullrank_framed":
            return kit.full_rank(theta_dim, K, D, frame=frame)
        case _:
            return kit.full_rank(theta_dim, K, D, frame=frame, absorbed=True)


def projected(psi: Tensor, mean: Any, covariance: Any) -> tuple[Any, Any]:
    """Mean and variance of ψ·w for w ~ N(mean, covariance)."""
    rows = psi.numpy()
    return rows @ mean, np.einsum("bi,ij,bj->b", rows, covariance, rows)


def given(mean: Any, covariance: Any, wanted: Any, known: Any, value: Any) -> tuple[Any, Any]:
    """The conditional of a Gaussian, by the book."""
    gain = covariance[np.ix_(wanted, known)] @ np.linalg.inv(covariance[np.ix_(known, known)])
    centre = mean[wanted] + gain @ (value - mean[known])
    return centre, covariance[np.ix_(wanted, wanted)] - gain @ covariance[np.ix_(known, wanted)]


@every_family
def test_theta_moments_are_the_marginal_and_the_samples_follow_them(kit: Any, name: str) -> None:
    q = build(kit, name)
    mean, covariance = q.theta_moments()
    dense_mean, dense_covariance = kit.dense(q)
    np.testing.assert_allclose(mean, dense_mean[:D2], rtol=1e-12)
    np.testing.assert_allclose(covariance, dense_covariance[:D2, :D2], rtol=1e-10, atol=1e-12)
    # θ̃ is affine in the noise: unit vectors of noise show the root.
    root = (q.theta(torch.eye(D2, dtype=F64)) - q.theta(torch.zeros(D2, D2, dtype=F64))).mT
    torch.testing.assert_close(root @ root.mT, covariance)
    torch.testing.assert_close(q.theta(torch.zeros(1, D2, dtype=F64))[0], mean)


@every_family
def test_moments_given_theta_are_those_of_dense_conditioning_and_of_samples(kit: Any, name: str) -> None:
    q = build(kit, name)
    theta, psi = kit.randn(31, 3, D2), kit.randn(32, 3, 4, D)
    mean, var = q.moments(psi, theta=theta)
    assert mean.shape == var.shape == (3, 4, K)
    dense = kit.dense(q)
    noise = kit.randn(33, DRAWS, K, D)
    for s in range(3):
        drawn = torch.einsum("bd,nkd->nbk", psi[s], q.sample(noise, theta[s].expand(DRAWS, -1)))
        for k in range(K):
            wanted = np.arange(D2 + k * D, D2 + (k + 1) * D)
            m, v = projected(psi[s], *given(*dense, wanted, np.arange(D2), theta[s].numpy()))
            np.testing.assert_allclose(mean[s, :, k], m, rtol=1e-8, atol=1e-10)
            np.testing.assert_allclose(var[s, :, k], v, rtol=1e-8)
            error = (drawn[..., k].mean(0) - mean[s, :, k]) / (var[s, :, k] / DRAWS).sqrt()
            assert float(error.abs().max()) < 4.5
            ratio = drawn[..., k].var(0) / var[s, :, k]
            assert float((ratio - 1).abs().max()) < 4.5 * (2 / DRAWS) ** 0.5


@every_family
def test_rows_without_samples_of_their_own_serve_every_theta(kit: Any, name: str) -> None:
    q = build(kit, name)
    theta, psi = kit.randn(31, 3, D2), kit.randn(32, 4, D)
    mean, var = q.moments(psi, theta=theta)
    full_mean, full_var = q.moments(psi.expand(3, -1, -1), theta=theta)
    torch.testing.assert_close(mean.expand(3, -1, -1), full_mean)
    torch.testing.assert_close(var.expand(3, -1, -1), full_var)


@every_family
def test_moments_without_theta_integrate_it_out_also_over_some_columns(kit: Any, name: str) -> None:
    q = build(kit, name)
    dense_mean, dense_covariance = kit.dense(q)
    for columns in (slice(None), slice(0, E), slice(E, None)):
        psi = kit.randn(34, 4, len(range(D)[columns]))
        mean, var = q.moments(psi, columns)
        for k in range(K):
            wanted = np.arange(D2 + k * D, D2 + (k + 1) * D)[columns]
            m, v = projected(psi, dense_mean[wanted], dense_covariance[np.ix_(wanted, wanted)])
            np.testing.assert_allclose(mean[:, k], m, rtol=1e-8, atol=1e-10)
            np.testing.assert_allclose(var[:, k], v, rtol=1e-8)


@every_family
def test_samples_of_theta_and_weights_together_have_the_joint_covariance(kit: Any, name: str) -> None:
    q = build(kit, name)
    theta = q.theta(kit.randn(35, DRAWS, D2))
    w = q.sample(kit.randn(36, DRAWS, K, D), theta)
    draws = torch.cat([theta, w.reshape(DRAWS, -1)], 1).numpy()
    mean, covariance = kit.dense(q)
    whitened = np.linalg.solve(np.linalg.cholesky(covariance), (draws - mean).T)
    assert np.abs(whitened.mean(1)).max() < 5 / DRAWS**0.5
    assert np.abs(np.cov(whitened) - np.eye(len(mean))).max() < 5 * (2 / DRAWS) ** 0.5


@every_family
def test_moments_given_the_first_columns_are_those_of_dense_conditioning(kit: Any, name: str) -> None:
    q = build(kit, name)
    theta, first, psi = kit.randn(37, 3, D2), kit.randn(38, 3, K, E), kit.randn(39, 3, 4, D - E)
    mean, var = q.moments_given(psi, first, theta)
    dense = kit.dense(q)
    var = var.expand(3, -1, -1)
    for s in range(3):
        for k in range(K):
            start = D2 + k * D
            known = np.concatenate([np.arange(D2), np.arange(start, start + E)])
            value = np.concatenate([theta[s].numpy(), first[s, k].numpy()])
            m, v = projected(psi[s], *given(*dense, np.arange(start + E, start + D), known, value))
            np.testing.assert_allclose(mean[s, :, k], m, rtol=1e-7, atol=1e-9)
            np.testing.assert_allclose(var[s, :, k], v, rtol=1e-7)


@every_family
def test_what_is_known_of_the_first_columns_of_one_output_says_nothing_new_of_another(kit: Any, name: str) -> None:
    q = build(kit, name)
    theta, first, psi = kit.randn(37, 1, D2), kit.randn(38, 1, K, E), kit.randn(39, 1, 4, D - E)
    mean, _ = q.moments_given(psi, first, theta)
    other = first.clone()
    other[:, 0] += 1
    torch.testing.assert_close(q.moments_given(psi, other, theta)[0][..., 1:], mean[..., 1:])


@every_family
@pytest.mark.parametrize("theta_dim", [0, D2])
def test_the_divergence_is_that_of_dense_gaussians(kit: Any, name: str, theta_dim: int) -> None:
    q = build(kit, name, theta_dim)
    size = theta_dim + K * D
    prior_mean, prior_covariance = np.zeros(size), np.eye(size)
    if isinstance(q, FullRank) and q.absorbed:  # the frame is the prior
        for k in range(K):
            rows = slice(theta_dim + k * D, theta_dim + (k + 1) * D)
            prior_mean[rows] = q.frame_mean[k]
            prior_covariance[rows, rows] = q.frame_root[k] @ q.frame_root[k].mT
    expected = kit.gaussian_kl(*kit.dense(q), prior_mean, prior_covariance)
    assert float(q.kl()) == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("name", ["meanfield", "fullrank", "fullrank_framed"])
def test_the_divergence_is_the_mean_log_ratio_over_samples(kit: Any, name: str) -> None:
    q = build(kit, name)
    theta = q.theta(kit.randn(35, DRAWS, D2))
    draws = torch.cat([theta, q.sample(kit.randn(36, DRAWS, K, D), theta).reshape(DRAWS, -1)], 1).numpy()
    ratio = scipy.stats.multivariate_normal(*kit.dense(q)).logpdf(draws) - scipy.stats.norm.logpdf(draws).sum(1)
    assert float(q.kl()) == pytest.approx(ratio.mean(), abs=4.5 * ratio.std() / DRAWS**0.5)


@pytest.mark.parametrize("name", ["fullrank", "fullrank_framed", "fullrank_absorbed"])
def test_what_the_weights_cost_where_theta_is_a_point_is_the_divergence_of_dense_gaussians(kit: Any, name: str) -> None:
    q = build(kit, name)
    assert isinstance(q, FullRank)
    expected = 0.0
    for k in range(K):
        covariance = (q.raw_root[k] @ q.raw_root[k].mT).numpy()
        prior = (np.zeros(D), np.eye(D))
        if q.absorbed:
            prior = (q.frame_mean[k].numpy(), (q.frame_root[k] @ q.frame_root[k].mT).numpy())
        expected += kit.gaussian_kl(q.raw_mean[k].numpy(), covariance, *prior)
    assert float(q.kl_weights()) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["meanfield_prior", "fullrank_prior"])
def test_a_family_starts_at_the_prior(kit: Any, name: str) -> None:
    assert float(build(kit, name).kl()) == pytest.approx(0.0, abs=1e-14)


@pytest.mark.parametrize("absorbed", [False, True])
def test_a_framed_family_starts_at_its_prior_too(kit: Any, absorbed: bool) -> None:
    frame = kit.frame(K, D, 20)
    q = FullRank(D2, K, D, frame=frame, absorbed=absorbed)
    assert float(q.kl()) == pytest.approx(0.0, abs=1e-11)
    torch.testing.assert_close(q.raw_mean, frame.mean if absorbed else torch.zeros(K, D, dtype=F64))
    cov = q.raw_root @ q.raw_root.mT
    torch.testing.assert_close(cov, frame.root @ frame.root.mT if absorbed else torch.eye(D, dtype=F64).expand(K, D, D))


def reframed(q: FullRank, frame: Frame) -> FullRank:
    """The same Gaussian in other coordinates: w = m + T v = m' + T' v'."""
    other = FullRank(q.theta_dim, q.outputs, q.width, frame=frame)
    change = torch.linalg.solve(q.frame_root, frame.root)  # v = … + T⁻¹T' v'
    P = change.mT @ q.precision_weights @ change
    mean = torch.linalg.solve(frame.root, (q.raw_mean - frame.mean).unsqueeze(-1)).squeeze(-1)
    other.move(q.theta_mean, mean, Arrow(q.precision_theta, q.precision_cross @ change, P))
    return other


def test_nothing_depends_on_the_frame(kit: Any) -> None:
    q = kit.full_rank(D2, K, D)
    other = reframed(q, kit.frame(K, E, 50).widen(D - E))
    theta, psi, first = kit.randn(31, 3, D2), kit.randn(32, 3, 4, D), kit.randn(38, 3, K, E)
    torch.testing.assert_close(other.kl(), q.kl(), rtol=1e-10, atol=0)
    for columns, given_theta in (
        (slice(None), None),
        (slice(None), theta),
        (slice(0, E), theta),
        (slice(E, None), None),
    ):
        for mine, its in zip(
            q.moments(psi[..., columns], columns, given_theta),
            other.moments(psi[..., columns], columns, given_theta),
            strict=True,
        ):
            torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-10)
    for mine, its in zip(
        q.moments_given(psi[..., E:], first, theta), other.moments_given(psi[..., E:], first, theta), strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-10)
    # The log prior's gradient is a covector: Tᵀ times the one in the weights' own coordinates.
    own, framed = q.prior_gradient()[1], other.prior_gradient()[1]
    torch.testing.assert_close((other.frame_root.mT @ own.unsqueeze(-1)).squeeze(-1), framed)


def test_conditioning_a_layer_gives_the_posterior_in_any_frame(kit: Any) -> None:
    phi, target, precision = kit.randn(1, 12, D), kit.randn(2, K, 12), 0.5 + kit.rand(3, K, 12)
    sums = gram(phi, target, precision)
    for frame in (None, kit.frame(K, D, 50)):
        q = FullRank(0, K, D, frame=frame)
        q.condition(sums)
        mean, covariance = kit.dense(q)
        for k in range(K):
            Lambda = np.eye(D) + (phi.mT * precision[k]).numpy() @ phi.numpy()
            m = np.linalg.solve(Lambda, phi.mT.numpy() @ (precision[k] * target[k]).numpy())
            np.testing.assert_allclose(mean[k * D : (k + 1) * D], m, rtol=1e-9)
            block = covariance[k * D : (k + 1) * D, k * D : (k + 1) * D]
            np.testing.assert_allclose(block, np.linalg.inv(Lambda), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("theta_dim", [0, D2])
def test_solving_with_an_arrow_is_solving_with_the_dense_matrix(kit: Any, theta_dim: int) -> None:
    arrow = kit.arrow(theta_dim, K, D, 60)
    factors, dense = factorise(arrow), kit.dense_arrow(arrow)
    assert factors is not None
    assert float(factors.log_det()) == pytest.approx(np.linalg.slogdet(dense)[1], rel=1e-12)
    theta, weights = kit.randn(61, theta_dim), kit.randn(62, K, D)
    step = np.concatenate([part.numpy().ravel() for part in factors.solve(theta, weights)])
    expected = np.linalg.solve(dense, np.concatenate([theta.numpy(), weights.numpy().ravel()]))
    np.testing.assert_allclose(step, expected, rtol=1e-9, atol=1e-12)


def test_an_arrow_that_is_not_positive_definite_has_no_factors(kit: Any) -> None:
    arrow = kit.arrow(D2, K, D, 60)
    indefinite = arrow.weights.clone()
    indefinite[1, 0, 0] = -1.0
    assert factorise(arrow._replace(weights=indefinite)) is None
    assert factorise(arrow._replace(cross=10 * arrow.cross)) is None  # only the Schur complement shows it
    assert factorise(arrow._replace(theta=torch.full_like(arrow.theta, torch.nan))) is None
    assert factorise(arrow._replace(cross=torch.full_like(arrow.cross, torch.inf))) is None
    assert factorise(arrow._replace(weights=torch.full_like(arrow.weights, torch.nan))) is None


def everything(q: Family, kit: Any) -> list[Tensor]:
    theta, psi, first = kit.randn(31, 3, D2), kit.randn(32, 3, 4, D), kit.randn(38, 3, K, E)
    answers = [q.kl(), q.theta(theta), *q.theta_moments(), *q.moments(psi), *q.moments(psi, theta=theta)]
    return [*answers, *q.moments_given(psi[..., E:], first, theta), q.sample(kit.randn(33, 3, K, D), theta)]


@every_family
def test_a_state_dict_carries_everything(kit: Any, name: str, tmp_path: Any) -> None:
    q = build(kit, name)
    torch.save(q.state_dict(), tmp_path / "q.pt")
    other: Family = MeanField(D2, K, D, dtype=F64)
    if isinstance(q, FullRank):
        other = FullRank(D2, K, D, absorbed=q.absorbed)
    parent = torch.nn.ModuleDict({"q": other})  # loaded as a part of something larger
    state = torch.load(tmp_path / "q.pt", weights_only=True)
    parent.load_state_dict({f"q.{key}": value for key, value in state.items()})
    for mine, its in zip(everything(q, kit), everything(other, kit), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


@every_family
def test_a_copy_is_independent_of_the_original(kit: Any, name: str) -> None:
    q = build(kit, name)
    before = everything(q, kit)
    twin = copy.deepcopy(q)
    blank: Family = MeanField(D2, K, D, dtype=F64) if isinstance(q, MeanField) else FullRank(D2, K, D)
    twin.load_state_dict(blank.state_dict())
    for mine, its in zip(before, everything(q, kit), strict=True):
        assert torch.equal(mine, its)


@every_family
def test_a_family_can_be_sent_to_another_process(kit: Any, name: str) -> None:
    q = build(kit, name)
    for mine, its in zip(everything(q, kit), everything(pickle.loads(pickle.dumps(q)), kit), strict=True):
        torch.testing.assert_close(mine, its)


@every_family
def test_a_family_still_answers_after_a_change_of_dtype_or_device(kit: Any, name: str) -> None:
    q = build(kit, name)
    before = everything(q, kit)
    for mine, its in zip(before, everything(q.to("cpu").double(), kit), strict=True):
        torch.testing.assert_close(mine, its)
    parent = torch.nn.ModuleList([q]).to(torch.float32)  # as a trainer's precision setting does to all that it holds
    theta, psi = kit.randn(31, 3, D2).float(), kit.randn(32, 3, 4, D).float()
    mean, var = parent[0].moments(psi, theta=theta)  # type: ignore[operator]
    torch.testing.assert_close(mean.double(), before[6], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(var.double(), before[7], rtol=1e-3, atol=1e-3)


def test_a_joint_gaussian_keeps_float64_when_its_parent_changes_precision(kit: Any) -> None:
    q = build(kit, "fullrank_framed")
    before = everything(q, kit)
    torch.nn.ModuleList([q]).float().half()
    for tensor in (*q.buffers(), q.raw_mean, q.theta_root, *q.factors):  # type: ignore[misc]
        assert tensor.dtype == F64
    for mine, its in zip(before, everything(q, kit), strict=True):
        assert torch.equal(mine, its)
