"""The borehole problem: water flow through a borehole that connects two aquifers.

The flow in m³/yr, with x = (Tu, Hu, Hl, L, Kw) known and t = (rw, r, Tl) to be calibrated, is

    flow = 2π·Tu·(Hu − Hl) / [ ln(r/rw) · (1 + 2·L·Tu / (ln(r/rw)·rw²·Kw) + Tu/Tl) ]

and the simulator's output is η = flow/150 − 0.5. Nature adds a discrepancy that no value of t can mimic,

    δ(x) = 0.0051 · 2·(10·x₁² + 4·x₂²) / (50·x₁·x₂ + 10) − 0.01,

and every observation white noise: y = η(x, θ*) + δ(x) + ε, ε ~ N(0, 0.005²). All inputs are scaled to the unit
interval, as in the paper's appendix on the borehole functions; `RANGES` gives their physical ranges.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from storage.errors import StoreError
from storage.priors import Uniform
from storage.problem import CalibrationInput, ControlInput, Output, Problem
from storage.store import Store, create, exists, open_store
from vcal_dist.problems.designs import Range, latin_hypercube

Array = NDArray[np.float64]


RANGES = {
    "Tu": Range(63070.0, 115600.0, "m²/yr", "transmissivity of the upper aquifer"),
    "Hu": Range(990.0, 1110.0, "m", "potentiometric head of the upper aquifer"),
    "Hl": Range(700.0, 820.0, "m", "potentiometric head of the lower aquifer"),
    "L": Range(1120.0, 1680.0, "m", "length of the borehole"),
    "Kw": Range(9855.0, 12045.0, "m/yr", "hydraulic conductivity of the borehole"),
    "rw": Range(0.05, 0.15, "m", "radius of the borehole"),
    "r": Range(100.0, 50000.0, "m", "radius of influence"),
    "Tl": Range(63.1, 116.0, "m²/yr", "transmissivity of the lower aquifer"),
}
CONTROLS = ("Tu", "Hu", "Hl", "L", "Kw")
PARAMETERS = ("rw", "r", "Tl")

THETA = (0.0894107602, 0.3077157724, 0.3724646792)  # θ*, the truth that calibration looks for
NOISE = 5e-3  # standard deviation of ε


class Data(NamedTuple):
    """Simulator runs (x_runs, t, z) and field observations (x, y)."""

    x_runs: Array  # (N, 5)
    t: Array  # (N, 3)
    z: Array  # (N, 1)
    x: Array  # (n, 5)
    y: Array  # (n, 1)


def problem() -> Problem:
    """Names, bounds and priors, as a store or a problem file holds them."""
    return Problem(
        name="borehole",
        description="Water flow through a borehole between two aquifers; inputs scaled to the unit interval.",
        control_inputs=tuple(
            ControlInput(name=name, description=_describe(name), bounds=(0.0, 1.0)) for name in CONTROLS
        ),
        calibration_inputs=tuple(
            CalibrationInput(name=name, description=_describe(name), bounds=(0.0, 1.0), prior=Uniform(low=0, high=1))
            for name in PARAMETERS
        ),
        outputs=(Output(name="flow", description="water flow in m³/yr, divided by 150, minus 0.5"),),
    )


def simulate(x: ArrayLike, t: ArrayLike) -> Array:
    """The computer model η(x, t), shape (B, 1), for x (B, 5) and t (B, 3) in the unit cube."""
    Tu, Hu, Hl, L, Kw = _physical(x, CONTROLS)
    rw, r, Tl = _physical(t, PARAMETERS)
    log_ratio = np.log(r / rw)
    flow = 2 * np.pi * Tu * (Hu - Hl) / (log_ratio * (1 + 2 * L * Tu / (log_ratio * rw**2 * Kw) + Tu / Tl))
    eta: Array = flow / 150 - 0.5
    return eta[:, None]


def discrepancy(x: ArrayLike) -> Array:
    """The discrepancy δ(x), shape (B, 1), for x (B, 5) in the unit cube."""
    x1, x2 = np.asarray(x, np.float64).T[:2]
    delta: Array = 0.0051 * 2 * (10 * x1**2 + 4 * x2**2) / (50 * x1 * x2 + 10) - 0.01
    return delta[:, None]


def observe(x: ArrayLike, rng: np.random.Generator, theta: ArrayLike = THETA, noise: float = NOISE) -> Array:
    """Observations y = η(x, θ) + δ(x) + ε, shape (B, 1), with ε drawn from `rng`."""
    x = np.asarray(x, np.float64)
    t = np.broadcast_to(np.asarray(theta, np.float64), (len(x), len(PARAMETERS)))
    return simulate(x, t) + discrepancy(x) + noise * rng.standard_normal((len(x), 1))


def paper_error(theta: ArrayLike, x: ArrayLike, truth: ArrayLike = THETA) -> float:
    """The paper's measure: the mean over θ ~ q (S, 3) of the root mean square over x of η(x, θ) − (η(x, θ*) + δ(x)).

    At the truth itself it is that of δ, 0.008: lower is not better below that.
    """
    x = np.asarray(x, np.float64)
    nature = simulate(x, np.broadcast_to(np.asarray(truth, np.float64), (len(x), len(PARAMETERS)))) + discrepancy(x)
    errors = [
        np.sqrt(np.mean((simulate(x, np.broadcast_to(t, (len(x), len(PARAMETERS)))) - nature) ** 2))
        for t in np.asarray(theta, np.float64)
    ]
    return float(np.mean(errors))


def generate(runs: int, observations: int, seed: int, theta: ArrayLike = THETA) -> Data:
    """A data set as in the paper: Latin hypercubes for the runs' (x, t) and for the observations' x."""
    rng = np.random.default_rng(seed)
    u = latin_hypercube(runs, len(CONTROLS) + len(PARAMETERS), rng)
    x_runs, t = u[:, : len(CONTROLS)], u[:, len(CONTROLS) :]
    x = latin_hypercube(observations, len(CONTROLS), rng)
    return Data(x_runs=x_runs, t=t, z=simulate(x_runs, t), x=x, y=observe(x, rng, theta))


def make_store(url: str | Path, runs: int, observations: int, seed: int) -> Store:
    """A store with such a data set, new or an empty one filled; nobody sees rows before all are there."""
    expected = {"runs": runs, "observations": observations}
    store = open_store(url) if exists(url) else create(url, problem(), expected_rows=expected)
    if store.problem != problem() or store.runs.rows or store.observations.rows:
        raise StoreError(f"there is already a store with other data at {url}; choose another path, or delete it")
    data = generate(runs, observations, seed)
    with store.writer({"runs": runs, "observations": observations}) as writers:
        if any(writer.start for writer in writers.values()):  # another process was faster
            raise StoreError(f"another process has just written rows to {url}")
        for table, arrays in (("runs", (data.x_runs, data.t, data.z)), ("observations", (data.x, data.y))):
            for array, rows in zip(writers[table].arrays.values(), arrays, strict=True):
                array[:] = rows
    return store


def _describe(name: str) -> str:
    low, high, unit, meaning = RANGES[name]
    return f"{meaning}; 0 to 1 stands for {low:g} to {high:g} {unit}"


def _physical(u: ArrayLike, names: tuple[str, ...]) -> list[Array]:
    """The columns of scaled inputs in physical units."""
    u = np.asarray(u, np.float64)
    if u.ndim != 2 or u.shape[1] != len(names):
        raise ValueError(f"expected an array of shape (rows, {len(names)}) with columns {names}, got shape {u.shape}")
    ranges = [RANGES[name] for name in names]
    return [low + (high - low) * column for (low, high, *_), column in zip(ranges, u.T, strict=True)]
