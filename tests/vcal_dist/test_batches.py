"""From the user's units to the model's and back, and errors that name table, array, row and column."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from storage.problem import Problem, parse_problem
from vcal_dist.batches import Observations, Runs, Scaling, take
from vcal_dist.errors import ModelError
from vcal_dist.transforms import Kind, OutputScaling, TransformSettings

F64 = torch.float64


def problem() -> Problem:
    return parse_problem(
        {
            "name": "pump",
            "control_inputs": [{"name": "speed", "bounds": [100, 300]}, {"name": "head", "bounds": [-1, 1]}],
            "calibration_inputs": [{"name": "loss", "bounds": [0.5, 0.7]}],
            "outputs": [{"name": "flow", "missing": True}, {"name": "power", "missing": True}],
        }
    )


def scaling(kinds: tuple[Kind, Kind] = ("none", "log"), dtype: torch.dtype = F64) -> Scaling:
    mean, sd = torch.tensor([10.0, 0.5], dtype=F64), torch.tensor([4.0, 0.25], dtype=F64)
    transforms = [TransformSettings(kind=kind) for kind in kinds]
    return Scaling(problem(), OutputScaling(transforms, mean, sd, ["flow", "power"]), dtype)


X = torch.tensor([[100.0, -1.0], [300.0, 1.0], [150.0, 0.0]], dtype=F64)
T = torch.tensor([[0.5], [0.7], [0.55]], dtype=F64)
Z = torch.tensor([[10.0, 1.0], [14.0, math.e], [torch.nan, 2.0]], dtype=F64)
NOISE = torch.tensor([[0.4, 0.1], [0.8, 0.2], [torch.nan, 0.3]], dtype=F64)


def test_inputs_are_mapped_to_the_unit_cube_by_the_bounds() -> None:
    runs = scaling().runs(X, T, Z)
    expected = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.25, 0.5, 0.25]], dtype=F64)
    torch.testing.assert_close(runs.u, expected)
    observations = scaling().observations(X, Z)
    torch.testing.assert_close(observations.x, expected[:, :2])


def test_the_bounds_that_a_scaling_holds_lead_back_to_the_users_units() -> None:
    s = scaling()
    u = s.runs(X, T, Z).u
    torch.testing.assert_close(s.low + u * s.width, torch.cat([X, T], 1))


def test_outputs_are_transformed_and_standardised_and_come_back() -> None:
    s = scaling()
    runs = s.runs(X, T, Z)
    expected = torch.tensor([[0.0, -2.0], [1.0, 2.0], [torch.nan, (math.log(2) - 0.5) / 0.25]], dtype=F64)
    torch.testing.assert_close(runs.z, expected, equal_nan=True)
    torch.testing.assert_close(s.observations(X, Z).y, expected, equal_nan=True)
    torch.testing.assert_close(s.outputs.inverse(runs.z), Z, equal_nan=True)


def test_the_jacobian_turns_densities_of_scaled_outputs_into_those_of_the_users() -> None:
    s = scaling()
    for jacobian in (s.runs(X, T, Z).log_jacobian, s.observations(X, Z).log_jacobian):
        for i in range(3):
            for k in range(2):
                if math.isnan(Z[i, k]):
                    assert float(jacobian[i, k]) == 0.0
                    continue
                step = 1e-6
                up, down = Z.clone(), Z.clone()
                up[i, k], down[i, k] = Z[i, k] + step, Z[i, k] - step
                slope = (s.runs(X, T, up).z - s.runs(X, T, down).z)[i, k] / (2 * step)
                assert float(jacobian[i, k]) == pytest.approx(math.log(slope), abs=1e-6)


def test_noise_of_observations_is_scaled_by_the_slope_at_the_observation() -> None:
    found = scaling().observations(X, Z, NOISE).noise
    assert found is not None
    # |ds/dz| = 1/4 for the flow, 1/(0.25·z) for the log of the power
    expected = torch.tensor([[0.1, 0.4], [0.2, 0.8 / math.e], [torch.nan, 0.6]], dtype=F64)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert scaling().observations(X, Z).noise is None


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_inputs_take_the_models_precision_and_outputs_keep_float64(dtype: torch.dtype) -> None:
    s = scaling(dtype=dtype)
    runs, observations = s.runs(X.float(), T.float(), Z.float()), s.observations(X, Z, NOISE)
    assert runs.u.dtype == observations.x.dtype == dtype
    for part in (runs.z, runs.log_jacobian, runs.weight, observations.y, observations.noise, observations.log_jacobian):
        assert part is not None
        assert part.dtype == F64
    torch.testing.assert_close(runs.u, scaling().runs(X, T, Z).u.to(dtype), rtol=0, atol=1e-5)


def test_inputs_are_scaled_in_float64_before_they_are_rounded() -> None:
    """A narrow range far from zero would lose most digits of float32."""
    narrow = parse_problem(
        {
            "name": "narrow",
            "control_inputs": [{"name": "year", "bounds": [2000.0, 2000.001]}],
            "calibration_inputs": [{"name": "rate", "bounds": [0, 1]}],
            "outputs": [{"name": "level"}],
        }
    )
    one = torch.ones(1, dtype=F64)
    s = Scaling(narrow, OutputScaling([TransformSettings()], 0 * one, one, ["level"]))
    runs = s.runs(torch.tensor([[2000.0003]], dtype=F64), one[:, None], one[:, None])
    assert float(runs.u[0, 0]) == pytest.approx(0.3, abs=1e-6)


def test_rows_are_numbered_and_weigh_one_unless_told() -> None:
    s = scaling()
    for batch in (s.runs(X, T, Z), s.observations(X, Z)):
        assert torch.equal(batch.row, torch.arange(3))
        assert torch.equal(batch.weight, torch.ones(3, dtype=F64))
    row, weight = torch.tensor([9, 4, 7], dtype=torch.int32), torch.tensor([1.0, 0.0, 1.0])
    for told in (s.runs(X, T, Z, row, weight), s.observations(X, Z, NOISE, row, weight)):
        assert torch.equal(told.row, row.long())
        assert told.row.dtype == torch.int64
        assert torch.equal(told.weight, weight.double())


@pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([2, 0]), torch.tensor([], dtype=torch.int64)])
def test_taking_rows_takes_them_of_every_part(rows: Any) -> None:
    s = scaling()
    whole: list[Runs | Observations] = [s.runs(X, T, Z), s.observations(X, Z, NOISE), s.observations(X, Z)]
    for table in whole:
        part = take(table, rows)
        assert type(part) is type(table)
        for mine, its in zip(part, table, strict=True):
            assert (mine is None) == (its is None)
            if mine is not None and its is not None:
                torch.testing.assert_close(mine, its[rows], equal_nan=True)


# --- what is wrong, and where -----------------------------------------------------------------------------------------


def spoiled(values: Tensor, row: int, column: int, value: float) -> Tensor:
    values = values.clone()
    values[row, column] = value
    return values


RUNS = {"x": X, "t": T, "z": Z}
OBSERVATIONS = {"x": X, "y": Z, "noise": NOISE}
OUTPUTS = ["flow", "power"]
NAMES = {"x": ["speed", "head"], "t": ["loss"], "z": OUTPUTS, "y": OUTPUTS, "noise": OUTPUTS}


def build(table: str, arrays: dict[str, Tensor]) -> Runs | Observations:
    return scaling(("none", "none")).runs(**arrays) if table == "runs" else scaling().observations(**arrays)


def message(table: str, arrays: dict[str, Tensor]) -> str:
    with pytest.raises(ModelError) as error:
        build(table, arrays)
    return str(error.value)


EVERY_ARRAY = [*(("runs", name) for name in RUNS), *(("observations", name) for name in OBSERVATIONS)]


def arrays_of(table: str) -> dict[str, Tensor]:
    return dict(RUNS if table == "runs" else OBSERVATIONS)


@pytest.mark.parametrize(("table", "name"), EVERY_ARRAY)
def test_an_array_of_the_wrong_width_is_named_with_the_columns_it_should_have(table: str, name: str) -> None:
    arrays = arrays_of(table)
    for wrong in (torch.ones(3, len(NAMES[name]) + 1), torch.ones(3, len(NAMES[name]) - 1), torch.ones(3)):
        text = message(table, {**arrays, name: wrong})
        assert f"{name} of the {table} has shape {tuple(wrong.shape)}" in text
        assert f"expected (rows, {len(NAMES[name])})" in text
        assert ", ".join(NAMES[name]) in text


@pytest.mark.parametrize(("table", "name"), [pair for pair in EVERY_ARRAY if pair[1] != "x"])
def test_an_array_with_other_rows_is_named_with_both_counts(table: str, name: str) -> None:
    arrays = arrays_of(table)
    text = message(table, {**arrays, name: arrays[name][:2]})
    assert f"{name} of the {table} has 2 rows where x has 3" in text
    assert "same rows" in text


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("table", "name"), [("runs", "x"), ("runs", "t"), ("observations", "x")])
def test_an_input_that_is_not_finite_is_named_with_row_and_column(table: str, name: str, value: float) -> None:
    arrays, column = arrays_of(table), len(NAMES[name]) - 1
    text = message(table, {**arrays, name: spoiled(arrays[name], 2, column, value)})
    assert f"{name} of the {table} holds {value:g} in row 2, column '{NAMES[name][column]}'" in text
    assert "must be finite" in text


@pytest.mark.parametrize("value", [math.inf, -math.inf])
@pytest.mark.parametrize(("table", "name"), [("runs", "z"), ("observations", "y"), ("observations", "noise")])
def test_an_infinite_output_or_noise_is_named_with_row_and_column(table: str, name: str, value: float) -> None:
    arrays = arrays_of(table)
    text = message(table, {**arrays, name: spoiled(arrays[name], 1, 1, value)})
    assert f"{name} of the {table} holds {value:g} in row 1, column 'power'" in text
    assert "NaN (missing)" in text


def test_the_first_wrong_value_is_named() -> None:
    wrong = spoiled(spoiled(X, 2, 0, math.nan), 1, 1, math.inf)
    assert "holds inf in row 1, column 'head'" in message("runs", {**RUNS, "x": wrong})


def test_an_output_that_the_transform_cannot_take_is_named() -> None:
    text = message("observations", {**OBSERVATIONS, "y": spoiled(Z, 0, 1, -3.0)})
    for word in ("'power'", "-3", "row 0", "log", "positive"):
        assert word in text
