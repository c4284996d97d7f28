"""What all charts share: colours, fonts, data in rows, and how a chart becomes a file."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from storage.places import write_durably
from vcal_dist.errors import ModelError

if TYPE_CHECKING:
    import altair as alt

PRIOR, POSTERIOR, TRUTH, DATA, OTHER = "#9aa5b1", "#2563a8", "#c8382d", "#1f2933", "#d98b1f"
SERIES = ["#2563a8", "#d98b1f", "#3b8f5d", "#8757a8", "#c8382d", "#5f7d95", "#b0577b", "#7a8b2a"]
SEQUENTIAL: Final = "viridis"
GAP = "\N{NO-BREAK SPACE}"  # between a number and what belongs to it
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
WIDTH, HEIGHT = 420, 260  # of a single chart outside a page
DIGITS = 6  # of numbers in a chart's data: more make files larger, and nobody sees them
# On the right there is room for half a label: Vega fits a chart to its page before it knows which labels the axes show.
PADDING = {"left": 6, "top": 6, "right": 18, "bottom": 6}
LINE = 62  # characters of a subtitle: what a phone has room for
SCALE = 2.0  # of PNGs: 144 dots per inch

FileFormat = Literal["png", "pdf", "svg"]


def rows(**columns: ArrayLike) -> alt.InlineData:
    """The data of a chart from columns of equal length: numbers (rounded; not finite ones become null) or texts."""
    lists = {name: [_cell(value) for value in np.asarray(column).tolist()] for name, column in columns.items()}
    lengths = {name: len(values) for name, values in lists.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"columns of a chart differ in length: {lengths}")
    return _data()(values=[dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)])


@cache
def _data() -> type[alt.InlineData]:
    import altair as alt

    class Rows(alt.InlineData):
        """Rows that are sound and do not change: Altair would copy and check them again and again."""

        _class_is_valid_at_instantiation = False

        def __deepcopy__(self, _: Any) -> Rows:
            return self

    return Rows


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def titled(chart: Any, text: str, *notes: str, **properties: Any) -> Any:
    """A chart with a title and notes under it, in lines that fit; empty notes are left out."""
    import altair as alt

    lines = [line for note in notes if note for line in _wrapped(note)]
    return chart.properties(title=alt.TitleParams(_wrapped(text), subtitle=lines), **properties)


def single(layers: Sequence[Any], title: str, *notes: str) -> alt.LayerChart:
    """A whole chart of layers, as wide as its page."""
    import altair as alt

    chart: alt.LayerChart = styled(titled(alt.layer(*layers), title, *notes, width="container", height=HEIGHT))
    return chart


def _wrapped(text: str) -> list[str]:
    """Lines that fit. One that goes on in the next ends with a space, so that a page can join them again."""
    text = re.sub(r"(?<=\d) %", f"{GAP}%", text)
    *before, last = textwrap.wrap(text, LINE, break_on_hyphens=False) or [""]
    return [*(f"{line} " for line in before), last]


def scale_of(ends: Sequence[float], **options: Any) -> alt.Scale:
    """A scale that goes from one end to the other, and not further."""
    import altair as alt

    return alt.Scale(domain=[float(end) for end in ends], nice=False, zero=False, **options)


def hover(data: alt.InlineData, x: Any, tooltip: list[Any]) -> alt.Chart:
    """A rule under the pointer that says what the chart holds there; `x` is the channel of the field `value`."""
    import altair as alt

    nearest = alt.selection_point(nearest=True, on="pointerover", fields=["value"], empty=False)
    opacity = alt.when(nearest).then(alt.value(0.4)).otherwise(alt.value(0))
    rule = alt.Chart(data).mark_rule(color=DATA)
    return rule.encode(x=x, opacity=opacity, tooltip=tooltip).add_params(nearest)


def styled(chart: Any) -> Any:
    """A chart, single or composed, with the look of all charts; for the outermost one, once."""
    import altair as alt

    # All at once: every `configure_…` copies the whole chart.
    axis = alt.AxisConfig(
        grid=True, gridColor="#eceff2", domainColor="#9aa5b1", tickColor="#9aa5b1", labelColor="#3e4c59",
        titleColor="#1f2933", titleFontWeight="normal", labelFontSize=11, titleFontSize=12, titleLimit=400,
        labelSeparation=6,
    )  # fmt: skip
    number = alt.NumberLocale(decimal=".", thousands=",", grouping=[3], currency=["$", ""], percent=f"{GAP}%")
    legend = alt.LegendConfig(
        labelColor="#3e4c59", titleColor="#1f2933", titleFontWeight="normal", orient="top", symbolOpacity=1,
        labelLimit=300,
    )  # fmt: skip
    title = alt.TitleConfig(color="#1f2933", fontSize=13, fontWeight=600, anchor="start", subtitleColor="#52606d")
    config = alt.Config(
        font=FONT, background="white", padding=PADDING, view=alt.ViewConfig(stroke=None), axis=axis,
        axisY=alt.AxisConfig(titleLimit=290), header=alt.HeaderConfig(labelColor="#1f2933", labelFontSize=12),
        legend=legend, title=title, locale=alt.Locale(number=number),
    )  # fmt: skip
    return chart.properties(config=config)


def write(chart: Any, path: str | Path) -> None:
    """Writes a chart to a .png, .pdf or .svg file, without a browser or a network."""
    import vl_convert

    path = Path(path)
    kind = path.suffix.removeprefix(".")
    if kind not in get_args(FileFormat):
        raise ModelError(f"a chart cannot be written to {path}; accepted: files that end in .png, .pdf or .svg")
    specification = with_width(chart.to_dict(), WIDTH)
    try:
        if kind == "png":
            content = vl_convert.vegalite_to_png(specification, scale=SCALE)
        elif kind == "pdf":
            content = vl_convert.vegalite_to_pdf(specification)
        else:
            content = vl_convert.vegalite_to_svg(specification).encode()
    except ValueError as error:
        cause = " ".join(str(error).partition("\n    at ")[0].split())  # after it, places in Vega's own code
        raise ModelError(
            f"cannot draw {path}: {cause}; if that shows a name or a unit of the problem, write it more plainly"
        ) from error
    write_durably(path, content)


def with_width(specification: dict[str, Any], width: int) -> dict[str, Any]:
    """A specification whose charts as wide as their page have a width of their own: there is no page."""
    return {
        key: width
        if key == "width" and value == "container"
        else with_width(value, width)
        if isinstance(value, dict)
        else [with_width(item, width) if isinstance(item, dict) else item for item in value]
        if isinstance(value, list) and key != "values"
        else value
        for key, value in specification.items()
    }
