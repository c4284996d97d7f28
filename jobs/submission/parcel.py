"""The files that travel with a job: the frozen configuration, what the user names, and nothing else.

They go as an archive of our own making: of a folder, Ray would leave out what a `.gitignore` in it names.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from jobs.console import size
from storage.layout import ROOT
from vcal_dist.errors import ConfigError
from vcal_dist.run_directory import ROWS

CONFIG = "config.yaml"
LARGEST = 100_000_000  # bytes in all; Ray keeps the archive in the head's memory
CURE = "data belong on storage that the cluster reaches, such as a shared file system or s3://"
TURNED_AWAY = {".git": "a Git repository", ".venv": "a virtual environment"}  # by name
# By what lies in a folder: Zarr of either version, runs, and environments of any name.
SIGNS = {ROOT: "a Zarr store", ".zgroup": "a Zarr store", ".zarray": "a Zarr store", ROWS: "a run"}
SIGNS |= {"pyvenv.cfg": "a virtual environment"}
SKIPPED = "__pycache__"
EPOCH = (1980, 1, 1, 0, 0, 0)  # the same files are the same archive, which a cluster that has it need not get again

Files = dict[str, bytes | Path]  # by their names in the job's folder


def parcel(text: str, paths: Iterable[Path] = ()) -> Files:
    """The configuration's text, and files and folders under their own names."""
    files: Files = {CONFIG: text.encode()}
    for path in paths:
        for name, file in _found(path.expanduser().absolute(), path):
            if name in files:
                raise ConfigError(f"--with {path}: the job has a file {name} already; give it another name")
            files[name] = file
    total = sum(sizes(files).values())
    if total > LARGEST:
        raise ConfigError(
            f"the files to send have {size(total)}, and {size(LARGEST)} is the most; leave out a --with: {CURE}"
        )
    return files


def sizes(files: Files) -> dict[str, int]:
    """Bytes of each file."""
    return {name: len(file) if isinstance(file, bytes) else file.stat().st_size for name, file in files.items()}


def write(files: Files, path: Path) -> None:
    """The archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in files.items():
            executable = isinstance(file, Path) and os.access(file, os.X_OK)
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if executable else 0o100644) << 16
            archive.writestr(entry, file if isinstance(file, bytes) else file.read_bytes())


def _found(path: Path, given: Path) -> Iterator[tuple[str, Path]]:
    """A file, or all files below a folder, with their names in the job's folder."""
    if not path.exists():
        raise ConfigError(f"--with {given}: there is no such file or folder")
    top = Path(os.path.normpath(path)).parent
    found = _below(path, given) if path.is_dir() else [path]
    for file in found:
        if not file.is_file():
            raise ConfigError(f"--with {given}: {file} is no plain file; leave it out")
        name = Path(os.path.normpath(file)).relative_to(top).as_posix()
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"--with {given}: the name {name!a} is not UTF-8; give it another") from None
        yield name, file


def _below(folder: Path, given: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        here = Path(place)
        found = TURNED_AWAY.get(here.resolve().name) or next((SIGNS[name] for name in names if name in SIGNS), None)
        if found is not None:
            raise ConfigError(f"--with {given}: {here} is {found}, which stays here: {CURE}")
        linked = next((name for name in folders if (here / name).is_symlink()), None)
        if linked is not None:
            raise ConfigError(f"--with {given}: {here / linked} is a link to a folder; name the folder itself")
        folders[:] = sorted(name for name in folders if name != SKIPPED)
        yield from (here / name for name in sorted(names))
