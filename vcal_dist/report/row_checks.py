"""Checks of rows that training did not see: are observations and runs predicted as well as is said?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from vcal_dist.leave_one_out import RELIABLE
from vcal_dist.report.check import RANK, Check
from vcal_dist.report.content import Status
from vcal_dist.report.gathering import Gathered, Sample
from vcal_dist.report.words import figure, listed, percent, plural

LEVEL = 0.9  # of the intervals whose coverage is counted
BAND = 0.95  # of a binomial count inside which coverage is as it should be, ...
FAR = 0.999  # ... and outside which it is no accident
TOLERANCE = 0.03  # a coverage that is off by less does no harm, however many rows say so
LOW_COVERAGE = 0.8  # below, intervals promise far too much
TOO_WIDE = 0.97  # above, intervals are wider than they need be
UNLIKELY = 0.01  # p-value of the Kolmogorov–Smirnov test of PIT values, ...
DISTANCE = (0.08, 0.2)  # ... which counts from these distances on: rows by the thousand find any flaw
MOST_UNRELIABLE = 0.5  # share of rows with k̂ above 0.7 that leaves nothing to judge by; fewer ask for care
FEW = 20  # observations: fewer cannot show that intervals are too narrow
DISCRETE = ("poisson", "bernoulli")
LEAST_VALUES = 5  # whose distribution means something
AS_FITTED = "at the hyperparameters that all rows gave"
MIDDLE = "Too many lie in the middle: the predictions are less sure than they could be."
WIDER = (
    "The intervals are wider than they need be: safe, but not sharp. Check that the observations' own noise is not "
    "stated too large, and that the emulator is accurate enough."
)
COVERAGE_THRESHOLD = (
    f"{percent(LEVEL)} of the rows, give or take {percent(TOLERANCE)} or what chance allows of so many (a "
    f"{percent(BAND)} band of the binomial distribution); bad below {percent(LOW_COVERAGE)} where that is beyond its "
    f"{percent(FAR)} band; care above {percent(TOO_WIDE)}"
)
PIT_THRESHOLD = (
    f"a Kolmogorov–Smirnov distance of {DISTANCE[0]:g} (care) and {DISTANCE[1]:g} (bad) with a p-value below "
    f"{UNLIKELY:g}; PIT values are uniform where predictions are right (Gneiting, Balabdaoui and Raftery 2007)"
)
LEFT_OUT_THRESHOLD = (
    f"k̂ = {RELIABLE:g} of a row (Vehtari, Simpson, Gelman, Yao and Gabry 2024): care from one row on, bad above "
    f"{percent(MOST_UNRELIABLE)} of the observations"
)


def coverage_of_observations(gathered: Gathered) -> list[Check]:
    """Do 90 % intervals of new observations hold 90 % of them?"""
    found = covered(gathered, "observations")
    if found is None:
        advice = "Keep some observations out of training and predict them (vcal predict)"
        if gathered.observations is not None:
            why = "leaving them out one by one is not reliable here (see “Leaving out observations”)"
        else:
            why = gathered.unreachable or "no observation was kept out of training"
            advice += ", or bring the store back to where the run found it" if gathered.unreachable else ""
        return [
            Check(
                "Coverage of observations",
                "care",
                "unknown",
                f"Nothing says how well unseen observations are predicted: {why}.",
                f"{advice}.",
                threshold=COVERAGE_THRESHOLD,
            )
        ]
    rows, share, worst = found[:3]
    status, side = judge_coverage(share, rows)
    unseen = "that training did not see " if is_held_out(gathered, "observations") else ""
    left_out = "" if unseen else f", each predicted as if it had been left out ({AS_FITTED})"
    inside = "lies inside its 90 % interval" if rows == 1 else "lie inside their 90 % intervals"
    values = f"{plural(found.values, 'value')} of " if found.values > rows else ""
    aside = f" ({found.aside:,} more cannot be left out reliably, and do not count)" if found.aside else ""
    sentence = (
        f"{percent(share)} of the {values}{plural(rows, 'observation')} {unseen}{inside}{left_out}{aside}; "
        f"{_expected(rows)} is what chance allows."
    )
    if worst is not None and RANK[worst.status] > RANK[status]:
        status, side = worst.status, worst.side
        sentence += f" {worst}"
    if rows < FEW and status == "good":
        status, side = "care", "few"
        sentence += " So few can hardly show that the intervals are wrong."
    advice = {
        "few": "Nothing speaks against the result, and little for it: more observations would test it.",
        "low": "The intervals are too narrow. Let the discrepancy be more flexible (model.discrepancy=general, more "
        "features, shorter length scales), allow heavier tails (model.likelihood_y.kind=student_t), and look for "
        "outliers among the residuals.",
        "high": WIDER,
        "": "",
    }[side]
    return [Check("Coverage of observations", status, percent(share), sentence, advice, share, COVERAGE_THRESHOLD)]


def coverage_of_runs(gathered: Gathered) -> list[Check]:
    """Do the emulator's 90 % intervals hold 90 % of the runs? Too wide ones do no harm: they only add to the noise."""
    found = covered(gathered, "runs")
    if found is None:
        return []
    rows, share, worst = found[:3]
    runs = distinct_runs(gathered.runs, rows)
    status, side = judge_coverage(share, runs)  # rows of one run are siblings, and no independent tests
    unseen, counted = is_held_out(gathered, "runs"), plural(rows, "run")
    if runs < rows:
        counted = f"{plural(rows, 'row')} of {plural(runs, 'run')}"
    which = f"{counted}, each run predicted without it,"
    if method_of(gathered, "runs") == "leave one out":
        which = f"{counted}, each row left out in turn,"
    elif unseen:
        which = f"{counted} that training did not see"
    sentence = f"{percent(share)} of {which} lie inside the emulator's 90 % intervals."
    if worst is not None and worst.side == "low" and RANK[worst.status] > RANK[status if side == "low" else "good"]:
        status, side = worst.status, worst.side
        sentence += f" {worst}"
    if side == "high":
        status, sentence = "good", f"{sentence} Wider than need be, which is safe."
    advice = (
        "The emulator is surer than it should be: give it more features (model.eta.features.features), more steps "
        "(fit.emulator.steps), hidden layers, a transform of the output, or more runs."
        if side == "low"
        else ""
    )
    return [Check("Coverage of runs", status, percent(share), sentence, advice, share, COVERAGE_THRESHOLD)]


