"""CSV and its relatives: separated by commas, semicolons or tabs, with a header line.

A file is cut into byte ranges, and every line belongs to the range in which the line before it ends; nobody has to
look for line ends beforehand. A gzip file cannot be entered in its middle: it is one partition, read piece by piece.
Text in quotes may hold separators but no line breaks.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv as arrow_csv

from storage.errors import IngestError
from storage.sources.cells import EMPTY
from storage.sources.columns import Request, select
from storage.sources.files import SourceFile
from storage.sources.parquet import piece
from storage.sources.partition import Piece, Plan, blank

PART_BYTES = 16 << 20  # of a partition's text
HEAD_BYTES = 1 << 20  # comments and header must lie within
LINE_BYTES = 8 << 20  # of a line at most
TAIL_BYTES = 1 << 16  # read at a time beyond a range, in search of the line's end
SEPARATORS = (",", ";", "\t")
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Header:
    """The names of the columns, how they are separated, and where the first row begins."""

    names: tuple[str, ...]
    separator: str
    newline: bytes
    end: int


@dataclass(frozen=True)
class DelimitedPartition:
    """The lines of a byte range; without a stop, all lines to the end in pieces."""

    file: SourceFile
    header: Header
    columns: tuple[int, ...]  # positions in a line
    start: int
    stop: int | None

    def pieces(self) -> Iterator[Piece]:
        """The rows in order."""
        for text in self._texts():
            if text.strip(b"\r\n"):
                yield parse(text, self.header, self.columns, self.file)

    def _texts(self) -> Iterator[bytes]:
        newline = self.header.newline
        with self.file.open() as stream:
            stream.seek(self.start)
            if self.stop is not None:
                yield _lines(self.file, stream, self.start, self.stop, newline, first=self.start == self.header.end)
                return
            rest = b""
            while block := stream.read(PART_BYTES):
                block = rest + block
                cut = block.rfind(newline) + 1
                rest = block[cut:]
                _refuse_long(len(rest), self.file)
                yield block[:cut]
            yield rest


def _refuse_long(length: int, file: SourceFile) -> None:
    if length > LINE_BYTES:  # a compressed file of some megabytes may hold a line that fits into no memory
        raise IngestError(
            f"{file}: has a line of more than {LINE_BYTES >> 20} MiB; is it text, with a row in each line?"
        )


def _lines(file: SourceFile, stream: IO[bytes], start: int, stop: int, newline: bytes, *, first: bool) -> bytes:
    """The lines of a range: from behind its first line end to behind the first line end after it."""
    text = stream.read(stop - start)
    if not first:
        cut = text.find(newline) + 1
        if not cut:
            return b""  # one line reaches over the whole range: it belongs to an earlier one
        text = text[cut:]
    tail = []
    while more := stream.read(TAIL_BYTES):
        cut = more.find(newline) + 1
        tail.append(more[: cut or None])
        if cut:
            break
        _refuse_long(TAIL_BYTES * len(tail), file)
    return b"".join([text, *tail]) if tail else text


def plan(file: SourceFile, request: Request) -> Plan:
    """Cuts a delimited file into byte ranges."""
    with file.open() as stream:
        head = stream.read(HEAD_BYTES)
    header = find_header(head, {c.name for c in request.flat()}, file)
    selection = select(request, file, header.names)
    columns = tuple(header.names.index(pick.name) for pick in selection.picks)
    note = ""
    if file.url.lower().endswith(".gz"):
        partitions = [DelimitedPartition(file, header, columns, header.end, None)]
    else:
        size = file.size()
        partitions = [
            DelimitedPartition(file, header, columns, start, min(start + PART_BYTES, size))
            for start in range(header.end, size, PART_BYTES)
        ]
        with file.open() as stream:
            stream.seek(size - 1)
            if stream.read() != header.newline:
                note = "its last line has no end; if its writer was interrupted, the last row may be cut"
    return Plan(file, tuple(partitions), selection, note)


def find_header(head: bytes, wanted: set[str], file: SourceFile) -> Header:
    """Finds the header: the first line that is neither blank nor a comment, or the comment above a line of numbers."""
    if not head.strip():
        raise IngestError(f"{file}: is empty; leave it out, or write it again if the simulator should have filled it")
    newline = b"\n" if b"\n" in head else b"\r"
    end = len(BOM) if head.startswith(BOM) else 0
    comment: Header | None = None
    while end < len(head):
        start, cut = end, head.find(newline, end)
        if cut < 0 and len(head) == HEAD_BYTES:
            break  # the line goes on beyond what has been read
        end = cut + 1 if cut >= 0 else len(head)
        try:
            line = head[start:end].decode().strip("\r\n")
        except UnicodeDecodeError:
            raise IngestError(f"{file}: the header is not text in UTF-8; save the file as CSV in UTF-8") from None
        if line.strip() and not line.lstrip().startswith("#"):
            header = _split(line, wanted, newline, end, file)
            if not all(_is_number(name) for name in header.names) or wanted & set(header.names):
                return header
            if comment and len(comment.names) == len(header.names):  # as numpy.savetxt writes it
                return Header(comment.names, header.separator, newline, start)
            raise IngestError(
                f"{file}: has no header, its first line is {line[:60]!r}; write the columns' names into the first line"
            )
        if line.strip():
            comment = _split(line.lstrip().lstrip("#"), wanted, newline, end, file)
    raise IngestError(f"{file}: has no header within {HEAD_BYTES >> 10} KiB; write the columns' names into a line")


def _split(line: str, wanted: set[str], newline: bytes, end: int, file: SourceFile) -> Header:
    """A header by the separator that finds most of the wanted names, then most names at all."""
    candidates = []
    for separator in SEPARATORS:
        try:
            row = next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])
        except csv.Error as error:
            raise IngestError(
                f"{file}: the header {line[:60]!r} cannot be read as CSV ({error}); write it again"
            ) from None
        names = tuple(name.strip() for name in row)
        candidates.append((len(wanted & set(names)), len(names), -SEPARATORS.index(separator), separator, names))
    _, _, _, separator, names = max(candidates)
    return Header(names, separator, newline, end)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.strip() == ""
    return True


def parse(text: bytes, header: Header, columns: tuple[int, ...], file: SourceFile) -> Piece:
    """Rows of text as numbers; only if a cell is not one, all cells are read as text and looked at."""
    broken: list[tuple[int, str]] = []
    text = _as_utf8(text)
    try:
        table = _read(text, header, columns, pa.float64(), broken)
    except pa.ArrowInvalid as error:
        if "conversion error" not in str(error):
            raise
        broken.clear()
        table = _read(text, header, columns, pa.binary(), broken)
    blanks = [number for number, line in broken if not line.strip()]
    if b'"' in text:
        lines = sum(1 for line in text.split(header.newline) if line.strip(b"\r"))
        if lines != table.num_rows + len(broken):
            raise IngestError(f"{file}: text in quotes runs over the end of its line; remove its line breaks or quotes")
    rows = piece(table, tuple(str(i) for i in columns))
    if len(blanks) == len(broken):
        return rows
    # Arrow numbers the lines that are not empty from 1; lines of blanks are no rows either.
    skipped = np.array([number - 1 - np.searchsorted(blanks, number) for number, line in broken if line.strip()])
    return _with_broken(rows, skipped.astype(np.intp), next(line for _, line in broken if line.strip()))


def _as_utf8(text: bytes) -> bytes:
    """Arrow gives up the row of a wrong length that is not UTF-8: what is not becomes a sign that is no number."""
    if text.isascii():
        return text
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode(errors="replace").encode()
    return text


def _read(text: bytes, header: Header, columns: tuple[int, ...], kind: Any, broken: list[tuple[int, str]]) -> pa.Table:
    def note(row: Any) -> str:
        broken.append((row.number, row.text))
        return "skip"

    # Positions stand for names, which may be empty or repeated where nobody asked for them.
    names = [str(i) for i in range(len(header.names))]
    wanted = [str(i) for i in columns]
    return arrow_csv.read_csv(
        pa.BufferReader(text),
        # Dask runs partitions in parallel; one block, so that Arrow numbers rows within the partition.
        arrow_csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names),
        arrow_csv.ParseOptions(delimiter=header.separator, invalid_row_handler=note),
        arrow_csv.ConvertOptions(
            include_columns=wanted,
            column_types=dict.fromkeys(wanted, kind),
            null_values=[] if kind == pa.binary() else [*EMPTY, *map(str.upper, EMPTY)],
            strings_can_be_null=False,
            check_utf8=False,
        ),
    )


def _with_broken(rows: Piece, broken: NDArray[np.intp], text: str) -> Piece:
    """Puts broken rows where they stand in the file, so that all rows keep their numbers."""
    total = len(rows.values) + len(broken)
    sound = np.setdiff1d(np.arange(total), broken)
    values = blank(total, rows.values.shape[1])
    values[broken] = np.nan
    values[sound] = rows.values
    return Piece(values, {i: (sound[bad], first) for i, (bad, first) in rows.texts.items()}, broken, text)
