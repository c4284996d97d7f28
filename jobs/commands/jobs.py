"""`vcal jobs {list,logs,stop}`: the jobs of a Ray cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from jobs.commands.submit_ray import ADDRESS_HELP, plainly, watch
from jobs.console import note, print_json, stdout, table

app = typer.Typer(help="Jobs that `vcal submit ray` has started.", no_args_is_help=True)

Address = Annotated[str | None, typer.Option(metavar="URL", help=ADDRESS_HELP)]
Name = Annotated[str, typer.Argument(metavar="ID", help="As `vcal jobs list` shows it.", show_default=False)]


@app.command("list")
def show(
    address: Address = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """List the jobs that were submitted to a cluster, the newest first."""
    from jobs.submission import ray_jobs

    found = ray_jobs.all_jobs(ray_jobs.connect(ray_jobs.address(address)))
    if json:
        rows = [
            {
                "id": job.submission_id,
                "status": str(job.status),
                "started": _time(job.start_time),
                "ended": _time(job.end_time),
                "exit_status": job.driver_exit_code,
                "entrypoint": job.entrypoint,
            }
            for job in found
        ]
        print_json({"jobs": rows})
        return
    result = table("Jobs", "id", "status", "started", "entrypoint")
    for job in found:
        result.add_row(job.submission_id, str(job.status), _time(job.start_time), job.entrypoint)
    stdout().print(result)


@app.command("logs")
def logs(
    name: Name,
    address: Address = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the job ends, and exit as it does.")] = False,
) -> None:
    """Print what a job has said."""
    from jobs.submission import ray_jobs

    cluster = ray_jobs.connect(ray_jobs.address(address))
    if follow:
        watch(cluster, name)
    plainly(ray_jobs.logs(cluster, name))


@app.command("stop")
def stop(name: Name, address: Address = None) -> None:
    """Stop a job; training writes a checkpoint first, and the same request goes on from it."""
    from jobs.submission import ray_jobs

    cluster = ray_jobs.connect(ray_jobs.address(address))
    note(f"stopping {name}")
    running, ended = ray_jobs.stop(cluster, name)
    stdout().print(f"{name} has stopped" if running else f"{name} had ended already: {ended.status}", soft_wrap=True)


def _time(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
