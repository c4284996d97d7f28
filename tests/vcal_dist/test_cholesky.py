"""Factors of matrices that rounding has left without one."""

from __future__ import annotations

import pytest
import torch

from tests.vcal_dist.conftest import F64, Kit
from vcal_dist.cholesky import cholesky


def test_a_sound_matrix_has_its_own_factor_to_the_last_bit() -> None:
    root = Kit.randn(1, 3, 6, 6)
    matrix = root @ root.mT + torch.eye(6, dtype=F64)
    assert torch.equal(cholesky(matrix), torch.linalg.cholesky(matrix))


def test_rounding_is_made_up_for_where_it_is_needed_and_nowhere_else() -> None:
    root = Kit.randn(2, 2, 8, 3)
    matrix = 1e6 * root @ root.mT  # of rank 3
    matrix[1] = torch.eye(8, dtype=F64)
    with pytest.raises(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        torch.linalg.cholesky(matrix)
    lower = cholesky(matrix)
    assert float((lower @ lower.mT - matrix).abs().max() / matrix.abs().max()) < 1e-8
    assert torch.equal(lower[1], torch.eye(8, dtype=F64))


@pytest.mark.parametrize("wrong", [float("nan"), -1.0])
def test_what_no_rounding_explains_is_refused(wrong: float) -> None:
    matrix = torch.eye(4, dtype=F64)
    matrix[2, 2] = wrong
    with pytest.raises(torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        cholesky(matrix)
