"""Small calibrations for the tests of reports: trained in a second or two, of any size, with names that bite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.problem import Problem, parse_problem
from storage.store import create
from tests.vcal_dist.training_kit import config, merge
from vcal_dist.training import train

Array = NDArray[np.float64]
Simulator = Callable[[Array, Array, int], Array]  # of x (B, d1) and t (B, d2), with so many outputs
TAG = "<img src=x onerror=alert(1)>"
BREAK = "</script><script>alert(2)</script>"  # a name has no slashes; units, descriptions and paths may
UNIT = BREAK + r" \upmu m"  # which Vega-Lite would read as code; a name has no backslashes either
STRANGE = f"{TAG} $(x)|&amp; datum['a'].b[0]: \"`"


def problem(
    controls: int = 1,
    parameters: int = 2,
    outputs: int = 1,
    *,
    strange: bool = False,
    prior: dict[str, Any] | None = None,
) -> Problem:
    def named(letter: str, count: int) -> list[dict[str, Any]]:
        name, unit, text = (f" {STRANGE}", UNIT, f"{BREAK}{TAG} {UNIT}") if strange else ("", "m", "")
        return [{"name": f"{letter}{j}{name}", "unit": unit, "description": text} for j in range(count)]

    return parse_problem(
        {
            "name": STRANGE if strange else "small",
            "description": BREAK if strange else "",
            "control_inputs": [{**v, "bounds": [0, 1]} for v in named("x", controls)],
            "calibration_inputs": [
                {**v, "bounds": [0, 1], **({} if prior is None else {"prior": prior})} for v in named("t", parameters)
            ],
            "outputs": [{**v, "missing": True} for v in named("y", outputs)],
        }
    )


def simulate(x: Array, t: Array, outputs: int) -> Array:
    """Smooth, and each parameter matters half as much as the one before; (B, outputs)."""
    scales = 0.5 ** np.arange(t.shape[1])
    phases = np.arange(outputs)
    return np.sin(3 * x.mean(1, keepdims=True) + phases) * (1 + t @ scales[:, None]) + 0.5 * x[:, :1]


def trained(
    folder: Path,
    *,
    controls: int = 1,
    parameters: int = 2,
    outputs: int = 1,
    runs: int = 450,
    observations: int = 60,
    strange: bool = False,
    simulator: Simulator = simulate,
    truth: float = 0.4,
    prior: dict[str, Any] | None = None,
    outliers: int = 0,
    **sections: Any,
) -> Path:
    """The directory of a finished run; the store lies beside it.

    Nature is the simulator with every parameter at `truth`, and 0.05 more; noise is 0.03, and outliers are 1 away.
    """
    rng = np.random.default_rng(3)
    store = create(folder / "data.zarr", problem(controls, parameters, outputs, strange=strange, prior=prior))
    x, t = rng.random((runs, controls)), rng.random((runs, parameters))
    store.append_runs(x, t, simulator(x, t, outputs))
    x = rng.random((observations, controls))
    y = simulator(x, np.full((observations, parameters), truth), outputs)
    y = y + 0.05 + 0.03 * rng.standard_normal((len(x), 1))
    y[3 : 3 + 5 * outliers : 5] += 1.0
    if outputs > 1:
        y[::7, 0] = np.nan
    store.append_observations(x, y)
    run = folder / ("run <b>" if strange else "run")
    quick = {"fit": {"emulator": {"steps": 60}, "theta": {"steps": 30}, "joint": {"steps": 4}, "evaluations": 64}}
    train(config(store.url, run, **merge(quick, sections)), progress=False)
    return run
