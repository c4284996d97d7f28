"""Functions of the control inputs: the process and what it is made of, along one or two of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vcal_dist.answers import Answers, Array
from vcal_dist.errors import ModelError
from vcal_dist.mixed import Averaged
from vcal_dist.plots.naming import NUMBER, label, output_place, place, point, where
from vcal_dist.plots.style import (
    DATA,
    GAP,
    HEIGHT,
    OTHER,
    POSTERIOR,
    PRIOR,
    hover,
    rows,
    scale_of,
    single,
    styled,
    titled,
)
from vcal_dist.posterior import Posterior
from vcal_dist.prediction_kinds import What
from vcal_dist.predictive import is_affine

if TYPE_CHECKING:
    import altair as alt

POINTS = 81  # of a line
GRID = 30  # of a map, in each direction
SAMPLES = 1000  # functions that find quantiles
MAP_SAMPLES = 400  # of a map, which has more points
OUTCOMES = 2000  # values with residual or noise that do
NOISES = 20  # of each function, where residual and noise are the same everywhere
SHOWN = 6  # functions that are drawn
# Vega's "blueorange", and what is left of it where the sign is not sure.
DIVERGING = [
    "#134b85", "#2f78b3", "#5da2cb", "#9dcae1", "#d2e5ef", "#f2f0eb", "#fce0ba", "#fbbf74", "#e8932f", "#c5690d",
    "#994a07",
]  # fmt: skip
STRENGTH = 0.25  # of a pale colour
NEW = "to be observed"  # short: a chart may be a third of a page wide
MOST_OBSERVATIONS = 2000


def process(
    posterior: Answers,
    *,
    along: str,
    output: str | None = None,
    at: Mapping[str, float] | None = None,
    x: ArrayLike | None = None,
    y: ArrayLike | None = None,
) -> alt.LayerChart:
    """The process f along one control input, the others at `at` or in the middle of their bounds.

    Mean, 90 % bands of the process (with the emulator's residual) and of new observations, some functions that f may be
    (without it: they are smooth), and the emulator at θ by itself. Observations x (B, d1), y (B, K) are drawn where
    there is no other control input.
    """
    import altair as alt

    problem, k = posterior.problem, output_place(posterior.problem, output)
    grid, values, others = _line(posterior, along, at)
    functions = _band(posterior, grid, "process_without_residual", k).samples
    f, outcome = (_around(posterior, grid, what, functions, k) for what in ("process", "observation"))
    eta = posterior.predict(grid, "emulator").mean[:, k]
    kinds = ["process", NEW, "emulator alone"]
    colours = [POSTERIOR, PRIOR, OTHER]
    shown, note = _observations(posterior, k, x, y)
    if shown is not None:
        kinds, colours = [*kinds, "observed"], [*colours, DATA]
    colour = alt.Color("kind:N", title=None, scale=alt.Scale(domain=kinds, range=colours))
    abscissa = _x(posterior, along)
    name = label(problem.outputs[k])
    layers: list[Any] = [
        _area(values, outcome, NEW, abscissa, name, colour, 0.3),
        _area(values, f, "process", abscissa, name, colour, 0.3),
        _functions(values, functions, abscissa, name),
        _mean(values, eta, "emulator alone", abscissa, name, colour, dash=True),
        _mean(values, f.mean, "process", abscissa, name, colour),
    ]
    if shown is not None:
        mark = alt.Chart(rows(value=shown[0], y=shown[1], kind=["observed"] * len(shown[0])))
        tips = [alt.Tooltip("value:Q", title=along, format=NUMBER), alt.Tooltip("y:Q", title=name, format=NUMBER)]
        points = mark.mark_circle(size=30 if len(shown[0]) <= 200 else 10, opacity=0.7)
        layers.append(points.encode(abscissa, alt.Y("y:Q", title=name), colour, tooltip=tips))
    tips = [
        alt.Tooltip("value:Q", title=along, format=NUMBER),
        alt.Tooltip("mean:Q", title="process", format=NUMBER),
        alt.Tooltip("low:Q", title=f"90{GAP}% from", format=NUMBER),
        alt.Tooltip("high:Q", title="to", format=NUMBER),
        alt.Tooltip("eta:Q", title="emulator alone", format=NUMBER),
    ]
    layers.append(hover(rows(value=values, mean=f.mean, low=f.low, high=f.high, eta=eta), abscissa, tips))
    shows = "means, 90 % bands and some possible processes without the emulator's residual (thin)"
    return single(layers, f"{problem.outputs[k].name} along {along}", shows, others, note)


def discrepancy(
    posterior: Answers, *, along: str, output: str | None = None, at: Mapping[str, float] | None = None
) -> alt.LayerChart:
    """What the process adds to the emulator along one control input: mean, 90 % band and some functions."""
    import altair as alt

    problem, k = posterior.problem, output_place(posterior.problem, output)
    grid, values, others = _line(posterior, along, at)
    delta = _band(posterior, grid, "discrepancy", k)
    abscissa, name = _x(posterior, along), f"discrepancy of {label(problem.outputs[k])}"
    colour = alt.value(POSTERIOR)
    tips = [
        alt.Tooltip("value:Q", title=along, format=NUMBER),
        alt.Tooltip("mean:Q", title="discrepancy", format=NUMBER),
        alt.Tooltip("low:Q", title=f"90{GAP}% from", format=NUMBER),
        alt.Tooltip("high:Q", title="to", format=NUMBER),
    ]
    layers = [
        _area(values, delta, "", abscissa, name, colour, 0.25),
        alt.Chart(rows(y=[0])).mark_rule(color=DATA, strokeWidth=1, strokeDash=[4, 3]).encode(alt.Y("y:Q", title=name)),
        _functions(values, delta.samples, abscissa, name),
        _mean(values, delta.mean, "", abscissa, name, colour),
        hover(rows(value=values, mean=delta.mean, low=delta.low, high=delta.high), abscissa, tips),
    ]
    title = f"Discrepancy of {problem.outputs[k].name} along {along}"
    return single(layers, title, "mean, 90 % band and some possible discrepancies (thin)", others)


def discrepancy_map(
    posterior: Answers, *, along: tuple[str, str], output: str | None = None, at: Mapping[str, float] | None = None
) -> alt.LayerChart:
    """The discrepancy's mean over two control inputs, pale where zero lies inside its 90 % band."""
    import altair as alt

    problem, k = posterior.problem, output_place(posterior.problem, output)
    inputs = problem.control_inputs
    i, j = (place(inputs, name, "control input") for name in along)
    if i == j:
        raise ModelError(f"along names '{along[0]}' twice; accepted: two different control inputs")
    fixed = _fixed(posterior, along, at)
    edges = [np.linspace(*inputs[n].bounds, GRID + 1) for n in (i, j)]
    cells = np.stack(np.meshgrid(np.arange(GRID), np.arange(GRID), indexing="ij"), -1).reshape(-1, 2)
    grid = np.tile(fixed, (len(cells), 1))
    for n, place_ in enumerate((i, j)):
        middles = (edges[n][1:] + edges[n][:-1]) / 2
        grid[:, place_] = middles[cells[:, n]]
    band = _band(posterior, grid, "discrepancy", k, MAP_SAMPLES)
    mean, sure = band.mean, (band.low > 0) | (band.high < 0)
    largest = float(np.abs(mean).max()) or 1.0
    # Cells overlap a little: where they only touch, the background shines through.
    ends = [edge + 0.1 * (edge[1] - edge[0]) for edge in edges]
    columns = {
        "x": edges[0][cells[:, 0]], "x_end": ends[0][cells[:, 0] + 1], "y": edges[1][cells[:, 1]],
        "y_end": ends[1][cells[:, 1] + 1], "mean": mean, "low": band.low, "high": band.high, "u": grid[:, i],
        "v": grid[:, j],
    }  # fmt: skip
    tips = [
        alt.Tooltip("u:Q", title=along[0], format=NUMBER),
        alt.Tooltip("v:Q", title=along[1], format=NUMBER),
        alt.Tooltip("mean:Q", title="discrepancy", format=NUMBER),
        alt.Tooltip("low:Q", title=f"90{GAP}% from", format=NUMBER),
        alt.Tooltip("high:Q", title="to", format=NUMBER),
    ]
    x, y = (
        channel(f"{field}:Q", title=label(inputs[n]), scale=scale_of(inputs[n].bounds))
        for channel, field, n in ((alt.X, "x", i), (alt.Y, "y", j))
    )

    def layer(some: Any, colours: list[str], legend: Any) -> Any:
        scale = alt.Scale(domain=[-largest, largest], range=colours)
        colour = alt.Color("mean:Q", title=label(problem.outputs[k]), scale=scale, legend=legend)
        mark = alt.Chart(rows(**{field: values[some] for field, values in columns.items()})).mark_rect(clip=True)
        return mark.encode(x, y, alt.X2("x_end"), alt.Y2("y_end"), colour, tooltip=tips)

    # Opacity would show where cells overlap.
    pale = layer(~sure, [_mixed_with_white(colour) for colour in DIVERGING], None)
    strong = layer(sure, DIVERGING, alt.Legend(orient="right"))
    chart = alt.layer(pale, strong).resolve_scale(color="independent")
    title = f"Mean discrepancy of {problem.outputs[k].name}"
    size = {"width": "container", "height": HEIGHT}
    whole: alt.LayerChart = styled(titled(chart, title, _sureness(sure), _others(posterior, along, fixed, at), **size))
    return whole


def _sureness(sure: Any) -> str:
    """What a map's pale cells say, and how many they are."""
    if not sure.any():
        return "pale: zero lies inside the 90 % band, here everywhere, so not even the sign is sure"
    if sure.all():
        return "zero lies outside the 90 % band everywhere: the sign is sure"
    return f"pale: zero lies inside the 90 % band, so the sign is not sure ({100 * np.mean(~sure):.0f} % of the map)"


def _mixed_with_white(colour: str) -> str:
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - STRENGTH * (255 - part)):02x}" for part in parts)


