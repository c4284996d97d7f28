"""What cannot be learned from a store's runs and observations, before anybody trains on them.

    for finding in find_design_faults(store):
        print(finding.severity, finding.message)

An input that never varies, two inputs that vary as one, a prior whose box the runs leave empty, observations where
there are no runs: each is a `Finding` with the columns, a number, and the cure. One pass over both tables, in memory
that does not grow with them. Thresholds allow for chance: a Latin hypercube of at least two runs for each input has no
findings, and a random sample rarely has one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from storage.design_survey import (
    MOST_VALUES,
    Numbers,
    ObservationsSurvey,
    RunsSurvey,
    estimated_count,
    survey_observations,
    survey_runs,
)
from storage.workers import Workers, workers

if TYPE_CHECKING:
    from storage.problem import Problem
    from storage.store import Store

Severity = Literal["bad", "care"]

FEW_VALUES = 4  # fewer distinct values leave the shape between them open
LINEAR = 0.999  # R² from which an input is a linear function of others
LEAST_SETTINGS = 8  # with fewer, inputs look linear in each other by chance
COEFFICIENT = 0.05  # standardised, from which an input belongs to such a function
SHARE_CARE, SHARE_BAD = 0.9, 0.5  # of the prior's probability within the runs' range
CHANCE = 0.01  # probability that a sound design would look as bad in one of its inputs
VOLUME = 0.2  # of the box that correlated runs fill, relative to independent ones
DEVIATIONS = 5.0  # of log det that chance may account for
OUTSIDE_INPUT, OUTSIDE_OUTPUT = 0.01, 0.5  # of the runs' range, by which an observation may lie beyond it
OUTSIDE_BAD = {"input": 0.2, "output": 0.5}  # share of the observations
RUNS_PER_INPUT = 2


@dataclass(frozen=True)
class Finding:
    """Something about the data that training cannot repair.

    `kind` is one of constant, few_values, dependent, empty_box, outside, few_runs and mixed_runs; `value` is the number
    that decided (of `constant` the value, of `dependent` R², of `empty_box` and `outside` a share, else a count).
    """

    kind: str
    names: tuple[str, ...]  # of the columns
    value: float
    severity: Severity
    message: str


@dataclass(frozen=True)
class _Input:
    """A column of x or t, as the runs have it."""

    index: int  # among the columns of [x, t]
    name: str
    calibration: bool
    low: float
    high: float
    values: Numbers
    varies: bool

    @property
    def width(self) -> float:
        return self.high - self.low


def find_design_faults(store: Store, pool: Workers | None = None) -> list[Finding]:
    """What is wrong with the design of a store's runs, the bad before what needs care; an empty list if nothing is.

    All rows are read once, by `pool` or by threads of this process. A store without runs has no findings.
    """
    if not store.runs.rows:
        return []
    problem = store.problem
    with contextlib.ExitStack() as stack:
        pool = pool or stack.enter_context(workers(None))
        runs = survey_runs(store.runs, pool)
        inputs = _inputs(problem, runs, float(np.finfo(store.dtype).eps))
        lower, upper = _limits(problem, runs, inputs)
        seen = survey_observations(store.observations, lower, upper, pool) if store.observations.rows else None
    dependent, kept = _dependent(inputs, runs)
    findings = [
        *_constant(inputs, runs, seen),
        *dependent,
        *_empty_range(problem, inputs, runs),
        *_empty_box(kept, runs),
        *_outside(problem, inputs, runs, seen),
        *_mixed_runs(runs),
        *_few_values(inputs, runs),
        *_few_runs(inputs, runs),
    ]
    return sorted(findings, key=lambda finding: finding.severity != "bad")


def _inputs(problem: Problem, runs: RunsSurvey, eps: float) -> list[_Input]:
    variables = (*problem.control_inputs, *problem.calibration_inputs)
    found = []
    for i, variable in enumerate(variables):
        low, high = float(runs.low[i]), float(runs.high[i])
        varies = high - low > 8 * eps * max(abs(low), abs(high))
        calibration = i >= len(problem.control_inputs)
        found.append(_Input(i, variable.name, calibration, low, high, runs.values[i], varies))
    return found


def _limits(problem: Problem, runs: RunsSurvey, inputs: Sequence[_Input]) -> tuple[Numbers, Numbers]:
    """How far observations may reach, of x and y."""
    controls = len(problem.control_inputs)
    where = [*range(controls), *range(len(inputs), len(runs.low))]
    low, high = runs.low[where], runs.high[where]
    slack = np.full(len(where), OUTSIDE_OUTPUT * max(1.0, 20 / len(runs.settings)))  # few runs span little by chance
    for i, control in enumerate(inputs[:controls]):
        count = len(control.values)
        # Where each run has a value of its own, the outermost ones lie up to some gaps from the ends of the box.
        own = 1 < count < MOST_VALUES and count >= len(runs.settings)
        slack[i] = max(OUTSIDE_INPUT, 3 / (count - 1)) if own else OUTSIDE_INPUT
    return low - slack * (high - low), high + slack * (high - low)


def _constant(inputs: Sequence[_Input], runs: RunsSurvey, seen: ObservationsSurvey | None) -> Iterator[Finding]:
    for item in (item for item in inputs if not item.varies):
        fact = f"it is {item.low:.6g} in all {_rows(runs.rows)} of the runs"
        severity: Severity = "bad"
        if item.calibration:
            text = f"nothing can be learned about '{item.name}': {fact}; vary it, or take it out of calibration_inputs"
        elif seen is not None and (seen.low[item.index] != item.low or seen.high[item.index] != item.low):
            text = (
                f"the runs do not say what '{item.name}' does: {fact}, but it goes from {seen.low[item.index]:.6g} to "
                f"{seen.high[item.index]:.6g} in the observations; run the simulator at such values"
            )
        else:
            severity = "care"
            text = f"the control input '{item.name}' never varies: {fact}; vary it, or take it out of control_inputs"
        yield Finding("constant", (item.name,), item.low, severity, text)


def _few_values(inputs: Sequence[_Input], runs: RunsSurvey) -> Iterator[Finding]:
    for item in (item for item in inputs if item.varies and len(item.values) < FEW_VALUES):
        count = len(item.values)
        if count < (len(runs.settings) if item.calibration else runs.rows):  # else there are few runs, not few values
            values = " and ".join([", ".join(f"{v:.6g}" for v in item.values[:-1]), f"{item.values[-1]:.6g}"])
            text = f"'{item.name}' has only {count} different values in the runs, {values}; run the simulator at more"
            yield Finding("few_values", (item.name,), count, "care", text)


def _dependent(inputs: Sequence[_Input], runs: RunsSurvey) -> tuple[list[Finding], list[_Input]]:
    """Inputs that are linear functions of others; and the calibration inputs that vary by themselves."""
    varying = [item for item in inputs if item.varies]
    controls = [item for item in varying if not item.calibration]
    calibration = [item for item in varying if item.calibration]
    count, first = len(runs.settings), len(inputs) - runs.t.shape[1]
    found: list[Finding] = []
    if count >= LEAST_SETTINGS:
        # One row a run: otherwise runs with many rows would count for more.
        correlation = _correlation(_products(runs.t))
        where = [item.index - first for item in calibration]
        for i, others, r2 in _linear(correlation[np.ix_(where, where)], range(len(where)), count):
            found.append(_dependence([calibration[k] for k in (i, *others)], r2))
        gone = {finding.names[0] for finding in found}
        calibration = [item for item in calibration if item.name not in gone]
    # Calibration inputs first: what depends on them is a control input.
    mixed = [*calibration, *controls] if count >= LEAST_SETTINGS else controls
    if runs.rows >= LEAST_SETTINGS and len(mixed) > 1:
        where = [item.index for item in mixed]
        correlation = _correlation(runs.products[np.ix_(where, where)])
        told_apart = [k for k, item in enumerate(mixed) if not item.calibration and len(item.values) >= FEW_VALUES]
        for i, others, r2 in _linear(correlation, told_apart, count):
            found.append(_dependence([mixed[k] for k in (i, *others)], r2))
    return found, calibration


def _linear(correlation: Numbers, candidates: Sequence[int], count: int) -> Iterator[tuple[int, list[int], float]]:
    """Columns among the candidates that are linear functions of others: which, of which, and R²."""
    left = list(range(len(correlation)))
    for i in candidates:
        for j in range(i):
            if i in left and j in left and correlation[i, j] ** 2 > LINEAR:
                left.remove(i)
                yield i, [j], min(1.0, float(correlation[i, j] ** 2))
    while len(left) > 2 and count >= max(LEAST_SETTINGS, RUNS_PER_INPUT * len(left)):
        precision = np.linalg.inv(correlation[np.ix_(left, left)] + 1e-10 * np.eye(len(left)))
        r2 = [1 - 1 / precision[k, k] if left[k] in candidates else 0.0 for k in range(len(left))]
        k = int(np.argmax(r2))
        if r2[k] <= LINEAR:
            return
        coefficients = np.abs(precision[k] / precision[k, k])
        yield left[k], [left[m] for m in range(len(left)) if m != k and coefficients[m] > COEFFICIENT], float(r2[k])
        del left[k]


def _dependence(members: Sequence[_Input], r2: float) -> Finding:
    first, *others = (f"'{item.name}'" for item in members)
    listed = " and ".join([", ".join(others[:-1]), others[-1]]) if len(others) > 1 else "".join(others)
    parameters = any(item.calibration for item in members)
    text = (
        f"{first} is a linear function of {listed} in the runs (R² = {r2:.4f}), so that their effects cannot be told "
        "apart; vary them separately, or take one of them out of the problem"
    )
    names = tuple(item.name for item in members)
    return Finding("dependent", names, r2, "bad" if parameters else "care", text)


def _empty_range(problem: Problem, inputs: Sequence[_Input], runs: RunsSurvey) -> Iterator[Finding]:
    """Priors that reach far beyond the runs' range of an input."""
    n = len(runs.settings)
    calibration = (item for item in inputs if item.calibration)
    for variable, item in zip(problem.calibration_inputs, calibration, strict=True):
        share = variable.prior.cdf(item.high) - variable.prior.cdf(item.low)
        # n draws from the prior span a range with this share of it or less with probability n sⁿ⁻¹ − (n − 1) sⁿ.
        chance = n * share ** (n - 1) - (n - 1) * share**n
        if item.varies and share < SHARE_CARE and chance * len(problem.calibration_inputs) < CHANCE:
            text = (
                f"the runs have '{item.name}' from {item.low:.6g} to {item.high:.6g}, which is {share:.0%} of its "
                f"prior, {variable.prior}; run the simulator over the rest, or narrow the prior"
            )
            yield Finding("empty_box", (item.name,), share, "bad" if share < SHARE_BAD else "care", text)


