"""Known values beside their predictions: how near they are, what is left over, and whether the intervals are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from vcal_dist.answers import Answers, Array
from vcal_dist.assessment import Judged
from vcal_dist.errors import ModelError
from vcal_dist.plots.naming import NUMBER, counted, label, output_place
from vcal_dist.plots.style import DATA, GAP, OTHER, POSTERIOR, PRIOR, SEQUENTIAL, rows, scale_of, single

if TYPE_CHECKING:
    import altair as alt

MOST_POINTS = 3000  # more are counted in cells
CELLS = 60  # in each direction
MOST_BARS = 300  # points whose intervals are wholly in sight
TREND_ROWS = 60  # residuals from which their mean is drawn too
INSIDE = f"inside 90{GAP}%"
METHODS = {
    "held out": "rows that training did not see",
    "cross-validation": "each run predicted by emulators that did not see it",
    "leave one out": "each row predicted from all others",
}


def observed(posterior: Answers, judged: Judged, *, output: str | None = None) -> alt.LayerChart:
    """Predictions of observations with their 90 % intervals against what was observed."""
    return _against(posterior, judged, output, "observed", "Predicted and observed")


def emulator(posterior: Answers, judged_runs: Judged, *, output: str | None = None) -> alt.LayerChart:
    """The emulator's predictions of runs against what the simulator gave."""
    return _against(posterior, judged_runs, output, "simulated", "Emulator and simulator")


def residuals(
    posterior: Answers, judged: Judged, *, output: str | None = None, against: str | None = None
) -> alt.LayerChart:
    """What predictions leave over, in their standard deviations, against them or an input."""
    import altair as alt

    k, variable, known = known_rows(posterior, judged, output)
    name, values = _abscissa(posterior, judged, k, against)
    with np.errstate(all="ignore"):  # a prediction without a spread has no residual
        left = (judged.y[:, k] - judged.mean[:, k]) / judged.sd[:, k]
    count = int(known.sum())
    known = known & np.isfinite(left)
    if not known.any():
        raise ModelError(
            f"of {count:,} predictions none has a spread, without which '{variable.name}' has no residuals; "
            "there is nothing to draw: leave it out"
        )
    lost = count - int(known.sum())
    values, left = values[known], left[known]
    reliable = _reliable(judged, known)
    ends = _padded(values[reliable])
    reach = max(3.0, float(np.abs(left[reliable]).max()) * 1.05)
    x = alt.X("x:Q", title=name, scale=scale_of(ends))
    y = alt.Y("y:Q", title="residual (standard deviations)", scale=scale_of([-reach, reach]))
    limits = alt.Chart(rows(y=[-1.645, 1.645])).mark_rule(color=PRIOR, strokeDash=[4, 3]).encode(y)
    zero = alt.Chart(rows(y=[0])).mark_rule(color=DATA, strokeWidth=1).encode(y)
    layers: list[Any] = [limits, zero]
    if len(left) > MOST_POINTS:
        layers.insert(0, _cells(values, left, x, y, [ends, [-reach, reach]]))
    else:
        table = rows(
            x=values, y=left, kind=_kinds(judged, k, known), known=judged.y[known, k], mean=judged.mean[known, k]
        )
        tips = [
            alt.Tooltip("x:Q", title=name, format=NUMBER),
            alt.Tooltip("y:Q", title="residual", format=".2f"),
            alt.Tooltip("known:Q", title=label(variable), format=NUMBER),
            alt.Tooltip("mean:Q", title="predicted", format=NUMBER),
        ]
        mark = alt.Chart(table).mark_circle(size=_size(len(left)), opacity=0.6, clip=True)
        layers.append(mark.encode(x, y, _colour(judged, known), tooltip=tips))
    if len(left) >= TREND_ROWS:
        centres, means = _trend(values, left)
        trend = alt.Chart(rows(x=centres, y=means)).mark_line(color=OTHER, strokeWidth=2.2, interpolate="monotone")
        layers.append(trend.encode(x, y))
    parts = [METHODS[judged.method], "dashed: where 90 % should lie"]
    parts += ["line: their mean"] if len(left) >= TREND_ROWS else []
    without = f"left out: {counted(lost, 'prediction')} without a spread" if lost else ""
    whose = "Residuals" if judged.t is None else "The emulator's residuals"
    title = f"{whose} of {variable.name} against {'predictions' if against is None else against}"
    return single(layers, title, "; ".join(parts), doubts(judged, k), without)


