"""Parquet: a partition is one row group, or several small neighbours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.sources.cells import numbers
from storage.sources.columns import Request, select
from storage.sources.files import SourceFile
from storage.sources.partition import Piece, Plan, blank, piece_rows


@dataclass(frozen=True)
class ParquetPartition:
    """Neighbouring row groups of a file."""

    file: SourceFile
    row_groups: tuple[int, ...]
    columns: tuple[str, ...]

    def pieces(self) -> Iterator[Piece]:
        """The rows in order; a large row group never lies in memory as a whole."""
        with _opened(self.file) as parquet:
            batches = parquet.iter_batches(
                piece_rows(len(self.columns)),
                row_groups=list(self.row_groups),
                columns=list(self.columns),
                use_threads=False,
            )
            for batch in batches:
                yield piece(batch, self.columns)


def plan(file: SourceFile, request: Request) -> Plan:
    """Cuts a Parquet file between its row groups."""
    with _opened(file) as parquet:
        selection = select(request, file, parquet.schema_arrow.names)
        columns = tuple(pick.name for pick in selection.picks)
        groups: list[list[int]] = []
        rows = 0
        for i in range(parquet.metadata.num_row_groups):
            size = parquet.metadata.row_group(i).num_rows
            if not groups or rows + size > piece_rows(len(columns)):
                groups.append([])
                rows = 0
            groups[-1].append(i)
            rows += size
    return Plan(file, tuple(ParquetPartition(file, tuple(group), columns) for group in groups), selection)


def piece(batch: pa.RecordBatch | pa.Table, columns: tuple[str, ...]) -> Piece:
    """The named columns of some Arrow rows."""
    values = blank(batch.num_rows, len(columns))
    texts = {}
    for i, name in enumerate(columns):
        column = batch.column(name)
        values[:, i], bad = numbers(column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column]))
        if bad is not None:
            texts[i] = bad
    return Piece(values, texts, np.empty(0, np.intp))


@contextlib.contextmanager
def _opened(file: SourceFile) -> Iterator[Any]:
    with contextlib.ExitStack() as stack:
        # Arrow reads local files itself; it does not know all of fsspec's URLs.
        source = stack.enter_context(file.open()) if file.remote else file.url
        # Read far ahead where requests are slow; elsewhere a row group should not come into memory as a whole.
        yield stack.enter_context(pq.ParquetFile(source, pre_buffer=file.remote, buffer_size=1 << 20))
