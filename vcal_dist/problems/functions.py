"""Twenty functions of the emulation literature on the unit cube: name, number of inputs, and f(u) for rows u (n, d).

Most are collected in the Virtual Library of Simulation Experiments of Surjanovic and Bingham
(https://www.sfu.ca/~ssurjano/), whose ranges of the inputs are used here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vcal_dist.problems import borehole as borehole_problem

Array = NDArray[np.float64]

# Columns of the ranges below: low, high.
PISTON = ((30, 60), (0.005, 0.020), (0.002, 0.010), (1000, 5000), (90_000, 110_000), (290, 296), (340, 360))
CIRCUIT = ((50, 150), (25, 70), (0.5, 3), (1.2, 2.5), (0.25, 1.2), (50, 300))
WING = (
    (150, 200),
    (220, 300),
    (6, 10),
    (-10, 10),
    (16, 45),
    (0.5, 1),
    (0.08, 0.18),
    (2.5, 6),
    (1700, 2500),
    (0.025, 0.08),
)
CANTILEVER = ((2.6e7, 3.2e7), (300, 700), (700, 1300), (2, 4), (2, 4))
CANTILEVER_LENGTH = 100.0
RIDGE_STEEPNESS = 8.0
PEAK = (0.4, 0.5, 0.6)  # where the product peak is largest ...
PEAK_WIDTH = 0.25  # ... and the distance at which each of its factors is a half
G_WEIGHTS = (0.0, 1.0, 4.5, 9.0, 99.0)  # the larger, the less an input of the g-function matters
# Coefficients of Welch's function by the number of the input, beside its non-linear terms.
WELCH = {5: 1, 19: -5, 2: 0.05, 3: 0.08, 6: -0.03, 7: 0.03, 9: -0.09, 10: -0.01, 11: -0.07, 14: -0.04, 15: 0.06}
WELCH |= {17: -0.01, 18: -0.03}


class Function(NamedTuple):
    """A function on the unit cube."""

    name: str
    inputs: int
    evaluate: Callable[[ArrayLike], Array]

    def __call__(self, u: ArrayLike) -> Array:
        """f(u), shape (n,), for u (n, d)."""
        u = np.asarray(u, np.float64)
        if u.ndim != 2 or u.shape[1] != self.inputs:
            raise ValueError(
                f"{self.name} has {self.inputs} inputs; expected u of shape (rows, {self.inputs}), got {u.shape}"
            )
        return self.evaluate(u)


def borehole(u: ArrayLike) -> Array:
    """The flow through a borehole in m³/yr (Harper and Gupta 1983; Morris, Mitchell and Ylvisaker 1993).

    Its inputs are those of `vcal_dist.problems.borehole`, in its order: Tu, Hu, Hl, L, Kw, rw, r, Tl.
    """
    u = np.asarray(u, np.float64)
    d1 = len(borehole_problem.CONTROLS)
    flow: Array = 150 * (borehole_problem.simulate(u[:, :d1], u[:, d1:])[:, 0] + 0.5)
    return flow


def friedman(u: ArrayLike) -> Array:
    """10·sin(π·u₁·u₂) + 20·(u₃ − ½)² + 10·u₄ + 5·u₅ (Friedman, Grosse and Stuetzle 1983; Friedman 1991)."""
    u1, u2, u3, u4, u5 = np.asarray(u, np.float64).T
    z: Array = 10 * np.sin(np.pi * u1 * u2) + 20 * (u3 - 0.5) ** 2 + 10 * u4 + 5 * u5
    return z


def piston(u: ArrayLike) -> Array:
    """The cycle time in s of a piston in a cylinder (Kenett and Zacks 1998; Ben-Ari and Steinberg 2007).

    Inputs: mass M, surface S, initial gas volume V₀, spring coefficient k, atmospheric pressure P₀, temperatures of
    the surroundings Tₐ and of the filling gas T₀. The gas fills the volume V at which the forces are in equilibrium.
    """
    M, S, V0, k, P0, Ta, T0 = _physical(u, PISTON)
    A = P0 * S + 19.62 * M - k * V0 / S
    gas = P0 * V0 * Ta / T0
    V = S / (2 * k) * (np.sqrt(A**2 + 4 * k * gas) - A)
    z: Array = 2 * np.pi * np.sqrt(M / (k + S**2 * gas / V**2))
    return z


def otl_circuit(u: ArrayLike) -> Array:
    """The mid-point voltage of an output transformerless push-pull circuit (Ben-Ari and Steinberg 2007).

    Inputs: resistances R_b1, R_b2, R_f, R_c1, R_c2 in kΩ and the current gain β.
    """
    Rb1, Rb2, Rf, Rc1, Rc2, beta = _physical(u, CIRCUIT)
    amplified = beta * (Rc2 + 9)
    base = 12 * Rb2 / (Rb1 + Rb2)
    z: Array = ((base + 0.74) * amplified + 11.35 * Rf + 0.74 * Rf * amplified / Rc1) / (amplified + Rf)
    return z


def wing_weight(u: ArrayLike) -> Array:
    """The weight in lb of the wing of a light aircraft (Raymer's handbook; Forrester, Sobester and Keane 2008).

    Inputs: wing area, fuel in the wing, aspect ratio, quarter-chord sweep in degrees, dynamic pressure, taper ratio,
    thickness to chord ratio, ultimate load factor, design gross weight, paint weight.
    """
    area, fuel, aspect, sweep, pressure, taper, thickness, load, gross, paint = _physical(u, WING)
    cosine = np.cos(np.deg2rad(sweep))
    z: Array = (
        0.036
        * area**0.758
        * fuel**0.0035
        * (aspect / cosine**2) ** 0.6
        * pressure**0.006
        * taper**0.04
        * (100 * thickness / cosine) ** -0.3
        * (load * gross) ** 0.49
    ) + area * paint
    return z


def robot_arm(u: ArrayLike) -> Array:
    """The distance of a robot arm's end from its shoulder (An and Owen 2001).

    The first four inputs are the angles of its segments, 0 to 2π, each against the segment before; the others their
    lengths, 0 to 1.
    """
    u = np.asarray(u, np.float64)
    direction = np.cumsum(2 * np.pi * u[:, :4], axis=1)
    z: Array = np.abs((u[:, 4:] * np.exp(1j * direction)).sum(1))
    return z


def ishigami(u: ArrayLike) -> Array:
    """sin v₁ + 7·sin² v₂ + 0.1·v₃⁴·sin v₁ with v on [−π, π]³ (Ishigami and Homma 1990)."""
    v1, v2, v3 = np.pi * (2 * np.asarray(u, np.float64).T - 1)
    z: Array = np.sin(v1) * (1 + 0.1 * v3**4) + 7 * np.sin(v2) ** 2
    return z


def ridge(u: ArrayLike) -> Array:
    """tanh(8·(u₁ + u₂ − 1)): steep across a diagonal, flat elsewhere, and its third input does nothing.

    A ridge function (Logan and Shepp 1975; Pinkus 2015), the usual hard case for lengthscales along the axes.
    """
    u1, u2, _ = np.asarray(u, np.float64).T
    z: Array = np.tanh(RIDGE_STEEPNESS * (u1 + u2 - 1))
    return z


def step(u: ArrayLike) -> Array:
    """1 where u₁ + ½·u₂ > ¾, with a trend of 0.2·u₃: discontinuous across a line oblique to the axes.

    The discontinuous family of Genz (1984) has its steps along the axes; oblique ones are harder.
    """
    u1, u2, u3 = np.asarray(u, np.float64).T
    z: Array = (u1 + 0.5 * u2 > 0.75) + 0.2 * u3
    return z


def product_peak(u: ArrayLike) -> Array:
    """Π c²/(c² + (u_j − w_j)²), which is 1 at its peak w: the product peak of Genz (1984) with three inputs."""
    distance = np.asarray(u, np.float64) - PEAK
    z: Array = np.prod(1 / (1 + (distance / PEAK_WIDTH) ** 2), axis=1)
    return z


def currin(u: ArrayLike) -> Array:
    """The exponential function of Currin, Mitchell, Morris and Ylvisaker (1991); largest, 13.8, at (0.217, 0.023)."""
    u1, u2 = np.asarray(u, np.float64).T
    with np.errstate(divide="ignore"):
        factor = -np.expm1(-0.5 / u2)
    z: Array = factor * (2300 * u1**3 + 1900 * u1**2 + 2092 * u1 + 60) / (100 * u1**3 + 500 * u1**2 + 4 * u1 + 20)
    return z


def park(u: ArrayLike) -> Array:
    """½·(√(u₁² + (u₂ + u₃²)·u₄) − u₁) + (u₁ + 3·u₄)·exp(1 + sin u₃) (Park 1991; Cox, Park and Singer 2001)."""
    u1, u2, u3, u4 = np.asarray(u, np.float64).T
    z: Array = 0.5 * (np.sqrt(u1**2 + (u2 + u3**2) * u4) - u1) + (u1 + 3 * u4) * np.exp(1 + np.sin(u3))
    return z


def curved(u: ArrayLike) -> Array:
    """The highly curved function of Dette and Pepelyshev (2010), of eight inputs."""
    u = np.asarray(u, np.float64)
    u1, u2, u3 = u[:, :3].T
    sums = np.cumsum(u[:, 2:], axis=1)[:, 1:]  # u₃ + … + u_i for i = 4 … 8
    first: Array = 4 * (u1 - 2 + 8 * u2 - 8 * u2**2) ** 2 + (3 - 4 * u2) ** 2
    return first + 16 * np.sqrt(u3 + 1) * (2 * u3 - 1) ** 2 + np.log1p(sums) @ np.arange(4.0, 9.0)


def welch(u: ArrayLike) -> Array:
    """Twenty inputs, of which the 8th and the 16th do nothing, and many next to nothing (Welch et al. 1992)."""
    v = dict(enumerate((np.asarray(u, np.float64) - 0.5).T, 1))
    linear = sum(coefficient * v[i] for i, coefficient in WELCH.items())
    z: Array = 5 * v[12] / (1 + v[1]) + 5 * (v[4] - v[20]) ** 2 + 40 * v[19] ** 3 + 0.25 * v[13] ** 2 + linear
    return z


def g_function(u: ArrayLike) -> Array:
    """Π (|4·u_i − 2| + a_i)/(1 + a_i) with five inputs: a kink in the middle of each (Saltelli and Sobol' 1995)."""
    a = np.array(G_WEIGHTS)
    z: Array = np.prod((np.abs(4 * np.asarray(u, np.float64) - 2) + a) / (1 + a), axis=1)
    return z


def franke(u: ArrayLike) -> Array:
    """Two hills, a slope and a dip (Franke 1979)."""
    x, y = 9 * np.asarray(u, np.float64).T
    z: Array = 0.75 * np.exp(-((x - 2) ** 2 + (y - 2) ** 2) / 4) + 0.75 * np.exp(-((x + 1) ** 2) / 49 - (y + 1) / 10)
    return z + 0.5 * np.exp(-((x - 7) ** 2 + (y - 3) ** 2) / 4) - 0.2 * np.exp(-((x - 4) ** 2) - (y - 7) ** 2)


def gramacy_lee(u: ArrayLike) -> Array:
    """x₁·exp(−x₁² − x₂²) over [−2, 6]²: a peak and a dip in a corner, and nothing elsewhere (Gramacy and Lee 2008)."""
    x1, x2 = 8 * np.asarray(u, np.float64).T - 2
    z: Array = x1 * np.exp(-(x1**2) - x2**2)
    return z


def morokoff(u: ArrayLike) -> Array:
    """(1 + 1/d)^d·Π u_i^(1/d) with d = 5 inputs: infinitely steep at the faces (Morokoff and Caflisch 1995)."""
    u = np.asarray(u, np.float64)
    d = u.shape[1]
    z: Array = (1 + 1 / d) ** d * np.prod(u ** (1 / d), axis=1)
    return z


def bratley(u: ArrayLike) -> Array:
    """Σ_i (−1)^i·Π_{j ≤ i} u_j with six inputs: interactions of every order (Bratley, Fox and Niederreiter 1992)."""
    products = np.cumprod(np.asarray(u, np.float64), axis=1)
    z: Array = products @ (-1.0) ** np.arange(1, products.shape[1] + 1)
    return z


def cantilever(u: ArrayLike) -> Array:
    """The displacement of a beam's end under two loads X and Y (Wu et al. 2001): 4L³/(Ewt)·√((Y/t²)² + (X/w²)²)."""
    E, X, Y, w, t = _physical(u, CANTILEVER)
    z: Array = 4 * CANTILEVER_LENGTH**3 / (E * w * t) * np.hypot(Y / t**2, X / w**2)
    return z


FUNCTIONS = {
    function.name: function
    for function in (
        Function("borehole", 8, borehole),
        Function("friedman", 5, friedman),
        Function("piston", 7, piston),
        Function("otl_circuit", 6, otl_circuit),
        Function("wing_weight", 10, wing_weight),
        Function("robot_arm", 8, robot_arm),
        Function("ishigami", 3, ishigami),
        Function("ridge", 3, ridge),
        Function("step", 3, step),
        Function("product_peak", 3, product_peak),
        Function("currin", 2, currin),
        Function("park", 4, park),
        Function("curved", 8, curved),
        Function("welch", 20, welch),
        Function("g_function", 5, g_function),
        Function("franke", 2, franke),
        Function("gramacy_lee", 2, gramacy_lee),
        Function("morokoff", 5, morokoff),
        Function("bratley", 6, bratley),
        Function("cantilever", 5, cantilever),
    )
}


def _physical(u: ArrayLike, ranges: tuple[tuple[float, float], ...]) -> Array:
    """The columns of scaled inputs in physical units, (d, n)."""
    low, high = np.array(ranges, np.float64).T
    columns: Array = (low + (high - low) * np.asarray(u, np.float64)).T
    return columns
