"""The order of rows, as a pure function: permutations, shares, and the limits that a memory budget sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import StreamError
from storage.order import Order, permutation, plan


def orders(shuffle: bool = True) -> st.SearchStrategy[Order]:
    @st.composite
    def build(draw: st.DrawFn) -> Order:
        rows = draw(st.integers(1, 3000))
        block_rows = draw(st.integers(1, 400))
        blocks = -(-rows // block_rows)
        shards = draw(st.integers(1, min(64, blocks)))
        return Order(
            rows=rows,
            block_rows=block_rows,
            shards=shards,
            window=draw(st.integers(1, 5)),
            batch=draw(st.integers(1, rows)),
            seed=draw(st.integers(0, 2**64 - 1)),
            shuffle=shuffle,
        )

    return build()


@given(n=st.integers(0, 5000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_a_permutation_is_one(n: int, seed: int, epoch: int) -> None:
    found = permutation(n, (seed, 1), (0, 3, 5, epoch))
    np.testing.assert_array_equal(np.sort(found), np.arange(n))


def test_a_permutation_never_changes() -> None:
    """Fixed for ever: a checkpoint of today must go on tomorrow, with another NumPy on another machine."""
    assert permutation(8, (1, 0), (0, 0, 0, 0)).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]
    assert permutation(8, (1, 0), (0, 0, 0, 1)).tolist() != permutation(8, (1, 0), (0, 0, 0, 0)).tolist()


def test_permutations_are_uniform() -> None:
    """All 24 orders of four things, chi-squared with 23 degrees of freedom (99.99 % quantile: 57)."""
    draws = 4800
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(draws):
        found = tuple(permutation(4, (7, 1), (0, 0, 0, epoch)).tolist())
        counts[found] = counts.get(found, 0) + 1
    assert len(counts) == 24
    assert sum((count - draws / 24) ** 2 / (draws / 24) for count in counts.values()) < 57


@given(order=orders())
@settings(max_examples=200, deadline=None)
def test_shares_add_up_and_never_go_back(order: Order) -> None:
    taken = order.taken(np.arange(order.steps + 1) * order.batch)
    np.testing.assert_array_equal(taken.sum(axis=1), np.minimum(np.arange(order.steps + 1) * order.batch, order.rows))
    assert (np.diff(taken, axis=0) >= 0).all()
    np.testing.assert_array_equal(taken[-1], order.shard_rows)
    assert order.shard_rows.sum() == order.rows
    assert (order.shard_rows > 0).all()


@given(order=orders(), world_size=st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_no_part_exceeds_its_capacity(order: Order, world_size: int) -> None:
    given_ = np.diff(order.taken(np.arange(order.steps + 1) * order.batch), axis=0)
    owned = []
    for rank in range(world_size):
        own = order.rank_shards(rank, world_size)
        owned += list(own)
        assert given_[:, own.start : own.stop].sum(axis=1).max() <= order.capacity(rank, world_size)
    assert owned == list(range(order.shards))


@given(order=orders(), epoch=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_windows_go_through_every_block_of_a_shard_once(order: Order, epoch: int) -> None:
    for shard in range(order.shards):
        windows = order.shard_windows(shard, epoch)
        assert all(1 <= len(blocks) <= order.window for blocks in windows)
        found = sorted(block.start for blocks in windows for block in blocks)
        assert found == [order.block_range(block).start for block in order.shard_blocks(shard)]
        assert sum(len(block) for blocks in windows for block in blocks) == order.shard_rows[shard]


@pytest.mark.parametrize(("batch", "world_size", "most"), [(4096, 2, 1.02), (256, 8, 1.15), (64, 2, 1.1)])
def test_a_constant_size_costs_little(batch: int, world_size: int, most: float) -> None:
    order = Order(rows=200_000, block_rows=2048, shards=64, window=1, batch=batch, seed=0)
    assert sum(order.capacity(rank, world_size) for rank in range(world_size)) < most * batch
    assert order.capacity(0, 1) == batch


@given(order=orders(), world_size=st.integers(2, 9))
@settings(max_examples=50, deadline=None)
def test_the_bound_for_long_epochs_holds(order: Order, world_size: int) -> None:
    exact = [order.capacity(rank, world_size) for rank in range(world_size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage.order.EXACT_STEPS", 0)
        assert all(order.capacity(rank, world_size) >= exact[rank] for rank in range(world_size))


@given(
    rows=st.integers(1, 10**9),
    block_rows=st.integers(1, 10**6),
    row_bytes=st.integers(4, 500),
    memory=st.integers(10**6, 10**10),
)
@settings(max_examples=200, deadline=None)
def test_a_plan_stays_inside_its_budget(rows: int, block_rows: int, row_bytes: int, memory: int) -> None:
    # Two windows of a block, and such a window and two chunks in each reading thread, in three quarters of the budget.
    readers, first = min(4, -(-rows // block_rows)), min(block_rows, rows)
    least = (2 * first + readers * (first + 2 * block_rows)) * row_bytes
    settings_: dict[str, Any] = {"batch": 64, "seed": 0, "shuffle": True, "memory": memory}
    if memory - memory // 4 < least:
        with pytest.raises(StreamError, match="too small"):
            plan(rows, block_rows, row_bytes, **settings_)
        return
    order = plan(rows, block_rows, row_bytes, **settings_)
    window_rows = min(order.window * block_rows, rows)
    assert (2 * order.shards * window_rows + readers * (window_rows + 2 * block_rows)) * row_bytes <= 0.75 * memory + 1
    assert 1 <= order.shards <= order.blocks
    assert order.window >= 1


def test_a_plan_refuses_what_cannot_be() -> None:
    with pytest.raises(StreamError, match="batch size is 0"):
        plan(10, 10, 36, batch=0, seed=0, shuffle=True, memory=10**6)
    with pytest.raises(StreamError, match="no rows"):
        plan(0, 10, 36, batch=1, seed=0, shuffle=True, memory=10**6)
    with pytest.raises(StreamError, match=r"budget of 1 MB.*blocks of 3\.6 MB.*at least 67\.2 MB"):
        plan(10**6, 10**5, 36, batch=1, seed=0, shuffle=True, memory=10**6)
