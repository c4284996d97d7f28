"""The refinement: against quadrature over θ̃ and ζ, with many rows as with few, and stopped anywhere."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.vcal_dist.training_kit import PASS_ROWS, Enough, Some, assert_same, config, make_store, small_passes
from vcal_dist import densities, exact_refinement, mixture, phases, refinement, streamed_refinement
from vcal_dist.batches import Observations, Runs
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.densities import collapsed_log_density, nature_moments
from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings
from vcal_dist.fitting import fit
from vcal_dist.gp import GPSettings
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.mixture import Adapted
from vcal_dist.nature import AMPLITUDE, LENGTHSCALES, NOISE, Nature
from vcal_dist.passes import compress
from vcal_dist.plan import FitSettings, StageSettings, Totals
from vcal_dist.posterior import Posterior
from vcal_dist.training import train
from vcal_dist.way import way
from vcal_dist.work import Fitted, Work

F64 = torch.float64
QUICK = FitSettings(
    emulator=StageSettings(steps=60), theta=StageSettings(steps=60), joint=StageSettings(steps=5), screening=256
)


def setting(kit: Any, kind: Any = "none", rows: int = 12, noise: float = 0.3) -> tuple[CalibrationModel, Runs, Any]:
    """η(x, t) = t + sin(3x)/2 known from many runs; few observations at θ = 0.6 with noise that is not known."""
    settings = ModelSettings(
        eta=GPSettings(features=FeatureSettings(features=20, constant=1.0), lengthscale=0.6),
        delta=GPSettings(
            features=FeatureSettings(features=6, lengthscales="isotropic"), amplitude=0.3, lengthscale=0.7
        ),
        discrepancy=kind,
        likelihood_y=LikelihoodSettings(noise=0.2, spread=1.0),
    )
    model = CalibrationModel(1, kit.prior(1), 1, settings, dtype=F64)
    u, x = kit.rand(1, 400, 2), kit.rand(2, rows, 1)
    z = u[:, 1:] + 0.5 * torch.sin(3 * u[:, :1])
    y = 0.6 + 0.5 * torch.sin(3 * x) + noise * kit.randn(3, rows, 1)
    runs = Runs(u, z, torch.zeros_like(z), torch.arange(400), torch.ones(400, dtype=F64))
    return model, runs, Observations(x, y, None, torch.zeros_like(y), torch.arange(rows), torch.ones(rows, dtype=F64))


def exact_moments(model: CalibrationModel, runs: Runs, rows: Observations, nodes: int) -> tuple[float, float]:
    """Mean and sd of θ̃ by a grid over θ̃ and ζ."""
    frame, nature = compress(model, [runs]).frame, Nature(model)
    line = torch.linspace(-3.5, 3.5, nodes, dtype=F64)
    grid = torch.cartesian_prod(*[line] * (1 + nature.dim))
    return weighted(grid[:, 0], collapsed_log_density(model, frame, lambda: [rows], grid, nature).softmax(0))


def weighted(values: torch.Tensor, p: torch.Tensor) -> tuple[float, float]:
    mean = float(p @ values)
    return mean, float((p @ (values - mean).square()).sqrt())


def found_moments(fitted: Fitted) -> tuple[float, float]:
    """Mean and sd of θ̃ under q."""
    p, theta = fitted.log_weights.softmax(0), [q.theta_moments() for q in fitted.components]
    mean = float(sum(w * m[0] for w, (m, _) in zip(p, theta, strict=True)))
    square = float(sum(w * (C[0, 0] + (m[0] - mean) ** 2) for w, (m, C) in zip(p, theta, strict=True)))
    return mean, square**0.5


@pytest.mark.parametrize(("kind", "nodes"), [("none", 41), ("additive", 15)])
def test_theta_is_as_uncertain_as_hyperparameters_make_it(kit: Any, kind: Any, nodes: int) -> None:
    model, runs, rows = setting(kit, kind, rows=8)
    if kind == "additive":  # with σ_y known, three dimensions are left
        known = replace(model.settings, likelihood_y=LikelihoodSettings(noise=0.2, learn_noise=False))
        model = CalibrationModel(1, kit.prior(1), 1, known, dtype=F64)
    fitted = fit(model, runs, rows, replace(QUICK, evaluations=1200))
    assert fitted.integrated == Nature(model).kinds
    assert fitted.adapted is not None
    assert fitted.adapted.effective > 200
    mean, sd = exact_moments(model, runs, rows, nodes)
    found_mean, found_sd = found_moments(fitted)
    assert found_mean == pytest.approx(mean, abs=0.15 * sd)
    assert found_sd == pytest.approx(sd, rel=0.12)


def test_one_value_of_a_hyperparameter_would_be_too_sure(kit: Any) -> None:
    """Five observations: not knowing σ_y makes the posterior of θ wider than it is at the most probable value."""
    model, runs, rows = setting(kit, "none", rows=5)
    fitted = fit(model, runs, rows, QUICK)
    assert fitted.adapted is not None
    best = fitted.adapted.points[fitted.adapted.log_weights.argmax(), 1:]
    Nature(model).put(best)
    grid = torch.linspace(-4, 4, 401, dtype=F64)[:, None]
    log_p = collapsed_log_density(model, compress(model, [runs]).frame, lambda: [rows], grid)
    assert found_moments(fitted)[1] > 1.1 * weighted(grid[:, 0], log_p.softmax(0))[1]


def test_laplace_finds_the_mode_and_curvature_of_the_noise(kit: Any) -> None:
    """Where η and σ_z are all but known, log σ given many residuals has variance 1/(2n)."""
    model, runs, rows = setting(kit, "none", rows=400)
    frame = compress(model, [runs]).frame
    theta = torch.special.ndtri(torch.tensor([0.6], dtype=F64))
    nature = Nature(model)
    mean, covariance = nature_moments(model, frame, lambda: [rows], theta, nature)
    nature.put(mean)  # the last of its steps may be half a standard deviation long
    mean, covariance = nature_moments(model, frame, lambda: [rows], theta, nature)
    line = torch.linspace(-0.3, 0.9, 1201, dtype=F64)[:, None]
    points = torch.cat([theta.expand(len(line), 1), line], 1)
    p = collapsed_log_density(model, frame, lambda: [rows], points, nature).softmax(0)
    exact = float(p @ line[:, 0])
    assert float(mean) == pytest.approx(exact, abs=0.02)
    assert float(covariance.sqrt()) == pytest.approx(float((p @ (line[:, 0] - exact).square()).sqrt()), rel=0.1)


def test_many_points_take_few_collective_calls(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between hosts a call takes milliseconds; one for each point took longer than everything else in this phase."""
    model, runs, rows = setting(kit, "additive")
    frame, nature, calls = compress(model, [runs]).frame, Nature(model), []

    def counted(tensors: Any, **options: Any) -> list[Tensor]:
        calls.append(len(tensors))
        return list(tensors)

    monkeypatch.setattr(densities, "sum_over_ranks", counted)
    points = torch.randn(200, model.prior.dim + nature.dim, dtype=F64, generator=torch.Generator().manual_seed(0))
    together = collapsed_log_density(model, frame, lambda: [rows], points, nature)
    assert len(calls) == 2
    one_by_one = [collapsed_log_density(model, frame, lambda: [rows], point[None], nature) for point in points[:20]]
    torch.testing.assert_close(together[:20], torch.cat(one_by_one))
    calls.clear()
    nature_moments(model, frame, lambda: [rows], points[0, : model.prior.dim], nature)
    assert len(calls) <= 2 * densities.NEWTON_STEPS


