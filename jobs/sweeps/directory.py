"""The directory of a sweep: what was asked for, and whether the same is asked for again.

<output>/
  sweep.yaml                what was asked for, with every default; `vcal sweep` of it goes on
  trials/                   a folder for each (jobs.sweeps.trial)
  trials.csv, sweep.png     what came of them
  best.yaml, best/          the best trial: a configuration for `vcal train`, and its run
  mixture/                  the best ones combined, if asked for
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from jobs.sweeps.settings import FREE, Sweep
from jobs.sweeps.trial import TRIALS
from storage.places import write_durably
from storage.validation import show
from vcal_dist import run_directory
from vcal_dist.errors import ConfigError

ASKED = "sweep.yaml"
FREE_KEYS = (*run_directory.FREE, *(f"sweep.{name}" for name in FREE))


def begin(sweep: Sweep) -> None:
    """Writes down what is asked for; if there is a sweep already, it must be the same, but for what is free."""
    path = sweep.output / ASKED
    if sweep.output.exists() and not sweep.output.is_dir():
        raise ConfigError(f"output is {sweep.output}, which is a file; a sweep needs a directory: choose another")
    if path.exists():
        if (sweep.output / TRIALS).exists():  # before, a mistake can be mended in place
            _compare(sweep, path)
    elif sweep.output.is_dir():
        _refuse_foreign(sweep.output)
    write_durably(path, as_yaml(sweep.plain()))


def exists(sweep: Sweep) -> bool:
    """Whether the sweep has begun."""
    return (sweep.output / ASKED).exists()


def as_yaml(plain: dict[str, Any]) -> bytes:
    """Plain data as a file."""
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text.encode()


def _compare(sweep: Sweep, path: Path) -> None:
    try:
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    now = yaml.safe_load(as_yaml(sweep.plain()))
    changed = [
        f"  {key}: {show(old)} before, {show(new)} now"
        for key, old, new in _differences(before, now)
        if not any(key == free or key.startswith(f"{free}.") for free in FREE_KEYS)
    ]
    if changed:
        raise ConfigError(
            f"the sweep in {sweep.output} was begun with another configuration:\n"
            + "\n".join(changed)
            + "\nChoose another output, or delete that directory to begin anew."
        )


def _differences(before: Any, now: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = {**before, **now}
        return [d for k in keys for d in _differences(before.get(k), now.get(k), f"{key}.{k}".lstrip("."))]
    return [] if before == now else [(key, before, now)]


def _refuse_foreign(output: Path) -> None:
    # A process that was killed may have left its file half-written; of an array, others may have begun just now.
    own = (ASKED, TRIALS, run_directory.LOCK)
    foreign = [e.name for e in output.iterdir() if e.name not in own and not e.match(f"{ASKED}.*.partial")]
    if foreign:
        raise ConfigError(
            f"output is {output}, which holds something else than a sweep ('{foreign[0]}'); choose another, or empty it"
        )
