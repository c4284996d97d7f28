"""`vcal ingest`: simulator files into a store."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from jobs.console import stdout


def ingest(
    problem: Annotated[
        Path, typer.Argument(metavar="PROBLEM", help="Problem file (YAML): names, bounds, priors. Goes before --runs.")
    ],
    store: Annotated[
        str, typer.Option("--output", "-o", metavar="STORE", help="Store to write: a directory or an s3:// URL.")
    ],
    runs: Annotated[
        list[str] | None,
        typer.Option(metavar="FILES…", help="Simulator runs: files, or quoted patterns such as 'out/*.csv'."),
    ] = None,
    observations: Annotated[
        list[str] | None, typer.Option(metavar="FILES…", help="Field observations, given like the runs.")
    ] = None,
    append: Annotated[bool, typer.Option("--append", help="Add rows to a store that exists.")] = False,
    drop_invalid: Annotated[
        bool, typer.Option("--drop-invalid", help="Drop and count rows that are NaN, infinite or out of bounds.")
    ] = False,
    dtype: Annotated[Literal["float32", "float64", "auto"], typer.Option(help="Number type of the store.")] = "auto",
    compression: Annotated[Literal["zstd", "none"], typer.Option(help="Compression of the chunks.")] = "zstd",
    chunk_rows: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rows of a chunk (chosen from the row's size unless given).")
    ] = None,
    shard_rows: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Rows of a shard, an object of many chunks (for object stores)."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Dask scheduler, such as tcp://host:8786 (threads here unless given)."),
    ] = None,
) -> None:
    """Read simulator runs and field observations into a store.

    CSV, Parquet, NetCDF, HDF5, npz and Zarr files are read, many at once and larger than memory. Columns are
    matched by the problem's names, and everything is checked before anything is written.

    Example: vcal ingest problem.yaml --runs out/*.csv --observations field.csv -o data.zarr
    """
    import storage

    report = storage.ingest(
        problem,
        runs=runs or [],
        observations=observations or [],
        store=store,
        drop_invalid=drop_invalid,
        append=append,
        dtype=dtype,
        compression=compression,
        chunk_rows=chunk_rows,
        shard_rows=shard_rows,
        scheduler=scheduler,
        progress=True,
    )
    for line in report.lines():
        stdout().print(line)
