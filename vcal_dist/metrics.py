"""Records of training in a file, read by whoever looks at a run; writing them is `vcal_dist.records`."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

from storage.regular import open_regular

METRICS = "metrics.csv"
MOST_PHASES = 100  # of a run, which has about ten
MOST_DIGITS = 18  # of a number of steps; Python reads no more than some thousands
MOST_CHARACTERS = 1 << 17  # of a line, as the csv module has it for a cell


def read_metrics(run: Path) -> list[dict[str, str]]:
    """The sound rows, in their order; a writer that died, or a full disk, may have left the last one in half."""
    try:
        with open_regular(run / METRICS) as data, io.TextIOWrapper(data, encoding="utf-8", newline="") as file:
            phases: set[str] = set()
            return [row for row in csv.DictReader(_lines(file)) if _is_sound(row) and _is_few(row["phase"], phases)]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def _is_few(phase: str, phases: set[str]) -> bool:
    """Whether a phase is among the first, which are remembered: each has charts of its own, which take a while."""
    if len(phases) < MOST_PHASES:
        phases.add(phase)
    return phase in phases


def _lines(file: TextIO) -> Iterator[str]:
    """The lines of a file, one at a time in memory also where it has no ends of lines."""
    while line := file.readline(MOST_CHARACTERS):
        if len(line) == MOST_CHARACTERS:
            raise csv.Error("a line has no end")
        yield line


def _is_sound(row: Mapping[str, str | None]) -> bool:
    step = row.get("step") or ""
    counts = step.isdecimal() and len(step) <= MOST_DIGITS
    return bool(counts and row.get("phase") and real(row.get("seconds")) is not None)


def real(text: str | None) -> float | None:
    """A finite number in a text, or None."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
