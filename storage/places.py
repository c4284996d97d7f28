"""Where a store lies: a local directory, or an s3:// URL. Everything that must be atomic happens here.

A place knows four things: read a small file, replace it atomically, make written chunks durable, and keep out a
second writer. Chunks themselves are read and written by Zarr.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from storage.documents import MOST_BYTES
from storage.errors import CommitUnknown, StoreError
from storage.links import refuse_links
from storage.regular import open_regular
from storage.room import because, check_output

if TYPE_CHECKING:
    from zarr.abc.store import Store as ZarrStore

LOCK_NAME = ".writer.lock"
LOCK_WAIT = 60.0  # seconds that an append waits for another writer before it gives up
LOCK_NOTICE = 2.0  # seconds until it says so
OWN_NAMES = {LOCK_NAME, "runs", "observations"}
_log = logging.getLogger("storage")


class Place(Protocol):
    """What a store needs from the medium it lies on."""

    url: str

    @property
    def faults(self) -> tuple[type[Exception], ...]:
        """What reading and writing here through Zarr may raise."""

    def read(self, key: str) -> tuple[bytes, str] | None:
        """A small file and its version, or None where there is none; of a larger one the beginning."""

    def replace(self, key: str, data: bytes, version: str | None) -> None:
        """Replaces a file durably in one atomic step; refuses if it is no longer `version` (None: it must be new).

        An error means that the old file is still there; only CommitUnknown says that nobody can tell.
        """

    def refuse_foreign(self) -> None:
        """Raises if a new store here would mix with what does not belong to one."""

    def put(self, key: str, data: bytes) -> None:
        """Writes a small file, whatever stood there; whole or not at all."""

    def make_durable(self, keys: Iterable[str]) -> None:
        """Returns when these chunks would survive a power failure; refuses, where it can tell, missing ones."""

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Excludes other writers; a dead writer's lock falls by itself."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every file below a prefix."""

    def sweep(self, prefixes: Iterable[str]) -> None:
        """Removes what writers that died have left half-written. Only under the lock."""

    def prepare(self) -> None:
        """Makes room for a new store."""

    def zarr_store(self, *, read_only: bool) -> ZarrStore:
        """The same place as Zarr sees it; every value it writes is whole and durable before it replaces another."""


def place(url: str | Path) -> Place:
    """The place behind a path or URL."""
    text = str(url)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return LocalPlace(Path(text))
    if scheme == "file":
        return LocalPlace(Path(text.removeprefix("file://")))
    if scheme == "s3":
        return S3Place(text)
    raise StoreError(
        f"cannot keep a store at '{text}': '{scheme}://' is not supported; use a local path or an s3:// URL"
    )


