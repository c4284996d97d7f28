"""The exact posterior of θ for shallow Gaussian models: what approximations are measured against.

Given θ̃ the rows are linear in the weights w = (w_δ, w_η) ~ N(0, I) with Gaussian noise,

    z = φ_η(x*, t)·w_η + N(0, σ_z²),    y = κφ_η(x, θ)·w_η + φ_δ(x)·w_δ + N(0, σ_y² + noise² + κ²σ_z²),

the last term only with the emulator's residual. So w integrates out. Rows ψ and targets r over their noise's standard
deviation s are stacked below the prior and made triangular by reflections, block after block:

    | I     0   |       | T  c |      log p(r) = −½ρ² − Σ log|T_ii| − Σ log s − (rows/2) log 2π,
    | ψ/s   r/s |  = Q  | 0  ρ |,     w | r ~ N(T⁻¹c, (TᵀT)⁻¹).

Unlike the sums of squares that training goes by, this squares no condition number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from vcal_dist.batches import Observations, Runs, Table, take
from vcal_dist.calibration import CalibrationModel
from vcal_dist.errors import ModelError
from vcal_dist.fitting import check
from vcal_dist.likelihoods import Gaussian
from vcal_dist.sampling import Draws, sample
from vcal_dist.stacked_emulator import StackedEmulator
from vcal_dist.theta import ThetaPosterior

LOG_2PI = math.log(2 * math.pi)
NUMBERS = 2**20  # of a block of features: more leave the cache
SCREENING = 512  # points of the prior, from which chains start
ZOOM = 25.0  # a grid leaves out what lies this many nats below the highest node
RESOLVED = 1e-5  # relative difference between integrals over all nodes and over every second
NODES = 2**20  # of a grid at most
CUT = 1e-3  # density at the end of a grid, relative to the highest, that is too much to leave out
PEAK = 0.05  # height of a local maximum, relative to the highest, that makes it a mode


class Grid(NamedTuple):
    """The normalised posterior density of one or two θ̃ on a regular grid, and log p(Y, Z)."""

    nodes: Tensor  # (P, d2), the last parameter running fastest
    density: Tensor  # (P,)
    log_evidence: float


class ExactPosterior:
    """log p(Y, Z | θ̃) with all weights integrated out, at the hyperparameters that the model has now."""

    def __init__(self, model: CalibrationModel, runs: Runs, observations: Observations) -> None:
        _check_exact(model)
        check(model, runs, observations)
        # float64, since 1e-7 of a feature is much where σ_z is 1e-4; a copy, since the runs are absorbed once.
        self.model = model = copy.deepcopy(model).double().requires_grad_(False)
        self.observations = observations._replace(x=observations.x.double())
        assert isinstance(model.likelihood_z, Gaussian)
        assert isinstance(model.likelihood_y, Gaussian)
        K, M = model.outputs, model.eta.width
        D = model.width - M  # of δ
        triangle = torch.eye(D + M + 1, dtype=torch.float64, device=model.kappa.device).repeat(K, 1, 1)
        triangle[:, -1, -1] = 0.0
        of_runs = triangle[:, D:, D:]  # δ does not enter the runs
        log_scales = torch.zeros((), dtype=torch.float64, device=model.kappa.device)
        for block in _blocks(runs, M):
            scale = _inverse_noise(block.z, model.likelihood_z.noise_variance(), block.weight)
            of_runs = _absorb(of_runs, model.eta(block.u.double()), block.z, scale)
            log_scales = log_scales + _log_scales(scale, block)
        triangle[:, D:, D:] = of_runs
        self._triangle = triangle  # (K, D + M + 1, D + M + 1) of prior and runs; the columns are δ, η, target
        self.log_evidence_runs = _log_evidence(of_runs) + log_scales  # log p(Z)
        variance = model.likelihood_y.noise_variance().expand_as(observations.y)
        residual = model.residual_variance()
        if residual is not None:
            variance = variance + residual
        if observations.noise is not None:
            variance = variance + observations.noise.double().square()
        self._scale = _inverse_noise(observations.y, variance, observations.weight)  # (n, K)
        of_observations = _log_scales(self._scale, observations)
        self._log_scales = log_scales + of_observations
        # One factor of the size of the rows or of the weights for every θ̃: the smaller.
        self._few = len(observations.x) <= model.width
        if self._few:
            self._constant = self.log_evidence_runs + of_observations
            root = self._scale.mT.unsqueeze(-1) * self._phi_delta(self.observations.x)  # (K, n, D)
            identity = torch.eye(len(observations.x), dtype=torch.float64, device=root.device)
            self._covariance = identity + root @ root.mT  # of noise and δ, over the noise's (K, n, n)

    def log_likelihood(self, theta: Tensor) -> Tensor:
        """log p(Y | θ̃, Z) + log p(Z) at θ̃ (d2,) or (P, d2): a scalar or (P,), differentiable (once) in θ̃."""
        dim = self.model.prior.dim
        if theta.ndim not in (1, 2) or theta.shape[-1] != dim:
            raise ModelError(f"theta has shape {tuple(theta.shape)}; expected ({dim},) or (points, {dim})")
        points = theta.double().reshape(-1, dim)
        if self._few:
            size = max(1, NUMBERS // (self.model.outputs * len(self.observations.x) * self.model.width))
            values = torch.cat([self._from_rows(part) for part in points.split(size)])
        else:
            values = torch.stack([self._from_weights(point) for point in points])
        return values.reshape(theta.shape[:-1])

    def log_density(self, theta: Tensor) -> Tensor:
        """log p(Y, Z | θ̃) + log N(θ̃; 0, I): the posterior of θ̃ but for its normalisation."""
        prior = -0.5 * (theta.double().square() + LOG_2PI).sum(-1)
        return self.log_likelihood(theta) + prior

    @torch.no_grad()
    def grid(self, points: int = 400, reach: float = 5.0) -> Grid:
        """The density on `points` nodes for each of one or two θ̃, normalised by the trapezoidal rule.

        It starts on [−reach, reach], zooms in on what holds the mass, and takes more nodes where that does not
        resolve it (several narrow modes).
        """
        dim = self.model.prior.dim
        if dim > 2:
            raise ModelError(f"a grid of {dim} parameters has too many nodes; accepted: 1 or 2. Use sample()")
        if points < 16 or not 0 < reach < math.inf:
            raise ModelError(f"points is {points} and reach {reach}; accepted: 16 or more, and a positive number")
        ends = [(-reach, reach)] * dim
        while points**dim <= NODES:
            axes = [torch.linspace(*end, points, dtype=torch.float64, device=self.model.kappa.device) for end in ends]
            nodes = torch.cartesian_prod(*axes).reshape(-1, dim)
            log_density = self.log_density(nodes)
            highest = log_density.max()
            density = (log_density - highest).exp()
            box = _box(log_density.reshape([points] * dim), axes)
            if any(b - a < 0.7 * (high - low) for (a, b), (low, high) in zip(box, ends, strict=True)):
                ends = box
                continue
            total = _integral(density, axes)
            half = _integral(density.reshape([points] * dim)[(slice(None, None, 2),) * dim], [a[::2] for a in axes])
            if abs(float(half / total) - 1) < RESOLVED:
                _check_ends(density.reshape([points] * dim), reach, ends)
                return Grid(nodes, density / total, float(highest + total.log()))
            points *= 2
        raise ModelError(
            f"the posterior has modes or ridges too narrow for a grid of {NODES} nodes between {ends}; use sample()"
        )

    def sample(
        self, chains: int = 4, draws: int = 1000, tune: int = 500, seed: int = 0, start: Tensor | None = None
    ) -> Draws:
        """Draws of θ̃ by the no-U-turn sampler, from `start` (chains, d2) or from draws out of a Sobol design."""
        return sample(
            self.log_density, self._start(chains, seed) if start is None else start, draws=draws, tune=tune, seed=seed
        )

    @torch.no_grad()
    def _start(self, chains: int, seed: int) -> Tensor:
        """Points of a Sobol design on the prior, drawn by their likelihood: many if it is flat, the best if not."""
        uniform = SobolEngine(self.model.prior.dim, scramble=True, seed=seed).draw(SCREENING, dtype=torch.float64)
        design = torch.special.ndtri(uniform.clamp(1e-4, 1 - 1e-4))
        weights = self.log_likelihood(design.to(self.model.kappa.device)).softmax(0).cpu()
        chosen = torch.multinomial(weights, chains, replacement=True, generator=torch.Generator().manual_seed(seed))
        return design[chosen].to(self.model.kappa.device)

    def _from_rows(self, theta: Tensor) -> Tensor:
        """log p(Y, Z | θ̃) by the covariance of Y given Z, for points (P, d2)."""
        D = self._triangle.shape[-1] - 1 - self.model.eta.width
        T, c = self._triangle[:, D:-1, D:-1], self._triangle[:, D:-1, -1:]  # (K, M, M), (K, M, 1)
        x, y, scale = self.observations.x, torch.nan_to_num(self.observations.y).mT, self._scale.mT
        phi = self.model.phi_eta(x, self.model.rows_of_theta(theta, len(x)), None)  # (P, n, M)
        rows = (self.model.kappa * phi).flatten(0, 1).expand(len(T), -1, -1)
        root = torch.linalg.solve_triangular(T, rows, upper=True, left=False)  # κφ_η T⁻¹ (K, P·n, M)
        mean = (root @ c).reshape(len(T), len(theta), -1)  # κφ_η E[w_η | Z] (K, P, n)
        residual = scale.unsqueeze(1) * (y.unsqueeze(1) - mean)
        root = scale[:, None, :, None] * root.unflatten(1, (len(theta), -1))  # (K, P, n, M)
        lower = torch.linalg.cholesky(self._covariance.unsqueeze(1) + root @ root.mT)  # (K, P, n, n)
        white = torch.linalg.solve_triangular(lower, residual.unsqueeze(-1), upper=False).squeeze(-1)
        log_p = -0.5 * white.square().sum(-1) - lower.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # (K, P)
        return log_p.sum(0) + self._constant

    def _from_weights(self, theta: Tensor) -> Tensor:
        """log p(Y, Z | θ̃) by the triangle of all rows, at one point (d2,)."""
        triangle = self._triangle
        with torch.no_grad():
            for block, scale in self._scaled_blocks():
                triangle = _absorb(triangle, self._design(block.x, self._phi_eta(block.x, theta)), block.y, scale)
        value = _log_evidence(triangle) + self._log_scales
        if not (torch.is_grad_enabled() and theta.requires_grad):
            return value
        return value + self._gradient(theta.detach(), triangle) @ (theta - theta.detach())

    def _gradient(self, theta: Tensor, triangle: Tensor) -> Tensor:
        """∂ log p(Y, Z | θ̃)/∂θ̃ block by block, by Fisher's identity: the mean of ∂ log p(Y | w, θ̃) over w | Y, Z."""
        M = self.model.eta.width
        T, c = triangle[:, :-1, :-1], triangle[:, :-1, -1:]
        inverse = torch.linalg.solve_triangular(T, torch.eye(T.shape[-1]).to(T).expand_as(T), upper=True)
        mean = inverse @ c  # m = T⁻¹c (K, D + M, 1)
        S = inverse @ inverse[:, -M:].mT  # η's columns of (TᵀT)⁻¹ (K, D + M, M)
        total = torch.zeros_like(theta)
        theta = theta.requires_grad_()
        for block, scale in self._scaled_blocks():
            phi = self._phi_eta(block.x, theta)  # (B, M)
            psi = self._design(block.x, phi.detach())  # (B, D + M)
            residual = torch.nan_to_num(block.y).mT.unsqueeze(-1) - psi @ mean  # (K, B, 1)
            # ∂/∂ψ E[−½(y − ψw)²/s²] = ((y − ψm)m − ψS)/s²
            by_psi = scale.square().mT.unsqueeze(-1) * (residual * mean[:, -M:].mT - psi @ S)  # (K, B, M)
            total = total + torch.autograd.grad(phi, theta, self.model.kappa * by_psi.sum(0))[0]
        return total

    def _scaled_blocks(self) -> Iterator[tuple[Observations, Tensor]]:
        blocks = _blocks(self.observations, self.model.outputs * self.model.width)
        yield from zip(blocks, self._scale.split(_size(self.model.outputs * self.model.width)), strict=True)

    def _phi_eta(self, x: Tensor, theta: Tensor) -> Tensor:
        return self.model.phi_eta(x, self.model.rows_of_theta(theta.unsqueeze(0), len(x)), None).squeeze(0)

    def _phi_delta(self, x: Tensor) -> Tensor:
        if self.model.delta is None:
            return x.new_zeros(len(x), 0)
        features: Tensor = self.model.delta(x)
        return features

    def _design(self, x: Tensor, phi_eta: Tensor) -> Tensor:
        """ψ = [φ_δ, κφ_η] (B, D + M)."""
        return torch.cat([self._phi_delta(x), self.model.kappa * phi_eta], -1)


