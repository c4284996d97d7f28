"""The model of Kennedy and O'Hagan with whole Gaussian processes, everything unknown sampled: a slow, exact reference.

No features, no variational posterior, no optimised hyperparameters. For one output, runs z at u = (x*, t) and
observations y, scaled as in training, are jointly Gaussian given θ and the hyperparameters:

    | z |         | k_η(u, u) + σ_z²I          k_η(u, v)                    |
    | y |  ~ N(0, | k_η(v, u)           k_η(v, v) + k_δ(x, x) + (σ_z² + σ_y²)I |),     v = (x, θ),

with Matérn 5/2 kernels, ARD for η, and a constant of η with a prior of its own, which adds c² to k_η. As elsewhere the
emulator's residual σ_z is part of nature's η. Hyperparameters have wide log-normal priors, `PRIORS`; the no-U-turn
sampler draws them together with θ̃.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vcal_dist.batches import Observations, Runs
from vcal_dist.errors import ModelError
from vcal_dist.leave_one_out import gaussian_leave_one_out
from vcal_dist.priors import ThetaPrior
from vcal_dist.sampling import Draws, sample

CONSTANT = 1.0  # c, the prior standard deviation of η's constant
JITTER = 1e-8  # a variance, far below any noise

# Median and standard deviation of the logarithm, in scaled units.
PRIORS = {
    "lengthscale_eta": (0.7, 1.0),  # of every input
    "amplitude_eta": (1.0, 1.0),
    "noise_z": (0.01, 1.0),
    "amplitude_delta": (0.1, 1.0),
    "lengthscale_delta": (0.3, 1.0),
    "noise_y": (0.03, 1.0),
}


class Known(NamedTuple):
    """δ's hyperparameters where they are prior knowledge."""

    amplitude: float
    lengthscale: float


class KOH:
    """log p(z, y, θ̃, hyperparameters), and draws from it.

    A point is θ̃ (d2) and the logarithms of ℓ_η (d1 + d2), σ_η, σ_z, σ_y and, unless δ is `known`, σ_δ and ℓ_δ.
    """

    def __init__(self, prior: ThetaPrior, runs: Runs, observations: Observations, known: Known | None = None) -> None:
        if runs.z.shape[1] != 1 or observations.y.shape[1] != 1:
            raise ModelError(f"the runs have {runs.z.shape[1]} outputs; the exact reference is written for 1")
        if observations.noise is not None:
            raise ModelError("the observations have noise of their own; the exact reference is written without")
        self.prior, self.known = prior, known
        self.u, self.x = runs.u.double(), observations.x.double()
        self.target = torch.cat([runs.z, observations.y]).double()  # (N + n, 1)
        if not bool(self.target.isfinite().all()):
            raise ModelError("an output is missing (NaN); the exact reference takes rows that are known")
        width = self.u.shape[1]
        self.names = [f"lengthscale_eta{j}" for j in range(width)] + ["amplitude_eta", "noise_z", "noise_y"]
        medians = [PRIORS["lengthscale_eta"]] * width + [PRIORS[name] for name in self.names[width:]]
        if known is None:
            self.names += ["amplitude_delta", "lengthscale_delta"]
            medians += [PRIORS[name] for name in self.names[-2:]]
        self._median = torch.tensor([math.log(median) for median, _ in medians], dtype=torch.float64)
        self._spread = torch.tensor([spread for _, spread in medians], dtype=torch.float64)

    @property
    def dim(self) -> int:
        """Coordinates of a point."""
        return self.prior.dim + len(self.names)

    def covariance(self, point: Tensor) -> Tensor:
        """The covariance of (z, y), (N + n, N + n), at a point (dim,)."""
        theta, logs = point[: self.prior.dim], dict(zip(self.names, point[self.prior.dim :], strict=True))
        N, n, width = len(self.u), len(self.x), self.u.shape[1]
        v = torch.cat([self.x, self.prior.unit(theta[None]).expand(n, -1)], -1)  # (n, d1 + d2)
        lengthscale = point[self.prior.dim : self.prior.dim + width].exp()
        K = (2 * logs["amplitude_eta"]).exp() * matern52(torch.cat([self.u, v]) / lengthscale) + CONSTANT**2
        if self.known is None:
            amplitude, of_delta = logs["amplitude_delta"].exp(), logs["lengthscale_delta"].exp()
        else:
            amplitude, of_delta = (point.new_tensor(value) for value in self.known)
        K_delta = amplitude.square() * matern52(self.x / of_delta)
        noise_z, noise_y = (2 * logs["noise_z"]).exp() + JITTER, (2 * logs["noise_y"]).exp()
        noise = torch.cat([noise_z.expand(N), (noise_z + noise_y).expand(n)])
        return K + torch.nn.functional.pad(K_delta, (N, 0, N, 0)) + torch.diag(noise)

    def log_density(self, point: Tensor) -> Tensor:
        """log p(z, y | point) + log p(point), scaled outputs, normalised but for the limits of floating point."""
        theta, logs = point[: self.prior.dim], point[self.prior.dim :]
        of_theta = -0.5 * (theta.square() + math.log(2 * math.pi)).sum()
        white = (logs - self._median) / self._spread
        of_logs = (-0.5 * (white.square() + math.log(2 * math.pi)) - self._spread.log()).sum()
        value: Tensor = _LogNormal.apply(self.covariance(point), self.target)  # type: ignore[no-untyped-call]
        return value + of_theta + of_logs

    def mode(self, theta: Tensor) -> Tensor:
        """A mode of the density, from θ̃ (d2,) and the priors' medians by L-BFGS."""
        from scipy.optimize import minimize

        def negative(point: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, Any]:
            at = torch.tensor(point, dtype=torch.float64, requires_grad=True)
            value = -self.log_density(at)
            (gradient,) = torch.autograd.grad(value, at)
            return value.item(), gradient.numpy()

        found = minimize(negative, torch.cat([theta.double(), self._median]).numpy(), jac=True, method="L-BFGS-B")
        return torch.as_tensor(found.x)

    def sample(self, start: Tensor, *, chains: int = 4, draws: int = 300, tune: int = 300, seed: int = 0) -> Draws:
        """Draws of points, from chains that begin around `start` (dim,)."""
        generator = torch.Generator().manual_seed(seed)
        spread = 0.1 * torch.randn(chains, self.dim, generator=generator, dtype=torch.float64)
        return sample(self.log_density, start + spread, draws=draws, tune=tune, seed=seed)

    def theta(self, draws: Draws) -> Tensor:
        """θ of all chains in the user's units, (chains·draws, d2)."""
        return self.prior.theta(draws.values[..., : self.prior.dim].flatten(0, 1))

    @torch.no_grad()
    def leave_one_out(self, draws: Draws) -> Tensor:
        """log p(y_i | all other rows, draw) of scaled outputs, (S, n)."""
        points = draws.values.flatten(0, 1)
        each = [gaussian_leave_one_out(self.target[:, 0], self.covariance(point))[len(self.u) :] for point in points]
        return torch.stack(each)


