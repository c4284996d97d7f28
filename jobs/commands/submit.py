"""`vcal submit {ray,slurm,kubernetes} -- train CONFIG …`: runs a command elsewhere."""

from __future__ import annotations

import typer

from jobs.commands import submit_kubernetes, submit_ray, submit_slurm

app = typer.Typer(
    help="Run `train` or `sweep` on a cluster: vcal submit ray -- train config.yaml", no_args_is_help=True
)
app.command("ray")(submit_ray.ray)
app.command("slurm")(submit_slurm.slurm)
app.command("kubernetes")(submit_kubernetes.kubernetes)
