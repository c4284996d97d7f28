"""`vcal submit ray` and `vcal jobs` against a real cluster: what is shown is sent, and how a job ends is told."""

from __future__ import annotations

import http.server
import json
import os
import select
import shlex
import signal
import socket
import socketserver
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from jobs.cli import main
from jobs.submission import parcel, ray_jobs
from jobs.submission.ray_job import RayJob, submit
from tests.ray_kit import BIN, RayHead, a_token
from tests.vcal_dist.training_kit import make_store, settings, wait_for
from vcal_dist.errors import ConfigError

ODD = 'o\'dd "$(touch made)" `touch made`; touch made #\n$HOME [red]:bug: ü'
LONG = {"fit": {"emulator": {"steps": 10_000_000, "batch_runs": 100}}}
pytestmark = pytest.mark.filterwarnings("ignore:ssl=None is deprecated:DeprecationWarning")  # Ray's client passes it


@pytest.fixture(autouse=True)
def _nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ray_jobs.ADDRESSES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def vcal(*arguments: str) -> int:
    """Run `vcal` in this process and return its exit status."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def write(path: Path, plain: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(plain), encoding="utf-8")
    return str(path)


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """The jobs by their names."""
    capsys.readouterr()
    assert vcal("jobs", "list", "--json") == 0
    return {job["id"]: job for job in json.loads(capsys.readouterr().out)["jobs"]}


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What was said on stderr, without the ends of lines."""
    return " ".join(capsys.readouterr().err.split())


class Cutting(socketserver.ThreadingTCPServer):
    """Forwards connections to a dashboard, and once, when it has passed on a word, breaks off all of them."""

    daemon_threads = True

    def __init__(self, dashboard: str, word: str) -> None:
        super().__init__(("127.0.0.1", 0), _Forward)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.target, self.word, self.cuts = urlsplit(dashboard), word.encode(), 0
        self.thread = threading.Thread(target=self.serve_forever)

    def __enter__(self) -> Cutting:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


class _Forward(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, Cutting)
        with socket.create_connection((str(server.target.hostname), int(server.target.port or 0))) as there:
            ends = {self.request: there, there: self.request}
            while True:
                for one in select.select(list(ends), [], [])[0]:
                    data = one.recv(65536)
                    if not data:
                        return
                    ends[one].sendall(data)
                    if server.word in data and not server.cuts:
                        server.cuts += 1
                        return


