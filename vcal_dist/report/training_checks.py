"""Checks of training and of the run as a whole."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from vcal_dist.metrics import real
from vcal_dist.mixed import Averaged
from vcal_dist.report.check import Check
from vcal_dist.report.content import Status
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.words import figure, listed, percent, plural

UNSETTLED = 0.05  # nats a row that the loss moves by over the last fifth of a stage, beyond its noise
LEAST_RECORDS = 20  # of a stage that can be judged
HEAVIEST = 0.9  # weight of an average's member that stands for it
SETTLED_THRESHOLD = (
    f"{UNSETTLED:g} nats a row over the last fifth of a stage, beyond three standard errors of its noise; at least "
    f"{LEAST_RECORDS} records of it"
)


def settled(gathered: Gathered) -> list[Check]:
    """Was training ended too early, or did it go astray?"""
    losses = losses_of(gathered.metrics)
    if not losses and isinstance(gathered.posterior, Averaged):  # its members have theirs
        return []
    changes = {phase: change(of) for phase, of in losses.items()}
    short = [f"'{phase}'" for phase, moved in changes.items() if moved is None]
    moved = {phase: by for phase, by in changes.items() if by is not None and abs(by) > UNSETTLED}
    judged = [f"'{phase}'" for phase, by in changes.items() if by is not None and phase not in moved]
    parts, advice = [], []
    for phase, by in moved.items():
        way = "rising" if by > 0 else "still falling"
        parts.append(f"The loss of '{phase}' was {way}, by {figure(abs(by), 2)} nats a row over its last fifth.")
    if judged:
        parts.append(f"The loss had settled at the end of {listed(judged) if short or moved else 'every stage'}.")
    if short:
        parts.append(f"Too few records to tell of {listed(short)}: fewer than {LEAST_RECORDS}.")
    if not losses:
        parts.append("There are no records of training.")
    falling = [phase for phase, by in moved.items() if by < 0]
    rising = [phase for phase, by in moved.items() if by > 0]
    if falling:
        advice.append(
            f"Train longer, for example with fit.{falling[0]}.steps at twice as many, and see whether θ changes."
        )
    if rising:
        advice.append(f"Lower fit.{rising[0]}.rate, and look for outliers: a loss should not rise.")
    if not moved and not judged:
        advice.append("Look at metrics.csv and at the predictions: nothing else says whether training was long enough.")
    value = f"{figure(max(map(abs, moved.values())), 2)} nats a row" if moved else "settled" if judged else "unknown"
    status: Status = "good" if judged and not moved else "care"
    most = max((abs(by) for by in changes.values() if by is not None), default=None)
    return [Check("Training", status, value, " ".join(parts), " ".join(advice), most, SETTLED_THRESHOLD)]


def losses_of(metrics: Sequence[Mapping[str, str]]) -> dict[str, list[float]]:
    """The losses of every stage that has some, in their order."""
    found: dict[str, list[float]] = {}
    for row in metrics:
        loss = real(row.get("loss"))
        if loss is not None:
            found.setdefault(row["phase"], []).append(loss)
    return found


def change(losses: Sequence[float]) -> float | None:
    """How far a loss moves from the first to the second half of its last fifth, 0 if that is no more than its noise.

    None with too few records: a fifth of them says nothing.
    """
    if len(losses) < LEAST_RECORDS:
        return None
    last = np.asarray(losses[-(len(losses) // 5) :], dtype=np.float64)
    first, second = np.array_split(last, 2)
    moved = float(second.mean() - first.mean())
    noise = math.sqrt(float(first.var(ddof=1)) / len(first) + float(second.var(ddof=1)) / len(second))
    return moved if abs(moved) > 3 * noise else 0.0


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
        one = weight >= HEAVIEST
        sentence += "" if one else " Rows were judged by that one alone, θ is that of all."
        advice = "" if one else "Report the other members too (vcal report of their runs), and see whether they agree."
        status: Status = "good" if one else "care"
        threshold = f"a weight of {HEAVIEST:g}: the heaviest member, by which rows are judged, then stands for all"
        found.append(Check("Average", status, plural(count, "member"), sentence, advice, weight, threshold))
    if gathered.newer:
        more = listed([f"{count:,} {name}" for name, count in gathered.newer.items()])
        sentence = f"The store has {more} more than this run has seen."
        number, threshold = float(sum(gathered.newer.values())), "0 rows: the result is of the rows that it has seen"
        found.append(Check("New rows", "care", more, sentence, "Train anew.", number, threshold))
    if gathered.store is None:  # fewer checks are no better a verdict
        why = gathered.unreachable or "there is no store"
        sentence = f"The rows that the run was trained on were not read, and checks that need them are left out: {why}."
        advice = "Say where the store is with --store."
        threshold = "the store is read"
        found.append(Check("Rows of the store", "care", "not read", sentence, advice, threshold=threshold))
    return found