def test_rows_decide_how_points_are_evaluated(kit: Any) -> None:
    model, _, rows = setting(kit, "additive")

    def ways(observations: int, rows: Observations = rows, **settings: Any) -> tuple[int, bool, int]:
        work = Work(model, FitSettings(**settings), Totals(100, observations), 0, rows)
        count, nature = refinement.exact_points(work)
        return count, nature is not None, refinement.streamed_points(work)

    assert ways(100) == (768, True, 768)
    assert ways(10_000) == (200, True, 768)  # four dimensions take 160
    assert ways(20_000) == (0, False, 768)  # more points of θ̃ alone
    assert ways(1_000_000) == (0, False, 768)  # from sums, which do not grow
    own_noise = rows._replace(noise=torch.ones_like(rows.y))
    assert ways(20_000, own_noise) == (0, False, 768)
    assert ways(100_000, own_noise) == (0, False, 250)
    assert ways(1_000_000, own_noise) == (0, False, 0)
    assert ways(100, evaluations=100) == (100, True, 100)  # of δ's amplitude alone
    assert ways(100, evaluations=70) == (70, False, 70)
    assert ways(100, evaluations=10) == (0, False, 0)
    assert ways(100, weights="fullrank") == (0, False, 0)


def test_many_rows_give_what_few_do(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows with a Gram matrix for each point, with sums, and with one matrix for all; ζ being known."""
    model, runs, rows = setting(kit, "additive", rows=60)
    known = replace(
        model.settings,
        delta=replace(model.settings.delta, learn=False),
        likelihood_y=LikelihoodSettings(noise=0.3, learn_noise=False),
    )
    found = []
    own_noise = rows._replace(noise=torch.full_like(rows.y, 1e-9))  # which does not compress
    for budget, observations in ((2_000_000, rows), (0, rows), (0, own_noise)):
        monkeypatch.setattr(refinement, "ROWS_EXACT", budget)
        again = CalibrationModel(1, kit.prior(1), 1, known, dtype=F64)
        fitted = fit(again, runs, observations, QUICK)
        assert not fitted.unrefined
        found.append((float(fitted.theta.mean()[0]), float(fitted.theta.sd()[0])))
    (mean, sd), *others = found
    for other_mean, other_sd in others:
        assert other_mean == pytest.approx(mean, abs=0.05 * sd)
        assert other_sd == pytest.approx(sd, rel=0.05)


def test_many_rows_of_several_outputs_are_integrated_over_amplitude_and_noises(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From sums as with a Gram matrix for each point, length scales being all but known."""
    monkeypatch.setattr(refinement, "KINDS", (AMPLITUDE, NOISE))
    one, runs, rows = setting(kit, "additive", rows=300)
    known = replace(one.settings, delta=replace(one.settings.delta, spread=0.5))
    z, y = (torch.cat([part, 2 * part, part.square()], 1) for part in (runs.z, rows.y))
    runs = runs._replace(z=z, log_jacobian=torch.zeros_like(z))
    rows = rows._replace(y=y, log_jacobian=torch.zeros_like(y))
    found = []
    for budget in (2_000_000, 0):
        monkeypatch.setattr(refinement, "ROWS_EXACT", budget)
        model = CalibrationModel(1, kit.prior(1), 3, known, dtype=F64)
        fitted = fit(model, runs, rows, QUICK)
        assert fitted.integrated == [AMPLITUDE, NOISE]
        assert fitted.adapted is not None
        assert fitted.adapted.effective > 100
        found.append(found_moments(fitted))
    (mean, sd), (other_mean, other_sd) = found
    assert other_mean == pytest.approx(mean, abs=0.15 * sd)
    assert other_sd == pytest.approx(sd, rel=0.12)


def test_steps_have_no_slope_in_their_length_scales(kit: Any) -> None:
    model, runs, rows = setting(kit, "additive")
    steps = replace(model.settings.delta, features=FeatureSettings(kernel="arccos0", features=6))
    model = CalibrationModel(1, kit.prior(1), 1, replace(model.settings, delta=steps), dtype=F64)
    fitted = fit(model, runs, rows, QUICK)
    assert not fitted.unrefined
    assert LENGTHSCALES in fitted.integrated


def test_starts_that_lead_nowhere_leave_what_training_found(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ModelError("no value")

    monkeypatch.setattr(exact_refinement, "close", fail)
    model, runs, rows = setting(kit, "none")
    fitted = fit(model, runs, rows, QUICK)
    assert fitted.adapted is not None
    assert fitted.adapted.effective > 50


@pytest.mark.parametrize("again", [0, 2])
def test_an_explanation_that_no_start_leads_to_is_begun_from(
    kit: Any, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    """A discrepancy so rough that its length scale, once seen, is known to a few percent."""
    monkeypatch.setattr(exact_refinement, "AGAIN", again)
    rough, runs, rows = setting(kit, "additive", rows=60, noise=0.1)
    with torch.no_grad():
        assert rough.delta is not None
        rough.delta.last.log_lengthscale.fill_(math.log(0.03))
        rough.delta.last.log_amplitude.fill_(0.0)
        phi = rough.delta(rows.x, None)
        rows = rows._replace(y=rows.y + phi @ kit.randn(7, phi.shape[1], 1))
    model = CalibrationModel(1, kit.prior(1), 1, rough.settings, dtype=F64)
    fitted = fit(model, runs, rows, QUICK)
    assert fitted.adapted is not None
    assert (fitted.adapted.effective > 100) == (again > 0)
    if again:
        assert model.delta is not None
        assert float(model.delta.last.log_lengthscale.detach().exp()) == pytest.approx(0.03, rel=0.1)


def test_a_sample_that_carries_less_than_the_first_is_not_kept(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = []

    def adapt(*arguments: Any, **options: Any) -> Adapted:
        sample = mixture.adapt(*arguments, **options)
        samples.append(sample._replace(effective=40.0 - 10 * len(samples)))
        return samples[-1]

    monkeypatch.setattr(exact_refinement, "adapt", adapt)
    model, runs, rows = setting(kit, "additive")
    fitted = fit(model, runs, rows, replace(QUICK, evaluations=200))
    assert [sample.effective for sample in samples] == [40.0, 30.0, 20.0]
    assert fitted.adapted is samples[0]


def test_the_record_says_how_theta_was_found(kit: Any) -> None:
    model, runs, rows = setting(kit, "additive")
    fitted = fit(model, runs, rows, QUICK)
    found = way(fitted, "collapsed")
    assert found["unrefined"] == ""
    assert found["evaluations"] == 768
    assert found["pareto_k"] < 0.7
    assert [set(start) for start in found["starts"]] == [{"theta", "log_evidence", "converged", "mode"}] * len(
        found["starts"]
    )
    assert found["starts"][0]["mode"] == 0
    noise = found["hyperparameters"]["noise"]
    assert noise["low"] < noise["median"] < noise["high"]
    assert noise["low"] < 0.3 < noise["high"]
    assert found["as_points"] == []
    assert list(found["sensitivity"]) == ["t0"]
    assert 0 <= found["sensitivity"]["t0"] < 1


# --- under Lightning, from a store ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("emulator", "batches", "least"),
    [("stacked", 7, 6), ("features", 2, 20)],  # a pass for each round; a pass for all of them, and two of the weights
)
def test_it_resumes_from_any_batch_of_any_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulator: str, batches: int, least: int
) -> None:
    """More observations than are at hand: rounds and weights are passes over the store."""
    monkeypatch.setattr(refinement, "ROWS_EXACT", 0)
    monkeypatch.setattr("vcal_dist.rows.AT_HAND", 100)
    monkeypatch.setattr(phases, "PASS_ROWS", PASS_ROWS)
    monkeypatch.setattr(phases.Compress, "feed", phases.Compress.feed)
    monkeypatch.setattr(streamed_refinement.Refining, "feed", phases.Feed(None, PASS_ROWS, None))
    small_passes(PASS_ROWS)
    store = tmp_path / "s.zarr"
    make_store(store, observations=300)

    def asked(run: str) -> Any:
        checkpoints = {"every_steps": 1, "every_seconds": None}
        return config(store, tmp_path / run, checkpoints=checkpoints, model={"emulator": emulator})

    whole = train(asked("whole"), progress=False)
    assert whole.record["theta"]["unrefined"] == ""
    assert whole.record["theta"]["evaluations"] >= 126  # six rounds of 21, or more
    assert LENGTHSCALES in whole.record["theta"]["as_points"]
    attempts = 0
    while True:
        attempts += 1
        try:
            train(asked("often"), progress=False, callbacks=[Some(batches)])
            break
        except Enough:
            assert attempts < 100
    assert attempts >= least
    assert_same(tmp_path / "often", tmp_path / "whole")
    assert np.isfinite(Posterior.load(tmp_path / "often").sample(5)).all()
