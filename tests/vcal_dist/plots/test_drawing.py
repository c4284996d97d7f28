"""Every chart is drawn for real, whatever the posterior's shape, likelihood, transforms and names are."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import altair as alt
import pytest

from storage.problem import ControlInput
from tests.vcal_dist.plots.charts_kit import axis_titles, judged, layers, records
from vcal_dist import plots
from vcal_dist.errors import ModelError
from vcal_dist.plots.naming import label, where
from vcal_dist.plots.style import rows, with_width
from vcal_dist.posterior import Posterior
from vcal_dist.sensitivity import Index

OF_ALL = ["one of each", pytest.param("many of each", marks=pytest.mark.slow), "averaged"]
OF_THETA = ["marginal", "pairs", "intervals", "training", "training_theta", "emulator_errors"]
OF_ROWS = ["observed", "residuals", "coverage", "emulator", "emulator_errors", "training"]  # judged by members
ENDS = ("", "_low", "_high")
OF_OUTPUTS = ["root", "log", "counts", "classes"]  # what is known of θ looks the same


def charts(posterior: Any) -> dict[str, Callable[[], Any]]:
    """All charts of a posterior, of its last output and input."""
    given = posterior.problem
    member = posterior if isinstance(posterior, Posterior) else posterior.members[0]
    x, t = (group[-1].name for group in (given.control_inputs, given.calibration_inputs))
    y = given.outputs[-1].name
    seen, runs = judged(member, missing=True), judged(member, runs=True, missing=True)
    found: dict[str, Callable[[], Any]] = {
        "marginal": lambda: plots.marginal(posterior, t, truth=0.7),
        "pairs": lambda: plots.pairs(posterior, truth={t: 0.7}),
        "intervals": lambda: plots.intervals(posterior, truth={t: 0.7}),
        "observed": lambda: plots.observed(posterior, seen, output=y),
        "residuals": lambda: plots.residuals(posterior, seen, output=y, against=x),
        "coverage": lambda: plots.coverage(posterior, seen, output=y),
        "process": lambda: plots.process(posterior, along=x, output=y, x=seen.x, y=seen.y),
        "discrepancy": lambda: plots.discrepancy(posterior, along=x, output=y),
        "emulator": lambda: plots.emulator(posterior, runs, output=y),
        "emulator_errors": lambda: plots.emulator_errors(posterior, runs, output=y),
        "sensitivity": lambda: plots.sensitivity(posterior, output=y),
        "training": lambda: plots.training(records(posterior)),
        "training_theta": lambda: plots.training_theta(posterior, records(posterior)),
    }
    if len(given.control_inputs) > 1:
        first = given.control_inputs[0].name
        found["discrepancy_map"] = lambda: plots.discrepancy_map(posterior, along=(first, x), output=y)
    if member.model.kind == "general":
        found["warping"] = lambda: plots.warping(posterior, output=y)
    return found


def channels(layer: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for channel, definition in layer.get("encoding", {}).items():
        yield from ((channel, d) for d in (definition if isinstance(definition, list) else [definition]))


@pytest.mark.parametrize("kind", [*OF_ALL, *OF_OUTPUTS])
def test_every_chart_is_drawn(posteriors: dict[str, Any], kind: str, tmp_path: Path) -> None:
    made = charts(posteriors[kind])
    without = OF_THETA if kind in OF_OUTPUTS else OF_ROWS if kind == "averaged" else []
    made = {name: make for name, make in made.items() if name not in without}
    for name, make in made.items():
        chart = make()
        # Names of users are titles and values, never fields: Vega-Lite reads "a.b" as b of a.
        units = list(layers(chart))
        fields = {d["field"] for unit in units for _, d in channels(unit) if "field" in d}
        fields |= {field for unit in units for row in unit["rows"] for field in row}
        assert all(re.fullmatch(r"[a-z_0-9]+", field) for field in fields), name
        path = tmp_path / f"{name}.png"
        plots.write(chart, path)
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG"), name
        width, height = struct.unpack(">II", content[16:24])
        assert width > 400, name
        assert height > 80, name


def test_single_charts_are_as_wide_as_their_page(posteriors: dict[str, Any]) -> None:
    single = ["marginal", "intervals", "observed", "residuals", "coverage", "process", "discrepancy", "discrepancy_map"]
    made = charts(posteriors["log"])
    for name in [*single, "emulator", "sensitivity"]:
        assert made[name]().to_dict()["width"] == "container", name


def test_titles_carry_names_and_units(posteriors: dict[str, Any]) -> None:
    posterior = posteriors["log"]
    chart = plots.process(posterior, along=posterior.problem.control_inputs[0].name)
    titles = {channel: d["title"] for layer in layers(chart) for channel, d in channels(layer) if channel in ("x", "y")}
    assert titles == {"x": "flow.rate [m]: a x0 (∖upmu m)", "y": "flow.rate [m]: a y0 (1/s ∖x)"}


NAMED_BY_VALUES = {"intervals": "y", "sensitivity": "y"}  # the axis holds names, which need no title


def test_every_axis_has_its_title_in_the_picture(posteriors: dict[str, Any]) -> None:
    # Vega-Lite joins the titles of layers: where one has none, or another one, it does not say so.
    for name, make in charts(posteriors["general"]).items():
        if name in ("pairs", "emulator_errors"):  # titles at the edge of the grid, or above the panels
            continue
        chart = make()
        given = {(c, d["title"]) for unit in layers(chart) for c, d in channels(unit) if c in "xy" and d.get("title")}
        found = axis_titles(chart)
        assert found, name
        for panel in found:
            wanted = {"x", "y"} - {NAMED_BY_VALUES.get(name)}
            assert {axis for axis, title in panel.items() if (axis, title) in given} == wanted, (name, panel)


def test_panels_of_a_grid_have_titles_at_its_edge(posteriors: dict[str, Any]) -> None:
    made = charts(posteriors["general"])
    assert all(panel["y"] == "RMSE (1/s ∖x)" for panel in axis_titles(made["emulator_errors"]()) if "y" in panel)
    inputs = posteriors["general"].problem.calibration_inputs
    found = axis_titles(made["pairs"]())
    assert [panel["y"] for panel in found if panel.get("y")] == [f"{v.name} (kg.m∖)" for v in inputs[1:]]
    assert [panel["x"] for panel in found if panel.get("x")] == [f"{v.name} (kg.m∖)" for v in inputs]


def test_percents_do_not_break_and_look_alike(posteriors: dict[str, Any]) -> None:
    import vl_convert

    posterior = posteriors["one of each"]
    chart = plots.coverage(posterior, judged(posterior, 10))
    shown = re.findall(r">([^<>]*%[^<>]*)</text>", vl_convert.vegalite_to_svg(with_width(chart.to_dict(), 420)))
    assert len(shown) > 5
    for text in shown:
        assert re.search(r"\d%|\d %", text) is None, text


def test_a_dash_is_no_unit() -> None:
    variables = [ControlInput(name="wetness", unit=unit, bounds=(0, 1)) for unit in ("-", "", "m")]
    assert [label(variable) for variable in variables] == ["wetness", "wetness", "wetness (m)"]
    assert where(variables[:1], [0.5], None) == "at wetness = 0.5"


def test_shares_of_variance_end_at_one(posteriors: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Index("a", "t", 0.99, 0.03, 1.02, 0.03), Index("b", "x", -0.01, 0.02, 0.01, 0.02)]
    monkeypatch.setattr("vcal_dist.plots.indices.sobol_indices", lambda *_: found)
    for layer in layers(plots.sensitivity(posteriors["log"])):
        assert layer["encoding"]["x"]["scale"]["domain"] == [0, 1]
        values = [row[f"{kind}{end}"] for row in layer["rows"] for kind in ("first", "total") for end in ENDS]
        assert min(values) == 0
        assert max(values) == 1
        assert layer["rows"][0]["total_text"] == "1.020 ± 0.030"


def test_a_chart_that_cannot_be_drawn_is_told_with_its_file_and_the_cause(tmp_path: Path) -> None:
    chart = alt.Chart(rows(x=[1], y=[2])).mark_point().encode(x=alt.X("x:Q", title="\\x"), y="y:Q")
    for name in ("bad.png", "bad.pdf", "bad.svg"):
        with pytest.raises(ModelError, match=rf"(?s){name}.*Expression parse error") as caught:
            plots.write(chart, tmp_path / name)
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_unknown_names_are_told_with_those_that_are_known(posteriors: dict[str, Any]) -> None:
    posterior = posteriors["general"]
    x = posterior.problem.control_inputs[0].name
    seen = judged(posterior, 10)
    for make, accepted in (
        (lambda: plots.marginal(posterior, "nothing"), "t0"),
        (lambda: plots.pairs(posterior, parameters=["nothing"]), "t0"),
        (lambda: plots.intervals(posterior, truth={"nothing": 1.0}), "t0"),
        (lambda: plots.observed(posterior, seen, output="nothing"), "y0"),
        (lambda: plots.residuals(posterior, seen, against="nothing"), "x0"),
        (lambda: plots.process(posterior, along="nothing"), "x0"),
        (lambda: plots.process(posterior, along=x, at={"nothing": 1.0}), "x0"),
        (lambda: plots.warping(posterior, output="nothing"), "y0"),
        (lambda: plots.sensitivity(posterior, output="nothing"), "y0"),
        (lambda: plots.training([], column="nothing"), "loss"),
    ):
        with pytest.raises(ModelError, match=rf"(?s)'nothing'.*accepted: .*{accepted}"):
            make()  # type: ignore[no-untyped-call]


def test_what_cannot_be_drawn_is_refused(posteriors: dict[str, Any]) -> None:
    posterior = posteriors["log"]
    x = posterior.problem.control_inputs[0].name
    with pytest.raises(ModelError, match="only 'general' warps"):
        plots.warping(posterior)
    with pytest.raises(ModelError, match="along which the chart goes"):
        plots.process(posterior, along=x, at={x: 0.0})
    with pytest.raises(ModelError, match=r"is 9, outside its bounds \[-1, 3\]"):
        plots.process(posterior, along=x, at={posterior.problem.control_inputs[1].name: 9.0})
    with pytest.raises(ModelError, match="twice"):
        plots.discrepancy_map(posterior, along=(x, x))
    with pytest.raises(ModelError, match="they are observations"):
        plots.emulator_errors(posterior, judged(posterior, 5))
    with pytest.raises(ModelError, match="none of the 0 records has a loss"):
        plots.training([])
