"""A real SLURM of two nodes for the tests, on one machine: munged, slurmctld and a slurmd for each node.

They need neither systemd nor cgroups, listen on ports that were free, keep everything in one folder, and leave an
installed SLURM alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
SYSTEM = "/usr/local/sbin:/usr/sbin:/sbin"  # where the daemons are, on the path or not
NODES = ("vcal1", "vcal2")
# A job that was put back into the queue waits for cred_expire seconds; 5 is the least that SLURM takes.
CONFIGURATION = """\
ClusterName=vcal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
NodeName=vcal1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=4 RealMemory=1000
NodeName=vcal2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=4 RealMemory=1000
PartitionName=main Nodes=vcal1,vcal2 Default=YES PriorityTier=1 OverSubscribe=NO GraceTime=60
PartitionName=urgent Nodes=vcal1,vcal2 PriorityTier=2 OverSubscribe=NO PreemptMode=OFF
"""


def missing() -> str | None:
    """Why there can be no SLURM here."""
    path = f"{os.environ['PATH']}:{SYSTEM}"
    absent = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if absent:
        return f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)"
    return "slurmd runs as root only" if os.geteuid() else None


class Slurm:
    """A running cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Nothing of a job that the tests may run in themselves.
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self.environment["PATH"] = f"{os.environ['PATH']}:{SYSTEM}"

    def start(self) -> None:
        folder = self.folder
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        names = ("controller", "first", "second")
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        text = CONFIGURATION.format(folder=folder, host=socket.gethostname().partition(".")[0], **ports)
        (folder / "slurm.conf").write_text(text, encoding="utf-8")
        files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "log-file": "munged.log"}
        files["seed-file"] = "munged.seed"
        # --force: the folder of a test is not as closed as munged asks.
        self.run("munged", "--force", *(f"--{option}={folder / name}" for option, name in files.items()))
        self.run("slurmctld", "-f", str(folder / "slurm.conf"))
        for node in NODES:
            self.run("slurmd", "-N", node, "-f", str(folder / "slurm.conf"))
        self.until(lambda: self.run("sinfo", "--noheader", "--Node", "--format=%t").split() == ["idle"] * 4)

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}\n{self.said()}"
        return done.stdout

    def said(self) -> str:
        """The ends of the daemons' logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in logs)

    def state(self, number: str) -> str:
        return self.run("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T").strip()

    def until(self, found: Callable[[], Any], timeout: float = 100) -> Any:
        """Waits for something true."""
        end = time.monotonic() + timeout
        while not (value := found()):
            assert time.monotonic() < end, f"waited {timeout} s in vain\n{self.said()}"
            time.sleep(0.2)
        return value

    def stop(self) -> None:
        """Cancels what is left, and ends the daemons by their numbers."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
            self.until(lambda: not self.run("squeue", "--noheader"), timeout=15)
        for name in (*(f"slurmd-{node}" for node in NODES), "slurmctld", "munged"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
                pid = int((self.folder / f"{name}.pid").read_text())
                os.kill(pid, signal.SIGTERM)
                self._gone(pid)

    def _gone(self, pid: int) -> None:
        end = time.monotonic() + 15
        while time.monotonic() < end:
            if re.search(r"^State:\s+Z", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
                return
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """A cluster whose files lie in a folder; its path must be short, as a socket's is."""
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