def total_variation(grid: Grid, q: ThetaPosterior) -> float:
    """½∫|p − q| over θ̃, the same in the user's units: the most by which two probabilities of one event differ."""
    if grid.nodes.shape[-1] != q.dim:
        raise ModelError(f"the grid has {grid.nodes.shape[-1]} parameters and q {q.dim}; compare the same ones")
    components = torch.distributions.MultivariateNormal(q.means, q.covariances)
    log_q = components.log_prob(grid.nodes.to(q.means).unsqueeze(1)) + q.log_weights  # (P, C)
    # ½∫|p − q| = 1 − ∫min(p, q), whose integrand vanishes where the grid, which covers p alone, does not reach.
    shared = torch.minimum(grid.density.to(q.means), log_q.logsumexp(-1).exp())
    return 1 - float(_integral(shared, [column.unique() for column in grid.nodes.to(q.means).unbind(-1)]))


def modes(grid: Grid) -> int:
    """The number of local maxima of one parameter's density that reach 5 % of the highest."""
    if grid.nodes.shape[-1] != 1:
        raise ModelError(f"the grid has {grid.nodes.shape[-1]} parameters; modes are counted for 1")
    density = torch.nn.functional.pad(grid.density, (1, 1), value=-1.0)
    left, middle, right = density[:-2], density[1:-1], density[2:]
    return int(((middle > left) & (middle >= right) & (middle > PEAK * middle.max())).sum())


