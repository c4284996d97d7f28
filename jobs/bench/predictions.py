"""What predictions promise: 90 % intervals of each kind, against a simulator and a process that are known.

    pendulum       5,000 runs, 40 observations of a clock that is late, as in the README
    borehole       the demo: 10⁵ runs, 10⁴ observations, the paper's discrepancy
    piston         100 runs, 50 observations of a function of the literature, whose last two inputs are unknown
    otl_circuit    the same
    cantilever     the same

A replicate draws a truth from the prior, a design and observations, and calibrates with default settings. Then, at
fresh points: outputs of the simulator at other (x, t) in intervals of `emulator`, the process without noise in those of
`process`, new observations in those of `observation`. Points of one replicate share a posterior, so that shares vary
from replicate to replicate; they are averaged over several.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jobs.console import note
from jobs.workers import in_processes
from storage.errors import VcalError
from storage.problem import Problem, parse_problem
from vcal_dist.calibrating import calibrate
from vcal_dist.posterior import Posterior
from vcal_dist.prediction_kinds import What
from vcal_dist.problems import borehole
from vcal_dist.problems.designs import latin_hypercube
from vcal_dist.problems.functions import FUNCTIONS

Array = NDArray[np.float64]
KINDS: tuple[What, ...] = ("emulator", "process", "observation")
FRESH = 500
SAMPLES = 1000  # that the quantiles come from, as those of `vcal predict`
UNKNOWN = 2  # inputs of a function that are calibrated
RUNS, OBSERVATIONS = 100, 50  # of a function
NOISE = 0.02  # of a function's observations, in standard deviations of its output
BIAS = 0.05  # size of its discrepancy, likewise


class Known(NamedTuple):
    """A problem whose simulator and process can be evaluated anywhere."""

    problem: Problem
    simulate: Callable[[Array, Array], Array]  # x (B, d1), t (B, d2) -> z (B, 1)
    bias: Callable[[Array], Array]  # δ: x (B, d1) -> (B, 1)
    noise: float
    theta: Array  # (d2,)
    runs: int
    observations: int


class Replicate(NamedTuple):
    """The share of fresh values inside 90 % intervals, and the intervals' mean width in sds of the simulator."""

    problem: str
    number: int
    inside: dict[str, float]
    width: dict[str, float]
    seconds: float


def pendulum(rng: np.random.Generator) -> Known:
    """The README's."""
    problem = {
        "name": "pendulum",
        "control_inputs": [{"name": "length", "bounds": [0.5, 2.0]}],
        "calibration_inputs": [
            {"name": "gravity", "bounds": [9.0, 10.5], "prior": {"family": "normal", "mean": 9.8, "sd": 0.2}}
        ],
        "outputs": [{"name": "period"}],
    }
    theta = np.clip(rng.normal(9.8, 0.2, 1), 9.0, 10.5)
    return Known(
        parse_problem(problem, source="the benchmark"),
        lambda x, t: 2 * np.pi * np.sqrt(x / t),
        lambda x: np.full((len(x), 1), 0.01),
        0.005,
        theta,
        5000,
        40,
    )


def demo(rng: np.random.Generator) -> Known:
    """The borehole."""
    theta = rng.random(len(borehole.PARAMETERS))
    return Known(borehole.problem(), borehole.simulate, borehole.discrepancy, borehole.NOISE, theta, 100_000, 10_000)


def function(name: str, rng: np.random.Generator) -> Known:
    """A function of the literature with a smooth discrepancy in its first input."""
    chosen = FUNCTIONS[name]
    controls = chosen.inputs - UNKNOWN
    scale = float(chosen(np.random.default_rng(0).random((10_000, chosen.inputs))).std())
    bounds = [0.0, 1.0]
    problem = {
        "name": name,
        "control_inputs": [{"name": f"x{i + 1}", "bounds": bounds} for i in range(controls)],
        "calibration_inputs": [{"name": f"t{i + 1}", "bounds": bounds} for i in range(UNKNOWN)],
        "outputs": [{"name": "z"}],
    }
    return Known(
        parse_problem(problem, source="the benchmark"),
        lambda x, t: chosen(np.hstack([x, t]))[:, None],
        lambda x: BIAS * scale * np.cos(np.pi * x[:, :1]),
        NOISE * scale,
        rng.random(UNKNOWN),
        RUNS,
        OBSERVATIONS,
    )


