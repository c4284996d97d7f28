"""Checks of θ against the discrepancy: on posteriors in which they are tied to each other, or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.vcal_dist.conftest import Kit
from tests.vcal_dist.plots.charts_kit import random_posterior
from vcal_dist.fullrank import Arrow, FullRank
from vcal_dist.nature import LENGTHSCALES
from vcal_dist.posterior import Posterior
from vcal_dist.report.content import Status
from vcal_dist.report.discrepancy_checks import sensitivity_to_discrepancy, theta_and_discrepancy
from vcal_dist.report.gathering import Gathered

F64 = torch.float64


def gathered(posterior: Posterior, **way: Any) -> Gathered:
    return Gathered("here", posterior, {"theta": way}, None, {}, None, [])


def tied(sd: float, factor: float) -> Posterior:
    """A posterior of one parameter whose θ̃ has this sd, and a weight of δ in common with it that leaves 1/factor."""
    posterior = random_posterior(1, 1)
    eta, q = posterior.model.eta.width, FullRank(1, 1, posterior.model.width)
    given = sd**2 / factor  # Var(θ̃ | W_δ)
    A = torch.full((1, 1), 1 / given, dtype=F64)
    P = torch.eye(q.width, dtype=F64)[None]
    C = torch.zeros(1, 1, q.width, dtype=F64)
    C[0, 0, eta] = (float(A) - 1 / sd**2) ** 0.5  # so that A − C P⁻¹ Cᵀ = 1/sd²
    q.move(q.theta_mean, q.mean, Arrow(A, C, P))
    posterior.components = [q]
    return posterior


@pytest.mark.parametrize(
    ("sd", "factor", "status", "word"),
    [
        (0.9, 1.5, "good", "Not confounded"),
        (0.9, 7.0, "care", "Partly confounded"),
        (0.9, 30.0, "care", "Not identifiable separately"),
        (0.05, 7.0, "good", "Learned in spite of the discrepancy"),
        (0.05, 60.0, "good", "Learned in spite of the discrepancy"),
        (0.05, 1.5, "good", "Not confounded"),
    ],
)
def test_what_the_discrepancy_can_do_too_is_told_of_what_was_not_learned(
    sd: float, factor: float, status: Status, word: str
) -> None:
    (check,) = theta_and_discrepancy(gathered(tied(sd, factor)))
    assert check.number == pytest.approx(factor)
    assert check.sentence.startswith(word)
    assert (check.status, bool(check.advice)) == (status, status == "care")
    assert list(check.numbers.values()) == [pytest.approx(factor)]


def test_without_a_discrepancy_of_its_own_nothing_is_said() -> None:
    assert theta_and_discrepancy(gathered(random_posterior(1, 2, kind="none"))) == []
    assert theta_and_discrepancy(gathered(random_posterior(1, 2, kind="general"))) == []
    apart = random_posterior(1, 2)
    apart.components = [Kit.mean_field(2, 1, apart.model.width)]
    assert theta_and_discrepancy(gathered(apart)) == []
    assert len(theta_and_discrepancy(gathered(random_posterior(1, 2, outputs=2)))) == 1


def test_an_answer_that_rests_on_the_discrepancys_prior_is_told() -> None:
    posterior = random_posterior(1, 2)
    (check,) = sensitivity_to_discrepancy(gathered(posterior, sensitivity={"a": 0.01, "b": 0.2}))
    assert (check.status, check.number) == ("care", 0.2)
    assert check.sentence == "The answer for b (0.20) depends on what is assumed of the discrepancy."
    (check,) = sensitivity_to_discrepancy(gathered(posterior, sensitivity={"a": 0.01, "b": 0.05}))
    assert (check.status, check.advice) == ("good", "")
    many = gathered(posterior, sensitivity={"a": 0.01}, as_points=[LENGTHSCALES])
    assert sensitivity_to_discrepancy(many)[0].sentence.endswith("length scales are taken as training found them.")
    for way in ({}, {"sensitivity": None}, {"sensitivity": {}}):
        assert sensitivity_to_discrepancy(gathered(posterior, **way)) == []
