"""What a sweep tries if its section names nothing: what a user has to guess, around what the configuration has."""

from __future__ import annotations

from typing import Any

from vcal_dist.config import Config

WIDE, NARROW = 5.0, 3.0  # factors upwards and downwards
LENGTHSCALE = 0.5  # where the configuration leaves it to the number of inputs
SPREAD = 0.1


def default_space(config: Config) -> dict[str, dict[str, Any]]:
    """Length scales, amplitudes, noises, the number of features, θ's first spread and the stages' rates."""
    model, fit = config.model, config.fit
    space: dict[str, dict[str, Any]] = {}
    processes = {"eta": model.eta} | ({} if model.discrepancy == "none" else {"delta": model.delta})
    for name, process in processes.items():
        key = f"model.{name}"
        if process.learn and not isinstance(process.lengthscale, tuple):  # one for each input is more than a guess
            space[f"{key}.lengthscale"] = _around(process.lengthscale or LENGTHSCALE, WIDE)
        if process.learn:
            space[f"{key}.amplitude"] = _around(process.amplitude, NARROW)
        M = process.features.features
        even = M // 4 * 2 or M
        space[f"{key}.features.features"] = {"choice": list(dict.fromkeys([even, M, 2 * M]))}
    for name in ("likelihood_z", "likelihood_y"):
        likelihood = getattr(model, name)
        if likelihood.kind in ("gaussian", "student_t") and likelihood.learn_noise:
            low, high = _around(likelihood.noise, WIDE)["loguniform"]
            space[f"model.{name}.noise"] = {"loguniform": [max(low, 2 * likelihood.floor), high]}
    space["fit.spread"] = _around(fit.spread or (1.0 if fit.weights == "meanfield" else SPREAD), NARROW)
    for stage, default in fit.stages.items():
        space[f"fit.{stage}.rate"] = _around(getattr(fit, stage).rate or default.rate, WIDE)
    if fit.weights != "meanfield":
        space["fit.discrepancy_rate"] = _around(fit.discrepancy_rate, WIDE)
    return space


def _around(value: float, factor: float) -> dict[str, Any]:
    """From a factor below to a factor above, to three digits."""
    return {"loguniform": [float(f"{value / factor:.3g}"), float(f"{value * factor:.3g}")]}
