"""Files of any format into a store: everything is read and judged first, then read again and written.

Both readings run through Dask, partition by partition, so that neither the files nor the store need fit into memory.
Nothing is written before every row has been judged, and nothing written is visible before all rows of a table are.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from storage import layout
from storage.design import Finding, find_design_faults
from storage.errors import IngestError, StoreError
from storage.ingest_report import IngestReport, TableReport, refusal
from storage.precision import Range, choose
from storage.problem import Column, Problem, load_problem
from storage.room import check_room
from storage.sources import Partition, Plan, Request, SourceFile, expand, plan
from storage.store import Store, Writer, check_new, create, exists, open_store
from storage.tally import FileFault, Tally, kept_rows, of_file, tally
from storage.workers import Task, Workers, workers

if TYPE_CHECKING:
    import zarr

_log = logging.getLogger("storage")
BLOCK_BYTES = 32 << 20  # of the rows that one task writes, where a chunk is not larger
SHRINKS = 4  # that zstd may make of measured and computed numbers
# A store's design is examined if it has so many rows at most, or not more than so many times the new ones.
EXAMINED_ROWS, EXAMINED_TIMES = 2_000_000, 10


@dataclass(frozen=True)
class Judged:
    """The files of one table after their first reading."""

    table: str
    plans: list[Plan]
    tallies: list[list[Tally]]  # by file and partition
    columns: tuple[Column, ...]
    optional: bool  # whether rows have the table's optional columns

    @property
    def partitions(self) -> list[tuple[Partition, Tally]]:
        """The partitions that have rows to write, in order."""
        partitions = [partition for p in self.plans for partition in p.partitions]
        tallies = [found for ts in self.tallies for found in ts]
        return [pair for pair in zip(partitions, tallies, strict=True) if pair[1].kept]

    @property
    def kept(self) -> int:
        """Rows without a fault."""
        return sum(t.kept for ts in self.tallies for t in ts)

    @property
    def faults(self) -> list[FileFault]:
        """What is wrong, by file, column and kind."""
        return [f for p, ts in zip(self.plans, self.tallies, strict=True) for f in of_file(str(p.file), ts)]

    @property
    def ranges(self) -> list[tuple[str, float, float]]:
        """Smallest and largest value of every column that is a measure, and not a number of a run."""
        low = np.fmin.reduce([t.low for ts in self.tallies for t in ts])
        high = np.fmax.reduce([t.high for ts in self.tallies for t in ts])
        found = zip(self.columns, low, high, strict=True)
        return [(c.name, float(a), float(b)) for c, a, b in found if not c.whole]

    @property
    def sources(self) -> list[dict[str, Any]]:
        """What the store remembers of its files."""
        return [
            {"file": str(p.file), "rows": sum(t.kept for t in ts), "dropped": sum(t.rows - t.kept for t in ts)}
            for p, ts in zip(self.plans, self.tallies, strict=True)
        ]

    def report(self) -> TableReport:
        """What the user hears of it."""
        ignored = dict.fromkeys(name for p in self.plans for name in p.selection.ignored)
        dropped = sum(t.rows - t.kept for ts in self.tallies for t in ts)
        notes = tuple(f"{p.file}: {p.note}" for p in self.plans if p.note)
        noise = self.optional and self.table == "observations"
        return TableReport(self.kept, len(self.plans), dropped, tuple(self.faults), tuple(ignored), noise, notes)


def ingest(
    problem: str | Path | Problem,
    *,
    runs: Sequence[str | Path] = (),
    observations: Sequence[str | Path] = (),
    store: str | Path,
    drop_invalid: bool = False,
    append: bool = False,
    dtype: Literal["auto", "float32", "float64"] = "auto",
    compression: Literal["zstd", "none"] = "zstd",
    chunk_rows: int | None = None,
    shard_rows: int | None = None,
    scheduler: str | None = None,
    progress: bool = False,
) -> IngestReport:
    """Writes files of runs and observations into a store, or raises IngestError before anything is written.

    Files are paths, fsspec URLs or patterns of them: CSV (also gzip), Parquet, NetCDF, HDF5, npz and Zarr. Columns are
    matched by the problem's names. `drop_invalid` leaves out rows that the problem does not admit, and counts them.
    `append` adds to a store of the same problem. `scheduler` is the address of a Dask scheduler, threads otherwise.
    """
    began = time.perf_counter()
    if not isinstance(problem, Problem):
        problem = load_problem(problem)
    if dtype not in ("auto", "float32", "float64"):
        raise IngestError(f"dtype is {dtype!r}; accepted: auto, float32, float64")
    given = {table: expand(files) for table, files in (("runs", runs), ("observations", observations)) if files}
    if not given:
        raise IngestError("there is nothing to ingest: give files of runs, of observations, or both")
    settings: dict[str, Any] = {"compression": compression, "chunk_rows": chunk_rows, "shard_rows": shard_rows}
    target = _target(store, problem, append=append, dtype=dtype, settings=settings)
    with workers(scheduler, progress=progress) as pool:
        judged = [_judge(pool, Request(table, layout.columns(problem, table)), files) for table, files in given.items()]
        faults = [fault for part in judged for fault in part.faults]
        if faults and not drop_invalid:
            raise IngestError(refusal(faults, problem))
        for part in judged:
            if not part.kept:
                raise IngestError(refusal(part.faults, problem, none_left=part.table))
        chosen, why = _dtype(dtype, [r for part in judged for r in part.ranges], target)
        _check_room(store, judged, chosen, compression if target is None else target.runs.compression)
        if target is None:
            expected = {part.table: part.kept for part in judged}
            target = create(store, problem, dtype=chosen, expected_rows=expected, **settings)
        again = _seen_before(judged, target)
        _write(pool, judged, target)
        seconds = time.perf_counter() - began
        identity, findings = _examine(pool, judged, target)
    tables = {part.table: part.report() for part in judged}
    lacking = tuple(t.name for t in (target.runs, target.observations) if not t.rows and t.name not in tables)
    return IngestReport(str(store), tables, chosen, why, seconds, again, lacking, identity, findings)


def _examine(
    pool: Workers, judged: Sequence[Judged], store: Store
) -> tuple[tuple[int, int] | None, tuple[Finding, ...] | None]:
    """Rows and runs of the store, and what is wrong with its design; None for what is not known.

    A large store is not read as a whole because of a few new rows.
    """
    rows = store.runs.rows + store.observations.rows
    if rows > max(EXAMINED_ROWS, EXAMINED_TIMES * sum(part.kept for part in judged)):
        return None, None
    # The new rows are committed: nothing may look like a failure any more, damage of older rows included.
    try:
        findings = tuple(find_design_faults(store, pool))
        counted = any(part.table == "runs" for part in judged)
        return (store.runs.rows, store.keep_run_count()) if counted else None, findings
    except Exception as error:
        _log.warning("the rows are committed to %s, but they could not be examined: %s", store.url, error)
        return None, None


def _target(
    url: str | Path, problem: Problem, *, append: bool, dtype: str, settings: Mapping[str, Any]
) -> Store | None:
    """The store to continue with, None where there is none; refuses one that must not be touched."""
    if not exists(url):
        if append:
            raise StoreError(f"there is no store at {url} to append to; check the path, or leave out --append")
        check_new(url)
        return None
    store = open_store(url)
    rows = store.runs.rows + store.observations.rows
    if rows and not append:
        raise StoreError(
            f"{url} already holds {store.runs.rows} runs and {store.observations.rows} observations; choose another "
            "path, or add to it with --append (append=True)"
        )
    differing = differences(store.problem.model_dump(), problem.model_dump())
    if differing:
        cure = "ingest into a new store" if rows else "it has no rows: delete it, or choose another path"
        listed = "\n".join(f"  - {line}" for line in differing)
        raise StoreError(f"the store {url} is of another problem; {cure}:\n{listed}")
    runs = store.runs
    found = {"dtype": str(store.dtype), "compression": runs.compression, "chunk_rows": runs.chunk_rows}
    found["shard_rows"] = runs.block_rows if runs.block_rows != runs.chunk_rows else None
    wanted = {"dtype": None if dtype == "auto" else dtype} | ({} if rows else dict(settings))
    for key, value in found.items():
        if wanted.get(key) not in (None, value):
            cure = f"leave out {key}, or choose another path" if rows else "the store has no rows: delete it"
            raise StoreError(f"the store {url} has {key} {value}, not {wanted[key]}; {cure}")
    return store


def _dtype(wanted: str, ranges: Sequence[Range], target: Store | None) -> tuple[str, str]:
    """The type of the numbers, and why; that of an existing store stays."""
    best, why = choose(wanted, ranges)
    if target is None:
        return best, why
    stored = str(target.dtype)
    if (best, stored) == ("float64", "float32") and not target.runs.rows + target.observations.rows:
        raise StoreError(f"the store {target.url} has no rows and dtype {stored}, but {why}; delete it")
    return choose(wanted, ranges, stored)


def _check_room(url: str | Path, judged: Sequence[Judged], dtype: str, compression: str) -> None:
    """Raises where the disk of a local store cannot hold the rows; how far zstd shrinks them is not known before."""
    if "://" in str(url).removeprefix("file://"):
        return
    size = sum(part.kept * len(part.columns) for part in judged) * np.dtype(dtype).itemsize
    check_room(str(url).removeprefix("file://"), size if compression == "none" else size // SHRINKS, "the store")


def differences(stored: Any, given: Any, key: str = "") -> list[str]:
    """Where two problems differ."""
    if isinstance(stored, dict) and isinstance(given, dict):
        keys = dict.fromkeys([*stored, *given])
        return [line for k in keys for line in differences(stored.get(k), given.get(k), f"{key}.{k}".lstrip("."))]
    if isinstance(stored, tuple | list) and isinstance(given, tuple | list) and len(stored) == len(given):
        pairs = enumerate(zip(stored, given, strict=True))
        return [line for i, (a, b) in pairs for line in differences(a, b, f"{key}[{i}]")]
    if stored == given:
        return []
    return [f"{key}: {_short(stored)} in the store, {_short(given)} given"]


def _short(value: Any) -> str:
    if isinstance(value, tuple | list) and value and isinstance(value[0], dict):
        return ", ".join(str(item.get("name")) for item in value)
    return repr(value)


def _judge(pool: Workers, request: Request, files: Sequence[SourceFile]) -> Judged:
    """The first reading: finds the columns, cuts the files, counts rows and faults."""
    plans = _sound(pool.run([Task(partial(_tried_plan, file, request)) for file in files], f"opening {request.table}"))
    optional = _agreed(plans, request.table) if request.optional else False
    columns = request.flat(optional=optional)
    tasks = [Task(partial(tally, partition, columns)) for p in plans for partition in p.partitions]
    results = iter(pool.run(tasks, f"checking {request.table}", rows=lambda found: found.rows))
    tallies = [[next(results) for _ in p.partitions] for p in plans]
    for file_plan, found in zip(plans, tallies, strict=True):
        if not sum(t.rows for t in found):
            raise IngestError(
                f"{file_plan.file}: has columns but no rows; leave it out, or write it again if it should have some"
            )
    return Judged(request.table, plans, tallies, columns, optional)


def _tried_plan(file: SourceFile, request: Request) -> Plan | IngestError:
    try:
        return plan(file, request)
    except IngestError as error:
        return error


def _sound(plans: Sequence[Plan | IngestError]) -> list[Plan]:
    """All plans, or the first error in the order of the files and how many more there are."""
    errors = [p for p in plans if isinstance(p, IngestError)]
    if errors:
        more = f"\n({len(errors) - 1} more of the {len(plans)} files cannot be used either)" if len(errors) > 1 else ""
        raise IngestError(f"{errors[0]}{more}")
    return [p for p in plans if isinstance(p, Plan)]


def _agreed(plans: Sequence[Plan], table: str) -> bool:
    """Whether rows carry the number of their run, or observations their noise: either all files say so, or none."""
    having = [p.file for p in plans if p.selection.optional]
    lacking = [p.file for p in plans if not p.selection.optional]
    if having and lacking:
        what = "a column 'run'" if table == "runs" else "columns for the noise of the observations"
        them = "it" if table == "runs" else "them"
        raise IngestError(f"{having[0]} has {what}, {lacking[0]} has none; give {them} in all files or in none")
    return bool(having)


def _write(pool: Workers, judged: Sequence[Judged], store: Store) -> None:
    """The second reading: writes the sound rows of all tables and commits them together."""
    sources = [{"table": part.table, **source} for part in judged for source in part.sources]
    optional = {layout.OPTIONAL[part.table] for part in judged if part.optional}
    with store.writer({part.table: part.kept for part in judged}, optional=optional, sources=sources) as writers:
        for part in judged:
            pool.run(_writing_tasks(part, writers[part.table], pool.count), f"writing {part.table}", rows=int)


def _writing_tasks(part: Judged, writer: Writer, at_a_time: int) -> list[Task]:
    """A task for every block of rows; it needs the partitions that hold them."""
    dtype = np.result_type(*(array.dtype for array in writer.arrays.values()))  # numbers of runs must stay exact
    # Several blocks for every worker, unless the blocks become smaller than a chunk.
    rows = min(BLOCK_BYTES // (len(part.columns) * dtype.itemsize), part.kept // (2 * at_a_time))
    edges = block_edges(writer.start, part.kept, writer.chunk_rows, rows)
    reads = [Task(partial(kept_rows, p, part.columns, found, dtype)) for p, found in part.partitions]
    starts = np.cumsum([writer.start, *(found.kept for _, found in part.partitions)]).tolist()
    tasks = []
    for start, stop in itertools.pairwise(edges):
        needed = overlaps(starts, start, stop)
        spans = [(low, high) for _, low, high in needed]
        tasks.append(Task(partial(write_block, writer.arrays, start, spans), [reads[i] for i, _, _ in needed]))
    return tasks


def _seen_before(judged: Sequence[Judged], store: Store) -> tuple[str, ...]:
    """The files whose rows the store has already."""
    known = {(source["table"], source["file"]) for source in store.provenance["sources"]}
    return tuple(str(p.file) for part in judged for p in part.plans if (part.table, str(p.file)) in known)


def block_edges(start: int, count: int, chunk_rows: int, rows: int) -> list[int]:
    """Where blocks of about `rows` rows begin and end: no chunk belongs to two of them.

    Two tasks that write parts of one chunk overwrite each other's rows without an error (dask/dask#12583), so every
    inner edge is the end of a chunk, also where the first block begins in the middle of one.
    """
    step = max(1, rows // chunk_rows) * chunk_rows
    edges = [start, *range(start // chunk_rows * chunk_rows + step, start + count, step), start + count]
    assert all(edge % chunk_rows == 0 for edge in edges[1:-1]), (edges, chunk_rows)
    return edges


def overlaps(starts: Sequence[int], start: int, stop: int) -> list[tuple[int, int, int]]:
    """The partitions that hold the rows of a block, and which of their rows; `starts` has one more, the end."""
    first, last = bisect.bisect_right(starts, start) - 1, bisect.bisect_left(starts, stop)
    return [(i, max(start - starts[i], 0), min(stop, starts[i + 1]) - starts[i]) for i in range(first, last)]


def write_block(
    arrays: Mapping[str, zarr.Array[Any]],
    start: int,
    spans: Sequence[tuple[int, int]],
    pieces: Sequence[NDArray[np.floating]],
) -> int:
    """Writes consecutive rows, spans of some pieces, into all arrays of a table; their number."""
    count, column = sum(high - low for low, high in spans), 0
    for array in arrays.values():
        columns = slice(column, column + array.shape[1])
        rows = [piece[low:high, columns] for piece, (low, high) in zip(pieces, spans, strict=True)]
        array[start : start + count] = np.concatenate(rows)
        column = columns.stop
    return count
