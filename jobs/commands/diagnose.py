"""`vcal diagnose`: whether to trust a finished run, check by check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import note, print_json, stdout
from jobs.locations import Store, TrustLocations

if TYPE_CHECKING:
    from vcal_dist.report.diagnostics import Verdict

STRICT = 3  # the exit status with --strict of a run that is not to be trusted
STYLES = {"good": "green", "care": "yellow", "bad": "red"}
INDENT = 2


def diagnose(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run directory of `vcal train`, several averaged, or a URL.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    store: Store = None,
    trust_locations: TrustLocations = False,
    strict: Annotated[
        bool, typer.Option("--strict", help=f"Exit with status {STRICT} if the verdict is 'bad', for scripts.")
    ] = False,
) -> None:
    """Say whether to trust a finished run: every check of the report, what it found, and what to do about it.

    The verdict is that of the worst check: good, care or bad. With --json every check comes with its figure and with
    what that was compared with. Rows come from the store that the run was trained on, as far as it can be reached.
    """
    from jobs.run_state import finished_run
    from vcal_dist.report import diagnostics, gather

    with finished_run(run, "diagnose") as (place, folder, posterior):
        gathered = gather(folder, posterior, place=place.url, store=store, trust_locations=trust_locations, say=note)
        verdict = diagnostics.diagnose(gathered)
        if json:
            print_json(described(place.url, verdict))
        else:
            show(place.url, verdict)
    if strict and verdict.status == "bad":
        raise typer.Exit(STRICT)


def described(run: str, verdict: Verdict) -> dict[str, Any]:
    """The verdict for programs; a check's `figures` are those of every parameter or output, by name."""
    checks = [
        {
            "name": check.name,
            "status": check.status,
            "value": check.value,
            "figure": check.number,
            "figures": dict(check.numbers),
            "threshold": check.threshold,
            "sentence": check.sentence,
            "suggestion": check.advice,
        }
        for check in verdict.checks
    ]
    return {"run": run, "verdict": verdict.status, "checks": checks}


def show(run: str, verdict: Verdict) -> None:
    """The verdict, then a table of the checks, the worst first: below each what it says, and what to do."""
    from rich.cells import cell_len
    from rich.padding import Padding
    from rich.text import Text

    from vcal_dist.report.answer import HEADLINES
    from vcal_dist.report.check import RANK

    console = stdout()
    counts = [(status, sum(check.status == status for check in verdict.checks)) for status in ("bad", "care", "good")]
    told = ", ".join(f"{count} {status}" for status, count in counts if count)
    console.print(f"{HEADLINES[verdict.status]}: {run}", style=f"bold {STYLES[verdict.status]}", soft_wrap=True)
    console.print(f"{len(verdict.checks)} checks: {told}\n")
    width = max(cell_len(name) for name in ("check", *(check.name for check in verdict.checks)))
    console.print(f"{'check':<{width}}  status  figure", style="bold cyan")
    for check in sorted(verdict.checks, key=lambda check: -RANK[check.status]):
        line = Text(check.name + " " * (width - cell_len(check.name)), style="bold")
        console.print(line.append(f"  {check.status:<6}", STYLES[check.status]).append(f"  {check.value}", ""))
        console.print(Padding(Text(check.sentence), (0, 0, 0, INDENT), expand=False))
        if check.advice:
            console.print(
                Padding(Text(f"→ {check.advice}", style=STYLES[check.status]), (0, 0, 0, INDENT), expand=False)
            )
