"""A run directory seen from outside: whether a path is one, how far training came, and its posterior if it is done."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.console import vcal

if TYPE_CHECKING:
    from vcal_dist.answers import Answers
    from vcal_dist.config import Config
    from vcal_dist.run_place import RunPlace

# As run_directory, posterior and mixed of vcal_dist name them; those modules are too heavy for a look at a path.
CONFIG, ROWS, VERSIONS = "config.yaml", "rows.json", "versions.json"
POSTERIOR, MIXTURE, CHECKPOINT = "posterior.safetensors", "mixture.json", "checkpoints/last.safetensors"


def is_run(path: str | Path) -> bool:
    """Whether a directory holds a run, finished or not."""
    run = Path(path)
    return (run / POSTERIOR).is_file() or ((run / CONFIG).is_file() and (run / VERSIONS).is_file())


def is_mixture(path: str | Path) -> bool:
    """Whether a directory holds several posteriors, averaged."""
    return (Path(path) / MIXTURE).is_file()


@dataclass(frozen=True)
class Progress:
    """Where training was when its last checkpoint was written; without one, everything is None."""

    step: int | None = None  # over all phases
    phase: str | None = None
    phase_step: int | None = None  # of a stage that takes steps,
    phase_steps: int | None = None  # so many in all
    phase_pass: int | None = None  # of a phase that goes over all rows again and again, from 1
    written: str | None = None  # when

    def __str__(self) -> str:
        if self.step is None:
            return "no checkpoint yet"
        if self.phase is None:
            return f"at step {self.step:,}"
        if self.phase_step is None:
            return f"in phase '{self.phase}', pass {self.phase_pass}, step {self.step:,} in all"
        of = "" if self.phase_steps is None else f" of {self.phase_steps:,}"
        return f"in phase '{self.phase}' at step {self.phase_step:,}{of}, step {self.step:,} in all"


def progress(run: Path) -> Progress:
    """What the last checkpoint says; raises ModelError if the checkpoint is damaged."""
    from vcal_dist.run_directory import read_checkpoint

    path = run / CHECKPOINT
    if not path.is_file():
        return Progress()
    schedule = read_checkpoint(path)["schedule"]
    step, name, leg, phase = (schedule[key] for key in ("steps", "name", "leg", "phase"))
    done, planned = (_count(of, key) for of, key in ((phase, "done"), (_part(phase, "cycle"), "total_steps")))
    steps = None if done is None else _steps_of(run, name, planned)
    return Progress(step, name, done, steps, leg + 1 if done is None else None, time_of(path))


def _part(tree: Any, key: str) -> Any:
    return tree.get(key) if isinstance(tree, dict) else None


def _count(tree: Any, key: str) -> int | None:
    """A whole number of a file, if it is one."""
    found = _part(tree, key)
    return found if isinstance(found, int) else None


def _steps_of(run: Path, stage: str | None, planned: int | None) -> int | None:
    """How many steps a stage has: as configured, or where that is in epochs as its learning rate was planned."""
    from vcal_dist.errors import ConfigError

    try:
        fit = read_config(run).fit
    except ConfigError:
        return planned
    if stage not in fit.stages or getattr(fit, stage).epochs is not None:
        return planned
    steps: int | None = getattr(fit, stage).steps
    return fit.stages[stage].steps if steps is None else steps


def read_config(run: Path) -> Config:
    """The configuration of a run; raises ConfigError if it is damaged."""
    import yaml

    from storage.room import because
    from vcal_dist.config import Config
    from vcal_dist.errors import ConfigError

    path = run / CONFIG
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {because(error)}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return Config.parse(found, str(path))


def time_of(path: Path) -> str:
    """When a file was written, in local time."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).astimezone().isoformat(sep=" ", timespec="seconds")


def resume_command(run: Path) -> str:
    """What a user types to go on with a run."""
    from vcal_dist.errors import ConfigError
    from vcal_dist.locations import remote_locations

    arguments = ["train", str(run / CONFIG)]
    try:
        config = read_config(run)
    except ConfigError:
        config = None
    output = None if config is None else config.output
    if config is not None:  # a location on the network is used only if the user names it
        named = remote_locations(config.plain())
        arguments += [f"{key}={value}" for key, value in named.items() if key != "output"]
    if output is None or Path(output).resolve() != run.resolve():  # it was moved, or begun in another directory
        arguments.append(f"output={run}")
    return vcal(*arguments)


def load_posterior(path: str | Path) -> Answers:
    """The posterior of a finished run, or of several averaged; otherwise an error that says what the path holds."""
    from vcal_dist.errors import ModelError
    from vcal_dist.mixed import Averaged
    from vcal_dist.posterior import Posterior
    from vcal_dist.run_directory import is_held

    run = Path(path)
    if "://" in str(path):
        from vcal_dist.run_place import run_place

        with run_place(path) as place:
            place.fetch()
            if not place.path.exists():
                raise ModelError(f"there is no run at {path}; check the address")
            return load_posterior(place.path)
    if is_mixture(run):
        return Averaged.load(run)
    if run.is_file() or (run / POSTERIOR).is_file():
        return Posterior.load(run)
    if is_run(run):
        try:
            found = progress(run)
        except ModelError as error:
            raise ModelError(f"the run in {run} is not finished, and cannot go on: {error}") from None
        when = "" if found.written is None else f" (last checkpoint: {found.written})"
        if is_held(run):
            raise ModelError(f"the run in {run} is being trained by another process, {found}{when}; wait for it")
        raise ModelError(f"the run in {run} is not finished: {found}{when}; go on with: {resume_command(run)}")
    if not run.exists():
        raise ModelError(f"there is no run at {run}; check the path, or train one with: vcal train CONFIG")
    if _is_store(run):
        cure = vcal("train", "CONFIG", f"store={run}")
        raise ModelError(f"{run} is a store of data, not a run; train one from it with: {cure}")
    held = sorted(item.name for item in run.iterdir())
    raise ModelError(
        f"{run} is not a run: it has neither {POSTERIOR} nor {CONFIG}, but {', '.join(held[:5]) or 'nothing'}"
        f"{', …' if len(held) > 5 else ''}"
    )


@contextmanager
def finished_run(run: str | Path, command: str) -> Iterator[tuple[RunPlace, Path, Answers]]:
    """A run wherever it lies, its directory and its posterior, for the command that looks at it."""
    from vcal_dist.errors import ModelError
    from vcal_dist.run_place import run_place

    with run_place(run) as place:
        place.fetch()
        if place.remote and not place.path.exists():
            raise ModelError(f"there is no run at {run}; check the address")
        _refuse_sweep(place, command)
        posterior = load_posterior(place.path)
        yield place, place.path.parent if place.path.is_file() else place.path, posterior


def _refuse_sweep(place: RunPlace, command: str) -> None:
    """A sweep has a page of its own, and runs that can be looked at."""
    from jobs.sweeps.directory import ASKED
    from jobs.sweeps.outcome import BEST, PAGE
    from vcal_dist.errors import ModelError

    if not (place.path / ASKED).is_file():
        return
    at = place.url.rstrip("/")
    page = f"its page is {at}/{PAGE}" if (place.path / PAGE).is_file() else "it has no page yet"
    best = shlex.join(["vcal", command, f"{at}/{BEST}"])
    cure = (
        f"{command} its best run with: {best}" if (place.path / BEST).is_dir() else "none of its trials is finished yet"
    )
    raise ModelError(f"{at} is a sweep, not a run: {page}; {cure}")


def _is_store(path: Path) -> bool:
    import storage

    try:
        storage.open(path)
    except storage.StoreError:
        return False
    return True
