"""Exact Gaussian processes of up to a thousand rows, several at a time: one for each set of rows that counts.

    k(u, v) = σ²·c(|u − v|/ℓ) + l²·(u − ½)·(v − ½) + 1,    c Gaussian or Matérn-5/2, one ℓ for each input,

with noise s² beside it. All outputs share the hyperparameters, which are maximum a posteriori. Shapes: P processes, N
rows, d inputs, K outputs.

`paths` gives a process after its rows as features with weights N(0, I) (Wilson et al. 2020, pathwise conditioning):
the prior's random features φ, less what the process itself would interpolate of them from their values at its rows,

    D(u) = φ(u) − k(u, X)(K + s²I)⁻¹Φ,    D(u)·D(v) ≈ cov(f(u), f(v) | rows).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torch.quasirandom import SobolEngine

from vcal_dist.cholesky import cholesky
from vcal_dist.features import FeatureSettings, draw_frequencies
from vcal_dist.threads import torch_threads

Kind = Literal["gaussian", "matern52"]
KINDS: tuple[Kind, ...] = ("gaussian", "matern52")
STEPS, RATE, FIRST_ROWS = 100, 0.3, 100  # of Adam, which finds the basin of the mode from a part of the rows
ITERATIONS = 100  # of L-BFGS, which ends at the mode with all of them
BETTER = 1.0  # nats, by which the mode of another process must be better than the own one
FARTHEST = 12.0  # that L-BFGS takes a logarithm from zero
# Where Adam begins: from long length scales and little noise it often ends in a poor mode.
FIRST_LENGTHSCALE, FIRST_NOISE = 0.2, 0.1
SMALLEST_NOISE = 1e-4
# Prior medians and standard deviations of the logarithms, for FEW rows and for MANY. The mode knows nothing of how
# uncertain it is: of few rows it is held near what is usual. The length scale's median grows with the root of the
# number of inputs (Hvarfner, Hellsten and Nardi 2024, whose prior is the one for many rows).
FEW, MANY = 20, 100
LENGTHSCALE, LENGTHSCALE_SPREAD = (0.5, math.exp(math.sqrt(2))), (1.0, math.sqrt(3))
AMPLITUDE, AMPLITUDE_SPREAD = (1.0, math.e), (1.0, 2.0)
SLOPE, SLOPE_SPREAD = 0.5, 1.0
NOISE, NOISE_SPREAD = 1e-3, 3.0
PATHS, CANDIDATES = 32, 512  # frequencies of the prior's features, and those that they are chosen from
PLACES = 256  # of the unit cube, over which variances are compared


class Hyperparameters(NamedTuple):
    """Of P processes, as logarithms."""

    lengthscale: Tensor  # (P, d)
    amplitude: Tensor  # (P,)
    slope: Tensor  # (P,) l
    noise: Tensor  # (P,)

    def noise_variance(self) -> Tensor:
        """s² (P,)."""
        return SMALLEST_NOISE**2 + (2 * self.noise).exp()

    def take(self, process: int) -> Hyperparameters:
        """One of the processes."""
        return Hyperparameters(*(part[process : process + 1] for part in self))


class Conditioned(NamedTuple):
    """P processes after their rows: f has mean k(u, X)·α and variance k(u, u) − |L⁻¹k(X, u)|²."""

    kind: Kind
    hyperparameters: Hyperparameters
    rows: Tensor  # X (N, d)
    counted: Tensor  # (P, N) which of the rows
    lower: Tensor  # L (P, N, N), the identity where a row does not count
    alpha: Tensor  # (P, N, K)

    def moments(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (P, B, K) and variance (P, B) of f at u (B, d)."""
        across = covariance(self.kind, self.hyperparameters, self.rows, u) * self.counted.unsqueeze(-1)  # (P, N, B)
        h = self.hyperparameters
        prior = (2 * h.amplitude).exp()[:, None] + (2 * h.slope).exp()[:, None] * (u - 0.5).square().sum(-1) + 1.0
        explained = torch.linalg.solve_triangular(self.lower, across, upper=False).square().sum(1)
        return across.mT @ self.alpha, (prior - explained).clamp_min(0.0)


