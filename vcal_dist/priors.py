"""The prior of θ as a bijection: θ̃ ~ N(0, I) in, θ with its own prior, in the user's own units, out.

Componentwise θ = F⁻¹(Φ(θ̃)), F the prior's CDF. A tail is always measured from its own end, by log-CDFs, survival
functions and distances to the nearer limit, so that neither θ nor its slope is lost to rounding for large |θ̃|.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from scipy import special
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from storage.priors import Beta, Gamma, LogNormal, Normal, Prior, TruncatedNormal, Uniform
from storage.problem import CalibrationInput, Problem
from storage.validation import explain
from vcal_dist.errors import ModelError

Array = NDArray[np.float64]

HALF_LOG_2PI = 0.5 * float(np.log(2 * np.pi))
END = 38.0  # stands for ±∞ in θ̃: float64 has no tail probability beyond it
LEAST_LOG = -700.0  # of a probability that SciPy's inverses are asked for
TINY = 1e-250  # below it only the first term of a CDF's series at zero matters


class ThetaPrior(nn.Module):
    """θ = T⁻¹(θ̃), componentwise through the CDFs, so that every θ̃ has prior N(0, 1).

    Values are computed in float64 on the CPU and returned in the dtype and on the device of what came in.
    `theta` and `unit` are differentiable, also by `torch.func`, but once only: their slope is a constant to torch. The
    other methods have no gradient.
    """

    def __init__(self, priors: Sequence[Prior], bounds: Sequence[tuple[float, float]], names: Sequence[str]) -> None:
        super().__init__()
        if not len(priors) == len(bounds) == len(names) > 0:
            raise ModelError(
                f"every parameter needs a prior, bounds and a name, got {len(priors)} priors, {len(bounds)} bounds and "
                f"{len(names)} names"
            )
        for prior, limits, name in zip(priors, bounds, names, strict=True):
            data = {"name": name, "bounds": limits, "prior": prior}
            try:
                CalibrationInput.model_validate(data)
            except ValidationError as error:
                raise ModelError(f"parameter '{name}':\n{explain(error, CalibrationInput, data)}") from None
        self.priors, self.names, self.dim = tuple(priors), tuple(names), len(priors)
        self.bounds = tuple((float(low), float(high)) for low, high in bounds)
        # Columns of one family are computed together.
        columns = {kind: [j for j, prior in enumerate(priors) if isinstance(prior, kind)] for kind in FAMILIES}
        self._families = [(js, FAMILIES[kind]([priors[j] for j in js])) for kind, js in columns.items() if js]
        low, high = np.empty(self.dim), np.empty(self.dim)
        for js, family in self._families:
            low[js], high[js] = family.low, family.high
        self.support = tuple(zip(low.tolist(), high.tolist(), strict=True))

    @classmethod
    def from_problem(cls, problem: Problem) -> ThetaPrior:
        """The priors of the problem's calibration inputs."""
        inputs = problem.calibration_inputs
        return cls([v.prior for v in inputs], [v.bounds for v in inputs], [v.name for v in inputs])

    def column(self, parameter: int) -> ThetaPrior:
        """The prior of one parameter alone."""
        return ThetaPrior([self.priors[parameter]], [self.bounds[parameter]], [self.names[parameter]])

    def theta(self, tilde: Tensor) -> Tensor:
        """θ in the user's units. (..., d2) → (..., d2)."""
        return self._differentiable(tilde)

    def unit(self, tilde: Tensor) -> Tensor:
        """(θ − low)/(high − low) by the bounds, which is what the emulator sees. (..., d2) → (..., d2)."""
        low, high = torch.tensor(self.bounds, dtype=torch.float64, device=tilde.device).unbind(-1)  # (d2,), (d2,)
        return ((self._differentiable(tilde.double()) - low) / (high - low)).to(tilde.dtype)

    def tilde(self, theta: Tensor) -> Tensor:
        """θ̃ of a θ. (..., d2) → (..., d2). An end of the support, which no finite θ̃ reaches, gives ±38."""
        values = self._numpy(theta)
        low, high = np.array(self.support).T
        outside = ~((values >= low) & (values <= high) & np.isfinite(values))
        if outside.any():
            *_, j = where = tuple(int(i) for i in np.argwhere(outside)[0])
            raise ModelError(
                f"parameter '{self.names[j]}' is {values[where]:g}, outside the support ({low[j]:g}, {high[j]:g}) of "
                f"its prior {self.priors[j]}; choose a value inside it or widen the prior"
            )
        tilde = self._by_family(values, lambda family, columns: family.tilde(columns))
        return _like(np.where(np.isinf(tilde), np.copysign(END, tilde), tilde), theta)

    def log_density(self, theta: Tensor) -> Tensor:
        """log p(θ_j), −∞ outside the support. (..., d2) → (..., d2)."""
        values = self._numpy(theta)
        low, high = np.array(self.support).T
        density = self._by_family(values, lambda family, columns: family.log_density(columns))
        return _like(np.where((values < low) | (values > high), -np.inf, density), theta)

    def log_slope(self, tilde: Tensor) -> Tensor:
        """log dθ/dθ̃ = log φ(θ̃) − log p(θ). (..., d2) → (..., d2)."""
        return _like(self._by_family(self._numpy(tilde), lambda family, columns: family.theta(columns)[1]), tilde)

    def _differentiable(self, tilde: Tensor) -> Tensor:
        theta: Tensor = _Quantile.apply(tilde, self._theta_and_slope)[0]  # type: ignore[no-untyped-call]
        return theta

    def _theta_and_slope(self, tilde: Tensor) -> tuple[Tensor, Tensor]:
        """θ and dθ/dθ̃ in the dtype of θ̃, finite in it, and θ inside the support."""
        theta, log_slope = self._by_family(self._numpy(tilde), lambda family, t: np.stack(family.theta(t)))
        largest = torch.finfo(tilde.dtype).max
        low, high = torch.tensor(self.support, dtype=torch.float64, device=tilde.device).unbind(-1)  # (d2,), (d2,)
        # A limit such as 0.1 is no float32: rounding must not carry θ over it.
        inside = _like(theta, tilde).clamp(_inward(low, tilde.dtype, up=True), _inward(high, tilde.dtype, up=False))
        return inside, _like(np.exp(np.minimum(log_slope, np.log(largest))), tilde)

    def _numpy(self, tensor: Tensor) -> Array:
        if tensor.ndim == 0 or tensor.shape[-1] != self.dim:
            raise ModelError(
                f"expected {self.dim} parameters ({', '.join(self.names)}) in the last dimension, got a tensor of "
                f"shape {tuple(tensor.shape)}"
            )
        values: Array = tensor.detach().double().cpu().numpy()
        return values

    def _by_family(self, values: Array, compute: Callable[[_Family, Array], Array]) -> Array:
        with np.errstate(all="ignore"):  # limits such as log 0 are meant
            parts = [compute(family, values[..., js]) for js, family in self._families]
        result = np.empty((*parts[0].shape[:-1], self.dim))
        for (js, _), part in zip(self._families, parts, strict=True):
            result[..., js] = part
        return result


