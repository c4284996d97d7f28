"""The `vcal` command: arranges the subcommands and turns errors into messages."""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from jobs.commands import (
    bench,
    demo,
    diagnose,
    doctor,
    ingest,
    inspect,
    predict,
    refine,
    report,
    reproduce,
    sbc,
    submit,
    sweep,
    train,
)
from jobs.commands import jobs as ray_jobs
from jobs.commands.many_values import ManyValuesCommand
from jobs.console import show_warnings, stderr, stdout
from storage.errors import VcalError
from storage.text import cleaned, redacted

INTERRUPTED = 130  # the exit status after Ctrl-C
SPEAK_FOR_THEMSELVES = ("train", "sweep", "sbc", "submit", "jobs")  # commands that say how to go on
WRONG_USAGE: Any = typer.BadParameter.__base__  # of all such errors; Typer gives it no name of its own


class _Commands(TyperGroup):
    """All commands. What was typed wrongly is shown again, but for secrets and control characters.

    Typer prints such errors itself, so that they are changed on their way to it.
    """

    def make_context(self, *args: Any, **extra: Any) -> Any:
        with _shown_safely():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        with _shown_safely():
            return super().invoke(ctx)


@contextlib.contextmanager
def _shown_safely() -> Iterator[None]:
    try:
        yield
    except WRONG_USAGE as error:
        error.message = cleaned(redacted(error.message))
        raise


app = typer.Typer(
    name="vcal",
    cls=_Commands,
    help="Distributed Bayesian calibration of computer models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("ingest", cls=ManyValuesCommand)(ingest.ingest)
app.command("inspect")(inspect.inspect)
app.command("train")(train.train)
app.command("sweep")(sweep.sweep)
app.add_typer(submit.app, name="submit")
app.add_typer(ray_jobs.app, name="jobs")
app.command("predict", cls=ManyValuesCommand)(predict.predict)
app.command("refine")(refine.refine)
app.command("report")(report.report)
app.command("diagnose")(diagnose.diagnose)
app.command("sbc")(sbc.sbc)
app.command("reproduce")(reproduce.reproduce)
app.add_typer(bench.app, name="bench")
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        import vcal_dist

        stdout().print(f"vcal-dist {vcal_dist.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None: ...


def main(argv: Sequence[str] | None = None) -> None:
    """Run `vcal` and exit: 0 after success, 1 after an error, 2 after wrong usage, 75 preempted, 130 after Ctrl-C;
    3 where `vcal diagnose --strict` finds a run that is not to be trusted.

    An error that the user can mend is one message without a traceback; VCAL_DEBUG=1 shows the traceback.
    """
    show_warnings()
    if any("\0" in argument for argument in argv or ()):
        _fail("an argument holds a NUL character, which no path and no value has; leave it out")
    try:
        app(args=argv, prog_name="vcal")
    except SystemExit as done:
        if done.code == INTERRUPTED and (argv or sys.argv[1:])[0] not in SPEAK_FOR_THEMSELVES:
            stderr().print("interrupted; what was not committed is not visible, run the command again", style="red")
        raise
    except VcalError as error:
        if os.environ.get("VCAL_DEBUG") == "1":
            raise
        _fail(str(error))
    except OSError as error:  # of a disk or a network, that nobody has put into words
        if os.environ.get("VCAL_DEBUG") == "1":
            raise
        from storage.room import explained

        _fail(explained(error))
    except MemoryError as error:
        if os.environ.get("VCAL_DEBUG") == "1":
            raise
        _fail(f"the machine has too little memory{f' ({error})' if str(error) else ''}; end other programs")


def _fail(message: str) -> NoReturn:
    stderr().print(f"error: {message}", style="red", soft_wrap=True)
    sys.exit(1)


if __name__ == "__main__":
    main()
