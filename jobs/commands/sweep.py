"""`vcal sweep`: many trainings with different settings, and the best of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.commands.train import told
from jobs.console import number, print_json, stderr, stdout, table
from jobs.locations import TrustLocations

if TYPE_CHECKING:
    from jobs.sweeps.outcome import Outcome
    from jobs.sweeps.settings import Sweep

SETTING_DIGITS = 3


def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys to replace, e.g. sweep.trials=32.", show_default=False),
    ] = None,
    trust_locations: TrustLocations = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster, host:port; unless given RAY_ADDRESS, one that runs here, or a new one."),
    ] = None,
    trial: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="K",
            help="Only train trial K, counted from 0, in full, here and without Ray: for the tasks of a job array.",
            show_default=False,
        ),
    ] = None,
    collect: Annotated[
        bool, typer.Option("--collect", help="Only write the outcome of the trials that are there.")
    ] = False,
) -> None:
    """Try settings of a training, stop those that lead nowhere, and keep the best; the same command again goes on.

    CONFIG is a configuration of `vcal train` with a section `sweep` (see jobs/configs/sweep.yaml). Exit status 1 if no
    trial succeeded, 75 after SIGTERM and 130 after Ctrl-C.
    """
    from jobs.sweeps.settings import load

    if trial is not None and collect:
        raise typer.BadParameter("trains one trial, and --collect none; give one of them", param_hint="--trial")
    settings = load(config, overrides or [], trust_locations=trust_locations)
    if trial is not None:
        run_one(settings, trial, as_json=json)
        return
    if not collect:
        run_all(settings, address)
    outcome = collected(settings)
    if json:
        print_json(outcome.plain())
    else:
        show(outcome)
    if outcome.best is None:
        raise typer.Exit(1)


def run_all(settings: Sweep, address: str | None) -> None:
    """All trials that are missing, on Ray."""
    from jobs.ray_cluster import connected
    from jobs.sweeps import directory
    from jobs.sweeps.trial import left
    from vcal_dist.errors import INTERRUPTED, PREEMPTED
    from vcal_dist.run_directory import held

    # Read when Ray is imported: what trials print would mix with the lines about them.
    os.environ.setdefault("RAY_LOG_TO_DRIVER", "0")
    directory.begin(settings)
    terminated = []

    def terminate(number: int, frame: FrameType | None) -> None:
        terminated.append(number)
        raise KeyboardInterrupt  # which Ray lets through, wherever it is

    if not any(left(settings)):
        say(f"all trials are done already, in {settings.output}; give more of them to go on, as in sweep.trials=32")
        return
    try:
        with held(settings.output), connected(address):
            from jobs.sweeps.tune import run

            signal.signal(signal.SIGTERM, terminate)  # after Ray has set its own
            run(settings, say)
    except KeyboardInterrupt:
        why = "stopped by a signal" if terminated else "interrupted"
        say(f"{why}; the same command goes on, in {settings.output}")
        raise typer.Exit(PREEMPTED if terminated else INTERRUPTED) from None


def run_one(settings: Sweep, trial: int, *, as_json: bool) -> None:
    """One trial in this process."""
    from jobs.sweeps import directory
    from jobs.sweeps.alone import run_alone
    from jobs.sweeps.outcome import row
    from vcal_dist.errors import Preempted

    directory.begin(settings)
    try:
        found = run_alone(settings, trial, say)
    except Preempted as stopped:
        raise told(stopped) from None
    if as_json:
        print_json(row(found) | {"settings": found.settings})
    elif found.last is not None:
        stdout().print(f"Trial {trial}: {settings.settings.metric} {number(found.last.metric)}")
    if found.state == "failed":
        stderr().print(f"trial {trial} failed: {found.reason}", style="red")
        raise typer.Exit(1)


def collected(settings: Sweep) -> Outcome:
    """The outcome of what is there."""
    from jobs.sweeps import directory, outcome
    from vcal_dist.errors import ConfigError

    if not directory.exists(settings):
        raise ConfigError(f"there is no sweep in {settings.output}; run it first, without --collect")
    directory.begin(settings)
    return outcome.collect(settings)


def say(line: str) -> None:
    """A line about what goes on."""
    stderr().print(line, style="dim", soft_wrap=True)


def show(outcome: Outcome) -> None:
    """A table of the trials, best first, and where the results lie."""
    from jobs.sweeps.outcome import BEST, BEST_CONFIG, MIXTURE, PAGE, TABLE

    settings, console = outcome.sweep, stdout()
    metric = settings.settings.metric.replace("_", " ")
    result = table("Trials", "rank", "trial", "state", metric, "seconds", "settings", right=("rank", "trial", metric))
    for rank, trial in enumerate(outcome.trials, 1):
        last = trial.last
        state = str(trial.state)
        if trial.state == "stopped" and last is not None:
            state = f"stopped at 1/{settings.budget(settings.last_rung - last.rung)}"
        spent = sum(rung.seconds or 0.0 for rung in trial.rungs)
        tried = ", ".join(f"{key}={_short(value)}" for key, value in trial.settings.items())
        note = f"{trial.reason} ({tried})" if trial.reason else tried
        cells = [str(rank), str(trial.number), state, number(None if last is None else last.metric), f"{spent:.1f}"]
        result.add_row(*cells, note)
    console.print(result)
    output = settings.output
    if outcome.best is None:
        stderr().print("\nNo trial was trained in full: the table says why.", style="red")
        console.print(f"The trials are in {output}: {TABLE}")
        return
    console.print(f"\nThe best is trial {outcome.best.number}. Its run lies in {output / BEST}, its configuration in")
    console.print(f"{output / BEST_CONFIG} for `vcal train`; all trials are in {TABLE} beside it.")
    if outcome.best.changed:
        console.print(
            "Its rates changed while it trained; that file has only the last ones, and finds another posterior."
        )
    if outcome.mixed:
        console.print(f"The {len(outcome.mixed)} best, combined by their evidence, lie in {output / MIXTURE}.")
    console.print(f"Look at {output / PAGE}", soft_wrap=True)


def _short(value: object) -> str:
    return number(value, SETTING_DIGITS) if isinstance(value, float) else str(value)