def coverage(posterior: Answers, judged: Judged, *, output: str | None = None) -> alt.LayerChart:
    """The share of known values inside central intervals of every level, with the band that chance explains."""
    import altair as alt
    from scipy import stats

    k, variable, known = known_rows(posterior, judged, output)
    distance = 2 * np.abs(judged.pit[known, k] - 0.5)  # the level from which an interval holds the value
    count, levels = len(distance), np.arange(1, 100) / 100
    share = (distance[:, None] <= levels).mean(0)
    low, high = (stats.binom.ppf(p, count, levels) / count for p in (0.025, 0.975))
    data = rows(level=levels, share=share, low=low, high=high)
    scale = alt.Scale(domain=[0, 1], nice=False)
    percent = alt.Axis(format=".0%")
    x = alt.X("level:Q", title="level of the interval", scale=scale, axis=percent)
    # On every layer: one without a title hides that of the others.
    ordinate: dict[str, Any] = {"title": "share of values inside", "scale": scale, "axis": percent}
    y = alt.Y("share:Q", **ordinate)
    tips = [
        alt.Tooltip("level:Q", title="level", format=".0%"),
        alt.Tooltip("share:Q", title="share inside", format=".1%"),
        alt.Tooltip("low:Q", title="chance explains from", format=".1%"),
        alt.Tooltip("high:Q", title="to", format=".1%"),
    ]
    base = alt.Chart(data)
    chance = base.mark_area(color=PRIOR, opacity=0.3).encode(x, alt.Y("low:Q", **ordinate), alt.Y2("high:Q"))
    ideal = (
        alt.Chart(rows(level=[0, 1], share=[0, 1])).mark_line(color=DATA, strokeWidth=1, strokeDash=[4, 3]).encode(x, y)
    )
    line = base.mark_line(color=POSTERIOR, strokeWidth=2.2).encode(x, y)
    points = base.mark_circle(color=POSTERIOR, opacity=0, size=80).encode(x, y, tooltip=tips)
    at_90 = float(share[89])
    parts = [
        METHODS[judged.method],
        f"{100 * at_90:.0f} % of {counted(count, 'value')} in 90 % intervals; grey: what chance explains",
    ]
    return single([chance, ideal, line, points], f"Coverage of {variable.name}", *parts, doubts(judged, k))


# --- what they share --------------------------------------------------------------------------------------------------


def _against(posterior: Answers, judged: Judged, output: str | None, source: str, title: str) -> alt.LayerChart:
    import altair as alt

    k, variable, known = known_rows(posterior, judged, output)
    y, mean, low, high = (part[known, k] for part in (judged.y, judged.mean, judged.low, judged.high))
    inside = _inside(judged, k)[known]
    many, reliable = len(y) > MOST_POINTS, _reliable(judged, known)
    extent = np.concatenate([y, *(part[reliable] for part in ([mean] if len(y) > MOST_BARS else [low, high]))])
    logarithmic = not many and bool(min(low.min(), y.min()) > 0) and np.ptp(np.log10(np.quantile(y, [0.05, 0.95]))) > 2
    ends = (10 ** np.array(_padded(np.log10(extent)))).tolist() if logarithmic else _padded(extent)
    scale = scale_of(ends, type="log" if logarithmic else "linear")
    x = alt.X("known:Q", title=f"{source} {label(variable)}", scale=scale)
    name = f"predicted {label(variable)}"
    ordinate = alt.Y("mean:Q", title=name, scale=scale)
    identity = alt.Chart(rows(known=ends, mean=ends)).mark_line(color=DATA, strokeWidth=1, strokeDash=[4, 3])
    parts = [METHODS[judged.method], f"{100 * inside.mean():.0f} % of {counted(len(y), 'value')} in 90 % intervals"]
    parts.append(doubts(judged, k))
    if many:
        return single(
            [_cells(y, mean, x, ordinate, [ends, ends]), identity.encode(x, ordinate)],
            f"{title}: {variable.name}",
            *parts,
        )
    data = rows(known=y, mean=mean, low=low, high=high, kind=_kinds(judged, k, known))
    tips = [
        alt.Tooltip("known:Q", title=source, format=NUMBER),
        alt.Tooltip("mean:Q", title="predicted", format=NUMBER),
        alt.Tooltip("low:Q", title=f"90{GAP}% interval from", format=NUMBER),
        alt.Tooltip("high:Q", title="to", format=NUMBER),
    ]
    tips.append(alt.Tooltip("kind:N", title="it lies"))
    base = alt.Chart(data)
    bars = base.mark_rule(strokeWidth=1, opacity=0.5 if len(y) <= MOST_BARS else 0.15, clip=True)
    points = base.mark_circle(size=_size(len(y)), opacity=0.8, clip=True)
    layers: list[Any] = [
        identity.encode(x, ordinate),
        bars.encode(x, alt.Y("low:Q", scale=scale, title=name), alt.Y2("high:Q"), _colour(judged, known)),
        points.encode(x, ordinate, _colour(judged, known), tooltip=tips),
    ]
    return single(layers, f"{title}: {variable.name}", *parts)


