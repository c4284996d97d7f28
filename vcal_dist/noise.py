"""Standard normal numbers that are a pure function of a key.

Monte Carlo noise that is drawn from a running generator depends on how the rows are split over processes and on how
often a process has drawn before. Here every number is a hash of its key, row and column instead: a resumed run
continues with the same noise, and any number of processes draws the same.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ divided by the golden ratio: multiples of it are far apart in the 64-bit ring


def shared_normal(key: Sequence[int], shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers of a shape, the same in every process: a function of the key and the place only.

    They are made on the CPU in float64 and then moved, so that kinds of device do not differ in the last digit.

    >>> shared_normal((0, 1), (2, 3), dtype=torch.float32, device=torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    # Not a seeded torch.Generator: on the CPU it keeps 32 bits of its seed, and 10⁵ keys would share streams.
    places = torch.arange(math.prod(shape), dtype=torch.int64)
    return _normal(b"shared", key, places, 1).reshape(tuple(shape)).to(device=device, dtype=dtype)


def row_normal(key: Sequence[int], rows: Tensor, columns: int, *, dtype: torch.dtype) -> Tensor:
    """Standard normal numbers (len(rows), columns) on the rows' device.

    Element (i, j) depends on the key, on the global row number rows[i] (int64, also negative) and on j only.

    >>> row_normal((0, 1), torch.tensor([7, 3, 7]), 2, dtype=torch.float64).unique().numel()
    4
    """
    return _normal(b"rows", key, rows, columns).to(dtype)


def _normal(purpose: bytes, key: Sequence[int], rows: Tensor, columns: int) -> Tensor:
    assert rows.dtype == torch.int64, f"row numbers are int64, not {rows.dtype}"
    # A cryptographic hash, so that neighbouring keys have nothing in common; 8 bytes each keep (1, 23) from (12, 3).
    packed = b"".join(int(part).to_bytes(8, "little") for part in key)
    digest = hashlib.blake2b(packed, digest_size=16, person=purpose).digest()
    row_key, column_key = (int.from_bytes(digest[i : i + 8], "little", signed=True) for i in (0, 8))
    by_row = _mix(rows * _signed(GOLDEN) + row_key)  # (B,)
    by_column = _mix(torch.arange(columns, dtype=torch.int64, device=rows.device) * _signed(GOLDEN) + column_key)
    bits = _shift(_mix(by_row[:, None] + by_column), 12)  # 52 bits, (B, columns)
    # u = (2·bits + 1)/2⁵³: exact in float64, symmetric around ½ and strictly inside (0, 1)
    uniform = (2 * bits + 1).to(torch.float64) * 2.0**-53
    # The inverse of the distribution function works element by element; log and cos of Box-Muller may differ in the
    # last digit between the vectorised body of a tensor and its remainder, and so between two splits of the rows.
    normal: Tensor = torch.special.ndtri(uniform)
    return normal


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014; Stafford's variant 13): every bit moves every other.

    int64 arithmetic wraps modulo 2⁶⁴, which is what unsigned arithmetic would do.
    """
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, places: int) -> Tensor:
    """Logical shift to the right; torch's own repeats the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


def _signed(constant: int) -> int:
    """The int64 of the same 64 bits."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant
