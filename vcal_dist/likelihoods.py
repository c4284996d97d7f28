"""Likelihoods p(y | f) of outputs, for runs and observations alike, with their expectations under f ~ N(mean, var).

The Student-t and the logistic function are scale mixtures of Gaussians, so their expectations under a Gaussian are
one-dimensional integrals of smooth functions over the mixing variable. The trapezoidal rule converges exponentially
on them, for any variance: unlike Gauss-Hermite nodes in f, which miss the kink of log p when the variance is large,
and whose derivative in the variance is 0/0 when it is zero.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from vcal_dist.errors import ModelError
from vcal_dist.quadrature import LOG_2PI, log_lambert_w, logistic_as_normals, nodes, reach

LikelihoodKind = Literal["gaussian", "student_t", "poisson", "bernoulli"]

LOWEST_DEGREES = 2.1  # above 2, so that the Student-t has a variance
TAIL = 36.0  # an integrand below e⁻³⁶ of its peak is left out


@dataclass(frozen=True, kw_only=True)
class LikelihoodSettings:
    """Which likelihood, and where its parameters start.

    >>> LikelihoodSettings(kind="student_t", degrees=5.0).noise
    0.1
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    kind: LikelihoodKind = "gaussian"
    noise: float = 0.1  # starting value of the standard deviation (Student-t: scale), in units of the scaled outputs
    floor: float = 1e-4  # the standard deviation never falls below it
    learn_noise: bool = True  # False: noise and degrees stay at their starting values
    spread: float = 2.0  # of observations: prior sd of the noise's logarithm around its starting value
    degrees: float = 4.0  # Student-t: starting value of the degrees of freedom

    def __post_init__(self) -> None:
        accepted = get_args(LikelihoodKind)
        if self.kind not in accepted:
            near = get_close_matches(str(self.kind).lower(), accepted, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ModelError(f"kind = {self.kind!r} is not a likelihood: take one of {', '.join(accepted)}{hint}")
        if not isinstance(self.learn_noise, bool):
            raise ModelError(f"learn_noise = {self.learn_noise!r} is neither True nor False")
        _check_above("floor", self.floor, 0.0, "0")
        _check_above("spread", self.spread, 0.0, "0")
        _check_above("noise", self.noise, self.floor, f"floor = {self.floor:g}")
        _check_above("degrees", self.degrees, LOWEST_DEGREES, f"{LOWEST_DEGREES}, where the variance stays finite")


class Likelihood(nn.Module, ABC):
    """p(y | f), row by row and output by output.

    Shapes: y (B, K); mean, var and f broadcast to (..., B, K); noise (B, K) is the observation's own standard
    deviation; extra_variance, (K,) to (..., B, K), is more variance around f (an emulator's residual, say). Results
    are (..., B, K), exactly 0 and without a gradient where y is NaN, which means "not observed".
    """

    kind: ClassVar[LikelihoodKind]
    accepts: ClassVar[str]  # the values that y can take
    takes_noise: ClassVar[bool]

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs

    def expected_log_prob(
        self, y: Tensor, mean: Tensor, var: Tensor, noise: Tensor | None = None, extra_variance: Tensor | None = None
    ) -> Tensor:
        """E_{f ~ N(mean, var)} log p(y | f)."""
        missing, y, mean, var, noise = _fill(y, mean, var, noise)
        return self._expected_log_prob(y, mean, *self._variances(var, noise, extra_variance)).masked_fill(missing, 0.0)

    def log_predictive(
        self, y: Tensor, mean: Tensor, var: Tensor, noise: Tensor | None = None, extra_variance: Tensor | None = None
    ) -> Tensor:
        """log E_{f ~ N(mean, var)} p(y | f)."""
        missing, y, mean, var, noise = _fill(y, mean, var, noise)
        return self._log_predictive(y, mean, *self._variances(var, noise, extra_variance)).masked_fill(missing, 0.0)

    def moments(
        self, mean: Tensor, var: Tensor, noise: Tensor | None = None, extra_variance: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of y when f ~ N(mean, var)."""
        mean_y, var_y = self._moments(mean, *self._variances(var, noise, extra_variance))
        return mean_y + torch.zeros_like(var_y), var_y + torch.zeros_like(mean_y)  # both (..., B, K)

    def sample(self, f: Tensor, generator: torch.Generator, noise: Tensor | None = None) -> Tensor:
        """One y for every f, drawn on the generator's device."""
        return self._sample(f, generator, self._square(noise))

    def check(self, y: Tensor, names: Sequence[str]) -> None:
        """A ModelError when a value of y (B, K) cannot come from this likelihood; NaN can, it is not observed."""
        wrong = (torch.isinf(y) | self._impossible(y)) & ~torch.isnan(y)
        if wrong.any():
            row, column = (int(i) for i in wrong.nonzero()[0])
            raise ModelError(
                f"output {names[column]!r} is {y[row, column].item():g} in row {row}, but a {self.kind} likelihood "
                f"takes {self.accepts}: mend the value, write NaN if it was not observed, or choose another likelihood"
            )

    def _square(self, noise: Tensor | None) -> Tensor | float:
        if noise is None:
            return 0.0
        if not self.takes_noise:
            raise ModelError(
                f"a {self.kind} likelihood has no standard deviation to which a column of noise could add: "
                "remove the column, or choose gaussian or student_t"
            )
        return noise.square()

    def _variances(self, var: Tensor, noise: Tensor | None, extra: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """The variance of f and the observation's own."""
        return var if extra is None else var + extra, self._square(noise)

    # What each likelihood defines, without missing values, `own` being the variance that the observation adds.

    @abstractmethod
    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor, own: Tensor | float) -> Tensor: ...

    @abstractmethod
    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor, own: Tensor | float) -> Tensor: ...

    @abstractmethod
    def _moments(self, mean: Tensor, var: Tensor, own: Tensor | float) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def _sample(self, f: Tensor, generator: torch.Generator, own: Tensor | float) -> Tensor: ...

    def _impossible(self, y: Tensor) -> Tensor:
        return torch.zeros_like(y, dtype=torch.bool)


class _Scaled(Likelihood):
    """A likelihood with a scale σ per output, σ² = floor² + exp(2·raw_noise)."""

    accepts = "finite numbers"
    takes_noise = True
    raw_noise: Tensor  # (K,)

    def __init__(self, settings: LikelihoodSettings, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(outputs)
        self.floor = settings.floor
        self._start("raw_noise", 0.5 * math.log(settings.noise**2 - settings.floor**2), settings, dtype)

    def noise_variance(self) -> Tensor:
        """σ² of every output, (K,)."""
        return self.floor**2 + torch.exp(2 * self.raw_noise)

    def _start(self, name: str, value: float, settings: LikelihoodSettings, dtype: torch.dtype) -> None:
        raw = torch.full((self.outputs,), value, dtype=dtype)
        if settings.learn_noise:
            self.register_parameter(name, nn.Parameter(raw))
        else:
            self.register_buffer(name, raw)


class Gaussian(_Scaled):
    """y ~ N(f, σ² + noise² + extra)."""

    kind = "gaussian"

    def precision(self, y: Tensor, noise: Tensor | None = None, extra_variance: Tensor | None = None) -> Tensor:
        """1/(σ² + noise² + extra), (..., B, K), exactly 0 where y is NaN: the weights of the rows in a Gram matrix."""
        missing, y, _, _, noise = _fill(y, y, y, noise)
        _, own = self._variances(y, noise, extra_variance)
        variance = self.noise_variance() + own
        return torch.where(missing, 0.0, variance.reciprocal())

    def _variances(self, var: Tensor, noise: Tensor | None, extra: Tensor | None) -> tuple[Tensor, Tensor | float]:
        own = self._square(noise)
        return var, own if extra is None else own + extra  # with it E log p stays the expectation of a proper density

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor, own: Tensor | float) -> Tensor:
        s2 = self.noise_variance() + own
        # log N(y; mean, s²) − var/(2s²)
        return -0.5 * (LOG_2PI + s2.log() + ((y - mean).square() + var) / s2)

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor, own: Tensor | float) -> Tensor:
        return _log_normal((y - mean).square(), var + self.noise_variance() + own)

    def _moments(self, mean: Tensor, var: Tensor, own: Tensor | float) -> tuple[Tensor, Tensor]:
        return mean, var + self.noise_variance() + own

    def _sample(self, f: Tensor, generator: torch.Generator, own: Tensor | float) -> Tensor:
        unit = torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)
        return f + (self.noise_variance() + own).sqrt() * unit


