"""Batches from a store: every row once in a pass, the same batches from anywhere, for anyone, streamed or resident."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from storage.chunks import ChunkReader
from storage.errors import StreamError
from storage.store import Store, create
from tests.vcal_dist.training_kit import CHUNK, append, generate, make_store, problem
from vcal_dist.batches import Scaling
from vcal_dist.errors import ModelError
from vcal_dist.feeding import Feeder
from vcal_dist.phases import Batch, Feed
from vcal_dist.prefetch import prefetched
from vcal_dist.transforms import OutputScaling, TransformSettings

CPU = torch.device("cpu")
GB = 10**9
SMALL = 30_000  # bytes: 4 shards of runs in place of 13
RUNS, OBSERVATIONS = 450, 60
HELD = {"runs": torch.tensor([0, 36, 37, 200, 449]), "observations": torch.tensor([5, 59])}
NONE = {name: torch.zeros(0, dtype=torch.int64) for name in HELD}
Make = Callable[..., Feeder]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Two outputs, some of them missing, and a column of noise; runs in 13 blocks, observations in 2."""
    made = create(tmp_path_factory.mktemp("feeding") / "s.zarr", problem(2), chunk_rows=CHUNK)
    arrays = generate(RUNS, OBSERVATIONS, outputs=2)
    arrays["z"][::7, 0] = arrays["y"][::5, 1] = np.nan
    append(made, arrays | {"noise": np.full((OBSERVATIONS, 2), 0.05) + 0.01 * arrays["x"]})
    return made


def scaling_of(store: Store) -> Scaling:
    z = torch.as_tensor(store.runs.read()["z"])
    names = [output.name for output in store.problem.outputs]
    outputs = OutputScaling.from_runs(z, [TransformSettings()] * len(names), names, standardise=len(z) > 1)
    return Scaling(store.problem, outputs, torch.float32)


@pytest.fixture
def make(store: Store) -> Iterator[Make]:
    """Feeders that are closed at the end."""
    made = []

    def feeder(of: Store = store, held: dict[str, Tensor] = HELD, **options: Any) -> Feeder:
        settings: dict[str, Any] = {"seed": 3, "device": CPU, "memory": GB} | options
        made.append(Feeder(of, scaling_of(of), held, **settings))
        return made[-1]

    yield feeder
    for each in made:
        each.close()


def of(batch: Batch, name: str) -> Any:
    return getattr(batch, name)


def same(one: Any, other: Any) -> bool:
    """Bit for bit in the rows that count, and in which those are."""
    counts = one.weight > 0
    return torch.equal(one.weight, other.weight) and all(
        a is b is None or torch.equal(torch.nan_to_num(a[counts], 9e9), torch.nan_to_num(b[counts], 9e9))
        for a, b in zip(one, other, strict=True)
    )


