"""Section 4.2 of the paper: ion channels of cardiac cells, 300 runs and 19 observations, beside the paper's table.

The measure is 1000 × the expected sum of squares between observations and the exact simulator at θ ~ q. It judges how
near the simulator itself comes to the data, which is not what the model of Kennedy and O'Hagan looks for: a
discrepancy that may be large leaves θ open. With the exact simulator in place of an emulator, the same square roots
and an additive discrepancy that is known, the posterior has (`cell_exact`; more length scales in results.json)

    δ's standard deviation                      0.05   0.1   0.2   0.3      (of the runs' output's)
    length scale 0.15: the measure               1.3   1.7   3.7   6.6
                       log evidence               66    82    83    80
    length scale of highest evidence             0.1  0.15   0.2   0.3      (of 0.1, 0.15, 0.2 and 0.3)
                       the measure               1.2   1.7   4.1   8.5
                       log evidence               68    82    86    86

so what is assumed of δ decides. Here δ is held at a tenth of the output's standard deviation, where the library's
default starts, and at the length scale of highest evidence then, 0.15. Both were set knowing this table, and the
evidence prefers a δ that is larger and smoother by four nats (larger only: by one). The figures of `additive` and
`general` hold under that assumption only. `additive_learned` learns both. A constant of δ is left out: all currents
end at zero.

q(θ) of additive discrepancy follows the exact posterior; that of general discrepancy is a single Gaussian. So both are
also sampled at the same hyperparameters, and the differences stand in the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jobs.reproduce.experiment import Experiment, Figure, Lines, Outcome, Say, ingested, trained
from vcal_dist.problems import cell

if TYPE_CHECKING:
    from jobs.reproduce.cell_exact import Assumed
    from vcal_dist.posterior import Posterior

AMPLITUDE, LENGTHSCALE = 0.1, 0.15  # of δ; g has the same along x
LENGTHSCALE_ETA = 1.0  # of g along η, in standard deviations of the runs' output
DRAWS = 4000  # of θ, for the measure
FLOOR = cell.squared_error([cell.LEAST_SQUARES])  # the measure at least squares with the exact simulator
AMPLITUDES, LENGTHSCALES = (0.05, 0.1, 0.2, 0.3), (0.1, 0.15, 0.2, 0.3)  # of δ, to see what they decide
METHODS = {
    "additive": ("v-cal, additive discrepancy", 1.83, 79.0),
    "general": ("v-cal, general discrepancy", 1.55, 93.0),
    "additive_learned": ("v-cal, additive discrepancy, δ's kernel learned", None, None),
    "additive_exact": ("the first again, θ by NUTS at its kernels", None, None),
    "general_exact": ("the second again, θ by NUTS at its kernels", None, None),
    "l2": ("L2, least squares on the emulator", 1.31, 30.0),
    "koh": ("KOH, everything sampled", 5.10, 3245.0),
    "koh_known": ("KOH, δ's kernel known", None, None),
    "projected": ("Projected", 2.52, 3792.0),
    "robust": ("Robust", 1.99, 361.0),
}


def figures(quick: bool) -> tuple[Figure, ...]:
    """The paper's whole table, its two columns below each other."""
    return (
        *(Figure(key, label, paper=paper, floor=FLOOR) for key, (label, paper, _) in METHODS.items()),
        *(Figure(f"seconds_{key}", label, paper=paper, unit="s") for key, (label, _, paper) in METHODS.items()),
    )


def settings(quick: bool) -> dict[str, Any]:
    """What decides the runs. The emulator of this very skewed output sees square roots."""
    matern: dict[str, Any] = {"kernel": "matern52", "features": 160, "frequencies": "fixed"}
    eta = {"features": {**matern, "features": 100 if quick else 200, "frequencies": "learned", "constant": 1.0}}
    delta = {"features": {**matern, "constant": None}, "amplitude": AMPLITUDE, "learn": False}
    common = {
        "transforms": {"current": {"kind": "sqrt"}},
        "fit": {"emulator": {"steps": 150 if quick else 400}, "theta": {"steps": 100}},
        "data": {"holdout": 0.0},  # of 19 observations none is to spare
        "devices": {"precision": "float64"},
    }
    noise = {"noise": 0.05}
    models = {
        "additive": {"discrepancy": "additive", "delta": {**delta, "lengthscale": LENGTHSCALE}},
        "general": {"discrepancy": "general", "delta": {**delta, "lengthscale": [LENGTHSCALE_ETA, LENGTHSCALE]}},
        "additive_learned": {
            "discrepancy": "additive", "delta": {**delta, "lengthscale": LENGTHSCALE, "learn": True},
        },
    }  # fmt: skip
    if quick:
        del models["additive_learned"]
    short, long = ({"chains": 4, "draws": draws, "tune": draws} for draws in (200, 250))
    return {
        "runs": cell.RUNS,
        "sections": common,
        "models": {name: {"eta": eta, "likelihood_y": noise, **model} for name, model in models.items()},
        "assumed": {
            "amplitudes": AMPLITUDES[1::2] if quick else AMPLITUDES,
            "lengthscales": (LENGTHSCALE,) if quick else LENGTHSCALES,
            "evaluations": 2000 if quick else 6000,
        },
        "sampled": {} if quick else {"additive_exact": long, "general_exact": long, "koh": short, "koh_known": short},
    }