class StudentT(_Scaled):
    """(y − f)/s ~ t(ν) with s² = σ² + noise², and ν = 2.1 + exp(raw_degrees) per output."""

    kind = "student_t"
    raw_degrees: Tensor  # (K,)
    node: Tensor  # (Q,)
    weight: Tensor  # (Q,)

    def __init__(self, settings: LikelihoodSettings, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(settings, outputs, dtype)
        self._start("raw_degrees", math.log(settings.degrees - LOWEST_DEGREES), settings, dtype)
        # Step 0.4 in log τ gives nine digits, and seven of the derivatives; e⁻⁴⁰ suits residuals up to 10⁵ scales.
        step = 0.4
        node = torch.arange(-40.0, 3.5, step, dtype=torch.float64).exp()
        self.register_buffer("node", node.to(dtype), persistent=False)
        self.register_buffer("weight", (step * torch.exp(-node)).to(dtype), persistent=False)

    def degrees(self) -> Tensor:
        """ν of every output, (K,)."""
        return LOWEST_DEGREES + torch.exp(self.raw_degrees)

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor, own: Tensor | float) -> Tensor:
        nu, s2 = self.degrees(), self.noise_variance() + own
        a = ((y - mean).square() / (nu * s2))[..., None]  # squared residual, in units of ν·s²
        v = (var / (nu * s2))[..., None]
        # log(1 + u²) = ∫ (1 − e^(−τu²)) e^(−τ)/τ dτ, and E e^(−τu²) = (1 + 2τv)^(−½) exp(−τa/(1 + 2τv))
        exponent = 0.5 * torch.log1p(2 * self.node * v) + self.node * a / (1 + 2 * self.node * v)  # (..., B, K, Q)
        expected_log1p = -(self.weight * torch.expm1(-exponent)).sum(-1)  # (..., B, K)
        # log t = log Γ((ν+1)/2) − log Γ(ν/2) − ½ log(π·ν·s²) − (ν+1)/2 · log(1 + (y−f)²/(ν·s²))
        constant = torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - 0.5 * torch.log(math.pi * nu * s2)
        return constant - (nu + 1) / 2 * expected_log1p

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor, own: Tensor | float) -> Tensor:
        # t(y; f, s, ν) = ∫ N(y; f, s²/λ) Gamma(λ; ν/2, ν/2) dλ, hence N(y; mean, var + s²/λ) under the Gaussian
        nu, s2, residual2 = self.degrees(), self.noise_variance() + own, (y - mean).square()
        k = nu / 2
        with torch.no_grad():  # the integral does not depend on where its nodes lie
            spread = 4 * nu * var.clamp_min(torch.finfo(var.dtype).tiny)
            # Below λ = lowest the integrand can only rise with λ: its derivative in log λ bounds it.
            lowest = torch.maximum(nu / (nu + residual2 / s2), 1 - residual2 / spread)
            left, right = reach(TAIL / k)
            log_lam, step = nodes(lowest.log() - left, torch.log1p(1 / nu) + right)
        density = k * k.log() - torch.lgamma(k)  # Gamma density of log λ without k·(log λ − λ), (K,)
        terms = density[:, None] + k[:, None] * (log_lam - log_lam.exp())  # (..., B, K, Q)
        terms = terms + _log_normal(residual2[..., None], var[..., None] + s2[..., None] * torch.exp(-log_lam))
        return torch.logsumexp(terms, dim=-1) + step.log()

    def _moments(self, mean: Tensor, var: Tensor, own: Tensor | float) -> tuple[Tensor, Tensor]:
        nu = self.degrees()
        return mean, var + (self.noise_variance() + own) * nu / (nu - 2)

    def _sample(self, f: Tensor, generator: torch.Generator, own: Tensor | float) -> Tensor:
        # Bailey's polar method: √(ν·(U^(−2/ν) − 1))·cos(2πV) ~ t(ν), from two uniform numbers
        u, v = torch.rand((2, *f.shape), generator=generator, dtype=f.dtype, device=f.device)
        nu = self.degrees()
        unit = torch.sqrt(nu * torch.expm1(-2 / nu * torch.log1p(-u))) * torch.cos(2 * math.pi * v)
        return f + (self.noise_variance() + own).sqrt() * unit


