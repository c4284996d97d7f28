"""What is said of a parameter is what its posterior is: against closed forms, and posteriors of known shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import special

from storage.problem import Problem, parse_problem
from vcal_dist.answers import Answers, Asked, Block, Predicted
from vcal_dist.priors import ThetaPrior
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.parameters import learned, mode_count, total_variation
from vcal_dist.report.theta_checks import at_bound, contraction, correlations, prior_conflict, several_modes
from vcal_dist.theta import ThetaPosterior

Components = list[tuple[float, float]]  # mean and sd of θ̃


class OfTheta(Answers):
    """A posterior of θ alone."""

    def __init__(self, problem: Problem, theta: ThetaPosterior) -> None:
        self.problem, self.record, self._theta = problem, {}, theta

    @property
    def theta(self) -> ThetaPosterior:
        return self._theta

    def _predictor(self, asked: Asked) -> Callable[[Block], Predicted]:
        raise NotImplementedError

    def _made_of(self) -> str:
        return "θ"


def posterior(*parameters: Components, prior: dict[str, Any] | None = None, correlation: float = 0.0) -> OfTheta:
    problem = parse_problem(
        {
            "name": "p",
            "control_inputs": [{"name": "x", "bounds": [0, 1]}],
            "calibration_inputs": [
                {"name": f"t{j}", "bounds": [0, 10], **({} if prior is None else {"prior": prior})}
                for j in range(len(parameters))
            ],
            "outputs": [{"name": "y"}],
        }
    )
    means = torch.tensor([[part[0] for part in of] for of in parameters], dtype=torch.float64).T
    sds = torch.tensor([[part[1] for part in of] for of in parameters], dtype=torch.float64).T
    covariances = torch.diag_embed(sds**2)
    if correlation:
        covariances[:, 0, 1] = covariances[:, 1, 0] = correlation * sds[:, 0] * sds[:, 1]
    return OfTheta(problem, ThetaPosterior(ThetaPrior.from_problem(problem), means, covariances))


def gathered(of: OfTheta) -> Gathered:
    return Gathered("here", of, {}, None, {}, None, [])


def test_total_variation_of_a_shift_is_that_of_the_closed_form() -> None:
    # Of N(m, 1) and N(0, 1): 2Φ(m/2) − 1.
    for shift in (0.0, 0.3, 2.0, 9.0):
        expected = 2 * special.ndtr(shift / 2) - 1
        assert math.isclose(total_variation(posterior([(shift, 1.0)]).theta, 0), expected, abs_tol=1e-6)


def test_total_variation_of_a_narrow_posterior_is_that_of_the_closed_form() -> None:
    # N(0, s²) and N(0, 1) cross at ±c, c² = 2s²·ln(1/s)/(1 − s²), and differ by their masses between.
    s = 0.01
    c = math.sqrt(2 * math.log(1 / s) * s**2 / (1 - s**2))
    expected = (2 * special.ndtr(c / s) - 1) - (2 * special.ndtr(c) - 1)
    assert math.isclose(total_variation(posterior([(0.0, s)]).theta, 0), expected, abs_tol=1e-5)


def test_a_posterior_that_is_the_prior_is_not_learned() -> None:
    row, other, third = learned(posterior([(0.0, 1.0)], [(0.2, 0.05)], [(0.9, 0.8)]))
    assert (row.kind, other.kind, third.kind) == ("not learned", "learned", "partly")
    assert math.isclose(row.narrowed, 0, abs_tol=1e-9)
    assert row.prior_low == pytest.approx(0.5)  # 5 % of a uniform over 0 to 10
    (check,) = contraction(gathered(posterior([(0.0, 1.0)], [(0.2, 0.05)])))
    assert check.status == "good"
    assert "the posterior is nearly the prior: t0" in check.sentence
    (check,) = contraction(gathered(posterior([(0.0, 1.0)])))
    assert check.status == "care"


def test_what_is_ruled_out_does_not_depend_on_the_units_of_the_prior() -> None:
    # Under a skewed prior an interval far out is wide in θ, and rules out nearly all the same.
    lognormal = {"family": "lognormal", "mu": 0.0, "sigma": 1.0}
    for prior in (None, lognormal):
        (row,) = learned(posterior([(1.8, 0.3)], prior=prior))
        ends = [special.ndtr(1.8 + sign * 0.3 * special.ndtri(0.95)) for sign in (-1, 1)]
        assert row.narrowed == pytest.approx(1 - (ends[1] - ends[0]) / 0.9, abs=1e-6)
        assert row.kind == "learned"


def test_a_parameter_that_is_known_less_well_than_before_is_not_called_learned() -> None:
    (row,) = learned(posterior([(0.0, 2.0)]))  # in θ most of it lies at the two ends
    assert (row.kind, row.narrowed < 0) == ("partly", True)
    (check,) = contraction(gathered(posterior([(0.0, 2.0)])))
    assert (check.status, check.value) == ("care", "0 of 1 parameter")
    assert "less well than before" in check.sentence
    (check,) = contraction(gathered(posterior([(-2.0, 0.2), (2.0, 0.2)])))  # either end, and not the middle
    assert "less well" not in check.sentence


@pytest.mark.parametrize(
    ("components", "count"),
    [
        ([(0.0, 1.0)], 1),
        ([(0.0, 1.05)], 1),  # in θ its density would rise at both ends of a uniform prior
        ([(-1.0, 0.2), (1.0, 0.2)], 2),
        ([(-0.1, 0.2), (0.1, 0.2)], 1),
        ([(-2.0, 0.1), (0.0, 0.1), (2.0, 0.1)], 3),
    ],
)
def test_modes_are_counted(components: Components, count: int) -> None:
    assert mode_count(posterior(components), 0) == count
    (check,) = several_modes(gathered(posterior(components)))
    assert (check.status == "care") == (count > 1)


def test_a_posterior_at_a_bound_is_told() -> None:
    (check,) = at_bound(gathered(posterior([(0.0, 0.5)])))
    assert check.status == "good"
    (check,) = at_bound(gathered(posterior([(4.0, 0.1)])))  # θ = 10·Φ(4)
    assert (check.status, "t0" in check.sentence) == ("bad", True)
    (check,) = at_bound(gathered(posterior([(0.0, 1.0)], prior={"family": "beta", "a": 0.2, "b": 0.2})))
    assert check.status == "good"  # the prior itself lies at the ends


def test_a_posterior_beyond_the_runs_is_told() -> None:
    wide = {"family": "normal", "mean": 8.0, "sd": 3.0}
    (check,) = at_bound(gathered(posterior([(1.0, 0.1)], prior=wide)))  # 11 ± 0.3
    assert (check.status, "outside" in check.sentence) == ("bad", True)


def test_strong_correlations_are_told_by_name() -> None:
    narrow: Components = [(0.0, 0.1)]
    (check,) = correlations(gathered(posterior(narrow, narrow, correlation=-0.97)))
    assert check.status == "care"
    assert "t0 and t1 (−0.97)" in check.sentence
    for r, words in ((0.3, "No two parameters"), (0.8, "t0 and t1 make up for each other in part (+0.80)")):
        (check,) = correlations(gathered(posterior(narrow, narrow, correlation=r)))
        assert (check.status, words in check.sentence) == ("good", True)
    assert correlations(gathered(posterior(narrow))) == []


@pytest.mark.parametrize(
    ("means", "status"),
    [
        ([0.5], "good"),
        ([1.9], "good"),
        ([-2.2], "care"),
        ([3.2], "bad"),
        ([2.2, 0.0], "good"),  # the further of two lies beyond 2 more often
        ([2.4, 0.0], "care"),
        ([3.5, 0.0], "bad"),
    ],
)
def test_a_mean_in_the_tail_of_its_prior_is_told(means: list[float], status: str) -> None:
    normal = {"family": "normal", "mean": 5.0, "sd": 1.0}
    (check,) = prior_conflict(gathered(posterior(*([(mean, 0.1)] for mean in means), prior=normal)))
    assert (check.status, check.number) == (status, pytest.approx(max(map(abs, means))))
    assert ("t0 (" in check.sentence) == bool(check.advice) == (status != "good")
    assert list(check.numbers) == [f"t{j}" for j in range(len(means))]


def test_a_uniform_prior_has_no_tail() -> None:
    assert prior_conflict(gathered(posterior([(3.5, 0.1)]))) == []


def test_contraction_is_that_of_the_variances_in_the_users_units() -> None:
    normal = {"family": "normal", "mean": 5.0, "sd": 2.0}
    (check,) = contraction(gathered(posterior([(0.7, 0.1)], [(0.0, 1.0)], prior=normal)))
    assert check.numbers == {"t0": pytest.approx(1 - 0.1**2), "t1": pytest.approx(0.0, abs=1e-9)}
