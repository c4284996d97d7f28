"""A stand-in for the paper's radionuclide problem (section 4.3): the plume of a release, carried by groundwater.

The paper's data, runs of a simulator of Yucca Flat, are not at hand. What stands in for them has their sizes (two
control inputs, six parameters, 88 sites × 200 runs, 10 observations) and their difficulty, a spike at one of the
observed sites. It is not that simulator, and no figure can be compared with one of the paper's.

An activity M is released at once at a point of an aquifer. Groundwater of seepage velocity v carries it along x' and
spreads it with D_L = α_L·v along and D_T = α_T·v across; sorption slows it down by the factor R; it decays at rate λ:

    R ∂c/∂t = D_L ∂²c/∂x'² + D_T ∂²c/∂y'² − v ∂c/∂x' − λ R c

In a wide aquifer of porosity n and thickness b the dissolved concentration at time T is, with τ = T/R,

    c(x', y', T) = M·exp(−λT)/(R·n·b) · exp(−(x' − vτ)²/(4·D_L·τ) − y'²/(4·D_T·τ)) / (4π·τ·√(D_L·D_T)),

x' and y' being the coordinates from the point of release, along and across the flow, whose direction is an angle
counterclockwise from east. x = (easting, northing) is known; t = (activity, velocity, dispersivities α_L and α_T,
direction, R) is to be calibrated.

The output is c itself and not log c, as a sampler measures it: nothing over most of the field, and a plume whose width
is about the distance between wells, so that one of the observed wells reads seven times what the next one does. log c
would be a smooth paraboloid without any spike. Nature adds a smooth background that the simulator does not know,

    δ(x) = 0.10 + 0.06·sin(2π·x₁/3 km) + 0.04·cos(2π·x₂/2 km) kBq/L,

and every observation has an error of its own, as a laboratory states it: y = f(x) + ε with f = η(x, θ*) + δ(x) and
ε ~ N(0, s²), s² = 0.03² + (0.02·f)². s comes with the observation.

M, v and R can only be told up to a common factor: c depends on M/v and on v/R.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from storage.priors import Uniform
from storage.problem import CalibrationInput, ControlInput, Output, Problem
from vcal_dist.problems.designs import Range, latin_hypercube

Array = NDArray[np.float64]


CONTROLS = {
    "easting": Range(0.0, 2200.0, "m", "of the well, from the south-west corner of the field"),
    "northing": Range(0.0, 1600.0, "m", "of the well, from the south-west corner of the field"),
}
PARAMETERS = {
    "activity": Range(20.0, 60.0, "TBq", "released activity M"),
    "velocity": Range(40.0, 60.0, "m/yr", "seepage velocity v of the groundwater"),
    "alpha_l": Range(5.0, 15.0, "m", "longitudinal dispersivity α_L"),
    "alpha_t": Range(2.0, 6.0, "m", "transverse dispersivity α_T"),
    "direction": Range(5.0, 35.0, "°", "direction of flow, counterclockwise from east"),
    "retardation": Range(1.5, 2.5, "", "retardation factor R"),
}
RELEASE = (200.0, 300.0)  # m, easting and northing of the release
TIME = 40.0  # yr from the release to the measurement
HALF_LIFE = 28.8  # yr, of strontium-90
POROSITY, THICKNESS = 0.25, 20.0  # n, and b in m
KBQ_PER_LITRE = 1e6  # in a TBq/m³: 10¹² Bq in 10³ litres

THETA = (42.0, 51.0, 9.0, 3.5, 21.0, 1.9)  # θ*, the truth that calibration looks for
NOISE, RELATIVE_NOISE = 0.03, 0.02  # standard deviation of ε: in kBq/L, and as a share of what is measured

GRID, SPACING, JITTER = (11, 8), 200.0, 60.0  # wells, and m between them and from their places on the grid
SPIKE = 39  # the well in the spike: of all 88 it has the highest concentration
OBSERVED = (SPIKE, 37, 28, 49, 40, 0, 10, 77, 87, 81)  # with four at the plume's edge and five beyond it


class Data(NamedTuple):
    """Simulator runs (x_runs, t, z) and field observations (x, y)."""

    x_runs: Array  # (N, 2)
    t: Array  # (N, 6)
    z: Array  # (N, 1)
    x: Array  # (n, 2), the spike's well first
    y: Array  # (n, 1)
    noise: Array  # (n, 1) standard deviations of y


def problem() -> Problem:
    """Names, units, bounds and priors, as a store or a problem file holds them."""
    return Problem(
        name="radionuclide",
        description="A physical stand-in for the paper's radionuclide data, which are not at hand: "
        "the plume of an instantaneous release in groundwater.",
        control_inputs=tuple(
            ControlInput(name=name, unit=unit, description=meaning, bounds=(low, high))
            for name, (low, high, unit, meaning) in CONTROLS.items()
        ),
        calibration_inputs=tuple(
            CalibrationInput(
                name=name, unit=unit, description=meaning, bounds=(low, high), prior=Uniform(low=low, high=high)
            )
            for name, (low, high, unit, meaning) in PARAMETERS.items()
        ),
        outputs=(Output(name="concentration", unit="kBq/L", description="dissolved activity after 40 years"),),
    )


def concentration(x: ArrayLike, t: ArrayLike, time: float = TIME) -> Array:
    """The dissolved concentration (B,) in kBq/L at x (B, 2), `time` years after a release with parameters t (B, 6)."""
    activity, velocity, alpha_l, alpha_t, _, R = _columns(t, tuple(PARAMETERS))
    along, across = flow_coordinates(x, t)
    tau = time / R
    D_L, D_T = alpha_l * velocity, alpha_t * velocity
    decay = math.exp(-math.log(2) / HALF_LIFE * time)
    mass = KBQ_PER_LITRE * activity * decay / (R * POROSITY * THICKNESS)
    spread = np.exp(-((along - velocity * tau) ** 2) / (4 * D_L * tau) - across**2 / (4 * D_T * tau))
    c: Array = mass * spread / (4 * np.pi * tau * np.sqrt(D_L * D_T))
    return c


def flow_coordinates(x: ArrayLike, t: ArrayLike) -> tuple[Array, Array]:
    """x' and y' (B,) in m: from the point of release, along and across the flow."""
    easting, northing = _columns(x, tuple(CONTROLS))
    angle = np.deg2rad(_columns(t, tuple(PARAMETERS))[4])
    east, north = easting - RELEASE[0], northing - RELEASE[1]
    return east * np.cos(angle) + north * np.sin(angle), north * np.cos(angle) - east * np.sin(angle)


def simulate(x: ArrayLike, t: ArrayLike) -> Array:
    """The computer model η(x, t), shape (B, 1), for x (B, 2) and t (B, 6)."""
    return concentration(x, t)[:, None]


def discrepancy(x: ArrayLike) -> Array:
    """The background δ(x), shape (B, 1)."""
    easting, northing = _columns(x, tuple(CONTROLS))
    delta: Array = 0.10 + 0.06 * np.sin(2 * np.pi * easting / 3000) + 0.04 * np.cos(2 * np.pi * northing / 2000)
    return delta[:, None]


def nature(x: ArrayLike) -> Array:
    """What an observation would be without noise, η(x, θ*) + δ(x), shape (B, 1)."""
    x = np.asarray(x, np.float64)
    return simulate(x, np.tile(THETA, (len(x), 1))) + discrepancy(x)


def sites() -> Array:
    """The wells (88, 2): near the points of a grid, always the same."""
    columns, rows = GRID
    east, north = np.meshgrid(np.arange(columns), np.arange(rows))
    grid = SPACING * np.stack([east.ravel() + 0.5, north.ravel() + 0.5], 1)
    wells: Array = grid + np.random.default_rng(88).uniform(-JITTER, JITTER, grid.shape)
    return wells


def generate(runs: int, seed: int) -> Data:
    """The simulator at all sites for each of `runs` points of a Latin hypercube, and the observations."""
    rng = np.random.default_rng(seed)
    x_runs, t = at_all_sites(design(runs, rng))
    x = sites()[list(OBSERVED)]
    truth = nature(x)
    noise = np.hypot(NOISE, RELATIVE_NOISE * truth)
    y = truth + noise * rng.standard_normal(truth.shape)
    return Data(x_runs=x_runs, t=t, z=simulate(x_runs, t), x=x, y=y, noise=noise)


def at_all_sites(t: ArrayLike) -> tuple[Array, Array]:
    """Every site with every t (R, 6): x (88·R, 2) and t (88·R, 6), run by run."""
    t, wells = np.asarray(t, np.float64), sites()
    return np.tile(wells, (len(t), 1)), np.repeat(t, len(wells), axis=0)


def design(runs: int, rng: np.random.Generator) -> Array:
    """Values of t (R, 6): a Latin hypercube on their ranges."""
    low, high = (np.array([getattr(value, side) for value in PARAMETERS.values()]) for side in ("low", "high"))
    points: Array = low + (high - low) * latin_hypercube(runs, len(PARAMETERS), rng)
    return points


def _columns(values: ArrayLike, names: tuple[str, ...]) -> Array:
    """The columns, as (columns, rows)."""
    values = np.asarray(values, np.float64)
    if values.ndim != 2 or values.shape[1] != len(names):
        raise ValueError(f"expected an array of shape (rows, {len(names)}) with columns {names}, got {values.shape}")
    return values.T
