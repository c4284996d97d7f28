"""What faults are injected into: each operation begins in a folder, and can be repeated there after a fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from storage.errors import VcalError
from tests.storage.conftest import PROBLEM, numbered

BEFORE, MORE = 20, 15  # rows; a chunk has 16, so that an append writes one again that holds committed rows


class Told(NamedTuple):
    """An exception as the user hears of it."""

    name: str
    message: str
    fair: bool  # one of the project's own classes, or an OSError that names a path

    @classmethod
    def of(cls, error: BaseException) -> Told:
        own = isinstance(error, VcalError) or (isinstance(error, OSError) and error.filename is not None)
        ended = isinstance(error, SystemExit) and error.code not in (0, None)  # the command line has said why
        return cls(type(error).__name__, str(error), own or ended)


def files_below(folder: Path) -> set[str]:
    """The names of all files; those of TensorBoard tell the time."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if "tensorboard" not in name and not name.endswith(".lock")}


def vcal(*arguments: Any) -> None:
    """The command line, which raises what it would print."""
    from jobs.cli import main

    try:
        main([str(argument) for argument in arguments])
    except SystemExit as ended:
        if ended.code not in (0, None):
            raise


class Operation:
    """By default the same command is simply given again."""

    passed = ""  # calls whose path contains this are left alone

    def prepare(self, folder: Path) -> None:
        """Makes what the operation begins with."""

    def attempt(self, folder: Path) -> None:
        """The operation itself."""
        raise NotImplementedError

    def check(self, folder: Path, told: Told | None) -> None:
        """What must hold after a fault, in a process that knows nothing of it."""

    def recover(self, folder: Path, told: Told | None) -> None:
        """The same command again."""
        self.attempt(folder)

    def complete(self, folder: Path, whole: Path) -> None:
        """What must hold in the end; `whole` is where nothing failed."""


# --- the store --------------------------------------------------------------------------------------------------------


def rows_of(url: Path) -> int:
    """The committed rows; each must be what it was."""
    import storage

    store = storage.open(url)
    for name, expected in zip("xtz", numbered(store.runs.rows), strict=True):
        np.testing.assert_array_equal(store.runs.read()[name], expected)
    assert store.verify() == []
    return store.runs.rows


class Create(Operation):
    """An empty store."""

    def attempt(self, folder: Path) -> None:
        import storage

        storage.create(folder / "s.zarr", PROBLEM, dtype="float64", chunk_rows=16)

    def check(self, folder: Path, told: Told | None) -> None:
        import storage

        if storage.exists(folder / "s.zarr"):
            assert told is None, f"a store that is there was called a failure: {told.message}"
            assert rows_of(folder / "s.zarr") == 0

    def recover(self, folder: Path, told: Told | None) -> None:
        if told is not None:
            self.attempt(folder)

    def complete(self, folder: Path, whole: Path) -> None:
        assert rows_of(folder / "s.zarr") == 0


class Append(Create):
    """Rows behind others, of which the last chunk is written again."""

    def prepare(self, folder: Path) -> None:
        import storage

        super().attempt(folder)
        storage.open(folder / "s.zarr").append_runs(*numbered(BEFORE))

    def attempt(self, folder: Path) -> None:
        import storage

        storage.open(folder / "s.zarr").append_runs(*numbered(MORE, start=BEFORE))

    def check(self, folder: Path, told: Told | None) -> None:
        rows = rows_of(folder / "s.zarr")
        assert rows == (BEFORE + MORE if told is None else BEFORE), f"{rows} rows, and the caller was told {told}"

    def complete(self, folder: Path, whole: Path) -> None:
        import storage

        storage.open(folder / "s.zarr").append_runs(*numbered(1, start=BEFORE + MORE))  # clears what was left
        assert rows_of(folder / "s.zarr") == BEFORE + MORE + 1


class Ingest(Operation):
    """Files into a new store, by the command line."""

    runs, observations = 120, 10

    def prepare(self, folder: Path) -> None:
        x, t, z = numbered(self.runs)
        settings = {"delimiter": ",", "comments": "", "fmt": "%.17g"}
        np.savetxt(folder / "runs.csv", np.concatenate([x, t, z], axis=1), header="a,b,k,f", **settings)
        np.savetxt(
            folder / "field.csv", np.concatenate([x, z], axis=1)[: self.observations], header="a,b,f", **settings
        )
        (folder / "problem.yaml").write_text(json.dumps(PROBLEM), encoding="utf-8")

    def attempt(self, folder: Path) -> None:
        files = ("--runs", folder / "runs.csv", "--observations", folder / "field.csv")
        settings = ("--dtype", "float64", "--chunk-rows", 64)
        vcal("ingest", folder / "problem.yaml", *files, "-o", folder / "s.zarr", *settings)

    def check(self, folder: Path, told: Told | None) -> None:
        import storage

        if storage.exists(folder / "s.zarr"):
            rows = rows_of(folder / "s.zarr")
            assert rows == (self.runs if told is None else 0), f"{rows} rows, and the caller was told {told}"

    def recover(self, folder: Path, told: Told | None) -> None:
        if told is not None:
            self.attempt(folder)

    def complete(self, folder: Path, whole: Path) -> None:
        import storage

        assert rows_of(folder / "s.zarr") == self.runs
        assert storage.open(folder / "s.zarr").observations.rows == self.observations


