"""Symbolic links in folders that we write into: one that leads out would let us change what is somebody else's."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

from storage.errors import StoreError


def refuse_links(folder: Path, *, depth: int | None = None, but: Container[str] = ()) -> None:
    """Raises if a link below a folder leads out of it. The folder itself may be behind one: the user has named it.

    `depth` says how many levels are looked at, `but` which folders at the top are not.
    """
    top = folder.resolve()
    _look(folder, top, depth, but)


def _look(folder: Path, top: Path, depth: int | None, but: Container[str]) -> None:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.is_symlink():
            target = _target(path)
            if target is None or not target.is_relative_to(top):
                raise StoreError(
                    f"{path} is a symbolic link to {path.readlink()}, outside of {top}: what is written there would "
                    "change something else; replace it by a file or folder of its own, or choose another path"
                )
        elif entry.is_dir() and entry.name not in but and depth != 1:
            _look(path, top, None if depth is None else depth - 1, ())


def _target(link: Path) -> Path | None:
    try:
        return link.resolve()
    except (OSError, RuntimeError):  # in a circle
        return None
