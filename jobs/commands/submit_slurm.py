"""`vcal submit slurm -- train CONFIG …`: a batch job of SLURM, or a job array for the trials of a sweep."""

from __future__ import annotations

from typing import Annotated

import typer

from jobs.console import stderr, stdout


def slurm(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- train|sweep CONFIG ...", help="What to run, after two dashes.", show_default=False),
    ],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes.", show_default="devices.num_nodes, or 1 with Ray")
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs of each node, and as many processes.", show_default="devices.devices"),
    ] = None,
    cpus_per_task: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="CPUs of each process; with Ray, of each node.",
            show_default="1; with Ray, one for each process",
        ),
    ] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each node, e.g. 64G.")] = None,
    time: Annotated[
        str | None,
        typer.Option(
            help="Time limit of one job, e.g. 90 (minutes), 8:00:00, 2-12:00:00; training goes on in the next."
        ),
    ] = None,
    partition: Annotated[str | None, typer.Option(help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Account that pays.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job.", show_default="from the output's")] = None,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Another option of sbatch, as --sbatch=--constraint=a100; repeatable."),
    ] = None,
    array: Annotated[
        bool, typer.Option("--array", help="Run every trial of a sweep as a job of its own, without Ray.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the end, and exit with the status of the job.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written and sent, and exit.")] = False,
) -> None:
    """Run `train` or `sweep` as a SLURM job: on many nodes with Lightning, or with Ray after `train --on ray`.

    The store, the output and this Python environment must lie where all nodes see them. A job that meets its time limit
    or is preempted writes a checkpoint, goes back into the queue and goes on from there.
    """
    from jobs.submission.request import request
    from jobs.submission.slurm import prepare
    from jobs.submission.slurm_queue import follow, send
    from jobs.submission.slurm_resources import Resources

    asked = Resources(
        nodes, gpus_per_node, cpus_per_task, mem, time, partition, account, name, tuple(sbatch or ()), array
    )
    submission = prepare(request(command), asked)
    if dry_run:
        for part in submission.show():
            typer.echo(part)
        return
    sent = send(submission)
    console = stdout()
    for number, log in sent:
        console.print(f"submitted job {number}; its log: {log}", soft_wrap=True)
    numbers = [number for number, _ in sent]
    console.print(f"  watch   squeue -j {','.join(numbers)}")
    console.print(f"  cancel  scancel {' '.join(numbers)}")
    if wait:
        raise typer.Exit(follow(numbers[-1], lambda line: stderr().print(line, style="dim")))