# --- a job from the beginning to its end ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_is_shown_is_sent_and_odd_names_arrive_unharmed(
    ray_head: RayHead, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ODD
    folder.mkdir()
    store, output, name = folder / f"{ODD}.zarr", folder / "runs" / ODD, "odd-names.1"
    make_store(store)
    config = write(folder / f"{ODD}.yaml", settings(store, "replaced"))
    extra = tmp_path / "extra"
    (extra / "__pycache__").mkdir(parents=True)
    (extra / "__pycache__" / "old.pyc").write_bytes(b"old")
    (extra / ".gitignore").write_text("*.txt\n", encoding="utf-8")
    (extra / "a 'word'.txt").write_text("not ignored", encoding="utf-8")
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")  # an address that is given is the one that is used
    options = ["--address", ray_head.dashboard, "--name", name, "--with", str(extra), "--env", "ODD=$(touch made) ; '"]
    command = ["--", "train", config, f"output={json.dumps(str(output))}", "--on", "here"]

    assert vcal("submit", "ray", "--dry-run", *options, *command) == 0
    shown = capsys.readouterr().out
    head, _, text = shown.partition("\nconfig.yaml:\n")
    assert not output.exists()
    assert vcal("submit", "ray", *options, *command) == 0
    captured = capsys.readouterr()

    assert "Posterior of θ" in captured.out
    assert f"{name}: SUCCEEDED" in captured.err
    assert "warning" not in captured.err  # the cluster is on this machine
    assert (output / "posterior.safetensors").is_file()
    assert [*tmp_path.rglob("made"), *ray_head.folder.rglob("made")] == []
    sent = ray_jobs.details(ray_jobs.connect(ray_head.dashboard), name)
    assert sent.entrypoint == "vcal train config.yaml --on here"
    assert sent.runtime_env is not None
    unpacked = next(
        ray_head.folder.glob(f"ray/session_2*/runtime_resources/*/{Path(sent.runtime_env['working_dir']).stem}")
    )
    files = {str(path.relative_to(unpacked)): path for path in sorted(unpacked.rglob("*")) if path.is_file()}
    assert files.keys() == {"config.yaml", "extra/.gitignore", "extra/a 'word'.txt"}
    assert text == files["config.yaml"].read_text(encoding="utf-8")
    assert yaml.safe_load(text)["output"] == str(output)
    assert head.splitlines() == [
        f"address     {ray_head.dashboard}",
        f"name        {name}",
        f"entrypoint  {sent.entrypoint}",
        *(f"variable    {key}=…" for key in sent.runtime_env["env_vars"]),  # values may be secrets
        f"file        config.yaml ({len(text.encode()) / 1024:.1f} KiB)",
        "file        extra/.gitignore (6 B)",
        "file        extra/a 'word'.txt (11 B)",
    ]
    assert sent.runtime_env["env_vars"]["ODD"] == "$(touch made) ; '"

    assert vcal("submit", "ray", *options, *command) == 1
    assert f"there is a job {name} at" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_failed_stopped_and_left_alone(
    ray_head: RayHead, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_head.dashboard)
    make_store(tmp_path / "data.zarr")
    left = write(tmp_path / "left.yaml", settings(tmp_path / "data.zarr", tmp_path / "left", **LONG))
    lost = write(tmp_path / "lost.yaml", settings(tmp_path / "nowhere.zarr", tmp_path / "lost"))

    command = [str(BIN / "vcal"), "submit", "ray", "--name", "left", "--", "train", left, "--on", "here"]
    env = ray_head.env | {"RAY_ADDRESS": ray_head.dashboard}
    watching = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert vcal("submit", "ray", "--name", "lost", "--no-follow", "--", "train", lost, "--on", "here") == 0
        assert capsys.readouterr().out == "lost\n"
        slow = "for i in 1 2 3 4 5 6; do echo word $i; sleep 1; done; exit 75"
        for name, entrypoint in {"bare": "no-such-vcal", "preempted": slow}.items():
            submit(RayJob(ray_head.dashboard, name, entrypoint, parcel.parcel("")))
        assert vcal("jobs", "logs", "bare", "--follow") == 127
        captured = capsys.readouterr()
        assert "no-such-vcal: not found" in captured.out
        assert "the cluster does not find `vcal`: install vcal-dist there" in captured.err
        with Cutting(ray_head.dashboard, "word 2") as forwarded:
            assert vcal("jobs", "logs", "preempted", "--follow", "--address", forwarded.url) == 75
        assert forwarded.cuts == 1
        said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("word")]
        assert said == [f"word {i}" for i in range(1, 7)]
        assert vcal("jobs", "logs", "lost", "--follow") == 1
        captured = capsys.readouterr()
        assert "nowhere.zarr" in captured.out
        assert "lost: FAILED, exit status 1" in captured.err

        wait_for((tmp_path / "left" / "checkpoints" / "last.safetensors").exists, 100)
        watching.send_signal(signal.SIGINT)
        said = watching.communicate(timeout=30)[1]
    finally:
        watching.kill()
        watching.communicate()
    assert watching.returncode == 130
    assert "vcal jobs logs left --follow" in said
    assert "vcal jobs stop left" in said
    assert listed(capsys)["left"]["status"] == "RUNNING"
    assert vcal("jobs", "stop", "left") == 0
    assert capsys.readouterr().out == "left has stopped\n"
    assert vcal("jobs", "logs", "left") == 0
    assert "stopped by a signal after step" in capsys.readouterr().out  # it had the time to write a checkpoint
    assert vcal("jobs", "stop", "left") == 0
    assert capsys.readouterr().out == "left had ended already: STOPPED\n"

    found = listed(capsys)
    assert {name: (found[name]["status"], found[name]["exit_status"]) for name in ("left", "lost", "preempted")} == {
        "left": ("STOPPED", None),
        "lost": ("FAILED", 1),
        "preempted": ("FAILED", 75),
    }
    assert vcal("jobs", "list") == 0
    assert "vcal train config.yaml --on here" in capsys.readouterr().out
    for job in ("logs", "stop"):
        assert vcal("jobs", job, "no-such-job") == 1
        assert "has no job no-such-job; see: vcal jobs list" in one_line(capsys)


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [("SUCCEEDED", 0, 0), ("FAILED", 75, 75), ("FAILED", -9, 137), ("FAILED", None, 1), ("STOPPED", None, 1)],
)
def test_the_exit_status_is_the_jobs_own(status: str, code: int | None, expected: int) -> None:
    from ray.dashboard.modules.job.pydantic_models import JobDetails, JobType

    details = JobDetails(type=JobType.SUBMISSION, status=status, entrypoint="", driver_exit_code=code)
    assert ray_jobs.exit_status(details) == expected


