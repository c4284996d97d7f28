"""Named arrays as rows: those that share a dimension go side by side, the others are spread over each other's.

A file with flow(run, site), rw(run) and distance(site) holds a row for every run at every site. What is read at a time
is a box: a slice of the first dimension or, where one index of it has too many rows, a part of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from storage.errors import IngestError
from storage.sources.columns import OUTPUT_ARRAYS, Matrix, Pick, Request, select
from storage.sources.containers import Arrays, NamedArray, opened
from storage.sources.files import SourceFile
from storage.sources.partition import Piece, Plan, blank, piece_rows, whole

BOXES = 4  # of a partition: opening a NetCDF file takes as long as reading a box
MOST_ROWS = 10**11  # of a file
MOST_ROWS_PER_BYTE = 10**4  # more than what compresses best, a column of one value
ROW = "row"  # the dimension of arrays that do not name theirs
Box = tuple[tuple[int, int], ...]  # start and stop along every dimension


@dataclass(frozen=True)
class ArrayPartition:
    """Boxes of a file's rows. An npz file is one partition, since its arrays can only be read as a whole."""

    file: SourceFile
    table: str
    picks: tuple[Pick, ...]
    dims: tuple[str, ...]
    boxes: tuple[Box, ...]

    def pieces(self) -> Iterator[Piece]:
        """The rows in order, the last dimension running fastest."""
        with opened(self.file, self.table) as arrays:
            for box in self.boxes:
                yield self._piece(arrays, dict(zip(self.dims, (slice(*ends) for ends in box), strict=True)))

    def _piece(self, arrays: Arrays, box: Mapping[str, slice]) -> Piece:
        shape = tuple(part.stop - part.start for part in box.values())
        values = blank(math.prod(shape), len(self.picks))
        blocks: dict[str, np.ndarray] = {}
        for i, pick in enumerate(self.picks):
            array = arrays[pick.name]
            dims = column_dims(array, pick)
            if pick.name not in blocks:
                rest = (slice(None),) * (len(array.shape) - len(dims))
                blocks[pick.name] = np.asarray(array.read((*(box[d] for d in dims), *rest)))
            block = blocks[pick.name]
            column = block[..., pick.index or 0] if block.ndim > len(dims) else block
            # From the array's own order of dimensions to the rows', with length 1 where it does not vary.
            ordered = column.transpose([dims.index(d) for d in self.dims if d in dims])
            spread = ordered[tuple(slice(None) if d in dims else None for d in self.dims)]
            values[:, i] = np.broadcast_to(spread, shape).ravel()
        return whole(values)


def plan(file: SourceFile, request: Request) -> Plan:
    """Cuts a file of named arrays into boxes."""
    with opened(file, request.table) as arrays:
        wanted = {c.name for c in request.flat()}
        identifiers = {c.name for c in request.flat() if c.whole}
        # Text that nobody asked for labels something; it is not worth a word that it is left out.
        columns = [n for n, array in arrays.items() if _is_column(array) and (array.numeric or n in wanted)]
        found = {name: arrays[name] for name in request.columns if name in arrays}
        matrices = {name: _matrix(array) for name, array in found.items() if _is_matrix(array)}
        described = [f"{name} {array.shape}" for name, array in arrays.items()]
        selection = select(request, file, columns, matrices, described=described)
        chosen = [arrays[pick.name] for pick in selection.picks]
        for pick, array in zip(selection.picks, chosen, strict=True):
            if not array.numeric:
                cure = (
                    "number the runs, or give it another name"
                    if pick.name in identifiers
                    else "store it as floating point"
                )
                raise IngestError(f"{file}: the array '{pick.name}' holds {_content(array)}, not numbers; {cure}")
        sizes = _sizes(file, request, selection.picks, chosen)
    _refuse_many(file, math.prod(sizes.values()))
    boxes = list(_boxes(tuple(sizes.values()), piece_rows(len(chosen))))
    step = len(boxes) if file.format == "npz" else BOXES
    groups = [tuple(boxes[i : i + step]) for i in range(0, len(boxes), max(1, step))]
    dims = tuple(sizes)
    partitions = [ArrayPartition(file, request.table, selection.picks, dims, group) for group in groups]
    return Plan(file, tuple(partitions), selection)


def _refuse_many(file: SourceFile, rows: int) -> None:
    """A file may say that it has any number of rows, and hold none of them: they would all be fill values."""
    stored = max(file.size(), 4096) if file.format in ("hdf5", "netcdf") else None
    if rows > MOST_ROWS or (stored is not None and rows > MOST_ROWS_PER_BYTE * stored):
        held = f" in {stored:,} bytes" if stored is not None else ""
        raise IngestError(f"{file}: says that it has {rows:,} rows{held}; was it written to its end? Write it again")


