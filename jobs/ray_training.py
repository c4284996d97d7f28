"""Training on Ray: the same module, batches and run directory, in processes that Ray Train starts on a cluster.

When a process or a node dies, Ray starts all of them anew, and training goes on from the last checkpoint in the run
directory; on fewer processes if need be, as batches do not depend on their number. Every node must see that directory
and the store: on a shared file system, or at URLs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from typing import Any

from jobs.ray_cluster import capacity
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, Diverged, ModelError
from vcal_dist.posterior import Posterior
from vcal_dist.run_place import SCRATCH, RunPlace, run_place
from vcal_dist.training import Say, look_ahead

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
    with run_place(config.output) as place:
        done = look_ahead(config, place, say)  # what is wrong is told before anything is started
        if done is not None:
            return done
        resources = shares(config, workers, gpus_per_worker, cpus_per_worker)
        say(f"{_count(workers)} on Ray with {resources['CPU']:g} CPU and {resources['GPU']:g} GPU each")
        _remove_scratch(place)  # of an attempt that was killed
        try:
            _fit(config, place, workers, resources, retries, progress)
            _raise_what_was_met(place)
        finally:
            _remove_scratch(place)
        place.fetch()
        return Posterior.load(place.path)


def shares(
    config: Config, workers: tuple[int, int], gpus_per_worker: float | None, cpus_per_worker: int | None
) -> dict[str, float]:
    """CPUs and GPUs of a process; refuses what the cluster cannot have."""
    least, most = workers
    if not 1 <= least <= most:
        raise ConfigError(f"workers is {least}:{most}; accepted: one or more, and the first at most the second")
    has = capacity()
    gpus = gpus_per_worker
    if gpus is None:
        gpus = 1.0 if has.most[1] >= 1 and config.devices.accelerator != "cpu" else 0.0
    if not 0 <= gpus <= 1:
        raise ConfigError(f"gpus-per-worker is {gpus:g}; a process uses one GPU at most: ask for more workers")
    if gpus == 0 and config.devices.accelerator == "gpu":
        raise ConfigError("devices.accelerator is 'gpu', but processes get no GPU; give --gpus-per-worker 1")
    has.refuse("training", least, cpus_per_worker or 1, gpus)
    cpus = cpus_per_worker or has.share(min(most, has.room(1, gpus)), gpus)
    return {"CPU": float(cpus), "GPU": float(gpus)}


def _count(workers: tuple[int, int]) -> str:
    least, most = workers
    if least != most:
        return f"{least} to {most} processes"
    return "1 process" if most == 1 else f"{most} processes"


def _fit(
    config: Config,
    place: RunPlace,
    workers: tuple[int, int],
    resources: dict[str, float],
    retries: int,
    progress: bool,
) -> None:
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.train.v2.api.config import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.exceptions import TrainingFailedError

    backend = config.devices.backend
    filesystem: Any = None
    if place.remote:
        from pyarrow.fs import FSSpecHandler, PyFileSystem

        filesystem = PyFileSystem(FSSpecHandler(place.files))  # the same credentials and endpoint as for our own files
    start: Any = TorchTrainer  # its types still tell of the classes before Train V2
    trainer = start(
        _work,
        train_loop_config={"config": config.plain(), "gpus": resources["GPU"], "progress": progress},
        torch_config=TorchConfig(backend=("nccl" if resources["GPU"] else "gloo") if backend == "auto" else backend),
        scaling_config=ScalingConfig(
            num_workers=workers[0] if workers[0] == workers[1] else workers,
            use_gpu=resources["GPU"] > 0,
            resources_per_worker={name: amount for name, amount in resources.items() if amount},
        ),
        run_config=RunConfig(
            name=f"attempt-{uuid.uuid4().hex[:8]}",  # with a name from before Ray would go on in its own way
            storage_path=f"{place.root}/{SCRATCH}",
            storage_filesystem=filesystem,
            failure_config=FailureConfig(max_failures=retries),
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        _raise_what_was_met(place)
        raise ModelError(
            f"training on Ray failed {retries + 1} times, the last time with: {_last_line(error)}. The same command "
            "goes on from the last checkpoint"
        ) from error


def _last_line(error: Exception) -> str:
    failures = getattr(error, "worker_failures", None) or {}
    text = str(next(iter(failures.values()), error)).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def _raise_what_was_met(place: RunPlace) -> None:
    """Raises the error of training itself, if it was written down."""
    with contextlib.suppress(FileNotFoundError):
        found = json.loads(place.files.cat_file(f"{place.root}/{SCRATCH}/{ERROR}"))
        kinds = {"ConfigError": ConfigError, "Diverged": Diverged}
        raise kinds.get(found["kind"], ModelError)(found["message"])


def _remove_scratch(place: RunPlace) -> None:
    with contextlib.suppress(FileNotFoundError):
        place.files.rm(f"{place.root}/{SCRATCH}", recursive=True)


def _work(arguments: dict[str, Any]) -> None:
    """One process of the training."""
    import ray.train
    from lightning.pytorch.utilities import rank_zero_only
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment

    from jobs.commands.train import say
    from storage.errors import VcalError
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
    )
    with run_place(config.output) as place:
        met = f"{place.root}/{SCRATCH}/{ERROR}"
        if place.files.exists(met):  # by the attempt before this one
            return
        try:
            train(config, progress=arguments["progress"], say=say, launched=launched)
        except VcalError as error:
            place.files.pipe_file(met, json.dumps({"kind": type(error).__name__, "message": str(error)}).encode())
            if not isinstance(error, Diverged):  # that comes to all processes alike; of others, some may be waiting
                raise
