"""Every format gives the same rows wherever it is cut; what cannot be read is named, with its cure."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.errors import IngestError
from storage.problem import Problem, parse_problem
from storage.sources import Plan, Request, delimited, expand, partition, pieces, plan

NAMES = ("depth", "rw", "K w", "flow", "heat")  # x; t, t; z, z


def make_problem(**changes: object) -> Problem:
    return parse_problem(
        {
            "name": "test",
            "control_inputs": [{"name": "depth", "bounds": [-100, 100]}],
            "calibration_inputs": [{"name": "rw", "bounds": [-100, 100]}, {"name": "K w", "bounds": [-100, 100]}],
            "outputs": [{"name": "flow"}, {"name": "heat"}],
            **changes,
        }
    )


RUNS = Request("runs", make_problem().runs_columns)
OBSERVATIONS = Request("observations", make_problem().observations_columns)


def rows_of(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, len(NAMES))).round(6)


def planned(path: Path | str, request: Request = RUNS) -> Plan:
    (file,) = expand([path])
    return plan(file, request)


def values(found: Plan) -> np.ndarray:
    """All rows, after a trip of every partition through pickle, as to another process."""
    parts = [pickle.loads(pickle.dumps(part)) for part in found.partitions]
    read = [piece.values for part in parts for piece in pieces(part)]
    return np.concatenate(read) if read else np.empty((0, len(NAMES)))


def write_csv(path: Path, rows: np.ndarray, *, separator: str = ",", newline: str = "\n", last: bool = True) -> Path:
    lines = [separator.join(NAMES), *(separator.join(map(repr, row)) for row in rows.tolist())]
    path.write_bytes((newline.join(lines) + newline * last).encode())
    return path


def write_any(path: Path, rows: np.ndarray) -> Path:
    """The rows in the format of the suffix, every column under its name."""
    columns = dict(zip(NAMES, rows.T, strict=True))
    if path.suffix in (".csv", ".tsv"):
        return write_csv(path, rows, separator="\t" if path.suffix == ".tsv" else ",")
    if path.name.endswith(".csv.gz"):
        path.write_bytes(gzip.compress(write_csv(path.with_suffix(""), rows).read_bytes()))
    elif path.suffix in (".parquet", ".pq"):
        pq.write_table(pa.table(columns), path, row_group_size=7)
    elif path.suffix == ".npz":
        np.savez(path, **columns)
    elif path.suffix in (".h5", ".hdf5"):
        import h5py

        with h5py.File(path, "w") as file:
            for name, column in columns.items():
                file[name] = column
    elif path.suffix == ".zarr":
        import zarr

        group = zarr.open_group(path, mode="w")
        for name, column in columns.items():
            group.create_array(name, data=column)
    else:
        import xarray as xr

        dataset = xr.Dataset({name: ("run", column) for name, column in columns.items()})
        if path.suffix == ".cdf":
            dataset.to_netcdf(path, engine="scipy")
        else:
            dataset.to_netcdf(path, engine="h5netcdf")
    return path


SUFFIXES = ("csv", "tsv", "csv.gz", "parquet", "pq", "npz", "h5", "hdf5", "zarr", "nc", "nc4", "cdf")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_rows_in_small_partitions(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "PART_BYTES", 300)
    monkeypatch.setattr(partition, "PIECE_BYTES", 10 * 8 * len(NAMES))
    rows = rows_of(64)
    found = planned(write_any(tmp_path / f"a.{suffix}", rows))
    assert np.array_equal(values(found), rows)
    assert len(found.partitions) > 1 or suffix in ("csv.gz", "npz")
    assert found.selection.ignored == ()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n=st.integers(1, 40),
    size=st.integers(1, 400),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    last=st.booleans(),
    separator=st.sampled_from([",", ";", "\t"]),
)
def test_a_csv_may_be_cut_anywhere(n, size, newline, last, separator, tmp_path):
    rows = rows_of(n)
    path = write_csv(tmp_path / "a.csv", rows, newline=newline, last=last, separator=separator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delimited, "PART_BYTES", size)
        patch.setattr(delimited, "TAIL_BYTES", max(1, size // 3))
        found = planned(path)
        assert np.array_equal(values(found), rows)


def test_a_header_is_found_below_comments_with_bom_quotes_and_spaces(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(
        b"\xef\xbb\xbf# simulator 3.1\r\n\r\n"
        b'"heat" ; flow;"K w"; rw ;"a; note";depth\r\n'
        b' 1;2e-1 ;+3;"4";"a; b";5.\r\n'
        b".5;-1E+2;1.5D+01;NA;;0\r\n\r\n \r\n\r\n"
    )
    expected = [[5, 4, 3, 0.2, 1], [0, np.nan, 15, -100, 0.5]]
    np.testing.assert_array_equal(values(planned(path)), expected)
    assert planned(path).selection.ignored == ("a; note",)


def test_a_header_that_numpy_has_written_as_a_comment(tmp_path):
    rows = rows_of(5)
    np.savetxt(tmp_path / "a.csv", rows, delimiter=",", header=",".join(NAMES))
    assert np.array_equal(values(planned(tmp_path / "a.csv")), rows)


@pytest.mark.parametrize("size", [1 << 20, 40])
def test_cells_that_are_no_numbers_and_broken_rows_are_found_with_their_rows(size, tmp_path, monkeypatch):
    monkeypatch.setattr(delimited, "PART_BYTES", size)
    lines = [
        ",".join(NAMES),
        "1,2,3,4,5",
        "1,2,3,abc,5",
        "",
        "1,2",
        "nan,,inf,-inf,NaN",
        "   ",
        "1,x,3,y z,5",
        "1,2,3,4,5,6",
    ]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    found, texts, broken, row = [], [], [], 0
    for part in planned(tmp_path / "a.csv").partitions:
        for piece in pieces(part):
            texts += [(NAMES[i], row + bad.tolist()[0], first) for i, (bad, first) in piece.texts.items()]
            texts += [(NAMES[i], row + r, "") for i, (bad, _) in piece.texts.items() for r in bad.tolist()[1:]]
            broken += [row + r for r in piece.broken.tolist()]
            found.append(piece.values)
            row += len(piece.values)
    assert broken == [2, 5]
    assert {(name, at) for name, at, _ in texts} == {("flow", 1), ("flow", 4), ("rw", 4)}
    assert ("flow", 1, "abc") in texts
    nan, inf = np.nan, np.inf
    expected = [
        [1, 2, 3, 4, 5],
        [1, 2, 3, nan, 5],
        [nan] * 5,
        [nan, nan, inf, -inf, nan],
        [1, nan, 3, nan, 5],
        [nan] * 5,
    ]
    np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"1,2,3,4,5\n1,2,3,4,5\n", "no header"),
        ("\ufeffdepth,rw".encode("utf-16"), "UTF-8"),
        (b'depth,rw,"K w",flow,heat,note\n1,2,3,4,5,"a\nb"\n', "line breaks"),
        (b'depth,rw,"K w",flow,heat,note\n1,2,3,4,5,"a\n1,2,3,4,5,6\n', "line breaks"),
        (b"depth,rw,K w,flow,heat,rw\n1,2,3,4,5,6\n", "2 columns named 'rw'"),
        (
            b"depth,Rw,K w,flow,heat\n1,2,3,4,5\n",
            "column 'rw' is missing (did you mean 'Rw'?); the file has 'depth', 'Rw'",
        ),
    ],
)
def test_a_csv_that_cannot_be_used_says_why(content, message, tmp_path):
    (tmp_path / "bad.csv").write_bytes(content)
    with pytest.raises(IngestError) as error:
        values(planned(tmp_path / "bad.csv"))
    assert message in str(error.value)
    assert "bad.csv" in str(error.value)


def test_an_inch_mark_is_not_a_quoted_text(tmp_path):
    (tmp_path / "a.csv").write_text('depth,rw,K w,flow,heat,note\n1,2,3,4,5,6" pipe\n1,2,3,4,5,7\n')
    assert values(planned(tmp_path / "a.csv")).tolist() == [[1, 2, 3, 4, 5]] * 2


def test_parquet_types_become_numbers(tmp_path):
    columns = {
        "depth": pa.array([1, None, 3], pa.int32()),
        "rw": pa.array(["1.5", " 2 ", "x"]),
        "K w": pa.array([True, False, None]),
        "flow": pa.array(["1e3", "", None]).dictionary_encode(),
        "heat": pa.array([1.5, float("nan"), float("inf")], pa.float32()),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    (part,) = planned(tmp_path / "a.parquet").partitions
    (piece,) = pieces(part)
    nan = np.nan
    np.testing.assert_array_equal(
        piece.values, [[1, 1.5, 1, 1e3, 1.5], [nan, 2, 0, nan, nan], [3, nan, nan, nan, np.inf]]
    )
    assert {i: (bad.tolist(), text) for i, (bad, text) in piece.texts.items()} == {1: ([2], "x")}


def test_a_directory_of_parquet_files_is_its_files(tmp_path):
    folder = tmp_path / "set.parquet"
    folder.mkdir()
    for i in range(3):
        pq.write_table(pa.table(dict(zip(NAMES, rows_of(4, i).T, strict=True))), folder / f"part-{i}.parquet")
    files = expand([folder])
    assert [Path(file.name).name for file in files] == ["part-0.parquet", "part-1.parquet", "part-2.parquet"]


@pytest.mark.parametrize("suffix", ["npz", "h5", "zarr"])
@pytest.mark.parametrize("table", ["runs", "observations"])
def test_matrices_named_as_the_arrays_hold_the_columns_in_order(suffix, table, tmp_path):
    rows = rows_of(9)
    request, parts = {
        "runs": (RUNS, {"x": rows[:, 0], "t": rows[:, 1:3], "z": rows[:, 3:]}),
        "observations": (OBSERVATIONS, {"x": rows[:, :1], "y": rows[:, 1:3], "noise": rows[:, 3:]}),
    }[table]
    path = tmp_path / f"a.{suffix}"
    if suffix == "npz":
        np.savez_compressed(path, **parts, extra=np.zeros((2, 2, 2)))
    elif suffix == "h5":
        import h5py

        with h5py.File(path, "w") as file:
            for name, array in parts.items():
                file.create_dataset(f"{table}/{name}", data=array, chunks=True, compression="gzip")
    else:
        import zarr

        group = zarr.open_group(path, mode="w", zarr_format=2)
        for name, array in parts.items():
            group.create_array(name, data=array)
    found = planned(path, request)
    assert np.array_equal(values(found), rows)
    assert found.selection.optional == (table == "observations")


def test_names_take_precedence_over_matrices(tmp_path):
    rows = rows_of(4)
    columns = dict(zip(NAMES, rows.T, strict=True))
    np.savez(tmp_path / "a.npz", **columns, x=np.zeros((4, 1)), z=np.zeros((4, 2)))
    found = planned(tmp_path / "a.npz")
    assert np.array_equal(values(found), rows)
    assert set(found.selection.ignored) == {"x", "z"}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"t": np.zeros((4, 3))}, "'t' has 3 columns, but the problem has 2"),
        ({"z": np.zeros((5, 2))}, "same length, but these are not: 'x' 4, 't' 4, 'z' 5"),
        ({"x": np.array(["a"] * 4)}, "'x' holds text, not numbers"),
        ({"x": np.zeros((4, 1)) * 1j}, "'x' holds complex numbers"),
        ({"t": np.zeros((4, 2, 2))}, "column 'rw' is missing; the file has 'x (4, 1)', 't (4, 2, 2)'"),
    ],
)
def test_arrays_that_do_not_fit_say_which(arrays, message, tmp_path):
    sound = {"x": np.zeros((4, 1)), "t": np.zeros((4, 2)), "z": np.zeros((4, 2))}
    np.savez(tmp_path / "bad.npz", **sound | arrays)
    with pytest.raises(IngestError) as error:
        planned(tmp_path / "bad.npz")
    assert message in str(error.value)
    assert "bad.npz" in str(error.value)


class Explosive:
    """An object whose unpickling would leave a trace."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def test_a_pickle_inside_an_npz_is_refused_and_never_loaded(tmp_path):
    trace = tmp_path / "was-loaded"
    bomb = np.array([Explosive(str(trace))] * 4, dtype=object)
    np.savez(tmp_path / "a.npz", x=bomb, t=np.zeros((4, 2)), z=np.zeros((4, 2)))
    with pytest.raises(IngestError, match="'x' holds Python objects"):
        planned(tmp_path / "a.npz")
    assert not trace.exists()


