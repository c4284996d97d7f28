"""The sections of a report below its answer, from what was gathered to texts, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from altair.utils.schemapi import debug_mode

from vcal_dist import plots
from vcal_dist.report.check import RANK
from vcal_dist.report.content import Block, Figure, Finding, Findings, Fold, Section, Status, Text
from vcal_dist.report.diagnostics import Verdict
from vcal_dist.report.gathering import Gathered, Say
from vcal_dist.report.parameters import learned
from vcal_dist.report.parts import (
    SHOWN_OUTPUTS,
    Size,
    by_output,
    drawn,
    first,
    is_predicted,
    left_over,
    no_rows,
    not_predicted,
    of_member,
    which_rows,
)
from vcal_dist.report.provenance import provenance
from vcal_dist.report.training_checks import losses_of
from vcal_dist.report.words import figure, listed, plural

SHOWN_PARAMETERS = 9  # densities in sight; others are folded, ...
MOST_PARAMETERS = 60  # ... up to so many: the table has all
PAIRS = 6  # parameters whose pairs are drawn: the ones that the data moved most
SHOWN_CONTROLS = 3
MANY_PANELS = 9  # of one chart; one with more is folded
MOST_CONTROLS = 6  # along which functions are drawn
POINTS = 65  # of a line along which the discrepancy's size is looked at
WORDS: dict[Status, str] = {"good": "good", "care": "with care", "bad": "bad"}


def sections(gathered: Gathered, verdict: Verdict, say: Say = lambda _: None) -> list[Section]:
    """All of them, in the order of the page."""
    found = []
    with debug_mode(False):  # Altair checks a chart at every step of its making; tests of the charts do that
        for title, make in SECTIONS:
            say(f"drawing: {title.lower()}")
            found.append(Section(title.lower().replace(" ", "-"), title, list(make(gathered, verdict))))
    return found


# --- θ ----------------------------------------------------------------------------------------------------------------


def parameters(gathered: Gathered, _: Verdict) -> Iterator[Block]:
    """Prior against posterior, and pairs."""
    posterior, truth = gathered.posterior, gathered.truth
    found = learned(posterior)
    yield Text("What was known of each parameter before (grey) and what is known now (blue).")
    size: Size = "full" if len(found) == 1 else "half" if len(found) == 2 else "third"
    densities = [
        drawn(
            f"marginal-{row.name}",
            partial(plots.marginal, posterior, row.name, truth=(truth or {}).get(row.name)),
            size=size,
        )
        for row in found[:MOST_PARAMETERS]
    ]
    yield from first(densities, SHOWN_PARAMETERS, "parameter")
    yield from left_over(len(found), MOST_PARAMETERS, "parameter", "marginal")
    if len(found) > 1:
        most = sorted(range(len(found)), key=lambda j: -found[j].moved)[:PAIRS]
        names = [found[j].name for j in sorted(most)]
        which = f" The {PAIRS} that the data moved most, of {len(found)}." if len(found) > PAIRS else ""
        yield drawn(
            "pairs",
            partial(plots.pairs, posterior, parameters=names, truth=truth),
            f"Draws from the posterior: a slanted cloud means that two parameters make up for each other.{which}",
            flows=False,
        )


# --- observations -----------------------------------------------------------------------------------------------------


def observations(gathered: Gathered, _: Verdict) -> Iterator[Block]:
    """Predictions against observations, residuals, coverage, and the process along the control inputs."""
    sample = gathered.observations
    if sample is None:
        yield no_rows(gathered, "observations")
    else:
        yield Text(f"{which_rows(sample, 'observation')} {of_member(gathered)}".strip())
    controls = [v.name for v in gathered.posterior.problem.control_inputs]

    def of_output(k: int, output: str) -> Iterator[Block]:
        member, several = gathered.member, len(controls) > 1
        if sample is not None and not is_predicted(sample, k):
            yield not_predicted(sample, k)
        elif sample is not None:
            judged = sample.judged
            yield drawn(
                f"observed-{output}",
                partial(plots.observed, member, judged, output=output),
                "Predicted against observed, with 90 % intervals of a new observation: points belong on the line.",
                size="half",
            )
            yield drawn(
                f"coverage-{output}",
                partial(plots.coverage, member, judged, output=output),
                "Intervals of every level, and how many observations they hold: the curve belongs on the diagonal.",
                size="half",
            )
            yield drawn(
                f"residuals-{output}",
                partial(plots.residuals, member, judged, output=output),
                "What the predictions leave unexplained: a pattern here is something that the model misses.",
                size="half",
            )
            against = [
                drawn(
                    f"residuals-{output}-{name}",
                    partial(plots.residuals, member, judged, output=output, against=name),
                    size="half",
                )
                for name in controls[: MOST_CONTROLS if k < SHOWN_OUTPUTS else 1]
            ]
            yield from first(against, 1, "control input", "Residuals against the other")
            yield from left_over(len(controls), max(1, len(against)), "control input", "residuals")
        if k >= SHOWN_OUTPUTS:
            yield Text(
                f"The process along the control inputs is drawn of the first {SHOWN_OUTPUTS} outputs; "
                "vcal_dist.plots.process draws it of this one.",
                "note",
            )
            return
        lines = [_process(gathered, output, name, len(controls)) for name in controls[:MOST_CONTROLS]]
        yield Text(
            "The real process that the observations come from, the emulator by itself, and how far new observations "
            "would scatter." + (" Inputs that are not named are in the middle of their ranges." if several else "")
        )
        yield from first(lines, SHOWN_CONTROLS, "control input", "Along the other")
        yield from left_over(len(controls), MOST_CONTROLS, "control input", "process")

    yield from by_output(gathered, of_output)


def _process(gathered: Gathered, output: str, along: str, controls: int) -> Figure | Text:
    sample = gathered.observations
    data: dict[str, Any] = {}
    if controls == 1 and sample is not None:  # with others, an observation lies elsewhere than the line
        data = {"x": sample.judged.x, "y": sample.judged.y}
    return drawn(
        f"process-{output}-{along}",
        partial(plots.process, gathered.posterior, along=along, output=output, **data),
        size="full" if controls == 1 else "half" if controls == 2 else "third",
    )


# --- the emulator, the discrepancy, sensitivity -----------------------------------------------------------------------


def emulator(gathered: Gathered, _: Verdict) -> Iterator[Block]:
    """Accuracy at runs that training did not see, and where it is worst."""
    sample = gathered.runs
    if sample is None:
        yield no_rows(gathered, "runs")
        return
    yield Text(f"The emulator stands in for the simulator. {which_rows(sample, 'run')}")
    problem = gathered.posterior.problem
    inputs = len(problem.control_inputs) + len(problem.calibration_inputs)

    def of_output(k: int, output: str) -> Iterator[Block]:
        if not is_predicted(sample, k):
            yield not_predicted(sample, k)
            return
        yield drawn(
            f"emulator-{output}",
            partial(plots.emulator, gathered.member, sample.judged, output=output),
            "What the emulator says of a run against what the simulator gave.",
            size="half",
        )
        yield drawn(
            f"emulator-residuals-{output}",
            partial(plots.residuals, gathered.member, sample.judged, output=output),
            "What it leaves over, in its own standard deviations.",
            size="half",
        )
        if k >= SHOWN_OUTPUTS:  # a panel for every input: with many inputs and outputs the page would grow too large
            yield Text(
                f"Errors along the inputs are drawn of the first {SHOWN_OUTPUTS} outputs; "
                "vcal_dist.plots.emulator_errors draws them of this one.",
                "note",
            )
            return
        errors = drawn(
            f"emulator-errors-{output}",
            partial(plots.emulator_errors, gathered.member, sample.judged, output=output),
            "Its errors along every input: where they grow, more runs would help most.",
        )
        yield errors if inputs <= MANY_PANELS else Fold("Its errors along every input", [errors])

    yield from by_output(gathered, of_output)


def discrepancy(gathered: Gathered, _: Verdict) -> Iterator[Block]:
    """What the simulator misses, and how g warps it."""
    member = gathered.member
    if member.model.kind == "none":
        yield Text("This calibration assumes that the simulator, at the right parameters, is right.")
        return
    controls = [v.name for v in gathered.posterior.problem.control_inputs]
    yield Text(
        "What separates the real process from the simulator at the calibrated parameters. Where the band holds zero "
        "there is no sign that the simulator is wrong."
    )
    if gathered.config is None or gathered.config.model.delta.learn:
        yield Text(
            "How large and how smooth it may be was estimated, and is taken as known: a trend that a parameter can "
            "make up for may have gone into that parameter, whose interval is then too narrow. If you know what the "
            "simulator misses, say it (docs/model.md)."
        )

    def of_output(k: int, output: str) -> Iterator[Block]:
        size: Size = "full" if len(controls) == 1 else "half" if len(controls) == 2 else "third"
        lines = [
            drawn(
                f"discrepancy-{output}-{name}",
                partial(plots.discrepancy, gathered.posterior, along=name, output=output),
                size=size,
            )
            for name in controls[:MOST_CONTROLS]
        ]
        yield from first(lines, SHOWN_CONTROLS, "control input", "Along the other")
        yield from left_over(len(controls), MOST_CONTROLS, "control input", "discrepancy")
        if len(controls) > 1:
            pair = _most_discrepant(gathered, output)
            yield drawn(
                f"discrepancy-map-{output}",
                partial(plots.discrepancy_map, gathered.posterior, along=pair, output=output),
                "Along the two inputs that change it most.",
                size="half" if len(controls) > 2 else "full",
            )
        if member.model.kind == "general":
            yield drawn(
                f"warping-{output}",
                partial(plots.warping, member, output=output),
                "How nature answers to the simulator's output: g(η, x), and its slope. On the dashed line the "
                "simulator is taken as it is; a slope that is not one stretches or flattens it.",
            )

    yield from by_output(gathered, of_output, SHOWN_OUTPUTS)


def _most_discrepant(gathered: Gathered, output: str) -> tuple[str, str]:
    """The two control inputs along which the discrepancy's mean changes most, others in the middle."""
    inputs = gathered.posterior.problem.control_inputs
    k = [v.name for v in gathered.posterior.problem.outputs].index(output)
    ranges = []
    for j, v in enumerate(inputs):
        x = np.tile([sum(u.bounds) / 2 for u in inputs], (POINTS, 1))
        x[:, j] = np.linspace(*v.bounds, POINTS)
        mean = gathered.posterior.predict(x, "discrepancy").mean[:, k]
        ranges.append(float(np.ptp(mean)))
    first, second = sorted(np.argsort(ranges)[-2:].tolist())
    return inputs[first].name, inputs[second].name


