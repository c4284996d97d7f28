"""Checkpoints: when they are written, that the best is the best, that none of them is of a training gone wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from storage.store import create
from tests.vcal_dist.training_kit import (
    CHUNK,
    append,
    assert_same,
    checkpoint,
    config,
    generate,
    leaves,
    make_store,
    problem,
    small_passes,
    tensors,
)
from vcal_dist import checkpoints, phases, tensorfile
from vcal_dist.errors import Diverged, Preempted
from vcal_dist.module import CalibrationModule
from vcal_dist.phases import Descent
from vcal_dist.schedule import Schedule
from vcal_dist.training import train

Written = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("data") / "s.zarr"
    make_store(url)
    return url


@pytest.fixture(autouse=True)
def passes_of_several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((phases, "PASS_ROWS"), (phases.Compress, "feed")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    small_passes(128)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Written:
    """Every checkpoint of a training, in the order of their writing."""
    found: Written = []

    def write(path: Path, tree: Any) -> None:
        tensorfile.write(path, tree)
        found.append((path.stem, tensorfile.read(path)))

    monkeypatch.setattr(checkpoints, "tensorfile", SimpleNamespace(write=write))
    return found


class Interruption(Exception):  # noqa: N818 - not an error
    pass


class At(Callback):
    """Does something before the batch after so many steps."""

    def __init__(self, steps: int, do: Callable[[], Any]) -> None:
        self.steps, self.do = steps, do

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(module, CalibrationModule)
        if module.schedule.steps == self.steps:
            self.do()


def interrupt() -> None:
    raise Interruption


def steps_of(written: Written, name: str = "last") -> list[int]:
    return [state["schedule"]["steps"] for which, state in written if which == name]


# --- when -------------------------------------------------------------------------------------------------------------

ENDS = [7, 11, 16]  # of the emulator, of the compression (450 runs by 128), of θ; then passes of one batch each


@pytest.mark.parametrize("every", [1, 3, 4, None])
def test_checkpoints_come_every_so_many_steps_and_after_every_phase(
    store: Path, tmp_path: Path, written: Written, every: int | None
) -> None:
    settings = {"every_steps": every, "every_seconds": None}
    train(config(store, tmp_path / "run", checkpoints=settings), progress=False)
    found = steps_of(written)
    numbers = [state["schedule"]["number"] for which, state in written if which == "last"]
    last = found[-1]
    assert set(ENDS) <= set(found)
    assert set(numbers) - {0} == {1, 3, 4, 5, 7}  # every phase that takes rows but the first has its beginning
    if every is None:
        assert len(found) == 5
        assert found[:3] == ENDS
    else:
        assert set(range(every, last, every)) <= set(found)
        assert all(step % every == 0 for step in found if step < 16 and step not in ENDS)
    assert found == sorted(found)


def test_checkpoints_come_every_so_many_seconds(
    store: Path, tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    step = Schedule.step

    def slow(schedule: Schedule, *arguments: Any) -> Any:
        now[0] += 1.0
        return step(schedule, *arguments)

    monkeypatch.setattr(Schedule, "step", slow)
    monkeypatch.setattr(checkpoints, "time", SimpleNamespace(monotonic=lambda: now[0]))
    settings = {"every_steps": None, "every_seconds": 3.0}
    train(config(store, tmp_path / "run", checkpoints=settings), progress=False)
    # Voted for before a step and written after it; the end of a phase sets the clock back.
    assert steps_of(written)[:6] == [4, 7, 11, 15, 16, 20]


# --- the best ---------------------------------------------------------------------------------------------------------


def smoothed(state: dict[str, Any]) -> tuple[int, float]:
    return state["schedule"]["number"], state["schedule"]["phase"]["smooth"]


@pytest.mark.parametrize("stop", [None, 4, 6])
def test_the_best_has_the_lowest_smoothed_loss_of_its_stage(
    store: Path, tmp_path: Path, written: Written, monkeypatch: pytest.MonkeyPatch, stop: int | None
) -> None:
    """Also after training went on: a worse checkpoint that comes later must not take its place."""
    losses = [3.0, 2.0, 1.0, 4.0, 5.0, 6.0, 7.0]
    judge = Descent._judge
    monkeypatch.setattr(
        Descent, "_judge", lambda self, loss: judge(self, losses[self.done] if self.name == "emulator" else loss)
    )
    settings = config(store, tmp_path / "run", checkpoints={"every_steps": 1, "every_seconds": None})
    if stop is not None:
        with pytest.raises(Interruption):
            train(settings, progress=False, callbacks=[At(stop, interrupt)])
    with pytest.raises(Interruption):
        train(settings, progress=False, callbacks=[At(9, interrupt)])  # in the compression, which has no loss
    lasts = [state for which, state in written if which == "last" and state["schedule"]["number"] == 0]
    assert [round(smoothed(state)[1], 3) for state in lasts] == [3.0, 2.9, 2.71, 2.839, 3.055, 3.35]
    assert smoothed(checkpoint(tmp_path / "run", "best")) == min(map(smoothed, lasts))
    assert steps_of(written, "best") == [1, 2, 3]


def test_every_stage_has_a_best_of_its_own(store: Path, tmp_path: Path, written: Written) -> None:
    settings = {"every_steps": 1, "every_seconds": None}
    train(config(store, tmp_path / "run", checkpoints=settings), progress=False)
    best = [smoothed(state) for which, state in written if which == "best"]
    stages = {number for number, _ in best}
    assert stages == {0, 3, 5}  # emulator, θ, joint
    assert smoothed(checkpoint(tmp_path / "run", "best"))[0] == 5
    for stage in stages:
        falling = [loss for number, loss in best if number == stage]
        assert falling == sorted(falling, reverse=True)


def test_no_best_is_kept_unless_asked_for(store: Path, tmp_path: Path) -> None:
    train(config(store, tmp_path / "run", checkpoints={"keep_best": False}), progress=False)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["last.safetensors"]


# --- training gone wrong ----------------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, stage: str, step: int, how: Callable[[Tensor, int], Tensor]) -> None:
    """Changes the loss of a stage from a step on."""
    init = Descent.__init__

    def spoilt(self: Descent, of: Any, *arguments: Any) -> None:
        init(self, of, *arguments)
        loss = self.stage.loss
        if self.name == stage:
            self.stage.loss = lambda runs, field, n: how(loss(runs, field, n), n) if n >= step else loss(runs, field, n)

    monkeypatch.setattr(Descent, "__init__", spoilt)


def assert_finite(run: Path) -> None:
    state = checkpoint(run)
    assert all(bool(value.isfinite().all()) for _, value in leaves(state["schedule"]))


@pytest.mark.parametrize("stage", ["emulator", "theta", "joint"])
def test_a_loss_that_is_not_finite_ends_training_by_stage_and_step(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    spoil(monkeypatch, stage, 2, lambda loss, _: loss * torch.nan)
    settings = config(store, tmp_path / "run", checkpoints={"every_steps": 1, "every_seconds": None})
    with pytest.raises(Diverged, match=rf"stage '{stage}' is nan in step 2; lower .* checkpoint is in .*checkpoints"):
        train(settings, progress=False)
    assert checkpoint(tmp_path / "run")["schedule"]["phase"]["done"] == 2
    assert_finite(tmp_path / "run")


def test_a_gradient_that_is_not_finite_leaves_the_checkpoint_before(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of that step is finite still, and a checkpoint is due right after it."""
    once, whole = tmp_path / "run", tmp_path / "whole"
    settings: dict[str, Any] = {"checkpoints": {"every_steps": 1, "every_seconds": None}}
    with monkeypatch.context() as patch:
        spoil(patch, "emulator", 3, lambda loss, _: loss + 0 * (loss - loss.detach()).abs().sqrt())
        with pytest.raises(Diverged, match="stage 'emulator' has no value in step 4"):
            train(config(store, once, **settings), progress=False)
    assert checkpoint(once)["schedule"]["steps"] == 3
    assert_finite(once)
    for run in (once, whole):
        train(config(store, run, **settings), progress=False)
    assert_same(once, whole)