def covariance(kind: Kind, h: Hyperparameters, u: Tensor, v: Tensor) -> Tensor:
    """k at u (A, d) and v (B, d): (P, A, B).

    Distances and the linear part are one product of matrices each: memory, not arithmetic, is what it costs.
    """
    inverse = (-h.lengthscale).exp().unsqueeze(1) * (math.sqrt(5) if kind == "matern52" else 1.0)  # (P, 1, d)
    a, b = u * inverse, v * inverse
    square = _with(-2 * a, a.square().sum(-1, keepdim=True), 1.0) @ _with(b, 1.0, b.square().sum(-1, keepdim=True)).mT
    square = square.clamp_min(1e-12)  # rounding; and a root has no slope at zero
    log_variance = (2 * h.amplitude)[:, None, None]
    slope = (2 * h.slope).exp()[:, None, None]  # l²
    linear = _with(slope * (u - 0.5), 1.0) @ _with(v - 0.5, 1.0).mT
    if kind == "gaussian":
        return linear + torch.exp(log_variance - 0.5 * square)
    s = square.sqrt()
    return linear + (1 + s + square / 3) * torch.exp(log_variance - s)


def _with(rows: Tensor, *columns: Tensor | float) -> Tensor:
    """Rows (..., B, d) with further columns (..., B, 1) behind them."""
    one = rows[..., :1]
    more = [torch.full_like(one, c) if isinstance(c, float) else c.expand_as(one) for c in columns]
    return torch.cat([rows, *more], -1)


def log_prior(h: Hyperparameters, rows: Tensor) -> Tensor:
    """log p of the hyperparameters of processes of so many rows (P,), up to a constant: (P,)."""
    many = ((rows.double() / FEW).log() / math.log(MANY / FEW)).clamp(0.0, 1.0)

    def between(ends: tuple[float, float]) -> Tensor:
        return ends[0] * (ends[1] / ends[0]) ** many

    median = (between(LENGTHSCALE) * math.sqrt(h.lengthscale.shape[-1])).log()
    return -0.5 * (
        ((h.lengthscale - median.unsqueeze(-1)) / between(LENGTHSCALE_SPREAD).unsqueeze(-1)).square().sum(-1)
        + ((h.amplitude - between(AMPLITUDE).log()) / between(AMPLITUDE_SPREAD)).square()
        + ((h.slope - math.log(SLOPE)) / SLOPE_SPREAD).square()
        + ((h.noise - math.log(NOISE)) / NOISE_SPREAD).square()
    )


