"""The stream's speed and memory, beside a DataLoader over single rows and a bare sequential Zarr read, in one run.

Nine float32 columns, batches of 4096 rows. What is compared runs in turns, and each figure is the best of its turns,
because other work on the machine only ever slows a turn down.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import storage
from jobs.console import note

BATCH = 4096
MEMORY = "256 MB"
CONTROLS, PARAMETERS = 5, 3
GETITEM_SECONDS = 2.0
PIECE = 1_000_000  # rows made at once


class Size(NamedTuple):
    """How much the benchmark works on."""

    rows: int
    csv_rows: int
    turns: int


QUICK = Size(rows=4_000_000, csv_rows=500_000, turns=2)
FULL = Size(rows=20_000_000, csv_rows=10_000_000, turns=3)


def run(*, quick: bool) -> dict[str, Any]:
    """All figures; the stores lie in a temporary directory and are removed afterwards."""
    size = QUICK if quick else FULL
    folder = Path(tempfile.mkdtemp(prefix="vcal-bench-"))
    try:
        stores = {compression: folder / f"{compression}.zarr" for compression in ("zstd", "none")}
        note(f"writing two stores of {size.rows:,} rows")
        for compression, path in stores.items():
            write_store(path, size.rows, compression)
        streamed: dict[str, list[Streamed]] = {compression: [] for compression in stores}
        sequential = []
        for turn in range(size.turns):
            note(f"streaming, turn {turn + 1} of {size.turns}")
            for compression, path in stores.items():
                streamed[compression].append(in_fresh_process(stream_store, str(path)))
            sequential.append(in_fresh_process(read_sequentially, str(stores["zstd"])))
        worst = max((s for turns in streamed.values() for s in turns), key=lambda s: s.peak_mb - s.base_mb)
        figures = {
            "stream_rows_per_s": max(s.rows_per_s for s in streamed["zstd"]),
            "stream_uncompressed_rows_per_s": max(s.rows_per_s for s in streamed["none"]),
            "getitem_rows_per_s": in_fresh_process(read_by_items, str(stores["zstd"])),
            "sequential_rows_per_s": max(sequential),
            "peak_rss_mb": worst.peak_mb,
            "base_rss_mb": worst.base_mb,
        }
        for path in stores.values():
            shutil.rmtree(path)
        note(f"ingesting {size.csv_rows:,} lines of CSV")
        in_fresh_process(write_csv, str(folder / "runs.csv"), size.csv_rows)
        ingested = in_fresh_process(ingest_csv, str(folder / "runs.csv"), size.csv_rows)
    finally:
        shutil.rmtree(folder)
    figures |= {"ingest_csv_rows_per_s": ingested.rows_per_s, "ingest_peak_rss_mb": ingested.peak_mb}
    rate = figures["stream_rows_per_s"]
    return {
        **{name: round(value, 1) for name, value in figures.items()},
        "stream_over_getitem": round(rate / figures["getitem_rows_per_s"], 1),
        "stream_over_sequential": round(rate / figures["sequential_rows_per_s"], 2),
        "rows": size.rows,
        "csv_rows": size.csv_rows,
        "batch": BATCH,
        "memory_budget": MEMORY,
    }


class Streamed(NamedTuple):
    """A rate, and the memory of the process before and at its highest, in MB (10⁶ bytes)."""

    rows_per_s: float
    base_mb: float
    peak_mb: float


def in_fresh_process(function: Any, *arguments: Any) -> Any:
    """A function's result from a process of its own: memory is then only what the function needs."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def problem() -> dict[str, Any]:
    """Nine columns on the unit interval."""
    return {
        "name": "bench",
        "control_inputs": [{"name": f"x{i}", "bounds": [0, 1]} for i in range(CONTROLS)],
        "calibration_inputs": [{"name": f"t{i}", "bounds": [0, 1]} for i in range(PARAMETERS)],
        "outputs": [{"name": "z"}],
    }


def random_rows(rows: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Rows that hardly compress, as a simulator's do."""
    return np.random.default_rng(seed).random((rows, CONTROLS + PARAMETERS + 1), dtype=np.float32)


def write_store(path: Path, rows: int, compression: str) -> None:
    """A store of random runs."""
    store = storage.create(path, problem(), compression=compression, expected_rows={"runs": rows})
    for start in range(0, rows, PIECE):
        values = random_rows(min(PIECE, rows - start), seed=start)
        store.append_runs(values[:, :CONTROLS], values[:, CONTROLS:-1], values[:, -1:])


def stream_store(path: str) -> Streamed:
    """Rows per second of a whole epoch from disk, after one that warms up the file cache."""
    store = storage.open(path)
    base = memory_mb("VmRSS")
    with storage.stream(store, runs=BATCH, memory=MEMORY) as stream:
        sum(1 for _ in stream)
        begun = time.perf_counter()
        rows = sum(len(batch.runs.x) for batch in stream if batch.runs is not None)
        seconds = time.perf_counter() - begun
    return Streamed(rows / seconds, base, memory_mb("VmHWM"))


def read_sequentially(path: str) -> float:
    """Rows per second of Zarr reading all arrays from front to back, many chunks at a time."""
    store = storage.open(path)
    rows, step = store.runs.rows, 16 * store.runs.chunk_rows
    begun = time.perf_counter()
    for start in range(0, rows, step):
        for array in store.runs.arrays.values():
            array[start : start + step]
    return rows / (time.perf_counter() - begun)


def read_by_items(path: str) -> float:
    """Rows per second of a DataLoader that collates single rows, at its best: the rows are in memory."""
    from torch.utils.data import DataLoader, Dataset

    rows = storage.open(path).runs.read(0, PIECE)

    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return len(rows["x"])

        def __getitem__(self, index: int) -> Any:
            return rows["x"][index], rows["t"][index], rows["z"][index]

    seen, begun = 0, time.perf_counter()
    for x, _, _ in DataLoader(Rows(), batch_size=BATCH, shuffle=True):
        seen += len(x)
        if time.perf_counter() - begun > GETITEM_SECONDS:
            break
    return seen / (time.perf_counter() - begun)


def write_csv(path: str, rows: int) -> None:
    """A file as a simulator might have written it."""
    import pyarrow as pa
    from pyarrow import csv

    groups = ("control_inputs", "calibration_inputs", "outputs")
    schema = pa.schema([(column["name"], pa.float32()) for group in groups for column in problem()[group]])
    with csv.CSVWriter(path, schema) as writer:
        for start in range(0, rows, PIECE):
            values = random_rows(min(PIECE, rows - start), seed=start)
            writer.write_table(pa.table(list(values.T), schema=schema))


def ingest_csv(path: str, rows: int) -> Streamed:
    """Rows per second from a CSV file to a store, checks included."""
    base, begun = memory_mb("VmRSS"), time.perf_counter()
    storage.ingest(storage.Problem.model_validate(problem()), runs=[path], observations=[], store=f"{path}.zarr")
    return Streamed(rows / (time.perf_counter() - begun), base, memory_mb("VmHWM"))


def memory_mb(field: str) -> float:
    """This process' memory from /proc: VmRSS now, VmHWM at its highest; or the nearest that the system tells."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
        return int(line.split()[1]) * 1024 / 1e6
    import psutil

    return float(psutil.Process().memory_info().rss) / 1e6
