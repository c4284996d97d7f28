"""Options of the commands that read a run or a configuration that may be a stranger's (`vcal_dist.locations`)."""

from __future__ import annotations

from typing import Annotated

import typer

Store = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="Where the rows are, if not where the run's record says.",
        show_default="as recorded, if on this machine",
    ),
]
TrustLocations = Annotated[
    bool,
    typer.Option("--trust-locations", help="Connect to network locations that only a run's own files name."),
]
