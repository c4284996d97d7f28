"""SLURM jobs: which options and arguments go to `sbatch` for a request.

The batch scripts in jobs/slurm are constant. What a user gives is in the frozen configuration, or a word of its own on
the command line of `sbatch`, which hands it on as such: no shell evaluates it.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from jobs.submission.request import ON_RAY, Request
from jobs.submission.slurm_resources import WARNING, Resources
from vcal_dist.errors import ConfigError

SCRIPTS = Path(__file__).parent.parent / "slurm"
SHARED = ("start.sh", "task.sh", "end.sh")
USED = {"lightning.sh": SHARED, "ray.sh": ("ray_node.sh", *SHARED)}  # by these scripts

UNFIT = {
    "--address": "a job starts a Ray cluster of its own",
    "--trial": "--array before the -- makes a job of every trial",
    "--collect": "it is quick, run it here",
}


@dataclass(frozen=True)
class Job:
    """One batch script with its options and arguments."""

    script: Path
    options: list[str]
    arguments: list[str]
    log: str  # with SLURM's own %j, or %A and %a, for the numbers

    def command(self, after: str | None = None) -> list[str]:
        """What is run here; of a job that waits for another one, with the number of that."""
        waits = [] if after is None else [f"--dependency=afterany:{after}"]
        return ["sbatch", "--parsable", *self.options, *waits, str(self.script), *self.arguments]


@dataclass(frozen=True)
class Submission:
    """A frozen configuration and the jobs that read it; the second one, if any, starts when the first has ended."""

    config: Path
    text: str
    jobs: list[Job]

    def show(self) -> Iterator[str]:
        """Exactly what would be written and sent."""
        yield f"# {shlex.quote(str(self.config))}\n{self.text}"
        for number, job in enumerate(self.jobs):
            yield f"# sent\n{shlex.join(job.command(after='NUMBER' if number else None))}\n"
        for name in (self.jobs[0].script.name, *USED[self.jobs[0].script.name]):
            yield f"# {shlex.quote(str(SCRIPTS / name))}\n{(SCRIPTS / name).read_text(encoding='utf-8')}"


def prepare(request: Request, asked: Resources) -> Submission:
    """What to send for a request; refuses what cannot work, and writes nothing."""
    on_ray = request.command == "sweep" or ON_RAY in zip(request.options, request.options[1:], strict=False)
    if asked.array and request.command != "sweep":
        raise ConfigError("--array runs the trials of a sweep as a job array; leave it out for train")
    for option, why in UNFIT.items():
        if option in request.options:
            raise ConfigError(f"{option} cannot be submitted to SLURM: {why}; leave it out")
    if asked.array:
        return _array(request, asked)
    return _ray(request, asked) if on_ray else _lightning(request, asked)


def _lightning(request: Request, asked: Resources) -> Submission:
    """One task a device."""
    devices = request.plain["devices"]
    nodes = asked.nodes or devices["num_nodes"]
    tasks, gpus = _tasks(devices, asked.gpus_per_node)
    frozen = _with_devices(request, tasks, nodes)
    options = [*_common(frozen, asked, nodes, gpus), f"--ntasks-per-node={tasks}"]
    if asked.cpus_per_task:
        options.append(f"--cpus-per-task={asked.cpus_per_task}")
    return _submission(frozen, [_job(frozen, asked, "lightning.sh", options, frozen.options)])


def _tasks(devices: dict[str, Any], gpus: int | None) -> tuple[int, int | None]:
    """Processes and GPUs of each node."""
    if gpus and devices["accelerator"] == "cpu":
        raise ConfigError(f"--gpus-per-node is {gpus}, but devices.accelerator is 'cpu'; leave one of them out")
    if gpus:
        return gpus, gpus
    asked = devices["devices"]
    if devices["accelerator"] != "gpu":
        return (asked if isinstance(asked, int) else 1), None
    if not isinstance(asked, int) or gpus == 0:
        raise ConfigError("devices.accelerator is 'gpu'; say how many with --gpus-per-node")
    return asked, asked


def _ray(request: Request, asked: Resources) -> Submission:
    """One task a node: Ray's; and vcal on the first node."""
    nodes = asked.nodes or 1
    options = [*_common(request, asked, nodes, asked.gpus_per_node), "--ntasks-per-node=1"]
    arguments = list(request.options)
    processes = nodes * (asked.gpus_per_node or 1)
    if request.command == "train" and "--workers" in arguments:
        most = re.fullmatch(r"(?:\d+:)?(\d+)", arguments[arguments.index("--workers") + 1])
        processes = int(most[1]) if most else processes  # what is no number is refused by the command
    elif request.command == "train":
        arguments += ["--workers", str(processes)]
    if asked.cpus_per_task:
        options.append(f"--cpus-per-task={asked.cpus_per_task}")
    elif request.command == "train":
        options.append(f"--cpus-per-task={max(1, -(-processes // nodes))}")
    else:
        options.append("--exclusive")  # trials take what there is
    return _submission(request, [_job(request, asked, "ray.sh", options, tuple(arguments))])


