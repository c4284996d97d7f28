"""Tables with names on their columns: the names decide, and never the order alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from storage.errors import VcalError
from storage.labels import by_name
from storage.problem import Column, Problem, parse_problem
from storage.store import create

COLUMNS = (Column(name="mu"), Column(name="cool"))
TABLE = pd.DataFrame({"cool": [1.0, 2.0], "other": [7.0, 8.0], "mu": [3.0, 4.0]})


def problem() -> Problem:
    return parse_problem(
        {
            "name": "named",
            "control_inputs": [{"name": "a", "bounds": [0, 10]}, {"name": "b", "bounds": [0, 10]}],
            "calibration_inputs": [{"name": "mu", "bounds": [0, 10]}, {"name": "cool", "bounds": [0, 10]}],
            "outputs": [{"name": "y1"}, {"name": "y2"}],
        }
    )


def test_columns_are_put_in_the_order_of_the_problem() -> None:
    np.testing.assert_array_equal(by_name("t", TABLE, COLUMNS), [[3, 1], [4, 2]])
    np.testing.assert_array_equal(by_name("t", TABLE.iloc[0][["cool", "mu"]], COLUMNS), [3, 1])  # one row


def test_what_has_no_names_is_taken_as_it_comes() -> None:
    for values in ([[1.0, 2.0]], np.array([[1.0, 2.0]]), pd.DataFrame([[1.0, 2.0]]), pd.Series([1.0, 2.0])):
        assert by_name("t", values, COLUMNS) is values


def test_noise_may_have_the_outputs_names() -> None:
    columns = problem().observations_columns["noise"]
    for names in (["y2", "y1"], ["y2_noise", "y1_noise"]):
        table = pd.DataFrame([[0.2, 0.1]], columns=names)
        np.testing.assert_array_equal(by_name("noise", table, columns), [[0.1, 0.2]])


def test_other_names_are_refused() -> None:
    with pytest.raises(VcalError, match=r"without a column 'cool' \(is it 'cooling'\?\); its columns are cooling, mu"):
        by_name("t", TABLE[["cool", "mu"]].rename(columns={"cool": "cooling"}), COLUMNS)
    doubled = TABLE[["cool", "mu", "mu"]]
    with pytest.raises(VcalError, match="2 columns 'mu'"):
        by_name("t", doubled, COLUMNS)


def test_a_store_takes_tables_by_name(tmp_path: Path) -> None:
    store = create(tmp_path / "s.zarr", problem())
    x = pd.DataFrame({"b": [2.0], "a": [1.0]})
    store.append_runs(x, TABLE[:1], pd.DataFrame({"y2": [6.0], "y1": [5.0]}))
    store.append_observations(x, [[5.0, 6.0]], pd.DataFrame({"y2": [0.2], "y1": [0.1]}))
    runs, field = store.runs.read(), store.observations.read()
    np.testing.assert_array_equal(np.hstack([runs["x"], runs["t"], runs["z"]]), [[1, 2, 3, 1, 5, 6]])
    np.testing.assert_allclose(field["noise"], [[0.1, 0.2]])
