"""What one look at a result found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vcal_dist.report.content import Status

RANK: dict[Status, int] = {"good": 0, "care": 1, "bad": 2}


@dataclass(frozen=True)
class Check:
    """What one look at a result found."""

    name: str
    status: Status
    value: str  # the figure that it is about
    sentence: str
    advice: str = ""  # what to do about it; empty where nothing is to be done
    number: float | None = None  # the figure for programs, if there is one
    threshold: str = ""  # what it was compared with, and where that comes from
    numbers: Mapping[str, float] = field(default_factory=dict)  # of every parameter or output, by name
