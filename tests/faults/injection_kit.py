"""Fails one chosen system call of an operation, in a process of its own, and asks afterwards what is left.

`shim.c` is compiled once and loaded with LD_PRELOAD into a server that has imported everything; the server forks one
process for every attempt and every look at what it left. A disk that is full stays full until the attempt ends; every
other fault happens once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import importlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.operations import OPERATIONS, Told, files_below

KINDS = ("open", "write", "fsync", "rename", "mkdir", "unlink")
SHORT = -1  # a write that takes half of what it was given
ERRORS = {
    "open": (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EINTR),
    "write": (errno.ENOSPC, errno.EIO, errno.EINTR, SHORT),
    "fsync": (errno.EIO, errno.ENOSPC, errno.EINTR),
    "rename": (errno.EIO, errno.EACCES, errno.ENOSPC),
    "mkdir": (errno.ENOSPC, errno.EIO, errno.EACCES),
    "unlink": (errno.EACCES, errno.EIO),
}
PATIENCE = 120.0  # seconds that an attempt may take


class Fault(NamedTuple):
    """The `number`-th call of a kind, counted from 1, gives an error."""

    kind: str
    number: int
    error: int

    def __str__(self) -> str:
        name = "a short write" if self.error == SHORT else errno.errorcode[self.error]
        return f"{self.kind} {self.number}: {name}"


@dataclass(frozen=True)
class Result:
    """What one fault did."""

    fault: Fault
    struck: str | None  # the path that it met; None if the attempt never came to it
    violations: list[str]


class Injector:
    """A server that forks attempts, with the shim loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shim = folder / "shim.so"
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler is not None
        source = Path(__file__).with_name("shim.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(shim), str(source), "-ldl"], check=True)
        (folder / "tmp").mkdir()
        own = {"LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        self.log = (folder / "server.log").open("wb")
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.injection_kit", str(shim)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=os.environ | own | {"VCAL_DEBUG": "1"},  # the command line raises what it would print
            cwd=Path(__file__).parents[2],
            bufsize=0,
        )
        self.unread = b""
        assert self._read(100) == {"ready": True}
        self.templates: dict[str, tuple[Path, dict[str, int], set[str]]] = {}

    def _read(self, timeout: float) -> Any:
        assert self.server.stdout is not None
        while b"\n" not in self.unread:
            ready, _, _ = select.select([self.server.stdout], [], [], timeout)
            more = os.read(self.server.stdout.fileno(), 65536) if ready else b""
            if not more:
                said = (self.folder / "server.log").read_text(errors="replace")
                raise AssertionError(f"no answer after {timeout:.0f} s, or the server is gone:\n{said[-3000:]}")
            self.unread += more
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def ask(self, what: str, operation: str, folder: Path, **job: Any) -> dict[str, Any]:
        """One forked process: it prepares, attempts, or recovers."""
        assert self.server.stdin is not None
        job |= {"what": what, "operation": operation, "folder": str(folder)}
        self.server.stdin.write(json.dumps(job).encode() + b"\n")
        found: dict[str, Any] = self._read(PATIENCE)
        return found

    def template(self, operation: str) -> tuple[Path, dict[str, int], set[str]]:
        """Where an operation begins, how many calls of each kind it makes, and the files that it ends with."""
        if operation not in self.templates:
            start, whole = self.folder / f"{operation}-template", self.folder / f"{operation}-whole"
            (start / "tmp").mkdir(parents=True)
            prepared = self.ask("prepare", operation, start)
            assert prepared["error"] is None, prepared["traceback"]
            shutil.copytree(start, whole)
            done = self.ask("attempt", operation, whole, fault=None)
            assert done["error"] is None, done["traceback"]
            self.templates[operation] = start, done["counts"], files_below(whole)
        return self.templates[operation]

    def faults(self, operation: str) -> Iterator[Fault]:
        """Every error of every call."""
        _, counts, _ = self.template(operation)
        for kind in KINDS:
            for number in range(1, counts[kind] + 1):
                yield from (Fault(kind, number, error) for error in ERRORS[kind])

    def inject(self, operation: str, fault: Fault) -> Result:
        """Attempts with the fault, looks at what is left, does the same again, and looks once more."""
        start, _, expected = self.template(operation)
        folder = self.folder / "case"
        shutil.copytree(start, folder)
        try:
            tried = self.ask("attempt", operation, folder, fault=list(fault))
            violations = list(tried["violations"])
            whole = str(self.folder / f"{operation}-whole")
            after = self.ask("recover", operation, folder, told=tried["error"], whole=whole)
            if after["error"] is not None:
                violations.append(f"{after['during']}: {after['error']}\n{after['traceback']}")
            elif files_below(folder) != expected:
                left, lost = files_below(folder) - expected, expected - files_below(folder)
                violations.append(f"left behind: {sorted(left)}, missing: {sorted(lost)}")
            return Result(fault, tried["struck"], violations)
        finally:
            shutil.rmtree(folder)

    def close(self) -> None:
        """Ends the server."""
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.close()
        self.server.wait(30)
        self.server.stdout.close()
        self.log.close()


# --- in the server ----------------------------------------------------------------------------------------------------


def serve(shim: str) -> None:
    """Forks a process for every line of standard input, and passes on what it says."""
    import jobs.cli
    import jobs.commands.train
    import tests.faults.operations
    import vcal_dist.training

    assert all((jobs.cli, jobs.commands.train, tests.faults.operations, vcal_dist.training))
    library = ctypes.CDLL(shim)
    library.faults_arm.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.c_long,
        ctypes.c_int,
        ctypes.c_int,
    ]
    library.faults_count.restype = ctypes.c_long
    library.faults_struck.restype = ctypes.c_char_p
    answers = os.dup(1)
    os.dup2(2, 1)
    os.write(answers, b'{"ready": true}\n')
    for line in sys.stdin:
        job = json.loads(line)
        receive, send = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(receive)
            os.close(answers)
            _child(job, library, send)
        os.close(send)
        said = b""
        while more := os.read(receive, 65536):
            said += more
        os.close(receive)
        _, status = os.waitpid(pid, 0)
        if not said:
            ended = f"the process ended with status {os.waitstatus_to_exitcode(status)}"
            empty = {"error": ended, "traceback": "", "violations": [ended], "struck": None, "during": "at the end"}
            said = json.dumps(empty).encode() + b"\n"
        if job["what"] == "attempt" and job["fault"] is None:
            _import_all(json.loads(said).get("modules", ()))
        os.write(answers, said)


