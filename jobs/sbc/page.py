"""A simulation-based calibration as one page: verdicts, charts of every parameter, what failed, how to read it."""

from __future__ import annotations

from functools import partial

import vcal_dist
from jobs.sbc.outcome import STATUS, Outcome, in_a_sentence, notes, p_value, sentence, status, summary
from vcal_dist.plots.simulated import contraction, coverage_curve, ecdf_difference, rank_histogram
from vcal_dist.report.answer import Answer, Tile
from vcal_dist.report.content import Block, Cell, Facts, Fold, Heading, Pill, Section, Status, Table, Text
from vcal_dist.report.page import render
from vcal_dist.report.parts import drawn
from vcal_dist.report.words import figure, percent, plural
from vcal_dist.sbc import LEVELS, THRESHOLD, Assessment

SHOWN = 6  # parameters whose charts are in sight
HEADLINES: dict[Status, str] = {
    "good": "The intervals cover as promised",
    "care": "Read the intervals with care",
    "bad": "The intervals do not cover as promised",
}
RIGHT = (*(f"{100 * level:.0f} %" for level in LEVELS), "p", "z", "contraction")


def page(outcome: Outcome) -> str:
    """The page."""
    sections = [
        Section("parameters", "Every parameter", _parameters(outcome)),
        Section("failed", "Replicates that failed", _failed(outcome)),
        Section("reading", "How to read this", _reading(outcome)),
    ]
    shown = [section for section in sections if section.blocks]
    return render(_answer(outcome), shown, place=str(outcome.asked.output), version=vcal_dist.__version__)


def _answer(outcome: Outcome) -> Answer:
    found, good = outcome.parameters, [one for one in outcome.parameters if STATUS[one.verdict] == "good"]
    tiles = [
        Tile(f"{len(good)} of {len(found)}", "parameters cover as promised"),
        Tile(str(len(outcome.numbers)), "replicates judged"),
    ]
    tiles += [Tile(str(len(outcome.failed)), "replicates failed")] if outcome.failed else []
    tiles.append(Tile(f"{figure(outcome.seconds / outcome.replicates, 2)} s", "for a replicate, on average"))
    fit = outcome.asked.settings.fit
    eta = "the simulator" if outcome.asked.simulator else "the emulator"
    return Answer(
        title=outcome.problem.name,
        description=outcome.problem.description,
        facts=f"{plural(outcome.replicates, 'replicate')} · truths from the prior, data from {eta} · weights: "
        f"{fit.weights}",
        status=status(outcome),
        headline=HEADLINES[status(outcome)],
        sentence=in_a_sentence(outcome),
        reasons=[],
        tiles=tiles,
        section=Section(
            "verdicts", "The verdicts", [_verdicts(outcome), *(Text(note, "note") for note in notes(outcome))]
        ),
        over="Simulation-based calibration",
    )


def _verdicts(outcome: Outcome) -> Table:
    lines: list[list[Cell]] = []
    for one in outcome.parameters:
        shares = [f"{percent(share)}" for share in one.coverage.value]
        verdict = Pill(one.verdict, STATUS[one.verdict])
        lines.append([f"{one.name}\n{sentence(one)}", verdict, *shares, p_value(one.p), *summary(one)])
    caption = "Shares of truths inside intervals of these levels; z and contraction as means over the replicates."
    return Table(["parameter", "verdict", *RIGHT], lines, RIGHT, caption, stacks=True)


def _parameters(outcome: Outcome) -> list[Block]:
    blocks: list[Block] = []
    folds: list[Block] = []
    for j, one in enumerate(outcome.parameters):
        charts = _charts(one, j)
        if j < SHOWN:
            blocks += [Heading(one.name), *charts] if len(outcome.parameters) > 1 else charts
        else:
            folds.append(Fold(one.name, charts))
    return [*blocks, *folds]


def _charts(found: Assessment, j: int) -> list[Block]:
    return [
        drawn(f"{name}-{j + 1}", partial(make, found), "", "half")
        for name, make in (
            ("ranks", rank_histogram),
            ("ecdf", ecdf_difference),
            ("coverage", coverage_curve),
            ("contraction", contraction),
        )
    ]


def _failed(outcome: Outcome) -> list[Block]:
    lines: list[list[Cell]] = [[str(record["number"]), record["failed"]] for record in outcome.failed]
    return [Table(["replicate", "why"], lines)] if lines else []


def _reading(outcome: Outcome) -> list[Block]:
    eta = (
        "the simulator itself gives the data, so that the emulator’s errors are part of what is judged"
        if outcome.asked.simulator
        else "the emulator gives the data, with weights drawn from what the runs say of them; --simulator puts the "
        "simulator itself in its place"
    )
    facts = [
        ("truths", "θ and nature’s hyperparameters from their priors, at the observations’ own inputs and noises"),
        ("data", eta),
        ("rank", "the share of the posterior below the truth; uniform if posteriors are right"),
        ("∪ and ∩", "ranks at both ends: intervals too narrow; in the middle: too wide; at one end: biased"),
        ("p", f"how often chance does as much, over all tests and parameters; below {THRESHOLD:g} it is a finding"),
        ("z", "(posterior mean − truth)/posterior sd"),
        ("contraction", "the share of the prior’s variance that the data took away"),
    ]
    return [Facts(facts)]
