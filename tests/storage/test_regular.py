"""What is no regular file is refused before it is waited for, and a data file holds what it gives itself."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import storage
from storage import documents, layout, sources, strict_yaml
from storage.errors import IngestError, StoreError
from storage.problem import parse_problem
from storage.regular import open_regular
from storage.store import Store
from tests.storage.conftest import PROBLEM

NAMES = ("a", "b", "k", "f")
VALUES = np.linspace(0.1, 0.4, 4)
pytestmark = pytest.mark.timeout(20)  # what is waited for would be for ever


def put_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def put_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def put_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD = {"a pipe": put_pipe, "a device": put_device, "a socket": put_socket}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_file_is_named(tmp_path: Path, kind: str) -> None:
    odd = tmp_path / "odd"
    ODD[kind](odd)
    for read in (
        lambda: documents.read(odd, StoreError, "cure"),
        lambda: strict_yaml.read(odd, StoreError),
        lambda: storage.open(tmp_path / "s.zarr"),
    ):
        (tmp_path / "s.zarr").mkdir(exist_ok=True)
        ODD[kind](tmp_path / "s.zarr" / layout.ROOT)
        with pytest.raises(StoreError, match=rf"cannot read .*: it is not a regular file but {kind}; check the path"):
            read()


def test_what_takes_the_place_of_a_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the opening somebody may put a pipe there."""
    put_pipe(tmp_path / "pipe")
    monkeypatch.setattr("storage.regular.check_regular", lambda path: None)
    with pytest.raises(OSError, match="a pipe"):
        open_regular(tmp_path / "pipe")


def test_a_command_s_own_input_may_be_a_pipe() -> None:
    """`vcal train <(make-config)` names one of these."""
    out, into = os.pipe()
    os.write(into, b"x: 1")
    os.close(into)
    try:
        assert strict_yaml.read(f"/dev/fd/{out}", StoreError) == {"x": 1}
    finally:
        os.close(out)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_chunk_that_is_no_file_is_refused(make_store: Callable[..., Store], kind: str, sharded: bool) -> None:
    store = make_store(runs=20, **({"chunk_rows": 8, "shard_rows": 16} if sharded else {"chunk_rows": 16}))
    ODD[kind](Path(store.url) / "runs" / "x" / "c.0.0")
    with pytest.raises(StoreError, match=kind):
        storage.open(store.url).runs.read(0, 20)


def rows(path: Path) -> np.ndarray[Any, Any]:
    request = sources.Request("runs", layout.columns(parse_problem(PROBLEM), "runs"))
    (file,) = sources.expand([path])
    parts = sources.plan(file, request).partitions
    return np.concatenate([piece.values for part in parts for piece in sources.pieces(part)])


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "parquet", "npz", "nc", "h5", "zarr"])
def test_a_data_file_that_is_no_file_is_refused(tmp_path: Path, suffix: str) -> None:
    put_pipe(tmp_path / f"runs.{suffix}")
    with pytest.raises(IngestError, match=rf"runs\.{suffix}: .*"):
        rows(tmp_path / f"runs.{suffix}")


# --- Zarr of others ---------------------------------------------------------------------------------------------------


def zarr_v2(root: Path) -> Path:
    """Four columns of four rows, as other programs write them."""
    (root / "a").mkdir(parents=True)
    (root / ".zgroup").write_text('{"zarr_format": 2}')
    described = {
        "zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f8", "compressor": None, "fill_value": None,
        "order": "C", "filters": None,
    }  # fmt: skip
    (root / "a" / ".zarray").write_text(json.dumps(described))
    (root / "a" / ".zattrs").write_text('{"_ARRAY_DIMENSIONS": ["site"]}')
    (root / "a" / "0").write_bytes(VALUES.tobytes())
    for name in NAMES[1:]:
        shutil.copytree(root / "a", root / name)
    return root


def test_a_sound_zarr_is_read(tmp_path: Path) -> None:
    np.testing.assert_array_equal(rows(zarr_v2(tmp_path / "r.zarr")), np.repeat(VALUES[:, None], 4, 1))


