"""The section `sweep` of a configuration: how many trials, what they vary, how they are judged and stopped.

    sweep = load("sweep.yaml", ["sweep.trials=8"])

Everything that can be wrong with it is told here, before any work: every end of a range and every choice is put into
the configuration and read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError

from jobs.config import ASIDE, configure, overridden, read, refuse_recorded
from jobs.sweeps.defaults import default_space
from jobs.sweeps.space import Dimension, Space, placed
from storage.validation import explain, show
from vcal_dist.config import Config, Count, Section, Seed
from vcal_dist.errors import ConfigError
from vcal_dist.plan import COLLAPSED, MEANFIELD

# What may change between a sweep and the same one later: it does not decide what trials find.
FREE = ("trials", "mixture", "cpus", "gpus", "workers")
RATES = tuple(f"fit.{stage}.rate" for stage in MEANFIELD)  # what a population may change while it trains


class SweepSettings(Section):
    """How settings are tried. A trial trains up to `rungs` times, each time with schedules longer by `reduction`."""

    trials: Count = 16
    metric: Literal["log_predictive_density", "bound"] = "log_predictive_density"  # of observations not learned from
    search: Literal["random", "optuna"] = "random"  # optuna: tree-structured Parzen estimators, from earlier trials
    scheduler: Literal["asha", "none", "pbt"] = "asha"  # none: in full only; pbt: rates that change (jobs.sweeps.pbt)
    reduction: Annotated[int, Field(ge=2)] = 3  # of the schedules from one rung to the one below; of trials upwards
    rungs: Annotated[int, Field(ge=1, le=10)] = 3
    seed: Seed = 0  # of the settings that are tried
    mixture: Annotated[int, Field(ge=0)] = 0  # the best trials that are combined, weighted by evidence; 0: none
    cpus: Count | None = None  # of each process of a trial; null: the cluster's, shared out
    gpus: Annotated[float, Field(ge=0, le=1)] | None = None  # of each process; null: one where there are some
    workers: Count = 1  # processes that train a trial together
    space: dict[str, Dimension] = Field(default_factory=dict)  # by key; none: what the configuration starts from


class _File(Section):
    """A file that has the section, so that errors name it."""

    sweep: SweepSettings = SweepSettings()


@dataclass(frozen=True)
class Sweep:
    """A configuration, and what is tried around it. Paths are absolute."""

    config: Config
    settings: SweepSettings

    @classmethod
    def parse(
        cls, data: Any, source: str = "the configuration", overrides: Sequence[str] = (), name: str | None = None
    ) -> Self:
        """The sweep in plain data, or an error that says what is wrong with it."""
        config = configure(data, overrides, source, name)  # also refuses what is no mapping
        section = overridden(data, overrides).get(ASIDE)
        settings = _settings({ASIDE: {} if section is None else section}, source)
        if not settings.space:
            space = default_space(config)
            if settings.scheduler == "pbt":
                space = {key: dimension for key, dimension in space.items() if key in RATES}
            settings = settings.model_copy(update={"space": _settings({ASIDE: {"space": space}}).space})
        sweep = cls(config, settings)
        sweep._check()
        return sweep

    def plain(self) -> dict[str, Any]:
        """The configuration with the section, nothing left out; `parse` makes an equal one of it."""
        settings = self.settings.model_dump(mode="json", exclude={"space"})
        space = {key: dimension.plain() for key, dimension in self.settings.space.items()}
        return {**self.config.plain(), ASIDE: {**settings, "space": space}}

    @cached_property
    def space(self) -> Space:
        """What is tried."""
        return Space(self.settings.space, self.config.plain())

    @property
    def output(self) -> Path:
        """The sweep's directory."""
        return Path(str(self.config.output))

    @property
    def rungs(self) -> range:
        """The rungs that a trial may climb."""
        return range(0 if self.settings.scheduler == "asha" else self.last_rung, self.settings.rungs)

    @property
    def last_rung(self) -> int:
        """The one with the configuration's own schedule."""
        return self.settings.rungs - 1

    def budget(self, rung: int) -> int:
        """What a rung costs, in units of the first."""
        return int(self.settings.reduction**rung)

    def configured(self, values: dict[str, Any], rung: int | None = None) -> Config:
        """The configuration of a trial with its settings; of a rung below the last, with a part of the schedule."""
        data = self.config.plain()
        if "fit.weights" in values:
            _leave_out_stages(data["fit"], str(values["fit.weights"]))
        for key, value in values.items():
            data = placed(data, key, value)
        config = Config.parse(data, "the trial")
        if rung is not None and rung < self.last_rung:
            _shorten(config, data, self.settings.reduction ** (self.last_rung - rung))
            config = Config.parse(data, "the trial")
        return config

    def _check(self) -> None:
        if "://" in str(self.config.output):
            raise ConfigError(
                f"output is {self.config.output}; a sweep needs a directory that all nodes see: give a local path"
            )
        if self.settings.scheduler == "pbt":
            self._check_population()
        bounds = "sweep.metric=bound" if self.settings.metric == "bound" else None
        if self.settings.mixture:
            bounds = bounds or "sweep.mixture"
        for key, value, values in self.space.corners():
            where = "sweep.space" if key is None else f"sweep.space.{key}: the value {show(value)}"
            try:
                config = self.configured(values)
            except ConfigError as error:
                told = "\n".join(line for line in str(error).splitlines()[1:]) or str(error)
                hint = "\nAdd e.g. `when: {fit.weights: collapsed}` to its keys." if "is no stage of" in told else ""
                raise ConfigError(f"{where} does not go into the configuration:\n{told}{hint}") from None
            if bounds is not None and config.fit.weights == "meanfield":
                raise ConfigError(f"{where}: the weights 'meanfield' have no bound over all rows, which {bounds} needs")

    def _check_population(self) -> None:
        """Rates may change while a q(θ̃, w) trains that can be judged at any step, and nothing else may."""
        settings, weights = self.settings, self.config.fit.weights
        told = None
        if weights != "meanfield":
            told = f"where the weights '{weights}' have no posterior to judge by; give fit.weights=meanfield"
        elif settings.metric != "log_predictive_density":
            told = f"where there is no {settings.metric}; give sweep.metric=log_predictive_density"
        elif settings.search != "random":
            told = f"and learns nothing from sweep.search={settings.search}; give sweep.search=random"
        elif settings.workers != 1:
            told = f"among trials of one process; sweep.workers is {settings.workers}: give 1"
        elif settings.trials < 2:
            told = f"among trials; sweep.trials is {settings.trials}: give 2 or more, better 8"
        for key, dimension in settings.space.items():
            if told is None and (key not in RATES or dimension.int is not None or dimension.when):
                told = (
                    f"and nothing else: sweep.space.{key} is not one of them; accepted: {', '.join(RATES)}, each with "
                    "uniform, loguniform or choice and without `when`"
                )
        if told is not None:
            raise ConfigError(
                f"sweep.scheduler is 'pbt', which exchanges rates in the middle of training, {told}, or "
                "sweep.scheduler=asha"
            )


