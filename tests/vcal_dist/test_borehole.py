"""The borehole simulator against an independently written scalar formula and known figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vcal_dist.problems import borehole


def scalar_flow(rw: float, r: float, Tu: float, Hu: float, Tl: float, Hl: float, L: float, Kw: float) -> float:
    """The borehole function as surrogate-modelling libraries print it: argument order and grouping are theirs."""
    numerator = 2 * math.pi * Tu * (Hu - Hl)
    a = 2 * L * Tu / (math.log(r / rw) * rw**2 * Kw)
    b = Tu / Tl
    return numerator / (math.log(r / rw) * (1 + a + b))


def test_simulate_equals_the_scalar_formula() -> None:
    rng = np.random.default_rng(1)
    x, t = rng.random((50, 5)), rng.random((50, 3))
    eta = borehole.simulate(x, t)
    assert eta.shape == (50, 1)
    for i in range(50):
        flow = scalar_flow(
            rw=0.05 + 0.1 * t[i, 0],
            r=100 + 49900 * t[i, 1],
            Tu=63070 + 52530 * x[i, 0],
            Hu=990 + 120 * x[i, 1],
            Tl=63.1 + 52.9 * t[i, 2],
            Hl=700 + 120 * x[i, 2],
            L=1120 + 560 * x[i, 3],
            Kw=9855 + 2190 * x[i, 4],
        )
        assert eta[i, 0] == pytest.approx(flow / 150 - 0.5, rel=1e-12)


def test_range_of_the_flow() -> None:
    # The function is monotone in every input, so its extremes lie in corners: all 2⁸ of them are tried.
    corners = np.indices((2,) * 8).reshape(8, -1).T.astype(float)
    flow = 150 * (borehole.simulate(corners[:, :5], corners[:, 5:]) + 0.5)
    assert flow.min() == pytest.approx(7.8197, abs=1e-3)
    assert flow.max() == pytest.approx(309.5756, abs=1e-3)
    inside = 150 * (borehole.simulate(*np.split(np.random.default_rng(0).random((20_000, 8)), [5], axis=1)) + 0.5)
    assert flow.min() < inside.min() < inside.max() < flow.max()
    assert inside.mean() == pytest.approx(77.7, abs=2)  # 77.66 over two million uniform points


def test_discrepancy_by_hand() -> None:
    x = np.array([[0.0, 0.0, 0.3, 0.3, 0.3], [1.0, 1.0, 0.9, 0.9, 0.9], [0.5, 0.2, 0, 0, 0]])
    expected = [-0.01, 0.0051 * 28 / 60 - 0.01, 0.0051 * 2 * (2.5 + 0.16) / 15 - 0.01]
    np.testing.assert_allclose(borehole.discrepancy(x)[:, 0], expected, rtol=1e-12)


def test_generate_is_a_latin_hypercube_with_the_stated_noise() -> None:
    data = borehole.generate(runs=1000, observations=5000, seed=3)
    for column in (*data.x_runs.T, *data.t.T):
        assert sorted(np.floor(column * 1000).astype(int)) == list(range(1000))
    np.testing.assert_array_equal(data.z, borehole.simulate(data.x_runs, data.t))
    truth = borehole.simulate(data.x, np.tile(borehole.THETA, (5000, 1))) + borehole.discrepancy(data.x)
    noise = (data.y - truth)[:, 0]
    assert noise.std() == pytest.approx(borehole.NOISE, rel=0.05)
    assert abs(noise.mean()) < 4 * borehole.NOISE / math.sqrt(5000)


def test_the_seed_decides() -> None:
    first, same, other = (borehole.generate(20, 10, seed) for seed in (5, 5, 6))
    for a, b, c in zip(first, same, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)


def test_the_papers_measure_of_the_truth() -> None:
    # Root mean square of η(x, θ*) − (η(x, θ*) + δ(x)): 0.008 for the truth itself.
    x = np.random.default_rng(0).random((20_000, 5))
    assert math.sqrt(np.mean(borehole.discrepancy(x) ** 2)) == pytest.approx(0.008, abs=0.001)


def test_problem_names_the_columns_of_the_data() -> None:
    problem, data = borehole.problem(), borehole.generate(4, 3, seed=0)
    assert len(problem.control_inputs) == data.x_runs.shape[1] == data.x.shape[1]
    assert [v.name for v in problem.calibration_inputs] == list(borehole.PARAMETERS)
    assert all(v.bounds == (0.0, 1.0) for v in (*problem.control_inputs, *problem.calibration_inputs))


def test_a_wrong_shape_says_so() -> None:
    with pytest.raises(ValueError, match=r"shape \(rows, 5\).*got shape \(2, 3\)"):
        borehole.simulate(np.zeros((2, 3)), np.zeros((2, 3)))
