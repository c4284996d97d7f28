"""Nature's hyperparameters ξ: δ's amplitude and length scales, and σ_y, each with a log-normal prior.

What is set for them (`amplitude`, `lengthscale`, `noise`) is the median of the prior;
`spread` is the standard deviation of the logarithm. In ζ = (log ξ − log median)/spread the prior is N(0, I), as that of
θ̃ is. What is held (`learn`, `learn_noise`) is known, and no part of ξ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vcal_dist.gp import typical_lengthscale
from vcal_dist.likelihoods import Gaussian, StudentT

if TYPE_CHECKING:
    from vcal_dist.calibration import CalibrationModel

AMPLITUDE, LENGTHSCALES, NOISE = "amplitude of the discrepancy", "length scales of the discrepancy", "noise"
KINDS = (AMPLITUDE, LENGTHSCALES, NOISE)
MOST = 16  # dimensions of ζ that are integrated over: amplitude, length scales, noises, as far as they fit


@dataclass(frozen=True)
class Part:
    """Hyperparameters of one kind, as logarithms."""

    name: str
    parameter: nn.Parameter
    median: Tensor  # of the prior, as a logarithm, in the parameter's shape
    spread: float

    def zeta(self) -> Tensor:
        """ζ at the current values, (p,), differentiable."""
        return ((self.parameter.double() - self.median.to(self.parameter.device)) / self.spread).reshape(-1)


def parts(model: CalibrationModel) -> list[Part]:
    """What is learned of nature and has a prior."""
    found = []
    if model.delta is not None and not model.delta.hidden and model.delta.settings.learn:
        settings, last = model.delta.settings, model.delta.last
        amplitude = torch.tensor(settings.amplitude, dtype=torch.float64).log()
        found.append(Part(AMPLITUDE, last.log_amplitude, amplitude, settings.spread))
        given = settings.lengthscale or typical_lengthscale(model.delta.inputs)
        lengthscale = torch.as_tensor(given, dtype=torch.float64).log().expand_as(last.log_lengthscale)
        found.append(Part(LENGTHSCALES, last.log_lengthscale, lengthscale, settings.spread))
    likelihood, noise = model.likelihood_y, model.settings.likelihood_y
    if isinstance(likelihood, Gaussian | StudentT) and isinstance(likelihood.raw_noise, nn.Parameter):
        excess = torch.tensor(noise.noise**2 - noise.floor**2, dtype=torch.float64)
        raw = (0.5 * excess.log()).expand_as(likelihood.raw_noise)
        found.append(Part(NOISE, likelihood.raw_noise, raw, noise.spread))
    return found


def log_prior(model: CalibrationModel) -> Tensor:
    """log p(ξ) but for a constant, at the current values."""
    total = torch.zeros((), dtype=torch.float64, device=model.kappa.device)
    for part in parts(model):
        total = total - 0.5 * part.zeta().square().sum()
    return total


class Nature:
    """ζ of a model as one vector, for whoever integrates over it."""

    def __init__(self, model: CalibrationModel, kinds: tuple[str, ...] = KINDS) -> None:
        chosen: list[Part] = []
        for part in parts(model) if model.kind != "general" else []:
            if part.name in kinds and sum(each.parameter.numel() for each in [*chosen, part]) <= MOST:
                chosen.append(part)
        self.parts = chosen
        self.sizes = [part.parameter.numel() for part in chosen]

    @property
    def kinds(self) -> list[str]:
        """What it is made of."""
        return [part.name for part in self.parts]

    @property
    def dim(self) -> int:
        """How many there are."""
        return sum(self.sizes)

    @property
    def names(self) -> list[str]:
        """What each coordinate is."""
        return [
            part.name if size == 1 else f"{part.name} {i + 1}"
            for part, size in zip(self.parts, self.sizes, strict=True)
            for i in range(size)
        ]

    def of_discrepancy(self) -> list[bool]:
        """For each coordinate, whether it is δ's."""
        return [part.name != NOISE for part, size in zip(self.parts, self.sizes, strict=True) for _ in range(size)]

    def priors(self) -> list[tuple[float, float]]:
        """For each coordinate the median of its prior, as a logarithm, and the spread around it."""
        return [(float(median), part.spread) for part in self.parts for median in part.median.reshape(-1)]

    def read(self) -> Tensor:
        """ζ as the model has it, (dim,); differentiable."""
        if not self.parts:
            return torch.zeros(0, dtype=torch.float64)
        return torch.cat([part.zeta() for part in self.parts])

    @torch.no_grad()
    def put(self, zeta: Tensor) -> None:
        """Gives the model these values."""
        for part, values in zip(self.parts, zeta.detach().split(self.sizes), strict=True):
            logs = part.median.to(values) + part.spread * values.reshape(part.parameter.shape)
            part.parameter.copy_(logs.to(part.parameter))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Gives the model back what it has now, whatever happens in between."""
        before = [part.parameter.detach().clone() for part in self.parts]
        try:
            yield
        finally:
            with torch.no_grad():
                for part, values in zip(self.parts, before, strict=True):
                    part.parameter.copy_(values)
