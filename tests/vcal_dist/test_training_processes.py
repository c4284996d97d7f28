"""Several processes train what one trains, stop together, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.vcal_dist.training_kit import (
    PREEMPTED,
    Processes,
    apart,
    assert_same,
    checkpoint,
    curve,
    leaves,
    make_store,
    metrics,
    settings,
    wait_for,
)
from vcal_dist import __main__ as program
from vcal_dist import tensorfile
from vcal_dist.errors import Diverged, ModelError, Preempted

FLOAT64: dict[str, Any] = {"devices": {"precision": "float64"}}
CASES: dict[str, dict[str, Any]] = {
    "collapsed": {},
    "stacked": {"model": {"emulator": "stacked"}},
    "collapsed deep general": {"deep": True, "model": {"discrepancy": "general"}},
    "fullrank": {"weights": "fullrank", "fit": {"free_emulator": True}},
    "fullrank deep": {"weights": "fullrank", "deep": True, "model": {"likelihood_y": {"kind": "student_t"}}},
    "meanfield": {"weights": "meanfield"},
    "meanfield deep general": {"weights": "meanfield", "deep": True, "model": {"discrepancy": "general"}},
}
# Here the first gradients of the hidden layers are zero but for rounding, 10⁻¹¹, and Adam divides them by their size.
SENSITIVE = ("fullrank deep",)
Trained = Callable[..., tuple[Path, list[list[dict[str, Any]]]]]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """13 blocks of runs and 2 of observations, or one of each: fewer than there are processes."""
    folder = tmp_path_factory.mktemp("data")
    for name, rows in (("blocks", 37), ("one block", 1000)):
        make_store(folder / name, chunk_rows=rows)
    return {name: folder / name for name in ("blocks", "one block")}


@pytest.fixture(scope="module")
def trained(processes: Processes, stores: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of a case on so many processes, and what each of them saw in every step."""
    folder = tmp_path_factory.mktemp("trained")

    def found(case: str, ranks: int, store: str = "blocks") -> tuple[Path, list[list[dict[str, Any]]]]:
        run = folder / f"{case} {ranks} {store}"
        if not run.exists():
            fit = {"starts": 1} if "deep" in case else {}
            asked = settings(stores[store], run, **FLOAT64 | CASES[case] | {"fit": CASES[case].get("fit", fit)})
            processes.finish(asked, ranks=ranks, trace=f"{run}.trace")
        return run, [tensorfile.read(f"{run}.trace.{rank}") for rank in range(ranks)]

    return found


def assert_close(found: Any, expected: Any, tolerance: float) -> None:
    """Relative to the largest number: some gradients are zero but for rounding."""
    pairs = [(a, b) for (_, a), (_, b) in zip(leaves(found), leaves(expected), strict=True) if a.numel()]
    assert pairs
    size = max(float(wanted.abs().max()) for _, wanted in pairs)
    assert max(float((value - wanted).abs().max()) for value, wanted in pairs) <= tolerance * size


@pytest.mark.parametrize(
    ("case", "ranks", "store"),
    [
        *((case, 2, "blocks") for case in CASES),
        ("collapsed", 3, "blocks"),  # uneven, and one without observations
        ("fullrank", 3, "one block"),
        ("meanfield", 2, "one block"),
    ],
)
def test_several_processes_train_what_one_trains(trained: Trained, case: str, ranks: int, store: str) -> None:
    one, (expected,) = trained(case, 1, store)
    several, (first, *others) = trained(case, ranks, store)
    assert [step["phase"] for step in first] == [step["phase"] for step in expected]
    for other in others:  # every process has the same loss, gradients and parameters, to the last bit
        assert [step["loss"] for step in other] == [step["loss"] for step in first]
        for (name, value), (_, same) in zip(leaves(other), leaves(first), strict=True):
            assert torch.equal(value, same), name
    loss, state, end = (1e-2, 1e-2, 0.1) if case in SENSITIVE else (1e-8, 1e-7, 1e-6)
    for step, wanted in zip(first, expected, strict=True):
        if wanted["loss"] is not None:
            assert step["loss"] == pytest.approx(wanted["loss"], rel=loss, abs=loss)
    for part in ("gradients", "parameters"):
        assert_close(first[0][part], expected[0][part], 1e-10)
    stages = [(step, wanted) for step, wanted in zip(first, expected, strict=True) if "parameters" in wanted]
    assert len({wanted["phase"] for _, wanted in stages}) >= 3
    for step, wanted in stages:
        for part in ("gradients", "parameters", "learned"):
            if wanted.get(part):
                assert_close(step[part], wanted[part], state)
    assert apart(several, one) < end
    assert [row["step"] for row in metrics(several)] == [row["step"] for row in metrics(one)]


