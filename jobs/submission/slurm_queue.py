"""Sending jobs to SLURM, and following them to their end."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable

from jobs.submission.slurm import Job, Submission
from storage.places import write_durably
from storage.room import because
from vcal_dist.errors import ConfigError

POLL = (0.5, 15.0)  # seconds between questions to the controller, at first and later
ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)


def send(submission: Submission) -> list[tuple[str, str]]:
    """Writes the configuration and submits the jobs; their numbers and logs."""
    if shutil.which("sbatch") is None:
        raise ConfigError(
            "there is no sbatch on the path: this is no machine of a SLURM cluster; log in to one, or see "
            "with --dry-run what would be sent"
        )
    try:
        write_durably(submission.config, submission.text.encode())
    except OSError as error:
        raise ConfigError(f"cannot write {submission.config}: {because(error)}") from error
    sent: list[tuple[str, str]] = []
    for job in submission.jobs:
        command = job.command(after=sent[-1][0] if sent else None)
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)  # noqa: S603
        if done.returncode:
            before = f" (job {sent[-1][0]} was sent; cancel it with scancel {sent[-1][0]})" if sent else ""
            raise ConfigError(f"sbatch refuses the job{before}: {done.stderr.strip()}")
        number = done.stdout.strip().partition(";")[0]  # the rest is the cluster's name
        sent.append((number, _log(job, number)))
    return sent


def _log(job: Job, number: str) -> str:
    """The log's name with the job's number; all logs of an array."""
    known = {"%%": "%", "%a": "*"}
    return re.sub(r"%[%jAa]", lambda found: known.get(found[0], number), job.log)


def follow(number: str, say: Callable[[str], None]) -> int:
    """Waits for the end of a job and gives its exit status; `say` hears the states that it comes to."""
    before, pause = "", POLL[0]
    ask = ["squeue", "--noheader", "--states=all", f"--jobs={number}", "--Format=State:30,exit_code:30"]
    while True:
        done = subprocess.run(ask, capture_output=True, text=True)  # noqa: S603
        if "Invalid job id" in done.stderr or (not done.returncode and not done.stdout.strip()):
            raise ConfigError(f"SLURM no longer knows job {number}; see its log for how it ended")
        if not done.returncode:  # else the controller does not answer for a while
            state, status = done.stdout.split()
            if state != before:
                say(f"job {number}: {state.lower()}")
            before = state
            if state in ENDED:
                return _exit_status(state, int(status))
        time.sleep(pause)
        pause = min(1.2 * pause, POLL[1])


def _exit_status(state: str, status: int) -> int:
    """That of the batch script, which SLURM keeps as `wait` gives it."""
    if state == "COMPLETED":
        return 0
    code = 128 + (status & 127) if status & 127 else status >> 8
    return code or 1  # cancelled, or out of time
