"""The LightningModule: gives every batch to the schedule, and turns at the end of each leg. All else is elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from vcal_dist.batches import Runs, Table, take
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collapsed import posterior
from vcal_dist.collective import sum_over_ranks, world_size
from vcal_dist.errors import ConfigError
from vcal_dist.fullrank import FullRank
from vcal_dist.initialise import start_model
from vcal_dist.objective import runs_gram
from vcal_dist.phases import NO_VOTE, Batch, Descent, LinAlgError, Outcome
from vcal_dist.plan import FitSettings, Totals
from vcal_dist.rows import AtHand, held_rows
from vcal_dist.schedule import Schedule, moved, refining
from vcal_dist.stages import is_collapsible
from vcal_dist.weights import MeanField
from vcal_dist.work import Found, Work

JUDGES = 512  # runs that tell the emulator's error while it trains


class CalibrationModule(LightningModule):
    """Trains a calibration model by its schedule; an epoch of Lightning is a leg of a phase."""

    def __init__(
        self,
        model: CalibrationModel,
        at_hand: AtHand,
        settings: FitSettings,
        totals: Totals,
        seed: int,
        state: dict[str, Any] | None = None,
        found: Found | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model, self.at_hand, self.settings, self.totals, self.seed = model, at_hand, settings, totals, seed
        self.resumed = state
        self.found = found  # what an earlier training has found, to be refined
        self.votes = NO_VOTE  # of this process, for the next step: to stop, and to write a checkpoint
        self.outcome = Outcome(None, NO_VOTE)
        self.batch: Batch | None = None
        self.leg_batches = 0
        self.schedule: Schedule

    def configure_optimizers(self) -> list[Any]:
        """None for Lightning: each stage has its own."""
        return []

    def on_fit_start(self) -> None:
        """Puts everything on the device and goes to the first batch, or to where a checkpoint was taken."""
        runs, observations = (
            on_device(self.at_hand.runs, self.device),
            on_device(self.at_hand.observations, self.device),
        )
        work = Work(self.model, self.settings, self.totals, self.seed, observations, complete=self.at_hand.complete)
        if self.at_hand.stacked:
            work.runs = runs
            work.run = None if self.at_hand.run is None else self.at_hand.run.to(self.device)
        held = held_rows(self.at_hand.runs, self.at_hand.held_runs)
        self.judges: Runs = on_device(held if len(held.u) else self.at_hand.runs, self.device)
        self.judges = type(self.judges)(*(part[:JUDGES] for part in self.judges))
        self.schedule = Schedule(work)
        if self.found is not None:
            work.found, work.patient = Found.from_state(moved(self.found.state(), self.device)), True
            self.schedule = Schedule(work, refining(work))
            self.schedule.start()
        elif self.resumed is None:
            start_model(self.model, take(runs, runs.weight > 0), take(observations, observations.weight > 0), self.seed)
            self.schedule.start()
        else:
            self.schedule.load(self.resumed)
        self._agree()

    def _agree(self) -> None:
        """All processes go on from the same batch: each has read the checkpoint by itself."""
        schedule = self.schedule
        here = torch.tensor([schedule.steps, schedule.number, schedule.batch], dtype=torch.float64, device=self.device)
        (total,) = sum_over_ranks([here])
        (different,) = sum_over_ranks([(total != here * world_size()).double().sum()])
        if float(different):
            raise ConfigError(
                f"this process goes on after step {schedule.steps}, others after another: they have not read the same "
                "checkpoint. Start them again; if it comes back, the output is not on a file system that they share"
            )

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        """One step of a stage, or one block of a pass."""
        self.batch = batch
        self.outcome = self.schedule.step(batch, self.votes)

    def on_train_epoch_end(self) -> None:
        """Ends the leg, unless training was told to stop in the middle of it."""
        if self.schedule.batch < self.leg_batches:
            return
        self.schedule.turn()
        if self.schedule.phase is None:
            self.trainer.should_stop = True

    @torch.no_grad()
    def emulator_error(self) -> float | None:
        """Root mean square error of the emulator's mean at runs that training does not see, in sds of the outputs."""
        model, found, phase = self.model, self.schedule.work.found, self.schedule.phase
        learned = phase.stage.learned if isinstance(phase, Descent) else None
        mean: Tensor
        if found.validation is not None:
            runs = self.at_hand.runs
            z = runs.z[torch.isin(runs.row, found.validation.row.cpu())].to(self.device)
            return float((found.validation.mean - z).square().nanmean().sqrt())
        if isinstance(learned, MeanField | FullRank) and found.frame is None:
            mean = learned.mean if isinstance(learned, MeanField) else learned.raw_mean
        elif found.frame is not None:
            mean = found.frame.mean
        elif self.batch is not None and self.batch.runs is not None and is_collapsible(model, self.settings)[0]:
            try:
                mean = posterior(runs_gram(model, self.batch.runs, None))[0]  # what this batch alone says
            except LinAlgError:  # the model is not finite any more: the next step says so
                return None
        else:
            return None
        z = model.eta(self.judges.u, None).double() @ mean[:, model.columns_eta].double().mT
        expected, _ = model.likelihood_z.moments(z, torch.zeros_like(z))
        return float((expected - self.judges.z).square().nanmean().sqrt())


def on_device(table: Table, device: torch.device) -> Table:
    """A table's tensors on a device."""
    if table.weight.device == device:
        return table
    return type(table)(*(None if part is None else part.to(device, non_blocking=True) for part in table))  # type: ignore[arg-type, redundant-expr]