def sensitivity(gathered: Gathered, _: Verdict) -> Iterator[Block]:
    """Sobol indices from the emulator."""
    yield Text(
        "Which inputs the simulator's output depends on: the share of its variance that each control input and each "
        "parameter explains over their ranges, alone and together with others. A parameter with a small share "
        "can be learned only from observations whose noise is smaller still."
    )

    def of_output(k: int, output: str) -> Iterator[Block]:
        yield drawn(f"sensitivity-{output}", partial(plots.sensitivity, gathered.posterior, output=output))

    yield from by_output(gathered, of_output, SHOWN_OUTPUTS)


# --- training, diagnostics --------------------------------------------------------------------------------------------


def training(gathered: Gathered, _: Verdict) -> Iterator[Block]:
    """Curves by stage."""
    metrics = gathered.metrics
    if not metrics:
        yield Text("There are no records of training beside this posterior.", "note")
        return
    seconds = float(metrics[-1]["seconds"])
    stages = list(losses_of(metrics))
    yield Text(
        f"{figure(seconds, 2)} s of steps, without start and end, in {plural(int(metrics[-1]['step']), 'step')}"
        + (f"; stages: {listed(stages)}." if stages else ".")
        + " Losses of different stages are of different things, and are not compared."
    )
    if stages:
        yield drawn("training-loss", partial(plots.training, metrics), "The loss of every stage, a row's share.")
    learning = [row for row in metrics if row["phase"] in _phases_that_change(metrics, "emulator_error")]
    if learning:
        held = gathered.runs is not None and gathered.runs.judged.method == "held out"
        which = "runs that were held out" if held else "some of the runs that it learned from"
        yield drawn(
            "training-emulator-error",
            partial(plots.training, learning, column="emulator_error"),
            f"The emulator's error at {which}, in standard deviations of the output.",
        )
    if any(value for row in metrics for name, value in row.items() if name.startswith("theta.")):
        theta = drawn(
            "training-theta",
            partial(plots.training_theta, gathered.posterior, metrics),
            "Where the point, or the mean, that training follows went. The posterior's own mean may lie elsewhere.",
        )
        many = len(gathered.posterior.problem.calibration_inputs) > MANY_PANELS
        yield Fold("The parameters in training", [theta]) if many else theta


