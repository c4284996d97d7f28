"""Passes over all rows: compression, settling and closing against dense solutions, and models inside each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor

from vcal_dist.batches import Observations, take
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.densities import collapsed_log_density
from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings
from vcal_dist.fullrank import Arrow, Frame, FullRank
from vcal_dist.gp import Draw, GPSettings
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.natural import Statistics, observations_statistics, runs_statistics
from vcal_dist.objective import Samples, elbo, observations_log_likelihood
from vcal_dist.passes import HIDDEN_SAMPLES, Climb, close, compress, run, settle
from vcal_dist.pinning import curvature, pin

F64 = torch.float64
UNEVEN = [1, 0, 11, 3, 5]  # rows of blocks, 20 in all


def in_blocks(table: Any, sizes: list[int]) -> Callable[[], Iterable[Any]]:
    def blocks() -> Iterable[Any]:
        for chosen in torch.arange(len(table.weight)).split(sizes):
            yield take(table, chosen)

    return blocks


# --- compression ----------------------------------------------------------------------------------------------------


def test_compression_over_uneven_blocks_is_one_dense_solution(kit: Any) -> None:
    model = kit.model("additive", outputs=2)
    runs = kit.runs(model, 20, missing=True)
    found = compress(model, in_blocks(runs, UNEVEN)())
    phi = model.eta(runs.u).detach().numpy()
    evidence = float(runs.log_jacobian.sum())
    for k, s2 in enumerate(model.likelihood_z.noise_variance().tolist()):
        z = runs.z[:, k].numpy()
        known = ~np.isnan(z)
        Lambda = np.eye(phi.shape[1]) + phi[known].T @ phi[known] / s2
        np.testing.assert_allclose(
            found.frame.mean[k], np.linalg.solve(Lambda, phi[known].T @ z[known] / s2), rtol=1e-10
        )
        covariance = found.frame.root[k] @ found.frame.root[k].mT
        np.testing.assert_allclose(covariance, np.linalg.inv(Lambda), rtol=1e-10, atol=1e-13)
        dense = scipy.stats.multivariate_normal(
            np.zeros(known.sum()), phi[known] @ phi[known].T + s2 * np.eye(known.sum())
        )
        evidence += dense.logpdf(z[known])
    assert float(found.log_evidence) == pytest.approx(evidence, rel=1e-10)


def test_compression_needs_runs(kit: Any) -> None:
    with pytest.raises(ModelError, match="no runs"):
        compress(kit.model("none"), [])


def test_compression_of_a_deep_emulator_is_the_best_q_given_its_hidden_layers(kit: Any) -> None:
    model = kit.model("none", hidden=(2,))
    runs = kit.runs(model, 20)
    found = compress(model, in_blocks(runs, UNEVEN)(), key=(4,))
    q = FullRank(0, 1, model.width, frame=found.frame, absorbed=True)
    own = FullRank(0, 1, model.width)
    own.move(own.theta_mean, q.raw_mean, own.precision._replace(weights=torch.linalg.inv(q.raw_root @ q.raw_root.mT)))

    def bound(state: FullRank) -> float:
        """With the same shared samples of hidden layers."""
        with torch.no_grad():
            phi = model.eta(runs.u, Draw((4,), HIDDEN_SAMPLES))
            log_prob = model.likelihood_z.expected_log_prob(runs.z, *state.moments(phi))
            return float(log_prob.sum((-1, -2)).mean() + runs.log_jacobian.sum() - state.kl())

    best = bound(own)
    assert float(found.log_evidence) == pytest.approx(best, rel=1e-9)
    for seed in range(3):
        away = FullRank(0, 1, model.width)
        precision = own.precision._replace(weights=own.precision_weights * (1 + 0.1 * seed))
        away.move(own.theta_mean, own.mean + 0.01 * kit.randn(seed, 1, model.width), precision)
        assert bound(away) < best


def test_settling_on_gaussian_runs_is_compression(kit: Any) -> None:
    model = kit.model("additive", outputs=2)
    runs = kit.runs(model, 20, missing=True)
    compressed = compress(model, [runs])
    q = FullRank(0, 2, model.eta.width)
    closing = settle(model, q, in_blocks(runs, UNEVEN))
    assert closing.converged
    assert closing.damped == 0
    assert closing.log_evidence == pytest.approx(float(compressed.log_evidence), rel=1e-9)
    torch.testing.assert_close(q.raw_mean, compressed.frame.mean, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        q.raw_root @ q.raw_root.mT, compressed.frame.root @ compressed.frame.root.mT, rtol=1e-9, atol=1e-10
    )


@pytest.mark.parametrize("kind", ["poisson", "bernoulli", "student_t"])
def test_settling_on_other_runs_ends_where_the_bound_is_highest(kit: Any, kind: Any) -> None:
    model = kit.model("none", likelihood_z=LikelihoodSettings(kind=kind, noise=0.5))
    runs = kit.runs(model, 30)
    u = runs.u
    smooth = torch.sin(3 * u[:, :1]) + u[:, 1:2]
    z = {"poisson": (2 * smooth.exp()).floor(), "bernoulli": (runs.z + smooth > 0.8).double()}.get(
        kind, smooth + 0.2 * runs.z
    )
    runs = runs._replace(z=z)
    q = FullRank(0, 1, model.width)
    closing = settle(model, q, in_blocks(runs, [30]), iterations=60)
    assert closing.converged
    gradient = runs_statistics(model, q, runs).gradient_weights + q.prior_gradient()[1]
    assert float(gradient.abs().max()) < 1e-3
    best = float(elbo(model, q, runs, None).total.detach())
    assert closing.log_evidence == pytest.approx(best, abs=1e-9)
    for seed in range(3):
        away = FullRank(0, 1, model.width)
        scaled = q.precision._replace(weights=q.precision_weights * (0.8 + 0.2 * seed))
        away.move(q.theta_mean, q.mean + 0.02 * kit.randn(seed, 1, model.width), scaled)
        assert float(elbo(model, away, runs, None).total.detach()) < best


@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 5, 6])
def test_settling_that_runs_out_of_iterations_says_so_and_keeps_the_q_whose_bound_it_reports(
    kit: Any, iterations: int
) -> None:
    model = kit.model("none", likelihood_z=LikelihoodSettings(kind="poisson"))
    runs = kit.runs(model, 30)
    runs = runs._replace(z=(20 * runs.u[:, :1].exp()).floor())  # far from where q starts: full steps overshoot
    q = FullRank(0, 1, model.width)
    before = float(elbo(model, q, runs, None).total.detach())
    closing = settle(model, q, in_blocks(runs, [30]), iterations=iterations)
    found = float(elbo(model, q, runs, None).total.detach())
    assert not closing.converged
    assert closing.iterations == iterations
    assert closing.log_evidence == pytest.approx(found, abs=1e-6)
    assert found >= before - 1e-6


# --- closing --------------------------------------------------------------------------------------------------------


def linear_case(
    kit: Any, theta: Tensor, kind: Any = "additive", rows: int = 15
) -> tuple[CalibrationModel, FullRank, Observations]:
    """f = a_k(x − ½) + 0.2·b_k·θ̃ + φ_δ(x)·w_k: linear in everything, the emulator being all but known."""
    settings = ModelSettings(
        eta=GPSettings(features=FeatureSettings(features=2, linear=1.0), amplitude=1e-12),
        delta=GPSettings(features=FeatureSettings(features=4, constant=1.0), amplitude=0.6, lengthscale=0.7),
        likelihood_y=LikelihoodSettings(noise=0.2),
        discrepancy=kind,
    )
    model = CalibrationModel(1, kit.prior(2, "normal"), 2, settings, dtype=F64)
    mean = torch.tensor([[0.0, 0.0, 1.0, 4.0, -2.0], [0.0, 0.0, -0.5, 1.0, 5.0]], dtype=F64)
    frame = Frame(mean, 1e-9 * torch.eye(5, dtype=F64).repeat(2, 1, 1)).widen(model.width - 5)
    q = FullRank(2, 2, model.width, frame=frame, absorbed=True)
    observations = kit.observations(model, rows, missing=True, noise=True)
    x = observations.x
    y = (x - 0.5) * mean[:, 2] + (0.2 * mean[:, 3:] @ theta) + 0.2 * observations.y
    return model, q, observations._replace(y=y)


def dense_linear(model: CalibrationModel, q: FullRank, observations: Observations) -> tuple[Any, Any, float]:
    """Mean and covariance of (θ̃, w_δ1, w_δ2), and the log evidence."""
    x, y = observations.x.numpy(), observations.y.numpy()
    phi = np.zeros((len(x), 0)) if model.delta is None else model.delta(observations.x).detach().numpy()
    M = phi.shape[1]
    mean = q.frame_mean.numpy()
    designs, targets, variances = [], [], []
    extra = model.residual_variance()
    assert extra is not None
    assert observations.noise is not None
    for k in range(2):
        known = ~np.isnan(y[:, k])
        J = np.zeros((len(x), 2 + 2 * M))
        J[:, :2] = 0.2 * mean[k, 3:5]
        J[:, 2 + k * M : 2 + (k + 1) * M] = phi
        s2 = model.likelihood_y.noise_variance().detach().numpy()[k]  # type: ignore[operator]
        own = observations.noise[:, k].numpy() ** 2
        designs.append(J[known])
        targets.append((y[:, k] - mean[k, 2] * (x[:, 0] - 0.5))[known])
        variances.append((s2 + own + float(extra.detach()[k]))[known])
    J, r, s2 = (np.concatenate(parts) for parts in (designs, targets, variances))
    Lambda = np.eye(J.shape[1]) + (J.T / s2) @ J
    evidence = scipy.stats.multivariate_normal(np.zeros(len(r)), J @ J.T + np.diag(s2)).logpdf(r)
    evidence += float(observations.log_jacobian.sum())
    return np.linalg.solve(Lambda, J.T @ (r / s2)), np.linalg.inv(Lambda), evidence


def of_theta_and_delta(kit: Any, q: FullRank) -> tuple[Any, Any]:
    mean, covariance = kit.dense(q)
    D = q.width
    chosen = np.r_[0:2, 2 + 5 : 2 + D, 2 + D + 5 : 2 + 2 * D]
    return mean[chosen], covariance[np.ix_(chosen, chosen)]


@pytest.mark.parametrize("start", ["prior", "narrow", "posterior mean", "posterior mean, narrow", "far away"])
@pytest.mark.parametrize("kind", ["none", "additive"])
def test_closing_a_linear_model_is_its_dense_posterior_wherever_it_starts(kit: Any, start: str, kind: Any) -> None:
    model, q, observations = linear_case(kit, torch.tensor([0.4, -0.3], dtype=F64), kind)
    mean, covariance, evidence = dense_linear(model, q, observations)
    where = torch.tensor(mean[:2]) if "posterior" in start else q.theta_mean
    where = where + (torch.tensor([-3.0, 4.0], dtype=F64) if start == "far away" else 0.0)
    precision = q.precision._replace(theta=(100.0 if "narrow" in start else 1.0) * q.precision_theta)
    q.move(where, q.mean, precision)
    closing = close(model, q, in_blocks(observations, [1, 0, 9, 5]))
    found_mean, found_covariance = of_theta_and_delta(kit, q)
    np.testing.assert_allclose(found_mean, mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found_covariance, covariance, rtol=1e-6, atol=1e-7)
    assert closing.log_evidence == pytest.approx(evidence, abs=1e-6)
    assert closing.converged
    assert closing.damped == 0


def curved_case(
    kit: Any, kind: Any = "additive", rate: float = 3.0, noise: float = 0.4
) -> tuple[CalibrationModel, Frame, Observations]:
    """An emulator of sin(5x + rate·t), and observations of it at an unusual θ."""
    likelihoods = {"likelihood_z": LikelihoodSettings(noise=0.05), "likelihood_y": LikelihoodSettings(noise=noise)}
    model = kit.model(kind, controls=1, features=20, prior=kit.prior(1), **likelihoods)
    runs = kit.runs(model, 60)
    z = torch.sin(5 * runs.u[:, :1] + rate * runs.u[:, 1:])
    frame = compress(model, [runs._replace(z=z)]).frame
    observations = kit.observations(model, 12)
    y = torch.sin(5 * observations.x + rate * 0.9) + 0.5 * noise * observations.y
    return model, frame, observations._replace(y=y)


def started(model: CalibrationModel, frame: Frame, theta: float) -> FullRank:
    q = FullRank(1, 1, model.width, frame=frame.widen(model.width - model.eta.width), absorbed=True)
    q.move(torch.tensor([theta], dtype=F64), q.mean, q.precision)
    return q


def log_joint(model: CalibrationModel, frame: Frame, observations: Observations, theta: float) -> float:
    """log p(y, θ̃ | runs) with every weight integrated out, in the user's units of y."""
    density = collapsed_log_density(model, frame, lambda: [observations], torch.tensor([[theta]], dtype=F64))
    return float(density + observations.log_jacobian.sum())


