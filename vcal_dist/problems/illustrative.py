"""The paper's illustrative example: one control input, one parameter, everything known but θ.

    η(x, t) ~ GP(0, σ_η²·exp(−½·dᵀA_η d)),  σ_η = 1,    A_η = ½I,    d the difference of two (x, t)
    δ(x)    ~ GP(0, σ_δ²·exp(−½·A_δ d²)),   σ_δ = 2/10, A_δ = 1/20,  d the difference of two x
    z = η(x*, t) + N(0, σ_z²),   y = η(x, θ) + δ(x) + N(0, σ_y²),   θ ~ N(0, 1)

with 7 runs in [0, 1] × [−5/2, 5/2] and 4 observations. The paper leaves σ_y and σ_z open; they are 0.01 here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from storage.priors import Normal
from storage.problem import CalibrationInput, ControlInput, Output, Problem
from vcal_dist.batches import Scaling
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.features import FeatureSettings
from vcal_dist.gp import GPSettings
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.priors import ThetaPrior
from vcal_dist.transforms import OutputScaling, TransformSettings

Array = NDArray[np.float64]

BOUNDS = (-2.5, 2.5)  # of t
SIGMA_ETA, A_ETA = 1.0, 1 / 2
SIGMA_DELTA, A_DELTA = 2 / 10, 1 / 20
NOISE = 0.01  # σ_z and σ_y
JITTER = 1e-10  # on the diagonal of covariances, far below NOISE²
TRANSFORM = TransformSettings(standardise=False)  # of the output: the processes are known in its own units
DESIGNS = 200  # of which the one with the largest smallest distance is taken


class Data(NamedTuple):
    """Simulator runs (x_runs, t, z), field observations (x, y) and the θ behind them."""

    x_runs: Array  # (N, 1)
    t: Array  # (N, 1)
    z: Array  # (N, 1)
    x: Array  # (n, 1)
    y: Array  # (n, 1)
    theta_true: float


def problem() -> Problem:
    """Names, bounds and the prior."""
    return Problem(
        name="illustrative",
        description="One control input, one parameter; η and δ are draws of Gaussian processes.",
        control_inputs=(ControlInput(name="x", bounds=(0.0, 1.0)),),
        calibration_inputs=(CalibrationInput(name="theta", bounds=BOUNDS, prior=Normal(mean=0.0, sd=1.0)),),
        outputs=(Output(name="response"),),
    )


def scaling() -> Scaling:
    """Inputs to the unit cube, outputs as they are, in float64: what `model` sees."""
    zero = torch.zeros(1, dtype=torch.float64)
    return Scaling(problem(), OutputScaling([TRANSFORM], zero, zero + 1, ["response"]), torch.float64)


def settings(features: int = 1000, seed: int = 0, *, delta_features: int | None = None) -> ModelSettings:
    """The model that the data come from, with `features` features for η and for δ and nothing of it to learn.

    It sees t on the unit interval, where the lengthscale 1/√A_η is shorter by the width of the bounds, and outputs that
    are not standardised (`TRANSFORM`). δ hardly bends over the unit interval: 40 features are as good as 400.
    """
    fixed = FeatureSettings(features=features, frequencies="fixed")
    of_delta = replace(fixed, features=delta_features or features)
    noise = LikelihoodSettings(noise=NOISE, learn_noise=False)
    lengthscale, (low, high) = 1 / math.sqrt(A_ETA), BOUNDS
    return ModelSettings(
        eta=GPSettings(
            features=fixed, lengthscale=(lengthscale, lengthscale / (high - low)), amplitude=SIGMA_ETA, learn=False
        ),
        delta=GPSettings(features=of_delta, lengthscale=1 / math.sqrt(A_DELTA), amplitude=SIGMA_DELTA, learn=False),
        likelihood_z=noise,
        likelihood_y=noise,
        emulator_residual=False,
        seed=seed,
    )


def model(features: int = 1000, seed: int = 0) -> CalibrationModel:
    """The model of these settings, in float64."""
    prior = ThetaPrior.from_problem(problem())
    return CalibrationModel(controls=1, prior=prior, outputs=1, settings=settings(features, seed), dtype=torch.float64)


def kernel_eta(u: ArrayLike, v: ArrayLike) -> Array:
    """The covariance of η between rows (x, t) of u (B, 2) and v (C, 2): (B, C)."""
    return _gaussian(u, v, SIGMA_ETA, A_ETA)


def kernel_delta(u: ArrayLike, v: ArrayLike) -> Array:
    """The covariance of δ between rows x of u (B, 1) and v (C, 1): (B, C)."""
    return _gaussian(u, v, SIGMA_DELTA, A_DELTA)


def generate(seed: int, runs: int = 7, observations: int = 4) -> Data:
    """Space-filling designs, θ from its prior, and η and δ from theirs, exactly and not by features.

    θ is drawn again until it lies between the bounds, where the runs are: one draw in eighty does not.
    """
    return _generate(seed, runs, observations)[0]


def true_eta(seed: int, points: ArrayLike, runs: int = 7, observations: int = 4) -> Array:
    """η at points (x, t) (P, 2): one draw (P, 1) of its process given the η that is behind `generate(seed)`."""
    _, u, eta = _generate(seed, runs, observations)
    points = np.asarray(points, np.float64)
    across = kernel_eta(points, u)  # (P, N + n)
    weights = np.linalg.solve(kernel_eta(u, u) + JITTER * np.eye(len(u)), across.T).T
    covariance = kernel_eta(points, points) - weights @ across.T
    values, vectors = np.linalg.eigh(covariance)  # singular at the rows of the data, where a Cholesky factor fails
    noise = np.random.default_rng([seed, 1]).standard_normal((len(points), 1))
    drawn: Array = weights @ eta + vectors @ (np.sqrt(values.clip(min=0))[:, None] * noise)
    return drawn


def log_posterior(data: Data, theta: ArrayLike) -> Array:
    """log p(θ | Y, Z) but for a constant at θ (P,), with the kernels themselves: no features, nothing approximated."""
    theta, runs = np.asarray(theta, np.float64), len(data.z)
    u = np.column_stack([data.x_runs, data.t])
    rows = np.concatenate([data.z, data.y])[:, 0]
    found = []
    for value in theta:
        both = np.concatenate([u, np.column_stack([data.x, np.full(len(data.x), value)])])
        covariance = kernel_eta(both, both) + NOISE**2 * np.eye(len(both))
        covariance[runs:, runs:] += kernel_delta(data.x, data.x)
        lower = np.linalg.cholesky(covariance)
        white = np.linalg.solve(lower, rows)
        found.append(-0.5 * white @ white - np.log(np.diag(lower)).sum() - 0.5 * value**2)
    return np.array(found)


def _generate(seed: int, runs: int, observations: int) -> tuple[Data, Array, Array]:
    """The data, the (x, t) of all their rows (N + n, 2), with the true θ as t of observations, and η there."""
    rng = np.random.default_rng(seed)
    low, high = BOUNDS
    u_runs = _space_filling(runs, 2, rng) * [1, high - low] + [0, low]  # (N, 2)
    x = _space_filling(observations, 1, rng)
    theta = low - 1
    while not low <= theta <= high:
        theta = float(rng.standard_normal())
    u = np.concatenate([u_runs, np.column_stack([x, np.full(observations, theta)])])
    eta = _draw(kernel_eta(u, u), rng)
    z, y = np.split(eta + NOISE * rng.standard_normal(eta.shape), [runs])
    return Data(u_runs[:, :1], u_runs[:, 1:], z, x, y + _draw(kernel_delta(x, x), rng), theta), u, eta


def _gaussian(u: ArrayLike, v: ArrayLike, sigma: float, A: float) -> Array:
    """σ²·exp(−½·A·|d|²)."""
    difference = np.asarray(u, np.float64)[:, None] - np.asarray(v, np.float64)[None]
    covariance: Array = sigma**2 * np.exp(-0.5 * A * np.square(difference).sum(-1))
    return covariance


def _draw(covariance: Array, rng: np.random.Generator) -> Array:
    """One draw (B, 1) of N(0, covariance)."""
    lower = np.linalg.cholesky(covariance + JITTER * np.eye(len(covariance)))
    draw: Array = lower @ rng.standard_normal((len(covariance), 1))
    return draw


def _space_filling(rows: int, columns: int, rng: np.random.Generator) -> Array:
    """The Latin hypercube on the unit cube with the largest smallest distance, out of some."""
    cells = rng.permuted(np.tile(np.arange(rows)[:, None], (DESIGNS, 1, columns)), axis=1)
    designs: Array = (cells + rng.random((DESIGNS, rows, columns))) / rows  # (DESIGNS, rows, columns)
    distance = np.linalg.norm(designs[:, :, None] - designs[:, None], axis=-1)  # (DESIGNS, rows, rows)
    distance[:, range(rows), range(rows)] = np.inf
    best: Array = designs[distance.min((1, 2)).argmax()]
    return best
