"""`vcal inspect` of a run directory: finished, stopped, just begun and damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

import storage
from jobs import inspect_run, run_state
from jobs.cli import main
from jobs.commands import train as train_command
from vcal_dist.checkpoints import BEST, LAST, Checkpoints
from vcal_dist.config import Config
from vcal_dist.errors import Preempted
from vcal_dist.metrics import METRICS
from vcal_dist.posterior import DRAWS_FILE, FILE, Posterior
from vcal_dist.problems import borehole
from vcal_dist.report import row_checks
from vcal_dist.run_directory import CHECKPOINTS, CONFIG, LOCK, ROWS, VERSIONS, held
from vcal_dist.training import train

SMALL = {"features": {"features": 16}}
STEPS = {"emulator": {"steps": 30}, "theta": {"steps": 10}, "joint": {"steps": 5}, "evaluations": 0}


class StopAt(Callback):
    """SIGTERM, as far as training can tell, before a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if module.schedule.steps + 1 == self.step:
            next(c for c in trainer.callbacks if isinstance(c, Checkpoints)).stopping = True


def config(where: Path, run: Path, **fit: Any) -> Config:
    model = {"emulator": "features", "eta": SMALL, "delta": SMALL}
    settings = {"model": model, "fit": STEPS | fit, "devices": {"accelerator": "cpu"}}
    return Config.parse({"store": str(where / "data.zarr"), "output": str(run), "record_every": 8, **settings})


def stop(where: Path, run: Path, step: int, **fit: Any) -> Path:
    """A run that was stopped after a step."""
    with pytest.raises(Preempted):
        train(config(where, run, **fit), progress=False, callbacks=[StopAt(step)])
    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, the run `done`, and the run `stopped` in step 12 of the emulator's 30."""
    where, before = tmp_path_factory.mktemp("inspect"), torch.get_num_threads()
    torch.set_num_threads(1)
    borehole.make_store(where / "data.zarr", 200, 30, seed=1)
    train(config(where, where / "done"), progress=False)
    stop(where, where / "stopped", 12)
    torch.set_num_threads(before)
    return where


@pytest.fixture
def copy(place: Path, tmp_path: Path) -> Path:
    """Both runs, to be damaged."""
    for name in ("done", "stopped"):
        shutil.copytree(place / name, tmp_path / name)
    return tmp_path