@torch.no_grad()
def climbed(model: CalibrationModel, q: FullRank, observations: Observations) -> float:
    """What closing climbs, a bound of log p(y, θ̃) at the mean of θ̃ with w as q has it, up to a constant."""
    hidden = HIDDEN_SAMPLES if model.random or model.kind == "general" else 1
    found = observations_statistics(model, q, observations, theta=q.theta_mean.expand(hidden, -1))
    return float(found.log_likelihood - q.kl_weights() - 0.5 * q.theta_mean.square().sum())


@pytest.mark.parametrize("kind", ["none", "additive"])
def test_closing_a_curved_model_ends_at_the_mode_of_the_collapsed_density_and_its_laplace_evidence(
    kit: Any, kind: Any
) -> None:
    model, frame, observations = curved_case(kit, kind)
    q = started(model, frame, 0.5)
    closing = close(model, q, lambda: [observations], tolerance=1e-9, iterations=100)
    assert closing.converged
    mode = scipy.optimize.minimize_scalar(
        lambda theta: -log_joint(model, frame, observations, theta), bounds=(-0.5, 3.0), options={"xatol": 1e-9}
    )
    assert float(q.theta_mean) == pytest.approx(mode.x, abs=1e-3 * float(q.theta_root))
    laplace = -mode.fun + 0.5 * math.log(2 * math.pi) + float(q.theta_root.log())
    assert closing.log_evidence == pytest.approx(laplace, abs=1e-6)


