"""The `vcal` command: help, version, errors and exit statuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

import storage
from jobs.cli import main
from jobs.commands.ingest import expand
from jobs.commands.many_values import spread
from storage.errors import IngestError


def vcal(*arguments: str) -> int:
    """Run `vcal` in this process and return its exit status."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("--help") == 0
    out = capsys.readouterr().out
    for command in ("demo", "ingest", "inspect", "bench", "doctor"):
        assert command in out


@pytest.mark.parametrize("command", ["demo", "ingest", "inspect", "bench", "doctor"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal(command, "--help") == 0
    assert f"Usage: vcal {command}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str], root: Path) -> None:
    import tomllib

    assert vcal("--version") == 0
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert capsys.readouterr().out == f"vcal-dist {project['version']}\n"


def test_unknown_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("inspekt") == 2
    assert "inspekt" in capsys.readouterr().err


def test_a_users_error_is_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "[red]nowhere.zarr"  # markup in a name is text
    assert vcal("inspect", str(missing)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert "[red]nowhere.zarr" in captured.err.replace("\n", "")


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VCAL_DEBUG", "1")
    with pytest.raises(storage.VcalError):
        main(["inspect", str(tmp_path / "nowhere.zarr")])


def test_a_bug_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(storage, "open", broken, raising=False)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["inspect", "anything"])


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_exits_130() -> None:
    script = """
import time, storage
from jobs.cli import main
def slow(*_):
    print("started", flush=True)
    time.sleep(60)
storage.open = slow
main(["inspect", "anything"])
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "started\n"
        time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        _, err = job.communicate(timeout=20)
    assert job.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("p.yaml --runs a b c -o out", "p.yaml --runs a --runs b --runs c -o out"),
        ("p.yaml --runs a --runs b -o out", "p.yaml --runs a --runs b -o out"),
        ("--runs a b --observations c d", "--runs a --runs b --observations c --observations d"),
        ("--runs=a b -o out p.yaml", "--runs a --runs b -o out p.yaml"),
        ("--runs a --append b", "--runs a --append b"),  # a flag ends the list: b is positional
        ("--runs -o out", "--runs -o out"),  # a missing value stays missing, for the parser to refuse
        ("--runs a b -- c d", "--runs a --runs b -- c d"),
        ("--runs - b", "--runs - --runs b"),
        ("p.yaml -o out", "p.yaml -o out"),
        ("", ""),
    ],
)
def test_spread(given: str, expected: str) -> None:
    assert spread(given.split(), {"--runs", "--observations"}) == expected.split()


class FakeReport:
    def lines(self) -> list[str]:
        return ["3 runs written", "[2 rows dropped]"]


@pytest.fixture
def ingest_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def record(problem: Path, **options: Any) -> FakeReport:
        calls.append({"problem": problem, **options})
        return FakeReport()

    monkeypatch.setattr(storage, "ingest", record, raising=False)
    return calls


def test_ingest_hands_everything_over(
    ingest_calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("b.csv", "a.csv"):
        (tmp_path / name).touch()
    pattern = str(tmp_path / "*.csv")
    options = "--drop-invalid --append --dtype float64 --compression none --chunk-rows 10 --shard-rows 100"
    status = vcal(
        "ingest", "p.yaml", "--runs", pattern, "c.nc", "--runs", "d.npz", "--observations", "e.csv", "-o", "s3://bucket/s",
        *options.split(), "--scheduler", "tcp://host:8786",
    )  # fmt: skip
    assert status == 0
    assert capsys.readouterr().out == "3 runs written\n[2 rows dropped]\n"
    assert ingest_calls == [
        {
            "problem": Path("p.yaml"),
            "runs": [str(tmp_path / "a.csv"), str(tmp_path / "b.csv"), "c.nc", "d.npz"],
            "observations": ["e.csv"],
            "store": "s3://bucket/s",
            "drop_invalid": True,
            "append": True,
            "dtype": "float64",
            "compression": "none",
            "chunk_rows": 10,
            "shard_rows": 100,
            "scheduler": "tcp://host:8786",
            "progress": True,
        }
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["p.yaml", "--runs", "no-such-*.csv", "-o", "out"],
        ["p.yaml", "--runs", "a.csv"],
        ["p.yaml", "--runs", "a.csv", "-o", "out", "--dtype", "float16"],
        ["p.yaml", "--runs", "a.csv", "-o", "out", "--chunk-rows", "0"],
        ["--runs", "a.csv", "p.yaml", "-o", "out"],
    ],
    ids=["nothing matches", "no store", "unknown type", "no rows", "problem swallowed by --runs"],
)
def test_ingest_refuses_wrong_usage(ingest_calls: list[dict[str, Any]], arguments: list[str]) -> None:
    assert vcal("ingest", *arguments) == 2
    assert ingest_calls == []


def test_ingest_errors_exit_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: Any, **__: Any) -> FakeReport:
        raise IngestError("a.csv: column 'rw' is missing")

    monkeypatch.setattr(storage, "ingest", refuse, raising=False)
    assert vcal("ingest", "p.yaml", "--runs", "a.csv", "-o", "out") == 1
    assert capsys.readouterr().err == "error: a.csv: column 'rw' is missing\n"


def test_ingest_and_inspect_real_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.yaml").write_text(
        "name: line\n"
        "control_inputs: [{name: a, bounds: [0, 10]}]\n"
        "calibration_inputs: [{name: b, bounds: [0, 1]}]\n"
        "outputs: [{name: c}]\n"
    )
    (tmp_path / "r1.csv").write_text("a,b,c\n1,0.5,3\n2,0.25,4\n")
    (tmp_path / "r2.csv").write_text("c,b,a\n5,0.75,6\n")
    (tmp_path / "o.csv").write_text("a,c\n7,8\n")
    at = {name: str(tmp_path / name) for name in ("p.yaml", "r1.csv", "r2.csv", "o.csv", "s.zarr")}
    given = ["--runs", at["r1.csv"], at["r2.csv"], "--observations", at["o.csv"], "-o", at["s.zarr"]]
    assert vcal("ingest", at["p.yaml"], *given) == 0
    capsys.readouterr()
    assert vcal("inspect", at["s.zarr"], "--verify", "--json") == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert tables["runs"]["first_rows"] == {"a": [1, 2, 6], "b": [0.5, 0.25, 0.75], "c": [3, 4, 5]}
    assert tables["observations"]["first_rows"] == {"a": [7], "c": [8]}


def test_a_file_that_looks_like_a_pattern_is_a_file(tmp_path: Path) -> None:
    odd = tmp_path / "run[1].csv"
    odd.touch()
    assert expand([str(odd)], "--runs") == [str(odd)]


def test_patterns_of_urls_expand(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", "c.txt"):
        (tmp_path / name).touch()
    found = expand([f"file://{tmp_path}/*.csv"], "--runs")
    assert found == [f"file://{tmp_path}/a.csv", f"file://{tmp_path}/b.csv"]


def test_bench_prints_a_table_or_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[bool] = []

    def run(quick: bool) -> dict[str, Any]:
        asked.append(quick)
        return {"stream_rows_per_s": 12345678, "peak_rss_mb": float("nan")}

    monkeypatch.setitem(sys.modules, "jobs.bench.stream", types.SimpleNamespace(run=run))
    assert vcal("bench", "stream") == 0
    assert "12,345,678" in capsys.readouterr().out
    assert vcal("bench", "stream", "--quick", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"stream_rows_per_s": 12345678, "peak_rss_mb": None}
    assert asked == [False, True]
