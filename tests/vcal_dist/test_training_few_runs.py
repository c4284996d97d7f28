"""Training on few runs: what is said of the emulator, and what later commands make of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from storage.store import open_store
from tests.vcal_dist.training_kit import config, make_store
from vcal_dist.assessment import judge_validation
from vcal_dist.errors import ConfigError
from vcal_dist.posterior import Posterior
from vcal_dist.refined import refine
from vcal_dist.report.design_checks import design_of_the_runs
from vcal_dist.report.emulator_checks import emulator_error, emulator_error_in_theta
from vcal_dist.report.gathering import gather
from vcal_dist.report.row_checks import coverage_of_runs
from vcal_dist.run_place import run_place
from vcal_dist.stacked_emulator import StackedEmulator
from vcal_dist.training import train

STACKED = {"model": {"emulator": "auto"}, "fit": {"emulator": {"steps": 40}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few")
    make_store(folder / "s.zarr", runs=60, observations=30)
    said: list[str] = []
    settings = config(folder / "s.zarr", folder / "run", **STACKED)
    train(settings, progress=False, say=said.append)
    (folder / "said").write_text("\n".join(said), encoding="utf-8")
    return folder


def test_the_emulator_is_stacked_and_its_validation_kept(folder: Path) -> None:
    posterior = Posterior.load(folder / "run")
    assert isinstance(posterior.model.eta, StackedEmulator)
    assert posterior.validation is not None
    assert posterior.validation.row.tolist() == list(range(60))
    assessed = posterior.record["assessment"]["runs"]
    assert assessed["method"] == "cross-validation"
    assert assessed["rows"] == 60
    z = open_store(folder / "s.zarr").runs.read()["z"]
    scaling = posterior.scaling.outputs
    errors = posterior.validation.mean - scaling(torch.from_numpy(z.astype(np.float64)))
    assert assessed["rmse"][0] == pytest.approx(float(errors.square().mean().sqrt() * scaling.sd), rel=1e-6)
    assert posterior.record["runs"] == 60
    assert "few runs: the emulator is trained in 10 folds" in (folder / "said").read_text(encoding="utf-8")


def test_a_report_shows_runs_that_had_no_say(folder: Path) -> None:
    posterior = Posterior.load(folder / "run")
    gathered = gather(folder / "run", posterior)
    assert gathered.runs is not None
    judged = gathered.runs.judged
    assert judged.method == "cross-validation"
    (check,) = coverage_of_runs(gathered)
    inside = (judged.low <= judged.y) & (judged.y <= judged.high)
    assert check.number == pytest.approx(inside.mean())
    assert "each run predicted without it" in check.sentence
    assert emulator_error_in_theta(gathered) == []  # its error is in the model
    (error,) = emulator_error(gathered)
    assert error.status != "bad"  # however large it is beside the noise: intervals of θ contain it
    (design,) = design_of_the_runs(gathered)
    assert design.status == "good"


def test_rows_are_found_by_their_numbers(folder: Path) -> None:
    posterior = Posterior.load(folder / "run")
    rows = {name: part.astype(np.float64) for name, part in open_store(folder / "s.zarr").runs.read().items()}
    some = np.array([3, 17, 41])
    assert posterior.validation is not None
    judged = judge_validation(posterior, *(rows[name][some] for name in ("x", "t", "z")), some)
    mean = posterior.validation.mean[torch.from_numpy(some)]
    expected = posterior.scaling.outputs.inverse(mean)
    np.testing.assert_allclose(judged.mean, expected.numpy(), rtol=1e-9)
    np.testing.assert_allclose(judged.high - judged.low, 2 * 1.6448536 * judged.sd, rtol=1e-6)


def test_a_run_can_be_refined(folder: Path) -> None:
    with run_place(str(folder / "run")) as place:
        after, _ = refine(place, evaluations=200, progress=False)
    assert isinstance(after.model.eta, StackedEmulator)
    assert after.validation is not None


def test_a_stack_that_is_not_possible_is_refused(folder: Path, tmp_path: Path) -> None:
    asked = config(folder / "s.zarr", tmp_path / "run", weights="fullrank", model={"emulator": "stacked"})
    with pytest.raises(ConfigError, match=r"model\.emulator is 'stacked', but fit\.weights is 'fullrank'"):
        train(asked, progress=False)
    assert not (tmp_path / "run" / "config.yaml").exists()
