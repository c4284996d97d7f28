"""Records of training in a file, read by whoever looks at a run; writing them is `vcal_dist.records`."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

METRICS = "metrics.csv"


def read_metrics(run: Path) -> list[dict[str, str]]:
    """The sound rows, in their order; a writer that died, or a full disk, may have left the last one in half."""
    try:
        with (run / METRICS).open(encoding="utf-8", newline="") as file:
            return [row for row in csv.DictReader(file) if _is_sound(row)]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def _is_sound(row: Mapping[str, str | None]) -> bool:
    return bool((row.get("step") or "").isdecimal() and row.get("phase") and real(row.get("seconds")) is not None)


def real(text: str | None) -> float | None:
    """A finite number in a text, or None."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