def _empty_box(inputs: Sequence[_Input], runs: RunsSurvey) -> Iterator[Finding]:
    """Runs along a diagonal: the volume that they fill is √det of their correlations, for independent ones about 1."""
    n, p = len(runs.settings), len(inputs)
    if p < 2 or n < max(LEAST_SETTINGS, RUNS_PER_INPUT * p):
        return
    from scipy.special import polygamma, psi

    first = int(len(runs.mean) - runs.t.shape[1])
    where = [item.index - first for item in inputs]
    correlation = _correlation(_products(runs.t[:, where]))
    # Of independent columns, det is a product of p − 1 variables ~ Beta((n − 1 − i)/2, i/2).
    halves = (n - 1 - np.arange(1, p)) / 2
    expected = float((psi(halves) - psi((n - 1) / 2)).sum())
    sd = math.sqrt(float((polygamma(1, halves) - polygamma(1, (n - 1) / 2)).sum()))
    excess = float(np.linalg.slogdet(correlation)[1]) - expected
    volume = math.exp(excess / 2)
    if volume < VOLUME and excess < -DEVIATIONS * sd:
        off = np.triu(np.abs(correlation), 1)
        i, j = divmod(int(off.argmax()), p)
        text = (
            f"the runs fill about {volume:.1%} of the box of the calibration inputs, because these are correlated "
            f"('{inputs[i].name}' and '{inputs[j].name}' by {correlation[i, j]:.3f}); vary them independently of each "
            "other, for example by a Latin hypercube"
        )
        yield Finding("empty_box", tuple(item.name for item in inputs), volume, "care", text)


