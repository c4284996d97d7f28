"""Rows per second of the emulator's collapsed stage on one and on two processes, one thread each.

Started as a module with a store and a number of processes, it trains some steps and prints the rate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import storage
from vcal_dist.config import Config

FEATURES, BATCH = 200, 8192
WARM_UP, STEPS, QUICK_STEPS = 5, 40, 15


def two_process_speedup(store: Path, *, turns: int, quick: bool) -> dict[str, Any]:
    """The best rate of each, from turns that alternate."""
    rates: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(turns):
        for processes, found in rates.items():
            found.append(rate(store, processes, QUICK_STEPS if quick else STEPS))
    one, two = max(rates[1]), max(rates[2])
    return {
        "two_process_speedup": round(two / one, 3),
        "one_process_rows_per_s": round(one),
        "two_process_rows_per_s": round(two),
    }


def rate(store: Path, processes: int, steps: int) -> float:
    """Rows per second in new processes."""
    command = [sys.executable, "-m", "jobs.bench.processes", str(store), str(processes), str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1])["rows_per_s"])


def main(store: str, processes: int, steps: int) -> None:
    """Trains, and prints the rate of the first process."""
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer

    from vcal_dist.datamodule import StoreData
    from vcal_dist.module import CalibrationModule
    from vcal_dist.training import is_first, make_trainer, prepare, quiet, threads

    class Clock(Callback):
        begun = seconds = 0.0

        def on_train_batch_end(
            self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == WARM_UP - 1:
                self.begun = time.perf_counter()
            if batch_idx == WARM_UP + steps - 1:
                self.seconds = time.perf_counter() - self.begun
                trainer.should_stop = True

    accelerator = "gpu" if torch.cuda.device_count() >= processes else "cpu"
    features = {"features": {"features": FEATURES}}
    config = Config.parse(
        {
            "store": store,
            "model": {"eta": features},
            "fit": {"emulator": {"steps": 10 * steps, "batch_runs": BATCH}},
            "devices": {"accelerator": accelerator, "devices": processes, "threads": 1},
        }
    )
    prepared = prepare(config, storage.open(store))
    clock = Clock()
    with threads(config.devices), quiet():
        trainer = make_trainer(config.devices, [clock], None)
        module = CalibrationModule(prepared.model, prepared.at_hand, config.fit, prepared.totals, seed=0)
        trainer.fit(module, datamodule=StoreData(prepared.store, prepared.at_hand, config.data, seed=0))
    if is_first():
        sys.stdout.write(json.dumps({"rows_per_s": steps * BATCH / clock.seconds}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