PROBLEMS: dict[str, Callable[[np.random.Generator], Known]] = {
    "pendulum": pendulum,
    "borehole": demo,
    **{name: partial(function, name) for name in ("piston", "otl_circuit", "cantilever")},
}


def run(*, problems: Sequence[str] | None = None, replicates: int = 8) -> dict[str, Any]:
    """The mean over replicates of what intervals hold, and its standard error."""
    chosen = list(dict.fromkeys(problems or PROBLEMS))
    unknown = [name for name in chosen if name not in PROBLEMS]
    if unknown:
        raise VcalError(f"there is no problem '{unknown[0]}'; accepted: {', '.join(PROBLEMS)}")
    tasks = [(name, number) for name in chosen for number in range(replicates)]
    done: list[Replicate] = []
    workers = min(len(tasks), len(os.sched_getaffinity(0)))
    with closing(in_processes(one, tasks, workers)) as results:  # Ctrl-C ends the processes too
        for replicate in results:
            done.append(replicate)
            note(f"{len(done)} of {len(tasks)}: {replicate.problem}, replicate {replicate.number}")
    return summarise(sorted(done, key=lambda replicate: (chosen.index(replicate.problem), replicate.number)))


def one(task: tuple[str, int]) -> Replicate:
    """Calibrates a replicate and predicts at fresh points."""
    name, number = task
    rng = np.random.default_rng([number, list(PROBLEMS).index(name)])
    known = PROBLEMS[name](rng)
    begun = time.perf_counter()
    posterior = calibrate(_data(known, rng), known.problem, progress=False, seed=number)
    seconds = time.perf_counter() - begun
    return Replicate(name, number, *held(posterior, known, rng), seconds)


def held(posterior: Posterior, known: Known, rng: np.random.Generator) -> tuple[dict[str, float], dict[str, float]]:
    """What 90 % intervals of each kind hold of fresh values, and how wide they are."""
    x, t = _points(known.problem, FRESH, rng)
    z = known.simulate(x, t)
    process = known.simulate(x, np.tile(known.theta, (len(x), 1))) + known.bias(x)
    y = process + known.noise * rng.standard_normal(process.shape)
    inside: dict[str, float] = {}
    width: dict[str, float] = {}
    for what, truth in zip(KINDS, (z, process, y), strict=True):
        at = t if what == "emulator" else None
        samples = posterior.predict(x, what, t=at, samples=SAMPLES).samples
        assert samples is not None
        low, high = np.quantile(samples, [0.05, 0.95], axis=0, method="inverted_cdf")
        inside[what] = float(np.mean((low <= truth) & (truth <= high)))
        width[what] = float(np.mean(high - low) / z.std())
    return inside, width


def summarise(replicates: Sequence[Replicate]) -> dict[str, Any]:
    """One entry for each problem and kind."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(replicate.problem for replicate in replicates):
        own = [replicate for replicate in replicates if replicate.problem == name]
        for what in KINDS:
            shares = [replicate.inside[what] for replicate in own]
            error = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else None
            found[f"{name}: {what} in 90 %"] = statistics.mean(shares)
            found[f"{name}: {what}, standard error"] = error
            found[f"{name}: {what}, width"] = statistics.mean(replicate.width[what] for replicate in own)
        found[f"{name}: seconds, median"] = statistics.median(replicate.seconds for replicate in own)
    found["replicates"] = len(replicates)
    return found


def _data(known: Known, rng: np.random.Generator) -> dict[str, Array]:
    x_runs, t = _points(known.problem, known.runs, rng)
    x, _ = _points(known.problem, known.observations, rng)
    process = known.simulate(x, np.tile(known.theta, (len(x), 1))) + known.bias(x)
    y = process + known.noise * rng.standard_normal(process.shape)
    return {"x_runs": x_runs, "t": t, "z": known.simulate(x_runs, t), "x": x, "y": y}


def _points(problem: Problem, count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """A Latin hypercube over the bounds of x and t."""
    inputs = [*problem.control_inputs, *problem.calibration_inputs]
    low, high = np.array([variable.bounds for variable in inputs], np.float64).T
    u = low + (high - low) * latin_hypercube(count, len(inputs), rng)
    return u[:, : len(problem.control_inputs)], u[:, len(problem.control_inputs) :]
