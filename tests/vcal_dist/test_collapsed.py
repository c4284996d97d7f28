"""The collapsed evidence and posterior: against dense densities, through blocks, with missing rows, with gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from vcal_dist.collapsed import (
    Gram,
    gram,
    half_quadratic_minus_log_det,
    in_frame,
    joined_gram,
    log_evidence,
    log_evidence_if_any,
    posterior,
)

F64 = torch.float64


def dense_log_evidence(phi: Tensor, target: Tensor, precision: Tensor) -> float:
    """log N(r; 0, ΦΦᵀ + diag(1/p)) over the rows that are known."""
    known = (precision > 0).numpy()
    phi_, r, p = phi.detach().numpy()[known], target.detach().numpy()[known], precision.detach().numpy()[known]
    covariance = phi_ @ phi_.T + np.diag(1 / p)
    return float(scipy.stats.multivariate_normal.logpdf(r, np.zeros(len(r)), covariance))


def case(kit: Any, *leading: int, rows: int = 9, features: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    phi = kit.randn(1, *leading, rows, features)
    return phi, 2 * kit.randn(2, *leading, rows), 0.2 + 5 * kit.rand(3, *leading, rows)


@pytest.mark.parametrize("rows", [2, 4, 9, 30])
def test_the_evidence_is_the_dense_density_with_fewer_and_with_more_rows_than_features(kit: Any, rows: int) -> None:
    phi, target, precision = case(kit, rows=rows)
    assert float(log_evidence(gram(phi, target, precision))) == pytest.approx(
        dense_log_evidence(phi, target, precision), rel=1e-11
    )


def test_missing_outputs_are_left_out(kit: Any) -> None:
    phi, target, precision = case(kit)
    precision[2] = precision[5] = 0.0
    target[2] = torch.nan  # precision 0 alone, and with NaN
    sums = gram(phi, target, precision)
    assert float(sums.rows) == 7
    assert float(log_evidence(sums)) == pytest.approx(dense_log_evidence(phi, target, precision), rel=1e-11)
    known = precision > 0
    for mine, its in zip(sums, gram(phi[known], target[known], precision[known]), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-14, atol=1e-14)


def test_no_rows_at_all_have_an_evidence_of_one_and_the_prior_as_posterior(kit: Any) -> None:
    phi, target, precision = case(kit, rows=0)
    sums = gram(phi, target, precision)
    assert float(log_evidence(sums)) == 0.0
    mean, root = posterior(sums)
    assert torch.equal(mean, torch.zeros(4, dtype=F64))
    assert torch.equal(root, torch.eye(4, dtype=F64))


def test_leading_dimensions_are_separate_problems(kit: Any) -> None:
    S, K = 3, 2
    phi = kit.randn(1, S, 1, 9, 4)  # features of samples, shared by outputs
    target, precision = kit.randn(2, K, 9), 0.2 + kit.rand(3, K, 9)
    precision[1, 4] = 0.0
    sums = gram(phi, target, precision)
    value = log_evidence(sums)
    mean, root = posterior(sums)
    assert value.shape == (S, K)
    for s in range(S):
        for k in range(K):
            expected = dense_log_evidence(phi[s, 0], target[k], precision[k])
            assert float(value[s, k]) == pytest.approx(expected, rel=1e-11)
            alone = posterior(gram(phi[s, 0], target[k], precision[k]))
            torch.testing.assert_close(mean[s, k], alone[0])
            torch.testing.assert_close(root[s, k], alone[1])


@pytest.mark.parametrize(
    ("of_phi", "of_target", "of_precision"),
    [
        ((), (), ()),
        ((1,), (2,), (2,)),  # features shared by outputs
        ((3, 1), (2,), (2,)),  # and sampled
        ((3, 1), (3, 2), (2,)),  # with targets that depend on the sample
        ((3, 2), (3, 2), (3, 2)),
        ((2,), (), ()),
    ],
)
def test_gradients_are_those_of_finite_differences_however_the_parts_broadcast(
    kit: Any, of_phi: tuple[int, ...], of_target: tuple[int, ...], of_precision: tuple[int, ...]
) -> None:
    B, M = 4, 3
    leaves = [kit.randn(1, *of_phi, B, M), kit.randn(2, *of_target, B), 0.3 + kit.rand(3, *of_precision, B)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    assert torch.autograd.gradcheck(lambda *x: log_evidence(gram(*x)), leaves, atol=1e-7)
    assert torch.autograd.gradcheck(lambda *x: tuple(gram(*x)[:4]), leaves, atol=1e-7)


def test_gradients_are_those_of_the_dense_density(kit: Any) -> None:
    phi, target, precision = (part.requires_grad_() for part in case(kit, rows=8))
    ours = torch.autograd.grad(log_evidence(gram(phi, target, precision)), [phi, target, precision])
    covariance = phi @ phi.mT + torch.diag(1 / precision)
    dense = torch.distributions.MultivariateNormal(torch.zeros(8, dtype=F64), covariance).log_prob(target)
    theirs = torch.autograd.grad(dense, [phi, target, precision])
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-11)


def test_a_missing_row_has_no_gradient_and_spoils_none(kit: Any) -> None:
    phi, target, precision = case(kit)
    precision[3], target[3] = 0.0, torch.nan
    phi.requires_grad_()
    target.requires_grad_()
    by_phi, by_target = torch.autograd.grad(log_evidence(gram(phi, target, precision)), [phi, target])
    assert bool(by_phi.isfinite().all())
    assert bool(by_target.isfinite().all())
    assert not bool(by_phi[3].any())
    assert float(by_target[3]) == 0.0


def test_sums_over_blocks_of_any_size_give_the_dense_solution(kit: Any) -> None:
    phi, target, precision = case(kit, rows=50, features=7)
    total: Gram | None = None
    for block in torch.arange(50).split([1, 0, 20, 3, 26]):
        part = gram(phi[block], target[block], precision[block])
        total = part if total is None else total.plus(part)
    assert total is not None
    mean, root = posterior(total)
    Phi, p = phi.numpy(), precision.numpy()
    Lambda = np.eye(7) + (Phi.T * p) @ Phi
    np.testing.assert_allclose(mean, np.linalg.solve(Lambda, Phi.T @ (p * target.numpy())), rtol=1e-10)
    np.testing.assert_allclose(root @ root.mT, np.linalg.inv(Lambda), rtol=1e-10, atol=1e-14)
    assert torch.equal(root, root.triu())
    assert float(log_evidence(total)) == pytest.approx(dense_log_evidence(phi, target, precision), rel=1e-10)


def test_sums_in_a_frame_are_those_of_features_times_its_root(kit: Any) -> None:
    phi, target, precision = case(kit)
    root = kit.frame(2, 4, 5).root
    for mine, its in zip(
        in_frame(gram(phi.expand(2, -1, -1), target, precision), root), gram(phi @ root, target, precision), strict=True
    ):
        torch.testing.assert_close(mine.expand_as(its), its)


def test_a_frame_of_the_first_weights_leaves_the_others(kit: Any) -> None:
    phi, target, precision = case(kit)
    root = kit.frame(2, 3, 5).root
    features = torch.cat([phi[..., :3] @ root, phi[..., 3:].expand(2, -1, -1)], -1)
    for mine, its in zip(
        in_frame(gram(phi.expand(2, -1, -1), target, precision), root), gram(features, target, precision), strict=True
    ):
        torch.testing.assert_close(mine.expand_as(its), its)


def test_float32_features_are_summed_in_float64(kit: Any) -> None:
    phi = torch.ones(100_000, 1) * 1.1
    sums = gram(phi, phi[:, 0], torch.ones(100_000))
    assert sums.G.dtype == F64
    assert float(sums.G) == pytest.approx(100_000 * float(phi[0, 0].double() ** 2), rel=1e-12)


def test_columns_that_all_samples_share_enter_as_any_others(kit: Any) -> None:
    S, K, B = 3, 2, 7
    first, second = kit.randn(1, S, 1, B, 4), kit.randn(2, B, 3)
    target, precision = kit.randn(3, S, K, B), kit.rand(4, K, B)
    precision[1, 2] = 0.0
    target[:, 1, 2] = torch.nan
    both = torch.cat([first, second.expand(S, 1, B, 3)], -1)
    for mine, its in zip(joined_gram(first, second, target, precision), gram(both, target, precision), strict=True):
        torch.testing.assert_close(mine.expand_as(its), its, rtol=1e-12, atol=1e-12)


def test_sums_without_a_factor_have_no_evidence() -> None:
    """Where rounding has made I + G indefinite, as far from all that is probable."""
    good = torch.diag(torch.tensor([2.0, 3.0], dtype=torch.float64))
    bad = torch.tensor([[1.0, -5.0], [-5.0, 1.0]], dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    sums = Gram(torch.stack([good, bad]), torch.stack([one, one]), one, 0 * one, one)
    found = log_evidence_if_any(sums)
    assert found[1] == -torch.inf
    torch.testing.assert_close(found[0], log_evidence(Gram(*(part[0] for part in sums))))


def test_columns_that_share_a_gram(kit: Any) -> None:
    """Value by plain linear algebra, gradient by finite differences."""
    root, b = kit.rand(31, 3, 4, 6), kit.rand(32, 3, 2, 4)
    root.requires_grad_()
    b.requires_grad_()

    def value(root: Tensor, b: Tensor) -> Tensor:
        return half_quadratic_minus_log_det(root @ root.mT, b)

    A = torch.eye(4, dtype=root.dtype) + root @ root.mT
    expected = 0.5 * (b * torch.linalg.solve(A, b.mT).mT).sum((-1, -2)) - A.logdet()
    torch.testing.assert_close(value(root, b), expected)
    assert torch.autograd.gradcheck(value, (root, b))
