"""Whether a store's root document is one that this package writes, before anything is opened or any memory taken.

Who writes a document can write its checksum, and earlier versions wrote none: every size is checked against what can be
held, and every array must be exactly what `layout` makes of its settings. So no document chooses its own codecs.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple, NoReturn

import numpy as np

from storage import layout
from storage.errors import ProblemError, StoreError
from storage.problem import Problem, parse_problem

MOST_FILE_BYTES = 1 << 30  # of the rows in one file of an array, in memory
MOST_FILES = 1 << 22  # of one array
MOST_ROWS = 1 << 48
RESTORE = f"restore {layout.ROOT} from a copy, or ingest the data again"


class Grid(NamedTuple):
    """How the rows of a table are cut, which is the same for all of its arrays."""

    rows: int
    chunk_rows: int
    shard_rows: int | None
    compression: str

    @property
    def file_rows(self) -> int:
        """Rows of a file."""
        return self.shard_rows or self.chunk_rows


def check(document: dict[str, Any], url: str) -> Problem:
    """The problem of a sound document, or an error that says what is wrong with it."""
    try:
        vcal = document["attributes"]["vcal"]
        problem = parse_problem(vcal["problem"], source=f"the problem in {url}")
        members = layout.members(document)
        for table in layout.TABLES:
            _check_table(members, table, problem, url)
        _check_records(vcal, url)
    except ProblemError as error:
        raise StoreError(f"{error}\n{RESTORE}") from None
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        # The checks below reach into what anybody may have written.
        _refuse(url, f"is not as a store writes it ({type(error).__name__}: {error})")
    return problem


def check_sizes(what: str, grid: Grid, width: int, dtype: str) -> None:
    """Refuses what could not be read again, also before it is written."""
    size = grid.file_rows * width * np.dtype(dtype).itemsize
    if size > MOST_FILE_BYTES:
        raise StoreError(
            f"{what} has {size:,} bytes in a file; accepted: {MOST_FILE_BYTES:,} or less, with smaller chunk_rows or "
            "shard_rows"
        )
    files = -(-grid.rows // grid.file_rows)
    if grid.rows > MOST_ROWS or files > MOST_FILES:
        raise StoreError(
            f"{what} has {grid.rows:,} rows in {files:,} files; accepted: {MOST_FILES:,} files or fewer, with larger "
            "chunk_rows or shard_rows"
        )


def _check_table(members: dict[str, Any], table: str, problem: Problem, url: str) -> None:
    if members[table]["node_type"] != "group":
        _refuse(url, f"has no group '{table}'")
    columns, first, dtypes = layout.columns(problem, table), None, set()
    for array in layout.TABLES[table]:
        path = f"{table}/{array}"
        if path not in members and array == layout.OPTIONAL[table]:
            continue
        found, names = members[path], [column.name for column in columns[array]]
        grid, dtype = _grid(found), found["data_type"]
        if dtype not in ("float32", "float64") or (array in layout.DTYPES and dtype != layout.DTYPES[array]):
            _refuse(url, f"has an array {path} of the type {dtype!r}")
        if found["shape"][1:] != [len(names)]:
            _refuse(url, f"has an array {path} with another number of columns than the problem")
        check_sizes(f"the array {path} in {url}", grid, len(names), dtype)
        made = layout.array_metadata(
            table,
            array,
            names,
            dtype=dtype,
            compression=grid.compression,
            chunk_rows=grid.chunk_rows,
            shard_rows=grid.shard_rows,
        )
        _compare(found, made | {"shape": found["shape"]}, path, url)
        first = first or grid
        if grid != first:
            _refuse(url, f"has arrays of {table} with different numbers of rows or chunks")
        dtypes |= {dtype} if array not in layout.DTYPES else set()
        _check_labels(members, table, array, problem, url)
    if len(dtypes) > 1:
        _refuse(url, f"has arrays of {table} of different types")


def _grid(metadata: dict[str, Any]) -> Grid:
    rows, chunk = metadata["shape"][0], metadata["chunk_grid"]["configuration"]["chunk_shape"][0]
    codecs, shard = metadata["codecs"], None
    if codecs[0]["name"] == "sharding_indexed":
        inner = codecs[0]["configuration"]
        codecs, shard, chunk = inner["codecs"], chunk, inner["chunk_shape"][0]
    for name, number, least in (("rows", rows, 0), ("rows of a chunk", chunk, 1), ("rows of a shard", shard, 1)):
        if number is not None and (type(number) is not int or number < least):
            raise ValueError(f"{name} is {number!r}")
    if shard is not None and shard % chunk:
        raise ValueError(f"rows of a shard is {shard}, of its chunks {chunk}")
    return Grid(rows, chunk, shard, "zstd" if any(codec["name"] == "zstd" for codec in codecs) else "none")


def _check_labels(members: dict[str, Any], table: str, array: str, problem: Problem, url: str) -> None:
    dimension = layout.COLUMN_DIMENSION[array]
    if dimension not in layout.labelled(problem):
        return
    path = f"{table}/{dimension}"
    made = layout.label_metadata(dimension, problem)
    # The first release wrote names without a checksum.
    made["codecs"] = made["codecs"][: len(members[path]["codecs"])]
    _compare(members[path], made, path, url)


def _compare(found: dict[str, Any], made: dict[str, Any], path: str, url: str) -> None:
    """Attributes are texts for people; everything else is what this package writes."""
    if not isinstance(found["attributes"], dict):
        raise TypeError(f"attributes of {path}")
    parts = ({key: value for key, value in side.items() if key != "attributes"} for side in (found, made))
    ours, theirs = (json.dumps(part, sort_keys=True) for part in parts)  # in which 1, 1.0 and true differ
    if ours != theirs:
        _refuse(url, f"describes the array {path} not as a store does")


def _check_records(vcal: dict[str, Any], url: str) -> None:
    """What is shown, and what was counted."""
    provenance, identity = vcal["provenance"], vcal.get("identity", {"rows": 0, "runs": 0})
    texts = [provenance["created"], provenance["vcal_dist"]]
    texts += [source[key] for source in provenance["sources"] for key in ("table", "file")]
    counts = [identity["rows"], identity["runs"]]
    if not all(isinstance(text, str) for text in texts) or not isinstance(provenance["sources"], list):
        _refuse(url, "has a damaged provenance")
    if not all(type(count) is int and 0 <= count <= MOST_ROWS for count in counts):
        _refuse(url, "has a damaged count of runs")


def _refuse(url: str, why: str) -> NoReturn:
    raise StoreError(f"{url}/{layout.ROOT} {why}; {RESTORE}")
