"""The prior of a calibration input's true value: six families, as they are written in a problem file."""

from __future__ import annotations

import math
from numbers import Real
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticKnownError


def _number(value: Any) -> float:
    """A real number of Python's or NumPy's as it is; true is not 1, and '3' is not 3."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise PydanticKnownError("float_type")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise PydanticKnownError("finite_number")
    return number


Finite = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False, gt=0)]


class Strict(BaseModel):
    """A part of a file: unknown keys are errors, and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Normal(Strict):
    """θ ~ N(mean, sd²)."""

    family: Literal["normal"] = "normal"
    mean: Finite
    sd: Positive

    def __str__(self) -> str:
        return f"normal({self.mean:g}, sd {self.sd:g})"

    @property
    def centre(self) -> float:
        return self.mean

    def cdf(self, value: float) -> float:
        """The probability of a θ below the value."""
        return _normal_cdf((value - self.mean) / self.sd)


class Uniform(Strict):
    """θ ~ U(low, high); without limits, over the input's bounds."""

    family: Literal["uniform"] = "uniform"
    low: Finite
    high: Finite

    def __str__(self) -> str:
        return f"uniform({self.low:g}, {self.high:g})"

    @property
    def centre(self) -> float:
        return (self.low + self.high) / 2

    def cdf(self, value: float) -> float:
        """The probability of a θ below the value."""
        return _between((value - self.low) / (self.high - self.low))


class LogNormal(Strict):
    """log θ ~ N(mu, sigma²)."""

    family: Literal["lognormal"] = "lognormal"
    mu: Finite
    sigma: Positive

    def __str__(self) -> str:
        return f"lognormal(median {self.centre:.4g}, sigma {self.sigma:g})"

    @property
    def centre(self) -> float:
        return math.exp(min(self.mu, 700.0))

    def cdf(self, value: float) -> float:
        """The probability of a θ below the value."""
        return _normal_cdf((math.log(value) - self.mu) / self.sigma) if value > 0 else 0.0


class Beta(Strict):
    """(θ − low)/(high − low) ~ Beta(a, b); without limits, over the input's bounds."""

    family: Literal["beta"] = "beta"
    a: Positive
    b: Positive
    low: Finite
    high: Finite

    def __str__(self) -> str:
        return f"beta({self.a:g}, {self.b:g}) on ({self.low:g}, {self.high:g})"

    @property
    def centre(self) -> float:
        return self.low + (self.high - self.low) * self.a / (self.a + self.b)

    def cdf(self, value: float) -> float:
        """The probability of a θ below the value."""
        from scipy.special import betainc  # costs more than everything else that a problem file needs

        return float(betainc(self.a, self.b, _between((value - self.low) / (self.high - self.low))))


class TruncatedNormal(Strict):
    """θ ~ N(mean, sd²) cut to (low, high); without limits, to the input's bounds."""

    family: Literal["truncated_normal"] = "truncated_normal"
    mean: Finite
    sd: Positive
    low: Finite
    high: Finite

    def __str__(self) -> str:
        return f"truncated normal({self.mean:g}, sd {self.sd:g}) on ({self.low:g}, {self.high:g})"

    @property
    def centre(self) -> float:
        return min(max(self.mean, self.low), self.high)

    def cdf(self, value: float) -> float:
        """The probability of a θ below the value."""
        # From the tail that the limits lie in, where differences of probabilities keep their digits.
        sign = -1.0 if self.low > self.mean else 1.0
        low, high, at = (
            _normal_cdf(sign * (v - self.mean) / self.sd)
            for v in (self.low, self.high, min(max(value, self.low), self.high))
        )
        return _between((at - low) / (high - low)) if high != low else float(value >= self.high)


class Gamma(Strict):
    """θ ~ Gamma(shape, rate), mean shape/rate."""

    family: Literal["gamma"] = "gamma"
    shape: Positive
    rate: Positive

    def __str__(self) -> str:
        return f"gamma(shape {self.shape:g}, rate {self.rate:g})"

    @property
    def centre(self) -> float:
        return self.shape / self.rate

    def cdf(self, value: float) -> float:
        """The probability of a θ below the value."""
        from scipy.special import gammainc

        return float(gammainc(self.shape, max(0.0, value * self.rate)))


Prior = Annotated[Normal | Uniform | LogNormal | Beta | TruncatedNormal | Gamma, Field(discriminator="family")]
WITH_LIMITS = ("uniform", "beta", "truncated_normal")  # families whose limits default to the input's bounds


def _between(share: float) -> float:
    return min(max(share, 0.0), 1.0)


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))
