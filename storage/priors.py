"""The prior of a calibration input's true value: six families, as they are written in a problem file."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(allow_inf_nan=False, gt=0)]


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


Prior = Annotated[Normal | Uniform | LogNormal | Beta | TruncatedNormal | Gamma, Field(discriminator="family")]
WITH_LIMITS = ("uniform", "beta", "truncated_normal")  # families whose limits default to the input's bounds
