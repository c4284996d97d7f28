"""Bayesian calibration of computer models with deep Gaussian processes and random features.

    posterior = vcal_dist.calibrate("borehole.zarr")
    posterior.summary(), posterior.predict(x).mean

Names load on first use: `import vcal_dist` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vcal_dist.analytic import ExactPosterior
    from vcal_dist.batches import Scaling
    from vcal_dist.calibrating import calibrate
    from vcal_dist.calibration import CalibrationModel, ModelSettings
    from vcal_dist.config import Config
    from vcal_dist.errors import ConfigError, Diverged, ModelError, Preempted
    from vcal_dist.features import FeatureSettings, RandomFeatures
    from vcal_dist.fitting import fit
    from vcal_dist.gp import GPSettings
    from vcal_dist.likelihoods import LikelihoodSettings
    from vcal_dist.mixed import Averaged
    from vcal_dist.objective import Samples
    from vcal_dist.plan import FitSettings, StageSettings
    from vcal_dist.posterior import Posterior
    from vcal_dist.priors import ThetaPrior
    from vcal_dist.theta import ThetaPosterior
    from vcal_dist.training import train
    from vcal_dist.transforms import OutputScaling, TransformSettings
    from vcal_dist.work import Fitted

    __version__: str

_HOME = {
    "Averaged": "mixed",
    "ExactPosterior": "analytic",
    "Scaling": "batches",
    "CalibrationModel": "calibration",
    "ModelSettings": "calibration",
    "Config": "config",
    "ConfigError": "errors",
    "Diverged": "errors",
    "ModelError": "errors",
    "Preempted": "errors",
    "calibrate": "calibrating",
    "FeatureSettings": "features",
    "RandomFeatures": "features",
    "Fitted": "work",
    "fit": "fitting",
    "GPSettings": "gp",
    "LikelihoodSettings": "likelihoods",
    "Samples": "objective",
    "Posterior": "posterior",
    "ThetaPrior": "priors",
    "FitSettings": "plan",
    "StageSettings": "plan",
    "ThetaPosterior": "theta",
    "train": "training",
    "OutputScaling": "transforms",
    "TransformSettings": "transforms",
}

__all__ = [
    "Averaged",
    "CalibrationModel",
    "Config",
    "ConfigError",
    "Diverged",
    "ExactPosterior",
    "FeatureSettings",
    "FitSettings",
    "Fitted",
    "GPSettings",
    "LikelihoodSettings",
    "ModelError",
    "ModelSettings",
    "OutputScaling",
    "Posterior",
    "Preempted",
    "RandomFeatures",
    "Samples",
    "Scaling",
    "StageSettings",
    "ThetaPosterior",
    "ThetaPrior",
    "TransformSettings",
    "__version__",
    "calibrate",
    "fit",
    "train",
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
