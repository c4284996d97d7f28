"""What is known of θ: one parameter by itself, and all of them at a glance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vcal_dist.answers import Answers, to_numpy
from vcal_dist.plots.densities import axis_values, contraction, densities, prior_rank, quantiles
from vcal_dist.plots.naming import NUMBER, label, place, unit
from vcal_dist.plots.style import POSTERIOR, PRIOR, TRUTH, hover, rows, scale_of, single, styled, titled

if TYPE_CHECKING:
    import altair as alt

ROW = 24  # pixels of a parameter


def marginal(posterior: Answers, parameter: str, *, truth: float | None = None) -> alt.LayerChart:
    """Density of one parameter before and after calibration, with its median and 90 % interval."""
    import altair as alt

    inputs = posterior.problem.calibration_inputs
    j = place(inputs, parameter, "parameter")
    theta, variable = posterior.theta, inputs[j]
    low, median, high = quantiles(theta, j, [0.05, 0.5, 0.95])
    values, ends, narrow = axis_values(theta, j, truth)
    before, after = densities(theta, j, values)
    below = to_numpy(theta.marginal_cdf(j, torch.from_numpy(values)))
    kinds = ["prior", "posterior"] + (["truth"] if truth is not None else [])
    colour = alt.Color(
        "kind:N", title=None, scale=alt.Scale(domain=kinds, range=[PRIOR, POSTERIOR, TRUTH][: len(kinds)])
    )
    x = alt.X("value:Q", title=label(variable), scale=scale_of(ends))
    y = alt.Y("density:Q", title="density", axis=alt.Axis(labels=False, ticks=False))
    both = rows(
        value=np.tile(values, 2), density=np.concatenate([before, after]), kind=np.repeat(kinds[:2], len(values))
    )
    inside = (values >= low) & (values <= high)
    layers: list[Any] = [
        alt.Chart(rows(value=values[inside], density=after[inside]))
        .mark_area(color=POSTERIOR, opacity=0.22)
        .encode(x, y),
        alt.Chart(both).mark_line(strokeWidth=2).encode(x, y, colour),
        alt.Chart(rows(value=[median])).mark_rule(color=POSTERIOR, strokeDash=[4, 3]).encode(x),
    ]
    if truth is not None:
        shown = alt.Chart(rows(value=[truth], kind=["truth"])).mark_rule(strokeWidth=2)
        layers.append(shown.encode(x, colour, tooltip=[alt.Tooltip("value:Q", title="truth", format=NUMBER)]))
    tips = [
        alt.Tooltip("value:Q", title=label(variable), format=NUMBER),
        alt.Tooltip("below:Q", title="probability of less", format=".1%"),
        alt.Tooltip("after:Q", title="posterior density", format=NUMBER),
        alt.Tooltip("before:Q", title="prior density", format=NUMBER),
    ]
    layers.append(hover(rows(value=values, below=below, after=after, before=before), x, tips))
    found = f"median {median:.4g}, 90 % interval {low:.4g} to {high:.4g}"
    prior = f"prior {variable.prior}" + (", most of it outside this range" if narrow else "")
    return single(layers, variable.name, found, prior)


def intervals(posterior: Answers, *, truth: Mapping[str, float] | None = None) -> alt.LayerChart:
    """All parameters: intervals of 50 and 90 % on the scale of their priors, the best known ones first.

    That scale is the prior's distribution function: without data, an interval of 90 % would go from 0.05 to 0.95.
    """
    import altair as alt

    inputs, theta = posterior.problem.calibration_inputs, posterior.theta
    truth = {inputs[place(inputs, name, "parameter")].name: value for name, value in (truth or {}).items()}
    told = contraction(theta)
    order = np.argsort(-told, kind="stable").tolist()
    names = [inputs[j].name for j in order]
    probabilities = [0.05, 0.25, 0.5, 0.75, 0.95]
    values = np.array([quantiles(theta, j, probabilities) for j in order])  # (d2, 5)
    ranks = np.array([prior_rank(theta.prior, j, row) for j, row in zip(order, values, strict=True)])
    units = [unit(inputs[j]) for j in order]
    table = {"parameter": names, "told": told[order]}
    table |= {f"r{n}": ranks[:, n] for n in range(5)}
    table |= {
        "median": [f"{v:.4g} {u}".strip() for v, u in zip(values[:, 2], units, strict=True)],
        "half": [f"{a:.4g} to {b:.4g} {u}".strip() for a, b, u in zip(values[:, 1], values[:, 3], units, strict=True)],
        "most": [f"{a:.4g} to {b:.4g} {u}".strip() for a, b, u in zip(values[:, 0], values[:, 4], units, strict=True)],
        "prior": [str(inputs[j].prior) for j in order],
    }
    data = rows(**table)
    tips = [
        alt.Tooltip(f"{field}:N", title=title)
        for field, title in (
            ("parameter", "parameter"), ("median", "median"), ("half", "50 % interval"), ("most", "90 % interval"),
            ("prior", "prior"),
        )
    ]  # fmt: skip
    y = alt.Y("parameter:N", sort=names, title=None, axis=alt.Axis(labelLimit=220, grid=False))
    scale = alt.Scale(domain=[0, 1], nice=False)
    title = "share of the prior below (0: its lowest value, 1: its highest)"
    base = alt.Chart(data)

    def bar(start: str, end: str, size: int, opacity: float) -> alt.Chart:
        mark = base.mark_bar(height=size, opacity=opacity, color=POSTERIOR, cornerRadius=2)
        return mark.encode(alt.X(f"{start}:Q", title=title, scale=scale), y, alt.X2(f"{end}:Q"), tooltip=tips)

    prior = base.mark_rule(color=PRIOR, strokeWidth=1, opacity=0.7).encode(
        alt.XDatum(0.05, scale=scale, title=title), y, alt.X2Datum(0.95), tooltip=tips
    )
    centre = base.mark_point(filled=True, size=34, color="white", stroke=POSTERIOR, strokeWidth=1.8, opacity=1)
    layers: list[Any] = [prior, bar("r0", "r4", 8, 0.45), bar("r1", "r3", 8, 0.9)]
    layers.append(centre.encode(alt.X("r2:Q", scale=scale, title=title), y, tooltip=tips))
    known = [j for j in order if inputs[j].name in truth]
    if known:
        true = np.array([truth[inputs[j].name] for j in known])
        marks = rows(
            parameter=[inputs[j].name for j in known],
            rank=[float(prior_rank(theta.prior, j, np.array([v]))[0]) for j, v in zip(known, true, strict=True)],
            value=true,
        )
        mark = alt.Chart(marks).mark_tick(color=TRUTH, thickness=2.5, size=16)
        tip = [alt.Tooltip("parameter:N", title="parameter"), alt.Tooltip("value:Q", title="truth", format=NUMBER)]
        layers.append(mark.encode(alt.X("rank:Q", scale=scale, title=title), y, tooltip=tip))
    legend = "dark: 50 %, pale: 90 %, circle: median, grey line: the prior's 90 %" + (", red: truth" if known else "")
    size = {"width": "container", "height": ROW * len(names)}
    chart: alt.LayerChart = styled(
        titled(alt.layer(*layers), "What calibration told of each parameter", legend, **size)
    )
    return chart