@pytest.mark.parametrize("suffix", ["nc", "cdf", "zarr"])
def test_variables_on_a_grid_are_spread_over_each_other(suffix, tmp_path, monkeypatch):
    import xarray as xr

    monkeypatch.setattr(partition, "PIECE_BYTES", 5 * 8 * len(NAMES))
    rng = np.random.default_rng(0)
    dataset = xr.Dataset(
        {
            "rw": ("run", rng.random(4)),
            "K w": ("time", [0.25, 0.5]),
            "flow": (("run", "time", "site"), rng.random((4, 2, 3))),
            "heat": (("site", "run"), rng.random((3, 4))),
        },
        coords={"depth": ("site", rng.random(3)), "time": [0.0, 1.0]},
    )
    dataset["time"].attrs["units"] = "days since 2000-01-01"
    path = tmp_path / f"a.{suffix}"
    if suffix == "zarr":
        dataset.to_zarr(path, zarr_format=2, consolidated=True)
    else:
        dataset.to_netcdf(path, engine="scipy" if suffix == "cdf" else "h5netcdf")
    found = planned(path)
    expected = [
        [dataset.depth[s], dataset.rw[r], dataset["K w"][t], dataset.flow[r, t, s], dataset.heat[s, r]]
        for r in range(4)
        for t in range(2)
        for s in range(3)
    ]
    assert np.array_equal(values(found), np.array(expected, dtype=float))
    assert len(found.partitions) == 2  # a run has six rows, a piece five: eight boxes


