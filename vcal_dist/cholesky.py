"""Cholesky factors of matrices that are positive definite but for rounding."""

from __future__ import annotations

import torch
from torch import Tensor

JITTERS = (1e-14, 1e-13, 1e-12, 1e-11, 1e-10, 1e-9)  # of the mean of the diagonal


def cholesky(matrix: Tensor) -> Tensor:
    """L with LLᵀ = matrix (..., M, M); where rounding leaves none, the least jitter on the diagonal that gives one.

    Only the matrices that need it get any. What is not finite, or far from positive definite, raises as torch does.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not bool(failed.any()):
        return factor
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    for jitter in JITTERS:
        more = torch.where(failed > 0, jitter * diagonal.mean(-1), 0.0).unsqueeze(-1).expand_as(diagonal)
        factor, still = torch.linalg.cholesky_ex(matrix + torch.diag_embed(more))
        if not bool(still.any()):
            return factor
    return torch.linalg.cholesky(matrix)
