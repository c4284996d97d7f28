"""Training on Ray: the same module, batches and run directory, in processes that Ray Train starts on a cluster.

When a process or a node dies, Ray starts all of them anew, and training goes on from the last checkpoint in the run
directory; on fewer processes if need be, as batches do not depend on their number. Every node must see that directory
and the store: on a shared file system, or at URLs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

from jobs.config import resolve
from jobs.ray_cluster import Capacity, capacity
from jobs.stopping import run_until_told
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, Diverged, ModelError, Preempted
from vcal_dist.posterior import FILE, Posterior
from vcal_dist.run_directory import refuse_held
from vcal_dist.run_place import SCRATCH, RunPlace, run_place
from vcal_dist.training import Say, look_ahead

MARK, STARTED = "mark", "started"  # files of the driver and of the processes, by which they know of each other
STOP = "stop"  # a file that tells the processes to write a checkpoint and end
ERROR = "error.json"  # what training itself has met, beside Ray's own files: starting anew would only meet it again


def train_on_ray(
    config: Config,
    *,
    workers: tuple[int, int] = (1, 1),
    gpus_per_worker: float | None = None,
    cpus_per_worker: int | None = None,
    retries: int = 3,
    progress: bool = True,
    say: Say = lambda _: None,
) -> Posterior:
    """The posterior that a configuration asks for, trained by so many processes (least, most) on the cluster.

    There must be a connection to Ray. Without numbers, each process gets a GPU where the cluster has some and training
    may use them, and an even share of the CPUs.
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

            def notice() -> None:
                with contextlib.suppress(Exception):  # the next look will tell
                    if not place.files.exists(f"{scratch}/{STARTED}"):
                        say(f"still waiting for {wanted}; `ray status` tells what the cluster does")

            try:
                trainer = _trainer(config, place, scratch, workers, resources, retries, progress)
                run_until_told(
                    partial(_fit, trainer, place, scratch, retries),
                    lambda: place.files.pipe_file(f"{scratch}/{STOP}", b""),
                    place.url,
                    notice,
                )
            except Preempted:
                if not place.has(FILE):  # else it came too late
                    raise
            _raise_what_was_met(place, scratch)
        place.fetch()
        return Posterior.load(place.path)


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
    from ray.train.torch import TorchConfig, TorchTrainer
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
        _work,
        train_loop_config={
            "config": config.plain(),
            "scratch": scratch,
            "gpus": gpus,
            "cpus": cpus,
            "progress": progress,
        },
        torch_config=TorchConfig(backend=chosen),
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
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
    )


def _fit(trainer: Any, place: RunPlace, scratch: str, retries: int) -> None:
    from ray.train.v2.api.exceptions import TrainingFailedError

    try:
        trainer.fit()
    except TrainingFailedError as error:
        _raise_what_was_met(place, scratch)
        raise ModelError(
            f"training on Ray failed, after at most {retries} new start(s), with: {_last_line(error)}. The same "
            "command goes on from the last checkpoint"
        ) from error


def _last_line(error: Exception) -> str:
    """What the processes failed with; one of them lost its connection to another that failed first."""
    failures = getattr(error, "worker_failures", None) or {0: error}
    lines = [text.splitlines()[-1] for text in (str(failure).strip() for failure in failures.values()) if text]
    return next((line for line in lines if "onnection" not in line), next(iter(lines), type(error).__name__))


def _raise_what_was_met(place: RunPlace, scratch: str) -> None:
    """Raises the error of training itself, if it was written down."""
    with contextlib.suppress(FileNotFoundError):
        found = json.loads(place.files.cat_file(f"{scratch}/{ERROR}"))
        raise (Diverged if found["kind"] == "Diverged" else ModelError)(found["message"])


def _work(arguments: dict[str, Any]) -> None:
    """One process of the training."""
    import ray.train
    from lightning.pytorch.utilities import rank_zero_only
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

    from jobs.commands.train import say
    from jobs.stopping import StopWhenAsked
    from vcal_dist.strategy import Launched, Unwrapped
    from vcal_dist.training import train

    class Strategy(Unwrapped, RayDDPStrategy):
        """Ray's devices, and a module that stays as it is."""

    logging.getLogger().setLevel(logging.WARNING)  # Ray's workers would show what every library notes for itself
    config = Config.parse(arguments["config"], "the configuration")
    known: Any = rank_zero_only
    known.rank = ray.train.get_context().get_world_rank()
    launched = Launched(
        Strategy(),  # type: ignore[no-untyped-call]
        RayLightningEnvironment(),
        "gpu" if arguments["gpus"] else "cpu",
        arguments["cpus"],
    )
    with run_place(config.output) as place:
        started, met, stop = (f"{arguments['scratch']}/{name}" for name in (STARTED, ERROR, STOP))
        if not place.files.exists(f"{arguments['scratch']}/{MARK}"):
            raise ConfigError(
                f"the node {socket.gethostname()} does not see {place.url} as the driver does; output and store must "
                "be on a file system that all nodes share, or at s3:// URLs"
            )
        if place.files.exists(met):  # by this one, before it was started anew
            return
        place.files.pipe_file(started, b"")

        def is_told() -> bool:
            try:
                return bool(place.files.exists(stop))
            except Exception:  # an object store that does not answer now
                return False

        try:
            asked = StopWhenAsked(is_told, 5.0 if place.remote else 1.0)
            train(config, progress=arguments["progress"], say=say, callbacks=[asked], launched=launched)
        except Preempted:  # all processes alike
            return
        except ModelError as error:  # of the model or its data: it would come again
            place.files.pipe_file(met, json.dumps({"kind": type(error).__name__, "message": str(error)}).encode())
            if not isinstance(error, Diverged):  # that comes to all processes alike; of others, some may be waiting
                raise
