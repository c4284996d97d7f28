"""What an experiment of the paper is to the command that runs it, and the ways that all of them go."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

import storage
from storage.places import write_durably
from storage.problem import Problem
from storage.store import exists

if TYPE_CHECKING:
    from vcal_dist.posterior import Posterior

Say = Callable[[str], None]
STORE = "data.zarr"


class Lines(NamedTuple):
    """A table in plain texts."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass(frozen=True)
class Figure:
    """A figure of the table that is printed."""

    key: str  # in results.json
    label: str
    paper: float | None = None  # what the paper reports
    floor: float | None = None  # what the truth, or the exact answer, itself has
    unit: str = ""


@dataclass(frozen=True)
class Outcome:
    """What one seed gave."""

    ours: Mapping[str, float]  # by the key of a figure
    floor: Mapping[str, float] = field(default_factory=dict)  # where that depends on the data
    details: Mapping[str, Any] = field(default_factory=dict)  # whatever else JSON can hold
    charts: Mapping[str, Any] = field(default_factory=dict)  # Altair charts by the name of their file


@dataclass(frozen=True)
class Experiment:
    """One experiment. `settings(quick)` is everything that decides what is run, in plain values."""

    name: str
    title: str
    notes: tuple[str, ...]  # what a reader of the table must know
    figures: Callable[[bool], tuple[Figure, ...]]  # of the quick version, or of the whole
    settings: Callable[[bool], dict[str, Any]]
    run: Callable[[Path, int, dict[str, Any], Say], Outcome]  # folder, seed, settings, say
    table: Callable[[Mapping[str, Any]], Lines] | None = None  # of a seed's details, beside the figures


def ingested(folder: Path, problem: Problem, runs: Mapping[str, ArrayLike], field: Mapping[str, ArrayLike]) -> Path:
    """The store in this folder, made of files as a user's would be; one that is whole already stays.

    `runs` has x (N, d1), t (N, d2), z (N, K); `field` has x (n, d1), y (n, K) and maybe noise (n, K).
    """
    store = folder / STORE
    if exists(store) and storage.open(store).observations.rows:
        return store
    folder.mkdir(parents=True, exist_ok=True)
    files = {"runs": (folder / "runs.npz", runs), "observations": (folder / "observations.npz", field)}
    for path, arrays in files.values():
        named: dict[str, Any] = {name: np.asarray(values) for name, values in arrays.items()}
        content = io.BytesIO()
        np.savez(content, **named)
        write_durably(path, content.getbuffer())
    storage.ingest(
        problem, runs=[files["runs"][0]], observations=[files["observations"][0]], store=store, dtype="float64"
    )
    for path, _ in files.values():
        path.unlink()
    return store


def trained(store: Path, output: Path, say: Say, **sections: Any) -> tuple[Posterior, float]:
    """The posterior of an ordinary training, and its seconds from the store to the posterior."""
    from vcal_dist.config import Config
    from vcal_dist.training import train

    config = Config.parse({"store": str(store), "output": str(output), **sections}, source=f"the settings of {output}")
    say(f"training {output.name}")
    posterior = train(config, progress=False)
    return posterior, float(posterior.record["seconds"])
