"""What can go wrong is found in fits where it does, and not in one where nothing does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vcal_dist.report.runs_kit import Array, trained
from tests.vcal_dist.training_kit import merge
from vcal_dist.posterior import Posterior
from vcal_dist.report import gather
from vcal_dist.report.check import Check
from vcal_dist.report.diagnostics import diagnose

SOUND: dict[str, Any] = {
    "model": {"eta": {"features": {"features": 24}}},
    "fit": {
        "emulator": {"steps": 150},
        "theta": {"steps": 40},
        "joint": {"steps": 25},
        "evaluations": 192,
        "starts": 3,
    },
}
QUICK = merge(SOUND, {"fit": {"evaluations": 0}})


def checks_of(folder: Path, **case: Any) -> dict[str, Check]:
    """The checks of a calibration of one parameter, by their names."""
    run = trained(folder, parameters=1, **{"observations": 80, **case})
    return {check.name: check for check in diagnose(gather(run, Posterior.load(run))).checks}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Check]:
    """Everything as it should be; the prior of θ is right, and says little."""
    prior = {"family": "normal", "mean": 0.5, "sd": 0.25}
    return checks_of(tmp_path_factory.mktemp("sound"), prior=prior, **SOUND)


def test_a_sound_calibration_passes_every_check(sound: dict[str, Check]) -> None:
    assert {name: check.sentence for name, check in sound.items() if check.status != "good"} == {}
    assert {"Outliers", "Emulator's error in θ", "Prior and data", "Bounds", "θ and discrepancy"} <= set(sound)


def test_every_check_says_what_it_was_compared_with(sound: dict[str, Check]) -> None:
    assert [name for name, check in sound.items() if not check.threshold or check.number is None] == []
    (contraction,) = sound["What was learned"].numbers.values()
    assert 0.9 < contraction < 1


def test_too_few_features_are_told_by_what_they_do_to_theta(tmp_path: Path, sound: dict[str, Check]) -> None:
    found = checks_of(tmp_path, **merge(QUICK, {"model": {"eta": {"features": {"features": 4}}}}))
    check = found["Emulator's error in θ"]
    assert check.status == "bad"
    assert "model.eta.features.features from 4 to 8" in check.advice
    assert found["Emulator's error"].status == "bad"


@pytest.mark.parametrize(("outliers", "status"), [(1, "care"), (8, "bad")])
def test_outliers_are_found_behind_the_noise_that_they_widen(tmp_path: Path, outliers: int, status: str) -> None:
    case = merge(QUICK, {"fit": {"emulator": {"steps": 80}}})
    check = checks_of(tmp_path, outliers=outliers, **case)["Outliers"]
    assert (check.status, check.number) == (status, outliers)
    assert "student_t" in check.advice
    assert f"(row{'s' if outliers > 1 else ''} 3" in check.sentence


def test_a_prior_far_from_what_the_data_say_is_told(tmp_path: Path) -> None:
    found = checks_of(tmp_path, prior={"family": "normal", "mean": 0.8, "sd": 0.1}, **QUICK)  # the truth is 0.4
    check = found["Prior and data"]
    assert check.status == "bad"
    assert check.number == pytest.approx(4, abs=0.6)
    assert "t0 (−" in check.sentence


def test_bounds_that_leave_the_truth_out_are_told(tmp_path: Path) -> None:
    found = checks_of(tmp_path, truth=1.4, **QUICK)
    assert found["Bounds"].status == "bad"
    assert "Prior and data" not in found  # a uniform prior has no tail to be in


def squared(x: Array, t: Array, outputs: int) -> Array:
    """The same for t and 1 − t."""
    return np.sin(3 * x) * (1 + 4 * (t[:, :1] - 0.5) ** 2) + 0.5 * x


def test_a_mode_that_one_start_must_miss_is_told(tmp_path: Path) -> None:
    both = checks_of(tmp_path / "several", simulator=squared, truth=0.3, **QUICK)
    assert both["Starts"].status == "care"
    assert "several explanations" in both["Starts"].sentence
    assert both["Modes"].status == "care"
    missed = checks_of(tmp_path / "one", simulator=squared, truth=0.3, **merge(QUICK, {"fit": {"starts": 1}}))
    assert missed["Modes"].status == "good"  # of what was found
    assert missed["Starts"].status == "care"
    assert "fit.starts=3" in missed["Starts"].advice


def offset(x: Array, t: Array, outputs: int) -> Array:
    """θ does what the discrepancy's constant does."""
    return t[:, :1] + 0.2 * np.sin(6 * x)


def test_a_parameter_that_the_discrepancy_can_stand_for_is_told(tmp_path: Path) -> None:
    check = checks_of(tmp_path, simulator=offset, **QUICK)["θ and discrepancy"]
    assert check.status == "care"
    assert check.sentence.startswith("Not identifiable separately from the discrepancy, which can do the same: t0")
    assert "model.delta.amplitude" in check.advice


def waved(x: Array, t: Array, outputs: int) -> Array:
    """Nature, which has one θ throughout, has a wave more than the simulator."""
    return t[:, :1] * x + (0.3 * np.sin(7 * x) if np.ptp(t) == 0 else 0.0)


def test_an_answer_that_rests_on_a_wrong_prior_of_the_discrepancy_is_told(
    tmp_path: Path, sound: dict[str, Check]
) -> None:
    wrong = {"delta": {"amplitude": 0.02}, "likelihood_y": {"noise": 0.1, "learn_noise": False}}
    check = checks_of(tmp_path, simulator=waved, observations=30, **merge(SOUND, {"model": wrong}))[
        "Prior of the discrepancy"
    ]
    assert check.status == "care"
    assert "t0" in check.sentence
    assert "model.delta" in check.advice
    assert sound["Prior of the discrepancy"].status == "good"
