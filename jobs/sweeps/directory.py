"""The directory of a sweep: what was asked for, and whether the same is asked for again.

<output>/
  sweep.yaml                what was asked for, with every default; `vcal sweep` of it goes on
  trials/                   a folder for each (jobs.sweeps.trial)
  sweep.html                what came of them, to look at
  trials.csv, sweep.png     the same for programs, and as a picture
  best.yaml, best/          the best trial: a configuration for `vcal train`, and its run
  mixture/                  the best ones combined, if asked for
"""

from __future__ import annotations

from pathlib import Path

from jobs.sweeps.settings import FREE, Sweep
from jobs.sweeps.trial import TRIALS
from storage import strict_yaml
from storage.places import write_durably
from vcal_dist import run_directory
from vcal_dist.errors import ConfigError
from vcal_dist.run_directory import compare, refuse_links_out

ASKED = "sweep.yaml"
FREE_KEYS = (*run_directory.FREE, *(f"sweep.{name}" for name in FREE))


def begin(sweep: Sweep) -> None:
    """Writes down what is asked for; if there is a sweep already, it must be the same, but for what is free."""
    path = sweep.output / ASKED
    refuse_links_out(sweep.output)
    if sweep.output.exists() and not sweep.output.is_dir():
        raise ConfigError(f"output is {sweep.output}, which is a file; a sweep needs a directory: choose another")
    if path.exists():
        if (sweep.output / TRIALS).exists():  # before, a mistake can be mended in place
            compare(path, sweep.plain(), f"the sweep in {sweep.output}", FREE_KEYS)
    elif sweep.output.is_dir():
        _refuse_foreign(sweep.output)
    write_durably(path, strict_yaml.dump(sweep.plain()).encode())


def exists(sweep: Sweep) -> bool:
    """Whether the sweep has begun."""
    return (sweep.output / ASKED).exists()


def _refuse_foreign(output: Path) -> None:
    # A process that was killed may have left its file half-written; of an array, others may have begun just now.
    own = (ASKED, TRIALS, run_directory.LOCK)
    foreign = [e.name for e in output.iterdir() if e.name not in own and not e.match(f"{ASKED}.*.partial")]
    if foreign:
        raise ConfigError(
            f"output is {output}, which holds something else than a sweep ('{foreign[0]}'); choose another, or empty it"
        )
