"""Rows of a store as the model sees them: those at hand from the start, and those kept out to judge the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from storage.sampling import sample
from storage.store import Store
from vcal_dist.batches import Observations, Runs, Scaling, Table, take
from vcal_dist.calibration import ModelSettings
from vcal_dist.errors import ModelError
from vcal_dist.noise import row_normal
from vcal_dist.transforms import OutputScaling, TransformSettings

AT_HAND = 32_768  # rows of each table that every process holds
LEAVE_ONE_OUT = 400  # tables of up to so many rows keep none out: rows are left out one by one at the end
HELD_KEY = 77  # no seed: trainings with other seeds are judged by the same rows


class AtHand(NamedTuple):
    """Rows that every process holds, the same ones, and of which some are kept out of training (weight zero)."""

    scaling: Scaling
    runs: Runs
    observations: Observations
    held_runs: Tensor  # numbers of the rows that are kept out, sorted
    held_observations: Tensor
    complete: bool  # whether the observations are all there are


def rows_at_hand(
    store: Store,
    settings: ModelSettings,
    transforms: dict[str, TransformSettings],
    *,
    holdout: float,
    holdout_rows: int,
    dtype: torch.dtype,
) -> AtHand:
    """Reads them, finds the outputs' scaling from them, and chooses which to keep out."""
    names = [output.name for output in store.problem.outputs]
    for name in transforms:
        if name not in names:
            raise ModelError(f"transforms names the output '{name}'; the outputs are {', '.join(names)}")
    (of_runs, run_numbers), (of_field, field_numbers) = (
        sample(table, AT_HAND) for table in (store.runs, store.observations)
    )
    chosen = [transforms.get(name, TransformSettings()) for name in names]
    kinds = {settings.likelihood_z.kind, settings.likelihood_y.kind}
    outputs = OutputScaling.from_runs(
        torch.as_tensor(of_runs["z"]), chosen, names, standardise=kinds <= {"gaussian", "student_t"}
    )
    scaling = Scaling(store.problem, outputs, dtype)
    x, t, z = (torch.as_tensor(of_runs[array]) for array in ("x", "t", "z"))
    runs = scaling.runs(x, t, z, torch.as_tensor(run_numbers))
    noise = of_field.get("noise")
    observations = scaling.observations(
        torch.as_tensor(of_field["x"]),
        torch.as_tensor(of_field["y"]),
        None if noise is None else torch.as_tensor(noise),
        row=torch.as_tensor(field_numbers),
    )
    held_runs, held_observations = (
        _held(numbers[~outputs.isnan().all(-1)], rows, holdout, holdout_rows, (HELD_KEY, i))
        for i, (numbers, outputs, rows) in enumerate(
            [
                (runs.row, runs.z, store.runs.rows),
                (observations.row, observations.y, store.observations.rows),
            ]
        )
    )
    return AtHand(
        scaling,
        keep_out(runs, held_runs),
        keep_out(observations, held_observations),
        held_runs,
        held_observations,
        len(observations.x) == store.observations.rows,
    )


def _held(numbers: Tensor, rows: int, share: float, most: int, key: Sequence[int]) -> Tensor:
    """Which of the rows at hand, those with a known output, are kept out: the order depends on the row alone."""
    if rows <= LEAVE_ONE_OUT:
        return numbers[:0]
    count = min(math.floor(share * rows), most, len(numbers) // 2)
    order = row_normal(key, numbers, 1, dtype=torch.float64)[:, 0].argsort()
    return numbers[order[:count]].sort().values


def keep_out(table: Table, held: Tensor) -> Table:
    """The table with weight zero for rows that are kept out."""
    if len(held) == 0:
        return table
    place = torch.searchsorted(held, table.row).clamp_max(len(held) - 1)
    return table._replace(weight=torch.where(held[place] == table.row, 0.0, table.weight))


def held_rows(table: Table, held: Tensor) -> Table:
    """The rows of a table that are kept out, with weight one."""
    chosen = take(table, torch.isin(table.row, held))
    return chosen._replace(weight=torch.ones_like(chosen.weight))
