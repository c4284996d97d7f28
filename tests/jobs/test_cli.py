"""The `vcal` command: help, version, errors and exit statuses."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import storage
from jobs import console
from jobs.cli import app, main
from jobs.commands.many_values import spread


def vcal(*arguments: str) -> int:
    """Run `vcal` in this process and return its exit status."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("--help") == 0
    out = capsys.readouterr().out
    for command in ("demo", "ingest", "inspect", "train", "diagnose", "bench", "doctor"):
        assert command in out


@pytest.mark.parametrize("command", ["demo", "ingest", "inspect", "train", "diagnose", "bench", "doctor"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal(command, "--help") == 0
    assert f"Usage: vcal {command}" in capsys.readouterr().out


def test_no_help_has_brackets_that_rich_would_swallow() -> None:
    def texts(command: Any) -> Iterator[str]:
        yield command.help or ""
        for parameter in command.params:
            yield parameter.help or ""
        for each in getattr(command, "commands", {}).values():
            yield from texts(each)

    found = list(texts(typer.main.get_command(app)))
    assert len(found) > 50
    assert [text for text in found if re.search(r"\[[a-z0-9]", text)] == []


def test_commands_that_are_shown_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "bin" / "vcal"
    own.parent.mkdir()
    own.touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bin/vcal", "demo"])
    monkeypatch.setenv("PATH", "/nowhere")
    assert console.vcal("report", "my run") == "bin/vcal report 'my run'"
    monkeypatch.setenv("PATH", str(own.parent))
    assert console.vcal("report", "run") == "vcal report run"
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert console.vcal("report", "run") == "vcal report run"


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


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, with a problem and files for it."""
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(
        "name: line\n"
        "control_inputs: [{name: a, bounds: [0, 10]}]\n"
        "calibration_inputs: [{name: b, bounds: [0, 1]}]\n"
        "outputs: [{name: c}]\n"
    )
    Path("r1.csv").write_text("a,b,c\n1,0.5,3\n2,0.25,4\n")
    Path("r2.csv").write_text("c,b,a\n5,0.75,6\n")
    Path("faulty.csv").write_text("a,b,c\n1,0.5,3\n2,7,4\n")
    Path("o.csv").write_text("a,c\n7,8\n")
    return tmp_path


def inspected(path: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert vcal("inspect", path, "--verify", "--json") == 0
    return dict(json.loads(capsys.readouterr().out)["tables"])


@pytest.mark.usefixtures("files")
def test_ingest_and_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("ingest", "p.yaml", "--runs", "r1.csv", "r2.csv", "--observations", "o.csv", "-o", "s.zarr") == 0
    assert "runs: 3 rows of 3 runs from 2 files" in capsys.readouterr().out
    tables = inspected("s.zarr", capsys)
    assert tables["runs"]["first_rows"] == {"a": [1, 2, 6], "b": [0.5, 0.25, 0.75], "c": [3, 4, 5]}
    assert tables["observations"]["first_rows"] == {"a": [7], "c": [8]}


@pytest.mark.usefixtures("files")
def test_ingest_options(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--dtype", "float64", "--compression", "none", "--chunk-rows", "2", "--shard-rows", "4"]
    assert (
        vcal("ingest", "p.yaml", "--runs", "r?.csv", "--runs", "faulty.csv", "--drop-invalid", *layout, "-o", "s") == 0
    )
    assert "dropped 1 of 5 rows" in capsys.readouterr().out
    store = storage.open("s")
    assert (store.runs.rows, store.dtype, store.runs.compression) == (4, "float64", "none")
    assert (store.runs.chunk_rows, store.runs.block_rows) == (2, 4)
    assert vcal("ingest", "p.yaml", "--runs", "r2.csv", "-o", "s") == 1
    assert "already holds 4 runs" in capsys.readouterr().err
    assert vcal("ingest", "p.yaml", "--runs", "r2.csv", "-o", "s", "--append") == 0
    assert inspected("s", capsys)["runs"]["rows"] == 5


@pytest.mark.usefixtures("files")
def test_ingest_on_a_scheduler_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("ingest", "p.yaml", "--runs", "r1.csv", "-o", "s", "--scheduler", "localhost") == 1
    assert "tcp://host:8786" in capsys.readouterr().err
    assert not Path("s").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["p.yaml", "--runs", "r1.csv"],
        ["p.yaml", "--runs", "r1.csv", "-o", "out", "--dtype", "float16"],
        ["p.yaml", "--runs", "r1.csv", "-o", "out", "--chunk-rows", "0"],
        ["--runs", "r1.csv", "p.yaml", "-o", "out"],
    ],
    ids=["no store", "unknown type", "no rows", "problem swallowed by --runs"],
)
def test_ingest_refuses_wrong_usage(files: Path, arguments: list[str]) -> None:
    assert vcal("ingest", *arguments) == 2
    assert not (files / "out").exists()


@pytest.mark.usefixtures("files")
def test_ingest_errors_exit_1_and_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("ingest", "p.yaml", "--runs", "faulty.csv", "-o", "out") == 1
    said = capsys.readouterr().err
    assert "faulty.csv: column 'b': 1 value out of bounds [0, 1], first in row 2: 7" in said
    assert "--drop-invalid" in said
    assert vcal("ingest", "p.yaml", "--runs", "o.csv", "-o", "out") == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "column 'b' is missing" in said
    assert "is it a file of observations?" in said
    assert not Path("out").exists()
