"""The run directory: whose run it is, what may change between attempts, and what is damaged in it."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from filelock import FileLock

from storage import documents
from storage.errors import StoreError
from storage.store import Store, create, open_store
from tests.vcal_dist.training_kit import append, assert_same, config, generate, make_store, problem, settings, tensors
from vcal_dist import run_directory, training
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, Disconnected, ModelError
from vcal_dist.plan import Chosen, Totals
from vcal_dist.problems import borehole
from vcal_dist.run_directory import FREE, LOCK, Before, begin, compare, held, is_held, look
from vcal_dist.run_place import run_place
from vcal_dist.schedule import moved
from vcal_dist.training import describe, is_first, open_or_make, train


def seen(asked: Config, run: Path, store: Store, *, first: bool = True) -> Before:
    with run_place(run) as place:
        return look(asked, place, store, first=first)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("data") / "s.zarr"
    make_store(url)
    return url


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """A run of the paper's schedule, which is the shortest."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    train(config(store, run, "meanfield"), progress=False)
    return run


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """The same run as if it had been stopped before its posterior was written."""
    run = tmp_path / "copy"
    shutil.copytree(finished, run)
    (run / "posterior.safetensors").unlink()
    (run / "posterior.nc").unlink()
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed(plain: dict[str, Any], key: str, value: Any) -> Config:
    section = plain
    *path, last = key.split(".")
    for part in path:
        section = section.setdefault(part, {})
    section[last] = value
    return Config.parse(plain, "a test")


# --- what is there ----------------------------------------------------------------------------------------------------


def test_a_run_leaves_what_it_was_and_what_it_found(finished: Path, store: Path) -> None:
    assert {path.name for path in finished.iterdir()} == {
        "config.yaml",
        "rows.json",
        "run.lock",
        "versions.json",
        "checkpoints",
        "metrics.csv",
        "tensorboard",
        "posterior.safetensors",
        "posterior.nc",
    }
    assert {path.name for path in (finished / "checkpoints").iterdir()} == {"last.safetensors", "best.safetensors"}
    written = Config.parse(yaml.safe_load((finished / "config.yaml").read_text()), "config.yaml")
    assert written == config(store, finished, "meanfield")
    rows = json.loads((finished / "rows.json").read_text())
    kept = documents.unsealed(rows, "rows.json", ConfigError, "")
    assert kept == {
        "runs": 450,
        "observations": 60,
        "config": run_directory.settings_checksum(finished / "config.yaml"),
    }
    assert "checksum" in rows
    assert json.loads((finished / "versions.json").read_text())["torch"] == torch.__version__
    assert next((finished / "tensorboard").iterdir()).stat().st_size > 0


def test_a_finished_run_is_loaded_and_not_trained_again(
    finished: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, said = contents(finished), list[str]()
    monkeypatch.setattr(training, "fit", lambda *_, **__: pytest.fail("it is trained again"))
    monkeypatch.setattr(run_directory, "versions", lambda: {"torch": "another"})
    posterior = train(config(store, finished, "meanfield"), progress=False, say=said.append)
    assert torch.equal(posterior.model.kappa, tensors(finished)[".model.state.kappa"])
    assert "done already" in said[0]
    assert contents(finished) == before


# --- another configuration --------------------------------------------------------------------------------------------


def test_another_configuration_is_refused_by_the_keys_that_differ(finished: Path, store: Path) -> None:
    before = contents(finished)
    other = settings(store, finished, "meanfield", seed=5, model={"eta": {"amplitude": 2.0}})
    other["fit"]["emulator"]["steps"] = 9
    with pytest.raises(ConfigError) as raised:
        train(Config.parse(other, "a test"), progress=False)
    text = str(raised.value)
    assert "seed: 0 before, 5 now" in text
    assert "model.eta.amplitude: 1.0 before, 2.0 now" in text
    assert "fit.emulator.steps: 4 before, 9 now" in text
    assert text.count(" before, ") == 3
    assert "another output" in text
    assert contents(finished) == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("store", None),
        ("transforms", {"f0": {"kind": "log"}}),
        ("data.holdout", 0.1),
        ("data.holdout_rows", 7),
        ("devices.precision", "float64"),  # it decides what is computed, not where
    ],
)
def test_what_decides_the_result_may_not_change(finished: Path, store: Path, key: str, value: Any) -> None:
    if key == "store":
        value = str(store.parent / ".." / store.parent.name / store.name)  # the same store: only its name is known
    with pytest.raises(ConfigError, match=rf"{key}\S*: "):
        train(changed(settings(store, finished, "meanfield"), key, value), progress=False)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generate", {"runs": 10}),
        ("devices.accelerator", "cpu"),
        ("devices.devices", 1),
        ("devices.backend", "gloo"),
        ("devices.threads", 1),
        ("checkpoints.every_steps", 2),
        ("checkpoints.keep_best", False),
        ("record_every", 3),
        ("data.memory", "300 MB"),
        ("data.resident", False),
        ("data.scheduler", "synchronous"),
    ],
)
def test_how_and_where_it_runs_may_change(copy: Path, store: Path, key: str, value: Any) -> None:
    asked = changed(settings(store, copy, "meanfield"), key, value)
    assert seen(asked, copy, open_store(store)).checkpoint is not None
    assert any(key == free or key.startswith(f"{free}.") for free in FREE)


