"""Creating, opening, appending to and reading a store."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import storage
from storage import layout
from storage.errors import IngestError, ProblemError, StoreError
from storage.store import Store
from tests.storage.conftest import PROBLEM, numbered

LAYOUTS = [{}, {"compression": "none"}, {"shard_rows": 64}, {"compression": "none", "shard_rows": 32}]


@pytest.mark.parametrize("settings_", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_was_appended_is_read_back(
    make_store: Callable[..., Store], settings_: dict[str, Any], dtype: str
) -> None:
    store = make_store(runs=7, dtype=dtype, **settings_)
    store.append_runs(*numbered(150, start=7))
    found = storage.open(store.url)
    for name, expected in zip("xtz", numbered(157), strict=True):
        np.testing.assert_array_equal(found.runs.read()[name], expected.astype(dtype))
        np.testing.assert_array_equal(found.runs.read(15, 33)[name], expected[15:33].astype(dtype))
    assert found.runs.rows == len(found.runs) == 157
    assert found.verify() == []


@settings(max_examples=12, deadline=None)
@given(
    chunk=st.integers(1, 20),
    shards=st.sampled_from([None, 1, 3]),
    pieces=st.lists(st.integers(0, 50), min_size=1, max_size=5),
)
def test_any_sequence_of_appends(
    tmp_path_factory: pytest.TempPathFactory, chunk: int, shards: int | None, pieces: list[int]
) -> None:
    path = tmp_path_factory.mktemp("store") / "s.zarr"
    store = storage.create(path, PROBLEM, dtype="float64", chunk_rows=chunk, shard_rows=shards and shards * chunk)
    total = 0
    for piece in pieces:
        store.append_runs(*numbered(piece, start=total))
        total += piece
    assert storage.open(path).runs.rows == total
    np.testing.assert_array_equal(storage.open(path).runs.read()["z"], numbered(total)[2])
    assert store.verify() == []


def test_xarray_and_zarr_see_labelled_committed_rows(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=20)
    runs = xarray.open_zarr(store.url, group="runs")
    assert dict(runs.sizes) == {"run": 20, "control_input": 2, "calibration_input": 1, "output": 1}
    np.testing.assert_array_equal(runs.x.sel(control_input="a"), np.arange(20))
    assert runs.control_input.attrs["units"] == ["m", ""]
    assert runs.calibration_input.attrs["description"] == ["stiffness"]
    observations = xarray.open_zarr(store.url, group="observations")
    assert observations.y.sel(output="f").shape == (10,)
    assert zarr.open_array(store.url, path="runs/x", mode="r").shape == (20, 2)
    # Written, but not committed: no reader sees it.
    with pytest.raises(ValueError, match="power cut"):  # noqa: PT012, SIM117
        with store.writer({"runs": 5}) as writers:
            writers["runs"].arrays["x"][20:25] = 1.0
            raise ValueError("power cut")
    assert xarray.open_zarr(store.url, group="runs").sizes["run"] == 20
    assert zarr.open_array(store.url, path="runs/x", mode="r").shape == (20, 2)


def test_rows_that_were_not_written_are_not_committed(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=20)
    with pytest.raises(StoreError, match=r"runs/t/c\.2\.0 was never written"), store.writer({"runs": 30}) as writers:
        writers["runs"].arrays["x"][20:50] = 1.0
    assert storage.open(store.url).runs.rows == 20
    assert store.verify() == []


def test_the_problem_travels_with_the_store(make_store: Callable[..., Store]) -> None:
    store = make_store()
    found = storage.open(store.url)
    assert found.problem == store.problem
    assert found.provenance["created"]
    assert found.dtype == np.float64


def test_noise_is_decided_by_the_first_observations(make_store: Callable[..., Store]) -> None:
    x, _, y = numbered(5)
    with_noise = make_store(observations=0)
    with_noise.append_observations(x, y, noise=np.full(5, 0.5))
    np.testing.assert_array_equal(storage.open(with_noise.url).observations.read()["noise"], np.full((5, 1), 0.5))
    assert with_noise.observations.columns["noise"] == ["f_noise"]
    with pytest.raises(StoreError, match="noise"):
        with_noise.append_observations(x, y)
    without = make_store(name="without.zarr")
    with pytest.raises(StoreError, match="noise"):
        without.append_observations(x, y, noise=y * 0 + 1)
    for bad in (-1.0, 0.0):
        with pytest.raises(IngestError, match="f_noise': 5 values not positive"):
            with_noise.append_observations(x, y, noise=np.full(5, bad))
    with pytest.raises(IngestError, match=r"f_noise': 1 value missing \(NaN\) where the output is known"):
        with_noise.append_observations(x, y, noise=[1, 1, np.nan, 1, 1])
    y[2] = np.nan
    with_noise.append_observations(x, y, noise=[1, 1, np.nan, 1, 1])
    assert with_noise.observations.rows == 10


def test_nan_outputs_are_kept_where_the_problem_allows_them(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=0)
    x, t, z = numbered(40)
    z[::2] = np.nan
    z[:32] = np.nan  # whole chunks of nothing but NaN
    store.append_runs(x, t, z)
    np.testing.assert_array_equal(storage.open(store.url).runs.read()["z"], z)
    assert store.verify() == []


@pytest.mark.parametrize(
    ("array", "value", "said"),
    [
        ("x", np.nan, ["runs:", "column 'b'", "1 value missing", "row 2"]),
        ("x", np.inf, ["column 'b'", "infinite"]),
        ("x", 1.5, ["column 'b'", "out of bounds [-1, 1]", "1.5"]),
        ("t", -0.1, ["column 'k'", "out of bounds [0, 1]"]),
        ("z", np.inf, ["column 'f'", "infinite"]),
    ],
)
def test_bad_rows_are_refused_before_anything_is_written(
    make_store: Callable[..., Store], array: str, value: float, said: list[str]
) -> None:
    store = make_store()
    rows = dict(zip("xtz", numbered(5), strict=True))
    rows[array][2, -1] = value
    before = (Path(store.url) / "zarr.json").read_bytes()
    with pytest.raises(IngestError) as caught:
        store.append_runs(**rows)
    for word in said:
        assert word in str(caught.value)
    assert (Path(store.url) / "zarr.json").read_bytes() == before


def test_shapes_that_do_not_fit(make_store: Callable[..., Store]) -> None:
    store = make_store()
    x, t, z = numbered(5)
    with pytest.raises(IngestError, match=r"runs x: shape is \(5, 1\).*\(rows, 2\) for a, b"):
        store.append_runs(x[:, :1], t, z)
    with pytest.raises(IngestError, match="different numbers of rows"):
        store.append_runs(x, t[:4], z)
    with pytest.raises(IngestError, match="not an array of numbers"):
        store.append_runs(x, t, [["a"]] * 5)
    store.append_runs(x, t[:, 0], z[:, 0])  # a single column may be a vector
    assert store.runs.rows == 105


def test_values_beyond_float32_are_refused(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=0, dtype="float32")
    x, t, _ = numbered(1)
    with pytest.raises(IngestError, match="float64"):
        store.append_runs(x, t, [1e39])


def test_a_value_on_a_bound_survives_float32(make_store: Callable[..., Store]) -> None:
    low_high = np.array([[1e9, 1.0], [0.0, -1.0]], dtype=np.float32)
    store = make_store(runs=0, dtype="float32")
    store.append_runs(low_high, np.float32([0.1, 1.0]), [0, 0])
    assert store.runs.rows == 2


@pytest.mark.parametrize(
    ("settings_", "said"),
    [
        ({"dtype": "int8"}, "float32, float64"),
        ({"compression": "gzip"}, "zstd, none"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
        ({"chunk_rows": 16, "shard_rows": 24}, "multiple"),
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, settings_: dict[str, Any], said: str) -> None:
    with pytest.raises(StoreError, match=said):
        storage.create(tmp_path / "s.zarr", PROBLEM, **settings_)
    assert not (tmp_path / "s.zarr").exists()


def test_what_is_not_a_store(make_store: Callable[..., Store], tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        storage.open(tmp_path / "nothing.zarr")
    zarr.create_group(tmp_path / "other.zarr")
    with pytest.raises(StoreError, match="is not a vcal store"):
        storage.open(tmp_path / "other.zarr")
    with pytest.raises(StoreError, match="not supported"):
        storage.open("gopher://host/s.zarr")
    store = make_store()
    with pytest.raises(StoreError, match="already"):
        storage.create(store.url, PROBLEM)
    with pytest.raises(ProblemError):
        storage.create(tmp_path / "bad.zarr", {"name": "bad"})


@pytest.mark.parametrize(("schema", "cure"), [(4, "upgrade vcal-dist"), (0, "ingest the data again"), ("x", "again")])
def test_a_store_of_another_schema_version(make_store: Callable[..., Store], schema: Any, cure: str) -> None:
    store = make_store()
    root = Path(store.url) / layout.ROOT
    document = json.loads(root.read_bytes())
    document["attributes"]["vcal"]["schema"] = schema
    root.write_text(json.dumps(document))
    with pytest.raises(StoreError, match=f"schema {schema!r}.*{cure}"):
        storage.open(store.url)
    with pytest.raises(StoreError, match="schema"):
        store.append_runs(*numbered(1))


def test_tables_are_frozen_until_refreshed(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=20)
    other = storage.open(store.url)
    other.append_runs(*numbered(20, start=20))
    assert store.runs.rows == 20
    np.testing.assert_array_equal(store.runs.read()["z"], numbered(20)[2])
    assert store.refresh().runs.rows == 40


def test_tables_travel_to_other_processes(make_store: Callable[..., Store]) -> None:
    store = make_store()
    table = pickle.loads(pickle.dumps(store.runs))
    np.testing.assert_array_equal(table.read_block(3)["x"], store.runs.read_block(3)["x"])


def test_summary_equals_numpy(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=0, observations=0)
    x, t, z = numbered(333)
    z[5:50] = np.nan
    store.append_runs(x, t, z)
    summary = store.summary()
    for name, values in (("a", x[:, 0]), ("b", x[:, 1]), ("k", t[:, 0]), ("f", z[:, 0])):
        known = values[~np.isnan(values)]
        found = summary.runs[name]
        assert (found.count, found.missing) == (len(known), len(values) - len(known))
        np.testing.assert_allclose(
            [found.minimum, found.maximum, found.mean, found.sd],
            [known.min(), known.max(), known.mean(), known.std()],
            rtol=1e-12,
        )
    assert summary.observations["f"].count == 0
    assert np.isnan(summary.observations["f"].mean)
    sample = store.summary(most_blocks=3)
    assert sample.rows_read["runs"] == 16 + 16 + 333 % 16
    assert sample.runs["a"].maximum == 332


def test_chunks_are_chosen_for_the_expected_rows() -> None:
    assert layout.default_chunk_rows(36, None) == 32768
    assert layout.default_chunk_rows(36, 10**9) == 32768
    assert layout.default_chunk_rows(36, 100_000) == 1024
    assert layout.default_chunk_rows(10**9, None) == 1
