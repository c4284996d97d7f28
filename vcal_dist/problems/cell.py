"""The cell biology problem: the current through the ion channels of cardiac cells after a step of the voltage.

A channel moves between three closed states and an open one; with rates θ in 1/ms its current at a time, normalised, is

    η(x, θ) = [exp(eˣ·A(θ))]₁₄,    A = | −θ2−θ3    θ1       0        0   |      x = log(time) = −1.714798 + 4.564348·x₀₁
                                       |  θ2     −θ1−θ2    θ1        0   |
                                       |  0        θ2     −θ1−θ2     θ1  |
                                       |  0        0        θ2      −θ1  |

with x₀₁ ∈ [0, 1] known and θ ∈ [0, 10]³ to be calibrated. The 19 observations are read off the published figure, to
±5·10⁻⁵ (Clancy and Rudy 1999; Plumlee 2017). Nobody knows a true θ: at least squares 1000·Σ(y − η)² is still 0.642.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from storage.priors import Uniform
from storage.problem import CalibrationInput, ControlInput, Output, Problem
from vcal_dist.problems.designs import maximin_latin_hypercube

Array = NDArray[np.float64]

PARAMETERS = ("theta1", "theta2", "theta3")
BOUNDS = (0.0, 10.0)  # of every parameter
OFFSET, SCALE = -1.714798, 4.564348  # log(time) = OFFSET + SCALE·x
RUNS = 300
SMALLEST = 1e-300  # no entry of the exact exponential is negative; rounding makes some −1e-17

TIMES: Array = np.array(
    [
        *(0.18, 0.36, 0.56, 0.82, 1.10, 1.42, 1.82, 2.28, 2.82, 3.44),
        *(4.18, 5.06, 6.08, 7.28, 8.70, 10.36, 12.30, 14.58, 17.28),
    ]
)
CURRENTS: Array = np.array(
    [
        *(0.05382, 0.08783, 0.12110, 0.13564, 0.11837, 0.08999, 0.06491, 0.04711, 0.03385, 0.02436),
        *(0.01745, 0.01184, 0.00891, 0.00600, 0.00455, 0.00274, 0.00237, 0.00185, 0.00130),
    ]
)
LEAST_SQUARES = (5.377, 4.454, 3.656)  # with the exact simulator: 1000·Σ(y − η)² = 0.642
STEEPEST = 1e4  # θ1/θ2, above which the eigenvalues of `curves` lose more than six digits


class Data(NamedTuple):
    """Simulator runs (x_runs, t, z) and field observations (x, y)."""

    x_runs: Array  # (N, 1)
    t: Array  # (N, 3)
    z: Array  # (N, 1)
    x: Array  # (19, 1)
    y: Array  # (19, 1)


def problem() -> Problem:
    """Names, bounds and priors."""
    return Problem(
        name="cell",
        description="Normalised current through the ion channels of cardiac cells, against the logarithm of time.",
        control_inputs=(
            ControlInput(
                name="x", description=f"log(time in ms) = {OFFSET} + {SCALE}·x: 0.18 to 17.28 ms", bounds=(0.0, 1.0)
            ),
        ),
        calibration_inputs=tuple(
            CalibrationInput(
                name=name, description="a rate of the channel", bounds=BOUNDS, prior=Uniform(low=0, high=10)
            )
            for name in PARAMETERS
        ),
        outputs=(Output(name="current", description="normalised current at -35 mV"),),
    )


def observed() -> tuple[Array, Array]:
    """The 19 observations, x (19, 1) and y (19, 1)."""
    x = (np.log(TIMES) - OFFSET) / SCALE
    return np.clip(x, 0.0, 1.0)[:, None], CURRENTS[:, None].copy()


def times(x: ArrayLike) -> Array:
    """The time in ms at an x of the unit interval."""
    return np.exp(OFFSET + SCALE * np.asarray(x, np.float64))


def simulate(x: ArrayLike, t: ArrayLike) -> Array:
    """The computer model η(x, t), shape (B, 1), for x (B, 1) and t (B, 3)."""
    from scipy.linalg import expm

    x, t = np.asarray(x, np.float64), np.asarray(t, np.float64)
    if x.ndim != 2 or x.shape[1] != 1 or t.shape != (len(x), len(PARAMETERS)):
        raise ValueError(f"expected x of shape (rows, 1) and t of (rows, 3), got {x.shape} and {t.shape}")
    t1, t2, t3 = t.T
    A = np.zeros((len(x), 4, 4))
    A[:, 0, 0], A[:, 0, 1] = -t2 - t3, t1
    A[:, 1, 0], A[:, 1, 1], A[:, 1, 2] = t2, -t1 - t2, t1
    A[:, 2, 1], A[:, 2, 2], A[:, 2, 3] = t2, -t1 - t2, t1
    A[:, 3, 2], A[:, 3, 3] = t2, -t1
    eta = expm(times(x)[:, :, None] * A)[:, 0, 3:]
    return np.maximum(eta, SMALLEST)


def curves(x: ArrayLike, theta: ArrayLike) -> Array:
    """η(·, θ) at x (n, 1) for every θ of (S, 3): (S, n).

    A is similar to a symmetric matrix, √(θ1θ2) beside its diagonal, whose eigenvalues serve all x of a θ at once:
    [exp(τA)]₁₄ = (θ1/θ2)^{3/2} Σ_k V₁ₖV₄ₖ exp(τλ_k). Where θ2 is almost nothing beside θ1, A itself is exponentiated.
    """
    x, theta = np.asarray(x, np.float64), np.asarray(theta, np.float64)
    eta = np.empty((len(theta), len(x)))
    steep = theta[:, 0] >= STEEPEST * theta[:, 1]
    rows = simulate(np.tile(x, (int(steep.sum()), 1)), np.repeat(theta[steep], len(x), axis=0))
    eta[steep] = rows.reshape(-1, len(x))
    t1, t2, t3 = theta[~steep].T
    A = np.zeros((len(t1), 4, 4))
    A[:, 0, 0], A[:, 1, 1], A[:, 2, 2], A[:, 3, 3] = -t2 - t3, -t1 - t2, -t1 - t2, -t1
    for i in range(3):
        A[:, i + 1, i] = np.sqrt(t1 * t2)  # eigh reads the lower triangle
    values, V = np.linalg.eigh(A)
    decay = np.exp(values[:, :, None] * times(x[:, 0]))  # (S, 4, n)
    eta[~steep] = (t1 / t2)[:, None] ** 1.5 * np.einsum("sk,skn->sn", V[:, 0] * V[:, 3], decay)
    return np.maximum(eta, SMALLEST)


def squared_error(theta: ArrayLike, weights: Array | None = None) -> float:
    """The paper's measure: 1000 × the mean over θ ~ q (S, 3) of Σ (y − η(x, θ))² over the 19 observations.

    With `weights` (S,) that sum to one, of an importance sample, the mean is the weighted one.
    """
    x, y = observed()
    squares = np.square(curves(x, theta) - y[:, 0]).sum(1)
    return float(1000 * np.average(squares, weights=weights))


def generate(runs: int = RUNS, seed: int = 0) -> Data:
    """Runs at a maximin Latin hypercube on (x, θ), and the observations."""
    u = maximin_latin_hypercube(runs, 1 + len(PARAMETERS), np.random.default_rng(seed))
    low, high = BOUNDS
    x_runs, t = u[:, :1], low + (high - low) * u[:, 1:]
    x, y = observed()
    return Data(x_runs=x_runs, t=t, z=simulate(x_runs, t), x=x, y=y)
