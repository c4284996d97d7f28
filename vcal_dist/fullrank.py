"""One Gaussian over θ̃ and the weights of the last layers, in natural parameters.

Outputs are independent given θ̃, so the precision is an arrow: A for θ̃, P_k for the weights of output k, C_k between
the two. With P_k = L_kL_kᵀ everything follows from D × D factors:

    Σ_θθ = (A − Σ_k C_k P_k⁻¹ C_kᵀ)⁻¹,        w_k | θ̃ ~ N(μ_k − P_k⁻¹C_kᵀ(θ̃ − μ_θ), P_k⁻¹).

The state is kept in coordinates v in which w_k = m_k + T_k v_k (a `Frame`). Once runs have been compressed into
N(m, RRᵀ), the frame (m, R) makes the precision of order one where that of w itself spans thirteen decades. With
`absorbed`, what the frame says is the prior: the runs are in it, and only observations are left to learn from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vcal_dist.collapsed import Gram, posterior
from vcal_dist.weights import ALL


class Frame(NamedTuple):
    """The coordinates w = m + T v of each output's weights; T is upper triangular."""

    mean: Tensor  # (K, D)
    root: Tensor  # (K, D, D)

    def widen(self, columns: int) -> Frame:
        """The frame with that many more weights at the end, which are their own coordinates."""
        K, D = self.mean.shape
        root = torch.eye(D + columns, dtype=self.root.dtype, device=self.root.device).repeat(K, 1, 1)
        root[:, :D, :D] = self.root
        return Frame(torch.cat([self.mean, self.mean.new_zeros(K, columns)], -1), root)


class Arrow(NamedTuple):
    """A symmetric matrix over (θ̃, v_1, …, v_K) without entries between outputs."""

    theta: Tensor  # A (d2, d2)
    cross: Tensor  # C (K, d2, D)
    weights: Tensor  # P (K, D, D)

    def mix(self, other: Arrow, share: float) -> Arrow:
        """(1 − share)·self + share·other."""
        return Arrow(*(torch.lerp(mine, its, share) for mine, its in zip(self, other, strict=True)))


