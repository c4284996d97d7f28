"""The charts of the stand-in for the radionuclide data: f over the sites, and along a line through the spike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vcal_dist.plots.style import DATA, SEQUENTIAL, SERIES, TRUTH, rows, styled
from vcal_dist.problems import radionuclide
from vcal_dist.problems.radionuclide import Data

if TYPE_CHECKING:
    from jobs.reproduce.radionuclide import Curve

STAND_IN = "A stand-in for the paper's data"
MAP, PROFILE = (270, 196), (400, 270)  # width and height
NATURE = "nature"
EAST = [0, 2200]
NORTH = [0, 1600]


def site_maps(found: Mapping[str, np.ndarray], data: Data) -> Any:
    """The posterior mean of f at the sites (88,) by the name of the variant, beside nature; one colour scale."""
    import altair as alt

    truth = radionuclide.nature(radionuclide.sites())[:, 0]
    top = max(float(values.max()) for values in (truth, *found.values()))
    # Between linear and logarithmic: the edge of the plume is a tenth of the spike, and the background a hundredth.
    scale = alt.Scale(type="symlog", constant=0.3, domain=[-1, top], scheme=SEQUENTIAL, clamp=True)
    panels = [_map(name, values, data, scale) for name, values in {NATURE: truth, **found}.items()]
    title = alt.Title(
        f"{STAND_IN}: concentration at the 88 wells",
        subtitle="Posterior mean of f = η(·, θ) + δ with each emulator, beside nature; rings: the ten observations",
        offset=12,
    )
    return styled(alt.concat(*panels, columns=3, spacing=24, title=title))


def _map(name: str, values: np.ndarray, data: Data, scale: Any) -> Any:
    import altair as alt

    wells = radionuclide.sites()
    seen = np.isin(np.arange(len(wells)), radionuclide.OBSERVED)
    spike = values[radionuclide.SPIKE]
    base = alt.Chart(
        rows(easting=wells[:, 0], northing=wells[:, 1], f=values, observed=np.where(seen, "yes", "no")),
        width=MAP[0],
        height=MAP[1],
        title=alt.Title(name, subtitle=f"spike: {spike:.1f} kBq/L", subtitleFontSize=11),
    ).encode(
        x=alt.X("easting:Q", title="easting (m)", scale=alt.Scale(domain=EAST, nice=False)),
        y=alt.Y("northing:Q", title="northing (m)", scale=alt.Scale(domain=NORTH, nice=False)),
        tooltip=["easting:Q", "northing:Q", alt.Tooltip("f:Q", title="f (kBq/L)"), "observed:N"],
    )
    wells_of = base.mark_square(size=130, opacity=1).encode(
        color=alt.Color(
            "f:Q",
            scale=scale,
            legend=alt.Legend(
                title="f (kBq/L)", orient="right", gradientLength=MAP[1], values=[-1, 0, 1, 3, 10, 20, 40]
            ),
        )
    )
    rings = base.transform_filter("datum.observed == 'yes'").mark_point(
        size=230, filled=False, stroke=TRUTH, strokeWidth=1.6, opacity=1, shape="circle"
    )
    return wells_of + rings


def profiles(found: Mapping[str, Curve], data: Data) -> Any:
    """f on the line from the release through the spike's well: a panel for a shallow emulator and its deep one."""
    import altair as alt

    pairs: dict[str, dict[str, Curve]] = {}
    for name, curve in found.items():
        depth, _, start = name.partition(", ")
        pairs.setdefault(start or "learned frequencies", {})[depth] = curve
    top = max(float((curve.mean + 2 * curve.sd).max()) for curve in found.values())
    low = min(float((curve.mean - 2 * curve.sd).min()) for curve in found.values())
    scale = alt.Scale(domain=[min(low, 0.0), max(top, float(data.y[0, 0]))], nice=True)
    heading = alt.Title(
        f"{STAND_IN}: the plume through the spike",
        subtitle="Posterior mean of f and two standard deviations of it; red: the observation in the spike",
        offset=12,
    )
    return styled(alt.hconcat(*(_profile(name, pair, data, scale) for name, pair in pairs.items()), title=heading))


def _profile(name: str, found: Mapping[str, Curve], data: Data, scale: Any) -> Any:
    import altair as alt

    from jobs.reproduce.radionuclide import along_the_spike

    distance, places = along_the_spike()
    order = [NATURE, *found]
    colours = alt.Scale(domain=order, range=[DATA, *SERIES[: len(found)]])
    color = alt.Color("curve:N", scale=colours, title=None, sort=order)
    end = float(distance[-1])
    x = alt.X("distance:Q", title="distance from the release (m)", scale=alt.Scale(domain=[0, end], nice=False))
    y = alt.Y("f:Q", title="concentration (kBq/L)", scale=scale)
    layers: list[Any] = []
    for depth, curve in found.items():
        low, high = curve.mean - 2 * curve.sd, curve.mean + 2 * curve.sd
        chart = alt.Chart(rows(distance=distance, f=curve.mean, low=low, high=high, curve=[depth] * len(distance)))
        band = alt.Y("low:Q", title="concentration (kBq/L)", scale=scale)
        layers.append(chart.mark_area(opacity=0.16).encode(x=x, y=band, y2="high:Q", color=color))
        tooltip = ["curve:N", "distance:Q", "f:Q", "low:Q", "high:Q"]
        layers.append(chart.mark_line(strokeWidth=2).encode(x=x, y=y, color=color, tooltip=tooltip))
    truth = rows(distance=distance, f=radionuclide.nature(places)[:, 0], curve=[NATURE] * len(distance))
    layers.append(alt.Chart(truth).mark_line(strokeDash=[5, 3], strokeWidth=1.6).encode(x=x, y=y, color=color))
    well = float(np.linalg.norm(data.x[0] - np.array(radionuclide.RELEASE)))
    seen, sd = float(data.y[0, 0]), float(data.noise[0, 0])
    spike = alt.Chart(rows(distance=[well], f=[seen], low=[seen - 2 * sd], high=[seen + 2 * sd]))
    layers.append(spike.mark_rule(color=TRUTH, strokeWidth=1.6).encode(x=x, y=alt.Y("low:Q", scale=scale), y2="high:Q"))
    layers.append(spike.mark_point(filled=True, color=TRUTH, size=60, opacity=1).encode(x=x, y=y, tooltip=["f:Q"]))
    return alt.layer(*layers, width=PROFILE[0], height=PROFILE[1], title=name)
