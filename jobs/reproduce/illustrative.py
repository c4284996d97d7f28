"""Section 4.1 of the paper: one input, one parameter, everything known but θ; q(θ) of the three ways beside the truth.

The exact posterior is that of the Gaussian processes themselves, on a grid of θ: kernels, no features.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jobs.reproduce.experiment import Experiment, Figure, Outcome, Say, ingested, trained
from vcal_dist.analytic import ExactPosterior, Grid, modes, total_variation
from vcal_dist.plan import MEANFIELD
from vcal_dist.posterior import Posterior
from vcal_dist.problems import illustrative

Array = NDArray[np.float64]

WAYS = ("collapsed", "fullrank", "meanfield")
REACH, NODES = 8.0, 4001  # of the grid of θ, whose prior is N(0, 1)
CELLS = 41  # of the surfaces' grid, in each direction


def figures(quick: bool) -> tuple[Figure, ...]:
    """The paper shows a picture here and reports no number."""
    return (
        *(Figure(f"distance_{way}", f"total-variation distance of q(θ), {way}") for way in WAYS),
        *(Figure(f"mean_{way}", f"mean of θ, {way}") for way in WAYS),
        *(Figure(f"sd_{way}", f"standard deviation of θ, {way}") for way in WAYS),
        Figure("theta", "true θ"),
        *(Figure(f"seconds_{way}", f"training, {way}", unit="s") for way in WAYS),
    )


def settings(quick: bool) -> dict[str, Any]:
    """The natural stages need few steps where nothing but θ is unknown; the paper's own has its default length."""
    short = {"theta": {"steps": 50 if quick else 100}, "joint": {"steps": 10 if quick else 20}}
    hurried = {name: {"steps": 250, "rate": 3 * stage.rate} for name, stage in MEANFIELD.items()}
    return {
        "features": 100 if quick else 400,
        "delta_features": 40,
        "fit": {"collapsed": short, "fullrank": short, "meanfield": hurried if quick else {}},
    }


def run(folder: Path, seed: int, settings: dict[str, Any], say: Say) -> Outcome:
    """One draw of the processes, calibrated in three ways."""
    from jobs.reproduce.illustrative_charts import panels

    data = illustrative.generate(seed)
    runs, field = {"x": data.x_runs, "t": data.t, "z": data.z}, {"x": data.x, "y": data.y}
    store = ingested(folder, illustrative.problem(), runs, field)
    known = illustrative.settings(settings["features"], seed, delta_features=settings["delta_features"])
    found = {
        way: trained(
            store,
            folder / way,
            say,
            seed=seed,
            model=asdict(known),
            transforms={"response": asdict(illustrative.TRANSFORM)},
            fit={"weights": way, **settings["fit"][way]},
            devices={"precision": "float64"},
        )
        for way in WAYS
    }
    exact = exact_grid(data)
    mean, sd = moments(exact)
    of_features = distance(exact, features_grid(data, found["collapsed"][0], exact))
    ours: dict[str, float] = {}
    for way, (posterior, seconds) in found.items():
        ours[f"distance_{way}"] = total_variation(exact, posterior.theta)
        ours[f"mean_{way}"], ours[f"sd_{way}"] = float(posterior.theta.mean()), float(posterior.theta.sd())
        ours[f"seconds_{way}"] = seconds
    floor = {f"distance_{way}": of_features for way in WAYS}
    floor |= {f"mean_{way}": mean for way in WAYS} | {f"sd_{way}": sd for way in WAYS} | {"theta": data.theta_true}
    details = {
        "theta": data.theta_true,
        "exact": {"mean": mean, "sd": sd, "modes": modes(exact)},
        "intervals": {way: posterior.theta.interval(0, 0.95) for way, (posterior, _) in found.items()},
        "components": {way: len(posterior.components) for way, (posterior, _) in found.items()},
    }
    x, t = surface_axes()
    points = np.stack(np.meshgrid(x, t, indexing="ij"), -1).reshape(-1, 2)
    emulated = found["collapsed"][0].predict(points[:, :1], "emulator", t=points[:, 1:]).mean
    chart = panels(
        data,
        exact,
        {way: posterior.theta for way, (posterior, _) in found.items()},
        (x, t),
        illustrative.true_eta(seed, points).reshape(CELLS, CELLS),
        emulated.reshape(CELLS, CELLS),
    )
    return Outcome(ours, floor, details, {"panels": chart})


def exact_grid(data: illustrative.Data) -> Grid:
    """The posterior of θ with the kernels themselves; θ̃ is θ, since its prior is N(0, 1)."""
    theta = np.linspace(-REACH, REACH, NODES)
    return normalised(theta, illustrative.log_posterior(data, theta))


def features_grid(data: illustrative.Data, posterior: Posterior, exact: Grid) -> Grid:
    """The exact posterior of the model that was trained: its features in place of the kernels, on the same nodes."""
    scaling = posterior.scaling
    runs = scaling.runs(*(torch.from_numpy(part) for part in (data.x_runs, data.t, data.z)))
    observations = scaling.observations(torch.from_numpy(data.x), torch.from_numpy(data.y))
    density = ExactPosterior(posterior.model, runs, observations).log_density(exact.nodes)
    return normalised(exact.nodes[:, 0].numpy(), density.detach().numpy())


def normalised(theta: Array, log_density: Array) -> Grid:
    """A density on a grid, from its logarithm up to a constant."""
    highest = float(log_density.max())
    density = np.exp(log_density - highest)
    total = float(np.trapezoid(density, theta))
    return Grid(torch.from_numpy(theta)[:, None], torch.from_numpy(density / total), highest + float(np.log(total)))


def moments(grid: Grid) -> tuple[float, float]:
    """Mean and standard deviation of θ."""
    theta, density = grid.nodes[:, 0], grid.density
    mean = float(torch.trapezoid(theta * density, theta))
    return mean, float(torch.trapezoid((theta - mean).square() * density, theta).sqrt())


def distance(first: Grid, second: Grid) -> float:
    """½∫|p − q| of two densities on the same nodes."""
    return 0.5 * float(torch.trapezoid((first.density - second.density).abs(), first.nodes[:, 0]))


def surface_axes() -> tuple[Array, Array]:
    """The nodes in x and in t where surfaces are drawn: the middles of cells."""
    middle = (np.arange(CELLS) + 0.5) / CELLS
    low, high = illustrative.BOUNDS
    return middle, low + (high - low) * middle


EXPERIMENT = Experiment(
    name="illustrative",
    title="Illustrative example (4.1): 7 runs, 4 observations, everything known but θ",
    notes=(
        "Distances are to the exact posterior of the Gaussian processes themselves (kernels, on a grid of θ).",
        "The floor of a distance is that of the exact posterior with the same features in place of the kernels.",
        "The floor of a mean or standard deviation is the exact posterior's. The paper shows a picture and no number.",
    ),
    figures=figures,
    settings=settings,
    run=run,
)
