"""Population based training: segments that change nothing, runs that are taken over, and a population on real Ray."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from jobs.cli import main
from jobs.sweeps.checks import check_with_data
from jobs.sweeps.member import HISTORY, Segment, history, mend, rates_of, run_of, segment, take_over
from jobs.sweeps.pbt import changed
from jobs.sweeps.resources import Share
from jobs.sweeps.settings import RATES, Sweep
from jobs.sweeps.space import Dimension
from jobs.sweeps.trial import Folder
from tests.ray_kit import BIN, RayHead
from tests.vcal_dist.training_kit import assert_same, checkpoint, config, make_store, settings, wait_for
from vcal_dist.checkpoints import Checkpoints
from vcal_dist.errors import ConfigError, Preempted
from vcal_dist.module import CalibrationModule
from vcal_dist.posterior import Posterior
from vcal_dist.training import moment, train

SPACE = {key: {"loguniform": [1e-4, 0.1]} for key in RATES}
SCALE = {"reduction": 4, "rungs": 2}  # four segments
ALONE = Share(1, 1, 0.0, 1)
POPULATION, SEGMENTS = 4, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("population")
    make_store(path / "small.zarr", observations=480)  # enough to hold some out
    return path


def plain(folder: Path, name: str, **sweep: Any) -> dict[str, Any]:
    found = settings(folder / "small.zarr", folder / name, "meanfield")
    return found | {"sweep": {"scheduler": "pbt", "trials": POPULATION, "space": SPACE, **SCALE, **sweep}}


# --- what can be a population -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("fit.weights=fullrank", "the weights 'fullrank' have no posterior to judge by; give fit.weights=meanfield"),
        ("sweep.metric=bound", "there is no bound; give sweep.metric=log_predictive_density"),
        ("sweep.search=optuna", "give sweep.search=random"),
        ("sweep.workers=2", "sweep.workers is 2: give 1"),
        ("sweep.trials=1", "sweep.trials is 1: give 2 or more"),
        ("sweep.space={fit.spread: {uniform: [0.1, 0.2]}}", "sweep.space.fit.spread is not one of them"),
        ("sweep.space={fit.weights: {choice: [meanfield]}}", "sweep.space.fit.weights is not one of them"),
        ("sweep.space={fit.emulator.rate: {int: [1, 2]}}", "uniform, loguniform or choice"),
    ],
)
def test_what_cannot_exchange_rates_is_refused_with_the_cure(folder: Path, override: str, told: str) -> None:
    stages = {name: {} for name in ("emulator_weights", "weights_and_theta", "everything")}  # not of other weights
    data = plain(folder, "refused")
    data["fit"] |= stages
    with pytest.raises(ConfigError) as caught:
        Sweep.parse(data, overrides=[override])
    assert told in str(caught.value)
    assert str(caught.value).endswith("or sweep.scheduler=asha")


def test_without_a_space_a_population_varies_the_rates(folder: Path) -> None:
    assert set(Sweep.parse(plain(folder, "empty", space={})).space.dimensions) == set(RATES)


def test_a_population_needs_observations_that_are_held_out(folder: Path) -> None:
    make_store(folder / "few.zarr")
    few = Sweep.parse(plain(folder, "few"), overrides=[f"store={folder / 'few.zarr'}"])
    with pytest.raises(ConfigError, match="of the 60 in the store none is"):
        check_with_data(few)
    check_with_data(Sweep.parse(plain(folder, "enough")))


def test_a_member_alone_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "alone.yaml"
    path.write_text(yaml.safe_dump(plain(folder, "alone")), encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["sweep", str(path), "--trial", "0"])
    assert "a trial alone needs sweep.scheduler=asha" in " ".join(capsys.readouterr().err.split())


# --- segments ---------------------------------------------------------------------------------------------------------


def test_segments_with_the_same_rates_give_the_same_posterior_to_the_last_bit(folder: Path) -> None:
    sweep = Sweep.parse(plain(folder, "cut", reduction=3, rungs=3))
    rates = dict.fromkeys(RATES, 0.01)
    Folder(sweep, 0).begin(rates)
    run = run_of(sweep, 0)
    ends = []
    for number in range(1, 10):
        assert len(segment(sweep, 0, ALONE)) == number
        if number < 9:
            ends.append(checkpoint(run)["schedule"]["steps"])
    assert ends == [16 * number // 9 for number in range(1, 9)]  # of them 8 and 12 end stages
    whole = train(sweep.configured(rates).model_copy(update={"output": str(folder / "whole")}), progress=False)
    assert_same(run, folder / "whole")
    found = history(run)
    assert [one["segment"] for one in found] == list(range(1, 10))
    assert found[-1]["metric"] == whole.record["assessment"]["observations"]["log_predictive_density"]
    assert len({one["metric"] for one in found}) == 9


class AtTheEnd(Callback):
    """Writes a checkpoint after the last step, which training itself has no use for."""

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        assert isinstance(module, CalibrationModule)
        next(c for c in trainer.callbacks if isinstance(c, Checkpoints)).save(trainer, module)  # type: ignore[attr-defined]


def test_the_assessment_of_the_last_moment_is_that_of_the_posterior(folder: Path) -> None:
    asked = config(folder / "small.zarr", folder / "moment", "meanfield")
    with pytest.raises(ConfigError, match="it has no checkpoint"):
        moment(asked)
    with pytest.raises(Preempted):
        train(asked, progress=False, callbacks=[Segment(1, 2)])
    half = moment(asked)
    assert moment(asked) == half
    posterior = train(asked, progress=False, callbacks=[AtTheEnd()])
    assert moment(asked) == posterior.record["assessment"] != half


# --- taking over ------------------------------------------------------------------------------------------------------


def test_a_member_goes_on_from_another_with_new_rates_and_a_crash_loses_nothing(folder: Path) -> None:
    sweep = Sweep.parse(plain(folder, "taken"))
    slow, fast = dict.fromkeys(RATES, 0.001), dict.fromkeys(RATES, 0.05)
    for number, rates in enumerate((slow, fast)):
        Folder(sweep, number).begin(rates)
        segment(sweep, number, ALONE)
    run, source = run_of(sweep, 0), run_of(sweep, 1)
    before, new = history(run), dict.fromkeys(RATES, 0.06)

    take_over(run, run, slow)  # its own copy: nothing happens
    assert history(run) == before
    run.rename(run.with_name(f".{run.name}.old"))  # a crash while the copy was to come in its place
    mend(run)
    assert history(run) == before
    assert rates_of(sweep, 0) == slow

    take_over(run, source, new)
    assert rates_of(sweep, 0) == new
    assert rates_of(sweep, 1) == fast
    found = segment(sweep, 0, ALONE)
    assert [one["trial"] for one in found] == [1, 0]
    assert [one["rates"] for one in found] == [fast, new]
    assert found[0] == history(source)[0]
    assert sorted(entry.name for entry in run.parent.iterdir()) == ["rung-1", "settings.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"segments": [1]}', '{"segments": [{}]}', '{"segments": [], "checksum": "x"}']
)
def test_a_history_that_was_made_up_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / HISTORY).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"{HISTORY} .*delete {tmp_path}, and that member trains again"):
        history(tmp_path)


def test_changed_rates_are_near_or_drawn_anew_and_stay_where_they_may_be() -> None:
    drawn = np.random.default_rng(0)
    for dimension in (Dimension(uniform=(0.01, 0.1)), Dimension(loguniform=(0.01, 0.1))):
        found = [changed(0.09, dimension, drawn) for _ in range(400)]
        assert min(found) >= 0.01
        assert max(found) == 0.1  # 0.108 is too much
        assert 0.25 < np.mean(np.isclose(found, 0.072)) < 0.5
        assert 0.15 < np.mean(~np.isin(found, [0.1, 0.09 * 0.8])) < 0.35
    choice = Dimension(choice=[0.1, 0.2, 0.3, 0.4])
    found = [changed(0.1, choice, drawn) for _ in range(400)]
    assert set(found) == {0.1, 0.2, 0.3, 0.4}
    assert np.mean(np.isin(found, [0.1, 0.2])) > 0.8


# --- on Ray -----------------------------------------------------------------------------------------------------------


def start(head: RayHead, folder: Path, name: str, *options: str) -> subprocess.Popen[str]:
    """`vcal sweep` with its output in files beside the sweep's directory."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(plain(folder, name)), encoding="utf-8")
    command = [str(BIN / "vcal"), "sweep", str(path), "--address", head.address, *options]
    with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, env=head.env, stdout=out, stderr=log, text=True, cwd=folder)


