"""The bound of all data, by which settings are compared, beside the exact evidence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from storage.store import create, open_store
from tests.vcal_dist.training_kit import append, config, generate, make_store, problem
from vcal_dist import training
from vcal_dist.analytic import ExactPosterior
from vcal_dist.errors import Diverged, ModelError
from vcal_dist.fitting import fit
from vcal_dist.phases import Batch, Descent
from vcal_dist.plan import FitSettings, StageSettings
from vcal_dist.problems import illustrative
from vcal_dist.run_place import run_place
from vcal_dist.stages import Stage
from vcal_dist.training import prepare, train
from vcal_dist.work import Fitted

SHORT = {"theta": StageSettings(steps=50), "joint": StageSettings(steps=5)}


def fitted(settings: FitSettings, features: int = 60) -> tuple[Fitted, ExactPosterior]:
    data, scaling = illustrative.generate(3), illustrative.scaling()
    model = illustrative.model(features, seed=3)
    runs = scaling.runs(*(torch.tensor(part) for part in (data.x_runs, data.t, data.z)))
    observations = scaling.observations(torch.tensor(data.x), torch.tensor(data.y))
    found = fit(model, runs, observations, settings, seed=0)
    return found, ExactPosterior(model, runs, observations)


@pytest.mark.parametrize("weights", ["collapsed", "fullrank"])
def test_it_is_the_evidence_of_runs_and_observations_with_laplace_in_theta(weights: str) -> None:
    found, exact = fitted(FitSettings(weights=weights, **SHORT))  # type: ignore[arg-type]
    assert found.bound is not None
    assert found.bound == pytest.approx(exact.grid(reach=10.0).log_evidence, abs=0.5)  # of Laplace: θ is not Gaussian
    assert found.log_evidence_runs == pytest.approx(float(exact.log_evidence_runs), abs=0.05)


def test_without_closing_passes_there_is_none() -> None:
    few = StageSettings(steps=2)
    stages = ("emulator_weights", "emulator", "weights_and_theta", "everything")
    settings = FitSettings(weights="meanfield", **dict.fromkeys(stages, few))  # type: ignore[arg-type]
    assert fitted(settings)[0].bound is None


def test_hidden_layers_pay_for_what_they_have_learned(tmp_path: Path) -> None:
    make_store(tmp_path / "s.zarr")
    prepared = prepare(config(tmp_path / "s.zarr", tmp_path / "run", deep=True), open_store(tmp_path / "s.zarr"))
    with run_place(tmp_path / "run") as place:
        found = training.fit(prepared, place, None, progress=False)
    assert found.bound is not None
    assert found.log_evidence_runs is not None
    (layer,) = found.model.eta.hidden
    q = Normal(layer.weights.mean, layer.weights.log_sd.exp())
    paid = float(kl_divergence(q, Normal(torch.zeros(()), torch.ones(()))).sum().detach())
    assert paid > 1
    of_modes = np.logaddexp.reduce([closing.log_evidence for closing in found.closings])
    assert found.bound == pytest.approx(found.log_evidence_runs + of_modes - paid, rel=1e-5)


def test_it_counts_in_the_units_of_the_user(tmp_path: Path) -> None:
    """So that outputs with different transforms can be compared: the density of 10·z is a tenth of that of z."""
    bounds = []
    for factor in (1.0, 10.0):
        arrays = generate(450, 60)
        arrays |= {name: factor * arrays[name] for name in ("z", "y")}
        store = create(tmp_path / f"{factor}.zarr", problem(), dtype="float64")
        append(store, arrays)
        posterior = train(config(store.url, tmp_path / f"{factor}", devices={"precision": "float64"}), progress=False)
        bounds.append(posterior.record["bound"])
    assert bounds[1] == pytest.approx(bounds[0] - (428 + 60) * np.log(10), abs=1e-4)


def test_training_can_begin_at_a_theta_of_the_users(tmp_path: Path) -> None:
    """A start far from the best point is where the stage of θ begins; names and values that cannot be are refused."""
    make_store(tmp_path / "s.zarr")
    still = {"theta": {"steps": 1, "rate": 1e-9, "batch_observations": 25}, "joint": {"steps": 0}}
    train(config(tmp_path / "s.zarr", tmp_path / "a", fit={**still, "start": {"t1": 0.9}}), progress=False)
    recorded = (tmp_path / "a" / "metrics.csv").read_text().splitlines()
    column = recorded[0].split(",").index("theta.t1")
    at_theta = next(line.split(",") for line in recorded if ",theta," in line)
    assert float(at_theta[column]) == pytest.approx(0.9, abs=1e-4)
    with pytest.raises(ModelError, match=r"fit.start names 't9'; the calibration inputs are t1, t2"):
        train(config(tmp_path / "s.zarr", tmp_path / "b", fit={"start": {"t9": 0.5}}), progress=False)
    with pytest.raises(ModelError, match="outside the support"):
        train(config(tmp_path / "s.zarr", tmp_path / "b", fit={"start": {"t1": 1.5}}), progress=False)


@pytest.mark.parametrize("spread", [None, 0.25])
def test_mean_field_begins_with_the_spread_that_is_asked_for(tmp_path: Path, spread: float | None) -> None:
    make_store(tmp_path / "s.zarr")
    stages = ("emulator_weights", "emulator", "weights_and_theta", "everything")
    fit = {name: {"steps": 1, "rate": 1e-9} for name in stages} | {"start": {"t2": 0.75}, "spread": spread}
    posterior = train(config(tmp_path / "s.zarr", tmp_path / "a", "meanfield", fit=fit), progress=False)
    mean, covariance = posterior.components[0].theta_moments()
    assert covariance.diagonal().sqrt().tolist() == pytest.approx([spread or 1.0] * 2, rel=1e-4)
    assert mean.tolist() == pytest.approx([0.0, 0.67449], abs=1e-4)  # Φ(0.67449) = 0.75


def test_a_rate_that_has_changed_goes_on_in_its_place_of_the_cycle() -> None:
    def stage(rate: float) -> Stage:
        weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        groups = [{"params": [weight], "lr": rate}]
        return Stage("a", 40, groups, lambda runs, field, n: (weight - 1).square().sum())

    descent, other = Descent(stage(0.1)), Descent(stage(0.05))
    for _ in range(17):
        descent.step(Batch(None, None))
        other.step(Batch(None, None))
    resumed = Descent(stage(0.05))
    resumed.load(descent.state())
    assert resumed.optimizer is not None
    assert other.optimizer is not None
    for _ in range(3):
        now, expected = resumed.optimizer.param_groups[0], other.optimizer.param_groups[0]
        assert now["lr"] == pytest.approx(expected["lr"], rel=1e-12)
        resumed.step(Batch(None, None))
        other.step(Batch(None, None))


def test_a_stage_that_has_spoilt_the_model_is_told_by_the_pass_after_it(tmp_path: Path) -> None:
    """One step is too few to see that a loss rises."""
    make_store(tmp_path / "s.zarr")
    fast = {"emulator": {"steps": 1, "rate": 1e25}}
    with pytest.raises(Diverged, match=r"no solution in phase 'compression'; lower the learning rates"):
        train(config(tmp_path / "s.zarr", tmp_path / "run", fit=fast), progress=False)
