"""Section 4.4 of the paper: the borehole with a million runs and a hundred thousand observations, in several variants.

The paper's measure is the mean over θ ~ q of the root mean square over x of η(x, θ) − (η(x, θ*) + δ(x)): the truth
itself has that of δ, 0.008, and less is no better. The emulator's error is its root mean square at fresh (x, t), in
standard deviations of z.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.reproduce.experiment import Experiment, Figure, Lines, Outcome, Say, ingested, trained
from vcal_dist.plan import MEANFIELD
from vcal_dist.posterior import Posterior
from vcal_dist.problems import borehole

Array = NDArray[np.float64]

DEFAULT = "default"
VARIANTS = {  # in the order of the table; what a label leaves unsaid is as in the default
    DEFAULT: "default",
    "isotropic": "isotropic, fixed frequencies",
    "fullrank": "fullrank",
    "meanfield": "meanfield",
    "features_50": "M = 50",
    "features_200": "M = 200",
    "features_400": "M = 400",
    "features_1000": "M = 1000",
}
FRESH_SEED = 10_000  # of inputs that no seed of the data has
PAPER_SECONDS, TREES_SECONDS = 1.4 * 3600, 132.4 * 3600
LEVELS = (0.9, 0.95)


def names(quick: bool) -> tuple[str, ...]:
    """The variants that are run."""
    return tuple(VARIANTS)[: 5 if quick else None]


def figures(quick: bool) -> tuple[Figure, ...]:
    """The paper's measure, seconds, truths inside their intervals and emulator errors."""
    chosen = {name: VARIANTS[name] for name in names(quick)}
    # The paper's model has isotropic kernels and fixed frequencies: its figures stand beside both.
    paper, paper_seconds = (dict.fromkeys((DEFAULT, "isotropic"), value) for value in (0.03, PAPER_SECONDS))
    return (
        Figure("measure_uniform", "measure: uniform θ", paper=0.32),
        Figure("measure_trees", "measure: sum-of-trees (not run)", paper=0.14),
        *(Figure(f"measure_{name}", f"measure: {label}", paper=paper.get(name)) for name, label in chosen.items()),
        Figure("seconds_trees", "training: sum-of-trees (not run)", paper=TREES_SECONDS, unit="s"),
        *(
            Figure(f"seconds_{name}", f"training: {label}", paper=paper_seconds.get(name), unit="s")
            for name, label in chosen.items()
        ),
        *(Figure(f"inside_{name}", f"truths in 95 % intervals, of 3: {label}") for name, label in chosen.items()),
        *(Figure(f"emulator_{name}", f"emulator error: {label}", unit="sds of z") for name, label in chosen.items()),
        *(Figure(f"sigma_{name}", f"σ_y: {label}", floor=borehole.NOISE) for name, label in chosen.items()),
    )


def settings(quick: bool) -> dict[str, Any]:
    """Sizes, and what each variant changes in a configuration that is otherwise left to its defaults."""
    variants = {name: _variant(name, quick) for name in names(quick)}
    if quick:
        return {"runs": 20_000, "observations": 2_000, "fresh": 2_000, "variants": variants}
    return {"runs": 1_000_000, "observations": 100_000, "fresh": 20_000, "variants": variants}


def _variant(name: str, quick: bool) -> dict[str, Any]:
    model: dict[str, Any] = {}
    fit: dict[str, Any] = {}
    if quick:
        fit = {"emulator": {"steps": 150}, "theta": {"steps": 80}, "joint": {"steps": 10}, "evaluations": 128}
    if name == "isotropic":
        kernel = {"lengthscales": "isotropic", "frequencies": "fixed"}
        model = {"eta": {"features": kernel}, "delta": {"features": kernel}}
    elif name == "fullrank":
        fit = {**fit, "weights": "fullrank"}
    elif name == "meanfield":
        fit = {"weights": "meanfield"}
        if quick:
            fit |= {stage: {"steps": 150, "rate": 3 * default.rate} for stage, default in MEANFIELD.items()}
    elif name.startswith("features_"):
        model = {"eta": {"features": {"features": int(name.removeprefix("features_"))}}}
        if name == "features_1000":
            fit = LARGE
    return {"model": model, "fit": fit}


# A step costs the square of M for each of its rows, of which there are 20 for each weight: a hundred times as much as
# with M = 100. Batches of 8192 and fewer steps keep it within minutes.
LARGE = {
    "emulator": {"steps": 100, "batch_runs": 8192},
    "theta": {"steps": 40, "batch_observations": 8192},
    "joint": {"steps": 10, "batch_observations": 8192},
    "starts": 1,
}


