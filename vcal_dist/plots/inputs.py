"""Where among its inputs the emulator is weak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vcal_dist.answers import Answers
from vcal_dist.assessment import Judged
from vcal_dist.errors import ModelError
from vcal_dist.plots.naming import NUMBER, counted, label, unit
from vcal_dist.plots.predictions import doubts, known_rows
from vcal_dist.plots.style import OTHER, POSTERIOR, rows, styled, titled

if TYPE_CHECKING:
    import altair as alt

BINS = 10
COLUMNS = 4


def emulator_errors(posterior: Answers, judged_runs: Judged, *, output: str | None = None) -> alt.FacetChart:
    """The emulator's root mean square error in bins of every control and calibration input."""
    import altair as alt

    problem = posterior.problem
    t = judged_runs.t
    if t is None:
        raise ModelError("these rows have no calibration inputs: they are observations; judge runs with `judge_runs`")
    k, variable, known = known_rows(posterior, judged_runs, output)
    squares = np.square(judged_runs.y[known, k] - judged_runs.mean[known, k])
    inputs = (*problem.control_inputs, *problem.calibration_inputs)
    values = np.concatenate([judged_runs.x[known], t[known]], 1)
    columns: dict[str, list[Any]] = {name: [] for name in ("input", "start", "end", "rmse", "count")}
    for v, column in zip(inputs, values.T, strict=True):
        counts, edges = np.histogram(column, BINS, range=v.bounds)
        sums, _ = np.histogram(column, BINS, range=v.bounds, weights=squares)
        filled = counts > 0
        columns["input"] += [label(v)] * int(filled.sum())
        columns["start"] += edges[:-1][filled].tolist()
        columns["end"] += edges[1:][filled].tolist()
        columns["rmse"] += np.sqrt(sums[filled] / counts[filled]).tolist()
        columns["count"] += counts[filled].tolist()
    overall = float(np.sqrt(squares.mean()))
    x = alt.X("start:Q", title=None, axis=alt.Axis(tickCount=3, grid=False), scale=alt.Scale(nice=False, zero=False))
    y = alt.Y("rmse:Q", title=f"RMSE ({unit(variable)})" if unit(variable) else "RMSE", axis=alt.Axis(tickCount=4))
    tips = [
        alt.Tooltip("start:Q", title="from", format=NUMBER),
        alt.Tooltip("end:Q", title="to", format=NUMBER),
        alt.Tooltip("rmse:Q", title="RMSE", format=NUMBER),
        alt.Tooltip("count:Q", title="runs"),
    ]
    bars = alt.Chart().mark_rect(color=POSTERIOR, opacity=0.75).encode(
        x, y, alt.X2("end"), alt.Y2Datum(0), tooltip=tips
    )  # fmt: skip
    mean = alt.Chart().mark_rule(color=OTHER, strokeDash=[4, 3]).encode(alt.YDatum(overall))
    labels = list(dict.fromkeys(columns["input"]))
    facet = alt.Facet("input:N", title=None, sort=labels, header=alt.Header(labelLimit=150))
    panels = alt.layer(bars, mean, data=rows(**columns)).properties(width=150, height=90)
    whole = panels.facet(facet, columns=min(COLUMNS, len(labels))).resolve_scale(x="independent")
    note = f"{counted(int(known.sum()), 'run')}; dashed: over all of them, {overall:.3g}"
    chart: alt.FacetChart = styled(
        titled(whole, f"The emulator's error by input: {variable.name}", note, doubts(judged_runs, k))
    )
    return chart
