"""The cell biology simulator against an integrated differential equation, its design, and known figures."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.spatial.distance import pdist

from vcal_dist.problems import cell
from vcal_dist.problems.designs import maximin_latin_hypercube


def test_simulate_equals_the_differential_equation_of_the_channel() -> None:
    rng = np.random.default_rng(1)
    x, t = rng.random((6, 1)), 10 * rng.random((6, 3))
    for i, (a, b, c) in enumerate(t):
        generator = np.array([[-b - c, a, 0, 0], [b, -a - b, a, 0], [0, b, -a - b, a], [0, 0, b, -a]])
        end = np.exp(-1.714798 + 4.564348 * x[i, 0])
        path = solve_ivp(
            lambda _, p, A=generator: A @ p, (0, end), [0.0, 0, 0, 1], method="LSODA", rtol=1e-10, atol=1e-14
        )
        assert cell.simulate(x[i : i + 1], t[i : i + 1])[0, 0] == pytest.approx(path.y[0, -1], rel=1e-6, abs=1e-12)


def test_nothing_is_negative_however_long_the_time() -> None:
    t = 10 * np.random.default_rng(0).random((500, 3))
    assert (cell.simulate(np.ones((500, 1)), t) > 0).all()  # a square root and a logarithm are to be taken


def test_the_observations_lie_where_the_paper_scales_time_to() -> None:
    x, y = cell.observed()
    assert x.shape == y.shape == (19, 1)
    np.testing.assert_allclose(cell.times(x[:, 0]), cell.TIMES, rtol=1e-6)
    assert x[0, 0] == pytest.approx(0, abs=1e-6)
    assert x[-1, 0] == pytest.approx(1, abs=1e-6)


def test_the_measure_at_least_squares_is_the_known_one_and_the_lowest_around() -> None:
    best = np.array(cell.LEAST_SQUARES)
    assert cell.squared_error(best[None]) == pytest.approx(0.642, abs=5e-4)
    around = best + 0.05 * np.concatenate([np.eye(3), -np.eye(3)])
    assert all(cell.squared_error(theta[None]) > cell.squared_error(best[None]) for theta in around)
    # the mean over draws, and not the error of their mean
    each = [cell.squared_error(t[None]) for t in around]
    assert cell.squared_error(around) == pytest.approx(np.mean(each))
    weights = np.arange(6) / 15
    assert cell.squared_error(around, weights) == pytest.approx(weights @ each)


def test_a_curve_is_the_simulator_along_x_also_where_a_rate_is_zero_or_nearly() -> None:
    rng = np.random.default_rng(2)
    theta = np.concatenate([10 * rng.random((40, 3)), 10 ** (1 - 6 * rng.random((40, 3)))])
    theta[:3] = [[0, 0, 0], [5, 0, 1], [0, 5, 1]]
    x = rng.random((7, 1))
    expected = cell.simulate(np.tile(x, (80, 1)), np.repeat(theta, 7, axis=0)).reshape(80, 7)
    np.testing.assert_allclose(cell.curves(x, theta), expected, rtol=1e-8, atol=1e-10)
    assert (cell.curves(x, theta) > 0).all()


def test_the_design_is_a_latin_hypercube_whose_points_keep_their_distance() -> None:
    rows = 100
    plain, better = (maximin_latin_hypercube(rows, 4, np.random.default_rng(3), swaps=swaps) for swaps in (0, 40))
    for column in better.T:
        assert sorted(np.floor(column * rows).astype(int)) == list(range(rows))
    random = max(
        pdist(maximin_latin_hypercube(rows, 4, np.random.default_rng(seed), swaps=0)).min() for seed in range(50)
    )
    assert pdist(better).min() > 1.5 * random
    assert pdist(better).min() > 2 * pdist(plain).min()


def test_generate_runs_the_simulator_at_the_design_and_the_seed_decides() -> None:
    data, same, other = (cell.generate(40, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(data.z, cell.simulate(data.x_runs, data.t))
    assert data.t.min() < 1
    assert data.t.max() > 9
    for a, b in zip(data, same, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(data.t, other.t)


def test_problem_names_the_columns_of_the_data() -> None:
    problem, data = cell.problem(), cell.generate(4, seed=0)
    assert len(problem.control_inputs) == data.x_runs.shape[1] == data.x.shape[1]
    assert [v.name for v in problem.calibration_inputs] == list(cell.PARAMETERS)
    assert all(v.bounds == cell.BOUNDS for v in problem.calibration_inputs)


def test_a_wrong_shape_says_so() -> None:
    with pytest.raises(ValueError, match=r"x of shape \(rows, 1\).*got \(2, 2\)"):
        cell.simulate(np.zeros((2, 2)), np.zeros((2, 3)))
