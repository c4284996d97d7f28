"""Simulators whose every run fills many rows: a time series or a field for each value of the parameters.

    oscillator   25 runs of 16 times       amplitude, frequency and damping of a free oscillation
    plume        36 runs of 572 places     bend, width and decay of a plume over two coordinates
    reservoir    300 runs of 365 days      recharge, its season, the time constant and the initial flow of a reservoir

All are smooth and exact. Coordinates and parameters are scaled to the unit interval.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
DAYS = 365


class Rows(NamedTuple):
    """Whole runs, row by row."""

    u: Array  # (R·L, d1 + d2) coordinates, then parameters
    z: Array  # (R·L,)
    run: NDArray[np.int64]  # (R·L,)


class LongForm(NamedTuple):
    """A simulator with its coordinates."""

    name: str
    x: Array  # (L, d1) the coordinates of every run's rows
    parameters: int  # d2
    runs: int  # of the usual design
    simulate: Callable[[ArrayLike, ArrayLike], Array]  # x (n, d1), t (n, d2) -> z (n,)

    def rows(self, t: ArrayLike) -> Rows:
        """All rows of the runs with parameters t (R, d2)."""
        t = np.asarray(t, np.float64)
        runs, places = len(t), len(self.x)
        x, t = np.tile(self.x, (runs, 1)), np.repeat(t, places, axis=0)
        return Rows(np.hstack([x, t]), self.simulate(x, t), np.repeat(np.arange(runs), places))


def oscillator(x: ArrayLike, t: ArrayLike) -> Array:
    """A free oscillation, z'' + 2ζω·z' + ω²·z = 0 from z = a at rest, over a time of 0 to 1.

    t: amplitude a of 0.5 to 1.5, ω of 4 to 12 (up to two periods), ζ of 0.05 to 0.4.
    """
    (time,), (a, w, damping) = _columns(x), _columns(t)
    a, w, damping = 0.5 + a, 4 + 8 * w, 0.05 + 0.35 * damping
    root = np.sqrt(1 - damping**2)
    phase = root * w * time
    z: Array = a * np.exp(-damping * w * time) * (np.cos(phase) + damping / root * np.sin(phase))
    return z


def plume(x: ArrayLike, t: ArrayLike) -> Array:
    """A plume that leaves (0, ½), bends aside, widens and decays downstream.

    t: bend of −0.4 to 0.4 at the far end, width of 0.08 to 0.2 at the near end, decay of 0 to 2.
    """
    (x1, x2), (bend, width, decay) = _columns(x), _columns(t)
    bend, width, decay = 0.8 * (bend - 0.5), 0.08 + 0.12 * width, 2 * decay
    spread = np.sqrt(width**2 + 0.02 * x1)
    z: Array = width / spread * np.exp(-decay * x1 - 0.5 * ((x2 - 0.5 - bend * x1**2) / spread) ** 2)
    return z


def reservoir(x: ArrayLike, t: ArrayLike) -> Array:
    """The outflow Q of a linear reservoir over a year, k·Q' = r(τ) − Q, whose recharge r has a season.

    r(τ) = r₀·(1 + a·sin(2π(τ/365 − φ))) in mm a day, t = (r₀, a, φ, k, Q₀): r₀ of 1 to 4, a of 0 to 0.9, φ of 0 to
    0.5 years, k of 10 to 90 days, Q₀ of 0 to 12. Q is the periodic solution and a recession towards it.
    """
    (year,), (r0, a, phi, k, start) = _columns(x), _columns(t)
    r0, a, phi, k, start = 1 + 3 * r0, 0.9 * a, 0.5 * phi, 10 + 80 * k, 12 * start
    turn = 2 * np.pi / DAYS * k

    def periodic(year: Array | float) -> Array:
        angle = 2 * np.pi * (year - phi)
        flow: Array = r0 * (1 + a * (np.sin(angle) - turn * np.cos(angle)) / (1 + turn**2))
        return flow

    z: Array = periodic(year) + (start - periodic(0.0)) * np.exp(-DAYS * year / k)
    return z


def _grid(*counts: int) -> Array:
    """Points of a regular grid on the unit cube, (L, d1), the last coordinate fastest."""
    axes = np.meshgrid(*(np.linspace(0, 1, count) for count in counts), indexing="ij")
    return np.stack([axis.ravel() for axis in axes], axis=1)


def _columns(values: ArrayLike) -> Array:
    columns: Array = np.asarray(values, np.float64).T
    return columns


LONG_FORMS = {
    problem.name: problem
    for problem in (
        LongForm("oscillator", _grid(16), 3, 25, oscillator),
        LongForm("plume", _grid(26, 22), 3, 36, plume),
        LongForm("reservoir", _grid(DAYS), 5, 300, reservoir),
    )
}
