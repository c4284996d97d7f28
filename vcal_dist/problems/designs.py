"""Where simulators are run: designs on the unit cube, and the ranges that its coordinates stand for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
SWAPS = 60  # for each run, that the design is improved by


class Range(NamedTuple):
    """The range of an input, with its unit."""

    low: float
    high: float
    unit: str
    meaning: str


def latin_hypercube(rows: int, columns: int, rng: np.random.Generator) -> Array:
    """Points whose every coordinate falls once into each of `rows` equal cells."""
    cells = np.stack([rng.permutation(rows) for _ in range(columns)], axis=1)  # (rows, columns)
    points: Array = (cells + rng.random((rows, columns))) / max(rows, 1)
    return points


def maximin_latin_hypercube(rows: int, columns: int, rng: np.random.Generator, swaps: int = SWAPS) -> Array:
    """A Latin hypercube on the unit cube whose closest points are far apart.

    Swapping one coordinate of two rows leaves it a Latin hypercube. One of the two closest points is swapped with
    another, and the swap stays when the smallest distance of the two that moved has not become smaller.
    """
    points = latin_hypercube(rows, columns, rng)
    if rows < 3:
        return points
    distance = np.square(points[:, None] - points[None]).sum(-1)
    np.fill_diagonal(distance, np.inf)
    for _ in range(swaps * rows):
        moved = np.array([rng.choice(np.unravel_index(distance.argmin(), distance.shape)), rng.integers(rows)])
        column = rng.integers(columns)
        trial = points[moved]
        trial[:, column] = trial[::-1, column]
        fresh = np.square(trial[:, None] - points[None]).sum(-1)  # (2, rows)
        fresh[:, moved] = np.inf
        between = np.square(trial[0] - trial[1]).sum() if moved[0] != moved[1] else np.inf
        if min(fresh.min(), between) <= distance[moved].min():
            continue
        fresh[[0, 1], moved[::-1]] = between
        points[moved] = trial
        distance[moved], distance[:, moved] = fresh, fresh.T
    return points
