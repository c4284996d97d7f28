"""Files into stores: every fault is named before anything is written, and every sound row arrives exactly once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storage
from storage import ingestion
from storage.errors import IngestError, ProblemError, StoreError, VcalError
from storage.ingestion import block_edges, ingest
from storage.precision import choose
from storage.problem import Problem, parse_problem
from storage.sources import delimited

RUNS = ("a", "b", "k", "f")
OBSERVATIONS = ("a", "b", "f")


def make_problem(**output: Any) -> Problem:
    return parse_problem(
        {
            "name": "toy",
            "control_inputs": [{"name": "a", "bounds": [0, 1e6]}, {"name": "b", "bounds": [-1, 1]}],
            "calibration_inputs": [{"name": "k", "bounds": [0, 1]}],
            "outputs": [{"name": "f", **output}],
        }
    )


PROBLEM = make_problem()


def rows_of(count: int, start: int = 0) -> np.ndarray:
    """Rows that carry their own number, exact in float32."""
    number = np.arange(start, start + count, dtype=np.float64)
    return np.stack([number, number % 3 - 1, number % 5 / 4, -number], axis=1)


def write(path: Path, rows: Any, names: tuple[str, ...] = RUNS) -> Path:
    lines = [",".join(names), *(",".join(map(str, row)) for row in np.asarray(rows, dtype=object).tolist())]
    path.write_text("\n".join(lines) + "\n")
    return path


def read_runs(url: Path | str) -> np.ndarray:
    found = storage.open(url).runs.read()
    return np.concatenate([found["x"], found["t"], found["z"]], axis=1)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "s.zarr"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions of a few lines and blocks of a chunk, so that small files have many."""
    monkeypatch.setattr(delimited, "PART_BYTES", 200)
    monkeypatch.setattr(ingestion, "BLOCK_BYTES", 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("settings", [{}, {"compression": "none"}, {"chunk_rows": 16, "shard_rows": 64}])
def test_many_files_of_all_formats_become_one_store(settings, store, tmp_path):
    rows = rows_of(600)
    write(tmp_path / "a.csv", rows[:300])
    pq.write_table(pa.table(dict(zip(RUNS, rows[300:400].T, strict=True))), tmp_path / "b.parquet", row_group_size=30)
    np.savez(tmp_path / "c.npz", x=rows[400:500, :2], t=rows[400:500, 2], z=rows[400:500, 3:])
    write(tmp_path / "d.csv", rows[500:], RUNS)
    write(tmp_path / "field.csv", rows[:20][:, [3, 0, 1]], ("f", "a", "b"))
    files = [tmp_path / "a.csv", tmp_path / "b.parquet", tmp_path / "c.npz", str(tmp_path / "[d].csv")]
    report = ingest(
        PROBLEM, runs=files, observations=[tmp_path / "field.csv"], store=store, **{"chunk_rows": 32, **settings}
    )
    assert np.array_equal(read_runs(store), rows)
    found = storage.open(store)
    assert np.array_equal(found.observations.read()["y"][:, 0], rows[:20, 3])
    assert found.verify() == []
    assert report.rows == {"runs": 600, "observations": 20}
    assert report.lines()[0] == "runs: 600 rows of 5 runs from 4 files"
    assert [(s["rows"], s["dropped"]) for s in found.provenance["sources"]] == [(300, 0), *[(100, 0)] * 3, (20, 0)]


def test_a_problem_file_and_our_own_store_are_sources(store, tmp_path):
    problem = tmp_path / "problem.yaml"
    problem.write_text(
        "name: toy\n"
        "control_inputs: [{name: a, bounds: [0, 1000000]}, {name: b, bounds: [-1, 1]}]\n"
        "calibration_inputs: [{name: k, bounds: [0, 1]}]\n"
        "outputs: [{name: f}]\n"
    )
    rows = rows_of(50)
    write(tmp_path / "a.csv", rows)
    noisy = rows + np.array([0, 0, 0.5, 0])
    write(tmp_path / "o.csv", noisy, ("a", "b", "f_noise", "f"))
    ingest(problem, runs=[tmp_path / "a.csv"], observations=[tmp_path / "o.csv"], store=store, chunk_rows=16)
    # The same columns in another order: labels decide, not positions.
    turned = parse_problem({**PROBLEM.model_dump(), "control_inputs": PROBLEM.model_dump()["control_inputs"][::-1]})
    report = ingest(turned, runs=[store], observations=[store], store=tmp_path / "again.zarr")
    assert report.tables["runs"].ignored == ()
    assert np.array_equal(read_runs(tmp_path / "again.zarr"), rows[:, [1, 0, 2, 3]])
    assert np.array_equal(storage.open(tmp_path / "again.zarr").observations.read()["noise"][:, 0], noisy[:, 2])


def test_a_store_whose_columns_are_called_as_its_arrays_is_a_source(store, tmp_path):
    problem = parse_problem(
        {
            "name": "short",
            "control_inputs": [{"name": "x", "bounds": [0, 9]}],
            "calibration_inputs": [{"name": "t", "bounds": [0, 9]}],
            "outputs": [{"name": "z"}],
        }
    )
    ingest(problem, runs=[write(tmp_path / "a.csv", [[1, 2, 3], [4, 5, 6]], ("x", "t", "z"))], store=store)
    ingest(problem, runs=[store], store=tmp_path / "again.zarr")
    assert read_runs(tmp_path / "again.zarr").tolist() == [[1, 2, 3], [4, 5, 6]]


FAULTS = {
    "not a number": ("abc", "column 'k': 2 values not a number, first in row 31: 'abc'"),
    "missing": ("", "column 'k': 2 values missing (NaN), first in row 31: nan"),
    "nan": ("NaN", "column 'k': 2 values missing (NaN), first in row 31: nan"),
    "infinite": ("-inf", "column 'k': 2 values infinite, first in row 31: -inf"),
    "bounds": ("1.25", "column 'k': 2 values out of bounds [0, 1], first in row 31: 1.25"),
    "fields": ("1,2", "2 rows with a wrong number of fields, first row 31: '"),
}


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_names_file_column_row_and_count_and_nothing_is_written(kind, store, tmp_path):
    cell, message = FAULTS[kind]
    rows = rows_of(100).astype(object)
    rows[30, 2] = rows[70, 2] = cell
    write(tmp_path / "good.csv", rows_of(100))
    write(tmp_path / "bad.csv", rows)
    with pytest.raises(IngestError) as error:
        ingest(PROBLEM, runs=[tmp_path / "good.csv", tmp_path / "bad.csv"], store=store)
    assert f"{tmp_path / 'bad.csv'}: {message}" in str(error.value)
    assert "good.csv" not in str(error.value)
    assert "--drop-invalid" in str(error.value)
    assert not store.exists()
    report = ingest(
        PROBLEM, runs=[tmp_path / "good.csv", tmp_path / "bad.csv"], store=store, drop_invalid=True, chunk_rows=16
    )
    expected = np.concatenate([rows_of(100), np.delete(rows_of(100), [30, 70], axis=0)])
    assert np.array_equal(read_runs(store), expected)
    ((file, _, _), count) = next(iter(report.dropped.items()))
    assert (Path(file).name, count, len(report.dropped)) == ("bad.csv", 2, 1)
    assert report.tables["runs"].dropped == 2
    assert "  dropped 2 of 200 rows:" in report.lines()
    assert storage.open(store).provenance["sources"][1]["dropped"] == 2


def test_faults_of_both_tables_come_together_and_the_list_ends(store, tmp_path):
    bad = rows_of(5)
    bad[:, 2] = 7
    files = [write(tmp_path / f"{i:02}.csv", bad) for i in range(30)]
    field = write(tmp_path / "field.csv", [[1, 0, "x"]], OBSERVATIONS)
    with pytest.raises(IngestError) as error:
        ingest(PROBLEM, runs=files, observations=[field], store=store)
    assert "and 11 more such lines" in str(error.value)
    assert str(error.value).count(".csv: column 'k': 5 values out of bounds") == 20
    with pytest.raises(IngestError, match=r"field\.csv: column 'f': 1 value not a number, first in row 1: 'x'"):
        ingest(PROBLEM, runs=files[:1], observations=[field], store=store)


def test_a_row_with_several_faults_is_dropped_once(store, tmp_path):
    file = write(tmp_path / "a.csv", [["x", "y", 9, "inf"], [1, 0, 0.5, 2]])
    report = ingest(PROBLEM, runs=[file], store=store, drop_invalid=True)
    assert (report.rows["runs"], report.tables["runs"].dropped, len(report.dropped)) == (1, 1, 4)


def test_a_bound_survives_rounding_and_missing_outputs_are_admitted(store, tmp_path):
    file = write(tmp_path / "a.csv", [[0, 1.0000001, -1e-8, "nan"], [1e6, -1, 1, 2]])
    with pytest.raises(IngestError, match=r"column 'f': 1 value missing.*\n.*'missing: true'"):
        ingest(PROBLEM, runs=[file], store=store)
    ingest(make_problem(missing=True), runs=[file], store=store)
    assert np.isnan(read_runs(store)[0, 3])


def test_if_no_row_is_left_nothing_is_written(store, tmp_path):
    file = write(tmp_path / "a.csv", [[1, 2, 3, 4]])
    with pytest.raises(IngestError, match="no row of the runs can be used"):
        ingest(PROBLEM, runs=[file], store=store, drop_invalid=True)
    assert not store.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("a,b,k,f\n", "has columns but no rows"),
        ("a,b,K,f\n1,0,1,1\n", "column 'k' is missing (did you mean 'K'?)"),
    ],
)
def test_one_file_that_disagrees_with_the_others_is_named(content, message, store, tmp_path):
    good = write(tmp_path / "good.csv", rows_of(5))
    (tmp_path / "bad.csv").write_text(content)
    with pytest.raises(IngestError) as error:
        ingest(PROBLEM, runs=[good, tmp_path / "bad.csv"], store=store)
    assert f"{tmp_path / 'bad.csv'}: {message}" in str(error.value)
    assert not store.exists()


