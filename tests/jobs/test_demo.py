"""`vcal demo`: calibrates the borehole, replaces its own files, and leaves everything else alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import storage
from jobs.cli import main
from jobs.commands.demo import MARK, RUN, STORE
from vcal_dist.posterior import Posterior
from vcal_dist.problems import borehole

FEW = ["fit.emulator.steps=20", "fit.theta.steps=5", "fit.joint.steps=2", "fit.evaluations=0"]
SMALL = [
    "model.emulator=features",
    "model.eta.features.features=10",
    "model.delta.features.features=4",
    "fit.screening=64",
]


def demo(output: Path, runs: int = 50) -> int:
    with pytest.raises(SystemExit) as end:
        main(["demo", *FEW, *SMALL, "--runs", str(runs), "--observations", "5", "--output", str(output)])
    return int(end.value.code or 0)


def test_demo_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "runs" / "demo"
    for runs in (50, 60):
        assert demo(output, runs) == 0
        store = storage.open(output / STORE)
        assert (store.runs.rows, store.observations.rows) == (runs, 5)
        assert store.problem == borehole.problem()
    shown = capsys.readouterr().out
    assert "See it in pictures" not in shown  # the demo writes the report itself
    assert str(output / RUN) in shown.replace("\n", "")
    for name, truth in zip(borehole.PARAMETERS, borehole.THETA, strict=True):
        (line,) = (line for line in shown.splitlines()[:6] if line.startswith(f"{name} "))
        assert f"{truth:.4g}" in line
    assert Posterior.load(output / RUN).problem == borehole.problem()


def test_an_interrupted_demo_is_replaced(tmp_path: Path) -> None:
    assert demo(tmp_path) == 0
    (tmp_path / STORE / "zarr.json").unlink()
    assert demo(tmp_path) == 0
    assert storage.open(tmp_path / STORE).runs.rows == 50


@pytest.mark.parametrize("mark", [None, "not json", '{"made_by": "somebody"}', "[]"])
def test_somebody_elses_store_is_left_alone(
    tmp_path: Path, mark: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / STORE / "precious"
    precious.parent.mkdir()
    precious.write_text("data")
    if mark is not None:
        (tmp_path / MARK).write_text(mark)
    assert demo(tmp_path) == 1
    assert "not made by `vcal demo`" in capsys.readouterr().err
    assert precious.read_text() == "data"


def test_a_link_is_left_alone(tmp_path: Path) -> None:
    assert demo(tmp_path / "demo") == 0
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "demo" / STORE).rename(elsewhere)
    (tmp_path / "demo" / STORE).symlink_to(elsewhere)
    assert demo(tmp_path / "demo") == 1
    assert storage.open(elsewhere).runs.rows == 50


def test_other_files_beside_the_store_stay(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert demo(tmp_path) == 0
    assert demo(tmp_path) == 0
    assert (tmp_path / "notes.txt").read_text() == "mine"
