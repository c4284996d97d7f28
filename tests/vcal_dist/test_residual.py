"""A residual that depends on the inputs: what is found from runs, and what each place does with it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor

from tests.vcal_dist.training_kit import config, make_store
from vcal_dist.assessment import _scores, _simulated
from vcal_dist.batches import Observations, Runs, take
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.collapsed import log_evidence
from vcal_dist.densities import collapsed_log_density
from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings
from vcal_dist.fitting import fit, fit_emulator
from vcal_dist.frozen import Frozen
from vcal_dist.fullrank import Frame, FullRank
from vcal_dist.gaussian import statistics
from vcal_dist.gp import Draw, GPSettings
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.natural import observations_statistics
from vcal_dist.objective import CollapsedTheta, collapsed_observations, observations_gram
from vcal_dist.passes import close, compress
from vcal_dist.plan import FitSettings, StageSettings
from vcal_dist.prediction_kinds import What
from vcal_dist.predictive import Inputs, draw_ensemble, residuals, users_moments, users_samples
from vcal_dist.residual import SPREAD, ResidualFit, directions
from vcal_dist.training import train
from vcal_dist.transforms import OutputScaling, TransformSettings
from vcal_dist.weights import Weights

F64 = torch.float64
QUICK = FitSettings(emulator=StageSettings(steps=150), theta=StageSettings(steps=60), joint=StageSettings(steps=5))


def varying(kit: Any, **options: Any) -> CalibrationModel:
    """A model whose residual depends on the inputs, by a lot."""
    model: CalibrationModel = kit.model("additive", varying_residual=True, **options)
    assert model.varying is not None
    model.varying.weights += 1.5 * kit.randn(7, *model.varying.weights.shape)
    return model


# --- what runs say ----------------------------------------------------------------------------------------------------


def noisy_runs(kit: Any, model: CalibrationModel, frame: Frame, rows: int) -> Runs:
    """Runs whose residuals have the model's own variance, of two outputs, one of which is not always known."""
    runs: Runs = kit.runs(model, rows)
    assert model.varying is not None
    with torch.no_grad():
        phi = model.eta(runs.u)
        z = phi @ frame.mean.mT + model.varying(phi).sqrt() * kit.randn(90, rows, model.outputs)
    z[::5, 1] = torch.nan
    return runs._replace(z=z)


def fitted(model: CalibrationModel, frame: Frame, blocks: list[Runs]) -> Tensor:
    found = copy.deepcopy(model)
    assert found.varying is not None
    found.varying.weights.zero_()
    passes = ResidualFit(found.varying, found.eta, found.likelihood_z, frame)  # type: ignore[arg-type]
    done = False
    while not done:
        for block in blocks:
            passes.take(block)
        done = passes.turn()
    return found.varying.weights


def test_it_is_the_most_probable_function_of_the_features(kit: Any) -> None:
    """Beside the posterior density maximised by another method, each output on its own."""
    model = varying(kit, outputs=2)
    frame = kit.frame(2, 6, 20)
    runs = noisy_runs(kit, model, frame, 400)
    found = fitted(model, frame, [runs])
    with torch.no_grad():
        phi = model.eta(runs.u)
        psi, r = directions(phi).numpy(), (runs.z - phi @ frame.mean.mT).numpy()
        uncertain = torch.einsum("bm,kmn,knl,bl->bk", phi, frame.root, frame.root.mT, phi).numpy()
        kept = np.maximum(1 - uncertain / 0.3**2, 0.05)  # 1 − h
    for k in range(2):
        known = ~np.isnan(r[:, k])

        def loss(v: Any, rows: Any = psi[known], square: Any = (r**2 / kept)[known, k]) -> float:
            density = scipy.stats.norm.logpdf(np.sqrt(square), 0, np.exp(0.5 * rows @ v))
            return float(-density.sum() + 0.5 * (v[:-1] ** 2).sum() / SPREAD**2)

        best = scipy.optimize.minimize(loss, np.zeros(7), method="BFGS")
        assert loss(found[k].numpy()) == pytest.approx(best.fun, abs=0.05)  # of a nat
        difference = psi @ (found[k].numpy() - best.x)
        assert np.sqrt((difference**2).mean()) < 0.05  # of log s²


