"""A job for Ray: the command that the cluster itself runs, the files that travel with it, and sending them."""

from __future__ import annotations

import re
import shlex
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.submission.parcel import CONFIG, Files, parcel, write
from jobs.submission.ray_jobs import checked, connect, told
from jobs.submission.request import Request
from vcal_dist.errors import ConfigError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Ray kills a job that is told to stop after this many seconds, 3 unless told: a checkpoint may take longer to write.
PATIENCE = {"RAY_JOB_STOP_WAIT_TIME_S": "60"}


@dataclass(frozen=True)
class RayJob:
    """What is sent, and to whom."""

    address: str
    name: str
    entrypoint: str  # read by a shell
    files: Files
    env: dict[str, str] = field(default_factory=dict)


def ray_job(asked: Request, to: str, name: str, paths: list[Path], env: list[str]) -> RayJob:
    """The job that runs a request with these files and variables."""
    asked = asked.on_ray()
    if "--address" in asked.options:
        raise ConfigError(
            "--address after the two dashes would take the job to another cluster than the one that it runs on; "
            "give the dashboard's address before them: vcal submit ray --address http://host:8265 -- train …"
        )
    entrypoint = shlex.join(["vcal", *asked.arguments(CONFIG)])
    return RayJob(to, checked(name), entrypoint, parcel(asked.text, paths), PATIENCE | dict(map(_variable, env)))


def _variable(given: str) -> tuple[str, str]:
    name, sign, value = given.partition("=")
    if not sign or not VARIABLE.fullmatch(name):
        raise ConfigError(f"--env {given} is no KEY=VALUE; write it as --env OMP_NUM_THREADS=4")
    return name, value


def submit(job: RayJob) -> JobSubmissionClient:
    """Sends it; it runs as soon as the cluster can."""
    cluster = connect(job.address)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "files.zip"
        write(job.files, archive)
        runtime_env = {"working_dir": str(archive), "env_vars": job.env}
        with told(job.address, job.name):
            cluster.submit_job(entrypoint=job.entrypoint, submission_id=job.name, runtime_env=runtime_env)
    return cluster