def vcal(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def inspected(path: Path, capsys: pytest.CaptureFixture[str], status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert vcal("inspect", str(path), "--json") == status
    return dict(json.loads(capsys.readouterr().out))


def shown(path: Path, capsys: pytest.CaptureFixture[str], status: int = 0) -> str:
    capsys.readouterr()
    assert vcal("inspect", str(path)) == status
    return capsys.readouterr().out


def test_the_names_of_the_files_are_those_of_training() -> None:
    assert (run_state.CONFIG, run_state.ROWS, run_state.VERSIONS) == (CONFIG, ROWS, VERSIONS)
    assert run_state.POSTERIOR == FILE
    assert Path(run_state.CHECKPOINT) == Path(CHECKPOINTS) / LAST


# --- a finished run ---------------------------------------------------------------------------------------------------


def test_json_of_a_finished_run_holds_what_the_posterior_says(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, posterior = inspected(place / "done", capsys), Posterior.load(place / "done")
    assert (found["kind"], found["damage"], found["state"]["done"]) == ("run", [], True)
    assert found["problem"]["name"] == "borehole"
    assert found["priors"] == dict.fromkeys(("rw", "r", "Tl"), "uniform(0, 1)")
    of_run = found["posterior"]
    assert of_run["parameters"] == [vars(row) for row in posterior.summary()]
    np.testing.assert_allclose(of_run["correlation"], posterior.correlation())
    assert of_run["noise"] == posterior.noise
    assert of_run["assessment"] == json.loads(json.dumps(posterior.record["assessment"]))
    assert found["rows"] == {"runs": 200, "observations": 30}
    assert found["versions"]["torch"] == torch.__version__
    assert found["config"]["fit"]["emulator"]["steps"] == 30
    assert found["files"][FILE] == (place / "done" / FILE).stat().st_size
    assert {CONFIG, VERSIONS, METRICS, DRAWS_FILE, "tensorboard"} <= set(found["files"])


def test_stages_are_those_of_the_metrics(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = inspected(place / "done", capsys)["stages"]
    by_name = {stage["phase"]: stage for stage in stages}
    assert [stage["phase"] for stage in stages] == [
        "emulator",
        "compression",
        "theta",
        "closing of theta",
        "joint",
        "closing",
    ]
    assert [by_name[name]["steps"] for name in ("emulator", "compression", "theta", "joint")] == [30, 1, 10, 5]
    lines = [line.split(",") for line in (place / "done" / METRICS).read_text().splitlines()]
    column = {name: i for i, name in enumerate(lines[0])}
    ends = {line[column["phase"]]: line for line in lines[1:]}  # the last line of each
    assert by_name["joint"]["loss"] == float(ends["joint"][column["loss"]])
    assert by_name["compression"]["loss"] is None
    between = float(ends["theta"][column["seconds"]]) - float(ends["compression"][column["seconds"]])
    assert by_name["theta"]["seconds"] == pytest.approx(between)
    assert sum(stage["seconds"] for stage in stages) == pytest.approx(float(lines[-1][column["seconds"]]))
    assert sum(stage["steps"] for stage in stages) == int(lines[-1][column["step"]])


def test_tables_of_a_finished_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(place / "done", capsys)
    row = Posterior.load(place / "done").summary()[0]
    for text in (
        "done: 20",
        "radius of influence",
        "Posterior of θ",
        f"{row.mean:.4g} ± {row.sd:.2g}",
        "Noise of flow",
    ):
        assert text in out
    for text in ("Correlations of θ", "Rows that training did not see", "closing of theta", "for ArviZ", "torch 2"):
        assert text in out
    assert "damaged" not in out
    assert "go on with" not in out


@pytest.mark.parametrize(
    ("unreliable", "figures", "note"),
    [
        (0, True, None),
        (
            3,
            True,
            "observations: for 3 of 30 rows leaving out is not reliable (k̂ above 0.7); take its figures with care",
        ),
        (15, True, "for 15 of 30 rows"),
        (16, False, "observations: for 16 of 30 rows leaving out is not reliable (k̂ above 0.7)\n"),
    ],
)
def test_figures_of_rows_that_cannot_be_left_out_are_not_shown(
    place: Path, capsys: pytest.CaptureFixture[str], unreliable: int, figures: bool, note: str | None
) -> None:
    posterior = Posterior.load(place / "done")
    found = {"rows": 30, "log_predictive_density": -4.447e7, "rmse": [6.61e5], "coverage": 0.42}
    found |= {"method": "leave one out", "unreliable": unreliable}
    posterior.record["assessment"] = {"observations": found}
    train_command.show(posterior, "run")
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("observations, left out one by one"))
    cells = ["6.61e+05", "-4.447e+07", "42", "%"] if figures else ["–"] * 3
    assert line.split()[6:] == ["30", *cells]
    assert note in out if note else "reliable" not in out
    assert train_command.described(posterior, "run")["assessment"] == {"observations": found}
    assert train_command.MOST_UNRELIABLE == row_checks.MOST_UNRELIABLE


def test_noise_of_several_outputs_stands_together(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Posterior, "noise", {"flow": 0.5, "head": 0.25})
    train_command.show(Posterior.load(place / "done"), "run")
    assert "\n\nNoise of flow: 0.5\nNoise of head: 0.25\nThe result" in capsys.readouterr().out


def test_of_many_parameters_the_strongest_correlations_are_shown() -> None:
    count = inspect_run.MOST_PARAMETERS + 1
    matrix = np.eye(count)
    matrix[7, 3] = matrix[3, 7] = -0.9
    matrix[1, 0] = matrix[0, 1] = 0.5
    found = {"parameters": [{"name": f"p{j}"} for j in range(count)], "correlation": matrix.tolist()}
    (table,) = inspect_run._correlations({"posterior": found})
    assert table.row_count == inspect_run.STRONGEST
    cells = [list(column.cells)[:2] for column in table.columns]
    assert cells == [["p3", "p0"], ["p7", "p1"], ["-0.90", "0.50"]]
    assert inspect_run._correlations({"posterior": found | {"parameters": [{"name": "p0"}]}}) == []


@pytest.mark.parametrize("options", [["--rows", "5"], ["--verify"], ["--rows", "0", "--verify", "--json"]])
def test_what_belongs_to_stores_is_refused(place: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("inspect", str(place / "done"), *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    said = " ".join(captured.err.replace("│", " ").split())
    assert " and ".join(option for option in options if option in ("--rows", "--verify")) in said
    assert "is a run" in said


def test_a_store_is_still_a_store(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspected(place / "data.zarr", capsys)["kind"] == "store"
    assert not run_state.is_run(place / "data.zarr")
    assert not run_state.is_run(place)
    assert not run_state.is_run("s3://bucket/run")


# --- a run that is not finished ---------------------------------------------------------------------------------------


def test_a_stopped_run_says_where_and_how_to_go_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = place / "stopped"
    found = inspected(run, capsys)
    state = found["state"]
    assert (state["done"], found["posterior"], found["damage"]) == (False, None, [])
    checkpoint = state["checkpoint"]
    keys = ("step", "phase", "phase_step", "phase_steps")
    assert [checkpoint[key] for key in keys] == [12, "emulator", 12, 30]
    written = (run / CHECKPOINTS / LAST).stat().st_mtime
    assert abs(np.datetime64(checkpoint["written"][:19]).astype(float) - int(written)) % 900 == 0  # of any time zone
    assert [stage["phase"] for stage in found["stages"]] == ["emulator"]
    assert found["problem"]["name"] == "borehole"  # from the store
    out = shown(run, capsys)
    assert "not finished: in phase 'emulator' at step 12 of 30, step 12 in all (last checkpoint: 20" in out
    assert f"go on with: vcal train {run / CONFIG}\n" in out
    assert "radius of influence" in out
    assert "Posterior of θ" not in out


def test_a_run_that_is_being_trained_is_to_be_waited_for(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy / "stopped"
    with held(run):
        state = inspected(run, capsys)["state"]
        assert (state["done"], state["training"], state["go_on"]) == (False, True, None)
        out = shown(run, capsys)
        assert "being trained by another process, in phase 'emulator' at step 12 of 30" in out
        assert "go on with" not in out
        for command in (["report", str(run)], ["predict", str(run), "--at", "new.csv", "-o", str(copy / "out.csv")]):
            assert vcal(*command) == 1
            said = capsys.readouterr().err
            assert f"the run in {run} is being trained by another process, in phase 'emulator' at step 12" in said
            assert "; wait for it" in said
            assert "go on with" not in said
        assert vcal("train", str(run / CONFIG), f"output={run}") == 1
        said = capsys.readouterr().err
        assert f"error: another process is training in {run}" in said
        assert "going on" not in said
        assert "training on" not in said
    state = inspected(run, capsys)["state"]
    assert (state["training"], state["go_on"] is not None) == (False, True)


def test_every_file_of_a_run_has_a_meaning(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(inspected(place / "done", capsys)["files"]) <= set(inspect_run.MEANING)
    assert LOCK in inspected(place / "done", capsys)["files"]


def test_a_path_with_nothing_is_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert vcal("inspect", str(tmp_path / "nosuch")) == 1
    said = capsys.readouterr().err
    assert f"there is neither a store nor a run at {tmp_path / 'nosuch'}" in said
    assert "'vcal ingest'" in said
    assert "'vcal train'" in said


def test_the_command_that_is_shown_goes_on(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = inspected(copy / "stopped", capsys)["state"]["go_on"]
    assert command == f"vcal train {copy / 'stopped' / CONFIG} output={copy / 'stopped'}"  # a copy lies elsewhere
    assert vcal(*command.split()[1:]) == 0
    assert "going on after step 12" in capsys.readouterr().err
    assert inspected(copy / "stopped", capsys)["state"]["done"]


@pytest.mark.parametrize(
    ("step", "fit", "expected"),
    [
        (3, {}, "in phase 'emulator' at step 3 of 30, step 3 in all"),  # before the first record
        (30, {}, "in phase 'compression', pass 1, step 30 in all"),  # at the end of a leg: the next phase has begun
        (31, {}, "in phase 'theta' at step 0 of 10, step 31 in all"),
        (40, {}, "in phase 'theta' at step 9 of 10, step 40 in all"),
        (42, {}, "in phase 'closing of theta', pass 2, step 42 in all"),
        (20, {"emulator": {"epochs": 25}}, "in phase 'emulator' at step 20 of 25, step 20 in all"),
    ],
)
def test_where_a_run_was_stopped(place: Path, tmp_path: Path, step: int, fit: Any, expected: str) -> None:
    run = stop(place, tmp_path / "run", step, **fit)
    assert str(run_state.progress(run)) == expected


def test_a_run_without_a_checkpoint(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copy / "stopped"
    shutil.rmtree(run / CHECKPOINTS)
    assert inspected(run, capsys)["state"]["checkpoint"]["step"] is None
    (run / METRICS).unlink()
    assert "not finished: no checkpoint yet\n" in shown(run, capsys)


# --- damage -----------------------------------------------------------------------------------------------------------


def damage(path: Path) -> None:
    """Flips a byte in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def test_a_damaged_posterior_is_named_and_the_rest_is_shown(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(copy / "done" / FILE)
    found = inspected(copy / "done", capsys, status=1)
    assert found["state"]["done"]
    assert found["posterior"] is None
    (line,) = found["damage"]
    assert FILE in line
    assert len(found["stages"]) == 6
    out = shown(copy / "done", capsys, status=1)
    assert "damaged: 1" in out
    assert "radius of influence" in out
    assert "closing of theta" in out


@pytest.mark.parametrize(
    ("run", "name", "content"),
    [
        ("done", CONFIG, "store: [1"),
        ("done", CONFIG, "colour: red"),
        ("done", CONFIG, "just a text"),
        ("done", ROWS, "{"),
        ("done", VERSIONS, "{"),
        ("done", VERSIONS, "[]"),
        ("stopped", f"{CHECKPOINTS}/{LAST}", "cut off"),
    ],
)
def test_every_damaged_file_is_named(
    copy: Path, run: str, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / run / name).write_text(content)
    found = inspected(copy / run, capsys, status=1)
    assert len(found["damage"]) == 1
    assert name in found["damage"][0]
    assert (found["posterior"] is not None) == (run == "done")
    assert "damaged: 1" in shown(copy / run, capsys, status=1)


def test_missing_draws_are_named_with_a_cure_that_works(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "done" / DRAWS_FILE).unlink()
    (line,) = inspected(copy / "done", capsys, status=1)["damage"]
    cure = re.search(r"Posterior\.load\('(.*)'\)\.save\('(.*)'\)", line)
    assert cure is not None
    Posterior.load(cure[1]).save(cure[2])
    assert inspected(copy / "done", capsys)["damage"] == []


def test_broken_metrics_show_what_is_left(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy / "done" / METRICS
    before = inspected(copy / "done", capsys)["stages"]
    path.write_text(path.read_text() + "x,closing\n999,clo")
    assert inspected(copy / "done", capsys)["stages"] == before
    path.write_bytes(b"\xff\xfe\x00")
    assert inspected(copy / "done", capsys)["stages"] == []


def test_an_unfinished_run_without_its_store_still_shows_its_state(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy / "stopped"
    text = (run / CONFIG).read_text()
    (run / CONFIG).write_text(re.sub(r"^store: .*$", "store: /nowhere.zarr", text, flags=re.MULTILINE))
    found = inspected(run, capsys)
    assert found["problem"] is None
    assert found["state"]["checkpoint"]["step"] == 12
    assert "a run  " in shown(run, capsys)


def test_a_posterior_alone_is_a_run_too(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (FILE, DRAWS_FILE):
        shutil.copy(place / "done" / name, tmp_path / name)
    found = inspected(tmp_path, capsys, status=1)
    assert [re.search(r"\w+\.(yaml|json)", line)[0] for line in found["damage"]] == [CONFIG, VERSIONS]  # type: ignore[index]
    assert found["posterior"]["parameters"][0]["name"] == "rw"


def test_nothing_is_changed_by_a_look(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def state() -> dict[str, tuple[int, float]]:
        files = [Path(folder) / name for folder, _, names in os.walk(place) for name in names]
        return {str(file): (file.stat().st_size, file.stat().st_mtime) for file in files}

    before = state()
    inspected(place / "done", capsys)
    inspected(place / "stopped", capsys)
    assert state() == before
    assert (place / "stopped" / CHECKPOINTS / BEST).exists()
    assert storage.open(place / "data.zarr").runs.rows == 200
