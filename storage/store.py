"""A store: create it, open it, append rows so that a crash loses nothing, read it, verify it.

Rows are written first and become durable; then one atomic replacement of the root document makes them visible in
all arrays at once. A writer that dies in between leaves chunks that nobody sees and the next writer overwrites.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from storage import documents, layout, soundness
from storage.checks import find_faults
from storage.chunks import ChunkReader, ZarrArray
from storage.errors import IngestError, StoreError
from storage.labels import by_name
from storage.places import Place, place
from storage.problem import Column, Problem, load_problem, parse_problem
from storage.room import because
from storage.table import Floats, Table, open_array

if TYPE_CHECKING:
    from storage.summary import Summary
    from storage.verify import Damage

_log = logging.getLogger("storage")


@dataclass(frozen=True)
class Writer:
    """Arrays that are `count` rows longer than what is committed; only rows from `start` on may be written."""

    arrays: dict[str, ZarrArray]
    start: int
    count: int
    chunk_rows: int  # of one file: what a single writing task must own

    @property
    def touched(self) -> range:
        """The files that hold the new rows."""
        return range(self.start // self.chunk_rows, -(-(self.start + self.count) // self.chunk_rows))


class Store:
    """Runs and observations of one problem. Tables show the rows that were committed when the store was opened."""

    def __init__(self, where: Place, document: dict[str, Any]) -> None:
        self.place = where
        self.url = where.url
        self._show(document)

    def _show(self, document: dict[str, Any]) -> None:
        self.problem = soundness.check(document, self.url)
        self.document = document
        members, readable = layout.members(document), self.place.zarr_store(read_only=True)
        self.runs, self.observations = (
            Table(table, layout.columns(self.problem, table), readable, members) for table in layout.TABLES
        )
        self.dtype = self.runs.dtype

    def __repr__(self) -> str:
        return f"<store {self.url}: {self.runs.rows} runs, {self.observations.rows} observations>"

    @property
    def provenance(self) -> dict[str, Any]:
        """When and by what the store was made, and from which files."""
        found: dict[str, Any] = self.document["attributes"]["vcal"]["provenance"]
        return found

    @property
    def has_checksum(self) -> bool:
        """Whether the root document carries a checksum; earlier versions wrote none, and the next append adds it."""
        return layout.has_checksum(self.document)

    def refresh(self) -> Store:
        """Shows the rows that have been committed meanwhile, by any writer."""
        self._show(_read_document(self.place)[0])
        return self

    def first(self, runs: int, observations: int) -> Store:
        """The store as it was when it had so many rows, to go on with work that began then; it only reads."""
        found = copy.copy(self)
        found.runs, found.observations = self.runs.first(runs), self.observations.first(observations)
        return found

    def append_runs(self, x: ArrayLike, t: ArrayLike, z: ArrayLike, run: ArrayLike | None = None) -> None:
        """Adds simulator runs: control inputs, calibration inputs and outputs, one row each.

        Rows with the same `run`, a whole number, are one run; without it, rows with the same calibration inputs are.
        """
        self._append("runs", {"x": x, "t": t, "z": z} | ({} if run is None else {"run": run}))

    def append_observations(self, x: ArrayLike, y: ArrayLike, noise: ArrayLike | None = None) -> None:
        """Adds field observations; `noise` is the known standard deviation of each output, if there is one."""
        self._append("observations", {"x": x, "y": y} | ({} if noise is None else {"noise": noise}))

    def _append(self, table: str, given: Mapping[str, ArrayLike]) -> None:
        values = _checked(table, given, self.problem, self.dtype)
        count = len(values["x"])
        if count:
            with self.writer({table: count}, optional=given.keys() & set(layout.OPTIONAL.values())) as writers:
                writer = writers[table]
                for array, rows in values.items():
                    writer.arrays[array][writer.start : writer.start + count] = rows

    @contextlib.contextmanager
    def writer(
        self, counts: Mapping[str, int], *, optional: Collection[str] = (), sources: Sequence[dict[str, Any]] = ()
    ) -> Iterator[dict[str, Writer]]:
        """Room for so many more rows of each table; leaving the block commits all of them, with an exception none.

        `optional` are the optional arrays that the new rows have; `sources` go into the store's provenance.
        """
        with self.place.lock(), _writing(self.place):
            document, found = _read_document(self.place)
            for table in (table for table, count in counts.items() if count):
                self._settle_optional(document, table, layout.OPTIONAL[table] in optional)
            writers = {table: self._grow(document, table, count) for table, count in counts.items()}
            soundness.check(document, self.url)  # what could not be opened again must not be committed
            yield writers
            for table, writer in writers.items():
                self.place.make_durable(layout.chunk_key(table, a, i) for a in writer.arrays for i in writer.touched)
            document["attributes"]["vcal"]["provenance"]["sources"] += sources
            _replace(self.place, document, found)
            # The rows are committed: nothing may look like a failure now.
            try:
                self._show(document)
                # For readers that open an array by itself.
                for path in (f"{table}/{array}" for table, writer in writers.items() for array in writer.arrays):
                    self.place.put(f"{path}/{layout.ROOT}", layout.to_bytes(layout.members(document)[path]))
            except Exception as error:
                _log.warning("the rows are committed to %s, but the work after that failed: %s", self.url, error)

    def _grow(self, document: dict[str, Any], table: str, count: int) -> Writer:
        """A table's arrays with room for more rows, in the document and in memory only."""
        members = layout.members(document)
        arrays = [array for array in layout.TABLES[table] if f"{table}/{array}" in members]
        start = int(members[f"{table}/x"]["shape"][0])
        for array in arrays:
            members[f"{table}/{array}"]["shape"][0] = start + count
        self.place.sweep(["", *(f"{table}/{array}" for array in arrays)])
        writable = self.place.zarr_store(read_only=False)
        grown = {a: open_array(writable, f"{table}/{a}", members[f"{table}/{a}"]) for a in arrays}
        writer = Writer(grown, start, count, int((grown["x"].shards or grown["x"].chunks)[0]))
        if start % writer.chunk_rows:  # the last chunk will be read and written again: better know now that it is sound
            for existing in grown.values():
                ChunkReader(existing).read(start // writer.chunk_rows, start % writer.chunk_rows)
        return writer

    def _settle_optional(self, document: dict[str, Any], table: str, given: bool) -> None:
        """The first rows of a table decide whether it has its optional array."""
        members, array = layout.members(document), layout.OPTIONAL[table]
        path, rows = f"{table}/{array}", members[f"{table}/x"]["shape"][0]
        has = path in members
        if given == has:
            return
        if rows:
            what = "rows of runs" if table == "runs" else table
            if has:
                cure = f"the new ones have none; give {'its run' if array == 'run' else 'a noise'} for each"
            else:
                cure = f"so the new ones must not have one; leave it out, or give the column '{array}' another name"
            raise StoreError(f"the {rows} {what} in {self.url} have {'a' if has else 'no'} {array} column, {cure}")
        if given:
            layout.add_optional(members, table)
        else:
            del members[path]

    @property
    def kept_run_count(self) -> int | None:
        """The count of runs that an ingest has left in the store, None where rows have come or gone since."""
        known = self.document["attributes"]["vcal"].get("identity")
        return int(known["runs"]) if known is not None and known["rows"] == self.runs.rows else None

    def count_runs(self) -> int:
        """How many simulator runs the rows of `runs` belong to, which may be fewer than the rows.

        Reads the calibration inputs of all rows, or the numbers of their runs, unless the count is kept in the store.
        """
        from storage.run_identity import count_runs

        return count_runs(self.runs) if self.kept_run_count is None else self.kept_run_count

    def keep_run_count(self) -> int:
        """Counts the runs that the store shows, and leaves the count in it for readers to come."""
        identity = {"rows": self.runs.rows, "runs": self.count_runs()}
        with self.place.lock():
            document, found = _read_document(self.place)
            document["attributes"]["vcal"]["identity"] = identity
            _replace(self.place, document, found)
        self.document["attributes"]["vcal"]["identity"] = identity
        return identity["runs"]

    def stored_bytes(self, table: str) -> int:
        """Bytes on disk of a table's files."""
        return sum(self.place.sizes(table).values())

    def summary(self, *, most_blocks: int | None = None) -> Summary:
        """Count, missing, range, mean and standard deviation of every column, in one pass."""
        from storage.summary import summarise

        return summarise(self, most_blocks=most_blocks)

    def verify(self) -> list[Damage]:
        """Reads every chunk of every array; the damaged ones, or an empty list."""
        from storage.verify import verify

        return verify(self)


def create(
    url: str | Path,
    problem: Problem | Mapping[str, Any] | str | Path,
    *,
    dtype: str = "float32",
    compression: str = "zstd",
    chunk_rows: int | None = None,
    shard_rows: int | None = None,
    expected_rows: Mapping[str, int] | None = None,
) -> Store:
    """A new, empty store.

    `compression` is "zstd" or "none". `chunk_rows` are rows of a chunk (by default about 1 to 2 MiB over all columns,
    fewer if `expected_rows` are few); with `shard_rows`, a multiple, many chunks share one file, for object stores.
    """
    if isinstance(problem, str | Path):
        problem = load_problem(problem)
    elif not isinstance(problem, Problem):
        problem = parse_problem(dict(problem))
    _check_settings(dtype, compression, chunk_rows, shard_rows)
    where = place(url)
    members: dict[str, dict[str, Any]] = {}
    for table in layout.TABLES:
        members |= _table_members(table, problem, dtype, compression, chunk_rows, shard_rows, expected_rows or {})
    provenance = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "vcal_dist": _version(), "sources": []}
    document = layout.root_document(problem, provenance, members)
    soundness.check(document, where.url)
    _refuse_existing(where)
    where.prepare()
    with where.lock(), _writing(where):
        _refuse_existing(where)
        for path, metadata in members.items():
            where.put(f"{path}/{layout.ROOT}", layout.to_bytes(metadata))
        _write_labels(where, members, problem)
        where.make_durable(f"{path}/{layout.ROOT}" for path in members)
        _replace(where, document, None)
    return Store(where, document)