def _outside(
    problem: Problem, inputs: Sequence[_Input], runs: RunsSurvey, seen: ObservationsSurvey | None
) -> Iterator[Finding]:
    """Observations where there are no runs, and measured values that no run comes near."""
    if seen is None:
        return
    controls = len(problem.control_inputs)
    for i, variable in enumerate((*problem.control_inputs, *problem.outputs)):
        is_input = i < controls
        column = i if is_input else len(inputs) + i - controls
        count, known = int(seen.outside[i]), int(seen.known[i])
        if not count or (is_input and not inputs[i].varies):
            continue
        low, high = float(runs.low[column]), float(runs.high[column])
        beyond, before = float(seen.high[i]) - high, low - float(seen.low[i])
        furthest = float(seen.high[i]) if beyond > before else float(seen.low[i])
        share = count / known
        bad = share > OUTSIDE_BAD["input" if is_input else "output"]
        cure = (
            "run the simulator there too, or leave these observations out"
            if is_input
            else "check units and offsets of both, or vary the inputs more"
        )
        text = (
            f"{_rows(count)} of the observations ({_percent(share)}) have '{variable.name}' outside of "
            f"{'' if is_input else 'and far from '}the runs' {low:.6g} to {high:.6g}, the furthest {furthest:.6g}; "
            + cure
        )
        yield Finding("outside", (variable.name,), share, "bad" if bad else "care", text)


