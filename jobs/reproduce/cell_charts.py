"""The pictures of the cell experiment: θ by all methods, the simulator at θ over the observations, and the warping."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vcal_dist.plots.style import DATA, PRIOR, SERIES, TRUTH, rows, styled
from vcal_dist.problems import cell

if TYPE_CHECKING:
    import altair as alt

    from vcal_dist.posterior import Posterior

Array = NDArray[np.float64]
CLOUD, CURVES, PLACES = 300, 30, (0.2, 0.6, 1.0)  # points and curves of each method; x of the warping
NEAR, POINTS, SMALLEST = 0.1, 60, 1e-3  # runs this near tell η's range there; the least η that is drawn
SYMBOLS = ("θ₁", "θ₂", "θ₃")
TIME = "time, ms"
COLOURS = [colour for colour in SERIES if colour != TRUTH]  # of methods; the red dot is L2's


def charts(
    data: cell.Data, clouds: Mapping[str, Array], labels: Mapping[str, str], least_squares: Array, general: Posterior
) -> dict[str, Any]:
    """All of them, by the name of their file."""
    named = {labels[name]: theta for name, theta in clouds.items()}
    return {
        "theta": theta_pairs(named, least_squares),
        "simulator": simulator(data, named),
        "warping": slopes(general, data),
    }


def theta_pairs(clouds: Mapping[str, Array], least_squares: Array) -> alt.VConcatChart:
    """Draws of θ, two parameters at a time, a row for each method; the red dot is L2's."""
    import altair as alt

    low, high = cell.BOUNDS
    pairs = list(combinations(range(len(SYMBOLS)), 2))
    methods = []
    for number, (label, theta) in enumerate(clouds.items()):
        chosen = theta[np.linspace(0, len(theta) - 1, CLOUD).astype(int)]
        panels = []
        for i, j in pairs:
            x = alt.X("a:Q", title=SYMBOLS[i], scale=alt.Scale(domain=[low, high]))
            y = alt.Y("b:Q", title=SYMBOLS[j], scale=alt.Scale(domain=[low, high]))
            tips = [alt.Tooltip("a:Q", title=SYMBOLS[i]), alt.Tooltip("b:Q", title=SYMBOLS[j])]
            cloud = alt.Chart(rows(a=chosen[:, i], b=chosen[:, j])).mark_circle(
                size=14, opacity=0.35, color=COLOURS[number]
            )
            dot = alt.Chart(rows(a=[least_squares[i]], b=[least_squares[j]])).mark_circle(
                size=70, opacity=1, color=TRUTH, stroke="white"
            )
            panels.append(
                alt.layer(cloud.encode(x, y, tooltip=tips), dot.encode(x, y, tooltip=tips)).properties(
                    width=190, height=150
                )
            )
        title = alt.TitleParams(label, subtitle="red: L2, least squares on the emulator" if not number else "")
        methods.append(alt.hconcat(*panels, spacing=18).properties(title=title))
    chart: alt.VConcatChart = styled(alt.vconcat(*methods, spacing=14))
    return chart


