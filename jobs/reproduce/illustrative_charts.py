"""The four panels of the paper's figure of the illustrative example, as one chart with one colour scale for values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import numpy as np
import torch
from numpy.typing import NDArray

from vcal_dist.analytic import Grid
from vcal_dist.plots.style import SEQUENTIAL, TRUTH, rows, styled
from vcal_dist.problems import illustrative
from vcal_dist.theta import ThetaPosterior

Array = NDArray[np.float64]

WIDTH, HEIGHT = 340, 230
POINTS = 501  # of the curves
STRIPS = 200  # of the grey background
OVERLAP = 1.3  # of neighbouring cells, in halves of their width: no seams between them
HEADROOM = 2.2  # over the exact posterior, where taller curves are cut
COLOURS = {
    "prior": "#1f2933",
    "exact": "#3b8f5d",
    "collapsed": "#2563a8",
    "fullrank": "#d98b1f",
    "meanfield": "#8757a8",
}
DASHES = [[1, 0], [1, 0], [6, 3], [6, 3], [6, 3]]


def panels(
    data: illustrative.Data,
    exact: Grid,
    found: Mapping[str, ThetaPosterior],
    axes: tuple[Array, Array],
    eta: Array,
    emulated: Array,
) -> Any:
    """Densities of θ; the true η (CELLS, CELLS) over x and t; the data over θ's posterior; the mean of η."""
    values = np.concatenate([eta.ravel(), emulated.ravel(), data.z.ravel(), data.y.ravel()])
    ends = [float(values.min()), float(values.max())]
    charts = (
        densities(data, exact, found),
        surface(axes, eta, ends, "True η, and where the runs are", data),
        observed(data, exact, ends),
        surface(axes, emulated, ends, "Posterior mean of η (collapsed)", None),
    )
    return styled(alt.concat(*charts, columns=2).resolve_scale(color="independent", fill="independent"))


def densities(data: illustrative.Data, exact: Grid, found: Mapping[str, ThetaPosterior]) -> Any:
    """Prior, exact posterior and q(θ) of each way, cut where one is far taller than the exact posterior."""
    theta = np.linspace(*illustrative.BOUNDS, POINTS)
    curves = {
        "prior": np.exp(-0.5 * theta**2) / np.sqrt(2 * np.pi),
        "exact": np.interp(theta, exact.nodes[:, 0].numpy(), exact.density.numpy()),
    }
    curves |= {way: q.marginal_density(0, torch.from_numpy(theta)).numpy() for way, q in found.items()}
    height = HEADROOM * float(max(curve.max() for name, curve in curves.items() if name in ("prior", "exact")))
    cut = [f"{name} reaches {curve.max():.2g}" for name, curve in curves.items() if curve.max() > height]
    names = list(curves)
    table = rows(
        theta=np.tile(theta, len(curves)),
        density=np.concatenate(list(curves.values())),
        of=np.repeat(names, POINTS),
    )
    scale = alt.Scale(domain=names, range=[COLOURS[name] for name in names])
    lines = (
        alt.Chart(table)
        .mark_line(clip=True, strokeWidth=2)
        .encode(
            x=_theta_axis("θ"),
            y=alt.Y("density:Q", title="density", scale=alt.Scale(domain=[0, height], nice=False)),
            color=alt.Color("of:N", title=None, scale=scale),
            strokeDash=alt.StrokeDash("of:N", legend=None, scale=alt.Scale(domain=names, range=DASHES)),
            tooltip=[alt.Tooltip("of:N", title="of"), alt.Tooltip("theta:Q", title="θ"), alt.Tooltip("density:Q")],
        )
    )
    title = alt.Title("Posterior of θ; the true θ in red", subtitle=[f"cut: {', '.join(cut)}"] if cut else [])
    return alt.layer(lines, _truth(data)).properties(width=WIDTH, height=HEIGHT, title=title)


