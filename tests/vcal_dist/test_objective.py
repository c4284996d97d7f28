"""The evidence lower bound and the collapsed evidence: below and equal to exact evidences, and right in every split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from storage.problem import Problem
from vcal_dist.batches import Observations, Runs, Scaling, take
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.collapsed import gram, log_evidence
from vcal_dist.features import FeatureSettings
from vcal_dist.fullrank import FullRank
from vcal_dist.gp import Draw, GPSettings
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.natural import natural_step, observations_statistics, runs_statistics
from vcal_dist.objective import (
    CollapsedTheta,
    Samples,
    collapsed_observations,
    collapsed_runs,
    elbo,
    observations_log_likelihood,
    runs_gram,
    runs_log_likelihood,
    sample_theta,
)
from vcal_dist.transforms import OutputScaling, TransformSettings
from vcal_dist.weights import MeanField, Weights

F64 = torch.float64
MANY = Samples(400, 1)


def jacobian(*batches: Runs | Observations) -> float:
    return sum(float(batch.log_jacobian.sum()) for batch in batches)


# --- exact evidences ------------------------------------------------------------------------------------------------


@torch.no_grad()
def evidence_given_theta(model: CalibrationModel, runs: Runs, observations: Observations, theta: Tensor) -> float:
    """log p(z, y | θ̃) as one dense Gaussian for every output; none and additive."""
    phi_z = model.eta(runs.u)
    phi_y = model.kappa * model.phi_eta(observations.x, model.rows_of_theta(theta[None], len(observations.x)), None)[0]
    design = np.concatenate([phi_z.numpy(), phi_y.numpy()])
    covariance = design @ design.T
    N = len(runs.u)
    if model.delta is not None:
        phi_delta = model.delta(observations.x).numpy()
        covariance[N:, N:] += phi_delta @ phi_delta.T
    s2_z, s2_y = (lik.noise_variance().numpy() for lik in (model.likelihood_z, model.likelihood_y))  # type: ignore[operator]
    extra = model.residual_variance()
    total = 0.0
    for k in range(model.outputs):
        own = np.zeros(len(observations.x)) if observations.noise is None else observations.noise[:, k].numpy() ** 2
        noise = s2_y[k] + own + (0.0 if extra is None else float(extra[k]))
        values = np.concatenate([runs.z[:, k].numpy(), observations.y[:, k].numpy()])
        known = ~np.isnan(values)
        with_noise = covariance + np.diag(np.concatenate([np.full(N, s2_z[k]), noise]))
        dense = scipy.stats.multivariate_normal(np.zeros(known.sum()), with_noise[np.ix_(known, known)])
        total += float(dense.logpdf(values[known]))
    return total


def exact_evidence(model: CalibrationModel, runs: Runs, observations: Observations) -> float:
    """log p(z, y), θ̃ (one-dimensional) by the trapezoidal rule, in the user's units."""
    grid = np.linspace(-7, 7, 141)
    terms = [evidence_given_theta(model, runs, observations, torch.tensor([t])) for t in grid]
    terms = np.array(terms) + scipy.stats.norm.logpdf(grid) + np.log(grid[1] - grid[0])
    return float(scipy.special.logsumexp(terms)) + jacobian(runs, observations)


