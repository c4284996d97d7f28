"""Calibration from Python in two lines, from a store or from arrays."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from storage import strict_yaml
from storage.labels import by_name
from storage.precision import choose
from storage.problem import Problem, load_problem, parse_problem
from storage.store import Store, create, exists, open_store
from vcal_dist.config import Config
from vcal_dist.errors import INTERRUPTED, PREEMPTED, ModelError, Preempted
from vcal_dist.posterior import Posterior
from vcal_dist.run_directory import DATA, refuse_foreign
from vcal_dist.training import Say, processes, train

ARRAYS = ("x_runs", "t", "z", "x", "y")


@runtime_checkable
class _Named(Protocol):
    def _asdict(self) -> dict[str, Any]: ...


def calibrate(
    data: str | Path | Store | Mapping[str, Any] | _Named,
    /,  # `data` is a section of the settings too
    problem: Problem | Mapping[str, Any] | str | Path | None = None,
    *,
    output: str | Path | None = None,
    progress: bool = True,
    say: Say = lambda _: None,
    **settings: Any,
) -> Posterior:
    """The posterior of θ given simulator runs and field observations.

    `data` is a store, or arrays by name: runs `x_runs` (N, d1), `t` (N, d2), `z` (N, outputs) and observations
    `x` (n, d1), `y` (n, outputs) and optionally `noise`. Arrays need a `problem`, as an object or a file.
    `settings` are the sections of a configuration: `model`, `fit`, `devices`, `seed` and so on, as objects or mappings.
    With `output` the run stays there, and the same call goes on with it; otherwise only the posterior remains.

    >>> posterior = calibrate("pendulum.zarr", fit={"weights": "fullrank"}, seed=1)  # doctest: +SKIP
    """
    with tempfile.TemporaryDirectory(prefix="vcal-") as temporary:
        place = Path(output) if output is not None else Path(temporary) / "run"
        url = data.url if isinstance(data, Store) else data
        if not isinstance(url, str | Path):
            refuse_foreign(place)
            url = _as_store(url, problem, (Path(temporary) if output is None else place) / DATA).url
        elif problem is not None:
            raise ModelError("problem is given beside a store, which has its own; leave it out")
        config = Config.parse(
            {**{key: _plain(value) for key, value in settings.items()}, "store": str(url), "output": str(place)},
            "calibrate(...)",
        )
        if processes(config.devices) > 1:
            return _in_other_processes(config, Path(temporary), progress)
        return train(config, progress=progress, say=say)


def _as_store(
    data: Mapping[str, Any] | _Named, problem: Problem | Mapping[str, Any] | str | Path | None, url: Path
) -> Store:
    arrays = dict(data if isinstance(data, Mapping) else data._asdict())
    noise = arrays.pop("noise", None)
    if set(arrays) != set(ARRAYS):
        raise ModelError(
            f"the arrays are {', '.join(sorted(arrays)) or 'none'}; accepted: {', '.join(ARRAYS)} and optionally noise"
        )
    if problem is None:
        raise ModelError("arrays need a problem, which names their columns, bounds and priors; give problem=…")
    if isinstance(problem, str | Path):
        problem = load_problem(problem)
    elif not isinstance(problem, Problem):
        problem = parse_problem(dict(problem))
    columns = problem.runs_columns | problem.observations_columns
    columns["x_runs"] = columns["x"]
    matrices = {name: np.asarray(by_name(name, arrays[name], columns[name]), np.float64) for name in ARRAYS}
    noise = None if noise is None else by_name("noise", noise, columns["noise"])
    ranges = [(name, float(np.nanmin(m)), float(np.nanmax(m))) for name, m in matrices.items() if m.size]
    rows = {"runs": len(matrices["z"]), "observations": len(matrices["y"])}
    made = not exists(url)
    store = create(url, problem, dtype=choose("auto", ranges)[0], expected_rows=rows) if made else open_store(url)
    try:
        if not store.runs.rows:  # none either where a process was killed
            store.append_runs(matrices["x_runs"], matrices["t"], matrices["z"])
        if not store.observations.rows:
            store.append_observations(matrices["x"], matrices["y"], noise)
    except BaseException:
        if made:
            shutil.rmtree(url, ignore_errors=True)
        raise
    if not made and (store.problem != problem or not _holds(store, matrices, noise)):
        raise ModelError(f"the run in {url.parent} began with other data; choose another output, or delete it")
    return store


def _holds(store: Store, matrices: dict[str, Any], noise: Any) -> bool:
    """Whether a store has these rows and no others."""
    runs = {"x": matrices["x_runs"], "t": matrices["t"], "z": matrices["z"]}
    field = {"x": matrices["x"], "y": matrices["y"]} | ({} if noise is None else {"noise": noise})
    return all(
        table.columns.keys() == given.keys()
        and all(
            np.array_equal(rows, np.asarray(given[name], rows.dtype).reshape(len(given[name]), -1), equal_nan=True)
            for name, rows in table.read().items()
        )
        for table, given in ((store.runs, runs), (store.observations, field))
    )


def _plain(value: Any) -> Any:
    """Settings as a mapping."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _in_other_processes(config: Config, temporary: Path, progress: bool) -> Posterior:
    """Several processes begin with a program of their own: a notebook cannot be started twice."""
    path = temporary / "config.yaml"
    path.write_text(strict_yaml.dump(config.plain()), encoding="utf-8")
    quiet = [] if progress else ["--quiet"]
    with subprocess.Popen([sys.executable, "-m", "vcal_dist", str(path), *quiet]) as started:  # noqa: S603 - no shell
        while True:
            try:
                status = started.wait()
                break
            except KeyboardInterrupt:  # it has heard of it as well, and writes a checkpoint first
                continue
    if status in (PREEMPTED, INTERRUPTED):
        number = signal.SIGINT if status == INTERRUPTED else signal.SIGTERM
        raise Preempted(f"stopped by a signal; with output={config.output} the same call goes on from there", number)
    if status:
        raise ModelError(f"training in {processes(config.devices)} processes ended with status {status}; see above")
    assert config.output is not None
    return Posterior.load(config.output)
