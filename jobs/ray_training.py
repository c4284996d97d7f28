"""Training on Ray: the same module, batches and run directory, in processes that Ray Train starts on a cluster.

When a process or a node dies, Ray starts all of them anew, and training goes on from the last checkpoint in the run
directory; on fewer processes if need be, as batches do not depend on their number. Every node must see that directory
and the store: on a shared file system, or at URLs.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jobs.config import resolve
from jobs.ray_cluster import Capacity, LostHead, answers, capacity, head_address
from jobs.ray_worker import MARK, STARTED, STOP, Meeting, Watch, raise_what_was_met, work
from jobs.stopping import run_until_told
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, Disconnected, ModelError, Preempted
from vcal_dist.posterior import FILE, Posterior
from vcal_dist.run_directory import refuse_held
from vcal_dist.run_place import SCRATCH, RunPlace, run_place
from vcal_dist.training import Say, look_ahead

HEAD_SECONDS = 30.0  # half of what Ray waits for its head
SAY_SECONDS = 30.0  # between words about what is waited for
START_TIMEOUT = 900.0  # seconds; nodes that an autoscaler brings take minutes


def train_on_ray(
    config: Config,
    *,
    workers: tuple[int, int] = (1, 1),
    gpus_per_worker: float | None = None,
    cpus_per_worker: int | None = None,
    retries: int = 3,
    start_timeout: float = START_TIMEOUT,
    progress: bool = True,
    say: Say = lambda _: None,
) -> Posterior:
    """The posterior that a configuration asks for, trained by so many processes (least, most) on the cluster.

    There must be a connection to Ray. Without numbers, each process gets a GPU where the cluster has some and training
    may use them, and an even share of the CPUs. The cluster has `start_timeout` seconds to make room for the processes,
    at first and whenever a node is lost.
    """
    config = resolve(config)  # processes of Ray's have another working directory
    with run_place(config.output) as place:
        done = look_ahead(config, place, say)  # what is wrong is told before anything is started
        if done is not None:
            return done
        refuse_held(place.path)
        resources = shares(config, capacity(), workers, gpus_per_worker, cpus_per_worker)
        wanted = f"{_count(workers)} on Ray with {resources['CPU']:g} CPU and {resources['GPU']:g} GPU each"
        say(wanted)
        with attempt(place) as scratch:
            waiting = _Waiting(wanted, start_timeout, lambda: bool(place.files.exists(f"{scratch}/{STARTED}")), say)
            try:
                trainer = _trainer(config, place, scratch, workers, resources, retries, progress)
                run_until_told(
                    partial(_fit, trainer, place, scratch, retries),
                    lambda: place.files.pipe_file(f"{scratch}/{STOP}", b""),
                    place.url,
                    waiting.look,
                )
            except Preempted:
                if not place.has(FILE):  # else it came too late
                    raise
            raise_what_was_met(place, scratch)
        place.fetch()
        return Posterior.load(place.path)


class _Waiting:
    """For processes that have no room yet: says so now and then, and gives up in the end."""

    def __init__(self, wanted: str, timeout: float, running: Callable[[], bool], say: Say) -> None:
        self.wanted, self.timeout, self.running, self.say = wanted, timeout, running, say
        self._since = self._said = self._heard = time.monotonic()
        self.head = head_address()

    def look(self) -> None:
        """Raises once they had no room for too long. (Ray itself would wait for ever.)"""
        now = time.monotonic()
        self._look_at_head(now)
        try:
            running = self.running()
        except Exception:  # an object store that does not answer now: the next look will tell
            return
        if running:
            self._since = self._said = now
        elif now - self._since > self.timeout:
            raise Disconnected(
                f"the Ray cluster has not started {self.wanted} in {self.timeout:g} s (--start-timeout): it has no "
                "room for them, or has lost a node; the same command goes on from the last checkpoint once there is "
                "room, at once with fewer --workers, and by itself with a range such as --workers 1:2"
            )
        elif now - self._said > SAY_SECONDS:
            self._said = now
            self.say(f"still waiting for {self.wanted}; `ray status` tells what the cluster does")

    def _look_at_head(self, now: float) -> None:
        """Raises once the head is gone for too long. (Ray would end this process a little later, without a word.)"""
        if answers(self.head):
            self._heard = now
        elif now - self._heard > HEAD_SECONDS:
            raise LostHead(
                f"the head of the Ray cluster, {self.head}, has not answered for {HEAD_SECONDS:g} s; once it runs "
                "again, the same command goes on from the last checkpoint"
            )


@contextlib.contextmanager
def attempt(place: RunPlace) -> Iterator[str]:
    """A folder beside the run for Ray's own files, and for what the driver and the processes tell each other.

    Each attempt has its own: nothing of one that was killed, or still runs elsewhere, is taken for this one's.
    """
    scratch = f"{place.root}/{SCRATCH}/attempt-{uuid.uuid4().hex[:8]}"
    place.files.makedirs(scratch, exist_ok=True)
    place.files.pipe_file(f"{scratch}/{MARK}", b"")
    try:
        yield scratch
    finally:
        try:
            # What a killed attempt has left goes too, where the lock says that no other is under way.
            place.files.rm(scratch if place.remote else f"{place.root}/{SCRATCH}", recursive=True)
        except Exception as error:  # the result does not depend on it
            logging.getLogger("vcal_dist").warning("cannot remove %s: %s", scratch, error)


def shares(
    config: Config,
    has: Capacity,
    workers: tuple[int, int],
    gpus_per_worker: float | None,
    cpus_per_worker: int | None,
) -> dict[str, float]:
    """CPUs and GPUs of a process; refuses what the cluster cannot have."""
    least, most = workers
    gpus = gpus_per_worker
    if gpus is None:
        gpus = 1.0 if has.room(0, 1) and config.devices.accelerator != "cpu" else 0.0
    if not 0 <= gpus <= 1:
        raise ConfigError(f"gpus-per-worker is {gpus:g}; a process uses one GPU at most: ask for more workers")
    if gpus == 0 and config.devices.accelerator == "gpu":
        raise ConfigError("devices.accelerator is 'gpu', but processes get no GPU; give --gpus-per-worker 1")
    has.refuse("training", least, cpus_per_worker or 1, gpus)
    cpus = cpus_per_worker or has.share(has.suited(least, most, gpus), gpus)
    return {"CPU": float(cpus), "GPU": float(gpus)}


def _count(workers: tuple[int, int]) -> str:
    least, most = workers
    if least != most:
        return f"{least} to {most} processes"
    return "1 process" if most == 1 else f"{most} processes"


def _trainer(
    config: Config,
    place: RunPlace,
    scratch: str,
    workers: tuple[int, int],
    resources: dict[str, float],
    retries: int,
    progress: bool,
) -> Any:
    from ray.train.torch import TorchTrainer
    from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig

    backend, cpus = config.devices.backend, int(resources["CPU"])
    filesystem: Any = None
    if place.remote:
        from pyarrow.fs import FSSpecHandler, PyFileSystem

        filesystem = PyFileSystem(FSSpecHandler(place.files))  # the same credentials and endpoint as for our own files
    start: Any = TorchTrainer  # its types still tell of the classes before Train V2
    gpus = resources["GPU"]
    # Processes that share a GPU cannot use NCCL.
    chosen = backend if backend != "auto" else "nccl" if gpus == 1 else "gloo"
    return start(
        work,
        train_loop_config={
            "config": config.plain(),
            "backend": chosen,
            "scratch": scratch,
            "gpus": gpus,
            "cpus": cpus,
            "progress": progress,
        },
        torch_config=Meeting(),
        scaling_config=ScalingConfig(
            num_workers=workers[0] if workers[0] == workers[1] else workers,
            use_gpu=resources["GPU"] > 0,
            resources_per_worker={name: amount for name, amount in resources.items() if amount},
        ),
        run_config=RunConfig(
            name="train",
            storage_path=scratch,
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=retries),
            callbacks=[Watch(place.url, scratch)],
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
    )


def _fit(trainer: Any, place: RunPlace, scratch: str, retries: int) -> None:
    from ray.train.v2.api.exceptions import TrainingFailedError

    try:
        trainer.fit()
    except TrainingFailedError as error:
        raise_what_was_met(place, scratch)
        raise ModelError(
            f"training on Ray failed, after at most {retries} new start(s), with: {_last_line(error)}. The same "
            "command goes on from the last checkpoint"
        ) from error


def _last_line(error: Exception) -> str:
    """What the processes failed with; one of them lost its connection to another that failed first."""
    failures = getattr(error, "worker_failures", None) or {0: error}
    lines = [text.splitlines()[-1] for text in (str(failure).strip() for failure in failures.values()) if text]
    return next((line for line in lines if "onnection" not in line), next(iter(lines), type(error).__name__))