def _array(request: Request, asked: Resources) -> Submission:
    """One trial an element, in one process, and a job that collects them."""
    if (asked.nodes or 1) > 1 or (asked.gpus_per_node or 0) > 1:
        raise ConfigError("with --array a trial is one process: leave out --nodes, and give --gpus-per-node 1 or none")
    frozen = _with_devices(request, 1, 1)
    options = [*_common(frozen, asked, 1, asked.gpus_per_node), "--ntasks-per-node=1"]
    if asked.cpus_per_task:
        options.append(f"--cpus-per-task={asked.cpus_per_task}")
    trials = _job(frozen, asked, "lightning.sh", options, frozen.options, log="%A_%a")
    trials.options.append(f"--array=0-{request.plain['sweep']['trials'] - 1}")
    collect = _job(frozen, asked, "lightning.sh", options, (*frozen.options, "--collect"))
    return _submission(frozen, [trials, collect])


def _common(request: Request, asked: Resources, nodes: int, gpus: int | None) -> list[str]:
    name = asked.name or re.sub(r"[^\w.+-]+", "_", request.name, flags=re.ASCII)[:64]
    given = {"gpus-per-node": gpus, "mem": asked.mem, "time": asked.time}
    given |= {"partition": asked.partition, "account": asked.account}
    return [
        f"--job-name={name}",
        f"--nodes={nodes}",
        *(f"--{option}={value}" for option, value in given.items() if value),
        "--requeue",
        "--open-mode=append",
        f"--signal=TERM@{WARNING}",
        *asked.sbatch,
    ]


def _with_devices(request: Request, devices: int, nodes: int) -> Request:
    changed = {**request.plain["devices"], "devices": devices, "num_nodes": nodes}
    return Request(request.command, {**request.plain, "devices": changed}, request.options)


def _place(request: Request) -> Path:
    """What the files beside the output begin with."""
    output = request.output
    return Path("runs", PurePosixPath(output).name).absolute() if "://" in output else Path(output)


def _config(request: Request) -> Path:
    """A name of its own for every configuration: what waits in the queue keeps its file."""
    place, digest = _place(request), hashlib.sha256(request.text.encode()).hexdigest()[:8]
    return place.with_name(f"{place.name}.submitted-{digest}.yaml")


def _job(
    request: Request, asked: Resources, script: str, options: list[str], words: tuple[str, ...], log: str = "%j"
) -> Job:
    place = _place(request)
    if "\\" in str(place):
        raise ConfigError(f"output is {request.output}; SLURM can write no log beside a name with a backslash")
    name = str(place).replace("%", "%%") + f".slurm-{log}.log"
    vcal = Path(sys.executable).absolute().parent / "vcal"
    arguments = [str(SCRIPTS), str(vcal), request.command, str(_config(request)), *words]
    return Job(SCRIPTS / script, [*options, f"--output={name}"], arguments, name)


def _submission(request: Request, jobs: list[Job]) -> Submission:
    return Submission(_config(request), request.text, jobs)