def simulator(data: cell.Data, clouds: Mapping[str, Array]) -> alt.ConcatChart:
    """η(·, θ) of the exact simulator with θ ~ q, over the observations (white) and the runs (grey)."""
    import altair as alt

    x = np.linspace(0, 1, 61)[:, None]
    ends = cell.times([0.0, 1.0])
    axis = alt.X(
        "time:Q",
        title=TIME,
        scale=alt.Scale(type="log", domain=ends.tolist(), nice=False),
        axis=alt.Axis(values=[0.2, 0.5, 1, 2, 5, 10], format="~g"),
    )
    y = alt.Y("current:Q", title="normalised current", scale=alt.Scale(domain=[0, 0.25], nice=False))
    near = data.z[:, 0] <= 0.25  # a few runs lie far above everything else
    runs = alt.Chart(rows(time=cell.times(data.x_runs[near, 0]), current=data.z[near, 0]))
    seen = alt.Chart(rows(time=cell.TIMES, current=cell.CURRENTS))
    tips = [alt.Tooltip("time:Q", title=TIME, format=".3g"), alt.Tooltip("current:Q", title="current", format=".4f")]
    panels = []
    for number, (label, theta) in enumerate(clouds.items()):
        chosen = theta[np.linspace(0, len(theta) - 1, CURVES).astype(int)]
        eta = cell.curves(x, chosen)  # (CURVES, 61)
        lines = rows(
            time=np.tile(cell.times(x[:, 0]), CURVES),
            current=eta.ravel(),
            draw=np.repeat(np.arange(CURVES), len(x)),
        )
        panels.append(
            alt.layer(
                runs.mark_circle(color=PRIOR, size=10, opacity=0.5).encode(axis, y),
                alt.Chart(lines)
                .mark_line(strokeWidth=0.8, opacity=0.5, color=COLOURS[number], clip=True)
                .encode(axis, y, alt.Detail("draw:N")),
                seen.mark_point(filled=True, fill="white", stroke=DATA, strokeWidth=1.2, size=34, opacity=1).encode(
                    axis, y, tooltip=tips
                ),
            ).properties(width=290, height=190, title=label)
        )
    chart: alt.ConcatChart = styled(alt.concat(*panels, columns=2, spacing=22))
    return chart


def slopes(general: Posterior, data: cell.Data) -> alt.LayerChart:
    """E ∂g/∂η against η at three x, over the range of the runs there: one where g only adds."""
    import altair as alt

    from vcal_dist.warping import warp

    columns: dict[str, list[Any]] = {"place": [], "eta": [], "slope": [], "low": [], "high": []}
    texts = [f"x = {x:g}, {cell.times(x):.3g} ms" for x in PLACES]
    for text, x in zip(texts, PLACES, strict=True):
        there = data.z[np.abs(data.x_runs[:, 0] - x) < NEAR, 0]
        eta = np.geomspace(SMALLEST, np.quantile(there, 0.95), POINTS)
        found = warp(general, np.full((POINTS, 1), x), eta)
        columns["place"] += [text] * POINTS
        columns["eta"] += eta.tolist()
        columns["slope"] += found.slope.tolist()
        columns["low"] += (found.slope - found.slope_sd).tolist()
        columns["high"] += (found.slope + found.slope_sd).tolist()
    table = alt.Chart(rows(**columns))
    x_axis = alt.X(
        "eta:Q",
        title="η, normalised current of the simulator",
        scale=alt.Scale(type="log", nice=False),
        axis=alt.Axis(values=[0.001, 0.003, 0.01, 0.03, 0.1, 0.3], format="~g"),
    )
    scale = alt.Scale(domain=[0, 2], nice=False)
    colour = alt.Color("place:N", title=None, sort=texts, scale=alt.Scale(domain=texts, range=SERIES[: len(texts)]))
    tips = [alt.Tooltip("place:N", title="at"), alt.Tooltip("eta:Q", title="η"), alt.Tooltip("slope:Q", title="∂g/∂η")]
    band = table.mark_area(opacity=0.12, clip=True).encode(
        x_axis, alt.Y("low:Q", scale=scale), alt.Y2("high:Q"), colour
    )
    line = table.mark_line(strokeWidth=2, clip=True).encode(
        x_axis, alt.Y("slope:Q", title="E ∂g/∂η", scale=scale), colour, tooltip=tips
    )
    one = alt.Chart(rows(one=[1.0])).mark_rule(color=DATA, strokeDash=[4, 3]).encode(alt.Y("one:Q", scale=scale))
    title = alt.TitleParams("How nature warps the simulator", subtitle="mean ± one standard deviation; dashed: it adds")
    chart: alt.LayerChart = styled(alt.layer(band, one, line).properties(width=460, height=260, title=title))
    return chart