class LocalPlace:
    """A directory. The kernel drops a dead writer's lock; files are replaced by rename after fsync."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.url = str(path)

    @property
    def faults(self) -> tuple[type[Exception], ...]:
        return (OSError,)

    def read(self, key: str) -> tuple[bytes, str] | None:
        try:
            with open_regular(self.path / key) as file:
                data = file.read(MOST_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StoreError(f"cannot read {self.path / key}: {because(error)}") from error
        return data, ""  # the lock suffices here: it cannot expire under a living writer

    def refuse_foreign(self) -> None:
        check_output(self.path / "zarr.json" if self.path.is_dir() else self.path)
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise StoreError(f"{self.url} is a file; a store is a directory: choose another path")
        # What an interrupted creation leaves behind may be used again.
        foreign = [f.name for f in self.path.iterdir() if f.name not in OWN_NAMES and f.suffix != ".partial"]
        if foreign:
            raise StoreError(f"the directory {self.url} holds other things ('{foreign[0]}', …); choose another path")

    def prepare(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"cannot make {self.url}: {because(error)}") from error

    def replace(self, key: str, data: bytes, version: str | None) -> None:
        target = self.path / key
        if version is None and target.exists():
            raise StoreError(f"{target} exists already")
        self.put(key, data)
        # Everybody sees the new file: what fails from here on must not look as if it were not there.
        try:
            _fsync(target.parent)
        except OSError as error:
            _log.warning(
                "%s is committed, but a power failure could still undo that: %s", target, error.strerror or error
            )

    def put(self, key: str, data: bytes) -> None:
        try:
            write_durably(self.path / key, data)
        except OSError as error:
            raise StoreError(f"cannot write {self.path / key}: {because(error)}") from error

    def make_durable(self, keys: Iterable[str]) -> None:
        # What a file holds is durable already; the file lasts if every folder above it knows the next one.
        folders = {self.path, self.path.parent}
        with _told(f"cannot make the new rows of {self.url} durable, nothing was committed"):
            for key in keys:
                if not (self.path / key).exists():
                    raise StoreError(f"{self.path / key} was never written; nothing was committed")
                folders.update(folder for folder in (self.path / key).parents if folder.is_relative_to(self.path))
            for folder in folders:
                _fsync(folder)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        import filelock

        refuse_links(self.path, depth=2)  # chunks themselves are replaced, whatever stands in their place
        lock = filelock.FileLock(self.path / LOCK_NAME)
        try:
            try:
                lock.acquire(timeout=min(LOCK_NOTICE, LOCK_WAIT))
            except filelock.Timeout:
                _log.warning("waiting for another process that writes to %s", self.url)
                lock.acquire(timeout=LOCK_WAIT)
        except filelock.Timeout:
            raise StoreError(
                f"another process is still writing to {self.url} after {LOCK_WAIT:g} s; wait for it or stop it"
            ) from None
        except NotImplementedError as error:
            raise StoreError(f"the file system of {self.url} has no file locks; mount it with them: {error}") from error
        except OSError as error:
            raise StoreError(f"cannot write to {self.url}: {because(error)}") from error
        try:
            yield
        finally:
            try:
                lock.release()
            except OSError as error:  # what was done under the lock is done
                _log.warning("what was committed stays, but %s stays locked: %s", self.url, error.strerror or error)

    def sizes(self, prefix: str) -> dict[str, int]:
        root = self.path / prefix
        with _told(f"cannot read {root}"):
            return {str(f.relative_to(self.path)): f.stat().st_size for f in root.rglob("*") if f.is_file()}

    def sweep(self, prefixes: Iterable[str]) -> None:
        with _told(f"cannot remove what an interrupted writer left in {self.url}"):
            for prefix in prefixes:
                with contextlib.suppress(FileNotFoundError), os.scandir(self.path / prefix) as entries:
                    for entry in entries:
                        if entry.name.endswith(".partial"):
                            Path(entry.path).unlink(missing_ok=True)

    def zarr_store(self, *, read_only: bool) -> ZarrStore:
        from storage.durable import DurableStore

        return DurableStore(self.path, read_only=read_only)


def write_durably(target: Path, data: Any) -> None:
    """Replaces a file in one step by one that is on disk: after a power failure it is the old one or the new one."""
    partial = target.with_name(f"{target.name}.{uuid.uuid4().hex}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if error.filename is None:  # of a write, which knows its descriptor only
            error.filename = str(target)
        raise


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Says in one line what the file system refused."""
    try:
        yield
    except OSError as error:
        raise StoreError(f"{what}: {because(error)}") from error


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _aws_error() -> type[Exception]:
    """Of requests that got no answer, or could not be made; botocore is not loaded for local stores."""
    from botocore.exceptions import BotoCoreError

    error: type[Exception] = BotoCoreError
    return error


