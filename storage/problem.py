"""The calibration problem: which columns are x, t and the outputs, their bounds, and the priors of θ.

A problem is written by people in YAML and travels with the data in the store's attributes:

    name: borehole
    control_inputs:                       # x: known for every run and every observation
      - {name: Tu, unit: m²/yr, bounds: [63070, 115600], description: transmissivity of the upper aquifer}
    calibration_inputs:                   # t: chosen for every run; its true value θ is what we look for
      - {name: rw, unit: m, bounds: [0.05, 0.15], prior: {family: normal, mean: 0.1, sd: 0.016}}
    outputs:                              # z of a run, y of an observation
      - {name: flow, unit: m³/yr}
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar
from unicodedata import category

from pydantic import AfterValidator, Field, StringConstraints, ValidationError, model_validator

from storage import strict_yaml
from storage.errors import ProblemError
from storage.priors import WITH_LIMITS, Beta, Finite, Prior, Strict, TruncatedNormal, Uniform
from storage.validation import explain, show

CONTROL = ("Cc", "Zl", "Zp")  # Unicode's categories of what moves a terminal's cursor or ends a line


def _one_line(text: str) -> str:
    for character in text:
        if category(character) in CONTROL:
            raise ValueError(f"has the control character {character!r}, got {show(text)}; leave it out")
    return text


def _lines(text: str) -> str:
    _one_line(text.translate({ord(character): " " for character in "\n\r\t"}))
    return text


# A name is a column's heading and an attribute's text: anything but blanks around it and path separators inside it.
Name = Annotated[
    str,
    StringConstraints(strip_whitespace=True, min_length=1, max_length=100, pattern=r"^[^/\\\n\r\t]+$"),
    AfterValidator(_one_line),
]
Lines = Annotated[str, AfterValidator(_lines)]

T = TypeVar("T")
NOISE_SUFFIX = "_noise"  # the optional column with an observation's own standard deviation
RUN = "run"  # the optional column with the number of the run that a row of the runs belongs to
MOST_WHOLE = 2.0**53 - 1  # up to here a float64 holds every whole number exactly


class Variable(Strict):
    """A named column with its unit and its meaning."""

    name: Name
    unit: Lines = ""
    description: Lines = ""


class ControlInput(Variable):
    """One column of x. Bounds map it to the unit interval; rows outside them are refused."""

    bounds: tuple[Finite, Finite]

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        low, high = self.bounds
        if not low < high:
            raise ValueError(f"bounds of '{self.name}' must be [low, high] with low < high, got [{low:g}, {high:g}]")
        return self


class CalibrationInput(ControlInput):
    """One column of t, with the prior of its true value θ (uniform over the bounds unless given)."""

    prior: Prior

    @model_validator(mode="before")
    @classmethod
    def _prior_from_bounds(cls, data: Any) -> Any:
        """A missing prior, and the limits a prior leaves out, come from the bounds."""
        if not isinstance(data, dict) or not isinstance(data.get("bounds"), list | tuple) or len(data["bounds"]) != 2:
            return data
        prior = data.get("prior", {"family": "uniform"})
        if isinstance(prior, dict) and prior.get("family") in WITH_LIMITS:
            prior = {"low": data["bounds"][0], "high": data["bounds"][1], **prior}
        return {**data, "prior": prior}

    @model_validator(mode="after")
    def _prior_inside_bounds(self) -> Self:
        (low, high), prior = self.bounds, self.prior
        if isinstance(prior, Uniform | Beta | TruncatedNormal):
            if not prior.low < prior.high:
                raise ValueError(f"prior of '{self.name}' needs low < high, got [{prior.low:g}, {prior.high:g}]")
            if prior.low < low or prior.high > high:
                raise ValueError(
                    f"prior of '{self.name}' reaches over [{prior.low:g}, {prior.high:g}], outside its bounds "
                    f"[{low:g}, {high:g}] where the simulator was run; narrow the prior or widen the bounds"
                )
        elif not low <= prior.centre <= high:
            raise ValueError(
                f"prior of '{self.name}', {prior}, is centred at {prior.centre:g}, outside its bounds "
                f"[{low:g}, {high:g}]; check the units, the prior or the bounds"
            )
        return self


class Output(Variable):
    """One column of z and y. With `missing: true`, NaN means "not measured" instead of an error."""

    bounds: tuple[Finite, Finite] | None = None
    missing: Annotated[bool, Field(strict=True)] = False

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(
                f"bounds of '{self.name}' must be [low, high] with low < high, got {[*self.bounds]}; or leave them out"
            )
        return self


class Column(Strict):
    """What a row of a table must satisfy in one column."""

    name: str
    low: float = -math.inf
    high: float = math.inf
    missing: bool = False
    optional: bool = False
    whole: bool = False  # an identifier: a whole number that a float64 holds exactly
    noise_of: str | None = None  # the output whose standard deviation this is: positive, and known where that is known

    @property
    def slack(self) -> float:
        """Tolerance at the bounds, so that a value on a bound survives rounding to float32."""
        width = self.high - self.low
        return 1e-6 * width if math.isfinite(width) else 0.0


def _some(items: tuple[T, ...]) -> tuple[T, ...]:
    if not items:
        raise ValueError("needs at least one entry, got none")
    return items


class Problem(Strict):
    """Names, units, bounds and priors; validated as a whole."""

    name: Name
    description: Lines = ""
    control_inputs: Annotated[tuple[ControlInput, ...], AfterValidator(_some)]
    calibration_inputs: Annotated[tuple[CalibrationInput, ...], AfterValidator(_some)]
    outputs: Annotated[tuple[Output, ...], AfterValidator(_some)]

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        names = [v.name for v in (*self.control_inputs, *self.calibration_inputs, *self.outputs)]
        names += [output.name + NOISE_SUFFIX for output in self.outputs]
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise ValueError(
                f"names must differ from each other (and from '<output>{NOISE_SUFFIX}'), repeated: {repeated}"
            )
        return self

    @property
    def runs_columns(self) -> dict[str, tuple[Column, ...]]:
        """The columns of the table of runs, by array: x, t, z and the optional run, unless a variable has that name."""
        found = {"x": _inputs(self.control_inputs), "t": _inputs(self.calibration_inputs), "z": self._outputs()}
        if RUN not in (column.name for columns in found.values() for column in columns):
            found[RUN] = (Column(name=RUN, optional=True, whole=True),)
        return found

    @property
    def observations_columns(self) -> dict[str, tuple[Column, ...]]:
        """The columns of the table of observations, by array: x, y and the optional noise of y."""
        noise = tuple(
            Column(name=o.name + NOISE_SUFFIX, optional=True, missing=o.missing, noise_of=o.name) for o in self.outputs
        )
        return {"x": _inputs(self.control_inputs), "y": self._outputs(), "noise": noise}

    def _outputs(self) -> tuple[Column, ...]:
        limits = [o.bounds or (-math.inf, math.inf) for o in self.outputs]
        return tuple(
            Column(name=o.name, low=low, high=high, missing=o.missing)
            for o, (low, high) in zip(self.outputs, limits, strict=True)
        )


def _inputs(inputs: Sequence[ControlInput]) -> tuple[Column, ...]:
    return tuple(Column(name=v.name, low=v.bounds[0], high=v.bounds[1]) for v in inputs)


def load_problem(path: str | Path) -> Problem:
    """The problem written in a YAML file."""
    data = strict_yaml.read(path, ProblemError, "the problem file")
    if data is None:
        raise ProblemError(f"{path} is empty; a problem file has the keys {', '.join(Problem.model_fields)}")
    return parse_problem(data, source=str(path))


def parse_problem(data: Any, source: str = "problem") -> Problem:
    """The problem in a mapping, or an error that lists every key that is wrong, what it holds and what is accepted."""
    if not isinstance(data, dict):
        raise ProblemError(
            f"{source}: expected a mapping with the keys {', '.join(Problem.model_fields)}, got {show(data)}"
        )
    try:
        return Problem.model_validate(data)
    except ValidationError as error:
        raise ProblemError(f"{source} is not a valid problem:\n{explain(error, Problem, data)}") from None
