"""Checks of training and of the run as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from vcal_dist.metrics import real
from vcal_dist.mixed import Averaged
from vcal_dist.report.check import Check
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.words import figure, listed, percent, plural

STILL_FALLING = 0.05  # nats a row that the loss falls by over the last fifth of a stage, beyond its noise
LEAST_RECORDS = 20  # of a stage that can be judged


def still_falling(gathered: Gathered) -> list[Check]:
    """Was training ended too early?"""
    falls = {phase: falling(losses) for phase, losses in losses_of(gathered.metrics).items()}
    if not falls:
        return []
    found = {phase: fall for phase, fall in falls.items() if fall is not None and fall > STILL_FALLING}
    if not found:
        judged, short = (
            [f"'{phase}'" for phase, fall in falls.items() if (fall is None) == few] for few in (False, True)
        )
        parts = []
        if judged:
            parts.append(f"The loss had settled at the end of {listed(judged) if short else 'every stage'}.")
        if short:
            parts.append(f"Too few records to tell of {listed(short)}: fewer than {LEAST_RECORDS}.")
        return [Check("Training", "good", "settled" if judged else "unknown", " ".join(parts))]
    told = listed([f"'{phase}' by {figure(fall, 2)} nats a row" for phase, fall in found.items()], most=4)
    stage = next(iter(found))
    return [
        Check(
            "Training",
            "care",
            f"{figure(max(found.values()), 2)} nats a row",
            f"The loss was still falling over the last fifth of {told}.",
            f"Train longer, for example with fit.{stage}.steps at twice as many, and see whether θ changes.",
        )
    ]


def losses_of(metrics: Sequence[Mapping[str, str]]) -> dict[str, list[float]]:
    """The losses of every stage that has some, in their order."""
    found: dict[str, list[float]] = {}
    for row in metrics:
        loss = real(row.get("loss"))
        if loss is not None:
            found.setdefault(row["phase"], []).append(loss)
    return found


def falling(losses: Sequence[float]) -> float | None:
    """How far a loss falls from the first to the second half of its last fifth, if that is more than its noise.

    None with too few records: a fifth of them says nothing.
    """
    last = np.asarray(losses[-(len(losses) // 5) :], dtype=np.float64)
    if len(losses) < LEAST_RECORDS:
        return None
    first, second = np.array_split(last, 2)
    fall = float(first.mean() - second.mean())
    noise = math.sqrt(float(first.var(ddof=1)) / len(first) + float(second.var(ddof=1)) / len(second))
    return fall if fall > 3 * noise else 0.0


def state_of_the_run(gathered: Gathered) -> list[Check]:
    """Is this all that there is to know?"""
    found = []
    posterior = gathered.posterior
    if isinstance(posterior, Averaged):
        weight = float(posterior.weights.max())
        count = len(posterior.members)
        sentence = f"An average of {plural(count, 'calibration')}; the heaviest weighs {percent(weight)}."
        if weight > 0.99 and count > 1:
            sentence += " The others hardly count."
        found.append(Check("Average", "good", plural(count, "member"), sentence))
    if gathered.newer:
        more = listed([f"{count:,} {name}" for name, count in gathered.newer.items()])
        found.append(
            Check("New rows", "care", more, f"The store has {more} more than this run has seen.", "Train anew.")
        )
    return found
