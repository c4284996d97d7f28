"""Batches for the phases of training, from a store: streamed, or from rows that stay on the device.

Every leg follows the order of `storage.stream`, which is a pure function of the seed and the phase, so that a leg can
be entered at any batch and is the same for any number of processes, whether rows are streamed or resident.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from storage.batches import Numbers
from storage.store import Store
from storage.streaming import Stream, stream
from vcal_dist.batches import Observations, Runs, Scaling, take
from vcal_dist.errors import ModelError
from vcal_dist.phases import Batch, Feed
from vcal_dist.rows import keep_out

TABLES = ("runs", "observations")
TOGETHER = 32_768  # rows that are scaled at once: operations on few rows cost more than the rows
Rows = Runs | Observations
Check = Callable[[str, Any], None]  # of a table's name and rows; raises what is wrong with them


@dataclass
class Resident:
    """All rows of this process, on its device; they are neighbours in the store."""

    rows: Any  # Runs or Observations
    first: int

    def take(self, numbers: np.ndarray[Any, Any], weight: np.ndarray[Any, Any]) -> Any:
        """Rows by their numbers in the store; a number of −1 only fills up."""
        device = self.rows.weight.device
        chosen = torch.from_numpy(numbers).to(device, non_blocking=True)
        found = take(self.rows, (chosen - self.first).clamp_min_(0))
        if weight.all():
            return found
        padding = torch.from_numpy(weight).to(device, torch.float64, non_blocking=True)
        return found._replace(weight=found.weight * padding, row=chosen)


class Feeder:
    """One process' batches of the legs of training."""

    def __init__(
        self,
        store: Store,
        scaling: Scaling,
        held: dict[str, Tensor],
        *,
        seed: int,
        device: torch.device,
        memory: int,
        resident: bool | str = "auto",
        scheduler: str = "threads",
        check: Check | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.store, self.scaling, self.held = store, scaling, held
        self.seed, self.device, self.memory, self.scheduler = seed, device, memory, scheduler
        self.rank, self.world_size, self.check = rank, world_size, check
        self.orders: dict[str, Any] = {}  # of the tables in the leg under way: a checkpoint keeps them
        self._streams: dict[str, Stream] = {}
        self._leg: tuple[int, Feed] | None = None
        self._keep = {name: self._fits(name) if resident == "auto" else bool(resident) for name in TABLES}
        self._resident: dict[str, Resident] = {}

    def length(self, feed: Feed) -> int:
        """Batches of a leg."""
        if feed.batches is not None:
            return feed.batches
        return max(-(-getattr(self.store, name).rows // size) for name, size in self._sizes(feed).items())

    def leg(self, feed: Feed, phase: int, start: int, orders: dict[str, Any] | None = None) -> Iterator[Batch]:
        """The batches of a leg of a phase from number `start` on; `orders` are those of a checkpoint.

        The orders are those of this leg from the call on, not from its first batch: a checkpoint may come before it.
        """
        if self._leg != (phase, feed):  # legs of one phase read alike: what was read for the first serves the others
            self.close()
            self._leg = (phase, feed)
            sizes = self._sizes(feed)
            for name, size in sizes.items():
                order = (orders or {}).get(name)
                self._streams[name] = self._open(
                    name, size, phase, feed.batches is not None, self.memory // len(sizes), order
                )
            self.orders = {name: s.state_dict()[name] for name, s in self._streams.items()}
        return self._batches(range(start, self.length(feed)))

    def _batches(self, numbers: range) -> Iterator[Batch]:
        parts = {name: self._parts(name, opened, numbers) for name, opened in self._streams.items()}
        for _ in numbers:
            rows = {name: next(part) for name, part in parts.items()}
            yield Batch(rows.get("runs"), rows.get("observations"))

    def close(self) -> None:
        """Stops reading ahead. Resident rows stay."""
        for opened in self._streams.values():
            opened.close()
        self._streams, self._leg = {}, None

    def _sizes(self, feed: Feed) -> dict[str, int]:
        """Rows of a global batch of each table; one that has all rows to learn from has those kept out too."""
        sizes = {name: size for name, size in zip(TABLES, (feed.runs, feed.observations), strict=True) if size}
        rows = {name: getattr(self.store, name).rows for name in sizes}
        return {name: rows[name] if size >= rows[name] - len(self.held[name]) else size for name, size in sizes.items()}

    def _open(
        self, name: str, size: int, phase: int, shuffle: bool, memory: int, order: dict[str, Any] | None
    ) -> Stream:
        options: dict[str, Any] = {
            name: size,
            "seed": self.seed * 1009 + phase,
            "shuffle": shuffle,
            "rank": self.rank,
            "world_size": self.world_size,
            "memory": memory,
            "scheduler": self.scheduler,
        }
        opened = stream(self.store, values=not self._keep[name], **options)
        if order is None:
            return opened
        state = {"epoch": 0, "step": 0, name: order}
        own = opened.tables[name].order.rank_rows(self.rank, self.world_size)
        opened.load_state_dict(state)
        if self._keep[name] and opened.tables[name].order.rank_rows(self.rank, self.world_size) != own:
            # The checkpoint is of another memory budget and deals other rows to this process than those that it keeps.
            opened.close()
            opened = stream(self.store, state=state, **options)
        return opened

    def _parts(self, name: str, opened: Stream, numbers: range) -> Iterator[Any]:
        """Batches of one table by their numbers in the leg; small ones are made ready several at a time.

        Rows that fill no batch at the end of an epoch wait for the next one: the evidence of few rows says little.
        """
        order = opened.tables[name].order
        steps = max(1, order.rows // order.batch) if order.shuffle else order.steps
        epoch, step = divmod(numbers.start, steps)
        if not order.shuffle:  # every epoch of a pass is alike
            epoch = opened.epoch
        if (opened.epoch, opened.step) != (epoch, step):
            opened.load_state_dict(opened.state_dict() | {"epoch": epoch, "step": step})
        size = opened.tables[name].capacity
        endless = (getattr(b, name) for epoch in iter(lambda: opened, None) for b in epoch if b.step < steps)
        for group in _groups(numbers, max(1, TOGETHER // size)):
            rows = self._rows(name, _joined(list(itertools.islice(endless, len(group)))))
            for i in range(len(group)):
                yield rows if len(group) == 1 else take(rows, slice(i * size, (i + 1) * size))  # type: ignore[type-var]

    def _rows(self, name: str, part: Any) -> Rows:
        if isinstance(part, Numbers):
            if name not in self._resident:
                self._resident[name] = self._load(name)
            found: Rows = self._resident[name].take(part.row, part.weight)
            return found
        scaled = self._scaled(name, [None if array is None else torch.from_numpy(array) for array in part])
        if self.check is not None:
            self.check(name, scaled)
        kept: Rows = keep_out(scaled, self.held[name])
        return kept

    def _scaled(self, name: str, arrays: list[Any]) -> Any:
        """Rows in the model's units; what an output's transform cannot take is refused by its row in the store."""
        scale: Any = self.scaling.runs if name == "runs" else self.scaling.observations
        transformed = any(transform.kind != "none" for transform in self.scaling.outputs.transforms)
        try:
            return scale(*arrays, check=transformed)
        except ModelError:
            for i, row in enumerate(arrays[-2].tolist()):
                try:
                    scale(*(None if array is None else array[i : i + 1] for array in arrays))
                except ModelError as error:
                    raise ModelError(f"row {row} of the {name} in the store: {error}") from None
            raise

    def _load(self, name: str) -> Resident:
        """Reads and scales all rows of this process, once."""
        table = getattr(self.store, name)
        size = min(table.rows, 65_536)
        with stream(
            self.store,
            **{name: size},
            shuffle=False,
            epochs=1,
            rank=self.rank,
            world_size=self.world_size,
            memory=self.memory,
            scheduler=self.scheduler,
        ) as opened:
            parts = [self._rows(name, getattr(batch, name)) for batch in opened]
        columns: list[Any] = [None if c[0] is None else torch.cat(c) for c in zip(*parts, strict=True)]
        joined: Any = type(parts[0])(*columns)
        del parts
        order = joined.row.argsort(stable=True)  # batches deal the shards out in turn; padding (−1) comes first
        padding = min(int((joined.row < 0).sum()), len(order) - 1)  # a process without rows keeps one of weight zero
        rows = take(joined, order[padding:])
        return Resident(
            type(rows)(*(None if part is None else part.to(self.device) for part in rows)), int(rows.row[0])
        )

    def _fits(self, name: str) -> bool:
        """Whether the rows of this process may stay: in half of the budget, or of a GPU's free memory."""
        table = getattr(self.store, name)
        width = sum(len(names) for names in table.columns.values())
        need = 24 * (width + 2) * table.rows / self.world_size  # mostly float64, and a copy while they are sorted
        free = self.memory
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                free = min(int(torch.cuda.mem_get_info(self.device)[0]), 8 * self.memory)
        return need <= free / 2


def _groups(numbers: range, size: int) -> Iterator[range]:
    return (numbers[i : i + size] for i in range(0, len(numbers), size))


def _joined(parts: list[Any]) -> Any:
    """The rows of several batches one after the other."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*parts, strict=True)
    return type(parts[0])(*(None if column[0] is None else np.concatenate(column) for column in columns))