def learn(kind: Kind, u: Tensor, z: Tensor, counted: Tensor) -> Hyperparameters:
    """Maximum a posteriori from rows u (N, d) and z (N, K) in random order, for each set of them that counts (P, N)."""
    first = slice(None, FIRST_ROWS)
    with torch_threads(1):  # thousands of small steps: two threads took three times as long, waiting for each other
        near = _by_adam(kind, u[first], z[first], counted[:, first], counted.sum(-1))
        modes = [_by_lbfgs(kind, u[own], z[own], near.take(p)) for p, own in enumerate(counted)]
        found = [_best_of(kind, u[own], z[own], modes, p) for p, own in enumerate(counted)]
    return Hyperparameters(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _best_of(kind: Kind, u: Tensor, z: Tensor, modes: list[Hyperparameters], own: int) -> Hyperparameters:
    """The own mode, or one that another process leads to, if the own rows think better of it.

    Sets of rows that are nearly the same have nearly the same modes, and now and then one is missed. The own rows alone
    decide: what others found is a place to begin.
    """
    counted, rows = torch.ones(1, len(u), dtype=torch.bool, device=u.device), torch.tensor([len(u)], device=u.device)

    def value(h: Hyperparameters) -> float:
        return float(log_evidence(kind, h, u, z, counted) + log_prior(h, rows))

    values = [value(mode) for mode in modes]
    best = max(range(len(modes)), key=values.__getitem__)
    if values[best] < values[own] + BETTER:
        return modes[own]
    return max(modes[own], _by_lbfgs(kind, u, z, modes[best]), key=value)


def _by_adam(kind: Kind, u: Tensor, z: Tensor, counted: Tensor, rows: Tensor) -> Hyperparameters:
    """Near the modes; the prior is that of so many rows (P,)."""
    P, d = len(counted), u.shape[1]

    def start(value: float, *shape: int) -> Tensor:
        return torch.full(shape, math.log(value), dtype=torch.float64, device=u.device)

    lengthscale = start(FIRST_LENGTHSCALE * math.sqrt(d), P, d)
    h = Hyperparameters(lengthscale, start(1.0, P), start(SLOPE, P), start(FIRST_NOISE, P))
    optimizer = torch.optim.Adam(list(h), lr=RATE, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS, pct_start=0.1)
    best = torch.full((P,), -torch.inf, dtype=torch.float64, device=u.device)
    found = [part.clone() for part in h]
    for _ in range(STEPS):
        value, slopes = _log_posterior(kind, h, u, z, counted, rows)
        # A long step can lead astray where there is next to no noise: the best place counts, not the last one.
        better = value > best
        best = torch.where(better, value, best)
        for kept, part, slope in zip(found, h, slopes, strict=True):
            kept[better] = part[better]
            part.grad = -slope / (rows if slope.ndim == 1 else rows.unsqueeze(-1))
        optimizer.step()
        scheduler.step()
    return Hyperparameters(*found)


def _by_lbfgs(kind: Kind, u: Tensor, z: Tensor, near: Hyperparameters) -> Hyperparameters:
    """The mode of one process (P = 1) with all its rows."""
    counted, rows = torch.ones(1, len(u), dtype=torch.bool, device=u.device), torch.tensor([len(u)], device=u.device)
    sizes = [part.shape[-1] for part in near]

    def unpacked(flat: NDArray[np.float64]) -> Hyperparameters:
        parts = torch.from_numpy(flat).to(u.device).split(sizes)
        return Hyperparameters(parts[0].unsqueeze(0), *parts[1:])

    def objective(flat: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        value, slopes = _log_posterior(kind, unpacked(flat), u, z, counted, rows)
        return -float(value) / len(u), -torch.cat([slope.flatten() for slope in slopes]).cpu().numpy() / len(u)

    begin = torch.cat([part.flatten() for part in near]).cpu().numpy()
    bounds = [(-FARTHEST, FARTHEST)] * len(begin)
    options = {"maxiter": ITERATIONS, "maxls": 10}
    return unpacked(minimize(objective, begin, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x)


def _log_posterior(
    kind: Kind, h: Hyperparameters, u: Tensor, z: Tensor, counted: Tensor, rows: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The log density of the hyperparameters up to a constant, (P,), and its slopes in them."""
    with torch.enable_grad():
        h = Hyperparameters(*(part.detach().requires_grad_() for part in h))
        K, noise, prior = covariance(kind, h, u, u), h.noise_variance(), log_prior(h, rows)
        with torch.no_grad():
            lower, alpha = _solve(K, noise, z, counted)
            # ∂ log p(z)/∂K = ½(ααᵀ − n_out·K⁻¹); of rows that do not count α is zero, and K⁻¹ must be.
            inverse = torch.cholesky_inverse(lower) * counted.unsqueeze(-1)
            slope = 0.5 * (alpha @ alpha.mT - z.shape[1] * inverse)  # (P, N, N)
        surrogate = (slope * K).sum((-1, -2)) + slope.diagonal(dim1=-2, dim2=-1).sum(-1) * noise + prior
        slopes = list(torch.autograd.grad(surrogate.sum(), list(h)))
    return _log_density(lower, alpha, z, counted) + prior.detach(), slopes


@torch.no_grad()
def log_evidence(kind: Kind, h: Hyperparameters, u: Tensor, z: Tensor, counted: Tensor) -> Tensor:
    """log p(z) of all outputs together, (P,)."""
    return _log_density(*_solve(covariance(kind, h, u, u), h.noise_variance(), z, counted), z, counted)


def _log_density(lower: Tensor, alpha: Tensor, z: Tensor, counted: Tensor) -> Tensor:
    known = torch.where(counted.unsqueeze(-1), z, 0.0)
    log_det = lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    rows = counted.sum(-1)
    return -0.5 * (known * alpha).sum((-1, -2)) - z.shape[1] * log_det - 0.5 * z.shape[1] * rows * math.log(2 * math.pi)


@torch.no_grad()
def condition(kind: Kind, h: Hyperparameters, u: Tensor, z: Tensor, counted: Tensor) -> Conditioned:
    """The processes after rows u (N, d), z (N, K) that count (P, N)."""
    lower, alpha = _solve(covariance(kind, h, u, u), h.noise_variance(), z, counted)
    return Conditioned(kind, h, u, counted, lower, alpha)


def _solve(K: Tensor, noise: Tensor, z: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """L with LLᵀ = K + s²I over the rows that count and the identity elsewhere, and α = (K + s²I)⁻¹z, 0 elsewhere."""
    both = counted.unsqueeze(-1) & counted.unsqueeze(-2)
    diagonal = torch.where(counted, noise.unsqueeze(-1), 1.0)
    lower = cholesky(torch.where(both, K, 0.0) + torch.diag_embed(diagonal))
    return lower, torch.cholesky_solve(torch.where(counted.unsqueeze(-1), z, 0.0), lower)


class Paths(NamedTuple):
    """The prior's features of one process, and what its rows explain of them."""

    omega: Tensor  # Ω/ℓ (d, F)
    amplitude: Tensor  # (F,) of each frequency
    slope: Tensor  # ()
    solved: Tensor  # (K + s²I)⁻¹Φ (N, 2F + d + 1)

    def prior(self, u: Tensor) -> Tensor:
        """φ (B, 2F + d + 1)."""
        P = u @ self.omega
        waves = torch.cat([self.amplitude * P.cos(), self.amplitude * P.sin()], -1)
        return torch.cat([waves, self.slope * (u - 0.5), torch.ones_like(u[:, :1])], -1)


@torch.no_grad()
def paths(conditioned: Conditioned, seed: int) -> Paths:
    """Of a single process (P = 1).

    Its rows explain low frequencies, and few high ones have most of what is left: of many frequencies, those stay that
    importance sampling chooses, in proportion to the variance that they have left over the unit cube.
    """
    h, u = conditioned.hyperparameters, conditioned.rows
    assert len(conditioned.counted) == 1
    settings = FeatureSettings(kernel=conditioned.kind, features=2 * CANDIDATES, quasi=True)
    omega = draw_frequencies(u.shape[1], settings, seed).to(u) * (-h.lengthscale[0]).exp().unsqueeze(-1)
    amplitude = (h.amplitude[0].exp() / math.sqrt(CANDIDATES)).expand(CANDIDATES)
    found = Paths(omega, amplitude, h.slope[0].exp(), u.new_zeros(0))
    places = SobolEngine(u.shape[1], scramble=True, seed=seed).draw(PLACES, dtype=torch.float64).to(u)
    found = _solved(conditioned, found)
    left = _left(conditioned, found, places)  # D (PLACES, 2C + d + 1)
    waves = left[:, : 2 * CANDIDATES].square().mean(0).reshape(2, CANDIDATES).sum(0)
    share = waves / waves.sum() if bool(waves.sum() > 0) else torch.full_like(waves, 1 / CANDIDATES)
    # Systematic sampling: one at every PATHS-th part of the summed shares.
    chosen = torch.searchsorted(share.cumsum(0), (torch.arange(PATHS).to(share) + 0.5) / PATHS).clamp_max(
        CANDIDATES - 1
    )
    weight = 1 / (PATHS * share[chosen])  # E Σ weight·D² is the sum over all
    kept = found._replace(omega=omega[:, chosen], amplitude=amplitude[chosen] * weight.sqrt())
    kept = _solved(conditioned, kept)
    exact = conditioned.moments(places)[1].mean()
    ratio = exact / _left(conditioned, kept, places).square().sum(-1).mean().clamp_min(1e-300)
    return _solved(conditioned, kept._replace(amplitude=kept.amplitude * ratio.sqrt().clamp(0.1, 10.0)))


def _solved(conditioned: Conditioned, path: Paths) -> Paths:
    phi = path.prior(conditioned.rows) * conditioned.counted[0].unsqueeze(-1)
    return path._replace(solved=torch.cholesky_solve(phi, conditioned.lower[0]))


def _left(conditioned: Conditioned, path: Paths, u: Tensor) -> Tensor:
    """D at u (B, d)."""
    across = covariance(conditioned.kind, conditioned.hyperparameters, u, conditioned.rows)[0]
    return path.prior(u) - (across * conditioned.counted[0]) @ path.solved
