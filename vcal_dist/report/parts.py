"""What the sections of a report share: charts or why there is none, some in sight and others folded, words for rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from storage.errors import VcalError
from vcal_dist.mixed import Averaged
from vcal_dist.report.content import Block, Figure, Fold, Heading, Text
from vcal_dist.report.gathering import Gathered, Sample
from vcal_dist.report.row_checks import AS_FITTED
from vcal_dist.report.words import plural

SHOWN_OUTPUTS = 3  # of the others, charts of rows are folded; functions of the inputs, which take seconds, told of
MOST_OUTPUTS = 20  # that have charts at all
Size = Literal["full", "half", "third"]


def drawn(
    name: str, make: Callable[[], Any], caption: str = "", size: Size = "full", *, flows: bool = True
) -> Figure | Text:
    """A chart, or why there is none."""
    try:
        return Figure(name, make(), caption, size, flows)
    except VcalError as error:
        return Text(f"No chart “{name}”: {error}", "note")


def by_output(
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


def first(blocks: Sequence[Block], count: int, noun: str, what: str = "The other") -> Iterator[Block]:
    """So many in sight, the others folded."""
    yield from blocks[:count]
    if len(blocks) > count:
        others = len(blocks) - count
        yield Fold(f"{what} {noun if others == 1 else plural(others, noun)}", blocks[count:])


def left_over(count: int, most: int, noun: str, function: str) -> Iterator[Block]:
    """What to say of charts beyond the first: which are not drawn, and what draws them."""
    if count > most:
        last = "one has" if count == most + 1 else f"{count - most:,} have"
        yield Text(f"Of {count:,} {noun}s the last {last} no chart here; vcal_dist.plots.{function} draws it.", "note")


def which_rows(sample: Sample, noun: str) -> str:
    """Which rows are shown: none is passed over in silence."""
    kept = sample.judged.method == "held out"
    if sample.rows < sample.among:
        some = f"A random sample of {sample.rows:,} of {sample.among:,} {noun}s"
    else:
        some = f"All {sample.rows:,} {noun}s" if sample.rows > 1 else f"The one {noun}"
    if kept:
        return f"{some} that training did not see, of {sample.table:,} in the store."
    if sample.judged.method == "cross-validation":
        return f"{some} of {sample.table:,} in the store, each predicted by emulators trained without its run."
    if bool(sample.judged.unreliable.all()):
        return f"{some}; none was kept out of training."
    return f"{some}, each predicted as if it alone had been left out of training, {AS_FITTED}."


def is_predicted(sample: Sample, k: int) -> bool:
    """Whether some row knows an output and has a prediction of it."""
    return bool((np.isfinite(sample.judged.y[:, k]) & np.isfinite(sample.judged.mean[:, k])).any())


def not_predicted(sample: Sample, k: int) -> Text:
    """Why not."""
    if np.isnan(sample.judged.y[:, k]).all():
        return Text("None of these rows knows this output: there is nothing to compare.", "note")
    return Text(
        "What would be predicted without each row cannot be told from this posterior: every one is fitted by itself, "
        "or training has not learned from it. Predict others, that training did not see, with vcal predict.",
        "note",
    )


def no_rows(gathered: Gathered, table: str) -> Text:
    """Why there is nothing to judge by."""
    why = gathered.unreachable or f"the store has no {table} to judge by"
    return Text(f"Charts that need {table} are left out: {why}.", "note")


def of_member(gathered: Gathered) -> str:
    """Of an average, who predicted."""
    return "Predicted by the heaviest member of the average." if isinstance(gathered.posterior, Averaged) else ""