@torch.no_grad()
def exact_evidence_of_g(model: CalibrationModel, runs: Runs, observations: Observations) -> float:
    """log p(z, y) under g for one output and two features of η: θ̃ and W_η on a grid, W_g as dense Gaussians."""
    nodes, log_weight = scipy.special.roots_hermitenorm(60)
    log_weight = np.log(log_weight) - 0.5 * np.log(2 * np.pi)
    s2_z = model.likelihood_z.noise_variance()  # type: ignore[operator]
    precision = model.likelihood_y.precision(observations.y, None, model.residual_variance())[:, 0]  # type: ignore[operator]
    w = torch.cartesian_prod(torch.tensor(nodes), torch.tensor(nodes))  # (Q, 2)
    prior_w = (log_weight[:, None] + log_weight[None, :]).ravel()
    residual = runs.z - model.eta(runs.u) @ w.mT  # (N, Q)
    of_runs = (-0.5 * residual.square() / s2_z - 0.5 * torch.log(2 * torch.pi * s2_z)).sum(0).numpy()
    terms = []
    for t, prior_t in zip(nodes, log_weight, strict=True):
        unit = model.rows_of_theta(torch.tensor([[t]]), len(observations.x))
        eta = (model.phi_eta(observations.x, unit, None)[0] @ w.mT).mT.unsqueeze(-1)  # (Q, B, 1)
        phi_g = model.phi_g(eta, observations.x, None)
        covariance = phi_g @ phi_g.mT + torch.diag(1 / precision)
        dense = torch.distributions.MultivariateNormal(eta[..., 0], covariance)
        terms.append(dense.log_prob(observations.y[:, 0]).numpy() + of_runs + prior_w + prior_t)
    return float(scipy.special.logsumexp(np.stack(terms))) + jacobian(runs, observations)


def settled(model: CalibrationModel, runs: Runs, observations: Observations, steps: int = 25) -> FullRank:
    """A q close to the posterior, so that a wrong bound has no slack to hide in."""
    q = FullRank(model.prior.dim, model.outputs, model.width)
    for step in range(steps):
        found = runs_statistics(model, q, runs, key=(step,), samples=Samples(1, 8))
        found = found.plus(observations_statistics(model, q, observations, key=(step,), samples=Samples(32, 1)))
        natural_step(q, found, 0.5)
    return q


def factorised(q: FullRank) -> MeanField:
    """The mean-field q with the same means and conditional variances."""
    other = MeanField(q.theta_dim, q.outputs, q.width, dtype=F64)
    with torch.no_grad():
        other.theta_mean.copy_(q.theta_mean)
        other.theta_log_sd.copy_(-0.5 * q.precision_theta.diagonal().log())
        other.mean.copy_(q.raw_mean)
        other.log_sd.copy_(-0.5 * q.precision_weights.diagonal(dim1=1, dim2=2).log())
    return other


@torch.no_grad()
def bound(model: CalibrationModel, q: Weights, runs: Runs | None, observations: Observations | None) -> float:
    return float(elbo(model, q, runs, observations, key=(99,), samples=MANY).total)


@pytest.mark.parametrize(
    ("kind", "free_kappa"),
    [("none", False), ("none", True), ("additive", False), ("additive", True), ("general", False)],
)
def test_the_bound_lies_below_the_evidence_and_comes_close_where_q_is_right(
    kit: Any, kind: Any, free_kappa: bool
) -> None:
    # θ̃ is Gaussian enough here for a Gaussian q to be nearly exact.
    prior = kit.prior(1, "normal", sd=0.08)
    model = kit.model(kind, prior=prior, controls=1, features=2, free_kappa=free_kappa)
    runs, observations = kit.runs(model, 6), kit.observations(model, 5)
    exact = (exact_evidence_of_g if kind == "general" else exact_evidence)(model, runs, observations)
    good = settled(model, runs, observations)
    slack = 1.0 if kind == "general" else 0.05
    assert exact - slack < bound(model, good, runs, observations) < exact + 0.01
    assert bound(model, factorised(good), runs, observations) < exact
    for seed in range(3):
        assert bound(model, kit.full_rank(1, 1, model.width, seed=seed), runs, observations) < exact
        assert bound(model, kit.mean_field(1, 1, model.width, seed=seed), runs, observations) < exact


def test_the_bound_of_two_outputs_with_noise_of_their_own_and_gaps_lies_below_the_evidence(kit: Any) -> None:
    model = kit.model("additive", prior=kit.prior(1, "normal", sd=0.08), outputs=2)
    runs = kit.runs(model, 7, missing=True)
    observations = kit.observations(model, 6, missing=True, noise=True)
    exact = exact_evidence(model, runs, observations)
    good = settled(model, runs, observations)
    assert exact - 0.1 < bound(model, good, runs, observations) < exact + 0.01
    assert bound(model, factorised(good), runs, observations) < exact


