"""The test functions against values from elsewhere, exact moments and symmetries; long-form runs against their laws."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import brentq

from vcal_dist.problems.functions import FUNCTIONS, G_WEIGHTS, PEAK, PEAK_WIDTH
from vcal_dist.problems.longform import LONG_FORMS

RNG_SEED = 5
INPUTS = {
    "borehole": 8,
    "friedman": 5,
    "piston": 7,
    "otl_circuit": 6,
    "wing_weight": 10,
    "robot_arm": 8,
    "ishigami": 3,
    "ridge": 3,
    "step": 3,
    "product_peak": 3,
    "currin": 2,
    "park": 4,
    "curved": 8,
    "welch": 20,
    "g_function": 5,
    "franke": 2,
    "gramacy_lee": 2,
    "morokoff": 5,
    "bratley": 6,
    "cantilever": 5,
}


def at(name: str, *u: float) -> float:
    return float(FUNCTIONS[name](np.array([u]))[0])


def centre(name: str) -> float:
    return at(name, *[0.5] * INPUTS[name])


def points(name: str, rows: int = 200_000) -> np.ndarray:
    return np.random.default_rng(RNG_SEED).random((rows, INPUTS[name]))


def test_every_function_is_finite_on_the_cube_and_varies() -> None:
    assert {name: function.inputs for name, function in FUNCTIONS.items()} == INPUTS
    for name, function in FUNCTIONS.items():
        z = function(points(name, 1000))
        assert z.shape == (1000,), name
        assert np.isfinite(z).all(), name
        assert z.std() > 0, name
        corners = np.random.default_rng(RNG_SEED).integers(0, 2, (1000, INPUTS[name])).astype(float)
        assert np.isfinite(function(corners)).all(), name


def test_a_wrong_number_of_inputs_is_named() -> None:
    with pytest.raises(ValueError, match=r"piston has 7 inputs.*got \(4, 6\)"):
        FUNCTIONS["piston"](np.zeros((4, 6)))


def test_borehole() -> None:
    # By hand: rw 0.1, r 25050, Tu 89335, Hu 1050, Tl 89.55, Hl 760, L 1400, Kw 10950.
    assert centre("borehole") == pytest.approx(70.87291, abs=1e-4)
    assert FUNCTIONS["borehole"](points("borehole")).mean() == pytest.approx(77.66, abs=0.5)


def test_friedman() -> None:
    assert centre("friedman") == pytest.approx(10 * math.sin(math.pi / 4) + 7.5)
    assert at("friedman", 0.5, 1, 1, 0, 0) == pytest.approx(10 + 5)
    z = FUNCTIONS["friedman"](points("friedman"))
    # ∫∫ sin(πuv) = (γ + ln π − Ci(π))/π = 0.52447
    assert z.mean() == pytest.approx(5.2447 + 20 / 12 + 5 + 2.5, abs=0.05)


def test_franke() -> None:
    # Every term is a product of functions of one input, whose integrals are known.
    def bump(middle: float, width: float) -> float:
        """∫ exp(−(9x − middle)²/width²) dx over the unit interval."""
        ends = math.erf((9 - middle) / width) + math.erf(middle / width)
        return ends * width * math.sqrt(math.pi) / 18

    slope = 10 / 9 * (math.exp(-0.1) - math.exp(-1.0))
    mean = 0.75 * bump(2, 2) ** 2 + 0.75 * bump(-1, 7) * slope + 0.5 * bump(7, 2) * bump(3, 2)
    mean -= 0.2 * bump(4, 1) * bump(7, 1)
    assert FUNCTIONS["franke"](points("franke")).mean() == pytest.approx(mean, abs=0.003)


def test_gramacy_lee_has_its_peak_in_a_corner() -> None:
    root = 1 / math.sqrt(2)
    assert at("gramacy_lee", (2 + root) / 8, 0.25) == pytest.approx(root * math.exp(-0.5))
    assert at("gramacy_lee", (2 - root) / 8, 0.25) == pytest.approx(-root * math.exp(-0.5))
    assert FUNCTIONS["gramacy_lee"](points("gramacy_lee")).max() <= root * math.exp(-0.5)
    assert abs(at("gramacy_lee", 1.0, 1.0)) < 1e-20


def test_morokoff_and_bratley_have_the_means_that_they_were_made_with() -> None:
    assert FUNCTIONS["morokoff"](points("morokoff")).mean() == pytest.approx(1.0, abs=0.005)
    assert at("morokoff", 1, 1, 1, 1, 0) == 0.0
    assert FUNCTIONS["bratley"](points("bratley")).mean() == pytest.approx(-(1 - 0.5**6) / 3, abs=0.003)
    assert at("bratley", 1, 1, 1, 0, 1, 1) == pytest.approx(-1.0)


def test_cantilever_adds_the_bending_of_both_loads_at_a_right_angle() -> None:
    # By hand, of a beam with L = 100, E = 2.9e7, X = 500, Y = 1000 and w = t = 3: force·L³/(3EI) in each direction.
    bent = [force * 100**3 / (3 * 2.9e7 * 3**4 / 12) for force in (500, 1000)]
    assert centre("cantilever") == pytest.approx(math.hypot(*bent))


def test_piston_is_where_the_forces_are_in_equilibrium() -> None:
    M, S, V0, k, P0, Ta, T0 = 45, 0.0125, 0.006, 3000, 1e5, 293, 350

    def force(V: float) -> float:
        return P0 * S + 19.62 * M + k * (V - V0) / S - P0 * V0 * Ta / T0 * S / V

    V = brentq(force, 1e-6, 1, xtol=1e-16)
    stiffness = k + S**2 * P0 * V0 * Ta / (T0 * V**2)
    assert centre("piston") == pytest.approx(2 * math.pi * math.sqrt(M / stiffness), rel=1e-10)
    assert centre("piston") == pytest.approx(0.4643970, abs=1e-6)


def test_circuit() -> None:
    # From exact fractions.
    assert centre("otl_circuit") == pytest.approx(5.310616942, abs=1e-8)
    assert at("otl_circuit", *[0] * 6) == pytest.approx(5.055138589, abs=1e-8)
    assert at("otl_circuit", *[1] * 6) == pytest.approx(5.451964206, abs=1e-8)


def test_wing_weight() -> None:
    """The Cessna of Gramacy (Surrogates, 2020, chapter 1) without paint: 233.90840542."""
    cessna = (0.48, 0.4, 0.38, 0.5, 0.62, 0.344, 0.4, 0.37, 0.38)
    area = 174
    assert at("wing_weight", *cessna, 0) - area * 0.025 == pytest.approx(233.90840542, abs=1e-7)
    assert at("wing_weight", *cessna, 1) - area * 0.080 == pytest.approx(233.90840542, abs=1e-7)
    swept = [at("wing_weight", *cessna[:3], angle, *cessna[4:], 0.5) for angle in (0.1, 0.9)]
    assert swept[0] == pytest.approx(swept[1])


def test_robot_arm() -> None:
    assert at("robot_arm", 0.3, 0, 0, 0, 1, 1, 1, 1) == pytest.approx(4)  # stretched
    assert at("robot_arm", 0.3, 0.25, 0.25, 0.25, 1, 1, 1, 1) == pytest.approx(0, abs=1e-12)  # a square
    assert at("robot_arm", 0, 0.25, 0, 0, 0.3, 0.4, 0, 0) == pytest.approx(0.5)  # a right angle
    u = points("robot_arm", 100)
    turned = u.copy()
    turned[:, 0] = 0.7
    np.testing.assert_allclose(FUNCTIONS["robot_arm"](u), FUNCTIONS["robot_arm"](turned))
    # Independent directions: E[z²] = Σ E[L²] = 4/3.
    assert np.square(FUNCTIONS["robot_arm"](points("robot_arm"))).mean() == pytest.approx(4 / 3, abs=0.01)


def test_ishigami() -> None:
    """Mean and variance are known exactly."""
    z = FUNCTIONS["ishigami"](points("ishigami"))
    assert z.mean() == pytest.approx(3.5, abs=0.03)
    exact = 7**2 / 8 + 0.1 * math.pi**4 / 5 + 0.1**2 * math.pi**8 / 18 + 0.5
    assert z.var() == pytest.approx(exact, rel=0.01)
    assert at("ishigami", 0.75, 0.75, 0.5) == pytest.approx(8)  # sin(π/2) + 7


def test_ridge() -> None:
    u = points("ridge", 100)
    z = FUNCTIONS["ridge"](u)
    np.testing.assert_allclose(FUNCTIONS["ridge"](1 - u), -z)
    np.testing.assert_allclose(FUNCTIONS["ridge"](u[:, [1, 0, 2]]), z)
    np.testing.assert_array_equal(FUNCTIONS["ridge"](u * [1, 1, 0]), z)
    assert at("ridge", 0.5, 0.625, 0) == pytest.approx(0.76159416)  # tanh 1


def test_step() -> None:
    z = FUNCTIONS["step"](points("step"))
    assert z.mean() == pytest.approx(0.5 + 0.1, abs=0.01)
    assert z.var() == pytest.approx(1 / 4 + 0.04 / 12, abs=0.002)
    assert at("step", 0.74, 0, 0.5) == pytest.approx(0.1)
    assert at("step", 0.76, 0, 0.5) == pytest.approx(1.1)


def test_product_peak() -> None:
    assert at("product_peak", *PEAK) == 1
    assert at("product_peak", PEAK[0] + PEAK_WIDTH, PEAK[1] - PEAK_WIDTH, PEAK[2]) == pytest.approx(1 / 4)
    exact = math.prod(PEAK_WIDTH * (math.atan((1 - w) / PEAK_WIDTH) + math.atan(w / PEAK_WIDTH)) for w in PEAK)
    assert FUNCTIONS["product_peak"](points("product_peak")).mean() == pytest.approx(exact, rel=0.01)


def test_currin() -> None:
    """Its maximum is the one in the Virtual Library."""
    z = FUNCTIONS["currin"](points("currin"))
    assert at("currin", 0.216667, 0.02282407) == pytest.approx(13.798650, abs=1e-4)
    assert z.max() < 13.799
    assert at("currin", 0, 0) == pytest.approx(3)


def test_park() -> None:
    assert at("park", 1, 1, 1, 1) == pytest.approx(25.5893, abs=1e-3)  # the Virtual Library's maximum
    assert FUNCTIONS["park"](points("park")).max() < 25.59
    assert at("park", 0, 0.25, 0, 1) == pytest.approx(0.25 + 3 * math.e)


def test_curved() -> None:
    assert at("curved", *[0] * 8) == pytest.approx(4 * 4 + 9 + 16)
    by_hand = 4 * 1 + 1 + 16 * math.sqrt(2) + sum(i * math.log(i - 1) for i in range(4, 9))
    assert at("curved", 1, 0.5, *[1] * 6) == pytest.approx(by_hand)


def test_welch() -> None:
    z = FUNCTIONS["welch"](points("welch"))
    assert z.mean() == pytest.approx(5 / 6 + 1 / 48, abs=0.02)  # the other terms are odd about the middle
    u = points("welch", 50)
    still = u.copy()
    still[:, [7, 15]] = 0.3
    np.testing.assert_array_equal(FUNCTIONS["welch"](still), FUNCTIONS["welch"](u))
    assert at("welch", *[0.5] * 18, 1.0, 0.5) == pytest.approx(40 / 8 - 5 / 2)


def test_g_function() -> None:
    """Mean and variance are known exactly."""
    z = FUNCTIONS["g_function"](points("g_function"))
    assert z.mean() == pytest.approx(1, abs=0.01)
    exact = math.prod(1 + 1 / (3 * (1 + a) ** 2) for a in G_WEIGHTS) - 1
    assert z.var() == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("name", "runs", "places", "controls"),
    [("oscillator", 25, 16, 1), ("plume", 36, 572, 2), ("reservoir", 300, 365, 1)],
)
def test_rows_are_whole_runs(name: str, runs: int, places: int, controls: int) -> None:
    problem = LONG_FORMS[name]
    assert problem.runs == runs
    assert problem.x.shape == (places, controls)
    t = np.random.default_rng(RNG_SEED).random((4, problem.parameters))
    rows = problem.rows(t)
    assert rows.u.shape == (4 * places, controls + problem.parameters)
    assert np.isfinite(rows.z).all()
    for number in range(4):
        of_run = rows.run == number
        np.testing.assert_array_equal(rows.u[of_run, :controls], problem.x)
        assert (rows.u[of_run, controls:] == t[number]).all()
    assert all(not np.allclose(a, b) for a, b in pairwise(rows.z.reshape(4, places)))


def test_the_oscillation_obeys_its_equation() -> None:
    w, damping, time = 4 + 8 * 0.3, 0.05 + 0.35 * 0.6, np.linspace(0, 1, 4001)
    z = LONG_FORMS["oscillator"].simulate(time[:, None], np.tile([0.7, 0.3, 0.6], (len(time), 1)))
    assert z[0] == pytest.approx(1.2)
    slope = np.gradient(z, time)
    assert slope[0] == pytest.approx(0, abs=0.02)
    left = np.gradient(slope, time) + 2 * damping * w * slope + w**2 * z
    assert np.abs(left[5:-5]).max() < 1e-3 * np.abs(w**2 * z).max()


def test_the_reservoir_balances_its_water() -> None:
    t = np.array([0.2, 0.7, 0.4, 0.3, 0.9])
    day = np.linspace(0, 365, 36_501)
    z = LONG_FORMS["reservoir"].simulate(day[:, None] / 365, np.tile(t, (len(day), 1)))
    assert z[0] == pytest.approx(12 * 0.9)
    recharge = (1 + 3 * 0.2) * (1 + 0.9 * 0.7 * np.sin(2 * np.pi * (day / 365 - 0.5 * 0.4)))
    storage = (10 + 80 * 0.3) * z
    gained = np.sum(((recharge - z)[1:] + (recharge - z)[:-1]) / 2 * np.diff(day))
    assert storage[-1] - storage[0] == pytest.approx(gained, rel=1e-5)


def test_the_plume_is_symmetric_about_its_bend() -> None:
    simulate, t = LONG_FORMS["plume"].simulate, np.array([[0.8, 0.3, 0.5]])
    assert simulate([[0, 0.5]], t)[0] == pytest.approx(1)
    axis = 0.5 + 0.8 * 0.3 * 0.5**2
    sides = [simulate([[0.5, axis + away]], t)[0] for away in (-0.1, 0.1)]
    assert sides[0] == pytest.approx(sides[1])
    mirrored = simulate([[0.6, 0.3]], t)[0], simulate([[0.6, 0.7]], [[0.2, 0.3, 0.5]])[0]  # bent the other way
    assert mirrored[0] == pytest.approx(mirrored[1])
