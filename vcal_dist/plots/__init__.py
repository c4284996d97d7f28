"""Charts of a posterior: every function takes one and returns an Altair chart, which a notebook shows as it is.

    chart = vcal_dist.plots.marginal(posterior, "rw")
    vcal_dist.plots.write(chart, "rw.pdf")

Names load on first use, and Altair with the first chart.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcal_dist.plots.curves import training, training_theta
    from vcal_dist.plots.functions import discrepancy, discrepancy_map, process
    from vcal_dist.plots.indices import sensitivity
    from vcal_dist.plots.inputs import emulator_errors
    from vcal_dist.plots.joint import pairs
    from vcal_dist.plots.parameters import intervals, marginal
    from vcal_dist.plots.predictions import coverage, emulator, observed, residuals
    from vcal_dist.plots.style import write
    from vcal_dist.plots.warps import warping

# No module is called as a function: importing it would put it in the function's place.
_HOME = {
    "coverage": "predictions",
    "discrepancy": "functions",
    "discrepancy_map": "functions",
    "emulator": "predictions",
    "emulator_errors": "inputs",
    "intervals": "parameters",
    "marginal": "parameters",
    "observed": "predictions",
    "pairs": "joint",
    "process": "functions",
    "residuals": "predictions",
    "sensitivity": "indices",
    "training": "curves",
    "training_theta": "curves",
    "warping": "warps",
    "write": "style",
}

__all__ = [
    "coverage",
    "discrepancy",
    "discrepancy_map",
    "emulator",
    "emulator_errors",
    "intervals",
    "marginal",
    "observed",
    "pairs",
    "process",
    "residuals",
    "sensitivity",
    "training",
    "training_theta",
    "warping",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'vcal_dist.plots' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"vcal_dist.plots.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