# --- numbers ----------------------------------------------------------------------------------------------------------


class Band(NamedTuple):
    """A function of one output along a line of G points."""

    mean: Array  # (G,)
    low: Array
    high: Array
    samples: Array  # (S, G)


def _band(posterior: Answers, grid: Array, what: What, k: int, samples: int = SAMPLES) -> Band:
    """Mean and quantiles of 5 and 95 %."""
    found = posterior.predict(grid, what, samples=samples)
    assert found.samples is not None
    return _of_draws(found.mean[:, k], found.samples[:, :, k])


def _of_draws(mean: Array, draws: Array) -> Band:
    # Values that were drawn, not between them: counts stay counts.
    low, high = np.quantile(draws, [0.05, 0.95], axis=0, method="inverted_cdf")
    return Band(mean, low, high, draws)


def _around(posterior: Answers, grid: Array, what: What, functions: Array, k: int) -> Band:
    """What has a residual, or noise too, around functions (S, G) of `process_without_residual`."""
    if not _is_even(posterior):
        return _band(posterior, grid, what, k, OUTCOMES)
    mean = posterior.predict(grid, what).mean[:, k]
    samples = posterior.predict(grid[:NOISES], what, samples=len(functions)).samples  # of the same functions
    assert samples is not None
    # What does not depend on x may as well be the same along the line: quantiles are then as smooth as f is.
    added = samples[:, :, k] - functions[:, :NOISES]  # (S, NOISES)
    return _of_draws(mean, (functions[:, None] + added[:, :, None]).reshape(-1, len(grid)))