def test_noise_is_in_all_files_or_in_none(store, tmp_path):
    with_noise = write(tmp_path / "n.csv", [[1, 0, 5, 0.5]], (*OBSERVATIONS, "f_noise"))
    without = write(tmp_path / "o.csv", [[1, 0, 5, 9]], (*OBSERVATIONS, "weather"))
    with pytest.raises(IngestError, match=r"n\.csv has columns for the noise of the observations, .*o\.csv has none"):
        ingest(PROBLEM, runs=[], observations=[with_noise, without], store=store)
    report = ingest(PROBLEM, observations=[without], store=store)
    assert report.tables["observations"].ignored == ("weather",)
    assert any("weather" in line for line in report.lines())
    with pytest.raises(StoreError, match="noise"):
        ingest(PROBLEM, observations=[with_noise], store=store, append=True)
    negative = write(tmp_path / "bad.csv", [[1, 0, 5, -0.5]], (*OBSERVATIONS, "f_noise"))
    with pytest.raises(IngestError, match="column 'f_noise': 1 value not positive"):
        ingest(PROBLEM, observations=[negative], store=tmp_path / "other.zarr")


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("sharded", [False, True])
def test_appending_fills_a_chunk_that_others_have_begun(sharded, store, tmp_path):
    rows = rows_of(530)
    settings: dict[str, Any] = {"chunk_rows": 16} | ({"shard_rows": 48} if sharded else {})
    edges = [0, 21, 22, 300, 530]
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        file = write(tmp_path / f"{i}.csv", rows[start:stop])
        ingest(PROBLEM, runs=[file], store=store, append=i > 0, **settings)
    assert np.array_equal(read_runs(store), rows)
    assert len(storage.open(store).provenance["sources"]) == 4