def test_a_loss_that_only_rises_ends_training_too(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, "emulator", 20, lambda loss, n: loss + 40.0 * (n - 20))
    settings = config(store, tmp_path / "run", fit={"emulator": {"steps": 60}})
    with pytest.raises(Diverged, match=r"stage 'emulator' diverges: its loss, smoothed, has risen from .* in step \d+"):
        train(settings, progress=False)
    assert 20 < checkpoint(tmp_path / "run")["schedule"]["steps"] < 40
    assert_finite(tmp_path / "run")


@pytest.mark.parametrize(
    ("weights", "stage"),
    [("collapsed", "emulator"), ("fullrank", "joint"), ("meanfield", "everything")],
)
def test_a_rate_that_is_much_too_high_is_noticed(store: Path, tmp_path: Path, weights: str, stage: str) -> None:
    settings = config(
        store,
        tmp_path / "run",
        weights,
        fit={stage: {"steps": 60, "rate": 1e4}},
        checkpoints={"every_steps": 1, "every_seconds": None},
    )
    with pytest.raises(Diverged, match=rf"stage '{stage}' .*in step \d+; lower its learning rate"):
        train(settings, progress=False)
    assert_finite(tmp_path / "run")


def test_an_outlier_beyond_all_measure_is_noticed(tmp_path: Path) -> None:
    arrays = generate(450, 60)
    arrays["y"][30] = 1e30
    append(create(tmp_path / "s.zarr", problem(), chunk_rows=CHUNK), arrays)
    with pytest.raises(Diverged, match=r"stage 'theta' .*in step \d+; lower .*check the data for outliers"):
        train(config(tmp_path / "s.zarr", tmp_path / "run"), progress=False)
    assert_finite(tmp_path / "run")


