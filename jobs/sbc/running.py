"""Replicates that are missing, in processes of this machine or as tasks of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from jobs.sbc import simulator
from jobs.sbc.directory import Asked, read, write
from jobs.workers import in_processes
from vcal_dist.errors import ConfigError, Preempted

if TYPE_CHECKING:
    from vcal_dist.replicates import Replicates

PAUSE = 5.0  # seconds between lines about how far it is
Say = Callable[[str], None]
Done = Callable[[dict[str, Any]], None]


def run(asked: Asked, replicates: int, *, workers: int, ray: str | None, say: Say) -> None:
    """Runs those of the first so many replicates that are missing; each is written when it is done.

    `ray` is the address of a cluster that runs them. Raises `Preempted` after SIGTERM or Ctrl-C.
    """
    missing = [number for number in range(replicates) if read(asked, number) is None]
    if not missing:
        say(f"all {replicates} replicates are there already; give more of them to go on")
        return
    from vcal_dist.training import threads

    progress = Progress(asked, replicates, len(missing), say)
    with contextlib.ExitStack() as stack:
        if ray is not None:
            from jobs.ray_cluster import connected

            os.environ.setdefault("RAY_LOG_TO_DRIVER", "0")  # what tasks print would mix with our lines
            stack.enter_context(connected(ray))
        stack.enter_context(_stoppable(asked))  # after Ray has set its own handlers
        stack.enter_context(threads(asked.settings.devices))
        _train_emulator(asked, say)
        if ray is not None:
            _on_ray(asked, missing, progress.done)
        elif min(workers, len(missing)) > 1:
            _in_processes(asked, missing, min(workers, len(missing)), progress.done)
        else:
            for number in missing:
                progress.done(one(asked, number))


def _train_emulator(asked: Asked, say: Say) -> None:
    """The emulator that all replicates begin from, unless it is there already."""
    shared = opened(asked)
    if shared.needs_emulator and not asked.emulator.is_file():
        say(f"training the emulator, once, on {shared.prepared.totals.runs:,} runs")
        shared.train_emulator().save(asked.emulator)


class Progress:
    """Writes what is done, and says how far it is and how long it may still take."""

    def __init__(self, asked: Asked, replicates: int, missing: int, say: Say) -> None:
        self.asked, self.replicates, self.missing, self.say = asked, replicates, missing, say
        self.count = self.failed = 0
        self.begun = self.told = time.monotonic()

    def done(self, record: dict[str, Any]) -> None:
        """A replicate has come back."""
        write(self.asked.replicate(record["number"]), record)
        if not self.count:  # processes take a while to start, and that only once
            self.begun = time.monotonic() - record["seconds"]
        self.count += 1
        if "failed" in record:
            self.failed += 1
            self.say(f"replicate {record['number']} failed: {record['failed']}")
        now, left = time.monotonic(), self.missing - self.count
        if left and now - self.told < PAUSE:
            return
        self.told = now
        failed = f", {self.failed} failed" if self.failed else ""
        to_go = f", about {_duration((now - self.begun) / self.count * left)} to go" if left else ""
        self.say(f"{self.replicates - left} of {self.replicates} replicates done{failed}{to_go}")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def one(asked: Asked, number: int) -> dict[str, Any]:
    """A replicate from its truth to what a calibration says of it, in plain values."""
    import torch

    from vcal_dist.replicates import DRAWS, ranks, told

    shared = opened(asked)
    prior = shared.prepared.model.prior
    begun = time.perf_counter()
    record: dict[str, Any] = {"number": number, "seed": asked.seed}

    def named(values: Any) -> dict[str, Any]:
        return dict(zip(prior.names, values, strict=True))

    try:
        drawn = shared.draw(asked.seed, number)
        truth = prior.theta(drawn.theta)
        record |= {"truth": named(truth.tolist()), "nature": drawn.nature}
        fitted = shared.calibrate(drawn.observations)
        posterior = fitted.theta
        found = told(posterior, truth)
        rank = ranks(posterior, truth, torch.Generator().manual_seed(number))
    except MemoryError:
        raise
    except Exception as error:  # whatever it is, the others go on, and the outcome says so
        return record | {"failed": f"{type(error).__name__}: {error}", "seconds": time.perf_counter() - begun}
    intervals = {str(level): named(ends) for level, ends in found.intervals.items()}
    return record | {
        "pit": named(found.pit),
        "rank": named(rank),
        "draws": DRAWS,
        "mean": named(found.mean),
        "sd": named(found.sd),
        "intervals": intervals,
        "unrefined": fitted.unrefined,
        "seconds": time.perf_counter() - begun,
    }


@lru_cache(maxsize=1)
def opened(asked: Asked) -> Replicates:
    """What all replicates share, once in each process, with the emulator if that is there already."""
    from storage.store import open_store
    from vcal_dist.replicates import Emulator, Replicates

    config = asked.settings
    simulate = None if asked.simulator is None else simulator.load(asked.simulator)
    shared = Replicates(config, open_store(config.store).first(*asked.rows), simulate)
    if shared.needs_emulator and asked.emulator.is_file():
        shared.emulator = Emulator.load(asked.emulator)
    return shared


def _in_processes(asked: Asked, numbers: list[int], workers: int, done: Done) -> None:
    try:
        with contextlib.closing(in_processes(partial(one, asked), numbers, workers)) as records:
            for record in records:
                done(record)
    except BrokenProcessPool:
        raise ConfigError(
            f"one of {workers} processes has died, for want of memory perhaps; the same command goes on, with fewer "
            "--workers if need be"
        ) from None


def _on_ray(asked: Asked, numbers: list[int], done: Done) -> None:
    """Call it with a connection to Ray. Every node must see the store, the output and the simulator's file."""
    import ray

    from jobs.ray_cluster import capacity

    capacity().refuse("a replicate", 1, 1, 0)
    task = ray.remote(num_cpus=1)(one)  # Ray gives it one thread
    waiting = [task.remote(asked, number) for number in numbers]
    try:
        while waiting:
            ready, waiting = ray.wait(waiting)
            done(ray.get(ready[0]))
    except ray.exceptions.RayTaskError as error:
        raise ConfigError(f"a process on Ray cannot begin: {error.cause}") from None
    except ray.exceptions.RayError as error:
        raise ConfigError(f"a process on Ray has died ({type(error).__name__}); the same command goes on") from None


@contextlib.contextmanager
def _stoppable(asked: Asked) -> Iterator[None]:
    """SIGTERM and Ctrl-C end the work wherever it is: what is done lies in files."""
    came: list[int] = []

    def stop(number: int, _: Any) -> None:
        came.append(number)
        raise KeyboardInterrupt  # which nobody takes for an error of a replicate

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except KeyboardInterrupt:
        raise Preempted(f"stopped by a signal; the same command goes on, in {asked.output}", came[-1]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