def test_the_laplace_evidence_of_a_sharp_theta_is_close_to_the_integral(kit: Any) -> None:
    model, frame, observations = curved_case(kit, "none")
    q = started(model, frame, 0.5)
    closing = close(model, q, lambda: [observations])
    theta = torch.linspace(-6, 6, 2001, dtype=F64)
    density = collapsed_log_density(model, frame, lambda: [observations], theta[:, None])
    integral = (
        float(density.logsumexp(0)) + math.log(float(theta[1] - theta[0])) + float(observations.log_jacobian.sum())
    )
    assert closing.log_evidence == pytest.approx(integral, abs=0.25)


@pytest.mark.parametrize("kind", ["none", "additive", "general"])
def test_closing_a_curved_model_converges_where_the_gradient_vanishes(kit: Any, kind: Any) -> None:
    model, frame, observations = curved_case(kit, kind)
    q = started(model, frame, 0.5)
    before = climbed(model, q, observations)
    closing = close(model, q, lambda: [observations])
    assert closing.converged
    assert closing.log_evidence == pytest.approx(climbed(model, q, observations) + float(q.theta_root.log()), abs=1e-9)
    assert climbed(model, q, observations) > before
    hidden = HIDDEN_SAMPLES if kind == "general" else 1
    found = observations_statistics(model, q, observations, theta=q.theta_mean.expand(hidden, -1))
    prior_theta, prior_weights = q.prior_gradient()
    step = q.factors.solve(found.gradient_theta + prior_theta, found.gradient_weights + prior_weights)
    gain = 0.5 * ((found.gradient_theta + prior_theta) @ step[0]).add(
        ((found.gradient_weights + prior_weights) * step[1]).sum()
    )
    assert float(gain) < 1e-3  # what is left to gain, in nats