def test_the_bound_of_an_emulator_on_its_own_is_its_evidence(kit: Any) -> None:
    model = kit.model("none", outputs=2)
    runs = kit.runs(model, 15, missing=True)
    q = FullRank(0, 2, model.width)
    with torch.no_grad():
        q.condition(runs_gram(model, runs, None))
        collapsed = collapsed_runs(model, runs, None)
    phi = model.eta(runs.u).detach().numpy()
    dense = jacobian(runs)
    for k, s2 in enumerate(model.likelihood_z.noise_variance().tolist()):
        known = ~np.isnan(runs.z[:, k].numpy())
        covariance = phi[known] @ phi[known].T + s2 * np.eye(known.sum())
        dense += scipy.stats.multivariate_normal(np.zeros(known.sum()), covariance).logpdf(runs.z[:, k].numpy()[known])
    assert bound(model, q, runs, None) == pytest.approx(dense, rel=1e-9)
    assert float(collapsed.value) == pytest.approx(dense, rel=1e-11)
    assert float(collapsed.rows) == 15
    away = FullRank(0, 2, model.width)
    away.move(q.theta_mean, q.mean + 0.01, q.precision)
    assert bound(model, away, runs, None) < dense - 1e-6


@pytest.mark.parametrize("kind", ["none", "additive"])
@pytest.mark.parametrize("free_kappa", [False, True])
@pytest.mark.parametrize("rows", [3, 30])  # fewer than η has weights, and more
def test_the_collapsed_evidence_of_observations_is_the_dense_one(
    kit: Any, kind: Any, free_kappa: bool, rows: int
) -> None:
    model = kit.model(kind, outputs=2, free_kappa=free_kappa)
    observations = kit.observations(model, rows, missing=True, noise=True)
    assert (rows < model.eta.width) == (rows == 3)
    frame = kit.frame(2, model.eta.width, 30)
    theta = torch.tensor([0.4], dtype=F64)
    with torch.no_grad():
        value = collapsed_observations(model, CollapsedTheta(model, frame, theta), observations, None).value
        unit = model.rows_of_theta(theta[None], rows)
        phi = float(model.kappa) * model.phi_eta(observations.x, unit, None)[0].numpy()
        phi_delta = np.zeros((rows, 1)) if model.delta is None else model.delta(observations.x).numpy()
        s2 = model.likelihood_y.noise_variance() + model.kappa**2 * model.likelihood_z.noise_variance()
    dense = jacobian(observations)
    for k in range(2):
        known = ~np.isnan(observations.y[:, k].numpy())
        root = phi @ frame.root[k].numpy()
        noise = float(s2[k]) + observations.noise[:, k].numpy() ** 2
        covariance = (root @ root.T + phi_delta @ phi_delta.T + np.diag(noise))[np.ix_(known, known)]
        mean = (phi @ frame.mean[k].numpy())[known]
        dense += scipy.stats.multivariate_normal(mean, covariance).logpdf(observations.y[:, k].numpy()[known])
    assert float(value) == pytest.approx(dense, rel=1e-10)


def test_the_collapsed_evidence_under_g_with_samples_of_v_lies_below_that_of_the_runs_and_theta(kit: Any) -> None:
    model = kit.model("general", controls=1, features=2)
    observations = kit.observations(model, 4)
    frame, theta = kit.frame(1, 2, 30), torch.tensor([0.4], dtype=F64)
    point = CollapsedTheta(model, frame, theta)
    assert point.v is not None
    nodes, weight = scipy.special.roots_hermitenorm(60)
    log_weight = np.log(weight / np.sqrt(2 * np.pi))
    v = torch.cartesian_prod(torch.tensor(nodes), torch.tensor(nodes))
    with torch.no_grad():
        phi = model.phi_eta(observations.x, model.rows_of_theta(theta[None], 4), None)[0]
        eta = (phi @ (frame.mean[0] + v @ frame.root[0].mT).mT).mT.unsqueeze(-1)  # (Q, B, 1)
        phi_g = model.phi_g(eta, observations.x, None)
        precision = model.likelihood_y.precision(observations.y, None, model.residual_variance())[:, 0]
        dense = torch.distributions.MultivariateNormal(eta[..., 0], phi_g @ phi_g.mT + torch.diag(1 / precision))
        terms = dense.log_prob(observations.y[:, 0]).numpy() + (log_weight[:, None] + log_weight).ravel()
        exact = float(scipy.special.logsumexp(terms)) + jacobian(observations)
        for seed in range(3):
            point.v.mean.copy_(0.3 * kit.randn(seed, 1, 2))
            point.v.log_sd.copy_(-0.5 + 0.3 * kit.randn(seed + 9, 1, 2))
            value = collapsed_observations(model, point, observations, Draw((1,), 3000)).value
            assert float(value + point.log_prior() + 0.5 * theta.square().sum()) < exact


