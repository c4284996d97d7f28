"""`calibrate`: arrays, a store and a NamedTuple lead to the same posterior, and what is wrong is said at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from storage.errors import IngestError, StoreError, VcalError
from storage.store import create, open_store
from tests.vcal_dist.training_kit import CHUNK, apart, append, assert_same, generate, problem, settings, tensors
from vcal_dist.calibrating import calibrate
from vcal_dist.config import DataSettings
from vcal_dist.errors import ConfigError, ModelError, Preempted
from vcal_dist.plan import FitSettings, StageSettings
from vcal_dist.posterior import Posterior

# The paper's schedule is the shortest.
STAGES = ("emulator_weights", "emulator", "weights_and_theta", "everything")
MODEL = {"eta": {"features": {"features": 12}}, "delta": {"features": {"features": 4}}}
FIT: dict[str, Any] = {"weights": "meanfield"} | {name: {"steps": 3} for name in STAGES}
SETTINGS: dict[str, Any] = {"model": MODEL, "fit": FIT, "seed": 4, "progress": False}
X = np.linspace(0, 1, 5)[:, None]


@pytest.fixture(scope="module")
def arrays() -> dict[str, Any]:
    return generate(90, 30)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, Any]) -> Path:
    """As `calibrate` makes one, but for its chunks: batches of all rows have no order that these could change."""
    url = tmp_path_factory.mktemp("data") / "s.zarr"
    append(create(url, problem(), chunk_rows=1000), arrays)
    return url


@pytest.fixture(scope="module")
def expected(store: Path) -> Posterior:
    return calibrate(store, **SETTINGS)


def assert_equal(found: Posterior, expected: Posterior) -> None:
    for name, value in expected.model.state_dict().items():
        assert np.array_equal(found.model.state_dict()[name], value), name
    np.testing.assert_array_equal(found.sample(50), expected.sample(50))
    for one, other in zip(found.predict(X), expected.predict(X), strict=True):
        np.testing.assert_array_equal(one, other)


def test_arrays_in_any_form_are_as_good_as_a_store(
    arrays: dict[str, Any], store: Path, expected: Posterior, tmp_path: Path
) -> None:
    Named = namedtuple("Named", arrays)  # type: ignore[misc]
    path = tmp_path / "problem.yaml"
    path.write_text(yaml.safe_dump(problem().model_dump(mode="json")), encoding="utf-8")
    assert_equal(calibrate(str(store), **SETTINGS), expected)
    assert_equal(calibrate(open_store(store), **SETTINGS), expected)
    assert_equal(calibrate(arrays, problem(), **SETTINGS), expected)
    assert_equal(calibrate(Named(**arrays), path, **SETTINGS), expected)
    lists = {name: values.tolist() for name, values in arrays.items()}
    assert_equal(calibrate(lists, problem().model_dump(mode="json"), **SETTINGS), expected)


def test_tables_are_taken_by_the_names_of_their_columns(arrays: dict[str, Any], expected: Posterior) -> None:
    columns = problem().runs_columns | problem().observations_columns
    columns["x_runs"] = columns["x"]
    assert len(columns["t"]) > 1  # so that there is an order to get wrong
    named = {array: pd.DataFrame(values, columns=[c.name for c in columns[array]]) for array, values in arrays.items()}
    backwards = {array: table[table.columns[::-1]] for array, table in named.items()}
    assert_equal(calibrate(backwards, problem(), **SETTINGS), expected)
    t = named["t"].iloc[: len(X)]
    for given in (t[t.columns[::-1]], t.iloc[0][::-1]):
        ordered = t if given.ndim == 2 else t.iloc[0]
        found, wanted = (expected.predict(X, "emulator", t=each) for each in (given, ordered.to_numpy()))
        np.testing.assert_array_equal(found.mean, wanted.mean)
    with pytest.raises(VcalError, match=r"t is a table without a column"):
        calibrate({**named, "t": named["t"].rename(columns=str.upper)}, problem(), **SETTINGS)


def test_an_absurd_observation_does_not_end_training() -> None:
    """Log densities are then so large that a difference of nats is lost in rounding."""
    rng = np.random.default_rng(0)
    x, t, at = rng.random((60, 1)), rng.random((60, 1)), rng.random((20, 1))
    y = np.sin(3 * at) + 0.4
    y[3] = 1e12
    stages = {"emulator": {"steps": 20}, "theta": {"steps": 60}, "joint": {"steps": 10}, "evaluations": 64}
    found = calibrate(
        {"x_runs": x, "t": t, "z": np.sin(3 * x) + t, "x": at, "y": y},
        {
            "name": "absurd",
            "control_inputs": [{"name": "x", "bounds": [0, 1]}],
            "calibration_inputs": [{"name": "t", "bounds": [0, 1]}],
            "outputs": [{"name": "y"}],
        },
        fit=stages,
        progress=False,
    )
    assert all(np.isfinite([row.mean, row.sd]).all() for row in found.summary())


def test_sections_may_be_objects(store: Path, expected: Posterior) -> None:
    fit = FitSettings(weights="meanfield", **{name: StageSettings(steps=3) for name in STAGES})  # type: ignore[arg-type]
    objects = SETTINGS | {"fit": fit, "data": DataSettings(resident=False)}
    assert_equal(calibrate(store, **objects), expected)


def test_a_column_of_noise_counts(arrays: dict[str, Any], expected: Posterior) -> None:
    noise = np.full_like(arrays["y"], 0.2)
    found = calibrate(arrays | {"noise": noise}, problem(), **SETTINGS)
    assert not np.array_equal(found.sample(50), expected.sample(50))


# --- what stays -------------------------------------------------------------------------------------------------------


def test_without_an_output_nothing_stays(
    arrays: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    calibrate(arrays, problem(), **SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_with_an_output_the_same_call_goes_on_with_the_run(
    arrays: dict[str, Any], tmp_path: Path, expected: Posterior, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert_equal(calibrate(arrays, problem(), output=run, **SETTINGS), expected)
    said: list[str] = []
    assert_equal(calibrate(arrays, problem(), output=run, say=said.append, **SETTINGS), expected)
    assert "done already" in said[0]
    (run / "posterior.safetensors").unlink()
    said.clear()
    assert_equal(calibrate(arrays, problem(), output=run, say=said.append, **SETTINGS), expected)
    assert said[0].startswith("going on after step")
    assert_equal(Posterior.load(run), expected)


@pytest.mark.parametrize("change", ["a value", "a row less", "a noise column", "the problem"])
def test_other_data_do_not_go_on_with_a_run(arrays: dict[str, Any], tmp_path: Path, change: str) -> None:
    run, other, asked = tmp_path / "run", dict(arrays), problem()
    calibrate(arrays, problem(), output=run, **SETTINGS)
    if change == "a value":
        other["z"] = arrays["z"] + 1e-3 * (np.arange(90)[:, None] == 7)
    elif change == "a row less":
        other |= {"x": arrays["x"][:-1], "y": arrays["y"][:-1]}
    elif change == "a noise column":
        other["noise"] = np.full_like(arrays["y"], 0.2)
    else:
        asked = asked.model_copy(update={"name": "another"})
    before = tensors(run)
    with pytest.raises(ModelError, match=r"began with other data; choose another output"):
        calibrate(other, asked, output=run, **SETTINGS)
    assert tensors(run).keys() == before.keys()
    assert open_store(run / "data.zarr").observations.rows == 30


def test_arrays_that_are_refused_leave_nothing_in_the_output(arrays: dict[str, Any], tmp_path: Path) -> None:
    """So that the same call with better ones is not refused."""
    with pytest.raises(IngestError, match="column 't1'"):
        calibrate(arrays | {"t": arrays["t"] + 0.5}, problem(), output=tmp_path / "run", **SETTINGS)
    assert not (tmp_path / "run" / "data.zarr").exists()
    calibrate(arrays, problem(), output=tmp_path / "run", **SETTINGS)


def test_a_directory_of_something_else_is_not_written_to(arrays: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else than a run"):
        calibrate(arrays, problem(), output=tmp_path, **SETTINGS)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


# --- what is wrong ----------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_named(arrays: dict[str, Any], store: Path, tmp_path: Path) -> None:
    renamed = {("x_run" if name == "x_runs" else name): values for name, values in arrays.items()}
    with pytest.raises(
        ModelError, match=r"the arrays are t, x, x_run, y, z; accepted: x_runs, t, z, x, y and optional"
    ):
        calibrate(renamed, problem(), **SETTINGS)
    with pytest.raises(ModelError, match=r"the arrays are none; accepted: x_runs"):
        calibrate({}, problem(), **SETTINGS)
    with pytest.raises(ModelError, match="arrays need a problem"):
        calibrate(arrays, **SETTINGS)
    with pytest.raises(ModelError, match="problem is given beside a store"):
        calibrate(store, problem(), **SETTINGS)
    with pytest.raises(StoreError, match="there is no store"):
        calibrate(tmp_path / "none.zarr", **SETTINGS)
    with pytest.raises(ConfigError, match=r"(?s)calibrate\(\.\.\.\).*sede"):
        calibrate(store, **SETTINGS, sede=3)
    with pytest.raises(ConfigError, match=r"fit\.everything\.steps"):
        calibrate(store, **SETTINGS | {"fit": FIT | {"everything": {"steps": "3"}}})
    with pytest.raises(IngestError, match="different numbers of rows"):
        calibrate(arrays | {"z": arrays["z"][:-1]}, problem(), **SETTINGS)


def test_a_failure_in_other_processes_is_told(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def ends(status: int) -> Any:
        def started(command: list[str]) -> Any:
            assert command[:3] == [sys.executable, "-m", "vcal_dist"]
            return start([sys.executable, "-c", f"raise SystemExit({status})"])

        return started

    devices = {"devices": 2, "accelerator": "cpu"}
    monkeypatch.setattr("vcal_dist.calibrating.subprocess.Popen", ends(1))
    with pytest.raises(ModelError, match="in 2 processes ended with status 1"):
        calibrate(store, **SETTINGS, devices=devices)
    for status, number in ((75, signal.SIGTERM), (130, signal.SIGINT)):
        monkeypatch.setattr("vcal_dist.calibrating.subprocess.Popen", ends(status))
        with pytest.raises(Preempted) as stopped:
            calibrate(store, **SETTINGS, devices=devices)
        assert stopped.value.signal == number


@pytest.mark.slow
def test_several_devices_work_through_processes_of_their_own(
    arrays: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    one, two = tmp_path / "one", tmp_path / "two"
    append(create(tmp_path / "s.zarr", problem(), chunk_rows=CHUNK), arrays)
    plain = settings(tmp_path / "s.zarr", one, "meanfield")
    sections = {name: part for name, part in plain.items() if name not in ("store", "output")}
    for run, count in ((one, 1), (two, 2)):
        devices = {"devices": count, "accelerator": "cpu", "precision": "float64"}
        calibrate(tmp_path / "s.zarr", output=run, devices=devices, progress=False, **sections)
    assert apart(two, one) < 1e-8
    with pytest.raises(AssertionError):
        assert_same(two, one)  # sums in another order: two processes were at work
