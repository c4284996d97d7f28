"""From what was gathered of a run to a page or to files."""

from __future__ import annotations

from pathlib import Path

import vcal_dist
from vcal_dist.report.answer import answer
from vcal_dist.report.diagnostics import diagnose
from vcal_dist.report.figures import FigureFormat, write_figures
from vcal_dist.report.gathering import Gathered, Say
from vcal_dist.report.page import render
from vcal_dist.report.sections import sections


def html(gathered: Gathered, say: Say = lambda _: None) -> str:
    """The report as one self-contained page."""
    verdict = diagnose(gathered)
    opening = answer(gathered, verdict)
    found = sections(gathered, verdict, say)
    say("writing the page")
    return render(opening, found, place=gathered.place, version=vcal_dist.__version__)


def figures(gathered: Gathered, folder: Path, kind: FigureFormat, say: Say = lambda _: None) -> list[Path]:
    """The figures of the report as files in a folder."""
    verdict = diagnose(gathered)
    opening = answer(gathered, verdict)
    return write_figures([opening.section, *sections(gathered, verdict)], folder, kind, say)