class Poisson(Likelihood):
    """y ~ Poisson(exp(f))."""

    kind = "poisson"
    accepts = "whole numbers from 0 (counts)"
    takes_noise = False

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor, own: Tensor | float) -> Tensor:
        # E log p = y·mean − exp(mean + var/2) − log y!
        return y * mean - torch.exp(mean + var / 2) - torch.lgamma(y + 1)

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor, own: Tensor | float) -> Tensor:
        with torch.no_grad():
            v = var.clamp_min(torch.finfo(var.dtype).tiny)
            # The mode of y·f − e^f − (f − mean)²/(2v): w·e^w = v·e^(mean + v·y) with w = v·e^f
            mode = log_lambert_w(v.log() + mean + v * y) - v.log()
            sd = v.sqrt()
            centre = sd * (y - mode.exp())  # (mode − mean)/√v
            # Away from the mode it falls like e^f, and at least like the Gaussian.
            left, right = ((r / sd).clamp_max(math.sqrt(2 * TAIL)) for r in reach(TAIL * torch.exp(-mode)))
            u, step = nodes(centre - left, centre + right)
            f = mean[..., None] + sd[..., None] * u  # (..., B, K, Q)
            count = y[..., None]
            terms = count * f - f.exp() - u.square() / 2
            value = torch.logsumexp(terms, dim=-1) + step.log() - LOG_2PI / 2 - torch.lgamma(y + 1)
            # ∂/∂mean E p = E p′ and ∂/∂var E p = ½ E p″, which hold at var = 0 too
            posterior, slope = torch.softmax(terms, dim=-1), count - f.exp()
            by_mean = (posterior * slope).sum(-1)
            by_var = 0.5 * (posterior * (slope.square() - f.exp())).sum(-1)
        # Zero is added: autograd through √var would give 0/0 at var = 0. Only first derivatives are right.
        return value + by_mean * (mean - mean.detach()) + by_var * (var - var.detach())

    def _moments(self, mean: Tensor, var: Tensor, own: Tensor | float) -> tuple[Tensor, Tensor]:
        rate = torch.exp(mean + var / 2)
        return rate, rate + rate.square() * torch.expm1(var)  # E rate + Var rate

    def _sample(self, f: Tensor, generator: torch.Generator, own: Tensor | float) -> Tensor:
        return torch.poisson(f.exp(), generator=generator)

    def _impossible(self, y: Tensor) -> Tensor:
        return (y < 0) | (y != y.floor())