def _is_even(posterior: Answers) -> bool:
    """Whether residual and noise are added to f, and the same everywhere."""
    members = posterior.members if isinstance(posterior, Averaged) else [posterior]
    return all(
        isinstance(member, Posterior)
        and member.model.varying is None
        and is_affine(member.model.likelihood_y, member.scaling.outputs)
        for member in members
    )


def _line(posterior: Answers, along: str, at: Mapping[str, float] | None) -> tuple[Array, Array, str]:
    """Points (G, d1) along an input, its values there, and where the others are in words."""
    inputs = posterior.problem.control_inputs
    j = place(inputs, along, "control input")
    fixed = _fixed(posterior, [along], at)
    values = np.linspace(*inputs[j].bounds, POINTS)
    grid = np.tile(fixed, (POINTS, 1))
    grid[:, j] = values
    return grid, values, _others(posterior, [along], fixed, at)


def _fixed(posterior: Answers, along: Sequence[str], at: Mapping[str, float] | None) -> Array:
    both = [name for name in along if name in (at or {})]
    if both:
        raise ModelError(f"at fixes '{both[0]}', along which the chart goes; leave it out of at")
    return point(posterior.problem, at)


def _others(posterior: Answers, along: Sequence[str], fixed: Array, at: Mapping[str, float] | None) -> str:
    kept = [(v, value) for v, value in zip(posterior.problem.control_inputs, fixed, strict=True) if v.name not in along]
    return where([v for v, _ in kept], [value for _, value in kept], at)