# --- splits and units -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "hidden"), [("additive", ()), ("general", (2,))])
@pytest.mark.parametrize("family", ["full_rank", "mean_field"])
def test_batches_and_ranks_add_up_to_the_whole(kit: Any, kind: Any, hidden: tuple[int, ...], family: str) -> None:
    model = kit.model(kind, hidden=hidden, outputs=2)
    runs, observations = kit.runs(model, 12, missing=True), kit.observations(model, 8, missing=True)
    q = getattr(kit, family)(1, 2, model.width)
    options: dict[str, Any] = {"key": (2,), "samples": Samples(2, 2)}
    with torch.no_grad():
        whole = elbo(model, q, runs, observations, **options)
        torch.testing.assert_close(whole.kl, q.kl() + model.kl())
        torch.testing.assert_close(whole.total, whole.runs + whole.observations - whole.kl)
        # The batches of an epoch, each scaled to all rows, average to the whole: the bound is unbiased.
        order = torch.randperm(12, generator=kit.generator(1))
        batches = [
            elbo(model, q, take(runs, a), take(observations, b), scale_runs=3.0, scale_observations=2.0, **options)
            for a in order.split(4)
            for b in order[order < 8].split(4)
        ]
        torch.testing.assert_close(torch.stack([b.total for b in batches]).mean(), whole.total, rtol=1e-10, atol=1e-9)
        # A rank's loss −W·Σ_local + KL, averaged over W ranks with unequal and empty shares, is −ELBO.
        shares = list(zip(order.split([7, 0, 5]), order[order < 8].split([0, 8, 0]), strict=True))
        losses = [
            -3 * runs_log_likelihood(model, q, take(runs, a), **options)
            - 3 * observations_log_likelihood(model, q, take(observations, b), **options)
            + q.kl()
            + model.kl()
            for a, b in shares
        ]
        torch.testing.assert_close(torch.stack(losses).mean(), -whole.total, rtol=1e-10, atol=1e-9)


def test_rows_of_weight_zero_change_nothing(kit: Any) -> None:
    model = kit.model("additive", outputs=2)
    runs, observations = kit.runs(model, 9), kit.observations(model, 9)
    weight = torch.ones(9, dtype=F64)
    weight[6:] = 0.0
    q = kit.full_rank(1, 2, model.width)
    point = CollapsedTheta(model, kit.frame(2, model.eta.width, 30), torch.zeros(1))
    first = slice(0, 6)
    with torch.no_grad():
        padded = runs._replace(weight=weight), observations._replace(weight=weight)
        short = take(runs, first), take(observations, first)
        torch.testing.assert_close(elbo(model, q, *padded).total, elbo(model, q, *short).total)
        pairs = [
            (collapsed_runs(model, padded[0], None), collapsed_runs(model, short[0], None)),
            (
                collapsed_observations(model, point, padded[1], None),
                collapsed_observations(model, point, short[1], None),
            ),
        ]
        for mine, its in pairs:
            torch.testing.assert_close(mine.value, its.value)
            assert float(mine.rows) == float(its.rows) == 6


