"""Charts of known values and their predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.vcal_dist.plots.charts_kit import column, judged, of_mark, random_posterior, subtitle
from vcal_dist import plots
from vcal_dist.assessment import Judged, judge_observations
from vcal_dist.errors import ModelError
from vcal_dist.posterior import Posterior


@pytest.fixture(scope="module")
def left_out(trained: Posterior, data: dict[str, Any]) -> Judged:
    found = judge_observations(trained, data["x"], data["y"], leave_one_out=True)
    return found._replace(unreliable=np.zeros_like(found.unreliable))


def test_points_are_the_observations_with_their_intervals(
    trained: Posterior, data: dict[str, Any], left_out: Judged
) -> None:
    chart = plots.observed(trained, left_out)
    (points,) = of_mark(chart, "circle")
    np.testing.assert_allclose(column(points, "known"), data["y"][:, 0], rtol=1e-5)
    assert (column(points, "low") < column(points, "mean")).all()
    assert (column(points, "mean") < column(points, "high")).all()
    outside = [row["kind"] == "outside" for row in points["rows"]]
    y, low, high = (column(points, field) for field in ("known", "low", "high"))
    np.testing.assert_array_equal(outside, (y < low) | (y > high))
    assert "each row predicted from all others" in subtitle(chart)


def test_many_points_are_counted_in_cells() -> None:
    posterior = random_posterior(1, 1)
    few = judged(posterior, 100, runs=True)
    tiled = [np.concatenate([part] * 35) if isinstance(part, np.ndarray) else part for part in few]
    runs = Judged(*tiled)  # type: ignore[arg-type]
    for make in (plots.emulator, plots.residuals):
        chart = make(posterior, runs)
        (cells,) = of_mark(chart, "rect")
        assert column(cells, "count").sum() == 3500
        assert len(cells["rows"]) <= 100
        assert not of_mark(chart, "circle")


def test_residuals_are_in_standard_deviations_against_any_input(trained: Posterior, left_out: Judged) -> None:
    expected = ((left_out.y - left_out.mean) / left_out.sd)[:, 0]
    for against, abscissa in ((None, left_out.mean[:, 0]), ("x", left_out.x[:, 0])):
        (points,) = of_mark(plots.residuals(trained, left_out, against=against), "circle")
        np.testing.assert_allclose(column(points, "y"), expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(column(points, "x"), abscissa, rtol=1e-4, atol=1e-5)


def test_charts_of_residuals_tell_themselves_apart() -> None:
    posterior = random_posterior(2, 2)
    inputs = [None, *(v.name for v in posterior.problem.control_inputs)]
    made = [
        plots.residuals(posterior, rows, against=against)
        for rows in (judged(posterior, 10), judged(posterior, 10, runs=True))
        for against in inputs
    ]
    assert len({" ".join(chart.to_dict()["title"]["text"]) for chart in made}) == 6


def test_coverage_stays_in_the_band_of_chance_where_the_model_is_the_truth() -> None:
    posterior = random_posterior(1, 1)
    chart = plots.coverage(posterior, judged(posterior, 1000))
    (area,) = of_mark(chart, "area")
    level, share, low, high = (column(area, field) for field in ("level", "share", "low", "high"))
    np.testing.assert_allclose(low, stats.binom.ppf(0.025, 1000, level) / 1000, atol=1e-6)
    assert (low <= level).all()
    assert (level <= high).all()
    assert np.mean((share >= low) & (share <= high)) > 0.8
    assert (np.diff(share) >= 0).all()


def test_intervals_that_are_too_narrow_leave_it() -> None:
    posterior = random_posterior(1, 1)
    found = judged(posterior, 500)
    narrow = stats.norm.cdf(3 * stats.norm.ppf(found.pit.clip(1e-4, 1 - 1e-4)))
    (area,) = of_mark(plots.coverage(posterior, found._replace(pit=narrow)), "area")
    assert column(area, "share", level=0.9)[0] < column(area, "low", level=0.9)[0]


def test_rows_without_a_prediction_are_left_out_and_told(trained: Posterior, left_out: Judged) -> None:
    mean, unreliable = left_out.mean.copy(), left_out.unreliable.copy()
    mean[:7], unreliable[:9] = np.nan, True
    spoilt = left_out._replace(mean=mean, unreliable=unreliable)
    for make in (plots.observed, plots.residuals, plots.coverage):
        chart = make(trained, spoilt)
        assert "left out: 7 rows without a prediction; unreliable (k̂ above 0.7): 2 predictions" in subtitle(chart)
    (points,) = of_mark(plots.observed(trained, spoilt), "circle")
    assert [row["kind"] for row in points["rows"]].count("unreliable") == 2
    assert len(points["rows"]) == 53


def test_predictions_without_a_spread_have_no_residual_and_are_told(trained: Posterior, left_out: Judged) -> None:
    sd, mean = left_out.sd.copy(), left_out.mean.copy()
    sd[:3] = 0.0
    mean[0] = left_out.y[0]  # 0 / 0
    chart = plots.residuals(trained, left_out._replace(sd=sd, mean=mean))
    (points,) = of_mark(chart, "circle")
    np.testing.assert_allclose(column(points, "x"), left_out.mean[3:, 0], rtol=1e-4, atol=1e-5)
    low, high = points["encoding"]["y"]["scale"]["domain"]
    assert -low == high == pytest.approx(max(3.0, 1.05 * np.abs((left_out.y - mean) / left_out.sd)[3:].max()))
    assert "left out: 3 predictions without a spread" in subtitle(chart)
    with pytest.raises(ModelError, match="of 60 predictions none has a spread"):
        plots.residuals(trained, left_out._replace(sd=np.zeros_like(sd)))


def test_one_row_is_not_several(trained: Posterior, left_out: Judged) -> None:
    mean, unreliable = left_out.mean.copy(), left_out.unreliable.copy()
    mean[0], unreliable[0] = np.nan, True
    chart = plots.coverage(trained, left_out._replace(mean=mean, unreliable=unreliable))
    assert subtitle(chart).endswith("left out: 1 row without a prediction")


def test_runs_without_a_prediction_have_no_part_in_the_emulators_errors() -> None:
    posterior = random_posterior(1, 1)
    runs = judged(posterior, 100, runs=True)
    mean, unreliable = runs.mean.copy(), runs.unreliable.copy()
    mean[:9], unreliable[:9] = np.nan, True
    chart = plots.emulator_errors(posterior, runs._replace(mean=mean, unreliable=unreliable))
    (bars,) = of_mark(chart, "rect")
    labels = list(dict.fromkeys(row["input"] for row in bars["rows"]))
    rmse, count = column(bars, "rmse", input=labels[0]), column(bars, "count", input=labels[0])
    assert count.sum() == 91
    overall = float(np.sqrt(np.square(runs.mean - runs.y)[9:].mean()))
    assert np.sqrt((np.square(rmse) * count).sum() / 91) == pytest.approx(overall, rel=1e-5)
    assert f"91 runs; dashed: over all of them, {overall:.3g} left out: 9 rows without a prediction" in subtitle(chart)
    with pytest.raises(ModelError, match="of 100 rows none knows the output"):
        plots.emulator_errors(posterior, runs._replace(mean=np.full_like(mean, np.nan)))


def test_errors_of_the_emulator_are_those_of_the_runs_in_each_bin() -> None:
    posterior = random_posterior(2, 2)
    runs = judged(posterior, 400, runs=True)
    spoilt = runs.mean.copy()
    bad = runs.x[:, 1] > 2.6  # the last of ten bins
    spoilt[bad] += 5.0
    chart = plots.emulator_errors(posterior, runs._replace(mean=spoilt))
    (bars,) = of_mark(chart, "rect")
    labels = list(dict.fromkeys(row["input"] for row in bars["rows"]))
    assert len(labels) == 4
    rmse, count = column(bars, "rmse", input=labels[1]), column(bars, "count", input=labels[1])
    assert rmse.argmax() == 9
    assert rmse[9] > 4
    assert count[9] == bad.sum()
    errors = np.square(spoilt - runs.y)
    assert np.sqrt((np.square(rmse) * count).sum() / 400) == pytest.approx(float(np.sqrt(errors.mean())), rel=1e-5)
