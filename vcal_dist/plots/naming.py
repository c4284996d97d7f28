"""How a problem's variables are named in charts, found by their names, and chosen.

Vega-Lite reads dots, brackets and colons in a field's name as operators. So names of users are never names of fields:
they are titles, or values in the data. Of titles it makes code too, and escapes no more than their quotes
(https://github.com/vega/vega-lite/pull/7640): units, which are free text, are shown without what breaks it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import numpy as np

from storage.problem import ControlInput, Problem, Variable
from vcal_dist.answers import Array, ParameterSummary
from vcal_dist.errors import ModelError

NUMBER = ".4~g"  # in tooltips
DASHES = ("-", "\N{EN DASH}", "\N{EM DASH}", "\N{MINUS SIGN}")


def label(variable: Variable | ParameterSummary) -> str:
    """A name with its unit."""
    return f"{variable.name} ({unit(variable)})" if unit(variable) else variable.name


def unit(variable: Variable | ParameterSummary) -> str:
    """A unit in one line, with a sign that looks like a backslash for each; a dash alone says that there is none."""
    text = " ".join(variable.unit.split()).replace("\\", "\N{SET MINUS}")
    return "" if text in DASHES else text


def counted(count: int, noun: str) -> str:
    """So many things: 1 row, 2 rows."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def place(variables: Sequence[Variable], name: str, what: str) -> int:
    """Where a variable stands, or an error that says which names there are."""
    names = [variable.name for variable in variables]
    if name in names:
        return names.index(name)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    raise ModelError(f"unknown {what} '{name}'{hint}; accepted: {', '.join(names)}")


def output_place(problem: Problem, name: str | None) -> int:
    """Where an output stands; without a name the first."""
    return 0 if name is None else place(problem.outputs, name, "output")


def point(problem: Problem, at: Mapping[str, float] | None) -> Array:
    """Control inputs (d1,), at the middle of their bounds unless `at` says otherwise."""
    inputs = problem.control_inputs
    values = np.array([sum(variable.bounds) / 2 for variable in inputs])
    for name, value in (at or {}).items():
        j = place(inputs, name, "control input")
        low, high = inputs[j].bounds
        if not low <= value <= high:
            raise ModelError(
                f"control input '{name}' is {value:g}, outside its bounds [{low:g}, {high:g}]; stay inside"
            )
        values[j] = value
    return values


def where(
    inputs: Sequence[ControlInput], values: Sequence[float], at: Mapping[str, float] | None, most: int = 3
) -> str:
    """In words where the inputs that a chart does not vary stand; empty if there are none."""
    if not inputs:
        return ""
    if not at and len(inputs) > most:
        return f"the other {len(inputs)} control inputs at the middle of their bounds"
    parts = [f"{v.name} = {value:.4g} {unit(v)}".strip() for v, value in zip(inputs, values, strict=True)]
    more = f" and {len(parts) - most} more" if len(parts) > most else ""
    return f"at {', '.join(parts[:most])}{more}"
