"""Checks of θ: what was learned, and whether a few numbers can tell it."""

from __future__ import annotations

import itertools

import numpy as np
from scipy import stats

from storage.priors import Uniform
from vcal_dist.report.check import RANK, Check
from vcal_dist.report.content import Status
from vcal_dist.report.design_checks import never_varied
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.parameters import EDGE, HALF, LEAST_MASS, SAME, VALLEY, learned, mode_count
from vcal_dist.report.words import figure, listed, percent, plural, signed

AT_BOUND = (0.2, 0.6)  # probability within 2 % of the range at one of its ends that asks for care, and that is bad
OUTSIDE = (0.05, 0.3)  # probability outside the bounds, where the emulator extrapolates
CORRELATED, IN_PART = 0.9, 0.5
CONFLICT = (2.0, 3.0)  # θ̃ of a single parameter's mean: 5 % and 0.3 % of the prior lie further out
LEARNED_THRESHOLD = (
    f"learned: the 90 % interval rules out {percent(HALF)} of the prior's; not learned: a total variation below "
    f"{SAME:g} from the prior. Figures by name are contractions, 1 − Var(posterior)/Var(prior) (Schad, Betancourt and "
    "Vasishth 2021): near 1 the data decide, near 0 the prior"
)
BOUND_THRESHOLD = (
    f"a probability of {AT_BOUND[0]:g} (care) and {AT_BOUND[1]:g} (bad) within {percent(EDGE)} of an end of the range, "
    f"and three times the prior's; of {OUTSIDE[0]:g} and {OUTSIDE[1]:g} outside, where the emulator extrapolates"
)
MODES_THRESHOLD = (
    f"one region: modes are apart where the density between them falls below {percent(VALLEY)} of the lower one's and "
    f"each holds {percent(LEAST_MASS)}"
)
CORRELATION_THRESHOLD = f"|r| = {CORRELATED:g}: above, an interval given the other parameter is less than half as wide"


def contraction(gathered: Gathered) -> list[Check]:
    """What did the data say of each parameter? A posterior that is its prior is sound, and says nothing."""
    found = learned(gathered.posterior)
    constant = never_varied(gathered)
    groups = {
        kind: [row.name for row in found if row.kind == kind and row.name not in constant]
        for kind in ("learned", "partly", "not learned")
    }
    parts = []
    still = [row.name for row in found if row.name in constant]
    if still:
        parts.append(f"Never varied in the runs, so that nothing can be learned of it: {listed(still)}.")
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
    nothing = len(groups["not learned"]) + len(still) == len(found)
    advice = (
        "The observations do not determine these parameters: the output hardly depends on them (see the sensitivity), "
        "the discrepancy can do what they do, or others make up for them. Do not quote their means as findings; "
        "observe where they matter, or fix them."
        if groups["not learned"]
        else ""
    )
    if still:
        advice = f"Vary {listed(still)} in the runs, or take it out of the calibration inputs. {advice}".strip()
    if wider:
        advice = f"{advice} Data seldom tell less than nothing: train longer, or from other starts.".strip()
    name, value = "What was learned", f"{len(groups['learned'])} of {plural(len(found), 'parameter')}"
    status: Status = "bad" if still else "care" if nothing or wider else "good"
    number, numbers = float(len(groups["learned"])), {row.name: row.contraction for row in found}
    return [Check(name, status, value, " ".join(parts), advice, number, LEARNED_THRESHOLD, numbers)]


def prior_conflict(gathered: Gathered) -> list[Check]:
    """Do the data pull a parameter into a tail of its prior? θ̃ is N(0, 1) under it, whatever the prior is.

    A uniform prior has no tails: what presses against its ends is seen by `at_bound`.
    """
    inputs, theta = gathered.posterior.problem.calibration_inputs, gathered.posterior.theta
    means = (theta.log_weights.exp() @ theta.means).tolist()
    numbers = {v.name: m for v, m in zip(inputs, means, strict=True) if not isinstance(v.prior, Uniform)}
    if not numbers:
        return []
    # Of several parameters, the furthest one has wider limits (Bonferroni).
    limits = [float(stats.norm.isf(stats.norm.sf(limit) / len(numbers))) for limit in CONFLICT]
    far = {name: mean for name, mean in numbers.items() if abs(mean) > limits[0]}
    most = max(numbers.values(), key=abs)
    status: Status = "good" if not far else "care" if abs(most) <= limits[1] else "bad"
    sentence = "Every parameter's mean is where its prior made it probable."
    advice = ""
    if far:
        tails = [f"{name} ({signed(mean, 1)} of its standard deviations)" for name, mean in far.items()]
        sentence = f"The data pull a parameter's mean into the tail of its prior: {listed(tails, most=6)}."
        advice = (
            "Prior and data disagree. Check the prior, its units, and the observations; if the prior is a guess, widen "
            "it. If it is knowledge, the parameter may be making up for a discrepancy that the model cannot follow."
        )
    worst = "" if len(numbers) == 1 else f" of the furthest of {len(numbers)}"
    threshold = (
        f"{figure(limits[0], 2)} (care) and {figure(limits[1], 2)} (bad) prior standard deviations of θ̃: chance has "
        f"5 % and 0.3 %{worst} beyond; for prior–data conflict, Evans and Moshonov (2006)"
    )
    value = f"at most {figure(abs(most), 2)} sd"
    return [Check("Prior and data", status, value, sentence, advice, abs(most), threshold, numbers)]


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
        inside = "No parameter presses against an end of its range."
        return [Check("Bounds", "good", "inside", inside, "", 0.0, BOUND_THRESHOLD)]
    advice = (
        "The true value may lie beyond. Check the bounds and the prior; if they can be wider, run the simulator there "
        "too. If not, the model may be using this parameter to make up for a discrepancy."
    )
    return [Check("Bounds", worst, percent(value), f"{listed(told, most=6)}.", advice, value, BOUND_THRESHOLD)]


def several_modes(gathered: Gathered) -> list[Check]:
    """Is there more than one explanation?"""
    counts = {row.name: mode_count(gathered.posterior, j) for j, row in enumerate(learned(gathered.posterior))}
    several = {name: count for name, count in counts.items() if count > 1}
    if not several:
        one = "Every parameter has one most probable region."
        return [Check("Modes", "good", "one", one, "", 1.0, MODES_THRESHOLD)]
    told = listed([f"{name} has {count}" for name, count in several.items()], most=6)
    return [
        Check(
            "Modes",
            "care",
            str(max(several.values())),
            f"There are several separate explanations of the data: {told} probable regions.",
            "Mean ± sd describes none of them: look at the densities. Observations where the explanations predict "
            "different things would decide.",
            float(max(several.values())),
            MODES_THRESHOLD,
            {name: float(count) for name, count in counts.items()},
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
        return [Check("Correlations of θ", "good", value, sentence, "", abs(r), CORRELATION_THRESHOLD)]
    told = listed([f"{one} and {other} ({signed(r)})" for r, one, other in strong], most=4)
    return [
        Check(
            "Correlations of θ",
            "care",
            value,
            f"Known together better than each alone: {told}.",
            "Quote them together, or use the draws in posterior.nc: separate intervals lose what is known.",
            abs(largest[0]),
            CORRELATION_THRESHOLD,
        )
    ]
