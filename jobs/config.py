"""Configuration files: YAML, with overrides such as `fit.emulator.steps=200` from the command line.

Relative paths in a file and in overrides are relative to the directory that the command runs in, not to the file: the
same file serves many data sets. They become absolute here, so that workers started elsewhere find them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from jobs.run_state import is_run
from storage.room import because
from storage.validation import show
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError
from vcal_dist.locations import refusal, remote_locations

SWEEP, TRIALS = "sweep.yaml", "trials"  # as jobs.sweeps.directory names them, which is too heavy to load here
ASIDE = "sweep"  # a section that only `vcal sweep` reads
MAPPING = "or with a mapping or a list as transforms={flow: {kind: log}}"
EXAMPLE = f"write it as fit.emulator.steps=200, {MAPPING}"
TAG = "tag:yaml.org,2002:"
PLAIN_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")  # what JSON has too
EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """Safe YAML without dates, in which 1e-3 is a number (PyYAML wants 1.0e-3) and a key stands once."""

    yaml_constructors = {  # noqa: RUF012 - as in the base class
        tag: made
        for tag, made in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(TAG) in PLAIN_TAGS
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused later: no key of a configuration is a list or a mapping
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"the key '{key.value}' stands twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.removeprefix(TAG) != "timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(TAG + "float", EXPONENT, list("-+.0123456789"))


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
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {because(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file in UTF-8 ({error}); a configuration is YAML") from error
    data = _read(text, str(path))
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


def _read(text: str, name: str) -> Any:
    """What a YAML text holds."""
    try:
        loader = _Loader(text)
        loader.name = name  # for the place in messages
        return loader.get_single_data()
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        # Beside its own errors, PyYAML lets through those of int() and float() for a text such as `!!int x`.
        raise ConfigError(f"{name} is not valid YAML: {error}") from None


def _override(data: dict[str, Any], override: str) -> dict[str, Any]:
    """The data with one key replaced."""
    dotted, sign, text = override.partition("=")
    keys = [key.strip() for key in dotted.split(".")]
    if not sign and keys[0] in Config.model_fields and all(keys):
        raise ConfigError(f"the override '{override}' has no value; write it as {'.'.join(keys)}=VALUE, {MAPPING}")
    if not sign or not all(keys):
        raise ConfigError(f"the override '{override}' is no key=value; {EXAMPLE}")
    value = _read(text, f"the override '{override}'")

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
