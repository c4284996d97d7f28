"""Rows to predict at: columns found by their names in files of any format that can be ingested, or in a store.

Everything is read twice. First every row is judged and counted, so that a fault in the last row is known before the
first is predicted; then rows come in blocks of one size, whatever the file's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from storage import layout
from storage.errors import IngestError
from storage.places import place
from storage.problem import NOISE_SUFFIX, Column, Problem
from storage.sources import Partition, Piece, Plan, Request, Selection, SourceFile, expand, pieces, plan
from storage.sources.columns import Pick
from storage.sources.partition import whole
from storage.store import open_store
from storage.table import Table
from storage.tally import FileFault, of_file, tally

Array = NDArray[np.float64]
MOST_LINES = 20  # of faults


@dataclass(frozen=True)
class Rows:
    """Rows that were found sound: `count` of them, with the columns of x, and of t and noise if they are there."""

    source: str
    plans: list[Plan]
    columns: dict[str, list[str]]  # names by array: x, t, noise
    count: int

    def blocks(self, size: int) -> Iterator[dict[str, Array]]:
        """All rows in order, `size` at a time, as arrays x, t and noise."""
        ends = np.cumsum([len(names) for names in self.columns.values()])[:-1]
        read = 0
        for values in _regular((piece.values for p in self.partitions for piece in pieces(p)), size):
            read += len(values)
            if read <= self.count:
                yield dict(zip(self.columns, np.split(values, ends, axis=1), strict=True))
        if read != self.count:
            raise IngestError(f"{self.source}: changed while it was read; wait until it is complete, then try again")

    @cached_property
    def partitions(self) -> list[Partition]:
        """What the rows are read from."""
        return [partition for p in self.plans for partition in p.partitions]

    @property
    def ignored(self) -> list[str]:
        """Columns that nobody asked for."""
        return list(dict.fromkeys(name for p in self.plans for name in p.selection.ignored))


def open_rows(
    source: str, problem: Problem, *, with_t: bool = False, with_noise: bool = False, extrapolate: bool = False
) -> Rows:
    """The rows in files or in a store, or an error that names missing columns, and rows with faults.

    Of a store these are its observations or, with t, its runs.
    """
    request = Request("runs" if with_t else "observations", wanted(problem, with_t, with_noise, extrapolate))
    plans = [_plan_of_store(source, request)] if _is_store(source) else [_tried(f, request) for f in expand([source])]
    having = {p.selection.optional for p in plans}
    if len(having) > 1:
        raise IngestError(f"{source}: some of the files have columns for the noise of the observations and some do not")
    noise = having == {True}
    flat = request.flat(optional=noise)
    rows, faults = 0, list[FileFault]()
    for p in plans:
        tallies = [tally(partition, flat) for partition in p.partitions]
        rows += sum(part.rows for part in tallies)
        faults += of_file(str(p.file), tallies)
    if faults:
        raise IngestError(_refusal(faults))
    if not rows:
        raise IngestError(f"{source}: has columns but no rows; there is nothing to predict")
    names = {array: [c.name for c in group] for array, group in request.columns.items() if noise or array != "noise"}
    return Rows(source, plans, names, rows)


def wanted(problem: Problem, with_t: bool, with_noise: bool, extrapolate: bool) -> dict[str, tuple[Column, ...]]:
    """The columns by array, with what they must satisfy."""
    inputs = {array: problem.runs_columns[array] for array in (("x", "t") if with_t else ("x",))}
    if extrapolate:
        inputs = {array: tuple(Column(name=c.name) for c in group) for array, group in inputs.items()}
    if with_noise:
        inputs["noise"] = tuple(
            Column(name=o.name + NOISE_SUFFIX, low=0, missing=o.missing, optional=True) for o in problem.outputs
        )
    return inputs


def _regular(parts: Iterable[Array], size: int) -> Iterator[Array]:
    """The same rows in parts of `size` rows; the last one may be short."""
    held, count = list[Array](), 0
    for part in parts:
        start = 0
        while start < len(part):
            taken = part[start : start + size - count]
            held.append(taken)
            start, count = start + len(taken), count + len(taken)
            if count == size:
                yield np.concatenate(held)
                held, count = [], 0
    if count:
        yield np.concatenate(held)


def _refusal(faults: Sequence[FileFault]) -> str:
    lines = [f"  {fault}" for fault in faults[:MOST_LINES]]
    if len(faults) > MOST_LINES:
        lines.append(f"  and {len(faults) - MOST_LINES:,} more such lines")
    outside = any(
        f.fault.kind.startswith("out of bounds") and not f.fault.column.endswith(NOISE_SUFFIX) for f in faults
    )
    cure = ", or predict where there are no runs with --extrapolate" if outside else ""
    listed = "\n".join(lines)
    return f"rows that cannot be predicted (counted from 1, below the header):\n{listed}\nTo go on, mend them{cure}."


def _tried(file: SourceFile, request: Request) -> Plan:
    """A plan, or an error that names all missing columns, not only the first."""
    try:
        return plan(file, request)
    except IngestError as error:
        missing = []
        for array, group in request.columns.items():
            for column in (c for c in group if not c.optional):
                try:
                    plan(file, Request(request.table, {array: (column,)}))
                except IngestError as other:
                    missing += [column.name] if f"column '{column.name}' is missing" in str(other) else []
        if len(missing) < 2:
            raise
        names = ", ".join(f"'{name}'" for name in missing)
        raise IngestError(f"{error}. Missing are {names}") from None


# --- stores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StorePartition:
    """Columns of a store's table, block by block."""

    file: SourceFile
    table: Table
    picks: tuple[Pick, ...]  # array, and the column's place in it

    def pieces(self) -> Iterator[Piece]:
        """The committed rows in order."""
        for index in range(self.table.blocks):
            block = self.table.read_block(index)
            yield whole(np.stack([block[pick.name][:, pick.index] for pick in self.picks], axis=1).astype(np.float64))


def _is_store(source: str) -> bool:
    """Whether it is one of ours: other Zarr groups are files like any other."""
    scheme, separator, _ = source.partition("://")
    if separator and scheme not in ("s3", "file"):
        return False
    found = place(source).read(layout.ROOT)
    return found is not None and b'"vcal"' in found[0]


def _plan_of_store(source: str, request: Request) -> Plan:
    table: Table = getattr(open_store(source), request.table)
    file = SourceFile(source, source, "zarr")
    picks, missing = list[Pick](), list[str]()
    noise = "noise" in request.columns and "noise" in table.columns
    for array, group in request.columns.items():
        if array == "noise" and not noise:
            continue
        for column in group:
            if column.name in table.columns[array]:
                picks.append(Pick(array, table.columns[array].index(column.name)))
            else:
                missing.append(column.name)
    if missing:
        names = ", ".join(f"'{name}'" for name in missing)
        present = ", ".join(f"'{name}'" for name in table.names)
        raise IngestError(f"{source}: its {table.name} have no column {names}; they have {present}")
    if not table.rows:
        raise IngestError(f"{source}: the store has no {table.name}; give a file with the rows to predict at")
    return Plan(file, (StorePartition(file, table, tuple(picks)),), Selection(tuple(picks), noise, ()))
