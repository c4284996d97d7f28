"""The stand-in for the radionuclide simulator: its closed form against the equation that it solves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from vcal_dist.problems import radionuclide as rn

Array = NDArray[np.float64]


def plume(x: Array, time: float, **parameters: float) -> Array:
    """c at rows of x, with the true parameters but for those that are given."""
    t = [parameters.get(name, value) for name, value in zip(rn.PARAMETERS, rn.THETA, strict=True)]
    return rn.concentration(x, np.tile(t, (len(x), 1)), time)


def centre(time: float, **parameters: float) -> Array:
    """Where the plume's mass is centred, from a fine grid around the field."""
    x, _ = fine_grid()
    c = plume(x, time, **parameters)
    mean: Array = c @ x / c.sum()
    return mean


def fine_grid(step: float = 10.0) -> tuple[Array, float]:
    """Points of a grid far beyond the field, and the area of a cell."""
    axis = np.arange(-2000.0, 4000.0, step)
    east, north = np.meshgrid(axis, axis)
    return np.stack([east.ravel(), north.ravel()], 1), step**2


def test_the_concentration_solves_the_equation_of_advection_dispersion_and_decay() -> None:
    # In the field's own coordinates: R ∂c/∂t = ∇·(D ∇c) − v·∇c − λRc with D rotated; by central differences.
    _, v, alpha_l, alpha_t, degrees, R = rn.THETA
    angle, decay = math.radians(degrees), math.log(2) / rn.HALF_LIFE
    along = np.array([math.cos(angle), math.sin(angle)])
    across = np.array([-along[1], along[0]])
    D = v * (alpha_l * np.outer(along, along) + alpha_t * np.outer(across, across))
    x = np.array(rn.RELEASE) + np.random.default_rng(0).normal([990, 380], 90, (40, 2))
    h, dt = 2.0, 0.02

    def at(east: float, north: float, later: float = 0.0) -> Array:
        return plume(x + np.array([east, north]), rn.TIME + later)

    c = at(0, 0)
    gradient = np.stack([at(h, 0) - at(-h, 0), at(0, h) - at(0, -h)]) / (2 * h)
    hessian_ee, hessian_nn = (at(h, 0) + at(-h, 0) - 2 * c) / h**2, (at(0, h) + at(0, -h) - 2 * c) / h**2
    hessian_en = (at(h, h) + at(-h, -h) - at(h, -h) - at(-h, h)) / (4 * h**2)
    by_time = R * (at(0, 0, dt) - at(0, 0, -dt)) / (2 * dt)
    dispersion = D[0, 0] * hessian_ee + D[1, 1] * hessian_nn + 2 * D[0, 1] * hessian_en
    advection, lost = v * along @ gradient, decay * R * c
    scale = np.abs(np.stack([by_time, dispersion, advection, lost])).max()
    np.testing.assert_allclose(by_time, dispersion - advection - lost, atol=2e-3 * scale)
    assert np.abs(by_time - (dispersion - advection)).max() > 0.02 * scale  # decay is not too small to be seen


@pytest.mark.parametrize("time", [20.0, 40.0])
def test_the_plane_holds_what_has_not_decayed_dissolved_and_sorbed(time: float) -> None:
    x, cell = fine_grid()
    kbq = 1000 * plume(x, time).sum() * cell * rn.THICKNESS * rn.POROSITY * rn.THETA[-1]  # a m³ has 1000 litres
    assert kbq / 1e9 == pytest.approx(rn.THETA[0] * 0.5 ** (time / rn.HALF_LIFE), rel=1e-6)  # TBq


def test_the_centre_travels_with_the_retarded_flow_in_its_direction() -> None:
    angle = math.radians(rn.THETA[4])
    expected = np.array(rn.RELEASE) + 51.0 * 40.0 / 1.9 * np.array([math.cos(angle), math.sin(angle)])
    np.testing.assert_allclose(centre(40.0), expected, atol=0.01)
    np.testing.assert_allclose(centre(40.0, retardation=2 * 1.9), (expected + rn.RELEASE) / 2, atol=0.01)
    np.testing.assert_allclose(
        centre(40.0, direction=90.0), [rn.RELEASE[0], rn.RELEASE[1] + 51.0 * 40.0 / 1.9], atol=0.01
    )


