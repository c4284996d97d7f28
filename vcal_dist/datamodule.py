"""The LightningDataModule: a DataLoader for each leg of the schedule, over the batches of `vcal_dist.feeding`."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from storage.store import Store
from storage.streaming import parse_memory
from vcal_dist.config import DataSettings
from vcal_dist.feeding import Check, Feeder
from vcal_dist.module import CalibrationModule, on_device
from vcal_dist.phases import Batch
from vcal_dist.prefetch import prefetched
from vcal_dist.rows import AtHand


class Leg(Dataset[Batch]):
    """The batches of a leg that are still to come, in their order: asking for one out of turn has no meaning.

    It has a length, as Lightning wants to know which batch is the last.
    """

    def __init__(self, batches: Iterator[Batch], length: int, wait: Waiting) -> None:
        self.batches, self.length, self.wait = batches, length, wait

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        begun = time.perf_counter()
        batch = next(self.batches)
        waited = time.perf_counter() - begun
        if index == 0:
            self.wait.opening += waited
        else:
            self.wait.seconds += waited
        return batch


class Waiting:
    """How long training has waited for rows: for the first batches of legs, which open the store, and for others."""

    opening = 0.0
    seconds = 0.0


class StoreData(LightningDataModule):
    """Rows of a store for the phases of a `CalibrationModule`."""

    def __init__(
        self,
        store: Store,
        at_hand: AtHand,
        settings: DataSettings,
        seed: int,
        check: Check | None = None,
        orders: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.store, self.at_hand, self.settings, self.seed, self.orders = store, at_hand, settings, seed, orders
        self.check = check
        self.waiting = Waiting()
        self.feeder: Feeder | None = None
        self.prefetching: Generator[Batch] | None = None

    def train_dataloader(self) -> DataLoader[Batch]:
        """The leg that the schedule has come to."""
        trainer = self.trainer
        assert trainer is not None
        module = trainer.lightning_module
        assert isinstance(module, CalibrationModule)
        if self.feeder is None:
            self.feeder = Feeder(
                self.store,
                self.at_hand.scaling,
                {"runs": self.at_hand.held_runs, "observations": self.at_hand.held_observations},
                seed=self.seed,
                device=module.device,
                memory=parse_memory(self.settings.memory),
                resident=self.settings.resident,
                scheduler=self.settings.scheduler,
                check=self.check,
                rank=trainer.global_rank,
                world_size=trainer.world_size,
            )
        schedule = module.schedule
        if schedule.phase is None:  # no phase has a step to take
            return DataLoader(Leg(iter(()), 0, self.waiting), batch_size=None)
        feed = schedule.phase.feed
        module.leg_batches = self.feeder.length(feed)
        batches = self.feeder.leg(feed, schedule.number, schedule.batch, self.orders)
        self.orders = None
        self._stop_prefetching()
        if module.device.type == "cuda":
            self.prefetching = batches = prefetched(batches)
        leg = Leg(batches, module.leg_batches - schedule.batch, self.waiting)
        return DataLoader(leg, batch_size=None)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Batches come in the nested tuples that the model takes; from pinned memory they travel while it computes."""
        runs, observations = batch
        return Batch(
            None if runs is None else on_device(runs, device),
            None if observations is None else on_device(observations, device),
        )

    def teardown(self, stage: str) -> None:
        """Stops reading ahead."""
        self._stop_prefetching()
        if self.feeder is not None:
            self.feeder.close()
            self.feeder = None

    def _stop_prefetching(self) -> None:
        """Before the streams are closed that its thread reads."""
        if self.prefetching is not None:
            self.prefetching.close()
            self.prefetching = None

    def on_exception(self, exception: BaseException) -> None:
        """Likewise: after an exception, Lightning tears nothing down."""
        self.teardown("fit")
