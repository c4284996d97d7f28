"""A check of the noise's tails: observations too far from their predictions for Gaussian noise."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from vcal_dist.answers import to_numpy
from vcal_dist.report.check import Check
from vcal_dist.report.content import Status
from vcal_dist.report.gathering import Gathered, Sample
from vcal_dist.report.row_checks import FEW, LEAST_VALUES, numbered, reliable
from vcal_dist.report.words import figure, plural

FAR = 4.0  # standard deviations: Gaussian noise goes beyond once in 16,000
CHANCE = 2 * float(stats.norm.sf(FAR))
UNLIKELY = (1e-3, 1e-6)  # probability of so many by chance, or of the furthest one, that asks for care; that is bad
EDGE = float(stats.norm.isf(0.05))  # of a 90 % interval, in standard deviations
MAD = float(stats.norm.isf(0.25))  # median absolute deviation of N(0, 1)
MAD_ERROR = 1.17  # its standard error times √n, as a share
THRESHOLD = (
    f"{FAR:g} standard deviations, which Gaussian noise exceeds once in 16,000: care where so many, or one so far off, "
    f"have a probability below {UNLIKELY[0]:g} by chance (binomial), bad where so many have one below {UNLIKELY[1]:g}"
)


def outliers(gathered: Gathered) -> list[Check]:
    """Are there observations that Gaussian noise does not explain?

    A few rows that cannot be left out reliably count too: an outlier is often one, and what is predicted without it
    leans towards it. Rows are counted, not values: outputs of one row are alike.
    """
    sample = gathered.observations
    if sample is None or gathered.member.model.likelihood_y.kind != "gaussian" or reliable(sample) is None:
        return []
    z = standardised(gathered, sample)
    known = np.isfinite(z)
    rows = int(known.any(axis=1).sum())
    if rows < LEAST_VALUES:
        return []
    away = np.abs(np.where(known, z, 0.0)).max(axis=1)  # (B,)
    far = away > FAR
    count, values = int(far.sum()), float(known.sum()) / rows
    so_many = float(stats.binom.sf(count - 1, rows, _any_of(values, CHANCE)))
    so_far = _any_of(rows * values, 2 * float(stats.norm.sf(away.max())))
    status: Status = "bad" if so_many < UNLIKELY[1] else "care" if min(so_many, so_far) < UNLIKELY[0] else "good"
    all_rows = plural(rows, "observation")
    sentence = f"None of {all_rows} lies further than {FAR:g} standard deviations from its prediction."
    if count:
        sentence = (
            f"{count:,} of {all_rows}{numbered(sample, far)} {'lies' if count == 1 else 'lie'} further than {FAR:g} "
            f"standard deviations from what is predicted, at most {figure(float(away.max()), 2)}; "
        )
        sentence += "chance allows that." if status == "good" else "Gaussian noise does that to one of 16,000."
    advice = (
        ""
        if status == "good"
        else "Look at these rows for mistakes. If they are real, allow heavier tails "
        "(model.likelihood_y.kind=student_t): under Gaussian noise a few of them move θ, and widen the noise of all."
    )
    return [Check("Outliers", status, f"{count:,} of {rows:,}", sentence, advice, float(count), THRESHOLD)]


def standardised(gathered: Gathered, sample: Sample) -> NDArray[np.float64]:
    """Residuals in standard deviations, (B, K), on the scale of the outputs' transforms; NaN where y is not known.

    The predicted standard deviation is that of the 90 % interval. Outliers widen the noise that was fitted, and then
    hide behind it: if a tenth of the rows are, they lie at most √10 such standard deviations away. So where the middle
    of the residuals spreads by clearly less than predicted (three standard errors), its spread is the measure.
    """
    outputs, judged = gathered.member.scaling.outputs, sample.judged
    y, low, high = (
        to_numpy(outputs(torch.from_numpy(part), check=False)) for part in (judged.y, judged.low, judged.high)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        z: NDArray[np.float64] = (y - (low + high) / 2) / ((high - low) / (2 * EDGE))
    for column in z.T:
        known = column[np.isfinite(column)]
        if len(known) >= FEW:
            column -= np.median(known)
            spread = float(np.median(np.abs(known - np.median(known)))) / MAD
            column /= min(1.0, max(spread * (1 + 3 * MAD_ERROR / math.sqrt(len(known))), 1e-6))
    return z


def _any_of(count: float, chance: float) -> float:
    """The probability that one or more of so many happen: 1 − (1 − p)ⁿ."""
    return -math.expm1(count * math.log1p(-chance)) if chance < 1 else 1.0