def run(folder: Path, seed: int, settings: dict[str, Any], say: Say) -> Outcome:
    """All variants for the first seed, the default for others."""
    from jobs.reproduce.borehole_charts import cost, intervals, posteriors

    store = _store(folder, seed, settings, say)
    fresh = Fresh(settings["fresh"], seed)
    ours = {"measure_uniform": fresh.measure(np.random.default_rng(seed).random((DRAWS, len(borehole.PARAMETERS))))}
    floor = {"measure_uniform": fresh.floor}
    details: dict[str, Any] = {"theta": list(borehole.THETA), "variants": {}}
    default: Posterior | None = None
    for name, changes in settings["variants"].items():
        if seed and name != DEFAULT:
            continue
        posterior, seconds = trained(store, folder / name, say, seed=seed, **changes)
        default = posterior if name == DEFAULT else default
        judged = fresh.judge(posterior) | {"seconds": seconds}
        details["variants"][name] = judged
        floor[f"measure_{name}"] = fresh.floor
        ours |= {f"{key}_{name}": judged[key] for key in ("measure", "seconds", "emulator", "sigma")}
        ours[f"inside_{name}"] = sum(parameter["inside"]["95"] for parameter in judged["theta"].values())
    labelled = {VARIANTS[name]: judged for name, judged in details["variants"].items()}
    charts = {"intervals": intervals(labelled), "cost": cost(labelled, fresh.floor)}
    if default is not None:
        charts["posterior"] = posteriors(default.theta)
    return Outcome(ours, floor, details, charts)


def _store(folder: Path, seed: int, settings: Mapping[str, Any], say: Say) -> Path:
    say(f"{settings['runs']:,} runs and {settings['observations']:,} observations")
    data = borehole.generate(settings["runs"], settings["observations"], seed)
    runs, field = {"x": data.x_runs, "t": data.t, "z": data.z}, {"x": data.x, "y": data.y}
    return ingested(folder, borehole.problem(), runs, field)


DRAWS, ROWS_OF_MEASURE = 2_000, 1_000  # θ and x of the paper's measure


class Fresh:
    """Inputs that no training has seen, and what a posterior is worth there."""

    def __init__(self, rows: int, seed: int) -> None:
        rng = np.random.default_rng(FRESH_SEED + seed)
        self.x, self.t = rng.random((rows, len(borehole.CONTROLS))), rng.random((rows, len(borehole.PARAMETERS)))
        self.z = borehole.simulate(self.x, self.t)
        self.floor = self.measure(np.array([borehole.THETA]))

    def measure(self, theta: Array) -> float:
        """The paper's measure of draws of θ (S, 3)."""
        return borehole.paper_error(theta, self.x[:ROWS_OF_MEASURE])

    def judge(self, posterior: Posterior) -> dict[str, Any]:
        """Everything about one variant."""
        emulated = posterior.predict(self.x, "emulator", t=self.t, draws=8).mean
        theta, truths = posterior.theta, dict(zip(borehole.PARAMETERS, borehole.THETA, strict=True))
        moments = zip(theta.mean().tolist(), theta.sd().tolist(), strict=True)
        found: dict[str, Any] = {}
        for (name, truth), (mean, sd) in zip(truths.items(), moments, strict=True):
            bounds = {f"{100 * level:.0f}": theta.interval(name, level) for level in LEVELS}
            inside = {level: low <= truth <= high for level, (low, high) in bounds.items()}
            found[name] = {"truth": truth, "mean": mean, "sd": sd, "intervals": bounds, "inside": inside}
        return {
            "emulator": float(np.sqrt(np.mean((emulated - self.z) ** 2)) / self.z.std()),
            "measure": self.measure(posterior.sample(DRAWS)),
            "sigma": posterior.noise["flow"],
            "theta": found,
        }


def table(details: Mapping[str, Any]) -> Lines:
    """All variants of one seed beside each other: θ as mean ± sd, in brackets where the 95 % interval misses it."""
    rows = []
    for name, judged in details["variants"].items():
        theta = [
            f"{found['mean']:.3g} ± {found['sd']:.2g}"
            if found["inside"]["95"]
            else f"({found['mean']:.3g} ± {found['sd']:.2g})"
            for found in judged["theta"].values()
        ]
        figures = (f"{judged['emulator']:.2g}", f"{judged['measure']:.2g}", f"{judged['sigma']:.3g}")
        rows.append((VARIANTS[name], *figures, *theta, f"{judged['seconds']:.3g}"))
    truth = [f"{name} (truth {value:.3g})" for name, value in zip(borehole.PARAMETERS, borehole.THETA, strict=True)]
    headings = ("variant", "emulator error", "measure", "σ_y", *truth, "seconds")
    return Lines("Variants; in brackets where the 95 % interval misses the truth", headings, rows)


EXPERIMENT = Experiment(
    name="borehole",
    title="Borehole (4.4): calibration from many runs and observations",
    notes=(
        "The measure is the paper's: below its floor, which the true θ itself has, lower is not better.",
        "The default is collapsed, with ARD, learned frequencies and M = 100 features of η; others change one thing.",
        "δ has 100 features in every variant. M = 1000 takes shorter stages, with batches of 8192.",
        "Only the default is repeated with more than one seed; the other variants have the first one's figures.",
    ),
    figures=figures,
    settings=settings,
    run=run,
    table=table,
)
