"""The stream: the same batches for any number of processes, every row once, resumable, inside its budget."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import storage
from storage.chunks import ChunkReader
from storage.errors import StreamError, VcalError
from storage.store import Store
from storage.streaming import Batch, Stream
from tests.storage.conftest import PROBLEM, numbered

# Small enough that windows are single blocks and nothing is kept in memory (float64 rows of 4 columns, chunks of 16).
TIGHT = 16 * 40 * (2 * 8 + 3 * 4) * 4 // 3 + 1


def rows_of(part: Any) -> np.ndarray:
    """The row numbers of a part of a batch, after checking that the rows are the ones that carry them."""
    real = part.weight > 0
    number = part.row[real]
    assert set(np.unique(part.weight)) <= {0.0, 1.0}
    assert (part.row[~real] == -1).all()
    x, t, z = numbered(int(number.max(initial=0)) + 1)
    np.testing.assert_array_equal(part.x[real], x[number])
    if hasattr(part, "t"):
        np.testing.assert_array_equal(part.t[real], t[number])
        np.testing.assert_array_equal(part.z[real], z[number])
    assert all(np.isfinite(a).all() for a in (part.x, part.weight))
    return np.asarray(number)


def streams(store: Store, world_size: int, **settings_: Any) -> list[Stream]:
    return [storage.stream(store, rank=rank, world_size=world_size, **settings_) for rank in range(world_size)]


def global_batches(
    store: Store, world_size: int, table: str = "runs", epochs: int = 2, **settings_: Any
) -> list[np.ndarray]:
    """The row numbers of every global batch, put together from all processes."""
    parts = streams(store, world_size, **settings_)
    found: list[np.ndarray] = []
    for _ in range(epochs):
        steps = zip(*parts, strict=True)  # strict: all processes take the same number of steps
        found += [np.concatenate([rows_of(getattr(batch, table)) for batch in batches]) for batches in steps]
    for part in parts:
        shapes = {getattr(batch, table).x.shape for batch in part}
        assert len(shapes) == 1, "the size of a process' part never changes"
        part.close()
    return found


def equal(left: list[np.ndarray], right: list[np.ndarray]) -> bool:
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("memory", [TIGHT, "1 GB"], ids=["windows", "all in memory"])
@pytest.mark.parametrize("scheduler", ["threads", "synchronous"])
def test_world_sizes_see_the_same_global_batches(make_store: Callable[..., Store], memory: Any, scheduler: str) -> None:
    store = make_store(runs=1000)
    one = global_batches(store, 1, runs=64, seed=5, memory=memory, scheduler="synchronous")
    for world_size in (1, 2, 3, 4, 9):
        assert equal(one, global_batches(store, world_size, runs=64, seed=5, memory=memory, scheduler=scheduler))


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 300),
    chunk=st.integers(1, 60),
    batch=st.integers(1, 400),
    world_size=st.integers(1, 5),
    blocks_of_memory=st.integers(20, 80),
    shuffle=st.booleans(),
    layout=st.sampled_from([{}, {"compression": "none"}, {"shard": 3}]),
)
def test_every_row_exactly_once_in_every_epoch(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    chunk: int,
    batch: int,
    world_size: int,
    blocks_of_memory: int,
    shuffle: bool,
    layout: dict[str, Any],
) -> None:
    shard = layout.get("shard")
    store = storage.create(
        tmp_path_factory.mktemp("s") / "s.zarr",
        PROBLEM,
        dtype="float64",
        chunk_rows=chunk,
        shard_rows=shard and shard * chunk,
        compression=layout.get("compression", "zstd"),
    )
    store.append_runs(*numbered(rows))
    memory = blocks_of_memory * chunk * (shard or 1) * 40
    settings_: dict[str, Any] = {"runs": batch, "memory": memory, "shuffle": shuffle, "seed": rows}
    found = global_batches(store, world_size, **settings_)
    steps = -(-rows // min(batch, rows))
    assert len(found) == 2 * steps
    for epoch in (found[:steps], found[steps:]):
        np.testing.assert_array_equal(np.sort(np.concatenate(epoch)), np.arange(rows))
        assert {len(b) for b in epoch[:-1]} <= {min(batch, rows)}
    assert equal(found, global_batches(store, 1, scheduler="synchronous", **settings_))


def test_four_rows_on_three_processes(make_store: Callable[..., Store]) -> None:
    for chunk_rows in (1, 2, 16):
        store = make_store(runs=4, name=f"{chunk_rows}.zarr", chunk_rows=chunk_rows)
        found = global_batches(store, 3, runs=3, epochs=1)
        assert [len(batch) for batch in found] == [3, 1]
        assert sorted(np.concatenate(found).tolist()) == [0, 1, 2, 3]


def test_no_block_is_read_by_two_processes_nor_twice(
    make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(runs=1000)
    reads: list[tuple[int, str, int]] = []
    reading = {"rank": 0}
    original = ChunkReader.read

    def counted(self: ChunkReader, index: int, rows: int) -> Any:
        reads.append((reading["rank"], self.array.path, index))
        return original(self, index, rows)

    monkeypatch.setattr(ChunkReader, "read", counted)
    for memory, epochs in ((TIGHT, 1), ("1 GB", 3)):  # data that fit are read once, however many epochs
        reads.clear()
        for rank in range(3):
            reading["rank"] = rank
            with storage.stream(store, runs=64, rank=rank, world_size=3, memory=memory, epochs=epochs) as stream:
                assert sum(1 for _ in range(epochs) for _ in stream) == epochs * 16
                assert list(stream) == []
        assert Counter((path, block) for _, path, block in reads) == Counter(
            (f"runs/{array}", block) for array in "xtz" for block in range(store.runs.blocks)
        )


def test_epochs_and_seeds_differ_but_repeat(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=500)
    first = global_batches(store, 1, runs=50, seed=1)
    assert equal(first, global_batches(store, 1, runs=50, seed=1))
    assert not equal(first, global_batches(store, 1, runs=50, seed=2))
    assert not equal(first[:10], first[10:])


@pytest.mark.parametrize("memory", [TIGHT, "1 GB"])
@pytest.mark.parametrize("both", [False, True])
def test_resuming_anywhere_equals_going_on(make_store: Callable[..., Store], memory: Any, both: bool) -> None:
    store = make_store(runs=300, observations=37)
    sizes = {"runs": 32, **({"observations": 8} if both else {})}
    make = {"seed": 9, "memory": memory, "scheduler": "synchronous", **sizes}

    def content(batch: Batch) -> tuple[Any, ...]:
        parts = [part for part in (batch.runs, batch.observations) if part is not None]
        return (batch.epoch, batch.step, *(part.row.tolist() for part in parts))

    with storage.stream(store, **make) as stream:
        states, batches = [stream.state_dict()], []
        for _ in range(3):
            for batch in stream:
                batches.append(content(batch))
                states.append(stream.state_dict())
    assert len(batches) == 30
    store.append_runs(*numbered(50, start=300))  # rows that came later do not enter
    for number, state in enumerate(states[:-1]):
        state = json.loads(json.dumps(state))  # it is small and plain
        with storage.stream(store, **make, state=state) as resumed:
            assert content(next(iter(resumed))) == batches[number]
    with storage.stream(store, **make, state=states[7]) as resumed:
        again = [content(batch) for _ in range(3) for batch in resumed]
    assert again == batches[7:]


def test_resuming_on_another_number_of_processes(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=300)
    whole = global_batches(store, 1, runs=32, seed=4, epochs=1)
    half = streams(store, 2, runs=32, seed=4)
    iterators = [iter(stream) for stream in half]
    for _ in range(4):
        for iterator in iterators:
            next(iterator)
    states = [stream.state_dict() for stream in half]
    assert states[0] == states[1], "a state is not of one process"
    for stream in half:
        stream.close()
    three = streams(store, 3, runs=32, seed=4, state=states[0])
    rest = [np.concatenate([rows_of(b.runs) for b in batches]) for batches in zip(*three, strict=True)]
    assert equal(rest, whole[4:])


def test_breaking_off_an_epoch_and_going_on(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=300)
    whole = global_batches(store, 1, runs=32, epochs=2)
    with storage.stream(store, runs=32) as stream:
        found = []
        for batch in stream:
            found.append(rows_of(batch.runs))
            if len(found) == 3:
                break
        found += [rows_of(batch.runs) for _ in range(2) for batch in stream]
    assert equal(found, whole)


def test_both_tables_and_the_smaller_one_cycled(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=300, observations=50)
    with storage.stream(store, runs=32, observations=20, seed=3) as stream:
        assert stream.steps == 10
        batches = [batch for _ in range(3) for batch in stream]
    runs = [rows_of(batch.runs) for batch in batches]
    observations = [rows_of(batch.observations) for batch in batches]
    for epoch in range(3):
        assert sorted(np.concatenate(runs[10 * epoch : 10 * epoch + 10]).tolist()) == list(range(300))
    for cycle in range(10):  # 3 batches of observations make a cycle, also across the epochs of the runs
        assert sorted(np.concatenate(observations[3 * cycle : 3 * cycle + 3]).tolist()) == list(range(50))
    assert observations[0].tolist() != observations[3].tolist(), "each cycle has its own permutation"
    assert all(batch.observations is not None and batch.observations.noise is None for batch in batches)
    alone = global_batches(store, 1, "observations", observations=20, seed=3, epochs=1)
    assert equal(alone, observations[:3])


def test_noise_comes_along(make_store: Callable[..., Store]) -> None:
    store = make_store(observations=0)
    x, _, y = numbered(30)
    store.append_observations(x, y, noise=x[:, :1] + 1)
    with storage.stream(store, observations=8, rank=0, world_size=1) as stream:
        for batch in stream:
            part = batch.observations
            assert part is not None
            assert part.noise is not None
            real = part.weight > 0
            np.testing.assert_array_equal(part.noise[real, 0], part.row[real] + 1)


def test_a_pass_is_in_order_and_ends(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=16 * 4, observations=5)
    with storage.stream(store, runs=16, shuffle=False, epochs=1) as stream:
        batches = [rows_of(batch.runs) for batch in stream]
        assert list(stream) == []
    assert sorted(np.concatenate(batches).tolist()) == list(range(64))
    for batch in batches:  # of each of the four shards the next four rows
        np.testing.assert_array_equal(np.sort(batch), (np.arange(4)[:, None] * 16 + batch.min() + np.arange(4)).ravel())


@pytest.mark.parametrize("memory", [TIGHT, "1 GB"])
def test_a_distributed_scheduler_gives_the_same_batches(
    make_store: Callable[..., Store], dask_address: str, memory: Any
) -> None:
    store = make_store(runs=500)
    one = global_batches(store, 1, runs=64, memory=memory, scheduler="synchronous", epochs=1)
    assert equal(one, global_batches(store, 1, runs=64, memory=memory, scheduler=dask_address, epochs=1))


@pytest.mark.parametrize("order", ["sorted", "grouped", "random"])
@pytest.mark.parametrize("memory", ["40 windows", "1 GB"])
def test_shuffle_quality(tmp_path: Path, order: str, memory: str) -> None:
    """Batch means of a column that is sorted or grouped on disk spread at most like those of random samples.

    The standard deviation of the means is compared with that of random batches without replacement. In a table
    without order the factor is 1 (0.8 to 1.25 here); in a sorted one it is below 0.5, because a batch takes its share
    from every part of the table: it is a stratified sample.
    """
    rows, batch = 40_000, 250
    column = np.sort(np.random.default_rng(0).random(rows))
    if order == "grouped":
        column = np.round(column * 5) / 5
    if order == "random":
        column = np.random.default_rng(1).permutation(column)
    store = storage.create(tmp_path / "s.zarr", PROBLEM, dtype="float64", chunk_rows=250)
    store.append_runs(np.stack([column, column], axis=1), column, column)
    budget = "1 GB" if memory == "1 GB" else 250 * 40 * (2 * 40 + 3 * 4) * 4 // 3 + 1
    means = []
    with storage.stream(store, runs=batch, seed=1, memory=budget) as stream:
        window = stream.tables["runs"].order.window
        for _ in range(5):
            means += [float(np.mean(b.runs.t)) for b in stream if b.runs is not None]
    assert (window == 1) == (memory != "1 GB")
    factor = np.std(means) / (column.std() / np.sqrt(batch) * np.sqrt(1 - batch / rows))
    assert 0.8 < factor < 1.25 if order == "random" else factor < 0.5
    np.testing.assert_allclose(np.mean(means), column.mean(), atol=1e-9)


def test_neighbours_are_separated(make_store: Callable[..., Store]) -> None:
    """Rows that lie side by side on disk do not come side by side: the pairs that do are as rare as by chance."""
    store = make_store(runs=4000)
    with storage.stream(store, runs=4000, memory=TIGHT, seed=2) as stream:
        number = np.concatenate([rows_of(batch.runs) for batch in stream])
    neighbours = int((np.abs(np.diff(number)) == 1).sum())
    # Inside a block of 16 rows two successive ones are neighbours with probability 2/16, in 250 blocks of 15 pairs.
    assert neighbours < 1.2 * 250 * 15 * 2 / 16


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({}, "nothing to stream"),
        ({"runs": 0}, "batch size is 0"),
        ({"runs": 8, "rank": 2, "world_size": 2}, "rank is 2 of 2"),
        ({"runs": 8, "memory": "lots"}, "memory is 'lots'"),
        ({"runs": 8, "memory": "1 KB"}, "budget of 0.001 MB is too small"),
        ({"runs": 8, "scheduler": "quick"}, "scheduler is 'quick'"),
        ({"runs": 8, "epochs": 0}, "epochs is 0"),
        ({"runs": 8, "world_size": 0}, "world_size is 0"),
        ({"runs": 8, "memory": -5}, "memory is '-5'"),
        ({"runs": 8, "scheduler": "tcp://127.0.0.1:1"}, "no Dask scheduler answers"),
    ],
)
def test_bad_settings_say_what_is_accepted(
    make_store: Callable[..., Store], settings_: dict[str, Any], said: str
) -> None:
    store = make_store()
    with pytest.raises(VcalError, match=said):
        storage.stream(store, **settings_)


def test_a_state_that_does_not_fit(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=100, observations=10)
    with storage.stream(store, runs=8, seed=1) as stream:
        state = stream.state_dict()
    with pytest.raises(StreamError, match="cannot resume with batch 16, the checkpoint has 8"):
        storage.stream(store, runs=16, seed=1, state=state)
    with storage.stream(store, runs=200, seed=1) as larger, pytest.raises(StreamError, match=r"batch 10, .* has 200"):
        storage.stream(store, runs=10, seed=1, state=larger.state_dict())
    with pytest.raises(StreamError, match="checkpoint needs a memory budget of"):
        storage.stream(store, runs=8, seed=1, state=state, memory=TIGHT // 2)
    with pytest.raises(StreamError, match="not one of a stream"):
        storage.stream(store, runs=8, seed=1, state={"epoch": 0, "step": 0, "runs": {"rows": 1}})
    with pytest.raises(StreamError, match="cannot resume with seed"):
        storage.stream(store, runs=8, seed=2, state=state)
    with pytest.raises(StreamError, match="observations"):
        storage.stream(store, runs=8, observations=2, seed=1, state=state)
    smaller = make_store(runs=50, name="smaller.zarr")
    with pytest.raises(StreamError, match="100 rows"):
        storage.stream(smaller, runs=8, seed=1, state=state)
    with pytest.raises(StreamError, match="no rows"):
        storage.stream(make_store(runs=0, name="empty.zarr"), runs=8)


def test_tables_have_permutations_of_their_own(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=100, observations=100)
    with storage.stream(store, runs=10, observations=10) as stream:
        pairs = [(rows_of(batch.runs), rows_of(batch.observations)) for batch in stream]
    assert not any(np.array_equal(runs, observations) for runs, observations in pairs)


@pytest.mark.parametrize("seed", range(4))
def test_a_short_block_may_come_in_any_window(make_store: Callable[..., Store], seed: int) -> None:
    """Windows of two blocks over three: where the short one falls changes their sizes from epoch to epoch."""
    store = make_store(runs=16 * 128 + 3)
    memory = 16 * 40 * (2 * 64 * 2 + 4 * 4) * 4 // 3 + 1
    with storage.stream(store, runs=100, seed=seed, memory=memory) as stream:
        assert stream.tables["runs"].order.window == 2
        for _ in range(6):
            rows = np.concatenate([rows_of(batch.runs) for batch in stream])
            np.testing.assert_array_equal(np.sort(rows), np.arange(16 * 128 + 3))


def test_wide_rows_keep_the_budget(tmp_path: Path) -> None:
    """What is assembled at once is limited by bytes, not by rows."""
    wide = {**PROBLEM, "outputs": [{"name": f"f{i}"} for i in range(300)]}
    store = storage.create(tmp_path / "s.zarr", wide, chunk_rows=64)
    x, t, _ = numbered(2000)
    store.append_runs(x, t, np.ones((2000, 300)))
    with storage.stream(store, runs=16, memory="8 MB") as stream:
        batch = next(iter(stream))
        assert batch.runs is not None
        base = batch.runs.z.base
        assert base is not None
        assert base.nbytes < 1e6
        assert len(stream) == 125


def test_a_closed_stream_says_so(make_store: Callable[..., Store]) -> None:
    stream = storage.stream(make_store(), runs=8)
    stream.close()
    with pytest.raises(StreamError, match="closed"):
        next(iter(stream))
    assert repr(stream) == "<stream of 8 of 100 runs; epoch 0, step 0 of 13>"