class Bernoulli(Likelihood):
    """y ~ Bernoulli(1/(1 + exp(−f)))."""

    kind = "bernoulli"
    accepts = "0 or 1 (classes)"
    takes_noise = False
    tau: Tensor  # (Q,)
    log_weight: Tensor  # (Q,)

    def __init__(self, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(outputs)
        tau, log_weight = logistic_as_normals()
        self.register_buffer("tau", tau.to(dtype), persistent=False)
        self.register_buffer("log_weight", log_weight.to(dtype), persistent=False)

    def _expected_log_prob(self, y: Tensor, mean: Tensor, var: Tensor, own: Tensor | float) -> Tensor:
        common = self.log_weight > -TAIL  # the rare wide normals matter only to the logarithm of a small probability
        tau, weight = self.tau[common], self.log_weight[common].exp()
        # −log p = log(1 + e^m) = E max(m + u, 0), m = ∓f, u logistic; for normal u: m·Φ(m/t) + t·φ(m/t), t² = τ² + var
        m = ((1 - 2 * y) * mean)[..., None]
        t = torch.sqrt(tau.square() + var[..., None])  # (..., B, K, Q)
        z = m / t
        softplus: Tensor = m * torch.special.ndtr(z) + t * torch.exp(-0.5 * (z.square() + LOG_2PI))
        return -(weight * softplus).sum(-1)

    def _log_predictive(self, y: Tensor, mean: Tensor, var: Tensor, own: Tensor | float) -> Tensor:
        # E 1/(1 + e^(−m)) = P(u < m) = Σ w·Φ(m/√(τ² + var)), m = ±f
        m = ((2 * y - 1) * mean)[..., None]
        t = torch.sqrt(self.tau.square() + var[..., None])
        return torch.logsumexp(self.log_weight + torch.special.log_ndtr(m / t), dim=-1)

    def _moments(self, mean: Tensor, var: Tensor, own: Tensor | float) -> tuple[Tensor, Tensor]:
        p = self._log_predictive(torch.ones_like(mean), mean, var, own).exp()
        return p, p * (1 - p)

    def _sample(self, f: Tensor, generator: torch.Generator, own: Tensor | float) -> Tensor:
        return torch.bernoulli(torch.sigmoid(f), generator=generator)

    def _impossible(self, y: Tensor) -> Tensor:
        return (y != 0) & (y != 1)


def make_likelihood(settings: LikelihoodSettings, outputs: int, dtype: torch.dtype = torch.float64) -> Likelihood:
    """The likelihood that the settings describe, for a number of outputs.

    >>> counts = make_likelihood(LikelihoodSettings(kind="poisson"), outputs=1)
    >>> counts.moments(mean=torch.zeros(1), var=torch.zeros(1))
    (tensor([1.]), tensor([1.]))
    """
    match settings.kind:
        case "gaussian":
            return Gaussian(settings, outputs, dtype)
        case "student_t":
            return StudentT(settings, outputs, dtype)
        case "poisson":
            return Poisson(outputs)
        case "bernoulli":
            return Bernoulli(outputs, dtype)


def _fill(
    y: Tensor, mean: Tensor, var: Tensor, noise: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Where y is missing, and everything with zeros there: a masked result alone would leave NaN in the gradients."""
    missing = torch.isnan(y)
    y, mean, var = (torch.where(missing, 0.0, x) for x in (y, mean, var))
    return missing, y, mean, var, None if noise is None else torch.where(missing, 0.0, noise)


def _log_normal(residual2: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (LOG_2PI + variance.log() + residual2 / variance)


def _check_above(key: str, value: object, bound: float, bound_name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not bound < value < math.inf:
        raise ModelError(f"{key} = {value!r} must be a finite number above {bound_name}")
