"""Real hosts on this machine: namespaces with an address, a name, a cable and processes each, and nothing left behind.

As on Debian and Ubuntu, a host's own name resolves to loopback there. The hosts share the file system but for one
folder, `OWN`. Nothing in them reaches any other network, and none sees the processes of another: Ray takes any node
whose processes it sees for one of this host, and the driver would join the head's in place of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

NET = "10.9.0."
CABLE = "eth0"  # what a host calls its end of it
OWN = Path("/tmp/vcal-own")  # every host sees files of its own here: those of Ray would mix
PREFIX = "vcal-host"  # of namespaces, with the number of the process that made them


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise OSError(f"`ip {' '.join(words)}`: {done.stderr.strip()}")
    return done.stdout


@cache
def why_no_hosts() -> str:
    """Why hosts cannot be made on this machine; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"there is no `{program}`"
    try:
        with hosts(2) as made:
            made[0].run(["true"])
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces are refused: {error}"
    return ""


@dataclass
class Host:
    """One of them. What is started in it ends with it."""

    namespace: str
    address: str
    folder: Path = Path()  # what it sees at `OWN`
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    first: int | None = None  # its process 1, which all others end with

    @property
    def prefix(self) -> list[str]:
        """Before a command: it then runs in this host."""
        if self.first is None:
            self._boot()
        return ["nsenter", f"--target={self.first}", "--all", "--wd"]

    def _boot(self) -> None:
        """Starts the process that holds the host's own name, folder and list of processes, and reaps orphans."""
        name = f"host{self.address.rpartition('.')[2]}"
        setup = f"hostname {name} && mount --bind {self.folder} {OWN} && echo up && sleep infinity & wait"
        own = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = ["ip", "netns", "exec", self.namespace, *own, "sh", "-c", setup]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        assert process.stdout is not None
        with process.stdout as said:
            if said.readline() != "up\n":
                raise OSError(f"{name} does not start")
        self.first = psutil.Process(process.pid).children()[0].pid

    def start(
        self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> subprocess.Popen[str]:
        """A process in this host, whose output goes to a file."""
        with contextlib.ExitStack() as stack:
            out = subprocess.DEVNULL if log is None else stack.enter_context(log.open("a", encoding="utf-8"))
            process = subprocess.Popen(
                [*self.prefix, *map(str, command)],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.started.append(process)
        return process

    def run(self, command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, timeout: float = 60) -> str:
        """The output of a command in this host, which must succeed."""
        words = [*self.prefix, *map(str, command)]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise OSError(f"{command}: {done.stderr.strip()}")
        return done.stdout

    def unplug(self) -> None:
        """Takes the link down: packets are lost without a word, as with a cable that is pulled."""
        _ip("-n", self.namespace, "link", "set", CABLE, "down")

    def plug(self) -> None:
        """Brings the link up, with a default route as hosts have one; it leads to nobody."""
        _ip("-n", self.namespace, "link", "set", CABLE, "up")
        _ip("-n", self.namespace, "route", "replace", "default", "via", f"{NET}254")

    def processes(self) -> list[psutil.Process]:
        """All that run in this host."""
        found = []
        for pid in _ip("netns", "pids", self.namespace).split():
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def kill(self) -> None:
        """Ends everything in it at once; its kernel still answers for what is gone."""
        end = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < end:  # what is killed may have started something
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
            psutil.wait_procs(left, timeout=1)
        for process in self.started:
            process.wait(10)
        self.started.clear()
        self.first = None


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts at 10.9.0.1, 10.9.0.2, …, with a switch between them that belongs to none."""
    _sweep()
    names = [f"{PREFIX}{os.getpid()}-{i}" for i in range(count + 1)]
    OWN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vcal-hosts", ignore_cleanup_errors=True) as folder:
        yield from _hosts(names, Path(folder))


def _hosts(names: list[str], folder: Path) -> Iterator[list[Host]]:
    switch = names[0]
    made = [Host(name, f"{NET}{i}", folder / str(i)) for i, name in enumerate(names[1:], 1)]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", switch, "link", "set", "switch", "up")
        for i, host in enumerate(made, 1):
            _ip("-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", CABLE, "netns", host.namespace)
            _ip("-n", switch, "link", "set", f"port{i}", "master", "switch", "up")
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", CABLE)
            host.plug()
            host.folder.mkdir()
            etc = Path("/etc/netns", host.namespace)  # `ip netns exec` shows its files in /etc
            etc.mkdir(parents=True)
            (etc / "resolv.conf").write_text(
                "nameserver 127.0.0.1\n", encoding="utf-8"
            )  # which answers at once: nobody
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 host{i}\n", encoding="utf-8")
        yield made
    finally:
        for host in made:
            with contextlib.suppress(OSError):
                host.kill()
        for name in names:
            _remove(name)


def _remove(namespace: str) -> None:
    with contextlib.suppress(OSError):
        _ip("netns", "delete", namespace)
    shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)


def _sweep() -> None:
    """Removes what processes have left that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX) and not psutil.pid_exists(int(name.removeprefix(PREFIX).partition("-")[0])):
            host = Host(name, "")
            host.kill()
            _remove(name)
