"""Section 4.3 of the paper on a stand-in for its data: a spike that a deep emulator follows and a shallow one does not.

Four calibrations of the same data (`vcal_dist.problems.radionuclide`), with as many features in the last layer:

    shallow, paper's start   fixed frequencies; the initial values of the paper's appendix, extended to six parameters
    deep, paper's start      the same with one hidden layer of width 8, and the appendix' values for that
    shallow                  learned frequencies, length scales that start from the data: this library's default
    deep                     the same with one hidden layer of width 8, its frequencies learned too

The appendix starts θ at ½ with a variance of ¼ on the unit interval. That variance has no distribution on the interval
but two points, and weights that are integrated out need no spread of θ to begin with; here θ starts in the middle, and
beside it from the two best points of its screened prior. The shallow ones take more steps, for about the same time.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jobs.reproduce.experiment import Experiment, Figure, Outcome, Say, ingested, trained
from vcal_dist.problems import radionuclide

if TYPE_CHECKING:
    from vcal_dist.assessment import Assessment
    from vcal_dist.posterior import Posterior

VARIANTS = {
    "shallow": "shallow",
    "deep": "deep",
    "shallow_paper": "shallow, paper's start",
    "deep_paper": "deep, paper's start",
}
QUICK = ("shallow", "deep")
MEASURES = {  # of every variant, and their units
    "spike_truth": ("spike: |f − nature|", "kBq/L"),
    "spike_observed": ("spike: |f − observed|", "kBq/L"),
    "spike_emulator": ("spike: |emulator at the true θ − simulator|", "kBq/L"),
    "sites": ("88 sites: RMSE of f against nature", "kBq/L"),
    "rmse": ("fresh runs: RMSE", "kBq/L"),
    "lpd": ("fresh runs: log predictive density", ""),
    "seconds": ("training", "s"),
}
PROFILE = 120  # points of the line from the release through the spike


class Curve(NamedTuple):
    """f along the line from the release through the spike."""

    mean: np.ndarray
    sd: np.ndarray


class Found(NamedTuple):
    """What one calibration says, for figures and charts."""

    sites: np.ndarray  # E f at the sites (88,)
    sites_sd: np.ndarray
    profile: Curve


def variants(quick: bool) -> dict[str, str]:
    """The variants that are run, with their names for people."""
    return {key: VARIANTS[key] for key in QUICK} if quick else VARIANTS


def figures(quick: bool) -> tuple[Figure, ...]:
    """The table: every measure of every variant. The paper has no numbers here."""
    return tuple(
        Figure(f"{measure}_{key}", f"{label}, {name}", unit=unit)
        for measure, (label, unit) in MEASURES.items()
        for key, name in variants(quick).items()
    )


def settings(quick: bool) -> dict[str, Any]:
    """Sizes, and the model and the training of every variant, as a configuration has them."""
    features, steps = (60, 300) if quick else (100, 1000)
    return {
        "runs": 60 if quick else 200,
        "fresh_runs": 20 if quick else 50,
        "variants": {key: _configuration(key, features, steps) for key in variants(quick)},
    }


def _configuration(key: str, features: int, steps: int) -> dict[str, Any]:
    """The sections `model` and `fit` of one variant."""
    if key in ("shallow_paper", "deep_paper"):
        fixed: dict[str, Any] = {"features": features, "frequencies": "fixed"}
        lengthscale = 1 / math.sqrt(20)  # A = 20·I
        eta = {"features": fixed, "lengthscale": lengthscale, "amplitude": 1.0}
        deep = {"hidden_features": fixed, "hidden_lengthscale": 1 / math.sqrt(2), "hidden_amplitude": 1.0}  # A = 2·I
        model: dict[str, Any] = {
            "eta": eta | (deep | {"hidden": [8]} if key == "deep_paper" else {}),
            "delta": {"lengthscale": lengthscale, "amplitude": 0.1},
            "likelihood_z": {"noise": 1e-3},
            "likelihood_y": {"noise": 1e-2},
        }
        middle = {name: (low + high) / 2 for name, (low, high, *_) in radionuclide.PARAMETERS.items()}
        fit: dict[str, Any] = {"start": middle, "spread": 1.0}
    else:
        learned = {"features": features, "frequencies": "learned"}
        deep = {"hidden": [8], "hidden_features": learned} if key == "deep" else {}
        model = {"emulator": "features", "eta": {"features": learned} | deep}  # what is compared is the depth of η
        fit = {}
    # A step of a deep emulator takes four samples of its hidden layer, and so about three times as long.
    fit["emulator"] = {"steps": steps if key.startswith("deep") else 3 * steps}
    return {"model": model, "fit": fit}


def run(folder: Path, seed: int, chosen: dict[str, Any], say: Say) -> Outcome:
    """One data set, calibrated by every variant."""
    from jobs.reproduce.radionuclide_charts import profiles, site_maps

    data = radionuclide.generate(chosen["runs"], seed)
    store = ingested(
        folder,
        radionuclide.problem(),
        {"x": data.x_runs, "t": data.t, "z": data.z},
        {"x": data.x, "y": data.y, "noise": data.noise},
    )
    truth = radionuclide.nature(radionuclide.sites())[:, 0]
    ours: dict[str, float] = {}
    details: dict[str, Any] = {"spike": {"nature": truth[radionuclide.SPIKE], "observed": data.y[0, 0]}}
    found = {}
    for key, configuration in chosen["variants"].items():
        if seed and key.endswith("_paper"):
            continue
        model = {"seed": seed, **configuration["model"]}
        posterior, seconds = trained(store, folder / key, say, seed=seed, model=model, fit=configuration["fit"])
        fresh = _assess_fresh_runs(posterior, chosen["fresh_runs"], seed)
        found[key] = _predicted(posterior)
        measures = _measures(posterior, found[key], truth, float(data.y[0, 0]))
        measures |= {"rmse": fresh.rmse[0], "lpd": fresh.log_predictive_density, "seconds": seconds}
        ours |= {f"{measure}_{key}": float(value) for measure, value in measures.items()}
        details[key] = {
            "spike": {"mean": found[key].sites[radionuclide.SPIKE], "sd": found[key].sites_sd[radionuclide.SPIKE]},
            "fresh_runs": fresh._asdict(),
            "held_out_rows": posterior.record["assessment"]["runs"],
            "theta": {s.name: {"mean": s.mean, "low": s.low, "high": s.high} for s in posterior.summary()},
            "log_evidence": posterior.record["bound"],
        }
    names = {key: VARIANTS[key] for key in found}
    return Outcome(
        ours=ours,
        floor={f"spike_observed_{key}": abs(float(truth[radionuclide.SPIKE] - data.y[0, 0])) for key in found},
        details=details,
        charts={
            "radionuclide-sites": site_maps({names[key]: each.sites for key, each in found.items()}, data),
            "radionuclide-spike": profiles({names[key]: each.profile for key, each in found.items()}, data),
        },
    )


def along_the_spike() -> tuple[np.ndarray, np.ndarray]:
    """Distances (P,) from the release in m, and places (P, 2), on the line through the spike's well."""
    release = np.array(radionuclide.RELEASE)
    way = radionuclide.sites()[radionuclide.SPIKE] - release
    distance = np.linspace(0, 1.6 * float(np.linalg.norm(way)), PROFILE)
    return distance, release + distance[:, None] * way / np.linalg.norm(way)