# --- clusters that cannot be reached ----------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write(tmp_path / "mine.yaml", settings("data.zarr", "out"))


class _Other(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def other() -> Iterator[str]:
    """A server that is not Ray."""
    with http.server.HTTPServer(("127.0.0.1", 0), _Other) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_without_a_cluster_there_is_one_message(config: str, capsys: pytest.CaptureFixture[str], other: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
    for arguments in (["submit", "ray"], ["jobs", "list"], ["jobs", "stop", "one"], ["jobs", "logs", "one"]):
        command = ["--", "train", config] if arguments[0] == "submit" else []
        assert vcal(*arguments, "--address", closed, *command) == 1
        said = one_line(capsys)
        assert f"no Ray dashboard answers at {closed} (Connection refused)" in said
        assert "'ray start --head'" in said
        assert "'ray dashboard cluster.yaml'" in said
    assert vcal("jobs", "list", "--address", other) == 1
    assert "something else listens there" in one_line(capsys)


def test_a_server_that_never_answers_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_jobs, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert vcal("jobs", "list", "--address", f"http://127.0.0.1:{server.getsockname()[1]}") == 1
    assert "timed out" in one_line(capsys)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_cluster_that_wants_a_token(capsys: pytest.CaptureFixture[str]) -> None:
    head = RayHead(a_token())
    try:
        head.start()
        assert vcal("jobs", "list", "--address", head.dashboard) == 1
        said = one_line(capsys)
        assert f"the Ray cluster at {head.dashboard} wants a token" in said
        assert "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in said
        command = [BIN / "vcal", "jobs", "list", "--json", "--address", head.dashboard]
        done = subprocess.run(command, env=head.env, capture_output=True, text=True, timeout=60)
    finally:
        head.stop()
    assert (done.returncode, json.loads(done.stdout)) == (0, {"jobs": []})


# --- what needs no cluster --------------------------------------------------------------------------------------------


def test_the_address_is_the_one_given_or_that_of_ray_or_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_jobs.address() == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # where workers connect, not the dashboard
    assert ray_jobs.address() == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "http://a:8265/")
    assert ray_jobs.address() == "http://a:8265"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "https://b")
    assert ray_jobs.address() == "https://b"
    assert ray_jobs.address("http://c:1") == "http://c:1"


