"""The posterior speaks the user's units, predicts what closed forms say, and is the same after a file as before."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

import storage
from storage.priors import LogNormal, Normal, Prior, Uniform
from storage.problem import CalibrationInput, ControlInput, Output, Problem
from vcal_dist import predictive, tensorfile
from vcal_dist.assessment import judge_runs
from vcal_dist.batches import Scaling
from vcal_dist.errors import ModelError
from vcal_dist.inference_data import import_arviz, to_inference_data, variable_names
from vcal_dist.likelihoods import LikelihoodSettings, StudentT
from vcal_dist.posterior import FILE, Posterior
from vcal_dist.prediction_kinds import AT_T, KINDS
from vcal_dist.predictive import draw_ensemble
from vcal_dist.priors import ThetaPrior
from vcal_dist.transforms import OutputScaling, TransformSettings

F64 = torch.float64
Array = NDArray[np.float64]
MEAN, SD = np.array([50.0, -3.0]), np.array([8.0, 0.5])  # of the runs' outputs
LOG = TransformSettings(kind="log")
ALONE = "process_without_residual, emulator_without_residual"
NORMALS = (Normal(mean=3.0, sd=0.5), Normal(mean=-1.0, sd=2.0))


def problem(controls: int = 2, outputs: int = 1, priors: tuple[Prior, Prior] = NORMALS) -> Problem:
    """Units and bounds that nothing could mistake for the unit cube."""
    bounds = ((1.0, 5.0), (-11.0, 9.0)) if priors is NORMALS else ((0.5, 9.0), (0.5, 9.0))
    return Problem(
        name="made up",
        control_inputs=tuple(
            ControlInput(name=f"x{j}", unit="m", bounds=(100.0 * j, 100.0 * j + 10)) for j in range(controls)
        ),
        calibration_inputs=tuple(
            CalibrationInput(name=name, unit=unit, bounds=limits, prior=prior, description=f"the {name}")
            for name, unit, limits, prior in zip(("rate θ", "loss"), ("1/s", ""), bounds, priors, strict=True)
        ),
        outputs=tuple(Output(name=f"y{k}", unit="kg") for k in range(outputs)),
    )


def posterior(
    kit: Any,
    kind: str = "additive",
    *,
    family: str = "full_rank",
    components: int = 1,
    outputs: int = 1,
    controls: int = 2,
    transform: TransformSettings | None = None,
    standardise: bool = True,
    dtype: torch.dtype = F64,
    priors: tuple[Prior, Prior] = NORMALS,
    framed: bool = False,
    **options: Any,
) -> Posterior:
    """A posterior of a small model, its components away from the prior."""
    made = problem(controls, outputs, priors)
    model = kit.model(
        kind, controls=controls, prior=ThetaPrior.from_problem(made), outputs=outputs, dtype=dtype, **options
    )
    names = [output.name for output in made.outputs]
    mean, sd = (torch.from_numpy(part[:outputs]) if standardise else None for part in (MEAN, SD))
    if mean is None or sd is None:
        mean, sd = torch.zeros(outputs, dtype=F64), torch.ones(outputs, dtype=F64)
    if transform is not None and transform.kind == "log":
        mean, sd = mean / 50, sd / 20
    scaling = Scaling(made, OutputScaling([transform or TransformSettings()] * outputs, mean, sd, names), dtype)
    extra: dict[str, Any] = {}
    if framed:
        extra = {"frame": kit.frame(outputs, model.width, 31), "absorbed": True}
    found = SimpleNamespace(
        model=model,
        components=[getattr(kit, family)(2, outputs, model.width, 5 + 10 * c, **extra) for c in range(components)],
        log_weights=torch.arange(components, dtype=F64),
        validation=None,
    )
    return Posterior.from_fitted(made, scaling, found, {"steps": 3, "loss": math.nan, "settings": {"rate": [0.1]}})


def inputs(rows: int = 4, controls: int = 2, seed: int = 0) -> Array:
    return np.random.default_rng(seed).random((rows, controls)) * 10 + 100.0 * np.arange(controls)


# --- θ ----------------------------------------------------------------------------------------------------------------


def test_the_summary_of_normal_parameters_is_in_closed_form(kit: Any) -> None:
    """θ = mean + sd·θ̃ with θ̃ Gaussian."""
    found = posterior(kit)
    dense_mean, dense_covariance = kit.dense(found.components[0])
    for j, (row, prior) in enumerate(zip(found.summary(0.8), NORMALS, strict=True)):
        mean, sd = prior.mean + prior.sd * dense_mean[j], prior.sd * math.sqrt(dense_covariance[j, j])
        assert (row.name, row.unit) == (("rate θ", "1/s"), ("loss", ""))[j]
        assert row.prior == str(prior)
        expected = (mean, sd, mean - 1.2815515655446004 * sd, mean, mean + 1.2815515655446004 * sd)
        assert (row.mean, row.sd, row.low, row.median, row.high) == pytest.approx(expected)
    text = repr(found)
    assert "posterior of 'made up': additive discrepancy, 1 component" in text
    assert len(text.splitlines()) == 3
    assert "rate θ" in text.splitlines()[1]
    assert f"{found.summary()[1].mean:.4g}" in text.splitlines()[2]


def test_draws_of_theta_are_those_of_the_posterior_and_of_their_seed(kit: Any) -> None:
    found = posterior(kit, components=2)
    draws = found.sample(20_000, seed=4)
    assert draws.shape == (20_000, 2)
    for j, row in enumerate(found.summary()):
        assert abs(draws[:, j].mean() - row.mean) < 5 * row.sd / math.sqrt(20_000)
        assert np.mean((draws[:, j] > row.low) & (draws[:, j] < row.high)) == pytest.approx(0.9, abs=0.011)
    np.testing.assert_array_equal(found.sample(5, seed=4), found.sample(5, seed=4))
    assert not (found.sample(5, seed=4) == found.sample(5, seed=5)).any()


def test_the_correlation_is_that_of_theta_in_its_own_units(kit: Any) -> None:
    """For log-normal priors log θ is Gaussian: corr = (e^c₁₂ − 1)/√((e^c₁₁ − 1)(e^c₂₂ − 1)), c its covariance."""
    sigma = 0.7
    found = posterior(kit, priors=(LogNormal(mu=0.5, sigma=sigma), LogNormal(mu=0.7, sigma=sigma)))
    c = sigma**2 * kit.dense(found.components[0])[1][:2, :2]
    expected = math.expm1(c[0, 1]) / math.sqrt(math.expm1(c[0, 0]) * math.expm1(c[1, 1]))
    of_tilde = c[0, 1] / math.sqrt(c[0, 0] * c[1, 1])
    assert abs(expected - of_tilde) > 0.02  # so that the two can be told apart
    assert found.correlation()[0, 1] == pytest.approx(expected, abs=0.015)
    np.testing.assert_allclose(np.diag(found.correlation()), 1)


def test_noise_is_sigma_y_alone_in_the_units_of_the_output(kit: Any) -> None:
    found = posterior(kit, outputs=2, likelihood_y=LikelihoodSettings(noise=0.4))
    assert found.noise == pytest.approx({"y0": 0.4 * 8, "y1": 0.4 * 0.5})
    student = posterior(kit, likelihood_y=LikelihoodSettings(kind="student_t", noise=0.2))
    assert student.noise == pytest.approx({"y0": 0.2 * 8})
    counts = LikelihoodSettings(kind="poisson")
    assert posterior(kit, likelihood_y=counts, likelihood_z=counts, standardise=False).noise == {}


# --- predictions ------------------------------------------------------------------------------------------------------


def test_the_emulator_at_chosen_inputs_is_in_closed_form_in_the_users_units(kit: Any) -> None:
    found = posterior(kit, outputs=2)
    x, t = inputs(5), np.random.default_rng(1).uniform([1, -11], [5, 9], (5, 2))
    predicted, alone = (found.predict(x, what, t=t, draws=3) for what in AT_T)
    u = np.concatenate([(x - [0, 100]) / 10, (t - [1, -11]) / [4, 20]], 1)
    phi = found.model.eta(torch.from_numpy(u)).numpy()
    mean, covariance = kit.dense(found.components[0])
    for k in range(2):
        rows = slice(2 + k * found.model.width, 2 + k * found.model.width + phi.shape[1])
        np.testing.assert_allclose(predicted.mean[:, k], MEAN[k] + SD[k] * (phi @ mean[rows]))
        np.testing.assert_allclose(alone.mean[:, k], predicted.mean[:, k])
        of_eta = ((phi @ covariance[rows, rows]) * phi).sum(1)
        np.testing.assert_allclose(alone.sd[:, k], SD[k] * np.sqrt(of_eta), rtol=1e-6)
        np.testing.assert_allclose(predicted.sd[:, k], SD[k] * np.sqrt(of_eta + 0.3**2), rtol=1e-6)  # σ_z = 0.3
    one = found.predict(x, "emulator", t=t[0], draws=3)
    np.testing.assert_allclose(one.mean, found.predict(x, "emulator", t=np.tile(t[0], (5, 1)), draws=3).mean)
    assert not np.allclose(one.mean[1:], predicted.mean[1:])


@pytest.mark.parametrize("kind", ["none", "additive", "general"])
def test_process_emulator_and_discrepancy_are_the_models_moments_in_the_users_units(kit: Any, kind: str) -> None:
    found = posterior(kit, kind, outputs=2, components=2)
    x = inputs()
    ensemble = draw_ensemble(found.model, found.components, found.log_weights, 64, 7)
    scaled = torch.from_numpy((x - [0, 100]) / 10)
    for what, function, shift, residual in (
        ("process", "process", MEAN, 0.3),
        ("emulator", "emulator", MEAN, 0.3),
        ("process_without_residual", "process", MEAN, 0.0),
        ("emulator_without_residual", "emulator", MEAN, 0.0),
        ("discrepancy", "discrepancy", 0.0, 0.0),
    ):
        predicted = found.predict(x, what, draws=64, seed=7)  # type: ignore[arg-type]
        mean, var = predictive.moments(ensemble, scaled, function)  # type: ignore[arg-type]
        np.testing.assert_allclose(predicted.mean, mean.numpy() * SD + shift)
        np.testing.assert_allclose(predicted.sd, (var + residual**2).sqrt().numpy() * SD)
        assert predicted.samples is None
    process, emulator, discrepancy = (
        found.predict(x, what, samples=5).samples  # type: ignore[arg-type]
        for what in ("process", "emulator", "discrepancy")
    )
    assert process is not None
    assert emulator is not None
    np.testing.assert_allclose(process - emulator, discrepancy, atol=1e-12)


def test_an_observation_adds_residual_and_noise_to_the_process(kit: Any) -> None:
    found = posterior(kit, outputs=2, free_kappa=True)  # κ = 1.3, σ_z = 0.3, σ_y = 0.4
    x, own = inputs(), np.array([[1.0, 0.1]] * 4)
    alone, process, plain, noisy = (
        found.predict(x, "process_without_residual", samples=20_000),
        found.predict(x, "process", samples=20_000),
        found.predict(x, "observation", samples=20_000),
        found.predict(x, "observation", noise=own, samples=20_000),
    )
    of_emulator, of_noise = SD**2 * 1.3**2 * 0.3**2, SD**2 * 0.4**2
    np.testing.assert_allclose(plain.mean, alone.mean)
    np.testing.assert_allclose(process.mean, alone.mean)
    np.testing.assert_allclose(process.sd**2 - alone.sd**2, np.tile(of_emulator, (4, 1)))
    np.testing.assert_allclose(plain.sd**2 - process.sd**2, np.tile(of_noise, (4, 1)))
    np.testing.assert_allclose(noisy.sd**2 - process.sd**2, of_noise + own**2)
    for predicted in (process, plain, noisy):
        assert predicted.samples is not None
        # The standard errors of a mean and of a standard deviation are below 1/√S of it.
        np.testing.assert_allclose((predicted.samples.mean(0) - predicted.mean) / predicted.sd, 0, atol=0.04)
        np.testing.assert_allclose(predicted.samples.std(0) / predicted.sd, 1, atol=0.04)
    # The same functions and residuals, so that one part is left: white over rows and outputs, and of its own size.
    for one, other, variance in ((process, alone, of_emulator), (plain, process, of_noise)):
        left = one.samples - other.samples  # type: ignore[operator]
        np.testing.assert_allclose(np.corrcoef(left.reshape(20_000, -1).T), np.eye(8), atol=0.04)
        np.testing.assert_allclose(left.std(0), np.tile(np.sqrt(variance), (4, 1)), rtol=0.03)


def test_without_a_residual_in_the_observations_the_process_has_none_but_the_simulator_does(kit: Any) -> None:
    found, x = posterior(kit, emulator_residual=False), inputs()
    process, alone = found.predict(x, samples=5), found.predict(x, "process_without_residual", samples=5)
    for one, other in zip(process, alone, strict=True):
        np.testing.assert_array_equal(one, other)  # type: ignore[arg-type]
    added = found.predict(x, "emulator").sd ** 2 - found.predict(x, "emulator_without_residual").sd ** 2
    np.testing.assert_allclose(added, 0.3**2 * 8**2)


def test_a_residual_that_varies_is_that_of_its_place(kit: Any) -> None:
    """s² = exp(ψ·v), at t for the emulator and at θ with κ² for the process."""
    found = posterior(kit, outputs=2, free_kappa=True, varying_residual=True)
    assert found.model.varying is not None
    found.model.varying.weights.copy_(kit.randn(3, *found.model.varying.weights.shape))
    x, t = inputs(5), np.random.default_rng(1).uniform([1, -11], [5, 9], (5, 2))
    u = torch.from_numpy(np.concatenate([(x - [0, 100]) / 10, (t - [1, -11]) / [4, 20]], 1))
    s2 = found.model.varying(found.model.eta(u)).numpy() * SD**2  # (5, 2)
    assert s2.max() > 2 * s2.min(0).max()
    predicted, alone = (found.predict(x, what, t=t, samples=20_000) for what in AT_T)
    np.testing.assert_allclose(predicted.sd**2 - alone.sd**2, s2)
    np.testing.assert_allclose((predicted.samples - alone.samples).std(0), np.sqrt(s2), rtol=0.03)  # type: ignore[operator]
    process, alone = (found.predict(x, what) for what in ("process", "process_without_residual"))  # type: ignore[arg-type]
    np.testing.assert_allclose(process.sd**2 - alone.sd**2, found.residual(x) ** 2)
    observation = found.predict(x, "observation")
    np.testing.assert_allclose(observation.sd**2 - process.sd**2, np.tile(0.4**2 * SD**2, (5, 1)))


def test_runs_with_student_noise_are_predicted_with_it_and_counts_by_their_mean(kit: Any) -> None:
    student = LikelihoodSettings(kind="student_t", noise=0.4, degrees=9.0)
    found, x = posterior(kit, likelihood_z=student), inputs()
    emulator, alone = (found.predict(x, what, samples=20_000) for what in AT_T)
    np.testing.assert_allclose(emulator.sd**2 - alone.sd**2, 0.4**2 * 8**2 * 9 / (9 - 2))
    left = (emulator.samples - alone.samples)[:, :, 0] / (0.4 * 8)  # type: ignore[operator]
    beyond = float(stats.t(9).sf(3.0)) * 2  # 0.015, of a normal distribution 0.0027
    np.testing.assert_allclose((np.abs(left) > 3).mean(0), beyond, atol=0.004)
    np.testing.assert_array_equal(found.predict(x).sd, found.predict(x, "process_without_residual").sd)
    logged = posterior(kit, likelihood_z=student, transform=LOG)
    emulator, alone = (logged.predict(x, what) for what in AT_T)
    assert (emulator.sd > alone.sd).all()
    counts = LikelihoodSettings(kind="poisson")
    found = posterior(kit, "none", likelihood_y=counts, likelihood_z=counts, standardise=False)
    for full, part in (("emulator", "emulator_without_residual"), ("process", "process_without_residual")):
        for one, other in zip(*(found.predict(x, what, samples=5) for what in (full, part)), strict=True):  # type: ignore[arg-type]
            np.testing.assert_array_equal(one, other)


def test_the_emulator_has_the_intervals_by_which_runs_are_judged(kit: Any) -> None:
    found = posterior(kit, outputs=2)
    x, t = inputs(6), np.random.default_rng(1).uniform([1, -11], [5, 9], (6, 2))
    predicted = found.predict(x, "emulator", t=t, samples=1)
    assert predicted.samples is not None
    judged = judge_runs(found, x, t, predicted.samples[0], leave_one_out=False)
    np.testing.assert_allclose(predicted.mean, judged.mean)
    np.testing.assert_allclose(predicted.sd, judged.sd)


def test_an_observation_with_student_noise_has_its_variance(kit: Any) -> None:
    found = posterior(
        kit, likelihood_y=LikelihoodSettings(kind="student_t", noise=0.4, degrees=6.0), emulator_residual=False
    )
    assert isinstance(found.model.likelihood_y, StudentT)
    x = inputs()
    process, observation = found.predict(x), found.predict(x, "observation", noise=np.full(4, 2.0))
    added = (0.4**2 * 8**2 + 2.0**2) * 6 / (6 - 2)
    np.testing.assert_allclose(observation.sd**2 - process.sd**2, added)


def test_samples_are_the_same_functions_at_other_rows_and_in_other_calls(kit: Any) -> None:
    found = posterior(kit, "general", hidden=(2,), components=2)
    x = inputs(9)
    f: Any = "process_without_residual"
    whole, part = found.predict(x, f, samples=6, seed=3), found.predict(x[[7, 2]], f, samples=6, seed=3)
    assert whole.samples is not None
    assert whole.samples.shape == (6, 9, 1)
    np.testing.assert_allclose(part.samples, whole.samples[:, [7, 2]], rtol=1e-10)
    other = found.predict(x, f, samples=6, seed=4).samples
    assert not np.isclose(other, whole.samples).any()
    # A residual belongs to a row, the same input or not.
    rows = np.concatenate([x[:1], x[:1]])
    left = found.predict(rows, samples=6).samples - found.predict(rows, f, samples=6).samples  # type: ignore[operator]
    assert len(np.unique(left.round(9))) == 12


def test_under_a_transform_samples_are_mapped_one_by_one(kit: Any) -> None:
    plain, logged = (posterior(kit, "additive", transform=transform) for transform in (None, LOG))
    x = inputs()
    # The same functions: log y = 1 + 0.4·f where y = 50 + 8·f
    for what in ("process_without_residual", "process", "emulator"):
        of_plain = plain.predict(x, what, samples=200, seed=2).samples  # type: ignore[arg-type]
        predicted = logged.predict(x, what, samples=200, draws=200, seed=2)  # type: ignore[arg-type]
        assert of_plain is not None
        expected = np.exp(1 + 0.4 * (of_plain - 50) / 8)
        np.testing.assert_allclose(predicted.samples, expected)
        if what == "process_without_residual":
            np.testing.assert_allclose(predicted.mean, expected.mean(0))
            np.testing.assert_allclose(predicted.sd, expected.std(0))
    f_and_eta: Any = ("process_without_residual", "emulator_without_residual")
    parts = [logged.predict(x, what, samples=50, draws=50).samples for what in f_and_eta]
    difference = logged.predict(x, "discrepancy", samples=50, draws=50)
    np.testing.assert_allclose(parts[0] - parts[1], difference.samples, rtol=1e-10, atol=1e-12)  # type: ignore[operator]
    np.testing.assert_allclose(difference.mean, (parts[0] - parts[1]).mean(0), rtol=1e-10, atol=1e-12)  # type: ignore[operator]


def test_under_a_transform_the_residual_counts_in_mean_and_sd_which_stay_smooth(kit: Any) -> None:
    """y = exp(1 + 0.4·(f + r)) with r ~ N(0, 0.3²): E y = E exp(1 + 0.4·f) · exp(0.4²·0.3²/2), and so on."""
    found, x = posterior(kit, transform=LOG), np.linspace([0.0, 100.0], [10.0, 110.0], 200)
    for full, part in (("process", "process_without_residual"), ("emulator", "emulator_without_residual")):
        predicted, alone = (found.predict(x, what, draws=20_000) for what in (full, part))  # type: ignore[arg-type]
        v = 0.4**2 * 0.3**2
        np.testing.assert_allclose(predicted.mean, alone.mean * math.exp(v / 2), rtol=0.01)
        expected = (alone.sd**2 + alone.mean**2) * math.exp(2 * v) - alone.mean**2 * math.exp(v)
        np.testing.assert_allclose(predicted.sd, np.sqrt(expected), rtol=0.05)
        few = found.predict(x, full).mean[:, 0]  # type: ignore[arg-type]
        smooth = found.predict(x, part).mean[:, 0]  # type: ignore[arg-type]
        assert np.abs(np.diff(few, 2)).max() < 2 * np.abs(np.diff(smooth, 2)).max()


def test_under_a_transform_an_observations_own_noise_is_in_the_users_units(kit: Any) -> None:
    found = posterior(kit, transform=LOG)
    x = inputs(2)
    plain, noisy = (found.predict(x, "observation", noise=n, draws=4096).sd for n in (None, np.full((2, 1), 30.0)))
    process = found.predict(x, draws=4096).sd
    assert (plain > process).all()
    np.testing.assert_allclose(noisy**2 - plain**2, 900, rtol=0.25)  # a few standard errors of a variance


def test_counts_are_predicted_by_their_mean_and_observed_as_whole_numbers(kit: Any) -> None:
    counts = LikelihoodSettings(kind="poisson")
    found = posterior(kit, "none", likelihood_y=counts, likelihood_z=counts, standardise=False)
    x = inputs()
    process, observation = (
        found.predict(x, what, samples=500, draws=4096)  # type: ignore[arg-type]
        for what in ("process", "observation")
    )
    assert process.samples is not None
    assert observation.samples is not None
    assert (process.samples > 0).all()
    np.testing.assert_array_equal(observation.samples, observation.samples.round())
    # Given the rate, a count has the rate as its mean and variance.
    error = 5 * np.sqrt(observation.sd**2 / 4096)
    np.testing.assert_array_less(np.abs(observation.mean - process.mean), error)
    np.testing.assert_allclose(observation.sd**2, process.sd**2 + process.mean, rtol=0.3)
    ensemble = draw_ensemble(found.model, found.components, found.log_weights, 4096, 0)
    f, _ = predictive.sampled_process(ensemble, torch.from_numpy((x - [0, 100]) / 10))
    np.testing.assert_allclose(process.mean, f.exp().mean(0).numpy())


def test_classes_are_predicted_by_their_probability(kit: Any) -> None:
    classes = LikelihoodSettings(kind="bernoulli")
    found = posterior(kit, "none", likelihood_y=classes, likelihood_z=classes, standardise=False)
    observation = found.predict(inputs(), "observation", samples=4000, draws=4000)
    process = found.predict(inputs(), draws=4000)
    assert observation.samples is not None
    assert set(np.unique(observation.samples)) == {0.0, 1.0}
    p = process.mean
    np.testing.assert_array_less(np.abs(observation.samples.mean(0) - p), 5 * np.sqrt(p * (1 - p) / 4000))


def test_one_control_input_may_come_without_its_dimension(kit: Any) -> None:
    found = posterior(kit, controls=1)
    x = inputs(3, 1)
    np.testing.assert_array_equal(found.predict(x[:, 0]).mean, found.predict(x).mean)
    np.testing.assert_array_equal(found.predict([1, 2, 3]).mean, found.predict([[1.0], [2.0], [3.0]]).mean)


def test_no_rows_give_no_predictions(kit: Any) -> None:
    for transform in (None, LOG):
        predicted = posterior(kit, transform=transform).predict(np.zeros((0, 2)), samples=3)
        assert predicted.mean.shape == predicted.sd.shape == (0, 1)
        assert predicted.samples is not None
        assert predicted.samples.shape == (3, 0, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"what": "proces"}, r"what is 'proces'; accepted: process, emulator, discrepancy, observation, " + ALONE),
        ({"x": [1.0, 2.0]}, r"x has shape \(2,\); accepted: \(rows, 2\), a column for each of x0, x1"),
        ({"x": [["a", "b"]]}, r"x is not an array of numbers"),
        (
            {"x": [[5.0, 99.0]]},
            r"x: column 'x1': 1 value out of bounds \[100, 110\], first in row 0: 99.*extrapolate=True",
        ),
        ({"x": [[5.0, math.nan]], "extrapolate": True}, r"x: column 'x1': 1 value missing \(NaN\)"),
        ({"t": [2.0, 3.0]}, r"t is given for 'process'"),
        ({"what": "emulator", "t": [2.0, 3.0, 4.0]}, r"t has shape \(3,\); accepted: \(2, 2\).* rate θ, loss"),
        ({"what": "emulator", "t": [[2.0, 3.0]]}, r"t has shape \(1, 2\); accepted: \(2, 2\)"),
        ({"what": "emulator", "t": [2.0, 30.0]}, r"t: column 'loss': 2 values out of bounds \[-11, 9\]"),
        ({"noise": [[1.0], [1.0]]}, r"noise is given for 'process'"),
        ({"what": "observation", "noise": [[1.0]]}, r"noise has shape \(1, 1\); accepted: \(2, 1\).* y0"),
        ({"what": "observation", "noise": [[1.0], [-1.0]]}, r"noise ranges from -1 to 1"),
        ({"samples": -1}, r"samples is -1"),
        ({"draws": 0}, r"the number of draws is 0"),
        ({"seed": -2}, r"seed is -2"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(kit: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        posterior(kit).predict(**{"x": inputs(2), **change})


def test_noise_is_refused_where_the_likelihood_has_none(kit: Any) -> None:
    counts = LikelihoodSettings(kind="poisson")
    found = posterior(kit, likelihood_y=counts, likelihood_z=counts, standardise=False)
    with pytest.raises(ModelError, match="a poisson likelihood has none to add to"):
        found.predict(inputs(2), "observation", noise=np.ones((2, 1)))


def test_beyond_the_bounds_one_may_extrapolate_knowingly(kit: Any) -> None:
    found = posterior(kit)
    x = np.array([[5.0, 130.0]])
    assert np.isfinite(found.predict(x, extrapolate=True).mean).all()
    assert np.isfinite(found.predict(x, "emulator", t=[2.0, 30.0], extrapolate=True).mean).all()


def test_a_store_is_predicted_block_by_block(kit: Any, tmp_path: Path) -> None:
    found = posterior(kit, "general", hidden=(2,), outputs=2)
    generator = np.random.default_rng(3)
    store = storage.create(tmp_path / "made.zarr", found.problem, dtype="float64", chunk_rows=7)
    t = generator.uniform([1, -11], [5, 9], (20, 2))
    y, noise = generator.normal(size=(20, 2)), generator.uniform(1, 2, (20, 2))
    store.append_runs(inputs(20), t, y)
    store.append_observations(inputs(20, seed=1), y, noise)
    for table, what, given in (
        (store.runs, "emulator", {"t": t}),
        (store.runs, "process", {}),
        (store.observations, "emulator", {}),
        (store.observations, "observation", {"noise": noise}),
    ):
        assert table.blocks == 3
        options: dict[str, Any] = {"what": what, "draws": 16, "seed": 2}
        parts = [*found.predict_batches(map(table.read_block, range(table.blocks)), **options, samples=4)]
        whole = found.predict(table.read()["x"], **options, **given, samples=4)
        assert [len(part.mean) for part in parts] == [7, 7, 6]
        for i in range(2):
            np.testing.assert_allclose(np.concatenate([part[i] for part in parts]), whole[i])  # type: ignore[misc]
        if what != "observation":  # whose noise is another in other blocks
            np.testing.assert_allclose(np.concatenate([part[2] for part in parts], 1), whole.samples)  # type: ignore[misc]


def test_blocks_are_read_one_at_a_time_and_settings_are_checked_at_once(kit: Any) -> None:
    found = posterior(kit)
    read: list[int] = []

    def blocks() -> Iterator[Array]:
        for i in range(5):
            read.append(i)
            yield inputs(3, seed=i)

    predictions = found.predict_batches(blocks())
    next(predictions)
    assert read == [0]
    assert len([*predictions]) == 4
    with pytest.raises(ModelError, match="what is"):
        found.predict_batches(blocks(), "everything")  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="a block has t; it needs x"):
        next(found.predict_batches([{"t": [1.0, 2.0]}]))


# --- files ------------------------------------------------------------------------------------------------------------

KEPT: dict[str, dict[str, Any]] = {
    "shallow": {"kind": "additive"},
    "float32": {"kind": "additive", "dtype": torch.float32},
    "compressed runs": {"kind": "additive", "framed": True, "outputs": 2},
    "free kappa": {"kind": "none", "free_kappa": True},
    "deep": {"kind": "additive", "hidden": (2,)},
    "general": {"kind": "general", "outputs": 2, "framed": True},
    "deep general": {"kind": "general", "hidden": (2,), "outputs": 2},
    "meanfield": {"kind": "additive", "family": "mean_field", "hidden": (2,)},
    "variational": {"kind": "additive", "frequencies": "variational"},
    "mixture": {"kind": "additive", "components": 3, "outputs": 2},
    "transform": {"kind": "additive", "transform": TransformSettings(kind="boxcox", power=0.3)},
    "student": {"kind": "additive", "likelihood_y": LikelihoodSettings(kind="student_t", degrees=7.0)},
}


def everything(found: Posterior) -> list[Array]:
    """Predictions of all kinds, and draws of θ."""
    predictions = [
        found.predict(inputs(), what, samples=5, draws=32, seed=1)  # type: ignore[arg-type]
        for what in KINDS
    ]
    parts = [part for prediction in predictions for part in prediction if part is not None]
    return [*parts, found.sample(10), found.predict(inputs(), "emulator", t=[2.0, 3.0], draws=8).mean]


@pytest.mark.parametrize("kind", KEPT)
def test_a_loaded_posterior_predicts_the_same_to_the_last_bit(kit: Any, tmp_path: Path, kind: str) -> None:
    found = posterior(kit, **KEPT[kind])
    found.save(tmp_path / "run")
    for path in (tmp_path / "run", tmp_path / "run" / FILE):
        loaded = Posterior.load(path)
        for mine, its in zip(everything(loaded), everything(found), strict=True):
            assert np.isfinite(mine).all()
            np.testing.assert_array_equal(mine, its)
    framed = KEPT[kind].get("framed", False)
    assert all(getattr(q, "absorbed", False) is framed for q in (*loaded.components, *found.components))
    assert loaded.problem == found.problem
    assert loaded.model.settings == found.model.settings
    assert loaded.summary() == found.summary()
    assert loaded.noise == found.noise
    assert math.isnan(loaded.record.pop("loss"))
    assert loaded.record == {"steps": 3, "settings": {"rate": [0.1]}}
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["posterior.nc", FILE]


def test_another_process_predicts_the_same_to_the_last_bit(
    kit: Any, tmp_path: Path, run_python: Callable[[str], str]
) -> None:
    found = posterior(kit, **KEPT["deep general"], components=2)
    found.save(tmp_path)
    x = inputs()
    script = f"""
