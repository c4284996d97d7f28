"""What training was like, from the rows of `metrics.csv`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vcal_dist.answers import Answers
from vcal_dist.errors import ModelError
from vcal_dist.plots.densities import NARROW, prior_quantiles, quantiles
from vcal_dist.plots.naming import NUMBER, label
from vcal_dist.plots.style import POSTERIOR, PRIOR, rows, styled, titled

if TYPE_CHECKING:
    import altair as alt

TITLES = {
    "loss": "loss",
    "emulator_error": "emulator's error",
    "rows_per_second": "rows per second",
    "wait_fraction": "share of time spent waiting for data",
    "seconds": "seconds",
}
LEAST_SPAN = {"loss": 0.01}  # of an axis: smaller changes should look small
COLUMNS = 3
SIZE = {"width": 210, "height": 130}
MOST_POINTS = 400  # of a curve
ORDERS = 100.0  # between the greatest and the least value, from which the axis is logarithmic


def training(records: Sequence[Mapping[str, Any]], *, column: str = "loss") -> alt.ConcatChart:
    """One column of the metrics against the step, each stage by itself: losses of different stages do not compare.

    Stages in which nothing changes are left out, unless nothing changes in any.
    """
    import altair as alt

    if column not in TITLES:
        raise ModelError(f"unknown column '{column}'; accepted: {', '.join(TITLES)}")
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        value = _number(record.get(column))
        if value is not None:
            curves.setdefault(str(record["phase"]), []).append((int(record["step"]), value))
    if not curves:
        raise ModelError(f"none of the {len(records)} records has a {column}; there is nothing to draw")
    changing = {phase: curve for phase, curve in curves.items() if len({value for _, value in curve}) > 1}
    panels = []
    for phase, curve in (changing or curves).items():
        steps, values = np.array(_thinned(curve)).T
        tips = [
            alt.Tooltip("step:Q", title="step", format=","),
            alt.Tooltip("value:Q", title=TITLES[column], format=NUMBER),
        ]
        y = alt.Y("value:Q", title=TITLES[column], scale=_span(values, LEAST_SPAN.get(column, 0.0)), axis=_ticks(5))
        line = alt.Chart(rows(step=steps, value=values)).mark_line(**_mark())
        panels.append(line.encode(_steps(steps), y, tooltip=tips).properties(title=_panel_title(phase), **SIZE))
    return _panels(panels, f"Training: {TITLES[column]}")


def training_theta(posterior: Answers, records: Sequence[Mapping[str, Any]]) -> alt.ConcatChart:
    """Every parameter over the steps that learn it, with the prior's 98 % range and the posterior's 90 % interval."""
    import altair as alt

    inputs, theta = posterior.problem.calibration_inputs, posterior.theta
    panels = []
    for j, variable in enumerate(inputs):
        curve = [
            (int(record["step"]), value)
            for record in records
            if (value := _number(record.get(f"theta.{variable.name}"))) is not None
        ]
        if not curve:
            continue
        steps, values = np.array(_thinned(curve)).T
        before, after = prior_quantiles(theta.prior, j, [0.01, 0.99]), quantiles(theta, j, [0.05, 0.95])
        ends = np.array([min(*after, values.min()), max(*after, values.max())])
        if np.ptp(ends) < NARROW * np.ptp(before):  # on a range of its own
            ends = ends + 0.4 * np.ptp(ends) * np.array([-1, 1])
        else:
            ends = np.array([min(ends[0], before[0]), max(ends[1], before[1])])
        scale = alt.Scale(domain=ends.tolist(), nice=False, zero=False)
        y = alt.Y("value:Q", title=label(variable), scale=scale, axis=_ticks(4))
        x = _steps(steps)
        base = alt.Chart(rows(step=steps, value=values))
        tips = [alt.Tooltip("step:Q", title="step", format=","), alt.Tooltip("value:Q", title="value", format=NUMBER)]
        layers: list[Any] = [
            alt.Chart(rows(value=[low], end=[high]))
            .mark_rect(color=colour, opacity=0.18, clip=True)
            .encode(y, alt.Y2("end"))
            for (low, high), colour in ((before, PRIOR), (after, POSTERIOR))
        ]
        layers.append(base.mark_line(**_mark()).encode(x, y, tooltip=tips))
        panels.append(alt.layer(*layers).properties(title=_panel_title(variable.name), **SIZE))
    if not panels:
        raise ModelError(f"none of the {len(records)} records has values of θ; there is nothing to draw")
    return _panels(panels, "θ in training", "grey: the prior's 98 % range, blue: the posterior's 90 % interval")


def _panels(panels: list[Any], title: str, *notes: str) -> alt.ConcatChart:
    import altair as alt

    whole = alt.concat(*panels, columns=min(COLUMNS, len(panels)), align="each")
    chart: alt.ConcatChart = styled(titled(whole.resolve_scale(x="independent", y="independent"), title, *notes))
    return chart


def _panel_title(text: str) -> Any:
    import altair as alt

    return alt.Title(text, fontSize=12, fontWeight="normal", anchor="middle", limit=SIZE["width"])


def _mark() -> dict[str, Any]:
    return {"color": POSTERIOR, "strokeWidth": 1.6, "clip": True, "point": {"size": 10, "color": POSTERIOR}}


def _ticks(count: int) -> Any:
    import altair as alt

    return alt.Axis(tickCount=count, titleLimit=SIZE["height"] + 20)


def _steps(steps: Any) -> Any:
    import altair as alt

    ends = [float(steps.min()), float(steps.max())]
    if ends[0] == ends[1]:
        ends = [ends[0] - 1, ends[1] + 1]
    axis = alt.Axis(tickCount=3, format=",d", tickMinStep=1)
    return alt.X("step:Q", title="step", axis=axis, scale=alt.Scale(domain=ends, nice=False))


def _span(values: Any, least: float) -> Any:
    """The scale of a curve: no narrower than `least`, and logarithmic over many orders of magnitude."""
    import altair as alt

    low, high = float(values.min()), float(values.max())
    if low > 0 and high > ORDERS * low:
        return alt.Scale(type="log", domain=[low, high], nice=True)
    room = max(least - (high - low), 0.05 * (high - low), 1e-9 * abs(high)) / 2
    return alt.Scale(domain=[low - room, high + room], nice=False, zero=False)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _thinned(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most so many points, with the first and the last."""
    if len(curve) <= MOST_POINTS:
        return curve
    return [curve[i] for i in np.unique(np.linspace(0, len(curve) - 1, MOST_POINTS).round().astype(int))]
