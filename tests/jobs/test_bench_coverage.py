"""`vcal bench coverage`: data of every experiment come from the process that they say, and outcomes are summed up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jobs.bench import coverage
from vcal_dist.problems import borehole, cell, illustrative, radionuclide
from vcal_dist.sbc import LEVELS, Told


@pytest.mark.timeout(200)
def test_replicates_share_an_emulator_and_cover(tmp_path: Path) -> None:
    shared = tmp_path / "emulator.safetensors"
    coverage._train_emulator("borehole_small", shared)
    asked = coverage.Asked("borehole_small", shared=str(shared))
    outcomes = {
        0: coverage.one(asked._replace(against=900), 0),  # little more than the default has
        1: coverage.one(asked, 1),
    }
    for outcome in outcomes.values():
        assert outcome.found.unrefined == ""
        assert outcome.found.effective > 40
        assert len(outcome.predictive) == 200
        assert abs(outcome.told.mean[0] - outcome.told.truth[0]) < 0.05  # rw
    assert outcomes[0].patient is not None
    assert outcomes[0].patient.points >= 900 > outcomes[0].found.points
    assert outcomes[0].patient.effective > 40
    assert outcomes[1].patient is None
    found = coverage.summarise("borehole_small", outcomes, "collapsed")
    for parameter in ("rw", "r", "Tl"):
        low, high = (float(part) for part in found[f"{parameter} width beside that of many points"].split(" to "))
        assert 0.5 < low == high < 2
    assert found["replicates"] == 2
    assert found["fresh observations"] == 400
    assert found["rw verdict"].startswith("too few replicates")
    assert found["fresh observations in 90 %"] > 0.8


def test_the_boreholes_observations_are_those_of_its_truth() -> None:
    data, _ = coverage._borehole(3, 1000, 500)
    nature = borehole.simulate(data.x, np.tile(data.theta, (500, 1))) + borehole.discrepancy(data.x)
    assert (data.y - nature).std() == pytest.approx(borehole.NOISE, rel=0.1)
    other, _ = coverage._borehole(4, 1000, 500)
    assert not np.allclose(data.theta, other.theta)


def test_fresh_observations_are_no_part_of_what_is_seen() -> None:
    data, setup = coverage._illustrative(5, features=20)
    assert data.x.shape == (4, 1)
    assert data.fresh_x.shape == (coverage.FRESH, 1)
    whole = illustrative.generate(5, observations=4 + coverage.FRESH)
    assert sorted([*data.y[:, 0], *data.fresh_y[:, 0]]) == sorted(whole.y[:, 0])
    assert data.theta[0] == whole.theta_true
    assert not setup.model.delta.learn


def test_roots_of_currents_and_concentrations_are_those_of_their_truths() -> None:
    data, setup = coverage._cell(1)
    assert data.y.shape == (19, 1)
    roots = np.sqrt(cell.simulate(data.x, np.tile(data.theta, (19, 1))))
    assert np.abs(data.y - roots).max() < 5 * np.hypot(0.1, 0.05) * data.z.std()  # δ and noise
    np.testing.assert_array_equal(data.z, np.sqrt(cell.generate(cell.RUNS, 1).z))
    assert setup.transform.kind == "none"
    plume, _ = coverage._radionuclide(1)
    truth = radionuclide.simulate(plume.fresh_x, np.tile(plume.theta, (88, 1))) + radionuclide.discrepancy(
        plume.fresh_x
    )
    assert plume.fresh_noise is not None
    assert np.abs((plume.fresh_y - truth) / plume.fresh_noise).max() < 5


def test_coverage_is_counted() -> None:
    def outcome(inside: bool) -> coverage.Outcome:
        interval = (0.0, 1.0) if inside else (2.0, 3.0)
        told = Told((0.5,) * 3, (0.5,) * 3, (0.6,) * 3, (0.1,) * 3, {level: [interval] * 3 for level in LEVELS})
        wider = replace(told, intervals={level: [(0.0, 2.0)] * 3 for level in LEVELS})
        many = coverage.Found(wider, "", 8000, 70.0)
        return coverage.Outcome(coverage.Found(told, "", 768, 100.0), [0.5, 0.01], 1.0, many)

    outside = outcome(False)
    far = replace(outside.told, pit=(1e-9, 0.5, 0.5))
    outside = outside._replace(found=outside.found._replace(told=far))
    outcomes = {7: outside, 5: outcome(True), 4: outcome(True), 6: outcome(True)}
    found = coverage.summarise("borehole_1000", outcomes, "collapsed")
    assert found["rw far outside in replicate"] == "7"
    assert "r far outside in replicate" not in found
    assert found["rw in 90 %"].startswith("0.750")
    assert found["all parameters in 95 %"] == "3 of 4"
    assert found["fresh observations in 90 %"] == 0.5
    assert found["rw width beside that of many points"] == "0.50 to 0.50"
    assert found["effective draws, median"] == 100.0
    assert found["many points, least"] == 8000
    assert found["effective draws of many points, least"] == 70.0
    assert found["many points that carry too little"] == 0
    assert found["Tl error"] == "mean 0.1, largest 0.1"


def test_other_replicates_are_asked_for_by_the_number_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the calibrations, which another test makes."""
    made: list[int] = []

    def parallel(asked: coverage.Asked, numbers: range) -> Iterator[tuple[int, coverage.Outcome]]:
        for number in numbers:
            data, _ = coverage.EXPERIMENTS[asked.name].make(number)
            made.append(number)
            truth = tuple(data.theta.tolist())
            told = Told((0.5,), truth, truth, (0.1,), {level: [(-9.0, 9.0)] for level in LEVELS})
            yield number, coverage.Outcome(coverage.Found(told, "", 768, 100.0), data.fresh_y[:, 0].tolist(), 1.0)

    monkeypatch.setattr(coverage, "_parallel", parallel)
    found = coverage.run(coverage.Asked("illustrative"), first=3, replicates=2)
    assert made == [3, 4]
    assert found["replicates"] == 2
    assert found["theta error"] == "mean 0, largest 0"
