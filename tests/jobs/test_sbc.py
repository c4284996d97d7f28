"""`vcal sbc` from a configuration to its page: in two processes, going on, what fails, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.cli import main
from jobs.config import load
from jobs.sbc import directory, outcome, running
from storage.store import open_store
from tests.vcal_dist.training_kit import make_store, settings
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, Diverged
from vcal_dist.replicates import Replicates

SIMULATOR = """
import numpy as np

def simulate(x, t):
    if {fails}:
        raise ArithmeticError("no solution")
    return 0.5 + np.sin(3 * x) * (1 + t[:, :1]) + t[:, 1:] * x**2

def transposed(x, t):
    return x.T
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small store with a configuration of few steps, and a simulator."""
    path = tmp_path_factory.mktemp("sbc")
    make_store(path / "small.zarr", runs=60, observations=12)
    plain = settings(path / "small.zarr", path / "run", fit={"evaluations": 0})
    (path / "small.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    (path / "pendulum.py").write_text(SIMULATOR.format(fails="False"), encoding="utf-8")
    return path


def sbc(folder: Path, *arguments: str | Path) -> int:
    """The command in this process; its exit status."""
    with pytest.raises(SystemExit) as end:
        main(["sbc", str(folder / "small.yaml"), *map(str, arguments)])
    return int(end.value.code or 0)


def records(output: Path) -> dict[int, dict[str, Any]]:
    """Replicates that are done, without the seconds that they took."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in (output / "replicates").glob("*.json")]
    return {record["number"]: {k: v for k, v in record.items() if k != "seconds"} for record in found}


@pytest.fixture(scope="module")
def done(folder: Path) -> Path:
    """The output of 5 replicates in two processes."""
    output = folder / "two processes"
    assert sbc(folder, "--replicates", "5", "--workers", "2", "-o", output) == 0
    return output


def test_replicates_in_two_processes(done: Path) -> None:
    found = records(done)
    assert sorted(found) == [0, 1, 2, 3, 4]
    assert (done / "replicates" / "0003.json").is_file()
    for record in found.values():
        assert set(record["truth"]) == set(record["pit"]) == set(record["rank"]) == {"t1", "t2"}
        for name, truth in record["truth"].items():
            low, high = record["intervals"]["0.9"][name]
            assert (low <= truth <= high) == (0.05 <= record["pit"][name] <= 0.95)
            assert record["rank"][name] / record["draws"] == pytest.approx(record["pit"][name], abs=0.07)
        assert set(record["nature"]) >= {"noise", "amplitude of the discrepancy"}
    assert len({record["truth"]["t1"] for record in found.values()}) == 5