def load(path: str | Path, overrides: Sequence[str] = (), *, trust_locations: bool = False) -> Sweep:
    """The sweep in a YAML file, with keys replaced by overrides, also those of the section: `sweep.trials=8`.

    Network locations in a file that a run or a sweep wrote are treated as `jobs.config.load` does.
    """
    data = read(path)
    if not trust_locations:
        refuse_recorded(Path(path), data, overrides)
    return Sweep.parse(data, str(path), overrides, Path(path).stem)


def _settings(data: dict[str, Any], source: str = "the sweep") -> SweepSettings:
    section = data[ASIDE]
    if isinstance(section, dict) and isinstance(section.get("space"), dict):
        data = {ASIDE: {**section, "space": dict(_flat(section["space"]))}}
    try:
        return _File.model_validate_json(json.dumps(data), strict=True).sweep
    except ValidationError as error:
        raise ConfigError(f"{source} is not a valid sweep:\n{explain(error, _File, data)}") from None


def _flat(space: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The space by dotted keys; an override such as `sweep.space.fit.rho.uniform=[0.1, 0.2]` makes sections of them."""
    for key, value in space.items():
        is_section = isinstance(value, dict) and all(isinstance(part, dict) for part in value.values())
        if value and is_section and not set(value) & set(Dimension.model_fields):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _leave_out_stages(fit: dict[str, Any], weights: str) -> None:
    """What the configuration says of stages that these weights do not have is for others that are tried."""
    for stage in {**COLLAPSED, **MEANFIELD}:
        if stage not in (MEANFIELD if weights == "meanfield" else COLLAPSED):
            fit[stage] = {}


def _shorten(config: Config, data: dict[str, Any], factor: int) -> None:
    """The schedule's stages, shorter by a factor; one that does anything keeps a step."""
    for name, default in config.fit.stages.items():
        stage = data["fit"][name]
        if stage.get("epochs") is not None:
            stage["epochs"] /= factor
            continue
        steps = default.steps if stage.get("steps") is None else stage["steps"]
        stage["steps"] = max(1, steps // factor) if steps else 0
