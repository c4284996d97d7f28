"""What is known of two parameters at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from vcal_dist.answers import Answers, Array, to_numpy
from vcal_dist.errors import ModelError
from vcal_dist.plots.densities import axis_values, contraction, densities
from vcal_dist.plots.naming import NUMBER, label, place
from vcal_dist.plots.parameters import marginal
from vcal_dist.plots.style import DATA, POSTERIOR, PRIOR, TRUTH, rows, scale_of, styled, titled
from vcal_dist.priors import ThetaPrior
from vcal_dist.theta import ThetaPosterior

if TYPE_CHECKING:
    import altair as alt

MOST = 6  # parameters, unless they are chosen
GRID = 61  # of a joint density, in each direction
DRAWS = 8192  # that find correlations, and the level of a region
SHOWN = 300  # draws in a panel


def pairs(
    posterior: Answers,
    *,
    parameters: Sequence[str] | None = None,
    truth: Mapping[str, float] | None = None,
    seed: int = 0,
) -> alt.ConcatChart | alt.LayerChart:
    """Joint densities of parameters, two at a time: regions of 50 and 90 % below the diagonal, correlations above.

    Without `parameters` they are the six that calibration has told most of.
    """
    import altair as alt

    inputs, theta = posterior.problem.calibration_inputs, posterior.theta
    if parameters is None:
        chosen = sorted(np.argsort(-contraction(theta), kind="stable")[:MOST].tolist())
    else:
        chosen = [place(inputs, name, "parameter") for name in parameters]
        if not chosen or len(set(chosen)) < len(chosen):
            raise ModelError(
                f"parameters are {', '.join(parameters) or 'none'}; accepted: different ones, at least one"
            )
    truth = {inputs[place(inputs, name, "parameter")].name: value for name, value in (truth or {}).items()}
    if len(chosen) == 1:
        name = inputs[chosen[0]].name
        return marginal(posterior, name, truth=truth.get(name))
    size = 220 if len(chosen) == 2 else 150 if len(chosen) <= 4 else 112
    some = _of(theta, chosen)
    generator = torch.Generator(theta.means.device).manual_seed(seed)
    sampled = to_numpy(some.sample(DRAWS, generator))  # of these only: the inverses of some priors' CDFs are slow
    correlation = np.atleast_2d(np.corrcoef(sampled, rowvar=False))
    ranges = {j: axis_values(theta, j, truth.get(inputs[j].name))[1] for j in chosen}
    panels = []
    for row, i in enumerate(chosen):
        for column, j in enumerate(chosen):
            last, first = row == len(chosen) - 1, column == 0
            x = alt.X(
                "x:Q", title=label(inputs[j]) if last else None, axis=_axis(last, size), scale=scale_of(ranges[j])
            )
            y = alt.Y(
                "y:Q", title=label(inputs[i]) if first else None, axis=_axis(first, size), scale=scale_of(ranges[i])
            )
            at = [truth.get(inputs[k].name) for k in (j, i)]
            if i == j:
                panel = _diagonal(
                    theta, j, x, at[0], alt.Title(inputs[j].name, fontSize=11, anchor="middle", limit=size)
                )
            elif column < row:
                panel = _joint(_of(theta, (j, i)), sampled[:, [column, row]], (ranges[j], ranges[i]), (x, y), at)
            else:
                panel = _correlated(float(correlation[row, column]))
            panels.append(panel.properties(width=size, height=size))
    total = len(inputs)
    subtitle = "regions of 50 and 90 %; grey: the prior"
    if parameters is None and total > MOST:
        subtitle = f"the {MOST} of {total} parameters that calibration told most of; {subtitle}"
    chart: alt.ConcatChart = styled(
        titled(
            alt.concat(*panels, columns=len(chosen), spacing=6, align="each"), "Parameters two at a time", subtitle
        ).resolve_scale(x="independent", y="independent", color="independent")
    )
    return chart


def _axis(shown: bool, size: int) -> Any:
    import altair as alt

    return alt.Axis(
        labels=shown,
        ticks=shown,
        tickCount=3 if size >= 150 else 2,
        labelOverlap="greedy",
        labelSeparation=6,
        grid=True,
        titleLimit=size,
    )


def _diagonal(theta: ThetaPosterior, j: int, x: Any, truth: float | None, title: Any) -> Any:
    import altair as alt

    values = axis_values(theta, j, truth)[0]
    before, after = densities(theta, j, values)
    y = alt.Y("density:Q", axis=None)
    tips = [alt.Tooltip("x:Q", title=theta.prior.names[j], format=NUMBER)]
    layers: list[Any] = [
        alt.Chart(rows(x=values, density=after))
        .mark_area(color=POSTERIOR, opacity=0.35, line={"color": POSTERIOR})
        .encode(x, y),
        alt.Chart(rows(x=values, density=before)).mark_line(color=PRIOR).encode(x, y),
    ]
    if truth is not None:
        layers.append(alt.Chart(rows(x=[truth])).mark_rule(color=TRUTH, strokeWidth=1.5).encode(x, tooltip=tips))
    return alt.layer(*layers).properties(title=title)


def _joint(
    two: ThetaPosterior,
    draws: Array,
    ranges: Sequence[Sequence[float]],
    axes: tuple[Any, Any],
    truth: Sequence[float | None],
) -> Any:
    import altair as alt

    x, y = axes
    layers: list[Any] = []
    for level, opacity in ((0.9, 0.25), (0.5, 0.4)):
        region = _region(two, draws, ranges, level)
        parts = rows(
            x=np.concatenate([line[:, 0] for line in region]),
            y=np.concatenate([line[:, 1] for line in region]),
            part=np.repeat(np.arange(len(region)), [len(line) for line in region]),
            order=np.concatenate([np.arange(len(line)) for line in region]),
        )
        mark = alt.Chart(parts).mark_line(
            filled=True, fill=POSTERIOR, fillOpacity=opacity, stroke=POSTERIOR, strokeWidth=0.7, clip=True
        )
        layers.append(mark.encode(x, y, detail="part:N", order="order:Q"))
    shown = draws[:SHOWN]
    tips = [
        alt.Tooltip(f"{field}:Q", title=name, format=NUMBER) for field, name in zip("xy", two.prior.names, strict=True)
    ]
    points = alt.Chart(rows(x=shown[:, 0], y=shown[:, 1])).mark_circle(size=5, color=DATA, opacity=0.35, clip=True)
    layers.append(points.encode(x, y, tooltip=tips))
    for value, channel in zip(truth, axes, strict=True):
        if value is not None:
            field = channel.shorthand.partition(":")[0]
            layers.append(alt.Chart(rows(**{field: [value]})).mark_rule(color=TRUTH, strokeWidth=1).encode(channel))
    return alt.layer(*layers)


def _region(two: ThetaPosterior, draws: Array, ranges: Sequence[Sequence[float]], level: float) -> list[Array]:
    """Closed lines (n, 2) around the smallest region that holds a share `level` of the posterior of two parameters."""
    import contourpy

    least = float(np.quantile(to_numpy(two.log_density(torch.from_numpy(draws))), 1 - level))
    edges = []
    for (low, high), values in zip(ranges, draws.T, strict=True):
        margin = 0.1 * np.ptp(values)
        start, end = max(low, values.min() - margin), min(high, values.max() + margin)
        # At the middles of cells: an end of the support may have an infinite density.
        edges.append(np.concatenate([[start], np.linspace(start, end, 2 * GRID + 1)[1::2], [end]]))
    mesh = np.stack(np.meshgrid(edges[0][1:-1], edges[1][1:-1]), -1)  # (GRID, GRID, 2), rows along the second
    excess = np.clip(to_numpy(two.log_density(torch.from_numpy(mesh))) - least, -10, 10)
    # A border below the level closes lines that would leave the panel.
    excess = np.pad(np.nan_to_num(excess, nan=-10.0), 1, constant_values=-1e-3)
    generator = contourpy.contour_generator(edges[0], edges[1], excess, line_type=contourpy.LineType.Separate)
    lines = cast(list[Array], generator.lines(0.0))
    return lines or [np.full((1, 2), np.nan)]


def _of(theta: ThetaPosterior, chosen: Sequence[int]) -> ThetaPosterior:
    """The joint posterior of some parameters, all others integrated out."""
    some, prior = list(chosen), theta.prior
    names = [prior.names[j] for j in some]
    part = ThetaPrior([prior.priors[j] for j in some], [prior.bounds[j] for j in some], names)
    covariances: Tensor = theta.covariances[:, some][:, :, some]
    return ThetaPosterior(part, theta.means[:, some], covariances, theta.log_weights)


def _correlated(value: float) -> Any:
    import altair as alt

    colour = TRUTH if abs(value) > 0.8 else DATA
    text = alt.Chart(rows(text=[f"{value:+.2f}"], x=[0], y=[0])).mark_text(fontSize=11 + 6 * abs(value), color=colour)
    none = alt.Axis(labels=False, ticks=False, grid=False, domain=False)
    scale = alt.Scale(domain=[-1, 1])
    return text.encode(
        alt.X("x:Q", axis=none, title=None, scale=scale),
        alt.Y("y:Q", axis=none, title=None, scale=scale),
        text="text:N",
    )
