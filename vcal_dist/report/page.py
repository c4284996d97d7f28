"""A report as one HTML file that needs no network: Jinja2 with everything escaped, and Vega inside.

Names, units, descriptions and paths are the user's: they reach the page as text only. Charts are JSON in the page,
which one script of this package draws; a Content-Security-Policy admits that script, by its hash, and no other, and no
request to anywhere. Vega's expressions are interpreted, not compiled, so that no text can become code.
"""

from __future__ import annotations

import base64
import hashlib
import math
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from vcal_dist.report.answer import Answer
from vcal_dist.report.content import Figure, Section

TEMPLATE, STYLE, SCRIPT = "page.html", "page.css", "page.js"


def render(answer: Answer, sections: list[Section], *, place: str, version: str) -> str:
    """The page."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.tests |= {"kind": lambda value, name: type(value).__name__ == name}
    charts: dict[str, Any] = {}

    def chart(figure: Figure) -> Placed:
        """The place of a chart in the page; its data go to the page's end."""
        spec = figure.chart.to_dict(validate=False)
        spec.pop("$schema", None)  # an address, though nothing would ask for it
        placed = Placed(f"chart-{len(charts) + 1}", *titles(spec.pop("title", "")))
        charts[placed.key] = finite(spec)
        return placed

    environment.globals |= {"chart": chart}
    script = f"{_bundle()}\n{_resource(SCRIPT)}"
    template = environment.get_template(TEMPLATE)
    return template.render(
        answer=answer,
        sections=sections,
        place=place,
        version=version,
        written=datetime.now(UTC).astimezone().strftime("%Y-%m-%d %H:%M"),
        charts=charts,
        style=Markup(_resource(STYLE)),  # noqa: S704 - a file of this package
        script=Markup(script),  # noqa: S704 - likewise, and Vega
        policy=policy(script),
    )


class Placed(NamedTuple):
    """A chart's place, and its titles: as text of the page they break where the screen ends."""

    key: str
    title: str
    subtitle: str


def titles(found: Any) -> tuple[str, str]:
    """Title and subtitle as Vega-Lite has them."""
    parts = found if isinstance(found, dict) else {"text": found}
    title, subtitle = (unwrapped(parts.get(name) or "") for name in ("text", "subtitle"))
    return title, subtitle


def unwrapped(lines: str | list[str]) -> str:
    """The notes that were broken into lines, in one: a line that ends with a space goes on in the next."""
    if isinstance(lines, str):
        return lines
    return "".join(line if line.endswith(" ") else f"{line}; " for line in lines).removesuffix("; ")


def finite(value: Any) -> Any:
    """Values of a chart with null for NaN and infinities: JSON has none, and one would undo all charts of the page."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def policy(script: str) -> str:
    """What the page may do: run this script, style itself, show pictures that it made itself. Nothing else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _resource(name: str) -> str:
    return files("vcal_dist.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script without imports."""
    import vl_convert

    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    assert "</script" not in bundle
    return bundle
