"""What general discrepancy makes of the simulator's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vcal_dist.answers import Array, to_numpy
from vcal_dist.errors import ModelError
from vcal_dist.plots.naming import NUMBER, label, output_place, point, unit
from vcal_dist.plots.style import DATA, GAP, SERIES, rows, styled, titled
from vcal_dist.posterior import Posterior
from vcal_dist.prediction_kinds import What
from vcal_dist.warping import warp

if TYPE_CHECKING:
    import altair as alt

Z = 1.6448536269514722  # the standard normal's 95 % quantile
SHARES = (0.1, 0.5, 0.9)  # of the way through the bounds
POINTS = 60
DESIGN = 256  # values of t that tell which outputs the simulator gives
SIZE = {"width": 300, "height": 240}


def warping(
    posterior: Posterior, *, at: Sequence[Mapping[str, float]] | None = None, output: str | None = None
) -> alt.HConcatChart:
    """g(η, x) and ∂g/∂η against the simulator's output η, at three places x unless `at` names some."""
    import altair as alt

    problem = posterior.problem
    k = output_place(problem, output)
    variable, name = problem.outputs[k], problem.outputs[k].name
    places = _places(posterior, at)
    columns: dict[str, list[Any]] = {
        field: [] for field in ("place", "eta", "g", "g_low", "g_high", "slope", "slope_low", "slope_high", "seen")
    }
    for text, x in places:
        eta, low, high = _range(posterior, x, k)
        found = warp(posterior, np.tile(x, (POINTS, 1)), eta, name)
        columns["place"] += [text] * POINTS
        columns["eta"] += eta.tolist()
        columns["seen"] += [bool(low <= value <= high) for value in eta]
        for field, mean, sd in (("g", found.mean, found.sd), ("slope", found.slope, found.slope_sd)):
            columns[field] += mean.tolist()
            columns[f"{field}_low"] += (mean - Z * sd).tolist()
            columns[f"{field}_high"] += (mean + Z * sd).tolist()
    data = rows(**columns)
    ends = [min(columns["eta"]), max(columns["eta"])]
    texts = [text for text, _ in places]
    colour = alt.Color(
        "place:N",
        title=None,
        sort=texts,
        scale=alt.Scale(domain=texts, range=SERIES[: len(texts)]),
        legend=alt.Legend(columns=1, labelLimit=500),
    )
    abscissa = alt.X("eta:Q", title=f"simulator: {label(variable)}", scale=alt.Scale(domain=ends, nice=False))

    def panel(field: str, title: str, reference: Any) -> Any:
        base = alt.Chart(data)
        y = alt.Y(f"{field}:Q", title=title, scale=alt.Scale(zero=False))
        tips = [
            alt.Tooltip("place:N", title="at"),
            alt.Tooltip("eta:Q", title="simulator", format=NUMBER),
            alt.Tooltip(f"{field}:Q", title=title, format=NUMBER),
            alt.Tooltip(f"{field}_low:Q", title=f"90{GAP}% from", format=NUMBER),
            alt.Tooltip(f"{field}_high:Q", title="to", format=NUMBER),
        ]
        area = base.mark_area(opacity=0.15).encode(
            abscissa,
            alt.Y(f"{field}_low:Q", title=title, scale=alt.Scale(zero=False)),
            alt.Y2(f"{field}_high:Q"),
            colour,
        )
        line = base.mark_line(strokeWidth=1.2).encode(abscissa, y, colour)
        seen = base.mark_line(strokeWidth=3.2).encode(abscissa, y, colour).transform_filter(alt.datum.seen)
        points = base.mark_circle(opacity=0, size=60).encode(abscissa, y, tooltip=tips)
        return alt.layer(area, reference.encode(abscissa, y), line, seen, points).properties(**SIZE)

    identity = alt.Chart(rows(eta=ends, g=ends)).mark_line(color=DATA, strokeWidth=1, strokeDash=[4, 3])
    one = alt.Chart(rows(eta=ends, slope=[1, 1])).mark_line(color=DATA, strokeWidth=1, strokeDash=[4, 3])
    panels = panel("g", f"nature g: {label(variable)}", identity), panel("slope", "∂g/∂η", one)
    note = "mean and 90 % band; thick: where calibration puts the simulator; dashed: nature is the simulator"
    chart: alt.HConcatChart = styled(
        titled(alt.hconcat(*panels, spacing=30), f"Nature as a function of the simulator: {name}", note)
    )
    return chart


def _places(posterior: Posterior, at: Sequence[Mapping[str, float]] | None) -> list[tuple[str, Array]]:
    """Control inputs (d1,) with words for them."""
    problem = posterior.problem
    inputs = problem.control_inputs
    if at is None:
        low, high = np.array([v.bounds for v in inputs]).T
        places = [low + share * (high - low) for share in SHARES]
        if len(inputs) > 2:
            return [
                (f"{100 * share:.0f}{GAP}% of the way through all bounds", x)
                for share, x in zip(SHARES, places, strict=True)
            ]
        named: list[Mapping[str, float]] = [{v.name: value for v, value in zip(inputs, x, strict=True)} for x in places]
    else:
        if not at:
            raise ModelError("at names no place; give some, or leave it out")
        named, places = list(at), [point(problem, one) for one in at]
    units = {v.name: unit(v) for v in inputs}
    texts = [", ".join(f"{n} = {v:.4g} {units[n]}".strip() for n, v in one.items()) or "the middle" for one in named]
    return [
        (text if texts.count(text) == 1 else f"{i + 1}: {text}", x)
        for i, (text, x) in enumerate(zip(texts, places, strict=True))
    ]


def _range(posterior: Posterior, x: Array, k: int) -> tuple[Array, float, float]:
    """Values that the simulator may give at x, and the 90 % interval of those that it gives at θ."""
    prior = posterior.model.prior
    u = torch.quasirandom.SobolEngine(prior.dim, scramble=True, seed=0).draw(DESIGN, dtype=torch.float64)
    t = to_numpy(prior.theta(torch.special.ndtri(u.clamp(1e-6, 1 - 1e-6))))
    bounds = np.array(prior.bounds)
    t = np.clip(t, bounds[:, 0], bounds[:, 1])
    eta: What = "emulator_without_residual"  # what g warps
    before = posterior.predict(np.tile(x, (DESIGN, 1)), eta, t=t, draws=16).mean[:, k]
    samples = posterior.predict(x[None], eta, samples=DESIGN).samples
    assert samples is not None
    low, high = np.quantile(samples[:, 0, k], [0.05, 0.95]).tolist()
    start, end = np.quantile(before, [0.01, 0.99])
    start, end = min(start, low), max(end, high)
    if end <= start:
        start, end = start - 0.5, end + 0.5
    return np.linspace(start, end, POINTS), low, high