@pytest.mark.parametrize("address", ["head:8265", "ray://head:10001", "http://", "http://head:x", "http://[::1"])
def test_an_address_that_is_no_dashboards(address: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("submit", "ray", "--dry-run", "--address", address, "--", "train", config) == 1
    assert "write it as http://127.0.0.1:8265" in one_line(capsys)


def test_paths_here_are_warned_of_if_the_cluster_is_elsewhere(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def warnings(address: str) -> list[str]:
        command = ["--", "train", config, "output=s3://bucket/run"]
        assert vcal("submit", "ray", "--dry-run", "--address", address, *command) == 0
        return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]

    (only,) = warnings("http://head.example.com:8265")
    assert f"store is {tmp_path / 'data.zarr'}: every node" in only
    for here in ("http://localhost:8265", "http://127.0.0.2:8265", "http://[::1]:8265"):
        assert warnings(here) == []


def test_a_dry_run_touches_nothing_and_names_are_unique(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = set()
    for _ in range(3):
        assert vcal("submit", "ray", "--dry-run", "--", "train", config, "output=a b", "--workers", "1:3") == 0
        lines = capsys.readouterr().out.splitlines()
        names.add(lines[1].removeprefix("name        "))
        assert shlex.split(lines[2])[1:] == ["vcal", "train", "config.yaml", "--on", "ray", "--workers", "1:3"]
    assert len(names) == 3
    assert all(ray_jobs.NAME.fullmatch(name) and name.startswith("vcal-a-b-2") for name in names)
    assert vcal("submit", "ray", "--dry-run", "--", "train", config, "--workers", "1 ; ls") == 1
    assert "--workers is '1 ; ls'; accepted: a number such as 4" in one_line(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "a/b"], "'a/b' cannot name a job"),
        (["--name", "$(x)"], "cannot name a job"),
        (["--env", "=x"], "--env =x is no KEY=VALUE"),
        (["--env", "A"], "--env A is no KEY=VALUE"),
        (["--with", "nowhere"], "--with nowhere: there is no such file"),
    ],
)
def test_wrong_options(options: list[str], message: str, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("submit", "ray", "--dry-run", *options, "--", "train", config) == 1
    assert message in one_line(capsys)


def test_the_cluster_is_named_before_the_dashes(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("submit", "ray", "--dry-run", "--", "train", config, "--address", "head:6379") == 1
    assert "give the dashboard's address before them" in one_line(capsys)


def test_data_runs_and_environments_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_store(tmp_path / "in" / "data.zarr", runs=40, observations=10)
    for path in ("run/rows.json", "code/.git/HEAD", "env/pyvenv.cfg", ".venv/bin/python", "other/config.yaml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}", encoding="utf-8")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "there").symlink_to(tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "in": "data.zarr is a Zarr store, which stays here: data belong on storage",
        "run": "run is a run",
        "code": r"code/\.git is a Git repository",
        "env": "env is a virtual environment",
        ".venv": "a virtual environment",
        "other/config.yaml": "has a file config.yaml already",
        "links": "there is a link to a folder",
        "pipe": "pipe is no plain file",
    }.items():
        with pytest.raises(ConfigError, match=message):
            parcel.parcel("", [Path(name)])
    assert set(parcel.parcel("", [Path("other"), Path("other/../run/rows.json")])) == {
        *("config.yaml", "other/config.yaml", "rows.json")
    }
    monkeypatch.setattr(parcel, "LARGEST", 5)
    with pytest.raises(ConfigError, match=r"have 8 B, and 5 B is the most; .* storage that the cluster"):
        parcel.parcel("four", [Path("other"), Path("run/rows.json")])


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!", encoding="utf-8")
    (tmp_path / "script").chmod(0o755)
    for name in ("a.zip", "b.zip"):
        parcel.write(parcel.parcel("text", [Path("script")]), tmp_path / name)
        os.utime(tmp_path / "script", (1, 1))
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        assert {entry.filename: entry.external_attr >> 16 & 0o777 for entry in archive.infolist()} == {
            "config.yaml": 0o644,
            "script": 0o755,
        }
