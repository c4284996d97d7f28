"""Charts of functions of the control inputs, and of what warps them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.vcal_dist.plots.charts_kit import column, of_mark, random_posterior, subtitle
from vcal_dist import plots
from vcal_dist.posterior import Posterior
from vcal_dist.warping import warp


def test_bands_hold_their_means_and_points_are_the_observations(trained: Posterior, data: dict[str, Any]) -> None:
    chart = plots.process(trained, along="x", x=data["x"], y=data["y"])
    outcome, process = of_mark(chart, "area")
    functions, emulator, mean = of_mark(chart, "line")
    at = column(mean, "value")[:, None]
    np.testing.assert_allclose(column(mean, "y"), trained.predict(at).mean[:, 0], rtol=1e-5)
    np.testing.assert_allclose(column(emulator, "y"), trained.predict(at, "emulator").mean[:, 0], rtol=1e-5)
    for band in (process, outcome):
        assert (column(band, "low") <= column(mean, "y")).all()
        assert (column(mean, "y") <= column(band, "high")).all()
    assert (column(outcome, "low") < column(process, "low")).all()
    assert (column(process, "high") < column(outcome, "high")).all()
    drawn = trained.predict(at, "process_without_residual", samples=1000).samples
    assert drawn is not None
    np.testing.assert_allclose(column(functions, "y"), drawn[:6, :, 0].reshape(-1), rtol=1e-5)
    assert {row["number"] for row in functions["rows"]} == {*range(6)}
    (points,) = of_mark(chart, "circle")
    np.testing.assert_allclose(column(points, "value"), data["x"][:, 0], rtol=1e-5)
    np.testing.assert_allclose(column(points, "y"), data["y"][:, 0], rtol=1e-5)


@pytest.mark.parametrize("kind", ["one of each", "averaged", "counts", "log", "varying"])
def test_bands_have_the_quantiles_of_process_and_observations(posteriors: dict[str, Any], kind: str) -> None:
    posterior = random_posterior(1, 1, 1, varying=True) if kind == "varying" else posteriors[kind]
    name, *others = (v.name for v in posterior.problem.control_inputs)
    outcome, process = of_mark(plots.process(posterior, along=name), "area")
    grid = np.stack([column(outcome, "value"), *[np.ones(81)] * len(others)], 1)[::20]
    for band, what in ((outcome, "observation"), (process, "process")):
        drawn = posterior.predict(grid, what, samples=20_000, seed=1).samples[:, :, 0]
        # The process's residual is small beside f, of which 1000 functions are drawn: three standard errors.
        near = 0.015 if what == "observation" else 0.022
        for field, share in (("low", 0.05), ("high", 0.95)):
            below = (drawn < column(band, field)[::20]).mean(0)
            upto = (drawn <= column(band, field)[::20]).mean(0)
            assert (below < share + near).all(), (what, field)
            assert (upto > share - near).all(), (what, field)


def test_observations_at_other_values_of_other_inputs_are_not_drawn(posteriors: dict[str, Any]) -> None:
    posterior = posteriors["log"]
    name, other = (v.name for v in posterior.problem.control_inputs)
    chart = plots.process(posterior, along=name, at={other: 2.5}, x=[[0.0, 0.0]], y=[[1.0]])
    assert not of_mark(chart, "circle")
    assert "observations are left out" in subtitle(chart)
    assert f"at {other} = 2.5 ∖upmu m" in subtitle(chart)
    mean = of_mark(chart, "line")[-1]
    grid = np.stack([column(mean, "value"), np.full(81, 2.5)], 1)
    np.testing.assert_allclose(column(mean, "y"), posterior.predict(grid).mean[:, 0], rtol=1e-5)


def test_discrepancy_is_what_the_process_adds(trained: Posterior) -> None:
    chart = plots.discrepancy(trained, along="x")
    mean = of_mark(chart, "line")[-1]
    at = column(mean, "value")[:, None]
    added = trained.predict(at).mean - trained.predict(at, "emulator").mean
    np.testing.assert_allclose(column(mean, "y"), added[:, 0], atol=0.02)
    zero = [layer for layer in of_mark(chart, "rule") if layer["rows"] == [{"y": 0}]]
    assert len(zero) == 1


def test_a_map_has_the_discrepancy_in_every_cell(posteriors: dict[str, Any]) -> None:
    posterior = posteriors["general"]
    first, second = (v.name for v in posterior.problem.control_inputs)
    layers = of_mark(plots.discrepancy_map(posterior, along=(second, first)), "rect")
    assert sum(len(cells["rows"]) for cells in layers) == 900
    for cells in layers:
        low, high = cells["encoding"]["color"]["scale"]["domain"]
        assert low == -high
        if cells["rows"]:
            x = np.stack([column(cells, "v"), column(cells, "u")], 1)
            found = posterior.predict(x, "discrepancy")
            np.testing.assert_allclose(column(cells, "mean"), found.mean[:, 0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("shift", "said"), [(0.0, "here everywhere"), (3.0, "the sign is not sure ("), (1000.0, "the sign is sure")]
)
def test_a_map_is_pale_where_zero_lies_inside_the_band(
    posteriors: dict[str, Any], monkeypatch: pytest.MonkeyPatch, shift: float, said: str
) -> None:
    posterior = posteriors["log"]
    predict = posterior.predict

    def shifted(x: Any, what: Any, **options: Any) -> Any:
        found = predict(x, what, **options)
        more = shift * np.quantile(np.abs(found.samples), 0.95) * (1 + x[:, :1]) / 4
        return found._replace(mean=found.mean + more, samples=found.samples + more)

    if shift:
        monkeypatch.setattr(posterior, "predict", shifted)
    chart = plots.discrepancy_map(posterior, along=tuple(v.name for v in posterior.problem.control_inputs))
    pale, strong = of_mark(chart, "rect")
    assert ((column(pale, "low") <= 0) & (column(pale, "high") >= 0)).all()
    assert ((column(strong, "low") > 0) | (column(strong, "high") < 0)).all()
    assert said in subtitle(chart)
    assert len(pale["rows"]) + len(strong["rows"]) == 900


def test_warping_is_drawn_where_the_simulator_goes(posteriors: dict[str, Any]) -> None:
    posterior = posteriors["root"]
    name, output = posterior.problem.control_inputs[0].name, posterior.problem.outputs[1].name
    chart = plots.warping(posterior, at=[{name: 0.0}, {name: 2.0}], output=output)
    line = of_mark(chart, "line")[1]  # after the dashed one
    places = list(dict.fromkeys(row["place"] for row in line["rows"]))
    assert places == [f"{name} = {value} ∖upmu m" for value in (0, 2)]
    eta = column(line, "eta", place=places[1])
    found = warp(posterior, np.full((len(eta), 1), 2.0), eta, output)
    np.testing.assert_allclose(column(line, "g", place=places[1]), found.mean, rtol=1e-4)
    np.testing.assert_allclose(column(line, "slope", place=places[1]), found.slope, rtol=1e-3, atol=1e-4)
    # Where θ puts the simulator is a part of what is drawn.
    emulated = posterior.predict([[2.0]], "emulator").mean[0, 1]
    seen = [row["eta"] for row in line["rows"] if row["place"] == places[1] and row["seen"]]
    assert min(seen) < emulated < max(seen)
    assert eta.min() <= min(seen)
    assert max(seen) <= eta.max()
    assert len(seen) < len(eta) or pytest.approx(1.0) == np.ptp(seen) / np.ptp(eta)