def test_it_finds_the_function_that_runs_come_from(kit: Any) -> None:
    model = varying(kit, outputs=2)
    frame = kit.frame(2, 6, 20)
    frame = frame._replace(root=1e-3 * frame.root)  # of a frame that knows the weights
    found = fitted(model, frame, [noisy_runs(kit, model, frame, 20_000)])
    psi = directions(model.eta(kit.rand(5, 500, model.eta.inputs)).detach())
    assert model.varying is not None
    truth, close = psi @ model.varying.weights.mT, psi @ found.mT
    assert float(truth.std(0).min()) > 0.4  # there is something to find
    assert float((truth - close).square().mean(0).sqrt().max()) < 0.08


@pytest.mark.parametrize("rows", [40, 3000])  # fewer than features, too
def test_runs_that_the_emulator_was_fitted_to_do_not_make_it_small(kit: Any, rows: int) -> None:
    """Where noise is the same everywhere, s² is that, as σ_z² is; a floor below it does not count."""
    noise = LikelihoodSettings(noise=0.3, floor=0.2)
    model = kit.model("none", features=100, varying_residual=True, likelihood_z=noise)
    u = kit.rand(1, rows, 3)
    weights = kit.randn(2, 100)
    z = (model.eta(u).detach() @ weights + 0.3 * kit.randn(3, rows))[:, None]
    runs = Runs(u, z, torch.zeros_like(z), torch.arange(rows), torch.ones(rows, dtype=F64))
    frame = compress(model, [runs]).frame
    psi = directions(model.eta(kit.rand(5, 500, 3)).detach())
    s2 = (psi @ fitted(model, frame, [runs]).mT).exp()
    assert 0.6 < float(s2.mean()) / 0.3**2 < 1.5


def test_it_is_never_below_the_floor_and_an_output_without_runs_is_no_matter(kit: Any) -> None:
    model = varying(kit, outputs=2, likelihood_z=LikelihoodSettings(noise=0.7, floor=0.6))
    assert model.varying is not None
    s2 = model.varying(model.eta(kit.rand(5, 500, model.eta.inputs)))
    assert float(s2.min().detach()) == pytest.approx(0.36)
    runs = kit.runs(model, 50)
    runs.z[:, 1] = torch.nan
    assert fitted(model, kit.frame(2, 6, 20), [runs]).isfinite().all()


def test_blocks_and_a_state_in_the_middle_of_a_pass_change_nothing(kit: Any) -> None:
    model = varying(kit, outputs=2)
    frame = kit.frame(2, 6, 20)
    runs = noisy_runs(kit, model, frame, 300)
    whole = fitted(model, frame, [runs])
    blocks = [take(runs, rows) for rows in torch.arange(300).split([7, 150, 143])]
    torch.testing.assert_close(fitted(model, frame, blocks), whole, rtol=1e-9, atol=1e-9)
    assert model.varying is not None
    model.varying.weights.zero_()
    passes, done = ResidualFit(model.varying, model.eta, model.likelihood_z, frame), False  # type: ignore[arg-type]
    while not done:
        passes.take(blocks[0])
        state = passes.state()
        passes = ResidualFit(model.varying, model.eta, model.likelihood_z, frame)  # type: ignore[arg-type]
        passes.load(state)
        for block in blocks[1:]:
            passes.take(block)
        done = passes.turn()
    torch.testing.assert_close(model.varying.weights, whole, rtol=1e-9, atol=1e-9)


# --- what is made of it -----------------------------------------------------------------------------------------------


@torch.no_grad()
def dense_log_density(model: CalibrationModel, frame: Frame, rows: Observations, theta: Tensor, at: Tensor) -> float:
    """log p(y | θ̃) as a dense Gaussian, the emulator's uncertainty and residual being those at `at`."""
    kappa, n = float(model.kappa), len(rows.x)

    def features(theta: Tensor) -> Tensor:
        return model.phi_eta(rows.x, model.rows_of_theta(theta[None], n), None)[0]

    assert model.varying is not None
    assert model.delta is not None
    delta = model.delta(rows.x)
    total = 0.0
    for k in range(model.outputs):
        psi = directions(features(at))
        s2 = (psi @ model.varying.weights[k]).exp()
        own = model.likelihood_y.noise_variance()[k] + kappa**2 * s2 + rows.noise[:, k].square()  # type: ignore[operator,index]
        uncertain = kappa * features(at) @ frame.root[k]
        covariance = uncertain @ uncertain.mT + delta @ delta.mT + torch.diag(own)
        known = ~rows.y[:, k].isnan()
        residual = (rows.y[:, k] - kappa * features(theta) @ frame.mean[k])[known].numpy()
        dense = scipy.stats.multivariate_normal(np.zeros(len(residual)), covariance[known][:, known].numpy())
        total += float(dense.logpdf(residual))
    return total