def _few_runs(inputs: Sequence[_Input], runs: RunsSurvey) -> Iterator[Finding]:
    varying = tuple(item.name for item in inputs if item.varies)
    count = len(runs.settings)
    if count < RUNS_PER_INPUT * len(varying):
        text = (
            f"there are only {count} runs with different calibration inputs for {len(varying)} inputs that vary; "
            f"{10 * len(varying)} are a good number"
        )
        yield Finding("few_runs", varying, count, "care", text)


def _mixed_runs(runs: RunsSurvey) -> Iterator[Finding]:
    """A number that stands for several runs, as where every file counts its runs from 1."""
    if runs.numbers is None or runs.numbered_settings is None:
        return
    numbers, pairs = estimated_count(runs.numbers), estimated_count(runs.numbered_settings)
    if pairs > numbers * (1 if numbers == len(runs.numbers) else 1.1):
        text = (
            f"the column 'run' has {numbers:,.0f} numbers for {pairs:,.0f} different sets of calibration inputs, so "
            "that some numbers stand for several runs; number the runs through all files"
        )
        yield Finding("mixed_runs", ("run",), numbers, "bad", text)


def _products(t: Numbers) -> Numbers:
    deviations = t - t.mean(axis=0)
    found: Numbers = deviations.T @ deviations
    return found


def _correlation(products: Numbers) -> Numbers:
    scale = np.sqrt(np.maximum(np.diag(products), np.finfo(np.float64).tiny))
    found: Numbers = products / np.outer(scale, scale)
    return found


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1g}" if share < 0.0001 else f"{share:.2%}"
