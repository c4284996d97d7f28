"""`vcal sweep` on a real Ray cluster of two CPUs: stopping early, going on after a kill, refusing what cannot be."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ray_kit import BIN, RayHead
from tests.vcal_dist.training_kit import make_store, settings, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TRIALS = 8
DIVERGING = 1e25
SPACE = {
    "fit.emulator.rate": {"choice": [0.003, 0.01, 0.03, DIVERGING]},
    "model.eta.lengthscale": {"loguniform": [0.05, 2.0]},
    "model.eta.features.features": {"choice": [6, 12, 24]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep")
    make_store(path / "small.zarr")
    return path


def start(head: RayHead, folder: Path, name: str, *options: str, **sweep: Any) -> subprocess.Popen[str]:
    """`vcal sweep` with its output in files beside the sweep's directory."""
    plain = settings(folder / "small.zarr", folder / name, fit={"starts": 1, "evaluations": 0})
    plain["sweep"] = {"trials": TRIALS, "space": SPACE, "rungs": 2, **sweep}
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(plain), encoding="utf-8")
    command = [str(BIN / "vcal"), "sweep", str(config), "--json", "--address", head.address, *options]
    with (folder / f"{name}.json").open("w") as out, (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, env=head.env, stdout=out, stderr=log, text=True, cwd=folder)


def said(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text(encoding="utf-8")


def finish(head: RayHead, folder: Path, name: str, *options: str, **sweep: Any) -> Any:
    """The outcome of a sweep that succeeds."""
    assert start(head, folder, name, *options, **sweep).wait(250) == 0, said(folder, name)
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def ended(out: Path) -> dict[int, str]:
    """State of the trials that have ended, by number."""
    found = {int(path.parent.name): json.loads(path.read_text()) for path in out.glob("trials/*/result.json")}
    return {number: result["state"] for number, result in found.items() if result["state"] != "running"}


def stamps(out: Path, numbers: Any) -> dict[str, int]:
    """When posteriors of these trials were written."""
    files = [file for number in numbers for file in out.glob(f"trials/{number}/rung-*/posterior.safetensors")]
    return {str(file): file.stat().st_mtime_ns for file in files}


@dataclass(frozen=True)
class Killed:
    """A sweep that was killed in its middle, and went on."""

    out: Path
    before: dict[int, str]  # trials that had ended when it was killed
    written: dict[str, int]  # their posteriors
    outcome: Any
    log: str  # of the second command


@pytest.fixture(scope="module")
def killed(ray_head: RayHead, folder: Path) -> Killed:
    out = folder / "killed"
    process = start(ray_head, folder, "killed")
    try:
        wait_for(lambda: len(ended(out)) >= 3 or process.poll() is not None, 200)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, said(folder, "killed")
    before = ended(out)
    written = stamps(out, before)
    outcome = finish(ray_head, folder, "killed")
    return Killed(out, before, written, outcome, said(folder, "killed"))


def test_what_was_done_before_a_kill_is_not_done_again(killed: Killed) -> None:
    assert 3 <= len(killed.before) < TRIALS
    assert killed.written
    assert stamps(killed.out, killed.before) == killed.written
    assert {number: ended(killed.out)[number] for number in killed.before} == killed.before
    *_, left = re.findall(r"(\d+) trials? to run, \d at a time with 1 CPU each", killed.log)
    assert TRIALS - len(killed.before) - 2 <= int(left) <= TRIALS - len(killed.before)  # two may have ended meanwhile


def test_every_trial_has_an_end_and_some_are_stopped_early(killed: Killed) -> None:
    trials = killed.outcome["trials"]
    assert sorted(trial["trial"] for trial in trials) == list(range(TRIALS))
    states = [trial["state"] for trial in trials]
    assert set(states) == {"done", "stopped", "failed"}
    for trial in trials:
        diverges = trial["settings"]["fit.emulator.rate"] == DIVERGING
        assert (trial["state"] == "failed") == diverges
        assert (trial["metric"] is None) == diverges
        assert trial["rung"] == {"done": 1, "stopped": 0, "failed": None}[trial["state"]]
        assert (killed.out / f"trials/{trial['trial']}/rung-1").exists() == (trial["state"] == "done")
    assert not (killed.out / ".ray").exists()


def test_the_best_configuration_gives_its_metric_to_the_last_bit(
    ray_head: RayHead, folder: Path, killed: Killed
) -> None:
    best = killed.outcome["trials"][0]
    again = folder / "again"
    command = [str(BIN / "vcal"), "train", killed.outcome["best_config"], f"output={again}", "--json"]
    found = subprocess.run(command, env=ray_head.env, capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["assessment"]["observations"]["log_predictive_density"] == best["metric"]


def test_more_trials_extend_a_sweep_that_knows_the_earlier_ones(
    ray_head: RayHead, folder: Path, killed: Killed
) -> None:
    written = stamps(killed.out, range(TRIALS))
    outcome = finish(ray_head, folder, "killed", f"sweep.trials={TRIALS + 1}")
    assert stamps(killed.out, range(TRIALS)) == written
    assert [trial for trial in outcome["trials"] if trial["trial"] < TRIALS] == killed.outcome["trials"]
    assert len(outcome["trials"]) == TRIALS + 1


def test_what_the_cluster_cannot_have_is_refused_at_once(ray_head: RayHead, folder: Path) -> None:
    assert start(ray_head, folder, "much", workers=2, cpus=2).wait(60) == 1
    log = " ".join(said(folder, "much").split())
    assert "a trial asks for 2 process(es) with 2 CPU and 0 GPU each" in log
    assert "the Ray cluster has 2 CPU and 0 GPU, room for 1" in log
    assert not (folder / "much/trials").exists()


def test_a_trial_of_as_many_processes_as_there_are_cpus_does_not_starve(ray_head: RayHead, folder: Path) -> None:
    outcome = finish(ray_head, folder, "wide", workers=2, trials=1, scheduler="none", seed=5)
    assert [trial["state"] for trial in outcome["trials"]] == ["done"]
    assert "1 trial to run, 1 at a time with 2 processes of 1 CPU each" in said(folder, "wide")
