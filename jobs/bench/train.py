"""Training from a store, beside a bare loop of the same mathematics with the data in memory, in one run.

The borehole as in the paper: M = 100 features, N runs and n observations.

    seconds              `vcal train` from the store to the posterior on disk
    error                the paper's measure of θ ~ q; the truth itself has 0.008
    bare_loop_ratio      training with rows streamed from Zarr, over the bare loop
    resident_ratio       the same with rows that stay in memory, which is the default where they fit
    data_wait_fraction   of the streamed training, spent waiting for rows; open_seconds more for the first batches
    integration_ratio    a calibration of a thousand observations that integrates over the discrepancy's hyperparameters
                         and σ_y, over one that ends before; refinement_ratio the same with all observations
    two_process_speedup  rows/s of two gloo processes over one, one thread each, M = 200, batches of 8192
    peak_rss_mb          memory of a process that trains on a store larger than its budget
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import storage
from jobs.bench.processes import two_process_speedup
from jobs.bench.stream import CONTROLS, PARAMETERS, in_fresh_process, memory_mb, random_rows, write_store
from jobs.console import note
from vcal_dist.batches import Observations, Runs
from vcal_dist.config import Config
from vcal_dist.fitting import fit as fit_in_memory
from vcal_dist.plan import FitSettings
from vcal_dist.posterior import Posterior
from vcal_dist.problems import borehole
from vcal_dist.rows import keep_out
from vcal_dist.training import Prepared, fit, prepare, train

BUDGET = "256 MB"
FRESH = 10_000


class Size(NamedTuple):
    """How much the benchmark works on."""

    runs: int
    observations: int
    steps: dict[str, int] | None  # of the stages; None: the defaults
    large: int  # rows of the store that does not fit the budget
    turns: int  # of which the best counts


QUICK = Size(100_000, 10_000, {"emulator": 300, "theta": 120, "joint": 10}, 2_000_000, 1)
FULL = Size(1_000_000, 100_000, None, 20_000_000, 3)


def run(*, quick: bool) -> dict[str, Any]:
    """All figures; what is written lies in a temporary directory and is removed afterwards."""
    size = QUICK if quick else FULL
    folder = Path(tempfile.mkdtemp(prefix="vcal-bench-"))
    try:
        note(f"making {size.runs:,} runs and {size.observations:,} observations of the borehole")
        borehole.make_store(folder / "borehole.zarr", size.runs, size.observations, seed=0)
        figures = _speed(folder, size)
        note("with and without integration over hyperparameters")
        figures |= _integration(folder, size)
        note("two processes beside one")
        figures |= two_process_speedup(folder / "borehole.zarr", turns=size.turns, quick=quick)
        shutil.rmtree(folder / "borehole.zarr")
        note(f"memory on a store of {size.large:,} rows")
        write_store(folder / "large.zarr", size.large, "zstd")
        values = random_rows(1000, seed=1)
        storage.open(folder / "large.zarr").append_observations(values[:, :CONTROLS], values[:, -1:])
        base, peak = in_fresh_process(_train_large, str(folder))
    finally:
        shutil.rmtree(folder)
    figures |= {"peak_rss_mb": round(peak, 1), "base_rss_mb": round(base, 1), "memory_budget": BUDGET}
    return {
        **figures,
        "runs": size.runs,
        "observations": size.observations,
        "large_rows": size.large,
        "threads": torch.get_num_threads(),
    }


def _speed(folder: Path, size: Size) -> dict[str, Any]:
    stages: dict[str, Any] = {name: {"steps": steps} for name, steps in (size.steps or {}).items()}
    if size.steps:
        stages["evaluations"] = 0
    settings = {"store": str(folder / "borehole.zarr"), "output": str(folder / "run"), "fit": stages}
    prepared = prepare(Config.parse(settings), storage.open(folder / "borehole.zarr"))
    note("the bare loop")
    bare = _bare(prepared)
    note("streamed")
    streamed = _under_lightning({**settings, "data": {"resident": False}}, folder)
    note("resident")
    resident = _under_lightning(settings, folder)
    note("from the store to the posterior on disk")
    begun = time.perf_counter()
    posterior = train(Config.parse(settings), progress=False)
    seconds = time.perf_counter() - begun
    return {
        "seconds": round(seconds, 2),
        "error": round(_paper_error(posterior), 5),
        "bare_loop_ratio": round(streamed.seconds / bare, 3),
        "resident_ratio": round(resident.seconds / bare, 3),
        "data_wait_fraction": round(streamed.waited / streamed.seconds, 4),
        "open_seconds": round(streamed.opening, 2),
        "bare_seconds": round(bare, 2),
        "sigma_y": round(posterior.noise["flow"], 6),
        "theta_inside": _inside(posterior),
    }


FEW = 1000  # observations, with which hyperparameters are uncertain


def _integration(folder: Path, size: Size) -> dict[str, Any]:
    """What the refinement takes: with few observations an integral over hyperparameters, with all of them passes."""
    stages: dict[str, Any] = {name: {"steps": steps} for name, steps in (size.steps or {}).items()}
    store = storage.open(folder / "borehole.zarr")
    found: dict[str, Any] = {}
    for name, observations in (("integration", FEW), ("refinement", size.observations)):
        seconds = []
        for evaluations in (FitSettings().evaluations, 0):
            settings = {"store": store.url, "fit": {**stages, "evaluations": evaluations}}
            prepared = prepare(Config.parse(settings), store.first(size.runs, observations))
            seconds.append(min(_bare(prepared) for _ in range(size.turns)))
        found |= {f"{name}_ratio": round(seconds[0] / seconds[1], 3), f"{name}_seconds": round(seconds[0], 2)}
    return found


def _bare(prepared: Prepared) -> float:
    """Seconds of the loop over tensors in memory, with the same rows kept out."""
    prepared = replace(prepared, model=copy.deepcopy(prepared.model))  # each time from where it starts
    scaling, at_hand = prepared.at_hand.scaling, prepared.at_hand
    runs, field = prepared.store.runs.read(), prepared.store.observations.read()
    x, t, z = (torch.as_tensor(runs[name]) for name in ("x", "t", "z"))
    rows: Runs = keep_out(scaling.runs(x, t, z), at_hand.held_runs)
    x, y = torch.as_tensor(field["x"]), torch.as_tensor(field["y"])
    observed: Observations = keep_out(scaling.observations(x, y), at_hand.held_observations)
    begun = time.perf_counter()
    fit_in_memory(prepared.model, rows, observed, prepared.config.fit, seed=prepared.config.seed)
    return time.perf_counter() - begun


class _Clock(Callback):
    """Seconds from the start to the end, and how many of them training waited for rows, but for a leg's first."""

    seconds = waited = opening = 0.0

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.begun = time.perf_counter()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.seconds = time.perf_counter() - self.begun
        waiting = trainer.datamodule.waiting  # type: ignore[attr-defined]
        self.waited, self.opening = waiting.seconds, waiting.opening