@contextlib.contextmanager
def _writing(where: Place) -> Iterator[None]:
    """Zarr lets the errors of disk and network through as they are."""
    try:
        yield
    except where.faults as error:
        why = because(error) if isinstance(error, OSError) else f"{error}; run the command again"
        raise StoreError(f"cannot write to {where.url}, nothing was committed: {why}") from error


def _refuse_existing(where: Place) -> None:
    if where.read(layout.ROOT) is not None:
        raise StoreError(
            f"there is already something at {where.url}; append to it, choose another path, or delete it first"
        )
    where.refuse_foreign()


def check_new(url: str | Path) -> None:
    """Raises now what `create` would raise later because of what lies at the path."""
    _refuse_existing(place(url))


def open_store(url: str | Path) -> Store:
    """The store at a path or URL, with the rows that are committed now."""
    where = place(url)
    return Store(where, _read_document(where)[0])


def exists(url: str | Path) -> bool:
    """Whether there is a store (of any schema) at a path or URL."""
    return place(url).read(layout.ROOT) is not None


def _read_document(where: Place) -> tuple[dict[str, Any], str]:
    found = where.read(layout.ROOT)
    if found is None:
        raise StoreError(f"there is no store at {where.url}; make one with 'vcal ingest' or storage.create")
    document = layout.parse_root(found[0], where.url)
    soundness.check(document, where.url)
    return document, found[1]