def test_a_dimension_without_an_input_is_refused_for_runs(tmp_path):
    import xarray as xr

    data = {name: ("run", np.full(4, 0.5)) for name in NAMES} | {"flow": (("run", "time"), np.ones((4, 3)))}
    xr.Dataset(data).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with pytest.raises(IngestError, match=r"no input varies along the dimension 'time'.*control input"):
        planned(tmp_path / "a.nc")


def test_a_csv_whose_last_line_has_no_end_is_noted(tmp_path):
    (tmp_path / "whole.csv").write_text(",".join(NAMES) + "\n" + ",".join("1" * len(NAMES)) + "\n")
    (tmp_path / "cut.csv").write_text(",".join(NAMES) + "\n" + ",".join("1" * len(NAMES)))
    assert planned(tmp_path / "whole.csv").note == ""
    assert "may be cut" in planned(tmp_path / "cut.csv").note


def test_a_scalar_file_is_one_row_and_packed_values_are_unpacked(tmp_path):
    import xarray as xr

    one = xr.Dataset({name: ((), float(i)) for i, name in enumerate(NAMES)})
    one.to_netcdf(tmp_path / "one.nc", engine="h5netcdf")
    assert values(planned(tmp_path / "one.nc")).tolist() == [[0, 1, 2, 3, 4]]
    many = xr.Dataset({name: ("run", np.array([0.5, np.nan, 1.5])) for name in NAMES})
    packed = {
        "flow": {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -1},
        "heat": {"dtype": "f4", "_FillValue": -9.0},
    }
    many.to_netcdf(tmp_path / "many.nc", engine="h5netcdf", encoding=packed)
    np.testing.assert_array_equal(values(planned(tmp_path / "many.nc")), np.repeat([[0.5], [np.nan], [1.5]], 5, axis=1))