@pytest.mark.parametrize("likelihood", ["gaussian", "student_t"])
def test_a_missing_output_is_an_output_left_out_of_that_row(kit: Any, likelihood: Any) -> None:
    settings = LikelihoodSettings(kind=likelihood, noise=0.3)
    model = kit.model("additive", outputs=2, likelihood_z=settings, likelihood_y=settings)
    runs, observations = kit.runs(model, 6), kit.observations(model, 6, noise=True)
    q = kit.full_rank(1, 2, model.width)
    theta = torch.zeros(1, 1, dtype=F64)
    with torch.no_grad():
        of_runs = model.likelihood_z.expected_log_prob(runs.z, *q.moments(model.eta(runs.u), model.columns_eta))
        of_runs = of_runs + runs.log_jacobian  # (B, K)
        gaps = [(2, 0), (5, 1), (5, 0)]
        z, log_jacobian = runs.z.clone(), runs.log_jacobian.clone()
        for gap in gaps:
            z[gap], log_jacobian[gap] = torch.nan, 0.0
        found = runs_log_likelihood(model, q, runs._replace(z=z, log_jacobian=log_jacobian))
        torch.testing.assert_close(found, of_runs.sum() - sum(of_runs[gap] for gap in gaps))
        y = observations.y.clone()
        f = model.predict(q, observations.x, theta, model.rows_of_theta(theta, 6), None)
        noise = observations.noise
        of_rows = model.likelihood_y.expected_log_prob(y, f.mean, f.var, noise, model.residual_variance())[0]
        y[2, 0] = torch.nan
        y[3] = torch.nan
        noise = noise.clone()
        noise[2, 0] = torch.nan  # an output that was not measured has no error bar either
        left = model.likelihood_y.expected_log_prob(y, f.mean, f.var, noise, model.residual_variance())[0]
        torch.testing.assert_close(left.sum(), of_rows.sum() - of_rows[2, 0] - of_rows[3].sum())


def problem_of(outputs: int) -> Problem:
    return Problem.model_validate(
        {
            "name": "units",
            "control_inputs": [{"name": "x", "bounds": (0, 2)}],
            "calibration_inputs": [{"name": "t", "bounds": (-1, 1)}],
            "outputs": [{"name": f"o{k}", "missing": True} for k in range(outputs)],
        }
    )


@pytest.mark.parametrize("kind", ["none", "log", "sqrt"])
def test_other_units_of_the_outputs_shift_every_bound_by_the_log_of_their_factor(kit: Any, kind: Any) -> None:
    a, K, N, n = 40.0, 2, 9, 5
    problem, model = problem_of(K), kit.model("additive", controls=1, outputs=K)
    x, t, z = 2 * kit.rand(1, N, 1), 2 * kit.rand(2, N, 1) - 1, kit.randn(3, N, K).exp()
    x_y, y, noise = 2 * kit.rand(4, n, 1), kit.randn(5, n, K).exp(), 0.1 + kit.rand(6, n, K)
    y[1, 0] = torch.nan
    q = kit.full_rank(1, K, model.width)
    point = CollapsedTheta(model, kit.frame(K, model.eta.width, 30), torch.zeros(1))
    values = []
    for factor in (1.0, a):
        outputs = OutputScaling.from_runs(factor * z, [TransformSettings(kind=kind)] * K, ["o0", "o1"])
        scaling = Scaling(problem, outputs, F64)
        runs = scaling.runs(x, t, factor * z)
        observations = scaling.observations(x_y, factor * y, factor * noise)
        with torch.no_grad():
            parts = elbo(model, q, runs, observations, samples=Samples(4, 1))
            of_runs = collapsed_runs(model, runs, None).value
            of_observations = collapsed_observations(model, point, observations, None).value
        values.append([float(v) for v in (parts.runs, parts.observations, of_runs, of_observations)])
    shifts = np.array(values[1]) - np.array(values[0])
    np.testing.assert_allclose(shifts, -np.log(a) * np.array([N * K, n * K - 1, N * K, n * K - 1]), rtol=1e-9)


