"""Trainings on several hosts: plain processes, a Ray cluster without a dashboard, and a server that speaks S3."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.hosts_kit import OWN, Host
from tests.ray_kit import BIN, ROOT
from tests.vcal_dist.training_kit import merge, settings, wait_for

RAY_PORT, MEETING_PORT = 6379, 29500  # every host has all ports to itself
CHECKPOINT = Path("checkpoints", "last.safetensors")
ENV = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_", "NCCL_"))} | {
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    # Ray takes a host that does not answer for lost within some ten seconds; else it would be about two minutes.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def written(folder: Path, name: str, **sections: Any) -> Path:
    """The file of a configuration with many checkpoints."""
    path, run = folder / f"{name}.yaml", settings(folder / "s.zarr", folder / name)
    plain = merge(merge(run, {"devices": {"precision": "float64", "accelerator": "cpu"}}), sections)
    path.write_text(yaml.safe_dump(plain), encoding="utf-8")
    return path


def train_here(folder: Path, name: str, **sections: Any) -> Path:
    """What one process finds on this machine."""
    command = [BIN / "vcal", "train", written(folder, name, **sections)]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder / name


class Training:
    """`vcal train` in one or several hosts, and what it says there."""

    def __init__(self, folder: Path, name: str) -> None:
        self.run, self.log = folder / name, folder / f"{name}.log"
        self.processes: list[subprocess.Popen[str]] = []

    def plainly(self, hosts: Sequence[Host], config: Path, **variables: str) -> Training:
        """One process in each host, as a launcher such as torchrun starts them."""
        for i, host in enumerate(hosts):
            names = {"NODE_RANK": str(i), "LOCAL_RANK": "0", "MASTER_ADDR": hosts[0].address}
            env = ENV | names | {"MASTER_PORT": str(MEETING_PORT)} | variables
            self.processes.append(host.start([BIN / "vcal", "train", config], env=env, log=self.log))
        return self

    def on_ray(self, host: Host, head: Host, config: Path, *options: str, **variables: str) -> Training:
        """The driver in one host, the processes wherever Ray has room."""
        address = f"{head.address}:{RAY_PORT}"
        command = [BIN / "vcal", "train", config, "--on", "ray", "--address", address, *options]
        self.processes.append(host.start(command, env=ENV | variables, log=self.log))
        return self

    def until_checkpoint(self, seconds: float = 150) -> Training:
        self._until(lambda: (self.run / CHECKPOINT).exists() or self._all_ended(), seconds)
        assert (self.run / CHECKPOINT).exists(), self.said()
        return self

    def ends(self, seconds: float) -> list[int]:
        """The exit statuses, within so many seconds."""
        self._until(self._all_ended, seconds)
        return [process.wait() for process in self.processes]

    def runs(self, seconds: float) -> bool:
        """Whether any of it still does after so many seconds."""
        end = time.monotonic() + seconds
        while not self._all_ended() and time.monotonic() < end:
            time.sleep(0.05)
        return not self._all_ended()

    def _until(self, found: Callable[[], bool], seconds: float) -> None:
        try:
            wait_for(found, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.said()}") from None

    def _all_ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def start_ray(host: Host, head: Host, **variables: str) -> None:
    """A node with one CPU: the head in its own host, in another one a node that joins it."""
    log, options = host.folder / "ray.log", [f"--address={head.address}:{RAY_PORT}"]
    if host is head:
        options = ["--head", f"--port={RAY_PORT}", f"--temp-dir={OWN}", "--include-dashboard=false"]
    fixed = ("--block", "--num-cpus=1", "--num-gpus=0", "--object-store-memory=100000000", "--disable-usage-stats")
    log.unlink(missing_ok=True)
    command = [BIN / "ray", "start", f"--node-ip-address={host.address}", *options, *fixed]
    process = host.start(command, env=ENV | variables, log=log)
    wait_for(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None, 100)
    assert process.poll() is None, log.read_text()


def of_ray(host: Host, word: str) -> list[psutil.Process]:
    """Ray's processes in a host, by a word of their command line."""
    return [one for one in host.processes() if word in " ".join(one.cmdline())]


class S3:
    """A server in a host of its own, with one bucket, that fails when told to."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.told, self.log = folder / "fault", folder / "s3.log"
        for left in (self.told, self.log):
            left.unlink(missing_ok=True)
        self.variables = {
            "AWS_ENDPOINT_URL": f"http://{host.address}:9000",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        script = Path(__file__).with_name("faulty_s3.py")
        host.start([sys.executable, script, host.address, "9000", self.told], env=ENV, log=self.log)

    def made(self, host: Host) -> S3:
        """With its bucket, which another host asks for until the server answers."""
        make = "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')"

        def answers() -> bool:
            try:
                host.run([sys.executable, "-c", make], env=ENV | self.variables)
            except (OSError, subprocess.TimeoutExpired):
                return False
            return True

        wait_for(answers, 60)
        return self

    def fails(self, how: str) -> None:
        """From now on, with every request: with status 500, or after so many seconds."""
        self.told.write_text(how, encoding="utf-8")

    def recovers(self) -> None:
        self.told.unlink(missing_ok=True)

    def said(self) -> str:
        """Its log: a line for every request."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def fetched(self, host: Host, name: str, target: Path) -> Path:
        """A copy of a run in the bucket."""
        shutil.rmtree(target, ignore_errors=True)
        script = f"import s3fs; s3fs.S3FileSystem().get('bucket/{name}', '{target}', recursive=True)"
        host.run([sys.executable, "-c", script], env=ENV | self.variables)
        return target
