"""What `vcal inspect` shows of a run: how far it is, what it found, how training went, where its files lie."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jobs.commands.train import described
from jobs.commands.train import show as show_posterior
from jobs.console import number, print_json, size, stdout, table
from jobs.run_state import (
    POSTERIOR,
    ROWS,
    VERSIONS,
    progress,
    read_config,
    resume_command,
    time_of,
)
from jobs.tables import variables
from vcal_dist.metrics import read_metrics, real

if TYPE_CHECKING:
    from storage import Problem
    from vcal_dist.posterior import Posterior

MOST_PARAMETERS = 8  # whose correlations are shown as a matrix; of more, the strongest
STRONGEST = 10
MEANING = {
    "config.yaml": "what was asked for, every default written out",
    "rows.json": "how many rows of the store belong to the run",
    "versions.json": "of Python and the packages",
    "run.lock": "held by the process that trains, empty",
    "metrics.csv": "records of training",
    "tensorboard": "the same for TensorBoard",
    "checkpoints": "to go on from",
    "data.zarr": "the rows, which were given as arrays",
    "posterior.safetensors": "the posterior, for `vcal predict`",
    "posterior.nc": "draws of θ, for ArviZ",
    "report.html": "what `vcal report` made of it, for a browser",
    "figures": "its figures, for a paper",
}
T = TypeVar("T")


def inspect_run(path: str | Path, *, json: bool) -> list[str]:
    """Prints what there is to know of a run; the damages that were found."""
    description, posterior = describe(Path(path))
    if json:
        print_json(description)
    else:
        show(description, posterior)
    damage: list[str] = description["damage"]
    return damage


def describe(run: Path) -> tuple[dict[str, Any], Posterior | None]:
    """Everything in plain values, and the posterior if it is there; what cannot be read is named as damage."""
    from storage.errors import VcalError
    from vcal_dist.posterior import DRAWS_FILE, Posterior
    from vcal_dist.run_directory import check_settings, is_held

    damage: list[str] = []

    def sound(read: Callable[[], T]) -> T | None:
        try:
            return read()
        except VcalError as error:
            damage.append(str(error))
            return None

    config = sound(lambda: read_config(run))
    rows = sound(lambda: _rows(run / ROWS)) if (run / ROWS).is_file() else None
    if config is not None and rows is not None:
        sound(lambda: check_settings(run))
    done = (run / POSTERIOR).is_file()
    training = not done and is_held(run)
    posterior = sound(lambda: Posterior.load(run)) if done else None
    if done and not (run / DRAWS_FILE).is_file():
        damage.append(f"{run / DRAWS_FILE} is missing; Posterior.load('{run}').save('{run}') writes it again")
    reached = None if done else sound(lambda: progress(run))
    problem = posterior.problem if posterior is not None else _problem_of(None if config is None else config.store)
    plain = None if config is None else config.plain()
    description = {
        "kind": "run",
        "path": str(run),
        "state": {
            "done": done,
            "at": time_of(run / POSTERIOR) if done else None,
            "training": training,
            "checkpoint": None if reached is None else vars(reached) | {"text": str(reached)},
            "go_on": None if done or training else resume_command(run),
        },
        "problem": None if problem is None else problem.model_dump(mode="json"),
        "priors": {} if problem is None else {v.name: str(v.prior) for v in problem.calibration_inputs},
        "rows": rows,
        "posterior": None if posterior is None else _posterior(posterior, run),
        "stages": stages(run),
        "versions": sound(lambda: _mapping(run / VERSIONS)),
        "files": _files(run),
        "config": plain,
        "damage": damage,
    }
    return description, posterior


def _problem_of(store: str | None) -> Problem | None:
    """The problem of the store that a run reads, if it is on this machine: the run may be a stranger's."""
    import storage
    from vcal_dist.locations import is_remote

    try:
        return None if store is None or is_remote(store) else storage.open(store).problem
    except storage.VcalError:
        return None


def _posterior(posterior: Posterior, run: Path) -> dict[str, Any]:
    found = described(posterior, str(run))
    return {**found, "correlation": posterior.correlation(), "components": len(posterior.components)}


def stages(run: Path) -> list[dict[str, Any]]:
    """The phases that have records, in their order: steps, seconds, and the last loss and emulator's error."""
    found: list[dict[str, Any]] = []
    steps, seconds = 0, 0.0
    for phase, group in groupby(read_metrics(run), key=lambda row: row["phase"]):
        rows = list(group)
        last = {key: [value for row in rows if (value := real(row.get(key))) is not None] for key in _RECORDED}
        end = int(rows[-1]["step"]), last["seconds"][-1]
        loss, error = (last[key][-1] if last[key] else None for key in ("loss", "emulator_error"))
        taken = {"steps": end[0] - steps, "seconds": end[1] - seconds}
        found.append({"phase": phase, **taken, "loss": loss, "emulator_error": error})
        steps, seconds = end
    return found