def known_rows(posterior: Answers, judged: Judged, output: str | None) -> tuple[int, Any, Any]:
    """Place and description of an output, and the rows that know it and have a prediction of it."""
    k = output_place(posterior.problem, output)
    variable = posterior.problem.outputs[k]
    known = np.isfinite(judged.y[:, k]) & np.isfinite(judged.mean[:, k])
    if not known.any():
        raise ModelError(
            f"of {len(known)} rows none knows the output '{variable.name}' and has a prediction of it; there is "
            "nothing to draw: leave it out, or judge rows that training did not see"
        )
    return k, variable, known


def _inside(judged: Judged, k: int) -> Any:
    with np.errstate(invalid="ignore"):
        return (judged.y[:, k] >= judged.low[:, k]) & (judged.y[:, k] <= judged.high[:, k])


def _reliable(judged: Judged, known: Any) -> Any:
    """Which of the known rows tell what a chart's axes should show."""
    reliable = ~judged.unreliable[known]
    return reliable if reliable.any() else np.ones_like(reliable)


def doubts(judged: Judged, k: int) -> str:
    """What to say of rows that cannot well be left out; nothing if there are none."""
    known = np.isfinite(judged.y[:, k])
    lost = int((known & np.isnan(judged.mean[:, k])).sum())
    doubtful = int((known & judged.unreliable).sum()) - lost
    parts = [f"left out: {counted(lost, 'row')} without a prediction"] if lost else []
    parts += [f"unreliable (k̂ above 0.7): {counted(doubtful, 'prediction')}"] if doubtful else []
    return "; ".join(parts)


def _abscissa(posterior: Answers, judged: Judged, k: int, against: str | None) -> tuple[str, Array]:
    problem = posterior.problem
    if against is None:
        return f"predicted {label(problem.outputs[k])}", judged.mean[:, k]
    columns = [(v, judged.x[:, j]) for j, v in enumerate(problem.control_inputs)]
    if judged.t is not None:
        columns += [(v, judged.t[:, j]) for j, v in enumerate(problem.calibration_inputs)]
    for variable, values in columns:
        if variable.name == against:
            return label(variable), values
    raise ModelError(f"unknown input '{against}'; accepted: {', '.join(v.name for v, _ in columns)}")


def _trend(values: Array, left: Array) -> tuple[Array, Array]:
    """Means of residuals in bins of as many rows each."""
    order = np.argsort(values, kind="stable")
    bins = np.array_split(order, max(4, min(10, len(order) // 50)))
    return np.array([values[part].mean() for part in bins]), np.array([left[part].mean() for part in bins])


def _cells(values: Array, others: Array, x: Any, y: Any, ends: list[list[float]]) -> Any:
    """Counts of points in cells of the plane."""
    import altair as alt

    counts, *edges = np.histogram2d(values, others, bins=CELLS, range=ends)
    i, j = np.nonzero(counts)
    fields = [channel.shorthand.partition(":")[0] for channel in (x, y)]
    columns = {fields[0]: edges[0][i], fields[1]: edges[1][j], "x_end": edges[0][i + 1], "y_end": edges[1][j + 1]}
    data = rows(**columns, count=counts[i, j].astype(int))
    colour = alt.Color("count:Q", title="rows", scale=alt.Scale(scheme=SEQUENTIAL, type="log", reverse=True))
    tips = [alt.Tooltip("count:Q", title="rows")]
    return alt.Chart(data).mark_rect().encode(x, y, alt.X2("x_end"), alt.Y2("y_end"), colour, tooltip=tips)


def _kinds(judged: Judged, k: int, known: Any) -> Any:
    kinds = np.where(_inside(judged, k), INSIDE, "outside")
    return np.where(judged.unreliable, "unreliable", kinds)[known]


def _colour(judged: Judged, known: Any) -> Any:
    import altair as alt

    count = 3 if judged.unreliable[known].any() else 2
    kinds, colours = [INSIDE, "outside", "unreliable"], [POSTERIOR, OTHER, PRIOR]
    scale = alt.Scale(domain=kinds[:count], range=colours[:count])
    return alt.Color("kind:N", title=None, scale=scale)


def _size(count: int) -> int:
    return 45 if count <= 100 else 25 if count <= 500 else 12


def _padded(values: Array) -> list[float]:
    """The range of values with a little room on both sides."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    room = 0.03 * (high - low) or 0.5 * abs(high) or 1.0
    return [low - room, high + room]
