"""Calibration of arrays in memory: a loop over the phases of `vcal_dist.schedule`, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from vcal_dist.allocation import keep_pages
from vcal_dist.batches import Observations, Runs, Table, take
from vcal_dist.calibration import CalibrationModel
from vcal_dist.errors import ModelError
from vcal_dist.few_runs import FEWEST, is_stacked
from vcal_dist.fullrank import Frame
from vcal_dist.initialise import start_model
from vcal_dist.phases import Batch, Descent, Feed, blocks
from vcal_dist.plan import FitSettings, Totals
from vcal_dist.schedule import Schedule, emulator_phases
from vcal_dist.stages import Stage
from vcal_dist.validation import Validation
from vcal_dist.work import Fitted, Work

ENOUGH = 20_000  # rows that often have too many runs already
Report = Callable[[str, int, float], None]  # stage, step, loss


def fit(
    model: CalibrationModel,
    runs: Runs,
    observations: Observations,
    settings: FitSettings | None = None,
    *,
    seed: int = 0,
    report: Report | None = None,
) -> Fitted:
    """Trains the model on all runs and observations, by the schedule of `settings.weights`."""
    settings = settings or FitSettings()
    if seed < 0:
        raise ModelError(f"seed is {seed}; accepted: 0 or more")
    check(model, runs, observations)
    start_model(model, runs, observations, seed)
    totals = Totals(len(runs.u), len(observations.x))
    work = Work(model, settings, totals, seed, observations, few_rows(model, runs, settings))
    drive(Schedule(work), runs, observations, report)
    return Fitted.from_work(work)


class FittedEmulator(NamedTuple):
    """What the runs say of η's weights, and how well they are told."""

    frame: Frame
    log_evidence: float | None  # of all runs; of a stacked emulator, the log density of the runs held out in turn
    validation: Validation | None  # of a stacked emulator


def fit_emulator(
    model: CalibrationModel, runs: Runs, settings: FitSettings, *, seed: int = 0, report: Report | None = None
) -> FittedEmulator:
    """η's hyperparameters and features, then what all runs say of its weights."""
    work = Work(model, settings, Totals(len(runs.u), 0), seed, None, few_rows(model, runs, settings))
    drive(Schedule(work, emulator_phases(work)), runs, None, report)
    assert work.found.frame is not None
    return FittedEmulator(work.found.frame, work.found.log_evidence_runs, work.found.validation)


def few_rows(model: CalibrationModel, runs: Runs, settings: FitSettings) -> Runs | None:
    """The runs, if they are so few that the emulator is stacked."""
    t = runs.u[runs.weight > 0][:, model.controls :]
    stacked = False
    for rows in (ENOUGH, len(t)):  # to count all of 10⁶ takes a second, and the first rows often show too many
        distinct = len(torch.unique(t[:rows], dim=0))
        stacked = is_stacked(model.settings, settings, distinct, model.eta.inputs)
        if distinct >= FEWEST and not stacked:
            break
    return runs if stacked else None


def drive(
    schedule: Schedule, runs: Runs | None, observations: Observations | None, report: Report | None = None
) -> None:
    """Takes every phase of a schedule over rows in memory."""
    keep_pages()
    schedule.start()
    while (phase := schedule.phase) is not None:
        for batch in leg(phase.feed, runs, observations, (schedule.work.seed, schedule.number)):
            loss = schedule.step(batch).loss
            if report is not None and loss is not None:
                report(phase.name, schedule.batch - 1, loss)
        schedule.turn()


def run_stage(
    stage: Stage, runs: Runs | None, observations: Observations | None, seed: int, report: Report | None = None
) -> None:
    """One stage on its own."""
    phase = Descent(stage)
    for step, batch in enumerate(leg(phase.feed, runs, observations, (seed, 0))):
        loss = phase.step(batch).loss
        if report is not None and loss is not None:
            report(stage.name, step, loss)


def leg(feed: Feed, runs: Runs | None, observations: Observations | None, seed: tuple[int, int]) -> Iterator[Batch]:
    """The batches of a leg, from rows in memory."""
    if feed.batches is None:
        if feed.runs is not None and runs is not None:
            yield from (Batch(block, None) for block in blocks(runs))
        elif feed.observations is not None and observations is not None:
            yield from (Batch(None, block) for block in blocks(observations))
        return
    of_runs = shuffled(runs, feed.runs, (*seed, 0)) if runs is not None and feed.runs else None
    of_observations = (
        shuffled(observations, feed.observations, (*seed, 1))
        if observations is not None and feed.observations
        else None
    )
    for _ in range(feed.batches):
        yield Batch(next(of_runs) if of_runs else None, next(of_observations) if of_observations else None)


def shuffled(table: Table, size: int, seed: tuple[int, int, int]) -> Iterator[Table]:
    """Endless batches, every row once an epoch (the last rows of an epoch that fill no batch wait for the next)."""
    rows = len(table.weight)
    if size >= rows:
        while True:
            yield table
    generator = torch.Generator().manual_seed((seed[0] * 7919 + seed[1]) * 2 + seed[2])
    while True:
        order = torch.randperm(rows, generator=generator).to(table.weight.device)
        for chosen in order.split(size):
            if len(chosen) == size:
                yield take(table, chosen)


def check(model: CalibrationModel, runs: Runs, observations: Observations) -> None:
    """What cannot work, said before any work is done."""
    if len(runs.u) < 2:
        raise ModelError(f"there are {len(runs.u)} runs; an emulator needs at least 2")
    if len(observations.x) < 1:
        raise ModelError("there are no observations; θ needs at least 1")
    for name, found, expected in (
        ("runs' inputs", runs.u.shape[1], model.eta.inputs),
        ("runs' outputs", runs.z.shape[1], model.outputs),
        ("observations' inputs", observations.x.shape[1], model.controls),
        ("observations' outputs", observations.y.shape[1], model.outputs),
    ):
        if found != expected:
            raise ModelError(f"the {name} have {found} columns; the model was built for {expected}")
    for name, inputs in (("runs", runs.u), ("observations", observations.x)):
        if inputs.dtype != model.dtype:
            raise ModelError(
                f"the inputs of the {name} are {inputs.dtype}, the model is {model.dtype}; give Scaling that dtype"
            )
        if not bool(inputs.isfinite().all()):
            raise ModelError(f"the inputs of the {name} hold values that are not finite; drop those rows")
    names = [str(k) for k in range(model.outputs)]
    noise = observations.noise
    if noise is not None:
        # Also refuses the column where the likelihood has no use for it.
        model.likelihood_y.expected_log_prob(observations.y[:1], observations.y[:1], observations.y[:1] * 0, noise[:1])
        wrong = ~observations.y.isnan() & ~((noise > 0) & noise.isfinite())
        if bool(wrong.any()):
            i, k = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
            raise ModelError(
                f"the noise of observation {i}, output {k}, is {float(noise[i, k]):g}; "
                "accepted: a positive standard deviation wherever the output is known"
            )
    model.likelihood_z.check(runs.z, names)
    model.likelihood_y.check(observations.y, names)
    unknown = runs.z.isnan().all(0).nonzero()[:, 0].tolist()
    if unknown:
        raise ModelError(f"output '{unknown[0]}' is missing (NaN) in every run; an emulator needs known values")
    if bool(observations.y.isnan().all()):
        raise ModelError("every observation is missing (NaN); θ needs at least one that is known")
