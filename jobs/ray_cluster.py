"""The Ray cluster: connecting to it, what it has, and whether a request fits.

Ray itself waits for ever for what it will never have; here such a request is refused at once, with asked and available.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from vcal_dist.errors import ConfigError

# Said by Ray for its developers; both only have an effect before Ray is imported.
QUIET = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0"}


class Capacity(NamedTuple):
    """CPUs and GPUs of every node that is there, and in all those that an autoscaler may bring."""

    nodes: list[tuple[float, float]]
    most: tuple[float, float]

    @property
    def grows(self) -> bool:
        """Whether nodes may come."""
        return any(self.most[i] > sum(node[i] for node in self.nodes) for i in (0, 1))

    def room(self, cpus: float, gpus: float) -> int:
        """How many processes with so many CPUs and GPUs each can run at once."""
        there = sum(_times(node, cpus, gpus) for node in self.nodes)
        return max(there, _times(self.most, cpus, gpus)) if self.grows else there

    def share(self, processes: int, gpus: float) -> int:
        """Whole CPUs for each of so many processes, so that all of them find room; at least one."""
        most = int(max([self.most[0], *(cpus for cpus, _ in self.nodes)]))
        return next((cpus for cpus in range(most, 1, -1) if self.room(cpus, gpus) >= processes), 1)

    def refuse(self, what: str, processes: int, cpus: float, gpus: float) -> None:
        """Raises unless so many processes find room."""
        if self.room(cpus, gpus) >= processes:
            return
        there = ", ".join(f"{c:g} CPU and {g:g} GPU" for c, g in self.nodes) or "no node"
        may = f" (an autoscaler may bring it to {self.most[0]:g} CPU and {self.most[1]:g} GPU)" if self.grows else ""
        raise ConfigError(
            f"{what} asks for {processes} process(es) with {cpus:g} CPU and {gpus:g} GPU each; the Ray cluster has "
            f"nodes with {there}{may}, room for {self.room(cpus, gpus)}. Ask for less, or add nodes"
        )


def _times(has: tuple[float, float], cpus: float, gpus: float) -> int:
    parts = [int(amount / asked + 1e-9) for amount, asked in zip(has, (cpus, gpus), strict=True) if asked > 0]
    return min(parts, default=0)


@contextmanager
def connected(address: str | None = None) -> Iterator[None]:
    """With a connection to the cluster at an address, or to RAY_ADDRESS, or one that runs here, or one of our own."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():  # inside a job of Ray's: whoever connected also leaves
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or None
    options: Any = {"logging_level": "error"}
    try:
        ray.init(address or "auto", **options)
    except ConnectionError as error:
        if address is not None:
            raise ConfigError(
                f"no Ray cluster answers at {address} ({_first_line(error)}); start one with 'ray start --head', or "
                "leave the address out to use this machine"
            ) from None
        ray.init("local", include_dashboard=False, **options)
    try:
        yield
    finally:
        ray.shutdown()


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def capacity() -> Capacity:
    """What the cluster has."""
    import ray
    from ray._private.state import state

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    there = [(float(has.get("CPU", 0)), float(has.get("GPU", 0))) for has in nodes]
    most = state.get_max_resources_from_cluster_config() or {}  # as Ray Train itself asks; None without an autoscaler
    cpus, gpus = (max(sum(has[i] for has in there), float(most.get(name, 0))) for i, name in enumerate(("CPU", "GPU")))
    return Capacity(there, (cpus, gpus))
