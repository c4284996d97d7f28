"""Files of runs and observations, in whatever format the simulator wrote, as partitions of columns.

A partition is small, picklable, and read by one task. What cannot be cut is one partition: an npz file and a gzip CSV.
"""

from __future__ import annotations

from collections.abc import Iterator

from storage.errors import IngestError
from storage.regular import check_regular
from storage.room import because
from storage.sources.columns import Request, Selection
from storage.sources.files import SUFFIXES, SourceFile, expand
from storage.sources.partition import Partition, Piece, Plan

__all__ = ["SUFFIXES", "Partition", "Piece", "Plan", "Request", "Selection", "SourceFile", "expand", "pieces", "plan"]


def plan(file: SourceFile, request: Request) -> Plan:
    """Finds the columns that a table needs in a file, and cuts the file into partitions."""
    from storage.sources import arrays, delimited, parquet

    _check_kind(file)
    plans = {"csv": delimited.plan, "parquet": parquet.plan}
    try:
        return plans.get(file.format, arrays.plan)(file, request)
    except IngestError:
        raise
    except Exception as error:
        raise _unreadable(file, error) from error


def pieces(partition: Partition) -> Iterator[Piece]:
    """The rows of a partition; whatever goes wrong names the file."""
    _check_kind(partition.file)
    try:
        yield from partition.pieces()
    except IngestError:
        raise
    except Exception as error:
        raise _unreadable(partition.file, error) from error


def _check_kind(file: SourceFile) -> None:
    """Raises for a pipe or a device: it would be waited for, and cannot be read twice. Of Zarr, a store looks."""
    path = file.url.removeprefix("file://")
    if "://" in path or file.format == "zarr":
        return
    try:
        check_regular(path)
    except OSError as error:
        raise IngestError(f"{file}: cannot be read: {because(error)}") from error


def _unreadable(file: SourceFile, error: Exception) -> IngestError:
    """The readers of the formats promise nothing about what they raise on a damaged file: it may be any exception."""
    said = str(error) if isinstance(error, OSError | ValueError) and str(error) else f"{type(error).__name__}: {error}"
    return IngestError(
        f"{file}: cannot be read as {file.format} ({said}); is it whole, and what its suffix says? Write it again"
    )