# --- training ---------------------------------------------------------------------------------------------------------


class Checkpoint(Operation):
    """A checkpoint takes the place of the one before."""

    def _write(self, folder: Path, step: int) -> None:
        import torch

        from vcal_dist import tensorfile

        tree = {"step": step, "weights": torch.full((64,), float(step))}
        tensorfile.write(folder / "checkpoints" / "last.safetensors", tree)

    def _read(self, folder: Path) -> int:
        from vcal_dist import tensorfile

        tree = tensorfile.read(folder / "checkpoints" / "last.safetensors")
        assert (tree["weights"] == tree["step"]).all()
        return int(tree["step"])

    def prepare(self, folder: Path) -> None:
        self._write(folder, 1)

    def attempt(self, folder: Path) -> None:
        self._write(folder, 2)

    def check(self, folder: Path, told: Told | None) -> None:
        assert self._read(folder) in ((1, 2) if told else (2,))

    def complete(self, folder: Path, whole: Path) -> None:
        assert self._read(folder) == 2


class Train(Operation):
    """`vcal train` with few steps and a checkpoint after each."""

    sections: dict[str, Any] = {  # noqa: RUF012 - read only
        "fit": {"emulator": {"steps": 2}, "theta": {"steps": 2}, "joint": {"steps": 1}, "evaluations": 0, "starts": 1},
        "checkpoints": {"every_steps": 2},
    }

    def _configured(self, folder: Path, **more: Any) -> None:
        from tests.vcal_dist.training_kit import make_store, settings

        make_store(folder / "s.zarr", runs=60, observations=12)
        # Relative, so that a copy of the folder is the same.
        plain = settings("s.zarr", "run", **self.sections) | more
        (folder / "small.yaml").write_text(json.dumps(plain), encoding="utf-8")

    def prepare(self, folder: Path) -> None:
        self._configured(folder)

    def attempt(self, folder: Path) -> None:
        vcal("train", folder / "small.yaml")

    def check(self, folder: Path, told: Told | None) -> None:
        from storage.store import open_store

        store = open_store(folder / "s.zarr")
        assert (store.runs.rows, store.observations.rows, store.verify()) == (60, 12, [])
        if told is None:
            assert (folder / "run" / "posterior.safetensors").exists()

    def complete(self, folder: Path, whole: Path) -> None:
        from tests.vcal_dist.training_kit import assert_same

        assert_same(folder / "run", whole / "run")


class Save(Train):
    """The posterior of a run is written to another place."""

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        super().attempt(folder)

    def attempt(self, folder: Path) -> None:
        from vcal_dist.posterior import Posterior

        Posterior.load(folder / "run").save(folder / "copy")

    def check(self, folder: Path, told: Told | None) -> None:
        if told is None or (folder / "copy" / "posterior.safetensors").exists():
            self.complete(folder, folder)

    def complete(self, folder: Path, whole: Path) -> None:
        from tests.vcal_dist.training_kit import assert_same
        from vcal_dist.inference_data import import_arviz

        assert_same(folder / "copy", folder / "run")
        import_arviz().from_netcdf(str(folder / "copy" / "posterior.nc"))


class Sweep(Train):
    """Two trials one after another, and the best of them; what their trainings do is `Train`."""

    passed = "/rung-"

    def prepare(self, folder: Path) -> None:
        space = {"fit.emulator.rate": {"choice": [0.01, 0.05]}}
        section = {"trials": 2, "scheduler": "none", "metric": "bound", "space": space}
        self._configured(folder, sweep=section)

    def attempt(self, folder: Path) -> None:
        for number in range(2):
            vcal("sweep", folder / "small.yaml", "--trial", number)
        vcal("sweep", folder / "small.yaml", "--collect")

    def check(self, folder: Path, told: Told | None) -> None:
        if told is None:
            assert (folder / "run" / "best" / "posterior.safetensors").exists()

    def complete(self, folder: Path, whole: Path) -> None:
        from tests.vcal_dist.training_kit import assert_same

        states = [json.loads(path.read_text())["state"] for path in (folder / "run").glob("trials/*/result.json")]
        assert states == ["done", "done"], f"a fault of the disk became a result of the trial: {states}"
        for number in range(2):
            assert_same(folder / f"run/trials/{number}/rung-2", whole / f"run/trials/{number}/rung-2")


class Sbc(Train):
    """One replicate in this process, and its page."""

    def attempt(self, folder: Path) -> None:
        vcal("sbc", folder / "small.yaml", "--replicates", 1, "--workers", 1, "-o", folder / "sbc")

    def check(self, folder: Path, told: Told | None) -> None:
        if told is None:
            assert (folder / "sbc" / "sbc.html").exists()

    def complete(self, folder: Path, whole: Path) -> None:
        def record(place: Path) -> dict[str, Any]:
            (path,) = (place / "sbc" / "replicates").glob("*.json")
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            return {key: value for key, value in found.items() if key != "seconds"}

        assert record(folder) == record(whole), "the replicate differs from one that was not disturbed"


OPERATIONS: dict[str, Operation] = {
    "create": Create(),
    "append": Append(),
    "ingest": Ingest(),
    "checkpoint": Checkpoint(),
    "train": Train(),
    "save": Save(),
    "sweep": Sweep(),
    "sbc": Sbc(),
}
