"""A Ray head of the tests' own: real, on free ports, with nothing left behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # of the environment: `ray` and `vcal` lie here
MARK = "VCAL_TEST_RAY_HEAD"  # in the environment of everything that the head starts
START_SECONDS = 60.0
# Everything that would otherwise take a fixed port, which another cluster on this machine may hold.
PORTS = (
    "--port",
    "--dashboard-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--runtime-env-agent-port",
    "--metrics-export-port",
    "--node-manager-port",
    "--object-manager-port",
    "--ray-client-server-port",
)
FIXED = (
    "--dashboard-host=127.0.0.1",
    "--min-worker-port=0",  # any
    "--max-worker-port=0",
    "--num-cpus=2",
    "--num-gpus=0",
    "--object-store-memory=200000000",
    "--disable-usage-stats",
)


@dataclass
class RayHead:
    """A cluster of one node with two CPUs. `env` is for processes that talk to it."""

    token: str | None = None  # what it asks of everybody; None: nothing
    address: str = ""  # host:port, for ray.init and --address
    dashboard: str = ""  # http://host:port, for jobs
    folder: Path = Path()  # its sessions and logs
    env: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> RayHead:
        """Starts it and waits until it answers; a port may have been taken in between, so it tries twice."""
        try:
            return self._start()
        except (AssertionError, OSError):
            self.stop()
            return self._start()

    def _start(self) -> RayHead:
        # Ray's sockets lie deep below its folder, and a socket's name has room for 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="vr", dir="/tmp"))
        ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        self.address = f"127.0.0.1:{ports['--port']}"
        self.dashboard = f"http://127.0.0.1:{ports['--dashboard-port']}"
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),  # the tests' own modules are found
            "OMP_NUM_THREADS": "1",
            "RAY_worker_niceness": "0",  # Ray's own 15 starves them beside anything else that runs
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        if self.token is None:
            self.env["RAY_AUTH_MODE"] = "disabled"
        else:
            self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        command = [str(BIN / "ray"), "start", "--head", "--block", *FIXED]
        command += [f"{option}={port}" for option, port in ports.items()]
        with (self.folder / "start.log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                # Ray's own processes look here for the cluster's address, and would otherwise find any other one.
                env=self.env | {MARK: self.folder.name, "RAY_TMPDIR": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )
        end = time.monotonic() + START_SECONDS
        while not self._answers(ports["--port"]):
            running = self._process.poll() is None
            assert running and time.monotonic() < end, self._said()  # noqa: PT018 - one reason
            time.sleep(0.1)
        return self

    def _answers(self, port: int) -> bool:
        """Jobs can be submitted: the dashboard answers, and the agent that starts jobs is known to it."""
        header = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            for path in ("/api/version", "/api/jobs/"):
                with urllib.request.urlopen(urllib.request.Request(self.dashboard + path, headers=header), timeout=5):
                    pass
            return True
        return False

    def _said(self) -> str:
        return (self.folder / "start.log").read_text(encoding="utf-8", errors="replace")[-3000:]

    def stop(self) -> None:
        """Ends it with all that it started, and removes its files."""
        if self._process is None:
            return
        started = set(self._started())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        for _ in range(20):  # what is killed may have started something meanwhile
            started = {one for one in started.union(self._started()) if one.is_running()}
            if not started:
                break
            for one in started:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(started, timeout=1)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._process = None

    def _started(self) -> list[psutil.Process]:
        """The head's descendants and those that lost their parent: jobs lead sessions of their own."""
        assert self._process is not None
        found = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            found = {one.pid: one for one in psutil.Process(self._process.pid).children(recursive=True)}
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.environ().get(MARK) == self.folder.name or any(
                    str(self.folder) in word for word in one.cmdline()
                ):
                    found[one.pid] = one
        return [one for one in found.values() if one.pid != os.getpid()]


def a_token() -> str:
    return secrets.token_hex(32)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in found]
