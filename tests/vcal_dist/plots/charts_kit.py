"""Posteriors of every shape for charts, and how to read a chart's specification."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from storage.problem import Problem, parse_problem
from tests.vcal_dist.conftest import Kit
from vcal_dist.assessment import Judged, judge_observations, judge_runs
from vcal_dist.batches import Scaling
from vcal_dist.calibration import Discrepancy
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.plots.style import with_width
from vcal_dist.posterior import Posterior
from vcal_dist.priors import ThetaPrior
from vcal_dist.transforms import OutputScaling, TransformSettings

Array = NDArray[np.float64]
F64 = torch.float64
# Units are free text: Vega-Lite reads their backslashes and new lines as the code that it makes of titles.
UNITS = {"x": r"\upmu m", "t": "kg.m\\", "y": "1/s\n\\x"}
STRANGE = ["flow.rate [m]: a", "θ 'quoted' \"twice\"", "$(x)|<b>&amp;", "datum['a']", "100 %", "naïve, å"]


def names(letter: str, count: int) -> list[str]:
    """Names that Vega-Lite would read as operators if they were fields, or HTML as tags."""
    return [f"{STRANGE[j % len(STRANGE)]} {letter}{j}" for j in range(count)]


def problem(controls: int, parameters: int, outputs: int) -> Problem:
    priors: list[dict[str, Any]] = [
        {"family": "uniform"},
        {"family": "normal", "mean": 1.0, "sd": 0.4},
        {"family": "gamma", "shape": 4.0, "rate": 4.0},
        {"family": "beta", "a": 0.5, "b": 2.0},
    ]
    return parse_problem(
        {
            "name": "charted",
            "control_inputs": [{"name": n, "unit": UNITS["x"], "bounds": [-1, 3]} for n in names("x", controls)],
            "calibration_inputs": [
                {"name": n, "unit": UNITS["t"], "bounds": [0, 2], "prior": priors[j % len(priors)]}
                for j, n in enumerate(names("t", parameters))
            ],
            "outputs": [{"name": n, "unit": UNITS["y"], "missing": True} for n in names("y", outputs)],
        }
    )


def random_posterior(
    controls: int = 2,
    parameters: int = 3,
    outputs: int = 1,
    *,
    kind: Discrepancy = "additive",
    transform: TransformSettings | None = None,
    likelihood: LikelihoodSettings | None = None,
    varying: bool = False,
    seed: int = 5,
) -> Posterior:
    """A random Gaussian over θ̃ and weights: as good as a trained one for what charts do with it."""
    given = problem(controls, parameters, outputs)
    likelihood = likelihood or LikelihoodSettings(noise=0.2)
    model = Kit.model(
        kind,
        controls=controls,
        prior=ThetaPrior.from_problem(given),
        outputs=outputs,
        likelihood_y=likelihood,
        likelihood_z=likelihood,
        varying_residual=varying,
    )
    if model.varying is not None:
        model.varying.weights += 0.5 * Kit.randn(7, *model.varying.weights.shape)
    counts = likelihood.kind in ("poisson", "bernoulli")
    mean = torch.full((outputs,), 0.0 if counts else 3.0, dtype=F64)
    sd = torch.full((outputs,), 1.0 if counts else 0.5, dtype=F64)
    scaled = OutputScaling([transform or TransformSettings()] * outputs, mean, sd, [o.name for o in given.outputs])
    q = Kit.full_rank(parameters, outputs, model.width, seed=seed)
    return Posterior(Scaling(given, scaled, F64), model, [q], torch.zeros(1, dtype=F64), {})


def judged(posterior: Posterior, rows: int = 40, *, runs: bool = False, missing: bool = False) -> Judged:
    """Draws of the posterior's own predictions, judged by it: the model is the truth."""
    rng = np.random.default_rng(1)
    given, outputs = posterior.problem, len(posterior.problem.outputs)
    x = rng.uniform(-1, 3, (rows, len(given.control_inputs)))
    t = rng.uniform(0.05, 1.95, (rows, len(given.calibration_inputs)))
    options: dict[str, Any] = {"t": t} if runs else {}
    drawn = posterior.predict(x, "emulator" if runs else "observation", samples=rows, **options).samples
    assert drawn is not None
    y = drawn[np.arange(rows), np.arange(rows)]  # (rows, K)
    if missing:
        y[::3, outputs - 1] = np.nan
    if posterior.model.likelihood_z.kind == "poisson":
        y = np.round(y)
    if runs:
        return judge_runs(posterior, x, t, y, leave_one_out=False)
    return judge_observations(posterior, x, y, leave_one_out=False)


def records(posterior: Posterior) -> list[dict[str, str]]:
    """Rows of metrics.csv."""
    found = []
    for step in range(1, 31):
        phase = "emulator" if step <= 20 else "theta"
        row = {"step": str(step), "phase": phase, "seconds": str(step), "loss": f"{5 / step if step <= 20 else -step}"}
        row |= {"emulator_error": f"{10.0 ** -min(step, 20)}"}
        thetas = {f"theta.{v.name}": f"{1 + 0.01 * step}" for v in posterior.problem.calibration_inputs}
        found.append(row | (thetas if step > 20 else dict.fromkeys(thetas, "")))
    return found


# --- specifications ---------------------------------------------------------------------------------------------------


def layers(chart: Any) -> Iterator[dict[str, Any]]:
    """Every unit of a chart, with its rows under "rows"."""
    spec = chart.to_dict()
    yield from _layers(spec, spec.get("datasets", {}), None)


def _layers(spec: dict[str, Any], datasets: dict[str, Any], data: Any) -> Iterator[dict[str, Any]]:
    data = spec.get("data", data)
    if "mark" in spec:
        rows = data.get("values") if "values" in data else datasets[data["name"]]
        yield spec | {"rows": rows}
    for key in ("layer", "hconcat", "vconcat", "concat"):
        for part in spec.get(key, []):
            yield from _layers(part, datasets, data)
    if "spec" in spec:
        yield from _layers(spec["spec"], datasets, data)


def mark(layer: dict[str, Any]) -> str:
    kind: str = layer["mark"] if isinstance(layer["mark"], str) else layer["mark"]["type"]
    return kind


def of_mark(chart: Any, kind: str) -> list[dict[str, Any]]:
    return [layer for layer in layers(chart) if mark(layer) == kind]


def column(layer: dict[str, Any], field: str, **where: Any) -> Array:
    rows = [row for row in layer["rows"] if all(row[key] == value for key, value in where.items())]
    return np.array([row[field] for row in rows], dtype=np.float64)


def axis_titles(chart: Any, width: int = 420) -> list[dict[str, Any]]:
    """Of every panel the titles of its axes as they are drawn, by their scales' names; None for one without."""
    import vl_convert

    return list(_axis_titles(vl_convert.vegalite_to_vega(with_width(chart.to_dict(), width))))


def _axis_titles(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    drawn = [axis for axis in group.get("axes", []) if axis.get("maxExtent") != 0]  # others are grids only
    if drawn:
        yield {"x" if axis["orient"] in ("bottom", "top") else "y": axis.get("title") for axis in drawn}
    for part in group.get("marks", []):
        yield from _axis_titles(part)


def subtitle(chart: Any) -> str:
    return " ".join(line.rstrip() for line in chart.to_dict()["title"]["subtitle"])
