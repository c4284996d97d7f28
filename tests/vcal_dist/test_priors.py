"""The bijection θ̃ → θ of every family of priors against scipy.stats, in the middle and far in both tails."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from storage.priors import Beta, Gamma, LogNormal, Normal, Prior, TruncatedNormal, Uniform
from storage.problem import parse_problem
from vcal_dist.errors import ModelError
from vcal_dist.priors import ThetaPrior

# A prior, the bounds of its input, and the same distribution from SciPy.
CASES: dict[str, tuple[Any, tuple[float, float], Any]] = {
    "normal": (Normal(mean=3, sd=0.5), (0, 5), stats.norm(3, 0.5)),
    "uniform": (Uniform(low=-0.5, high=2), (-1, 3), stats.uniform(-0.5, 2.5)),
    "uniform from zero": (Uniform(low=0, high=2), (0, 2), stats.uniform(0, 2)),
    "lognormal": (LogNormal(mu=1, sigma=0.7), (0, 20), stats.lognorm(0.7, scale=math.e)),
    "beta": (Beta(a=2, b=3, low=0, high=4), (0, 4), stats.beta(2, 3, 0, 4)),
    "beta with a peak at each end": (Beta(a=0.3, b=0.4, low=0, high=1), (0, 1), stats.beta(0.3, 0.4)),
    "narrow beta": (Beta(a=400, b=700, low=0, high=1), (0, 1), stats.beta(400, 700)),
    "gamma": (Gamma(shape=3, rate=0.5), (0, 30), stats.gamma(3, scale=2)),
    "gamma with a peak at zero": (Gamma(shape=0.2, rate=4), (0, 2), stats.gamma(0.2, scale=0.25)),
    "truncated normal": (
        TruncatedNormal(mean=1, sd=2, low=0, high=6),
        (0, 6),
        stats.truncnorm(-0.5, 2.5, 1, 2),
    ),
    "half normal": (TruncatedNormal(mean=0, sd=1, low=0, high=30), (0, 30), stats.truncnorm(0, 30)),
    "upper tail of a normal": (TruncatedNormal(mean=0, sd=1, low=6, high=9), (6, 9), stats.truncnorm(6, 9)),
    "lower tail of a normal": (TruncatedNormal(mean=0, sd=1, low=-9, high=-6), (-9, -6), stats.truncnorm(-9, -6)),
    "flat truncated normal": (TruncatedNormal(mean=0, sd=1e5, low=0, high=1), (0, 1), stats.uniform()),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def prior_of(case: tuple[Prior, tuple[float, float], Any]) -> ThetaPrior:
    return ThetaPrior([case[0]], [case[1]], ["p"])


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def all_families() -> ThetaPrior:
    """Families mixed and repeated, so that columns of one family are not neighbours."""
    chosen = ["beta", "normal", "gamma", "uniform", "normal", "lognormal", "beta", "truncated normal"]
    return ThetaPrior([CASES[c][0] for c in chosen], [CASES[c][1] for c in chosen], [f"p{j}" for j in range(8)])


@each_case
def test_the_cdf_of_theta_is_the_normal_cdf_of_tilde(case: Any) -> None:
    t = np.linspace(-8, 8, 65)
    theta = prior_of(case).theta(column(*t))[:, 0].numpy()
    # θ is known up to its rounding, and SciPy's truncated normal up to 1e-15.
    below, above = theta - 2 * np.spacing(np.abs(theta)), theta + 2 * np.spacing(np.abs(theta))
    lower, p, q = t <= 0, special.ndtr(t), special.ndtr(-t)
    assert (case[2].cdf(below) <= p * (1 + 1e-9) + 1e-15)[lower].all()
    assert (case[2].cdf(above) >= p * (1 - 1e-9) - 1e-15)[lower].all()
    assert (case[2].sf(above) <= q * (1 + 1e-9) + 1e-15)[~lower].all()
    assert (case[2].sf(below) >= q * (1 - 1e-9) - 1e-15)[~lower].all()


@pytest.mark.parametrize("name", ["half normal", "truncated normal", "beta", "gamma", "uniform from zero"])
def test_the_mass_below_a_theta_near_zero_is_the_normal_tail(name: str) -> None:
    case = CASES[name]
    for t in (-8.0, -6.0, -4.0):
        theta = prior_of(case).theta(column(t)).item()
        mass, _ = integrate.quad(case[2].pdf, 0, theta, epsabs=0, epsrel=1e-12)
        assert mass == pytest.approx(special.ndtr(t), rel=1e-10)


@each_case
def test_theta_and_tilde_undo_each_other(case: Any) -> None:
    prior = prior_of(case)
    tilde = torch.linspace(-5, 5, 41, dtype=torch.float64)[:, None]
    theta = prior.theta(tilde)
    # θ has 53 bits: Δθ̃ = Δθ / slope.
    rounding = 4 * torch.from_numpy(np.spacing(theta.abs().numpy())) / prior.log_slope(tilde).exp()
    assert ((prior.tilde(theta) - tilde).abs() <= 1e-9 + rounding).all()
    assert torch.allclose(prior.theta(prior.tilde(theta)), theta, rtol=1e-10, atol=0)


@pytest.mark.parametrize("case", [case for case in CASES.values() if getattr(case[0], "low", 0) == 0])
def test_a_tail_at_zero_keeps_its_digits(case: Any) -> None:
    prior, tilde = prior_of(case), column(-8, -7, -6)
    assert torch.allclose(prior.tilde(prior.theta(tilde)), tilde, rtol=1e-11, atol=0)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        (Uniform(low=0, high=2), Uniform(low=-2, high=0)),
        (Beta(a=2, b=3, low=0, high=2), Beta(a=3, b=2, low=-2, high=0)),
        (TruncatedNormal(mean=0.5, sd=1, low=0, high=2), TruncatedNormal(mean=-0.5, sd=1, low=-2, high=0)),
    ],
)
def test_a_mirrored_prior_gives_the_mirrored_theta_to_the_last_digits(lower: Any, upper: Any) -> None:
    prior, mirrored = ThetaPrior([lower], [(0, 2)], ["p"]), ThetaPrior([upper], [(-2, 0)], ["p"])
    tilde = torch.linspace(-8, 8, 33, dtype=torch.float64)[:, None]
    theta = prior.theta(tilde)
    assert torch.allclose(-mirrored.theta(-tilde), theta, rtol=1e-13, atol=0)
    assert torch.allclose(-mirrored.tilde(-theta), prior.tilde(theta), rtol=1e-11, atol=1e-14)
    assert torch.allclose(mirrored.log_slope(-tilde), prior.log_slope(tilde), rtol=1e-12, atol=0)


@each_case
def test_log_density_is_that_of_scipy(case: Any) -> None:
    values = case[2].ppf(np.linspace(0.01, 0.99, 33))
    density = prior_of(case).log_density(column(*values))[:, 0].numpy()
    assert density == pytest.approx(case[2].logpdf(values), rel=1e-8, abs=1e-8)


@each_case
def test_log_density_outside_the_support_is_minus_infinity(case: Any) -> None:
    prior = prior_of(case)
    outside = [low - 1e-3 for low, _ in prior.support if math.isfinite(low)]
    outside += [high + 1e-3 for _, high in prior.support if math.isfinite(high)]
    assert (prior.log_density(column(*outside)) == -math.inf).all()


@each_case
def test_the_gradient_is_the_slope_and_that_of_finite_differences(case: Any) -> None:
    prior = prior_of(case)
    tilde = torch.linspace(-4, 4, 33, dtype=torch.float64)[:, None].requires_grad_()
    (gradient,) = torch.autograd.grad(prior.theta(tilde).sum(), tilde)
    assert torch.allclose(gradient.log(), prior.log_slope(tilde), rtol=1e-12, atol=1e-12)
    h = 1e-4
    with torch.no_grad():
        theta = [prior.theta(tilde + k * h) for k in (-2, -1, 1, 2)]
        difference = (theta[0] - 8 * theta[1] + 8 * theta[2] - theta[3]) / (12 * h)
        rounding = 10 * torch.from_numpy(np.spacing(theta[0].abs().numpy())) / h
    assert ((gradient - difference).abs() <= 1e-8 * gradient + rounding).all()


@each_case
def test_slope_times_density_is_the_normal_density(case: Any) -> None:
    prior = prior_of(case)
    tilde = torch.linspace(-3, 3, 25, dtype=torch.float64)[:, None]
    total = prior.log_slope(tilde) + prior.log_density(prior.theta(tilde))
    # At an end that is not zero, rounding θ changes a density that is infinite there.
    assert torch.allclose(total, torch.from_numpy(stats.norm.logpdf(tilde.numpy())), rtol=1e-8, atol=1e-6)


@each_case
def test_extreme_values_stay_finite_monotone_and_inside(case: Any) -> None:
    prior = prior_of(case)
    low, high = prior.support[0]
    for dtype in (torch.float64, torch.float32):
        tilde = torch.cat([torch.linspace(-8, 8, 801), torch.tensor([-40.0, -20, 20, 40])]).sort().values
        theta = prior.theta(tilde[:, None].to(dtype))[:, 0]
        assert theta.isfinite().all()
        assert theta.dtype == dtype
        exact = theta.double()
        assert ((exact >= low) & (exact <= high)).all()
        assert (theta.diff() >= 0).all()
    tilde = torch.linspace(-8, 8, 801, dtype=torch.float64)[:, None].requires_grad_()
    assert prior.log_slope(tilde).isfinite().all()
    (gradient,) = torch.autograd.grad(prior.theta(tilde).sum(), tilde)
    assert ((gradient > 0) & gradient.isfinite()).all()


@pytest.mark.parametrize(
    ("prior", "bounds"),
    [
        (Beta(a=0.01, b=0.01, low=0, high=1), (0, 1)),
        (Beta(a=5, b=0.01, low=0, high=1), (0, 1)),
        (Gamma(shape=0.01, rate=1), (0, 1)),
        (LogNormal(mu=0, sigma=200), (0, 2)),
        (TruncatedNormal(mean=0, sd=1, low=50, high=60), (50, 60)),
    ],
)
def test_what_underflows_or_overflows_keeps_a_finite_log_slope(prior: Any, bounds: tuple[float, float]) -> None:
    theta_prior = ThetaPrior([prior], [bounds], ["p"])
    tilde = torch.linspace(-8, 8, 65, dtype=torch.float64)[:, None]
    assert theta_prior.log_slope(tilde).isfinite().all()
    for dtype in (torch.float64, torch.float32):
        theta = theta_prior.theta(tilde.to(dtype).requires_grad_())
        assert theta.isfinite().all()
        assert (theta.detach().diff(dim=0) >= 0).all()


def test_the_log_slope_of_an_underflowing_beta_follows_its_power_law() -> None:
    # θ → (a·B(a, b)·Φ(θ̃))^(1/a) for θ̃ → −∞, so dθ/dθ̃ = θ·φ/(a·Φ).
    a, b, t = 0.01, 2.0, -8.0
    log_theta = (special.log_ndtr(t) + math.log(a) + special.betaln(a, b)) / a
    expected = log_theta + stats.norm.logpdf(t) - math.log(a) - special.log_ndtr(t)
    prior = ThetaPrior([Beta(a=a, b=b, low=0, high=1)], [(0, 1)], ["p"])
    assert log_theta < -1000
    assert prior.log_slope(column(t)).item() == pytest.approx(expected, rel=1e-12)


@each_case
def test_samples_of_the_prior_pass_a_kolmogorov_smirnov_test(case: Any) -> None:
    tilde = torch.randn(4000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    theta = prior_of(case).theta(tilde)[:, 0].numpy()
    assert stats.kstest(theta, case[2].cdf).pvalue > 1e-3


def test_columns_are_those_of_every_prior_alone() -> None:
    prior = all_families()
    tilde = torch.randn(4, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    theta = prior.theta(tilde)
    for j in range(8):
        alone, part = prior.column(j), slice(j, j + 1)
        assert torch.equal(alone.theta(tilde[..., part]), theta[..., part])
        assert torch.equal(alone.tilde(theta[..., part]), prior.tilde(theta)[..., part])
        assert torch.equal(alone.log_density(theta[..., part]), prior.log_density(theta)[..., part])
        assert torch.equal(alone.log_slope(tilde[..., part]), prior.log_slope(tilde)[..., part])
        assert torch.equal(alone.unit(tilde[..., part]), prior.unit(tilde)[..., part])


def test_unit_is_theta_between_the_bounds_with_its_gradient() -> None:
    prior = all_families()
    low, high = torch.tensor(prior.bounds, dtype=torch.float64).T
    tilde = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.allclose(prior.unit(tilde), (prior.theta(tilde) - low) / (high - low), rtol=1e-14, atol=0)
    (gradient,) = torch.autograd.grad(prior.unit(tilde).sum(), tilde)
    assert torch.allclose(gradient, prior.log_slope(tilde).exp() / (high - low), rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # forward mode scripts decompositions in torch
def test_function_transforms_of_torch_give_the_same_derivatives() -> None:
    prior = all_families()
    tilde = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    slope = prior.log_slope(tilde).exp()
    per_row = torch.func.vmap(torch.func.grad(lambda t: prior.theta(t).sum()))(tilde)
    _, tangent = torch.func.jvp(prior.theta, (tilde,), (torch.ones_like(tilde),))
    jacobian = torch.func.vmap(torch.func.jacfwd(prior.theta))(tilde)  # (5, 8, 8)
    assert torch.allclose(per_row, slope, rtol=1e-12)
    assert torch.allclose(tangent, slope, rtol=1e-12)
    assert torch.allclose(jacobian, torch.diag_embed(slope), rtol=1e-12)
    assert torch.equal(torch.func.vmap(prior.theta, in_dims=1)(tilde.T), prior.theta(tilde))


def test_float32_in_gives_float32_out_and_float64_inside() -> None:
    prior = all_families()
    tilde = torch.randn(6, 8, generator=torch.Generator().manual_seed(4)).requires_grad_()
    theta = prior.theta(tilde)
    (gradient,) = torch.autograd.grad(theta.sum(), tilde)
    results = [theta, gradient, prior.unit(tilde), prior.tilde(theta), prior.log_density(theta), prior.log_slope(tilde)]
    assert {r.dtype for r in results} == {torch.float32}
    assert torch.equal(theta, prior.theta(tilde.double()).float())


def test_a_limit_that_is_no_float32_is_not_passed() -> None:
    prior = ThetaPrior([Uniform(low=0.7, high=1.1)] * 2, [(0.7, 1.1)] * 2, ["p", "q"])
    assert torch.tensor(1.1).item() > 1.1
    assert torch.tensor(0.7).item() < 0.7
    tilde = torch.tensor([[9.0, -9.0]], requires_grad=True)
    theta = prior.theta(tilde)
    assert theta[0, 0].item() < 1.1
    assert theta[0, 1].item() > 0.7
    assert prior.tilde(theta).isfinite().all()
    (gradient,) = torch.autograd.grad(theta.sum(), tilde)
    assert (gradient > 0).all()


def test_an_end_of_the_support_has_a_finite_tilde() -> None:
    prior = ThetaPrior([Uniform(low=0, high=2), LogNormal(mu=0, sigma=1)], [(0, 2), (0, 3)], ["p", "q"])
    tilde = prior.tilde(torch.tensor([[0.0, 0.0], [2.0, 1.0]], dtype=torch.float64))
    assert tilde.tolist() == [[-38, -38], [38, 0]]
    assert torch.equal(prior.log_density(torch.zeros(2))[1], torch.tensor(-math.inf))


def test_the_priors_of_a_problem_are_its_calibration_inputs() -> None:
    problem = parse_problem(
        {
            "name": "p",
            "control_inputs": [{"name": "x", "bounds": [0, 1]}],
            "calibration_inputs": [
                {"name": "a", "bounds": [2, 4]},
                {"name": "b", "bounds": [0, 9], "prior": {"family": "gamma", "shape": 2, "rate": 1}},
            ],
            "outputs": [{"name": "z"}],
        }
    )
    prior = ThetaPrior.from_problem(problem)
    assert (prior.dim, prior.names, prior.bounds) == (2, ("a", "b"), ((2, 4), (0, 9)))
    theta = prior.theta(torch.zeros(2, dtype=torch.float64))
    assert theta.tolist() == pytest.approx([3, stats.gamma(2).median()])
    assert torch.equal(copy.deepcopy(prior).theta(torch.zeros(2, dtype=torch.float64)), theta)


@pytest.mark.parametrize("value", [3.5, -0.1, math.nan, math.inf])
def test_a_theta_outside_the_support_is_an_error_that_names_it(value: float) -> None:
    prior = ThetaPrior([Normal(mean=0, sd=1), Uniform(low=0, high=3)], [(-1, 1), (0, 4)], ["mass", "rate"])
    with pytest.raises(ModelError, match=rf"'rate' is {value:g}, outside the support \(0, 3\).*uniform\(0, 3\)"):
        prior.tilde(torch.tensor([[0.0, 1.0], [0.0, value]]))


def test_errors_at_construction() -> None:
    normal = Normal(mean=0, sd=1)
    with pytest.raises(ModelError, match="1 priors, 2 bounds and 1 names"):
        ThetaPrior([normal], [(0, 1), (0, 1)], ["p"])
    with pytest.raises(ModelError, match="0 priors, 0 bounds"):
        ThetaPrior([], [], [])
    with pytest.raises(ModelError, match=r"'p'.*\n.*needs low < high, got \[2, 1\]"):
        ThetaPrior([Beta(a=1, b=1, low=2, high=1)], [(0, 3)], ["p"])
    with pytest.raises(ModelError, match=r"outside its bounds \[0, 1\]"):
        ThetaPrior([Uniform(low=0, high=2)], [(0, 1)], ["p"])
    with pytest.raises(ModelError, match=r"low < high, got \[1, 1\]"):
        ThetaPrior([normal], [(1, 1)], ["p"])
    with pytest.raises(ModelError, match="centred at 0, outside its bounds"):
        ThetaPrior([normal], [(1, 2)], ["p"])
    with pytest.raises(ModelError, match="no mass that can be computed"):
        ThetaPrior([TruncatedNormal(mean=0, sd=1e-200, low=1, high=2)], [(1, 2)], ["p"])


def test_a_wrong_number_of_parameters_is_an_error() -> None:
    prior = all_families()
    with pytest.raises(ModelError, match=r"expected 8 parameters .* shape \(3, 7\)"):
        prior.theta(torch.zeros(3, 7))


@pytest.mark.gpu
def test_results_stay_on_the_device_of_the_input() -> None:
    prior = all_families()
    tilde = torch.zeros(2, 8, device="cuda", requires_grad=True)
    theta = prior.theta(tilde)
    theta.sum().backward()
    assert theta.is_cuda
    assert prior.unit(tilde).is_cuda
    assert prior.tilde(theta).is_cuda
    assert torch.equal(theta.cpu(), prior.theta(torch.zeros(2, 8)))
