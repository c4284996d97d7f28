"""How an emulator of few runs predicted each of them without having seen it (cross-validation over whole runs)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Validation(NamedTuple):
    """Predictions of rows by emulators that were trained without their runs, in the model's units."""

    row: Tensor  # (B,) numbers in the store, sorted
    mean: Tensor  # (B, K)
    sd: Tensor  # (B, K) noise included
