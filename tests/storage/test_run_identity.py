"""Rows of one run: by their calibration inputs, or by the number in the column `run`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage
from storage import layout
from storage.errors import IngestError, StoreError
from storage.problem import parse_problem
from storage.run_identity import count_runs, hash_rows, run_numbers
from storage.store import Store, create

LONG = parse_problem(
    {
        "name": "long",
        "control_inputs": [{"name": "time", "bounds": [0, 100]}],
        "calibration_inputs": [{"name": "k", "bounds": [-1, 1]}, {"name": "c", "bounds": [-1, 1]}],
        "outputs": [{"name": "f"}],
    }
)


def append(store: Store, t: Any, run: Any = None) -> None:
    """Rows with these calibration inputs."""
    rows = np.arange(len(t), dtype=float) % 100
    store.append_runs(rows, t, rows, run)


def by_loop(rows: np.ndarray) -> list[int]:
    """The numbers as one would count them by hand."""
    seen: dict[tuple[float, ...], int] = {}
    return [seen.setdefault(tuple(row), len(seen)) for row in (rows + 0.0).tolist()]


def write_csv(path: Path, columns: dict[str, Any]) -> Path:
    rows = zip(*columns.values(), strict=True)
    path.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def long_form(runs: Any, times: int = 3) -> dict[str, list[Any]]:
    """Columns of a file where run number i has k = i/100 and some times."""
    rows = [(time, i / 100, 0.5, 0.0, run) for i, run in enumerate(runs) for time in range(times)]
    return dict(zip(("time", "k", "c", "f", "run"), map(list, zip(*rows, strict=True)), strict=True))


# --- numbers of runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_rows_with_the_same_calibration_inputs_are_one_run(tmp_path: Path, dtype: str, order: str) -> None:
    rng = np.random.default_rng(1)
    t = np.repeat(rng.uniform(-1, 1, (40, 2)), 25, axis=0)
    t = rng.permutation(t) if order == "shuffled" else t
    store = create(tmp_path / "s.zarr", LONG, dtype=dtype, chunk_rows=64)
    append(store, t[:700])
    append(store, t[700:])
    assert run_numbers(store.runs).tolist() == by_loop(t)
    assert count_runs(store.runs) == store.count_runs() == 40
    assert run_numbers(store.runs.first(130)).tolist() == by_loop(t[:130])


def test_runs_that_differ_in_one_input_or_in_the_order_of_inputs_are_different() -> None:
    rows = np.array([[0.1, 0.2], [0.2, 0.1], [0.1, 0.1], [0.2, 0.2], [0.0, 0.3], [0.3, 0.0], [0.1, -0.2]])
    assert len(set(hash_rows(rows).tolist())) == len(rows)
    grid = np.stack(np.meshgrid(*[np.arange(50.0)] * 3), axis=-1).reshape(-1, 3)
    assert len(np.unique(hash_rows(grid))) == len(grid)


def test_minus_zero_is_zero_and_float32_is_float64() -> None:
    zero = hash_rows(np.array([[0.0, 1.0], [-0.0, 1.0]]))
    assert zero[0] == zero[1]
    rows = np.random.default_rng(0).random((10, 3)).astype(np.float32)
    assert np.array_equal(hash_rows(rows), hash_rows(rows.astype(np.float64)))


def test_runs_that_only_rounding_makes_the_same_are_different_runs(tmp_path: Path) -> None:
    data = {**LONG.model_dump(), "calibration_inputs": [{"name": "g", "bounds": [9, 10.5]}]}
    rng = np.random.default_rng(0)
    for n in (5000, 200_000):
        store = create(tmp_path / f"{n}.zarr", data, expected_rows={"runs": n})
        append(store, rng.uniform(9, 10.5, n))
        assert len(np.unique(store.runs.read()["t"])) < n
        assert store.count_runs() == n
        assert np.array_equal(run_numbers(store.runs), np.arange(n))
    store = create(tmp_path / "long.zarr", data)
    t = rng.permutation(np.repeat(rng.uniform(9, 10.5, 2500), 2))  # two rows a run are no coincidence
    append(store, t)
    assert store.count_runs() == len(np.unique(t.astype(np.float32)))
    assert run_numbers(store.runs).max() + 1 == store.count_runs()


def test_many_calibration_inputs(tmp_path: Path) -> None:
    """100 columns of 2²⁴ values have more combinations than a float64 can count."""
    names = [{"name": f"k{i}", "bounds": [0, 1]} for i in range(100)]
    store = create(tmp_path / "s.zarr", {**LONG.model_dump(), "calibration_inputs": names})
    t = np.random.default_rng(0).random((20, 100))
    append(store, np.concatenate([t, t[:3]]))
    assert store.count_runs() == 20


def test_a_store_without_rows_has_no_runs(tmp_path: Path) -> None:
    store = create(tmp_path / "s.zarr", LONG)
    assert run_numbers(store.runs).shape == (0,)
    assert (count_runs(store.runs), store.count_runs()) == (0, 0)


# --- the array `run` --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"shard_rows": 32}], ids=["chunks", "shards"])
def test_a_run_number_decides_over_the_inputs_and_stays_exact(tmp_path: Path, settings: Any) -> None:
    store = create(tmp_path / "s.zarr", LONG, chunk_rows=16, **settings)
    large = 2**24 + 1  # float32 would make it 2**24
    run = np.repeat([large, large - 1, 2**53 - 1, -5], 10)
    append(store, np.full((40, 2), 0.5), run)
    found = storage.open(store.url).runs
    assert found.numbered
    assert found.dtype == np.float32
    assert np.array_equal(found.read(arrays=["run"])["run"][:, 0], run)
    assert np.array_equal(found.read(5, 25, arrays=["run", "x"])["run"][:, 0], run[5:25])
    assert run_numbers(found).tolist() == np.repeat([0, 1, 2, 3], 10).tolist()
    assert store.verify() == []


def test_a_run_number_is_neither_streamed_nor_a_column(tmp_path: Path) -> None:
    store = create(tmp_path / "s.zarr", LONG, chunk_rows=16)
    append(store, np.full((40, 2), 0.5), np.arange(40))
    assert list(store.runs.read()) == list(store.runs.columns) == ["x", "t", "z"]
    assert store.runs.row_bytes == 16
    assert set(store.summary().runs) == {"time", "k", "c", "f"}
    with storage.stream(store, runs=8, memory="1 MB") as stream:
        batch = next(iter(stream)).runs
    assert batch._fields == ("x", "t", "z", "row", "weight")
    assert np.array_equal(batch.x, batch.z)


def test_xarray_reads_a_store_with_run_numbers(tmp_path: Path) -> None:
    import xarray

    store = create(tmp_path / "s.zarr", LONG, chunk_rows=16)
    append(store, np.full((4, 2), 0.5), [7, 7, 8, 8])
    with xarray.open_zarr(store.url, group="runs") as found:
        assert found["run"].values[:, 0].tolist() == [7, 7, 8, 8]
        assert found["x"].sel(control_input="time").values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("first", [True, False])
def test_an_append_has_run_numbers_if_the_store_has_them(tmp_path: Path, first: bool) -> None:
    store = create(tmp_path / "s.zarr", LONG)
    append(store, np.full((4, 2), 0.5), [1, 1, 2, 2] if first else None)
    what = "have a run column, the new ones have none" if first else "have no run column, so the new ones must not"
    with pytest.raises(StoreError, match=what):
        append(store, np.full((4, 2), 0.5), None if first else [1, 1, 2, 2])
    assert storage.open(store.url).runs.rows == 4
    append(store, np.full((2, 2), 0.5), [2, 3] if first else None)
    assert store.count_runs() == (3 if first else 1)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ([0.5, 1, 2, 3], "column 'run': 1 value not a whole number below 2.*first in row 0: 0.5"),
        ([1, 2**53, 2, 3], "column 'run': 1 value not a whole number below 2"),
        ([1, np.nan, 2, 3], "column 'run': 1 value missing"),
        ([1, 2, 3], "different numbers of rows"),
        (["a", "b", "c", "d"], "runs run: not an array of numbers"),
    ],
)
def test_a_run_number_must_be_whole(tmp_path: Path, run: list[Any], message: str) -> None:
    store = create(tmp_path / "s.zarr", LONG)
    with pytest.raises(IngestError, match=message):
        append(store, np.full((4, 2), 0.5), run)


def test_a_problem_may_have_a_variable_of_that_name(tmp_path: Path) -> None:
    data = LONG.model_dump()
    data["control_inputs"] = [{"name": "run", "bounds": [0, 100]}]
    columns = long_form([1, 2, 3])
    file = write_csv(tmp_path / "a.csv", {name: columns[name] for name in ("k", "c", "f", "run")})
    storage.ingest(parse_problem(data), runs=[file], store=tmp_path / "s.zarr")
    store = storage.open(tmp_path / "s.zarr")
    assert not store.runs.numbered
    assert store.runs.read()["x"][:, 0].tolist() == columns["run"]
    with pytest.raises(IngestError, match="has a variable named 'run'"):
        append(store, np.full((1, 2), 0.5), [1])


def test_versions_before_run_numbers_refuse_every_new_store(tmp_path: Path) -> None:
    """They would append rows without a number, or leave the checksum of the root document behind."""
    for name, run in (("with", [1, 2]), ("without", None)):
        store = create(tmp_path / name, LONG)
        append(store, np.full((2, 2), 0.5), run)
        schema = json.loads((tmp_path / name / layout.ROOT).read_bytes())["attributes"]["vcal"]["schema"]
        assert schema == layout.SCHEMA > 2


def test_a_writer_that_dies_shows_no_row_of_any_array(tmp_path: Path) -> None:
    store = create(tmp_path / "s.zarr", LONG, chunk_rows=4)
    append(store, np.full((6, 2), 0.5), np.arange(6))

    def die() -> None:
        with store.writer({"runs": 3}, optional={"run"}) as writers:
            writers["runs"].arrays["run"][6:9] = 99
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        die()
    found = storage.open(store.url).runs
    assert (found.rows, found.read(arrays=["run"])["run"][:, 0].tolist()) == (6, list(range(6)))
    append(store, np.full((3, 2), 0.5), [6, 7, 8])
    assert store.verify() == []
    assert store.runs.read(arrays=["run"])["run"][:, 0].tolist() == list(range(9))


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "parquet", "npz", "nc", "zarr"])
def test_every_format_gives_the_run_column(tmp_path: Path, suffix: str) -> None:
    runs = [2**24 + 1, 7, 7, 2**24]
    columns = long_form(runs)
    path = tmp_path / f"a.{suffix}"
    if suffix == "csv":
        write_csv(path, columns)
    elif suffix == "parquet":
        pq.write_table(pa.table(columns), path)
    elif suffix == "npz":
        np.savez(path, **columns)
    elif suffix == "nc":
        import xarray

        along = {
            "k": ("run", np.arange(4) / 100),
            "c": ("run", np.full(4, 0.5)),
            "f": (("run", "time"), np.zeros((4, 3))),
        }
        xarray.Dataset(along, coords={"run": runs, "time": np.arange(3)}).to_netcdf(path, engine="h5netcdf")
    else:
        storage.ingest(LONG, runs=[write_csv(tmp_path / "b.csv", columns)], store=path)
    report = storage.ingest(LONG, runs=[path], store=tmp_path / "s.zarr")
    store = storage.open(tmp_path / "s.zarr")
    assert store.runs.read(arrays=["run"])["run"][:, 0].tolist() == columns["run"]
    np.testing.assert_allclose(store.runs.read()["t"][:, 0], columns["k"], rtol=1e-6)
    assert store.dtype == np.float32
    assert report.tables["runs"].ignored == ()
    assert store.count_runs() == 3


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        (["hot", "cold"], "a.csv: column 'run': 6 values not a number, first in row 1: 'hot'"),
        ([1, 1.5], "a.csv: column 'run': 3 values not a whole number below 2\\*\\*53, first in row 4: 1.5"),
    ],
)
def test_a_file_whose_runs_are_not_numbered_is_refused_with_the_cure(
    tmp_path: Path, labels: list[Any], fault: str
) -> None:
    file = write_csv(tmp_path / "a.csv", long_form(labels))
    with pytest.raises(IngestError, match=f"{fault}(.|\n)*number the runs .* or give that column another name"):
        storage.ingest(LONG, runs=[file], store=tmp_path / "s.zarr")
    assert not (tmp_path / "s.zarr").exists()


def test_text_along_a_dimension_is_refused_with_the_cure(tmp_path: Path) -> None:
    import xarray

    along = {"k": ("run", [0.1, 0.2]), "c": ("run", [0.5, 0.5]), "f": (("run", "time"), np.zeros((2, 3)))}
    file = tmp_path / "a.nc"
    xarray.Dataset(along, coords={"run": ["hot", "cold"], "time": np.arange(3)}).to_netcdf(file, engine="h5netcdf")
    with pytest.raises(IngestError, match=r"'run' holds .*text.*number the runs, or give it another name"):
        storage.ingest(LONG, runs=[file], store=tmp_path / "s.zarr")


def test_files_agree_on_the_run_column(tmp_path: Path) -> None:
    columns = long_form([1, 2])
    files = [write_csv(tmp_path / "a.csv", columns), tmp_path / "b.csv"]
    write_csv(files[1], {name: cells for name, cells in columns.items() if name != "run"})
    with pytest.raises(
        IngestError, match=r"a.csv has a column 'run', .*b.csv has none; give it in all files or in none"
    ):
        storage.ingest(LONG, runs=files, store=tmp_path / "s.zarr")
    storage.ingest(LONG, runs=files[:1], store=tmp_path / "s.zarr")
    with pytest.raises(StoreError, match="have a run column, the new ones have none; give its run for each"):
        storage.ingest(LONG, runs=files[1:], store=tmp_path / "s.zarr", append=True)


# --- the count that a store keeps -------------------------------------------------------------------------------------


def kept(path: Path) -> dict[str, int] | None:
    found = json.loads((path / layout.ROOT).read_bytes())["attributes"]["vcal"].get("identity")
    return None if found is None else dict(found)


def test_an_ingest_leaves_the_count_and_an_append_makes_it_stale(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "s.zarr"
    storage.ingest(LONG, runs=[write_csv(tmp_path / "a.csv", long_form([1, 2, 3]))], store=path)
    assert kept(path) == {"rows": 9, "runs": 3}
    store = storage.open(path)
    monkeypatch.setattr("storage.run_identity.count_runs", lambda table: 1000 + table.rows)
    assert store.count_runs() == 3
    assert store.first(6, 0).count_runs() == 1006
    append(store, np.full((2, 2), 0.5), [3, 4])
    assert store.count_runs() == 1011
    assert storage.open(path).count_runs() == 1011
    assert kept(path) == {"rows": 9, "runs": 3}


def test_a_count_that_is_kept_loses_no_rows_that_came_meanwhile(
    make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(runs=30)
    other = storage.open(store.url)
    other.append_runs([[1, 0]], [[0.5]], [[1]])
    store.keep_run_count()
    assert kept(Path(store.url)) == {"rows": 30, "runs": 30}
    assert storage.open(store.url).runs.rows == 31
    assert storage.open(store.url).count_runs() == 31
