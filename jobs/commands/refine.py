"""`vcal refine`: the posterior of θ of a finished run, closer to the exact one than training had time for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import number, print_json, stdout, table, vcal
from jobs.locations import Store, TrustLocations

if TYPE_CHECKING:
    from vcal_dist.posterior import Posterior
    from vcal_dist.refined import Moved

FAR, NEAR = 0.25, 0.05  # total-variation distance


def refine(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory of `vcal train`, or a URL.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Where and how to compute, e.g. devices.devices=2 or data.memory=1GB.",
            show_default=False,
        ),
    ] = None,
    evaluations: Annotated[
        int, typer.Option(min=1, help="Points where the exact posterior is evaluated.", show_default=True)
    ] = 2048,
    store: Store = None,
    trust_locations: TrustLocations = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Refine the posterior of θ of a finished run, and say how far it moved.

    Importance sampling of the posterior of θ with all weights integrated out, and with what is not known of the
    discrepancy and the noise. With many observations all points of a round share one pass over the rows, and the
    discrepancy's length scales stay as they are. It needs Gaussian noise and an additive discrepancy or none. The run's
    posterior is replaced; write its report again.
    """
    from jobs.commands.train import say
    from jobs.config import overridden
    from jobs.run_state import finished_run
    from vcal_dist.errors import ConfigError
    from vcal_dist.refined import refine as refined
    from vcal_dist.run_directory import WHERE
    from vcal_dist.training import is_first

    for override in overrides or []:
        key = override.partition("=")[0].strip()
        if key not in WHERE:
            raise ConfigError(f"'{key}' cannot be changed when a run is refined; accepted: {', '.join(WHERE)}")
    changes: dict[str, Any] = overridden({}, overrides or [])
    with finished_run(run, "refine") as (place, _, _):
        posterior, moved = refined(
            place,
            evaluations=evaluations,
            changes=changes,
            store=store,
            trust_locations=trust_locations,
            say=say,
        )
    if not is_first():
        return
    if json:
        print_json(described(run, posterior, moved))
    else:
        show(run, posterior, moved)


def described(run: str, posterior: Posterior, moved: list[Moved]) -> dict[str, object]:
    """The result in plain values."""
    found = posterior.record["theta"]
    return {
        "run": run,
        "parameters": [vars(each) for each in moved],
        "evaluations": found["evaluations"],
        "effective": found["effective"],
        "pareto_k": found["pareto_k"],
        "seconds": posterior.record["refined"]["seconds"],
        "verdict": verdict(moved),
    }


def verdict(moved: list[Moved]) -> str:
    """In a sentence, how far it moved."""
    furthest = max(moved, key=lambda each: each.distance)
    if furthest.distance < NEAR:
        return f"Nothing moved: every parameter is within {number(NEAR, 2)} of where it was (total variation)."
    much = "moved far" if furthest.distance > FAR else "moved a little"
    wider = f"its sd is {number(furthest.ratio, 3)} times what it was"
    return f"{furthest.name} {much}: by {number(furthest.shift, 2)} sd, {wider}; use the posterior as it is now."


def show(run: str, posterior: Posterior, moved: list[Moved]) -> None:
    """A table of what changed, and where to look next."""
    headings = ("before", "now", "shift in sds", "sd ratio", "distance")
    result = table("Posterior of θ, refined", "parameter", *headings, right=headings)
    for each in moved:
        before, now = (
            f"{number(mean, 4)} ± {number(sd, 2)}"
            for mean, sd in ((each.mean_before, each.sd_before), (each.mean, each.sd))
        )
        figures = (number(each.shift, 2), number(each.ratio, 3), number(each.distance, 2))
        result.add_row(each.name, before, now, *figures)
    stdout().print(result)
    found = posterior.record["theta"]
    k = "" if found["pareto_k"] is None else f", k̂ {number(found['pareto_k'], 2)}"
    points = f"{number(found['evaluations'])} points, worth {number(found['effective'], 3)} independent draws{k}"
    stdout().print(f"{verdict(moved)}\n{points}; {number(posterior.record['refined']['seconds'], 3)} s")
    stdout().print(f"Whether to trust it: {vcal('diagnose', run)}", soft_wrap=True)
