"""Rows of a store as the model sees them: those at hand from the start, and those kept out to judge the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from storage.run_identity import run_numbers
from storage.sampling import sample
from storage.store import Store
from vcal_dist.batches import Observations, Runs, Scaling, Table, take
from vcal_dist.calibration import ModelSettings
from vcal_dist.errors import ModelError
from vcal_dist.few_runs import is_stacked
from vcal_dist.noise import row_normal
from vcal_dist.plan import FitSettings
from vcal_dist.transforms import OutputScaling, TransformSettings

AT_HAND = 32_768  # rows of each table that every process holds
LEAVE_ONE_OUT = 400  # tables of up to so many rows keep none out: rows are left out one by one at the end
LEAST_RUNS = 10  # of several rows each, of which some can be held out
HELD_KEY = 77  # no seed: trainings with other seeds are judged by the same rows


class AtHand(NamedTuple):
    """Rows that every process holds, the same ones, and of which some are held out of training (weight zero)."""

    scaling: Scaling
    runs: Runs
    observations: Observations
    held_runs: Tensor  # numbers of the rows that are kept out, sorted
    held_observations: Tensor
    complete: bool  # whether the observations are all there are
    distinct: int  # runs that the rows of the runs' table belong to
    run: Tensor | None = None  # (B,) the number of the run of each row of `runs`; None: every row is a run
    stacked: bool = False  # whether the runs are so few that the emulator is stacked: none is held out then


def rows_at_hand(
    store: Store,
    settings: ModelSettings,
    transforms: dict[str, TransformSettings],
    *,
    fit: FitSettings,
    holdout: float,
    holdout_rows: int,
    dtype: torch.dtype,
    stacked: bool | None = None,
) -> AtHand:
    """Reads them, finds the outputs' scaling from them, and chooses which to hold out: whole runs of the runs' table.

    `stacked` says whether the emulator is, where that is known from an earlier training.
    """
    names = [output.name for output in store.problem.outputs]
    for name in transforms:
        if name not in names:
            raise ModelError(f"transforms names the output '{name}'; the outputs are {', '.join(names)}")
    (of_runs, row_numbers), (of_field, field_numbers) = (
        sample(table, AT_HAND) for table in (store.runs, store.observations)
    )
    chosen = [transforms.get(name, TransformSettings()) for name in names]
    kinds = {settings.likelihood_z.kind, settings.likelihood_y.kind}
    outputs = OutputScaling.from_runs(
        torch.as_tensor(of_runs["z"]), chosen, names, standardise=kinds <= {"gaussian", "student_t"}
    )
    scaling = Scaling(store.problem, outputs, dtype)
    x, t, z = (torch.as_tensor(of_runs[array]) for array in ("x", "t", "z"))
    runs = scaling.runs(x, t, z, torch.as_tensor(row_numbers))
    noise = of_field.get("noise")
    observations = scaling.observations(
        torch.as_tensor(of_field["x"]),
        torch.as_tensor(of_field["y"]),
        None if noise is None else torch.as_tensor(noise),
        row=torch.as_tensor(field_numbers),
    )
    distinct = store.count_runs()
    run_of_row = None if distinct == store.runs.rows else torch.as_tensor(run_numbers(store.runs))
    if stacked is None:
        stacked = is_stacked(settings, fit, distinct, runs.u.shape[1])
    known = [table.row[~values.isnan().all(-1)] for table, values in ((runs, runs.z), (observations, observations.y))]
    if stacked:
        held_runs = runs.row[:0]
    elif run_of_row is not None:
        held_runs = _held_siblings(run_of_row, distinct, holdout, holdout_rows)
    else:
        held_runs = _held(known[0], store.runs.rows, holdout, holdout_rows, (HELD_KEY, 0))
    held_observations = _held(known[1], store.observations.rows, holdout, holdout_rows, (HELD_KEY, 1))
    return AtHand(
        scaling,
        keep_out(runs, held_runs),
        keep_out(observations, held_observations),
        held_runs,
        held_observations,
        len(observations.x) == store.observations.rows,
        distinct,
        None if run_of_row is None else run_of_row[runs.row],
        stacked,
    )


def _held_siblings(run: Tensor, distinct: int, share: float, most: int) -> Tensor:
    """All rows of the runs that are held out, where runs have several rows each: siblings would give a row away."""
    if distinct < LEAST_RUNS or not share:
        return run[:0]
    count = min(max(1, math.floor(share * distinct)), most)
    order = row_normal((HELD_KEY, 0), torch.arange(distinct), 1, dtype=torch.float64)[:, 0].argsort()
    return torch.isin(run, order[:count]).nonzero()[:, 0]


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
