"""Checks of θ: what was learned, and whether a few numbers can tell it."""

from __future__ import annotations

import itertools

import numpy as np

from vcal_dist.report.check import RANK, Check
from vcal_dist.report.content import Status
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.parameters import learned, mode_count
from vcal_dist.report.words import figure, listed, percent, plural, signed

AT_BOUND = (0.2, 0.6)  # probability within 2 % of the range at one of its ends that asks for care, and that is bad
OUTSIDE = (0.05, 0.3)  # probability outside the bounds, where the emulator extrapolates
CORRELATED, IN_PART = 0.9, 0.5
EFFECTIVE = 40.0  # independent draws, below which an interval's ends are uncertain by a fifth of its half-width


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
                "Read the intervals as approximate. A calibration with a part of the observations, few enough to be "
                f"compared (docs/model.md), shows whether they hold.{longer}",
            )
        ]
    effective = float(found["effective"])
    sentence = (
        f"A mixture of Gaussians that follows the posterior of θ with all weights integrated out, at "
        f"{plural(int(found['evaluations']), 'point')}; they are worth {figure(effective, 2)} independent draws of it."
    )
    enough = effective >= EFFECTIVE
    advice = "" if enough else "Raise fit.evaluations, and see whether θ changes."
    return [Check(name, "good" if enough else "care", f"{figure(effective, 2)} draws", sentence, advice)]


def contraction(gathered: Gathered) -> list[Check]:
    """What did the data say of each parameter? A posterior that is its prior is sound, and says nothing."""
    found = learned(gathered.posterior)
    groups = {kind: [row.name for row in found if row.kind == kind] for kind in ("learned", "partly", "not learned")}
    parts = []
    if groups["learned"]:
        parts.append(f"Learned: {listed(groups['learned'])}.")
    if groups["partly"]:
        parts.append(f"In part: {listed(groups['partly'])}.")
    if groups["not learned"]:
        parts.append(f"Not learned, the posterior is nearly the prior: {listed(groups['not learned'])}.")
    wider = [  # one mode: with several, an interval spans what lies between them
        row.name
        for j, row in enumerate(found)
        if row.kind != "not learned" and row.narrowed < 0 and mode_count(gathered.posterior, j) == 1
    ]
    if wider:
        parts.append(f"Known less well than before, the interval holds more of the prior than 90 %: {listed(wider)}.")
    nothing = len(groups["not learned"]) == len(found)
    advice = (
        "The observations do not determine these parameters: the output hardly depends on them (see the sensitivity), "
        "the discrepancy can do what they do, or others make up for them. Do not quote their means as findings; "
        "observe where they matter, or fix them."
        if groups["not learned"]
        else ""
    )
    if wider:
        advice = f"{advice} Data seldom tell less than nothing: train longer, or from other starts.".strip()
    name, value = "What was learned", f"{len(groups['learned'])} of {plural(len(found), 'parameter')}"
    return [Check(name, "care" if nothing or wider else "good", value, " ".join(parts), advice)]


def at_bound(gathered: Gathered) -> list[Check]:
    """Does the posterior press against a bound, or reach beyond where the simulator was run?"""
    worst: Status = "good"
    told, value = [], 0.0
    for row in learned(gathered.posterior):
        near, outside = row.at_bound, row.outside
        pressed = near > AT_BOUND[0] and near > 3 * row.prior_at_bound
        status: Status = "good"
        if pressed:
            status = "bad" if near > AT_BOUND[1] else "care"
            told.append(f"{row.name} lies with probability {percent(near)} at an end of its range")
        if outside > OUTSIDE[0]:
            status = "bad" if outside > OUTSIDE[1] else max(status, "care", key=RANK.__getitem__)
            told.append(f"{row.name} lies with probability {percent(outside)} outside the range of the runs")
        worst, value = max(worst, status, key=RANK.__getitem__), max(value, near if pressed else 0.0, outside)
    if not told:
        return [Check("Bounds", "good", "inside", "No parameter presses against an end of its range.")]
    advice = (
        "The true value may lie beyond. Check the bounds and the prior; if they can be wider, run the simulator there "
        "too. If not, the model may be using this parameter to make up for a discrepancy."
    )
    return [Check("Bounds", worst, percent(value), f"{listed(told, most=6)}.", advice)]


def several_modes(gathered: Gathered) -> list[Check]:
    """Is there more than one explanation?"""
    counts = {row.name: mode_count(gathered.posterior, j) for j, row in enumerate(learned(gathered.posterior))}
    several = {name: count for name, count in counts.items() if count > 1}
    if not several:
        return [Check("Modes", "good", "one", "Every parameter has one most probable region.")]
    told = listed([f"{name} has {count}" for name, count in several.items()], most=6)
    return [
        Check(
            "Modes",
            "care",
            str(max(several.values())),
            f"There are several separate explanations of the data: {told} probable regions.",
            "Mean ± sd describes none of them: look at the densities. Observations where the explanations predict "
            "different things would decide.",
        )
    ]


def correlations(gathered: Gathered) -> list[Check]:
    """Are parameters known only together?"""
    names = [v.name for v in gathered.posterior.problem.calibration_inputs]
    if len(names) < 2 or (gathered.record.get("theta") or {}).get("family") == "meanfield":  # there are none, by design
        return []
    matrix = np.nan_to_num(gathered.posterior.correlation())
    pairs = [(float(matrix[i, j]), names[i], names[j]) for i, j in itertools.combinations(range(len(names)), 2)]
    strong = sorted((pair for pair in pairs if abs(pair[0]) > CORRELATED), key=lambda pair: -abs(pair[0]))
    largest = max(pairs, key=lambda pair: abs(pair[0]))
    value = f"at most {abs(largest[0]):.2f}"
    if not strong:
        r, one, other = largest
        sentence = "No two parameters are tied to each other."
        if abs(r) > IN_PART:
            sentence = f"{one} and {other} make up for each other in part ({signed(r)}), others less."
        return [Check("Correlations of θ", "good", value, sentence)]
    told = listed([f"{one} and {other} ({signed(r)})" for r, one, other in strong], most=4)
    return [
        Check(
            "Correlations of θ",
            "care",
            value,
            f"Known together better than each alone: {told}.",
            "Quote them together, or use the draws in posterior.nc: separate intervals lose what is known.",
        )
    ]
