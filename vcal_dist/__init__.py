"""Bayesian calibration of computer models with deep Gaussian processes and random features.

    scaling = vcal_dist.Scaling(problem, vcal_dist.OutputScaling.from_runs(z, transforms, names))
    model = vcal_dist.CalibrationModel(d1, vcal_dist.ThetaPrior.from_problem(problem), outputs)
    fitted = vcal_dist.fit(model, scaling.runs(x_runs, t, z), scaling.observations(x, y))
    fitted.theta.mean(), fitted.theta.interval("rw", 0.9)

Names load on first use: `import vcal_dist` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcal_dist.analytic import ExactPosterior
    from vcal_dist.batches import Scaling
    from vcal_dist.calibration import CalibrationModel, ModelSettings
    from vcal_dist.errors import ModelError
    from vcal_dist.features import FeatureSettings, RandomFeatures
    from vcal_dist.fitting import fit
    from vcal_dist.gp import GPSettings
    from vcal_dist.likelihoods import LikelihoodSettings
    from vcal_dist.objective import Samples
    from vcal_dist.plan import FitSettings, StageSettings
    from vcal_dist.priors import ThetaPrior
    from vcal_dist.theta import ThetaPosterior
    from vcal_dist.transforms import OutputScaling, TransformSettings
    from vcal_dist.work import Fitted

    __version__: str

_HOME = {
    "ExactPosterior": "analytic",
    "Scaling": "batches",
    "CalibrationModel": "calibration",
    "ModelSettings": "calibration",
    "ModelError": "errors",
    "FeatureSettings": "features",
    "RandomFeatures": "features",
    "Fitted": "work",
    "fit": "fitting",
    "GPSettings": "gp",
    "LikelihoodSettings": "likelihoods",
    "Samples": "objective",
    "ThetaPrior": "priors",
    "FitSettings": "plan",
    "StageSettings": "plan",
    "ThetaPosterior": "theta",
    "OutputScaling": "transforms",
    "TransformSettings": "transforms",
}

__all__ = [
    "CalibrationModel",
    "ExactPosterior",
    "FeatureSettings",
    "FitSettings",
    "Fitted",
    "GPSettings",
    "LikelihoodSettings",
    "ModelError",
    "ModelSettings",
    "OutputScaling",
    "RandomFeatures",
    "Samples",
    "Scaling",
    "StageSettings",
    "ThetaPosterior",
    "ThetaPrior",
    "TransformSettings",
    "__version__",
    "fit",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("vcal-dist")
    if name not in _HOME:
        raise AttributeError(f"module 'vcal_dist' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"vcal_dist.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
