"""The sections of a report below its answer, from what was gathered to texts, tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
from altair.utils.schemapi import debug_mode

from storage.errors import VcalError
from vcal_dist import plots
from vcal_dist.mixed import Averaged
from vcal_dist.report.check import RANK
from vcal_dist.report.content import Block, Figure, Finding, Findings, Fold, Heading, Section, Status, Text
from vcal_dist.report.diagnostics import Verdict
from vcal_dist.report.gathering import Gathered, Sample, Say
from vcal_dist.report.parameters import learned
from vcal_dist.report.provenance import provenance
from vcal_dist.report.row_checks import AS_FITTED
from vcal_dist.report.training_checks import losses_of
from vcal_dist.report.words import figure, listed, plural

SHOWN_PARAMETERS = 9  # densities in sight; others are folded, ...
MOST_PARAMETERS = 60  # ... up to so many: the table has all
PAIRS = 6  # parameters whose pairs are drawn: the ones that the data moved most
SHOWN_OUTPUTS = 3  # of the others, charts of rows are folded; functions of the inputs, which take seconds, told of
MOST_OUTPUTS = 20  # that have charts at all
SHOWN_CONTROLS = 3
MANY_PANELS = 9  # of one chart; one with more is folded
MOST_CONTROLS = 6  # along which functions are drawn
POINTS = 65  # of a line along which the discrepancy's size is looked at
WORDS: dict[Status, str] = {"good": "good", "care": "with care", "bad": "bad"}
Size = Literal["full", "half", "third"]


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
    drawn = [
        _figure(
            f"marginal-{row.name}",
            partial(plots.marginal, posterior, row.name, truth=(truth or {}).get(row.name)),
            size=size,
        )
        for row in found[:MOST_PARAMETERS]
    ]
    yield from _first(drawn, SHOWN_PARAMETERS, "parameter")
    yield from _left(len(found), MOST_PARAMETERS, "parameter", "marginal")
    if len(found) > 1:
        most = sorted(range(len(found)), key=lambda j: -found[j].moved)[:PAIRS]
        names = [found[j].name for j in sorted(most)]
        which = f" The {PAIRS} that the data moved most, of {len(found)}." if len(found) > PAIRS else ""
        yield _figure(
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
        yield _no_rows(gathered, "observations")
    else:
        yield Text(f"{_which(sample, 'observation')} {_of_member(gathered)}".strip())
    controls = [v.name for v in gathered.posterior.problem.control_inputs]

    def of_output(k: int, output: str) -> Iterator[Block]:
        member, several = gathered.member, len(controls) > 1
        if sample is not None and not _predicted(sample, k):
            yield _not_predicted(sample, k)
        elif sample is not None:
            judged = sample.judged
            yield _figure(
                f"observed-{output}",
                partial(plots.observed, member, judged, output=output),
                "Predicted against observed, with 90 % intervals of a new observation: points belong on the line.",
                size="half",
            )
            yield _figure(
                f"coverage-{output}",
                partial(plots.coverage, member, judged, output=output),
                "Intervals of every level, and how many observations they hold: the curve belongs on the diagonal.",
                size="half",
            )
            yield _figure(
                f"residuals-{output}",
                partial(plots.residuals, member, judged, output=output),
                "What the predictions leave unexplained: a pattern here is something that the model misses.",
                size="half",
            )
            against = [
                _figure(
                    f"residuals-{output}-{name}",
                    partial(plots.residuals, member, judged, output=output, against=name),
                    size="half",
                )
                for name in controls[: MOST_CONTROLS if k < SHOWN_OUTPUTS else 1]
            ]
            yield from _first(against, 1, "control input", "Residuals against the other")
            yield from _left(len(controls), max(1, len(against)), "control input", "residuals")
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
        yield from _first(lines, SHOWN_CONTROLS, "control input", "Along the other")
        yield from _left(len(controls), MOST_CONTROLS, "control input", "process")

    yield from _by_output(gathered, of_output)


def _process(gathered: Gathered, output: str, along: str, controls: int) -> Figure | Text:
    sample = gathered.observations
    data: dict[str, Any] = {}
    if controls == 1 and sample is not None:  # with others, an observation lies elsewhere than the line
        data = {"x": sample.judged.x, "y": sample.judged.y}
    return _figure(
        f"process-{output}-{along}",
        partial(plots.process, gathered.posterior, along=along, output=output, **data),
        size="full" if controls == 1 else "half" if controls == 2 else "third",
    )


# --- the emulator, the discrepancy, sensitivity -----------------------------------------------------------------------


def emulator(gathered: Gathered, _: Verdict) -> Iterator[Block]:
    """Accuracy at runs that training did not see, and where it is worst."""
    sample = gathered.runs
    if sample is None:
        yield _no_rows(gathered, "runs")
        return
    yield Text(f"The emulator stands in for the simulator. {_which(sample, 'run')}")
    problem = gathered.posterior.problem
    inputs = len(problem.control_inputs) + len(problem.calibration_inputs)

    def of_output(k: int, output: str) -> Iterator[Block]:
        if not _predicted(sample, k):
            yield _not_predicted(sample, k)
            return
        yield _figure(
            f"emulator-{output}",
            partial(plots.emulator, gathered.member, sample.judged, output=output),
            "What the emulator says of a run against what the simulator gave.",
            size="half",
        )
        yield _figure(
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
        errors = _figure(
            f"emulator-errors-{output}",
            partial(plots.emulator_errors, gathered.member, sample.judged, output=output),
            "Its errors along every input: where they grow, more runs would help most.",
        )
        yield errors if inputs <= MANY_PANELS else Fold("Its errors along every input", [errors])

    yield from _by_output(gathered, of_output)


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

    def of_output(k: int, output: str) -> Iterator[Block]:
        size: Size = "full" if len(controls) == 1 else "half" if len(controls) == 2 else "third"
        lines = [
            _figure(
                f"discrepancy-{output}-{name}",
                partial(plots.discrepancy, gathered.posterior, along=name, output=output),
                size=size,
            )
            for name in controls[:MOST_CONTROLS]
        ]
        yield from _first(lines, SHOWN_CONTROLS, "control input", "Along the other")
        yield from _left(len(controls), MOST_CONTROLS, "control input", "discrepancy")
        if len(controls) > 1:
            pair = _most_discrepant(gathered, output)
            yield _figure(
                f"discrepancy-map-{output}",
                partial(plots.discrepancy_map, gathered.posterior, along=pair, output=output),
                "Along the two inputs that change it most.",
                size="half" if len(controls) > 2 else "full",
            )
        if member.model.kind == "general":
            yield _figure(
                f"warping-{output}",
                partial(plots.warping, member, output=output),
                "How nature answers to the simulator's output: g(η, x), and its slope. On the dashed line the "
                "simulator is taken as it is; a slope that is not one stretches or flattens it.",
            )

    yield from _by_output(gathered, of_output, SHOWN_OUTPUTS)


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
        "parameter explains over their ranges, alone and together with others. A parameter with a share near zero "
        "cannot be learned from this output."
    )

    def of_output(k: int, output: str) -> Iterator[Block]:
        yield _figure(f"sensitivity-{output}", partial(plots.sensitivity, gathered.posterior, output=output))

    yield from _by_output(gathered, of_output, SHOWN_OUTPUTS)


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
        f"{figure(seconds, 2)} s of training in {plural(int(metrics[-1]['step']), 'step')}"
        + (f"; stages: {listed(stages)}." if stages else ".")
        + " Losses of different stages are of different things, and are not compared."
    )
    if stages:
        yield _figure("training-loss", partial(plots.training, metrics), "The loss of every stage, a row's share.")
    learning = [row for row in metrics if row["phase"] in _phases_that_change(metrics, "emulator_error")]
    if learning:
        yield _figure(
            "training-emulator-error",
            partial(plots.training, learning, column="emulator_error"),
            "The emulator's error at runs that were kept apart, in standard deviations of the output.",
        )
    if any(value for row in metrics for name, value in row.items() if name.startswith("theta.")):
        theta = _figure(
            "training-theta",
            partial(plots.training_theta, gathered.posterior, metrics),
            "Where the parameters went while they were learned.",
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


# --- help -------------------------------------------------------------------------------------------------------------


def _figure(
    name: str, make: Callable[[], Any], caption: str = "", size: Size = "full", *, flows: bool = True
) -> Figure | Text:
    """A chart, or why there is none."""
    try:
        return Figure(name, make(), caption, size, flows)
    except VcalError as error:
        return Text(f"No chart “{name}”: {error}", "note")


def _by_output(
    gathered: Gathered, blocks: Callable[[int, str], Iterator[Block]], most: int = MOST_OUTPUTS
) -> Iterator[Block]:
    """Of one output, or of each: the first few in sight, the others folded; at most so many."""
    outputs = gathered.posterior.problem.outputs
    for k, output in enumerate(outputs[:most]):
        if len(outputs) == 1:
            yield from blocks(k, output.name)
        elif k < SHOWN_OUTPUTS:
            yield Heading(output.name)
            yield from blocks(k, output.name)
        else:
            yield Fold(output.name, list(blocks(k, output.name)))
    if len(outputs) > most:
        left = len(outputs) - most
        yield Text(f"The other {plural(left, 'output')}: vcal_dist.plots draws the same charts of each.", "note")


def _first(blocks: Sequence[Block], count: int, noun: str, what: str = "The other") -> Iterator[Block]:
    """So many in sight, the others folded."""
    yield from blocks[:count]
    if len(blocks) > count:
        yield Fold(f"{what} {plural(len(blocks) - count, noun)}", blocks[count:])


def _left(count: int, most: int, noun: str, function: str) -> Iterator[Block]:
    """What to say of charts beyond the first: which are not drawn, and what draws them."""
    if count > most:
        last = "one has" if count == most + 1 else f"{count - most:,} have"
        yield Text(f"Of {count:,} {noun}s the last {last} no chart here; vcal_dist.plots.{function} draws it.", "note")


def _which(sample: Sample, noun: str) -> str:
    """Which rows are shown: none is passed over in silence."""
    kept = sample.judged.method == "held out"
    if sample.rows < sample.among:
        some = f"A random sample of {sample.rows:,} of {sample.among:,} {noun}s"
    else:
        some = f"All {sample.rows:,} {noun}s" if sample.rows > 1 else f"The one {noun}"
    if kept:
        return f"{some} that training did not see, of {sample.table:,} in the store."
    return f"{some}, each predicted as if it alone had been left out of training, {AS_FITTED}."


def _predicted(sample: Sample, k: int) -> bool:
    """Whether some row knows an output and has a prediction of it."""
    return bool((np.isfinite(sample.judged.y[:, k]) & np.isfinite(sample.judged.mean[:, k])).any())


def _not_predicted(sample: Sample, k: int) -> Text:
    """Why not."""
    if np.isnan(sample.judged.y[:, k]).all():
        return Text("None of these rows knows this output: there is nothing to compare.", "note")
    return Text(
        "What would be predicted without each row cannot be told from this posterior: every one is fitted by itself, "
        "or training has not learned from it. Predict others, that training did not see, with vcal predict.",
        "note",
    )


def _no_rows(gathered: Gathered, table: str) -> Text:
    why = gathered.unreachable or f"the store has no {table} to judge by"
    return Text(f"Charts that need {table} are left out: {why}.", "note")


def _of_member(gathered: Gathered) -> str:
    return "Predicted by the heaviest member of the average." if isinstance(gathered.posterior, Averaged) else ""


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
