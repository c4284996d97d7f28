"""Whether a classic NetCDF file has all that its header says.

SciPy, which reads these files, maps them into memory and leaves the map behind when a header does not fit its file.
So the header is walked first. It holds lists of dimensions, attributes and variables, each a tag, a count and as many
entries; texts and values are padded to four bytes, and numbers are big-endian.
"""

from __future__ import annotations

import math
from typing import IO

DIMENSION, VARIABLE, ATTRIBUTE = 10, 11, 12
SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 4, 6: 8}  # bytes of a value, by type
STREAMING = 0xFFFFFFFF  # of the number of records: not known when the header was written


def check(stream: IO[bytes], size: int) -> None:
    """Raises ValueError if the header is cut or damaged, or if the file is shorter than its variables."""
    _Walk(stream, size).header()


class _Walk:
    def __init__(self, stream: IO[bytes], size: int) -> None:
        self.stream, self.left, self.size = stream, size, size
        self.wide = 4  # bytes of a position in the file

    def header(self) -> None:
        version = self._bytes(4)[3]
        if version not in (1, 2):
            raise ValueError(f"version {version} of the classic format; accepted: 1 and 2, or NetCDF 4")
        self.wide = 4 * version
        records = self._number()
        dims = [self._named_number() for _ in range(self._count(DIMENSION))]
        self._attributes()
        fixed, of_record = [], []
        for _ in range(self._count(VARIABLE)):
            begin, shape, item = self._variable(dims)
            if shape and shape[0] == 0:
                of_record.append((begin, math.prod(shape[1:]) * item))
            else:
                fixed.append(begin + math.prod(shape) * item)
        # Records follow each other, each padded for every variable unless there is only one.
        step = (
            sum(-(-length // 4) * 4 for _, length in of_record) if len(of_record) > 1 else sum(n for _, n in of_record)
        )
        if records not in (0, STREAMING):
            fixed += [begin + (records - 1) * step + length for begin, length in of_record]
        if max(fixed, default=0) > self.size:
            raise ValueError(f"the file is cut: its header says {max(fixed):,} bytes, it has {self.size:,}")

    def _variable(self, dims: list[int]) -> tuple[int, list[int], int]:
        """Where a variable begins, its shape, and the bytes of a value."""
        self._text()
        places = [self._number() for _ in range(self._fitting(self._number(), 4))]
        self._attributes()
        kind, _ = self._number(), self._number()
        begin = int.from_bytes(self._bytes(self.wide), "big")
        if kind not in SIZES or any(place >= len(dims) for place in places):
            raise ValueError("a variable in its header is damaged")
        return begin, [dims[place] for place in places], SIZES[kind]

    def _attributes(self) -> None:
        for _ in range(self._count(ATTRIBUTE)):
            self._text()
            kind, count = self._number(), self._number()
            if kind not in SIZES:
                raise ValueError("an attribute in its header is damaged")
            self._padded(count * SIZES[kind])

    def _named_number(self) -> int:
        self._text()
        return self._number()

    def _count(self, tag: int) -> int:
        found, count = self._number(), self._number()
        if found != tag and (found, count) != (0, 0):
            raise ValueError("a list in its header is damaged")
        return self._fitting(count, 4)

    def _fitting(self, count: int, least: int) -> int:
        if count * least > self.left:
            raise ValueError("its header is cut or damaged")
        return count

    def _text(self) -> None:
        self._padded(self._number())

    def _padded(self, count: int) -> None:
        self._bytes(-(-count // 4) * 4)

    def _number(self) -> int:
        return int.from_bytes(self._bytes(4), "big")

    def _bytes(self, count: int) -> bytes:
        self.left -= self._fitting(count, 1)
        return self.stream.read(count)
