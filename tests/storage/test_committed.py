"""An append is committed or it is not: what fails before the root document is replaced raises and shows no row, what
fails afterwards is a warning, so that nobody appends the same rows twice."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

import storage
from storage.errors import VcalError
from storage.problem import parse_problem
from storage.store import Store
from tests.storage.conftest import PROBLEM, numbered


class Failing:
    """Lets the k-th of the file system's calls fail with an error of the disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.failed = -1, ""
        for name in ("fsync", "replace", "mkdir", "unlink", "rename"):
            monkeypatch.setattr(os, name, self._wrapped(name, getattr(os, name)))
        monkeypatch.setattr(filelock.FileLock, "release", self._wrapped("release", filelock.FileLock.release))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **settings: Any) -> Any:
            if self.left == 0:
                self.left, self.failed = -1, name
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.left -= self.left > 0
            return call(*args, **settings)

        return wrapped


def test_every_failing_call_leaves_the_rows_committed_or_not(
    make_store: Callable[..., Store], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The k-th call fails, for every k: an append that raises has shown no row, one that returns has shown all."""
    store = make_store(runs=20)
    failing = Failing(monkeypatch)
    raised, warned = [], []
    for k in range(200):
        before = storage.open(store.url).runs.rows
        failing.left, failing.failed = k, ""
        caplog.clear()
        with caplog.at_level(logging.WARNING, "storage"):
            try:
                store.append_runs(*numbered(16, start=before))  # two chunks each time, so that calls are the same
                added = 16
            except VcalError as error:
                raised.append((failing.failed, str(error)))
                added = 0
        failing.left = -1
        found = storage.open(store.url)
        assert found.runs.rows == before + added, f"call {k}, {failing.failed}: {caplog.text}"
        assert store.refresh().runs.rows == before + added
        if failing.failed and added and "committed" in caplog.text:
            warned.append(failing.failed)
        if not failing.failed:
            break
    assert not failing.failed, "more calls than expected"
    assert {"fsync", "replace"} <= {call for call, _ in raised}
    assert all("Input/output error" in said for _, said in raised)
    assert "fsync" in warned  # of the directory, after the root document was replaced
    assert "release" in warned
    np.testing.assert_array_equal(found.runs.read()["x"], numbered(found.runs.rows)[0])
    assert found.verify() == []


def test_an_ingest_whose_clean_up_fails_is_reported_as_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, t, z = numbered(30)
    rows = np.concatenate([x, t, z], axis=1)
    np.savetxt(tmp_path / "runs.csv", rows, delimiter=",", header="a,b,k,f", comments="", fmt="%.17g")
    failing = Failing(monkeypatch)
    for k in range(0, 400, 5):
        url = tmp_path / f"{k}.zarr"
        failing.left, failing.failed = k, ""
        try:
            storage.ingest(parse_problem(PROBLEM), runs=[tmp_path / "runs.csv"], store=url)
        except VcalError:
            failing.left = -1
            assert not storage.exists(url) or storage.open(url).runs.rows == 0, f"call {k}: {failing.failed}"
        else:
            failing.left = -1
            assert storage.open(url).runs.rows == 30
        if not failing.failed:
            break
    assert not failing.failed
    assert k > 20, "the calls are not those that fail"
