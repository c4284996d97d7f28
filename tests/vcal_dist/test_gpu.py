"""Training on CUDA devices, one and all of them over NCCL, agrees with training on the CPU. `make test-gpu` runs it."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vcal_dist.posterior import Posterior
from vcal_dist.problems import borehole

KINDS: dict[str, dict[str, Any]] = {
    "shallow": {},
    "deep": {"eta": {"hidden": [4], "mean": "linear", "hidden_features": {"features": 20}}},
    "general": {"discrepancy": "general"},
}
WAYS = ("collapsed", "fullrank", "meanfield")


def train(place: Path, kind: str, weights: str, **devices: Any) -> tuple[list[float], Posterior]:
    """Losses of a short training in processes of its own, and the posterior."""
    stages = ("emulator", "theta", "joint")
    if weights == "meanfield":
        stages = ("emulator_weights", "emulator", "weights_and_theta", "everything")  # type: ignore[assignment]
    features = {"eta": {"features": {"features": 20}}, "delta": {"features": {"features": 10}}}
    model = {**features, **KINDS[kind]}
    model["eta"] = {**features["eta"], **KINDS[kind].get("eta", {})}
    store = place / "borehole.zarr"
    if not store.exists():
        borehole.make_store(store, 5000, 1000, seed=0)
    output = place / "-".join([kind, weights, *map(str, devices.values())])
    config = {
        "store": str(store),
        "output": str(output),
        "model": model,
        "fit": {"weights": weights, "screening": 256, **{name: {"steps": 20} for name in stages}},
        "devices": {"precision": "float64", **devices},
        "record_every": 1,
    }
    path = place / f"{output.name}.yaml"
    path.write_text(yaml.safe_dump(config))
    done = subprocess.run([sys.executable, "-m", "vcal_dist", str(path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    with (output / "metrics.csv").open(newline="") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    return losses, Posterior.load(output)


def compare(one: tuple[list[float], Posterior], other: tuple[list[float], Posterior]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(one[1].theta.mean(), other[1].theta.mean(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(one[1].theta.sd(), other[1].theta.sd(), rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "weights"), [*(("shallow", way) for way in WAYS), ("deep", "collapsed"), ("general", "collapsed")]
)
def test_cuda_trains_as_the_cpu_does(tmp_path: Path, kind: str, weights: str) -> None:
    on_cpu = train(tmp_path, kind, weights, accelerator="cpu", devices=1)
    compare(on_cpu, train(tmp_path, kind, weights, accelerator="gpu", devices=1))


@pytest.mark.gpu
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "weights"), [("shallow", "collapsed"), ("deep", "collapsed"), ("shallow", "meanfield")]
)
def test_all_devices_over_nccl_train_as_one_does(tmp_path: Path, kind: str, weights: str) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two CUDA devices, there is {count}")
    alone = train(tmp_path, kind, weights, accelerator="gpu", devices=1)
    compare(alone, train(tmp_path, kind, weights, accelerator="gpu", devices=count, backend="nccl"))
