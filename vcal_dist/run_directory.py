"""The run directory: what was asked for, with which versions, and what is there to go on from.

runs/NAME/
  config.yaml             what was asked for, with every default written out
  rows.json               how many rows the store had when the run began: it never reads more; and what
                          decides the result in config.yaml, as a checksum: people copy that file, and edit the copy
  versions.json           of Python and the packages
  checkpoints/            last.safetensors, best.safetensors
  metrics.csv, tensorboard/
  data.zarr/              the rows, where they were given as arrays
  posterior.safetensors, posterior.nc
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from storage import documents, strict_yaml
from storage.errors import StoreError
from storage.links import refuse_links
from storage.places import write_durably
from storage.store import Store
from vcal_dist import tensorfile
from vcal_dist.checkpoints import BEST, LAST, SCHEMA
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, Disconnected, Malformed, ModelError
from vcal_dist.run_place import SCRATCH, RunPlace

CONFIG, ROWS, VERSIONS = "config.yaml", "rows.json", "versions.json"
CHECKPOINTS, DATA, LOCK = "checkpoints", "data.zarr", "run.lock"
OWN = (CONFIG, ROWS, VERSIONS, "metrics.csv", "posterior.safetensors", "posterior.nc")
GLANCE = 0.2  # seconds, many times what a look at the lock takes: `is_held` holds it for a moment
PACKAGES = ("vcal-dist", "torch", "lightning", "numpy", "zarr", "dask", "ray", "arviz")
WHERE = (  # and how something is computed, and not what
    "devices.accelerator",
    "devices.devices",
    "devices.num_nodes",
    "devices.backend",
    "devices.threads",
    "devices.timeout",
    "data.memory",
    "data.resident",
    "data.scheduler",
)
# What may change between an interrupted run and the one that goes on with it.
FREE = ("output", "generate", "checkpoints", "record_every", *WHERE)
SETTINGS = "config"  # in rows.json: the checksum of the configuration


FORM = {  # of a checkpoint
    "schema": SCHEMA,
    "orders": {},
    "lowest": [0, 0.0],
    "schedule": {
        "name": None,
        "number": 0,
        "leg": 0,
        "batch": 0,
        "steps": 0,
        "model": {},
        "found": {},
        "phase": None,
    },
}


class Before(NamedTuple):
    """What there is from earlier attempts."""

    rows: tuple[int, int]  # runs and observations that the run may read
    checkpoint: dict[str, Any] | None  # the last one


def look(config: Config, place: RunPlace, store: Store, *, first: bool = True) -> Before:
    """Compares what is asked for with the run there, if there is one. Writes nothing.

    Other processes than the `first` wait until it has begun the run: the rows are the same for all of them.
    """
    run = place.path
    if first:
        refuse_foreign(run)
    else:
        wait(lambda: place.has(ROWS), f"begin the run in {place.url}", config.devices.timeout)
        store.refresh()
    place.fetch()
    if (run / CONFIG).exists():
        compare(run / CONFIG, config.plain(), f"the run in {run}")
    rows = (store.runs.rows, store.observations.rows)
    if not (run / ROWS).exists():
        if (run / CHECKPOINTS / LAST).exists():  # it would be written over
            raise ConfigError(
                f"the run in {run} has a checkpoint but no {ROWS}: it is of another version, or that file was lost; "
                f"use that version, bring the file back, or delete {run} to start from scratch"
            )
        return Before(rows, None)
    check_settings(run)
    rows, now = read_rows(run / ROWS), rows
    for name, before, found in zip(("runs", "observations"), rows, now, strict=True):
        if found < before:
            raise ConfigError(
                f"the run in {run} began with {before} {name}, but {store.url} has {found}; bring the store back, or "
                "choose another output to begin anew"
            )
    last = run / CHECKPOINTS / LAST
    if not last.exists():
        return Before(rows, None)
    try:
        return Before(rows, read_checkpoint(last))
    except ModelError as error:
        raise cannot_go_on(run, str(error)) from error


def cannot_go_on(run: Path, why: str) -> ConfigError:
    """What to tell a user whose last checkpoint is of no use."""
    return ConfigError(
        f"the run in {run} cannot go on: {why}; put {BEST}, if there is one, in its place, or delete {run} to start "
        "from scratch"
    )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint says, as far as can be told without the training that it belongs to."""
    state = tensorfile.read(path)
    if not isinstance(state, dict) or type(state.get("schema")) is not int or state["schema"] != SCHEMA:
        raise ModelError(f"{path} is a checkpoint of another version; use that version")
    try:
        tensorfile.check_form(FORM, state, "state")
        for table, order in state["orders"].items():
            tensorfile.check_form({}, order, f"state.orders.{table}")
        if state["schedule"]["name"] is not None:
            tensorfile.check_form("", state["schedule"]["name"], "state.schedule.name")
    except Malformed as error:
        raise Malformed(f"{path} is no checkpoint: {error}") from None
    if not tensorfile.is_finite(state):
        raise Malformed(f"{path} holds numbers that are not finite; vcal-dist writes none")
    return state