class Factors(NamedTuple):
    """What is needed to solve with an arrow: L, its inverse transpose, P⁻¹Cᵀ, and the factor of Σ_θθ⁻¹."""

    lower: Tensor  # L (K, D, D)
    root: Tensor  # L⁻ᵀ (K, D, D)
    gain: Tensor  # P⁻¹Cᵀ (K, D, d2)
    schur: Tensor  # chol(A − Σ C P⁻¹ Cᵀ) (d2, d2)

    def solve(self, theta: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Λ⁻¹(g_θ, g_w) for g_θ (d2,) and g_w (K, D)."""
        inner = torch.cholesky_solve(weights.unsqueeze(-1), self.lower).squeeze(-1)  # P⁻¹g (K, D)
        step = theta - torch.einsum("kdj,kd->j", self.gain, weights)
        step = torch.cholesky_solve(step.unsqueeze(-1), self.schur).squeeze(-1)
        return step, inner - self.gain @ step

    def log_det(self) -> Tensor:
        """log|Λ|."""
        return 2 * (_log_diagonal(self.lower) + _log_diagonal(self.schur))


def factorise(arrow: Arrow) -> Factors | None:
    """The factors of an arrow, or None where it is not positive definite."""
    lower, failed = torch.linalg.cholesky_ex(arrow.weights)
    if bool(failed.any()) or not bool(torch.isfinite(lower).all()):
        return None
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    root = torch.linalg.solve_triangular(lower.mT, identity.expand_as(lower), upper=True)
    half = root.mT @ arrow.cross.mT  # L⁻¹Cᵀ (K, D, d2)
    schur, failed = torch.linalg.cholesky_ex(arrow.theta - (half.mT @ half).sum(0))
    if bool(failed.any()) or not bool(torch.isfinite(schur).all()):
        return None
    return Factors(lower, root, root @ half, schur)


class FullRank(nn.Module):
    """q(θ̃, w) = N(μ, Λ⁻¹), started at the prior N(0, I)."""

    theta_mean: Tensor  # (d2,)
    mean: Tensor  # (K, D) in the frame
    precision_theta: Tensor
    precision_cross: Tensor
    precision_weights: Tensor
    frame_mean: Tensor
    frame_root: Tensor

    def __init__(
        self,
        theta_dim: int,
        outputs: int,
        width: int,
        *,
        frame: Frame | None = None,
        absorbed: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.theta_dim, self.outputs, self.width, self.absorbed = theta_dim, outputs, width, absorbed
        if frame is None:  # the weights' own coordinates
            identity = torch.eye(width, dtype=torch.float64, device=device)
            frame = Frame(identity.new_zeros(outputs, width), identity.expand(outputs, -1, -1))
        assert frame.root.shape == (outputs, width, width)
        self.register_buffer("frame_mean", frame.mean.clone())
        self.register_buffer("frame_root", frame.root.clone())
        prior = self.prior()
        self.register_buffer("theta_mean", frame.mean.new_zeros(theta_dim))
        start = torch.zeros_like(frame.mean)
        if not absorbed:  # w = 0, in the frame
            start = torch.linalg.solve_triangular(frame.root, -frame.mean.unsqueeze(-1), upper=True).squeeze(-1)
        self.register_buffer("mean", start)
        self.register_buffer("precision_theta", prior.theta)
        self.register_buffer("precision_cross", prior.cross)
        self.register_buffer("precision_weights", prior.weights)
        self.register_load_state_dict_post_hook(_refactor)  # type: ignore[no-untyped-call]
        self._refactor()

    # --- state ------------------------------------------------------------------------------------------------

    @property
    def precision(self) -> Arrow:
        """Λ, in the frame."""
        return Arrow(self.precision_theta, self.precision_cross, self.precision_weights)

    def prior(self) -> Arrow:
        """The prior's precision in the frame: I for θ̃; TᵀT for each output, or I where the frame is the prior."""
        T = self.frame_root
        identity = torch.eye(self.width, dtype=T.dtype, device=T.device).expand_as(T)
        return Arrow(
            torch.eye(self.theta_dim, dtype=T.dtype, device=T.device),
            T.new_zeros(self.outputs, self.theta_dim, self.width),
            identity.clone() if self.absorbed else T.mT @ T,
        )

    def prior_gradient(self) -> tuple[Tensor, Tensor]:
        """The gradient of the log prior at the mean: −θ̃ and, in the frame, −Tᵀw (or −v where it is the prior)."""
        if self.absorbed:
            return -self.theta_mean, -self.mean
        return -self.theta_mean, -(self.frame_root.mT @ self.raw_mean.unsqueeze(-1)).squeeze(-1)

    def move(self, theta_mean: Tensor, mean: Tensor, precision: Arrow, factors: Factors | None = None) -> None:
        """Takes a new mean and precision, both in the frame."""
        factors = factors or factorise(precision)
        assert factors is not None, "the precision is positive definite"
        self.theta_mean, self.mean = theta_mean, mean
        self.precision_theta, self.precision_cross, self.precision_weights = precision
        self._keep(factors)

    def condition(self, sums: Gram) -> None:
        """The exact posterior of a layer on its own (no θ̃) given rows with Gaussian noise."""
        assert self.theta_dim == 0
        mean, _ = posterior(sums)
        T = self.frame_root
        inner = torch.linalg.solve_triangular(T, (mean - self.frame_mean).unsqueeze(-1), upper=True).squeeze(-1)
        prior = self.prior()
        self.move(self.theta_mean, inner, prior._replace(weights=prior.weights + T.mT @ sums.G @ T))

    def _refactor(self) -> None:
        factors = factorise(self.precision)
        assert factors is not None, "the precision is positive definite"
        self._keep(factors)

    def _keep(self, factors: Factors) -> None:
        T = self.frame_root
        identity = torch.eye(self.theta_dim, dtype=T.dtype, device=T.device)
        self.factors = factors
        self.raw_mean = self.frame_mean + (T @ self.mean.unsqueeze(-1)).squeeze(-1)  # E w (K, D)
        self.raw_root = T @ factors.root  # cov(w | θ̃) = raw_root raw_rootᵀ (K, D, D)
        self.raw_gain = -(T @ factors.gain)  # E[w | θ̃] = raw_mean + raw_gain (θ̃ − μ_θ) (K, D, d2)
        # A root of Σ_θθ.
        self.theta_root = torch.linalg.solve_triangular(factors.schur.mT, identity, upper=True)

    def _apply(self, fn: Any, recurse: bool = True) -> FullRank:
        # To another device, never to another precision.
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)  # type: ignore[no-untyped-call]
        self._refactor()
        return self

    # --- the protocol -----------------------------------------------------------------------------------------

    def theta(self, noise: Tensor) -> Tensor:
        return self.theta_mean + noise.double() @ self.theta_root.mT

    def theta_moments(self) -> tuple[Tensor, Tensor]:
        return self.theta_mean, self.theta_root @ self.theta_root.mT

    def moments(self, psi: Tensor, columns: slice = ALL, theta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        psi = psi.double()
        if theta is None:
            mean = self.raw_mean
            root = torch.cat([self.raw_root, self.raw_gain @ self.theta_root], -1)  # θ̃ adds to the spread of w
        else:
            mean, root = self.mean_given(theta), self.raw_root
        return psi @ mean[..., columns].mT, _spread(psi, root[:, columns])

    def mean_given(self, theta: Tensor) -> Tensor:
        """E[w | θ̃], (S, K, D)."""
        return self.raw_mean + torch.einsum("kdj,sj->skd", self.raw_gain, theta.double() - self.theta_mean)

    def moments_given(self, psi: Tensor, first: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        E = first.shape[-1]
        # The frame mixes no columns across E, and leaves those behind it alone but for a shift.
        known = torch.linalg.solve_triangular(
            self.frame_root[:, :E, :E], (first - self.frame_mean[:, :E]).unsqueeze(-1), upper=True
        ).squeeze(-1)  # (S, K, E)
        P, C = self.precision_weights, self.precision_cross
        lower = torch.linalg.cholesky(P[:, E:, E:])
        pull = torch.einsum("kde,ske->skd", P[:, E:, :E], known - self.mean[:, :E])
        pull = pull + torch.einsum("kjd,sj->skd", C[:, :, E:], theta.double() - self.theta_mean)
        mean = self.mean[:, E:] - torch.cholesky_solve(pull.unsqueeze(-1), lower).squeeze(-1)  # (S, K, D − E)
        identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
        root = torch.linalg.solve_triangular(lower.mT, identity.expand_as(lower), upper=True)
        psi = psi.double()
        return psi @ (mean + self.frame_mean[:, E:]).mT, _spread(psi, root)

    def sample(self, noise: Tensor, theta: Tensor) -> Tensor:
        return self.mean_given(theta) + torch.einsum("kde,ske->skd", self.raw_root, noise.double())

    def kl(self) -> Tensor:
        # In the coordinates in which the prior is N(0, I): those of the frame, or the weights' own.
        root, gain, mean = self.raw_root, self.raw_gain, self.raw_mean
        log_det = -self.factors.log_det()  # log|Σ|
        if self.absorbed:
            root, gain, mean = self.factors.root, -self.factors.gain, self.mean
        else:
            log_det = log_det + 2 * _log_diagonal(self.frame_root)
        trace = self.theta_root.square().sum() + root.square().sum() + (gain @ self.theta_root).square().sum()
        size = self.theta_dim + self.outputs * self.width
        return 0.5 * (trace + self.theta_mean.square().sum() + mean.square().sum() - size - log_det)

    def kl_weights(self) -> Tensor:
        """KL(q(w | θ̃ = μ_θ) ‖ p(w)): what w costs where θ̃ is a point."""
        root, mean = (self.factors.root, self.mean) if self.absorbed else (self.raw_root, self.raw_mean)
        log_det = -2 * _log_diagonal(self.factors.lower) + (0 if self.absorbed else 2 * _log_diagonal(self.frame_root))
        return 0.5 * (root.square().sum() + mean.square().sum() - self.outputs * self.width - log_det)


def _spread(psi: Tensor, root: Tensor) -> Tensor:
    """ψ Σ_k ψᵀ for each row and output, Σ_k = root root^T: psi (..., B, C), root (K, C, ·) → (..., B, K)."""
    return torch.stack([(psi @ part).square().sum(-1) for part in root], -1)


def _log_diagonal(factor: Tensor) -> Tensor:
    return factor.diagonal(dim1=-2, dim2=-1).log().sum()


def _refactor(module: FullRank, _: object) -> None:
    """After a state was loaded. (A function of the module, so that q can be sent to another process.)"""
    module._refactor()
