"""Configuration files: YAML, with overrides such as `fit.emulator.steps=200` from the command line.

Relative paths in a file and in overrides are relative to the directory that the command runs in, not to the file: the
same file serves many data sets. They become absolute here, so that workers started elsewhere find them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from jobs.run_state import is_run
from storage import strict_yaml
from storage.validation import show
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError
from vcal_dist.locations import refusal, remote_locations

SWEEP, TRIALS = "sweep.yaml", "trials"  # as jobs.sweeps.directory names them, which is too heavy to load here
ASIDE = "sweep"  # a section that only `vcal sweep` reads
MAPPING = "or with a mapping or a list as transforms={flow: {kind: log}}"
EXAMPLE = f"write it as fit.emulator.steps=200, {MAPPING}"


def load(path: str | Path, overrides: Sequence[str] = (), *, trust_locations: bool = False) -> Config:
    """The configuration in a YAML file, with keys replaced by overrides; a later override wins.

    A run's own file may be a stranger's: network locations in it are used if an override names them too, or with
    `trust_locations`.

    >>> load("borehole.yaml", ["fit.emulator.steps=200", "model.eta.hidden=[8, 8]"])  # doctest: +SKIP
    """
    data = read(path)
    if not trust_locations:
        refuse_recorded(Path(path), data, overrides)
    return configure(data, overrides, str(path), Path(path).stem)


def refuse_recorded(path: Path, data: Any, overrides: Sequence[str]) -> None:
    """A file that a run or a sweep wrote names network locations only if the user has named them again."""
    if not is_record(path) or not isinstance(data, dict):
        return
    named = {override.partition("=")[0].strip() for override in overrides}
    found = {key: value for key, value in remote_locations(data).items() if key not in named}
    if found:
        again = " ".join(shlex.quote(f"{key}={value}") for key, value in found.items())
        raise ConfigError(refusal(str(path), found, f"say it again with {again}"))


def is_record(path: Path) -> bool:
    """Whether a configuration was written by a run or a sweep, and not by the user."""
    folder = path.parent
    return is_run(folder) or ((folder / SWEEP).is_file() and (folder / TRIALS).is_dir())


def read(path: str | Path) -> Any:
    """What a configuration file holds."""
    data = strict_yaml.read(path, ConfigError, "the configuration")
    if data is None:
        raise ConfigError(f"{path} is empty; a configuration has the keys {', '.join(Config.model_fields)}")
    return data


def configure(
    data: Any, overrides: Sequence[str] = (), source: str = "the configuration", name: str | None = None
) -> Config:
    """The configuration in plain data, with overrides; `name` names a run directory that is not given."""
    data = overridden(data, overrides)
    if isinstance(data, dict):
        data = {key: value for key, value in data.items() if key != ASIDE}
    return resolve(Config.parse(data, f"{source} with {', '.join(overrides)}" if overrides else source), name)


def overridden(data: Any, overrides: Sequence[str]) -> Any:
    """The data with keys replaced."""
    if isinstance(data, dict):
        for override in overrides:
            data = _override(data, override)
    return data


def resolve(config: Config, name: str | None = None) -> Config:
    """The configuration with absolute paths; a run directory that is not given is runs/<name>, or named as the store.

    URLs stay as they are.
    """
    output = config.output or str(Path("runs") / (name or PurePosixPath(config.store).stem))
    return config.model_copy(update={"store": _absolute(config.store), "output": _absolute(output)})


def _override(data: dict[str, Any], override: str) -> dict[str, Any]:
    """The data with one key replaced."""
    dotted, sign, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not sign and keys[0] in Config.model_fields and all(keys):
        raise ConfigError(f"the override '{override}' has no value; write it as {'.'.join(keys)}=VALUE, {MAPPING}")
    if not sign or not all(keys):
        raise ConfigError(f"the override '{override}' is no key=value; {EXAMPLE}")
    value = strict_yaml.parse(text, f"the override '{override}'", ConfigError)

    def replaced(section: Any, depth: int) -> Any:
        if depth == len(keys):
            return value
        if section is None:
            section = {}
        if not isinstance(section, dict):
            raise ConfigError(
                f"the override '{override}' goes inside {'.'.join(keys[:depth])}, which is {show(section)} and no "
                f"mapping; {EXAMPLE}"
            )
        # A copy: with an anchor, another key of the file may hold the same mapping.
        return {**section, keys[depth]: replaced(section.get(keys[depth]), depth + 1)}

    result: dict[str, Any] = replaced(data, 0)
    return result


def _absolute(path: str) -> str:
    if "://" in path:
        return path
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:
        raise ConfigError(f"cannot tell where '{path}' is: {error}; write the directory in place of ~") from None
