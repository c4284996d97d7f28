"""Writers and trainings that are killed at random moments lose nothing, and the same command ends the same."""

from __future__ import annotations

import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xarray

import storage
from storage.store import create
from tests.faults.conftest import Tally, size
from tests.faults.kill_kit import kill, reports, start, write_for_ever
from tests.storage.conftest import PROBLEM, numbered
from tests.vcal_dist.test_training_resume import KINDS
from tests.vcal_dist.training_kit import KILLED, Processes, assert_same, checkpoint, curve, make_store, settings

SAMPLE = 15  # of the writers; tests/vcal_dist/test_training_resume.py has one of the trainings
KILLS, KILLED_TRAININGS = size("KILLS", 1000), size("KILLED_TRAININGS", 200)
SHARES = 5  # kills of a training, each in about this part of it
MOST_ROWS = 3000  # of a store; then another is begun, as every look reads all of it


def kill_writers(folder: Path, tally: Tally, kills: int) -> None:
    """Kills writers one after another, and reads all rows after each."""
    moments, torn, store, committed = random.Random(0), 0, None, 0
    for attempt in range(kills):
        if store is None or committed > MOST_ROWS:
            if store is not None:
                finish(store.url, committed)
            store, committed = create(folder / f"{attempt}.zarr", PROBLEM, dtype="float64", chunk_rows=16), 0
        process, receive = start(write_for_ever, store.url, attempt)
        assert receive.poll(60), "the lock of a killed writer is not free"
        time.sleep(moments.random() * 0.08)
        kill(process)
        said = [committed, *reports(receive)]
        receive.close()
        found = storage.open(store.url)
        assert found.runs.rows >= max(said), f"kill {attempt}: a committed row was lost"
        rows = found.runs.read()
        for name, expected in zip("xtz", numbered(found.runs.rows), strict=True):
            np.testing.assert_array_equal(rows[name], expected)
        assert xarray.open_zarr(store.url, group="runs").sizes["run"] == found.runs.rows
        written = max((int(f.name.split(".")[1]) for f in Path(store.url).glob("runs/x/c.*.0")), default=0)
        torn += written >= found.runs.blocks or any(Path(store.url).glob("runs/*/*.partial"))
        committed = found.runs.rows
        tally.add("killed writers", 1, 1)
    assert store is not None
    finish(store.url, committed)
    assert torn > 0, "no kill fell into the middle of an append: the test has lost its point"


def finish(url: str, rows: int) -> None:
    """The next writer clears what killed ones left, and everything is sound."""
    store = storage.open(url)
    store.append_runs(*numbered(1, start=rows))
    assert store.verify() == []
    assert not list(Path(url).rglob("*.partial")), "what killed writers left is swept away"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_few_killed_writers_lose_nothing(tmp_path: Path, tally: Tally) -> None:
    kill_writers(tmp_path, tally, SAMPLE)


@pytest.mark.faults
@pytest.mark.timeout(4 * 3600)
def test_many_killed_writers_lose_nothing(tmp_path: Path, tally: Tally) -> None:
    kill_writers(tmp_path, tally, KILLS)


@pytest.fixture
def processes() -> Iterator[Processes]:
    with tempfile.TemporaryDirectory() as folder:
        found = Processes(Path(folder))
        yield found
        found.close()


@pytest.mark.faults
@pytest.mark.timeout(4 * 3600)
def test_many_killed_trainings_end_the_same(tmp_path: Path, tally: Tally, processes: Processes) -> None:
    """Each run is killed some times on its way to the end, and then compared."""
    make_store(tmp_path / "s.zarr")
    moments, lasts, phases, killed = random.Random(0), dict[str, float](), Counter[str](), 0
    for kind in KINDS:
        begun = time.monotonic()
        processes.finish(settings(tmp_path / "s.zarr", tmp_path / kind, **KINDS[kind]))
        lasts[kind] = time.monotonic() - begun
    number = 0
    while killed < KILLED_TRAININGS:
        kind, run = list(KINDS)[number % len(KINDS)], tmp_path / f"run-{number}"
        asked = settings(tmp_path / "s.zarr", run, **KINDS[kind])
        number += 1
        for _ in range(SHARES):
            (pid,) = processes.start(asked)
            time.sleep(moments.random() * lasts[kind] / SHARES)
            processes.send(pid, signal.SIGKILL)
            if processes.wait(pid) == KILLED:
                killed += 1
                reached = (run / "checkpoints" / "last.safetensors").exists()
                phases[str(checkpoint(run)["schedule"]["name"]) if reached else "before a checkpoint"] += 1
        processes.finish(asked)
        assert_same(run, tmp_path / kind)
        assert curve(run) == curve(tmp_path / kind)
        assert not list(run.rglob("*.partial"))
    tally.add("killed trainings", killed, killed)
    print(f"{killed} kills of {number} runs, by the phase of the checkpoint they left: {dict(phases)}")
    assert killed < 50 or len(phases) > 1, "all kills fell into one phase: the test has lost its point"