@pytest.mark.parametrize(("rate", "noise"), [(3.0, 0.4), (12.0, 0.05)])
@pytest.mark.parametrize("iterations", [1, 2, 3, 4, 5, 6])
def test_closing_that_runs_out_of_iterations_says_so_and_keeps_the_q_whose_evidence_it_reports(
    kit: Any, rate: float, noise: float, iterations: int
) -> None:
    model, frame, observations = curved_case(kit, "additive", rate, noise)
    for start in (-2.0, 0.5, 2.0):  # some of which end with a step taken back
        q = started(model, frame, start)
        closing = close(model, q, lambda: [observations], iterations=iterations, tolerance=1e-9)
        assert not closing.converged
        assert closing.iterations == iterations
        evidence = climbed(model, q, observations) + float(q.theta_root.log())
        assert closing.log_evidence == pytest.approx(evidence, abs=1e-9)


@pytest.mark.parametrize("kind", ["none", "additive", "general"])
def test_closing_never_ends_below_where_it_started(kit: Any, kind: Any) -> None:
    model, frame, observations = curved_case(kit, kind)
    for start in (-2.5, -1.0, 0.0, 2.0):
        before = climbed(model, started(model, frame, start), observations)
        for iterations in (1, 2, 4, 30):
            q = started(model, frame, start)
            close(model, q, lambda: [observations], iterations=iterations)
            assert climbed(model, q, observations) > before - 1e-3


