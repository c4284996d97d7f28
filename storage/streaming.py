"""The stream: global batches of runs and observations, in the order that `storage.order` defines.

    with storage.stream(store, runs=4096, observations=1024, seed=1) as stream:
        for batch in stream:                  # one epoch; iterate again for the next
            batch.runs.x, batch.runs.t, batch.runs.z, batch.runs.weight

Each process gets its part of every global batch, padded with rows of weight zero to a size that never changes. The
state is a small dictionary; a stream made from it goes on with the next batch at once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from dask.utils import parse_bytes

from storage.batches import INDEX_BYTES, TableStream
from storage.errors import StreamError
from storage.order import THREADS, plan
from storage.store import Store
from storage.table import Table
from storage.windows import Assembler, Dask, Synchronous

DEFAULT_MEMORY = "1 GB"


class Batch(NamedTuple):
    """One step's data, and which step of which epoch it is."""

    runs: Any  # storage.batches.Runs, or Numbers of a stream without values; None if it has no runs
    observations: Any  # likewise
    epoch: int
    step: int


class Stream:
    """Endless batches, an epoch for each iteration. Make one with `stream`."""

    def __init__(self, tables: dict[str, TableStream], epochs: int | None) -> None:
        self.tables = tables
        self.epochs = epochs
        self.epoch = 0
        self.step = 0
        self._parts: dict[str, Iterator[Any]] = {}
        self._closed = False

    @property
    def steps(self) -> int:
        """Batches in an epoch: those of the table that needs more; the other one is cycled."""
        return max(table.order.steps for table in self.tables.values())

    def __len__(self) -> int:
        return self.steps

    def __repr__(self) -> str:
        parts = ", ".join(f"{t.order.batch} of {t.order.rows} {name}" for name, t in self.tables.items())
        return f"<stream of {parts}; epoch {self.epoch}, step {self.step} of {self.steps}>"

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the current epoch that are still to come."""
        if self._closed:
            raise StreamError("the stream is closed; make a new one, with state=stream.state_dict() to go on")
        if self.epochs is not None and self.epoch >= self.epochs:
            return
        if not self._parts:
            done = self.epoch * self.steps + self.step
            ends = None if self.epochs is None else self.epochs * self.steps
            self._parts = {name: table.parts(done, ends) for name, table in self.tables.items()}
        epoch = self.epoch
        while self.epoch == epoch:
            try:
                parts = {name: next(part) for name, part in self._parts.items()}
            except BaseException:
                self._stop_parts()  # so that iterating again begins anew at the same batch
                raise
            batch = Batch(parts.get("runs"), parts.get("observations"), epoch, self.step)
            self.step += 1
            if self.step == self.steps:
                self.epoch, self.step = epoch + 1, 0
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on after the last batch given, on any number of processes."""
        orders = {name: asdict(table.order) for name, table in self.tables.items()}
        return {"epoch": self.epoch, "step": self.step, **orders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken."""
        if {"epoch", "step", *self.tables} != set(state):
            given = sorted(set(state) - {"epoch", "step"})
            raise StreamError(f"the state is of a stream of {given}, this one has {sorted(self.tables)}")
        self._stop_parts()
        for name, table in self.tables.items():
            table.resume(state[name])
        self.epoch, self.step = int(state["epoch"]), int(state["step"])

    def _stop_parts(self) -> None:
        for part in self._parts.values():
            part.close()  # type: ignore[attr-defined]
        self._parts = {}

    def close(self) -> None:
        """Stops reading ahead and frees the memory."""
        self._closed = True
        self._stop_parts()
        for table in self.tables.values():
            table.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def stream(
    store: Store,
    *,
    runs: int | None = None,
    observations: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    memory: int | str = DEFAULT_MEMORY,
    scheduler: str = "threads",
    values: bool = True,
    state: dict[str, Any] | None = None,
) -> Stream:
    """Batches of `runs` rows of the runs and/or `observations` rows of the observations, over all processes together.

    With `shuffle=False` rows come in a fixed order: an exactly-once pass with `epochs=1`. `memory` is the budget of
    this process ("256 MB"); it decides how far rows are shuffled, and data that fit are read once. `scheduler` is
    "threads", the address of a Dask distributed scheduler, or "synchronous" (nothing is read ahead). `state`
    continues an earlier stream. Without `values` batches hold the numbers of the same rows, in the same order, for
    someone who keeps the rows.
    """
    sizes = {name: size for name, size in (("runs", runs), ("observations", observations)) if size is not None}
    if not sizes:
        raise StreamError("nothing to stream; give a batch size for runs, for observations, or for both")
    if world_size < 1:
        raise StreamError(f"world_size is {world_size}; accepted: 1 or more")
    if not 0 <= rank < world_size:
        raise StreamError(f"rank is {rank} of {world_size} processes; accepted: 0 to {world_size - 1}")
    if epochs is not None and epochs < 1:
        raise StreamError(f"epochs is {epochs}; accepted: 1 or more, or None for no end")
    budgets = _share_memory(store, list(sizes), parse_memory(memory))
    tables = {}
    for name, size in sizes.items():
        table: Table = getattr(store, name)
        order = plan(
            table.rows,
            table.block_rows,
            table.row_bytes + INDEX_BYTES,
            batch=size,
            seed=seed,
            shuffle=shuffle,
            memory=budgets[name],
            stream=("runs", "observations").index(name),
        )
        table = table if values else table.numbers()
        tables[name] = TableStream(table, order, budgets[name], _assembler(scheduler), rank, world_size)
    made = Stream(tables, epochs)
    if state is not None:
        made.load_state_dict(state)
    return made


def _share_memory(store: Store, names: list[str], memory: int) -> dict[str, int]:
    """Half of the budget at most for the smaller table, which then mostly fits; the rest for the other."""
    if len(names) == 1:
        return {names[0]: memory}
    # Enough to keep a table in memory, with two windows over all of it, the readers' scratch and the batches.
    needs = {
        table.name: 2 * (3 * table.blocks + 3 * THREADS) * table.block_rows * (table.row_bytes + INDEX_BYTES)
        for table in (store.runs, store.observations)
    }
    small, large = sorted(names, key=lambda name: needs[name])
    share = min(memory // 2, max(needs[small], memory // 8))
    return {small: share, large: memory - share}


def _assembler(scheduler: str) -> Assembler:
    if scheduler == "synchronous":
        return Synchronous()
    return Dask(None if scheduler == "threads" else scheduler)


def parse_memory(memory: int | str) -> int:
    """A number of bytes, from a number or a text such as "256 MB" or "1 GiB"."""
    try:
        # Dask takes a blank text for one byte.
        found = int(parse_bytes(memory.strip() or "0")) if isinstance(memory, str) else operator.index(memory)
    except (ValueError, TypeError, OverflowError):
        found = 0
    if found <= 0:
        raise StreamError(f"memory is '{memory}'; accepted: a number of bytes, or a text such as '256 MB' or '2 GiB'")
    return found
