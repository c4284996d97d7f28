"""A ladder of emulators: functions of the literature, designs of 20 to 10⁵ runs, several seeds, several methods.

A cell is a function, a number of runs N, a seed and a method (`jobs.bench.emulator_methods`). It fits a Latin
hypercube of the seed and is scored at fresh uniform points, whole fresh runs for long-form problems: the root mean
square error in standard deviations of the function, the share of outputs inside central 90 % predictive intervals, the
mean log predictive density of the standardised output, and seconds of fitting; beside them, what the emulator reports
of its own error and coverage. Cells run in processes of one thread each.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.bench.emulator_methods import METHODS, Design, methods_for
from jobs.bench.svgp import import_gpytorch
from jobs.console import note
from jobs.workers import in_processes
from storage.errors import VcalError
from vcal_dist.problems.designs import latin_hypercube
from vcal_dist.problems.functions import FUNCTIONS
from vcal_dist.problems.longform import LONG_FORMS

Array = NDArray[np.float64]
NAMES = (*FUNCTIONS, *LONG_FORMS)
SIZES = (20, 50, 100, 300, 1000, 10_000, 100_000)
SEEDS = 3
QUICK_NAMES = ("borehole", "ishigami", "step")
QUICK_SIZES = (20, 50, 100, 300)
QUICK_SEEDS = 1
FRESH = 2000  # points ...
FRESH_RUNS = 30  # ... and of long-form problems at least so many runs
LEVEL = 0.9
ENOUGH = 50  # runs, from where on coverage is expected to hold
SAY_EVERY = 10.0  # seconds between notes about progress


class Task(NamedTuple):
    """What one process works on."""

    function: str
    runs: int
    seed: int
    method: str


class Scores(NamedTuple):
    """How good Gaussian predictions are."""

    rmse: float
    coverage: float
    log_density: float


class Cell(NamedTuple):
    """What one method made of one design; numbers are NaN where it failed."""

    function: str
    runs: int
    seed: int
    method: str
    rows: int
    rmse: float = math.nan  # in standard deviations of the function
    coverage: float = math.nan
    log_density: float = math.nan  # of the standardised output
    seconds: float = math.nan
    reported_rmse: float | None = None
    reported_coverage: float | None = None
    failed: str = ""


def run(
    *,
    quick: bool,
    functions: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    seeds: int | None = None,
) -> dict[str, Any]:
    """All cells and their summary."""
    begun = time.perf_counter()
    tasks = choose(
        functions or (QUICK_NAMES if quick else NAMES),
        sizes or (QUICK_SIZES if quick else SIZES),
        seeds or (QUICK_SEEDS if quick else SEEDS),
    )
    import_gpytorch()  # a missing package is one message, and no failure of every cell
    cells = sorted(_measured(tasks))
    return {
        **summarise(cells),
        "seconds": time.perf_counter() - begun,
        "cells": [cell._asdict() for cell in cells],
    }


def choose(functions: Sequence[str], sizes: Sequence[int], seeds: int) -> list[Task]:
    """The tasks, the longest first. A long-form problem has its own number of runs."""
    unknown = [name for name in functions if name not in NAMES]
    if unknown:
        raise VcalError(f"there is no function '{unknown[0]}'; accepted: {', '.join(NAMES)}")
    if min(sizes) < 2:
        raise VcalError(f"a size is {min(sizes)}; a design needs at least 2 runs")
    tasks = [
        Task(name, runs, seed, method)
        for name in dict.fromkeys(functions)
        for runs in ([LONG_FORMS[name].runs] if name in LONG_FORMS else sorted(set(sizes)))
        for seed in range(seeds)
        for method in methods_for(_rows(name, runs), runs)
    ]
    return sorted(tasks, key=lambda task: -_rows(task.function, task.runs))


def make(name: str, runs: int, seed: int) -> tuple[Design, Array, Array]:
    """A design, and fresh points with their outputs."""
    rng, fresh_rng = (np.random.default_rng([seed, runs, part]) for part in (0, 1))
    if name in FUNCTIONS:
        function = FUNCTIONS[name]
        u, fresh = latin_hypercube(runs, function.inputs, rng), fresh_rng.random((FRESH, function.inputs))
        return Design(u, function(u), np.arange(runs), 0), fresh, function(fresh)
    problem = LONG_FORMS[name]
    places, controls = problem.x.shape
    rows = problem.rows(latin_hypercube(runs, problem.parameters, rng))
    others = problem.rows(fresh_rng.random((max(FRESH_RUNS, -(-FRESH // places)), problem.parameters)))
    return Design(*rows, controls), others.u, others.z


def measure(task: Task) -> Cell:
    """Fits and scores a method. An error is part of the result: the other cells go on."""
    design, fresh, truth = make(task.function, task.runs, task.seed)
    cell = Cell(*task, rows=len(design.u))
    try:
        begun = time.perf_counter()
        fitted = METHODS[task.method](design, task.seed)
        seconds = time.perf_counter() - begun
        mean, sd = fitted.predict(fresh)
    except MemoryError:
        raise
    except Exception as error:
        return cell._replace(failed=f"{type(error).__name__}: {error}")
    scale = float(truth.std())
    reported = fitted.reported_rmse
    return cell._replace(
        **score(mean / scale, sd / scale, truth / scale)._asdict(),
        seconds=seconds,
        reported_rmse=None if reported is None else reported / scale,
        reported_coverage=fitted.reported_coverage,
    )


def score(mean: Array, sd: Array, truth: Array) -> Scores:
    """Error, coverage and mean log density of Gaussian predictions."""
    half = statistics.NormalDist().inv_cdf(0.5 + LEVEL / 2)
    off = truth - mean
    with np.errstate(all="ignore"):  # a standard deviation of zero
        log_density = -0.5 * np.square(off / sd) - np.log(sd) - 0.5 * math.log(2 * math.pi)
    log_density = np.where(sd > 0, log_density, -np.inf)
    return Scores(
        rmse=float(np.sqrt(np.mean(np.square(off)))),
        coverage=float(np.mean(np.abs(off) <= half * sd)),
        log_density=float(np.mean(log_density)),
    )


def summarise(cells: Iterable[Cell]) -> dict[str, Any]:
    """How `default` does, over functions and sizes, and beside the exact Gaussian process.

    Coverages of a function and size are means over seeds; all else is medians over seeds.
    """
    groups: dict[tuple[str, int, str], list[Cell]] = {}
    failed = 0
    for cell in cells:
        if cell.failed:
            failed += 1
        else:
            groups.setdefault((cell.function, cell.runs, cell.method), []).append(cell)
    own = {key[:2]: group for key, group in groups.items() if key[2] == "default"}
    exact = {key[:2]: group for key, group in groups.items() if key[2] == "exact_gp"}
    coverage = {key: statistics.mean(cell.coverage for cell in group) for key, group in own.items()}
    enough = {key: value for key, value in coverage.items() if key[1] >= ENOUGH}
    few = [value for key, value in coverage.items() if key[1] == 20]
    long_form = [value for key, value in coverage.items() if key[0] in LONG_FORMS]
    both = [(own[key], exact[key]) for key in own if key in exact]
    gains = [_median(a, "log_density") - _median(b, "log_density") for a, b in both]
    better = [_median(a, "rmse") < _median(b, "rmse") for a, b in both]
    reported = [
        statistics.median(cell.reported_rmse / cell.rmse for cell in group if cell.reported_rmse is not None)
        for group in own.values()
        if any(cell.reported_rmse is not None for cell in group)
    ]
    return {
        "worst_coverage": min(enough.values(), default=None),
        "worst_coverage_of": _name(min(enough, key=enough.__getitem__, default=None)),
        "highest_coverage": max(enough.values(), default=None),
        "highest_coverage_of": _name(max(enough, key=enough.__getitem__, default=None)),
        "worst_coverage_20": min(few, default=None),
        "worst_coverage_long_form": min(long_form, default=None),
        "median_log_density_gain_over_exact_gp": statistics.median(gains) if gains else None,
        "share_log_density_no_worse": statistics.mean(gain >= 0 for gain in gains) if gains else None,
        "share_rmse_better": statistics.mean(better) if better else None,
        "reported_over_true_rmse_min": min(reported, default=None),
        "reported_over_true_rmse_max": max(reported, default=None),
        "failed": failed,
    }


def _median(group: list[Cell], value: str) -> float:
    median: float = statistics.median(getattr(cell, value) for cell in group)
    return median


def _name(key: tuple[str, int] | None) -> str | None:
    return None if key is None else f"{key[0]}, N = {key[1]:,}"


def _rows(name: str, runs: int) -> int:
    return runs * (len(LONG_FORMS[name].x) if name in LONG_FORMS else 1)


def _measured(tasks: list[Task]) -> list[Cell]:
    """Every cell, with notes about progress."""
    workers = min(len(tasks), len(os.sched_getaffinity(0)))
    note(f"{len(tasks)} cells in {workers} processes")
    cells: list[Cell] = []
    said = time.monotonic()
    try:
        with closing(in_processes(measure, tasks, workers)) as results:  # Ctrl-C ends the processes too
            for cell in results:
                cells.append(cell)
                if cell.failed:
                    note(f"{cell.method} failed: {_name((cell.function, cell.runs))}, seed {cell.seed}: {cell.failed}")
                if time.monotonic() - said > SAY_EVERY:
                    said = time.monotonic()
                    note(f"{len(cells)} of {len(tasks)} cells")
    except BrokenProcessPool:
        raise VcalError("a process has died, for want of memory perhaps; give smaller --sizes") from None
    return cells
