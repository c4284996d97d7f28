"""A small problem with stores and configurations for the tests of training, and processes that cost little to start.

    η(x, t) = ½ + sin(3x)·(1 + t1) + t2·x²,   nature = η(x, θ) + 0.1 + 0.2x

Run as a script it is a process that has imported everything and forks one that trains for every line that it reads:
a new interpreter would need seconds to import torch and Lightning.
"""

from __future__ import annotations

import contextlib
import csv
import faulthandler
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from torch import Tensor

from storage.priors import Uniform
from storage.problem import CalibrationInput, ControlInput, Output, Problem
from storage.store import Store, create
from vcal_dist import phases, tensorfile
from vcal_dist.config import Config

Array = NDArray[np.float64]
TRUTH = (0.3, 0.7)
CHUNK = 37
PASS_ROWS = 128  # of a global batch in a pass: several batches, so that a pass has a middle
KILLED = -signal.SIGKILL
PREEMPTED = 75


# --- data -------------------------------------------------------------------------------------------------------------


def problem(outputs: int = 1) -> Problem:
    return Problem(
        name="small",
        control_inputs=(ControlInput(name="x", bounds=(0.0, 1.0)),),
        calibration_inputs=tuple(
            CalibrationInput(name=name, bounds=(0.0, 1.0), prior=Uniform(low=0.0, high=1.0)) for name in ("t1", "t2")
        ),
        outputs=tuple(Output(name=f"f{k}", missing=True) for k in range(outputs)),
    )


def simulate(x: Array, t: Array, outputs: int = 1) -> Array:
    """η and its mirror image in x, all positive: (B, outputs)."""

    def eta(x: Array) -> Array:
        return 0.5 + np.sin(3 * x) * (1 + t[:, :1]) + t[:, 1:] * x**2

    return np.concatenate([eta(x), eta(1 - x)], 1)[:, :outputs]


def generate(runs: int, observations: int, outputs: int = 1, seed: int = 0) -> dict[str, Array]:
    """Arrays by the names that `calibrate` takes."""
    rng = np.random.default_rng(seed)
    x_runs, t, x = rng.random((runs, 1)), rng.random((runs, 2)), rng.random((observations, 1))
    nature = simulate(x, np.broadcast_to(TRUTH, (observations, 2)), outputs) + 0.1 + 0.2 * x
    return {
        "x_runs": x_runs,
        "t": t,
        "z": simulate(x_runs, t, outputs) + 0.01 * rng.standard_normal((runs, outputs)),
        "x": x,
        "y": nature + 0.03 * rng.standard_normal((observations, outputs)),
    }


def make_store(
    url: Path, runs: int = 450, observations: int = 60, outputs: int = 1, chunk_rows: int = CHUNK, **options: Any
) -> Store:
    """A store of several chunks."""
    store = create(url, problem(outputs), chunk_rows=chunk_rows, **options)
    append(store, generate(runs, observations, outputs))
    return store


def append(store: Store, arrays: dict[str, Array]) -> None:
    store.append_runs(arrays["x_runs"], arrays["t"], arrays["z"])
    store.append_observations(arrays["x"], arrays["y"], arrays.get("noise"))


# --- interruptions ----------------------------------------------------------------------------------------------------


class Enough(Exception):  # noqa: N818 - not an error
    pass


class Some(Callback):
    """Lets a number of batches pass, then interrupts."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.left:
            raise Enough
        self.left -= 1


# --- configurations ---------------------------------------------------------------------------------------------------


def settings(
    store: Path | str, output: Path | str, weights: str = "collapsed", *, deep: bool = False, **sections: Any
) -> dict[str, Any]:
    """A configuration of few features and few steps; `sections` are merged into it."""
    runs, field = {"batch_runs": 100}, {"batch_observations": 25}
    fit: dict[str, Any] = {"weights": weights, "screening": 64, "starts": 2, "evaluations": 128}
    if weights == "meanfield":
        fit |= {name: {"steps": 4, **runs} for name in ("emulator_weights", "emulator")}
        fit |= {name: {"steps": 4, **runs, **field} for name in ("weights_and_theta", "everything")}
    else:
        fit |= {"emulator": {"steps": 7, **runs}, "theta": {"steps": 5, **field}, "joint": {"steps": 3, **field}}
    eta: dict[str, Any] = {"features": {"features": 12}}
    if deep:
        eta |= {"hidden": [2], "mean": "linear", "hidden_features": {"features": 6}}
    plain = {
        "store": str(store),
        "output": str(output),
        "model": {"emulator": "features", "eta": eta, "delta": {"features": {"features": 4}}},
        "fit": fit,
        "checkpoints": {"every_steps": 3, "every_seconds": None},
        "record_every": 1,
    }
    return merge(plain, sections)


def merge(base: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {k: merge(base[k], v) for k, v in other.items() if isinstance(v, dict) and isinstance(base.get(k), dict)}
    return base | other | both


def config(*arguments: Any, **sections: Any) -> Config:
    return Config.parse(settings(*arguments, **sections), "a test")


# --- results ----------------------------------------------------------------------------------------------------------


def leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a tree with their places."""
    if isinstance(tree, Tensor):
        yield key, tree
    elif isinstance(tree, dict | list | tuple):
        for name, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{key}.{name}")