def _observations(
    posterior: Answers, k: int, x: ArrayLike | None, y: ArrayLike | None
) -> tuple[tuple[Array, Array] | None, str]:
    """What to draw of the observations, and what to say of them."""
    if x is None or y is None:
        return None, ""
    if len(posterior.problem.control_inputs) > 1:
        return None, "observations are left out: they lie at other values of the other inputs"
    abscissa, values = np.asarray(x, np.float64).reshape(-1), np.asarray(y, np.float64)
    values = values.reshape(len(abscissa), -1)[:, k]
    known = np.flatnonzero(~np.isnan(values))
    if len(known) > MOST_OBSERVATIONS:
        some = np.sort(np.random.default_rng(0).choice(known, MOST_OBSERVATIONS, replace=False))
        return (abscissa[some], values[some]), f"{MOST_OBSERVATIONS:,} of {len(known):,} observations, chosen at random"
    return (abscissa[known], values[known]), ""


# --- marks ------------------------------------------------------------------------------------------------------------


def _x(posterior: Answers, along: str) -> Any:
    import altair as alt

    variable = posterior.problem.control_inputs[place(posterior.problem.control_inputs, along, "control input")]
    return alt.X("value:Q", title=label(variable), scale=alt.Scale(domain=list(variable.bounds), nice=False))


def _area(values: Array, band: Band, kind: str, x: Any, name: str, colour: Any, opacity: float) -> Any:
    import altair as alt

    data = rows(value=values, low=band.low, high=band.high, kind=[kind] * len(values))
    y = alt.Y("low:Q", title=name, scale=alt.Scale(zero=False))
    return alt.Chart(data).mark_area(opacity=opacity).encode(x, y, alt.Y2("high:Q"), color=colour)


def _mean(values: Array, mean: Array, kind: str, x: Any, name: str, colour: Any, dash: bool = False) -> Any:
    import altair as alt

    data = rows(value=values, y=mean, kind=[kind] * len(values))
    return (
        alt.Chart(data)
        .mark_line(strokeWidth=2.2, strokeDash=[6, 3] if dash else [1, 0])
        .encode(x, alt.Y("y:Q", title=name), color=colour)
    )


def _functions(values: Array, samples: Array, x: Any, name: str) -> Any:
    import altair as alt

    samples = samples[:SHOWN]
    number = np.repeat(np.arange(len(samples)), len(values))
    data = rows(value=np.tile(values, len(samples)), y=samples.reshape(-1), number=number)
    mark = alt.Chart(data).mark_line(strokeWidth=0.8, opacity=0.55, color=POSTERIOR)
    return mark.encode(x, alt.Y("y:Q", title=name), detail="number:N")
