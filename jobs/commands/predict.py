"""`vcal predict`: what a finished run says of the process at the rows of a file."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from jobs.console import print_json, stderr, stdout
from jobs.outputs import writable
from vcal_dist.prediction_kinds import AT_T, MEANING, What

if TYPE_CHECKING:
    from jobs.prediction_inputs import Rows
    from jobs.predictions import Asked
    from storage import Problem
    from vcal_dist.answers import Answers

FROM_FILE = "from-file"
SHOWN = 10  # rows, where they are not written
MOST_NAMES = 20  # of ignored columns
T = TypeVar("T")


def predict(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run directory of `vcal train`, or several averaged. Goes before --t."),
    ],
    at: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Where to predict: CSV, Parquet, NetCDF, HDF5, npz or Zarr with a column for each control input, or a "
            "store (its observations).",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="File to write: .csv, .parquet, .nc or .zarr. Without it, a look.",
            callback=writable,
        ),
    ] = None,
    what: Annotated[
        What,
        typer.Option(metavar="WHAT", help="\n\n".join(f"{kind}: {text}." for kind, text in MEANING.items())),
    ] = "process",
    samples: Annotated[int, typer.Option(min=0, metavar="S", help="Also write so many samples of each row.")] = 0,
    t: Annotated[
        list[str] | None,
        typer.Option(
            "--t",
            metavar="NAME=VALUE…",
            help="Predict the emulator at these calibration inputs in place of the posterior's θ, all of them; or "
            f"'{FROM_FILE}': at those in FILE's columns (of a store: its runs).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all draws.")] = 0,
    extrapolate: Annotated[
        bool, typer.Option("--extrapolate", help="Allow inputs outside the problem's bounds, where there are no runs.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Predict at the rows of a file with a finished run.

    Columns of FILE are found by the control inputs' names; others are ignored. With --what observation, columns
    `<output>_noise` add the observations' own noise.

    The result has the inputs and, for each output, `_mean`, `_sd`, `_q05`, `_q95` (5 % and 95 % quantiles) and
    `_sample_0`, `_sample_1`, … A sample is one function of x in all rows, residual and noise apart.

    The residual in --what is what the emulator cannot follow of the simulator. Of counts and classes, process and
    emulator are the mean.

    Quantiles are exact where the prediction is a normal distribution: the emulator at chosen calibration inputs and an
    additive discrepancy, if the posterior has one component and there are neither hidden layers nor transforms.
    Otherwise they are those of 1000 samples, or of S if that is more, with an error of about 0.07 standard deviations.

    Example: vcal predict runs/borehole --at new.csv -o predicted.parquet
    """
    from jobs.prediction_files import MADE_BY, check_output, flat_names, write
    from jobs.run_state import load_posterior

    path = None if output is None else check_output(output, at, overwrite=overwrite)
    posterior = load_posterior(run)
    rows, asked = _asked(posterior, at, what, samples, t, seed, extrapolate)
    from jobs.predictions import block_rows, drawn, fields, is_normal, predicted

    count = drawn(posterior, rows, asked)
    about = {
        "made_by": MADE_BY,
        "run": str(Path(run).absolute()),
        "problem": posterior.problem.name,
        "what": what,
        "at": at,
        "seed": str(seed),
        "quantiles": "of a normal distribution" if is_normal(posterior, rows, asked) else f"of {count} samples",
    }
    found: dict[str, Any] = {**about, "seed": seed, "rows": rows.count, "ignored": rows.ignored}
    columns = fields(posterior.problem, rows, asked)
    if path is None:
        first = next(predicted(posterior, rows, asked, SHOWN))
        values = [column for block in first for column in (block.T if block.ndim > 1 else [block])]
        _show(found | {"first_rows": dict(zip(flat_names(columns), map(list, values), strict=True))}, json)
        return
    size, begun = block_rows(posterior, rows, asked), time.perf_counter()
    blocks = _progress(predicted(posterior, rows, asked, size), rows.count, size)
    write(path, columns, blocks, rows=rows.count, block_rows=size, about=about)
    _show(found | {"output": output, "seconds": time.perf_counter() - begun}, json)