def run(folder: Path, seed: int, settings: dict[str, Any], say: Say) -> Outcome:
    """One design, and all methods on it."""
    from jobs.reproduce.cell_baselines import least_squares, leave_one_out, sampled_exact, sampled_koh
    from jobs.reproduce.cell_charts import charts
    from vcal_dist.koh import Known

    data = cell.generate(settings["runs"], seed)
    runs, field = {"x": data.x_runs, "t": data.t, "z": data.z}, {"x": data.x, "y": data.y}
    store = ingested(folder, cell.problem(), runs, field)
    ours: dict[str, float] = {}
    details: dict[str, Any] = {}
    clouds, posteriors = {}, {}
    for name, model in settings["models"].items():
        sections = {**settings["sections"], "seed": seed, "model": {**model, "seed": seed}}
        posterior, ours[f"seconds_{name}"] = trained(store, folder / name, say, **sections)
        posteriors[name] = posterior
        clouds[name] = theta = draws_of(posterior, seed)
        ours[name] = cell.squared_error(theta)
        details[name] = spread(theta) | leave_one_out(posterior, data)
    say("least squares on the emulator")
    emulated = posteriors["additive"]
    found, ours["seconds_l2"] = least_squares(emulated, data)
    ours["l2"] = cell.squared_error(found[None])
    details["l2"] = {"theta": found.tolist()}
    if seed == 0:  # another design changes the scale of the output only
        say("the exact simulator under other δ")
        details["assumed"] = [each._asdict() for each in under_other_delta(emulated, settings["assumed"])]
    for name, chains in settings["sampled"].items() if seed == 0 else ():  # minutes each
        say(f"sampling {METHODS[name][0]}")
        if name.startswith("koh"):
            known = Known(AMPLITUDE, LENGTHSCALE) if name == "koh_known" else None
            sampled = sampled_koh(emulated, data, found, known, chains, seed)
            clouds[name] = sampled.theta
        else:
            sampled = sampled_exact(posteriors[name.removesuffix("_exact")], data, chains, seed)
        ours[name], ours[f"seconds_{name}"] = cell.squared_error(sampled.theta), sampled.seconds
        details[name] = spread(sampled.theta) | sampled.details
    labels = {name: METHODS[name][0] for name in clouds}
    drawn = charts(data, clouds, labels, found, posteriors["general"])
    return Outcome(ours, details=details, charts=drawn)


def under_other_delta(posterior: Posterior, settings: dict[str, Any]) -> list[Assumed]:
    """θ by the exact simulator for every amplitude and length scale of δ."""
    from jobs.reproduce.cell_exact import assumed
    from vcal_dist.koh import Known

    deltas = [Known(a, ell) for a in settings["amplitudes"] for ell in settings["lengthscales"]]
    return [assumed(posterior.scaling.outputs, delta, evaluations=settings["evaluations"]) for delta in deltas]


def table(details: Mapping[str, Any]) -> Lines:
    """What is assumed of δ, and what follows with the exact simulator."""
    found = {(each["amplitude"], each["lengthscale"]): each for each in details["assumed"]}
    lengthscales = sorted({ell for _, ell in found})
    rows = []
    for a in sorted({a for a, _ in found}):
        cells = (f"{found[a, ell]['measure']:.2f} ({found[a, ell]['log_evidence']:.1f})" for ell in lengthscales)
        rows.append((f"{a:g}", *cells))
    least = min(each["effective"] for each in found.values())
    title = f"The exact simulator under other δ: the measure (log evidence); effective sizes of {least:.0f} or more"
    return Lines(title, ("δ's standard deviation", *(f"length scale {ell:g}" for ell in lengthscales)), rows)


def draws_of(posterior: Posterior, seed: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """θ ~ q in the user's units, (DRAWS, 3)."""
    return posterior.theta.sample(DRAWS, torch.Generator().manual_seed(seed)).numpy()


def spread(theta: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    """Mean and standard deviation of every parameter: a narrow posterior is not a good one."""
    return {"mean": theta.mean(0).tolist(), "sd": theta.std(0).tolist()}


EXPERIMENT = Experiment(
    name="cell",
    title="4.2 Cell biology: 300 runs, 19 observations; 1000 × the expected sum of squares, and seconds",
    notes=(
        "All of ours see square roots of the current: noise and discrepancy are additive there.",
        "δ is held at 0.1 of the output's standard deviation and a length scale of 0.15 (g: 1 along η), set knowing",
        "that where δ is learned or sampled θ is left open and the measure rises, with the exact simulator too: its",
        "table is of the first seed's scale. The evidence there prefers 0.3 and 0.3 by four nats, at a measure of 8.5.",
        "Steps and features were chosen on seeds 0 to 4.",
        "q(θ) of general discrepancy is one Gaussian, and can be too narrow: see the same again by NUTS.",
        "What is sampled is sampled for the first seed only; R̂ and effective sizes stand in results.json.",
        "The floor is least squares with the exact simulator. Projected and Robust are the paper's only.",
    ),
    figures=figures,
    settings=settings,
    run=run,
    table=table,
)