def test_a_run_goes_on_streamed_on_other_settings_and_in_another_place(copy: Path, finished: Path, store: Path) -> None:
    asked = settings(store, copy, "meanfield", data={"resident": False, "memory": "100 MB"}, record_every=2)
    train(Config.parse(asked, "a test"), progress=False)
    assert_same(copy, finished)


def test_keys_that_came_later_are_at_their_defaults(copy: Path, store: Path) -> None:
    """A run that was begun before there was such a key goes on, unless the key is set to something else now."""
    path = copy / "config.yaml"
    before = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert before["model"]["eta"]["features"].pop("quasi") is False
    path.write_text(yaml.safe_dump(before), encoding="utf-8")
    run_directory.keep_rows(copy, (450, 60))
    assert seen(changed(settings(store, copy, "meanfield"), "record_every", 3), copy, open_store(store)).checkpoint
    with pytest.raises(ConfigError, match=r"model.eta.features.quasi: False before, True now"):
        seen(changed(settings(store, copy, "meanfield"), "model.eta.features.quasi", True), copy, open_store(store))
    nested = copy / "settings.yaml"
    nested.write_text(yaml.safe_dump({"seed": 1, "config": before}), encoding="utf-8")
    now = {"seed": 1, "config": Config.parse(before).plain()}
    compare(nested, now, "that")
    with pytest.raises(ConfigError, match="seed: 1 before, 2 now"):
        compare(nested, {**now, "seed": 2}, "that")


# --- other things in its place ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["notes.txt", "checkpoints/last.safetensors", "thesis.partial"])
def test_a_directory_with_something_else_is_refused_and_untouched(tmp_path: Path, store: Path, name: str) -> None:
    run = tmp_path / "run"
    (run / name).parent.mkdir(parents=True)
    (run / name).write_text("mine")
    with pytest.raises(ConfigError, match=r"holds something else than a run .*choose another"):
        train(config(store, run), progress=False)
    assert contents(run) == {name: b"mine"}


def test_a_file_is_refused_and_untouched(tmp_path: Path, store: Path) -> None:
    (tmp_path / "run").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        train(config(store, tmp_path / "run"), progress=False)
    assert (tmp_path / "run").read_text() == "mine"


def test_what_a_killed_process_has_left_is_no_obstacle_and_is_swept_away(tmp_path: Path, store: Path) -> None:
    run, left = tmp_path / "run", ("config.yaml.1f.partial", "checkpoints/last.safetensors.2e.partial")
    run.mkdir()
    (run / left[0]).write_text("sto")  # killed while the configuration was written
    asked, opened = config(store, run), open_store(store)
    begin(asked, run, seen(asked, run, opened).rows)
    (run / "checkpoints").mkdir()
    (run / left[1]).write_bytes(b"\0" * 100)
    found = seen(asked, run, opened)
    assert found.checkpoint is None
    begin(asked, run, found.rows)
    assert not list(run.rglob("*.partial"))