def tensors(run: Path) -> dict[str, Tensor]:
    """All tensors of the posterior of a run."""
    tree = tensorfile.read(run / "posterior.safetensors")
    return dict(leaves({name: part for name, part in tree.items() if name != "record"}))


def assert_same(run: Path, other: Path) -> None:
    """Bit for bit."""
    found, expected = tensors(run), tensors(other)
    assert found.keys() == expected.keys()
    different = {
        k: float((found[k] - expected[k]).abs().max()) for k in found if not torch.equal(found[k], expected[k])
    }
    assert not different


def apart(run: Path, other: Path) -> float:
    """The largest difference between the posteriors of two runs, relative to the size of the tensor it is in."""
    found, expected = tensors(run), tensors(other)
    assert found.keys() == expected.keys()
    sizes = {k: float(v.double().abs().max()) for k, v in expected.items() if v.numel()}
    return max(float((found[k] - expected[k]).double().abs().max()) / max(size, 1e-12) for k, size in sizes.items())


def metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def curve(run: Path) -> list[tuple[str, ...]]:
    """What metrics say of every step but how long it took."""
    timed = ("seconds", "rows_per_second", "wait_fraction")
    return [tuple(value for name, value in row.items() if name not in timed) for row in metrics(run)]


def checkpoint(run: Path, name: str = "last") -> dict[str, Any]:
    found: dict[str, Any] = tensorfile.read(run / "checkpoints" / f"{name}.safetensors")
    return found


# --- processes --------------------------------------------------------------------------------------------------------


