"""Charts of a sweep: the metric against every setting, and what longer schedules were worth."""

from __future__ import annotations

import json
import math
from typing import Any

import altair as alt

from jobs.sweeps.settings import Sweep
from jobs.sweeps.space import Dimension
from jobs.sweeps.trial import Rung, Trial
from vcal_dist.plots.style import DATA, HEIGHT, PRIOR, TRUTH, rows, styled

COLUMNS = 3
PANEL = 250  # width of a chart in the picture of all
FAR = 4.0  # times the spread of the better half, below which points are shown at the edge
LABEL = 20  # pixels of a choice on its axis at least; pointing at a mark shows the whole text


def picture(sweep: Sweep, trials: list[Trial]) -> Any | None:
    """All settings in one chart, for a file; None before there is a result. `trials` are sorted, best first."""
    charts = [_panel(sweep, key, trials).properties(width=PANEL, height=PANEL * 0.75) for key in tried(sweep, trials)]
    if not charts:
        return None
    count = f"{len(trials)} trial{'s' if len(trials) != 1 else ''}"
    return styled(alt.concat(*charts, columns=COLUMNS, title=f"Sweep {sweep.output.name}: {count}"))


def panel(sweep: Sweep, key: str, trials: list[Trial]) -> Any:
    """The metric against one setting, coloured by the length of the training, the best trial in red."""
    return styled(_panel(sweep, key, trials).properties(width="container", height=HEIGHT))


def climb(sweep: Sweep, trials: list[Trial]) -> Any:
    """The metric of every trial after each of its trainings: what the longer schedules were worth."""
    points = [(trial, rung) for trial in trials for rung in trial.rungs]
    low, high = _limits([rung.metric for _, rung in points])
    best = trials[0].number if trials[0].state == "done" else None
    data = rows(
        rung=[_schedule(sweep, rung) for _, rung in points],
        metric=[max(rung.metric, low) for _, rung in points],
        true=[rung.metric for _, rung in points],
        trial=[trial.number for trial, _ in points],
        seconds=[rung.seconds or math.nan for _, rung in points],
        best=["best" if trial.number == best else "others" for trial, _ in points],
    )
    chart = (
        alt.Chart(data)
        .mark_line(point=True, clip=True)
        .encode(
            x=alt.X("rung:N", sort=[_named(sweep, rung) for rung in sweep.rungs], title=None).axis(labelAngle=0),
            y=_metric(sweep, low, high),
            detail="trial:N",
            color=alt.Color("best:N", title=None).scale(domain=["best", "others"], range=[TRUTH, PRIOR]),
            tooltip=[alt.Tooltip("trial:N"), alt.Tooltip("true:Q", title=_words(sweep)), alt.Tooltip("seconds:Q")],
        )
        .properties(width="container", height=HEIGHT)
    )
    return styled(chart)


def tried(sweep: Sweep, trials: list[Trial]) -> list[str]:
    """The settings that some trial with a result has."""
    return [key for key in sweep.space.dimensions if any(key in trial.settings and trial.rungs for trial in trials)]


def _panel(sweep: Sweep, key: str, trials: list[Trial]) -> Any:
    dimension = sweep.space.dimensions[key]
    points = [(trial, rung) for trial in reversed(trials) for rung in trial.rungs if key in trial.settings]
    low, high = _limits([rung.metric for trial in trials for rung in trial.rungs])
    best = trials[0].number if trials[0].state == "done" else None
    data = rows(
        value=[_place(dimension, trial.settings[key]) for trial, _ in points],
        beside=[(trial.number * 0.618034) % 1.0 for trial, _ in points],
        metric=[max(rung.metric, low) for _, rung in points],
        true=[rung.metric for _, rung in points],
        rung=[_schedule(sweep, rung) for _, rung in points],
        trial=[trial.number for trial, _ in points],
        shape=["lower than shown" if rung.metric < low else "shown" for _, rung in points],
        best=[trial.number == best and rung is trial.last for trial, rung in points],
    )
    order = [_named(sweep, rung) for rung in sweep.rungs]
    shades = ["#c3d3e4", "#7ea3cb", "#2563a8", "#123a68"]
    colours = [shades[min(len(shades) - 1, i + len(shades) - 1 - len(order))] for i in range(len(order))]
    base = alt.Chart(data).encode(
        x=_axis(dimension, key),
        y=_metric(sweep, low, high),
        tooltip=[
            alt.Tooltip("trial:N"),
            alt.Tooltip("value", type=_kind(dimension), title="value"),
            alt.Tooltip("true:Q", title=_words(sweep)),
            alt.Tooltip("rung:N", title="trained with"),
        ],
    )
    if dimension.choice is not None:
        base = base.encode(xOffset=alt.XOffset("beside:Q").scale(domain=[-1, 2]))
    marks = base.mark_point(filled=True, size=55, opacity=0.9).encode(
        color=alt.Color("rung:N", title="trained with", sort=order).scale(domain=order, range=colours),
        shape=alt.Shape("shape:N", legend=None).scale(
            domain=["shown", "lower than shown"], range=["circle", "triangle-down"]
        ),
    )
    ring = base.mark_point(size=190, strokeWidth=2, color=TRUTH).transform_filter("datum.best")
    return alt.layer(marks, ring)


def _axis(dimension: Dimension, key: str) -> alt.X:
    """The axis of a setting's values: the whole range, so that charts of one sweep can be compared."""
    if dimension.choice is not None:
        order = [_place(dimension, value) for value in dimension.choice]
        room = max(PANEL // len(order) - 6, LABEL)
        axis = alt.Axis(labelAngle=0, labelOverlap=False, labelLimit=room)
        return alt.X("value:N", sort=order, title=key, axis=axis).scale(domain=order)
    low, high = dimension.ends
    if dimension.loguniform is None:
        return (
            alt.X("value:Q", title=key)
            .scale(domain=[low, high], nice=False, zero=False, padding=8)
            .axis(format="~g", tickCount=5)
        )
    scale = alt.Scale(type="log", domain=[low, high], nice=False, padding=8)
    return alt.X("value:Q", title=key, scale=scale).axis(format="~g", tickCount=4)


def _kind(dimension: Dimension) -> Any:
    return "quantitative" if dimension.choice is None else "nominal"


def _place(dimension: Dimension, value: Any) -> Any:
    """A value as its axis has it."""
    if dimension.choice is None:
        return float(value)
    return value if isinstance(value, str) else json.dumps(value)


def _metric(sweep: Sweep, low: float, high: float) -> alt.Y:
    return (
        alt.Y("metric:Q", title=_words(sweep)).scale(domain=[low, high], nice=False, zero=False).axis(titleColor=DATA)
    )


def _words(sweep: Sweep) -> str:
    return sweep.settings.metric.replace("_", " ")


def _schedule(sweep: Sweep, rung: Rung) -> str:
    return _named(sweep, rung.rung)


def _named(sweep: Sweep, rung: int) -> str:
    factor = sweep.budget(sweep.last_rung - rung)
    return "whole schedule" if factor == 1 else f"1/{factor} of it"


def _limits(metrics: list[float]) -> tuple[float, float]:
    """The range that is shown: a few trials that went wrong must not flatten all others."""
    ordered = sorted(metrics)
    best, middle = ordered[-1], ordered[len(ordered) // 2]
    low = max(ordered[0], best - FAR * (best - middle)) if best > middle else ordered[0]
    margin = 0.06 * (best - low) or 0.05 * max(abs(best), 1e-6)
    if not math.isfinite(margin):
        return low, best
    return low - margin, best + margin
