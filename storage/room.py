"""Whether a path can be written, before the work that would end there; and what to do where a disk says no."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import tempfile
from pathlib import Path

from storage.errors import StoreError

GIB = 2**30
_OTHER = "or choose another path"
CURES = {
    errno.ENOSPC: f"free some room there, {_OTHER}",
    errno.EDQUOT: f"free some of your quota, {_OTHER}",
    errno.EFBIG: f"raise the limit of file sizes (ulimit -f), {_OTHER}",
    errno.EACCES: f"change its permissions, {_OTHER}",
    errno.EPERM: f"change its permissions, {_OTHER}",
    errno.EROFS: "it is mounted read-only: choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOTDIR: "a file stands where a directory is needed: choose another path",
    errno.EEXIST: "something stands there already: choose another path",
    errno.EISDIR: "it is a directory: give a file",
    errno.ENOENT: "check the path",
    errno.ELOOP: "its symbolic links go round in a circle: check the path",
    errno.EIO: "the disk or its network fails: see the system's log, then run the command again",
    errno.ESTALE: "the network file system has lost it: run the command again",
    errno.EMFILE: "raise the number of open files (ulimit -n)",
    errno.ENFILE: "end other programs: the machine has too many open files",
    errno.ENOMEM: "the machine has too little memory: end other programs",
}


def because(error: OSError) -> str:
    """The cause and the cure.

    >>> because(OSError(28, "No space left on device"))
    'No space left on device; free some room there, or choose another path'
    """
    number, cause = error.errno, error.strerror
    if number is None and (told := re.search(r"errno (?:= )?(\d+)", str(error))):  # of HDF5 and Arrow
        number = int(told[1])
        cause = os.strerror(number)
    cure = CURES.get(number or 0, "check the path, and run the command again")
    return f"{cause or ' '.join(str(error).split()) or type(error).__name__}; {cure}"


def explained(error: OSError) -> str:
    """One line for an error that nobody has put into words: path, cause and cure."""
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]
    return f"{' and '.join(names) or 'a file'} cannot be used: {because(error)}"


def check_output(path: str | Path) -> None:
    """Raises if nothing can be written at a path: a file is made, and removed, in the folder that it will lie in."""
    given, path = path, Path(path).expanduser().absolute()
    if "\0" in str(path):
        raise StoreError(f"cannot write {str(given)!r}: a path has no NUL character; choose another path")
    folder = path.parent
    try:
        path.is_symlink()  # the name itself may be too long, or its folder closed
        path.lstat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StoreError(f"cannot write {given}: {because(error)}") from error
    try:
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise StoreError(f"cannot write {given}: {because(error)}") from error


def check_room(path: str | Path, need: int, what: str) -> None:
    """Raises if the disk of a path has fewer bytes left than something will take."""
    folder = Path(path).expanduser().absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if need > free:
        raise StoreError(
            f"{what} needs {_size(need)}, and {folder} has {_size(free)} left; free some room there, {_OTHER}"
        )


def check_file_size(path: str | Path, need: int, what: str) -> None:
    """Likewise for a single file, which a limit may hold down too."""
    check_room(path, need, what)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and need > limit:
        raise StoreError(f"{what} needs {_size(need)}; files may have {_size(limit)} here: raise it with ulimit -f")


def _size(count: int) -> str:
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 100 else f"{count / 1024:,.0f} KiB"
