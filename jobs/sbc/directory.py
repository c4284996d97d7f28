"""The directory of a simulation-based calibration: what was asked for, and what is there of it.

<output>/
  settings.yaml           what was asked for, with every default
  emulator.safetensors    what all replicates begin from
  replicates/NNNN.json    one replicate each: its truth and what came of it
  sbc.json, sbc.html      all of them together, for programs and to look at
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.sbc.simulator import digest
from storage import documents, strict_yaml
from storage.places import write_durably
from vcal_dist import run_directory
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError
from vcal_dist.report.page import finite
from vcal_dist.run_directory import compare, counted, refuse_links_out

SETTINGS, EMULATOR, REPLICATES = "settings.yaml", "emulator.safetensors", "replicates"
RESULTS, PAGE = "sbc.json", "sbc.html"
# What may change between an interrupted command and the one that goes on with it.
FREE = ("simulator.at", "rows.checksum", *(f"config.{name}" for name in run_directory.FREE))


@dataclass(frozen=True)
class Asked:
    """What a command asks for, in plain values: they go to other processes."""

    config: str  # as JSON
    seed: int  # of the truths and their data
    simulator: str | None  # FILE.py:function
    rows: tuple[int, int]  # runs and observations that the store had when the first command began
    output: Path

    @property
    def settings(self) -> Config:
        """The configuration."""
        return Config.parse(json.loads(self.config))

    @property
    def emulator(self) -> Path:
        """Where the emulator that all share lies."""
        return self.output / EMULATOR

    def replicate(self, number: int) -> Path:
        """Where a replicate lies."""
        return self.output / REPLICATES / f"{number:04d}.json"

    def plain(self) -> dict[str, Any]:
        """All that decides what comes out."""
        simulator = None if self.simulator is None else {"at": self.simulator, "sha256": digest(self.simulator)}
        rows = documents.sealed(dict(zip(("runs", "observations"), self.rows, strict=True)))
        return {"seed": self.seed, "simulator": simulator, "rows": rows, "config": json.loads(self.config)}


def ask(config: Config, seed: int, simulator: str | None, rows: tuple[int, int], output: Path) -> Asked:
    """What is asked for; a directory that was begun before goes on with the rows that the store had then."""
    path = output / SETTINGS
    refuse_links_out(output)
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output is {output}, which is a file; a directory is needed: choose another")
    if path.is_file():
        rows = _rows_before(path, rows, config.store)
    asked = Asked(json.dumps(config.plain()), seed, simulator, rows, output)
    if path.is_file():
        compare(path, asked.plain(), f"the simulation-based calibration in {output}", FREE)
    elif output.is_dir():
        _refuse_foreign(output)
    return asked


def begin(asked: Asked) -> None:
    """Writes down what is asked for, once it is known to make sense."""
    if not (asked.output / SETTINGS).is_file():
        write_durably(asked.output / SETTINGS, strict_yaml.dump(asked.plain()).encode())


def write(path: Path, plain: dict[str, Any]) -> None:
    """A file of JSON that is whole or not there; null where a number is not finite."""
    write_durably(path, documents.to_bytes(finite(plain)))


def read(asked: Asked, number: int) -> dict[str, Any] | None:
    """A replicate that is done, well or not."""
    path = asked.replicate(number)
    if not path.is_file():
        return None
    return documents.read(path, ConfigError, "delete it, and the same command runs that replicate again")


def _rows_before(path: Path, now: tuple[int, int], store: str) -> tuple[int, int]:
    found = strict_yaml.read(path, ConfigError)
    rows = found.get("rows") if isinstance(found, dict) else None
    before = counted(rows, str(path), f"restore it from a copy, or delete {path.parent} to start again")
    for name, had, has in zip(("runs", "observations"), before, now, strict=True):
        if has < had:
            raise ConfigError(
                f"{path.parent} began with {had} {name}, but {store} has {has}; bring the store back, or choose "
                "another --output"
            )
    return before


def _refuse_foreign(output: Path) -> None:
    own = (run_directory.LOCK,)
    foreign = [e.name for e in output.iterdir() if e.name not in own and not e.match(f"{SETTINGS}.*.partial")]
    if foreign:
        raise ConfigError(f"--output is {output}, which holds something else ('{foreign[0]}'); choose another")
