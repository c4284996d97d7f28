"""Charts of the borehole: θ by variant, the default's posterior beside the prior, and errors against seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
import torch

from vcal_dist.plots.style import DATA, POSTERIOR, PRIOR, SERIES, TRUTH, rows, styled
from vcal_dist.problems import borehole
from vcal_dist.theta import ThetaPosterior

WIDTH, HEIGHT = 230, 200
POINTS = 401  # of a curve
EDGE = 0.02  # of the unit interval, where densities do not decide on the height of a chart
SDS = 5.0  # of the posterior that its chart shows on each side, inside the bounds

Judged = Mapping[str, Mapping[str, Any]]  # by variant, as `Fresh.judge` gives it


def intervals(variants: Judged) -> Any:
    """90 % (thick) and 95 % (thin) intervals of each θ by variant, and the truth."""
    charts = [_intervals(variants, parameter, first=not j) for j, parameter in enumerate(borehole.PARAMETERS)]
    title = alt.Title("Intervals of θ by variant: 90 % thick, 95 % thin; the truth in red", offset=14)
    return styled(alt.hconcat(*charts).properties(title=title))


def _intervals(variants: Judged, parameter: str, *, first: bool) -> Any:
    found = {name: judged["theta"][parameter] for name, judged in variants.items()}
    columns = {
        f"{side}{level}": [each["intervals"][level][i] for each in found.values()]
        for level in ("90", "95")
        for i, side in enumerate(("low", "high"))
    }
    table = rows(variant=list(found), mean=[each["mean"] for each in found.values()], **columns)
    axis = alt.Axis() if first else alt.Axis(labels=False, ticks=False)
    y = alt.Y("variant:N", title=None, sort=list(found), axis=axis)
    tooltip: list[Any] = ["variant:N", "mean:Q", "low90:Q", "high90:Q", "low95:Q", "high95:Q"]
    base = alt.Chart(table).encode(y=y, tooltip=tooltip)
    scale = alt.Scale(zero=False)

    def bar(level: str, width: float) -> Any:
        x = alt.X(f"low{level}:Q", title=f"{parameter} (scaled)", scale=scale)
        return base.mark_rule(strokeWidth=width, color=POSTERIOR).encode(x=x, x2=f"high{level}:Q")

    means = base.mark_point(filled=True, size=45, color=DATA, opacity=1).encode(x=alt.X("mean:Q", scale=scale))
    return alt.layer(bar("95", 1.5), bar("90", 5), means, _truth(parameter)).properties(
        width=WIDTH, height=alt.Step(26), title=borehole.RANGES[parameter].meaning
    )


def posteriors(theta: ThetaPosterior) -> Any:
    """The density of each θ, its prior and the truth; a sharp parameter is shown around its posterior only."""
    charts = [_posterior(theta, j, first=not j) for j in range(theta.dim)]
    title = alt.Title("Posterior of θ (blue, the default), its prior (grey) and the truth (red)", offset=14)
    return styled(alt.hconcat(*charts).properties(title=title))


def _posterior(theta: ThetaPosterior, j: int, *, first: bool) -> Any:
    mean, sd, name = float(theta.mean()[j]), float(theta.sd()[j]), borehole.PARAMETERS[j]
    truth = borehole.THETA[j]
    low, high = max(0.0, min(mean - SDS * sd, truth)), min(1.0, max(mean + SDS * sd, truth))
    values = np.linspace(low, high, POINTS)
    density = theta.marginal_density(j, torch.from_numpy(values)).numpy()
    x = alt.X("theta:Q", title=f"{name} (scaled)", scale=alt.Scale(domain=[low, high], nice=False))
    inner = density[(values > EDGE) & (values < 1 - EDGE)]  # the density of a θ̃ wider than its prior's has no end there
    height = 1.2 * float(max(1.0, inner.max() if len(inner) else density.max()))
    y = alt.Y("density:Q", title="density" if first else None, scale=alt.Scale(domain=[0, height], nice=False))
    tooltip = [alt.Tooltip("theta:Q", title=name), alt.Tooltip("density:Q")]
    layers = [
        alt.Chart(rows(theta=values, density=curve))
        .mark_area(clip=True, line={"color": colour, "strokeWidth": 2}, color=colour, opacity=0.25)
        .encode(x=x, y=y, tooltip=tooltip)
        for curve, colour in ((np.ones(POINTS), PRIOR), (density, POSTERIOR))
    ]
    title = borehole.RANGES[name].meaning
    return alt.layer(*layers, _truth(name)).properties(width=WIDTH, height=HEIGHT, title=title)


def cost(variants: Judged, floor: float) -> Any:
    """The emulator's error and the paper's measure against seconds of training, on logarithmic axes."""
    seconds = [judged["seconds"] for judged in variants.values()]
    colours = alt.Scale(domain=list(variants), range=SERIES[: len(variants)])
    charts = []
    for key, title in (("emulator", "emulator error (sds of z)"), ("measure", "the paper's measure")):
        table = rows(variant=list(variants), seconds=seconds, value=[judged[key] for judged in variants.values()])
        log = alt.Scale(type="log", nice=False, padding=16)
        base = alt.Chart(table).encode(
            x=alt.X("seconds:Q", title="seconds of training", scale=log),
            y=alt.Y("value:Q", title=title, scale=log),
            color=alt.Color("variant:N", title=None, sort=None, scale=colours, legend=alt.Legend(orient="right")),
            tooltip=["variant:N", "seconds:Q", alt.Tooltip("value:Q", title=title)],
        )
        layers: list[Any] = [base.mark_circle(size=110, opacity=1)]
        if key == "measure":
            line = alt.Chart(rows(value=[floor])).mark_rule(color=DATA, strokeDash=[5, 3])
            layers.append(line.encode(y="value:Q", tooltip=alt.Tooltip("value:Q", title="the truth's own")))
        charts.append(alt.layer(*layers).properties(width=340, height=260))
    title_of_both = alt.Title("What a second buys", subtitle="dashed: the measure of the true θ itself", offset=10)
    return styled(alt.hconcat(*charts).properties(title=title_of_both))


def _truth(parameter: str) -> Any:
    truth = dict(zip(borehole.PARAMETERS, borehole.THETA, strict=True))[parameter]
    rule = alt.Chart(rows(truth=[truth])).mark_rule(color=TRUTH, strokeWidth=1.5)
    return rule.encode(x="truth:Q", tooltip=alt.Tooltip("truth:Q", title="truth"))