def test_the_spread_is_that_of_the_two_dispersivities() -> None:
    x, _ = fine_grid()
    c = plume(x, rn.TIME)
    along, across = rn.flow_coordinates(x, np.tile(rn.THETA, (len(x), 1)))
    travelled = 51.0 * 40.0 / 1.9
    for coordinate, middle, alpha in ((along, travelled, 9.0), (across, 0.0, 3.5)):
        variance = c @ (coordinate - middle) ** 2 / c.sum()
        assert variance == pytest.approx(2 * alpha * travelled, rel=1e-6)


def test_activity_velocity_and_retardation_are_known_up_to_a_factor() -> None:
    x = rn.sites()
    scaled = plume(x, rn.TIME, activity=42.0 * 1.1, velocity=51.0 * 1.1, retardation=1.9 * 1.1)
    np.testing.assert_allclose(scaled, plume(x, rn.TIME), rtol=1e-12)


def test_one_observed_well_stands_in_a_spike() -> None:
    wells = rn.sites()
    everywhere = rn.nature(wells)[:, 0]
    assert everywhere.argmax() == rn.SPIKE == rn.OBSERVED[0]
    spike, *others = everywhere[list(rn.OBSERVED)]
    assert spike > 7 * max(others)
    assert sum(value > 0.5 for value in others) == 4  # at the plume's edge; nothing but background beyond
    assert len(set(rn.OBSERVED)) == 10


def test_every_well_has_its_place_in_the_field() -> None:
    wells = rn.sites()
    assert wells.shape == (88, 2)
    for column, bounds in zip(wells.T, rn.CONTROLS.values(), strict=True):
        assert bounds.low < column.min() < column.max() < bounds.high
    distance = np.linalg.norm(wells[:, None] - wells, axis=-1) + 1e9 * np.eye(88)
    assert distance.min() > 80


def test_generate_has_all_wells_for_each_run_of_a_latin_hypercube() -> None:
    data = rn.generate(50, seed=3)
    assert data.z.shape == (50 * 88, 1)
    np.testing.assert_array_equal(data.z, rn.simulate(data.x_runs, data.t))
    for column, bounds in zip(data.t.reshape(50, 88, 6).transpose(2, 0, 1), rn.PARAMETERS.values(), strict=True):
        assert (column == column[:, :1]).all()
        cells = np.floor((column[:, 0] - bounds.low) / (bounds.high - bounds.low) * 50)
        assert sorted(cells.astype(int)) == list(range(50))
    for run in data.x_runs.reshape(50, 88, 2):
        np.testing.assert_array_equal(run, rn.sites())


def test_observations_differ_from_nature_by_the_stated_noise() -> None:
    many = [rn.generate(1, seed) for seed in range(400)]
    truth = rn.nature(many[0].x)
    away = np.stack([(data.y - truth) / data.noise for data in many])
    assert away.std() == pytest.approx(1, rel=0.05)
    assert many[0].noise[0, 0] == pytest.approx(math.sqrt(0.03**2 + (0.02 * truth[0, 0]) ** 2))
    assert not np.array_equal(many[0].y, many[1].y)
    np.testing.assert_array_equal(many[5].t, rn.generate(1, 5).t)


def test_the_problem_names_the_columns_and_says_that_it_stands_in() -> None:
    problem, low, high = rn.problem(), *bounds_of_theta()
    assert "stand-in" in problem.description
    assert [v.name for v in problem.control_inputs] == list(rn.CONTROLS)
    assert [v.name for v in problem.calibration_inputs] == list(rn.PARAMETERS)
    assert (low < rn.THETA).all()
    assert (high > rn.THETA).all()


def bounds_of_theta() -> tuple[Array, Array]:
    found: ArrayLike = [v.bounds for v in rn.problem().calibration_inputs]
    low, high = np.asarray(found).T
    return low, high


def test_a_wrong_shape_says_so() -> None:
    with pytest.raises(ValueError, match=r"shape \(rows, 6\).*got \(2, 3\)"):
        rn.simulate(np.zeros((2, 2)), np.zeros((2, 3)))