def _lease(data: bytes) -> tuple[str, float]:
    """Who holds a lock, and until when; of one that is damaged, nobody."""
    try:
        found = json.loads(data)
        return str(found["owner"]), float(found["until"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "", 0.0


class S3Place:
    """A prefix of an S3 bucket. Puts are atomic and durable; conditional puts guard the commit and the lock.

    The lock is a lease: its holder renews it while it lives, so that a dead writer's lock runs out after
    `LEASE` seconds. A writer that could not renew it (no network for that long, a clock that is off by as much) may
    be taken for dead; it then cannot commit, but a chunk it still writes may damage the rows of its successor:
    object stores have no way to refuse it. Credentials and endpoint come from the usual chain (botocore's).
    """

    LEASE = 60.0

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.root = self.url.removeprefix("s3://")

    @property
    def faults(self) -> tuple[type[Exception], ...]:
        return (OSError, _aws_error())

    @functools.cached_property
    def _files(self) -> Any:
        import s3fs

        # Without a cache of listings: another process may have committed since.
        return s3fs.S3FileSystem(use_listings_cache=False)

    def read(self, key: str) -> tuple[bytes, str] | None:
        files, path = self._files, f"{self.root}/{key}"
        try:
            info = files.info(path, refresh=True)
            part = {"start": 0, "end": MOST_BYTES + 1} if info["size"] > MOST_BYTES else {}
            return files.cat_file(path, **part), info["ETag"]
        except FileNotFoundError:
            return None
        except (OSError, _aws_error()) as error:
            raise StoreError(
                f"cannot read s3://{path}: {error}; check the address, the network and the credentials"
            ) from error

    def refuse_foreign(self) -> None:
        """A prefix is nobody's; other objects below it do no harm."""

    def prepare(self) -> None:
        """A prefix needs no room."""

    def replace(self, key: str, data: bytes, version: str | None) -> None:
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            self._put(key, data, **condition)
        except StoreError as error:
            # The answer may be lost and not the object; a second try then meets what the first has put.
            if self._look(key, error) != data:
                raise

    def _look(self, key: str, error: StoreError) -> bytes | None:
        """What lies there after an error."""
        try:
            found = self.read(key)
        except StoreError:
            raise CommitUnknown(
                f"{error}. Whether it was written is not known: look at {self.url} before you write the same again"
            ) from error
        return found[0] if found else None

    def put(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        bucket, _, name = f"{self.root}/{key}".partition("/")
        try:
            self._files.call_s3("put_object", Bucket=bucket, Key=name, Body=data, **condition)
        except FileNotFoundError as error:
            raise StoreError(f"cannot write s3://{bucket}/{name}: {error}; does the bucket exist?") from error
        except _aws_error() as error:
            raise StoreError(
                f"cannot write s3://{bucket}/{name}: {error}; check the address, the network and the credentials"
            ) from error
        except OSError as error:
            raise StoreError(
                f"s3://{bucket}/{name} was changed by another writer, or is not writable: {error}"
            ) from error

    def make_durable(self, keys: Iterable[str]) -> None:
        """An object that has been put is durable."""

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        give_up, notice = time.monotonic() + LOCK_WAIT + self.LEASE, time.monotonic() + LOCK_NOTICE
        while not self._take(owner):
            if time.monotonic() > notice:
                _log.warning("waiting for another process that writes to %s", self.url)
                notice = give_up
            if time.monotonic() > give_up:
                raise StoreError(f"another process is still writing to {self.url}; wait for it or stop it")
            time.sleep(min(1.0, self.LEASE / 20))
        done = threading.Event()
        keeper = threading.Thread(target=self._keep, args=(owner, done), name="vcal-lease", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            done.set()
            keeper.join()
            try:
                if self._holds(owner):
                    self._files.rm_file(f"{self.root}/{LOCK_NAME}")
            except (StoreError, OSError, _aws_error()) as error:  # what was done under the lock is done
                _log.warning("what was committed stays, but %s is locked for %g s: %s", self.url, self.LEASE, error)

    def _take(self, owner: str) -> bool:
        """Takes the lease if nobody has it or it has run out; a conditional put lets only one of several win."""
        found = self.read(LOCK_NAME)
        if found and _lease(found[0])[1] > time.time():
            return False
        try:
            self.replace(LOCK_NAME, self._new_lease(owner), found[1] if found else None)
        except StoreError:
            # Lost the race, unless the place cannot be written at all: then there is no lock to lose it to.
            if self.read(LOCK_NAME) is None:
                raise
            return False
        return True

    def _new_lease(self, owner: str) -> bytes:
        return json.dumps({"owner": owner, "until": time.time() + self.LEASE}).encode()

    def _keep(self, owner: str, done: threading.Event) -> None:
        while not done.wait(self.LEASE / 4):
            with contextlib.suppress(StoreError):  # a passing fault: there are three more tries in a lease
                found = self.read(LOCK_NAME)
                if found and _lease(found[0])[0] == owner:
                    self.replace(LOCK_NAME, self._new_lease(owner), found[1])

    def _holds(self, owner: str) -> bool:
        found = self.read(LOCK_NAME)
        return found is not None and _lease(found[0])[0] == owner

    def sizes(self, prefix: str) -> dict[str, int]:
        found = self._files.find(f"{self.root}/{prefix}", detail=True)
        return {name.removeprefix(self.root + "/"): int(info["size"]) for name, info in found.items()}

    def sweep(self, prefixes: Iterable[str]) -> None:
        """An object is never half-written."""

    def zarr_store(self, *, read_only: bool) -> ZarrStore:
        from zarr.storage import FsspecStore

        return FsspecStore.from_url(self.url, read_only=read_only, storage_options={"use_listings_cache": False})
