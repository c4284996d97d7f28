"""What is fuzzed: for each kind of input the sound one, how it is changed, and who reads it."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st

import storage
from storage import layout, sources
from storage.problem import load_problem, parse_problem
from tests.faults.fuzz_kit import ODD, ODD_TEXTS, changed, csv_text, damaged, yaml_text
from tests.storage.conftest import PROBLEM, numbered

GOLDEN = Path(__file__).parents[1] / "golden" / "run-4"
CONFIG: dict[str, Any] = {
    "store": "s.zarr",
    "output": "run",
    "seed": 1,
    "model": {"discrepancy": "additive", "eta": {"features": {"features": 6}, "hidden": [2]}, "free_kappa": False},
    "transforms": {"f": {"kind": "log"}},
    "fit": {"weights": "collapsed", "emulator": {"steps": 4, "rate": 0.1}, "theta": {"epochs": 2}, "start": {"k": 0.5}},
    "data": {"memory": "64 MB", "holdout": 0.1, "scheduler": "threads"},
    "devices": {"accelerator": "cpu", "devices": 1},
    "checkpoints": {"every_steps": 2, "every_seconds": None},
}  # fmt: skip
SPACE: dict[str, Any] = {
    "fit.emulator.rate": {"loguniform": [0.003, 0.3]},
    "fit.rho": {"uniform": [0.1, 0.2]},
    "model.eta.features.features": {"int": [20, 40], "step": 2},
    "fit.theta.rate": {"choice": [0.1, 0.2], "when": {"fit.weights": "collapsed"}},
}
RICH = {
    **PROBLEM,
    "description": "a toy",
    "calibration_inputs": [
        {"name": "k", "bounds": [0, 1], "prior": {"family": "beta", "a": 2, "b": 3}, "unit": "N/m"},
        {"name": "l", "bounds": [0.1, 9], "prior": {"family": "normal", "mean": 1, "sd": 2}},
    ],
}


Changed = tuple[str, bytes]  # the name of a file, and what it holds now


@dataclass(frozen=True)
class Target:
    """Sound inputs, changed ones, and what reads one in an empty folder. `share` is how many of all cases it gets."""

    sound: Callable[[], list[Any]]
    inputs: Callable[[], st.SearchStrategy[Any]]
    read: Callable[[Any, Path], None]
    share: float


# --- texts of the user ------------------------------------------------------------------------------------------------


def read_problem(text: bytes, folder: Path) -> None:
    (folder / "problem.yaml").write_bytes(text)
    problem = load_problem(folder / "problem.yaml")
    parse_problem(problem.model_dump(mode="json"))
    from vcal_dist.priors import ThetaPrior

    ThetaPrior.from_problem(problem)


def read_config(text: bytes, folder: Path) -> None:
    from jobs.config import load
    from vcal_dist.config import Config

    (folder / "config.yaml").write_bytes(text)
    config = load(folder / "config.yaml")
    yaml.safe_dump(config.plain(), allow_unicode=True).encode()
    assert Config.parse(config.plain()) == config


def read_overrides(given: list[str], folder: Path) -> None:
    from jobs.config import configure

    configure(CONFIG, given)


def read_sweep(text: bytes, folder: Path) -> None:
    from jobs.sweeps.settings import Sweep, load

    (folder / "sweep.yaml").write_bytes(text)
    sweep = load(folder / "sweep.yaml")
    assert Sweep.parse(sweep.plain()) == sweep


def overrides() -> st.SearchStrategy[list[str]]:
    keys = [
        "fit.emulator.steps",
        "model.eta.hidden",
        "transforms.f",
        "seed",
        "fit",
        "data.memory",
        "store",
        "sweep.trials",
    ]
    key = st.one_of(st.sampled_from(keys), st.sampled_from(ODD_TEXTS), st.text(max_size=10))
    value = st.one_of(ODD.map(lambda odd: json.dumps(odd)), st.sampled_from(ODD_TEXTS), st.text(max_size=20))
    return st.lists(
        st.tuples(key, st.sampled_from(["=", "=", "=", "", "=="]), value).map("".join), min_size=1, max_size=3
    )


# --- files of runs ----------------------------------------------------------------------------------------------------


@cache
def sound_files() -> dict[str, bytes]:
    """The same few rows in every format."""
    with tempfile.TemporaryDirectory() as folder:
        return _written(Path(folder))


def _written(folder: Path) -> dict[str, bytes]:
    import h5py
    import pyarrow as pa
    import pyarrow.parquet
    import xarray as xr

    x, t, z = numbered(12)
    columns = {"a": x[:, 0], "b": x[:, 1], "k": t[:, 0], "f": z[:, 0]}
    data = xr.Dataset({name: ("row", values) for name, values in columns.items()})
    text = (
        "a,b,k,f\n"
        + "\n".join(",".join(map(repr, map(float, row))) for row in zip(*columns.values(), strict=True))
        + "\n"
    )
    parquet, npz, packed = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pyarrow.parquet.write_table(pa.table(columns), parquet)
    np.savez(npz, **columns)
    np.savez_compressed(packed, x=x, t=t, z=z)
    data.to_netcdf(folder / "four.nc", engine="h5netcdf")
    data.to_netcdf(folder / "three.nc", engine="scipy")
    with h5py.File(folder / "data.h5", "w") as file:
        for name, values in columns.items():
            file.create_dataset(f"runs/{name}", data=values, compression="gzip")
    return {
        "runs.csv": text.encode(),
        "runs.csv.gz": gzip.compress(text.encode()),
        "runs.parquet": parquet.getvalue(),
        "runs.npz": npz.getvalue(),
        "packed.npz": packed.getvalue(),
        "four.nc": (folder / "four.nc").read_bytes(),
        "three.nc": (folder / "three.nc").read_bytes(),
        "runs.h5": (folder / "data.h5").read_bytes(),
    }


def read_source(case: Changed, folder: Path) -> None:
    name, data = case
    (folder / name).write_bytes(data)
    request = sources.Request("runs", layout.columns(parse_problem(PROBLEM), "runs"))
    (file,) = sources.expand([folder / name])
    for partition in sources.plan(file, request).partitions:
        for _ in sources.pieces(partition):
            pass


def files() -> st.SearchStrategy[Changed]:
    cases = [one(sound_files(), name) for name in sound_files()]
    return st.one_of(*cases, st.tuples(st.just("runs.csv"), csv_text(["a", "b", "k", "f"])))


# --- what the project writes ------------------------------------------------------------------------------------------


@cache
def store_files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        problem = RICH | {"calibration_inputs": PROBLEM["calibration_inputs"]}
        store = storage.create(folder / "s.zarr", problem, chunk_rows=16)
        store.append_runs(*numbered(20))
        x, _, y = numbered(5)
        store.append_observations(x, y)
        store.keep_run_count()
        return _read_all(folder)


def stores() -> st.SearchStrategy[Changed]:
    names = [name for name, data in store_files().items() if data]
    return st.sampled_from(["s.zarr/zarr.json"] * len(names) + names).flatmap(lambda name: one(store_files(), name))


def one(sound: dict[str, bytes], name: str) -> st.SearchStrategy[Changed]:
    """One file of several is changed, as suits it."""
    data: st.SearchStrategy[bytes] = damaged(sound[name])
    if name.endswith(".json"):
        document = changed(json.loads(sound[name])).map(lambda tree: json.dumps(tree).encode())
        data = st.one_of(document, document, data)
    elif name.endswith(".yaml"):
        data = st.one_of(yaml_text(yaml.safe_load(sound[name])), data)
    elif name.endswith(".safetensors"):
        data = st.one_of(trees(sound[name]), data)
    return st.tuples(st.just(name), data)


def read_store(case: Changed, folder: Path) -> None:
    _write_all(store_files() | dict([case]), folder)
    store = storage.open(folder / "s.zarr")
    store.runs.read(0, min(store.runs.rows, 100))
    store.verify()
    store.summary()
    store.count_runs()
    if store.runs.rows == 20:
        store.append_runs(*numbered(1, start=20))


def _read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _write_all(files: dict[str, bytes], folder: Path) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


METRICS = "step,phase,leg,batch,seconds,rows_per_second,wait_fraction,loss,emulator_error,theta.t\n" + "".join(
    f"{step},emulator,0,{step},{step / 10},100,0.1,{1 / step},0.5,1.0\n" for step in range(1, 6)
)


@cache
def run_files() -> dict[str, bytes]:
    return _read_all(GOLDEN / "run") | {"metrics.csv": METRICS.encode()}


def runs() -> st.SearchStrategy[tuple[Changed, bool]]:
    """One file of a run is changed; the posterior is there or is not yet."""
    files = st.sampled_from(sorted(run_files())).flatmap(lambda name: one(run_files(), name))
    return st.tuples(files, st.booleans())


def read_run(case: tuple[Changed, bool], folder: Path) -> None:
    """`vcal inspect`, and what a resumed training looks at."""
    from jobs.config import load
    from jobs.inspect_run import inspect_run
    from vcal_dist.posterior import FILE
    from vcal_dist.run_directory import look
    from vcal_dist.run_place import run_place

    (name, data), done = case
    _write_all(run_files() | {name: data}, folder / "run")
    if not done:
        (folder / "run" / FILE).unlink()
    shutil.copytree(GOLDEN / "store", folder / "store")
    with contextlib.redirect_stdout(io.StringIO()):
        inspect_run(folder / "run", json=False)
    config = load(folder / "run" / "config.yaml").model_copy(update={"store": "store"})
    with run_place(folder / "run") as place:
        look(config, place, storage.open(folder / "store"))


def trees(sound: bytes) -> st.SearchStrategy[bytes]:
    """Files of tensors whose tree, or whose tensors, are changed; their digest is right."""
    import torch

    from vcal_dist import tensorfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sound").write_bytes(sound)
        tree = tensorfile.read(Path(folder) / "sound")
    tensors = [torch.zeros(0), torch.zeros(3), torch.full((1, 3), torch.nan), torch.tensor(1), torch.ones(2, 2).bool()]
    values = st.one_of(ODD, st.sampled_from(tensors))

    def written(changed_tree: Any) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            try:
                tensorfile.write(Path(folder) / "changed", changed_tree)
            except Exception:
                return sound  # it is not a tree that can be written
            return (Path(folder) / "changed").read_bytes()

    return changed(tree, values).map(written)


def posteriors() -> st.SearchStrategy[bytes]:
    sound = (GOLDEN / "run" / "posterior.safetensors").read_bytes()
    return st.one_of(trees(sound), trees(sound), damaged(sound))


def read_posterior(data: bytes, folder: Path) -> None:
    from vcal_dist.posterior import Posterior

    (folder / "posterior.safetensors").write_bytes(data)
    posterior = Posterior.load(folder)
    posterior.sample(3, seed=0)
    predicted = posterior.predict(np.array([[0.5]]))
    assert np.isfinite(predicted.mean).all(), "it loads, and predicts what is not finite"


def mixtures() -> st.SearchStrategy[Changed]:
    return one(_read_all(GOLDEN / "mixture"), "mixture.json")


def read_mixture(case: Changed, folder: Path) -> None:
    from vcal_dist.mixed import Averaged

    _write_all(_read_all(GOLDEN / "mixture") | dict([case]), folder)
    Averaged.load(folder).sample(3, seed=0)


TRIAL: dict[str, Any] = {
    "settings.json": {"fit.emulator.rate": 0.01},
    "result.json": {
        "state": "done",
        "reason": None,
        "rungs": [{"rung": 2, "budget": 9, "metric": 1.5, "seconds": 1.0}],
    },
}
TRIAL_FILES = {name: json.dumps(content).encode() for name, content in TRIAL.items()}
SWEEP = {"trials": 1, "space": {"fit.emulator.rate": {"choice": [0.01]}}}


def trials() -> st.SearchStrategy[Changed]:
    return st.sampled_from(list(TRIAL)).flatmap(lambda name: one(TRIAL_FILES, name))


def read_trials(case: Changed, folder: Path) -> None:
    from jobs.sweeps import trial
    from jobs.sweeps.outcome import ranked, row
    from jobs.sweeps.settings import Sweep

    sweep = Sweep.parse({**CONFIG, "output": str(folder), "sweep": SWEEP})
    _write_all(TRIAL_FILES | dict([case]), folder / "trials" / "0")
    found = ranked(trial.read_trials(sweep))
    json.dumps([row(trial) for trial in found])
    trial.left(sweep)


def _as_text(plain: Any) -> Callable[[], list[bytes]]:
    return lambda: [json.dumps(plain).encode()]


TRIED = {**CONFIG, "sweep": {"trials": 3, "space": SPACE}}
TARGETS: dict[str, Target] = {
    "problem": Target(_as_text(RICH), lambda: yaml_text(RICH), read_problem, 0.2),
    "config": Target(_as_text(CONFIG), lambda: yaml_text(CONFIG), read_config, 0.15),
    "overrides": Target(lambda: [["fit.emulator.steps=3", "seed=2"]], overrides, read_overrides, 0.1),
    "sweep": Target(_as_text(TRIED), lambda: yaml_text(TRIED), read_sweep, 0.05),
    "files": Target(lambda: list(sound_files().items()), files, read_source, 0.24),
    "store": Target(lambda: list(store_files().items())[:1], stores, read_store, 0.1),
    "run": Target(lambda: [(next(iter(run_files().items())), done) for done in (True, False)], runs, read_run, 0.03),
    "posterior": Target(lambda: [run_files()["posterior.safetensors"]], posteriors, read_posterior, 0.05),
    "mixture": Target(lambda: [next(iter(_read_all(GOLDEN / "mixture").items()))], mixtures, read_mixture, 0.03),
    "trials": Target(lambda: [next(iter(TRIAL_FILES.items()))], trials, read_trials, 0.05),
}
