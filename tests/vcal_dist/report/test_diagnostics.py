"""Checks say what is so: on rows, losses and posteriors of which the answer is known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tests.vcal_dist.plots.charts_kit import random_posterior
from vcal_dist.assessment import Judged
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.posterior import Posterior
from vcal_dist.report import Gathered, gather
from vcal_dist.report.content import Status
from vcal_dist.report.diagnostics import CHECKS, diagnose
from vcal_dist.report.gathering import Sample
from vcal_dist.report.row_checks import (
    DISTANCE,
    coverage_of_observations,
    emulator_and_noise,
    emulator_error,
    judge_coverage,
    left_out,
    pit_shape,
    pit_uniformity,
)
from vcal_dist.report.training_checks import falling, state_of_the_run, still_falling
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


def test_counts_scatter_themselves_and_are_no_error_of_the_emulator(small: Gathered) -> None:
    posterior = random_posterior(1, 2, likelihood=LikelihoodSettings(kind="poisson"))
    assert small.runs is not None
    assert emulator_error(replace(small, posterior=posterior)) == []


def test_a_loss_that_falls_is_told_from_one_that_trembles() -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(100)
    assert falling((5 * np.exp(-steps / 10)).tolist()) == pytest.approx(0, abs=0.01)
    assert (falling((-0.02 * steps).tolist()) or 0) == pytest.approx(0.2)  # 10 steps apart
    assert falling((0.5 * rng.standard_normal(100)).tolist()) == 0
    assert falling(steps[:10].tolist()) is None


def test_training_that_ended_too_early_is_told_by_its_stage(small: Gathered) -> None:
    rows = [{"step": str(i), "phase": "theta", "seconds": "1", "loss": str(-0.02 * i)} for i in range(100)]
    (check,) = still_falling(replace(small, metrics=rows))
    assert (check.status, "fit.theta.steps" in check.advice) == ("care", True)


def test_a_stage_with_few_records_is_not_said_to_have_settled(small: Gathered) -> None:
    rows = [
        {"step": str(i), "phase": phase, "seconds": "1", "loss": str(loss)}
        for phase, count, loss in (("emulator", 40, 1.0), ("theta", 10, 2.0))
        for i in range(count)
    ]
    (check,) = still_falling(replace(small, metrics=rows))
    assert check.sentence == (
        "The loss had settled at the end of 'emulator'. Too few records to tell of 'theta': fewer than 20."
    )
    (check,) = still_falling(replace(small, metrics=rows[40:]))
    assert (check.value, "settled" in check.sentence) == ("unknown", False)


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
    assert len(verdict.checks) == sum(len(look(observed(small, np.full(100, 0.999)))) for look in CHECKS)
