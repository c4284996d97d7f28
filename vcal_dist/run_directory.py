"""The run directory: what was asked for, with which versions, and what is there to go on from.

runs/NAME/
  config.yaml             what was asked for, with every default written out
  versions.json           of Python and the packages
  checkpoints/            last.safetensors, best.safetensors
  metrics.csv, tensorboard/
  posterior.safetensors, posterior.nc
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from storage.places import write_durably
from vcal_dist import tensorfile
from vcal_dist.checkpoints import LAST, SCHEMA
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError

CONFIG, VERSIONS, CHECKPOINTS = "config.yaml", "versions.json", "checkpoints"
PACKAGES = ("vcal-dist", "torch", "lightning", "numpy", "zarr", "dask", "ray", "arviz")
# What may change between an interrupted run and the one that goes on with it.
FREE = (
    "output",
    "generate",
    "devices",
    "checkpoints",
    "record_every",
    "data.memory",
    "data.resident",
    "data.scheduler",
)


def begin(config: Config, run: Path, *, first: bool) -> dict[str, Any] | None:
    """Writes the configuration into a new run directory, or compares it with that of the run there.

    Returns the last checkpoint, if there is one. Only the `first` process writes.
    """
    path = run / CONFIG
    if path.exists():
        _compare(config, path, run)
    elif run.exists() and any(run.iterdir()):
        raise ConfigError(f"output is {run}, which holds something else than a run; choose another, or empty it")
    elif first:
        write_durably(path, _yaml(config.plain()).encode())
    if first:
        write_durably(run / VERSIONS, (json.dumps(versions(), indent=2) + "\n").encode())
    last = run / CHECKPOINTS / LAST
    if not last.exists():
        return None
    state = tensorfile.read(last)
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        raise ConfigError(f"{last} is a checkpoint of another version; delete {run} to begin anew, or use that version")
    return dict(state)


def _compare(config: Config, path: Path, run: Path) -> None:
    before = yaml.safe_load(path.read_text(encoding="utf-8"))
    now = yaml.safe_load(_yaml(config.plain()))
    changed = [
        f"  {key}: {old!r} before, {new!r} now"
        for key, old, new in _differences(before, now)
        if not any(key == free or key.startswith(f"{free}.") for free in FREE)
    ]
    if changed:
        raise ConfigError(
            f"the run in {run} was begun with another configuration:\n"
            + "\n".join(changed)
            + "\nChoose another output, or delete that directory to begin anew."
        )


def _differences(before: Any, now: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = {**before, **now}
        return [d for k in keys for d in _differences(before.get(k), now.get(k), f"{key}.{k}".lstrip("."))]
    return [] if before == now else [(key, before, now)]


def _yaml(plain: dict[str, Any]) -> str:
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text


def versions() -> dict[str, str]:
    """Of Python, the machine and the packages."""
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
