"""Named arrays that hold inputs only, as rows.

`storage.sources.plan` asks for outputs, because their dimensions decide there what the rows are. Inputs alone are
spread over each other's dimensions: depth(depth) and time(time) make a grid.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from storage.errors import IngestError
from storage.sources import Plan, Request, SourceFile
from storage.sources.arrays import ArrayPartition, Box, column_dims
from storage.sources.columns import Matrix, Pick, select
from storage.sources.containers import NamedArray, opened
from storage.sources.partition import piece_rows


def plan_of_arrays(file: SourceFile, request: Request) -> Plan:
    """Finds the columns in an npz, HDF5, NetCDF or Zarr file, and cuts it into boxes."""
    with opened(file, request.table) as arrays:
        columns = [name for name, array in arrays.items() if array.numeric and _is_column(array)]
        matrices = {name: _matrix(arrays[name]) for name in request.columns if name in arrays and arrays[name].shape}
        described = [f"{name} {array.shape}" for name, array in arrays.items()]
        selection = select(request, file, columns, matrices, described=described)
        sizes = _sizes(file, {pick: arrays[pick.name] for pick in selection.picks})
    boxes = _boxes(list(sizes.values()), piece_rows(len(selection.picks)))
    partition = ArrayPartition(file, request.table, selection.picks, tuple(sizes), boxes)
    return Plan(file, (partition,), selection)


def _is_column(array: NamedArray) -> bool:
    return array.dims is not None or len(array.shape) == 1 or (len(array.shape) == 2 and array.shape[1] == 1)


def _matrix(array: NamedArray) -> Matrix:
    single = len(array.shape) == 1
    return Matrix(1 if single else array.shape[-1], () if single else array.labels, single=single)


def _sizes(file: SourceFile, chosen: Mapping[Pick, NamedArray]) -> dict[str, int]:
    """The dimensions of the rows, slowest first, and their lengths; the array with most of them gives their order."""
    sizes: dict[str, int] = {}
    for pick, array in sorted(chosen.items(), key=lambda pair: -len(column_dims(pair[1], pair[0]))):
        for dim, length in zip(column_dims(array, pick), array.shape, strict=False):
            if sizes.setdefault(dim, length) != length:
                listed = ", ".join(f"'{p.name}' {a.shape}" for p, a in chosen.items())
                raise IngestError(f"{file}: columns must have the same length, but these have not: {listed}")
    return sizes


def _boxes(sizes: list[int], rows: int) -> tuple[Box, ...]:
    """Slices of the first dimension of about so many rows."""
    if not sizes:
        return ((),)  # scalars only: one row
    step = max(1, rows // max(1, math.prod(sizes[1:])))
    rest = tuple((0, size) for size in sizes[1:])
    return tuple(((start, min(start + step, sizes[0])), *rest) for start in range(0, sizes[0], step))