# --- signals ----------------------------------------------------------------------------------------------------------


def test_a_training_that_is_told_to_stop_ends_with_75_and_goes_on(
    processes: Processes, stores: dict[str, Path], tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    fit = {"emulator": {"steps": 200}, "starts": 1}
    asked = settings(stores["blocks"], run, fit=fit, checkpoints={"every_steps": None})
    (pid,) = processes.start(asked)
    wait_for(lambda: (run / "metrics.csv").exists() and len(metrics(run)) > 5)
    processes.send(pid, signal.SIGTERM)
    assert processes.wait(pid) == PREEMPTED
    said = processes.said(pid)
    assert "the same command goes on from there" in said
    steps = checkpoint(run)["schedule"]["steps"]
    assert f"after step {steps};" in " ".join(said.split())
    assert 5 < steps < 200
    processes.finish(asked)
    assert f"going on after step {steps}" in processes.said(processes.started[-1])
    processes.finish(settings(stores["blocks"], whole, fit=fit))
    assert_same(run, whole)
    assert curve(run) == curve(whole)


@pytest.mark.parametrize("told", [0, 1])
def test_processes_stop_together_when_one_is_told_to(
    processes: Processes, stores: dict[str, Path], tmp_path: Path, told: int
) -> None:
    run, trace = tmp_path / "run", tmp_path / "trace"
    fit = {"emulator": {"steps": 100}, "starts": 1}
    asked = settings(stores["blocks"], run, **FLOAT64, fit=fit, checkpoints={"every_steps": None})
    pids = processes.start(asked, ranks=2, trace=str(trace))
    wait_for(lambda: (run / "metrics.csv").exists() and len(metrics(run)) > 5)
    processes.send(pids[told], signal.SIGTERM)
    assert [processes.wait(pid) for pid in pids] == [PREEMPTED, 0]  # the first one speaks for all
    taken = [len(tensorfile.read(f"{trace}.{rank}")) for rank in range(2)]
    assert taken[0] == taken[1] == checkpoint(run)["schedule"]["steps"] < 100
    if told:
        processes.finish(asked, ranks=2)
        processes.finish(settings(stores["blocks"], tmp_path / "whole", **FLOAT64, fit=fit), ranks=2)
        assert_same(run, tmp_path / "whole")


@pytest.mark.parametrize("how", ["nan", "rising"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_that_diverges_ends_on_all_processes(
    processes: Processes, stores: dict[str, Path], tmp_path: Path, ranks: int, how: str
) -> None:
    asked = settings(stores["blocks"], tmp_path / "run", **FLOAT64, fit={"emulator": {"steps": 100}})
    pids = processes.start(asked, ranks=ranks, fault="diverge", fault_options={"steps": 25, "how": how})
    assert [processes.wait(pid, 30) for pid in pids] == [1, 0][:ranks]
    said = " ".join(processes.said(pids[0]).split())
    expected = "'emulator' is nan in step 25" if how == "nan" else "'emulator' diverges: its loss, smoothed, has risen"
    assert expected in said
    assert "Traceback" not in said
    assert "the last good checkpoint is in" in said
    state = checkpoint(tmp_path / "run")["schedule"]
    assert state["steps"] == 24 if how == "nan" else 25 < state["steps"] < 50
    assert all(bool(value.isfinite().all()) for _, value in leaves(state))


# --- as Lightning starts them -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def command(asked: dict[str, Any], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`vcal train` in a new interpreter, which starts the other processes itself; they end with the test."""
    path = folder / "asked.yaml"
    path.write_text(yaml.safe_dump(asked), encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / "said.txt").open("wb") as said:
        started = subprocess.Popen(
            [sys.executable, "-m", "jobs.cli", "train", str(path)],
            stdout=said,
            stderr=said,
            env=environment,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
def test_a_signal_to_one_process_ends_all_that_the_command_has_started(stores: dict[str, Path], tmp_path: Path) -> None:
    """To another than the first, whose status counts."""
    run, devices = tmp_path / "run", {"devices": 2, "accelerator": "cpu"}
    asked = settings(stores["blocks"], run, fit={"emulator": {"steps": 100_000}}, devices=devices)
    with command(asked, tmp_path) as started:
        wait_for(lambda: (run / "metrics.csv").exists() and len(metrics(run)) > 5, 60)
        (other,) = children(started.pid)
        os.kill(other, signal.SIGTERM)
        assert started.wait(30) == PREEMPTED
        wait_for(lambda: not is_alive(other), 10)
    steps = checkpoint(run)["schedule"]["steps"]
    assert [int(row["step"]) for row in metrics(run)] == list(range(1, steps + 1))


@pytest.mark.slow
def test_a_command_whose_training_diverges_ends_with_1_and_all_its_processes(
    stores: dict[str, Path], tmp_path: Path
) -> None:
    run, devices = tmp_path / "run", {"devices": 2, "accelerator": "cpu"}
    fit = {"emulator": {"steps": 100, "rate": 0.01}, "theta": {"steps": 50, "rate": 0.01}, "discrepancy_rate": 1e6}
    with command(settings(stores["blocks"], run, fit=fit, devices=devices, record_every=1), tmp_path) as started:
        wait_for(lambda: (run / "metrics.csv").exists(), 60)
        (other,) = children(started.pid)
        assert started.wait(60) == 1
        wait_for(lambda: not is_alive(other), 10)
    said = " ".join((tmp_path / "said.txt").read_text().split())
    assert said.count("error: the loss of stage 'theta'") == 1
    assert "Traceback" not in said
    assert checkpoint(run)["schedule"]["steps"] >= 100


@pytest.mark.parametrize(
    ("raised", "rank", "expected"),
    [
        (None, 0, 0),
        (Preempted("stopped", signal.SIGTERM), 0, PREEMPTED),
        (Preempted("stopped", signal.SIGINT), 0, 130),
        (Preempted("stopped", signal.SIGTERM), 1, 0),
        (Diverged("away"), 0, "error: away"),
        (Diverged("away"), 1, 0),
        (ModelError("wrong"), 0, "error: wrong"),
        (ModelError("wrong"), 1, "error: wrong"),  # which no other process may know of
    ],
)
def test_the_module_ends_with_a_status_for_every_end(
    stores: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    raised: Exception | None,
    rank: int,
    expected: int | str,
) -> None:
    def trained(_: Any, *, progress: bool) -> None:
        assert progress
        if raised is not None:
            raise raised

    monkeypatch.setattr(program, "train", trained)
    monkeypatch.setattr(program, "is_first", lambda: rank == 0)
    path = tmp_path / "asked.yaml"
    path.write_text(yaml.safe_dump(settings(stores["blocks"], tmp_path / "run")), encoding="utf-8")
    assert program.main(str(path)) == expected


def test_nothing_is_left_behind(processes: Processes) -> None:
    time.sleep(0.1)
    assert [pid for pid in processes.started if processes.wait(pid, 5) is None] == []
