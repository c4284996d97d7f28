"""Where a run lies: a directory, or a URL such as s3://bucket/runs/name, with a copy of it to work in.

Training writes into a directory. For a URL that is a temporary one: what is at the URL comes at the start, and files
that have changed go there after every checkpoint, each in one step, the posterior last.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from storage.errors import VcalError
from storage.room import check_room
from vcal_dist.errors import ConfigError
from vcal_dist.posterior import FILE

SCRATCH = ".ray"  # what a cluster keeps beside a run while it trains
LEFT = ("tensorboard", SCRATCH)  # not needed to go on
STAYS = ("run.lock",)
_log = logging.getLogger("vcal_dist")


class RunPlace:
    """A run's directory `path`, and the same on the file system `files` (of fsspec) below `root`."""

    def __init__(self, url: str, path: Path, files: Any, root: str, *, remote: bool) -> None:
        self.url, self.path, self.files, self.root, self.remote = url, path, files, root.rstrip("/"), remote
        self._sent: dict[str, tuple[int, int]] = {}

    def has(self, name: str) -> bool:
        """Whether a file of the run is there."""
        return bool(self.files.exists(f"{self.root}/{name}"))

    def fetch(self) -> None:
        """Brings what is there to go on from."""
        if not self.remote:
            return
        try:
            objects = self.files.find(self.root, detail=True)
            check_room(
                self.path, sum(int(info.get("size") or 0) for info in objects.values()), f"the run at {self.url}"
            )
            for found in objects:
                name = str(found)[len(self.root) :].lstrip("/")
                if name.partition("/")[0] not in LEFT:
                    target = inside(self.path, name, self.url)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self.files.get_file(found, str(target))
                    self._sent[name] = _stamp(target)
        except FileNotFoundError:
            return
        except VcalError:
            raise
        except Exception as error:  # every file system has its own
            raise ConfigError(
                f"cannot read the run at {self.url}: {error}; check the address and the credentials"
            ) from error

    def send(self, *, must: bool = True) -> None:
        """Sends what has changed; unless it must, a failure is only told, and the next time sends it too."""
        if not self.remote:
            return
        names = [
            str(file.relative_to(self.path))
            for file in self.path.rglob("*")
            if file.is_file() and not file.is_symlink()
        ]
        # Where the posterior is, the run is done; where a checkpoint is, so is what was recorded before it.
        for name in sorted(names, key=lambda name: (name == FILE, name.startswith("checkpoints/"), name)):
            file = self.path / name
            stamp = _stamp(file)
            if file.name in STAYS or file.suffix == ".partial" or self._sent.get(name) == stamp:
                continue
            try:
                self.files.put_file(str(file), f"{self.root}/{name}")
            except Exception as error:
                if must:
                    raise ConfigError(
                        f"cannot write {self.url}/{name}: {error}; check the address and the credentials"
                    ) from error
                _log.warning("cannot write %s/%s: %s; the next checkpoint tries again", self.url, name, error)
                return
            self._sent[name] = stamp


def inside(folder: Path, name: str, source: str) -> Path:
    """The file of that name below the folder; a name that leads elsewhere is refused."""
    parts = name.split("/")
    odd = "\\" in name or "\0" in name or any("\ud800" <= character <= "\udfff" for character in name)
    if odd or "" in parts or "." in parts or ".." in parts or Path(name).is_absolute():
        raise ConfigError(
            f"{source} holds an object named {name!r}, which would be written outside of the run's directory; "
            "somebody made it on purpose: do not use this run, or delete that object"
        )
    return folder / name


def _stamp(file: Path) -> tuple[int, int]:
    state = file.stat()
    return state.st_size, state.st_mtime_ns


@contextlib.contextmanager
def run_place(output: str | Path | None) -> Iterator[RunPlace]:
    """The place of a run while it is worked in."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    text = str(output or "runs/calibration").removeprefix("file://")
    if "://" not in text:
        yield RunPlace(text, Path(text), LocalFileSystem(), str(Path(text).absolute()), remote=False)
        return
    try:
        # Another process may have written since this one looked.
        files, root = url_to_fs(text, use_listings_cache=False, skip_instance_cache=True)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"output is {text}: {error}; use a local path or an s3:// URL") from error
    with tempfile.TemporaryDirectory(prefix="vcal-run-") as temporary:
        yield RunPlace(text, inside(Path(temporary), Path(root).name, text), files, root, remote=True)