def test_a_step_that_overshoots_is_taken_back_and_halved_and_every_start_finds_a_mode(kit: Any) -> None:
    model, frame, observations = curved_case(kit, "none", rate=12.0, noise=0.05)
    damped = 0
    for start in np.linspace(-2, 2, 9):
        q = started(model, frame, start)
        closing = close(model, q, lambda: [observations], tolerance=1e-7, iterations=60)
        damped += closing.damped
        assert closing.converged
        mean, sd = float(q.theta_mean), float(q.theta_root)
        here = log_joint(model, frame, observations, mean)
        for beside in (mean - 0.05 * sd, mean + 0.05 * sd):
            assert log_joint(model, frame, observations, beside) < here
    assert damped > 0


def test_closing_under_other_noise_ends_where_the_bound_in_the_weights_is_highest(kit: Any) -> None:
    model = kit.model("additive", controls=1, likelihood_y=LikelihoodSettings(kind="student_t", noise=0.3))
    observations = kit.observations(model, 15, missing=True)
    q = started(model, kit.frame(1, model.eta.width, 30, scale=0.2), 0.3)
    closing = close(model, q, lambda: [observations], tolerance=1e-8, iterations=200)
    assert closing.converged
    best = climbed(model, q, observations)
    for seed in range(4):
        away = started(model, kit.frame(1, model.eta.width, 30, scale=0.2), 0.0)
        scaled = away.precision._replace(weights=q.precision_weights * (0.8 + 0.15 * seed))
        away.move(q.theta_mean + 0.02 * (seed - 1.5), q.mean + 0.02 * kit.randn(seed, 1, model.width), scaled)
        assert climbed(model, away, observations) < best


def test_with_hidden_layers_the_collapsed_density_is_the_bound_of_the_best_weights(kit: Any) -> None:
    """The height that closing climbs, its weights found anew at θ̃: Gaussian steps of size one, not integrals."""
    model = kit.model("additive", outputs=2, prior=kit.prior(2), hidden=(3,), free_kappa=True)
    observations = kit.observations(model, 15, missing=True, noise=True)
    frame = kit.frame(2, model.eta.width, 30)
    points = kit.randn(4, 3, 2)
    density = collapsed_log_density(model, frame, in_blocks(observations, [1, 0, 9, 5]), points, key=(3,))
    for theta, found in zip(points, density, strict=True):
        q = FullRank(2, 2, model.width, frame=frame.widen(model.width - model.eta.width), absorbed=True)
        pin(model, q, in_blocks(observations, [1, 0, 9, 5]), theta, torch.eye(2, dtype=F64), key=(3,))
        copies = theta.expand(HIDDEN_SAMPLES, -1)
        statistics = observations_statistics(model, q, observations, key=(3,), theta=copies)
        bound = statistics.log_likelihood - q.kl_weights() - 0.5 * theta.square().sum() - math.log(2 * math.pi)
        assert float(found) == pytest.approx(float((bound - observations.log_jacobian.sum()).detach()), abs=1e-8)