def test_a_table_that_training_still_needs_is_named(store, tmp_path):
    runs, field = write(tmp_path / "a.csv", rows_of(10)), write(tmp_path / "field.csv", rows_of(10))
    first = ingest(PROBLEM, runs=[runs], store=store)
    assert first.lines()[-1] == "there are no observations yet, and training needs them: add some with --append"
    for files in ({"observations": [field]}, {"runs": [runs]}):
        assert "training needs" not in "\n".join(ingest(PROBLEM, **files, store=store, append=True).lines())


def test_files_given_again_are_noted(store, tmp_path):
    file = write(tmp_path / "a.csv", rows_of(10))
    assert "ingested before" not in "\n".join(ingest(PROBLEM, runs=[file], store=store).lines())
    assert f"there twice: {file}" in "\n".join(ingest(PROBLEM, runs=[file], store=store, append=True).lines())


def test_targets_that_cannot_be_are_refused_before_reading(tmp_path):
    file = write(tmp_path / "a.csv", rows_of(10))
    with pytest.raises(StoreError, match="is a file"):
        ingest(PROBLEM, runs=[file], store=file)
    with pytest.raises(StoreError, match=r"holds other things \('a\.csv'"):
        ingest(PROBLEM, runs=[file], store=tmp_path)
    with pytest.raises(StoreError, match=r"no store at .* to append to"):
        ingest(PROBLEM, runs=[file], store=tmp_path / "s.zarr", append=True)
    assert [f.name for f in tmp_path.iterdir()] == ["a.csv"]


