"""Checks say what is so: on rows, losses and posteriors of which the answer is known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tests.vcal_dist.plots.charts_kit import random_posterior
from tests.vcal_dist.report.runs_kit import trained
from vcal_dist.assessment import Judged
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.mixed import Averaged
from vcal_dist.posterior import Posterior
from vcal_dist.report import Gathered, gather
from vcal_dist.report.content import Status
from vcal_dist.report.diagnostics import CHECKS, diagnose
from vcal_dist.report.emulator_checks import (
    emulator_and_noise,
    emulator_error,
    emulator_error_in_theta,
    residual_of,
)
from vcal_dist.report.gathering import Sample
from vcal_dist.report.row_checks import (
    DISTANCE,
    coverage_of_observations,
    judge_coverage,
    left_out,
    pit_shape,
    pit_uniformity,
)
from vcal_dist.report.theta_checks import correlations
from vcal_dist.report.training_checks import LEAST_RECORDS, change, losses_of, settled, state_of_the_run
from vcal_dist.report.way_checks import how_theta_was_found
from vcal_dist.report.words import percent
from vcal_dist.transforms import TransformSettings

Array = NDArray[np.float64]


@pytest.fixture(scope="module")
def small(small_run: Path) -> Gathered:
    return gather(small_run, Posterior.load(small_run))


def observed(small: Gathered, pit: Array, method: str = "held out", unreliable: int = 0) -> Gathered:
    """The same run, with observations at these places of normal predictive distributions."""
    y, zeros = stats.norm.ppf(pit)[:, None], np.zeros((len(pit), 1))
    judged = Judged(
        method=method,  # type: ignore[arg-type]
        x=zeros,
        t=None,
        y=y,
        mean=zeros,
        low=zeros - 1.645,
        high=zeros + 1.645,
        sd=zeros + 1,
        pit=pit[:, None],
        unreliable=np.arange(len(pit)) < unreliable,
    )
    return replace(small, observations=Sample(judged, len(pit), len(pit), len(pit)))


@pytest.mark.parametrize(
    ("share", "rows", "status", "side"),
    [
        (0.90, 100, "good", ""),
        (0.85, 100, "good", ""),  # 84 to 95 of 100 are chance
        (0.80, 100, "care", "low"),
        (0.79, 100, "care", "low"),  # 0.1 % of such counts are chance
        (0.70, 100, "bad", "low"),
        (0.88, 100_000, "good", ""),  # no chance, and no harm
        (0.85, 100_000, "care", "low"),
        (0.60, 10, "care", "low"),
        (0.95, 100_000, "good", ""),
        (0.99, 1000, "care", "high"),
        (1.00, 10, "good", ""),
    ],
)
def test_coverage_is_judged_by_chance_and_by_harm(share: float, rows: int, status: Status, side: str) -> None:
    assert judge_coverage(share, rows) == (status, side)


def test_the_band_of_chance_is_binomial() -> None:
    low, high = stats.binom.ppf([0.025, 0.975], 250, 0.9) / 250
    for share, good in ((low, True), (low - 0.004, False)):
        assert (judge_coverage(share, 250)[0] == "good") == good
    assert abs(low - 0.9) > 0.03  # or it would be the tolerance that is tested
    assert high < 0.97


def test_uniform_places_are_good_and_others_are_named(small: Gathered) -> None:
    even = (np.arange(200) + 0.5) / 200
    (check,) = pit_uniformity(observed(small, even))
    assert check.status == "good"
    for pit, words in ((even**3, "below"), (1 - even**3, "above"), (stats.beta.ppf(even, 0.3, 0.3), "tails")):
        (check,) = pit_uniformity(observed(small, pit))
        assert check.status != "good"
        assert words in check.sentence
        assert check.advice
    assert "middle" in pit_shape(stats.beta.ppf(even, 4, 4))


def test_predictions_that_are_not_sharp_ask_for_care_only(small: Gathered) -> None:
    even = (np.arange(200) + 0.5) / 200
    for pit, status in ((stats.beta.ppf(even, 9, 9), "care"), (stats.beta.ppf(even, 0.1, 0.1), "bad")):
        (check,) = pit_uniformity(observed(small, pit))
        assert stats.kstest(pit, "uniform").statistic > DISTANCE[1]
        assert (check.status, bool(check.advice)) == (status, True)


def test_rows_that_were_left_out_one_by_one_are_not_called_unseen(small: Gathered) -> None:
    even = (np.arange(200) + 0.5) / 200
    for method, seen in (("held out", False), ("leave one out", True)):
        checks = [
            *coverage_of_observations(observed(small, even, method)),
            *pit_uniformity(observed(small, even, method)),
        ]
        assert [("left out" in check.sentence) for check in checks] == [seen, seen]
        assert [("did not see" in check.sentence or "unseen" in check.sentence) for check in checks] == [not seen] * 2


def test_few_observations_ask_for_care(small: Gathered) -> None:
    for rows, status in ((10, "care"), (200, "good")):
        (check,) = coverage_of_observations(observed(small, (np.arange(rows) + 0.5) / rows))
        assert check.status == status


def test_rows_that_cannot_be_left_out_do_not_count(small: Gathered) -> None:
    places = np.concatenate([np.full(40, 0.001), (np.arange(60) + 0.5) / 60])  # the first 40 lie outside
    (check,) = coverage_of_observations(observed(small, places, "leave one out", unreliable=40))
    assert check.status == "good"
    (check,) = coverage_of_observations(observed(small, places, "leave one out", unreliable=60))
    assert (check.status, check.value) == ("care", "unknown")
    (check,) = coverage_of_observations(observed(small, places, "leave one out", unreliable=40))
    assert "(40 more cannot be left out reliably, and do not count)" in check.sentence
    assert small.observations is not None
    assert small.observations.numbers is not None  # of the rows in the store
    assert len(small.observations.numbers) == len(small.observations.judged.y)
    some = observed(small, places, "leave one out", unreliable=2)
    assert some.observations is not None
    some = replace(some, observations=replace(some.observations, numbers=np.arange(100) + 1000))
    (check,) = (check for check in left_out(some) if "observ" in check.name)
    assert "rows 1,000 and 1,001, counted from 0" in check.sentence
    for count, status in ((0, "good"), (40, "care"), (60, "bad")):
        check = next(c for c in left_out(observed(small, places, "leave one out", count)) if "observ" in c.name)
        assert check.status == status


def test_the_emulators_error_is_that_of_the_record(small: Gathered) -> None:
    ((name, error, noise),) = emulator_and_noise(small)
    recorded = small.record["assessment"]["runs"]["rmse"][0]
    assert (name, noise) == ("y0", small.member.noise["y0"])
    assert error == pytest.approx(recorded, rel=0.02)  # the same rows, other draws


def test_an_emulator_worse_than_the_noise_is_bad(small: Gathered) -> None:
    assert small.runs is not None
    ((_, error, noise),) = emulator_and_noise(small)
    for wanted, status in ((0.1, "good"), (0.6, "care"), (3.0, "bad")):
        judged = small.runs.judged
        worse = judged._replace(mean=judged.y + (judged.mean - judged.y) * wanted * noise / error)
        (check,) = emulator_error(replace(small, runs=replace(small.runs, judged=worse)))
        assert check.status == status


def test_the_emulators_error_is_on_the_scale_of_the_noise(small: Gathered) -> None:
    # Runs that are all predicted 10 % too high are off by log 1.1 after a logarithm, whatever their size.
    posterior = random_posterior(
        1, 2, transform=TransformSettings(kind="log"), likelihood=LikelihoodSettings(noise=0.2)
    )
    y = np.geomspace(0.01, 1000, 50)[:, None]
    judged = Judged("held out", y, y, y, 1.1 * y, y, y, y, y, np.zeros(50, bool))
    with_log = replace(small, posterior=posterior, runs=Sample(judged, 50, 50, 50), observations=None)
    ((name, error, noise),) = emulator_and_noise(with_log)
    assert error == pytest.approx(math.log(1.1))
    assert (
        noise == posterior.noise[name] == pytest.approx(0.2 * 0.5)
    )  # the kit's outputs have a standard deviation of ½
    (check,) = emulator_error(with_log)
    assert (check.status, "on the scale of its transform (log)" in check.sentence) == ("care", True)
    own = Sample(judged, 50, 50, 50, noise=0.3 * y)  # standard deviations of 30 % of y are 0.3 after a logarithm
    ((_, _, noise),) = emulator_and_noise(replace(with_log, observations=own))
    assert noise == pytest.approx(math.hypot(0.1, 0.3))


@pytest.mark.parametrize(
    ("rows", "error", "shift"),
    [
        (10_000, 0.01, 0.2887),  # 0.01·√(10,000/12)/1
        (10_000, 0.02, 0.5774),
        (1_000_000, 0.01, 2.887),
        (6, 0.4, 0.4),  # fewer than directions: no more than beside one of them
        (6, 0.6, 0.6),
    ],
)
def test_an_error_that_noise_hides_in_one_observation_shows_in_many(
    small: Gathered, rows: int, error: float, shift: float
) -> None:
    assert small.runs is not None
    ((name, own, sigma),) = emulator_and_noise(small)
    judged = small.runs.judged
    whole = math.hypot(sigma, residual_of(small, name))
    worse = judged._replace(mean=judged.y + (judged.mean - judged.y) * error * whole / own)
    of_so_many = observed(small, (np.arange(200) + 0.5) / 200)
    assert of_so_many.observations is not None
    sample = replace(of_so_many.observations, table=rows + 200, among=200)  # those were kept out
    case = replace(of_so_many, runs=replace(small.runs, judged=worse), observations=sample)
    (check,) = emulator_error_in_theta(case)
    assert check.number == pytest.approx(shift, rel=1e-3)
    assert check.status == ("good" if shift <= 0.5 else "care" if shift <= 2 else "bad")
    assert ("model.eta.features.features from 12 to 24" in check.advice) == (check.status != "good")
    assert f"{rows:,} observations" in check.sentence


def test_counts_scatter_themselves_and_are_no_error_of_the_emulator(small: Gathered) -> None:
    posterior = random_posterior(1, 2, likelihood=LikelihoodSettings(kind="poisson"))
    assert small.runs is not None
    assert emulator_error(replace(small, posterior=posterior)) == []


def test_a_loss_that_moves_is_told_from_one_that_trembles() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(100)
    assert change((5 * np.exp(-steps / 10)).tolist()) == pytest.approx(0, abs=0.01)
    for slope in (-0.02, 0.02):
        assert (change((slope * steps).tolist()) or 0) == pytest.approx(10 * slope)  # 10 steps apart
    assert change((0.5 * rng.standard_normal(100)).tolist()) == 0
    assert change(steps[:10].tolist()) is None


def recorded(*stages: tuple[str, int, float]) -> list[dict[str, str]]:
    """Records of stages with so many of them and this slope of their loss."""
    return [
        {"step": str(i), "phase": phase, "seconds": "1", "loss": str(slope * i)}
        for phase, count, slope in stages
        for i in range(count)
    ]


@pytest.mark.parametrize(("slope", "word", "cure"), [(-0.02, "falling", "steps"), (0.02, "rising", "rate")])
def test_training_that_ended_too_early_or_went_astray_is_told_by_its_stage(
    small: Gathered, slope: float, word: str, cure: str
) -> None:
    (check,) = settled(replace(small, metrics=recorded(("emulator", 40, 0.0), ("theta", 100, slope))))
    assert (check.status, f"fit.theta.{cure}" in check.advice) == ("care", True)
    assert f"'theta' was {'still ' if slope < 0 else ''}{word}" in check.sentence
    assert "settled at the end of 'emulator'" in check.sentence


def test_a_stage_with_few_records_is_not_said_to_have_settled(small: Gathered) -> None:
    rows = recorded(("emulator", 40, 0.0), ("theta", 10, 0.0))
    (check,) = settled(replace(small, metrics=rows))
    assert (check.status, check.sentence) == (
        "good",
        "The loss had settled at the end of 'emulator'. Too few records to tell of 'theta': fewer than 20.",
    )
    for nothing in (rows[40:], []):
        (check,) = settled(replace(small, metrics=nothing))
        assert (check.status, check.value, "settled" in check.sentence) == ("care", "unknown", False)


def test_the_stages_that_decide_on_theta_have_records_to_judge_by(tmp_path: Path) -> None:
    run = trained(tmp_path, fit={"theta": {"steps": 60}, "joint": {"steps": 40}})
    stages = losses_of(gather(run, Posterior.load(run)).metrics)
    assert len(stages["theta"]) >= LEAST_RECORDS
    assert len(stages["joint"]) >= LEAST_RECORDS


# --- how q(θ) was found -----------------------------------------------------------------------------------------------


def found(small: Gathered, **changes: Any) -> Gathered:
    way = {"family": "collapsed", "converged": True, "unrefined": "", "evaluations": 512, "effective": 200.0}
    return replace(small, record={**small.record, "theta": way | changes})


def test_training_says_how_theta_was_found(small: Gathered, tmp_path: Path) -> None:
    way = small.record["theta"]
    assert (way["family"], way["converged"], way["unrefined"]) == (
        "collapsed",
        True,
        "fit.evaluations is 64, and 96 are needed",
    )
    run = trained(tmp_path, fit={"evaluations": 256})
    way = Posterior.load(run).record["theta"]
    assert (way["unrefined"], way["evaluations"]) == ("", 252)  # six rounds of 42
    assert 4 * 3 <= way["effective"] <= 252


@pytest.mark.parametrize(
    ("changes", "status", "word"),
    [
        ({}, "good", "worth 200 independent draws"),
        ({"effective": 15.0}, "care", "worth 15 independent draws"),
        ({"unrefined": "weights are 'fullrank'"}, "care", "not compared with the exact posterior: weights are"),
        ({"unrefined": "x", "converged": False}, "care", "before θ stood still"),
        ({"family": "meanfield"}, "care", "too narrow"),
    ],
)
def test_an_approximation_that_nothing_was_compared_with_is_told(
    small: Gathered, changes: dict[str, Any], status: Status, word: str
) -> None:
    (check,) = how_theta_was_found(found(small, **changes))
    assert (check.status, word in check.sentence, bool(check.advice)) == (status, True, status != "good")


def test_independence_by_design_is_not_called_a_finding(small: Gathered) -> None:
    assert len(correlations(found(small))) == 1
    assert correlations(found(small, family="meanfield")) == []


# --- several outputs, counts and classes ------------------------------------------------------------------------------


def several(small: Gathered, pit: Array, kind: str = "gaussian") -> Gathered:
    """Observations of as many outputs as PIT values (B, K) have columns, with normal predictive distributions."""
    posterior = random_posterior(1, 2, outputs=pit.shape[1], likelihood=LikelihoodSettings(kind=kind))  # type: ignore[arg-type]
    zeros = np.zeros_like(pit)
    y = stats.norm.ppf(pit)
    judged = Judged(
        "held out", zeros[:, :1], None, y, zeros, zeros - 1.645, zeros + 1.645, zeros + 1, pit, np.zeros(len(pit), bool)
    )
    return replace(small, posterior=posterior, observations=Sample(judged, len(pit), len(pit), len(pit)))


@pytest.mark.parametrize(("outputs", "rows"), [(20, 60), (20, 100), (40, 200)])
def test_one_wrong_output_among_many_is_found_and_named(small: Gathered, outputs: int, rows: int) -> None:
    pit = np.random.default_rng(0).random((rows, outputs))
    right = several(small, pit)
    assert [check.status for look in (coverage_of_observations, pit_uniformity) for check in look(right)] == [
        "good"
    ] * 2
    wrong = pit.copy()
    wrong[:, 3] = 1 - 1e-6 * (1 + pit[:, 3])  # five standard deviations away
    names = [output.name for output in right.posterior.problem.outputs]
    for look in (coverage_of_observations, pit_uniformity):
        (check,) = look(several(small, wrong))
        assert check.status == "bad"
        assert f"'{names[3]}', the worst of {outputs} outputs" in check.sentence


def test_classes_that_are_predicted_as_they_fall_are_covered(small: Gathered) -> None:
    # Their 90 % intervals are nearly always {0, 1}: counted by those, all of them would lie inside.
    places = (np.arange(200) + 0.5)[:, None] / 200
    judged = several(small, places, "bernoulli")
    assert judged.observations is not None
    of = judged.observations.judged
    wide = replace(judged.observations, judged=of._replace(low=of.y - 1, high=of.y + 1))
    (check,) = coverage_of_observations(replace(judged, observations=wide))
    assert (check.status, check.value) == ("good", percent(0.9))


def test_an_average_that_no_member_stands_for_asks_for_care(small: Gathered) -> None:
    member = small.member
    for weights, status in (([0.95, 0.05], "good"), ([0.5, 0.5], "care")):
        average = Averaged([member, member], np.log(weights).tolist())
        (check,) = state_of_the_run(replace(small, posterior=average))
        assert check.status == status


def test_rows_that_came_later_are_told(small: Gathered) -> None:
    (check,) = state_of_the_run(replace(small, newer={"runs": 1200}))
    assert (check.status, check.value) == ("care", "1,200 runs")
    assert state_of_the_run(small) == []


def test_the_verdict_is_that_of_the_worst_check(small: Gathered) -> None:
    verdict = diagnose(observed(small, np.full(100, 0.999)))
    assert verdict.status == "bad"
    assert verdict.reasons[0].status == "bad"
    assert {check.status for check in verdict.reasons} <= {"care", "bad"}
    assert all(check.advice for check in verdict.reasons)  # what is not good comes with what to do
    assert all(check.threshold for check in verdict.checks)
    assert len(verdict.checks) == sum(len(look(observed(small, np.full(100, 0.999)))) for look in CHECKS)
