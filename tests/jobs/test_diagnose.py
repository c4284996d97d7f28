"""`vcal diagnose`: the checks of the report in the terminal and as JSON, of runs of every kind and place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from jobs.cli import main
from tests.vcal_dist.report.runs_kit import trained
from vcal_dist.mixed import Averaged
from vcal_dist.posterior import Posterior
from vcal_dist.report import gather
from vcal_dist.report.diagnostics import diagnose as verdict_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("diagnosed"), parameters=1, observations=30, runs=80)


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bounds that leave the truth out."""
    return trained(tmp_path_factory.mktemp("wrong"), parameters=1, observations=30, runs=80, truth=2.0)


def diagnose(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(["diagnose", *map(str, arguments)])
    return int(end.value.code or 0)


def described(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    capsys.readouterr()
    assert diagnose(*arguments, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_verdict_comes_first_and_the_worst_check_next(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diagnose(wrong) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0] == f"Do not trust this calibration yet: {wrong}"
    heading = next(i for i, line in enumerate(lines) if line.split() == ["check", "status", "figure"])
    rows = [line for line in lines[heading + 1 :] if not line.startswith("  ")]
    statuses = [word for line in rows for word in line.split() if word in ("bad", "care", "good")]
    assert statuses == sorted(statuses, key=["bad", "care", "good"].index)
    assert "t0 lies with probability" in out
    assert "→ The true value may lie beyond." in out


def test_programs_get_every_check_with_its_figure_and_threshold(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = described(capsys, run)
    verdict = verdict_of(gather(run, Posterior.load(run)))
    assert (found["run"], found["verdict"]) == (str(run), verdict.status)
    assert [check["name"] for check in found["checks"]] == [check.name for check in verdict.checks]
    keys = {"name", "status", "value", "figure", "figures", "threshold", "sentence", "suggestion"}
    for check in found["checks"]:
        assert set(check) == keys
        assert check["threshold"]
        assert check["figure"] is None or isinstance(check["figure"], float)
        assert check["status"] == "good" or check["suggestion"]
    learned = next(check for check in found["checks"] if check["name"] == "What was learned")
    assert 0 < learned["figures"]["t0"] < 1


def test_scripts_can_stop_at_a_run_that_is_not_to_be_trusted(
    run: Path, wrong: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert described(capsys, wrong)["verdict"] == "bad"
    assert diagnose(wrong, "--strict") == 3
    assert diagnose(wrong, "--strict", "--json") == 3
    assert described(capsys, run)["verdict"] != "bad"
    assert diagnose(run, "--strict") == 0


def test_an_average_and_a_run_in_an_object_store_are_diagnosed(
    run: Path, tmp_path: Path, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    posterior = Posterior.load(run)
    Averaged([posterior, posterior], [0.0, -1.0]).save(tmp_path / "mixture")
    names = [check["name"] for check in described(capsys, tmp_path / "mixture")["checks"]]
    assert "Average" in names
    fsspec.filesystem("s3", skip_instance_cache=True).put(str(run), f"{s3_url}/diagnosed", recursive=True)
    assert described(capsys, f"{s3_url}/diagnosed")["run"] == f"{s3_url}/diagnosed"


def test_what_is_no_finished_run_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = tmp_path / "sweep"
    (sweep / "best").mkdir(parents=True)
    (sweep / "sweep.yaml").write_text("sweep: {}\n")
    for path, words in (
        (tmp_path / "nothing", "there is no run at"),
        (run.parent / "data.zarr", "is a store of data, not a run"),
        (sweep, "diagnose its best run with: vcal diagnose"),
    ):
        assert diagnose(path) == 1
        assert words in " ".join(capsys.readouterr().err.split())
