"""Data-parallel training under Lightning: processes and devices as in its DDP strategy, gradients in one call.

Torch's DistributedDataParallel expects that every step gives a gradient to the same parameters. Here stages move
different ones, passes move none, and all of them together are a few thousand numbers: `vcal_dist.collective` sums
those, and the sums over rows that the evidence needs, in one call each. So the module stays as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy


class Unwrapped:
    """For a DDP strategy: leaves the module unwrapped."""

    def configure_ddp(self) -> None:
        """Nothing to wrap."""


class DataParallel(Unwrapped, DDPStrategy):
    """Several processes of one training, each with a device of its own."""

    def __init__(self, backend: str | None = None, **options: Any) -> None:
        super().__init__(process_group_backend=backend, **options)


class Launched(NamedTuple):
    """Processes that a cluster has started, each with its device, and how Lightning finds its place among them."""

    strategy: DDPStrategy
    environment: ClusterEnvironment
    accelerator: str
    threads: int  # of each process, unless the configuration says
