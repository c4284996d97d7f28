"""Emulators behind one protocol: a method is a function of a design and a seed, and returns a fitted emulator.

default    vcal-dist's own
exact_gp   GPyTorch's exact Gaussian process, up to 2,000 rows
svgp       GPyTorch's sparse variational Gaussian process, from 10⁴ rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtri

from jobs.bench.emulator import as_weights
from jobs.bench.exact_gp import MOST_ROWS, fit_exact_gp
from jobs.bench.svgp import fit_svgp
from storage.priors import Uniform
from storage.problem import CalibrationInput, ControlInput, Output, Problem
from vcal_dist.batches import Runs
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.fitting import few_rows, fit_emulator
from vcal_dist.initialise import start_model
from vcal_dist.plan import FitSettings
from vcal_dist.priors import ThetaPrior

Array = NDArray[np.float64]
FEWEST_ROWS_SVGP = 10_000
SECONDS_SVGP = 20.0
HELD_OUT = 0.05  # of many runs
PIECE = 10_000  # points predicted at once


class Design(NamedTuple):
    """What a method learns from."""

    u: Array  # (rows, d) in the unit cube: the control inputs, then the parameters
    z: Array  # (rows,) in the function's own units
    run: NDArray[np.int64]  # (rows,) number of the simulator's run that a row belongs to
    controls: int  # columns of u that vary within a run; 0 where every row is a run


@dataclass(frozen=True)
class Fitted:
    """An emulator. What it reports of itself is optional, and in the units of z."""

    predict: Callable[[Array], tuple[Array, Array]]  # mean and standard deviation of z (n,) at u (n, d)
    reported_rmse: float | None = None  # its own estimate, from held-out rows or cross-validation
    reported_coverage: float | None = None  # the same of its 90 % intervals


Method = Callable[[Design, int], Fitted]


def fit_default(design: Design, seed: int) -> Fitted:
    """vcal-dist's emulator with its default settings."""
    centre, scale = float(design.z.mean()), float(design.z.std()) or 1.0
    rows, d = design.u.shape
    z = torch.as_tensor((design.z - centre) / scale)[:, None]
    u = torch.as_tensor(design.u, dtype=torch.float32)
    runs = Runs(u, z, torch.zeros_like(z), torch.arange(rows), torch.ones(rows, dtype=torch.float64))
    controls = max(design.controls, 1)
    prior = ThetaPrior.from_problem(_problem(controls, d - controls))
    model = CalibrationModel(controls, prior, 1, ModelSettings(discrepancy="none", seed=seed))
    start_model(model, runs, None, seed)
    held = np.zeros(rows, dtype=bool)
    settings = FitSettings()
    if few_rows(model, runs, settings) is None:  # as training does: a part of the runs is held out
        held[:: round(1 / HELD_OUT)] = True
        runs = runs._replace(weight=runs.weight * torch.from_numpy(~held))
    frame, _, validation = fit_emulator(model, runs, settings, seed=seed)
    q = as_weights(frame)

    @torch.no_grad()
    def predict(u: Array) -> tuple[Array, Array]:
        pieces = torch.as_tensor(u, dtype=torch.float32).split(PIECE)
        means, variances = zip(*(q.moments(model.eta(piece), model.columns_eta) for piece in pieces), strict=True)
        mean, variance = model.likelihood_z.moments(torch.cat(means)[:, 0], torch.cat(variances)[:, 0])
        return centre + scale * mean.numpy(), scale * variance.sqrt().numpy()

    if validation is None:
        mean, sd = predict(design.u[held])
        known = design.z[held]
    else:
        rows_of = validation.row.numpy()
        mean, sd = centre + scale * validation.mean[:, 0].numpy(), scale * validation.sd[:, 0].numpy()
        known = design.z[rows_of]
    error = known - mean
    inside = np.abs(error) <= ndtri(0.95) * sd
    return Fitted(predict, float(np.sqrt(np.mean(error**2))), float(inside.mean()))


def fit_exact(design: Design, seed: int) -> Fitted:
    """The exact Gaussian process, on a random subset of the rows where they are more than it takes."""
    rows = np.arange(len(design.u))
    if len(rows) > MOST_ROWS:
        rows = np.random.default_rng([seed, 9]).choice(rows, MOST_ROWS, replace=False)
    return Fitted(fit_exact_gp(design.u[rows], design.z[rows], seed))


def fit_sparse(design: Design, seed: int) -> Fitted:
    """The tuned SVGP, for a fixed time."""
    centre, scale = float(design.z.mean()), float(design.z.std()) or 1.0
    u, z = torch.as_tensor(design.u), torch.as_tensor((design.z - centre) / scale)
    fitted = fit_svgp(u, z, seconds=SECONDS_SVGP, seed=seed)

    def predict(u: Array) -> tuple[Array, Array]:
        mean, variance = fitted(torch.as_tensor(u))
        return centre + scale * mean.numpy(), scale * variance.sqrt().numpy()

    return Fitted(predict)


METHODS: dict[str, Method] = {"default": fit_default, "exact_gp": fit_exact, "svgp": fit_sparse}


def methods_for(rows: int, runs: int) -> list[str]:
    """The methods that can learn from a design of so many rows and runs; the exact one takes a subset of long runs."""
    return [
        "default",
        *(["exact_gp"] if runs <= MOST_ROWS else []),
        *(["svgp"] if rows >= FEWEST_ROWS_SVGP else []),
    ]


def _problem(controls: int, parameters: int) -> Problem:
    return Problem(
        name="emulators",
        description="Inputs in the unit cube.",
        control_inputs=tuple(ControlInput(name=f"x{j}", description="", bounds=(0.0, 1.0)) for j in range(controls)),
        calibration_inputs=tuple(
            CalibrationInput(name=f"t{j}", description="", bounds=(0.0, 1.0), prior=Uniform(low=0, high=1))
            for j in range(parameters)
        ),
        outputs=(Output(name="z", description=""),),
    )
