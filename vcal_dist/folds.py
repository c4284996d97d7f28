"""Whole runs in folds, for cross-validation: rows of one run are siblings, and never tell of each other."""

from __future__ import annotations

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from vcal_dist.noise import shared_normal

FOLDS_KEY = 78  # in the keys of the random numbers, apart from what training draws


def run_numbers(t: Tensor) -> Tensor:
    """Which run each row belongs to, (B,), counted from 0: rows with the same calibration inputs t (B, d2) are one."""
    return torch.unique(t, dim=0, return_inverse=True)[1]


def inseparable(t: Tensor, run: Tensor | None) -> Tensor:
    """A group for every row, (B,), counted from 0: rows of one run, and runs with the same calibration inputs.

    Replicates of a run give each other away as siblings do. Without numbers of the runs (B,), t (B, d2) tells them.
    """
    by_t = run_numbers(t)
    if run is None:
        return by_t
    pairs = torch.stack([run, by_t + int(run.max()) + 1]).cpu().numpy()
    nodes = int(pairs.max()) + 1
    graph = coo_array((np.ones(pairs.shape[1], dtype=bool), tuple(pairs)), shape=(nodes, nodes))
    group = torch.from_numpy(connected_components(graph, directed=False)[1]).to(run.device)
    return torch.unique(group[run], return_inverse=True)[1]


def assign_folds(run: Tensor, folds: int, repeats: int, seed: int) -> Tensor:
    """A fold for every row, (repeats, B): each repeat deals the runs again, as evenly as it can."""
    count = int(run.max()) + 1
    found = []
    for repeat in range(repeats):
        order = shared_normal((seed, FOLDS_KEY, repeat), (count,), dtype=torch.float64, device=torch.device("cpu"))
        place = torch.empty(count, dtype=torch.long)
        place[order.argsort()] = torch.arange(count) % folds
        found.append(place.to(run.device)[run])
    return torch.stack(found)
