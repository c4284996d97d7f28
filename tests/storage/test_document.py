"""The store's root document decides what rows mean: a changed, cut or crafted one is refused in one line."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storage
from storage import documents, layout
from storage.errors import StoreError
from storage.store import Store
from tests.storage.conftest import numbered, places, replaced

GOLDEN = Path(__file__).parents[1] / "golden"
HOSTILE = (None, True, -1, 0, 1, 2**40, 10**30, 1.5, 1e300, "", "x", "\ud800", [], [[]], {}, {"name": "x"}, ["x"] * 3)


def root(store: Store) -> Path:
    return Path(store.url) / layout.ROOT


def read(store: Store) -> Any:
    return json.loads(root(store).read_bytes())


def use(url: str) -> None:
    """What people do with a store."""
    store = storage.open(url)
    store.verify()
    store.summary()
    store.count_runs()
    repr(store)
    store.append_runs(*numbered(1, start=store.runs.rows), **({"run": [1]} if store.runs.numbered else {}))


def test_a_changed_prior_is_refused(make_store: Callable[..., Store]) -> None:
    store = make_store()
    text = root(store).read_text()
    assert text.count('"high": 1.0') == 1
    root(store).write_text(text.replace('"high": 1.0', '"high": 0.5'))
    for act in (lambda: storage.open(store.url), store.refresh, lambda: store.append_runs(*numbered(1, start=100))):
        with pytest.raises(StoreError, match="does not match its checksum"):
            act()


def test_every_value_of_the_document_is_under_its_checksum(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=20)
    document = read(store)
    for path in list(places(document))[::3]:
        for remove in (False, True):
            root(store).write_text(json.dumps(replaced(document, path, "other", remove=remove)))
            with pytest.raises(StoreError):
                storage.open(store.url)
    root(store).write_text(json.dumps(document))  # another way to write the same
    assert storage.open(store.url).verify() == []


@pytest.mark.parametrize("numbers", [False, True])
def test_a_crafted_document_with_a_right_checksum_gives_no_raw_error(
    make_store: Callable[..., Store], numbers: bool
) -> None:
    """Whoever writes a document can write its checksum: what it says is checked as well. A sample of all changes."""
    store = make_store(runs=0)
    store.append_runs(*numbered(20), run=np.arange(20) if numbers else None)
    store.keep_run_count()
    good = root(store).read_bytes()
    document = json.loads(good)
    tries = [(path, value, False) for path in places(document) for value in HOSTILE]
    tries += [(path, None, True) for path in places(document)]
    accepted = 0
    for path, value, remove in random.Random(int(numbers)).sample(tries, 60):
        crafted = replaced(document, path, value, remove=remove)
        try:
            layout.seal(crafted)
            data = layout.to_bytes(crafted)
        except (StoreError, ValueError, TypeError, KeyError, AttributeError):
            data = json.dumps(crafted).encode()  # without what a checksum is for
        root(store).write_bytes(data)
        with contextlib.suppress(storage.VcalError):
            use(store.url)
            accepted += 1
        root(store).write_bytes(good)
    assert accepted < 20  # texts such as descriptions and sources may say anything


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("shape",), [2**50, 2], "rows"),
        (("shape",), [20, 3], "columns"),
        (("shape",), [19, 2], "different numbers of rows"),
        (("shape",), [-1, 2], "rows"),
        (("chunk_grid", "configuration", "chunk_shape"), [2**40, 2], "bytes"),
        (("chunk_grid", "configuration", "chunk_shape"), [0, 2], "rows"),
        (("codecs", 0, "name"), "numcodecs.pickle", "not as a store"),
        (("data_type",), "float16", "float16"),
        (("data_type",), "int64", "int64"),
    ],
)
def test_sizes_and_kinds_are_checked_before_memory_is_taken(
    make_store: Callable[..., Store], path: tuple[Any, ...], value: Any, said: str
) -> None:
    store = make_store(runs=20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inside = ("consolidated_metadata", "metadata", "runs/x")
    crafted = replaced(read(store), (*inside, *path), value)
    layout.seal(crafted)
    root(store).write_bytes(layout.to_bytes(crafted))
    with pytest.raises(StoreError, match=said):
        storage.open(store.url)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KiB


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "damaged"),
        (b"[" * 200_000, "damaged"),
        (b'{"a":' * 100_000, "damaged"),
        (b'{"attributes": ' + b"9" * 10_000 + b"}", "damaged"),
        (b'{"a": NaN}', "damaged"),
        (b'{"a": 1, "a": 2}', "stands twice"),
        (b"\xff\xfe", "damaged"),
        (b"5", "not a vcal store"),
        (b"{}", "not a vcal store"),
        (b'{"attributes": {"vcal": 3}}', "not a vcal store"),
        (b'{"attributes": {"vcal": {"schema": true}}}', "schema True"),
        (b'{"attributes": {"vcal": {"schema": [3]}}}', "schema"),
        (b" " * (documents.MOST_BYTES + 1), "more than 32 MiB"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_document(make_store: Callable[..., Store], text: bytes, said: str) -> None:
    store = make_store(runs=20)
    root(store).write_bytes(text)
    with pytest.raises(StoreError, match=said):
        storage.open(store.url)


def test_a_cut_document_is_damaged(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=20)
    good = root(store).read_bytes()
    for end in range(0, len(good) - 1, 211):
        root(store).write_bytes(good[:end])
        with pytest.raises(StoreError, match="damaged"):
            storage.open(store.url)


def test_a_crafted_document_of_an_earlier_schema_gives_no_raw_error(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "store-2" / "store", tmp_path / "old.zarr")
    target = tmp_path / "old.zarr" / layout.ROOT
    good = target.read_bytes()
    document = json.loads(good)
    tries = [(path, value) for path in places(document) for value in HOSTILE]
    for path, value in random.Random(0).sample(tries, 60):
        target.write_text(json.dumps(replaced(document, path, value)))
        with contextlib.suppress(storage.VcalError):
            storage.open(tmp_path / "old.zarr").verify()


def test_a_chunk_file_of_any_size_is_refused_before_it_is_read(make_store: Callable[..., Store]) -> None:
    store = make_store(runs=20)
    with (Path(store.url) / "runs" / "x" / "c.0.0").open("r+b") as file:
        file.truncate(1 << 42)  # no block of the disk is taken
    assert [damage.file for damage in store.verify()] == ["runs/x/c.0.0"]


def test_a_store_that_could_not_be_opened_is_not_made(tmp_path: Path, make_store: Callable[..., Store]) -> None:
    for settings in ({"chunk_rows": 2**40}, {"chunk_rows": 16, "shard_rows": 2**40}):
        with pytest.raises(StoreError, match="bytes"):
            make_store(name="large.zarr", **settings)
    assert not (tmp_path / "large.zarr").exists()