@pytest.mark.parametrize("kind", ["none", "additive", "general"])
@pytest.mark.parametrize("hidden", [(), (2,)])
@pytest.mark.parametrize("family", ["full_rank", "mean_field"])
def test_float32_features_give_the_same_bound(kit: Any, kind: Any, hidden: tuple[int, ...], family: str) -> None:
    values = []
    for dtype in (torch.float32, F64):
        model = kit.model(kind, hidden=hidden, outputs=2, dtype=dtype)
        q = getattr(kit, family)(1, 2, model.width)
        q = q.to(dtype) if family == "mean_field" else q
        runs, observations = kit.runs(model, 6, missing=True), kit.observations(model, 6, missing=True)
        total = elbo(model, q, runs, observations, key=(1,), samples=Samples(2, 2)).total
        total.backward()
        values.append(float(total.detach()))
    assert values[0] == pytest.approx(values[1], rel=1e-3)


def test_samples_of_theta_are_antithetic_pairs_with_hidden_samples_for_each(kit: Any) -> None:
    q = kit.full_rank(2, 1, 3)
    theta = sample_theta(q, Samples(4, 3), (1,))
    assert theta.shape == (12, 2)
    distinct = theta[::3]
    torch.testing.assert_close(theta, distinct.repeat_interleave(3, 0))
    torch.testing.assert_close(distinct.mean(0), q.theta_mean)
    assert len(distinct.unique(dim=0)) == 4
    assert len(sample_theta(q, Samples(3, 1), (1,)).unique(dim=0)) == 3


# --- hidden layers --------------------------------------------------------------------------------------------------


def deep_case(kit: Any) -> tuple[CalibrationModel, Runs]:
    """One hidden unit with two weights, and runs that no smooth function follows."""
    eta = GPSettings(
        features=FeatureSettings(features=4),
        lengthscale=0.4,
        hidden=(1,),
        hidden_features=FeatureSettings(features=2),
        hidden_amplitude=1.0,
        mean="zero",
        feed_inputs=False,
    )
    settings = ModelSettings(eta=eta, discrepancy="none", likelihood_z=LikelihoodSettings(noise=0.3))
    model = CalibrationModel(1, kit.prior(1), 1, settings, dtype=F64)
    runs = kit.runs(model, 6)
    alternating = torch.tensor([1.0, -1.0] * 3, dtype=F64)[:, None]
    return model, runs._replace(u=0.5 + 0.01 * runs.u, z=alternating, log_jacobian=torch.zeros(6, 1, dtype=F64))


@torch.no_grad()
def exact_deep_evidence(model: CalibrationModel, runs: Runs) -> tuple[float, Tensor, Tensor]:
    """log p(z) with the two hidden weights on a grid; their posterior mean and sd too."""
    axis = torch.linspace(-6, 6, 121, dtype=F64)
    w = torch.cartesian_prod(axis, axis)  # (Q, 2)
    h = (model.eta.hidden[0].features(runs.u) @ w.mT).mT.unsqueeze(-1)  # (Q, B, 1)
    phi = model.eta.last(h)
    covariance = phi @ phi.mT + model.likelihood_z.noise_variance() * torch.eye(6, dtype=F64)  # type: ignore[operator]
    dense = torch.distributions.MultivariateNormal(torch.zeros(6, dtype=F64), covariance).log_prob(runs.z[:, 0])
    terms = dense - 0.5 * w.square().sum(1) - np.log(2 * np.pi) + 2 * torch.log(axis[1] - axis[0])
    posterior = terms.softmax(0)
    mean = posterior @ w
    return float(terms.logsumexp(0)), mean, (posterior @ (w - mean).square()).sqrt()


def hidden_states(kit: Any, mean: Tensor, sd: Tensor) -> list[tuple[Tensor, Tensor]]:
    prior = torch.zeros(1, 2, dtype=F64), torch.zeros(1, 2, dtype=F64)
    moved = [(kit.randn(i, 1, 2), -0.5 + 0.5 * kit.randn(i + 5, 1, 2)) for i in range(2)]
    return [prior, (mean[None], sd.log()[None]), *moved]


