"""The figures of a report as files, for a paper."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from vcal_dist.plots.style import write
from vcal_dist.report.content import Section
from vcal_dist.report.gathering import Say

FigureFormat = Literal["png", "pdf"]
MOST_BYTES = 180  # of a file's name: file systems take 255, of which an ending and the writing need some


def write_figures(
    sections: Iterable[Section], folder: Path, kind: FigureFormat, say: Say = lambda _: None
) -> list[Path]:
    """Writes every figure into a folder, named after what it shows; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for figure in (figure for section in sections for figure in section.figures()):
        stem = file_name(figure.name)
        path = folder / f"{stem}.{kind}"
        count = 1
        # Names may differ only in what a file's name cannot hold, or in what not every file system tells apart.
        while path.name.casefold() in {other.name.casefold() for other in written}:
            count += 1
            path = folder / f"{stem}-{count}.{kind}"
        say(f"writing {path}")
        write(figure.chart, path)
        written.append(path)
    return written


def file_name(name: str) -> str:
    """A name that every file system takes: letters and digits of any script stay, all else becomes a dash."""
    plain = re.sub(r"[^\w.]+", "-", unicodedata.normalize("NFC", name)).strip("-.")
    return plain[:80].encode()[:MOST_BYTES].decode(errors="ignore") or "figure"
