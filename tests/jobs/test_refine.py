"""`vcal refine`: a run's posterior is brought closer to the exact one, and the answer says how far it moved."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from jobs.cli import app
from storage.errors import VcalError
from tests.vcal_dist.training_kit import config, make_store
from vcal_dist.posterior import Posterior
from vcal_dist.priors import ThetaPrior
from vcal_dist.refined import total_variation
from vcal_dist.theta import ThetaPosterior
from vcal_dist.training import train

FIT = {"emulator": {"steps": 80}, "theta": {"steps": 60}, "joint": {"steps": 3}, "evaluations": 128}
SHORT = {"steps": 40}
MEANFIELD = dict.fromkeys(("emulator_weights", "emulator", "weights_and_theta", "everything"), SHORT)


def refine(run: Path, *arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["refine", str(run), "--json", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("refine") / "s.zarr"
    make_store(url)
    return url


def test_a_sound_run_hardly_moves_the_second_time(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(config(store, run, fit=FIT), progress=False)
    first, again = refine(run, "--evaluations", "1500"), refine(run, "--evaluations", "3000")
    assert first["evaluations"] == 1500
    assert again["evaluations"] == 3000
    assert max(each["distance"] for each in again["parameters"]) < 0.15
    assert all(0.85 < each["ratio"] < 1.15 for each in again["parameters"])
    assert all(abs(each["shift"]) < 0.2 for each in again["parameters"])
    assert again["pareto_k"] < 0.7
    posterior = Posterior.load(run)
    assert posterior.record["refined"]["from"] == "collapsed"
    assert posterior.record["theta"]["hyperparameters"].keys() >= {"noise"}
    assert posterior.record["seconds"] > 0  # what training said remains
    for row, each in zip(posterior.summary(), again["parameters"], strict=True):
        assert [row.mean, row.sd] == pytest.approx([each["mean"], each["sd"]])


def test_meanfield_is_led_to_the_posterior(store: Path, tmp_path: Path) -> None:
    """θ of a short mean-field training is nowhere; the same emulator tells where it is."""
    run = tmp_path / "run"
    train(config(store, run, "meanfield", fit=MEANFIELD), progress=False)
    found = refine(run, "--evaluations", "600")
    assert max(each["distance"] for each in found["parameters"]) > 0.25
    assert "moved far" in found["verdict"]
    record = Posterior.load(run).record["theta"]
    assert (record["family"], record["unrefined"]) == ("collapsed", "")
    assert record["effective"] > 20


def test_what_cannot_be_refined_says_why_and_stays(store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit = {**FIT, "emulator": {"steps": 5}, "theta": {"steps": 5}}
    train(config(store, run, "fullrank", model={"likelihood_y": {"kind": "student_t"}}, fit=fit), progress=False)
    before = (run / "posterior.safetensors").read_bytes()
    with pytest.raises(VcalError, match="where the noise is not Gaussian"):
        CliRunner().invoke(app, ["refine", str(run)], catch_exceptions=False)
    with pytest.raises(VcalError, match=r"'fit\.starts' cannot be changed when a run is refined; accepted: devices"):
        CliRunner().invoke(app, ["refine", str(run), "fit.starts=3"], catch_exceptions=False)
    with pytest.raises(VcalError, match="nothing"):
        CliRunner().invoke(app, ["refine", str(tmp_path / "nothing")], catch_exceptions=False)
    assert (run / "posterior.safetensors").read_bytes() == before


def test_total_variation_of_two_normals_is_closed_form() -> None:
    from tests.vcal_dist.conftest import Kit

    prior: ThetaPrior = Kit.prior(2)
    one, none = torch.eye(2, dtype=torch.float64)[None], torch.zeros(1, 2, dtype=torch.float64)
    here, there = ThetaPosterior(prior, none, 0.04 * one), ThetaPosterior(prior, none + 0.1, 0.04 * one)
    expected = math.erf(0.25 / math.sqrt(2))  # 2Φ(d/2) − 1 for a distance of half a standard deviation
    assert total_variation(here, there, 1) == pytest.approx(expected, abs=1e-4)
    assert total_variation(here, here, 0) == 0.0