def test_steps_that_lead_from_one_side_of_the_top_to_the_other_are_shortened() -> None:
    """A Gauss–Newton curvature of half the true one: steps of size one go from θ̃ to −θ̃, and lower nothing."""
    true, seen = 40.0, 20.0
    q = FullRank(1, 1, 1)
    q.move(torch.tensor([0.3], dtype=F64), q.mean, q.precision)

    def statistics(_: Any) -> Statistics:
        theta, curvature = q.theta_mean, torch.tensor([[seen - 1]], dtype=F64)
        zero = torch.zeros(1, 1, 1, dtype=F64)
        return Statistics(
            Arrow(curvature, zero, zero), -(true - 1) * theta, zero[0], -0.5 * (true - 1) * theta.square().sum()
        )

    def height(found: Statistics) -> float:
        return float(found.log_likelihood - 0.5 * q.theta_mean.square().sum())

    model = SimpleNamespace(dtype=F64)
    climb: Climb[Any] = Climb(
        model,  # type: ignore[arg-type]
        q,
        statistics,
        height,
        iterations=30,
        tolerance=1e-3,
        relax=False,
    )
    found = run(climb, lambda: [None])
    assert found.converged
    assert found.iterations < 8
    assert abs(float(q.theta_mean)) < 1e-2


# --- pinning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "additive"])
def test_pinning_the_exact_marginal_of_theta_in_a_linear_model_is_its_dense_posterior(kit: Any, kind: Any) -> None:
    model, q, observations = linear_case(kit, torch.tensor([0.4, -0.3], dtype=F64), kind)
    mean, covariance, _ = dense_linear(model, q, observations)
    pin(model, q, in_blocks(observations, [1, 0, 9, 5]), torch.tensor(mean[:2]), torch.tensor(covariance[:2, :2]))
    found_mean, found_covariance = of_theta_and_delta(kit, q)
    np.testing.assert_allclose(found_mean, mean, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found_covariance, covariance, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["none", "additive"])
def test_pinning_gives_the_marginal_asked_for_and_the_exact_weights_at_its_mean(kit: Any, kind: Any) -> None:
    model = kit.model(kind, outputs=2, prior=kit.prior(2), free_kappa=True)
    observations = kit.observations(model, 15, missing=True, noise=True)
    frame = kit.frame(2, model.eta.width, 30).widen(model.width - model.eta.width)
    q = FullRank(2, 2, model.width, frame=frame, absorbed=True)
    theta = torch.tensor([0.7, -0.2], dtype=F64)
    covariance = torch.tensor([[0.3, -0.1], [-0.1, 0.2]], dtype=F64)
    pin(model, q, in_blocks(observations, [1, 0, 9, 5]), theta, covariance)
    for mine, asked in zip(q.theta_moments(), (theta, covariance), strict=True):
        torch.testing.assert_close(mine, asked, rtol=1e-9, atol=1e-10)
    assert observations.noise is not None
    with torch.no_grad():
        unit = model.rows_of_theta(theta[None], 15)
        phi_delta = None if model.delta is None else model.delta(observations.x)
        phi = model.design(model.phi_eta(observations.x, unit, None), phi_delta)[0].numpy()
        s2 = model.likelihood_y.noise_variance() + model.kappa**2 * model.likelihood_z.noise_variance()
    for k in range(2):
        y = observations.y[:, k].numpy()
        known = ~np.isnan(y)
        precision = 1 / (float(s2[k]) + observations.noise[known, k].numpy() ** 2)
        prior = np.linalg.inv(frame.root[k].numpy() @ frame.root[k].numpy().T)
        Lambda = prior + (phi[known].T * precision) @ phi[known]
        expected = np.linalg.solve(Lambda, prior @ frame.mean[k].numpy() + phi[known].T @ (precision * y[known]))
        np.testing.assert_allclose(q.mean_given(theta[None])[0, k], expected, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(q.raw_root[k] @ q.raw_root[k].mT, np.linalg.inv(Lambda), rtol=1e-8, atol=1e-10)


def test_pinned_weights_follow_theta_as_the_exact_ones_do(kit: Any) -> None:
    """dE[w | θ̃]/dθ̃ by differences of weights pinned nearby: to first order in what f's own slope leaves of y."""
    model, frame, observations = curved_case(kit, "additive")

    def pinned(theta: float) -> FullRank:
        q = started(model, frame, 0.0)
        pin(model, q, lambda: [observations], torch.tensor([theta], dtype=F64), torch.tensor([[0.01]], dtype=F64))
        return q

    # Nothing but δ is free: it takes what f loses by a step of θ̃, exactly.
    frame = Frame(frame.mean, 1e-6 * frame.root)
    E = model.eta.width
    slope = (pinned(0.9 + 1e-4).raw_mean - pinned(0.9 - 1e-4).raw_mean)[:, E:] / 2e-4
    torch.testing.assert_close(pinned(0.9).raw_gain[:, E:, 0], slope, rtol=1e-4, atol=1e-5)


def test_pinning_forgets_the_weights_it_started_from(kit: Any) -> None:
    """The slopes of f in θ̃, and so how w follows θ̃, belong to the weights that are found, not to those before."""
    model, frame, observations = curved_case(kit, "additive")
    theta, covariance = torch.tensor([0.9], dtype=F64), torch.tensor([[0.01]], dtype=F64)
    found = []
    for scale in (0.0, 3.0):
        q = started(model, frame, 0.0)
        q.move(q.theta_mean, scale * kit.randn(1, *q.mean.shape), q.precision)
        pin(model, q, lambda: [observations], theta, covariance)
        found.append([q.mean, *q.precision])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-8, atol=1e-8)


