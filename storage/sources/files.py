"""The files that a user means: paths, URLs and patterns, told apart by their suffix."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import fsspec

from storage.errors import IngestError
from storage.text import redacted

Format = Literal["csv", "parquet", "netcdf", "hdf5", "npz", "zarr"]

SUFFIXES: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "csv",
    ".csv.gz": "csv",
    ".tsv.gz": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".nc": "netcdf",
    ".nc4": "netcdf",
    ".cdf": "netcdf",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".npz": "npz",
    ".zarr": "zarr",
}


@dataclass(frozen=True)
class SourceFile:
    """A file as the user named it, secrets apart, and where a worker in another directory finds it."""

    name: str
    url: str
    format: Format

    def __str__(self) -> str:
        """The name for messages and provenance; bytes that are not UTF-8 are escaped, since no text can hold them."""
        return self.name.encode(errors="backslashreplace").decode()

    @property
    def remote(self) -> bool:
        """Whether it is read through fsspec's protocols."""
        return "://" in self.url

    def open(self) -> IO[bytes]:
        """The file's bytes; compressed ones are decompressed."""
        compression = "gzip" if self.url.lower().endswith(".gz") else None
        # Without the compression the file can be sought in, which partitions rely on.
        return cast(IO[bytes], fsspec.open(self.url, "rb", compression=compression).open())

    def size(self) -> int:
        """Bytes on disk."""
        files, path = _files(self.url)
        return int(files.size(path))


def expand(given: Sequence[str | Path]) -> list[SourceFile]:
    """The files behind paths, URLs and glob patterns, each once; a pattern's matches are sorted."""
    found: dict[str, SourceFile] = {}
    for item in given:
        for name in _matches(str(item)):
            url = name if "://" in name else str(Path(name).expanduser().resolve())
            found.setdefault(url, SourceFile(redacted(name), url, _format(name)))
    return list(found.values())


def _matches(text: str) -> list[str]:
    files, path = _files(text)
    remote = "://" in text
    if files.exists(path):
        inside = _parts(files, path) if text.rstrip("/").lower().endswith((".parquet", ".pq")) else []
        return [_named(files, p, remote) for p in inside] or [text.rstrip("/")]
    if not glob.has_magic(text):
        raise IngestError(f"{text}: no such file")
    found = sorted(files.glob(path)) if remote else sorted(glob.glob(str(Path(text).expanduser()), recursive=True))
    if not found:
        raise IngestError(f"{text}: no file matches this pattern")
    return [_named(files, p, remote) for p in found]


def _parts(files: Any, path: str) -> list[str]:
    """The files of a Parquet data set that is kept as a directory."""
    return sorted(files.glob(f"{path.rstrip('/')}/*.parquet")) if files.isdir(path) else []


def _named(files: Any, path: str, remote: bool) -> str:
    return str(files.unstrip_protocol(path)) if remote else path


def _files(url: str) -> tuple[Any, str]:
    try:
        files, path = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as error:
        raise IngestError(f"{url}: cannot be reached: {error}") from error
    return files, path


def _format(name: str) -> Format:
    lower = name.rstrip("/").lower()
    for suffix, kind in SUFFIXES.items():
        if lower.endswith(suffix):
            return kind
    raise IngestError(f"{name}: the format is not known by its suffix; accepted: {', '.join(SUFFIXES)}")
