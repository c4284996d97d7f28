"""Data-parallel training under Lightning: processes and devices as in its DDP strategy, gradients in one call.

Torch's DistributedDataParallel expects that every step gives a gradient to the same parameters. Here stages move
different ones, passes move none, and all of them together are a few thousand numbers: `vcal_dist.collective` sums
those, and the sums over rows that the evidence needs, in one call each. So the module stays as it is.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy

from vcal_dist.collective import together
from vcal_dist.interfaces import use_interface


class DataParallel(DDPStrategy):
    """Several processes of one training, each with a device of its own."""

    def __init__(self, backend: str | None, seconds: float, **options: Any) -> None:
        """`seconds` is how long processes wait for each other, at the start and in every step."""
        super().__init__(process_group_backend=backend, timeout=timedelta(seconds=seconds), **options)

    def setup_distributed(self) -> None:
        """Connects the processes."""
        environment = self.cluster_environment
        assert environment is not None
        use_interface(environment.main_address, nodes=self.num_nodes)
        with together(f"connect, at {environment.main_address}:{environment.main_port}"):
            super().setup_distributed()

    def configure_ddp(self) -> None:
        """Nothing to wrap: the module stays as it is."""

    def barrier(self, *arguments: Any, **options: Any) -> None:
        """Waits for all processes."""
        with together("wait for each other"):
            super().barrier(*arguments, **options)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Gives every process the object of one."""
        with together("share a value"):
            return super().broadcast(obj, src)


class Launched(NamedTuple):
    """Processes that a cluster has started, each with its device, and how Lightning finds its place among them."""

    strategy: DDPStrategy
    environment: ClusterEnvironment
    accelerator: str
    threads: int  # of each process, unless the configuration says
