"""Checks of the way to q(θ), on records of which the answer is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vcal_dist.mixture import Mixture, adapt
from vcal_dist.posterior import Posterior
from vcal_dist.report import Gathered, gather
from vcal_dist.report.content import Status
from vcal_dist.report.way_checks import importance_weights, most_pareto_k, starts_agree
from vcal_dist.way import pareto_k


@pytest.fixture(scope="module")
def small(small_run: Path) -> Gathered:
    return gather(small_run, Posterior.load(small_run))


def found(small: Gathered, **way: Any) -> Gathered:
    return replace(small, record={**small.record, "theta": way})


# --- importance weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "most"), [(100, 0.5), (1000, 1 - 1 / 3), (2200, 0.7), (10**6, 0.7), (252, 0.5837), (8, -0.107)]
)
def test_the_most_that_k_may_be_depends_on_the_points(points: int, most: float) -> None:
    assert most_pareto_k(points) == pytest.approx(most, abs=1e-3)


@pytest.mark.parametrize(
    ("k", "points", "status", "advice"),
    [
        (-0.2, 252, "good", ""),
        (0.55, 252, "good", ""),
        (0.62, 252, "care", "vcal refine --evaluations 504, or more"),  # twice as many, above 10^(1/0.38) = 429
        (0.62, 512, "good", ""),
        (0.69, 5000, "good", ""),
        (0.8, 5000, "care", "do not quote"),
        (1.3, 5000, "bad", "do not quote"),
    ],
)
def test_weights_with_a_heavy_tail_are_told(
    small: Gathered, k: float, points: int, status: Status, advice: str
) -> None:
    (check,) = importance_weights(found(small, pareto_k=k, evaluations=points))
    assert (check.status, check.number) == (status, k)
    assert advice in check.advice
    assert bool(check.advice) == (status != "good")
    assert "Vehtari" in check.threshold


@pytest.mark.parametrize(("width", "status"), [(0.02, "bad"), (5.0, "good")])
def test_points_that_miss_a_bent_and_narrow_posterior_are_told(small: Gathered, width: float, status: Status) -> None:
    def bent(points: Tensor) -> Tensor:
        """N(0, I), and every coordinate near to twice the square of the one before it."""
        away = (points[:, 1:] - 2 * points[:, :-1].square()) / width
        return -0.5 * points.square().sum(-1) - 0.5 * away.square().sum(-1)

    one = torch.eye(6, dtype=torch.float64)
    start = Mixture(torch.zeros_like(one[:1]), 0.05 * one[None], torch.zeros_like(one[0, :1]))
    sample = adapt(bent, start, evaluations=300, seed=0)
    (check,) = importance_weights(found(small, pareto_k=pareto_k(sample), evaluations=len(sample.points)))
    assert check.status == status
    assert (sample.effective < 10) == (status == "bad")


def test_without_weights_nothing_is_said_of_them(small: Gathered) -> None:
    for way in ({}, {"pareto_k": None, "evaluations": 252}, {"pareto_k": None, "evaluations": 0}):
        assert importance_weights(found(small, **way)) == []
    assert importance_weights(replace(small, record={})) == []


# --- starts -----------------------------------------------------------------------------------------------------------


def start(mode: int, log_evidence: float = 0.0, theta: float = 0.4, *, converged: bool = True) -> dict[str, Any]:
    return {"theta": [theta, 0.7], "log_evidence": log_evidence, "mode": mode, "converged": converged}


BEST, SAME = start(0), start(0, -0.001)
LIGHT, RIVAL, OTHER = start(-1, -30.0, 0.9), start(1, -0.4, 0.8), start(1, -4.0, 0.8)
MOVING = start(0, -2.0, converged=False)


@pytest.mark.parametrize(
    ("starts", "status", "word"),
    [
        ([BEST, SAME, SAME], "good", "All ended in the same place"),
        ([BEST, SAME], "good", "All ended in the same place"),
        ([BEST, LIGHT], "good", "1 ended more than 10 nats below it, too light to matter"),
        ([BEST, SAME, LIGHT], "good", "2 ended in the best mode"),
        ([SAME, BEST, OTHER], "good", "1 ended in another, which is in the posterior"),
        ([BEST, SAME, MOVING], "good", "1 of them had not come to rest"),
        ([BEST], "care", "nothing to compare it with"),
        ([BEST, MOVING, MOVING], "care", "2 of them had not come to rest"),
        ([MOVING, MOVING], "care", "2 of them had not come to rest"),
        ([BEST, LIGHT, LIGHT], "care", "only one start has found"),
        ([BEST, OTHER, OTHER], "care", "only one start has found"),
        ([BEST, SAME, RIVAL], "care", "several explanations, as good as each other: (t0 = 0.400, t1 = 0.700) and (t0"),
    ],
)
def test_starts_that_disagree_are_told(
    small: Gathered, starts: list[dict[str, Any]], status: Status, word: str
) -> None:
    (check,) = starts_agree(found(small, starts=starts))
    assert check.status == status
    assert word in check.sentence
    assert bool(check.advice) == (status == "care")


def test_without_starts_nothing_is_said_of_them(small: Gathered) -> None:
    for way in ({}, {"starts": None}, {"starts": []}):
        assert starts_agree(found(small, **way)) == []


def test_the_order_of_the_starts_does_not_matter(small: Gathered) -> None:
    for starts in ([RIVAL, SAME, BEST], [BEST, RIVAL, SAME]):
        (check,) = starts_agree(found(small, starts=starts))
        assert (check.value, check.number) == ("2 of 3", pytest.approx(2 / 3))