def _check_exact(model: CalibrationModel) -> None:
    """The parts that keep weights from integrating out, each with its cure."""
    if model.kind == "general":
        raise ModelError("discrepancy is 'general': g is not linear in η's weights; accepted: none, additive")
    for name, stack in (("eta", model.eta), ("delta", model.delta)):
        if isinstance(stack, StackedEmulator):
            raise ModelError("the emulator is stacked; the exact posterior needs model.emulator = 'features'")
        if stack is not None and stack.hidden:
            raise ModelError(f"{name} has {len(stack.hidden)} hidden layers; the exact posterior needs hidden = ()")
        if stack is not None and stack.random:
            raise ModelError(f"the frequencies of {name} are 'variational'; accepted: fixed, learned")
    for name, likelihood in (("likelihood_z", model.likelihood_z), ("likelihood_y", model.likelihood_y)):
        if not isinstance(likelihood, Gaussian):
            raise ModelError(f"{name} is '{likelihood.kind}'; weights integrate out under 'gaussian' only")
    if model.varying is not None:
        raise ModelError("varying_residual is true; the exact posterior needs a residual that is the same everywhere")


def _size(width: int) -> int:
    """Rows of a block: enough for reflections to work on rows more than on the triangle."""
    return max(NUMBERS // width, 2 * width)


def _blocks(table: Table, width: int) -> Iterator[Table]:
    for start in range(0, len(table.weight), _size(width)):
        yield take(table, slice(start, start + _size(width)))


def _inverse_noise(target: Tensor, variance: Tensor, weight: Tensor) -> Tensor:
    """1/s (B, K), 0 for rows that are missing or only fill up."""
    scale = (weight.double().unsqueeze(-1) / variance).sqrt()
    return torch.where(target.isnan(), 0.0, scale)


def _log_scales(scale: Tensor, batch: Runs | Observations) -> Tensor:
    """−Σ log s − (rows/2) log 2π, and the Jacobian of the outputs' scaling."""
    known = scale[scale > 0]
    return known.log().sum() - 0.5 * LOG_2PI * len(known) + (batch.log_jacobian.sum(-1) * batch.weight).sum()


def _absorb(triangle: Tensor, psi: Tensor, target: Tensor, scale: Tensor) -> Tensor:
    """The triangle (K, C + 1, C + 1) of its rows and of ψ (B, C) with targets (B, K) times `scale` (B, K)."""
    target = torch.nan_to_num(target.double()).mT.unsqueeze(-1)  # (K, B, 1)
    rows = torch.cat([psi.expand(len(target), -1, -1), target], -1) * scale.mT.unsqueeze(-1)  # (K, B, C + 1)
    return torch.linalg.qr(torch.cat([triangle, rows], 1), mode="r").R


def _log_evidence(triangle: Tensor) -> Tensor:
    """−½ρ² − Σ log|T_ii|, over all outputs."""
    diagonal = triangle.diagonal(dim1=-2, dim2=-1)
    return -0.5 * diagonal[:, -1].square().sum() - diagonal[:, :-1].abs().log().sum()


def _integral(values: Tensor, axes: list[Tensor]) -> Tensor:
    """The trapezoidal rule over all axes."""
    values = values.reshape([len(axis) for axis in axes])
    for axis in reversed(axes):
        values = torch.trapezoid(values, axis, dim=-1)
    return values


def _box(log_density: Tensor, axes: list[Tensor]) -> list[tuple[float, float]]:
    """The ends of what may hold mass, on every axis, and one node more.

    Between two nodes the density may rise above both, by less than their difference where it looks like a Gaussian.
    """
    rise = torch.zeros_like(log_density)
    for j in range(len(axes)):
        step = log_density.diff(dim=j).abs()
        first, last = log_density.narrow(j, 0, 1) * 0, step
        rise = torch.maximum(rise, torch.maximum(torch.cat([last, first], j), torch.cat([first, last], j)))
    kept = log_density + rise > log_density.max() - ZOOM
    ends = []
    for j, axis in enumerate(axes):
        others = [i for i in range(len(axes)) if i != j]
        where = (kept.any(others[0]) if others else kept).nonzero()
        low, high = max(int(where.min()) - 1, 0), min(int(where.max()) + 1, len(axis) - 1)
        ends.append((float(axis[low]), float(axis[high])))
    return ends


def _check_ends(density: Tensor, reach: float, ends: list[tuple[float, float]]) -> None:
    """Mass beyond the reach would be missing without a word."""
    for j, (low, high) in enumerate(ends):
        edges = density.movedim(j, 0)
        for end, edge in ((low, edges[0]), (high, edges[-1])):
            if abs(end) == reach and edge.max() > CUT * density.max():
                raise ModelError(
                    f"the density of parameter {j} at the end {end:g} of the grid is {float(edge.max()):.2g} of its "
                    f"highest value; choose a reach above {reach:g}"
                )