def _import_all(names: Iterable[str]) -> None:
    """What an attempt has imported, so that those to come need not."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _child(job: dict[str, Any], library: Any, send: int) -> None:
    faulthandler.dump_traceback_later(PATIENCE - 20, exit=True)
    folder, operation = Path(job["folder"]), OPERATIONS[job["operation"]]
    os.chdir(folder)
    tempfile.tempdir = str(folder / "tmp")
    said: dict[str, Any] = {"error": None, "traceback": "", "violations": [], "struck": None}
    try:
        if job["what"] == "prepare":
            operation.prepare(folder)
        elif job["what"] == "attempt":
            _attempt(job, library, said)
            if job["fault"] is None:
                said["modules"] = [name for name in sys.modules if name != "__main__"]
        else:
            said["during"] = "after the fault"
            told = None if job["told"] is None else Told(*job["told"])
            operation.check(folder, told)
            said["during"] = "while the same command recovers"
            operation.recover(folder, told)
            said["during"] = "after the recovery"
            operation.complete(folder, Path(job["whole"]))
    except BaseException as error:
        said |= {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-3000:]}
    with os.fdopen(send, "wb") as pipe:
        pipe.write(json.dumps(said).encode() + b"\n")
    os._exit(0)


def _attempt(job: dict[str, Any], library: Any, said: dict[str, Any]) -> None:
    kind, number, error = job["fault"] or ("open", 0, 0)
    root, passed = job["folder"].encode(), OPERATIONS[job["operation"]].passed.encode()
    library.faults_arm(root, passed, KINDS.index(kind), number, error, error == errno.ENOSPC)
    raised: BaseException | None = None
    try:
        OPERATIONS[job["operation"]].attempt(Path(job["folder"]))
    except BaseException as found:
        raised = found
    library.faults_disarm()
    said["counts"] = {name: library.faults_count(i) for i, name in enumerate(KINDS)}
    if library.faults_hits():
        said["struck"] = library.faults_struck().decode(errors="replace").removeprefix(job["folder"])
    if raised is not None:
        told = Told.of(raised)
        said["error"] = list(told)
        said["traceback"] = "".join(traceback.format_exception(raised))[-4000:]
        if not told.fair:
            said["violations"].append(f"raised {told.name}: {told.message}\n{said['traceback']}")


if __name__ == "__main__":
    serve(sys.argv[1])
