"""Checks of the way to q(θ): what it was compared with, and whether other starts lead elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vcal_dist.leave_one_out import RELIABLE
from vcal_dist.report.check import Check
from vcal_dist.report.content import Status
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.words import figure, listed, plural

EFFECTIVE = 40.0  # independent draws, below which an interval's ends are uncertain by a fifth of its half-width
HOPELESS = 1.0  # k̂ from which on a mean with these weights need not exist
TOO_LIGHT = -1  # the mode of a start that ended more than 10 nats below the best
EVEN = 1.0  # nats between the log evidences of two modes that can hardly be told apart
SHOWN = 4  # parameters of which it is said where modes lie
EFFECTIVE_THRESHOLD = (
    f"{EFFECTIVE:g} independent draws of the exact posterior: with fewer, the ends of a 90 % interval are uncertain by "
    "more than a fifth of its half-width"
)
STARTS_THRESHOLD = (
    "two starts or more, half of them at rest, and of three or more at least two in the best mode; another mode within "
    f"{EVEN:g} nat of it is as good an explanation (a Bayes factor below 3 is not worth more than a bare mention: Kass "
    "and Raftery 1995)"
)


def how_theta_was_found(gathered: Gathered) -> list[Check]:
    """Is q(θ) the posterior, or an approximation of it that nothing was compared with?"""
    found = gathered.record.get("theta")
    if found is None:
        return []
    name = "Posterior of θ"
    if found["family"] == "meanfield":
        return [
            Check(
                name,
                "care",
                "factorised",
                "θ and the weights are taken to be independent (meanfield): intervals of θ are then often far too "
                "narrow, and parameters look uncorrelated whatever they are.",
                "Train with fit.weights=collapsed (or fullrank where the noise is not Gaussian), and compare.",
                threshold=EFFECTIVE_THRESHOLD,
            )
        ]
    if found["unrefined"]:
        still = "" if found["converged"] else " The closing passes ended before θ stood still."
        longer = "" if found["converged"] else " Train longer (fit.theta.steps), or from more starts (fit.starts)."
        return [
            Check(
                name,
                "care",
                "not compared",
                "One Gaussian around each mode, which may be too narrow where the simulator is curved in θ; it was not "
                f"compared with the exact posterior: {found['unrefined']}.{still}",
                "Read the intervals as approximate. vcal refine follows the exact posterior where there is one "
                f"(Gaussian noise, additive discrepancy or none), and says how far θ moves.{longer}",
                threshold=EFFECTIVE_THRESHOLD,
            )
        ]
    effective = float(found["effective"])
    sentence = (
        f"A mixture of Gaussians that follows the posterior of θ with all weights integrated out, at "
        f"{plural(int(found['evaluations']), 'point')}; they are worth {figure(effective, 2)} independent draws of it."
    )
    kinds = dict.fromkeys(name.rstrip(" 0123456789") for name in found.get("hyperparameters") or {})
    if kinds:
        sentence += f" What is not known of these is in it: {listed(list(kinds))}."
    if found.get("as_points"):
        sentence += f" Taken as training found them: {listed(found['as_points'])}."
    enough = effective >= EFFECTIVE
    advice = "" if enough else "Refine it with more points (vcal refine), and see how far θ moves."
    value = f"{figure(effective, 2)} draws"
    return [Check(name, "good" if enough else "care", value, sentence, advice, effective, EFFECTIVE_THRESHOLD)]


def importance_weights(gathered: Gathered) -> list[Check]:
    """Can what the exact posterior says at a few points be relied on? k̂, the tail of their weights, tells."""
    found = gathered.record.get("theta") or {}
    k, points = found.get("pareto_k"), int(found.get("evaluations") or 0)
    if k is None or not points:
        return []
    limit = most_pareto_k(points)
    status: Status = "good" if k < limit else "care" if k <= HOPELESS else "bad"
    what = {
        "good": "Means and intervals taken with these weights are reliable.",
        "care": "Means and intervals taken with these weights can be off: a few points carry much of them.",
        "bad": "So few points carry all of the weight that not even a mean of θ need exist.",
    }[status]
    sentence = (
        f"The exact posterior was evaluated at {plural(points, 'point')}, each weighted by it; k̂ of the weights' tail "
        f"is {figure(k, 2)}, and may be {figure(limit, 2)} for so many. {what}"
    )
    if status == "good":
        advice = ""
    elif k < RELIABLE:  # there is a number of points that is enough
        enough = max(math.ceil(10 ** (1 / (1 - k))), 2 * points)
        advice = f"Refine it (vcal refine --evaluations {enough}, or more), and see how far θ moves."
    else:
        advice = (
            "Refine it with several times as many points (vcal refine), and see how far θ moves; until it stands "
            "still, do not quote these intervals."
        )
    threshold = (
        f"k̂ below {figure(limit, 2)}, the lesser of {RELIABLE:g} and 1 − 1/log10(S) for S = {points:,} points; bad "
        f"above {HOPELESS:g} (Vehtari, Simpson, Gelman, Yao and Gabry 2024)"
    )
    return [Check("Importance weights", status, f"k̂ {figure(k, 2)}", sentence, advice, float(k), threshold)]


def most_pareto_k(points: int) -> float:
    """The greatest k̂ with which so many points are enough: min(1 − 1/log10(S), 0.7)."""
    return min(1 - 1 / math.log10(max(points, 2)), RELIABLE)


def starts_agree(gathered: Gathered) -> list[Check]:
    """Do the starts that were followed end in the same place? One that was not tried may hold a better mode."""
    starts: Sequence[Mapping[str, Any]] = (gathered.record.get("theta") or {}).get("starts") or []
    if not starts:
        return []
    rest = [start for start in starts if start["converged"]]
    best = max(starts, key=lambda start: start["log_evidence"])
    there = sum(start["mode"] == best["mode"] for start in rest)
    light = sum(start["mode"] == TOO_LIGHT for start in rest)
    kept = len(rest) - there - light
    modes = _modes(starts)
    rivals = [at for at in modes if at is not best and best["log_evidence"] - at["log_evidence"] < EVEN]

    parts = [f"{plural(len(starts), 'start')} {'was' if len(starts) == 1 else 'were'} followed."]
    if len(rest) < len(starts):
        parts.append(f"{len(starts) - len(rest)} of them had not come to rest when training ended.")
    if there == len(rest) > 1:
        parts.append(f"All {'that did ' if len(rest) < len(starts) else ''}ended in the same place.")
    elif len(starts) > 1 and rest:
        parts.append(f"{there} ended in the best mode.")
    if kept:
        parts.append(f"{kept} ended in {'another, which is' if kept == 1 else 'others, which are'} in the posterior.")
    if light:
        parts.append(f"{light} ended more than 10 nats below it, too light to matter.")

    advice = []
    if len(starts) == 1:
        parts.append("There is nothing to compare it with: another mode may have been missed.")
        advice.append("Follow several, with fit.starts=3 or more.")
    elif 2 * len(rest) < len(starts):
        advice.append("Train longer (fit.theta.steps): what has not come to rest says little about modes.")
    elif there == 1 and len(starts) > 2:
        parts.append("A better mode that only one start has found may not be the last.")
        advice.append(f"Follow more, with fit.starts={2 * len(starts)}, and see whether a better one turns up.")
    if rivals:
        names = [v.name for v in gathered.posterior.problem.calibration_inputs]
        parts.append(f"There are several explanations, as good as each other: {_places([best, *rivals], names)}.")
        advice.append("Quote all of them; observations where they predict different things would decide.")
    status: Status = "care" if advice else "good"
    value = f"{there} of {len(starts)}"
    number = there / len(starts)
    return [Check("Starts", status, value, " ".join(parts), " ".join(advice), number, STARTS_THRESHOLD)]


def _modes(starts: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of every mode that was kept, the start with the highest log evidence."""
    found: dict[int, Mapping[str, Any]] = {}
    for start in sorted(starts, key=lambda start: start["log_evidence"]):
        if start["mode"] != TOO_LIGHT:
            found[start["mode"]] = start
    return list(found.values())


def _places(starts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Where modes lie, by the first few parameters."""
    told = []
    for start in starts:
        values = [f"{name} = {figure(value)}" for name, value in zip(names, start["theta"], strict=True)][:SHOWN]
        told.append(f"({', '.join(values)}{', …' if len(names) > SHOWN else ''})")
    return listed(told, most=4)