def _under_lightning(settings: dict[str, Any], folder: Path) -> _Clock:
    prepared = prepare(Config.parse(settings), storage.open(folder / "borehole.zarr"))
    clock = _Clock()
    fit(prepared, None, None, progress=False, callbacks=[clock])
    return clock


def _paper_error(posterior: Posterior) -> float:
    x = np.random.default_rng(1).random((FRESH, len(borehole.CONTROLS)))
    return borehole.paper_error(posterior.sample(200, seed=0), x)


def _inside(posterior: Posterior) -> str:
    """How many truths lie inside the 90 % intervals."""
    rows = posterior.summary(0.9)
    inside = sum(row.low <= truth <= row.high for row, truth in zip(rows, borehole.THETA, strict=True))
    return f"{inside} of {len(rows)}"


def _train_large(folder: str) -> tuple[float, float]:
    """This process' memory before and at its highest, training with a small budget on many rows."""
    assert CONTROLS == PARAMETERS + 2
    features = {"features": {"features": 20}}
    stages = {"emulator": {"steps": 50}, "theta": {"steps": 5}, "joint": {"steps": 2}, "evaluations": 0}
    config = Config.parse(
        {
            "store": f"{folder}/large.zarr",
            "output": f"{folder}/large",
            "model": {"eta": features, "delta": features},
            "fit": stages,
            "data": {"memory": BUDGET},
        }
    )
    base = memory_mb("VmRSS")
    fit(prepare(config, storage.open(config.store)), None, None, progress=False)
    return base, memory_mb("VmHWM")
