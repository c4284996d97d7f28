"""`vcal inspect`: what it shows of a healthy, an empty and a damaged store."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import storage
from jobs.cli import main
from vcal_dist.problems import borehole


def vcal(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with 100 runs in chunks of 30, and 7 observations."""
    data = borehole.generate(100, 7, seed=1)
    store = storage.create(tmp_path / "s.zarr", borehole.problem(), chunk_rows=30)
    store.append_runs(data.x_runs, data.t, data.z)
    store.append_observations(data.x, data.y)
    return tmp_path / "s.zarr"


def damage_one_chunk(path: Path) -> None:
    """Flip a byte in the middle of the largest chunk of the runs' x."""
    chunks = [file for file in (path / "runs" / "x").rglob("*") if file.is_file() and file.name != "zarr.json"]
    chunk = max(chunks, key=lambda file: file.stat().st_size)
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 0xFF
    chunk.write_bytes(bytes(content))


def test_json_holds_everything(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("inspect", str(path), "--rows", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    data = borehole.generate(100, 7, seed=1)
    runs = found["tables"]["runs"]
    assert (runs["rows"], runs["chunk_rows"], runs["compression"]) == (100, 30, "zstd")
    assert runs["columns"] == {"x": list(borehole.CONTROLS), "t": list(borehole.PARAMETERS), "z": ["flow"]}
    assert runs["stored_bytes"] > 0
    assert runs["ranges_from_rows"] == 100
    assert runs["ranges"]["rw"]["minimum"] == pytest.approx(data.t[:, 0].min(), rel=1e-6)
    assert runs["ranges"]["flow"]["count"] == 100
    np.testing.assert_allclose(runs["first_rows"]["flow"], data.z[:3, 0], rtol=1e-6)
    assert found["tables"]["observations"]["rows"] == 7
    assert found["problem"]["calibration_inputs"][0]["name"] == "rw"
    assert found["health"] == {"verified": False, "document_checksum": True, "damage": []}


def test_tables_show_the_same(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("inspect", str(path), "--verify") == 0
    out = capsys.readouterr().out
    for text in ("borehole", "uniform(0, 1)", "radius of influence", "row 4", "every chunk was read"):
        assert text in out
    assert "row 5" not in out


def test_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage.create(tmp_path / "s.zarr", borehole.problem())
    assert vcal("inspect", str(tmp_path / "s.zarr")) == 0
    capsys.readouterr()
    assert vcal("inspect", str(tmp_path / "s.zarr"), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tables"]["runs"]["rows"] == 0
    assert found["tables"]["runs"]["ranges"]["rw"]["mean"] is None


@pytest.mark.parametrize("options", [["--verify"], []], ids=["verify", "quick"])
def test_a_damaged_store_still_shows_its_schema_and_exits_1(
    path: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    damage_one_chunk(path)
    assert vcal("inspect", str(path), *options) == 1
    out = capsys.readouterr().out
    assert "radius of influence" in out
    assert "damaged: 1" in out
    assert "runs/x" in out


@pytest.fixture
def long_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with 12 runs at 5 times, in which c never varies, and its problem."""
    monkeypatch.chdir(tmp_path)
    Path("p.yaml").write_text(
        "name: long\n"
        "control_inputs: [{name: time, bounds: [0, 10]}]\n"
        "calibration_inputs: [{name: k, bounds: [0, 1]}, {name: c, bounds: [0, 1]}]\n"
        "outputs: [{name: f}]\n"
    )
    rows = [f"{run},{time},{run / 11},0.98,{run * time}" for run in range(12) for time in range(5)]
    Path("r.csv").write_text("\n".join(["run,time,k,c,f", *rows]) + "\n")


@pytest.mark.usefixtures("long_form")
def test_runs_and_what_they_cannot_teach(capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("ingest", "p.yaml", "--runs", "r.csv", "-o", "s.zarr") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "runs: 60 rows of 12 runs from 1 file" in said
    assert "WARNING: nothing can be learned about 'c': it is 0.98 in all 60 rows of the runs; vary it" in said
    assert vcal("inspect", "s.zarr", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tables"]["runs"]["rows"], found["tables"]["runs"]["runs"]) == (60, 12)
    assert found["tables"]["runs"]["first_rows"]["run"] == [0, 0, 0, 0, 0]
    (finding,) = found["design"]
    assert (finding["kind"], finding["names"], finding["severity"]) == ("constant", ["c"], "bad")
    assert vcal("inspect", "s.zarr") == 0
    assert "design: 1 finding" in capsys.readouterr().out


@pytest.mark.usefixtures("long_form")
def test_a_glance_at_a_large_store_shows_the_count_that_it_keeps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert vcal("ingest", "p.yaml", "--runs", "r.csv", "-o", "s.zarr") == 0
    monkeypatch.setattr("jobs.commands.inspect.QUICK_ROWS", 50)
    capsys.readouterr()
    assert vcal("inspect", "s.zarr", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tables"]["runs"]["runs"], found["design"]) == (12, None)
    assert vcal("inspect", "s.zarr") == 0
    assert "design: not examined; --verify" in " ".join(capsys.readouterr().out.split())
    assert vcal("inspect", "s.zarr", "--verify", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["design"]) == 1


def test_a_changed_prior_is_no_store(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = path / "zarr.json"
    changed = re.sub(r'("prior": {\s*"family": "\w+",\s*"\w+": )[-0-9.e]+', r"\g<1>0.25", root.read_text(), count=1)
    assert changed != root.read_text()
    root.write_text(changed)
    assert vcal("inspect", str(path), "--verify") == 1
    assert "zarr.json does not match its checksum: problem, priors" in " ".join(capsys.readouterr().err.split())


def test_a_store_of_an_earlier_version_says_that_it_has_no_checksum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(Path(__file__).parents[1] / "golden" / "store-1" / "store", tmp_path / "old.zarr")
    for option in ([], ["--verify"]):
        assert vcal("inspect", str(tmp_path / "old.zarr"), *option) == 0
        assert "problem and priors carry no checksum" in " ".join(capsys.readouterr().out.split())
