"""Files that are cut, changed or crafted: every reader reads them or refuses them in one line, in any format."""

from __future__ import annotations

import contextlib
import gzip
import os
import random
import resource
import shutil
import struct
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xarray as xr
import zarr

import storage
from storage import layout
from storage.errors import IngestError, VcalError
from storage.problem import parse_problem
from storage.sources import Request, expand, pieces, plan
from tests.storage.conftest import PROBLEM, numbered

ROWS = 12
REQUEST = Request("runs", layout.columns(parse_problem(PROBLEM), "runs"))
WORDS = [b"\x00", b"\xff", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff\xff\xff\xff\xff", b'"', b"\n", b"\r", b",", b"1e999"]


def columns() -> dict[str, np.ndarray]:
    x, t, z = numbered(ROWS)
    return {"a": x[:, 0], "b": x[:, 1], "k": t[:, 0], "f": z[:, 0]}


def csv_bytes(separator: str = ",") -> bytes:
    lines = [separator.join(columns())] + [
        separator.join(map(repr, row)) for row in zip(*columns().values(), strict=True)
    ]
    return ("\n".join(lines) + "\n").replace("np.float64(", "").replace(")", "").encode()


def write_netcdf(path: Path, engine: str, **settings: str) -> None:
    dataset = xr.Dataset({name: ("run", values) for name, values in columns().items()})
    dataset["f"].attrs = {"units": "N", "_FillValue": -9999.0}
    dataset.to_netcdf(path, engine=engine, **settings)


def write_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        for name, values in columns().items():
            file.create_dataset(f"runs/{name}", data=values, chunks=(4,), compression="gzip")


def write_zarr(path: Path, version: int) -> None:
    group = zarr.create_group(path, zarr_format=version)
    for name, values in columns().items():
        group.create_array(name, data=values, chunks=(4,), **({"dimension_names": ["run"]} if version == 3 else {}))


FILES: dict[str, Callable[[Path], object]] = {
    "a.csv": lambda path: path.write_bytes(csv_bytes()),
    "a.tsv": lambda path: path.write_bytes(csv_bytes("\t")),
    "a.csv.gz": lambda path: path.write_bytes(gzip.compress(csv_bytes())),
    "a.parquet": lambda path: pq.write_table(pa.table(columns()), path, row_group_size=5),
    "classic.nc": lambda path: write_netcdf(path, "scipy", format="NETCDF3_CLASSIC"),
    "wide.nc": lambda path: write_netcdf(path, "scipy", format="NETCDF3_64BIT"),
    "a.nc": lambda path: write_netcdf(path, "h5netcdf"),
    "a.h5": write_hdf5,
    "a.npz": lambda path: np.savez(path, **columns()),
    "packed.npz": lambda path: np.savez_compressed(path, **columns()),
    "v2.zarr": lambda path: write_zarr(path, 2),
    "v3.zarr": lambda path: write_zarr(path, 3),
}


def harmed(data: bytes, rng: random.Random) -> bytes:
    """Cut, changed at one place, or with a piece left out, repeated or put in; most often in the header."""
    length = len(data)
    at = min(
        rng.choice(
            [rng.randrange(length), rng.randrange(min(length, 400)), length - 1 - rng.randrange(min(length, 200))]
        ),
        length - 1,
    )
    span = rng.choice([1, 2, 4, 8, 40])
    match rng.randrange(6):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 2:
            return data[:at] + data[at + span :]
        case 3:
            return data[:at] + data[at : at + span] + data[at:]
        case 4:
            word = rng.choice(WORDS)
            return data[:at] + word + data[at + len(word) :]
        case _:
            return data[:at] + rng.choice(WORDS) + data[at:]


def read_all(path: Path) -> int:
    """What an ingest does with a file before it writes: how many rows it found."""
    found = plan(expand([path])[0], REQUEST)
    return sum(len(piece.values) for partition in found.partitions for piece in pieces(partition))


def harm(path: Path, rng: random.Random) -> None:
    target = rng.choice([f for f in sorted(path.rglob("*")) if f.is_file()]) if path.is_dir() else path
    target.write_bytes(harmed(target.read_bytes(), rng))


def fuzz(folder: Path, name: str, count: int, seed: int = 0) -> Iterator[BaseException | None]:
    """What comes of so many harmed copies of a file; each has its own seed."""
    good, path = folder / f"good-{name}", folder / name
    FILES[name](good)
    assert read_all(good) == ROWS
    for number in range(count):
        if good.is_dir():
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(good, path)
        else:
            shutil.copy(good, path)
        harm(path, random.Random(f"{name} {seed} {number}"))
        began = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read_all(path)
        except VcalError:
            yield None
        except Exception as error:
            error.add_note(f"{name}, seed {seed}, number {number}")
            yield error
        else:
            yield None
        assert time.monotonic() - began < 10


@pytest.mark.parametrize("name", FILES)
def test_a_harmed_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for error in fuzz(tmp_path, name, 40):
        if error is not None:
            raise error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def refused(path: Path) -> str:
    began = time.monotonic()
    with pytest.raises(IngestError) as caught:
        read_all(path)
    assert time.monotonic() - began < 10
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_classic_netcdf_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.nc"
    write_netcdf(path, "scipy", format="NETCDF3_CLASSIC")
    data = path.read_bytes()
    for end in [*range(0, 400, 5), *range(400, len(data) - 1, 40)]:
        path.write_bytes(data[:end])
        refused(path)


@pytest.mark.parametrize(
    "header", [b"a,b\rx,k,f\n", b'a,b,k,f,"' + b"x" * 200_000 + b'"\n', b"a,b,k,f\x00\n", b"# a\rb\n1,2,3,4\n"]
)
def test_a_header_that_is_no_csv_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(header + b"1,2,3\n")
    with contextlib.suppress(IngestError):
        read_all(path)
    path.write_bytes(header)
    with contextlib.suppress(IngestError):
        read_all(path)


def test_a_short_row_that_is_not_utf8_is_a_broken_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(csv_bytes() + b"1,\xff\xfe\n" + b"9,0,0.5,\xe2\n" + b"10,0,0.5,-1\n")
    with pytest.raises(IngestError) as caught:
        storage.ingest(parse_problem(PROBLEM), runs=[path], store=tmp_path / "s.zarr")
    assert f"row {ROWS + 2}" in str(caught.value)
    assert "'1,\ufffd\ufffd'" in str(caught.value)
    report = storage.ingest(parse_problem(PROBLEM), runs=[path], store=tmp_path / "s.zarr", drop_invalid=True)
    assert (report.tables["runs"].rows, report.tables["runs"].dropped) == (ROWS + 1, 2)


def test_claimed_rows_take_no_memory(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name in columns():
            file.create_dataset(name, shape=(2**50,), dtype="f8", chunks=(1000,))
    assert "1,125,899,906,842,624 rows" in refused(tmp_path / "a.h5")
    group = zarr.create_group(tmp_path / "a.zarr")
    for name in columns():
        group.create_array(name, shape=(2**50,), dtype="f8", chunks=(1000,))
    assert "1,125,899,906,842,624 rows" in refused(tmp_path / "a.zarr")
    header = str({"descr": "<f8", "fortran_order": False, "shape": (2**40,)}).encode().ljust(117) + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in columns():
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
    assert "should have 8,796,093,022,208 bytes" in refused(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_line_without_an_end_takes_no_memory(tmp_path: Path, name: str) -> None:
    path, text = tmp_path / name, b"a,b,k,f\n1,2,3,4\n" + b"1" * (40 << 20)
    path.write_bytes(gzip.compress(text, 1) if name.endswith("gz") else text)
    assert "a line of more than 8 MiB" in refused(path)


def test_a_file_whose_name_is_not_utf8_is_ingested(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.csv"))
    path.write_bytes(csv_bytes())
    storage.ingest(parse_problem(PROBLEM), runs=[path], store=tmp_path / "s.zarr")
    store = storage.open(tmp_path / "s.zarr")
    assert store.runs.rows == ROWS
    assert store.provenance["sources"][0]["file"].endswith("a\\udcff.csv")
