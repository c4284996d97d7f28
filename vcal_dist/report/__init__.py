"""A run as a page that a person wants to look at, or as figures for a paper.

    gathered = gather(Path("runs/borehole"), Posterior.load("runs/borehole"))
    Path("report.html").write_text(html(gathered), encoding="utf-8")

`gathering` collects what there is, `diagnostics` says whether to trust it, `answer` and `sections` put it into words
and figures, `page` and `figures` write them.
"""

from __future__ import annotations

from vcal_dist.report.gathering import Gathered, gather
from vcal_dist.report.writing import figures, html

__all__ = ["Gathered", "figures", "gather", "html"]