def _predicted(posterior: Posterior) -> Found:
    wells, (_, line) = radionuclide.sites(), along_the_spike()
    at = posterior.predict(np.concatenate([wells, line]), draws=256)
    mean, sd = at.mean[:, 0], at.sd[:, 0]
    rows = len(wells)
    return Found(mean[:rows], sd[:rows], Curve(mean[rows:], sd[rows:]))


def _measures(posterior: Posterior, found: Found, truth: np.ndarray, observed: float) -> dict[str, float]:
    """Errors at the spike and over all sites."""
    spike, theta = radionuclide.SPIKE, np.array([radionuclide.THETA])
    well = radionuclide.sites()[spike : spike + 1]
    emulated = posterior.predict(well, "emulator", t=theta).mean[0, 0]
    return {
        "spike_truth": abs(found.sites[spike] - truth[spike]),
        "spike_observed": abs(found.sites[spike] - observed),
        "spike_emulator": abs(emulated - radionuclide.simulate(well, theta)[0, 0]),
        "sites": float(np.sqrt(np.mean((found.sites - truth) ** 2))),
    }


def _assess_fresh_runs(posterior: Posterior, runs: int, seed: int) -> Assessment:
    """The emulator at all sites of runs that nobody has seen, from a Latin hypercube of their own."""
    import torch

    from vcal_dist.assessment import assess_runs

    x, t = radionuclide.at_all_sites(radionuclide.design(runs, np.random.default_rng([seed, 1])))
    z = radionuclide.simulate(x, t)
    rows = posterior.scaling.runs(x=torch.from_numpy(x), t=torch.from_numpy(t), z=torch.from_numpy(z))
    parts = (posterior.model, posterior.components, posterior.log_weights, posterior.scaling)
    return assess_runs(*parts, rows, leave_one_out=False, draws=64, seed=seed)


EXPERIMENT = Experiment(
    name="radionuclide",
    title="Complex response, a stand-in for the radionuclide data (section 4.3)",
    notes=(
        "A physical stand-in of the same sizes, a plume in groundwater: the paper's data are not at hand.",
        "Fresh runs: all 88 sites of runs with new parameters, none of which training saw. f is its posterior mean.",
        "At the paper's start frequencies are fixed; elsewhere they are learned, and length scales come from the data.",
        "That start is tried with the first seed only.",
    ),
    figures=figures,
    settings=settings,
    run=run,
)
