"""The likelihoods: expectations against quadrature, densities against SciPy, missing values, gradients, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.integrate
import scipy.special
import scipy.stats
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcal_dist.errors import ModelError
from vcal_dist.likelihoods import LOWEST_DEGREES, Gaussian, Likelihood, LikelihoodSettings, StudentT, make_likelihood

F64 = torch.float64
SCALE, DEGREES = 0.3, 4.0
KINDS = ("gaussian", "student_t", "poisson", "bernoulli")
WITH_NOISE = ("gaussian", "student_t")
VARIANCES = (0.0, 1e-20, 1e-6, 0.01, 1.0, 25.0, 900.0)  # 900 is 10⁴ squared scales
MEANS = (-4.0, 0.0, 1.3)
Array = NDArray[np.float64]


def make(kind: str, outputs: int = 1, dtype: torch.dtype = F64, **settings: Any) -> Likelihood:
    chosen = LikelihoodSettings(kind=kind, **{"noise": SCALE, "degrees": DEGREES, **settings})  # type: ignore[arg-type]
    return make_likelihood(chosen, outputs, dtype)


def targets(kind: str) -> tuple[float, ...]:
    return {"poisson": (0.0, 1.0, 7.0, 300.0), "bernoulli": (0.0, 1.0)}.get(kind, (-3.0, 0.1, 2.0, 30.0))


def log_density(kind: str, y: float, f: Array) -> Array:
    """log p(y | f), by SciPy."""
    if kind == "gaussian":
        return scipy.stats.norm.logpdf(y, f, SCALE)
    if kind == "student_t":
        return scipy.stats.t.logpdf(y, DEGREES, f, SCALE)
    if kind == "poisson":
        return scipy.stats.poisson.logpmf(y, np.exp(f))
    return scipy.special.log_expit(f if y == 1 else -f)


def derivatives(kind: str, y: float, f: Array) -> tuple[Array, Array]:
    """First and second derivative of log p(y | f) in f, by hand."""
    r, c = y - f, DEGREES * SCALE**2
    p = scipy.special.expit(f)
    return {
        "gaussian": (r / SCALE**2, np.full_like(f, -1 / SCALE**2)),
        "student_t": ((DEGREES + 1) * r / (c + r**2), (DEGREES + 1) * (r**2 - c) / (c + r**2) ** 2),
        "poisson": (y - np.exp(f), -np.exp(f)),
        "bernoulli": (y - p, -p * (1 - p)),
    }[kind]


def quadrature(kind: str, y: float, mean: float, var: float) -> tuple[Array, Array]:
    """Nodes f and log weights under N(mean, var): Gauss-Legendre on panels that are fine wherever log p bends."""
    if var == 0:
        return np.array([mean]), np.array([0.0])
    centre, width = {"bernoulli": (0.0, 1.0)}.get(kind, (y, SCALE))
    if kind == "poisson":
        centre, width = math.log(max(y, 0.5)), 1 / math.sqrt(y + 1)
    sd = math.sqrt(var)
    around = np.concatenate([np.linspace(0, 10, 41), np.geomspace(10, 1e4, 41)])
    bends = (centre + width * np.concatenate([-around, around]) - mean) / sd
    edges = np.unique(np.concatenate([np.linspace(-45, 45, 181), bends[np.abs(bends) < 45]]))
    node, weight = scipy.special.roots_legendre(16)
    half = np.diff(edges)[:, None] / 2
    u = (edges[:-1, None] + half * (1 + node)).ravel()
    return mean + sd * u, np.log(half * weight).ravel() - u**2 / 2 - 0.5 * math.log(2 * math.pi)


def expectation(kind: str, y: float, mean: float, var: float, of: Callable[[Array], Array]) -> float:
    f, log_weight = quadrature(kind, y, mean, var)
    weight = np.exp(log_weight)
    seen = weight > 1e-30  # beyond, exp(f) may overflow where it cannot matter
    return float(weight[seen] @ of(f[seen]))


def one(value: float, grad: bool = False) -> Tensor:
    return torch.tensor([[value]], dtype=F64, requires_grad=grad)


def cases(kind: str, var: float) -> list[tuple[float, float]]:
    # E exp(f) overflows for counts with the largest variance; 25 is a factor of e⁵ either way
    return [] if kind == "poisson" and var > 25 else [(y, mean) for y in targets(kind) for mean in MEANS]


def test_the_reference_rule_equals_adaptive_quadrature() -> None:
    for kind, y, mean, var in (
        ("student_t", 2.0, 0.0, 25.0),
        ("poisson", 7.0, 1.3, 1.0),
        ("bernoulli", 1.0, -4.0, 25.0),
    ):
        adaptive, _ = scipy.integrate.quad(
            lambda f, k=kind, y=y, m=mean, v=var: log_density(k, y, f) * scipy.stats.norm.pdf(f, m, math.sqrt(v)),
            mean - 9 * math.sqrt(var), mean + 9 * math.sqrt(var), points=[y, 0.0], epsabs=1e-11, limit=200,
        )  # fmt: skip
        rule = expectation(kind, y, mean, var, lambda f, k=kind, y=y: log_density(k, y, f))
        assert rule == pytest.approx(adaptive, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("var", VARIANCES)
def test_expectations_equal_quadrature(kind: str, var: float) -> None:
    lik = make(kind)
    for y, mean in cases(kind, var):
        exact = expectation(kind, y, mean, var, lambda f, y=y: log_density(kind, y, f))
        got = lik.expected_log_prob(one(y), one(mean), one(var)).item()
        assert got == pytest.approx(exact, rel=1e-7, abs=1e-8), (y, mean)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("var", VARIANCES)
def test_log_predictives_equal_quadrature(kind: str, var: float) -> None:
    lik = make(kind)
    for y, mean in cases(kind, var):
        f, log_weight = quadrature(kind, y, mean, var)
        with np.errstate(over="ignore"):
            exact = scipy.special.logsumexp(log_weight + log_density(kind, y, f))
        got = lik.log_predictive(one(y), one(mean), one(var)).item()
        assert got == pytest.approx(exact, rel=1e-7, abs=1e-8), (y, mean)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("var", VARIANCES)
def test_derivatives_of_the_expectation_are_expected_derivatives(kind: str, var: float) -> None:
    """∂/∂mean E g = E g′ and ∂/∂var E g = ½ E g″, which natural-gradient steps use; also at variance 0."""
    lik = make(kind)
    for y, mean in cases(kind, var):
        m, v = one(mean, grad=True), one(var, grad=True)
        by_mean, by_var = torch.autograd.grad(lik.expected_log_prob(one(y), m, v).sum(), (m, v))
        first = expectation(kind, y, mean, var, lambda f, y=y: derivatives(kind, y, f)[0])
        second = expectation(kind, y, mean, var, lambda f, y=y: derivatives(kind, y, f)[1])
        assert by_mean.item() == pytest.approx(first, rel=1e-6, abs=1e-7), (y, mean)
        assert by_var.item() == pytest.approx(second / 2, rel=1e-6, abs=1e-7), (y, mean)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("var", VARIANCES)
def test_derivatives_of_the_log_predictive_are_posterior_expectations(kind: str, var: float) -> None:
    lik = make(kind)
    for y, mean in cases(kind, var):
        f, log_weight = quadrature(kind, y, mean, var)
        with np.errstate(over="ignore"):
            log_joint = log_weight + log_density(kind, y, f)
        posterior = np.exp(log_joint - scipy.special.logsumexp(log_joint))
        seen = posterior > 1e-30
        slope, curvature = derivatives(kind, y, f[seen])
        m, v = one(mean, grad=True), one(var, grad=True)
        by_mean, by_var = torch.autograd.grad(lik.log_predictive(one(y), m, v).sum(), (m, v))
        assert by_mean.item() == pytest.approx(posterior[seen] @ slope, rel=1e-5, abs=1e-7), (y, mean)
        assert by_var.item() == pytest.approx(posterior[seen] @ (curvature + slope**2) / 2, rel=1e-5, abs=1e-6), (
            y,
            mean,
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["expected_log_prob", "log_predictive"])
def test_gradients_of_everything_equal_finite_differences(kind: str, method: str) -> None:
    lik = make(kind, outputs=2)
    y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, math.nan]], dtype=F64)
    mean = torch.tensor([[0.3, -0.7], [1.5, 2.0], [-1.0, 0.0]], dtype=F64, requires_grad=True)
    var = torch.tensor([[0.5, 0.01], [3.0, 0.2], [1.0, 1.0]], dtype=F64, requires_grad=True)
    extra = torch.tensor([0.2, 0.4], dtype=F64, requires_grad=True)
    parameters = list(lik.parameters())

    def call(mean: Tensor, var: Tensor, extra: Tensor, *_: Tensor) -> Tensor:
        return getattr(lik, method)(y, mean, var, extra_variance=extra)

    # The derivative that is coded is that of the integral; the last digits of the quadrature differ.
    assert torch.autograd.gradcheck(call, (mean, var, extra, *parameters), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_all_likelihoods_keep_the_same_contract(kind: str) -> None:
    lik = make(kind, outputs=3)
    assert lik.outputs == 3
    generator = torch.Generator().manual_seed(1)
    f = torch.randn((5, 4, 3), generator=generator, dtype=F64)
    y = lik.sample(f, generator)
    assert (y.shape, y.dtype) == ((5, 4, 3), F64)
    lik.check(y[0], ["a", "b", "c"])  # what it draws, it takes
    y = y[0].clone()
    y[1, 2] = math.nan
    lik.check(y, ["a", "b", "c"])
    var = torch.rand((5, 1, 1), generator=generator, dtype=F64)
    extra = torch.tensor([0.1, 0.2, 0.0], dtype=F64)
    expected = lik.expected_log_prob(y, f, var, extra_variance=extra)
    predictive = lik.log_predictive(y, f, var, extra_variance=extra)
    mean_y, var_y = lik.moments(f, var, extra_variance=extra)
    for result in (expected, predictive, mean_y, var_y):
        assert (result.shape, result.dtype) == ((5, 4, 3), F64)
        assert result.isfinite().all()
    assert (expected[:, 1, 2] == 0).all()
    assert (predictive[:, 1, 2] == 0).all()
    assert (var_y > 0).all()
    # Each row, output and leading index is on its own.
    apart = lik.expected_log_prob(y[2:3], f[3, 2:3], var[3], extra_variance=extra)
    torch.testing.assert_close(apart, expected[3, 2:3], rtol=1e-13, atol=1e-13)
    # Extra variance around f is more variance of f, except in the Gaussian's expectation.
    torch.testing.assert_close(lik.log_predictive(y, f, var + extra), predictive)
    torch.testing.assert_close(lik.moments(f, var + extra)[1], var_y)
    assert torch.allclose(lik.expected_log_prob(y, f, var + extra), expected) == (kind != "gaussian")


@pytest.mark.parametrize("kind", KINDS)
def test_the_expectation_never_exceeds_the_log_predictive(kind: str) -> None:
    lik, generator = make(kind), torch.Generator().manual_seed(2)
    mean = 3 * torch.randn((2000, 1), generator=generator, dtype=F64)
    var = torch.exp(4 * torch.randn((2000, 1), generator=generator, dtype=F64)).clamp(max=50.0)
    y = lik.sample(mean.clamp(max=5.0), generator)
    gap = lik.log_predictive(y, mean, var) - lik.expected_log_prob(y, mean, var)
    assert gap.min() > -1e-6
    assert gap.max() > 1.0  # and the inequality is strict where the variance is large


@pytest.mark.parametrize("kind", KINDS)
def test_missing_values_leave_exact_zeros_and_no_gradient(kind: str) -> None:
    y = torch.tensor([[1.0, math.nan], [math.nan, 0.0]], dtype=F64)
    hidden = torch.isnan(y)
    for method in ("expected_log_prob", "log_predictive"):
        gradients = []
        for poison in (math.nan, math.inf, 0.7):  # what stands behind a missing value must not matter
            lik = make(kind, outputs=2)
            mean, var = (torch.where(hidden, poison, torch.full_like(y, x)).requires_grad_() for x in (0.4, 0.9))
            noise = torch.where(hidden, poison, torch.full_like(y, 0.2)) if kind in WITH_NOISE else None
            result = getattr(lik, method)(y, mean, var, noise)
            assert (result[hidden] == 0).all()
            inputs = (mean, var, *lik.parameters())
            gradients.append(torch.autograd.grad(result.sum(), inputs))
            for gradient in gradients[-1][:2]:
                assert (gradient[hidden] == 0).all()
                assert (gradient[~hidden] != 0).all()
        for gradient, same, again in zip(*gradients, strict=True):
            assert gradient.isfinite().all()
            assert torch.equal(gradient, same)
            assert torch.equal(gradient, again)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_equal_quadrature(kind: str) -> None:
    lik = make(kind)
    for mean in (-1.0, 0.5):
        for var in (0.0, 0.3, 4.0):
            inner: dict[str, Callable[[Array], tuple[Any, Any]]] = {
                "gaussian": lambda f: (f, np.full_like(f, SCALE**2)),
                "student_t": lambda f: (f, np.full_like(f, scipy.stats.t.var(DEGREES, scale=SCALE))),
                "poisson": lambda f: (np.exp(f), np.exp(f)),
                "bernoulli": lambda f: (scipy.special.expit(f), scipy.special.expit(f) * scipy.special.expit(-f)),
            }
            law = inner[kind]
            first = expectation(kind, 0.0, mean, var, lambda f, law=law: law(f)[0])
            second = expectation(kind, 0.0, mean, var, lambda f, law=law: law(f)[1] + law(f)[0] ** 2)
            mean_y, var_y = lik.moments(one(mean), one(var))
            assert mean_y.item() == pytest.approx(first, rel=1e-8)
            assert var_y.item() == pytest.approx(second - first**2, rel=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_moments_and_the_distribution(kind: str) -> None:
    n = 40_000
    lik, f = make(kind, degrees=9.0), torch.full((n, 1), 0.8, dtype=F64)
    y = lik.sample(f, torch.Generator().manual_seed(3)).detach().numpy()[:, 0]
    mean, var = (x.item() for x in lik.moments(one(0.8), one(0.0)))
    assert abs(y.mean() - mean) < 4 * math.sqrt(var / n)
    fourth = ((y - y.mean()) ** 4).mean()
    assert abs(y.var() - var) < 4 * math.sqrt((fourth - var**2) / n) + 1e-12
    if kind in WITH_NOISE:
        law = scipy.stats.norm(0.8, SCALE) if kind == "gaussian" else scipy.stats.t(9.0, 0.8, SCALE)
        assert scipy.stats.kstest(y, law.cdf).pvalue > 1e-3
    again = lik.sample(f, torch.Generator().manual_seed(3)).detach().numpy()[:, 0]
    np.testing.assert_array_equal(y, again)


@pytest.mark.parametrize("kind", WITH_NOISE)
def test_a_column_of_noise_adds_to_the_squared_scale(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    y, mean = torch.randn((2, 3, 2), generator=generator, dtype=F64)
    noise = torch.rand((3, 2), generator=generator, dtype=F64)
    lik, zero = make(kind, outputs=2), torch.zeros_like(mean)
    scale = np.sqrt(SCALE**2 + noise.numpy() ** 2)
    at = mean.numpy()
    law = scipy.stats.norm(at, scale) if kind == "gaussian" else scipy.stats.t(DEGREES, at, scale)
    for method in (lik.expected_log_prob, lik.log_predictive):
        np.testing.assert_allclose(method(y, mean, zero, noise).detach().numpy(), law.logpdf(y.numpy()), rtol=1e-7)
    np.testing.assert_allclose(lik.moments(mean, zero, noise)[1].detach().numpy(), law.var(), rtol=1e-12)
    many = mean.expand(20_000, 3, 2)
    drawn = lik.sample(many, generator, noise).detach().numpy()
    inner = np.mean(np.abs(drawn - at) < scale, axis=0)  # a share that both laws know, without heavy tails
    np.testing.assert_allclose(inner, law.cdf(at + scale) - law.cdf(at - scale), atol=4 * 0.5 / math.sqrt(20_000))


@pytest.mark.parametrize("kind", ["poisson", "bernoulli"])
def test_a_column_of_noise_is_refused_where_there_is_no_scale(kind: str) -> None:
    lik, x = make(kind), one(1.0)
    calls: tuple[Callable[[], object], ...] = (
        lambda: lik.expected_log_prob(x, x, x, x),
        lambda: lik.log_predictive(x, x, x, x),
        lambda: lik.moments(x, x, x),
        lambda: lik.sample(x, torch.Generator(), x),
    )
    for call in calls:
        with pytest.raises(ModelError, match=f"{kind}.*column.*gaussian or student_t"):
            call()


def test_gaussian_extra_variance_joins_the_noise_of_the_expectation() -> None:
    lik, extra = make("gaussian"), torch.tensor([0.07], dtype=F64)
    s2 = SCALE**2 + 0.07
    exact = scipy.stats.norm.logpdf(1.2, 0.5, math.sqrt(s2)) - 0.4 / (2 * s2)
    assert lik.expected_log_prob(one(1.2), one(0.5), one(0.4), extra_variance=extra).item() == pytest.approx(exact)


def test_gaussian_precision_weighs_rows_and_drops_missing_ones() -> None:
    lik = make("gaussian", outputs=2)
    assert isinstance(lik, Gaussian)
    y = torch.tensor([[1.0, math.nan], [2.0, 3.0]], dtype=F64)
    noise = torch.tensor([[0.5, math.nan], [0.0, 1.0]], dtype=F64)
    extra = torch.tensor([0.1, 0.2], dtype=F64)
    s2 = SCALE**2
    expected = [[1 / (s2 + 0.25 + 0.1), 0.0], [1 / (s2 + 0.1), 1 / (s2 + 1.0 + 0.2)]]
    precision = lik.precision(y, noise, extra)
    np.testing.assert_allclose(precision.detach().numpy(), expected, rtol=1e-13)
    assert precision[0, 1] == 0
    np.testing.assert_allclose(lik.precision(y).detach().numpy(), [[1 / s2, 0.0], [1 / s2, 1 / s2]], rtol=1e-13)
    (gradient,) = torch.autograd.grad(precision.sum(), lik.raw_noise)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("kind", WITH_NOISE)
def test_the_scale_starts_at_the_setting_and_stays_above_its_floor(kind: str) -> None:
    lik = make(kind, outputs=2, noise=0.5, floor=0.01, degrees=7.0)
    assert isinstance(lik, Gaussian | StudentT)
    np.testing.assert_allclose(lik.noise_variance().detach().numpy(), [0.25, 0.25], rtol=1e-14)
    if isinstance(lik, StudentT):
        np.testing.assert_allclose(lik.degrees().detach().numpy(), [7.0, 7.0], rtol=1e-14)
    with torch.no_grad():
        for parameter in lik.parameters():
            parameter.fill_(-100.0)
    np.testing.assert_allclose(lik.noise_variance().detach().numpy(), [1e-4, 1e-4], rtol=1e-14)
    zero = torch.zeros((1, 2), dtype=F64)
    assert lik.moments(zero, zero)[1].isfinite().all()
    assert lik.expected_log_prob(zero, zero, zero).isfinite().all()


@pytest.mark.parametrize("kind", WITH_NOISE)
def test_a_fixed_scale_is_saved_but_not_learned(kind: str) -> None:
    fixed, free = make(kind, learn_noise=False), make(kind)
    assert list(fixed.parameters()) == []
    assert len(list(free.parameters())) == (1 if kind == "gaussian" else 2)
    assert fixed.state_dict().keys() == free.state_dict().keys()  # one can start where the other ended
    args = one(0.5), one(0.1), one(0.2)
    assert torch.equal(fixed.expected_log_prob(*args), free.expected_log_prob(*args))


@pytest.mark.parametrize(("degrees", "noise"), [(2.2, 0.05), (4.0, 1e-3), (50.0, 0.3), (3000.0, 0.3)])
def test_student_t_holds_for_any_degrees_and_far_outliers(degrees: float, noise: float) -> None:
    lik = make("student_t", degrees=degrees, noise=noise)
    for y in (0.0, 4 * noise, 100 * noise, 10.0):
        exact = scipy.stats.t.logpdf(y, degrees, 0.0, noise)
        for method in (lik.expected_log_prob, lik.log_predictive):
            assert method(one(y), one(0.0), one(0.0)).item() == pytest.approx(exact, rel=1e-6), y
    # With many degrees of freedom it is the Gaussian.
    if degrees == 3000.0:
        for method in ("expected_log_prob", "log_predictive"):
            t, normal = (getattr(x, method)(one(0.5), one(0.2), one(0.05)) for x in (lik, make("gaussian")))
            assert t.item() == pytest.approx(normal.item(), rel=3e-3)


def test_bernoulli_log_probabilities_hold_far_in_the_tails() -> None:
    lik = make("bernoulli")
    logits = torch.tensor([[-400.0], [-100.0], [-20.0], [0.0], [20.0], [100.0], [1e4]], dtype=F64)
    zero, ones = torch.zeros_like(logits), torch.ones_like(logits)
    exact = torch.nn.functional.logsigmoid(logits)
    torch.testing.assert_close(lik.expected_log_prob(ones, logits, zero), exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lik.log_predictive(ones, logits, zero), exact, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_single_precision_follows_and_agrees_with_double(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    mean, var = torch.randn((6, 2), generator=generator), torch.rand((6, 2), generator=generator)
    var[0] = 0.0
    single, double = make(kind, outputs=2, dtype=torch.float32), make(kind, outputs=2)
    y = single.sample(mean, generator).detach()
    for method in ("expected_log_prob", "log_predictive"):
        m, v = mean.clone().requires_grad_(), var.clone().requires_grad_()
        result = getattr(single, method)(y, m, v)
        assert result.dtype == torch.float32
        exact = getattr(double, method)(y.double(), mean.double(), var.double())
        torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-4)
        assert all(g.isfinite().all() for g in torch.autograd.grad(result.sum(), (m, v)))


@pytest.mark.parametrize(
    ("kind", "value", "takes"),
    [
        *((kind, math.inf, "takes") for kind in KINDS),
        ("poisson", -1.0, "counts"),
        ("poisson", 2.5, "counts"),
        ("bernoulli", 2.0, "0 or 1"),
        ("bernoulli", 0.5, "0 or 1"),
    ],
)
def test_impossible_values_are_named_with_output_and_row(kind: str, value: float, takes: str) -> None:
    y = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [1.0, value]], dtype=F64)
    with pytest.raises(ModelError, match=rf"output 'head' is {value:g} in row 2, but a {kind} likelihood .*{takes}"):
        make(kind, outputs=2).check(y, ["flow", "head"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "gausian"}, "kind = 'gausian'.*gaussian, student_t, poisson, bernoulli.*did you mean 'gaussian'"),
        ({"kind": "Student-T"}, "did you mean 'student_t'"),
        ({"kind": 3}, "kind = 3 is not a likelihood"),
        ({"noise": 0.0}, "noise = 0.0 must be a finite number above floor = 0.0001"),
        ({"noise": 1e-4}, "noise = 0.0001 must be"),
        ({"noise": math.nan}, "noise = nan must be"),
        ({"noise": "0.1"}, "noise = '0.1' must be"),
        ({"floor": 0.0}, "floor = 0.0 must be a finite number above 0"),
        ({"floor": math.inf}, "floor = inf must be"),
        ({"degrees": LOWEST_DEGREES}, "degrees = 2.1 must be a finite number above 2.1"),
        ({"degrees": True}, "degrees = True must be"),
        ({"learn_noise": "no"}, "learn_noise = 'no' is neither True nor False"),
    ],
)
def test_wrong_settings_say_key_value_and_cure(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        LikelihoodSettings(**settings)