class _Quantile(torch.autograd.Function):
    """θ and its slope, computed outside torch; ∂/∂θ̃ multiplies by the slope."""

    @staticmethod
    def forward(tilde: Tensor, compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return compute(tilde)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.saved_tensors[0], None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> tuple[Tensor, None]:
        return tangent * ctx.saved_tensors[0], None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], tilde: Tensor, compute: Any) -> Any:
        assert in_dims[0] is not None
        return _Quantile.apply(tilde.movedim(in_dims[0], 0), compute), (0, 0)  # type: ignore[no-untyped-call]


class _Family(Protocol):
    """Columns of one family, d of them, with parameters of shape (d,)."""

    low: Array  # support
    high: Array

    def theta(self, t: Array) -> tuple[Array, Array]:
        """θ and log dθ/dθ̃ at θ̃ = t."""

    def tilde(self, theta: Array) -> Array:
        """θ̃, infinite at the ends of the support."""

    def log_density(self, theta: Array) -> Array:
        """log p(θ) inside the support."""


class _Normals:
    def __init__(self, priors: Sequence[Normal]) -> None:
        self.mean, self.sd = _columns(priors, "mean", "sd")
        self.low, self.high = np.full_like(self.mean, -np.inf), np.full_like(self.mean, np.inf)

    def theta(self, t: Array) -> tuple[Array, Array]:
        return self.mean + self.sd * t, np.broadcast_to(np.log(self.sd), t.shape)

    def tilde(self, theta: Array) -> Array:
        return (theta - self.mean) / self.sd

    def log_density(self, theta: Array) -> Array:
        return _log_phi(self.tilde(theta)) - np.log(self.sd)


class _LogNormals:
    def __init__(self, priors: Sequence[LogNormal]) -> None:
        self.mu, self.sigma = _columns(priors, "mu", "sigma")
        self.low, self.high = np.zeros_like(self.mu), np.full_like(self.mu, np.inf)

    def theta(self, t: Array) -> tuple[Array, Array]:
        log_theta = self.mu + self.sigma * t
        return np.exp(log_theta), log_theta + np.log(self.sigma)

    def tilde(self, theta: Array) -> Array:
        return (np.log(theta) - self.mu) / self.sigma

    def log_density(self, theta: Array) -> Array:
        inner = _log_phi(self.tilde(theta)) - np.log(self.sigma) - np.log(theta)
        return np.where(theta == 0, -np.inf, inner)


