"""`vcal submit ray -- train CONFIG …`: runs a command on a Ray cluster, through Ray Jobs."""

from __future__ import annotations

import re
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jobs.console import note, size, stderr, stdout
from storage.text import cleaned, redacted

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from jobs.submission.ray_job import RayJob
    from jobs.submission.request import Request

INTERRUPTED = 130  # the exit status after Ctrl-C
COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # that Ray gives its lines
NOT_FOUND = 127  # a shell's, for a command that it does not have
ADDRESS_HELP = "Dashboard of the cluster; unless given RAY_API_SERVER_ADDRESS, RAY_ADDRESS or http://127.0.0.1:8265."


def ray(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- train|sweep CONFIG ...", help="What to run, after two dashes.", show_default=False),
    ],
    address: Annotated[str | None, typer.Option(metavar="URL", help=ADDRESS_HELP)] = None,
    name: Annotated[str | None, typer.Option(help="Of the job; unless given, from the output's and the time.")] = None,
    extra: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="PATH", help="File or folder to send along; may be given several times."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Environment variable of the job; may be given several times."),
    ] = None,
    follow: Annotated[bool, typer.Option(help="Show the job's log and exit as the job does.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and send nothing.")] = False,
) -> None:
    """Run `train` or `sweep` on a Ray cluster: vcal submit ray -- train config.yaml --workers 4

    The configuration is sent as it is now; the cluster must reach the store and the output, and have vcal-dist.
    """
    from jobs.submission import ray_jobs
    from jobs.submission.ray_job import ray_job, submit
    from jobs.submission.request import request

    asked, to = request(command), ray_jobs.address(address)
    job = ray_job(asked, to, name or unique(asked.name), extra or [], env or [])
    if not ray_jobs.is_here(to):
        warn(asked)
    if dry_run:
        show(job)
        return
    note(f"submitting {job.name} to {to}")
    cluster = submit(job)
    if follow:
        watch(cluster, job.name)
    else:
        stdout().print(job.name, soft_wrap=True)


def unique(name: str) -> str:
    """A name with the time, and something more for the same second."""
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def warn(asked: Request) -> None:
    """Says which paths every node of the cluster must see."""
    places = {"store": asked.plain.get("store"), "output": asked.output}
    for key, place in places.items():
        if place is not None and "://" not in str(place):
            text = f"warning: {key} is {place}: every node of the cluster must see the same files at this path"
            stderr().print(text, style="yellow", soft_wrap=True)


def show(job: RayJob) -> None:
    """All that would be sent, to the letter but for the values of variables."""
    from jobs.submission.parcel import CONFIG, sizes

    lines = [f"address     {job.address}", f"name        {job.name}", f"entrypoint  {job.entrypoint}"]
    lines += [f"variable    {name}=…" for name in job.env]  # a value may be a secret
    lines += [f"file        {name} ({size(count)})" for name, count in sizes(job.files).items()]
    text = job.files[CONFIG]
    assert isinstance(text, bytes)
    plainly("\n".join([*lines, "", f"{CONFIG}:", text.decode()]))


def watch(cluster: JobSubmissionClient, name: str) -> None:
    """Shows a job's log until it ends, and exits as it did; Ctrl-C ends only the watching."""
    from jobs.submission import ray_jobs

    try:
        ended = ray_jobs.follow(cluster, name, plainly)
    except KeyboardInterrupt:
        text = f"the job goes on; to see it: vcal jobs logs {name} --follow; to stop it: vcal jobs stop {name}"
        stderr().print(f"\n{text}", style="yellow", soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from None
    status = ray_jobs.exit_status(ended)
    if ended.driver_exit_code is None and ended.message and status:
        stderr().print(ended.message, soft_wrap=True)  # it never ran, so that its log does not say why
    if status == NOT_FOUND:
        stderr().print("the cluster does not find `vcal`: install vcal-dist there, on the PATH of the head's Ray")
    stderr().print(f"{name}: {ended.status}" + (f", exit status {status}" if status else ""), style="dim")
    raise typer.Exit(status)


def plainly(text: str) -> None:
    """Text of a job, in lines as they are: colours, secrets and what else a terminal would obey are left out."""
    sys.stdout.write(cleaned(redacted(COLOURS.sub("", text)).replace("\r\n", "\n")))
    sys.stdout.flush()
