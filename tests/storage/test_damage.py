"""A damaged chunk never passes for data: reading raises, verify names it."""

from __future__ import annotations

import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from numcodecs.zstd import Zstd

import storage
from storage.errors import DamagedChunk
from storage.store import Store
from tests.storage.conftest import numbered

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"compression": "none"},
    {"shard_rows": 48},
    {"compression": "none", "shard_rows": 48},
]


def chunk_files(store: Store) -> list[Path]:
    return sorted(f for a in ("x", "t", "z", "y") for f in Path(store.url).glob(f"*/{a}/c.*"))


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
def test_a_flipped_byte_in_any_chunk_is_found(make_store: Callable[..., Store], settings: dict[str, Any]) -> None:
    store = make_store(runs=100, observations=20, **settings)
    rng = np.random.default_rng(0)
    for file in chunk_files(store):
        whole = file.read_bytes()
        for position in {0, len(whole) - 1, *rng.integers(len(whole), size=3).tolist()}:
            flip(file, position)
            damages = store.verify()
            assert damages, f"byte {position} of {file}"
            assert {d.file for d in damages} == {str(file.relative_to(store.url))}
            table = store.runs if "runs" in file.parts else store.observations
            with pytest.raises(DamagedChunk, match=file.name):
                table.read_block(int(file.name.split(".")[1]))
            file.write_bytes(whole)
    assert store.verify() == []


@pytest.mark.parametrize("settings", LAYOUTS, ids=str)
@pytest.mark.parametrize("harm", ["delete", "truncate", "empty"])
def test_lost_and_cut_files_are_found(make_store: Callable[..., Store], settings: dict[str, Any], harm: str) -> None:
    store = make_store(runs=100, **settings)
    file = Path(store.url) / "runs" / "z" / "c.1.0"
    if harm == "delete":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: 0 if harm == "empty" else -7])
    assert {d.file for d in store.verify()} == {"runs/z/c.1.0"}
    with pytest.raises(DamagedChunk, match="into a new store"):
        store.runs.read()


def test_every_damaged_chunk_is_named_with_its_rows(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=100)
    root = Path(store.url)
    flip(root / "runs" / "x" / "c.0.0", 3)
    flip(root / "runs" / "t" / "c.6.0", 3)
    (root / "observations" / "y" / "c.0.0").unlink()
    assert [(d.file, d.first_row, d.last_row) for d in storage.open(root).verify()] == [
        ("runs/x/c.0.0", 0, 15),
        ("runs/t/c.6.0", 96, 99),
        ("observations/y/c.0.0", 0, 9),
    ]


def test_inside_a_shard_the_damaged_chunk_is_named(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=100, shard_rows=48)
    flip(Path(store.url) / "runs" / "x" / "c.1.0", 2)
    damage = store.verify()
    assert [(d.first_row, d.last_row) for d in damage] == [(48, 63)]


def test_damaged_labels_are_named(make_store: Callable[..., Store]) -> None:
    store = make_store()
    flip(Path(store.url) / "runs" / "control_input" / "c.0", -6)
    assert [damage.file for damage in store.verify()] == ["runs/control_input/c.0"]


def test_a_stream_stops_at_damage(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=100)
    flip(Path(store.url) / "runs" / "x" / "c.4.0", 5)
    for memory in ("20 KB", "1 GB"):
        with storage.stream(store, runs=10, memory=memory) as stream, pytest.raises(DamagedChunk, match=r"c\.4\.0"):
            list(stream)


def test_a_stream_goes_on_after_a_repair(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=100)
    file = Path(store.url) / "runs" / "x" / "c.4.0"
    whole = file.read_bytes()
    flip(file, 5)
    with storage.stream(store, runs=10) as stream:
        with pytest.raises(DamagedChunk):
            list(stream)
        file.write_bytes(whole)
        rows = [number for batch in stream if batch.runs is not None for number in batch.runs.row.tolist()]
    assert sorted(rows) == list(range(100))


def test_appending_to_a_damaged_chunk_says_so(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=20)
    flip(Path(store.url) / "runs" / "t" / "c.1.0", 5)
    with pytest.raises(DamagedChunk, match=r"runs/t/c\.1\.0 \(rows 16 to 20\)"):
        store.append_runs(*numbered(1, start=20))
    assert storage.open(store.url).runs.rows == 20


@pytest.mark.parametrize("shard_rows", [None, 48])
def test_a_chunk_that_stands_for_gigabytes_is_damaged(make_store: Callable[..., Store], shard_rows: int | None) -> None:
    """Its checksums are right: whoever crafts a chunk can write them."""
    compressed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(compressed, "zstd") as stream:
        for _ in range(200):
            stream.write(bytes(1 << 20))
    chunk = with_checksum(compressed.getvalue().to_pybytes())
    assert len(chunk) < 10_000
    store = make_store(runs=100, **({} if shard_rows is None else {"shard_rows": shard_rows}))
    index = with_checksum(struct.pack("<6Q", *[0, len(chunk)] * 3)) if shard_rows else b""
    (Path(store.url) / "runs" / "x" / "c.0.0").write_bytes(chunk + index)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DamagedChunk, match=r"c\.0\.0"):
        store.runs.read_block(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def with_checksum(data: bytes) -> bytes:
    return data + int(google_crc32c.value(data)).to_bytes(4, "little")


@pytest.mark.parametrize("shard_rows", [None, 48])
@pytest.mark.parametrize("size", [1, 8, 255, 256, 300])
def test_a_chunk_that_is_too_short_shows_no_old_memory(
    make_store: Callable[..., Store], shard_rows: int | None, size: int
) -> None:
    store = make_store(runs=100, **({} if shard_rows is None else {"shard_rows": shard_rows}))
    chunk = with_checksum(bytes(Zstd(3).encode(bytes(size))))
    index = with_checksum(struct.pack("<6Q", *[0, len(chunk)] * 3)) if shard_rows else b""
    (Path(store.url) / "runs" / "x" / "c.0.0").write_bytes(chunk + index)
    store.runs.read_block(3 if shard_rows is None else 1)  # whose memory the next chunk may get
    if size == 16 * 2 * 8:
        assert not store.runs.read_block(0)["x"].any()
    else:
        with pytest.raises(DamagedChunk, match=r"c\.0\.0"):
            store.runs.read_block(0)
