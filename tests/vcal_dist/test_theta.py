"""The posterior of θ against scipy, numeric integration and its own samples, for one and for two components."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from storage.priors import Beta, Gamma, LogNormal, Normal, TruncatedNormal, Uniform
from vcal_dist.errors import ModelError
from vcal_dist.priors import ThetaPrior
from vcal_dist.theta import ThetaPosterior

PRIORS = {
    "rw": (Normal(mean=3, sd=0.5), (0, 5)),
    "kw": (Uniform(low=-0.5, high=2), (-1, 3)),
    "flow": (LogNormal(mu=1, sigma=0.4), (0, 20)),
    "share": (Beta(a=2, b=3, low=1, high=4), (0, 4)),
    "rate": (Gamma(shape=3, rate=0.5), (0, 30)),
    "head": (TruncatedNormal(mean=1, sd=2, low=0, high=6), (0, 6)),
}
PRIOR = ThetaPrior([p for p, _ in PRIORS.values()], [b for _, b in PRIORS.values()], list(PRIORS))


def posterior(components: int, prior: ThetaPrior = PRIOR) -> ThetaPosterior:
    generator = torch.Generator().manual_seed(7)
    d = prior.dim
    means = 0.7 * torch.randn(components, d, dtype=torch.float64, generator=generator)
    roots = 0.3 * torch.randn(components, d, d, dtype=torch.float64, generator=generator)
    covariances = roots @ roots.mT + 0.1 * torch.eye(d)
    log_weights = torch.tensor([0.5, 1.5])[:components] + 40  # not normalised
    return ThetaPosterior(prior, means, covariances, log_weights)


ONE, TWO = posterior(1), posterior(2)
either = pytest.mark.parametrize("q", [ONE, TWO], ids=["one component", "two components"])
every_parameter = pytest.mark.parametrize("name", PRIORS)


def span(q: ThetaPosterior, name: str) -> tuple[float, float]:
    low, high = q.quantile(name, torch.tensor([1e-12, 1 - 1e-12], dtype=torch.float64)).tolist()
    return low, high


def moment(q: ThetaPosterior, name: str, power: int) -> float:
    def integrand(x: float) -> float:
        return float(x**power * q.marginal_density(name, torch.tensor(x, dtype=torch.float64)))

    centre = q.quantile(name, torch.tensor([0.1, 0.5, 0.9])).tolist()
    return float(integrate.quad(integrand, *span(q, name), points=centre, limit=100, epsrel=1e-9)[0])


def test_with_a_normal_prior_the_posterior_is_the_mixture_itself() -> None:
    prior = ThetaPrior([Normal(mean=1, sd=2), Normal(mean=-3, sd=0.5)], [(0, 2), (-4, 0)], ["a", "b"])
    q = posterior(2, prior)
    scale = np.diag([2, 0.5])
    weights = np.exp([0.5, 1.5]) / np.exp([0.5, 1.5]).sum()
    moments = [
        (np.array([1, -3]) + scale @ q.means[c].numpy(), scale @ q.covariances[c].numpy() @ scale) for c in (0, 1)
    ]
    theta = torch.randn(3, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
    joint = sum(
        w * stats.multivariate_normal(m, s).pdf(theta.numpy()) for w, (m, s) in zip(weights, moments, strict=True)
    )
    assert q.log_density(theta).exp().numpy() == pytest.approx(joint, rel=1e-10)
    marginals = [stats.norm(m[1], math.sqrt(s[1, 1])) for m, s in moments]
    values = torch.linspace(-5, -1, 9, dtype=torch.float64)
    density = sum(w * n.pdf(values) for w, n in zip(weights, marginals, strict=True))
    cdf = sum(w * n.cdf(values) for w, n in zip(weights, marginals, strict=True))
    assert q.marginal_density("b", values).numpy() == pytest.approx(density, rel=1e-10)
    assert q.marginal_cdf("b", values).numpy() == pytest.approx(cdf, rel=1e-10)
    mean = sum(w * m for w, (m, _) in zip(weights, moments, strict=True))
    covariance = sum(w * (s + np.outer(m - mean, m - mean)) for w, (m, s) in zip(weights, moments, strict=True))
    assert q.mean().numpy() == pytest.approx(mean, rel=1e-10)
    assert q.sd().numpy() == pytest.approx(np.sqrt(np.diag(covariance)), rel=1e-10)
    assert q.correlation()[0, 1].item() == pytest.approx(
        covariance[0, 1] / math.sqrt(covariance[0, 0] * covariance[1, 1])
    )
    assert torch.allclose(q.correlation().diagonal(), torch.ones(2).double())


def test_a_posterior_that_is_the_prior_has_its_density_and_moments() -> None:
    q = ThetaPosterior(PRIOR, torch.zeros(1, 6), torch.eye(6)[None])
    theta = PRIOR.theta(torch.linspace(-2, 2, 7, dtype=torch.float64)[:, None].expand(7, 6))
    assert torch.allclose(q.log_density(theta), PRIOR.log_density(theta).sum(-1), rtol=1e-9)
    distributions = [
        stats.norm(3, 0.5),
        stats.uniform(-0.5, 2.5),
        stats.lognorm(0.4, scale=math.e),
        stats.beta(2, 3, 1, 3),
        stats.gamma(3, scale=2),
        stats.truncnorm(-0.5, 2.5, 1, 2),
    ]
    assert q.mean().tolist() == pytest.approx([d.mean() for d in distributions], rel=1e-7)
    assert q.sd().tolist() == pytest.approx([d.std() for d in distributions], rel=1e-6)
    for j, distribution in enumerate(distributions):
        assert q.interval(j, 0.8) == pytest.approx(distribution.interval(0.8), rel=1e-9)


@either
@every_parameter
def test_a_marginal_density_integrates_to_one_with_the_stated_moments(q: ThetaPosterior, name: str) -> None:
    j = PRIOR.names.index(name)
    mean, square = moment(q, name, 1), moment(q, name, 2)
    assert moment(q, name, 0) == pytest.approx(1, rel=1e-7)
    assert q.mean()[j].item() == pytest.approx(mean, rel=1e-7)
    assert q.sd()[j].item() == pytest.approx(math.sqrt(square - mean**2), rel=1e-6)


@either
@every_parameter
def test_the_cdf_is_the_integral_of_the_density(q: ThetaPosterior, name: str) -> None:
    values = q.quantile(name, torch.tensor([0.2, 0.7], dtype=torch.float64))
    area, _ = integrate.quad(
        lambda x: float(q.marginal_density(name, torch.tensor(x, dtype=torch.float64))), *values.tolist(), epsrel=1e-10
    )
    cdf = q.marginal_cdf(name, values)
    assert (cdf[1] - cdf[0]).item() == pytest.approx(area, rel=1e-8)


@either
@every_parameter
def test_quantile_inverts_the_cdf(q: ThetaPosterior, name: str) -> None:
    p = torch.tensor([[1e-8, 1e-3, 0.05], [0.5, 0.95, 1 - 1e-8]], dtype=torch.float64)
    values = q.quantile(name, p)
    assert values.shape == p.shape
    assert (values.flatten().diff() > 0).all()
    assert torch.allclose(q.marginal_cdf(name, values), p, rtol=1e-7, atol=0)


def test_two_equal_components_are_one() -> None:
    twice = ThetaPosterior(PRIOR, ONE.means.expand(2, -1), ONE.covariances.expand(2, -1, -1), torch.tensor([0.0, 3.0]))
    p = torch.tensor([1e-6, 0.3, 0.5, 0.999], dtype=torch.float64)
    theta = ONE.sample(5, torch.Generator().manual_seed(0))
    for j in range(6):
        assert torch.allclose(twice.quantile(j, p), ONE.quantile(j, p), rtol=1e-13)
    assert torch.allclose(twice.log_density(theta), ONE.log_density(theta), rtol=1e-12)
    assert torch.allclose(twice.sd(), ONE.sd(), rtol=1e-12)
    assert torch.allclose(twice.correlation(), ONE.correlation(), rtol=1e-12)


def test_the_quantile_between_two_far_components_is_found() -> None:
    prior = ThetaPrior([Normal(mean=0, sd=1)], [(-9, 9)], ["a"])
    variances = torch.tensor([0.01, 0.01]).reshape(2, 1, 1)
    q = ThetaPosterior(prior, torch.tensor([[-4.0], [4.0]]), variances, torch.tensor([0.25, 0.75]).log())
    # P(θ ≤ a) = 0.25·Φ((a + 4)/0.1) on the left, 0.25 + 0.75·Φ((a − 4)/0.1) on the right.
    expected = [-4 + 0.1 * stats.norm.ppf(0.8), 4 + 0.1 * stats.norm.ppf(0.2)]
    assert q.quantile("a", torch.tensor([0.2, 0.4], dtype=torch.float64)).tolist() == pytest.approx(expected, rel=1e-6)


@either
def test_samples_follow_the_marginals_and_the_correlation(q: ThetaPosterior) -> None:
    theta = q.sample(4000, torch.Generator().manual_seed(11))
    assert theta.shape == (4000, 6)
    for j, name in enumerate(PRIOR.names):
        uniform = q.marginal_cdf(name, theta[:, j]).numpy()
        assert stats.kstest(uniform, "uniform").pvalue > 1e-3
    assert torch.allclose(torch.corrcoef(PRIOR.tilde(theta).T), q.correlation(), atol=0.08)
    assert torch.equal(theta, q.sample(4000, torch.Generator().manual_seed(11)))


@either
def test_the_joint_density_integrates_to_its_marginal(q: ThetaPosterior) -> None:
    # Two of the parameters alone: the joint density integrated over the second is the marginal of the first.
    pair = ThetaPrior([PRIOR.priors[j] for j in (3, 4)], [PRIOR.bounds[j] for j in (3, 4)], ["share", "rate"])
    q2 = ThetaPosterior(pair, q.means[:, 3:5], q.covariances[:, 3:5, 3:5], q.log_weights)
    value = torch.tensor(2.2, dtype=torch.float64)

    def joint(other: float) -> float:
        return float(q2.log_density(torch.stack([value, value.new_tensor(other)])).exp())

    area, _ = integrate.quad(joint, *span(q, "rate"), limit=100, epsrel=1e-9)
    assert area == pytest.approx(q.marginal_density("share", value).item(), rel=1e-7)


@either
def test_outside_the_support_there_is_no_density(q: ThetaPosterior) -> None:
    values = torch.tensor([-math.inf, 0.9, 4.1, math.inf, math.nan], dtype=torch.float64)
    assert q.marginal_density("share", values)[:4].tolist() == [0, 0, 0, 0]
    assert q.marginal_cdf("share", values)[:4].tolist() == [0, 0, 1, 1]
    assert q.marginal_cdf("rw", values)[[0, 3]].tolist() == [0, 1]
    assert q.marginal_density("share", values)[4].isnan()
    assert q.marginal_cdf("share", values)[4].isnan()
    theta = q.sample(2, torch.Generator().manual_seed(0))
    theta[1, 3] = 4.1
    assert q.log_density(theta).isfinite().tolist() == [True, False]


def test_an_interval_has_equal_tails() -> None:
    low, high = TWO.interval("rate")
    assert TWO.marginal_cdf("rate", torch.tensor([low, high], dtype=torch.float64)).tolist() == pytest.approx(
        [0.05, 0.95]
    )


def test_everything_is_float64_whatever_comes_in() -> None:
    q = ThetaPosterior(PRIOR, torch.zeros(1, 6), torch.eye(6)[None] / 2)
    x = torch.tensor([0.5])
    results = [q.sample(2, torch.Generator()), q.mean(), q.sd(), q.correlation(), q.quantile(0, x)]
    results += [q.marginal_cdf(1, x), q.marginal_density(1, x), q.log_density(q.sample(2, torch.Generator()).float())]
    assert {r.dtype for r in results} == {torch.float64}


@pytest.mark.parametrize(
    ("parameter", "message"),
    [("flwo", r"unknown parameter 'flwo' \(did you mean 'flow'\?\); accepted: rw, kw"), (6, "0 to 5"), (-1, "0 to 5")],
)
def test_an_unknown_parameter_is_an_error_with_the_nearest_name(parameter: int | str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ONE.interval(parameter)


def test_wrong_mixtures_are_errors() -> None:
    zero, identity = torch.zeros(1, 6), torch.eye(6)[None]
    with pytest.raises(ModelError, match=r"component 1 is not positive definite, its smallest eigenvalue is -1"):
        ThetaPosterior(PRIOR, zero.expand(2, -1), torch.cat([identity, -identity]))
    lopsided = identity.clone()
    lopsided[0, 0, 1] = 0.3
    with pytest.raises(ModelError, match=r"component 0 is not symmetric, opposite entries differ by 0\.3"):
        ThetaPosterior(PRIOR, zero, lopsided)
    with pytest.raises(ModelError, match="component 0 holds NaN"):
        ThetaPosterior(PRIOR, zero, identity * math.nan)
    with pytest.raises(ModelError, match="means must be finite"):
        ThetaPosterior(PRIOR, zero / 0, identity)
    with pytest.raises(ModelError, match="one weight positive"):
        ThetaPosterior(PRIOR, zero, identity, torch.tensor([-math.inf]))
    for means, covariances, log_weights in [
        (torch.zeros(6), identity, None),
        (zero, identity[0], None),
        (zero, identity, torch.zeros(2)),
        (zero[:0], identity[:0], None),
    ]:
        with pytest.raises(ModelError, match=r"needs means \(C, 6\)"):
            ThetaPosterior(PRIOR, means, covariances, log_weights)
    with pytest.raises(ModelError, match="strictly between 0 and 1"):
        ONE.quantile(0, torch.tensor([0.5, 1.0]))
    with pytest.raises(ModelError, match=r"strictly between 0 and 1, got 1\.2"):
        ONE.interval(0, 1.2)
