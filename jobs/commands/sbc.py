"""`vcal sbc`: whether intervals cover as they promise, from calibrations of data whose truth is known."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.commands.train import told
from jobs.console import print_json, stderr, stdout, table
from jobs.locations import TrustLocations
from jobs.outputs import writable

if TYPE_CHECKING:
    from jobs.sbc.outcome import Outcome
    from vcal_dist.config import Config

SUFFIX = "-sbc"  # of the default directory, beside the run's


def sbc(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file of `vcal train`.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys to replace, e.g. fit.joint.steps=0.", show_default=False),
    ] = None,
    *,
    replicates: Annotated[
        int,
        typer.Option(min=1, metavar="R", help="How many; 100 tell 90 % from 70 %, 200 from 80 %.", show_default=False),
    ],
    simulator: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:FUNCTION",
            help="Python function of x (B, d1) and t (B, d2) that gives z (B, outputs), in your units, as the truth in "
            "place of the emulator.",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="W", help="Processes on this machine; unless given, its cores.", show_default=False
        ),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster that runs them, as host:port or auto.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Directory to write to; unless given, the run's with -sbc behind it.",
            callback=writable,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="Of truths and data.")] = 0,
    trust_locations: TrustLocations = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Calibrate data drawn from the prior, again and again, and tell whether intervals cover the truths as promised.

    The same command again goes on where it stopped; with more replicates it adds to those that are there. Intervals
    that do not cover are a finding, with exit status 0. It is 75 after SIGTERM and 130 after Ctrl-C.
    """
    from jobs.config import load
    from vcal_dist.replicates import check

    if ray is not None and workers is not None:
        raise typer.BadParameter("is for processes of this machine; leave it out with --ray", param_hint="--workers")
    settings = load(config, overrides or [], trust_locations=trust_locations)
    check(settings.model)
    output = _place(settings, output)
    outcome = judge(settings, output, replicates, simulator=simulator, workers=workers, ray=ray, seed=seed)
    if json:
        print_json(outcome.plain())
    else:
        show(outcome)


def judge(
    config: Config,
    output: Path,
    replicates: int,
    *,
    simulator: str | None,
    workers: int | None,
    ray: str | None,
    seed: int,
) -> Outcome:
    """Runs the replicates that are missing, and writes what all of them say together."""
    import json

    from jobs.doctor import usable_cores
    from jobs.sbc.directory import PAGE, RESULTS, ask, begin
    from jobs.sbc.outcome import collect
    from jobs.sbc.page import page
    from jobs.sbc.running import opened, run
    from jobs.sbc.simulator import located
    from storage.places import write_durably
    from vcal_dist.errors import Preempted
    from vcal_dist.replicates import prior_sd
    from vcal_dist.report.page import finite
    from vcal_dist.run_directory import held
    from vcal_dist.training import open_or_make

    simulator = None if simulator is None else located(simulator)
    store = open_or_make(config)
    asked = ask(config, seed, simulator, (store.runs.rows, store.observations.rows), output)
    shared = opened(asked)  # what is wrong is told before anything is begun
    shared.try_simulator()
    try:
        with held(output):
            begin(asked)
            run(asked, replicates, workers=workers or usable_cores(), ray=ray, say=say)
    except Preempted as stopped:
        raise told(stopped) from None
    outcome = collect(asked, store.problem, replicates, prior_sd(shared.prepared.model.prior))
    results = json.dumps(finite(outcome.plain()), indent=2, ensure_ascii=False, allow_nan=False)
    write_durably(output / RESULTS, f"{results}\n".encode())
    write_durably(output / PAGE, page(outcome).encode())
    return outcome


def _place(config: Config, output: Path | None) -> Path:
    """The directory: where one wants it, or beside the run."""
    from vcal_dist.errors import ConfigError

    if output is None:
        if "://" in str(config.output):
            raise ConfigError(f"output is {config.output}; give a directory of this machine with --output")
        output = Path(f"{config.output}{SUFFIX}")
    return output.expanduser().absolute()


def say(line: str) -> None:
    """A line about what goes on."""
    stderr().print(line, style="dim", soft_wrap=True)


def show(outcome: Outcome) -> None:
    """A table of the parameters, what it means, and where the results lie."""
    from jobs.sbc.directory import PAGE, RESULTS
    from jobs.sbc.outcome import STATUS, in_a_sentence, notes, p_value, sentence, summary
    from vcal_dist.sbc import LEVELS

    console, output = stdout(), outcome.asked.output
    levels = [f"{100 * level:.0f} %" for level in LEVELS]
    right = (*levels, "p", "z", "contraction")
    judged = len(outcome.numbers)
    result = table(
        f"Coverage of {judged} truth{'s' if judged > 1 else ''}", "parameter", "verdict", *right, right=right
    )
    for one in outcome.parameters:
        shares = [f"{100 * share:.0f} %" for share in one.coverage.value]
        result.add_row(one.name, one.verdict, *shares, p_value(one.p), *summary(one))
    chance = outcome.parameters[0].coverage
    bands = [f"{100 * low:.0f}–{100 * high:.0f} %" for low, high in zip(chance.low, chance.high, strict=True)]
    result.add_row("by chance", "", *bands, style="dim")
    console.print(result)
    console.print()
    for one in outcome.parameters:
        style = "" if STATUS[one.verdict] == "good" else "yellow"
        console.print(f"{one.name}: {one.verdict}. {sentence(one)}", style=style, soft_wrap=True)
    for record in outcome.failed:
        console.print(f"replicate {record['number']} failed: {record['failed']}", style="yellow", soft_wrap=True)
    for line in notes(outcome):
        console.print(line, style="dim", soft_wrap=True)
    console.print(in_a_sentence(outcome), soft_wrap=True)
    console.print(f"Look at {output / PAGE}; {RESULTS} beside it has everything for programs", soft_wrap=True)