def _replace(where: Place, document: dict[str, Any], version: str | None) -> None:
    """Commits a document."""
    layout.seal(document)
    data = layout.to_bytes(document)
    if len(data) > documents.MOST_BYTES:
        raise StoreError(
            f"the {layout.ROOT} of {where.url} would have more than {documents.MOST_BYTES >> 20} MiB, of which its "
            f"{len(document['attributes']['vcal']['provenance']['sources'])} sources are most; ingest fewer files"
        )
    where.replace(layout.ROOT, data, version)


def _table_members(
    table: str,
    problem: Problem,
    dtype: str,
    compression: str,
    chunk_rows: int | None,
    shard_rows: int | None,
    expected_rows: Mapping[str, int],
) -> dict[str, dict[str, Any]]:
    """The metadata of a table's group, labels and arrays; an optional array comes with the first rows that have it."""
    columns = {array: c for array, c in layout.columns(problem, table).items() if array != layout.OPTIONAL[table]}
    row_bytes = sum(map(len, columns.values())) * np.dtype(dtype).itemsize
    rows = chunk_rows or layout.default_chunk_rows(row_bytes, expected_rows.get(table))
    if shard_rows is not None and shard_rows % rows:
        raise StoreError(f"shard_rows is {shard_rows}; accepted: a multiple of the chunk's rows, which are {rows}")
    members = {table: layout.group_metadata()}
    for array, names in columns.items():
        label = layout.COLUMN_DIMENSION[array]
        members[f"{table}/{label}"] = layout.label_metadata(label, problem)
        members[f"{table}/{array}"] = layout.array_metadata(
            table,
            array,
            [column.name for column in names],
            dtype=dtype,
            compression=compression,
            chunk_rows=rows,
            shard_rows=shard_rows,
        )
    return members


