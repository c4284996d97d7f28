"""Gaussian processes and deep ones as feature expansions (equations 3 and 4 of the paper, and its deep extension).

A stack maps inputs u through hidden layers h ← mean(h) + φ(h)·W, W ~ N(0, I), to the features φ_L of its last layer.
The last layer's weights are not here: they belong to q(θ̃, w), which treats them in closed form. Depth one is a
shallow GP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings, RandomFeatures
from vcal_dist.noise import row_normal, shared_normal
from vcal_dist.weights import MeanField

FREQUENCY_NOISE, WEIGHT_NOISE = 0, 1  # the last number of a key


@dataclass(frozen=True, kw_only=True)
class GPSettings:
    """A shallow or deep GP. Inputs lie in the unit cube, outputs have a standard deviation of one.

    Without `learn`, length scales and amplitudes are known, those of hidden layers too: they stay as given. Whether
    frequencies are learned is said with the features.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    features: FeatureSettings = field(default_factory=FeatureSettings)  # of the last layer
    lengthscale: float | tuple[float, ...] | None = None  # or one for each input; None: from the inputs
    amplitude: float = 1.0  # σ of the last layer
    hidden: tuple[int, ...] = ()  # widths of the hidden layers: none makes it shallow
    hidden_features: FeatureSettings = field(default_factory=FeatureSettings)
    hidden_lengthscale: float | None = None
    hidden_amplitude: float = 0.5
    mean: Literal["identity", "linear", "zero"] = "identity"  # of hidden layers
    feed_inputs: bool = True  # every layer sees the inputs beside the layer before it
    learn: bool = True  # whether length scales and amplitudes are learned, or known as given
    spread: float = 1.0  # of δ: prior sd of log length scales and log amplitude around what is given

    def __post_init__(self) -> None:
        if any(width < 1 for width in self.hidden):
            raise ModelError(f"hidden is {self.hidden}; accepted: widths of 1 or more, one for each hidden layer")
        if self.mean not in ("identity", "linear", "zero"):
            raise ModelError(f"mean is '{self.mean}'; accepted: identity, linear, zero")
        for name in ("amplitude", "hidden_amplitude", "lengthscale", "hidden_lengthscale", "spread"):
            value = getattr(self, name)
            several = name == "lengthscale" and isinstance(value, Sequence)
            values = value if several else [] if value is None else [value]
            if not all(0 < each < math.inf for each in values) or (several and not values):
                each_input = ", or one for each input" if name == "lengthscale" else ""
                raise ModelError(f"{name} is {value}; accepted: a positive number{each_input}")
        for name, used in (("lengthscale", True), ("hidden_lengthscale", bool(self.hidden))):
            if not self.learn and used and getattr(self, name) is None:
                raise ModelError(f"learn is false, but no {name} is given; give the one that is known, or learn it")


class Draw(NamedTuple):
    """Which Monte Carlo noise hidden layers use.

    Without `rows` a sample of the weights is shared by all rows, as the collapsed evidence needs it: it couples the
    rows. With `rows` (their global numbers) every row has noise of its own (local reparameterisation), which has
    less variance and is right where the bound is a sum over rows.
    """

    key: tuple[int, ...]
    samples: int = 1
    rows: Tensor | None = None


