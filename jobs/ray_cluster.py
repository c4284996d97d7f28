"""The Ray cluster: connecting to it, what it has, and whether a request fits.

Ray itself waits for ever for what it will never have; here such a request is refused at once, with asked and available.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jobs.ray_probe import foreign_cluster
from vcal_dist.errors import ConfigError, Disconnected

# Lines of Ray's and torch's processes that help nobody. Without a dashboard the first comes every second.
NOISE = (
    "Failed to query Ray Train Controller actor state",
    "has constructor arguments in the object store and max_restarts",
    "hostname of the client socket cannot be retrieved",
)
# Said by Ray for its developers; all have an effect only before Ray is imported.
QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "|".join(NOISE),
}
CONNECT_SECONDS = 5.0  # Ray tries for minutes
BOOTSTRAP = "~/ray_bootstrap_config.yaml"  # where `ray up` leaves the cluster's file on its head
Node = tuple[float, float]  # CPUs and GPUs


class LostHead(Disconnected):
    """The head of the cluster does not answer any more."""


class Capacity(NamedTuple):
    """The nodes that are there, and those that there can be at most where an autoscaler's limits are known."""

    nodes: list[Node]
    most: list[Node]

    def room(self, cpus: float, gpus: float) -> int:
        """How many processes with so many CPUs and GPUs each can run at once."""
        return max(sum(_times(node, cpus, gpus) for node in nodes) for nodes in (self.nodes, self.most))

    def suited(self, least: int, most: int, gpus: float) -> int:
        """How many processes suit the cluster: as many as have a GPU; without GPUs, one a node unless more must be."""
        by_nodes = sum(cpus >= 1 for cpus, _ in max(self.nodes, self.most, key=len))
        return min(most, max(least, self.room(1, gpus) if gpus else by_nodes))

    def share(self, processes: int, gpus: float) -> int:
        """Whole CPUs for each of so many processes, so that all of them find room; at least one."""
        largest = int(max((cpus for nodes in self for cpus, _ in nodes), default=1))
        return next((cpus for cpus in range(largest, 1, -1) if self.room(cpus, gpus) >= processes), 1)

    def refuse(self, what: str, processes: int, cpus: float, gpus: float) -> None:
        """Raises unless so many processes find room."""
        if self.room(cpus, gpus) >= processes:
            return
        may = f" (an autoscaler may make it {_told(self.most)})" if self.most else ""
        raise ConfigError(
            f"{what} asks for {processes} process(es) with {cpus:g} CPU and {gpus:g} GPU each; the Ray cluster has "
            f"{_told(self.nodes)}{may}, room for {self.room(cpus, gpus)}. Ask for less, or add nodes"
        )


def _told(nodes: list[Node]) -> str:
    counts = {node: nodes.count(node) for node in nodes}
    several = (f"{count} × " if count > 1 else "" for count in counts.values())
    return ", ".join(f"{n}{c:g} CPU and {g:g} GPU" for n, (c, g) in zip(several, counts, strict=True)) or "no node"


def _times(has: Node, cpus: float, gpus: float) -> int:
    parts = [int(amount / asked + 1e-9) for amount, asked in zip(has, (cpus, gpus), strict=True) if asked > 0]
    return min(parts, default=0)


def worker_range(text: str) -> tuple[int, int]:
    """Least and most processes in the option --workers."""
    found = re.fullmatch(r"([1-9][0-9]*)(?::([1-9][0-9]*))?", text)
    if found is None or int(found[1]) > int(found[2] or found[1]):
        raise ConfigError(f"--workers is '{text}'; accepted: a number such as 4, or a range such as 2:8")
    return int(found[1]), int(found[2] or found[1])


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """With a connection to the cluster at an address, or to RAY_ADDRESS, or one that runs here, or one of our own."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():  # inside a job of Ray's: whoever connected also leaves
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    foreign = foreign_cluster() if address == "auto" else None
    if foreign is not None:
        raise ConfigError(
            f"Ray would connect to {foreign}, which is another user's word, and let that user run programs as you; say "
            "--address HOST:PORT for a cluster that you trust, or --address local for a new one. Set RAY_TMPDIR to a "
            "folder of your own, too, where somebody else owns the one of Ray"
        )
    _reach(address)
    options: Any = {"logging_level": "error"}
    try:
        ray.init(address, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if "multiple active Ray instances" in str(error):
            raise ConfigError(
                f"several Ray clusters run on this machine ({_first_line(error)}); say which with --address or "
                "RAY_ADDRESS"
            ) from None
        if address != "auto":
            raise _unreachable(address, _first_line(error)) from None
        ray.init("local", include_dashboard=False, **options)
    leave: Callable[[], object] = ray.shutdown
    try:
        yield
    except LostHead:  # Ray would wait for it for a minute, then crash beside the thread that is in a call of Ray's
        leave = partial(atexit.register, _end_at_once)  # runs before Ray's own, which was registered earlier
        raise
    finally:
        leave()


def _end_at_once() -> None:
    """Ends this process with status 1, without what Ray does at the end of the interpreter."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)


def _reach(address: str) -> None:
    """Raises unless something listens at an address."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise ConfigError(
            f"the address of the Ray cluster is '{address}'; accepted: host:port of a cluster that this machine is "
            "part of; to one elsewhere, send a job: vcal submit ray --address http://host:8265 -- …"
        )
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS):
            return
    except OSError as error:
        raise _unreachable(address, error.strerror or str(error)) from None


def _unreachable(address: str, why: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster answers at {address} ({why}); start one with 'ray start --head', or leave the address out to "
        "use this machine"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def head_address() -> str:
    """Where the head of the cluster listens, as host:port."""
    import ray

    return str(ray.get_runtime_context().gcs_address)


def answers(address: str) -> bool:
    """Whether something listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS):
            return True
    except OSError:
        return False


def capacity() -> Capacity:
    """What the cluster has, and what `ray up` may bring to it: Ray itself does not tell."""
    import ray

    has = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    path = Path(BOOTSTRAP).expanduser()
    return Capacity([_node(resources) for resources in has], planned(path) if path.is_file() else [])


def planned(path: Path) -> list[Node]:
    """The nodes that a cluster file allows at most."""
    import yaml

    try:
        cluster = yaml.safe_load(path.read_text(encoding="utf-8"))
        kinds, head = cluster["available_node_types"], cluster["head_node_type"]
        nodes = [_node(kinds[head]["resources"])]
        for name, kind in kinds.items():
            if name != head:
                nodes += [_node(kind["resources"])] * int(kind.get("max_workers", cluster["max_workers"]))
        return nodes[: 1 + int(cluster["max_workers"])]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
        return []  # of another kind, such as machines of one's own, which are all there from the start


def _node(resources: dict[str, Any]) -> Node:
    return float(resources.get("CPU", 0)), float(resources.get("GPU", 0))
