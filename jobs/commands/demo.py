"""`vcal demo`: the borehole example from end to end."""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.commands.report import write_report
from jobs.commands.train import say, show, trained
from jobs.console import stdout, vcal
from jobs.outputs import writable

MARK = "demo.json"  # lies beside the store and the run, and says that this command made them
STORE, RUN = "borehole.zarr", "run"
SEED = 0


def demo(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the configuration to replace.", show_default=False),
    ] = None,
    runs: Annotated[int, typer.Option(min=2, metavar="N", help="Simulator runs to generate.")] = 100_000,
    observations: Annotated[int, typer.Option(min=1, metavar="N", help="Field observations to generate.")] = 10_000,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Directory to write to; an earlier demo is replaced.",
            callback=writable,
        ),
    ] = Path("runs/demo"),
) -> None:
    """Generate the borehole data set, write the store, calibrate, show θ beside the truth, and write the report."""
    from jobs.config import configure
    from vcal_dist.problems import borehole
    from vcal_dist.training import is_first

    config = configure({"store": str(output / STORE), "output": str(output / RUN), "seed": SEED}, overrides or [])
    settings = {"runs": runs, "observations": observations, "seed": SEED, "overrides": overrides or []}
    if is_first() and not is_interrupted(output, settings):
        path = make_room(output, settings)
        borehole.make_store(path, runs, observations, seed=SEED)
        say(f"{runs:,} runs and {observations:,} observations of the borehole are in {path}")
    posterior = trained(config)
    if posterior is None:
        return
    truth = dict(zip(borehole.PARAMETERS, borehole.THETA, strict=True))
    show(posterior, str(output / RUN), truth, has_report=True)
    look = vcal("inspect", str(output / RUN))
    stdout().print(f"The store lies in {output / STORE}. Look at the run with: {look}", soft_wrap=True)
    stdout().print(f"Open the report in a browser: {write_report(output / RUN, truth=truth)}", soft_wrap=True)


def is_interrupted(output: Path, settings: dict[str, Any]) -> bool:
    """Whether an earlier demo with the same settings was stopped in its training: it goes on."""
    from vcal_dist.posterior import FILE
    from vcal_dist.run_directory import ROWS

    mark, run = output / MARK, output / RUN
    if not (run / ROWS).is_file() or (run / FILE).exists() or not mark.is_file() or not _is_ours(mark):
        return False
    return bool(json.loads(mark.read_text(encoding="utf-8")) == _content(settings))


def make_room(output: Path, settings: dict[str, Any]) -> Path:
    """The path for the demo's store, free: an earlier demo's store and run are removed, anything else is left alone."""
    from storage.errors import StoreError

    mark = output / MARK
    for path in (output / STORE, output / RUN):
        # The mark is written before the store, so that a demo that was interrupted can be replaced too.
        if path.is_symlink() or (path.exists() and not (mark.is_file() and _is_ours(mark))):
            raise StoreError(
                f"{path} exists and was not made by `vcal demo`; move it, or choose another directory with --output"
            )
    for path in (output / STORE, output / RUN):
        if path.exists():
            shutil.rmtree(path)
    output.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps(_content(settings), indent=2) + "\n", encoding="utf-8")
    return output / STORE


def _content(settings: dict[str, Any]) -> dict[str, Any]:
    return {"made_by": "vcal demo", "store": STORE, "run": RUN, **settings}


def _is_ours(mark: Path) -> bool:
    try:
        content = json.loads(mark.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("made_by") == "vcal demo" and content.get("store") == STORE
