"""A writer that is killed at any moment loses only its own uncommitted rows, and never shows half of one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

import storage
from storage.errors import StoreError
from storage.problem import parse_problem
from storage.store import Store
from tests.faults.kill_kit import kill, start
from tests.storage.conftest import PROBLEM, numbered


def ingest_all(files: list[str], url: str, report: Connection) -> None:
    report.send(0)
    runs, observations = files
    storage.ingest(parse_problem(PROBLEM), runs=[runs], observations=[observations], store=url, dtype="float64")


def hold_the_lock(url: str, report: Connection) -> None:
    with storage.open(url).writer({"runs": 5}) as writers:
        writer = writers["runs"]
        writer.arrays["x"][writer.start : writer.start + 5] = 1.0
        report.send(writer.start)
        time.sleep(600)


@pytest.mark.slow
def test_a_killed_ingest_shows_all_or_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    x, t, z = numbered(60_000)
    runs, observations, url = (str(tmp_path / name) for name in ("runs.csv", "field.csv", "s.zarr"))
    settings = {"delimiter": ",", "comments": "", "fmt": "%.17g"}
    np.savetxt(runs, np.concatenate([x, t, z], axis=1), header="a,b,k,f", **settings)
    np.savetxt(observations, np.concatenate([x, z], axis=1)[:500], header="a,b,f", **settings)
    moments, found = random.Random(1), None
    for _ in range(8):
        process, receive = start(ingest_all, [runs, observations], url)
        receive.recv()
        time.sleep(0.2 + moments.random() * 0.6)
        kill(process)
        if storage.exists(url):
            found = storage.open(url)
            assert (found.runs.rows, found.observations.rows) in [(0, 0), (60_000, 500)]
            if found.runs.rows:
                break
    if found is None or not found.runs.rows:
        storage.ingest(parse_problem(PROBLEM), runs=[runs], observations=[observations], store=url, dtype="float64")
    found = storage.open(url)
    np.testing.assert_array_equal(found.runs.read()["x"], x)
    assert found.observations.rows == 500
    assert found.verify() == []


def test_a_dead_writer_does_not_hold_the_lock(
    make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(runs=20)
    process, receive = start(hold_the_lock, store.url)
    assert receive.recv() == 20
    monkeypatch.setattr("storage.places.LOCK_WAIT", 0.2)
    with pytest.raises(StoreError, match="another process is still writing"):
        store.append_runs(*numbered(1, start=20))
    kill(process)
    store.append_runs(*numbered(7, start=20))
    np.testing.assert_array_equal(storage.open(store.url).runs.read()["x"], numbered(27)[0])


def test_two_writers_take_turns(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=0, observations=0)
    one, other = storage.open(store.url), storage.open(store.url)
    for piece in range(6):
        (one if piece % 2 else other).append_runs(*numbered(11, start=11 * piece))
    np.testing.assert_array_equal(store.refresh().runs.read()["z"], numbered(66)[2])
