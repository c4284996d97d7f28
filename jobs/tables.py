"""Tables that several commands show: the variables of a problem, and rows a line a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from jobs.console import number, stdout, table

ROW_WIDTH = 13  # of a number and the gap before it


def variables(problem: Mapping[str, Any], priors: Mapping[str, str]) -> Table:
    """Every variable of a problem, given in plain values, with its unit, bounds and prior."""
    result = table("Problem", "role", "name", "unit", "bounds", "prior", "description")
    for role, group in (("x", "control_inputs"), ("t", "calibration_inputs"), ("z, y", "outputs")):
        for item in problem[group]:
            bounds = "–" if item["bounds"] is None else "{:g} … {:g}".format(*item["bounds"])
            prior = priors.get(item["name"], "")
            result.add_row(role, item["name"], item["unit"], bounds, prior, item["description"])
    return result


def first_rows(title: str, columns: Mapping[str, Sequence[float]]) -> list[Table]:
    """As many rows side by side as the width allows, the others below: any number of columns fits."""
    shown = max((len(values) for values in columns.values()), default=0)
    room = stdout().width - max((len(column) for column in columns), default=0) - 2
    together = max(1, room // ROW_WIDTH)
    results = []
    for start in range(0, shown, together):
        headings = tuple(f"row {i}" for i in range(start, min(start + together, shown)))
        result = table(title if start == 0 else "", "column", *headings, right=headings)
        for column, values in columns.items():
            result.add_row(column, *(number(value) for value in values[start : start + together]))
        results.append(result)
    return results