def test_an_existing_store_is_only_added_to_if_asked_and_of_the_same_problem(store, tmp_path):
    file = write(tmp_path / "a.csv", rows_of(10))
    ingest(PROBLEM, runs=[file], store=store)
    with pytest.raises(StoreError, match=r"already holds 10 runs and 0 observations.*--append"):
        ingest(PROBLEM, runs=[file], store=store)
    other = parse_problem({**PROBLEM.model_dump(), "outputs": [{"name": "f", "bounds": [-1e9, 1e9], "unit": "m"}]})
    with pytest.raises(StoreError) as error:
        ingest(other, runs=[file], store=store, append=True)
    assert "outputs[0].unit: '' in the store, 'm' given" in str(error.value)
    assert "outputs[0].bounds: None in the store, (-1000000000.0, 1000000000.0) given" in str(error.value)
    with pytest.raises(StoreError, match="has dtype float32, not float64"):
        ingest(PROBLEM, runs=[file], store=store, append=True, dtype="float64")
    assert storage.open(store).runs.rows == 10


def change_between_readings(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    chosen = ingestion.choose

    def meanwhile(*arguments: Any) -> Any:
        file.write_text(file.read_text().replace("77.0,", "78.0,"))
        return chosen(*arguments)

    monkeypatch.setattr(ingestion, "choose", meanwhile)


@pytest.mark.usefixtures("small_parts")
def test_a_file_that_changes_between_the_readings_leaves_nothing_visible(store, tmp_path, monkeypatch):
    file = write(tmp_path / "a.csv", rows_of(200))
    change_between_readings(monkeypatch, file)
    with pytest.raises(IngestError, match=r"a\.csv: changed while it was read"):
        ingest(PROBLEM, runs=[file], store=store, chunk_rows=16)
    assert storage.open(store).runs.rows == 0
    # What the failed ingest has left is taken up again.
    monkeypatch.undo()
    ingest(PROBLEM, runs=[file], store=store)
    assert storage.open(store).runs.rows == 200


def test_settings_that_an_empty_store_cannot_follow_are_refused(store, tmp_path):
    file = write(tmp_path / "a.csv", rows_of(10))
    storage.create(store, PROBLEM, chunk_rows=16)
    with pytest.raises(StoreError, match="has chunk_rows 16, not 32; the store has no rows: delete it"):
        ingest(PROBLEM, runs=[file], store=store, chunk_rows=32)
    with pytest.raises(StoreError, match="has compression zstd, not none"):
        ingest(PROBLEM, runs=[file], store=store, compression="none")
    with pytest.raises(StoreError, match="has shard_rows None, not 64"):
        ingest(PROBLEM, runs=[file], store=store, chunk_rows=16, shard_rows=64)
    fine = write(tmp_path / "fine.csv", [[0, 0, 0, 1000.0], [1, 1, 1, 1000.5]])
    with pytest.raises(StoreError, match=r"has no rows and dtype float32, but float32 would round .*; delete it"):
        ingest(PROBLEM, runs=[fine], store=store)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, "float32"),
        (5.0, 5.0, "float32"),  # constant
        (1000.0, 1001.0, "float64"),
        (-1e39, 1e39, "float64"),
        (0.0, 1e-42, "float64"),
        (float("nan"), float("nan"), "float32"),
    ],
)
def test_float32_where_it_loses_nothing(low, high, expected):
    assert choose("auto", [("a", 0.0, 1.0), ("b", low, high)])[0] == expected
    assert choose("float64", [("b", low, high)]) == ("float64", "as asked for")


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_the_automatic_choice_keeps_a_millionth_of_the_range(values):
    column = np.array(values)
    dtype, _ = choose("auto", [("a", column.min(), column.max())])
    error = np.abs(column.astype(dtype).astype(float) - column).max()
    assert error <= 1e-6 * np.ptp(column) or np.ptp(column) == 0


def test_the_type_is_chosen_by_the_data(store, tmp_path):
    fine = write(tmp_path / "fine.csv", [[0, 0, 0, 1000.0], [1, 1, 1, 1000.5]])
    huge = write(tmp_path / "huge.csv", [[0, 0, 0, 1e300]])
    report = ingest(PROBLEM, runs=[fine, huge], store=store)
    assert (report.dtype, storage.open(store).dtype) == ("float64", np.float64)
    assert "column 'f' reaches 1e+300" in report.why
    assert read_runs(store)[1, 3] == 1000.5
    with pytest.raises(IngestError, match="column 'f' reaches 1e\\+300, beyond float32; use dtype float64"):
        ingest(PROBLEM, runs=[huge], store=tmp_path / "t.zarr", dtype="float32")
    assert not (tmp_path / "t.zarr").exists()
    report = ingest(PROBLEM, runs=[fine], store=tmp_path / "t.zarr", dtype="float32")
    assert report.why.startswith("as asked for, though float32 would round column 'f'")
    with pytest.raises(IngestError, match="new store"):
        ingest(PROBLEM, runs=[huge], store=tmp_path / "t.zarr", append=True)