def test_inputs_on_a_dimension_of_their_own_are_refused(tmp_path):
    import xarray as xr

    dims = {"depth": "a", "rw": "a", "K w": "a", "flow": "b", "heat": "b"}
    xr.Dataset({name: (dim, np.zeros(3)) for name, dim in dims.items()}).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with pytest.raises(IngestError, match=r"no output varies along all of the dimensions a, b.*rw\(a\).*flow\(b\)"):
        planned(tmp_path / "a.nc")


@pytest.mark.parametrize("suffix", ["parquet", "npz", "h5", "nc", "zarr", "csv.gz"])
def test_a_damaged_file_is_named(suffix, tmp_path):
    path = tmp_path / f"bad.{suffix}"
    path.write_bytes(b"\x1f\x8b nothing of that kind")
    with pytest.raises(IngestError, match=r"bad\.\S+: cannot be read as"):
        planned(path)


def test_files_are_found_by_path_pattern_and_suffix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b.csv", "a.csv", "c[1].csv", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert [file.name for file in expand(["?.csv"])] == ["a.csv", "b.csv"]
    assert [file.name for file in expand(["b.csv", "*.csv"])] == ["b.csv", "a.csv", "c[1].csv"]
    assert [file.name for file in expand(["c[1].csv"])] == ["c[1].csv"]
    assert expand(["a.csv"])[0].url == str(tmp_path / "a.csv")
    with pytest.raises(IngestError, match=r"d\.csv: no such file"):
        expand(["d.csv"])
    with pytest.raises(IngestError, match=r"q\*\.csv: no file matches"):
        expand(["q*.csv"])
    with pytest.raises(IngestError, match=r"notes\.txt: the format is not known.*accepted: \.csv, "):
        expand(["notes.txt"])
    with pytest.raises(IngestError, match="cannot be reached"):
        expand(["nowhere://a.csv"])