def test_the_same_command_again_goes_on_in_this_process_and_says_the_same(
    folder: Path, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = records(done)
    stamps = {path: path.stat().st_mtime_ns for path in (done / "replicates").iterdir()}
    assert sbc(folder, "--replicates", "7", "--workers", "1", "-o", done, "--json") == 0
    said = capsys.readouterr()
    assert "7 of 7 replicates done" in said.err
    assert "training the emulator" not in said.err
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert sorted(records(done)) == list(range(7))
    found = json.loads(said.out)
    assert found == json.loads((done / "sbc.json").read_text(encoding="utf-8"))
    assert found["judged"] == list(range(7))
    first, second = found["parameters"]
    assert [first["name"], second["name"]] == ["t1", "t2"]
    assert first["verdict"] == "too few replicates"
    assert first["pit"][:5] == [before[number]["pit"]["t1"] for number in range(5)]
    assert sum(first["histogram"]["value"]) == 7
    assert len(first["z"]) == len(first["contraction"]) == 7
    assert first["coverage"]["at"] == [0.5, 0.8, 0.9, 0.95]
    page = (done / "sbc.html").read_text(encoding="utf-8")
    assert "<h1>small</h1>" in page
    assert "too few replicates" in page
    for name in ("ranks-1", "ecdf-2", "coverage-1", "contraction-2"):
        assert f'data-name="{name}"' in page


def test_what_is_there_is_shown_as_a_table(folder: Path, done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sbc(folder, "--replicates", "5", "-o", done) == 0
    said = capsys.readouterr()
    assert "all 5 replicates are there already" in said.err
    assert "Coverage of 5 truths" in said.out
    assert "by chance" in said.out
    assert "not follow the exact one in replicate 0, 1, 2, 3 and 4: fit.evaluations is 0" in said.out
    assert "t2: too few replicates. 90 % intervals hold" in said.out.replace("\N{NO-BREAK SPACE}", " ")
    assert f"Look at {done / 'sbc.html'}" in said.out


def test_a_replicate_that_was_made_up_is_refused_by_its_name(folder: Path, done: Path, tmp_path: Path) -> None:
    config = load(folder / "small.yaml")
    problem = open_store(config.store).problem
    asked = directory.ask(config, 0, None, (60, 12), tmp_path)
    shutil.copytree(done / "replicates", tmp_path / "replicates")
    sound = json.loads(asked.replicate(1).read_text())
    del sound["checksum"]  # as an earlier version wrote it, or anybody
    asked.replicate(1).write_text(json.dumps(sound))
    assert outcome.collect(asked, problem, 3, [1.0, 1.0]).numbers == [0, 1, 2]
    for made_up in (
        {},
        {"failed": "why"},
        sound | {"number": 2},
        {**sound, "failed": ["why"]},
        *({key: value for key, value in sound.items() if key != left} for left in ("truth", "unrefined", "seconds")),
        *(sound | {key: odd} for key in ("truth", "pit", "intervals", "seconds") for odd in (None, "x", [], {"a": {}})),
    ):
        asked.replicate(1).write_text(json.dumps(made_up))
        with pytest.raises(ConfigError, match=r"0001\.json is damaged \(.*\); delete it, and the same command"):
            outcome.collect(asked, problem, 3, [1.0, 1.0])


def test_the_store_may_grow_meanwhile(folder: Path, done: Path, tmp_path: Path) -> None:
    import shutil

    import storage
    from tests.vcal_dist.training_kit import append, generate

    grown = tmp_path / "grown.zarr"
    shutil.copytree(folder / "small.zarr", grown)
    output = tmp_path / "out"
    assert sbc(folder, f"store={grown}", "--replicates", "1", "--workers", "1", "-o", output) == 0
    append(storage.open(grown), generate(20, 4, seed=1))
    running.opened.cache_clear()
    assert sbc(folder, f"store={grown}", "--replicates", "2", "--workers", "1", "-o", output) == 0
    assert records(output)[1]["pit"] == pytest.approx(records(done)[1]["pit"])


def test_an_interrupted_command_goes_on_where_it_stopped(
    folder: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate, count = Replicates.calibrate, [0]

    def dying(self: Replicates, observations: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return calibrate(self, observations)

    monkeypatch.setattr(Replicates, "calibrate", dying)
    command = ("--replicates", "4", "--workers", "1", "-o", tmp_path / "out")
    assert sbc(folder, *command) == 75
    assert f"the same command goes on, in {tmp_path / 'out'}" in capsys.readouterr().err.replace("\n", "")
    assert sorted(records(tmp_path / "out")) == [0, 1]
    assert not (tmp_path / "out" / "sbc.json").exists()
    assert sbc(folder, *command) == 0
    assert count[0] == 3 + 2
    whole = records(done)
    for number, record in records(tmp_path / "out").items():  # one thread or two, here or in another process
        assert record["pit"] == pytest.approx(whole[number]["pit"])


def test_replicates_that_fail_are_counted_and_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate = Replicates.calibrate

    def diverging(self: Replicates, observations: Any) -> Any:
        if float(observations.y.nanmean()) > 0:
            raise Diverged("the loss of stage 'theta' is nan")
        return calibrate(self, observations)

    monkeypatch.setattr(Replicates, "calibrate", diverging)
    assert sbc(folder, "--replicates", "6", "--workers", "1", "-o", tmp_path / "out") == 0
    said = capsys.readouterr()
    failed = [number for number, record in records(tmp_path / "out").items() if "failed" in record]
    assert 0 < len(failed) < 6
    for number in failed:
        line = f"replicate {number} failed: Diverged: the loss of stage 'theta' is nan"
        assert line in said.err
        assert line in said.out
    assert f"{len(failed)} replicate" in said.out
    assert "of 6 failed, and what is said is without" in said.out
    result = json.loads((tmp_path / "out" / "sbc.json").read_text(encoding="utf-8"))
    assert [record["number"] for record in result["failed"]] == sorted(failed)
    assert set(result["failed"][0]["truth"]) == {"t1", "t2"}
    assert result["judged"] == [number for number in range(6) if number not in failed]
    assert "Replicates that failed" in (tmp_path / "out" / "sbc.html").read_text(encoding="utf-8")


def test_a_simulator_of_the_users_is_the_truth(
    folder: Path, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("--replicates", "2", "--workers", "1", "-o", tmp_path / "out")
    simulator = f"{folder / 'pendulum.py'}:simulate"
    assert sbc(folder, *command, "--simulator", simulator, "--json") == 0
    assert json.loads(capsys.readouterr().out)["simulator"] == simulator
    for number, record in records(tmp_path / "out").items():
        assert record["truth"] == records(done)[number]["truth"]
        assert record["pit"] != records(done)[number]["pit"]
    assert sbc(folder, *command) == 1
    assert "simulator" in capsys.readouterr().err
    edited = tmp_path / "pendulum.py"
    edited.write_text(SIMULATOR.format(fails="t[0, 0] > 0.9"), encoding="utf-8")
    assert sbc(folder, *command, "--simulator", f"{edited}:simulate") == 1
    assert "simulator.sha256" in capsys.readouterr().err


def test_an_error_of_the_simulator_fails_its_replicate_alone(
    folder: Path, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    highest = max(records(done)[number]["truth"]["t1"] for number in range(5))
    text = SIMULATOR.format(fails=f"t[0, 0] > {highest - 1e-6}")
    (tmp_path / "stiff.py").write_text(text, encoding="utf-8")
    command = ("--replicates", "5", "--workers", "1", "--simulator", tmp_path / "stiff.py:simulate")
    assert sbc(folder, *command, "-o", tmp_path / "out") == 0
    assert "failed: ArithmeticError: no solution" in capsys.readouterr().out
    assert sum("failed" in record for record in records(tmp_path / "out").values()) == 1


def test_nothing_but_failures_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverging(self: Replicates, observations: Any) -> Any:
        raise Diverged("it leads nowhere")

    monkeypatch.setattr(Replicates, "calibrate", diverging)
    assert sbc(folder, "--replicates", "2", "--workers", "1", "-o", tmp_path / "out") == 1
    assert "all 2 replicates failed, the first with: Diverged: it leads nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model.discrepancy=general"], "model.discrepancy is general"),
        (["model.likelihood_y.kind=student_t"], "model.likelihood_y.kind is student_t"),
        (["--simulator", "pendulum"], "write it as FILE.py:function"),
        (["--simulator", "nowhere.py:simulate"], "nowhere.py, which is no Python file that is there"),
        (["--simulator", "{folder}/pendulum.py:simulat"], "no function 'simulat'; did you mean 'simulate'?"),
        (["--simulator", "{folder}/pendulum.py:transposed"], "shape (1, 2)"),
        (["--simulator", "{folder}/broken.py:simulate"], "cannot be imported: NameError"),
        (["output=s3://bucket/run"], "give a directory of this machine with --output"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "broken.py").write_text("simulate = undefined\n", encoding="utf-8")
    assert sbc(folder, *(text.format(folder=folder) for text in arguments), "--replicates", "2") == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("error: ")
    assert said in " ".join(found.err.split())
    assert not (folder / "run-sbc").exists()


def test_an_output_of_other_settings_is_refused(
    folder: Path, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sbc(folder, "fit.theta.steps=9", "--replicates", "5", "-o", done) == 1
    said = capsys.readouterr().err
    assert "was begun with another configuration" in said
    assert "config.fit.theta.steps: 5 before, 9 now" in said
    assert sbc(folder, "--seed", "1", "--replicates", "5", "-o", done) == 1
    assert "seed: 0 before, 1 now" in capsys.readouterr().err
    (tmp_path / "mine.txt").touch()
    assert sbc(folder, "--replicates", "5", "-o", tmp_path) == 1
    assert "holds something else ('mine.txt')" in capsys.readouterr().err
    assert sbc(folder, "--replicates", "5", "-o", tmp_path / "mine.txt") == 1
    assert "which is a file" in capsys.readouterr().err


def test_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sbc(folder) == 2
    assert sbc(folder, "--replicates", "2", "--ray", "auto", "--workers", "2") == 2
    assert "leave it out with --ray" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_changed_counts_of_rows_are_refused(tmp_path: Path) -> None:
    config = Config(store="s.zarr", output=str(tmp_path / "run"))
    asked = directory.ask(config, 1, None, (300, 40), tmp_path / "sbc")
    directory.begin(asked)
    path = tmp_path / "sbc" / directory.SETTINGS
    assert directory.ask(config, 1, None, (400, 40), tmp_path / "sbc").rows == (300, 40)
    text = path.read_text()
    path.write_text(text.replace("runs: 300", "runs: 30"))
    with pytest.raises(ConfigError, match="does not match its checksum"):
        directory.ask(config, 1, None, (400, 40), tmp_path / "sbc")
    path.write_text("".join(line for line in text.splitlines(keepends=True) if "checksum" not in line))
    assert directory.ask(config, 1, None, (400, 40), tmp_path / "sbc").rows == (300, 40)  # of an earlier version