def judge_coverage(share: float, rows: int, among: int = 1) -> tuple[Status, str]:
    """What a share inside 90 % intervals says, of so many rows; and on which side it is off: low, high or neither.

    Outputs of one row are alike, so rows and not values are counted. One of several outputs has the wider band of the
    worst `among` so many (Bonferroni).
    """
    band, far = (1 - (1 - level) / among for level in (BAND, FAR))
    low, high = (edge / rows for edge in stats.binom.interval(band, rows, LEVEL))
    if low <= share <= high or abs(share - LEVEL) <= TOLERANCE:
        return "good", ""
    if share > LEVEL:
        return ("care", "high") if share > TOO_WIDE else ("good", "")
    beyond_chance = share < stats.binom.interval(far, rows, LEVEL)[0] / rows
    return ("bad" if beyond_chance and share < LOW_COVERAGE else "care"), "low"


def pit_uniformity(gathered: Gathered) -> list[Check]:
    """Are the predicted distributions the right ones? Then the values' places in them are uniform."""
    sample = gathered.observations
    if sample is None or (rows := reliable(sample)) is None:
        return []
    names = [output.name for output in gathered.posterior.problem.outputs]
    pit = sample.judged.pit[rows]
    looked = [(judge_places(pit, int(rows.sum())), "")]
    if len(names) > 1:  # one of many that is wrong is lost among the others
        looked += [
            (judge_places(pit[:, k], among=len(names)), f" For '{name}', the worst of {len(names)} outputs:")
            for k, name in enumerate(names)
        ]
    known = [(found, about) for found, about in looked if found is not None]
    if not known:
        return []
    (status, distance, shape), about = max(known, key=lambda look: (RANK[look[0].status], look[1] == "", look[0][1]))
    unseen = "unseen observations" if is_held_out(gathered, "observations") else "observations that are left out"
    sentence = f"Places of {unseen} within their predicted distributions (PIT).{about} {shape}"
    advice = ""
    if status != "good":
        advice = (
            WIDER
            if shape == MIDDLE
            else "Look at the residuals against each input: a trend there is a discrepancy that the model cannot "
            "follow; a steady offset may be a unit or a bias of the instrument."
        )
    value = f"distance {figure(distance, 2)}"
    return [Check("Shape of predictions", status, value, sentence, advice, distance, PIT_THRESHOLD)]