class _Uniforms:
    def __init__(self, priors: Sequence[Uniform]) -> None:
        self.low, self.high = _columns(priors, "low", "high")
        self.width = self.high - self.low

    def theta(self, t: Array) -> tuple[Array, Array]:
        distance = self.width * special.ndtr(-np.abs(t))
        return np.where(t <= 0, self.low + distance, self.high - distance), _log_phi(t) + np.log(self.width)

    def tilde(self, theta: Array) -> Array:
        return _score(np.log((theta - self.low) / self.width), np.log((self.high - theta) / self.width))

    def log_density(self, theta: Array) -> Array:
        return np.broadcast_to(-np.log(self.width), theta.shape)


class _Betas:
    """With u = (θ − low)/(high − low) and v = 1 − u, each computed by itself."""

    def __init__(self, priors: Sequence[Beta]) -> None:
        self.a, self.b, self.low, self.high = _columns(priors, "a", "b", "low", "high")
        self.width = self.high - self.low
        self.log_norm: Array = special.betaln(self.a, self.b)

    def theta(self, t: Array) -> tuple[Array, Array]:
        a, b, lower = self.a, self.b, t <= 0
        p = _probability(-np.abs(t))  # Φ(θ̃) if θ̃ ≤ 0, 1 − Φ(θ̃) if not
        u = np.where(lower, special.betaincinv(a, b, p), special.betainccinv(a, b, p))
        v = np.where(lower, special.betainccinv(b, a, p), special.betaincinv(b, a, p))
        # I_u(a, b) → uᵃ/(a·B(a, b)) for u → 0, and the same for v: their logs survive where they underflow.
        log_u = np.where(u < TINY, (special.log_ndtr(t) + np.log(a) + self.log_norm) / a, np.log(u))
        log_v = np.where(v < TINY, (special.log_ndtr(-t) + np.log(b) + self.log_norm) / b, np.log(v))
        theta = np.where(u <= v, self.low + self.width * u, self.high - self.width * v)
        log_unit_density = (a - 1) * log_u + (b - 1) * log_v - self.log_norm
        return theta, _log_phi(t) - log_unit_density + np.log(self.width)

    def tilde(self, theta: Array) -> Array:
        u, v = (theta - self.low) / self.width, (self.high - theta) / self.width
        below = np.where(u <= v, special.betainc(self.a, self.b, u), special.betaincc(self.b, self.a, v))
        above = np.where(u <= v, special.betaincc(self.a, self.b, u), special.betainc(self.b, self.a, v))
        return _score(np.log(below), np.log(above))

    def log_density(self, theta: Array) -> Array:
        u, v = (theta - self.low) / self.width, (self.high - theta) / self.width
        kernel: Array = special.xlogy(self.a - 1, u) + special.xlogy(self.b - 1, v)
        return kernel - self.log_norm - np.log(self.width)


class _Gammas:
    """With w = rate·θ ~ Gamma(shape, 1)."""

    def __init__(self, priors: Sequence[Gamma]) -> None:
        self.shape, self.rate = _columns(priors, "shape", "rate")
        self.low, self.high = np.zeros_like(self.rate), np.full_like(self.rate, np.inf)
        self.log_norm: Array = special.gammaln(self.shape)

    def theta(self, t: Array) -> tuple[Array, Array]:
        k, p = self.shape, _probability(-np.abs(t))
        w = np.where(t <= 0, special.gammaincinv(k, p), special.gammainccinv(k, p))
        # P(k, w) → wᵏ/Γ(k + 1) for w → 0.
        log_w = np.where(w < TINY, (special.log_ndtr(t) + special.gammaln(k + 1)) / k, np.log(w))
        log_unit_density = (k - 1) * log_w - w - self.log_norm
        return w / self.rate, _log_phi(t) - log_unit_density - np.log(self.rate)

    def tilde(self, theta: Array) -> Array:
        w = self.rate * theta
        return _score(np.log(special.gammainc(self.shape, w)), np.log(special.gammaincc(self.shape, w)))

    def log_density(self, theta: Array) -> Array:
        w = self.rate * theta
        kernel: Array = special.xlogy(self.shape - 1, w) - w
        return kernel - self.log_norm + np.log(self.rate)


