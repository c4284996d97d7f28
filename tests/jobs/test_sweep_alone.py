"""Trials without Ray: one after another in this process, their files, and what is collected from them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from jobs.cli import main
from jobs.sweeps.checks import check_with_data
from jobs.sweeps.directory import begin
from jobs.sweeps.outcome import _keep_best, ranked
from jobs.sweeps.page import page
from jobs.sweeps.settings import Sweep, load
from jobs.sweeps.trial import Folder, Rung, Trial, left, run_trial
from storage import documents
from tests.vcal_dist.training_kit import make_store, settings
from vcal_dist import tensorfile
from vcal_dist.errors import ConfigError
from vcal_dist.mixed import Averaged
from vcal_dist.posterior import FILE, Posterior

SPACE = {
    # At the last rate, training diverges in its first steps.
    "fit.emulator.rate": {"choice": [0.01, 0.05, 1e25]},
    "model.eta.lengthscale": {"loguniform": [0.2, 1.0]},
}
DIVERGING = 1e25
GOLDEN = Path(__file__).parents[1] / "golden" / "run-4"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "small.zarr"
    make_store(path)
    return path


def written(folder: Path, store: Path, **sweep: Any) -> Path:
    """The file of a sweep in a folder."""
    plain = settings(store, folder / "out") | {"sweep": {"trials": 3, "space": SPACE, **sweep}}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(plain), encoding="utf-8")
    return path


def vcal(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def test_trials_of_a_job_array_are_collected(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path, store, mixture=2, seed=3), tmp_path / "out"
    tried = [documents.read(out / f"trials/{number}/settings.json", ConfigError, "") for number in _run_all(path)]
    statuses = [vcal("sweep", path, "--trial", number) for number in range(3)]  # they are there already
    diverging = [values["fit.emulator.rate"] == DIVERGING for values in tried]
    assert sorted(diverging) == [False, False, True]
    assert statuses == [int(diverges) for diverges in diverging]
    capsys.readouterr()
    assert vcal("sweep", path, "--collect", "--json") == 0
    found = json.loads(capsys.readouterr().out)

    best, second, last = found["trials"]
    assert [best["state"], second["state"], last["state"]] == ["done", "done", "failed"]
    assert best["metric"] > second["metric"]
    assert last["metric"] is None
    assert "loss" in last["reason"]
    assert found["best"] == best["trial"]

    posterior = Posterior.load(out / "best")
    assert posterior.record["assessment"]["observations"]["log_predictive_density"] == best["metric"]
    assert posterior.record["config"]["model"]["eta"]["lengthscale"] == best["settings"]["model.eta.lengthscale"]
    assert vcal("train", out / "best.yaml") == 0
    assert "is done already" in capsys.readouterr().err
    mixture = Averaged.load(out / "mixture")
    bounds = {member.record["bound"] for member in mixture.members}
    runs = [out / f"trials/{trial['trial']}/rung-2" for trial in (best, second)]
    assert bounds == {Posterior.load(run).record["bound"] for run in runs}

    with (out / "trials.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["trial"] for row in rows] == [str(trial["trial"]) for trial in found["trials"]]
    assert float(rows[0]["metric of rung 2"]) == best["metric"]
    assert float(rows[0]["model.eta.lengthscale"]) == best["settings"]["model.eta.lengthscale"]
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")


def _run_all(path: Path) -> range:
    for number in range(3):
        vcal("sweep", path, "--trial", number)
    return range(3)


def test_a_trial_alone_is_what_train_makes_of_its_settings(tmp_path: Path, store: Path) -> None:
    path = written(tmp_path, store, space={"fit.start.t1": {"uniform": [0.2, 0.4]}, "fit.rho": {"uniform": [0.1, 0.2]}})
    assert vcal("sweep", path, "--trial", 1) == 0
    values = documents.read(tmp_path / "out/trials/1/settings.json", ConfigError, "")
    overrides = [f"{key}={value!r}" for key, value in values.items()]
    assert vcal("train", path, f"output={tmp_path / 'same'}", *overrides) == 0
    one, other = (Posterior.load(run) for run in (tmp_path / "out/trials/1/rung-2", tmp_path / "same"))
    assert one.record["assessment"] == other.record["assessment"]
    assert one.record["bound"] == other.record["bound"]


def test_what_cannot_be_done_alone_is_refused(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, store)
    assert vcal("sweep", path, "--collect") == 1
    assert "there is no sweep in" in capsys.readouterr().err
    assert vcal("sweep", path, "--trial", 3) == 1
    assert "the sweep has 3 trials, from 0; got --trial 3" in " ".join(capsys.readouterr().err.split())
    assert vcal("sweep", path, "--trial", 0, "--collect") == 2
    assert vcal("sweep", path, "sweep.search=optuna", f"output={tmp_path / 'other'}", "--trial", 0) == 1
    assert "a trial alone needs sweep.search=random" in " ".join(capsys.readouterr().err.split())


def test_another_space_or_metric_of_a_sweep_that_exists_is_refused_and_more_trials_are_not(
    tmp_path: Path, store: Path
) -> None:
    def asked(overrides: list[str]) -> Sweep:
        return Sweep.parse(yaml.safe_load(written(tmp_path, store).read_text()), overrides=overrides)

    begin(asked(["sweep.metric=bound"]))
    begin(asked([]))  # no trial has begun: a mistake can be mended in place
    Folder(asked([]), 0).begin({})
    begin(asked(["sweep.trials=5", "sweep.mixture=2", "sweep.cpus=2", "devices.threads=1", "record_every=3"]))
    for override, told in [
        ("sweep.metric=bound", "sweep.metric: 'log_predictive_density' before, 'bound' now"),
        ("sweep.seed=1", "sweep.seed: 0 before, 1 now"),
        ("fit.rho=0.2", "fit.rho: 0.05 before, 0.2 now"),
        ("sweep.space={fit.rho: {choice: [0.1]}}", "sweep.space.fit.rho: None before, {'choice': [0.1]} now"),
    ]:
        with pytest.raises(ConfigError) as caught:
            begin(asked([override]))
        assert told in str(caught.value)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious.txt").touch()
    with pytest.raises(ConfigError, match=r"something else than a sweep \('precious.txt'\)"):
        begin(asked([f"output={tmp_path / 'other'}"]))


def test_a_trial_that_is_damaged_or_unfinished_is_known_as_such(tmp_path: Path, store: Path) -> None:
    tried = Sweep.parse(yaml.safe_load(written(tmp_path, store, trials=4).read_text()))
    for number in (0, 2):
        Folder(tried, number).begin({"fit.emulator.rate": 0.01})
    Folder(tried, 2).write(Trial(2, {}, "stopped", rungs=(Rung(0, 1, -1.0, 1.0),)))
    assert left(tried) == ([0], [1, 3])
    (Folder(tried, 0).path / "result.json").write_text("{")
    with pytest.raises(ConfigError, match=r"trials/0/result\.json is damaged"):
        left(tried)


def test_a_changed_metric_or_setting_is_refused(tmp_path: Path, store: Path) -> None:
    tried = Sweep.parse(yaml.safe_load(written(tmp_path, store, trials=4).read_text()))
    trial = Folder(tried, 2)
    trial.begin({"fit.emulator.rate": 0.01})
    trial.write(Trial(2, {}, "done", rungs=(Rung(0, 1, -1.5, 1.0),)))
    for name, old, new in (("result.json", "-1.5", "9.5"), ("settings.json", "0.01", "0.02")):
        text = (trial.path / name).read_text()
        assert text.count(old) == 1
        (trial.path / name).write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=rf"{name} does not match its checksum.*delete .*trials/2"):
            left(tried)
        for other in ("[]", '{"rungs": 3}', '{"state": "done", "reason": null, "rungs": [3]}'):
            (trial.path / "result.json").write_text(other)
            with pytest.raises(ConfigError):
                left(tried)
        (trial.path / name).write_text(text)
    (trial.path / "settings.json").write_text('{"fit.emulator.rate": 0.01}')  # of an earlier version
    (trial.path / "result.json").write_text('{"state": "done", "reason": null, "rungs": []}')
    assert left(tried) == ([], [0, 1, 3])


def test_a_combination_that_no_end_of_a_range_showed_fails_only_its_trial(tmp_path: Path, store: Path) -> None:
    tried = load(written(tmp_path, store, space={"fit.rho": {"uniform": [0.1, 0.2]}}))
    Folder(tried, 0).begin({"fit.rho": 2.0})

    def train(_: Any) -> Posterior:
        raise AssertionError("never called")

    trial = run_trial(tried, 0, 0, train)
    assert trial.state == "failed"
    assert "rho is 2.0" in str(trial.reason)


def test_what_does_not_go_with_the_data_is_told_before_any_trial(tmp_path: Path, store: Path) -> None:
    path = written(tmp_path, store, space={"fit.start.t9": {"uniform": [0.1, 0.2]}})
    with pytest.raises(ConfigError, match=r"fit\.start names 't9'; the calibration inputs are t1, t2"):
        check_with_data(Sweep.parse(yaml.safe_load(path.read_text())))
    path = written(tmp_path, store, space={"transforms.f9.kind": {"choice": ["none", "log"]}})
    with pytest.raises(ConfigError, match="transforms names the output 'f9'; the outputs are f0"):
        check_with_data(Sweep.parse(yaml.safe_load(path.read_text())))
    make_store(tmp_path / "many.zarr", runs=100, observations=401)
    many = [f"store={tmp_path / 'many.zarr'}", "data.holdout=0"]
    with pytest.raises(ConfigError, match="no observations are held out to judge trials by"):
        check_with_data(load(written(tmp_path, store), many))
    check_with_data(load(written(tmp_path, store), [*many, "sweep.metric=bound"]))


def test_trials_rank_by_how_far_they_came_and_then_by_their_metric() -> None:
    def trial(number: int, state: Any, *metrics: float) -> Trial:
        return Trial(number, {}, state, rungs=tuple(Rung(k, 3**k, metric, 1.0) for k, metric in enumerate(metrics)))

    found = ranked(
        [
            trial(0, "failed"),
            trial(1, "stopped", 9.0),
            trial(2, "done", 0.0, 0.0, 1.0),
            trial(3, "stopped", 1.0, 2.0),
            trial(4, "done", 0.0, 0.0, 2.0),
            trial(5, "stopped", 10.0),
            trial(6, "running", 50.0),
        ]
    )
    assert [one.number for one in found] == [4, 2, 3, 5, 1, 6, 0]


def test_a_result_is_counted_once_and_in_its_own_rung_whatever_came_before(tmp_path: Path) -> None:
    """A trial that was interrupted after its first rung, goes on in another command, and ends there."""
    from jobs.sweeps.tune import Driver, Rungs

    asked = Sweep.parse(settings(tmp_path / "s.zarr", tmp_path / "out") | {"sweep": {"space": SPACE}})
    driver = Driver(asked, lambda _: None)
    folder = Folder(asked, 0)
    first, second = Rung(0, 1, -5.0, 1.0), Rung(1, 3, 7.0, 1.0)
    folder.begin({"fit.emulator.rate": 0.01})
    before = folder.write(Trial(0, {"fit.emulator.rate": 0.01}, rungs=(first,)))
    folder.rung(1).mkdir(parents=True)  # it was decided that it goes on
    rungs = Rungs(driver, [before])
    driver.numbers["a name of Tune's"] = 0
    trial: Any = SimpleNamespace(trial_id="a name of Tune's")
    rungs.on_trial_add(None, trial)
    folder.write(Trial(0, {"fit.emulator.rate": 0.01}, rungs=(first, second)))
    result = {"budget": 3, "metric": 7.0}
    for _ in range(2):  # as after the death of a process
        rungs.on_trial_result(None, trial, result)
    rungs.on_trial_complete(None, trial, result)
    counted = {milestone: list(recorded.values()) for milestone, recorded in rungs._brackets[0]._rungs}
    assert counted == {1: [-5.0], 3: [7.0], 9: []}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"state": None}, "state"),
        ({"rungs": [{"rung": 0, "budget": 1, "metric": "high", "seconds": 1.0}]}, "metric"),
        ({"history": [{}]}, "rates"),
    ],
)
def test_a_trial_that_says_what_is_never_written_is_refused(
    tmp_path: Path, store: Path, changed: dict[str, Any], told: str
) -> None:
    tried = Sweep.parse(yaml.safe_load(written(tmp_path, store, trials=4).read_text()))
    folder = Folder(tried, 0)
    folder.begin({"fit.emulator.rate": 0.01})
    sound = {"state": "running", "reason": None, "rungs": []}
    (folder.path / "result.json").write_text(json.dumps(sound | changed), encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"the trial in .*/trials/0 is damaged \(.*{told}"):
        folder.read()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("store", "s3://somebody/s.zarr"),
        ("data.scheduler", "tcp://somebody:8786"),
        ("fit.emulator.rate", None),
        ("fit.emulator.rate", "=1+1"),
        ("fit.emulator.rate", -0.01),
        ("fit.emulator.rate", True),
        ("fit.emulator.rate", {"a": 1}),
    ],
)
def test_a_trial_tries_only_what_the_sweep_asks_for(tmp_path: Path, store: Path, key: str, value: Any) -> None:
    """A trial goes on from its own files, which may be a stranger's: another store would be opened from there."""
    tried = load(written(tmp_path, store))
    Folder(tried, 0).begin({"fit.emulator.rate": 0.01} | {key: value})
    with pytest.raises(
        ConfigError, match=rf"settings\.json is damaged \(it has {key}.*not tried\); delete .*runs again"
    ):
        Folder(tried, 0).read()


def test_posteriors_of_another_problem_among_the_trials_are_refused(tmp_path: Path, store: Path) -> None:
    tried = load(written(tmp_path, store))
    trials = []
    for number in range(2):
        folder = Folder(tried, number)
        folder.begin({"fit.emulator.rate": 0.01})
        trials.append(Trial(number, {"fit.emulator.rate": 0.01}, "done", rungs=(Rung(2, 9, -1.0, 1.0),)))
        shutil.copytree(GOLDEN / "run", folder.rung(tried.last_rung))
    assert "Do the trials agree?" in page(tried, trials, ())
    file = Folder(tried, 1).rung(tried.last_rung) / FILE
    tree = tensorfile.read(file)
    for variable in tree["problem"]["calibration_inputs"]:
        variable["name"] = "another"
    tensorfile.write(file, tree)
    with pytest.raises(
        ConfigError, match=r"trial 1 has a posterior of other parameters than trial 0.*; delete .*trials/1"
    ):
        page(tried, trials, ())
    (Folder(tried, 0).rung(tried.last_rung) / "config.yaml").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.yaml is damaged"):
        _keep_best(tried, trials[0])
