"""Predictions into a file, block by block, in the format that its suffix says: CSV, Parquet, NetCDF or Zarr.

A file is written under another name beside its own and renamed at the end: nobody ever sees half of it.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.predictions import Field
from storage import documents
from storage.errors import StoreError
from storage.room import because, check_file_size
from storage.text import no_formula

Array = NDArray[np.float64]
Write = Callable[[Sequence[Array]], None]
HEADERS = 2**17  # bytes of a NetCDF file beside its numbers
MADE_BY = "vcal predict"
ROW, SAMPLE = "row", "sample"  # dimensions
RESERVED = (ROW, SAMPLE, ".")  # names that a variable of NetCDF or Zarr cannot have here


def check_output(given: str, at: str, *, overwrite: bool) -> Path:
    """The path to write to; what is wrong with it, its suffix or what lies there, is raised before any work."""
    if "://" in given:
        raise StoreError(f"{given} is a URL; predictions are written to local files: choose a path")
    path = Path(given)
    if path.suffix.lower() not in FORMATS:
        raise StoreError(f"{path}: the format is not known by its suffix; accepted: {', '.join(FORMATS)}")
    if not path.exists() and not path.is_symlink():
        return path
    if not overwrite:
        raise StoreError(f"{path} exists; choose another path, or replace it with --overwrite")
    if path.exists() and Path(at).exists() and path.samefile(at):
        raise StoreError(f"{path} is also what is predicted at; choose another path")
    if path.is_dir() and not _is_ours(path):
        raise StoreError(f"{path} is a directory that was not made by `{MADE_BY}`; delete it, or choose another path")
    return path


def write(
    path: Path,
    fields: Sequence[Field],
    blocks: Iterable[Sequence[Array]],
    *,
    rows: int,
    block_rows: int,
    about: Mapping[str, str],
) -> None:
    """Writes all blocks, or nothing; what lies at the path already is replaced at the end.

    `about` says where the numbers come from; CSV has no place for it.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FORMATS[path.suffix.lower()](partial, fields, rows, block_rows, about) as put:
            for block in blocks:
                put(block)
        old = path.rename(f"{partial}.old") if path.is_dir() else None  # a rename cannot replace a directory
        partial.replace(path)
        if old is not None:
            shutil.rmtree(old)
    except OSError as error:  # of writing: what goes wrong with reading names its own file
        raise StoreError(f"cannot write {path}: {because(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        with contextlib.suppress(OSError):  # it is not there any more, or never was
            partial.unlink()


def _is_ours(path: Path) -> bool:
    try:
        document = documents.read(path / "zarr.json", StoreError, "")
        return bool(document["attributes"]["made_by"] == MADE_BY)
    except (StoreError, KeyError, TypeError):
        return False


def distinct(names: Iterable[str], taken: Sequence[str] = ()) -> list[str]:
    """The names, with "_" behind those that are taken or have come before.

    >>> distinct(["flow", "flow_mean", "flow_mean"])
    ['flow', 'flow_mean', 'flow_mean_']
    """
    found: list[str] = []
    for name in names:
        while name in (*taken, *found):
            name += "_"
        found.append(name)
    return found


def flat_names(fields: Sequence[Field]) -> list[str]:
    """Names of the columns of a table, where every sample is a column."""
    return distinct(
        name
        for field in fields
        for name in ([field.name] if field.samples is None else (f"{field.name}_{i}" for i in range(field.samples)))
    )


def _flat(block: Sequence[Array]) -> list[Array]:
    return [column for values in block for column in np.atleast_2d(values.T)]


# --- tables -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _csv(path: Path, fields: Sequence[Field], rows: int, block_rows: int, about: Mapping[str, str]) -> Iterator[Write]:
    """Numbers are written so that they are the same when they are read again."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    names = flat_names(fields)
    schema = pa.schema([(str(i), pa.float64()) for i in range(len(names))])
    header = io.StringIO()
    csv.writer(header, lineterminator="\n").writerow(map(no_formula, names))
    with path.open("wb") as file:
        file.write(header.getvalue().encode())
        with arrow_csv.CSVWriter(file, schema, write_options=arrow_csv.WriteOptions(include_header=False)) as writer:
            yield lambda block: writer.write_table(pa.table(_flat(block), schema=schema))


@contextlib.contextmanager
def _parquet(
    path: Path, fields: Sequence[Field], rows: int, block_rows: int, about: Mapping[str, str]
) -> Iterator[Write]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.float64()) for name in flat_names(fields)], metadata=dict(about))
    with pq.ParquetWriter(path, schema) as writer:
        yield lambda block: writer.write_table(pa.table(_flat(block), schema=schema))


# --- arrays with dimensions -------------------------------------------------------------------------------------------


class _Arrays:
    """Writes blocks into arrays that have room for all rows."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.arrays, self.start = arrays, 0

    def put(self, block: Sequence[Array]) -> None:
        """The next rows."""
        stop = self.start + len(block[0])
        for array, values in zip(self.arrays, block, strict=True):
            array[self.start : stop] = values
        self.start = stop


def _shape(field: Field, rows: int) -> dict[str, int]:
    return {ROW: rows} if field.samples is None else {ROW: rows, SAMPLE: field.samples}


def _attributes(field: Field, name: str) -> dict[str, Any]:
    found = {"units": field.unit, "long_name": field.meaning, "name": field.name if name != field.name else ""}
    return {key: text for key, text in found.items() if text}


@contextlib.contextmanager
def _netcdf(
    path: Path, fields: Sequence[Field], rows: int, block_rows: int, about: Mapping[str, str]
) -> Iterator[Write]:
    import h5netcdf  # type: ignore[import-untyped]

    numbers = sum(math.prod(_shape(field, rows).values()) for field in fields)
    check_file_size(path, 8 * numbers + HEADERS, "the file")  # HDF5 ends the process where it cannot write
    with h5netcdf.File(path, "w") as file:
        file.attrs.update(about)
        file.dimensions = {dim: size for field in fields for dim, size in _shape(field, rows).items()}
        arrays = []
        for name, field in zip(distinct([f.name for f in fields], RESERVED), fields, strict=True):
            shape = _shape(field, rows)
            chunks = tuple(min(size, block_rows) if dim == ROW else size for dim, size in shape.items())
            arrays.append(file.create_variable(name, tuple(shape), "f8", chunks=chunks))
            arrays[-1].attrs.update(_attributes(field, name))
        yield _Arrays(arrays).put


@contextlib.contextmanager
def _zarr(path: Path, fields: Sequence[Field], rows: int, block_rows: int, about: Mapping[str, str]) -> Iterator[Write]:
    import zarr

    group = zarr.open_group(path, mode="w-", zarr_format=3, attributes=dict(about))
    arrays = []
    for name, field in zip(distinct([f.name for f in fields], RESERVED), fields, strict=True):
        shape = _shape(field, rows)
        chunks = tuple(min(size, block_rows) if dim == ROW else size for dim, size in shape.items())
        arrays.append(
            group.create_array(
                name,
                shape=tuple(shape.values()),
                chunks=chunks,
                dtype="float64",
                dimension_names=tuple(shape),
                attributes=_attributes(field, name),
                fill_value=np.nan,
            )
        )
    yield _Arrays(arrays).put
    with warnings.catch_warnings():
        # Zarr 3 calls it no part of the specification; xarray warns where it is missing.
        warnings.filterwarnings("ignore", message="Consolidated metadata", category=UserWarning)
        zarr.consolidate_metadata(path)


FORMATS = {".csv": _csv, ".parquet": _parquet, ".nc": _netcdf, ".zarr": _zarr}