@pytest.mark.parametrize("name", ["a/0", "a/.zarray", ".zgroup"])
@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_nothing_in_a_zarr_of_others_is_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    ODD[kind](zarr_v2(tmp_path / "r.zarr") / name)
    with pytest.raises(IngestError, match=r"r\.zarr.*"):
        rows(tmp_path / "r.zarr")


def test_a_chunk_that_memory_cannot_hold_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (zarr_v2(tmp_path / "r.zarr") / "a" / "0").open("r+b") as file:
        try:
            file.truncate(1 << 43)
        except OSError:
            pytest.skip("the file system holds no file of that size")
    with pytest.raises(IngestError, match=r"8,192\.0 GiB of it are needed"):
        rows(tmp_path / "r.zarr")


class Program:
    """What a pickle can stand for."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_no_codec_of_a_zarr_unpickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numcodecs did so by itself before 0.16.6; labels are read although nobody has asked for them."""
    monkeypatch.setattr("numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)
    root = zarr_v2(tmp_path / "r.zarr")
    shutil.copytree(root / "a", root / "site")
    described = json.loads((root / "site" / ".zarray").read_text())
    codecs = [{"id": "vlen-utf8"}, {"id": "pickle"}]
    (root / "site" / ".zarray").write_text(json.dumps(described | {"dtype": "|O", "filters": codecs, "fill_value": ""}))
    (root / "site" / "0").write_bytes(pickle.dumps(Program(tmp_path / "ran")))
    with pytest.raises(IngestError, match="the array 'site' is stored as a pickle, which can run any program"):
        rows(root)
    assert not (tmp_path / "ran").exists()


# --- HDF5 of others ---------------------------------------------------------------------------------------------------


def _linked(file: h5py.File, name: str, other: Path) -> None:
    file[name] = h5py.ExternalLink(str(other), "values")


def _raw(file: h5py.File, name: str, other: Path) -> None:
    file.create_dataset(name, shape=(4,), dtype="f8", external=[(str(other), 0, 32)])


def _virtual(file: h5py.File, name: str, other: Path) -> None:
    whole = h5py.VirtualLayout((4,), "f8")
    whole[:] = h5py.VirtualSource(str(other), "values", (4,))
    file.create_virtual_dataset(name, whole)


@pytest.mark.parametrize("suffix", ["h5", "nc"])
@pytest.mark.parametrize("place", [_linked, _raw, _virtual])
@pytest.mark.parametrize("group", ["", "runs/"])
def test_a_file_whose_columns_lie_in_another_is_refused(
    tmp_path: Path, suffix: str, place: Callable[[h5py.File, str, Path], None], group: str
) -> None:
    put_pipe(tmp_path / "mine")  # it is not even opened
    with h5py.File(tmp_path / f"r.{suffix}", "w") as file:
        for name in NAMES[1:]:
            file[group + name] = VALUES
        place(file, f"{group}a", tmp_path / "mine")
    with pytest.raises(IngestError, match=rf"r\.{suffix}: '{group}a' lies in another file, .*mine; copy everything"):
        rows(tmp_path / f"r.{suffix}")


def test_a_group_in_another_file_is_refused(tmp_path: Path) -> None:
    put_pipe(tmp_path / "mine")
    with h5py.File(tmp_path / "r.h5", "w") as file:
        file["runs"] = h5py.ExternalLink(str(tmp_path / "mine"), "/")
    with pytest.raises(IngestError, match="'runs' lies in another file"):
        rows(tmp_path / "r.h5")


def test_parts_of_a_file_may_name_each_other(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "r.h5", "w") as file:
        file["values"] = VALUES
        whole = h5py.VirtualLayout((4,), "f8")
        whole[:] = h5py.VirtualSource(file["values"])
        file.create_virtual_dataset("runs/a", whole)
        for name in NAMES[1:]:
            file[f"runs/{name}"] = h5py.SoftLink("/values")
        file["runs/loop"] = file["/"]
    np.testing.assert_array_equal(rows(tmp_path / "r.h5")[:, 0], VALUES)
