"""How a cluster is shared out among trials, so that it is full and nothing waits for what it will never get."""

from __future__ import annotations

from typing import NamedTuple

from jobs.ray_cluster import Capacity
from jobs.sweeps.settings import Sweep


class Share(NamedTuple):
    """What each process of a trial gets, and how many trials run at once."""

    workers: int  # processes of a trial
    cpus: int
    gpus: float
    concurrent: int

    def __str__(self) -> str:
        each = f"{self.cpus} CPU" + (f" and {self.gpus:g} GPU" if self.gpus else "")
        if self.workers > 1:
            each = f"{self.workers} processes of {each}"
        return f"{self.concurrent} at a time with {each} each"


def share(sweep: Sweep, has: Capacity, trials: int) -> Share:
    """The share of each of so many trials; refuses what the cluster cannot have."""
    asked, workers = sweep.settings, sweep.settings.workers
    gpus = asked.gpus
    if gpus is None:
        gpus = 1.0 if has.room(0, 1) and sweep.config.devices.accelerator != "cpu" else 0.0
    has.refuse("a trial", workers, asked.cpus or 1, gpus)
    concurrent = max(1, min(trials, has.room(asked.cpus or 1, gpus) // workers))
    return Share(workers, asked.cpus or has.share(concurrent * workers, gpus), gpus, concurrent)
