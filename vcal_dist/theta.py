"""The posterior of θ: a mixture of Gaussians in θ̃, one component in the ordinary case, read in the user's units."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vcal_dist.errors import ModelError
from vcal_dist.priors import ThetaPrior
from vcal_dist.weights import Weights

NODES = 100  # of the Gauss–Hermite quadrature: they reach to 18 standard deviations
BISECTIONS = 100  # more than float64 has bits: the bracket closes to neighbouring numbers


class ThetaPosterior:
    """q(θ̃) = Σ_c w_c N(m_c, S_c), and θ = T⁻¹(θ̃) through the prior.

    `means` is (C, d2), `covariances` (C, d2, d2), `log_weights` (C,), equal unless given; weights are normalised.
    Everything is float64, on the device of `means`. A parameter is named or counted from 0.
    """

    def __init__(
        self, prior: ThetaPrior, means: Tensor, covariances: Tensor, log_weights: Tensor | None = None
    ) -> None:
        count, dim = means.shape[0] if means.ndim else 0, prior.dim
        log_weights = means.new_zeros(count) if log_weights is None else log_weights
        shapes = tuple(means.shape), tuple(covariances.shape), tuple(log_weights.shape)
        if count == 0 or shapes != ((count, dim), (count, dim, dim), (count,)):
            raise ModelError(
                f"a mixture of C components of {dim} parameters needs means (C, {dim}), covariances (C, {dim}, {dim}) "
                f"and log weights (C,), got {', '.join(map(str, shapes))}"
            )
        self.prior, self.dim = prior, dim
        self.means = means.detach().double()
        self.covariances = covariances.detach().to(self.means)
        self.log_weights = log_weights.detach().to(self.means).log_softmax(0)
        if not self.means.isfinite().all() or self.log_weights.isnan().any():
            raise ModelError(
                f"means must be finite and one weight positive, got means {means.tolist()} and log weights "
                f"{log_weights.tolist()}; has the fit diverged?"
            )
        self._cholesky = _cholesky(self.covariances)  # (C, d2, d2)
        self._sd = self.covariances.diagonal(dim1=-2, dim2=-1).sqrt()  # (C, d2)
        self._columns = [prior.column(j) for j in range(dim)]

    @classmethod
    def of(cls, prior: ThetaPrior, components: Sequence[Weights], log_weights: Tensor) -> ThetaPosterior:
        """q(θ̃) of a mixture of joint Gaussians, the weights integrated out."""
        moments = [q.theta_moments() for q in components]
        means = torch.stack([mean.detach().double() for mean, _ in moments])
        return cls(prior, means, torch.stack([covariance.detach().double() for _, covariance in moments]), log_weights)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draws of θ, (count, d2), in the user's units; the generator lives on the device of the means."""
        component = torch.multinomial(self.log_weights.exp(), count, replacement=True, generator=generator)  # (count,)
        noise = torch.randn(count, self.dim, 1, generator=generator, dtype=torch.float64, device=self.means.device)
        tilde = self.means[component] + (self._cholesky[component] @ noise).squeeze(-1)  # m + Lε
        return self.prior.theta(tilde)

    def log_density(self, theta: Tensor) -> Tensor:
        """Joint log density in the user's units, −∞ outside the support. (..., d2) → (...)."""

        def normals(tilde: Tensor) -> Tensor:  # (n, d2) → (n, C)
            residual = (tilde[:, None] - self.means)[..., None]  # (n, C, d2, 1)
            white = torch.linalg.solve_triangular(self._cholesky, residual, upper=False).squeeze(-1)  # L⁻¹(θ̃ − m)
            log_determinant = self._cholesky.diagonal(dim1=-2, dim2=-1).log().sum(-1)  # (C,)
            distance: Tensor = white.square().sum(-1)  # (n, C)
            return -distance / 2 - log_determinant - self.dim / 2 * math.log(2 * math.pi)

        return self._change_of_variables(self.prior, theta, normals)

    def marginal_density(self, parameter: int | str, values: Tensor) -> Tensor:
        """Density of one θ_j in the user's units, 0 outside its support. Any shape."""
        j = self._index(parameter)

        def normals(tilde: Tensor) -> Tensor:  # (n, 1) → (n, C)
            white = (tilde - self.means[:, j]) / self._sd[:, j]
            return -white.square() / 2 - self._sd[:, j].log() - math.log(2 * math.pi) / 2

        return self._change_of_variables(self._columns[j], values[..., None], normals).exp()

    def marginal_cdf(self, parameter: int | str, values: Tensor) -> Tensor:
        """P(θ_j ≤ value), values in the user's units. Any shape."""
        j = self._index(parameter)
        low, high = self.prior.support[j]
        values = values.to(self.means)
        inside = (values >= low) & (values <= high) & values.isfinite()
        cdf = torch.where(values < low, 0.0, 1.0).to(self.means)
        cdf = torch.where(values == -torch.inf, 0.0, cdf).masked_fill(values.isnan(), torch.nan)
        tilde = self._columns[j].tilde(values[inside][:, None])  # (n, 1)
        cdf[inside] = self._tilde_cdf(j, tilde[:, 0], upper=False)
        return cdf

    def quantile(self, parameter: int | str, probabilities: Tensor) -> Tensor:
        """θ_j below which the given probabilities lie, in the user's units. Any shape."""
        j = self._index(parameter)
        p = probabilities.to(self.means)
        if not ((p > 0) & (p < 1)).all():
            raise ModelError(f"probabilities must lie strictly between 0 and 1, got {probabilities.tolist()}")
        of_components = self.means[:, j] + self._sd[:, j] * torch.special.ndtri(p)[..., None]  # (..., C)
        # The mixture's quantile lies between those of its components, and is theirs if there is but one.
        below, above = of_components.amin(-1), of_components.amax(-1)
        upper = p > 0.5
        target = torch.where(upper, 1 - p, p)
        for _ in range(BISECTIONS if len(self.means) > 1 else 0):
            middle = (below + above) / 2
            tail = torch.where(upper, self._tilde_cdf(j, middle, upper=True), self._tilde_cdf(j, middle, upper=False))
            left = torch.where(upper, tail > target, tail < target)  # the middle lies left of the quantile
            below, above = torch.where(left, middle, below), torch.where(left, above, middle)
        return self._columns[j].theta(above[..., None]).squeeze(-1)

    def interval(self, parameter: int | str, level: float = 0.9) -> tuple[float, float]:
        """The interval with probability `level` and equal tails, in the user's units."""
        if not 0 < level < 1:
            raise ModelError(f"the level of an interval must lie strictly between 0 and 1, got {level}")
        low, high = self.quantile(parameter, self.means.new_tensor([(1 - level) / 2, (1 + level) / 2])).tolist()
        return low, high

    def mean(self) -> Tensor:
        """E[θ_j], (d2,), by Gauss–Hermite quadrature."""
        return self._expectation(lambda theta: theta)

    def sd(self) -> Tensor:
        """Standard deviations of θ_j, (d2,), by Gauss–Hermite quadrature."""
        mean = self.mean()
        return self._expectation(lambda theta: (theta - mean).square()).sqrt()

    def correlation(self) -> Tensor:
        """The correlation matrix of θ̃, not of θ, (d2, d2), with what the distance between components adds."""
        weights = self.log_weights.exp()
        centred = self.means - weights @ self.means  # (C, d2)
        covariance = torch.einsum("c,cij->ij", weights, self.covariances + centred[:, :, None] * centred[:, None, :])
        sd = covariance.diagonal().sqrt()
        return covariance / (sd[:, None] * sd)

    def _expectation(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """E[function(θ)] componentwise, (d2,): Σ_c w_c Σ_k ω_k function(T⁻¹(m + s·x_k))."""
        x, omega = np.polynomial.hermite_e.hermegauss(NODES)
        nodes, rule = torch.from_numpy(x).to(self.means), torch.from_numpy(omega / omega.sum()).to(self.means)
        theta = self.prior.theta(self.means + self._sd * nodes[:, None, None])  # (NODES, C, d2)
        return torch.einsum("k,c,kcj->j", rule, self.log_weights.exp(), function(theta))

    def _tilde_cdf(self, j: int, tilde: Tensor, *, upper: bool) -> Tensor:
        """Σ_c w_c Φ((θ̃_j − m)/s), or the tail above it. Any shape."""
        white = (tilde[..., None] - self.means[:, j]) / self._sd[:, j]  # (..., C)
        cdf: Tensor = torch.special.ndtr(-white if upper else white)
        return cdf @ self.log_weights.exp()

    def _change_of_variables(self, prior: ThetaPrior, theta: Tensor, normals: Callable[[Tensor], Tensor]) -> Tensor:
        """log Σ_c w_c N_c(θ̃) − Σ_j log dθ_j/dθ̃_j at θ (..., d), −∞ outside the support; (...)."""
        theta = theta.to(self.means)
        low, high = self.means.new_tensor(prior.support).unbind(-1)
        inside = ((theta >= low) & (theta <= high) & theta.isfinite()).all(-1)  # (...)
        density = torch.full_like(theta[..., 0], -torch.inf).masked_fill(theta.isnan().any(-1), torch.nan)
        tilde = prior.tilde(theta[inside])  # (n, d)
        density[inside] = torch.logsumexp(normals(tilde) + self.log_weights, -1) - prior.log_slope(tilde).sum(-1)
        return density

    def _index(self, parameter: int | str) -> int:
        names = self.prior.names
        if isinstance(parameter, str):
            if parameter in names:
                return names.index(parameter)
            near = difflib.get_close_matches(parameter, names, n=1, cutoff=0.6)
            hint = f" (did you mean '{near[0]}'?)" if near else ""
            raise ModelError(f"unknown parameter '{parameter}'{hint}; accepted: {', '.join(names)}")
        if not 0 <= parameter < self.dim:
            raise ModelError(f"parameter {parameter} does not exist; accepted: 0 to {self.dim - 1} or a name")
        return parameter


def _cholesky(covariances: Tensor) -> Tensor:
    """The lower Cholesky factors, or an error that names the component without one."""
    factors: Tensor
    factors, info = torch.linalg.cholesky_ex(covariances)
    asymmetry = (covariances - covariances.mT).abs().amax((-2, -1))
    size = covariances.abs().amax((-2, -1))
    for c in range(len(covariances)):
        if not covariances[c].isfinite().all():
            raise ModelError(f"the covariance of component {c} holds NaN or infinity; has the fit diverged?")
        if asymmetry[c] > 1e-6 * size[c]:
            raise ModelError(
                f"the covariance of component {c} is not symmetric, opposite entries differ by {asymmetry[c]:.2g}; "
                "give (S + Sᵀ)/2"
            )
        if info[c] != 0:
            least = torch.linalg.eigvalsh(covariances[c])[0]
            raise ModelError(
                f"the covariance of component {c} is not positive definite, its smallest eigenvalue is {least:.3g}; "
                "check the fit, or add a small multiple of the identity"
            )
    return factors
