"""`vcal demo`: the borehole example from end to end."""

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.commands.inspect import describe, show
from jobs.console import stdout

MARK = "demo.json"  # lies beside the store and says that this command made it
STORE = "borehole.zarr"
SEED = 0


def demo(
    runs: Annotated[int, typer.Option(min=1, metavar="N", help="Simulator runs to generate.")] = 100_000,
    observations: Annotated[int, typer.Option(min=1, metavar="N", help="Field observations to generate.")] = 10_000,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Directory to write to; an earlier demo is replaced."),
    ] = Path("runs/demo"),
) -> None:
    """Generate the borehole data set, write the store and inspect it."""
    import storage
    from vcal_dist.problems import borehole

    path = make_room(output, {"runs": runs, "observations": observations, "seed": SEED})
    data = borehole.generate(runs, observations, seed=SEED)
    expected = {"runs": runs, "observations": observations}
    store = storage.create(path, borehole.problem(), expected_rows=expected)
    store.append_runs(data.x_runs, data.t, data.z)
    store.append_observations(data.x, data.y)
    show(describe(storage.open(path), rows=5))
    stdout().print(f"\nThe store lies in {path}; look at it again with: vcal inspect {path}")


def make_room(output: Path, settings: dict[str, Any]) -> Path:
    """The path for the demo's store, free: an earlier demo's store is removed, anything else is left alone."""
    from storage.errors import StoreError

    path, mark = output / STORE, output / MARK
    if path.exists() or path.is_symlink():
        # The mark is written before the store, so that a demo that was interrupted can be replaced too.
        if path.is_symlink() or not mark.is_file() or not _is_ours(mark):
            raise StoreError(
                f"{path} exists and was not made by `vcal demo`; move it, or choose another directory with --output"
            )
        shutil.rmtree(path)
    output.mkdir(parents=True, exist_ok=True)
    mark.write_text(json.dumps({"made_by": "vcal demo", "store": STORE, **settings}, indent=2) + "\n", encoding="utf-8")
    return path


def _is_ours(mark: Path) -> bool:
    try:
        content = json.loads(mark.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("made_by") == "vcal demo" and content.get("store") == STORE