import hashlib, numpy, torch
from vcal_dist.posterior import Posterior
torch.set_num_threads(1)
predicted = Posterior.load({str(tmp_path)!r}).predict(numpy.array({x.tolist()!r}), samples=5)
print(hashlib.sha256(b"".join(part.tobytes() for part in predicted)).hexdigest())
"""
    predicted = found.predict(x, samples=5)
    assert predicted.samples is not None
    assert run_python(script).strip() == hashlib.sha256(b"".join(part.tobytes() for part in predicted)).hexdigest()  # type: ignore[union-attr]


def test_a_posterior_does_not_change_when_training_goes_on(kit: Any) -> None:
    made = problem()
    model = kit.model("additive", prior=ThetaPrior.from_problem(made))
    zero = torch.zeros(1, dtype=F64)
    scaling = Scaling(made, OutputScaling([TransformSettings()], zero, zero + 1, ["y0"]), F64)
    record: dict[str, Any] = {"steps": [1]}
    fitted = SimpleNamespace(
        model=model, components=[kit.full_rank(2, 1, model.width)], log_weights=zero, validation=None
    )
    found = Posterior.from_fitted(made, scaling, fitted, record)
    before = everything(found)
    with torch.no_grad():
        for value in (*model.parameters(), *fitted.components[0].buffers(), scaling.outputs.sd):
            value.mul_(1.5)
    record["steps"].append(2)
    for mine, its in zip(everything(found), before, strict=True):
        np.testing.assert_array_equal(mine, its)
    assert found.record == {"steps": [1]}
    assert not any(parameter.requires_grad for parameter in found.model.parameters())


def test_parts_that_do_not_belong_together_are_refused(kit: Any) -> None:
    found = posterior(kit)
    other = problem(priors=(Uniform(low=1.0, high=2.0), Uniform(low=1.0, high=2.0)))
    with pytest.raises(ModelError, match="the problem of the model"):
        Posterior.from_fitted(other, found.scaling, found)
    scaling = Scaling(other, found.scaling.outputs, F64)
    with pytest.raises(ModelError, match="the priors of the model"):
        Posterior.from_fitted(other, scaling, found)
    with pytest.raises(ModelError, match="the precision of the model"):
        Posterior.from_fitted(found.problem, Scaling(found.problem, found.scaling.outputs), found)


def deleted(*keys: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        del tree[keys[-1]]

    return change


def replaced(value: Any, *keys: Any) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replaced("another", "format"), "is a file of vcal-dist, but not a posterior"),
        (replaced(3, "schema"), "has schema 3; this version of vcal-dist reads schemas 1 and 2"),
        *((deleted(key), f"it has no '{key}'") for key in ("problem", "scaling", "model", "components", "record")),
        (deleted("model", "dtype"), "it has no 'dtype'"),
        (deleted("components", 0, "family"), "it has no 'family'"),
        (deleted("model", "state", "kappa"), "kappa"),
        (deleted("components", 0, "tensors", "mean"), "mean"),
        (replaced("float12", "model", "dtype"), "float12"),
        (replaced("gamma", "components", 0, "family"), "family 'gamma'"),
        (replaced([2, 1, 99], "components", 0, "shape"), "99 weights; the model has"),
        (replaced(torch.zeros(2), "components", 0, "tensors", "mean"), "mean"),
        (replaced("text", "components", 0, "tensors"), "sound"),
        (replaced(torch.zeros(3), "log_weights"), r"there are 1 components, and log weights \(3,\)"),
        (replaced([], "components"), "there are 0 components"),
        (replaced(-torch.ones(2, 2, dtype=F64), "components", 0, "tensors", "precision_theta"), "positive definite"),
        (replaced("perhaps", "model", "settings", "discrepancy"), "discrepancy"),
        (replaced([], "problem", "outputs"), "outputs"),
        (replaced(torch.zeros(1, dtype=F64), "scaling", "sd"), "positive sd"),
        (replaced([{"kind": "cube"}], "scaling", "transforms"), "cube"),
    ],
)
def test_a_file_that_is_not_a_sound_posterior_is_refused_by_name(
    kit: Any, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    tree = posterior(kit)._tree()
    change(tree)
    tensorfile.write(tmp_path / FILE, tree)
    with pytest.raises(ModelError, match=message) as caught:
        Posterior.load(tmp_path)
    assert str(tmp_path / FILE) in str(caught.value)


def test_a_missing_posterior_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*posterior\.safetensors: No such file"):
        Posterior.load(tmp_path)
    with pytest.raises(ModelError, match=r"cannot read .*elsewhere: No such file"):
        Posterior.load(tmp_path / "elsewhere")


# --- ArviZ ------------------------------------------------------------------------------------------------------------


def test_arviz_reads_the_draws_beside_the_posterior(kit: Any, tmp_path: Path) -> None:
    found = posterior(kit)
    found.save(tmp_path)
    arviz = import_arviz()
    data = arviz.from_netcdf(tmp_path / "posterior.nc")
    assert data.groups() == ["posterior", "prior"]
    assert data.attrs["problem"] == "made up"
    assert data.attrs["vcal_dist_version"]
    rate = data.posterior["rate θ"]
    assert (rate.attrs["units"], rate.attrs["description"]) == ("1/s", "the rate θ")
    np.testing.assert_array_equal(rate.values[0], found.sample(4000)[:, 0])
    table = arviz.summary(data, kind="stats", round_to=8)
    for row in found.summary():
        assert abs(table.loc[row.name, "mean"] - row.mean) < 5 * row.sd / math.sqrt(4000)
        assert table.loc[row.name, "sd"] == pytest.approx(row.sd, rel=5 / math.sqrt(8000))
    for prior, name in zip(NORMALS, ("rate θ", "loss"), strict=True):
        values = data.prior[name].values
        assert abs(values.mean() - prior.mean) < 5 * prior.sd / math.sqrt(4000)
        assert values.std() == pytest.approx(prior.sd, rel=5 / math.sqrt(8000))


def test_draws_are_written_nowhere_but_beside_the_posterior(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HDF5 on a full temporary directory raised RuntimeError, or ended the process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "is not there"))
    posterior(kit).save(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["posterior.nc", FILE]


def test_a_log_likelihood_goes_with_its_draws(kit: Any) -> None:
    found = posterior(kit)
    values = np.random.default_rng(0).normal(size=(50, 7))
    data = to_inference_data(found, draws=50, log_likelihood={"y0": values})
    np.testing.assert_array_equal(data["log_likelihood"]["y0"].values, values[None])
    with pytest.raises(ModelError, match=r"of 'y0' has shape \(50, 7\); accepted: \(60, rows\)"):
        to_inference_data(found, draws=60, log_likelihood={"y0": values})


def test_names_that_netcdf_cannot_hold_are_changed_and_told(kit: Any, tmp_path: Path) -> None:
    assert variable_names(["a\x01b", "a_b"]) == ["a_b_", "a_b"]
    names = ["θ 1 [m]", "chain", "draw", ".", "..", "a_b", "é" * 100, "#", "1", "_x", "chain_"]
    inner = variable_names(names)
    assert [safe for safe, name in zip(inner, names, strict=True) if safe != name] == ["chain__", "draw_", "._"]
    assert len({*inner}) == len(names)
    model = kit.model("none", controls=2, prior=ThetaPrior.from_problem(many(names)))
    zero = torch.zeros(1, dtype=F64)
    fitted = SimpleNamespace(
        model=model, components=[kit.mean_field(len(names), 1, model.width)], log_weights=zero, validation=None
    )
    scaling = Scaling(many(names), OutputScaling([TransformSettings()], zero, zero + 1, ["y0"]), F64)
    Posterior.from_fitted(many(names), scaling, fitted).save(tmp_path)
    arviz = import_arviz()
    data = arviz.from_netcdf(tmp_path / "posterior.nc")
    assert {name: data.posterior[name].attrs["long_name"] for name in inner} == dict(zip(inner, names, strict=True))
    assert len(arviz.summary(data, kind="stats")) == len(names)


def many(names: list[str]) -> Problem:
    inner = tuple(CalibrationInput.model_validate({"name": name, "bounds": (0.0, 1.0)}) for name in names)
    return problem().model_copy(update={"calibration_inputs": inner})
