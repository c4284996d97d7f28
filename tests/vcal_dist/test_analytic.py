"""The exact posterior against dense Gaussians of all rows, the fitting code's evidence, quadrature and sampling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

from storage.priors import Normal, Prior, Uniform
from vcal_dist import analytic
from vcal_dist.analytic import ExactPosterior, Grid, modes, total_variation
from vcal_dist.batches import Observations, Runs
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings
from vcal_dist.gp import GPSettings
from vcal_dist.likelihoods import Gaussian, LikelihoodSettings
from vcal_dist.objective import CollapsedTheta, collapsed_observations
from vcal_dist.passes import compress
from vcal_dist.priors import ThetaPrior
from vcal_dist.theta import ThetaPosterior

PRIORS: list[Prior] = [Normal(mean=0.5, sd=0.2), Uniform(low=0.0, high=1.0), Normal(mean=0.3, sd=0.1)]


def prior(dim: int) -> ThetaPrior:
    return ThetaPrior(PRIORS[:dim], [(0.0, 1.0)] * dim, [f"t{j}" for j in range(dim)])


def make_model(parameters: int = 1, outputs: int = 1, features: int = 10, **settings: Any) -> CalibrationModel:
    gp = GPSettings(features=FeatureSettings(features=features, constant=0.5), lengthscale=0.6)
    settings = {
        "eta": gp,
        "delta": GPSettings(features=FeatureSettings(features=6, linear=0.3), lengthscale=0.8, amplitude=0.3),
        "likelihood_z": LikelihoodSettings(noise=0.05),
        "likelihood_y": LikelihoodSettings(noise=0.1),
        "seed": 3,
    } | settings
    model = CalibrationModel(2, prior(parameters), outputs, ModelSettings(**settings), dtype=torch.float64)
    with torch.no_grad():
        for likelihood in (model.likelihood_z, model.likelihood_y):
            if isinstance(likelihood, Gaussian):  # every output its own noise
                likelihood.raw_noise += torch.linspace(0, 0.4, outputs, dtype=torch.float64)
        if settings.get("free_kappa"):
            model.kappa.fill_(1.3)
    return model


def make_data(
    model: CalibrationModel, runs: int = 12, observations: int = 9, seed: int = 0
) -> tuple[Runs, Observations]:
    """Smooth outputs with gaps, own noises and uneven weights, so that nothing of it can be forgotten."""
    g = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    u, x = uniform(runs, model.eta.inputs), uniform(observations, 2)
    slopes = uniform(model.eta.inputs, model.outputs)
    z = torch.sin(3 * u @ slopes) + 0.05 * uniform(runs, model.outputs)
    truth = torch.cat([x, torch.full((observations, model.prior.dim), 0.6, dtype=torch.float64)], 1)
    y = torch.sin(3 * truth @ slopes) + 0.1 * uniform(observations, model.outputs)
    z[2, -1] = y[1, 0] = torch.nan
    noise = 0.05 + 0.1 * uniform(observations, model.outputs)
    weight_z, weight_y = torch.ones(runs, dtype=torch.float64), torch.ones(observations, dtype=torch.float64)
    weight_z[4], weight_y[3], weight_y[5] = 0.0, 0.0, 0.5
    jacobian_z, jacobian_y = uniform(*z.shape).masked_fill(z.isnan(), 0), uniform(*y.shape).masked_fill(y.isnan(), 0)
    return (
        Runs(u, z, jacobian_z, torch.arange(runs), weight_z),
        Observations(x, y, noise, jacobian_y, torch.arange(observations), weight_y),
    )


def plain(runs: Runs, observations: Observations) -> tuple[Runs, Observations]:
    """Without own noises."""
    return runs, observations._replace(noise=None)


def points(model: CalibrationModel, count: int, seed: int = 7) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, model.prior.dim, generator=g, dtype=torch.float64)


@torch.no_grad()
def dense(model: CalibrationModel, runs: Runs, observations: Observations, theta: Tensor) -> float:
    """log p(Y, Z | θ̃) by the joint covariance of all known rows, output by output."""
    u = torch.cat([observations.x, model.prior.unit(theta).expand(len(observations.x), -1)], 1)
    phi_z, phi_y = model.eta(runs.u).numpy(), float(model.kappa) * model.eta(u).numpy()
    phi_delta = np.zeros((len(u), 1)) if model.delta is None else model.delta(observations.x).numpy()
    var_z, var_y = (
        torch.exp(2 * lik.raw_noise) + lik.floor**2 for lik in (model.likelihood_z, model.likelihood_y)
    )  # (K,)
    if model.settings.emulator_residual:
        var_y = var_y + model.kappa**2 * var_z
    total = 0.0
    for k in range(model.outputs):
        a = (~runs.z[:, k].isnan() & (runs.weight > 0)).numpy()
        b = (~observations.y[:, k].isnan() & (observations.weight > 0)).numpy()
        own = 0.0 if observations.noise is None else observations.noise[b, k].numpy() ** 2
        R_z = np.diag(float(var_z[k]) / runs.weight[a].numpy())
        R_y = np.diag((float(var_y[k]) + own) / observations.weight[b].numpy())
        zz, zy = phi_z[a] @ phi_z[a].T + R_z, phi_z[a] @ phi_y[b].T
        yy = phi_y[b] @ phi_y[b].T + phi_delta[b] @ phi_delta[b].T + R_y
        rows = np.concatenate([runs.z[a, k].numpy(), observations.y[b, k].numpy()])
        total += stats.multivariate_normal(np.zeros(len(rows)), np.block([[zz, zy], [zy.T, yy]])).logpdf(rows)
    jacobian = (runs.log_jacobian.sum(1) @ runs.weight) + (observations.log_jacobian.sum(1) @ observations.weight)
    return total + float(jacobian)


CASES = [
    {},
    {"discrepancy": "none"},
    {"outputs": 3, "parameters": 2},
    {"outputs": 2, "free_kappa": True},
    {"emulator_residual": False, "parameters": 3},
    {"eta": GPSettings(features=FeatureSettings(features=8, frequencies="learned", kernel="matern52"))},
]


@pytest.mark.parametrize("observations", [9, 60])  # fewer and more than the 19 or so weights
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_likelihood_is_the_dense_gaussian_of_all_rows(
    case: dict[str, Any], observations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analytic, "NUMBERS", 200)  # several blocks
    model = make_model(**case)
    data = make_data(model, runs=70, observations=observations)
    theta = points(model, 4)
    for given in (data, plain(*data)):
        exact = ExactPosterior(model, *given)
        expected = [dense(model, *given, point) for point in theta]
        assert exact.log_likelihood(theta).tolist() == pytest.approx(expected, abs=1e-7)
        assert float(exact.log_likelihood(theta[1])) == pytest.approx(expected[1], abs=1e-7)
        log_prior = stats.norm.logpdf(theta.numpy()).sum(1)
        assert exact.log_density(theta).tolist() == pytest.approx(expected + log_prior, abs=1e-7)


@pytest.mark.parametrize("observations", [9, 60])
@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_the_likelihood_is_the_collapsed_evidence_of_the_fitting_code(case: dict[str, Any], observations: int) -> None:
    model = make_model(**case)
    runs, rows = make_data(model, observations=observations)
    exact = ExactPosterior(model, runs, rows)
    frame, of_runs = compress(model, [runs])
    assert float(exact.log_evidence_runs) == pytest.approx(float(of_runs), abs=1e-8)
    for theta in points(model, 3):
        evidence = collapsed_observations(model, CollapsedTheta(model, frame, theta), rows, None)
        value = exact.log_likelihood(theta)
        assert float(value) == pytest.approx(float(evidence[0] + of_runs), abs=1e-8)


@pytest.mark.parametrize("observations", [9, 60])
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_the_gradient_is_that_of_finite_differences(
    case: dict[str, Any], observations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(analytic, "NUMBERS", 200)
    model = make_model(**case)
    exact = ExactPosterior(model, *make_data(model, observations=observations))
    theta = points(model, 1)[0].requires_grad_()
    (gradient,) = torch.autograd.grad(exact.log_density(theta), theta)
    for j in range(model.prior.dim):
        step = torch.zeros_like(theta)
        step[j] = 1e-5
        with torch.no_grad():
            slope = (exact.log_density(theta + step) - exact.log_density(theta - step)) / 2e-5
        assert float(gradient[j]) == pytest.approx(float(slope), rel=1e-5, abs=1e-6)


@torch.no_grad()
def test_many_runs_of_little_noise_lose_no_digits() -> None:
    # z = Φw without noise, where sums of squares 10¹² large leave 0.3 of log p: by the singular values of Φ,
    # log|I + pΦᵀΦ| = Σ log(1 + p s²) and zᵀ(I + pΦΦᵀ)⁻¹pz = Σ (vᵀw)²·p s²/(1 + p s²).
    model = make_model(features=16, likelihood_z=LikelihoodSettings(noise=1.1e-4), discrepancy="none")
    runs, observations = make_data(model, runs=20_000)
    phi, w = model.eta(runs.u), points(model, model.eta.width, seed=1)
    runs = runs._replace(z=phi @ w, log_jacobian=torch.zeros_like(runs.z), weight=torch.ones_like(runs.weight))
    precision = 1 / float(torch.exp(2 * model.likelihood_z.raw_noise) + 1e-8)
    _, s, V = np.linalg.svd(phi.numpy(), full_matrices=False)
    large = precision * s**2
    quadratic = ((V @ w.numpy())[:, 0] ** 2 * large / (1 + large)).sum()
    expected = -0.5 * (quadratic + np.log1p(large).sum()) + 10_000 * math.log(precision / (2 * math.pi))
    assert float(ExactPosterior(model, runs, observations).log_evidence_runs) == pytest.approx(
        expected, rel=0, abs=1e-7
    )


def test_the_posterior_keeps_the_hyperparameters_that_it_was_built_with() -> None:
    model = make_model()
    exact = ExactPosterior(model, *make_data(model))
    theta = points(model, 2)
    before = exact.log_likelihood(theta)
    with torch.no_grad():
        model.eta.last.log_amplitude += 1.0
    assert torch.equal(exact.log_likelihood(theta), before)
    assert all(parameter.requires_grad for parameter in model.eta.parameters())


def test_a_single_precision_model_is_computed_in_double() -> None:
    model = make_model()
    runs, observations = make_data(model)
    single = make_model().float()
    rounded = runs._replace(u=runs.u.float()), observations._replace(x=observations.x.float())
    value = ExactPosterior(single, *rounded).log_likelihood(points(model, 2))
    assert value.dtype == torch.float64
    again = rounded[0]._replace(u=rounded[0].u.double()), rounded[1]._replace(x=rounded[1].x.double())
    assert torch.allclose(value, ExactPosterior(single.double(), *again).log_likelihood(points(model, 2)), atol=1e-9)


# --- grids ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one() -> ExactPosterior:
    model = make_model()
    return ExactPosterior(model, *make_data(model))


@pytest.fixture(scope="module")
def two() -> ExactPosterior:
    model = make_model(parameters=2, outputs=2)
    return ExactPosterior(model, *make_data(model, runs=30))


def moments(grid: Grid) -> tuple[Tensor, Tensor]:
    """Mean and covariance by the plain sum over nodes, which are equally spaced."""
    share = grid.density / grid.density.sum()
    mean = share @ grid.nodes
    centred = grid.nodes - mean
    return mean, (share[:, None] * centred).mT @ centred


def test_a_grid_of_one_parameter_agrees_with_adaptive_quadrature(one: ExactPosterior) -> None:
    grid = one.grid(points=200)
    assert grid.nodes.shape == (200, 1)
    assert np.trapezoid(grid.density, grid.nodes[:, 0]) == pytest.approx(1, abs=1e-12)
    peak = float(one.log_density(grid.nodes).max())

    def density(theta: float) -> float:
        return math.exp(float(one.log_density(torch.tensor([theta], dtype=torch.float64))) - peak)

    mass, _ = integrate.quad(density, -8, 8, epsabs=1e-10, limit=200, points=[float(moments(grid)[0])])
    assert grid.log_evidence == pytest.approx(peak + math.log(mass), abs=1e-6)


def test_a_grid_of_two_parameters_agrees_with_gauss_hermite_quadrature(two: ExactPosterior) -> None:
    grid = two.grid(points=60)
    assert grid.nodes.shape == (3600, 2)
    mean, covariance = moments(grid)
    lower = torch.linalg.cholesky(covariance)
    x, w = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(60))
    white = torch.cartesian_prod(x, x)
    # ∫f = Σ w·f/N(θ̃; mean, covariance), the nodes where the density is
    log_ratio = two.log_density(mean + white @ lower.mT) + 0.5 * white.square().sum(1) + lower.diagonal().log().sum()
    quadrature = torch.logsumexp(log_ratio + torch.cartesian_prod(w, w).prod(1).log(), 0)
    assert grid.log_evidence == pytest.approx(float(quadrature), abs=1e-3)


class Known(ExactPosterior):
    """A posterior whose log density is given."""

    def __init__(self, log_density: Any, dim: int) -> None:
        self.model = make_model(dim)
        self._given = log_density

    def log_density(self, theta: Tensor) -> Tensor:
        value: Tensor = self._given(theta)
        return value


def gaussians(means: list[float], sd: float) -> Any:
    parts = torch.distributions.Normal(torch.tensor(means, dtype=torch.float64), sd)
    return lambda theta: torch.logsumexp(parts.log_prob(theta), -1)


@pytest.mark.parametrize("sd", [0.5, 1e-2, 1e-4, 1e-7])
def test_a_grid_zooms_until_a_narrow_posterior_is_resolved(sd: float) -> None:
    grid = Known(lambda theta: gaussians([1.2345678], sd)(theta) - 1000, 1).grid(points=100)
    assert len(grid.nodes) == 100
    assert grid.log_evidence == pytest.approx(-1000, abs=1e-6)
    mean, covariance = moments(grid)
    assert float(mean) == pytest.approx(1.2345678, abs=1e-5 * sd)
    assert math.sqrt(covariance) == pytest.approx(sd, rel=1e-5)


def test_a_grid_of_two_parameters_zooms_on_each() -> None:
    sd = torch.tensor([1e-3, 0.3], dtype=torch.float64)
    normal = torch.distributions.Normal(torch.tensor([-2.0, 1.0], dtype=torch.float64), sd)
    grid = Known(lambda theta: normal.log_prob(theta).sum(-1), 2).grid(points=40)
    assert grid.log_evidence == pytest.approx(0, abs=1e-5)
    assert moments(grid)[1].diagonal().sqrt().tolist() == pytest.approx(sd.tolist(), rel=1e-4)


def test_a_grid_takes_more_nodes_where_two_modes_are_narrow() -> None:
    posterior = Known(gaussians([-2.003, 1.501], 0.004), 1)
    grid = posterior.grid(points=100)
    assert len(grid.nodes) > 400
    assert grid.log_evidence == pytest.approx(math.log(2), abs=1e-4)
    assert modes(grid) == 2


def test_modes_that_no_grid_resolves_are_an_error() -> None:
    with pytest.raises(ModelError, match=r"too narrow.*use sample"):
        Known(gaussians([-2.0, 1.5], 1e-7), 1).grid()


def test_a_reach_that_cuts_the_density_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"parameter 0 at the end -2 .* a reach above 2"):
        Known(gaussians([1.5], 1.0), 1).grid(reach=2.0)


# --- samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["one", "two"])
def test_the_sampler_agrees_with_the_grid(name: str, request: pytest.FixtureRequest) -> None:
    exact: ExactPosterior = request.getfixturevalue(name)
    mean, covariance = moments(exact.grid(points=60))
    drawn = exact.sample(chains=2, draws=200, tune=150, seed=1)
    flat = drawn.values.flatten(0, 1)
    assert flat.shape == (400, exact.model.prior.dim)
    assert (drawn.rhat < 1.05).all()
    sd = covariance.diagonal().sqrt()
    assert ((flat.mean(0) - mean).abs() < 4 * sd / drawn.effective.sqrt()).all()
    assert torch.allclose(flat.T.cov().reshape(covariance.shape), covariance, atol=0.25 * float(sd.max()) ** 2)


def test_chains_start_where_they_are_told_and_the_seed_decides(one: ExactPosterior) -> None:
    start = torch.tensor([[0.3]], dtype=torch.float64)
    first, again = (one.sample(draws=10, tune=20, seed=4, start=start).values for _ in range(2))
    assert first.shape == (1, 10, 1)
    assert torch.equal(first, again)
    assert one.sample(chains=3, draws=10, tune=20).values.shape == (3, 10, 1)


# --- comparisons ----------------------------------------------------------------------------------------------------


def q(means: list[list[float]], sd: list[float]) -> ThetaPosterior:
    m, s = torch.tensor(means, dtype=torch.float64), torch.tensor(sd, dtype=torch.float64)
    return ThetaPosterior(prior(m.shape[1]), m, torch.diag(s.square()).expand(len(m), -1, -1))


@pytest.mark.parametrize("distance", [0.0, 0.5, 2.0, 30.0])
def test_the_total_variation_of_two_gaussians_is_the_analytic_one(distance: float) -> None:
    grid = Known(gaussians([0.5], 0.2), 1).grid()
    expected = 2 * stats.norm.cdf(distance / 2) - 1  # of N(0, 1) and N(distance, 1)
    assert total_variation(grid, q([[0.5 + 0.2 * distance]], [0.2])) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("sd", [0.02, 0.1, 1.0, 3.0])
def test_a_q_wider_or_narrower_than_the_grid_is_compared_as_well(sd: float) -> None:
    grid = Known(gaussians([0.5], 0.1), 1).grid()
    p, other = stats.norm(0.5, 0.1), stats.norm(0.5, sd)
    # The densities cross where (x/0.1)² − (x/sd)² = 2 log(sd/0.1).
    cross = 0.0 if sd == 0.1 else math.sqrt(2 * math.log(sd / 0.1) / (0.1**-2 - sd**-2))
    expected = 2 * abs(p.cdf(0.5 + cross) - other.cdf(0.5 + cross))
    assert total_variation(grid, q([[0.5]], [sd])) == pytest.approx(expected, abs=2e-3)


def test_the_total_variation_of_mixtures_and_of_two_parameters() -> None:
    grid = Known(gaussians([-1.0, 2.0], 0.2), 1).grid()
    assert total_variation(grid, q([[-1.0], [2.0]], [0.2])) == pytest.approx(0, abs=1e-6)
    assert total_variation(grid, q([[2.0]], [0.2])) == pytest.approx(0.5, abs=1e-6)
    normal = torch.distributions.Normal(0.0, 0.5)
    plane = Known(lambda theta: normal.log_prob(theta).sum(-1), 2).grid(points=150)
    assert total_variation(plane, q([[0.0, 0.0]], [0.5, 0.5])) == pytest.approx(0, abs=1e-6)
    expected = 2 * stats.norm.cdf(math.hypot(0.3, 0.4)) - 1
    assert total_variation(plane, q([[0.3, 0.4]], [0.5, 0.5])) == pytest.approx(expected, abs=1e-3)


def test_modes_are_local_maxima_of_some_height() -> None:
    nodes = torch.linspace(0, 1, 7, dtype=torch.float64)[:, None]

    def count(*density: float) -> int:
        return modes(Grid(nodes, torch.tensor(density, dtype=torch.float64), 0.0))

    assert count(0, 1, 2, 1, 0, 0, 0) == 1
    assert count(0, 2, 1, 2, 1, 0, 3) == 3
    assert count(0, 2, 1, 1.01, 1, 0.08, 0.09) == 2  # the last is below 5 %
    assert count(1, 1, 1, 1, 1, 1, 1) == 1


# --- errors ---------------------------------------------------------------------------------------------------------

DEEP = GPSettings(features=FeatureSettings(features=6), hidden=(3,))
RANDOM = GPSettings(features=FeatureSettings(features=6, frequencies="variational"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"discrepancy": "general"}, "discrepancy is 'general'.*accepted: none, additive"),
        ({"eta": DEEP}, "eta has 1 hidden layers"),
        ({"delta": GPSettings(hidden=(2,), mean="zero")}, "delta has 1 hidden layers"),
        ({"eta": RANDOM}, "frequencies of eta are 'variational'"),
        ({"delta": RANDOM}, "frequencies of delta are 'variational'"),
        ({"likelihood_z": LikelihoodSettings(kind="student_t")}, "likelihood_z is 'student_t'"),
        ({"likelihood_y": LikelihoodSettings(kind="poisson")}, "likelihood_y is 'poisson'"),
    ],
)
def test_a_model_whose_weights_do_not_integrate_out_is_named(settings: dict[str, Any], message: str) -> None:
    data = make_data(make_model())
    with pytest.raises(ModelError, match=message):
        ExactPosterior(make_model(**settings), *data)


def test_data_of_another_shape_and_wrong_points_are_named(one: ExactPosterior) -> None:
    with pytest.raises(ModelError, match="built for 4"):
        ExactPosterior(make_model(2), *make_data(make_model(1)))
    with pytest.raises(ModelError, match=r"shape \(3,\); expected \(1,\) or \(points, 1\)"):
        one.log_likelihood(torch.zeros(3))
    with pytest.raises(ModelError, match="points is 3"):
        one.grid(points=3)
    with pytest.raises(ModelError, match="reach -1"):
        one.grid(reach=-1)


def test_what_only_few_parameters_have_is_refused_for_more(two: ExactPosterior) -> None:
    model = make_model(parameters=3)
    with pytest.raises(ModelError, match=r"grid of 3 parameters.*sample"):
        ExactPosterior(model, *make_data(model)).grid()
    plane = two.grid(points=30)
    with pytest.raises(ModelError, match="modes are counted for 1"):
        modes(plane)
    with pytest.raises(ModelError, match="the grid has 2 parameters and q 1"):
        total_variation(plane, q([[0.0]], [1.0]))