def said(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_population_larger_than_the_cluster_exchanges_rates_and_goes_on_after_a_kill(
    ray_head: RayHead, folder: Path
) -> None:
    out = folder / "killed"
    first = start(ray_head, folder, "killed")
    try:
        wait_for(lambda: "goes on from" in said(folder, "killed") or first.poll() is not None, 200)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert first.returncode == -signal.SIGKILL, said(folder, "killed")
    assert start(ray_head, folder, "killed", "--json").wait(200) == 0, said(folder, "killed")
    outcome = json.loads((folder / "killed.out").read_text(encoding="utf-8"))

    assert [trial["state"] for trial in outcome["trials"]] == ["done"] * POPULATION
    taken = 0
    for trial in outcome["trials"]:
        found = trial["history"]
        assert found == history(out / f"trials/{trial['trial']}/rung-1")
        assert [one["segment"] for one in found] == list(range(1, SEGMENTS + 1))
        assert found[-1]["trial"] == trial["trial"]
        assert found[-1]["rates"] == trial["settings"]
        assert found[-1]["metric"] == trial["metric"]
        for one, after in itertools.pairwise(found):
            assert (one["trial"] == after["trial"]) or one["rates"] != after["rates"]
            taken += one["trial"] != after["trial"]
        assert all(1e-4 <= rate <= 0.1 for one in found for rate in one["rates"].values())
    assert taken
    assert not (out / ".ray").exists()

    best = outcome["trials"][0]
    record = Posterior.load(out / "best").record
    assert record["assessment"]["observations"]["log_predictive_density"] == best["metric"]
    assert best["metric"] == max(trial["metric"] for trial in outcome["trials"])
    asked = (out / "best.yaml").read_text(encoding="utf-8")
    other = any(one["rates"] != best["settings"] for one in best["history"])
    assert ("finds another posterior" in asked) == other
    assert {key: yaml.safe_load(asked)["fit"][key.split(".")[1]]["rate"] for key in RATES} == best["settings"]
    assert (out / "best" / HISTORY).exists()
