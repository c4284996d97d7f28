"""Charts of a simulation-based calibration: one parameter's assessment over all replicates, in four ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vcal_dist.errors import ModelError
from vcal_dist.plots.naming import counted
from vcal_dist.plots.style import DATA, POSTERIOR, PRIOR, rows, scale_of, single
from vcal_dist.sbc import BAND, TOGETHER, Assessment, Banded

if TYPE_CHECKING:
    import altair as alt

LEAST_REACH = 3.0  # of z, in standard deviations, that a chart shows


def rank_histogram(assessment: Assessment) -> alt.LayerChart:
    """How many truths lie where in their posteriors: flat if these are right, a ∪ if too narrow, a ∩ if too wide."""
    import altair as alt

    found = assessment.histogram
    half = 0.5 / len(found.at)
    left, right = (np.asarray(found.at) + sign * half for sign in (-1, 1))
    data = rows(left=left, right=right, count=found.value, low=found.low, high=found.high)
    x = alt.X("left:Q", title="rank of the truth in its posterior", scale=scale_of([0, 1]), axis=_percent())
    top = 1.05 * max(*found.value, *found.high)
    ordinate: dict[str, Any] = {"title": "replicates", "scale": scale_of([0, top])}
    tips = [
        alt.Tooltip("left:Q", title="from", format=".0%"),
        alt.Tooltip("right:Q", title="to", format=".0%"),
        alt.Tooltip("count:Q", title="replicates"),
        alt.Tooltip("low:Q", title="chance explains from"),
        alt.Tooltip("high:Q", title="to"),
    ]
    base = alt.Chart(data)
    bars = base.mark_rect(color=POSTERIOR, opacity=0.75, stroke="white").encode(
        x, alt.Y("count:Q", **ordinate), alt.X2("right"), y2=alt.datum(0), tooltip=tips
    )
    chance = base.mark_rect(color=PRIOR, opacity=0.35).encode(
        x, alt.Y("low:Q", **ordinate), alt.X2("right"), alt.Y2("high")
    )
    even = alt.Chart(rows(count=[assessment.replicates / len(found.at)]))
    ideal = even.mark_rule(color=DATA, strokeWidth=1, strokeDash=[4, 3]).encode(alt.Y("count:Q", **ordinate))
    note = f"{counted(assessment.replicates, 'replicate')}; grey: where a bar ends by chance, with {100 * BAND:.0f} %"
    return single([bars, chance, ideal], f"Ranks of {assessment.name}", note)


def ecdf_difference(assessment: Assessment) -> alt.LayerChart:
    """The ECDF of ranks less that of uniform ones, in a band that holds the whole of it."""
    import altair as alt

    found = assessment.ecdf
    reach = 1.05 * max(abs(value) for value in (*found.value, *found.low, *found.high))
    x = alt.X("at:Q", title="rank of the truth in its posterior", scale=scale_of([0, 1]), axis=_percent())
    ordinate: dict[str, Any] = {"title": "share up to it, less the rank", "scale": scale_of([-reach, reach])}
    band, line, points = _in_band(found, x, ordinate)
    zero = alt.Chart(rows(value=[0.0])).mark_rule(color=DATA, strokeWidth=1, strokeDash=[4, 3])
    note = f"grey: where all of the line stays by chance, with {100 * TOGETHER:.0f} %"
    return single(
        [band, zero.encode(alt.Y("value:Q", **ordinate)), line, points],
        f"ECDF of the ranks of {assessment.name}",
        f"{note}; that it strays as far has p = {assessment.tests['shape']:.2g}",
    )


def coverage_curve(assessment: Assessment) -> alt.LayerChart:
    """The share of truths inside central intervals of every level."""
    import altair as alt

    found = assessment.curve
    scale, percent = scale_of([0, 1]), _percent()
    x = alt.X("at:Q", title="level of the interval", scale=scale, axis=percent)
    ordinate: dict[str, Any] = {"title": "share of truths inside", "scale": scale, "axis": percent}
    band, line, points = _in_band(found, x, ordinate)
    ideal = alt.Chart(rows(at=[0, 1], value=[0, 1])).mark_line(color=DATA, strokeWidth=1, strokeDash=[4, 3])
    told = dict(zip(assessment.coverage.at, assessment.coverage.value, strict=True))
    note = f"{100 * told[0.9]:.0f} % of {counted(assessment.replicates, 'truth')} in 90 % intervals"
    return single(
        [band, ideal.encode(x, alt.Y("value:Q", **ordinate)), line, points],
        f"Coverage of {assessment.name}",
        f"{note}; grey: what chance explains, all along the line",
    )


def contraction(assessment: Assessment) -> alt.LayerChart:
    """How far each posterior's mean is from its truth, against how much of the prior's variance the data took away."""
    import altair as alt

    if not assessment.contraction:
        raise ModelError(f"of '{assessment.name}' only PIT values are known; its contraction cannot be drawn")
    gained, z = np.array(assessment.contraction), np.array(assessment.z)
    reach = max(LEAST_REACH, 1.05 * float(np.abs(z[np.isfinite(z)]).max(initial=0.0)))
    least = min(0.0, float(gained[np.isfinite(gained)].min(initial=0.0)))
    x = alt.X("gained:Q", title="contraction", scale=scale_of([least, 1]), axis=_percent())
    y = alt.Y("z:Q", title="(mean − truth)/sd", scale=scale_of([-reach, reach]))
    tips = [alt.Tooltip("gained:Q", title="contraction", format=".1%"), alt.Tooltip("z:Q", format=".2f")]
    points = alt.Chart(rows(gained=gained, z=z)).mark_circle(color=POSTERIOR, opacity=0.6, size=35)
    zero = alt.Chart(rows(z=[0.0])).mark_rule(color=DATA, strokeWidth=1, strokeDash=[4, 3]).encode(y)
    note = "contraction: the share of the prior’s variance that the data took away"
    return single([zero, points.encode(x, y, tooltip=tips)], f"Means and truths of {assessment.name}", note)


def _in_band(found: Banded, x: Any, ordinate: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A line that goes up in steps, the band around it, and what the pointer shows."""
    import altair as alt

    base = alt.Chart(rows(at=found.at, value=found.value, low=found.low, high=found.high))
    y = alt.Y("value:Q", **ordinate)
    tips = [
        alt.Tooltip("at:Q", title="at", format=".0%"),
        alt.Tooltip("value:Q", title="found", format=".3f"),
        alt.Tooltip("low:Q", title="chance explains from", format=".3f"),
        alt.Tooltip("high:Q", title="to", format=".3f"),
    ]
    band = base.mark_area(color=PRIOR, opacity=0.3).encode(x, alt.Y("low:Q", **ordinate), alt.Y2("high:Q"))
    line = base.mark_line(color=POSTERIOR, strokeWidth=2.2).encode(x, y)
    return band, line, base.mark_circle(color=POSTERIOR, opacity=0, size=80).encode(x, y, tooltip=tips)


def _percent() -> alt.Axis:
    import altair as alt

    return alt.Axis(format=".0%")
