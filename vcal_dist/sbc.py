"""Simulation-based calibration: whether truths lie where posteriors say that they do, over many replicates.

A replicate draws θ* from its prior and data given θ*, and finds the posterior of θ from them. If that is right,
u = P(θ ≤ θ* | data), the posterior's CDF at the truth (its PIT value), is uniform on (0, 1), parameter by parameter
(Cook, Gelman and Rubin 2006; Talts et al. 2018 have the rank of θ* among draws in its place). Four tests ask whether
it is, of

    location   the mean of u: above ½ truths lie above the posterior, which is biased low
    spread     the mean of |2u − 1|, the level from which a central interval holds the truth: above ½ intervals are too
               narrow. It is one less the area under the curve of coverage against the level
    tails      the u nearest to an end: a mode that is missed now and then, which the others do not notice
    shape      all of u: its ECDF against a band that holds the whole of it (Säilynoja, Bürkner and Vehtari 2022)

Nothing here knows where PIT values come from: of `vcal_dist.replicates`, or of anything else that has posteriors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

from vcal_dist.errors import ModelError

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Floats = tuple[float, ...]
Verdict = Literal[
    "covers as promised",
    "intervals too narrow",
    "intervals too wide",
    "biased low",
    "biased high",
    "truths far outside",  # now and then
    "not as promised",  # in another way: only the shape tells
    "too few replicates",
]

LEVELS = (0.5, 0.8, 0.9, 0.95)  # of intervals whose coverage is told
BAND = 0.99  # of a binomial band
TOGETHER = 0.95  # of a band around a whole curve
THRESHOLD = 0.05  # of p-values, over all tests of all parameters
FEWEST = 20  # replicates below which nothing found means nothing known
POINTS = 100  # of an ECDF that are compared with a band
BINS, PER_BIN = (5, 20), 10  # fewest and most, and replicates in each
FAR = 1e-6  # a truth with less of the posterior on one side of it is far outside
STEPS = 40  # of a bisection


@dataclass(frozen=True)
class Told:
    """What one calibration said of its truth: a value for each parameter. Only `pit` is needed."""

    pit: Floats
    truth: Floats = ()  # these in the user's units
    mean: Floats = ()
    sd: Floats = ()
    intervals: Mapping[float, Sequence[tuple[float, float]]] = field(default_factory=dict)  # by their level


@dataclass(frozen=True)
class Banded:
    """Figures at points, each with the band in which chance leaves it."""

    at: Floats
    value: Floats
    low: Floats
    high: Floats


@dataclass(frozen=True)
class Assessment:
    """One parameter over all replicates."""

    name: str
    replicates: int
    verdict: Verdict
    p: float  # of all tests of all parameters together: Bonferroni over tests, Holm over parameters
    tests: Mapping[str, float]  # p-values of each alone
    coverage: Banded  # at `LEVELS`, each with a band of 99 %
    curve: Banded  # the same at all levels, with a band of 95 % for all of it
    histogram: Banded  # counts of u in bins around `at`, each with a band of 99 %
    ecdf: Banded  # ECDF of u less u, with a band of 95 % for all of it
    pit: Floats
    z: Floats  # (posterior mean − truth)/posterior sd of each replicate; empty where these are not known
    contraction: Floats  # 1 − (posterior sd/prior sd)², likewise
    far: tuple[int, ...]  # replicates, counted from 0 as they came, whose truth is far outside the posterior


def assess(names: Sequence[str], told: Iterable[Told], prior_sd: Sequence[float] | None = None) -> list[Assessment]:
    """Judges every parameter, `names` in the order that replicates have them in.

    Coverage is that of the intervals that are told, or of central ones where none are.

    >>> rng = np.random.default_rng(0)
    >>> found = assess(["a", "b"], [Told(pit=(rng.random(), rng.random() / 2)) for _ in range(100)])
    >>> [parameter.verdict for parameter in found]
    ['covers as promised', 'biased high']
    """
    told = list(told)
    if not told:
        raise ModelError("there is no replicate to judge; give at least one")
    pit = np.array([one.pit for one in told], np.float64).reshape(len(told), -1)  # (R, d2)
    if pit.shape[1] != len(names):
        raise ModelError(
            f"replicates have {pit.shape[1]} PIT values for the {len(names)} parameters {', '.join(names)}"
        )
    wrong = ~((pit >= 0) & (pit <= 1))
    if wrong.any():
        i, j = (int(index) for index in np.argwhere(wrong)[0])
        raise ModelError(f"the PIT value of '{names[j]}' is {pit[i, j]} in replicate {i}; accepted: from 0 to 1")
    tests = [_tests(column) for column in pit.T]
    adjusted = holm([min(1.0, len(of) * min(of.values())) for of in tests])
    known = all(len(one.truth) == len(one.mean) == len(one.sd) == len(names) for one in told)
    found = []
    for j, (name, u) in enumerate(zip(names, pit.T, strict=True)):
        z, contraction = [], []
        if known:
            z = [(one.mean[j] - one.truth[j]) / one.sd[j] for one in told]
        if known and prior_sd is not None:
            contraction = [1 - (one.sd[j] / prior_sd[j]) ** 2 for one in told]
        found.append(
            Assessment(
                name=name,
                replicates=len(told),
                verdict=_verdict(u, tests[j], adjusted[j]),
                p=adjusted[j],
                tests=tests[j],
                coverage=coverage(u) if not known else _coverage_told(told, j, u),
                curve=curve(u),
                histogram=histogram(u),
                ecdf=ecdf_difference(u),
                pit=_floats(u),
                z=tuple(z),
                contraction=tuple(contraction),
                far=tuple(np.flatnonzero((u < FAR) | (u > 1 - FAR)).tolist()),
            )
        )
    return found


def pit_of_ranks(ranks: ArrayLike, draws: int) -> Array:
    """PIT values of truths with so many of a posterior's draws below them, for posteriors that are draws only.

    They are the middles of the draws + 1 places that a truth can have, so that draws should be many.
    """
    ranks = np.asarray(ranks, np.float64)
    if draws < 1 or not ((ranks >= 0) & (ranks <= draws)).all():
        raise ModelError(f"ranks among {draws} draws must lie between 0 and {draws}, and draws be 1 or more")
    return np.asarray((ranks + 0.5) / (draws + 1), np.float64)


def coverage(pit: Array, levels: Sequence[float] = LEVELS) -> Banded:
    """The share of truths inside central intervals of some levels."""
    return _shares([np.abs(2 * pit - 1) <= level for level in levels], levels)


def binomial_band(count: int, probability: ArrayLike, level: float = BAND) -> tuple[Array, Array]:
    """What a binomial number lies between with at least the probability `level`, with equal tails."""
    low, high = (stats.binom.ppf(p, count, probability) for p in ((1 - level) / 2, (1 + level) / 2))
    return np.asarray(low, np.float64), np.asarray(high, np.float64)


def histogram(pit: Array) -> Banded:
    """Counts of u in bins of one width."""
    count = len(pit)
    bins = min(max(count // PER_BIN, BINS[0]), BINS[1])
    counts, edges = np.histogram(pit, bins, (0.0, 1.0))
    low, high = binomial_band(count, np.full(bins, 1 / bins))
    return Banded(_floats((edges[:-1] + edges[1:]) / 2), _floats(counts), _floats(low), _floats(high))


def ecdf_difference(pit: Array, level: float = TOGETHER) -> Banded:
    """ECDF(u) − u, which is easier to see than the ECDF itself."""
    at, share, low, high = _ecdf(pit, level)
    return Banded(_floats(at), _floats(share - at), _floats(low - at), _floats(high - at))


def curve(pit: Array, level: float = TOGETHER) -> Banded:
    """Coverage of central intervals against their level: the ECDF of |2u − 1|, which is uniform too."""
    return Banded(*(_floats(part) for part in _ecdf(np.abs(2 * pit - 1), level)))


def simultaneous_band(count: int, level: float = TOGETHER) -> tuple[Array, Counts, Counts]:
    """Points in (0, 1), and the least and most of so many uniform numbers that lie below each of them.

    All points at once hold with at least the probability `level`: the band has the same tail probability at each, the
    largest with which it does.
    """
    low, high = -60.0, 0.0  # of the tail probability's logarithm
    for _ in range(STEPS):
        middle = (low + high) / 2
        if _stays(count, np.exp(middle)) >= level:
            low = middle
        else:
            high = middle
    return (_points(count), *_within(count, np.exp(low)))


def holm(p: Sequence[float]) -> list[float]:
    """p-values of several tests such that the smallest is below a threshold no more often than it says (Holm 1979)."""
    order = np.argsort(p)
    factors = np.arange(len(p), 0, -1)
    adjusted = np.minimum(np.maximum.accumulate(np.asarray(p)[order] * factors), 1.0)
    return [float(adjusted[place]) for place in np.argsort(order)]


def _tests(pit: Array) -> dict[str, float]:
    """p-values of the tests.

    The mean of R uniform numbers has a standard deviation of 1/√(12R). It is hardly told from a normal one, whose tails
    are the heavier: p-values of few replicates are too large, if anything.
    """
    location, spread = (2 * float(special.ndtr(-abs(z))) for z in _scores(pit))
    nearest = float(2 * np.minimum(pit, 1 - pit).min())  # to an end, the least of R uniform numbers
    with np.errstate(divide="ignore"):
        tails = float(-np.expm1(len(pit) * np.log1p(-nearest)))  # 1 − (1 − nearest)ᴿ
    return {"location": location, "spread": spread, "tails": tails, "shape": _p_of_shape(pit)}


def _scores(pit: Array) -> tuple[float, float]:
    root = np.sqrt(12 * len(pit))
    return float((pit.mean() - 0.5) * root), float((np.abs(2 * pit - 1).mean() - 0.5) * root)


def _verdict(pit: Array, tests: Mapping[str, float], p: float) -> Verdict:
    """In words: what is certain over all tests and parameters, named by what is most unlike chance."""
    if p > THRESHOLD:
        return "covers as promised" if len(pit) >= FEWEST else "too few replicates"
    directed, alone = min(tests["location"], tests["spread"]), THRESHOLD / len(tests)
    if tests["tails"] < alone < directed:
        return "truths far outside"
    if directed > THRESHOLD:
        return "not as promised"
    location, spread = _scores(pit)
    if abs(location) > abs(spread):
        return "biased low" if location > 0 else "biased high"
    return "intervals too narrow" if spread > 0 else "intervals too wide"


def _coverage_told(told: Sequence[Told], j: int, pit: Array) -> Banded:
    """Coverage of the intervals that replicates came with, if all of them did."""
    if not all(set(LEVELS) <= set(one.intervals) for one in told):
        return coverage(pit)
    inside = []
    for level in LEVELS:
        ends = np.array([one.intervals[level][j] for one in told])  # (R, 2)
        truth = np.array([one.truth[j] for one in told])
        inside.append((ends[:, 0] <= truth) & (truth <= ends[:, 1]))
    return _shares(inside, LEVELS)


def _shares(inside: Sequence[NDArray[np.bool_]], levels: Sequence[float]) -> Banded:
    count = len(inside[0])
    low, high = binomial_band(count, np.asarray(levels))
    return Banded(
        tuple(levels), tuple(float(part.mean()) for part in inside), _floats(low / count), _floats(high / count)
    )


# --- an ECDF and its band ---------------------------------------------------------------------------------------------


def _ecdf(values: Array, level: float) -> list[Array]:
    """Points, the share of values up to each, and the ends of its band; from 0 to 1, where there is nothing to see."""
    count = len(values)
    at, low, high = _band(count, level)
    parts = (at, _below(values, at) / count, low / count, high / count)
    return [np.concatenate([[0.0], part, [1.0]]) for part in parts]


_band = cache(simultaneous_band)  # the same for all parameters


def _points(count: int) -> Array:
    """i/K: as many as there are values, up to `POINTS`, without the ends."""
    points = min(max(count, 2), POINTS)
    return np.arange(1, points) / points


def _below(values: Array, at: Array) -> Counts:
    return np.searchsorted(np.sort(values), at, side="right")


@cache
def _tails(count: int) -> Array:
    """p-values, with two tails, of 0, 1, … of so many uniform numbers below each point: (K − 1, count + 1)."""
    numbers, at = np.arange(count + 1), _points(count)[:, None]
    lower, upper = stats.binom.cdf(numbers, count, at), stats.binom.sf(numbers - 1, count, at)
    return np.minimum(2 * np.minimum(lower, upper), 1.0)


def _within(count: int, tail: float) -> tuple[Counts, Counts]:
    """The least and most numbers below each point with a p-value above `tail`; none if the least is above the most."""
    inside = _tails(count) > tail
    low, high = inside.argmax(1), count - inside[:, ::-1].argmax(1)
    return np.where(inside.any(1), low, 1), np.where(inside.any(1), high, 0)


def _stays(count: int, tail: float) -> float:
    """The probability that p-values at all points are above `tail`, exactly, from one point to the next.

    Of N numbers of which k lie below the last point, the binomially many N − k that do not may lie below the next.
    """
    low, high = _within(count, tail)
    if (low > high).any():
        return 0.0
    at = _points(count)
    before, numbers, reached = np.ones(1), np.zeros(1, np.int64), 0.0  # of 0 numbers below 0
    for point, least, most in zip(at, low, high, strict=True):
        share = (point - reached) / (1 - reached)
        here = np.arange(least, most + 1)
        step = here[:, None] - numbers  # (H, B)
        log_p = _log_choose(count - numbers, step) + step * np.log(share) + (count - here[:, None]) * np.log1p(-share)
        before = np.exp(np.where(step >= 0, log_p, -np.inf)) @ before
        numbers, reached = here, point
    return float(before.sum())


def _log_choose(n: Counts, k: Counts) -> Array:
    """log n!/(k!(n − k)!), and anything where k is negative."""
    table = _log_factorials(int(n.max()))
    taken = np.maximum(k, 0)
    return table[n] - table[taken] - table[np.maximum(n - taken, 0)]


@cache
def _log_factorials(most: int) -> Array:
    return np.asarray(special.gammaln(np.arange(most + 1) + 1.0))


def _p_of_shape(pit: Array) -> float:
    """How often uniform numbers have a point that is at least as unlikely as the most unlikely one here."""
    count = len(pit)
    tails = _tails(count)
    observed = tails[np.arange(len(tails)), _below(pit, _points(count))].min()
    return min(1.0, max(0.0, 1 - _stays(count, float(observed))))


def _floats(values: ArrayLike) -> Floats:
    return tuple(np.asarray(values, np.float64).tolist())