def surface(
    axes: tuple[Array, Array], values: Array, ends: list[float], title: str, data: illustrative.Data | None
) -> Any:
    """A heat map of values (cells of x, cells of t), with the runs as dots if there are data."""
    x, t = axes
    step_x, step_t = x[1] - x[0], t[1] - t[0]
    X, T = np.meshgrid(x, t, indexing="ij")
    table = rows(
        x=(X - step_x / 2).ravel(),
        x2=(X + OVERLAP * step_x / 2).ravel(),
        theta=(T - step_t / 2).ravel(),
        theta2=(T + OVERLAP * step_t / 2).ravel(),
        value=values.ravel(),
    )
    cells = (
        alt.Chart(table)
        .mark_rect(clip=True)
        .encode(
            x=_theta_axis("t"),
            x2="theta2:Q",
            y=_x_axis(),
            y2="x2:Q",
            color=_value(ends, legend=data is not None),
            tooltip=[alt.Tooltip("x:Q"), alt.Tooltip("theta:Q", title="t"), alt.Tooltip("value:Q", title="η")],
        )
    )
    layers = [cells] if data is None else [cells, _runs(data, ends, "t")]
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=title)


def observed(data: illustrative.Data, exact: Grid, ends: list[float]) -> Any:
    """Y as lines at their x, Z as dots, and the posterior of θ as a grey strip behind them, darkest at its mode."""
    low, high = illustrative.BOUNDS
    edges = np.linspace(low, high, STRIPS + 1)
    density = np.interp((edges[1:] + edges[:-1]) / 2, exact.nodes[:, 0].numpy(), exact.density.numpy())
    overlapping = edges[1:] + (OVERLAP - 1) * np.diff(edges)
    strip = (
        alt.Chart(rows(theta=edges[:-1], theta2=overlapping, density=density))
        .mark_rect(clip=True)
        .encode(
            x=_theta_axis("t, or θ"),
            x2="theta2:Q",
            fill=alt.Fill(
                "density:Q", scale=alt.Scale(domainMin=0, range=["white", "#7b8794"], interpolate="rgb"), legend=None
            ),
            tooltip=[alt.Tooltip("theta:Q", title="θ"), alt.Tooltip("density:Q", title="posterior density")],
        )
    )
    count = len(data.x)
    lines = (
        alt.Chart(rows(x=data.x[:, 0], theta=np.full(count, low), theta2=np.full(count, high), value=data.y[:, 0]))
        .mark_rule(strokeWidth=4)
        .encode(
            x=_theta_axis("t, or θ"),
            x2="theta2:Q",
            y=_x_axis(),
            color=_value(ends, legend=False),
            tooltip=[alt.Tooltip("x:Q"), alt.Tooltip("value:Q", title="y")],
        )
    )
    title = "Y (lines) and Z (dots) over the posterior of θ"
    return alt.layer(strip, lines, _truth(data), _runs(data, ends, "t, or θ")).properties(
        width=WIDTH, height=HEIGHT, title=title
    )


def _runs(data: illustrative.Data, ends: list[float], title: str) -> Any:
    return (
        alt.Chart(rows(x=data.x_runs[:, 0], theta=data.t[:, 0], value=data.z[:, 0]))
        .mark_circle(size=110, opacity=1, stroke="white", strokeWidth=1.5)
        .encode(
            x=_theta_axis(title),
            y=_x_axis(),
            color=_value(ends, legend=False),
            tooltip=[alt.Tooltip("x:Q"), alt.Tooltip("theta:Q", title="t"), alt.Tooltip("value:Q", title="z")],
        )
    )


def _truth(data: illustrative.Data) -> Any:
    rule = alt.Chart(rows(theta=[data.theta_true])).mark_rule(color=TRUTH, strokeWidth=1.5)
    return rule.encode(x="theta:Q", tooltip=alt.Tooltip("theta:Q", title="true θ"))


def _theta_axis(title: str) -> alt.X:
    scale = alt.Scale(domain=list(illustrative.BOUNDS), nice=False)
    return alt.X("theta:Q", title=title, scale=scale, axis=alt.Axis(values=[-2, -1, 0, 1, 2], format="d"))


def _x_axis() -> alt.Y:
    return alt.Y("x:Q", title="x", scale=alt.Scale(domain=[0, 1], nice=False))


def _value(ends: list[float], *, legend: bool) -> alt.Color:
    shown = alt.Legend(title="value", orient="right", gradientLength=HEIGHT - 40, tickCount=5) if legend else None
    return alt.Color("value:Q", scale=alt.Scale(domain=ends, scheme=SEQUENTIAL), legend=shown)
