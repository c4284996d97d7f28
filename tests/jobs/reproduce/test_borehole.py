"""The borehole experiment: variants are configurations, measures those of the simulator, charts complete."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from jobs.reproduce import borehole as experiment
from jobs.reproduce.borehole_charts import cost, intervals, posteriors
from vcal_dist.batches import Scaling
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.config import Config
from vcal_dist.posterior import Posterior
from vcal_dist.priors import ThetaPrior
from vcal_dist.problems import borehole
from vcal_dist.theta import ThetaPosterior
from vcal_dist.transforms import OutputScaling, TransformSettings
from vcal_dist.weights import MeanField


def config(name: str, *, quick: bool = False) -> Config:
    return Config.parse({"store": "s.zarr", **experiment.settings(quick)["variants"][name]})


def judged(seconds: float, measure: float, sd: float = 0.01) -> dict[str, Any]:
    theta = {
        name: {
            "truth": truth,
            "mean": truth,
            "sd": sd,
            "intervals": {"90": (truth - 1.6 * sd, truth + 1.6 * sd), "95": (truth - 2 * sd, truth + 2 * sd)},
            "inside": {"90": True, "95": True},
        }
        for name, truth in zip(borehole.PARAMETERS, borehole.THETA, strict=True)
    }
    return {"emulator": 0.001, "measure": measure, "sigma": 0.005, "theta": theta, "seconds": seconds}


def gaussian(sd: float) -> ThetaPosterior:
    prior = ThetaPrior.from_problem(borehole.problem())
    means = prior.tilde(torch.tensor([borehole.THETA], dtype=torch.float64))
    return ThetaPosterior(prior, means, (sd**2 * torch.eye(3, dtype=torch.float64))[None])


def test_the_default_changes_nothing_and_every_variant_one_thing() -> None:
    plain = Config.parse({"store": "s.zarr"})
    assert config("default") == plain
    assert config("isotropic").model.eta.features.lengthscales == "isotropic"
    assert config("isotropic").model.eta.features.frequencies == "fixed"
    assert config("isotropic").model.delta.features.lengthscales == "isotropic"
    assert config("isotropic").model.delta.features.constant == plain.model.delta.features.constant
    for way in ("fullrank", "meanfield"):
        assert config(way).fit.weights == way
        assert config(way).model == plain.model
    for features in (50, 200, 400, 1000):
        assert config(f"features_{features}").model.eta.features.features == features
        assert config(f"features_{features}").model.delta == plain.model.delta


@pytest.mark.parametrize("quick", [True, False])
def test_settings_are_plain_and_every_variant_has_its_figures(quick: bool) -> None:
    settings = experiment.settings(quick)
    assert json.loads(json.dumps(settings)) == settings
    assert (settings["runs"], settings["observations"]) == ((20_000, 2_000) if quick else (1_000_000, 100_000))
    keys = {figure.key for figure in experiment.figures(quick)}
    for name in settings["variants"]:
        assert config(name, quick=quick)
        assert {f"{key}_{name}" for key in ("measure", "seconds", "inside", "emulator", "sigma")} <= keys
    paper = {figure.key: figure.paper for figure in experiment.figures(quick) if figure.paper is not None}
    assert paper == {
        "measure_uniform": 0.32,
        "measure_trees": 0.14,
        "measure_default": 0.03,
        "measure_isotropic": 0.03,
        "seconds_default": 5040.0,
        "seconds_isotropic": 5040.0,
        "seconds_trees": pytest.approx(476_640.0),
    }


def posterior_at_the_truth(level: float, sd: float) -> Posterior:
    """A posterior whose emulator says `level` everywhere and whose θ̃ is a narrow Gaussian at the truth."""
    problem = borehole.problem()
    model = CalibrationModel(5, ThetaPrior.from_problem(problem), 1, ModelSettings())
    one = torch.ones(1, dtype=torch.float64)
    scaling = Scaling(problem, OutputScaling([TransformSettings()], level * one, one, ["flow"]))
    q = MeanField(3, 1, model.width)
    with torch.no_grad():
        q.mean.zero_()
        q.theta_mean.copy_(gaussian(sd).means[0])
        q.theta_log_sd.fill_(math.log(sd))
    return Posterior(scaling, model, [q], torch.zeros(1, dtype=torch.float64), {})


def test_a_posterior_at_the_truth_has_the_measure_of_the_discrepancy() -> None:
    fresh = experiment.Fresh(3000, seed=0)
    x = fresh.x[: experiment.ROWS_OF_MEASURE]
    assert fresh.floor == pytest.approx(float(np.sqrt(np.mean(borehole.discrepancy(x) ** 2))), rel=1e-12)
    assert fresh.floor == pytest.approx(0.008, abs=0.0005)
    found = fresh.judge(posterior_at_the_truth(level=0.25, sd=1e-5))
    assert found["measure"] == pytest.approx(fresh.floor, rel=1e-3)
    # An emulator that is constant: its error is the root of variance and squared offset.
    offset = (fresh.z.mean() - 0.25) / fresh.z.std()
    assert found["emulator"] == pytest.approx(math.sqrt(1 + offset**2), rel=1e-5)
    assert found["sigma"] == pytest.approx(0.1)  # where learning starts, and the scaling has an sd of one
    for name, truth in zip(borehole.PARAMETERS, borehole.THETA, strict=True):
        assert found["theta"][name]["mean"] == pytest.approx(truth, abs=1e-4)
        assert found["theta"][name]["inside"] == {"90": True, "95": True}
        low, high = found["theta"][name]["intervals"]["90"]
        wide_low, wide_high = found["theta"][name]["intervals"]["95"]
        assert wide_low < low < truth < high < wide_high
    assert json.loads(json.dumps(found))


def test_fresh_inputs_are_not_those_of_the_data() -> None:
    fresh, data = experiment.Fresh(50, seed=0), borehole.generate(50, 10, seed=0)
    assert not np.isin(fresh.x, data.x_runs).any()
    assert not np.array_equal(fresh.x, experiment.Fresh(50, seed=1).x)


# --- charts -----------------------------------------------------------------------------------------------------------


def data_of(chart: dict[str, Any], layer: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a layer; a composed chart keeps them by name."""
    rows: list[dict[str, Any]] = chart["datasets"][layer["data"]["name"]]
    return rows


