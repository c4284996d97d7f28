"""`vcal submit kubernetes -- train CONFIG …`: a Ray cluster on Kubernetes for one job, through KubeRay."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from jobs.console import stderr, stdout


def kubernetes(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- train|sweep CONFIG ...", help="What to run, after two dashes.", show_default=False),
    ],
    image: Annotated[
        str,
        typer.Option(help="Container image that holds Ray and vcal-dist in the versions of here.", show_default=False),
    ],
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Worker pods; by default as many as the processes of train --workers need.", show_default=False
        ),
    ] = None,
    gpus_per_worker: Annotated[int, typer.Option(min=0, help="GPUs of each worker pod; a process uses one.")] = 0,
    cpus: Annotated[int, typer.Option(min=1, help="CPUs of each worker pod.")] = 4,
    memory: Annotated[str, typer.Option(help="Memory of each worker pod.")] = "16Gi",
    volume: Annotated[
        str | None,
        typer.Option(
            metavar="CLAIM:/PATH",
            help="PersistentVolumeClaim (ReadWriteMany) that all pods see at a path: for a store or an output there.",
        ),
    ] = None,
    secret: Annotated[
        str | None, typer.Option(help="Secret whose entries become environment variables, e.g. AWS_ACCESS_KEY_ID.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace; by default that of kubectl's context.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job; by default from the output's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the YAML that would be sent, and exit.")] = False,
) -> None:
    """Run `train` or `sweep` on Kubernetes: needs kubectl here and KubeRay 1.5.1 or newer there."""
    from jobs.submission.kubernetes import Pods, documents, dump, send, unseen, watching
    from jobs.submission.request import request

    pods = Pods(image, name, namespace, workers, gpus_per_worker, cpus, memory, volume, secret)
    asked = request(command)
    config_map, job = documents(asked, pods)
    for warning in unseen(asked, pods):
        stderr().print(f"warning: {warning}", style="yellow", soft_wrap=True)
    if dry_run:
        typer.echo(dump(config_map, job), nl=False)
        return
    send(config_map, job)
    console = stdout()
    console.print(f"submitted the RayJob {job['metadata']['name']}")
    for purpose, words in watching(job).items():
        console.print(f"  {purpose:<7} {shlex.join(words)}", soft_wrap=True)