class _TruncatedNormals:
    """With ζ = (θ − mean)/sd between α and β, and Z = Φ(β) − Φ(α)."""

    def __init__(self, priors: Sequence[TruncatedNormal]) -> None:
        mean, self.sd, self.low, self.high = _columns(priors, "mean", "sd", "low", "high")
        self.alpha, self.beta = (self.low - mean) / self.sd, (self.high - mean) / self.sd
        self.width = (self.high - self.low) / self.sd
        with np.errstate(all="ignore"):
            self.log_mass: Array = _log_mass(self.alpha, self.width)  # log Z
        for prior, log_mass in zip(priors, self.log_mass, strict=True):
            if not np.isfinite(log_mass):
                raise ModelError(
                    f"prior {prior} has no mass that can be computed between its limits; choose a mean nearer to them "
                    "or a larger sd"
                )

    def theta(self, t: Array) -> tuple[Array, Array]:
        lower = t <= 0
        start = np.where(lower, self.alpha, -self.beta)  # the upper tail is the lower one of the mirrored density
        distance = np.clip(self._distance(-np.abs(t), start), 0, self.width)
        theta = np.where(lower, self.low + self.sd * distance, self.high - self.sd * distance)
        return theta, _log_phi(t) - _log_phi(start + distance) + self.log_mass + np.log(self.sd)

    def _distance(self, t: Array, start: Array) -> Array:
        """How far from `start` the mass Φ(t)·Z reaches, t ≤ 0."""
        log_target = special.log_ndtr(t) + self.log_mass
        log_start, log_after = special.log_ndtr(start), special.log_ndtr(-start)
        left = special.ndtri_exp(np.logaddexp(log_start, log_target))  # Φ(ζ) = Φ(α) + Φ(t)·Z
        right = -special.ndtri_exp(log_after + np.log1p(-np.exp(log_target - log_after)))  # Φ(−ζ) = Φ(−α) − Φ(t)·Z
        # Close to the end ζ − α cancels; r = d − αd²/2 + (α² − 1)d³/6 − …, with r = Φ(t)·Z/φ(α), turned round does not.
        r = np.exp(log_target - _log_phi(start))
        close = r * (1 + start * r / 2 + (1 + 2 * start**2) * r**2 / 6)
        far: Array = np.where(start > 0, right, left) - start
        return np.where((1 + np.abs(start)) * r < 1e-4, close, far)

    def tilde(self, theta: Array) -> Array:
        below, above = (theta - self.low) / self.sd, (self.high - theta) / self.sd
        return _score(
            _log_mass(self.alpha, below) - self.log_mass, _log_mass(self.alpha + below, above) - self.log_mass
        )

    def log_density(self, theta: Array) -> Array:
        return _log_phi(self.alpha + (theta - self.low) / self.sd) - np.log(self.sd) - self.log_mass


FAMILIES: dict[type[Any], Callable[[Sequence[Any]], _Family]] = {
    Normal: _Normals,
    Uniform: _Uniforms,
    LogNormal: _LogNormals,
    Beta: _Betas,
    TruncatedNormal: _TruncatedNormals,
    Gamma: _Gammas,
}


def _columns(priors: Sequence[Any], *keys: str) -> list[Array]:
    return [np.array([getattr(prior, key) for prior in priors], dtype=np.float64) for key in keys]


def _log_phi(t: Array) -> Array:
    return -t * t / 2 - HALF_LOG_2PI


def _probability(t: Array) -> Array:
    """Φ(t), never zero."""
    p: Array = np.exp(np.maximum(special.log_ndtr(t), LEAST_LOG))
    return p


def _score(log_below: Array, log_above: Array) -> Array:
    """θ̃ from the logs of F(θ) and 1 − F(θ), through the smaller one."""
    lower = log_below <= log_above
    t: Array = special.ndtri_exp(np.minimum(np.where(lower, log_below, log_above), 0))
    return np.where(lower, t, -t)


def _log_mass(start: Array, width: Array) -> Array:
    """log(Φ(start + width) − Φ(start)), also far in a tail and for a narrow interval."""
    start = np.where(start + width / 2 > 0, -(start + width), start)  # the same interval on the accurate side
    middle = start + width / 2
    log_end = special.log_ndtr(start + width)
    wide = log_end + np.log1p(-np.exp(special.log_ndtr(start) - log_end))
    narrow = _log_phi(middle) + np.log(width) + np.log1p((middle**2 - 1) * width**2 / 24)
    return np.where((1 + np.abs(middle)) * width < 1e-3, narrow, wide)


def _like(values: Array, tensor: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device=tensor.device, dtype=tensor.dtype)


def _inward(limit: Tensor, dtype: torch.dtype, *, up: bool) -> Tensor:
    """The finite number of a dtype that is nearest to a limit from inside."""
    finite = torch.finfo(dtype)
    rounded = limit.to(dtype).clamp(finite.min, finite.max)
    towards = torch.full_like(rounded, torch.inf if up else -torch.inf)
    beyond = rounded.double() < limit if up else rounded.double() > limit
    return torch.where(beyond, torch.nextafter(rounded, towards), rounded)
