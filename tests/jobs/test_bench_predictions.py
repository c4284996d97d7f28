"""`vcal bench predictions`: data follow the problem, and shares are those of intervals that are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jobs.bench import predictions
from jobs.bench.predictions import KINDS, PROBLEMS, Replicate
from storage.errors import VcalError
from vcal_dist.answers import Predicted


class Knowing:
    """Predicts the truth with a standard deviation of its own, and is as far off as that, or twice as far."""

    def __init__(self, known: predictions.Known, sd: float, off: float) -> None:
        self.known, self.sd, self.off = known, sd, off

    def predict(self, x: Any, what: str, *, t: Any = None, samples: int) -> Predicted:
        rng = np.random.default_rng(3)
        theta = np.tile(self.known.theta, (len(x), 1)) if t is None else t
        truth = self.known.simulate(x, theta) + (self.known.bias(x) if what != "emulator" else 0)
        mean = truth + self.off * self.sd * rng.standard_normal(truth.shape)
        sd = np.hypot(self.sd, self.known.noise) if what == "observation" else self.sd
        drawn = mean + sd * rng.standard_normal((samples, *truth.shape))
        return Predicted(mean, np.full_like(mean, sd), drawn)


@pytest.mark.parametrize("name", ["pendulum", "cantilever"])
def test_shares_are_those_of_the_intervals(name: str) -> None:
    rng = np.random.default_rng(1)
    known = PROBLEMS[name](rng)
    inside, width = predictions.held(Knowing(known, 0.5 * known.noise, 1.0), known, rng)  # type: ignore[arg-type]
    for what in KINDS:
        assert inside[what] == pytest.approx(0.9, abs=0.05)  # 500 points: a standard error of 0.013
    assert width["process"] == pytest.approx(width["emulator"], rel=0.02)
    assert width["observation"] == pytest.approx(np.sqrt(5) * width["process"], rel=0.02)
    narrow, _ = predictions.held(Knowing(known, 0.5 * known.noise, 2.0), known, rng)  # type: ignore[arg-type]
    assert narrow["emulator"] == pytest.approx(0.589, abs=0.08)  # P(|z| < 1.645/2)


@pytest.mark.parametrize("name", PROBLEMS)
def test_data_are_of_the_known_process(name: str) -> None:
    rng = np.random.default_rng(2)
    known = PROBLEMS[name](rng)._replace(runs=50, observations=4000)
    data = predictions._data(known, rng)
    assert np.array_equal(data["z"], known.simulate(data["x_runs"], data["t"]))
    assert data["t"].shape == (50, len(known.theta))
    left = data["y"] - known.simulate(data["x"], np.tile(known.theta, (4000, 1))) - known.bias(data["x"])
    assert left.std() == pytest.approx(known.noise, rel=0.1)
    for values, inputs in ((data["x"], known.problem.control_inputs), (data["t"], known.problem.calibration_inputs)):
        for column, variable in zip(values.T, inputs, strict=True):
            low, high = variable.bounds
            assert low <= column.min() < column.max() <= high


def test_replicates_are_averaged() -> None:
    done = [
        Replicate("piston", number, dict.fromkeys(KINDS, share), dict.fromkeys(KINDS, 0.1), seconds)
        for number, share, seconds in ((0, 0.8, 3.0), (1, 1.0, 5.0))
    ]
    found = predictions.summarise(done)
    assert found["piston: process in 90 %"] == pytest.approx(0.9)
    assert found["piston: process, standard error"] == pytest.approx(0.1)
    assert found["piston: seconds, median"] == 4.0
    assert found["replicates"] == 2


def test_a_problem_that_there_is_not_is_named() -> None:
    with pytest.raises(VcalError, match="no problem 'nothing'; accepted: pendulum,"):
        predictions.run(problems=["nothing"])