@pytest.mark.parametrize("rows", [4, 17])  # fewer than η's features, and more
def test_the_collapsed_evidence_has_it_at_its_theta(kit: Any, rows: int) -> None:
    model = varying(kit, prior=kit.prior(2), outputs=2, free_kappa=True)
    frame = compress(model, [kit.runs(model, 30)]).frame
    observations = kit.observations(model, rows, missing=True, noise=True)
    jacobian = float(observations.log_jacobian.sum())
    for theta in kit.randn(50, 3, 2):
        found = collapsed_observations(model, CollapsedTheta(model, frame, theta), observations, None)
        expected = dense_log_density(model, frame, observations, theta, theta) + jacobian
        assert float(found.value.detach()) == pytest.approx(expected, rel=1e-9)


def test_many_points_at_once_have_it_each_at_its_own(kit: Any) -> None:
    model = varying(kit, prior=kit.prior(2), outputs=2)
    frame = compress(model, [kit.runs(model, 30)]).frame
    observations, points = kit.observations(model, 17, missing=True, noise=True), kit.randn(50, 3, 2)
    with torch.no_grad():
        sums = observations_gram(model, CollapsedTheta(model, frame, points), observations, Draw((0,), 3))
        found = log_evidence(sums).sum(-1).tolist()
    expected = [dense_log_density(model, frame, observations, point, point) for point in points]
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("learn", [False, True])
def test_closed_form_statistics_have_its_slope_in_theta(kit: Any, learn: bool) -> None:
    """Beside automatic differentiation of the bound; the curvature has what the noise's size tells in the mean."""
    model = varying(kit, prior=kit.prior(2), outputs=2, free_kappa=True)
    q = kit.full_rank(2, 2, model.width)
    rows, theta = kit.observations(model, 9, missing=True, noise=True), kit.randn(40, 3, 2)
    found = statistics(model, q, rows, theta=theta, learn=learn)
    expected = observations_statistics(model, q, rows, theta=theta)
    for name in ("gradient_theta", "gradient_weights", "log_likelihood"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9)
    for name in ("cross", "weights"):
        torch.testing.assert_close(getattr(found.curvature, name), getattr(expected.curvature, name))
    information = torch.zeros(2, 2, dtype=F64)
    for point in theta:
        J = torch.stack([_log_precision(model, rows, point + 1e-5 * e) for e in torch.eye(2, dtype=F64)], -1)
        J -= torch.stack([_log_precision(model, rows, point - 1e-5 * e) for e in torch.eye(2, dtype=F64)], -1)
        J /= 2e-5  # (B, K, d2)
        information += 0.5 * torch.einsum("bki,bkj->ij", J, J) / len(theta)
    assert float(information.diagonal().min()) > 0.1  # it is something
    torch.testing.assert_close(found.curvature.theta, expected.curvature.theta + information, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def _log_precision(model: CalibrationModel, rows: Observations, theta: Tensor) -> Tensor:
    phi = model.phi_eta(rows.x, model.rows_of_theta(theta[None], len(rows.x)), None)
    p = model.likelihood_y.precision(rows.y, rows.noise, model.residual_variance(phi))[0]  # type: ignore[operator]
    return torch.where(p > 0, p, torch.ones_like(p)).log()


def test_closing_ends_at_the_mode_of_the_exact_posterior_and_as_wide(kit: Any) -> None:
    """A sharp bump that moves with θ: where it is, the emulator errs."""
    settings = ModelSettings(eta=GPSettings(features=FeatureSettings(features=30)), discrepancy="none")
    settings = replace(settings, varying_residual=True, likelihood_y=LikelihoodSettings(noise=0.05, learn_noise=False))
    model = CalibrationModel(1, kit.prior(1), 1, settings, dtype=F64)

    def bump(u: Tensor) -> Tensor:
        x, t = u[:, :1], u[:, 1:]
        return 1.5 * torch.exp(-(((x - t) / 0.15) ** 2)) * torch.sin(60 * x) + 0.5 * (t - 0.5)

    u, x = kit.rand(1, 3000, 2), kit.rand(2, 200, 1)
    z, y = bump(u), bump(torch.cat([x, torch.full_like(x, 0.4)], -1)) + 0.05 * kit.randn(3, 200, 1)
    ones = torch.ones(3000, dtype=F64)
    runs = Runs(u, z, torch.zeros_like(z), torch.arange(3000), ones)
    rows = Observations(x, y, None, torch.zeros_like(y), torch.arange(200), ones[:200])
    frame = fit_emulator(model, runs, FitSettings(emulator=StageSettings(steps=150))).frame
    grid = torch.linspace(-1.5, 1.0, 2001, dtype=F64)
    log_density = collapsed_log_density(model, frame, lambda: [rows], grid[:, None])
    density = (log_density - log_density.max()).exp()
    mean = float((grid * density).sum() / density.sum())
    sd = float((((grid - mean) ** 2 * density).sum() / density.sum()).sqrt())
    q = FullRank(1, 1, model.width, frame=Frame(frame.mean, frame.root), absorbed=True)
    q.move(torch.tensor([mean + 2 * sd], dtype=F64), q.mean, q.precision)
    ended = close(model, q, lambda: [rows])
    assert ended.converged
    assert abs(float(q.theta_mean) - float(grid[density.argmax()])) < 0.2 * sd
    assert 0.7 < float(q.theta_moments()[1].sqrt()) / sd < 1.4


def test_frozen_sums_have_it_at_the_centre(kit: Any) -> None:
    model = varying(kit, prior=kit.prior(2), outputs=2)
    frame = compress(model, [kit.runs(model, 30)]).frame
    rows, points, centre = kit.observations(model, 17, missing=True, noise=True), kit.randn(50, 3, 2), kit.randn(51, 2)
    frozen = Frozen(model, frame, centre, points)
    frozen.take(rows)
    prior = scipy.stats.norm.logpdf(points.numpy()).sum(1)
    expected = [
        dense_log_density(model, frame, rows, point, centre) + p for point, p in zip(points, prior, strict=True)
    ]
    assert frozen.log_density().tolist() == pytest.approx(expected, rel=1e-9)


def test_predictions_of_observations_have_it(kit: Any) -> None:
    """In moments its mean over draws; in samples every draw its own."""
    model = varying(kit, prior=kit.prior(2), outputs=2)
    q: Weights = kit.full_rank(2, 2, model.width, 30)
    ensemble = draw_ensemble(model, [q], torch.zeros(1, dtype=F64), 400, 0)
    outputs = OutputScaling(
        [TransformSettings()] * 2, torch.zeros(2, dtype=F64), torch.tensor([2.0, 3.0]).double(), "ab"
    )
    inputs, generator = Inputs(kit.rand(60, 6, 2)), torch.Generator().manual_seed(0)
    found = residuals(ensemble, inputs.x)
    assert found is not None
    assert found.shape == (400, 6, 2)
    theta = torch.cat([group.theta for group in ensemble.groups])[:1]
    first = model.phi_eta(inputs.x, model.rows_of_theta(theta, 6), None)
    place = int(ensemble.groups[0].places[0])
    torch.testing.assert_close(found[place], model.residual_variance(first)[0])  # type: ignore[index]
    kinds: tuple[What, ...] = ("process_without_residual", "process", "observation")
    alone, process, observed = (users_moments(ensemble, outputs, inputs, what, generator)[1] for what in kinds)
    added = (process.square() - alone.square()) / outputs.sd.square()
    torch.testing.assert_close(added, found.mean(0))
    added = (observed.square() - alone.square()) / outputs.sd.square()
    torch.testing.assert_close(added, model.likelihood_y.noise_variance() + found.mean(0))  # type: ignore[operator]
    draws = torch.cat([users_samples(ensemble, outputs, inputs, "observation", generator) for _ in range(40)])
    torch.testing.assert_close(draws.std(0), observed, rtol=0.1, atol=0.0)


# --- from end to end --------------------------------------------------------------------------------------------------


def simulate(u: Tensor) -> Tensor:
    """A standard deviation of about one over the unit square."""
    x, t = u[:, :1], u[:, 1:]
    return 3 * (t - 0.5) + 1.5 * torch.sigmoid(40 * (x - 0.75)) * torch.sin(60 * x)


def flat_and_sharp(kit: Any, *, varying: bool) -> tuple[CalibrationModel, Runs, Observations]:
    """An output that few features follow for small x, and that is rough for large x; θ shifts it."""
    settings = ModelSettings(
        eta=GPSettings(features=FeatureSettings(features=30)),
        varying_residual=varying,
        likelihood_z=LikelihoodSettings(noise=0.2),
    )
    model = CalibrationModel(1, kit.prior(1), 1, settings, dtype=F64)

    u, x, ones = kit.rand(1, 2000, 2), kit.rand(2, 30, 1), torch.ones(2000, dtype=F64)
    z = simulate(u)
    y = simulate(torch.cat([x, torch.full_like(x, 0.3)], -1)) + 0.05 * kit.randn(3, 30, 1)
    runs = Runs(u, z, torch.zeros_like(z), torch.arange(2000), ones)
    return model, runs, Observations(x, y, None, torch.zeros_like(y), torch.arange(30), ones[:30])


def test_a_calibration_is_unsure_where_the_emulator_is(kit: Any) -> None:
    models = {}
    for which in (False, True):
        model, runs, observations = flat_and_sharp(kit, varying=which)
        found = fit(model, runs, observations, QUICK, seed=0)
        models[which] = model
        assert abs(float(found.theta.mean()[0]) - 0.3) < 4 * float(found.theta.sd()[0])
    before, after = (dict(models[which].eta.named_parameters()) for which in (False, True))
    assert all(torch.equal(after[name], before[name]) for name in before)  # the emulator is the same
    model, fresh = models[True], kit.rand(9, 3000, 2)
    q = found.q
    with torch.no_grad():
        phi = model.eta(fresh)
        mean, _ = q.moments(phi, model.columns_eta)
        variance = model.residual_variance(phi)
    assert variance is not None
    error = mean - simulate(fresh)
    flat, sharp = fresh[:, 0] < 0.5, fresh[:, 0] > 0.85
    for where in (flat, sharp):
        ratio = float(error[where].square().mean() / variance[where].mean())
        assert 0.4 < ratio < 2.5
    assert float(variance[sharp].mean()) > 10 * float(variance[flat].mean())


def test_runs_are_judged_with_it(kit: Any) -> None:
    """Of fresh runs nearer half lie in 50 % intervals, in flat places and sharp ones; the weights' variance stays."""
    shares = {}
    for which in (False, True):
        model, runs, observations = flat_and_sharp(kit, varying=which)
        found = fit(model, runs, observations, QUICK, seed=0)
        names = ["z"]
        scaling = OutputScaling([TransformSettings()], torch.zeros(1, dtype=F64), torch.ones(1, dtype=F64), names)
        u = kit.rand(9, 1500, 2)
        fresh = Runs(u, simulate(u), torch.zeros(1500, 1, dtype=F64), torch.arange(1500), torch.ones(1500, dtype=F64))
        data, ensemble, _ = _simulated(model, found.components, found.log_weights, fresh, False, 64, 0)
        scores = _scores(ensemble, scaling, data, False, 0, with_moments=False)
        inside = (2 * scores.at_most[:, 0] - 1).abs() <= 0.5
        shares[which] = [float(inside[where].double().mean()) for where in (u[:, 0] < 0.6, u[:, 0] > 0.85)]
    (flat, sharp), (flat_before, sharp_before) = shares[True], shares[False]
    assert 0.4 < flat < flat_before - 0.1
    assert sharp_before + 0.1 < sharp < 0.65


def test_a_run_is_refused_before_it_leaves_anything(tmp_path: Path) -> None:
    make_store(tmp_path / "s.zarr")
    asked = config(tmp_path / "s.zarr", tmp_path / "run", weights="meanfield", model={"varying_residual": True})
    with pytest.raises(ModelError, match=r"fit.weights collapsed or fullrank, not with meanfield"):
        train(asked, progress=False)
    assert not (tmp_path / "run").exists()


def test_what_cannot_have_it_is_refused_before_any_work(kit: Any) -> None:
    with pytest.raises(ModelError, match=r"varying_residual goes with Gaussian noise of runs; .* 'student_t'"):
        ModelSettings(varying_residual=True, likelihood_z=LikelihoodSettings(kind="student_t"))
    with pytest.raises(ModelError, match="varying_residual is true and emulator_residual false"):
        ModelSettings(varying_residual=True, emulator_residual=False)
    model, runs, observations = flat_and_sharp(kit, varying=True)
    with pytest.raises(ModelError, match=r"model.varying_residual goes with fit.weights collapsed or fullrank"):
        fit(model, runs, observations, FitSettings(weights="meanfield"))
