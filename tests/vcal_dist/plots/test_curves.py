"""Charts of training and of sensitivity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.vcal_dist.plots.charts_kit import column, of_mark, records
from vcal_dist import plots
from vcal_dist.sensitivity import sobol_indices


def test_every_stage_has_a_panel_with_a_scale_of_its_own(posteriors: dict[str, Any]) -> None:
    rows = records(posteriors["log"])
    rows.append({"step": "31", "phase": "closing", "seconds": "31", "loss": "", "emulator_error": "nan"})
    chart = plots.training(rows)
    first, second = of_mark(chart, "line")
    np.testing.assert_array_equal(column(first, "step"), np.arange(1, 21))
    np.testing.assert_allclose(column(first, "value"), 5 / np.arange(1, 21), rtol=1e-5)
    np.testing.assert_array_equal(column(second, "value"), -np.arange(21, 31))
    assert [panel["title"]["text"] for panel in chart.to_dict()["concat"]] == ["emulator", "theta"]
    domains = [layer["encoding"]["y"]["scale"]["domain"] for layer in (first, second)]
    assert domains[0][0] > domains[1][1]
    # In its second stage nothing changes.
    (only,) = of_mark(plots.training(rows, column="emulator_error"), "line")
    assert only["encoding"]["y"]["scale"]["type"] == "log"
    assert len(only["rows"]) == 20


def test_a_loss_that_hardly_changes_looks_flat() -> None:
    rows = [{"step": str(i), "phase": "joint", "loss": f"{3 + 1e-5 * i}"} for i in range(10)]
    (line,) = of_mark(plots.training(rows), "line")
    low, high = line["encoding"]["y"]["scale"]["domain"]
    assert high - low == pytest.approx(0.01, rel=0.01)


def test_theta_is_drawn_over_its_steps_with_prior_and_posterior(posteriors: dict[str, Any]) -> None:
    posterior = posteriors["log"]
    chart = plots.training_theta(posterior, records(posterior))
    lines, bands = of_mark(chart, "line"), of_mark(chart, "rect")
    assert len(lines) == 2
    np.testing.assert_allclose(column(lines[1], "value"), 1 + 0.01 * np.arange(21, 31))
    assert bands[0]["rows"][0] == pytest.approx({"value": 0.02, "end": 1.98})  # 98 % of a uniform prior over (0, 2)
    low, high = posterior.theta.interval(0, 0.9)
    assert bands[1]["rows"][0] == pytest.approx({"value": low, "end": high}, rel=1e-5)


def test_bars_are_the_indices_with_the_greatest_first(posteriors: dict[str, Any]) -> None:
    posterior = posteriors["log"]
    found = {index.name: index for index in sobol_indices(posterior)}
    bars = of_mark(plots.sensitivity(posterior), "bar")[0]["rows"]
    assert [row["total"] for row in bars] == sorted((row["total"] for row in bars), reverse=True)
    for row in bars:
        index = found[row["name"]]
        assert row["total"] == pytest.approx(index.total, rel=1e-5)
        assert row["first"] == pytest.approx(max(index.first, 0.0), rel=1e-5)
        assert row["kind"] == {"x": "control input", "t": "calibration input"}[index.kind]
        assert row["total_high"] == pytest.approx(index.total + index.total_error, rel=1e-5)