def _phases_that_change(metrics: list[dict[str, str]], column: str) -> set[str]:
    """The phases in which a column does not stay what it was."""
    values: dict[str, set[str]] = {}
    for row in metrics:
        if row.get(column):
            values.setdefault(row["phase"], set()).add(row[column])
    return {phase for phase, found in values.items() if len(found) > 1}


def diagnostics(_: Gathered, verdict: Verdict) -> Iterator[Block]:
    """Every check with what to do about it."""
    yield Text(
        "Checks look at what can be seen: predictions, rows, training. That a posterior holds a parameter's true value "
        "also takes a simulator and a discrepancy of the right kind, which no check can prove.",
        "note",
    )
    checks = sorted(verdict.checks, key=lambda check: -RANK[check.status])
    yield Findings(
        [
            Finding(check.name, check.status, WORDS[check.status], check.value, check.sentence, check.advice)
            for check in checks
        ]
    )


Make = Callable[[Gathered, Verdict], Iterator[Block]]
SECTIONS: tuple[tuple[str, Make], ...] = (
    ("Prior and posterior", parameters),
    ("Observations", observations),
    ("Emulator", emulator),
    ("Discrepancy", discrepancy),
    ("Sensitivity", sensitivity),
    ("Training", training),
    ("Diagnostics", diagnostics),
    ("Data and settings", provenance),
)
