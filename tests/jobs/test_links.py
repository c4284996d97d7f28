"""Symbolic links and names in what somebody else made: nothing is written outside of a run, a store or a sweep."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import storage
from jobs.cli import main
from storage import strict_yaml
from storage.errors import StoreError
from tests.vcal_dist.test_checkpoints import At, Interruption, interrupt
from tests.vcal_dist.training_kit import append, config, generate, make_store, settings
from vcal_dist.errors import ConfigError
from vcal_dist.run_place import inside, run_place
from vcal_dist.training import train


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, a run that is finished and one that was stopped."""
    folder = tmp_path_factory.mktemp("made")
    make_store(folder / "s.zarr")
    train(config(folder / "s.zarr", folder / "done"), progress=False)
    with pytest.raises(Interruption):
        train(config(folder / "s.zarr", folder / "stopped"), progress=False, callbacks=[At(4, interrupt)])
    return folder


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """A folder and a file of the user's, which must be the same afterwards."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "precious").write_text("precious")
    yield folder
    assert [(f.name, f.read_text()) for f in folder.iterdir()] == [("precious", "precious")]


def vcal(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    return int(end.value.code or 0)


def linked(run: Path, name: str, mine: Path) -> None:
    """Puts a link in the place of a file or folder of a run."""
    target, old = (mine if "." not in name or name.startswith(".") else mine / "precious"), run / name
    if old.is_dir():
        shutil.rmtree(old)
    old.unlink(missing_ok=True)
    old.symlink_to(target)


@pytest.mark.parametrize(
    "name", ["run.lock", "metrics.csv", "config.yaml", "checkpoints", "tensorboard", ".ray", "checkpoints/x.partial"]
)
def test_training_writes_through_no_link(made: Path, tmp_path: Path, mine: Path, name: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "stopped", run)
    linked(run, name, mine)
    with pytest.raises(ConfigError, match=rf"{name} is a symbolic link to .*mine.*outside of .*; replace it"):
        train(config(made / "s.zarr", run), progress=False)


@pytest.mark.parametrize("command", [["refine", "--evaluations", "100"], ["report", "--format", "png"]])
def test_nor_do_the_commands_that_add_to_a_run(
    made: Path, tmp_path: Path, mine: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "done", run)
    linked(run, "figures", mine)
    assert vcal(command[0], run, *command[1:]) == 1
    assert "figures is a symbolic link" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["sweep", "--trial", "0"], ["sbc", "--replicates", "1"]])
def test_nor_a_sweep_or_a_check_of_coverage(
    made: Path, tmp_path: Path, mine: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    space = {"trials": 1, "scheduler": "none", "space": {"model.eta.amplitude": {"loguniform": [0.3, 3.0]}}}
    (tmp_path / "c.yaml").write_text(strict_yaml.dump(settings(made / "s.zarr", output) | {"sweep": space}))
    (output / "trials").symlink_to(mine)
    (output / "replicates").symlink_to(mine)
    more = ["-o", str(output)] if command[0] == "sbc" else []
    assert vcal(command[0], tmp_path / "c.yaml", *command[1:], *more) == 1
    assert "is a symbolic link" in capsys.readouterr().err


def test_a_link_inside_of_a_run_and_a_run_behind_a_link_are_fine(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "stopped", tmp_path / "real")
    (tmp_path / "real" / "notes").symlink_to("config.yaml")
    (tmp_path / "run").symlink_to(tmp_path / "real")
    train(config(made / "s.zarr", tmp_path / "run"), progress=False)
    assert (tmp_path / "real" / "posterior.safetensors").exists()


@pytest.mark.parametrize("name", [".writer.lock", "runs", "observations", "runs/z"])
def test_a_store_is_written_through_no_link(tmp_path: Path, mine: Path, name: str) -> None:
    make_store(tmp_path / "s.zarr")
    at = tmp_path / "s.zarr" / name
    if at.is_dir():
        shutil.rmtree(at)
    at.unlink(missing_ok=True)
    at.symlink_to(mine / "precious" if name == ".writer.lock" else mine)
    with pytest.raises(StoreError, match="is a symbolic link to"):
        append(storage.open(tmp_path / "s.zarr"), generate(5, 5))


def test_a_link_is_not_followed_to_what_is_sent(tmp_path: Path, mine: Path) -> None:
    with run_place("memory://bucket/sent") as place:
        place.path.mkdir()
        (place.path / "own").write_text("own")
        (place.path / "stolen").symlink_to(mine / "precious")
        place.send()
    assert fsspec.filesystem("memory").find("/bucket/sent") == ["/bucket/sent/own"]


@given(name=st.text(st.sampled_from("./\\a\0~:*\n") | st.characters(), max_size=12))
def test_every_name_is_inside_or_refused(name: str) -> None:
    folder = Path("/nowhere/run")
    try:
        found = inside(folder, name, "s3://bucket/run")
    except ConfigError:
        return
    assert folder in found.resolve().parents


def test_a_url_that_ends_above_itself_is_refused() -> None:
    for url in ("memory://bucket/runs/..", "memory://bucket/runs/x\\..\\y"):
        with pytest.raises(ConfigError, match="outside"), run_place(url):
            pass


def test_a_run_that_does_not_fit_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/bucket/big/config.yaml", b"x")
    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.size", 2**60)  # as a server may say
    with run_place("memory://bucket/big") as place, pytest.raises(StoreError, match=r"needs .* GiB, and .* left"):
        place.fetch()
