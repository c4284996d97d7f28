"""The collapsed evidence: the weights of a last layer integrated out in closed form, from sums over rows.

Rows r = φ·w + ε with w ~ N(0, I) and ε_i ~ N(0, 1/p_i) enter only through

    G = Σ p φφᵀ,   b = Σ p φ r,   Σ p r²,   Σ log p,   the number of rows,

which add up over blocks of rows and over processes. With L = chol(I + G) and w = (I + G)⁻¹ b,

    log p(r) = −½(Σ p r² − bᵀw) − Σ log L_ii + ½ Σ log p − (rows/2) log 2π,
    p(w | r) = N(w; (I + G)⁻¹b, (I + G)⁻¹).

Rows with p = 0 (missing outputs, padding) count for nothing. Sums and factors are float64 whatever the features are:
float32 loses positive definiteness at some hundred features.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from vcal_dist.cholesky import cholesky


class Gram(NamedTuple):
    """What rows say about the weights of a linear model: sums over rows, with any leading dimensions."""

    G: Tensor  # (..., M, M) Σ p φφᵀ
    b: Tensor  # (..., M)    Σ p φ r
    square: Tensor  # (...)  Σ p r²
    log_precision: Tensor  # (...) Σ log p
    rows: Tensor  # (...) how many have p > 0

    def plus(self, other: Gram) -> Gram:
        """The sums over the rows of both."""
        return Gram(*(mine + its for mine, its in zip(self, other, strict=True)))


def gram(phi: Tensor, target: Tensor, precision: Tensor) -> Gram:
    """The sums over rows of features φ (..., B, M), targets r (..., B) and precisions p (..., B), p ≥ 0."""
    phi, precision = phi.double(), precision.double()
    known = precision > 0
    target = torch.where(known, target.double(), 0.0)  # NaN marks a missing output
    G, b = _WeightedProducts.apply(phi, target, precision)  # type: ignore[no-untyped-call]
    return Gram(
        G=G,
        b=b,
        square=(precision * target.square()).sum(-1),
        log_precision=torch.where(known, precision, 1.0).log().sum(-1),
        rows=known.sum(-1).to(torch.float64),
    )


@torch.no_grad()
def joined_gram(first: Tensor, second: Tensor, target: Tensor, precision: Tensor) -> Gram:
    """`gram` of features [first, second], where `second` (B, F) is the same for all samples of the first.

    `first` is (S, 1, B, E), or (S, K, B, E) where outputs have features of their own; targets are (S, K, B), precisions
    (K, B). Half of the work is then done once for all samples.
    """
    first, second = first.double(), second.double()
    known = precision > 0
    target = torch.where(known, target.double(), 0.0)
    weighted = first * precision.unsqueeze(-1)  # (S, K, B, E)
    of_second = (second * precision.unsqueeze(-1)).mT @ second  # (K, F, F)
    across = weighted.mT @ second  # (S, K, E, F)
    top = torch.cat([weighted.mT @ first, across], -1)
    bottom = torch.cat([across.mT, of_second.expand(len(first), *of_second.shape)], -1)
    b = torch.cat([(weighted.mT @ target.unsqueeze(-1)).squeeze(-1), (target * precision) @ second], -1)
    return Gram(
        G=torch.cat([top, bottom], -2),
        b=b,
        square=(precision * target.square()).sum(-1),
        log_precision=torch.where(known, precision, 1.0).log().sum(-1),
        rows=known.sum(-1).to(torch.float64),
    )


def in_frame(sums: Gram, root: Tensor) -> Gram:
    """The sums for weights v with w = T v for the first m of M, T (..., m, m), the others as they are.

    What rows φT would give, at a cost without rows; where these are fewer than weights, φT costs less.
    """
    m = root.shape[-1]
    top = root.mT @ sums.G[..., :m, :]  # (..., m, M)
    first = (root.mT @ sums.b[..., :m].unsqueeze(-1)).squeeze(-1)
    if m == sums.G.shape[-1]:
        return sums._replace(G=top @ root, b=first)
    across = top[..., m:]
    upper = torch.cat([top[..., :m] @ root, across], -1)
    lower = torch.cat([across.mT, sums.G[..., m:, m:]], -1)
    return sums._replace(G=torch.cat([upper, lower], -2), b=torch.cat([first, sums.b[..., m:]], -1))


def log_evidence(sums: Gram) -> Tensor:
    """log N(r; 0, ΦΦᵀ + diag(1/p)) for each leading index, through the weight-space Cholesky factor."""
    fitted = half_quadratic_minus_log_det(sums.G, sums.b.unsqueeze(-2))
    return fitted - 0.5 * sums.square + 0.5 * sums.log_precision - 0.5 * math.log(2 * math.pi) * sums.rows


@torch.no_grad()
def log_evidence_if_any(sums: Gram) -> Tensor:
    """`log_evidence`, and −∞ where rounding leaves I + G without a factor: at points far from all that is probable."""
    identity = torch.eye(sums.G.shape[-1], dtype=sums.G.dtype, device=sums.G.device)
    factor, failed = torch.linalg.cholesky_ex(sums.G + identity)
    w = torch.cholesky_solve(sums.b.unsqueeze(-1), factor).squeeze(-1)
    fitted = 0.5 * (sums.b * w).sum(-1) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    value = fitted - 0.5 * sums.square + 0.5 * sums.log_precision - 0.5 * math.log(2 * math.pi) * sums.rows
    return torch.where((failed == 0) & value.isfinite(), value, -torch.inf)


def posterior(sums: Gram) -> tuple[Tensor, Tensor]:
    """Mean (..., M) and a root R (..., M, M), S = RRᵀ, of p(w | rows); R is upper triangular."""
    factor = _factor(sums.G)
    identity = torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device)
    root = torch.linalg.solve_triangular(factor.mT, identity.expand_as(factor), upper=True)  # L⁻ᵀ
    return torch.cholesky_solve(sums.b.unsqueeze(-1), factor).squeeze(-1), root


def _factor(G: Tensor) -> Tensor:
    return cholesky(G + torch.eye(G.shape[-1], dtype=G.dtype, device=G.device))


def weighted_gram(phi: Tensor, weight: Tensor) -> Tensor:
    """Σ p φφᵀ (..., M, M) of features (..., B, M) and weights (..., B), both float64."""
    found: Tensor = _WeightedProducts.apply(phi, torch.zeros_like(weight), weight)[0]  # type: ignore[no-untyped-call]
    return found


class _WeightedProducts(torch.autograd.Function):
    """Σ p φφᵀ and Σ p φ r. Plain autograd would take two products of the size of the first one back; G is symmetric."""

    @staticmethod
    def forward(ctx: Any, phi: Tensor, target: Tensor, precision: Tensor) -> tuple[Tensor, Tensor]:
        weighted = phi * precision.unsqueeze(-1)  # (..., B, M)
        ctx.save_for_backward(phi, target, precision)
        return weighted.mT @ phi, (weighted.mT @ target.unsqueeze(-1)).squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_G: Tensor, by_b: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        phi, target, precision = ctx.saved_tensors
        product = phi @ (by_G + by_G.mT)  # (..., B, M)
        along = (phi @ by_b.unsqueeze(-1)).squeeze(-1)  # φ·∂b (..., B)
        by_precision = None
        if ctx.needs_input_grad[2]:
            by_precision = (0.5 * torch.linalg.vecdot(phi, product) + target * along).sum_to_size(precision.shape)
        by_phi = (product + target.unsqueeze(-1) * by_b.unsqueeze(-2)) * precision.unsqueeze(-1)
        return by_phi.sum_to_size(phi.shape), (precision * along).sum_to_size(target.shape), by_precision


def half_quadratic_minus_log_det(G: Tensor, b: Tensor) -> Tensor:
    """½Σ_k b_kᵀ(I+G)⁻¹b_k − ½K·log|I+G| for G (..., M, M) and b (..., K, M), whose rows share G: (...)."""
    found: Tensor = _HalfQuadraticMinusLogDet.apply(G, b)  # type: ignore[no-untyped-call]
    return found


class _HalfQuadraticMinusLogDet(torch.autograd.Function):
    """The gradient, −½(K·(I+G)⁻¹ + Σ_k w_k w_kᵀ) and w, needs no pass back through the factorisation."""

    @staticmethod
    def forward(ctx: Any, G: Tensor, b: Tensor) -> Tensor:
        factor = _factor(G)
        w = torch.cholesky_solve(b.mT, factor)  # (..., M, K)
        ctx.save_for_backward(factor, w)
        return 0.5 * (b.mT * w).sum((-1, -2)) - b.shape[-2] * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        factor, w = ctx.saved_tensors
        inverse = torch.cholesky_inverse(factor)
        upstream = upstream[..., None, None]
        return -0.5 * upstream * (w.shape[-1] * inverse + w @ w.mT), upstream * w.mT