def test_the_chart_of_intervals_has_every_variant_and_the_truth_of_every_parameter() -> None:
    chart = intervals({"default": judged(10, 0.008), "M = 50": judged(5, 0.009)}).to_dict()
    assert len(chart["hconcat"]) == 3
    for panel, name, truth in zip(chart["hconcat"], borehole.PARAMETERS, borehole.THETA, strict=True):
        assert panel["title"] == borehole.RANGES[name].meaning
        rows = data_of(chart, panel["layer"][0])
        assert [row["variant"] for row in rows] == ["default", "M = 50"]
        assert rows[0]["low95"] < rows[0]["low90"] < rows[0]["mean"] < rows[0]["high90"] < rows[0]["high95"]
        assert data_of(chart, panel["layer"][-1]) == [{"truth": pytest.approx(truth, rel=1e-5)}]


def test_the_chart_of_costs_is_logarithmic_and_shows_the_truths_own_measure() -> None:
    chart = cost({"default": judged(10, 0.008), "M = 50": judged(5, 0.009)}, floor=0.0081).to_dict()
    for panel in chart["hconcat"]:
        encoding = panel["layer"][0]["encoding"]
        assert encoding["x"]["scale"]["type"] == encoding["y"]["scale"]["type"] == "log"
    assert data_of(chart, chart["hconcat"][1]["layer"][-1]) == [{"value": 0.0081}]


@pytest.mark.parametrize("sd", [0.01, 1.6])
def test_the_chart_of_a_posterior_shows_the_truth_and_is_not_flattened_by_the_ends(sd: float) -> None:
    theta = gaussian(sd)
    chart = posteriors(theta).to_dict()
    for j, panel in enumerate(chart["hconcat"]):
        encoding = panel["layer"][1]["encoding"]
        low, high = encoding["x"]["scale"]["domain"]
        assert 0 <= low < borehole.THETA[j] < high <= 1
        # A Gaussian θ̃ wider than its prior has a density without bound at the ends of θ.
        at_truth = float(theta.marginal_density(j, torch.tensor([borehole.THETA[j]]))[0])
        assert at_truth < encoding["y"]["scale"]["domain"][1] < 5 * max(at_truth, 1)
