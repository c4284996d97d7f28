"""The settings that a sweep tries: for each key of the configuration a range or a list of choices, some conditional.

    fit.emulator.rate: {loguniform: [0.003, 0.3]}
    model.eta.features.features: {int: [20, 200], step: 2}
    fit.weights: {choice: [collapsed, meanfield]}
    fit.everything.rate: {loguniform: [0.0003, 0.03], when: {fit.weights: meanfield}}

A conditional setting is only tried where the settings that `when` names have these values, be they tried themselves or
fixed; where it is not tried, it keeps the value of the configuration.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from storage.priors import Finite, Positive
from storage.validation import show
from vcal_dist.config import Count, Section
from vcal_dist.errors import ConfigError

Whole = Annotated[int, Field()]
Number = int  # which is the name of a field below
KINDS = ("uniform", "loguniform", "int", "choice")
# What decides on which rows trials are judged, on which devices, or where results lie.
INCOMPARABLE = (
    "store",
    "output",
    "generate",
    "data.holdout",
    "data.holdout_rows",
    "devices",
    "checkpoints",
    "record_every",
)


class Dimension(Section):
    """What a sweep tries for one setting: one of uniform, loguniform, int and choice."""

    uniform: tuple[Finite, Finite] | None = None
    loguniform: tuple[Positive, Positive] | None = None
    int: tuple[Whole, Whole] | None = None  # both ends included
    step: Count = 1  # between whole numbers
    choice: Annotated[list[Any], Field(min_length=1)] | None = None
    when: dict[str, Any] = Field(default_factory=dict)  # other settings, and the value or the list of values they need

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"needs one of {', '.join(KINDS)}; got {' and '.join(given) or 'none'}")
        low, high = self.ends[0], self.ends[-1]
        if given != ["choice"] and not low < high:
            raise ValueError(f"{given[0]} is [{low}, {high}]; accepted: two numbers, the first below the second")
        if self.int is not None and (high - low) % self.step:
            raise ValueError(f"step is {self.step}, which does not lead from {low} to {high}")
        if self.int is None and self.step != 1:
            raise ValueError(f"step goes with int, not with {given[0]}")
        if self.choice is not None and len({_text(value) for value in self.choice}) < len(self.choice):
            raise ValueError(f"choice is {show(self.choice)}, where a value stands twice")
        return self

    @property
    def ends(self) -> list[Any]:
        """All choices, or both ends of the range."""
        found = self.choice or self.uniform or self.loguniform or self.int
        return list(found or ())

    @property
    def probes(self) -> list[Any]:
        """Values that show whether all will do; whole numbers have a second one, as some keys take even ones only."""
        return self.ends if self.int is None else [self.int[0], self.int[0] + self.step, self.int[1]]

    def takes(self, value: Any) -> bool:
        """Whether a value is of the kind that is tried; rates that change on the way may leave their range."""
        if self.choice is not None:
            return any(same(value, choice) for choice in self.choice)
        kinds = (float, Number) if self.int is None else (Number,)
        if type(value) not in kinds or not math.isfinite(value):
            return False
        return self.loguniform is None or value > 0

    def plain(self) -> dict[str, Any]:
        """As it is written."""
        return self.model_dump(mode="json", exclude_defaults=True)


class Space:
    """All dimensions, in an order in which a setting comes after those that it depends on."""

    def __init__(self, dimensions: Mapping[str, Dimension], fixed: Mapping[str, Any]) -> None:
        """`fixed` is the plain configuration."""
        self.fixed = fixed
        self.dimensions = {key: dimensions[key] for key in _ordered(dimensions)}
        for key, dimension in dimensions.items():
            _refuse_incomparable(key)
            inside = [other for other in dimensions if other.startswith(f"{key}.")]
            if inside:
                raise ConfigError(f"sweep.space has {key} and {inside[0]}, which is inside it; give one of them")
            for other, accepted in dimension.when.items():
                self._check_condition(key, other, _listed(accepted))

    def _check_condition(self, key: str, other: str, accepted: list[Any]) -> None:
        where = f"sweep.space.{key}.when"
        if other not in self.dimensions:
            if not _has(self.fixed, other):
                near = get_close_matches(other, [*self.dimensions, *_keys(self.fixed)], n=1)
                meant = f" (did you mean '{near[0]}'?)" if near else ""
                raise ConfigError(f"{where} names '{other}', which is no key of the configuration{meant}")
            return
        choices = self.dimensions[other].choice
        if choices is None:
            raise ConfigError(f"{where} names '{other}', which has a range; a condition needs a choice")
        possible = [*choices, self._fixed(other)] if self.dimensions[other].when else choices
        for value in accepted:
            if not any(same(value, choice) for choice in possible):
                raise ConfigError(f"{where}.{other} is {show(value)}, which is none of its choices {show(choices)}")

    def _fixed(self, key: str) -> Any:
        value: Any = self.fixed
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def settle(self, pick: Callable[[str, Dimension], Any]) -> dict[str, Any]:
        """A value for every setting that applies, given those before it."""
        values: dict[str, Any] = {}
        for key, dimension in self.dimensions.items():
            has = {other: values[other] if other in values else self._fixed(other) for other in dimension.when}
            conditions = [(has[other], _listed(accepted)) for other, accepted in dimension.when.items()]
            if all(any(same(value, one) for one in accepted) for value, accepted in conditions):
                values[key] = pick(key, dimension)
        return values

    def corners(self) -> Iterator[tuple[str | None, Any, dict[str, Any]]]:
        """Key, value and settings with every end and choice once, where the key applies; the first: of all keys.

        Other settings are at their first end, but for those that the key needs.
        """
        yield None, None, self.settle(lambda _, dimension: dimension.ends[0])
        for key, dimension in self.dimensions.items():
            needed = self._needed(key)
            for value in dimension.probes:
                chosen = needed | {key: value}
                found = self.settle(lambda k, d, chosen=chosen: chosen.get(k, d.ends[0]))  # type: ignore[misc]
                if key in found:
                    yield key, value, found

    def _needed(self, key: str) -> dict[str, Any]:
        """Values of other dimensions with which this one applies."""
        found: dict[str, Any] = {}
        for other, accepted in self.dimensions[key].when.items():
            if other in self.dimensions:
                choices = self.dimensions[other].ends
                possible = [value for value in _listed(accepted) if any(same(value, choice) for choice in choices)]
                found |= self._needed(other) | {other: possible[0]} if possible else {}
        return found


def placed(data: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The data with the value at a dotted key; nothing is changed in place."""
    first, _, rest = key.partition(".")
    if not rest:
        return {**data, first: value}
    section = data.get(first)
    if section is not None and not isinstance(section, Mapping):
        raise ConfigError(f"'{rest}' goes inside {first}, which is {show(section)} and no mapping")
    return {**data, first: placed(section or {}, rest, value)}


def _ordered(dimensions: Mapping[str, Dimension]) -> Iterator[str]:
    done: set[str] = set()

    def visit(key: str, path: tuple[str, ...]) -> Iterator[str]:
        if key in path:
            circle = " → ".join((*path[path.index(key) :], key))
            raise ConfigError(f"sweep.space: conditions go in a circle: {circle}; leave one of them out")
        if key in done:
            return
        for other in dimensions[key].when:
            if other in dimensions:
                yield from visit(other, (*path, key))
        done.add(key)
        yield key

    for key in dimensions:
        yield from visit(key, ())


def _refuse_incomparable(key: str) -> None:
    if any(key == refused or key.startswith(f"{refused}.") for refused in INCOMPARABLE):
        raise ConfigError(
            f"sweep.space.{key}: trials with other values of it cannot be compared; give it in the configuration, and "
            "take it out of the space"
        )


def _listed(accepted: Any) -> list[Any]:
    return accepted if isinstance(accepted, list) else [accepted]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def same(value: Any, other: Any) -> bool:
    """Equal, and not as true equals 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _has(data: Any, key: str) -> bool:
    for part in key.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return False
        data = data[part]
    return True


def _keys(data: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
