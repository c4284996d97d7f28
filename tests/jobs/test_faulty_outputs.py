"""Disks that are full, closed or misnamed: every command ends in one line with path, cause and cure."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import yaml

from jobs.cli import main
from storage.errors import StoreError
from storage.room import CURES, because, check_output, check_room, explained
from tests.vcal_dist.training_kit import make_store, problem, settings

NOBODY = 65534
SMALL = 96  # KiB of a disk


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, a finished run, files to ingest, and configurations."""
    found = tmp_path_factory.mktemp("faulty")
    make_store(found / "s.zarr")
    plain = settings(found / "s.zarr", found / "run")
    (found / "c.yaml").write_text(yaml.safe_dump(plain))
    sweep = {"trials": 1, "scheduler": "none", "space": {"model.eta.amplitude": {"loguniform": [0.3, 3.0]}}}
    (found / "sweep.yaml").write_text(yaml.safe_dump(plain | {"sweep": sweep}))
    (found / "problem.yaml").write_text(yaml.safe_dump(problem().model_dump(mode="json")))
    rows = "".join(f"{i / 5000:.4f},0.2,{i * 7 % 5000 / 5000:.4f},{i}\n" for i in range(5000))
    (found / "runs.csv").write_text(f"x,t1,t2,f0\n{rows}")
    (found / "x.csv").write_text("x\n" + "".join(f"{i / 2000}\n" for i in range(2000)))
    (found / "file").write_text("x")
    (found / "closed").mkdir()
    main_of(["train", str(found / "c.yaml")])
    for parent in (found, *found.parents[:-1]):  # pytest keeps them for one user
        parent.chmod(parent.stat().st_mode | 0o055)
    (found / "closed").chmod(0o700)
    return found


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk of a few KiB, a real one."""
    disk = tmp_path_factory.mktemp("disk")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL}k", "tmpfs", str(disk)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no disk can be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def leave(disk: Path, left: int) -> None:
    """Fills the disk but for so many KiB."""
    for old in disk.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    (disk / "fill").write_bytes(bytes((SMALL - left) * 1024))


@contextmanager
def another_user() -> Iterator[None]:
    if os.geteuid():
        pytest.skip("only root can become another user")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def small_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def main_of(argv: list[str]) -> int:
    try:
        main(argv)
    except SystemExit as done:
        return int(done.code or 0)
    return 0


COMMANDS: dict[str, Callable[[Path, Path], list[str]]] = {
    "ingest": lambda at, out: ["ingest", f"{at}/problem.yaml", "--runs", f"{at}/runs.csv", "-o", str(out)],
    "train": lambda at, out: ["train", f"{at}/c.yaml", f"output={out}"],
    "sweep": lambda at, out: ["sweep", f"{at}/sweep.yaml", f"output={out}", "--trial", "0"],
    "predict csv": lambda at, out: ["predict", f"{at}/run", "--at", f"{at}/x.csv", "-o", f"{out}.csv"],
    "predict nc": lambda at, out: ["predict", f"{at}/run", "--at", f"{at}/x.csv", "-o", f"{out}.nc"],
    "report": lambda at, out: ["report", f"{at}/run", "-o", f"{out}.html"],
    "sbc": lambda at, out: ["sbc", f"{at}/c.yaml", "--replicates", "1", "--workers", "1", "-o", str(out)],
    "demo": lambda at, out: ["demo", "--runs", "200", "--observations", "20", "-o", str(out)],
    "reproduce": lambda at, out: ["reproduce", "cell", "-o", str(out)],
}
READING: dict[str, Callable[[Path, Path], list[str]]] = {
    "inspect": lambda _, out: ["inspect", str(out)],
    "diagnose": lambda _, out: ["diagnose", str(out)],
    "refine": lambda _, out: ["refine", str(out)],
    "predict": lambda at, out: ["predict", str(out), "--at", f"{at}/x.csv"],
    "train store": lambda at, out: ["train", f"{at}/c.yaml", f"store={out}", f"output={at}/none"],
    "train config": lambda _, out: ["train", str(out)],
    "ingest problem": lambda at, out: ["ingest", str(out), "--runs", f"{at}/runs.csv", "-o", f"{at}/none"],
}
FAULTS: dict[str, tuple[str, Callable[[], AbstractContextManager[None]]]] = {
    "too long": ("n" * 300, nullcontext),
    "below a file": ("file/out", nullcontext),
    "in /proc": ("/proc/out", nullcontext),
    "closed": ("closed/out", another_user),
    "NUL": ("a\0b", nullcontext),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("command", [*COMMANDS, *READING])
def test_a_path_that_cannot_be_used_ends_in_one_line_at_once(
    folder: Path, command: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, change = FAULTS[fault]
    argv = (COMMANDS | READING)[command](folder, folder / name)
    with change():
        status = main_of(argv)
    said = capsys.readouterr().err.strip()
    assert status == 1
    assert len(said.splitlines()) == 1, said
    assert said.startswith("error: ")
    assert ";" in said, "a cure"
    if fault != "NUL":
        assert str(folder / name) in said


@pytest.mark.parametrize("command", ["ingest", "train", "predict csv", "predict nc", "demo"])
@pytest.mark.parametrize("left", [8, 64])
def test_a_full_disk_ends_in_one_line(
    folder: Path, full: Path, command: str, left: int, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(full, left)
    status = main_of(COMMANDS[command](folder, full / "out"))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert status == 1
    assert len(said) == 1
    assert str(full) in said[0]
    assert "free some room there, or choose another path" in said[0]


@pytest.mark.parametrize("command", ["ingest", "sweep", "predict csv", "predict nc", "sbc"])
def test_a_limit_of_file_sizes_ends_in_one_line(
    folder: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_files():
        status = main_of(COMMANDS[command](folder, tmp_path / "out"))
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (status, len(said)) == (1, 1)
    assert "ulimit -f" in said[0]


def test_a_disk_that_will_be_too_small_is_told_before_the_work(
    folder: Path, full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (
        [*COMMANDS["ingest"](folder, full / "out"), "--compression", "none", "--dtype", "float64"],
        [*COMMANDS["train"](folder, full / "out"), "model.eta.features.features=500"],
    ):
        leave(full, SMALL - 4)
        assert main_of(argv) == 1
        said = capsys.readouterr().err
        assert "KiB left; free some room there" in said or "GiB left; free some room there" in said
        assert not (full / "out").exists()


def test_room_is_asked_of_the_disk_below(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "there", 1, "it")
    with pytest.raises(StoreError, match=rf"it needs .* GiB, and {tmp_path} has .* left; free some room"):
        check_room(tmp_path / "not" / "there", 2**60, "it")
    check_output(tmp_path / "not" / "there")
    assert not list(tmp_path.iterdir())


def test_every_cause_has_a_cure() -> None:
    for number in CURES:
        assert because(OSError(number, os.strerror(number))).startswith(os.strerror(number))
    assert explained(OSError(5, "Input/output error", "/a")).startswith("/a cannot be used: Input/output error; ")
    assert explained(OSError("odd")) == "a file cannot be used: odd; check the path, and run the command again"
