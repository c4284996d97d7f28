"""One process of a training on Ray: where it meets the others, and what it does.

Ray Train could connect the processes itself. Then a failure to do so would be one of Ray's controller, with a hundred
lines and no new start. So they only hear from it where to meet, and connect as processes do that anything else started.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from typing import Any

import ray.train
from lightning.pytorch.utilities import rank_zero_only
from ray.train import UserCallback
from ray.train.backend import Backend
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment
from ray.train.torch import TorchConfig

from jobs.commands.train import say
from jobs.console import stderr
from jobs.stopping import StopWhenAsked
from storage.errors import VcalError
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, Disconnected, Diverged, ModelError, Preempted
from vcal_dist.run_place import RunPlace, run_place
from vcal_dist.strategy import DataParallel, Launched
from vcal_dist.training import train

MARK, STARTED = "mark", "started"  # files of the driver and of the processes, by which they know of each other
STOP = "stop"  # a file that tells the processes to write a checkpoint and end
TRACEBACKS = "ray.train.v2._internal.util"  # where Ray logs those of training
ERROR = "error.json"  # what training itself has met, beside Ray's own files: starting anew would only meet it again


class Meeting(TorchConfig):
    """Ray's settings for torch, but for who connects the processes."""

    @property
    def backend_cls(self) -> type[Backend]:
        """What is done once the processes are there."""
        return _Tell


class _Tell(Backend):
    """Tells all processes where the first one is."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        worker_group.execute(_expect, *worker_group.execute_single(0, _offer))


def _offer() -> tuple[str, int]:
    """This node's address as Ray knows it, and a free port."""
    address = ray.util.get_node_ip_address()
    with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
        return address, int(free.getsockname()[1])


def _expect(address: str, port: int) -> None:
    """As a launcher such as torchrun would have it, for Lightning and torch."""
    here = ray.train.get_context()
    os.environ |= {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "LOCAL_RANK": str(here.get_local_rank()),
        "NODE_RANK": str(here.get_node_rank()),
        "RANK": str(here.get_world_rank()),
        "WORLD_SIZE": str(here.get_world_size()),
    }


class Strategy(DataParallel, RayDDPStrategy):
    """The device that Ray has given to this process."""


class Watch(UserCallback):
    """Tells the driver, from Ray's controller, that processes have failed and others do not run yet."""

    def __init__(self, output: str, scratch: str) -> None:
        self.output, self.scratch = output, scratch

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Takes the processes' mark away; the next ones set it again."""
        with contextlib.suppress(Exception), run_place(self.output) as place:
            place.files.rm_file(f"{self.scratch}/{STARTED}")


def work(arguments: dict[str, Any]) -> None:
    """Trains, as one of several processes. Of an error that a user can fix nobody needs the traceback."""
    try:
        _train(arguments)
    except VcalError as error:
        logging.getLogger(TRACEBACKS).setLevel(logging.CRITICAL)
        if isinstance(error, Disconnected):  # others are told by the driver
            stderr().print(str(error), style="yellow", soft_wrap=True)
        raise


def _train(arguments: dict[str, Any]) -> None:
    logging.getLogger().setLevel(logging.WARNING)  # Ray's workers would show what every library notes for itself
    config = Config.parse(arguments["config"], "the configuration")
    known: Any = rank_zero_only
    known.rank = ray.train.get_context().get_world_rank()
    launched = Launched(
        Strategy(arguments["backend"], config.devices.timeout),
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


def raise_what_was_met(place: RunPlace, scratch: str) -> None:
    """Raises the error of training itself, if it was written down."""
    with contextlib.suppress(FileNotFoundError):
        found = json.loads(place.files.cat_file(f"{scratch}/{ERROR}"))
        raise (Diverged if found["kind"] == "Diverged" else ModelError)(found["message"])
