"""Which columns a table asks for, and where a file has them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from storage.errors import IngestError
from storage.problem import NOISE_SUFFIX, Column
from storage.sources.files import SourceFile

OUTPUT_ARRAYS = ("z", "y")


@dataclass(frozen=True)
class Request:
    """The columns of a table, by array, as the problem names them."""

    table: str
    columns: Mapping[str, tuple[Column, ...]]

    def flat(self, *, optional: bool = True) -> tuple[Column, ...]:
        """The columns of a row in the order in which pieces hold them."""
        return tuple(c for group in self.columns.values() for c in group if optional or not c.optional)

    @property
    def optional(self) -> bool:
        """Whether the table has columns that files may leave out."""
        return any(c.optional for c in self.flat())


@dataclass(frozen=True)
class Pick:
    """Where a column lies: an array (or column) of the file, and its index there if that array has several."""

    name: str
    index: int | None = None


@dataclass(frozen=True)
class Matrix:
    """An array that may hold a whole group of columns: how many, and their labels if the file has them."""

    width: int
    labels: tuple[str, ...] = ()
    single: bool = False  # also stands for the only column of a group

    @property
    def column(self) -> bool:
        """Whether it is a matrix with one column."""
        return self.width == 1 and not self.single


@dataclass(frozen=True)
class Selection:
    """A file's answer to a request."""

    picks: tuple[Pick, ...]
    optional: bool  # whether the optional columns are there too
    ignored: tuple[str, ...]


def select(
    request: Request,
    file: SourceFile,
    columns: Sequence[str],
    matrices: Mapping[str, Matrix] | None = None,
    *,
    described: Sequence[str] | None = None,
) -> Selection:
    """Finds every column of a request: by its own name, or else in a matrix with the name of its array."""
    matrices = matrices or {}
    picks: list[Pick] = []
    optional = False
    for array, group in request.columns.items():
        names = [c.name for c in group]
        missing = [name for name in names if name not in columns]
        # A matrix with these labels names its columns too, and better: its own name may be that of a column. So it is
        # with the array `run` of a store, which is a matrix with one column.
        labelled = array in matrices and set(names) <= {*matrices[array].labels, *([array] * matrices[array].column)}
        if not missing and not labelled:
            found = [Pick(name) for name in names]
        elif array in matrices:
            found = _in_matrix(file, array, names, matrices[array])
        elif len(missing) == len(names) and all(c.optional for c in group):
            continue
        else:
            if all(c.optional for c in group):
                raise IngestError(
                    f"{file}: has a noise column for some outputs but not '{missing[0]}'; give the noise of all or none"
                )
            swapped = array == "t" and len(missing) == len(names)
            _missing(file, missing[0], described or columns, hint="; or is it a file of observations?" * swapped)
        picks += found
        optional = optional or any(c.optional for c in group)
    for name in {pick.name for pick in picks}:
        if list(columns).count(name) > 1:
            raise IngestError(f"{file}: has {list(columns).count(name)} columns named '{name}'; rename all but one")
    used = {pick.name for pick in picks}
    ignored = tuple(dict.fromkeys(name for name in (*columns, *matrices) if name and name not in used))
    return Selection(tuple(picks), optional, ignored)


def _in_matrix(file: SourceFile, array: str, names: list[str], matrix: Matrix) -> list[Pick]:
    if matrix.labels:
        # The noise of an output carries the output's own label.
        for wanted in (names, [name.removesuffix(NOISE_SUFFIX) for name in names]):
            if set(wanted) <= set(matrix.labels):
                return [Pick(array, matrix.labels.index(name)) for name in wanted]
        lacking = next(name for name in names if name not in matrix.labels)
        _missing(file, lacking, matrix.labels, f"the array '{array}'")
    if len(names) == 1 and matrix.single:
        return [Pick(array)]
    if matrix.width != len(names):
        raise IngestError(
            f"{file}: the array '{array}' has {matrix.width} columns, but the problem has {len(names)} "
            f"({', '.join(names)}); give one array for each name, or as many columns as names, in that order"
        )
    return [Pick(array, i) for i in range(len(names))]


def _missing(file: SourceFile, name: str, present: Sequence[str], where: str = "the file", hint: str = "") -> NoReturn:
    """Says which column is missing, what is there instead, and which of it was probably meant."""
    by_lower = {other.lower(): other for other in present}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    meant = f" (did you mean '{by_lower[near[0]]}'?)" if near else ""
    listed = ", ".join(f"'{other}'" for other in present[:30]) + (", …" if len(present) > 30 else "")
    raise IngestError(
        f"{file}: column '{name}' is missing{meant}; {where} has {listed or 'no columns'}. "
        f"Rename the column in the file or the variable in the problem file{hint}"
    )