def refuse_foreign(run: Path) -> None:
    """Raises if a run there would mix with what does not belong to one."""
    refuse_links_out(run)
    if run.exists() and not run.is_dir():
        raise ConfigError(f"output is {run}, which is a file; a run needs a directory: choose another")
    if not run.exists() or (run / CONFIG).exists():
        return
    # A process that was killed may have left its data, or its configuration half-written.
    foreign = [
        f.name for f in run.iterdir() if f.name not in (DATA, LOCK, SCRATCH) and not f.match(f"{CONFIG}.*.partial")
    ]
    if foreign:
        raise ConfigError(
            f"output is {run}, which holds something else than a run ('{foreign[0]}'); choose another, or empty it"
        )


def refuse_links_out(run: Path) -> None:
    """Raises if a link in a run's directory, which may be a stranger's, leads out of it; a store looks after itself."""
    try:
        refuse_links(run, but=(DATA,))
    except StoreError as error:
        raise ConfigError(str(error)) from None


def begin(config: Config, run: Path, rows: tuple[int, int]) -> None:
    """Writes down what is asked for; once it is known to make sense, so that a mistake can be mended in place."""
    for pattern in (*(f"{name}.*.partial" for name in OWN), f"{CHECKPOINTS}/*.partial"):
        for left in run.glob(pattern):  # half-written by a process that was killed
            left.unlink(missing_ok=True)
    if not (run / CONFIG).exists():
        write_durably(run / CONFIG, strict_yaml.dump(config.plain()).encode())
    write_durably(run / VERSIONS, (json.dumps(versions(), indent=2) + "\n").encode())
    if not (run / ROWS).exists():  # the last: others wait for it
        keep_rows(run, rows)


def keep_rows(run: Path, rows: tuple[int, int]) -> None:
    """Writes down how many rows the run may read, and which configuration it is of."""
    found = {**dict(zip(("runs", "observations"), rows, strict=True)), SETTINGS: settings_checksum(run / CONFIG)}
    write_durably(run / ROWS, documents.to_bytes(found))


def settings_checksum(path: Path) -> str:
    """Of what a run's configuration says, but for what may change, and for where its store lies: it may be moved."""
    return documents.checksum({k: v for k, v in _flat(read_mapping(path)) if not _is_among(k, (*FREE, "store"))})


