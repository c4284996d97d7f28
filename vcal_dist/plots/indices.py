"""Which inputs the output depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vcal_dist.answers import Answers
from vcal_dist.plots.naming import counted, output_place
from vcal_dist.plots.style import DATA, OTHER, POSTERIOR, rows, styled, titled
from vcal_dist.sensitivity import sobol_indices

if TYPE_CHECKING:
    import altair as alt

KINDS = {"x": "control input", "t": "calibration input"}
MOST = 30  # inputs
ROW = 24  # pixels of an input


def sensitivity(posterior: Answers, *, output: str | None = None) -> alt.LayerChart:
    """Sobol indices of the emulator's mean for every input, the greatest first."""
    import altair as alt

    variable = posterior.problem.outputs[output_place(posterior.problem, output)]
    found = sorted(sobol_indices(posterior, variable.name), key=lambda index: -index.total)
    shown = found[:MOST]
    names = [index.name for index in shown]
    table: dict[str, Any] = {
        "name": names,
        "kind": [KINDS[index.kind] for index in shown],
        "first": [_share(index.first) for index in shown],
        "total": [_share(index.total) for index in shown],
        "first_text": [f"{index.first:.3f} ± {index.first_error:.3f}" for index in shown],
        "total_text": [f"{index.total:.3f} ± {index.total_error:.3f}" for index in shown],
    }
    for name in ("first", "total"):
        errors = [(getattr(index, name), getattr(index, f"{name}_error")) for index in shown]
        table[f"{name}_low"] = [_share(value - error) for value, error in errors]
        table[f"{name}_high"] = [_share(value + error) for value, error in errors]
    base = alt.Chart(rows(**table))
    title = "share of the variance"
    scale = alt.Scale(domain=[0, 1], nice=False)
    colour = alt.Color("kind:N", title=None, scale=alt.Scale(domain=list(KINDS.values()), range=[OTHER, POSTERIOR]))
    y = alt.Y("name:N", sort=names, title=None, axis=alt.Axis(labelLimit=220, grid=False))
    tips = [
        alt.Tooltip("name:N", title="input"),
        alt.Tooltip("kind:N", title="kind"),
        alt.Tooltip("first_text:N", title="by itself"),
        alt.Tooltip("total_text:N", title="with interactions"),
    ]

    def bar(field: str, height: int, opacity: float) -> Any:
        mark = base.mark_bar(height=height, opacity=opacity)
        return mark.encode(alt.X(f"{field}:Q", title=title, scale=scale), y, colour, tooltip=tips)

    def error(field: str, shift: int) -> Any:
        mark = base.mark_rule(color=DATA, strokeWidth=1.2, yOffset=shift)
        return mark.encode(alt.X(f"{field}_low:Q", title=title, scale=scale), y, alt.X2(f"{field}_high:Q"))

    note = "dark: the input by itself (first order), pale: with its interactions (total); lines: 95 % intervals"
    left = len(found) - len(shown)
    more = f"left out: {counted(left, 'input')} with smaller indices" if left else ""
    layers = bar("total", 14, 0.4), bar("first", 14, 0.95), error("total", -3), error("first", 3)
    size = {"width": "container", "height": ROW * len(shown)}
    chart: alt.LayerChart = styled(titled(alt.layer(*layers), f"What {variable.name} depends on", note, more, **size))
    return chart


def _share(value: float) -> float:
    """What is shown of an estimate: it may leave what a share can be, which its text still says."""
    return min(max(value, 0.0), 1.0)
