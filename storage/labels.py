"""Tables with names on their columns (pandas, polars): the names decide, not the order."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from storage.errors import VcalError
from storage.problem import Column


def by_name(what: str, values: Any, columns: Sequence[Column]) -> Any:
    """The columns of a table in the order of the problem's; what has no names stays as it is.

    Other columns are left out. Noise may have the names of the outputs. A row by itself (pandas' Series with the names
    as its index) is put in order too.
    """
    names = [column.name for column in columns]
    labels = getattr(values, "columns", None)
    if labels is None:
        index: Any = getattr(values, "index", None)  # of a list a method, and an array has none
        if index is not None and not callable(index) and set(index) == set(names):
            return values[list(names)]
        return values
    labels = list(labels)
    outputs = [column.noise_of for column in columns if column.noise_of is not None]
    if outputs and set(outputs) <= set(labels):
        names = outputs
    if not any(isinstance(label, str) for label in labels):
        return values  # numbered
    given = ", ".join(str(label) for label in labels)
    missing = [name for name in names if name not in labels]
    if missing:
        near = get_close_matches(missing[0], [str(label) for label in labels], n=1)
        raise VcalError(
            f"{what} is a table without a column '{missing[0]}'{f' (is it {near[0]!r}?)' if near else ''}; its columns "
            f"are {given}: name them as the problem does ({', '.join(names)}), or give an array without names"
        )
    twice = [name for name in names if labels.count(name) > 1]
    if twice:
        raise VcalError(f"{what} is a table with {labels.count(twice[0])} columns '{twice[0]}'; leave one of them")
    return values[list(names)]
