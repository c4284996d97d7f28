"""Output transforms: T of z and y alike, followed by standardisation, with the Jacobian that a likelihood needs.

Noise is additive after the transform, which is what a user chooses with it. A density in the user's units is the one
of the scaled value times |ds/dz|.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from vcal_dist.errors import ModelError

Kind = Literal["none", "sqrt", "log", "boxcox"]


@dataclass(frozen=True, kw_only=True)
class TransformSettings:
    """One output's T(z): z, √z, log z, or Box–Cox (z^power − 1)/power, which is log z at power 0.

    Without `standardise`, amplitudes and noises of the model are in the units of T(z): for processes that are known.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    kind: Kind = "none"
    power: float | None = None
    standardise: bool = True  # whether T(z) is then scaled by the runs' mean and standard deviation

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ModelError(f"transform kind is {self.kind!r}; accepted: {', '.join(get_args(Kind))}")
        if self.kind == "boxcox" and (self.power is None or not math.isfinite(self.power)):
            raise ModelError(f"transform boxcox needs a finite power, got {self.power}; fit_power(z) finds one")
        if self.kind != "boxcox" and self.power is not None:
            raise ModelError(f"transform {self.kind} takes no power, got {self.power}; leave it out or choose boxcox")

    def forward(self, z: Tensor) -> Tensor:
        """T(z)."""
        if self.kind == "none":
            return z
        if self.kind == "sqrt":
            return z.sqrt()
        if not self.power:
            return z.log()
        return torch.expm1(self.power * z.log()) / self.power  # (z^λ − 1)/λ without cancellation at small λ

    def inverse(self, value: Tensor) -> Tensor:
        """z of a T(z), or its limit where no z has that T(z)."""
        if self.kind == "none":
            return value
        if self.kind == "sqrt":
            return value.clamp(min=0).square()
        if not self.power:
            return value.exp()
        return torch.exp(torch.log1p((self.power * value).clamp(min=-1)) / self.power)  # (1 + λT)^(1/λ)

    def log_slope(self, z: Tensor) -> Tensor:
        """log |dT/dz|."""
        if self.kind == "none":
            return torch.zeros_like(z)
        if self.kind == "sqrt":
            return -z.log() / 2 - math.log(2)  # 1/(2√z)
        return ((self.power or 0) - 1) * z.log()  # z^(λ − 1)