def test_a_collapsed_deep_model_with_shared_samples_stays_below_the_evidence(kit: Any) -> None:
    model, runs = deep_case(kit)
    smooth = runs._replace(u=kit.runs(model, 6).u, z=kit.runs(model, 6).u[:, :1])
    for batch in (runs, smooth):
        exact, mean, sd = exact_deep_evidence(model, batch)
        for weights_mean, log_sd in hidden_states(kit, mean, sd):
            with torch.no_grad():
                model.eta.hidden[0].weights.mean.copy_(weights_mean)
                model.eta.hidden[0].weights.log_sd.copy_(log_sd)
                value = float(collapsed_runs(model, batch, Draw((1,), 4000)).value - model.kl())
            assert value < exact


@torch.no_grad()
def mean_collapsed(model: CalibrationModel, runs: Runs, samples: int, *, per_row: bool) -> float:
    """The collapsed bound from that many samples of hidden layers, its mean over many draws of them."""
    rows = runs.row if per_row else None
    values = [float(collapsed_runs(model, runs, Draw((i,), samples, rows)).value) for i in range(800 // samples)]
    return float(np.mean(values) - model.kl())


@pytest.mark.parametrize("samples", [1, 4, 40])
def test_few_shared_samples_of_hidden_layers_stay_below_the_evidence_where_noise_of_every_row_does_not(
    kit: Any, samples: int
) -> None:
    model, runs = deep_case(kit)
    exact, _, _ = exact_deep_evidence(model, runs)
    with torch.no_grad():
        model.eta.hidden[0].weights.log_sd.zero_()  # q of the hidden layer is its prior
        model.eta.hidden[0].weights.mean.zero_()
    assert mean_collapsed(model, runs, samples, per_row=False) < exact
    if samples == 1:  # rows at one place would differ: this is no bound
        assert mean_collapsed(model, runs, samples, per_row=True) > exact + 5


def test_weights_that_cannot_follow_the_sample_have_less_evidence_than_those_that_can(kit: Any) -> None:
    """The evidence of the mean sums over samples of hidden layers, and the mean of the samples' evidences."""
    model = kit.model("none", hidden=(2,), outputs=2)
    runs = kit.runs(model, 12, missing=True)
    with torch.no_grad():
        phi = model.eta(runs.u, Draw((3,), 16)).unsqueeze(-3)  # (S, 1, B, M)
        each = gram(phi, runs.z.mT, model.likelihood_z.precision(runs.z).mT)
        following = float(log_evidence(each).sum(-1).mean() + runs.log_jacobian.sum())
        mean_sums = each._replace(G=each.G.mean(0), b=each.b.mean(0))
        held = float(log_evidence(mean_sums).sum() + runs.log_jacobian.sum())
        found = float(collapsed_runs(model, runs, Draw((3,), 16)).value)
    assert found == pytest.approx(held, rel=1e-10)
    assert held < following - 0.1


def test_the_bound_of_a_deep_model_with_noise_of_its_own_for_every_row_stays_below_the_evidence(kit: Any) -> None:
    model, runs = deep_case(kit)
    smooth = runs._replace(u=kit.runs(model, 6).u, z=kit.runs(model, 6).u[:, :1])
    for batch in (runs, smooth):
        exact, mean, sd = exact_deep_evidence(model, batch)
        for weights_mean, log_sd in hidden_states(kit, mean, sd):
            with torch.no_grad():
                model.eta.hidden[0].weights.mean.copy_(weights_mean)
                model.eta.hidden[0].weights.log_sd.copy_(log_sd)
                phi = model.eta(batch.u, Draw((1,), 200, batch.row)).unsqueeze(-3)  # (S, 1, B, M)
                sums = gram(phi, batch.z.mT, model.likelihood_z.precision(batch.z).mT)
                # The best q(w) given q of the hidden layer: the mean of the statistics over samples.
                sums = sums._replace(G=sums.G.mean(0), b=sums.b.mean(0))
                q = FullRank(0, 1, model.width)
                q.condition(sums)
                found = elbo(model, q, batch, None, key=(1,), samples=Samples(1, 200)).total
            assert float(found) < exact
            assert float(found) == pytest.approx(float(log_evidence(sums).sum() - model.kl().detach()), rel=1e-9)