def _asked(
    posterior: Answers, at: str, what: Any, samples: int, t: list[str] | None, seed: int, extrapolate: bool
) -> tuple[Rows, Asked]:
    """What to predict and where; everything that can be wrong with it is said here."""
    from jobs.prediction_inputs import open_rows
    from jobs.predictions import Asked

    if t and what not in AT_T:
        raise typer.BadParameter(
            f"only the emulator is predicted at chosen calibration inputs, and --what is {what}; add --what emulator",
            param_hint="--t",
        )
    from_file = t == [FROM_FILE]
    fixed = parse_t(t, posterior.problem, extrapolate) if t and not from_file else None
    rows = open_rows(at, posterior.problem, with_t=from_file, with_noise=what == "observation", extrapolate=extrapolate)
    return rows, Asked(what, samples, seed, extrapolate, fixed)


def parse_t(given: Sequence[str], problem: Problem, extrapolate: bool) -> dict[str, float]:
    """The calibration inputs in texts such as rw=0.1, every one of the problem."""
    inputs = {v.name: v for v in problem.calibration_inputs}
    found: dict[str, float] = {}
    for text in given:
        name, sign, value = text.rpartition("=")
        if not sign:
            raise _wrong(f"'{text}' is no NAME=VALUE; write all of {_example(inputs)}, or {FROM_FILE} alone")
        if name not in inputs:
            raise _wrong(f"'{name}' is no calibration input; they are {', '.join(inputs)}")
        if name in found:
            raise _wrong(f"'{name}' is given twice")
        try:
            found[name] = float(value)
        except ValueError:
            raise _wrong(f"'{value}', given for '{name}', is not a number") from None
        low, high = inputs[name].bounds
        if not math.isfinite(found[name]) or not (extrapolate or low <= found[name] <= high):
            cure = "" if extrapolate else "; --extrapolate predicts there all the same"
            raise _wrong(f"'{name}' is {found[name]:g}, out of its bounds {low:g} to {high:g}{cure}")
    missing = [name for name in inputs if name not in found]
    if missing:
        raise _wrong(f"{', '.join(missing)} is missing; all must be given: {_example(inputs)}")
    return found


def _wrong(text: str) -> typer.BadParameter:
    return typer.BadParameter(text, param_hint="--t")


def _example(names: Iterable[str]) -> str:
    return " ".join(f"{name}=VALUE" for name in names)


def _progress(blocks: Iterator[T], rows: int, size: int) -> Iterator[T]:
    """The blocks, with a bar on the terminal where they are several."""
    console = stderr()
    if rows <= size or not console.is_terminal:
        yield from blocks
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("predicting"),
        BarColumn(30),
        MofNCompleteColumn(),
        TextColumn("rows,"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=rows)
        for block in blocks:
            yield block
            bar.advance(task, min(size, rows - bar.tasks[0].completed))


def _show(found: dict[str, Any], json: bool) -> None:
    if json:
        print_json(found)
        return
    if found["ignored"]:
        ignored = found["ignored"]
        more = f" and {len(ignored) - MOST_NAMES} more" if len(ignored) > MOST_NAMES else ""
        stderr().print(f"ignored columns: {', '.join(ignored[:MOST_NAMES])}{more}", style="dim")
    if "output" in found:
        rate = found["rows"] / max(found["seconds"], 1e-9)
        stdout().print(
            f"{found['output']}: {found['what']} at {found['rows']:,} rows in {found['seconds']:.1f} s, "
            f"{rate:,.0f} rows/s; quantiles {found['quantiles']}",
            soft_wrap=True,
        )
        return
    from jobs.predictions import named
    from jobs.tables import first_rows

    for part in first_rows(f"Prediction of the {named(found['what'])}", found["first_rows"]):
        stdout().print(part)
    more = found["rows"] - len(next(iter(found["first_rows"].values())))
    stdout().print(f"\nquantiles {found['quantiles']}{f'; {more:,} more rows: -o FILE writes all' if more else ''}")
