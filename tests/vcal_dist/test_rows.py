"""Which rows are held out: whole runs, so that no row has siblings in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import storage
from storage.store import Store
from vcal_dist.calibration import ModelSettings
from vcal_dist.plan import FitSettings
from vcal_dist.rows import LEAST_RUNS, AtHand, rows_at_hand

PROBLEM: dict[str, Any] = {
    "name": "line",
    "control_inputs": [{"name": "time", "bounds": [0, 1]}],
    "calibration_inputs": [{"name": "k", "bounds": [0, 1]}],
    "outputs": [{"name": "f"}],
}
FEATURES = ModelSettings(emulator="features")


def make_store(path: Path, runs: int, rows: int, *, numbered: bool = False) -> Store:
    """Runs of so many rows each, in random order; numbered ones share calibration inputs in pairs."""
    rng = np.random.default_rng(1)
    store = storage.create(path, PROBLEM)
    number = rng.permutation(np.repeat(np.arange(runs), rows))
    t = rng.random(runs)[number // 2 if numbered else number]
    x = rng.random(len(t))
    run = {"run": number} if numbered else {}
    store.append_runs(x=x[:, None], t=t[:, None], z=(x * t)[:, None], **run)
    store.append_observations(x=rng.random((5, 1)), y=rng.random((5, 1)))
    return store


def at_hand(store: Store, settings: ModelSettings, holdout: float = 0.05, **more: Any) -> AtHand:
    return rows_at_hand(
        store, settings, {}, fit=FitSettings(), holdout=holdout, holdout_rows=2000, dtype=torch.float32, **more
    )


@pytest.mark.parametrize("numbered", [False, True])
def test_whole_runs_are_held_out(tmp_path: Path, numbered: bool) -> None:
    store = make_store(tmp_path / "line.zarr", 60, 20, numbered=numbered)
    found = at_hand(store, FEATURES)
    assert found.distinct == 60
    assert found.run is not None
    held = torch.isin(found.runs.row, found.held_runs)
    assert int(held.sum()) == 3 * 20  # five in a hundred of sixty runs
    assert not set(found.run[held].tolist()) & set(found.run[~held].tolist())
    assert torch.equal(found.runs.weight == 0, held)
    assert not found.stacked


def test_of_few_runs_none_is_held_out(tmp_path: Path) -> None:
    store = make_store(tmp_path / "line.zarr", 60, 20)
    found = at_hand(store, ModelSettings())
    assert found.stacked
    assert len(found.held_runs) == 0
    assert not at_hand(store, ModelSettings(), stacked=False).stacked  # as an earlier training was


def test_runs_of_one_row_each_are_held_out_by_rows(tmp_path: Path) -> None:
    store = make_store(tmp_path / "line.zarr", 3000, 1)
    found = at_hand(store, ModelSettings())
    assert found.distinct == 3000
    assert found.run is None
    assert len(found.held_runs) == 150
    assert not found.stacked


def test_very_few_long_runs_are_not_held_out(tmp_path: Path) -> None:
    found = at_hand(make_store(tmp_path / "line.zarr", LEAST_RUNS - 1, 100), FEATURES)
    assert len(found.held_runs) == 0
    found = at_hand(make_store(tmp_path / "more.zarr", LEAST_RUNS, 100), FEATURES)
    assert len(found.held_runs) == 100  # one run
    assert len(at_hand(make_store(tmp_path / "none.zarr", 50, 10), FEATURES, holdout=0.0).held_runs) == 0