def _write_labels(where: Place, members: dict[str, dict[str, Any]], problem: Problem) -> None:
    """The names along each labelled dimension."""
    names = {dimension: [v.name for v in variables] for dimension, variables in layout.labelled(problem).items()}
    writable = where.zarr_store(read_only=False)
    for path, metadata in members.items():
        label = path.rpartition("/")[2]
        if label in names:
            open_array(writable, path, metadata)[:] = np.array(names[label], dtype=object)


def _check_settings(dtype: str, compression: str, chunk_rows: int | None, shard_rows: int | None) -> None:
    if dtype not in ("float32", "float64"):
        raise StoreError(f"dtype is {dtype!r}; accepted: float32, float64")
    if compression not in ("zstd", "none"):
        raise StoreError(f"compression is {compression!r}; accepted: zstd, none")
    for name, rows in (("chunk_rows", chunk_rows), ("shard_rows", shard_rows)):
        if rows is not None and rows < 1:
            raise StoreError(f"{name} is {rows}; accepted: 1 or more")


def _checked(table: str, given: Mapping[str, ArrayLike], problem: Problem, dtype: np.dtype[Any]) -> dict[str, Floats]:
    """The rows as matrices of the store's type, or an error that names what does not fit."""
    columns = layout.columns(problem, table)
    if "run" in given and "run" not in columns:
        raise IngestError(
            "the problem has a variable named 'run', so rows are told apart by t; rename it, or give no run"
        )
    values = {array: _matrix(f"{table} {array}", rows, columns[array]) for array, rows in given.items()}
    lengths = {array: len(matrix) for array, matrix in values.items()}
    if len(set(lengths.values())) > 1:
        raise IngestError(f"{table}: the arrays have different numbers of rows: {lengths}")
    together = [column for array in given for column in columns[array]]
    faults, _ = find_faults(np.concatenate(list(values.values()), axis=1), together)
    if faults:
        listed = "\n".join(f"  {fault}" for fault in faults)
        raise IngestError(f"{table}: rows that the problem does not admit (rows counted from 0):\n{listed}")
    with np.errstate(over="ignore"):
        stored = {array: matrix.astype(layout.DTYPES.get(array, dtype)) for array, matrix in values.items()}
    for array, matrix in stored.items():
        if np.isinf(matrix).any():
            raise IngestError(f"{table} {array}: values too large for {dtype}; make the store with dtype='float64'")
    return stored


def _matrix(what: str, rows: ArrayLike, columns: Sequence[Column]) -> Floats:
    """Rows as a matrix with so many columns."""
    try:
        matrix = np.asarray(by_name(what, rows, columns), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise IngestError(f"{what}: not an array of numbers ({error})") from None
    if matrix.ndim == 1 and len(columns) == 1:
        matrix = matrix[:, None]
    if matrix.ndim != 2 or matrix.shape[1] != len(columns):
        names = ", ".join(column.name for column in columns)
        raise IngestError(f"{what}: shape is {matrix.shape}, accepted: (rows, {len(columns)}) for {names}")
    return matrix


def _version() -> str:
    try:
        return version("vcal-dist")
    except PackageNotFoundError:
        return "not installed"