class HiddenLayer(nn.Module):
    """h ← mean(h) + φ(v)·W with q(W) factorised; v is h, with the stack's inputs beside it if they are fed forward."""

    def __init__(
        self,
        before: int,
        inputs: int,
        width: int,
        settings: GPSettings,
        *,
        seed: int,
        number: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.number = number
        self.features = RandomFeatures(
            inputs,
            settings.hidden_features,
            seed=seed,
            lengthscale=settings.hidden_lengthscale or typical_lengthscale(inputs),
            amplitude=settings.hidden_amplitude,
            dtype=dtype,
        )
        self.weights = MeanField(0, width, self.features.width, sd=0.01, dtype=dtype)
        self.mean = settings.mean
        if settings.mean == "identity" and before != width:
            raise ModelError(
                f"a hidden layer of width {width} after one of width {before} has no identity mean; "
                f"use mean 'linear' or 'zero', or width {before}"
            )
        if settings.mean == "linear":
            self.slope = nn.Parameter(torch.eye(before, width, dtype=dtype))

    def forward(self, before: Tensor, inputs: Tensor, draw: Draw | None) -> Tensor:
        """(..., B, before), (..., B, inputs) → (..., B, width); S samples come first where there is noise."""
        phi = self.features(inputs, sampled_frequencies(self.features, draw, self.number))
        mean, var = self.weights.moments(phi)
        if draw is None:
            value = mean
        elif draw.rows is None:
            shape = (draw.samples, self.weights.outputs, self.weights.width)
            noise = shared_normal((*draw.key, *self.number, WEIGHT_NOISE), shape, dtype=phi.dtype, device=phi.device)
            value = phi @ self.weights.sample(noise, noise.new_zeros(draw.samples, 0)).mT
        else:
            noise = torch.stack(
                [
                    row_normal(
                        (*draw.key, *self.number, WEIGHT_NOISE, s), draw.rows, self.weights.outputs, dtype=phi.dtype
                    )
                    for s in range(draw.samples)
                ]
            )
            value = mean + var.clamp_min(1e-20).sqrt() * noise  # the root's gradient is infinite at zero
        if self.mean == "zero":
            return value
        return value + (before if self.mean == "identity" else before @ self.slope)

    def kl(self) -> Tensor:
        return self.weights.kl() + self.features.kl()


class DeepGP(nn.Module):
    """Inputs u → features of the last layer. `number` keeps the noise of several stacks apart."""

    def __init__(
        self, inputs: int, settings: GPSettings, *, seed: int, number: int = 0, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.inputs, self.settings = inputs, settings
        self.number = number
        layers = []
        before, seen = inputs, inputs
        for i, width in enumerate(settings.hidden):
            layer = HiddenLayer(
                before, seen, width, settings, seed=_layer_seed(seed, i + 1), number=(number, i), dtype=dtype
            )
            layers.append(layer)
            before, seen = width, width + (inputs if settings.feed_inputs else 0)
        self.hidden: Sequence[HiddenLayer] = nn.ModuleList(layers)  # type: ignore[assignment]
        self.last = RandomFeatures(
            seen,
            settings.features,
            seed=_layer_seed(seed, 0),
            lengthscale=settings.lengthscale or typical_lengthscale(seen),
            amplitude=settings.amplitude,
            dtype=dtype,
        )
        if not settings.learn:
            for features in (self.last, *(layer.features for layer in self.hidden)):
                features.hold()

    @property
    def width(self) -> int:
        """Features of the last layer."""
        return self.last.width

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the features."""
        return self.last.log_amplitude.dtype

    @property
    def random(self) -> bool:
        """Whether the features depend on Monte Carlo noise."""
        return bool(self.hidden) or self.last.noise_shape is not None

    def hidden_values(self, u: Tensor, draw: Draw | None) -> Tensor:
        """What the last layer sees."""
        value, seen = u, u
        for layer in self.hidden:
            value = layer(value, seen, draw)
            seen = torch.cat([value, u.expand(*value.shape[:-1], -1)], -1) if self.settings.feed_inputs else value
        return seen

    def forward(self, u: Tensor, draw: Draw | None = None) -> Tensor:
        """φ_L, (B, M) or with samples of hidden layers (S, B, M); without a draw at the means of hidden weights."""
        frequencies = sampled_frequencies(self.last, draw, (self.number, len(self.hidden)))
        features: Tensor = self.last(self.hidden_values(u, draw), frequencies)
        return features

    def log_prior(self) -> Tensor:
        """log p(Ω) of learned frequencies."""
        total = self.last.log_prior()
        for layer in self.hidden:
            total = total + layer.features.log_prior()
        return total

    def kl(self) -> Tensor:
        """KL of hidden weights and variational frequencies."""
        total: Tensor = self.last.kl()
        for layer in self.hidden:
            total = total + layer.kl()
        return total


def sampled_frequencies(features: RandomFeatures, draw: Draw | None, number: tuple[int, ...]) -> Tensor:
    """Ω (d, F), or samples of it (S, d, F) where it is variational: these are always shared by all rows."""
    if draw is None or features.noise_shape is None:
        return features.frequencies()
    parameter = next(features.parameters())
    noise = shared_normal(
        (*draw.key, *number, FREQUENCY_NOISE),
        (draw.samples, *features.noise_shape),
        dtype=parameter.dtype,
        device=parameter.device,
    )
    return features.frequencies(noise)


def typical_lengthscale(inputs: int) -> float:
    """Distances in the unit cube grow with the root of its dimension: √(d/12) is their spread, up to a factor."""
    return max(0.3, math.sqrt(inputs / 12))


def _layer_seed(seed: int, layer: int) -> int:
    return seed * 1009 + layer
