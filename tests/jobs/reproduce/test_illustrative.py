"""The illustrative experiment: what is known goes through a configuration, and figures are those of the processes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from numpy.typing import NDArray
from scipy import stats

from jobs.config import load
from jobs.reproduce import illustrative as experiment
from jobs.reproduce.experiment import ingested, trained
from jobs.reproduce.illustrative_charts import panels
from tests.vcal_dist.training_kit import assert_same, metrics
from vcal_dist.analytic import ExactPosterior, Grid, total_variation
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.config import Config
from vcal_dist.features import FeatureSettings
from vcal_dist.gp import GPSettings
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.posterior import Posterior
from vcal_dist.priors import ThetaPrior
from vcal_dist.problems import illustrative
from vcal_dist.theta import ThetaPosterior
from vcal_dist.training import train

Array = NDArray[np.float64]
FEATURES, SEED = 20, 2
SHORT = {
    "collapsed": {"theta": {"steps": 5}, "joint": {"steps": 2}, "evaluations": 64},
    "fullrank": {"emulator": {"steps": 5}, "theta": {"steps": 5}, "joint": {"steps": 2}},
    "meanfield": {name: {"steps": 3} for name in ("emulator_weights", "emulator", "weights_and_theta", "everything")},
}


def known(way: str) -> dict[str, Any]:
    return {
        "model": asdict(illustrative.settings(FEATURES, SEED)),
        "transforms": {"response": asdict(illustrative.TRANSFORM)},
        "fit": {"weights": way, **SHORT[way]},
        "devices": {"precision": "float64"},
    }


@pytest.fixture(scope="module")
def data() -> illustrative.Data:
    return illustrative.generate(SEED)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, data: illustrative.Data) -> Path:
    folder = tmp_path_factory.mktemp("illustrative")
    return ingested(
        folder, illustrative.problem(), {"x": data.x_runs, "t": data.t, "z": data.z}, {"x": data.x, "y": data.y}
    )


def by_hand() -> CalibrationModel:
    """The same model without settings that say what is known: learned ones, put in their places afterwards."""
    fixed = FeatureSettings(features=FEATURES, frequencies="fixed")
    noise = LikelihoodSettings(noise=0.01, learn_noise=False)
    model = CalibrationModel(
        1,
        ThetaPrior.from_problem(illustrative.problem()),
        1,
        ModelSettings(
            eta=GPSettings(features=fixed),
            delta=GPSettings(features=fixed, amplitude=0.2),
            likelihood_z=noise,
            likelihood_y=noise,
            emulator_residual=False,
            seed=SEED,
        ),
        dtype=torch.float64,
    )
    model.eta.last.set_lengthscale(torch.tensor([math.sqrt(2), math.sqrt(2) / 5], dtype=torch.float64))
    assert model.delta is not None
    model.delta.last.set_lengthscale(torch.tensor([math.sqrt(20)], dtype=torch.float64))
    return model


@pytest.fixture(scope="module")
def run_of(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run directory of each way, trained once."""
    folder = tmp_path_factory.mktemp("runs")

    def found(way: str) -> Path:
        if not (folder / way).exists():
            said: list[str] = []
            _, seconds = trained(store, folder / way, said.append, seed=1, **known(way))
            assert seconds > 0
            assert said == [f"training {way}"]
        return folder / way

    return found