def test_f_is_curved_by_what_weights_that_are_linear_in_theta_miss(kit: Any) -> None:
    model, q, observations = linear_case(kit, torch.tensor([0.4, -0.3], dtype=F64), "additive")
    pin(model, q, lambda: [observations], q.theta_mean, 0.1 * torch.eye(2, dtype=F64))
    assert curvature(model, q, lambda: [observations], q.theta_mean + torch.eye(2, dtype=F64)) < 1e-10
    model, frame, observations = curved_case(kit, "additive")
    theta = torch.tensor([0.9], dtype=F64)
    q = started(model, frame, 0.0)
    pin(model, q, lambda: [observations], theta, torch.tensor([[0.01]], dtype=F64))
    parts = in_blocks(observations, [1, len(observations.x) - 1])
    far, near = (curvature(model, q, parts, (theta + step)[None]) for step in (0.1, 0.05))
    assert far / near == pytest.approx(16, rel=0.5)  # the square of a quadratic error


@pytest.mark.parametrize("pass_", [pin, close])
def test_a_pass_needs_observations(kit: Any, pass_: Any) -> None:
    model, q, _ = linear_case(kit, torch.zeros(2, dtype=F64))
    arguments = (torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64)) if pass_ is pin else ()
    with pytest.raises(ModelError, match="no rows"):
        pass_(model, q, list, *arguments)


def test_the_collapsed_density_needs_observations(kit: Any) -> None:
    model = kit.model("none")
    with pytest.raises(ModelError, match="no observations"):
        collapsed_log_density(model, kit.frame(1, model.width, 30), list, torch.zeros(1, 1, dtype=F64))


@pytest.mark.parametrize("kind", ["none", "additive"])
def test_the_collapsed_density_of_theta_is_the_dense_one_up_to_the_jacobian(kit: Any, kind: Any) -> None:
    model = kit.model(kind, outputs=2, free_kappa=True, prior=kit.prior(2))
    observations = kit.observations(model, 15, missing=True, noise=True)
    frame, points = kit.frame(2, model.eta.width, 30), kit.randn(1, 4, 2)
    found = collapsed_log_density(model, frame, in_blocks(observations, [1, 0, 9, 5]), points)
    assert observations.noise is not None
    for theta, value in zip(points, found.tolist(), strict=True):
        with torch.no_grad():
            unit = model.rows_of_theta(theta[None], 15)
            phi = (model.kappa * model.phi_eta(observations.x, unit, None)[0]).numpy()
            phi_delta = np.zeros((15, 0)) if model.delta is None else model.delta(observations.x).numpy()
            s2 = model.likelihood_y.noise_variance() + model.kappa**2 * model.likelihood_z.noise_variance()
        expected = scipy.stats.norm.logpdf(theta.numpy()).sum()
        for k in range(2):
            y = observations.y[:, k].numpy()
            known = ~np.isnan(y)
            root = phi @ frame.root[k].numpy()
            noise = float(s2[k]) + observations.noise[:, k].numpy() ** 2
            dense = (root @ root.T + phi_delta @ phi_delta.T + np.diag(noise))[np.ix_(known, known)]
            mean = (phi @ frame.mean[k].numpy())[known]
            expected += scipy.stats.multivariate_normal(mean, dense).logpdf(y[known])
        assert value == pytest.approx(expected, rel=1e-9)