def test_files_are_read_through_fsspec(tmp_path):
    import fsspec

    rows = rows_of(20)
    for suffix in ("csv", "csv.gz", "parquet", "npz", "h5", "nc", "cdf"):
        local = write_any(tmp_path / f"a.{suffix}", rows)
        with fsspec.open(f"memory://bucket/a.{suffix}", "wb") as file:
            file.write(local.read_bytes())
        (found,) = expand([f"memory://bucket/*.{suffix}"]) if suffix != "csv" else expand(["memory://bucket/a.csv"])
        assert np.array_equal(values(plan(found, RUNS)), rows), suffix


NAME = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="/\\"), min_size=1, max_size=8).filter(
    lambda name: name.strip() == name
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(NAME, min_size=3, max_size=3, unique=True))
def test_any_name_is_found_in_csv_and_parquet(names, tmp_path):
    import csv

    x, t, z = names
    problem = make_problem(
        control_inputs=[{"name": x, "bounds": [-9, 9]}],
        calibration_inputs=[{"name": t, "bounds": [-9, 9]}],
        outputs=[{"name": z}],
    )
    request = Request("runs", problem.runs_columns)
    rows = rows_of(3)[:, :3]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(names)
        writer.writerows(rows.tolist())
    pq.write_table(pa.table(dict(zip(names, rows.T, strict=True))), tmp_path / "a.parquet")
    for suffix in ("csv", "parquet"):
        assert np.array_equal(values(planned(tmp_path / f"a.{suffix}", request)), rows)


def test_patterns_expand_in_order_and_odd_names_are_files(tmp_path):
    for name in ("b.csv", "a.csv", "c.txt", "run[1].csv"):
        (tmp_path / name).touch()
    assert [file.url for file in expand([tmp_path / "?.csv"])] == [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    assert [file.url for file in expand([tmp_path / "run[1].csv"])] == [str(tmp_path / "run[1].csv")]
    assert [file.url for file in expand([f"file://{tmp_path}/?.csv"])] == [
        f"file://{tmp_path}/a.csv",
        f"file://{tmp_path}/b.csv",
    ]
    with pytest.raises(IngestError, match="no-such"):
        expand([tmp_path / "no-such-*.csv"])
