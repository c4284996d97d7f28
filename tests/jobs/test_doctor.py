"""`vcal doctor`: the facts are there, and each fault gets its sentence."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from jobs import doctor, ray_cluster, ray_probe
from jobs.cli import main
from vcal_dist.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray_probe, "DEFAULT_ADDRESS", f"127.0.0.1:{_closed_port()}")


def _closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--json", "--path", str(tmp_path)])
    facts = json.loads(capsys.readouterr().out)
    assert end.value.code in (None, 0), facts["broken"]
    assert facts["ok"] is True
    assert facts["packages"]["zarr"] == {"installed": metadata.version("zarr"), "required": "<3.2,>=3.1.4", "ok": True}
    assert "pytest" not in facts["packages"]  # an extra is not a requirement
    assert 1 <= facts["processor"]["usable_cores"] <= facts["processor"]["cores"]
    assert facts["torch"]["threads"] >= 1
    assert facts["memory"]["total_bytes"] > facts["memory"]["available_bytes"] > 0
    assert facts["disk"]["write_bytes_per_s"] > 0
    assert facts["ray"]["reachable"] is False
    assert not any("Ray" in line for line in facts["advice"])  # no cluster is no fault
    assert list(tmp_path.iterdir()) == []  # the test file is gone


def test_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--path", str(tmp_path)])
    out = capsys.readouterr().out
    assert "lightning" in out
    assert "shared memory" in out


def test_missing_and_outdated_packages_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["numpy>=999", "no-such-package>=1", "typer>=0.1", "torch>=2.6", "other; extra == 'test'"]
    monkeypatch.setattr(metadata, "requires", lambda _: declared)
    report = doctor.Report()
    doctor.check_packages(report)
    assert [line.partition(",")[0] for line in report.broken] == [
        f"numpy is {metadata.version('numpy')}",
        "no-such-package is missing",
    ]


def test_broken_exits_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(metadata, "requires", lambda _: ["numpy>=999"])
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--path", str(tmp_path)])
    assert end.value.code == 1
    assert "pip install 'numpy>=999'" in capsys.readouterr().out


def test_a_directory_that_cannot_be_written_is_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_: Path) -> tuple[float, float]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor, "disk_speed", refuse)
    report = doctor.Report()
    doctor.check_disk(report, tmp_path)
    assert report.advice == [
        f"{tmp_path} cannot be written (Permission denied): choose another one with --path, or mend its rights."
    ]


def test_small_shared_memory_is_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"total": 64 * doctor.MIB, "free": 64 * doctor.MIB})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(Path, "is_dir", lambda _: True)
    report = doctor.Report()
    doctor.check_memory(report)
    assert any("--shm-size" in line for line in report.advice)


def test_a_cluster_that_is_configured_but_gone_is_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    address = f"127.0.0.1:{_closed_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    report = doctor.examine(tmp_path)
    assert any(f"RAY_ADDRESS is {address}" in line for line in report.advice)
    assert report.facts["ray"]["reachable"] is False


@pytest.mark.parametrize("address", ["host", "http://", "ray://host"])
def test_an_address_without_a_port(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    found = ray_probe.probe()
    assert not found.reachable
    assert "host:port" in found.detail


def test_another_service_on_the_port_is_not_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(ray_probe, "ANSWER_SECONDS", 1.0)
        found = ray_probe.probe()
    assert not found.reachable
    assert "did not answer as Ray" in found.detail


STRANGER = 54321  # a user's number


def _foreign_file(folder: Path) -> None:
    file = folder / "ray" / "ray_current_cluster"
    file.parent.mkdir()
    file.write_text("10.0.0.1:6379")
    os.chown(file, STRANGER, STRANGER)


def _foreign_process(folder: Path) -> None:
    command = ["raylet", "-c", "read line", "--gcs-address=10.0.0.1:6379"]
    _processes.append(subprocess.Popen(command, executable="/bin/sh", user=STRANGER, cwd="/", stdin=subprocess.PIPE))


_processes: list[subprocess.Popen[bytes]] = []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("left", [_foreign_file, _foreign_process])
def test_ray_is_not_sent_where_another_user_says(tmp_path: Path, left: Callable[[Path], None]) -> None:
    """Whose cluster could run programs as this user: Ray takes whatever it finds on the machine."""
    assert ray_probe.foreign_cluster() is None
    try:
        left(tmp_path)
        found = ray_probe.probe()
        assert not found.reachable
        assert found.address == "10.0.0.1:6379"
        assert "another user" in found.detail
        told = r"connect to 10\.0\.0\.1:6379.*another user.*--address local"
        with pytest.raises(ConfigError, match=told), ray_cluster.connected():
            pass
    finally:
        while _processes:
            _processes.pop().communicate(b"\n")


class _Dashboard(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"ray_version": "2.99.0"}')

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def dashboard() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Dashboard) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_jobs_api_of_a_cluster(monkeypatch: pytest.MonkeyPatch, dashboard: str) -> None:
    monkeypatch.setenv("RAY_ADDRESS", dashboard)
    assert ray_probe.probe() == ray_probe.Probe(dashboard, configured=True, reachable=True, detail="Ray 2.99.0")


@pytest.mark.slow
@pytest.mark.slow
def test_a_real_cluster_with_and_without_its_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = """
import ray
ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, object_store_memory=100_000_000,
         log_to_driver=False, logging_level="ERROR")
print("gcs", ray.get_runtime_context().gcs_address, flush=True)
input()
ray.shutdown()
"""
    monkeypatch.delenv("RAY_TMPDIR")  # sockets under pytest's long paths exceed what a socket's name may hold
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "only-for-this-test-" + "0" * 32)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
        assert cluster.stdout is not None
        address = next(line.split()[1] for line in cluster.stdout if line.startswith("gcs "))
        monkeypatch.setenv("RAY_ADDRESS", address)
        allowed = ray_probe.probe()
        monkeypatch.delenv("RAY_AUTH_MODE")
        monkeypatch.delenv("RAY_AUTH_TOKEN")
        monkeypatch.setattr(ray_probe, "ANSWER_SECONDS", 10.0)
        refused = ray_probe.probe()
        cluster.communicate("\n", timeout=60)
    assert allowed == ray_probe.Probe(address, configured=True, reachable=True, detail="2 CPU, 0 GPU")
    assert not refused.reachable
    assert "RAY_AUTH_MODE=token" in refused.detail
