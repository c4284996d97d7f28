"""Stacking: which expert is believed, and how much."""

from __future__ import annotations

import pytest
import torch

from tests.vcal_dist.conftest import F64, Kit
from vcal_dist.stacking import Expert, combine, coverage, stack, stacked

ALL = [True, True, True]


def experts(errors: tuple[float, ...], sds: tuple[float, ...], rows: int = 400) -> tuple[torch.Tensor, list[Expert]]:
    """Of a standard normal truth, with errors and claimed standard deviations of so much."""
    z = Kit.randn(1, rows, 1)
    found = []
    for i, (error, sd) in enumerate(zip(errors, sds, strict=True)):
        found.append(Expert(z + error * Kit.randn(2 + i, rows, 1), torch.full((rows, 1), sd**2, dtype=F64)))
    return z, found


def test_a_mixture_has_the_mixture_s_moments() -> None:
    means, variances = Kit.randn(1, 3, 5), Kit.rand(2, 3, 5)
    a = torch.tensor([0.2, 0.5, 0.3], dtype=F64)
    mean, var = combine(a, means, variances, True)
    second = (a[:, None] * (variances + means.square())).sum(0)
    torch.testing.assert_close(mean, (a[:, None] * means).sum(0))
    torch.testing.assert_close(var, second - mean.square())


def test_the_best_expert_is_believed_and_its_variance_put_right() -> None:
    z, said = experts((0.05, 1.0, 1.0), (0.005, 1.0, 1.0))  # the best one is ten times too sure of itself
    found = stack(z, said, ALL, 400)
    assert float(found.weights[0, 0]) > 0.9
    assert float(found.weights.sum()) == pytest.approx(1.0)
    fresh, again = experts((0.05, 1.0, 1.0), (0.005, 1.0, 1.0), 2000)
    assert coverage(fresh, stacked(found, again, ALL)) == pytest.approx(0.9, abs=0.06)


def test_two_experts_with_independent_errors_are_averaged() -> None:
    z, said = experts((0.3, 0.3, 2.0), (0.3, 0.3, 2.0))
    found = stack(z, said, ALL, 400)
    both = stacked(found, said, ALL)
    assert float(found.weights[:2].min()) > 0.3
    assert float((both.mean - z).square().mean().sqrt()) < 0.25


def test_intervals_of_few_runs_are_wider_than_those_of_many() -> None:
    z, said = experts((0.1, 1.0, 1.0), (0.1, 1.0, 1.0))
    few, many = (stack(z, said, ALL, runs).scale for runs in (9, 10_000))
    assert float(few / many) == pytest.approx((1 + 1.5 / 3) / (1 + 1.5 / 100))


def test_missing_values_have_no_say() -> None:
    z, said = experts((0.1, 0.5, 1.0), (0.1, 0.5, 1.0))
    holes = z.clone()
    holes[::3] = torch.nan
    kept = ~holes[:, 0].isnan()
    alone = stack(z[kept], [Expert(e.mean[kept], e.var[kept]) for e in said], ALL, 400)
    for found, expected in zip(stack(holes, said, ALL, 400), alone, strict=True):
        torch.testing.assert_close(found, expected)


def test_only_some_variances_count_where_outputs_are_many() -> None:
    z, said = experts((0.1, 1.0, 0.05), (0.2, 1.0, 1e-6))  # the third has no variance to speak of
    shapes = [True, True, False]
    found = stack(z, said, shapes, 400)
    assert float(found.weights[2, 0]) > 0.5
    assert coverage(z, stacked(found, said, shapes)) == pytest.approx(0.9, abs=0.05)