class Places(NamedTuple):
    """What PIT values say: their distance from uniform ones (Kolmogorov–Smirnov), and their shape in words."""

    status: Status
    distance: float
    shape: str


def judge_places(pit: NDArray[np.float64], rows: int | None = None, among: int = 1) -> Places | None:
    """Of `rows` rows (else one a value), the worst `among` so many outputs; None where too few are known."""
    pit = pit[~np.isnan(pit)]
    if len(pit) < LEAST_VALUES:
        return None
    distance = float(stats.kstest(pit, "uniform").statistic)
    p_value = float(stats.kstwo.sf(distance, rows or len(pit)))  # outputs of one row are alike: rows count, not values
    if p_value >= UNLIKELY / among or distance <= DISTANCE[0]:
        return Places("good", distance, "They spread as evenly as chance allows.")
    shape = pit_shape(pit)
    # Predictions that are less sure than they could be are no reason not to trust them.
    return Places("bad" if distance > DISTANCE[1] and shape != MIDDLE else "care", distance, shape)


def pit_shape(pit: NDArray[np.float64]) -> str:
    """In words: a shift where the mean is off, otherwise a width that is."""
    mean, spread = float(pit.mean()), float(pit.var() * 12)  # of a uniform: ½ and 1
    if abs(mean - 0.5) > 0.1:
        side = "above" if mean > 0.5 else "below"
        return f"Observations tend to lie {side} their predictions."
    if spread > 1:
        return "Too many lie in the tails: the predictions are surer than they should be."
    return MIDDLE


def left_out(gathered: Gathered) -> list[Check]:
    """Can leaving out be computed without training again? k̂ of its importance weights says for which rows."""
    found: list[Check] = []
    for table in ("observations", "runs"):
        sample = gathered.sample(table)
        if sample is None or sample.judged.method != "leave one out":
            continue
        bad = int(np.sum(sample.judged.unreliable))
        share = bad / sample.rows
        status: Status = "good" if bad == 0 else "care" if share <= MOST_UNRELIABLE else "bad"
        # Runs matter less: their emulator is judged by what it does to the observations.
        status = "care" if table == "runs" and status == "bad" else status
        sentence = (
            f"Leaving out one of the {sample.rows:,} {table} at a time is reliable for all of them."
            if bad == 0
            else f"For {plural(bad, table.removesuffix('s'))} of {sample.rows:,}"
            f"{numbered(sample, sample.judged.unreliable)}, what is predicted without it is uncertain: it carries so "
            "much of what is known that the posterior without it cannot be told from this one (k̂, the tail of its "
            "importance weights, is above 0.7)."
        )
        advice = (
            "" if bad == 0 else "Look at these rows for mistakes. More rows near them would make the result firmer."
        )
        name, value = f"Leaving out {table}", f"{bad} of {sample.rows:,}"
        found.append(Check(name, status, value, sentence, advice, float(bad), LEFT_OUT_THRESHOLD))
    return found


