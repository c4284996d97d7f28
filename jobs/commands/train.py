"""`vcal train`: from a configuration to a posterior."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from jobs.console import number, print_json, stderr, stdout, table, vcal
from jobs.locations import TrustLocations

if TYPE_CHECKING:
    from vcal_dist.config import Config
    from vcal_dist.errors import Preempted
    from vcal_dist.posterior import Posterior

RETRIES = 3
MOST_UNRELIABLE = 0.5  # as the report has it, which is too heavy to load for a table


def _checked_workers(workers: str | None) -> str | None:
    """Here, so that a request to run elsewhere is checked where it is made."""
    if workers is not None:
        from jobs.ray_cluster import worker_range

        worker_range(workers)
    return workers


def train(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Keys to replace, e.g. fit.emulator.steps=500.", show_default=False
        ),
    ] = None,
    trust_locations: TrustLocations = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of configurations, for editors, and exit.")
    ] = False,
    on: Annotated[
        Literal["here", "ray"], typer.Option("--on", help="This machine, or a Ray cluster.", show_default=True)
    ] = "here",
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster, as host:port; unless given RAY_ADDRESS, one that runs here, or a new one."),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX",
            help="Processes on Ray; from MIN to MAX as the cluster has room.",
            show_default="1",
            callback=_checked_workers,
        ),
    ] = None,
    gpus_per_worker: Annotated[
        float | None, typer.Option(help="GPUs of each process on Ray.", show_default="1 where the cluster has GPUs")
    ] = None,
    cpus_per_worker: Annotated[
        int | None,
        typer.Option(min=1, help="CPUs of each process on Ray.", show_default="what the cluster has, shared out"),
    ] = None,
    retries: Annotated[
        int | None,
        typer.Option(min=0, help="How often training on Ray goes on after a process or a node died.", show_default="3"),
    ] = None,
    start_timeout: Annotated[
        float | None,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="How long the Ray cluster may have no room for the processes, at first or after a node was lost.",
            show_default="900",
        ),
    ] = None,
) -> None:
    """Train a calibration and write its posterior; the same command again goes on where it stopped.

    Exit status 75 after SIGTERM and 130 after Ctrl-C: a checkpoint is written, and the same command goes on from it.
    """
    from jobs.config import load

    if schema:
        from vcal_dist.config import Config

        print_json(Config.schema())
        return
    if config is None:
        raise typer.BadParameter(
            "a configuration file is needed; see jobs/configs/borehole.yaml for one", param_hint="CONFIG"
        )
    settings = load(config, overrides or [], trust_locations=trust_locations)
    only_ray = {
        "--address": address,
        "--workers": workers,
        "--gpus-per-worker": gpus_per_worker,
        "--cpus-per-worker": cpus_per_worker,
        "--retries": retries,
        "--start-timeout": start_timeout,
    }
    if on == "ray":
        posterior: Posterior | None = on_ray(
            settings, address, workers, gpus_per_worker, cpus_per_worker, retries, start_timeout
        )
    else:
        for option, value in only_ray.items():
            if value is not None:
                raise typer.BadParameter("is for training on Ray; add --on ray", param_hint=option)
        posterior = trained(settings)
    if posterior is None:
        return
    if json:
        print_json(described(posterior, str(settings.output)))
        return
    show(posterior, str(settings.output))


def trained(config: Config) -> Posterior | None:
    """The posterior, or None for a process that has nothing to show; a signal ends with a status of its own.

    What ends all processes alike is said by the first alone. The others end well: Lightning kills the first one if
    another fails while it is still there.
    """
    from vcal_dist.errors import Diverged, Preempted
    from vcal_dist.training import is_first
    from vcal_dist.training import train as run

    try:
        posterior = run(config, say=say)
    except (Diverged, Preempted) as stopped:
        if not is_first():
            return None
        if isinstance(stopped, Diverged):
            raise
        raise told(stopped) from None
    return posterior if is_first() else None


def told(stopped: Preempted) -> typer.Exit:
    """Says that training was stopped; the exit with its status."""
    from vcal_dist.errors import INTERRUPTED, PREEMPTED

    stderr().print(str(stopped), style="yellow", soft_wrap=True)
    return typer.Exit(INTERRUPTED if stopped.signal == signal.SIGINT else PREEMPTED)


def on_ray(
    config: Config,
    address: str | None,
    workers: str | None,
    gpus_per_worker: float | None,
    cpus_per_worker: int | None,
    retries: int | None,
    start_timeout: float | None,
) -> Posterior:
    """The posterior, trained on a Ray cluster."""
    from jobs.ray_cluster import connected, worker_range

    asked = worker_range(workers or "1")
    with connected(address):
        from jobs.ray_training import START_TIMEOUT, train_on_ray
        from vcal_dist.errors import Preempted

        try:
            return train_on_ray(
                config,
                workers=asked,
                gpus_per_worker=gpus_per_worker,
                cpus_per_worker=cpus_per_worker,
                retries=RETRIES if retries is None else retries,
                start_timeout=START_TIMEOUT if start_timeout is None else start_timeout,
                say=say,
            )
        except Preempted as stopped:
            raise told(stopped) from None


def say(line: str) -> None:
    """A line about what goes on."""
    from vcal_dist.training import is_first

    if is_first():
        stderr().print(line, style="dim", soft_wrap=True)


def described(posterior: Posterior, output: str) -> dict[str, object]:
    """The result in plain values."""
    return {
        "output": output,
        "parameters": [vars(row) for row in posterior.summary()],
        "noise": posterior.noise,
        "assessment": posterior.record.get("assessment"),
        "seconds": posterior.record.get("seconds"),
    }


def show(posterior: Posterior, output: str, truth: dict[str, float] | None = None, *, has_report: bool = False) -> None:
    """Tables of θ and of how well rows are predicted that training did not see, and where the result lies."""
    console = stdout()
    headings = ["parameter", "unit", "prior", "mean ± sd", "90 % interval", *(["truth"] if truth else [])]
    result = table("Posterior of θ", *headings)
    for row in posterior.summary():
        interval = f"{number(row.low, 4)} to {number(row.high, 4)}"
        cells = [row.name, row.unit, row.prior, f"{number(row.mean, 4)} ± {number(row.sd, 2)}", interval]
        result.add_row(*cells, *([number(truth[row.name], 4)] if truth else []))
    console.print(result)
    _show_assessment(posterior.record.get("assessment") or {})
    console.print()
    for name, sigma in posterior.noise.items():
        console.print(f"Noise of {name}: {number(sigma, 4)}")
    console.print(f"The result lies in {output}: posterior.nc for ArviZ, posterior.safetensors for `vcal predict`")
    if not has_report:
        console.print(f"See it in pictures with: {vcal('report', output)}", soft_wrap=True)


def _show_assessment(judged: dict[str, Any]) -> None:
    """A table, without the figures that mean nothing since most rows cannot be left out."""
    if not judged:
        return
    headings = ["rows", "RMSE", "log predictive density", "in the 90 % interval"]
    result = table("\nRows that training did not see", "table", *headings, right=tuple(headings))
    notes = []
    for name, found in judged.items():
        how = {"leave one out": ", left out one by one", "cross-validation": ", by cross-validation"}
        one_by_one = how.get(found["method"], "")
        errors = ", ".join(number(value, 3) for value in found["rmse"])
        cells = [errors, number(found["log_predictive_density"], 4), f"{100 * found['coverage']:.0f} %"]
        rows, unreliable = found["rows"], found.get("unreliable", 0)
        if unreliable:
            few = unreliable <= MOST_UNRELIABLE * rows
            cells = cells if few else ["–"] * len(cells)
            care = "; take its figures with care" if few else ""
            what = f"for {unreliable:,} of {rows:,} rows leaving out is not reliable (k̂ above 0.7)"
            notes.append(f"{name}: {what}{care}")
        result.add_row(f"{name}{one_by_one}", number(rows), *cells)
    stdout().print(result)
    for line in notes:
        stdout().print(line, style="yellow", soft_wrap=True)
