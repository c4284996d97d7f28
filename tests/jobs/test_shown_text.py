"""What commands print and keep: no escape sequence of a file reaches the terminal, and no secret of a URL stays."""

from __future__ import annotations

import csv
import json
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.padding import Padding
from rich.text import Text

import storage
from jobs.cli import main
from jobs.console import print_json, stderr, stdout, table
from jobs.prediction_files import write
from jobs.predictions import Field
from storage.errors import IngestError, StoreError
from tests.storage.conftest import PROBLEM
from tests.storage.test_regular import zarr_v2
from tests.vcal_dist.training_kit import problem
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError

BAD = "m\x1b]0;owned\x07\x1b[2J\x9b1mK\u202ex\ud800"
SIGNED = "https://me:hunter2@lab.example/r.csv?X-Amz-Signature=0123abcd"
SECRETS = ("hunter2", "0123abcd")


def plain(text: str) -> bool:
    return not any(character in text for character in "\x1b\x07\x9b\u202e\ud800")


@pytest.mark.parametrize("console", [stdout, stderr])
def test_a_console_sends_nothing_that_is_not_its_own(console: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(BAD, BAD, right=(BAD,))
    rows.add_row(BAD)
    for shown in (BAD, rows, Text(BAD, style="bold"), Padding(Text("x").append(BAD, "red"), (0, 2))):
        console().print(shown, soft_wrap=True)
        out, err = capsys.readouterr()
        assert plain(out + err)
        assert r"\x1b]0;owned" in out + err
    console().print(f"error: {SIGNED}", soft_wrap=True)
    out, err = capsys.readouterr()
    assert not any(secret in out + err for secret in SECRETS)


def test_json_escapes_what_a_terminal_would_obey_and_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"unit": BAD.removesuffix("\ud800"), "at": SIGNED})
    out = capsys.readouterr().out
    assert plain(out)
    found = json.loads(out)
    assert found["unit"] == BAD.removesuffix("\ud800")
    assert not any(secret in out for secret in SECRETS)


def test_warnings_of_the_packages_are_shown_without_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    sendable = BAD.removesuffix("\ud800")  # pytest itself keeps what is logged, and cannot send half a character on
    logging.getLogger("storage").warning("waiting for %s %s", sendable, SIGNED)
    logging.getLogger("vcal_dist").warning("cannot write %s", SIGNED)
    err = capsys.readouterr().err
    assert err.count("lab.example") == 2
    assert plain(err)
    assert not any(secret in err for secret in SECRETS)


def test_what_libraries_say_of_files_is_shown_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zarr names in a warning what it finds in a folder and does not know."""
    zarr_v2(tmp_path / "r.zarr")
    bad = BAD.removesuffix("\ud800")
    (tmp_path / "r.zarr" / bad).mkdir()
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(PROBLEM))
    with warnings.catch_warnings(), monkeypatch.context() as changed:
        warnings.simplefilter("default")
        changed.setattr(logging, "lastResort", None)
        with pytest.raises(SystemExit):
            main(
                ["ingest", str(tmp_path / "p.yaml"), "--runs", str(tmp_path / "r.zarr"), "-o", str(tmp_path / "s.zarr")]
            )
        assert logging.lastResort is not None
        logging.lastResort.handle(logging.makeLogRecord({"msg": f"{bad} {SIGNED}"}))
    err = capsys.readouterr().err
    assert err.count(r"\x1b]0;owned") >= 2
    assert plain(err)
    assert "hunter2" not in err


def test_provenance_keeps_where_files_came_from_without_secrets(tmp_path: Path) -> None:
    import fsspec

    url = "memory://me:hunter2@lab.example/runs.csv"
    with fsspec.open(url, "w") as file:
        file.write("x,t1,t2,f0\n0.1,0.2,0.1,3\n0.4,0.5,0.2,6\n")
    (tmp_path / "field.csv").write_text("x,f0\n0.3,4\n")
    found = storage.ingest(problem(), runs=[url], observations=[tmp_path / "field.csv"], store=tmp_path / "s.zarr")
    assert "hunter2" not in str(found)
    kept = (tmp_path / "s.zarr" / "zarr.json").read_text()
    assert "hunter2" not in kept
    assert "lab.example/runs.csv" in kept


def test_errors_say_no_secrets_from_python_either(tmp_path: Path) -> None:
    for call in (
        lambda: storage.open("ftp://me:hunter2@lab.example/s.zarr"),
        lambda: storage.ingest(problem(), runs=["nothing://me:hunter2@lab.example/r.csv"], store=tmp_path / "s"),
    ):
        with pytest.raises((StoreError, IngestError, storage.ProblemError)) as caught:
            call()
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("key", ["store", "output", "data.scheduler"])
def test_a_configuration_holds_no_secret(key: str) -> None:
    plain: dict[str, Any] = {"store": "s.zarr"}
    section = plain
    *parents, last = key.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[last] = SIGNED
    with pytest.raises(ConfigError, match=r"would be kept in every file of the run.*environment") as caught:
        Config.parse(plain)
    assert not any(secret in str(caught.value) for secret in SECRETS)


@pytest.mark.parametrize(
    "arguments",
    [
        [SIGNED],
        ["jobs", SIGNED],
        ["train", "--on", SIGNED],
        ["train", "--retries", SIGNED],
        ["train", "c.yaml", "--workers", SIGNED],
        ["train", f"--{SIGNED}"],
        ["inspect", f"--nope={SIGNED}", SIGNED, SIGNED],
        ["reproduce", SIGNED],
        ["train", "c.yaml", f"stor={SIGNED}"],
        ["train", "c.yaml", f"fit.{SIGNED}"],
        ["train", "c.yaml", f"model.eta: [{SIGNED}"],
    ],
    ids=lambda arguments: " ".join(arguments).replace(SIGNED, "URL"),
)
def test_usage_errors_do_not_repeat_secrets(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("store: s.zarr\n")
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code in (1, 2)
    said = "".join(capsys.readouterr().err.split()).replace("│", "")  # it may stand in a box, folded
    assert said
    assert not any(secret in said for secret in SECRETS)


def test_usage_errors_do_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([BAD[:-1]], ["train", "--on", BAD[:-1]], ["train", f"--{BAD[:-1]}"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert plain(capsys.readouterr().err)


def test_no_name_is_a_formula_in_a_spreadsheet(tmp_path: Path) -> None:
    names = ['=WEBSERVICE("http:"&CHAR(47))', "@SUM(A1)", "-x", "flow = 1"]
    fields = [Field(name, "", "") for name in names]
    write(tmp_path / "p.csv", fields, [[np.ones(1)] * 4], rows=1, block_rows=1, about={})
    with (tmp_path / "p.csv").open(encoding="utf-8", newline="") as file:
        assert next(csv.reader(file)) == [*(f"'{name}" for name in names[:3]), names[3]]