# --- models inside models -------------------------------------------------------------------------------------------


def without_theta(model: CalibrationModel) -> CalibrationModel:
    """η no longer depends on the calibration input."""
    with torch.no_grad():
        model.eta.last.log_lengthscale[-1] = 30.0
    return model


def test_three_outputs_are_three_separate_fits(kit: Any) -> None:
    joint = without_theta(kit.model("additive", outputs=3))
    runs, observations = kit.runs(joint, 20, missing=True), kit.observations(joint, 15, missing=True, noise=True)
    assert observations.noise is not None
    frame = compress(joint, [runs]).frame
    q = FullRank(1, 3, joint.width, frame=frame.widen(joint.width - joint.eta.width), absorbed=True)
    closing = close(joint, q, lambda: [observations])
    mean, covariance = kit.dense(q)
    alone_evidences = []
    for k in range(3):
        model = without_theta(kit.model("additive", outputs=1))
        columns = slice(k, k + 1)
        of_runs = runs._replace(z=runs.z[:, columns], log_jacobian=runs.log_jacobian[:, columns])
        of_observations = observations._replace(
            y=observations.y[:, columns],
            noise=observations.noise[:, columns],
            log_jacobian=observations.log_jacobian[:, columns],
        )
        alone_frame = compress(model, [of_runs]).frame
        torch.testing.assert_close(alone_frame.mean[0], frame.mean[k])
        torch.testing.assert_close(alone_frame.root[0], frame.root[k])
        alone = FullRank(1, 1, model.width, frame=alone_frame.widen(model.width - model.eta.width), absorbed=True)
        alone_evidences.append(close(model, alone, lambda rows=of_observations: [rows]).log_evidence)  # type: ignore[misc]
        alone_mean, alone_covariance = kit.dense(alone)
        rows = slice(1 + k * model.width, 1 + (k + 1) * model.width)
        np.testing.assert_allclose(mean[rows], alone_mean[1:], rtol=1e-8, atol=1e-10)
        np.testing.assert_allclose(covariance[rows, rows], alone_covariance[1:, 1:], rtol=1e-8, atol=1e-10)
        other = np.delete(np.arange(len(mean)), np.r_[0, rows])
        np.testing.assert_allclose(covariance[rows][:, other], 0, atol=1e-10)
    assert closing.log_evidence == pytest.approx(sum(alone_evidences), rel=1e-8)


def test_additive_lies_inside_general(kit: Any) -> None:
    additive, frame, observations = curved_case(kit, "additive")
    general = kit.model(
        "general", controls=1, features=20, prior=kit.prior(1), likelihood_z=LikelihoodSettings(noise=0.05)
    )
    assert additive.delta is not None
    with torch.no_grad():  # g's features see x as δ's do, and η not at all
        general.delta.last.log_lengthscale[0] = 30.0
        general.delta.last.omega[1:] = additive.delta.last.omega
    # η's weights all but known: what g samples of them is then the same in every sample.
    sharp = Frame(frame.mean, 1e-6 * frame.root)
    found = []
    for model in (additive, general):
        q = started(model, sharp, 0.8)
        closing = close(model, q, lambda: [observations], tolerance=1e-7, iterations=100)
        assert closing.converged
        with torch.no_grad():
            expected = observations_log_likelihood(model, q, observations, key=(2,), samples=Samples(16, 1))
        found.append((q, closing.log_evidence, float(expected)))
    (q, evidence, likelihood), (other, other_evidence, other_likelihood) = found
    assert other_evidence == pytest.approx(evidence, abs=1e-4)
    assert other_likelihood == pytest.approx(likelihood, abs=1e-3)
    for mine, its in zip(kit.dense(q), kit.dense(other), strict=True):
        np.testing.assert_allclose(its, mine, rtol=1e-3, atol=1e-4)