def matern52(u: Tensor) -> Tensor:
    """The Matérn 5/2 correlations of rows u (B, d) at unit length scale, (B, B)."""
    centred = u - u.mean(0)
    square = centred.square().sum(-1)
    squared = (square[:, None] + square - 2 * centred @ centred.mT).clamp_min(0)  # r²
    correlation: Tensor = _Matern52.apply(squared)  # type: ignore[no-untyped-call]
    return correlation


class _Matern52(torch.autograd.Function):
    """(1 + s + s²/3)e⁻ˢ, s = √(5r²), as a function of r²: its derivative −(5/6)(1 + s)e⁻ˢ is finite at zero."""

    @staticmethod
    def forward(ctx: Any, squared: Tensor) -> Tensor:
        s = (5 * squared).sqrt()
        decay = torch.exp(-s)
        ctx.save_for_backward((1 + s) * decay)
        return (1 + s + s.square() / 3) * decay

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return -5 / 6 * slope * upstream


class _LogNormal(torch.autograd.Function):
    """log N(r; 0, K) and its gradient ½(αα′ − K⁻¹), α = K⁻¹r; −∞ where rounding leaves K no factor."""

    @staticmethod
    def forward(ctx: Any, K: Tensor, target: Tensor) -> Tensor:
        factor, failed = torch.linalg.cholesky_ex(K)
        if int(failed):
            ctx.save_for_backward(torch.zeros_like(K), torch.zeros_like(target))
            return K.new_tensor(-math.inf)
        alpha = torch.cholesky_solve(target, factor)
        ctx.save_for_backward(torch.cholesky_inverse(factor), alpha)
        log_determinant = factor.diagonal().log().sum()
        return -0.5 * (target * alpha).sum() - log_determinant - 0.5 * len(K) * math.log(2 * math.pi)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        inverse, alpha = ctx.saved_tensors
        return upstream * 0.5 * (alpha @ alpha.mT - inverse), None
