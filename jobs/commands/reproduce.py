"""`vcal reproduce`: the paper's experiments, beside the paper's own figures."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jobs.commands.train import say
from jobs.console import number, print_json, stdout, table
from jobs.outputs import writable

if TYPE_CHECKING:
    from jobs.reproduce.experiment import Experiment

NAMES = ("illustrative", "cell", "radionuclide", "borehole")
DIGITS = 4


def reproduce(
    name: Annotated[
        Literal["illustrative", "cell", "radionuclide", "borehole", "all"],
        typer.Argument(
            metavar="illustrative|cell|radionuclide|borehole|all", help="The experiment.", show_default=False
        ),
    ],
    seeds: Annotated[int, typer.Option(min=1, metavar="K", help="How often, with other data and starts.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, to see that it works.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Directory to write to.",
            show_default="runs/reproduce, or -quick",
            callback=writable,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Repeat the paper's experiments and show its figures beside ours; the same command again goes on.

    Every experiment leaves results.json, figures (PNG and PDF) and its run directories, for `vcal report`.
    """
    from jobs.reproduce.running import claim
    from jobs.reproduce.running import reproduce as run

    output = output or Path("runs/reproduce-quick" if quick else "runs/reproduce")
    names = NAMES if name == "all" else (name,)
    for each in names:
        claim(experiment(each), output / each, seeds=seeds, quick=quick)
    found = {}
    for each in names:
        results = run(experiment(each), output / each, seeds=seeds, quick=quick, say=say)
        found[each] = results
        if not json:
            show(results, experiment(each), output / each)
    if json:
        print_json(found)


def experiment(name: str) -> Experiment:
    """The experiment of this name."""
    found: Experiment = importlib.import_module(f"jobs.reproduce.{name}").EXPERIMENT
    return found


def show(results: dict[str, Any], of: Experiment, output: Path) -> None:
    """The paper's figures, ours and the floor side by side."""
    out, seeds = stdout(), results["seeds"]
    headings = ("paper", "ours" if seeds == 1 else f"ours, median of {seeds}", "range", "floor")
    heading = f"\n{results['title']}{' (quick: smaller than the paper’s)' if results['quick'] else ''}"
    lines = table(heading, "figure", *headings, right=headings)
    for key, figure in results["figures"].items():
        ours, unit = results["ours"][key], f" {figure['unit']}" if figure["unit"] else ""
        cells = (
            number(results["paper"][key], DIGITS),
            number(None if ours is None else ours["median"], DIGITS),
            _range(ours),
            number(results["floor"][key], DIGITS),
        )
        lines.add_row(f"{figure['label']}{unit and ',' + unit}", *cells)
    out.print(lines)
    if of.table is not None:
        found = of.table(results["details"][0])
        more = table(f"\n{found.title}", *found.headings, right=found.headings[1:])
        for row in found.rows:
            more.add_row(*row)
        out.print(more)
    for note in results["notes"]:
        out.print(note, style="dim")
    seconds = sum(results["seconds"])
    out.print(f"{results['experiment']}: {seconds:.0f} s in all; results.json, figures and runs lie in {output}")


def _range(ours: dict[str, Any] | None) -> str:
    """From the lowest to the highest; a figure that few seeds have says so."""
    if ours is None or len(ours["values"]) == 1:
        return ""
    known = sum(value is not None for value in ours["values"])
    if known == 1:
        return "1 seed"
    spread = f"{number(ours['low'], DIGITS)} to {number(ours['high'], DIGITS)}"
    return spread if known == len(ours["values"]) else f"{spread}, {known} seeds"
