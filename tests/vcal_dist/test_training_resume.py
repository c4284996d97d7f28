"""A training that was stopped, anywhere and by anything, ends with the same numbers as one that was not."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.store import open_store
from tests.vcal_dist.training_kit import (
    KILLED,
    PASS_ROWS,
    Enough,
    Processes,
    Some,
    apart,
    append,
    assert_same,
    checkpoint,
    config,
    curve,
    generate,
    make_store,
    metrics,
    settings,
    small_passes,
    wait_for,
)
from vcal_dist import phases
from vcal_dist.posterior import Posterior
from vcal_dist.training import train

KINDS: dict[str, dict[str, Any]] = {
    "collapsed": {},
    "stacked": {"model": {"emulator": "stacked"}},
    "fullrank": {
        "weights": "fullrank",
        "model": {"likelihood_y": {"kind": "student_t"}, "varying_residual": True},
        "fit": {"free_emulator": True},
    },
    "meanfield": {"weights": "meanfield"},
    "deep": {"deep": True, "model": {"discrepancy": "general"}, "fit": {"starts": 1}},
}
Whole = Callable[[str], Path]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("data") / "s.zarr"
    make_store(url)
    return url


@pytest.fixture(scope="module", autouse=True)
def passes_of_several_batches() -> Any:
    before = phases.PASS_ROWS, phases.Compress.feed
    small_passes(PASS_ROWS)
    yield
    phases.PASS_ROWS, phases.Compress.feed = before


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Whole:
    """An uninterrupted run of a kind, trained once."""
    folder = tmp_path_factory.mktemp("whole")

    def found(kind: str) -> Path:
        if not (folder / kind).exists():
            train(config(store, folder / kind, **KINDS[kind]), progress=False)
        return folder / kind

    return found


def assert_as_if_never_stopped(run: Path, whole: Path) -> None:
    assert_same(run, whole)
    assert curve(run) == curve(whole)  # every step once, in order, with the same losses
    seconds = [float(row["seconds"]) for row in metrics(run)]
    assert seconds == sorted(seconds)
    assert Posterior.load(run).record["seconds"] > seconds[-1]  # what earlier attempts took is counted
    assert not list(run.rglob("*.partial"))
    assert (run / "posterior.nc").exists()


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "batches"), [("collapsed", 1), ("stacked", 2), ("fullrank", 3), ("meanfield", 1), ("deep", 4)]
)
def test_every_batch_is_a_place_to_stop(store: Path, tmp_path: Path, whole: Whole, kind: str, batches: int) -> None:
    """Each attempt takes one batch, or a few; rows are streamed in one and resident in the next."""
    run, attempts = tmp_path / "run", 0
    while not (run / "posterior.safetensors").exists():
        sections = {"checkpoints": {"every_steps": 1}, "data": {"resident": attempts % 2 == 0}}
        try:
            train(config(store, run, **KINDS[kind], **sections), progress=False, callbacks=[Some(batches)])
        except Enough:
            attempts += 1
    assert attempts >= 10
    assert_as_if_never_stopped(run, whole(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_and_resident_rows_give_the_same_posterior(
    store: Path, tmp_path: Path, whole: Whole, kind: str
) -> None:
    """Whole tables fit the budget of the other run, so that they stayed; here windows of few blocks pass."""
    data = {"resident": False, "memory": 120_000}
    run = tmp_path / "run"
    train(config(store, run, **KINDS[kind], data=data), progress=False)
    assert_same(run, whole(kind))


# --- killed processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "seed"), [("collapsed", 1), ("fullrank", 2), ("meanfield", 3), ("deep", 4)])
def test_a_training_that_is_killed_at_random_moments_ends_the_same(
    processes: Processes, store: Path, tmp_path: Path, whole: Whole, kind: str, seed: int
) -> None:
    run, moments, killed, reached = tmp_path / "run", random.Random(seed), 0, []
    asked = settings(store, run, **KINDS[kind], data={"resident": bool(seed % 2)})
    for _ in range(4):
        (pid,) = processes.start(asked)
        time.sleep(0.2 + 0.4 * moments.random())
        processes.send(pid, signal.SIGKILL)
        killed += processes.wait(pid) == KILLED
        if (run / "checkpoints" / "last.safetensors").exists():
            reached.append(checkpoint(run)["schedule"]["steps"])
    processes.finish(asked)
    assert_as_if_never_stopped(run, whole(kind))
    assert killed >= 2, "the test has lost its point: training ends before it is killed"
    assert reached == sorted(reached)


# In the order in which a run comes to them.
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "while writing the configuration": ("while writing", {"name": "config.yaml", "count": 1}),
    "while writing the counts of rows": ("while writing", {"name": "rows.json", "count": 1}),
    "before the first batch": ("at", {"steps": 0}),
    "before the first checkpoint": ("at", {"steps": 2}),
    "while writing the first best": ("while writing", {"name": "best.safetensors", "count": 1}),
    "while writing the first checkpoint": ("while writing", {"name": "last.safetensors", "count": 1}),
    "in a stage": ("at", {"steps": 5}),
    "while writing a checkpoint": ("while writing", {"name": "last.safetensors", "count": 2}),
    "after a stage": ("at", {"phase": "compression", "batch": 0}),
    "in the middle of a pass": ("at", {"phase": "compression", "batch": 2}),
    "in the screening": ("in", {"module": "vcal_dist.schedule", "function": "screen_theta"}),
    "in the closing": ("at", {"phase": "closing", "batch": 0}),
    "in the refinement": ("in", {"module": "vcal_dist.exact_refinement", "function": "adapt"}),
    "in the assessment": ("in", {"module": "vcal_dist.training", "function": "assess_observations"}),
    "while writing draws": ("while writing", {"name": "posterior.nc", "count": 1}),
    "while writing the posterior": ("while writing", {"name": "posterior.safetensors", "count": 1}),
}


def test_a_training_that_is_killed_in_every_bad_moment_ends_the_same(
    processes: Processes, store: Path, tmp_path: Path, whole: Whole
) -> None:
    run = tmp_path / "run"
    for moment, (fault, options) in FAULTS.items():
        assert processes.run(settings(store, run), fault=fault, fault_options=options) == [KILLED], moment
        assert not (run / "posterior.safetensors").exists()
    processes.finish(settings(store, run))
    assert_as_if_never_stopped(run, whole("collapsed"))


def test_a_training_killed_while_it_takes_up_its_records_keeps_them(
    processes: Processes, store: Path, tmp_path: Path, whole: Whole
) -> None:
    asked = settings(store, tmp_path / "run", "meanfield")
    for fault, options in (("at", {"steps": 9}), ("while writing", {"name": "metrics.csv", "count": 1})):
        assert processes.run(asked, fault=fault, fault_options=options) == [KILLED]
    processes.finish(asked)
    assert_as_if_never_stopped(tmp_path / "run", whole("meanfield"))


@pytest.mark.parametrize("moment", ["before the first checkpoint", "in the middle of a pass"])
def test_rows_that_come_between_the_attempts_change_nothing(
    processes: Processes, tmp_path: Path, whole: Whole, moment: str
) -> None:
    url, run = tmp_path / "s.zarr", tmp_path / "run"
    make_store(url)
    fault, options = FAULTS[moment]
    assert processes.run(settings(url, run), fault=fault, fault_options=options) == [KILLED]
    append(open_store(url), generate(200, 30, seed=5))
    processes.finish(settings(url, run))
    assert_as_if_never_stopped(run, whole("collapsed"))
    assert Posterior.load(run).record["rows"] == {"runs": 450, "observations": 60}


# --- another number of processes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole64(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Whole:
    folder = tmp_path_factory.mktemp("whole64")

    def found(kind: str) -> Path:
        if not (folder / kind).exists():
            train(config(store, folder / kind, **KINDS[kind], devices={"precision": "float64"}), progress=False)
        return folder / kind

    return found


@pytest.mark.parametrize(("kind", "ranks"), [("collapsed", (1, 2, 1)), ("fullrank", (2, 1, 3))])
def test_a_training_goes_on_with_another_number_of_processes(
    processes: Processes, store: Path, tmp_path: Path, whole64: Whole, kind: str, ranks: tuple[int, ...]
) -> None:
    """Killed in the emulator's stage, in the middle of a pass, and not any more."""
    run = tmp_path / "run"
    asked = settings(store, run, **KINDS[kind], devices={"precision": "float64"}, checkpoints={"every_steps": 1})
    second = "compression" if kind == "collapsed" else "settling"
    moments: list[dict[str, Any]] = [{"steps": 4}, {"phase": second, "batch": 2}]
    for count, options in zip(ranks, moments, strict=False):
        pids = processes.start(asked, ranks=count, fault="at", fault_options=options)
        assert [processes.wait(pid) for pid in pids] == [KILLED] * count
    assert checkpoint(run)["schedule"]["batch"] == 2
    processes.finish(asked, ranks=ranks[-1])
    assert apart(run, whole64(kind)) < 1e-7
    steps = [int(row["step"]) for row in metrics(run)]
    assert steps == [int(row["step"]) for row in metrics(whole64(kind))]


def test_a_process_that_dies_takes_the_others_with_it(processes: Processes, store: Path, tmp_path: Path) -> None:
    for victim in (0, 1):
        run = tmp_path / str(victim)
        pids = processes.start(settings(store, run, fit={"emulator": {"steps": 100_000}}), ranks=2)
        wait_for((run / "checkpoints" / "last.safetensors").exists)
        processes.send(pids[victim], signal.SIGKILL)
        assert processes.wait(pids[victim]) == KILLED
        assert processes.wait(pids[1 - victim], 30) not in (0, None)
