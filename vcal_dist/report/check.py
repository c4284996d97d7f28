"""What one look at a result found."""

from __future__ import annotations

from dataclasses import dataclass

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