def test_a_mistake_can_be_mended_in_place(tmp_path: Path) -> None:
    """Nothing is kept of a run that could not begin: neither its configuration nor how many rows there were."""
    url, run = tmp_path / "s.zarr", tmp_path / "run"
    store = make_store(url, runs=1, observations=1)
    for transforms, message in (({"f1": {"kind": "log"}}, "the output 'f1'"), ({}, "in 1 runs; at least 2 are needed")):
        with pytest.raises(ModelError, match=message):
            train(config(url, run, "meanfield", transforms=transforms), progress=False)
        assert not run.exists()
    append(store, generate(60, 20))
    posterior = train(config(url, run, "meanfield"), progress=False)
    assert posterior.record["rows"] == {"runs": 61, "observations": 21}


# --- damage -----------------------------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut off":
        del data[len(data) // 2 :]
    elif how == "a flipped bit":
        data[-3] ^= 1
    else:
        data[:] = b"nothing of this kind"
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("how", ["cut off", "a flipped bit", "another file"])
def test_a_damaged_checkpoint_is_named_with_a_cure(copy: Path, store: Path, how: str) -> None:
    damage(copy / "checkpoints" / "last.safetensors", how)
    before = contents(copy)
    with pytest.raises(ConfigError, match=r"last\.safetensors.*best\.safetensors.*or delete .* to start from scratch"):
        train(config(store, copy, "meanfield"), progress=False)
    after = contents(copy)
    assert {name: after[name] for name in before if name != "versions.json"} == {
        name: text for name, text in before.items() if name != "versions.json"
    }


def test_the_best_checkpoint_can_take_the_place_of_the_last(copy: Path, finished: Path, store: Path) -> None:
    (copy / "checkpoints" / "best.safetensors").replace(copy / "checkpoints" / "last.safetensors")
    train(config(store, copy, "meanfield"), progress=False)
    assert_same(copy, finished)


@pytest.mark.parametrize("text", ["", "seed: [", "- 1", "\x00"])
@pytest.mark.parametrize("name", ["config.yaml", "rows.json"])
def test_a_damaged_configuration_is_named(copy: Path, store: Path, name: str, text: str) -> None:
    (copy / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        train(config(store, copy, "meanfield"), progress=False)


@pytest.mark.parametrize(
    "text", ["{}", '{"runs": 450}', '{"runs": "many", "observations": 60}', '{"runs": 1e3, "observations": 60}']
)
def test_damaged_counts_of_rows_are_named(copy: Path, store: Path, text: str) -> None:
    (copy / "rows.json").write_text(text)
    with pytest.raises(ConfigError, match=r"rows\.json is damaged"):
        train(config(store, copy, "meanfield"), progress=False)


def test_changed_counts_of_rows_are_refused(copy: Path, store: Path) -> None:
    path = copy / "rows.json"
    path.write_text(path.read_text().replace("450", "45"))
    with pytest.raises(ConfigError, match=r"rows\.json does not match its checksum"):
        train(config(store, copy, "meanfield"), progress=False)


def test_counts_of_rows_of_an_earlier_version_have_no_checksum(copy: Path) -> None:
    (copy / "rows.json").write_text('{"runs": 450, "observations": 60}\n')
    assert run_directory.read_rows(copy / "rows.json") == (450, 60)


@pytest.mark.parametrize(("key", "value"), [("fit.emulator.rate", 0.5), ("seed", 7), ("data.holdout", 0.5)])
def test_a_configuration_that_was_edited_after_the_run_began_is_refused(
    copy: Path, store: Path, key: str, value: Any
) -> None:
    """`vcal train RUN/config.yaml` would go on with it, and the record would say that all was trained so."""
    path = copy / "config.yaml"
    now = changed(yaml.safe_load(path.read_text(encoding="utf-8")), key, value)
    path.write_text(yaml.safe_dump(now.plain()), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.yaml does not match its checksum in rows\.json: it was changed"):
        seen(now, copy, open_store(store))
    rows = json.loads((copy / "rows.json").read_text())
    del rows["config"], rows["checksum"]  # as earlier versions wrote it
    (copy / "rows.json").write_text(json.dumps(rows))
    assert seen(now, copy, open_store(store)).rows == (450, 60)


def test_what_may_change_may_be_edited_too(copy: Path, store: Path, tmp_path: Path) -> None:
    shutil.move(copy, tmp_path / "moved")
    shutil.copytree(store, tmp_path / "moved.zarr")
    plain = settings(tmp_path / "moved.zarr", tmp_path / "moved", "meanfield", data={"resident": False}, record_every=2)
    asked = Config.parse(plain, "a test")
    (tmp_path / "moved" / "config.yaml").write_text(yaml.safe_dump(asked.plain()), encoding="utf-8")
    assert seen(asked, tmp_path / "moved", open_store(tmp_path / "moved.zarr")).checkpoint


def test_a_checkpoint_of_another_version_is_refused(copy: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "SCHEMA", 99)
    with pytest.raises(ConfigError, match="checkpoint of another version"):
        train(config(store, copy, "meanfield"), progress=False)


def test_a_damaged_posterior_is_not_trained_over(copy: Path, finished: Path, store: Path) -> None:
    shutil.copy(finished / "posterior.safetensors", copy)
    damage(copy / "posterior.safetensors", "a flipped bit")
    with pytest.raises(ModelError, match=r"posterior\.safetensors"):
        train(config(store, copy, "meanfield"), progress=False)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_a_run_keeps_to_the_rows_that_it_began_with(tmp_path: Path, finished: Path) -> None:
    """Also when it was stopped before its first checkpoint."""
    url, run = tmp_path / "s.zarr", tmp_path / "run"
    store = make_store(url)
    begin(config(url, run, "meanfield"), run, seen(config(url, run, "meanfield"), run, store).rows)
    append(store, generate(100, 20, seed=9))
    posterior = train(config(url, run, "meanfield"), progress=False)
    assert posterior.record["rows"] == {"runs": 450, "observations": 60}
    assert_same(run, finished)


def test_a_store_with_fewer_rows_than_the_run_began_with_is_refused(tmp_path: Path, copy: Path) -> None:
    url = tmp_path / "s.zarr"
    make_store(url, runs=449)
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace(yaml.safe_load(text)["store"], str(url)))
    with pytest.raises(ConfigError, match=r"began with 450 runs, but .* has 449"):
        train(config(url, copy, "meanfield"), progress=False)


def test_another_process_waits_for_the_first_and_takes_its_rows(tmp_path: Path, store: Path) -> None:
    run, asked, found = tmp_path / "run", config(store, tmp_path / "run"), []
    grown = make_store(tmp_path / "s.zarr", runs=500, observations=80)  # as another process may see it, a little later
    other = threading.Thread(target=lambda: found.append(seen(asked, run, grown, first=False)))
    other.start()
    time.sleep(0.2)
    assert not found
    assert not run.exists()
    begin(asked, run, seen(asked, run, open_store(store)).rows)
    other.join(10)
    assert found[0].rows == (450, 60)


def test_waiting_ends_after_the_time_out_of_the_processes(tmp_path: Path, store: Path) -> None:
    asked = config(store, tmp_path / "run", devices={"timeout": 0.2})
    with pytest.raises(Disconnected, match=r"waited 0.2 s \(devices.timeout\) for the first process to begin the run"):
        seen(asked, tmp_path / "run", open_store(store), first=False)
    with pytest.raises(StoreError, match="there is no store"):
        train(config(tmp_path / "none.zarr", tmp_path / "run"), progress=False)
    assert not (tmp_path / "run").exists()


def test_two_trainings_do_not_share_a_run(store: Path, tmp_path: Path) -> None:
    asked = config(store, tmp_path / "run")
    (tmp_path / "run").mkdir()
    with (
        held(tmp_path / "run"),
        pytest.raises(ConfigError, match="another process is training in"),
        held(tmp_path / "run"),
    ):
        pass
    with held(tmp_path / "run"), pytest.raises(ConfigError, match="another process is training in"):
        train(asked, progress=False)
    assert not (tmp_path / "run" / "config.yaml").exists()
    train(asked, progress=False)  # what the lock has left is no obstacle


def test_a_look_at_the_lock_is_no_obstacle(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with held(tmp_path / "run"):
        assert is_held(tmp_path / "run")
    assert not is_held(tmp_path / "run")
    looking, done = FileLock(tmp_path / "run" / LOCK), threading.Event()

    def look_for_a_moment() -> None:
        with looking:
            done.set()
            time.sleep(0.05)

    thread = threading.Thread(target=look_for_a_moment)
    thread.start()
    done.wait(10)
    with held(tmp_path / "run"):  # waits for it
        pass
    thread.join()


def test_a_training_that_is_refused_says_nothing_of_going_on(copy: Path, store: Path) -> None:
    heard: list[str] = []
    with held(copy), pytest.raises(ConfigError, match="another process is training in"):
        train(config(store, copy, "meanfield"), progress=False, say=heard.append)
    assert heard == []


def test_the_plan_writes_many_epochs_in_full() -> None:
    stage = Chosen("theta", 2000, 0.01, None, 30, 1)
    _, line = describe([stage], Totals(100, 60))
    assert line == "  theta: 2,000 steps of 30 observations (1,000 epochs), rate 0.01"


def test_gpus_that_are_not_there_are_refused_before_any_work(store: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    with pytest.raises(ConfigError, match=r"asks for 1 GPU\(s\), torch .* sees 0; give devices.accelerator=cpu"):
        train(config(store, tmp_path / "run", devices={"accelerator": "gpu"}), progress=False)
    assert not (tmp_path / "run").exists()


def test_the_first_process_is_on_the_first_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_first()
    monkeypatch.setenv("NODE_RANK", "1")
    assert not is_first()


def test_a_store_whose_making_was_interrupted_is_filled(tmp_path: Path) -> None:
    asked = config(tmp_path / "b.zarr", tmp_path / "run", generate={"runs": 50, "observations": 7})
    create(tmp_path / "b.zarr", borehole.problem())
    made = open_or_make(asked)
    assert (made.runs.rows, made.observations.rows) == (50, 7)
    assert open_or_make(asked).runs.rows == 50


def test_a_state_goes_to_the_device_of_the_model_but_for_adams_counters() -> None:
    state = {"a": [torch.ones(2), 3], "phase": {"adam": {"0": {"step": torch.ones(())}}, "sums": (torch.ones(1), None)}}
    found = moved(state, torch.device("meta"))
    assert found["a"][0].is_meta
    assert found["a"][1] == 3
    assert found["phase"]["sums"][0].is_meta
    assert not found["phase"]["adam"]["0"]["step"].is_meta


def test_only_rows_with_a_known_output_are_kept_out(tmp_path: Path) -> None:
    arrays = generate(600, 500)
    arrays["y"][4:] = np.nan
    store = create(
        tmp_path / "s.zarr", {**problem().model_dump(mode="json"), "outputs": [{"name": "f0", "missing": True}]}
    )
    append(store, arrays)
    posterior = train(config(tmp_path / "s.zarr", tmp_path / "run"), progress=False)
    assert posterior.record["assessment"]["observations"]["rows"] <= 2
    assert posterior.record["rows"]["observations"] == 500


def test_trainings_that_begin_at_the_same_moment_make_one_store(tmp_path: Path) -> None:
    asked = config(tmp_path / "s.zarr", tmp_path / "run", generate={"runs": 3000, "observations": 40})
    begin_together = threading.Barrier(4)

    def make() -> tuple[int, int]:
        begin_together.wait()
        store = open_or_make(asked)
        return store.runs.rows, store.observations.rows

    with ThreadPoolExecutor(4) as pool:
        found = [one.result() for one in [pool.submit(make) for _ in range(4)]]
    assert found == [(3000, 40)] * 4
    assert open_store(tmp_path / "s.zarr").runs.rows == 3000
