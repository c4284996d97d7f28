"""`vcal report`: a finished run as one page to look at, or its figures as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jobs.console import note, stdout
from jobs.locations import Store, TrustLocations
from jobs.outputs import writable

if TYPE_CHECKING:
    from vcal_dist.run_place import RunPlace

PAGE, FIGURES = "report.html", "figures"


def report(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run directory of `vcal train`, several averaged, or a URL.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File to write or replace, or with --format png and pdf a folder to which figures are added: those "
            "of other names stay. [RUN/report.html, RUN/figures]",
            show_default=False,
            callback=writable,
        ),
    ] = None,
    kind: Annotated[
        Literal["html", "png", "pdf"],
        typer.Option("--format", help="A page that needs no network, or its figures for a paper."),
    ] = "html",
    store: Store = None,
    trust_locations: TrustLocations = False,
) -> None:
    """Write a report of a finished run: what the parameters are, how sure that is, and whether to trust it.

    The page holds everything that it shows and asks no network for anything. Rows come from the store that the run
    was trained on; if that cannot be reached, the report says so and leaves out what needs them.
    """
    written = write_report(run, output, kind, store=store, trust_locations=trust_locations)
    stdout().print(str(written), soft_wrap=True)


def write_report(
    run: str | Path,
    output: Path | None = None,
    kind: Literal["html", "png", "pdf"] = "html",
    truth: Mapping[str, float] | None = None,
    *,
    store: str | None = None,
    trust_locations: bool = False,
) -> str:
    """Writes the report of a run; where it lies. `truth` is known of examples."""
    from jobs.run_state import finished_run
    from storage.places import write_durably
    from storage.room import because
    from vcal_dist.errors import ModelError
    from vcal_dist.report import figures, gather, html
    from vcal_dist.run_directory import refuse_links_out

    with finished_run(run, "report") as (place, folder, posterior):
        target = _target(place, folder, output, kind)
        gathered = gather(
            folder,
            posterior,
            place=place.url,
            truth=truth,
            store=store,
            trust_locations=trust_locations,
            say=note,
        )
        page = html(gathered, note).encode() if kind == "html" else b""
        if output is None:
            refuse_links_out(target.parent)
        try:
            if kind == "html":
                write_durably(target, page)
            else:
                figures(gathered, target, kind, note)
        except OSError as error:
            raise ModelError(f"cannot write {target}: {because(error)}") from None
        if output is None:
            place.send()
            return f"{place.url.rstrip('/')}/{target.name}" if place.remote else str(target)
        return str(target)


def _target(place: RunPlace, folder: Path, output: Path | None, kind: str) -> Path:
    """Where the report goes."""
    from jobs.run_state import is_mixture

    name = PAGE if kind == "html" else FIGURES
    if output is not None:
        return output / name if kind == "html" and output.is_dir() else output
    if is_mixture(folder) and not place.remote:  # whose directory holds nothing else
        return folder.parent / f"{folder.resolve().name}-{name}"
    return folder / name