class Processes:
    """Trainings in processes of their own: started, signalled and waited for by their number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[int] = []
        self.ended: dict[int, int] = {}
        self.unread = b""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        self.server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0
        )
        assert self._read(100) == {"ready": True}

    def _read(self, timeout: float) -> Any:
        """The next line of the server, or None."""
        assert self.server.stdout is not None
        while b"\n" not in self.unread:  # a buffered reader would hide from `select` what it holds
            ready, _, _ = select.select([self.server.stdout], [], [], timeout)
            more = os.read(self.server.stdout.fileno(), 65536) if ready else b""
            if not more:
                return None
            self.unread += more
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def start(self, plain: dict[str, Any], *, ranks: int = 1, **job: Any) -> list[int]:
        """`vcal train` with this configuration; the numbers of the processes, in the order of their ranks."""
        number = len(self.started)
        path = self.folder / f"{number}.yaml"
        path.write_text(yaml.safe_dump(plain), encoding="utf-8")
        if ranks > 1:
            devices = {"devices": ranks, "accelerator": "cpu", "precision": "float64"}
            path.write_text(yaml.safe_dump(merge(plain, {"devices": devices})), encoding="utf-8")
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                job["port"] = free.getsockname()[1]
        pids = []
        for rank in range(ranks):
            log = self.folder / f"{number}.{rank}.log"
            line = json.dumps({"config": str(path), "rank": rank, "ranks": ranks, "log": str(log), **job})
            assert self.server.stdin is not None
            self.server.stdin.write(line.encode() + b"\n")
            while "started" not in (found := self._read(30)):
                self.ended[found["ended"]] = found["status"]
            pids.append(found["started"])
            self.started.append(found["started"])
            (self.folder / f"{found['started']}.log").symlink_to(log)
        return pids

    def wait(self, pid: int, timeout: float = 60) -> int | None:
        """The exit status, negative after a signal; None if it does not end."""
        end = time.monotonic() + timeout
        while pid not in self.ended:
            found = self._read(max(end - time.monotonic(), 0.0))
            if found is None:
                break
            self.ended[found["ended"]] = found["status"]
        return self.ended.get(pid)

    def send(self, pid: int, number: int) -> None:
        """Signals a process, unless it has ended."""
        if self.wait(pid, 0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def said(self, pid: int) -> str:
        return (self.folder / f"{pid}.log").read_text(encoding="utf-8", errors="replace")

    def run(self, plain: dict[str, Any], *, ranks: int = 1, **job: Any) -> list[int | None]:
        """Starts and waits; the statuses."""
        pids = self.start(plain, ranks=ranks, **job)
        return [self.wait(pid) for pid in pids]

    def finish(self, plain: dict[str, Any], *, ranks: int = 1, **job: Any) -> None:
        """Starts, waits, and insists on success."""
        pids = self.start(plain, ranks=ranks, **job)
        for pid in pids:
            assert self.wait(pid, 100) == 0, self.said(pid)[-3000:]

    def close(self) -> None:
        """Ends what is left."""
        for pid in self.started:
            if pid not in self.ended:
                os.kill(pid, signal.SIGKILL)
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait(30)
        self.server.stdout.close()


def wait_for(found: Any, timeout: float = 30) -> Any:
    """Until a function gives something true."""
    end = time.monotonic() + timeout
    while not (value := found()):
        assert time.monotonic() < end, f"waited {timeout} s in vain"
        time.sleep(0.01)
    return value


# --- inside those processes -------------------------------------------------------------------------------------------


def serve() -> None:
    """Forks a process that trains for every line of standard input."""
    import lightning.pytorch
    import rich.progress
    import tensorboardX

    import jobs.commands.train
    import vcal_dist.training

    assert all((lightning.pytorch, rich.progress, tensorboardX, jobs.commands.train, vcal_dist.training))
    torch.set_num_threads(1)
    print(json.dumps({"ready": True}), flush=True)
    running = set()
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], 0.01)
        if readable:
            line = sys.stdin.readline()
            if not line:
                break
            pid = os.fork()
            if pid == 0:
                _child(json.loads(line))
            running.add(pid)
            print(json.dumps({"started": pid}), flush=True)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            running.remove(pid)
            print(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}), flush=True)


def _child(job: dict[str, Any]) -> None:
    """`vcal train`, with its output in a file; it never returns."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(number, target)
    faulthandler.register(signal.SIGUSR1)  # says where it is
    status: Any = 1
    try:
        _prepare(job)
        import jobs.cli

        jobs.cli.main(["train", job["config"]])
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        traceback.print_exc()
    if "trace" in job:
        tensorfile.write(f"{job['trace']}.{job['rank']}", TRACE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def _prepare(job: dict[str, Any]) -> None:
    from lightning.pytorch.utilities import rank_zero_only

    small_passes(job.get("pass_rows", PASS_ROWS))
    if job["ranks"] > 1:  # as a launcher such as torchrun would have done before anything was imported
        names = {"LOCAL_RANK": job["rank"], "WORLD_SIZE": job["ranks"], "NODE_RANK": 0, "MASTER_PORT": job["port"]}
        os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
        known: Any = rank_zero_only
        known.rank = job["rank"]
    if "trace" in job:
        _trace()
    if "fault" in job:
        FAULTS[job["fault"]](**job.get("fault_options", {}))


def small_passes(rows: int) -> None:
    """Passes of several batches."""
    phases.PASS_ROWS = rows
    phases.Compress.feed = phases.Feed(rows, None, None)


TRACE: list[dict[str, Any]] = []


def _trace() -> None:
    """Keeps every step's loss to the last bit, and of the first steps of a stage gradients and parameters."""
    from vcal_dist.schedule import Schedule

    owner: Any = Schedule
    step = owner.step

    def traced(schedule: Schedule, *arguments: Any) -> Any:
        outcome, phase = step(schedule, *arguments), schedule.phase
        assert phase is not None
        found: dict[str, Any] = {"phase": phase.name, "loss": outcome.loss, "votes": list(outcome.votes)}
        if isinstance(phase, phases.Descent) and phase.done <= 3:
            found["gradients"] = [p.grad.clone() for p in phase.parameters if p.grad is not None]
            found["parameters"] = [p.detach().clone() for p in phase.parameters]
            if phase.stage.learned is not None:
                found["learned"] = {name: value.clone() for name, value in phase.stage.learned.state_dict().items()}
        TRACE.append(found)
        return outcome

    owner.step = traced


def _diverge(steps: int, how: str) -> None:
    """The emulator's loss is nan, or rises, from a step on."""
    owner: Any = phases.Descent
    init = owner.__init__

    def spoilt(self: phases.Descent, *arguments: Any) -> None:
        init(self, *arguments)
        loss = self.stage.loss
        if self.name == "emulator":
            slope = torch.nan if how == "nan" else 40.0
            self.stage.loss = lambda runs, field, n: loss(runs, field, n) + (slope * (n - steps) if n >= steps else 0)

    owner.__init__ = spoilt


def _die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_while_writing(name: str, count: int) -> None:
    """Killed when the `count`-th file of this name is on disk, but not yet in its place."""
    owner: Any = Path
    replace, seen = owner.replace, [0]

    def dying(path: Path, target: Any) -> Any:
        if Path(target).name == name:
            seen[0] += 1
            if seen[0] == count:
                _die()
        return replace(path, target)

    owner.replace = dying


def _die_at(steps: int | None = None, phase: str | None = None, batch: int = 0) -> None:
    """Killed before a batch: the one after so many steps, or one of a phase."""
    from vcal_dist.schedule import Schedule

    owner: Any = Schedule
    step = owner.step

    def dying(schedule: Schedule, *arguments: Any) -> Any:
        here = schedule.phase is not None and schedule.phase.name == phase and schedule.batch == batch
        if schedule.steps == steps or here:
            _die()
        return step(schedule, *arguments)

    owner.step = dying


def _die_in(module: str, function: str) -> None:
    """Killed on the way into a function."""
    import importlib

    setattr(importlib.import_module(module), function, _die)


FAULTS: dict[str, Any] = {"while writing": _die_while_writing, "at": _die_at, "in": _die_in, "diverge": _diverge}


if __name__ == "__main__":
    serve()