class OutputScaling(nn.Module):
    """s = (T(z) − mean)/sd, per output.

    `mean` and `sd`, (K,), are buffers. Values are computed in the wider of their dtype and the input's, and returned
    in the input's. NaN, which means not measured, passes through.
    """

    mean: Tensor
    sd: Tensor

    def __init__(self, transforms: Sequence[TransformSettings], mean: Tensor, sd: Tensor, names: Sequence[str]) -> None:
        super().__init__()
        _check_counts(transforms, names)
        if mean.shape != (len(names),) or sd.shape != (len(names),):
            raise ModelError(
                f"mean and sd need one value for each of the {len(names)} outputs, got shapes {tuple(mean.shape)} and "
                f"{tuple(sd.shape)}"
            )
        for name, m, s in zip(names, mean.tolist(), sd.tolist(), strict=True):
            if not (math.isfinite(m) and math.isfinite(s) and s > 0):
                raise ModelError(f"output '{name}' needs a finite mean and a positive sd, got mean {m:g} and sd {s:g}")
        self.transforms, self.names = tuple(transforms), tuple(names)
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("sd", sd.detach().clone())

    @classmethod
    def from_runs(
        cls, z: Tensor, transforms: Sequence[TransformSettings], names: Sequence[str], standardise: bool = True
    ) -> OutputScaling:
        """Mean and standard deviation of T(z) over the known values of runs z (N, K), kept in float64.

        Without `standardise`, for counts and classes, the mean is 0 and the sd 1; so they are for an output whose
        transform does not standardise.
        """
        _check_counts(transforms, names)
        zero = z.new_zeros(len(names), dtype=torch.float64)
        plain = cls(transforms, zero, zero + 1, names)
        value = plain(z.double())  # T(z), (N, K)
        if not standardise:
            return plain
        counts = (~value.isnan()).sum(0)  # (K,)
        scaled = torch.tensor([transform.standardise for transform in transforms], device=z.device)  # (K,)
        for k, name in enumerate(names):
            if not scaled[k]:
                continue
            known = value[~value[:, k].isnan(), k]
            if len(known) < 2:
                raise ModelError(
                    f"output '{name}' has {len(known)} known values in {len(z)} runs; at least 2 are needed to "
                    "standardise it: add runs or leave the output out"
                )
            if (known == known[0]).all():
                raise ModelError(
                    f"output '{name}' is the same in all {len(known)} runs that know it, with {transforms[k].kind} as "
                    f"its transform {_number(known[0])}: there is nothing to emulate; leave the output out"
                )
        mean = value.nanmean(0)
        variance = (value - mean).square().nansum(0) / (counts - 1)
        return cls(transforms, torch.where(scaled, mean, zero), torch.where(scaled, variance.sqrt(), zero + 1), names)

    def forward(self, z: Tensor, *, check: bool = True) -> Tensor:
        """s of a z in the user's units. (B, K) → (B, K). Without `check`, z must be known to lie in T's domain."""
        if check:
            self._check_domain(z)
        value = self._by_output(lambda transform, column: transform.forward(column), self._widened(z))
        return ((value - self.mean) / self.sd).to(z.dtype)

    def inverse(self, s: Tensor) -> Tensor:
        """z in the user's units. (..., K) → (..., K).

        An s below T's range gives 0, and one above the range of a Box–Cox with negative power gives ∞.
        """
        value = self._widened(s) * self.sd + self.mean
        return self._by_output(lambda transform, column: transform.inverse(column), value).to(s.dtype)

    def log_jacobian(self, z: Tensor, *, check: bool = True) -> Tensor:
        """log |ds/dz|, 0 where z is NaN. (B, K) → (B, K)."""
        if check:
            self._check_domain(z, with_slope=True)
        slope = self._by_output(lambda transform, column: transform.log_slope(column), self._widened(z))
        return torch.where(z.isnan(), 0, slope - self.sd.log()).to(z.dtype)

    def scale_noise(self, z: Tensor, noise: Tensor) -> Tensor:
        """An observation's own standard deviation in scaled space, noise·|ds/dz| (delta method). (B, K) → (B, K).

        Where z is NaN the noise comes back as it is.
        """
        return noise * self.log_jacobian(z).exp()

    def _widened(self, values: Tensor) -> Tensor:
        return values.to(torch.promote_types(values.dtype, self.mean.dtype))

    def _by_output(self, compute: Callable[[TransformSettings, Tensor], Tensor], values: Tensor) -> Tensor:
        columns = zip(self.transforms, values.unbind(-1), strict=True)
        return torch.stack([compute(transform, column) for transform, column in columns], -1)

    def _check_domain(self, z: Tensor, with_slope: bool = False) -> None:
        if z.ndim != 2 or z.shape[1] != len(self.names):
            raise ModelError(
                f"expected (rows, {len(self.names)}) for the outputs {', '.join(self.names)}, got {tuple(z.shape)}"
            )
        least = [_LEAST[t.kind] for t in self.transforms]
        zero = [t.kind == "none" or (t.kind == "sqrt" and not with_slope) for t in self.transforms]
        low, closed = z.new_tensor(least), torch.tensor(zero, device=z.device)
        outside = z.isinf() | (z < low) | ((z == low) & ~closed)
        if outside.any():  # the only synchronisation with a GPU
            row, k = (int(i) for i in outside.nonzero()[0])
            name, kind, value = self.names[k], self.transforms[k].kind, _number(z[row, k])
            if math.isinf(z[row, k]):
                raise ModelError(f"output '{name}' is {value} in row {row}; remove the row or mark it as missing (NaN)")
            needs = "values of zero or more" if zero[k] else "positive values"
            why = ": its slope at 0 is infinite" if kind == "sqrt" and with_slope else ""
            raise ModelError(
                f"output '{name}' is {value} in row {row}, but transform {kind} needs {needs}{why}; correct the value, "
                "mark it as missing (NaN) or choose transform none"
            )


_LEAST: dict[Kind, float] = {"none": -math.inf, "sqrt": 0.0, "log": 0.0, "boxcox": 0.0}


def fit_power(z: Tensor) -> float:
    """The Box–Cox exponent of greatest likelihood for the known values of one output; they must be positive."""
    from scipy import stats  # most of a second to import, for this function only

    known = z[~z.isnan()].double()
    if len(known) < 2 or (known == known[0]).all():
        raise ModelError(f"a Box–Cox power needs two or more different known values, got {len(known)} values")
    if not (known > 0).all() or known.isinf().any():
        raise ModelError(
            f"a Box–Cox power needs positive and finite values, got values from {known.min():g} to {known.max():g}; "
            "shift the output or choose another transform"
        )
    return float(stats.boxcox(known.cpu().numpy())[1])


def _check_counts(transforms: Sequence[TransformSettings], names: Sequence[str]) -> None:
    if not len(transforms) == len(names) > 0:
        raise ModelError(
            f"every output needs a transform (kind none changes nothing), got {len(transforms)} transforms for "
            f"{len(names)} outputs"
        )


def _number(value: Tensor) -> str:
    return f"{float(value):g}"