@dataclass(frozen=True)
class Worst:
    """The output whose coverage is furthest off, of several."""

    status: Status
    side: str
    name: str
    share: float
    among: int

    def __str__(self) -> str:
        return f"Of '{self.name}', the worst of {self.among} outputs, {percent(self.share)} do."


class Covered(NamedTuple):
    """Rows, the share of their values inside their intervals, and the worst of several outputs."""

    rows: int
    share: float
    worst: Worst | None = None
    aside: int = 0  # rows that cannot be left out reliably, and do not count
    values: int = 0  # of all outputs of these rows


def covered(gathered: Gathered, table: str) -> Covered | None:
    """How many values lie inside their 90 % intervals; None where nothing can be said.

    Rows that cannot be left out reliably are left aside. Without rows, what training has recorded counts.
    """
    model = gathered.member.model
    discrete = (model.likelihood_z if table == "runs" else model.likelihood_y).kind in DISCRETE
    sample = gathered.sample(table)
    if sample is not None:
        rows = reliable(sample)
        if rows is None:
            return None
        judged = sample.judged
        inside = (judged.y >= judged.low) & (judged.y <= judged.high)
        if discrete:  # an interval of values that y can take holds more than 90 %: chance decides at its ends (PIT)
            inside = np.abs(judged.pit - 0.5) <= LEVEL / 2
        known = ~np.isnan(judged.y) & rows[:, None]
        names = [output.name for output in gathered.posterior.problem.outputs]
        count = int(rows.sum())
        share, worst = float(inside[known].mean()), _worst(names, inside, known)
        return Covered(count, share, worst, sample.rows - count, int(known.sum()))
    recorded = (gathered.record.get("assessment") or {}).get(table)
    if recorded is None or discrete or recorded.get("unreliable", 0) > MOST_UNRELIABLE * recorded["rows"]:
        return None
    return Covered(int(recorded["rows"]), float(recorded["coverage"]))


def _worst(names: list[str], inside: NDArray[np.bool_], known: NDArray[np.bool_]) -> Worst | None:
    """Pooled, one output that is always missed would be lost among the others."""
    found = []
    for k, name in enumerate(names):
        rows = int(known[:, k].sum())
        if rows and len(names) > 1:
            share = float(inside[known[:, k], k].mean())
            found.append(Worst(*judge_coverage(share, rows, len(names)), name, share, len(names)))
    return max(found, key=lambda worst: (RANK[worst.status], -worst.share), default=None)


def is_held_out(gathered: Gathered, table: str) -> bool:
    """Whether rows that are judged were held out of training, and not left out in turn."""
    return method_of(gathered, table) == "held out"


def method_of(gathered: Gathered, table: str) -> str:
    """How the rows that are judged were kept from what predicts them."""
    sample = gathered.sample(table)
    if sample is not None:
        return sample.judged.method
    recorded = (gathered.record.get("assessment") or {}).get(table) or {}
    return str(recorded.get("method", "held out"))


def distinct_runs(sample: Sample | None, rows: int) -> int:
    """How many runs the judged rows belong to: those with the same calibration inputs are one."""
    if sample is None or sample.judged.t is None:
        return rows
    return min(rows, len(np.unique(sample.judged.t, axis=0)))


def reliable(sample: Sample) -> NDArray[np.bool_] | None:
    """The rows that were not seen, or can be left out reliably; None if these are the fewer."""
    rows: NDArray[np.bool_] = ~sample.judged.unreliable
    return rows if rows.mean() >= 1 - MOST_UNRELIABLE else None


def numbered(sample: Sample, rows: NDArray[np.bool_]) -> str:
    """Which rows these are, counted from 0 as `vcal ingest` does."""
    if sample.numbers is None:
        return ""
    numbers = [f"{i:,}" for i in sample.numbers[rows]]
    return f" (row{'s' if len(numbers) > 1 else ''} {listed(numbers, most=8)}, counted from 0)"


def _expected(rows: int) -> str:
    low, high = stats.binom.interval(BAND, rows, LEVEL)
    return f"{percent(low / rows)} to {percent(high / rows)}"
