"""Files are opened for reading here, if they are files.

In a directory that somebody else made, any name may be a pipe, a device, a socket, or a link to one: it would be waited
for, or read without end.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Callable
from pathlib import Path

KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
TYPED = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")  # nobody writes these by accident; `<(command)` is one of them


def open_regular(path: str | Path) -> io.BufferedReader:
    """A file opened for reading; an OSError for whatever else stands there, unless it is the command's own input."""
    if str(path).startswith(TYPED):
        return Path(path).open("rb")
    check_regular(path)  # to open a device may be enough to make it do something
    file = open(path, "rb", opener=_opened)  # noqa: SIM115 - whoever asked for it closes it
    try:
        _refuse(os.fstat(file.fileno()), path)  # something else may have taken its place
    except OSError:
        file.close()
        raise
    return file


def check_regular(path: str | Path) -> None:
    """Raises an OSError for what is no file; for readers that open it by its name themselves."""
    _refuse(os.stat(path), path)  # noqa: PTH116 - of texts too


def _refuse(state: os.stat_result, path: str | Path) -> None:
    if stat.S_ISDIR(state.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(state.st_mode):
        kind = next((name for is_kind, name in KINDS if is_kind(state.st_mode)), "something else")
        raise OSError(errno.EINVAL, f"it is not a regular file but {kind}", str(path))


def _opened(path: str, flags: int) -> int:
    """Without waiting for somebody who writes into a pipe, and without becoming a terminal's process."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