def test_a_last_step_that_loses_its_numbers_is_noticed(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loss follows that would tell."""
    spoil(monkeypatch, "emulator", 6, lambda loss, _: loss + 0 * (loss - loss.detach()).abs().sqrt())
    with pytest.raises(Diverged, match="stage 'emulator' has lost its numbers in its last step, 6"):
        train(config(store, tmp_path / "run"), progress=False)


def test_signals_and_files_are_given_back_after_an_exception(store: Path, tmp_path: Path) -> None:
    before, opened = handlers(), list[str]()

    def interrupt() -> None:
        opened.extend(path.name for path in open_files())
        raise Interruption

    with pytest.raises(Interruption):
        train(config(store, tmp_path / "run"), progress=False, callbacks=[At(4, interrupt)])
    assert handlers() == before
    assert "metrics.csv" in opened
    assert not [path for path in open_files() if tmp_path in path.parents]


def open_files() -> list[Path]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(link.readlink())
    return found


# --- signals ----------------------------------------------------------------------------------------------------------


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("steps", [0, 3, 6, 7, 9, 20])  # in the first batch, in the last of a leg, in a pass
def test_a_signal_ends_after_the_step_under_way(store: Path, tmp_path: Path, steps: int, number: int) -> None:
    before, run = handlers(), tmp_path / "run"
    settings = config(store, run, checkpoints={"every_steps": None, "every_seconds": None})
    with pytest.raises(Preempted, match=f"after step {steps + 1}; the same command goes on") as raised:
        train(settings, progress=False, callbacks=[At(steps, lambda: os.kill(os.getpid(), number))])
    assert raised.value.signal == number
    assert handlers() == before
    assert checkpoint(run)["schedule"]["steps"] == steps + 1


def test_a_signalled_training_goes_on_to_the_same_end(store: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(config(store, whole), progress=False)
    for steps in (2, 9, 14, 20):
        with pytest.raises(Preempted):
            train(
                config(store, stopped),
                progress=False,
                callbacks=[At(steps, lambda: os.kill(os.getpid(), signal.SIGTERM))],
            )
    train(config(store, stopped), progress=False)
    assert_same(stopped, whole)


def test_a_second_interrupt_ends_at_once(store: Path, tmp_path: Path) -> None:
    before = handlers()

    def twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        train(config(store, tmp_path / "run"), progress=False, callbacks=[At(4, twice)])
    assert checkpoint(tmp_path / "run")["schedule"]["steps"] == 3
    assert handlers() == before


def test_training_outside_the_main_thread_leaves_signals_alone(store: Path, tmp_path: Path) -> None:
    before, seen = handlers(), []
    settings = config(store, tmp_path / "run", "meanfield")
    thread = threading.Thread(
        target=lambda: train(settings, progress=False, callbacks=[At(3, lambda: seen.append(handlers()))])
    )
    thread.start()
    thread.join()
    assert seen == [before]
    assert tensors(tmp_path / "run")
