"""How a report opens: what the parameters are, how sure that is, and whether to trust it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vcal_dist.mixed import Averaged
from vcal_dist.report.check import Check
from vcal_dist.report.content import Block, Cell, Figure, Fold, Section, Share, Span, Status, Table, Text
from vcal_dist.report.diagnostics import Verdict
from vcal_dist.report.emulator_checks import emulator_and_noise
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.parameters import Kind, Learned, learned
from vcal_dist.report.row_checks import covered, is_held_out
from vcal_dist.report.words import figure, listed, percent, plural, to_the_digit, with_unit

MANY = 12  # parameters that the table shows; of more, the others are folded, and a chart shows all
HEADLINES: dict[Status, str] = {
    "good": "This calibration looks sound",
    "care": "Use this calibration with care",
    "bad": "Do not trust this calibration yet",
}
WORDS: dict[Kind, str] = {"learned": "learned", "partly": "partly learned", "not learned": "not learned"}


@dataclass(frozen=True)
class Tile:
    """One figure of the first glance."""

    value: str
    label: str


@dataclass(frozen=True)
class Answer:
    """The first screen of the page."""

    title: str
    description: str
    facts: str  # a line about data and model
    status: Status
    headline: str
    sentence: str
    reasons: list[Check]
    tiles: list[Tile]
    section: Section  # the parameters
    over: str = "Calibration report"  # what kind of page this is


def answer(gathered: Gathered, verdict: Verdict) -> Answer:
    """What a reader wants to know first."""
    problem = gathered.posterior.problem
    return Answer(
        title=problem.name,
        description=problem.description,
        facts=_facts(gathered),
        status=verdict.status,
        headline=HEADLINES[verdict.status],
        sentence=in_a_sentence(gathered),
        reasons=verdict.reasons,
        tiles=_tiles(gathered),
        section=Section("parameters", "The parameters", _parameters(gathered)),
    )


def in_a_sentence(gathered: Gathered) -> str:
    """What was learned: up to three parameters in figures, others by name."""
    found = learned(gathered.posterior)
    parts = []
    for kind, more_were in (("learned", "more {} learned"), ("partly", "more {}")):
        known = sorted((row for row in found if row.kind == kind), key=lambda row: -row.narrowed)
        told = [f"{row.name} = {with_unit(_value(row), row.unit)}" for row in known[:3]]
        if told:
            more = len(known) - len(told)
            others = f", and {more} {more_were.format('was' if more == 1 else 'were')}" if more else ""
            parts.append(f"{'Learned in part only: ' if kind == 'partly' else ''}{listed(told)}{others}.")
    back = [row.name for row in found if row.kind == "not learned"]
    if back:
        verb = "was" if len(back) == 1 else "were"
        whose = "its posterior is nearly its prior" if len(back) == 1 else "their posteriors are nearly their priors"
        parts.append(f"{listed(back, most=6)} {verb} not learned from these data: {whose}.")
    return " ".join(parts)


def _facts(gathered: Gathered) -> str:
    posterior, rows = gathered.posterior, gathered.record.get("rows") or {}
    kind = gathered.member.model.kind
    problem = posterior.problem
    parts = (
        [f"{plural(int(rows['runs']), 'run')} and {plural(int(rows['observations']), 'observation')}"] if rows else []
    )
    sizes = (
        plural(len(problem.control_inputs), "control input"),
        plural(len(problem.calibration_inputs), "parameter"),
        plural(len(problem.outputs), "output"),
    )
    parts += [", ".join(sizes), "no discrepancy" if kind == "none" else f"{kind} discrepancy"]
    if isinstance(posterior, Averaged):
        parts.append(f"an average of {len(posterior.members)} calibrations")
    seconds = gathered.record.get("seconds")
    if seconds is not None:
        parts.append(f"trained in {figure(float(seconds), 2)} s")
    return " · ".join(parts)


def _tiles(gathered: Gathered) -> list[Tile]:
    found = learned(gathered.posterior)
    known, partly = (sum(row.kind == kind for row in found) for kind in ("learned", "partly"))
    noun = "parameters learned" if len(found) > 1 else "parameter learned"
    tiles = [Tile(f"{known} of {len(found)}", noun + (f", {partly} in part" if partly else ""))]
    counted = covered(gathered, "observations")
    if counted is not None:
        unseen = "unseen observations" if is_held_out(gathered, "observations") else "observations, each left out,"
        tiles.append(Tile(percent(counted[1]), f"of {unseen} inside their 90 % intervals"))
    ratios = [(error / noise, error) for _, error, noise in emulator_and_noise(gathered) if noise > 0]
    if ratios:
        ratio = max(ratios)[0]
        share = percent(ratio) if ratio < 1 else f"{figure(ratio, 2)} ×"
        runs = "unseen runs" if is_held_out(gathered, "runs") else "runs that are left out"
        tiles.append(Tile(share, f"{'of ' if ratio < 1 else ''}the noise is the emulator’s error at {runs}"))
    noise = gathered.member.noise
    if len(noise) == 1:
        ((name, sigma),) = noise.items()
        (unit,) = (output.unit for output in gathered.posterior.problem.outputs)
        transformed = any(t.kind != "none" for t in gathered.member.scaling.outputs.transforms)
        label = f"noise of {name}" + (", transformed" if transformed else "")
        tiles.append(Tile(with_unit(figure(sigma, 3), "" if transformed else unit), label))
    return tiles


def _parameters(gathered: Gathered) -> list[Block]:
    from vcal_dist.plots import intervals

    found = learned(gathered.posterior)
    truth = gathered.truth or {}
    headings = ["parameter", "mean ± sd", "90 % interval", *(["truth"] if truth else []), "", "ruled out"]
    right = ("mean ± sd", "90 % interval", "truth")
    rows = [_row(row, truth.get(row.name), bool(truth)) for row in found]
    first = Table(headings, rows[:MANY], right, stacks=True)
    blocks: list[Block] = [first]
    if len(rows) > MANY:
        blocks.append(
            Fold(f"The other {len(rows) - MANY} parameters", [Table(headings, rows[MANY:], right, stacks=True)])
        )
        blocks.append(
            Figure(
                "intervals",
                intervals(gathered.posterior, truth=gathered.truth),
                "Every parameter's 90 % interval on the scale of its prior.",
            )
        )
    blocks.append(
        Text(
            "The grey line is the prior's 90 % interval, the blue bar the posterior's, the dot its mean"
            + (", the red mark the truth" if truth else "")
            + ". “Ruled out” is how much of the prior's 90 % lies outside the posterior's interval.",
            "note",
        )
    )
    return blocks


def _row(row: Learned, truth: float | None, with_truth: bool) -> list[Cell]:
    interval = f"{to_the_digit(row.low, row.sd)} to {to_the_digit(row.high, row.sd)}\nprior {row.prior}"
    name = with_unit(row.name, f"({row.unit})" if row.unit else "")
    cells: list[Cell] = [f"{name}\n{row.description}" if row.description else name, _value(row), interval]
    if with_truth:
        cells.append("–" if truth is None else to_the_digit(truth, row.sd))
    narrowed = max(0.0, row.narrowed)
    return [*cells, span(row, truth), Share(narrowed, f"{percent(narrowed)} · {WORDS[row.kind]}")]


def _value(row: Learned) -> str:
    return f"{to_the_digit(row.mean, row.sd)} ± {figure(row.sd, 2)}"


def span(row: Learned, truth: float | None) -> Span:
    """The intervals of prior and posterior on one line that holds both."""
    ends = [row.prior_low, row.prior_high, row.low, row.high, *([] if truth is None else [truth])]
    low, high = min(ends), max(ends)
    pad = 0.04 * (high - low)
    low, high = low - pad, high + pad

    def place(value: float) -> float:
        return (value - low) / (high - low) if math.isfinite(value) else 0.5

    return Span(
        (place(row.prior_low), place(row.prior_high)),
        (place(row.low), place(row.high)),
        place(min(max(row.mean, low), high)),
        None if truth is None else place(truth),
    )