def _flat(section: dict[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a configuration by their dotted keys."""
    for name, value in section.items():
        inner = f"{key}.{name}".lstrip(".")
        if isinstance(value, dict) and value:
            yield from _flat(value, inner)
        else:
            yield inner, value


def check_settings(run: Path) -> None:
    """Raises if the configuration was changed after the run began; earlier versions did not write its checksum."""
    known = _kept(run / ROWS).get(SETTINGS)
    if known is not None and known != settings_checksum(run / CONFIG):
        raise ConfigError(
            f"{run / CONFIG} does not match its checksum in {ROWS}: it was changed after the run began, and what was "
            "trained is of other settings; bring it back, or train a copy of it with another output"
        )


def is_held(run: Path) -> bool:
    """Whether another process is training there, as far as can be told."""
    import filelock

    if not (run / LOCK).exists():
        return False
    try:
        with filelock.FileLock(run / LOCK, timeout=0):
            return False
    except filelock.Timeout:
        return True
    except (NotImplementedError, OSError):  # a file system without locks, or a run that may only be read
        return False


def refuse_held(run: Path) -> None:
    """Raises if another process is training there."""
    if is_held(run):
        raise _taken(run)


def _taken(run: Path) -> ConfigError:
    return ConfigError(f"another process is training in {run}; wait for it, or choose another output")


@contextlib.contextmanager
def held(run: Path, patience: float = GLANCE, name: str = LOCK) -> Iterator[None]:
    """Makes the directory, and keeps it for one process that writes; the lock falls with its holder.

    `patience` is how many seconds a holder may take to end.
    """
    import filelock

    refuse_links_out(run)
    run.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(run / name)
    with contextlib.suppress(NotImplementedError):  # a file system without locks
        try:
            lock.acquire(timeout=patience)
        except filelock.Timeout:
            raise _taken(run) from None
    try:
        yield
    finally:
        lock.release()


def wait(done: Callable[[], bool], what: str, seconds: float) -> None:
    """Until the first process has done something that the others need; raises `Disconnected` after so many seconds."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise Disconnected(
                f"waited {seconds:g} s (devices.timeout) for the first process to {what}; it is gone, or slow to "
                "start: look at what it said, and run the same command again"
            )
        time.sleep(0.1)


def compare(path: Path, plain: dict[str, Any], what: str, free: Sequence[str] = FREE) -> None:
    """Raises if a file holds another configuration than the plain one, but for keys that may change."""
    before = _completed(read_mapping(path))
    now = strict_yaml.parse(strict_yaml.dump(plain), what, ConfigError)
    changed = [
        f"  {key}: {old!r} before, {new!r} now"
        for key, old, new in _differences(before, now)
        if not _is_among(key, free)
    ]
    if changed:
        raise ConfigError(
            f"{what} was begun with another configuration:\n"
            + "\n".join(changed)
            + "\nChoose another output, or delete that directory to begin anew."
        )


def read_mapping(path: Path) -> dict[str, Any]:
    """A mapping in YAML or JSON, which is YAML too."""
    found = strict_yaml.read(path, ConfigError)
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is damaged; bring it back, or delete {path.parent} to begin anew")
    return found


def _completed(found: dict[str, Any]) -> dict[str, Any]:
    """A configuration, at the top or below `config`, with the keys at their defaults that came after it was written."""
    if isinstance(found.get("config"), dict):
        return {**found, "config": _completed(found["config"])}
    try:
        whole = Config.parse({key: value for key, value in found.items() if key in Config.model_fields}).plain()
    except ConfigError:  # of another version: what differs is told
        return found
    return {**found, **strict_yaml.parse(strict_yaml.dump(whole), "the configuration", ConfigError)}


def read_rows(path: Path) -> tuple[int, int]:
    """The rows that a run began with."""
    return counted({key: value for key, value in _kept(path).items() if key != SETTINGS}, str(path), _restore(path))


def _kept(path: Path) -> dict[str, Any]:
    """What rows.json holds, which must match its checksum."""
    return documents.unsealed(read_mapping(path), str(path), ConfigError, _restore(path))


def _restore(path: Path) -> str:
    return f"restore it from a copy, or delete {path.parent} to start again"


def counted(found: Any, name: str, cure: str) -> tuple[int, int]:
    """Runs and observations in a mapping, which must match its checksum."""
    rows = documents.unsealed(found, name, ConfigError, cure) if isinstance(found, dict) else {}
    before = rows.get("runs"), rows.get("observations")
    if set(rows) != {"runs", "observations"} or any(type(count) is not int or count < 0 for count in before):
        raise ConfigError(f"{name} is damaged; {cure}")
    return rows["runs"], rows["observations"]


def _is_among(key: str, names: Sequence[str]) -> bool:
    """Whether a dotted key is one of these, or stands below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _differences(before: Any, now: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = {**before, **now}
        return [d for k in keys for d in _differences(before.get(k), now.get(k), f"{key}.{k}".lstrip("."))]
    return [] if before == now else [(key, before, now)]


def versions() -> dict[str, str]:
    """Of Python, the machine and the packages."""
    found = {"python": platform.python_version(), "machine": f"{platform.system()} {platform.machine()}"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
