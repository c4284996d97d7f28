"""Noise that is a pure function of its key: independence of the split, and the distribution of the numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch import Tensor

from vcal_dist import noise
from vcal_dist.noise import row_normal, shared_normal

CPU = torch.device("cpu")
F64 = torch.float64


def shared(key: tuple[int, ...], shape: tuple[int, ...] = (1000,)) -> Tensor:
    return shared_normal(key, shape, dtype=F64, device=CPU)


def rows_of(key: tuple[int, ...], count: int, columns: int = 1) -> Tensor:
    return row_normal(key, torch.arange(count), columns, dtype=F64)


def splitmix64(x: int) -> int:
    """The finaliser in Python's unbounded integers, as the paper prints it."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def test_the_mixing_equals_unbounded_integers_modulo_two_to_the_64() -> None:
    values = [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345678, -987654321098765432]
    mixed = noise._mix(torch.tensor(values)).tolist()
    assert [m % 2**64 for m in mixed] == [splitmix64(v % 2**64) for v in values]
    assert splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first number of splitmix64 from seed 0


def test_numbers_do_not_depend_on_the_order_or_split_of_the_rows() -> None:
    rows, key = torch.arange(1013) * 7919, (3, 1, 4)
    whole = row_normal(key, rows, 5, dtype=F64)
    order = torch.randperm(1013, generator=torch.Generator().manual_seed(0))
    assert torch.equal(row_normal(key, rows[order], 5, dtype=F64), whole[order])
    for size in (1, 3, 64, 500):
        parts = [row_normal(key, part, 5, dtype=F64) for part in rows.split(size)]
        assert torch.equal(torch.cat(parts), whole)
    assert row_normal(key, rows[:0], 5, dtype=F64).shape == (0, 5)


def test_numbers_do_not_depend_on_the_number_of_columns() -> None:
    assert torch.equal(rows_of((1, 2), 50, 7)[:, :3], rows_of((1, 2), 50, 3))


def test_padding_and_far_rows_are_rows_like_any_other() -> None:
    rows = torch.tensor([-1, 0, 1, 2**62, -(2**63)])
    values = row_normal((0,), rows, 3, dtype=F64)
    assert values.isfinite().all()
    assert values.unique().numel() == 15
    assert torch.equal(row_normal((0,), torch.tensor([-1, -1]), 3, dtype=F64), values[[0, 0]])


def test_golden_values_never_change() -> None:
    rows = row_normal((1, 2, 3), torch.tensor([-1, 0, 10**12]), 2, dtype=F64)
    expected = [
        [0.5734841955790985, -0.8903513502011632],
        [-0.9688635798720384, -1.4903640438297665],
        [-1.0837307894791304, -0.7774008757724287],
    ]
    np.testing.assert_allclose(rows.numpy(), expected, rtol=1e-13)
    np.testing.assert_allclose(
        shared((1, 2, 3), (3,)).numpy(), [0.6241337974880388, 0.5141590045177998, 0.38024196507040364], rtol=1e-13
    )


def test_every_part_of_the_key_matters_and_so_does_its_length() -> None:
    keys = [(1, 23), (12, 3), (1, 23, 0), (0, 1, 23), (23, 1), (1,), (), (2**40, 23)]
    for draw in (rows_of, lambda key, count: shared(key, (count,))):
        assert torch.stack([draw(key, 4) for key in keys]).unique().numel() == 4 * len(keys)


def test_shared_and_row_noise_of_one_key_are_independent() -> None:
    a, b = shared((5, 6), (20000,)), rows_of((5, 6), 20000)[:, 0]
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(20000)


def test_keys_that_a_32_bit_seed_would_confuse_differ() -> None:
    assert not torch.equal(shared((1,)), shared((1 + 2**32,)))


@pytest.mark.parametrize("values", [rows_of((7,), 200_000)[:, 0], rows_of((8, 9), 1000, 200), shared((7,), (400, 500))])
def test_the_distribution_is_standard_normal(values: Tensor) -> None:
    x = values.flatten().numpy()
    n = x.size
    assert n == 200_000
    assert scipy.stats.kstest(x, "norm").pvalue > 1e-3
    # Standard errors of the means of x, x², x³, x⁴: the variances of these powers are 1, 2, 15, 96.
    for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((x**power).mean() - mean) < 4 * math.sqrt(variance / n), power


def test_rows_columns_and_consecutive_keys_are_uncorrelated() -> None:
    n = 50_000
    bound = 4 / math.sqrt(n)
    x = rows_of((0, 0, 5), n, 4).numpy()
    columns = np.corrcoef(x.T)
    assert np.abs(columns - np.eye(4)).max() < bound
    for lag in (1, 2, 64):  # neighbouring rows
        assert abs(np.corrcoef(x[:-lag, 0], x[lag:, 0])[0, 1]) < bound * 1.01
    for place in range(3):
        keys = [tuple(step if i == place else 5 for i in range(3)) for step in range(4)]
        draws = np.stack([rows_of(key, n)[:, 0].numpy() for key in keys])
        assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < bound
        assert np.abs(np.corrcoef(draws**2) - np.eye(4)).max() < bound  # nor in size
        draws = np.stack([shared(key, (n,)).numpy() for key in keys])
        assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < bound


def test_one_row_over_many_keys_is_standard_normal() -> None:
    x = np.array([float(rows_of((seed, step), 1)) for seed in range(20) for step in range(200)])
    assert scipy.stats.kstest(x, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 4 / math.sqrt(x.size)


def test_a_million_values_hold_no_duplicate() -> None:
    assert rows_of((11,), 100_000, 10).unique().numel() == 1_000_000


def test_uniforms_have_53_bits_strictly_inside_the_unit_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits, uniform in ((0, 2.0**-53), (-1, 1 - 2.0**-53)):  # all bits zero, all bits one
        monkeypatch.setattr(noise, "_mix", lambda x, bits=bits: torch.full_like(x, bits))
        extreme = rows_of((0,), 1).item()
        assert math.isfinite(extreme)
        assert extreme == pytest.approx(scipy.special.ndtri(uniform), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_and_shape_follow_and_float32_is_the_rounded_float64(dtype: torch.dtype) -> None:
    values = row_normal((2,), torch.arange(9), 4, dtype=dtype)
    assert (values.dtype, values.shape, values.device) == (dtype, (9, 4), CPU)
    assert torch.equal(values, rows_of((2,), 9, 4).to(dtype))
    values = shared_normal((2,), (2, 0, 3), dtype=dtype, device=CPU)
    assert (values.dtype, values.shape) == (dtype, (2, 0, 3))
    assert shared_normal((2,), (), dtype=dtype, device=CPU).shape == ()
    assert torch.equal(shared_normal((2,), (5,), dtype=dtype, device=CPU), shared((2,), (5,)).to(dtype))


@pytest.mark.gpu
def test_a_gpu_draws_the_same_numbers() -> None:
    values = row_normal((2,), torch.arange(1000, device="cuda"), 4, dtype=F64)
    assert values.is_cuda
    torch.testing.assert_close(values.cpu(), rows_of((2,), 1000, 4), rtol=1e-12, atol=1e-12)


def test_global_random_state_is_neither_used_nor_changed() -> None:
    before = torch.random.get_rng_state()
    first = shared((1,)), rows_of((1,), 10)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.equal(first[0], shared((1,)))
    assert torch.equal(first[1], rows_of((1,), 10))
