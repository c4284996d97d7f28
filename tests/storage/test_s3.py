"""A store behind a real S3 API on loopback."""

from __future__ import annotations

import json
import time
from pathlib import Path

import boto3
import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv

import storage
from storage import layout
from storage.errors import DamagedChunk, StoreError
from storage.places import LOCK_NAME, S3Place
from storage.problem import parse_problem
from tests.storage.conftest import PROBLEM, numbered

BUCKET = "bucket"


@pytest.fixture
def url(s3_url: str, request: pytest.FixtureRequest) -> str:
    return f"{s3_url}/{request.node.name}.zarr"


@pytest.mark.parametrize("shard_rows", [None, 64])
def test_append_read_stream_and_verify(url: str, shard_rows: int | None) -> None:
    store = storage.create(url, PROBLEM, dtype="float64", chunk_rows=16, shard_rows=shard_rows)
    store.append_runs(*numbered(50))
    storage.open(url).append_runs(*numbered(50, start=50))
    x, _, y = numbered(9)
    store.append_observations(x, y, noise=y * 0 + 1)
    found = storage.open(url)
    np.testing.assert_array_equal(found.runs.read()["x"], numbered(100)[0])
    assert found.verify() == []
    assert found.stored_bytes("runs") > 0
    with storage.stream(found, runs=30, observations=4) as stream:
        rows = np.concatenate([batch.runs.row[batch.runs.weight > 0] for batch in stream if batch.runs is not None])
    assert sorted(rows.tolist()) == list(range(100))


def test_damage_is_found(url: str) -> None:
    store = storage.create(url, PROBLEM, dtype="float64", chunk_rows=16)
    store.append_runs(*numbered(50))
    client, key = boto3.client("s3"), f"{url.removeprefix(f's3://{BUCKET}/')}/runs/z/c.1.0"
    data = bytearray(client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
    data[10] ^= 1
    client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data))
    client.delete_object(Bucket=BUCKET, Key=key.replace("/z/c.1.0", "/x/c.2.0"))
    assert [damage.file for damage in store.verify()] == ["runs/x/c.2.0", "runs/z/c.1.0"]
    with pytest.raises(DamagedChunk, match=r"c\.1\.0"):
        store.runs.read_block(1)


def test_what_is_not_there(s3_url: str) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        storage.open(f"{s3_url}/nothing.zarr")
    with pytest.raises(StoreError, match="does the bucket exist"):
        storage.create("s3://no-such-bucket/s.zarr", PROBLEM)


def test_an_existing_store_is_not_overwritten(url: str) -> None:
    storage.create(url, PROBLEM).append_runs(*numbered(3))
    with pytest.raises(StoreError, match="already"):
        storage.create(url, PROBLEM)
    assert storage.open(url).runs.rows == 3


def test_a_dead_writers_lease_runs_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = storage.create(url, PROBLEM, dtype="float64", chunk_rows=16)
    monkeypatch.setattr(S3Place, "LEASE", 0.5)
    place = S3Place(url)
    place.put(LOCK_NAME, json.dumps({"owner": "a dead writer", "until": time.time() + 1.5}).encode())
    begun = time.time()
    store.append_runs(*numbered(5))
    assert time.time() - begun > 1, "the lease of a writer that may still live was not respected"
    assert storage.open(url).runs.rows == 5
    assert place.read(LOCK_NAME) is None


def test_a_living_writers_lease_is_renewed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = storage.create(url, PROBLEM, dtype="float64", chunk_rows=16)
    monkeypatch.setattr(S3Place, "LEASE", 1.0)
    monkeypatch.setattr("storage.places.LOCK_WAIT", 0.2)
    read, faults = store.place.read, ["the network is away"]

    def faulty(key: str) -> tuple[bytes, str] | None:
        if key == LOCK_NAME and faults:
            raise StoreError(faults.pop())
        return read(key)

    with store.writer({"runs": 2}) as writers:
        monkeypatch.setattr(store.place, "read", faulty)  # a passing fault must not end the renewals
        time.sleep(1.5)
        assert not faults
        with pytest.raises(StoreError, match="another process is still writing"):
            storage.open(url).append_runs(*numbered(1))
        for name, rows in zip("xtz", numbered(2), strict=True):
            writers["runs"].arrays[name][0:2] = rows
    assert storage.open(url).runs.rows == 2


def test_a_writer_that_was_taken_for_dead_cannot_commit(url: str) -> None:
    store = storage.create(url, PROBLEM, dtype="float64", chunk_rows=16)
    other = S3Place(url)
    with pytest.raises(StoreError, match="changed by another writer"), store.writer({"runs": 2}):
        other.put("zarr.json", layout.to_bytes(store.document) + b"\n")
    assert storage.open(url).runs.rows == 0


def test_files_and_store_may_lie_in_a_bucket(s3_url: str, url: str, tmp_path: Path) -> None:
    x, t, z = numbered(300)
    table = pa.table({"a": x[:, 0], "b": x[:, 1], "k": t[:, 0], "f": z[:, 0]})
    for part in (0, 1):
        with fsspec.open(f"{s3_url}/in/{part}.csv", "wb") as file:
            csv.write_csv(table.slice(150 * part, 150), file)
    storage.ingest(parse_problem(PROBLEM), runs=[f"{s3_url}/in/*.csv"], store=url, dtype="float64", chunk_rows=64)
    np.testing.assert_array_equal(storage.open(url).runs.read()["x"], x)
    storage.ingest(parse_problem(PROBLEM), runs=[url], store=tmp_path / "local.zarr", dtype="float64")
    np.testing.assert_array_equal(storage.open(tmp_path / "local.zarr").runs.read()["z"], z)


@pytest.mark.parametrize("answers", [True, False])
def test_an_append_whose_answer_is_lost_is_committed_or_not_known(
    url: str, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    store = storage.create(url, PROBLEM, dtype="float64", chunk_rows=16)
    put, read = store.place._put, store.place.read  # type: ignore[attr-defined]
    lost = False

    def answer_lost(key: str, data: bytes, **condition: str) -> None:
        nonlocal lost
        put(key, data, **condition)
        if key == layout.ROOT and not lost:
            lost = True
            put(key, data, **condition)  # botocore tries again, and meets what it has put itself

    def unreachable(key: str) -> tuple[bytes, str] | None:
        if lost and not answers:
            raise StoreError("the network is away")
        return read(key)

    monkeypatch.setattr(store.place, "_put", answer_lost)
    monkeypatch.setattr(store.place, "read", unreachable)
    if answers:
        store.append_runs(*numbered(5))
    else:
        with pytest.raises(storage.CommitUnknown, match=r"look at .* before you write the same again"):
            store.append_runs(*numbered(5))
    assert lost
    assert storage.open(url).runs.rows == 5


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b'{"owner": 1, "until": "x"}', b"\xff", b"[" * 100_000])
def test_a_damaged_lock_is_nobodys(url: str, text: bytes) -> None:
    store = storage.create(url, PROBLEM, dtype="float64", chunk_rows=16)
    S3Place(url).put(LOCK_NAME, text)
    store.append_runs(*numbered(5))
    assert storage.open(url).runs.rows == 5