# --- passes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 17])  # 13 blocks of runs, 2 of observations
def test_a_pass_has_every_row_once_over_all_processes(make: Make, world_size: int, resident: bool) -> None:
    for name, rows, feed in (
        ("runs", RUNS, Feed(100, None, None)),
        ("observations", OBSERVATIONS, Feed(None, 25, None)),
    ):
        seen, lengths = [], set()
        for rank in range(world_size):
            feeder = make(rank=rank, world_size=world_size, resident=resident)
            parts = [of(batch, name) for batch in feeder.leg(feed, 1, 0)]
            lengths.add(len(parts))
            assert feeder.length(feed) == len(parts)
            seen += [part.row[part.row >= 0] for part in parts]
            for part in parts:  # what fills up, and what is kept out, teaches nothing
                assert torch.equal(part.weight > 0, (part.row >= 0) & ~torch.isin(part.row, HELD[name]))
        assert lengths == {-(-rows // (feed.runs or feed.observations or 0))}
        assert torch.equal(torch.cat(seen).sort().values, torch.arange(rows))


@pytest.mark.parametrize("resident", [True, False])
def test_a_table_of_one_row_is_dealt_to_one_process(tmp_path: Path, make: Make, resident: bool) -> None:
    tiny = make_store(tmp_path / "s.zarr", runs=1, observations=1)
    for shuffled in (None, 3):
        batches = [
            list(make(tiny, NONE, rank=rank, world_size=3, resident=resident).leg(Feed(8, 8, shuffled), 0, 0))
            for rank in range(3)
        ]
        assert {len(part) for part in batches} == {shuffled or 1}
        for parts in zip(*batches, strict=True):
            for name in HELD:
                assert sum(float(of(part, name).weight.sum()) for part in parts) == 1
                assert all(bool(of(part, name)[0].isfinite().all()) for part in parts)


def test_legs_of_a_phase_read_the_store_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read = [], ChunkReader.read

    def counted(*arguments: Any) -> Any:
        reads.append(arguments)
        return read(*arguments)

    monkeypatch.setattr(ChunkReader, "read", counted)
    feeder, feed = make(resident=False), Feed(100, None, None)
    first = [batch.runs for batch in feeder.leg(feed, 1, 0)]
    count = len(reads)
    for _ in range(3):
        assert all(same(a, b.runs) for a, b in zip(first, feeder.leg(feed, 1, 0), strict=True))
    assert count > 0
    assert len(reads) == count


# --- shuffled legs ----------------------------------------------------------------------------------------------------

SHUFFLED = Feed(100, 25, 12)  # 5 batches an epoch of runs, 3 of observations


@pytest.mark.parametrize("feed", [SHUFFLED, Feed(100, None, None), Feed(None, 25, None)], ids=["both", "runs", "field"])
def test_a_leg_can_be_entered_at_any_batch(make: Make, feed: Feed) -> None:
    whole = list(make().leg(feed, 4, 0))
    for resident in (True, False):
        for start in range(len(whole) + 1):
            feeder = make(resident=resident)
            rest = list(feeder.leg(feed, 4, start))
            assert len(rest) == len(whole) - start
            for found, expected in zip(rest, whole[start:], strict=True):
                assert (found.runs is None, found.observations is None) == (
                    feed.runs is None,
                    feed.observations is None,
                )
                for name in HELD:
                    assert of(found, name) is None or same(of(found, name), of(expected, name))


def test_a_leg_goes_on_from_the_orders_of_a_checkpoint_with_another_budget(make: Make) -> None:
    feed = Feed(100, None, 12)
    feeder = make(memory=SMALL, resident=False)
    whole, orders = list(feeder.leg(feed, 4, 0)), feeder.orders
    assert orders["runs"]["shards"] < 13
    for resident in (True, False):
        rest = make(memory=GB, resident=resident).leg(feed, 4, 5, orders)
        assert all(same(a.runs, b.runs) for a, b in zip(rest, whole[5:], strict=True))
    with pytest.raises(StreamError, match="needs a memory budget"):
        make(memory=21_000, resident=False).leg(feed, 4, 5, orders)


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("memory", [SMALL, GB])
def test_orders_of_a_checkpoint_give_each_process_its_own_rows(make: Make, memory: int, resident: bool) -> None:
    """Another budget has other shards, and so deals other rows to a process than those that it keeps."""
    feed = Feed(100, None, 7)
    before = make(memory=SMALL, resident=False)
    whole = list(before.leg(feed, 4, 0))
    parts = [
        list(make(memory=memory, resident=resident, rank=rank, world_size=3).leg(feed, 4, 2, before.orders))
        for rank in range(3)
    ]
    for expected, *shares in zip(whole[2:], *parts, strict=True):
        for column in ("row", "u", "z"):
            together = torch.cat([getattr(share.runs, column)[share.runs.row >= 0] for share in shares])
            wanted = getattr(expected.runs, column)[expected.runs.row >= 0]
            assert torch.equal(torch.nan_to_num(together, 9e9), torch.nan_to_num(wanted, 9e9))


@pytest.mark.parametrize("world_size", [2, 3, 17])
def test_global_batches_are_the_same_for_any_number_of_processes(make: Make, world_size: int) -> None:
    whole = list(make().leg(SHUFFLED, 4, 0))
    parts = [list(make(rank=rank, world_size=world_size).leg(SHUFFLED, 4, 0)) for rank in range(world_size)]
    for expected, *shares in zip(whole, *parts, strict=True):
        for name in HELD:
            rows = torch.cat([of(share, name).row for share in shares])
            counted = of(expected, name).row
            assert torch.equal(rows[rows >= 0], counted[counted >= 0])  # even in the same order
            weight = sum(float(of(share, name).weight.sum()) for share in shares)
            assert weight == float(of(expected, name).weight.sum())


def test_phases_and_seeds_have_orders_of_their_own(make: Make) -> None:
    def rows(phase: int, seed: int) -> list[int]:
        batches = make(seed=seed).leg(Feed(100, None, 4), phase, 0)
        return torch.cat([of(batch, "runs").row for batch in batches]).tolist()

    assert rows(4, 3) == rows(4, 3)
    assert len({tuple(rows(phase, seed)) for phase in (0, 4) for seed in (0, 3)}) == 4


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("batches", [None, 12])
def test_resident_and_streamed_batches_are_equal_to_the_last_bit(
    make: Make, world_size: int, batches: int | None
) -> None:
    for rank in range(world_size):
        place: dict[str, Any] = {"rank": rank, "world_size": world_size}
        kept, streamed, synchronous = (
            make(resident=True, **place).leg(Feed(100, 25, batches), 4, 0),
            make(resident=False, **place).leg(Feed(100, 25, batches), 4, 0),
            make(resident=False, memory=2 * SMALL, scheduler="synchronous", **place).leg(Feed(100, 25, None), 4, 0),
        )
        for one, other in zip(kept, streamed, strict=batches is not None):
            assert same(one.runs, other.runs)
            assert same(one.observations, other.observations)
        assert len(list(synchronous)) == 5  # also where a budget allows for few blocks at a time


# --- what stays -------------------------------------------------------------------------------------------------------


def test_rows_stay_where_they_fit_the_budget(make: Make) -> None:
    # 24 bytes for each of 5 (runs) or 5 (observations with noise) columns and two more, in half of the budget.
    need = {"runs": 2 * 24 * 7 * RUNS, "observations": 2 * 24 * 7 * OBSERVATIONS}
    for memory, expected in ((need["runs"], HELD.keys()), (need["runs"] - 1, {"observations"})):
        feeder = make(memory=memory)
        next(iter(feeder.leg(Feed(100, 25, 2), 0, 0)))
        assert feeder._resident.keys() == expected
    shared = make(memory=need["runs"] // 2 + 1, rank=1, world_size=2)
    next(iter(shared.leg(Feed(100, 25, 2), 0, 0)))
    assert shared._resident.keys() == HELD.keys()
    own = shared._resident["runs"].rows.row
    assert torch.equal(own, torch.arange(int(own[0]), RUNS))
    assert 150 < len(own) < 300


def test_rows_that_stay_are_not_read_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    feeder = make()
    expected = list(feeder.leg(SHUFFLED, 4, 0))
    monkeypatch.setattr(ChunkReader, "read", lambda *_, **__: pytest.fail("the store is read"))
    found = feeder.leg(SHUFFLED, 5, 0)
    assert len(list(found)) == 12
    feeder.close()
    assert all(same(a.runs, b.runs) for a, b in zip(feeder.leg(SHUFFLED, 4, 0), expected, strict=True))


def test_the_orders_of_a_leg_are_known_before_its_first_batch(make: Make) -> None:
    feeder = make()
    list(feeder.leg(SHUFFLED, 0, 0))
    feeder.leg(Feed(200, None, None), 1, 0)
    assert feeder.orders.keys() == {"runs"}
    assert (feeder.orders["runs"]["batch"], feeder.orders["runs"]["shuffle"]) == (200, False)


@pytest.mark.parametrize("resident", [True, False])
def test_every_row_is_checked_on_its_way(make: Make, resident: bool) -> None:
    seen: dict[str, list[Tensor]] = {"runs": [], "observations": []}
    feeder = make(resident=resident, check=lambda name, rows: seen[name].append(rows.row))
    list(feeder.leg(Feed(100, 25, None), 1, 0))
    for name, rows in (("runs", RUNS), ("observations", OBSERVATIONS)):
        assert set(torch.cat(seen[name]).tolist()) - {-1} == set(range(rows))


# --- batches made ready in a thread -----------------------------------------------------------------------------------


def test_batches_ahead_are_the_same_batches(make: Make) -> None:
    ahead = prefetched(make().leg(SHUFFLED, 4, 0), pin=False)
    assert all(same(a.runs, b.runs) for a, b in zip(ahead, make().leg(SHUFFLED, 4, 0), strict=True))


def test_an_exception_ahead_comes_where_its_batch_would_have_come() -> None:
    def failing() -> Iterator[Batch]:
        yield Batch(None, None)
        yield Batch(None, None)
        raise StreamError("the third")

    ahead = prefetched(failing(), pin=False)
    assert [next(ahead), next(ahead)] == [Batch(None, None)] * 2
    with pytest.raises(StreamError, match="the third"):
        next(ahead)


def test_batches_ahead_that_nobody_wants_end_their_thread(make: Make) -> None:
    import threading

    ahead = prefetched(make().leg(Feed(100, None, 10_000), 4, 0), pin=False)
    next(ahead)
    ahead.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == "vcal-prefetch"]


# --- whole batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [True, False])
def test_no_shuffled_batch_is_short(make: Make, resident: bool) -> None:
    """The evidence of a batch is no sum over rows: a short one would count as much as a whole one."""
    feeder = make(resident=resident)
    taught = RUNS - len(HELD["runs"])
    sizes = [int((batch.runs.row >= 0).sum()) for batch in feeder.leg(Feed(100, None, 30), 2, 0) if batch.runs]
    assert set(sizes) == {100}
    for asked in (taught, RUNS):  # all that there is to learn from, in every batch
        weights = {float(batch.runs.weight.sum()) for batch in feeder.leg(Feed(asked, None, 3), 5, 0) if batch.runs}
        assert weights == {float(taught)}


def test_a_value_that_a_transform_cannot_take_is_refused_by_its_row(tmp_path: Path) -> None:
    arrays = generate(120, 20)
    arrays["z"][77] = -1.0
    store = create(tmp_path / "s.zarr", problem(), chunk_rows=CHUNK)
    append(store, arrays)
    outputs = OutputScaling([TransformSettings(kind="log")], torch.zeros(1), torch.ones(1), ["f0"])
    nothing = {name: torch.empty(0, dtype=torch.int64) for name in ("runs", "observations")}
    scaling = Scaling(store.problem, outputs, torch.float32)
    feeder = Feeder(store, scaling, nothing, seed=0, device=CPU, memory=GB, resident=False)
    with pytest.raises(ModelError, match=r"row 77 of the runs in the store: output 'f0' is -1 .*log needs positive"):
        list(feeder.leg(Feed(50, None, None), 0, 0))
    feeder.close()
