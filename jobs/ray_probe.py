"""Is a Ray cluster reachable? Looks where Ray itself would look, with short time-outs, and never starts one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from storage.regular import open_regular

DEFAULT_ADDRESS = "127.0.0.1:6379"
CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 20.0  # importing Ray takes a few of them

# Run in a process of its own: a cluster of another version, or another service on the port, can hang `ray.init`.
# Given an address, or "auto", it only ever connects.
_ASK = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
print(json.dumps(ray.cluster_resources()))
"""


@dataclass(frozen=True)
class Probe:
    """Where a cluster was looked for and what was found."""

    address: str | None
    configured: bool  # the user asked for this address with RAY_ADDRESS
    reachable: bool
    detail: str


def probe() -> Probe:
    """Look for the cluster that a job started here would use."""
    given = os.environ.get("RAY_ADDRESS", "")
    if given == "local":
        return Probe(given, configured=False, reachable=False, detail="every job starts its own")
    configured = given not in ("", "auto")
    foreign = None if configured else foreign_cluster()
    if foreign is not None:
        return Probe(foreign, configured, reachable=False, detail="another user says so: give --address to go there")
    current = _current_cluster()
    address = given if configured else current or DEFAULT_ADDRESS
    try:
        host, port = _host_and_port(address)
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS):
            pass
        if address.startswith("http"):
            detail = _dashboard_version(address)
        else:
            # To a cluster that Ray finds by itself, it also brings the token by itself.
            detail = _resources(address if configured or not current else "auto")
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        if configured or current:
            return Probe(address, configured, reachable=False, detail=_reason(error))
        return Probe(None, configured, reachable=False, detail="none running; a job starts its own")
    return Probe(address, configured, reachable=True, detail=detail)


def foreign_cluster() -> str | None:
    """Where Ray would go by itself although another user says so, with the right to run programs here as this one.

    Ray takes the first cluster whose processes it sees on the machine, whoever runs them, or the address in a file
    below the temporary directory, whoever wrote it. The machine's administrator is trusted.
    """
    import psutil

    trusted = {os.getuid(), 0}
    path = _current_file()
    with contextlib.suppress(OSError):
        # In a folder of somebody else, the file can be another one in a moment.
        if not {path.parent.stat().st_uid, path.lstat().st_uid, path.stat().st_uid} <= trusted:
            return _current_cluster() or str(path)
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = process.info["cmdline"] or [""], process.info["uids"]
        if Path(words[0].partition(" ")[0]).name == "raylet" and uids is not None and uids.real not in trusted:
            found = (word.partition("=")[2] for word in " ".join(words).split() if word.startswith("--gcs-address="))
            return next(found, f"process {process.pid}")
    return None


def _current_cluster() -> str | None:
    """The address that `ray start` left on this machine."""
    try:
        with open_regular(_current_file()) as file:
            return file.read(1000).decode().strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _current_file() -> Path:
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray" / "ray_current_cluster"


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    if not parts.hostname or not parts.port:
        raise ValueError("not of the form host:port, ray://host:port or http://host:port")
    return parts.hostname, parts.port


def _dashboard_version(address: str) -> str:
    # The scheme is http or https: the caller checked.
    with urllib.request.urlopen(f"{address.rstrip('/')}/api/version", timeout=CONNECT_SECONDS) as answer:  # noqa: S310
        return f"Ray {json.load(answer)['ray_version']}"


def _resources(address: str) -> str:
    command = [sys.executable, "-c", _ASK, address]
    done = subprocess.run(command, capture_output=True, timeout=ANSWER_SECONDS, check=True)  # noqa: S603 - our own script
    resources = json.loads(done.stdout.strip().splitlines()[-1])
    return ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired | subprocess.CalledProcessError):
        said = (error.stderr or b"").decode(errors="replace")
        if "AuthToken" in said or "AuthenticationError" in said:
            # Local clusters ask for one since Ray 2.59, and a client with an explicit address sends none by itself.
            return "it wants a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        if isinstance(error, subprocess.TimeoutExpired):
            return f"something listens there, but did not answer as Ray within {ANSWER_SECONDS:g} s"
        return next(reversed(said.strip().splitlines()), "no answer")
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