@pytest.mark.parametrize("way", experiment.WAYS)
def test_a_configuration_can_say_that_everything_but_theta_is_known(
    way: str, run_of: Callable[[str], Path], data: illustrative.Data
) -> None:
    posterior, model = Posterior.load(run_of(way)), by_hand()
    expected, found = model.state_dict(), posterior.model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():  # no stage has moved anything, in any of the ways
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)
    u = torch.rand(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(posterior.model.eta(u), model.eta(u).detach(), rtol=1e-12, atol=0)
    assert posterior.noise["response"] == pytest.approx(0.01)  # in the output's own units
    # log p(Z) of the model by hand, by reflections and in closed form, and as training found it
    scaling = illustrative.scaling()
    runs = scaling.runs(*(torch.from_numpy(part) for part in (data.x_runs, data.t, data.z)))
    observations = scaling.observations(torch.from_numpy(data.x), torch.from_numpy(data.y))
    by_reflections = float(ExactPosterior(model, runs, observations).log_evidence_runs)
    phi = model.eta(runs.u).detach().numpy()
    covariance = phi @ phi.T + 1e-4 * np.eye(7)
    closed = stats.multivariate_normal(np.zeros(7), covariance).logpdf(data.z[:, 0])
    assert by_reflections == pytest.approx(closed, rel=1e-6)
    if way == "collapsed":
        assert posterior.record["log_evidence_runs"] == pytest.approx(closed, rel=1e-6)


def test_with_nothing_to_learn_the_emulators_stage_takes_no_step(run_of: Callable[[str], Path]) -> None:
    phases = {row["phase"] for row in metrics(run_of("collapsed"))}
    assert "theta" in phases
    assert "emulator" not in phases


def test_what_is_known_stands_in_the_configuration_of_the_run(run_of: Callable[[str], Path]) -> None:
    again = load(run_of("meanfield") / "config.yaml")
    assert again.model == illustrative.settings(FEATURES, SEED)
    assert again.transforms == {"response": illustrative.TRANSFORM}


def test_a_run_of_a_known_model_goes_on_after_a_stop(
    store: Path, run_of: Callable[[str], Path], tmp_path: Path
) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.steps == 4:  # in the stage of θ, after the one batch of the compression
                raise RuntimeError("stopped")
            self.steps += 1

        steps = 0

    output = {"store": str(store), "output": str(tmp_path / "run"), "seed": 1, "checkpoints": {"every_steps": 1}}
    config = Config.parse({**output, **known("collapsed")})
    with pytest.raises(RuntimeError, match="stopped"):
        train(config, progress=False, callbacks=[Stop()])
    said: list[str] = []
    train(config, progress=False, say=said.append)
    assert any(line.startswith("going on after step") for line in said)
    assert_same(tmp_path / "run", run_of("collapsed"))


def test_the_settings_of_both_sizes_are_configurations() -> None:
    for quick in (True, False):
        settings = experiment.settings(quick)
        assert json.loads(json.dumps(settings)) == settings
        for way in experiment.WAYS:
            fit = Config.parse({"store": "s.zarr", "fit": {"weights": way, **settings["fit"][way]}}).fit
            assert fit.weights == way


# --- figures ----------------------------------------------------------------------------------------------------------


def normal_grid(mean: float, sd: float) -> Grid:
    theta = np.linspace(-8, 8, 4001)
    return experiment.normalised(theta, -0.5 * ((theta - mean) / sd) ** 2 + 7.0)


def test_moments_and_distances_of_normal_densities_are_known() -> None:
    first, second = normal_grid(0.3, 0.5), normal_grid(0.8, 0.5)
    assert experiment.moments(first) == pytest.approx((0.3, 0.5), abs=1e-6)
    assert first.log_evidence == pytest.approx(7.0 + math.log(0.5 * math.sqrt(2 * math.pi)))
    # Two normals one standard deviation apart: 2Φ(1/2) − 1.
    assert experiment.distance(first, second) == pytest.approx(2 * stats.norm.cdf(0.5) - 1, abs=1e-5)
    prior = ThetaPrior.from_problem(illustrative.problem())
    q = ThetaPosterior(prior, torch.tensor([[0.8]]), torch.tensor([[[0.25]]]))
    assert total_variation(first, q) == pytest.approx(2 * stats.norm.cdf(0.5) - 1, abs=1e-5)


def test_the_exact_posterior_is_bayes_rule_with_the_kernels(data: illustrative.Data) -> None:
    grid = experiment.exact_grid(data)
    chosen = [1500, 2000, 2300]
    by_scipy = []
    for theta in grid.nodes[chosen, 0].tolist():
        u = np.concatenate([np.column_stack([data.x_runs, data.t]), np.column_stack([data.x, np.full(4, theta)])])
        covariance = np.exp(-0.25 * np.square(u[:, None] - u[None]).sum(-1)) + 1e-4 * np.eye(11)
        covariance[7:, 7:] += 0.04 * np.exp(-np.square(data.x - data.x.T) / 40)
        likelihood = stats.multivariate_normal(np.zeros(11), covariance).logpdf(np.concatenate([data.z, data.y])[:, 0])
        by_scipy.append(likelihood + stats.norm.logpdf(theta))
    found = grid.density[chosen].log().numpy()
    np.testing.assert_allclose(found - found[0], np.array(by_scipy) - by_scipy[0], rtol=1e-6, atol=1e-8)
    assert float(torch.trapezoid(grid.density, grid.nodes[:, 0])) == pytest.approx(1)


def test_the_true_surface_goes_through_the_data(data: illustrative.Data) -> None:
    u = np.column_stack([data.x_runs, data.t])
    rng = np.random.default_rng(0)
    others = rng.random((30, 2)) * [1, 5] - [0, 2.5]
    eta = illustrative.true_eta(SEED, np.concatenate([u, others]))
    assert eta.shape == (37, 1)
    assert np.abs(eta[:7] - data.z).max() < 5 * illustrative.NOISE
    np.testing.assert_array_equal(eta, illustrative.true_eta(SEED, np.concatenate([u, others])))


def test_the_true_surface_is_a_draw_of_its_process() -> None:
    points = np.array([[0.2, -2.0], [0.5, 0.1], [0.9, 2.2]])
    lower = np.linalg.cholesky(illustrative.kernel_eta(points, points))
    white = np.array([np.linalg.solve(lower, illustrative.true_eta(seed, points)[:, 0]) for seed in range(300)])
    assert stats.kstest(white.ravel(), "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(white.T) - np.eye(3)).max() < 0.25


# --- the chart --------------------------------------------------------------------------------------------------------


def test_four_panels_share_one_colour_scale_of_values(data: illustrative.Data) -> None:
    prior = ThetaPrior.from_problem(illustrative.problem())
    found = {
        way: ThetaPosterior(prior, torch.tensor([[0.5]]), torch.tensor([[[sd**2]]]))
        for way, sd in zip(experiment.WAYS, (0.5, 0.4, 0.01), strict=True)
    }
    axes = (np.array([0.25, 0.75]), np.array([-1.25, 1.25]))
    eta, emulated = np.array([[0.0, 9.0], [1.0, 2.0]]), np.array([[-9.0, 0.0], [1.0, 2.0]])
    chart = panels(data, normal_grid(0.5, 0.5), found, axes, eta, emulated).to_dict()
    assert len(chart["concat"]) == 4
    values = [color["scale"]["domain"] for color in encodings(chart, "color") if color["field"] == "value"]
    assert len(values) == 5  # two surfaces, the lines, and the runs twice
    assert all(domain == [-9.0, 9.0] for domain in values)
    (of,) = (color["scale"]["domain"] for color in encodings(chart, "color") if color["field"] == "of")
    assert of == ["prior", "exact", "collapsed", "fullrank", "meanfield"]
    # A curve that is far taller than the exact posterior is cut, and the chart says so.
    assert chart["concat"][0]["title"]["subtitle"] == ["cut: meanfield reaches 40"]


def encodings(chart: Any, channel: str) -> list[dict[str, Any]]:
    """The channel's definition in every layer of a chart."""
    if isinstance(chart, list):
        return [found for part in chart for found in encodings(part, channel)]
    if not isinstance(chart, dict):
        return []
    here = [chart["encoding"][channel]] if channel in chart.get("encoding", {}) else []
    return here + [found for key in ("concat", "layer") for found in encodings(chart.get(key, []), channel)]