_RECORDED = ("seconds", "loss", "emulator_error")


def _mapping(path: Path) -> dict[str, Any]:
    """What a small JSON file holds."""
    from storage import documents
    from vcal_dist.errors import ModelError

    return documents.read(path, ModelError, "restore it from a copy")


def _rows(path: Path) -> dict[str, int]:
    from vcal_dist.run_directory import read_rows

    runs, observations = read_rows(path)
    return {"runs": runs, "observations": observations}


def _files(run: Path) -> dict[str, int]:
    """Bytes of what lies in the run directory, folders as a whole."""

    def stored(item: Path) -> int:
        return sum(file.stat().st_size for file in (item, *item.rglob("*")) if file.is_file())

    return {item.name: stored(item) for item in sorted(run.iterdir())}


def show(description: dict[str, Any], posterior: Posterior | None) -> None:
    """Print what `describe` found."""
    out, problem, state = stdout(), description["problem"], description["state"]
    out.print(f"{problem['name'] if problem else 'a run'}  {description['path']}", style="bold")
    if problem and problem["description"]:
        out.print(problem["description"])
    if state["done"]:
        seconds = (description["posterior"] or {}).get("seconds")
        took = "" if seconds is None else f", after {seconds:.1f} s"
        out.print(f"done: {state['at']}{took}", style="green")
    else:
        checkpoint = state["checkpoint"]
        when = f" (last checkpoint: {checkpoint['written']})" if checkpoint and checkpoint["written"] else ""
        where = checkpoint["text"] if checkpoint else "its checkpoint is damaged"
        if state["training"]:
            out.print(f"being trained by another process, {where}{when}; wait for it", style="yellow", soft_wrap=True)
        else:
            out.print(f"not finished: {where}{when}", style="yellow")
            out.print(f"go on with: {state['go_on']}", soft_wrap=True)
    if description["config"]:
        asked = description["config"]
        kinds = f"weights {asked['fit']['weights']}, discrepancy {asked['model']['discrepancy']}, seed {asked['seed']}"
        rows = "".join(f", {count:,} {table}" for table, count in (description["rows"] or {}).items())
        out.print(f"{kinds}, store {asked['store']}{rows}", soft_wrap=True)
    if problem:
        out.print()
        out.print(variables(problem, description["priors"]))
    if posterior is not None:
        out.print()
        show_posterior(posterior, description["path"])
    for part in (*_correlations(description), *_training(description), _places(description)):
        out.print()
        out.print(part)
    if description["versions"]:
        out.print("\n" + ", ".join(f"{name} {version}" for name, version in description["versions"].items()))
    if description["damage"]:
        out.print(f"\ndamaged: {len(description['damage'])}", style="bold red")
        for line in description["damage"]:
            out.print(f"  {line}", style="red", soft_wrap=True)


def _correlations(description: dict[str, Any]) -> list[Any]:
    found = description["posterior"]
    names = [row["name"] for row in found["parameters"]] if found else []
    if len(names) < 2:
        return []
    matrix = found["correlation"]
    if len(names) <= MOST_PARAMETERS:
        result = table("Correlations of θ", "", *names, right=tuple(names))
        for i, name in enumerate(names):
            result.add_row(name, *(f"{matrix[i][j]:.2f}" for j in range(i + 1)))
        return [result]
    pairs = [(float(matrix[i][j]), names[j], names[i]) for i in range(len(names)) for j in range(i)]
    result = table(f"The strongest of {len(pairs)} correlations of θ", "", "and", "correlation", right=("correlation",))
    for value, one, other in sorted(pairs, key=lambda pair: -abs(pair[0]))[:STRONGEST]:
        result.add_row(one, other, f"{value:.2f}")
    return [result]


def _training(description: dict[str, Any]) -> list[Any]:
    if not description["stages"]:
        return []
    headings = ("steps", "seconds", "loss per row", "emulator error")
    result = table("Training", "phase", *headings, right=headings)
    for item in description["stages"]:
        values = (number(item["loss"], 4), number(item["emulator_error"], 3))
        result.add_row(item["phase"], number(item["steps"]), f"{item['seconds']:.2f}", *values)
    return [result]


def _places(description: dict[str, Any]) -> Any:
    result = table(f"Files in {description['path']}", "file", "size", "what it is", right=("size",))
    for name, stored in description["files"].items():
        result.add_row(name, size(stored), MEANING.get(name, ""))
    return result
