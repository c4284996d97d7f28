"""Small stores whose rows can be told apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage.problem import Problem, parse_problem
from storage.store import Store, create

PROBLEM: dict[str, Any] = {
    "name": "toy",
    "control_inputs": [{"name": "a", "bounds": [0, 1e9], "unit": "m"}, {"name": "b", "bounds": [-1, 1]}],
    "calibration_inputs": [{"name": "k", "bounds": [0, 1], "description": "stiffness"}],
    "outputs": [{"name": "f", "missing": True, "unit": "N"}],
}


@pytest.fixture
def problem() -> Problem:
    return parse_problem(PROBLEM)


def numbered(count: int, start: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, t and z of rows that carry their own number, three times over."""
    number = np.arange(start, start + count, dtype=np.float64)
    x = np.stack([number, np.sin(number)], axis=1)
    return x, (number % 97 / 97)[:, None], -number[:, None]


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a document stands."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def replaced(data: Any, path: tuple[Any, ...], value: Any, *, remove: bool = False) -> Any:
    """The document with another value in one place, or without it."""
    found = copy.deepcopy(data)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return found


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., Store]:
    """A float64 store with numbered runs and observations."""

    def make(runs: int = 100, observations: int = 10, name: str = "toy.zarr", **settings: Any) -> Store:
        store = create(tmp_path / name, PROBLEM, **{"dtype": "float64", "chunk_rows": 16, **settings})
        store.append_runs(*numbered(runs))
        x, _, y = numbered(observations)
        store.append_observations(x, y)
        return store

    return make


@pytest.fixture(scope="session")
def dask_address() -> Iterator[str]:
    """A real Dask cluster with two worker processes, shared by all tests."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0") as cluster:
        yield cluster.scheduler_address
