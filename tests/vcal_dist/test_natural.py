"""Natural-gradient steps: exact for conjugate models, the natural gradient for others, exact gradients through θ̃."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vcal_dist.batches import Observations, take
from vcal_dist.calibration import ETA_NOISE, CalibrationModel
from vcal_dist.fullrank import Arrow, FullRank, factorise
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.natural import (
    HALVINGS,
    Statistics,
    judged_step,
    natural_step,
    observations_statistics,
    runs_statistics,
)
from vcal_dist.noise import shared_normal
from vcal_dist.objective import Samples, elbo, observations_log_likelihood, runs_log_likelihood

F64 = torch.float64
STUDENT = LikelihoodSettings(kind="student_t", noise=0.3, degrees=3.0)


def clone(q: FullRank) -> FullRank:
    frame_free = FullRank(q.theta_dim, q.outputs, q.width, absorbed=q.absorbed)
    frame_free.load_state_dict(q.state_dict())
    return frame_free


def state(q: FullRank) -> list[Tensor]:
    return [q.theta_mean, q.mean, *q.precision]


# --- conjugate models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rho", "steps"), [(1.0, 1), (0.5, 60)])
@pytest.mark.parametrize("framed", [False, True])
def test_steps_on_gaussian_runs_end_in_bayesian_linear_regression(
    kit: Any, rho: float, steps: int, framed: bool
) -> None:
    model = kit.model("none", outputs=2)
    runs = kit.runs(model, 20, missing=True)
    q = kit.full_rank(0, 2, model.width, frame=kit.frame(2, model.width, 9) if framed else None)
    for _ in range(steps):
        step = natural_step(q, runs_statistics(model, q, runs), rho)
        assert step.damped == 0
    phi = model.eta(runs.u).detach().numpy()
    s2 = model.likelihood_z.noise_variance().detach().numpy()
    mean, covariance = kit.dense(q)
    for k in range(2):
        known = ~np.isnan(runs.z[:, k].numpy())
        Lambda = np.eye(model.width) + phi[known].T @ phi[known] / s2[k]
        rows = slice(k * model.width, (k + 1) * model.width)
        expected = np.linalg.solve(Lambda, phi[known].T @ runs.z[:, k].numpy()[known] / s2[k])
        np.testing.assert_allclose(mean[rows], expected, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(covariance[rows, rows], np.linalg.inv(Lambda), rtol=1e-6, atol=1e-9)


def test_the_promised_gain_of_a_full_step_from_the_prior_is_what_the_mean_gains(kit: Any) -> None:
    model = kit.model("none")
    runs = kit.runs(model, 20)
    q = FullRank(0, 1, model.width)
    natural_step(q, runs_statistics(model, q, runs), 1.0)
    # At the optimum of the precision, the bound is quadratic in the mean: ½gᵀΛ⁻¹g is the gain exactly.
    away = clone(q)
    away.move(q.theta_mean, q.mean + 0.1 * kit.randn(1, 1, model.width), q.precision)
    before = float(elbo(model, away, runs, None).total.detach())
    step = natural_step(away, runs_statistics(model, away, runs), 1.0)
    gain = float(elbo(model, away, runs, None).total.detach()) - before
    assert step.decrement == pytest.approx(gain, rel=1e-8)


# --- other likelihoods --------------------------------------------------------------------------------------------


def natural_gradient_step(model: CalibrationModel, q: FullRank, rho: float, bound: Any) -> tuple[Tensor, Tensor]:
    """λ ← λ + ρ ∂ELBO/∂η by automatic differentiation in the expectation parameters η₁ = μ, η₂ = Σ + μμᵀ."""
    mean, precision = q.raw_mean[0], q.precision_weights[0]
    covariance = torch.linalg.inv(precision)
    eta1 = mean.clone().requires_grad_()
    eta2 = (covariance + torch.outer(mean, mean)).requires_grad_()
    Sigma = eta2 - torch.outer(eta1, eta1)
    kl = 0.5 * (Sigma.trace() + eta1 @ eta1 - len(mean) - torch.logdet(Sigma))
    by1, by2 = torch.autograd.grad(bound(eta1, Sigma) - kl, [eta1, eta2])
    h = precision @ mean + rho * by1
    Lambda = precision + rho * -2 * 0.5 * (by2 + by2.mT)
    return torch.linalg.solve(Lambda, h), Lambda


@pytest.mark.parametrize("kind", ["student_t", "poisson", "bernoulli", "gaussian"])
def test_one_step_is_the_natural_gradient_by_automatic_differentiation(kit: Any, kind: Any) -> None:
    model = kit.model("none", likelihood_z=LikelihoodSettings(kind=kind, noise=0.3, degrees=3.0))
    runs = kit.runs(model, 12)
    if kind == "poisson":
        runs = runs._replace(z=(3 * runs.z.abs()).floor())
    if kind == "bernoulli":
        runs = runs._replace(z=(runs.z > 0).double())
    q = kit.full_rank(0, 1, model.width)
    q.move(q.theta_mean, 0.3 * q.mean, q.precision._replace(weights=5 * q.precision_weights))
    phi = model.eta(runs.u).detach()

    def expected(mean: Tensor, Sigma: Tensor) -> Tensor:
        var = torch.einsum("bi,ij,bj->b", phi, Sigma, phi)
        return model.likelihood_z.expected_log_prob(runs.z, (phi @ mean)[:, None], var[:, None]).sum()

    mean, Lambda = natural_gradient_step(model, q, 0.3, expected)
    step = natural_step(q, runs_statistics(model, q, runs), 0.3)
    assert step.size == 0.3
    torch.testing.assert_close(q.precision_weights[0], Lambda, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(q.raw_mean[0], mean, rtol=1e-8, atol=1e-8)


def test_small_steps_on_a_student_t_raise_the_bound(kit: Any) -> None:
    model = kit.model("none", likelihood_z=STUDENT)
    runs = kit.runs(model, 30)
    q = FullRank(0, 1, model.width)
    bounds = []
    for _ in range(10):
        bounds.append(float(elbo(model, q, runs, None).total.detach()))
        natural_step(q, runs_statistics(model, q, runs), 0.2)
    assert all(after > before for before, after in pairwise(bounds))


def test_a_step_that_would_lose_positive_definiteness_is_damped_and_counted(kit: Any) -> None:
    model = kit.model("none", likelihood_z=STUDENT)
    runs = kit.runs(model, 40)
    runs = runs._replace(
        z=1.5 + 0 * runs.z
    )  # all are outliers to a q that knows better: the likelihood is convex there
    q = FullRank(0, 1, model.width)
    q.move(q.theta_mean, q.mean, q.precision._replace(weights=1000 * q.precision_weights))
    statistics = runs_statistics(model, q, runs)
    target = Arrow(*(a + b for a, b in zip(q.prior(), statistics.curvature, strict=True)))
    assert factorise(target) is None
    step = natural_step(q, statistics, 1.0)
    assert step.damped > 0
    assert 0 < step.size == 0.5**step.damped
    assert float(torch.linalg.eigvalsh(q.precision_weights).min()) > 0
    assert bool(q.mean.isfinite().all())


def statistics_like(q: FullRank, value: float, part: str) -> Statistics:
    zero = Statistics(
        Arrow(*(torch.zeros_like(x) for x in q.precision)), 0 * q.theta_mean, 0 * q.mean, torch.zeros((), dtype=F64)
    )
    if part in Arrow._fields:
        spoiled = torch.full_like(getattr(zero.curvature, part), value)
        return zero._replace(curvature=zero.curvature._replace(**{part: spoiled}))
    return zero._replace(**{part: torch.full_like(getattr(zero, part), value)})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", ["theta", "cross", "weights", "gradient_theta", "gradient_weights"])
def test_statistics_that_are_not_finite_leave_q_where_it_is(kit: Any, value: float, part: str) -> None:
    q = kit.full_rank(2, 1, 3)
    before = [x.clone() for x in state(q)]
    step = natural_step(q, statistics_like(q, value, part), 0.5)
    assert step.size == 0.0
    for mine, its in zip(before, state(q), strict=True):
        assert torch.equal(mine, its)


def test_a_hopeless_step_is_left_out_after_all_halvings(kit: Any) -> None:
    q = kit.full_rank(1, 1, 3)
    before = [x.clone() for x in state(q)]
    step = natural_step(q, statistics_like(q, -1e30, "theta"), 1.0)
    assert (step.size, step.damped) == (0.0, HALVINGS)
    for mine, its in zip(before, state(q), strict=True):
        assert torch.equal(mine, its)


def test_no_theta_moves_by_more_than_the_longest_step(kit: Any) -> None:
    q = kit.full_rank(2, 1, 3)
    before = q.theta_mean.clone()
    natural_step(q, statistics_like(q, 1e6, "gradient_theta"), 1.0)
    assert float((q.theta_mean - before).abs().max()) == pytest.approx(1.0)


@pytest.mark.parametrize("framed", [False, True])
def test_a_full_step_that_holds_theta_finds_the_weights_of_this_theta(kit: Any, framed: bool) -> None:
    model = kit.model("additive", outputs=2, prior=kit.prior(2))
    observations = kit.observations(model, 15, missing=True)
    frame = kit.frame(2, model.width, 40) if framed else None
    q, free = (kit.full_rank(2, 2, model.width, frame=frame) for _ in range(2))
    theta = q.theta_mean.clone()
    found = observations_statistics(model, q, observations, theta=theta[None])
    step = natural_step(q, found, 1.0, hold_theta=True)
    assert (step.size, step.damped) == (1.0, 0)
    assert torch.equal(q.theta_mean, theta)
    with torch.no_grad():
        unit = model.rows_of_theta(theta[None], 15)
        psi = model.design(model.phi_eta(observations.x, unit, None), model.delta(observations.x))[0].numpy()
        s2 = (model.likelihood_y.noise_variance() + model.residual_variance()).numpy()
    for k in range(2):
        known = ~np.isnan(observations.y[:, k].numpy())
        Lambda = np.eye(model.width) + psi[known].T @ psi[known] / s2[k]
        expected = np.linalg.solve(Lambda, psi[known].T @ observations.y[known, k].numpy() / s2[k])
        np.testing.assert_allclose(q.raw_mean[k], expected, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(q.raw_root[k] @ q.raw_root[k].mT, np.linalg.inv(Lambda), rtol=1e-8, atol=1e-10)
    natural_step(free, found, 1.0)  # the precision is that of a step in which θ̃ moves
    assert not torch.equal(free.theta_mean, theta)
    for mine, its in zip(q.precision, free.precision, strict=True):
        torch.testing.assert_close(mine, its)


def test_a_gradient_that_is_not_finite_leaves_q_where_it_is_also_where_theta_is_held(kit: Any) -> None:
    q = kit.full_rank(2, 1, 3)
    before = [x.clone() for x in state(q)]
    assert natural_step(q, statistics_like(q, float("nan"), "gradient_weights"), 1.0, hold_theta=True).size == 0.0
    for mine, its in zip(before, state(q), strict=True):
        assert torch.equal(mine, its)


def counts_far_away(kit: Any) -> tuple[CalibrationModel, Any]:
    model = kit.model("none", likelihood_z=LikelihoodSettings(kind="poisson"))
    runs = kit.runs(model, 30)
    return model, runs._replace(z=(60 * runs.u[:, :1].exp()).floor())


def test_a_judged_step_is_halved_until_it_does_not_lower_the_bound(kit: Any) -> None:
    model, runs = counts_far_away(kit)

    def bound(state: FullRank) -> float:
        return float(elbo(model, state, runs, None).total.detach())

    q, plain = FullRank(0, 1, model.width), FullRank(0, 1, model.width)
    before, statistics = bound(q), runs_statistics(model, q, runs)
    natural_step(plain, statistics, 1.0)
    assert not bound(plain) >= before  # a full step overshoots
    step = judged_step(q, statistics, 1.0, lambda: bound(q))
    assert step.damped > 0
    assert step.size == 0.5**step.damped
    assert bound(q) >= before
    once = FullRank(0, 1, model.width)
    natural_step(once, statistics, step.size)  # from where it started, not on top of the steps taken back
    for mine, its in zip(state(q), state(once), strict=True):
        torch.testing.assert_close(mine, its)


def test_a_judged_step_under_gaussian_noise_is_the_step(kit: Any) -> None:
    model = kit.model("none")
    runs = kit.runs(model, 30)
    q, plain = FullRank(0, 1, model.width), FullRank(0, 1, model.width)
    statistics = runs_statistics(model, q, runs)
    step = judged_step(q, statistics, 0.5, lambda: float(elbo(model, q, runs, None).total.detach()))
    assert step == natural_step(plain, statistics, 0.5)
    for mine, its in zip(state(q), state(plain), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("after", [-1.0, float("nan")])
def test_a_judged_step_that_no_halving_mends_is_left_out(kit: Any, after: float) -> None:
    model = kit.model("none")
    q = FullRank(0, 1, model.width)
    before = [x.clone() for x in state(q)]
    values = iter([0.0])
    step = judged_step(q, runs_statistics(model, q, kit.runs(model, 30)), 1.0, lambda: next(values, after))
    assert (step.size, step.damped) == (0.0, HALVINGS)
    for mine, its in zip(before, state(q), strict=True):
        assert torch.equal(mine, its)


# --- gradients through θ̃ ------------------------------------------------------------------------------------------

CASES = [
    ("none", False, ()),
    ("none", True, ()),
    ("additive", False, ()),
    ("additive", True, ()),
    ("general", False, ()),
    ("none", False, (2,)),
    ("additive", True, (2,)),
    ("general", False, (2,)),
]


@pytest.mark.parametrize(("kind", "free_kappa", "hidden"), CASES)
@pytest.mark.parametrize("likelihood", ["gaussian", "student_t"])
def test_gradients_are_those_of_the_expected_log_likelihood_in_the_mean_of_q(
    kit: Any, kind: Any, free_kappa: bool, hidden: tuple[int, ...], likelihood: Any
) -> None:
    model = kit.model(
        kind,
        prior=kit.prior(2),
        outputs=2,
        hidden=hidden,
        free_kappa=free_kappa,
        likelihood_y=LikelihoodSettings(kind=likelihood, noise=0.4),
    )
    observations = kit.observations(model, 5, missing=True, noise=True)
    q = kit.full_rank(2, 2, model.width, frame=kit.frame(2, model.eta.width, 9).widen(model.width - model.eta.width))
    options: dict[str, Any] = {"key": (3,), "samples": Samples(2, 2)}
    found = observations_statistics(model, q, observations, **options)

    def shifted(by_theta: Tensor, by_weights: Tensor) -> float:
        moved = clone(q)
        moved.move(q.theta_mean + by_theta, q.mean + by_weights, q.precision, q.factors)
        with torch.no_grad():
            return float(observations_log_likelihood(model, moved, observations, **options))

    # The samples of θ̃ shift with its mean, and E[w | θ̃] at a sample stays: its noise is held.
    with torch.no_grad():
        value = float(observations_log_likelihood(model, q, observations, **options))
    assert float(found.log_likelihood.detach()) == pytest.approx(value, rel=1e-12)
    step = 1e-4
    for seed in range(2):
        theta = kit.randn(70 + seed, 2)
        weights = kit.randn(80 + seed, 2, model.width) * (seed > 0)  # θ̃ alone, then both
        slope = (shifted(step * theta, step * weights) - shifted(-step * theta, -step * weights)) / (2 * step)
        expected = float(found.gradient_theta @ theta + (found.gradient_weights * weights).sum())
        assert expected == pytest.approx(slope, rel=2e-6, abs=2e-6)


@pytest.mark.parametrize("hidden", [(), (2,)])
def test_gradients_of_runs_are_those_of_the_expected_log_likelihood_too(kit: Any, hidden: tuple[int, ...]) -> None:
    model = kit.model("additive", outputs=2, hidden=hidden, likelihood_z=STUDENT)
    runs = kit.runs(model, 5, missing=True)
    q = kit.full_rank(1, 2, model.width, frame=kit.frame(2, model.eta.width, 9).widen(model.width - model.eta.width))
    found = runs_statistics(model, q, runs, key=(3,), samples=Samples(1, 3))
    weights, step = kit.randn(80, 2, model.width), 1e-4

    def shifted(size: float) -> float:
        moved = clone(q)
        moved.move(q.theta_mean, q.mean + size * weights, q.precision, q.factors)
        return float(runs_log_likelihood(model, moved, runs, key=(3,), samples=Samples(1, 3)).detach())

    assert not bool(found.gradient_theta.any())
    assert not bool(found.gradient_weights[:, model.eta.width :].any())
    slope = (shifted(step) - shifted(-step)) / (2 * step)
    assert float((found.gradient_weights * weights).sum()) == pytest.approx(slope, rel=2e-6)


@pytest.mark.parametrize("kind", ["none", "additive"])
@pytest.mark.parametrize("free_kappa", [False, True])
def test_curvature_is_that_of_gauss_and_newton(kit: Any, kind: Any, free_kappa: bool) -> None:
    """Σ p JJᵀ with J = ∂E[f]/∂(θ̃, w), by automatic differentiation of f itself."""
    model = kit.model(kind, prior=kit.prior(2), outputs=2, free_kappa=free_kappa)
    observations = kit.observations(model, 4, missing=True, noise=True)
    q = kit.full_rank(2, 2, model.width)
    found = observations_statistics(model, q, observations, theta=q.theta_mean[None])
    precision = model.likelihood_y.precision(observations.y, observations.noise, model.residual_variance()).detach()

    def f(theta: Tensor, w: Tensor) -> Tensor:  # (B, K)
        unit = model.rows_of_theta(theta[None], 4)
        phi_delta = None if model.delta is None else model.delta(observations.x)
        return (model.design(model.phi_eta(observations.x, unit, None), phi_delta) @ w.mT)[0]

    by_theta, by_w = torch.autograd.functional.jacobian(f, (q.theta_mean, q.raw_mean))  # (B, K, d2), (B, K, K, D)
    J = torch.cat([by_theta, by_w.flatten(2)], -1)  # (B, K, d2 + KD)
    expected = torch.einsum("bki,bk,bkj->ij", J, precision, J)
    np.testing.assert_allclose(kit.dense_arrow(found.curvature), expected, rtol=1e-9, atol=1e-10)


def test_curvature_under_g_is_that_of_gauss_and_newton_for_one_output(kit: Any) -> None:
    model = kit.model("general", prior=kit.prior(2))
    observations = kit.observations(model, 4)
    q = kit.full_rank(2, 1, model.width)
    theta = q.theta_mean[None]
    found = observations_statistics(model, q, observations, key=(3,), theta=theta)
    # Rows of f = η + φ_g(η)·w_g at the sampled w_η and the mean of w_g given it.
    noise = model_noise(model, theta, (3,))
    first = q.sample(noise, theta)[0, :, model.columns_eta]
    identity = torch.eye(model.width - model.eta.width, dtype=F64)
    second = q.moments_given(identity, first[None], theta)[0][0].mT  # E[w_g | …] (K, M_g)

    def f(tilde: Tensor, w: Tensor) -> Tensor:
        phi = model.phi_eta(observations.x, model.rows_of_theta(tilde[None], 4), None)
        eta = phi @ w[:, model.columns_eta].mT
        return (eta + model.phi_g(eta, observations.x, None) @ w[:, model.eta.width :].mT)[0, :, 0]

    by_theta, by_w = torch.autograd.functional.jacobian(f, (theta[0], torch.cat([first, second], 1)))
    J = torch.cat([by_theta, by_w.flatten(1)], -1)
    p = model.likelihood_y.precision(observations.y, None, model.residual_variance()).detach()[:, 0]
    np.testing.assert_allclose(kit.dense_arrow(found.curvature), (J.mT * p) @ J, rtol=1e-9, atol=1e-10)


def model_noise(model: CalibrationModel, theta: Tensor, key: tuple[int, ...]) -> Tensor:
    shape = (len(theta), model.outputs, model.width)
    return shared_normal((*key, ETA_NOISE), shape, dtype=F64, device=theta.device)


# --- sums -----------------------------------------------------------------------------------------------------------


def parts(statistics: Statistics) -> list[Tensor]:
    return [*statistics.curvature, statistics.gradient_theta, statistics.gradient_weights, statistics.log_likelihood]


@pytest.mark.parametrize(("kind", "hidden"), [("additive", ()), ("general", (2,))])
def test_batches_scaled_to_all_rows_average_to_all_rows(kit: Any, kind: Any, hidden: tuple[int, ...]) -> None:
    model = kit.model(kind, hidden=hidden, likelihood_y=STUDENT)
    observations = kit.observations(model, 12)
    q = kit.full_rank(1, 1, model.width)

    def found(batch: Observations) -> list[Tensor]:
        scaled = observations_statistics(model, q, batch, key=(4,)).scaled(12 / len(batch.x))
        return [part.detach() for part in parts(scaled)]

    whole = found(observations)
    # An epoch: three batches of four rows from a permutation, the mean of which is exactly the whole.
    order = torch.randperm(12, generator=kit.generator(1))
    batches = [found(take(observations, chosen)) for chosen in order.split(4)]
    for i, expected in enumerate(whole):
        torch.testing.assert_close(torch.stack([b[i] for b in batches]).mean(0), expected, rtol=1e-9, atol=1e-9)
    # Unequal blocks add up without scales.
    total: Statistics | None = None
    for chosen in order.split([1, 7, 0, 4]):
        block = observations_statistics(model, q, take(observations, chosen), key=(4,))
        total = block if total is None else total.plus(block)
    assert total is not None
    for mine, expected in zip(parts(total), whole, strict=True):
        torch.testing.assert_close(mine.detach(), expected, rtol=1e-9, atol=1e-9)


def test_rows_of_weight_zero_and_missing_rows_add_nothing(kit: Any) -> None:
    model = kit.model("additive")
    observations = kit.observations(model, 8)
    q = kit.full_rank(1, 1, model.width)
    whole = observations_statistics(model, q, take(observations, slice(0, 6)), key=(4,))
    weight = torch.ones(8, dtype=F64)
    weight[6:] = 0
    y = observations.y.clone()
    y[6:] = torch.nan
    jacobian = torch.where(y.isnan(), 0.0, observations.log_jacobian)
    for padded in (observations._replace(weight=weight), observations._replace(y=y, log_jacobian=jacobian)):
        for mine, its in zip(parts(observations_statistics(model, q, padded, key=(4,))), parts(whole), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


def test_the_log_likelihood_of_the_statistics_has_the_gradient_of_the_hyperparameters(kit: Any) -> None:
    model = kit.model("additive", frequencies="learned", hidden=(2,), free_kappa=True)
    observations, runs = kit.observations(model, 6), kit.runs(model, 6)
    q = kit.full_rank(1, 1, model.width)
    parameters = [p for p in model.parameters() if p.numel()]
    pairs = [
        (
            observations_statistics(model, q, observations, key=(4,)).log_likelihood,
            observations_log_likelihood(model, q, observations, key=(4,)),
        ),
        (
            runs_statistics(model, q, runs, key=(4,)).log_likelihood,
            runs_log_likelihood(model, q, runs, key=(4,)),
        ),
    ]
    for ours, theirs in pairs:
        mine = torch.autograd.grad(ours, parameters, allow_unused=True, materialize_grads=True)
        its = torch.autograd.grad(theirs, parameters, allow_unused=True, materialize_grads=True)
        assert sum(float(g.abs().max()) > 1e-6 for g in mine) > 5
        for a, b in zip(mine, its, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