@given(start=st.integers(0, 500), count=st.integers(1, 2000), chunk=st.integers(1, 64), rows=st.integers(0, 300))
def test_no_chunk_belongs_to_two_blocks(start, count, chunk, rows):
    edges = block_edges(start, count, chunk, rows)
    assert edges[0] == start
    assert edges[-1] == start + count
    owners = [set(range(a // chunk, (b - 1) // chunk + 1)) for a, b in itertools.pairwise(edges)]
    assert all(b > a for a, b in itertools.pairwise(edges))
    assert len(set().union(*owners)) == sum(map(len, owners))


def test_what_is_asked_for_is_checked_first(store, tmp_path):
    file = write(tmp_path / "a.csv", rows_of(3))
    with pytest.raises(IngestError, match="nothing to ingest"):
        ingest(PROBLEM, store=store)
    with pytest.raises(IngestError, match="dtype is 'float16'; accepted: auto"):
        ingest(PROBLEM, runs=[file], store=store, dtype="float16")  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="compression is 'lz4'"):
        ingest(PROBLEM, runs=[file], store=store, compression="lz4")  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="cannot read"):
        ingest(tmp_path / "none.yaml", runs=[file], store=store)
    with pytest.raises(VcalError, match="scheduler is 'localhost'; accepted: the address"):
        ingest(PROBLEM, runs=[file], store=store, scheduler="localhost")
    assert not store.exists()


def test_no_scheduler_at_the_address_is_said(store, tmp_path, monkeypatch):
    monkeypatch.setattr("storage.workers.CONNECT_SECONDS", 0.2)
    with pytest.raises(VcalError, match=r"no Dask scheduler answers at tcp://127\.0\.0\.1:1"):
        ingest(PROBLEM, runs=[write(tmp_path / "a.csv", rows_of(3))], store=store, scheduler="tcp://127.0.0.1:1")


@pytest.mark.usefixtures("small_parts")
def test_a_distributed_scheduler_writes_the_same_store(dask_address, store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the workers stay elsewhere
    rows = rows_of(700)
    write(tmp_path / "a.csv", rows[:300])
    np.savez(tmp_path / "b.npz", x=rows[300:, :2], t=rows[300:, 2:3], z=rows[300:, 3])
    write(tmp_path / "bad.csv", [[1, 0, "x", 0]])
    report = ingest(PROBLEM, runs=["a.csv", "b.npz"], store="s.zarr", chunk_rows=16, scheduler=dask_address)
    assert report.rows == {"runs": 700}
    assert np.array_equal(read_runs(store), rows)
    with pytest.raises(IngestError, match=r"bad\.csv: column 'k': 1 value not a number"):
        ingest(PROBLEM, runs=["bad.csv"], store="t.zarr", scheduler=dask_address)
    change_between_readings(monkeypatch, tmp_path / "a.csv")
    with pytest.raises(IngestError, match=r"a\.csv: changed"):
        ingest(PROBLEM, runs=["a.csv"], store="s.zarr", append=True, scheduler=dask_address)
    assert storage.open(store).runs.rows == 700


def test_progress_is_shown_on_a_terminal_only(store, tmp_path, monkeypatch, capsys):
    file = write(tmp_path / "a.csv", rows_of(30))
    ingest(PROBLEM, runs=[file], store=store, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    ingest(PROBLEM, runs=[file], store=store, append=True, progress=True)
    shown = capsys.readouterr()
    assert "checking runs" in shown.err
    assert "writing runs" in shown.err
    assert shown.out == ""


def test_importing_ingest_loads_no_reader_of_other_formats(run_python):
    absent = ["pandas", "xarray", "h5py", "distributed", "rich", "torch"]
    script = f"import sys, storage.ingestion; print([m for m in {absent} if m in sys.modules])"
    assert run_python(script).strip() == "[]"


def test_decimal_commas_are_recognised(store, tmp_path):
    (tmp_path / "a.csv").write_text("a;b;k;f\n1;0,5;0,25;3\n")
    with pytest.raises(IngestError, match=r"not a number, first in row 1: '0,5'[\s\S]*decimal point"):
        ingest(PROBLEM, runs=[tmp_path / "a.csv"], store=store)