def column_dims(array: NamedArray, pick: Pick) -> tuple[str, ...]:
    """The dimensions along which a column varies."""
    if array.dims is None:
        return (ROW,)
    return array.dims if pick.index is None else array.dims[:-1]


def _is_column(array: NamedArray) -> bool:
    """Whether an array can be a column by its own name."""
    return array.dims is not None or len(array.shape) == 1 or (len(array.shape) == 2 and array.shape[1] == 1)


def _is_matrix(array: NamedArray) -> bool:
    """Whether an array can hold the columns of a group side by side."""
    return len(array.shape) in (1, 2) or (array.dims is not None and len(array.shape) > 2)


def _matrix(array: NamedArray) -> Matrix:
    width = array.shape[-1] if len(array.shape) > 1 else 1
    return Matrix(width, array.labels if len(array.shape) > 1 else (), single=len(array.shape) == 1)


def _content(array: NamedArray) -> str:
    kinds = {"U": "text", "S": "text", "T": "text", "O": "Python objects or text", "c": "complex numbers"}
    return kinds.get(array.dtype.kind, f"values of type {array.dtype}")


def _sizes(file: SourceFile, request: Request, picks: tuple[Pick, ...], chosen: list[NamedArray]) -> dict[str, int]:
    """The dimensions of the rows, slowest first, and their lengths."""
    lengths: dict[str, dict[str, int]] = {}  # dimension → array → length
    for pick, array in zip(picks, chosen, strict=True):
        for dim, length in zip(column_dims(array, pick), array.shape, strict=False):
            lengths.setdefault(dim, {})[pick.name] = length
    for of_arrays in lengths.values():
        if len(set(of_arrays.values())) > 1:
            listed = ", ".join(f"'{name}' {length}" for name, length in of_arrays.items())
            raise IngestError(f"{file}: arrays of one table must be of the same length, but these are not: {listed}")
    # The array with most dimensions, an output on its grid, gives their order; the outputs are the last of equals.
    by_width = sorted(zip(picks, chosen, strict=True), key=lambda pair: -len(column_dims(pair[1], pair[0])))
    dims = list(dict.fromkeys(dim for pick, array in by_width for dim in column_dims(array, pick)))
    _outputs_cover(file, request, picks, chosen, dims)
    return {dim: next(iter(lengths[dim].values())) for dim in dims}


def _outputs_cover(
    file: SourceFile, request: Request, picks: tuple[Pick, ...], chosen: list[NamedArray], dims: list[str]
) -> None:
    """Refuses rows that repeat each other: outputs that do not vary along a dimension, or inputs of runs."""
    groups = [name for name, group in request.columns.items() for _ in group][: len(picks)]
    columns = {pick.name: column_dims(array, pick) for pick, array in zip(picks, chosen, strict=True)}
    outputs = [columns[p.name] for g, p in zip(groups, picks, strict=True) if g in OUTPUT_ARRAYS]
    inputs = [columns[p.name] for g, p in zip(groups, picks, strict=True) if g not in OUTPUT_ARRAYS]
    listed = ", ".join(f"{name}({', '.join(shape)})" for name, shape in columns.items())
    if outputs and not any(set(shape) == set(dims) for shape in outputs):  # a request may be for inputs alone
        raise IngestError(
            f"{file}: no output varies along all of the dimensions {', '.join(dims)}, so rows would repeat each other: "
            f"{listed}. Give the arrays of one row the same dimensions"
        )
    alone = [d for d in dims if all(d not in shape for shape in inputs)]
    if request.table == "runs" and alone:  # observations may be repeated at the same place, a run has one result
        raise IngestError(
            f"{file}: no input varies along the dimension '{alone[0]}', so runs would repeat their inputs: "
            f"{listed}. Make '{alone[0]}' a control input of the problem, or select one of its values"
        )


def _boxes(sizes: tuple[int, ...], rows: int) -> Iterator[Box]:
    """Boxes of at most about `rows` rows that cover all rows in order."""
    if not sizes:
        yield ()  # scalars only: one row
        return
    inner = math.prod(sizes[1:])
    if inner <= rows:
        step = max(1, rows // max(1, inner))
        for start in range(0, sizes[0], step):
            yield ((start, min(start + step, sizes[0])), *((0, size) for size in sizes[1:]))
        return
    for start in range(sizes[0]):
        for rest in _boxes(sizes[1:], rows):
            yield ((start, start + 1), *rest)
