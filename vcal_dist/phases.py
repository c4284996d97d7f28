"""The phases of training. Each takes batches of rows, one at a time; `turn` ends a *leg* of them.

A stage (`Descent`) has one leg of as many shuffled batches as it has steps. A pass has legs in which every row comes
once. Some phases (`Instant`) need no rows but those at hand. A phase writes what it found into `work.found`; its state
in the middle of a leg is tensors and plain values, so that training goes on from any batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vcal_dist.batches import Observations, Runs, Table, take
from vcal_dist.collective import average_gradients, vote
from vcal_dist.errors import Diverged, Malformed
from vcal_dist.gp import DeepGP
from vcal_dist.likelihoods import Gaussian
from vcal_dist.passes import Climb, Compression
from vcal_dist.residual import ResidualFit
from vcal_dist.stages import Stage
from vcal_dist.tensorfile import check_form
from vcal_dist.work import Work

BLOCK = 8192  # rows whose features stay in the cache
PASS_ROWS = 8 * BLOCK  # of a global batch in a pass
SMOOTHING, FIRST_STEPS = 0.1, 20  # of the loss, and steps before it is judged
DIVERGED = 10.0  # nats a row above the lowest smoothed loss, relative to that where it is large
CURE = "lower its learning rate, or check the data for outliers"
LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined] # it is public in the docs
NO_VOTE = (0.0, 0.0)


class Batch(NamedTuple):
    """This process' rows of one step."""

    runs: Runs | None
    observations: Observations | None


class Feed(NamedTuple):
    """What a leg reads: rows of a global batch of each table, None where it reads none of it.

    So many shuffled batches, or with None every row once.
    """

    runs: int | None
    observations: int | None
    batches: int | None


class Outcome(NamedTuple):
    """What a step gave, the same on every process: the loss, if there is one, and the votes of all."""

    loss: float | None
    votes: tuple[float, float]


class Phase(ABC):
    """One phase of training."""

    name: str

    @abstractmethod
    def turn(self) -> bool:
        """Ends a leg; whether the phase is done."""


class Instant(Phase):
    """A phase that takes no rows but those at hand."""

    def __init__(self, name: str, do: Callable[[], None]) -> None:
        self.name, self.do = name, do

    def turn(self) -> bool:
        self.do()
        return True


class Reading(Phase):
    """A phase that takes batches of rows, in one leg or in several."""

    feed: Feed
    fixed_form = True  # whether its state has the same keys and shapes from the first batch to the last

    @abstractmethod
    def step(self, batch: Batch, votes: tuple[float, float] = NO_VOTE) -> Outcome:
        """Takes a batch. Votes are numbers of this process; their means over all of them come back with it."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Where the phase is; every process must ask."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state."""


class Descent(Reading):
    """The steps of a stage: Adam with a one-cycle rate; a stage with nothing to learn by Adam still takes its steps."""

    def __init__(self, stage: Stage, finish: Callable[[Stage], None] = lambda _: None) -> None:
        self.name, self.stage, self.finish = stage.name, stage, finish
        steps = stage.steps if stage.groups or stage.natural else 0
        self.feed = Feed(stage.runs, stage.observations, steps)
        self.done = 0
        self.smooth, self.lowest = math.nan, math.inf
        self.optimizer: torch.optim.Adam | None = None
        self.parameters: list[nn.Parameter] = [p for group in stage.groups for p in group["params"]]
        if stage.groups:
            self.optimizer = torch.optim.Adam(stage.groups, betas=(0.9, 0.95))
            self.rates = [group["lr"] for group in stage.groups]
            # OneCycleLR divides by the steps of its warm-up less one; a shorter stage ends before its cycle does.
            self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
                self.optimizer, self.rates, total_steps=max(stage.steps, 20), pct_start=0.1
            )

    def step(self, batch: Batch, votes: tuple[float, float] = NO_VOTE) -> Outcome:
        try:
            loss = self.stage.loss(batch.runs, batch.observations, self.done)
            if self.optimizer is not None:
                self.optimizer.zero_grad()
                loss.backward()
        except LinAlgError as error:  # from sums over all processes: every one of them meets it
            raise Diverged(f"the loss of stage '{self.name}' has no value in step {self.done}; {CURE}") from error
        extras = torch.stack([loss.detach().double(), *loss.new_tensor(votes, dtype=torch.float64)])
        value, *votes_of_all = average_gradients(self.parameters, extras).tolist()
        self._judge(value)
        if self.optimizer is not None:
            self.optimizer.step()
            self.scheduler.step()
        self.done += 1
        return Outcome(value, (votes_of_all[0], votes_of_all[1]))

    def _judge(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise Diverged(f"the loss of stage '{self.name}' is {loss} in step {self.done}; {CURE}")
        self.smooth = loss if self.done == 0 else (1 - SMOOTHING) * self.smooth + SMOOTHING * loss
        if self.done >= FIRST_STEPS:
            self.lowest = min(self.lowest, self.smooth)
            if self.smooth > self.lowest + DIVERGED * (1 + abs(self.lowest)):
                raise Diverged(
                    f"stage '{self.name}' diverges: its loss, smoothed, has risen from {self.lowest:.4g} to "
                    f"{self.smooth:.4g} in step {self.done}; {CURE}"
                )

    def turn(self) -> bool:
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters):
            raise Diverged(f"stage '{self.name}' has lost its numbers in its last step, {self.done - 1}; {CURE}")
        self.finish(self.stage)
        return True

    def state(self) -> dict[str, Any]:
        learned = self.stage.learned
        found: dict[str, Any] = {
            "done": self.done,
            "smooth": self.smooth,
            "lowest": self.lowest,
            "counts": self.stage.counts,
            "learned": None if learned is None else dict(learned.state_dict()),
        }
        if self.optimizer is not None:
            moments = self.optimizer.state_dict()
            found["adam"] = {str(i): moment for i, moment in moments["state"].items()}
            found["groups"] = moments["param_groups"]
            found["cycle"] = self.scheduler.state_dict()
        return found

    def load(self, state: dict[str, Any]) -> None:
        self.done, self.smooth, self.lowest = state["done"], state["smooth"], state["lowest"]
        if not 0 <= self.done <= self.stage.steps:
            raise Malformed(f"schedule.phase.done is {self.done} of {self.stage.steps} steps")
        self.stage.counts.update(state["counts"])
        if self.stage.learned is not None:
            self.stage.learned.load_state_dict(state["learned"])
        if self.optimizer is not None:
            moments = {int(i): moment for i, moment in state["adam"].items()}
            for i, parameter in enumerate(self.parameters):
                if i in moments:  # torch takes any shape
                    own = {"step": torch.tensor(0.0), "exp_avg": parameter, "exp_avg_sq": parameter}
                    check_form(own, moments[i], f"schedule.phase.adam.{i}")
            self.optimizer.load_state_dict({"state": moments, "param_groups": state["groups"]})
            self.scheduler.load_state_dict(state["cycle"])
            self._set_rates()

    def _set_rates(self) -> None:
        """The rates that the settings say now, at the place of the cycle that was reached."""
        assert self.optimizer is not None
        for group, asked in zip(self.optimizer.param_groups, self.rates, strict=True):
            factor = asked / group["max_lr"]
            if factor != 1:  # else to the last bit as before
                group |= {name: group[name] * factor for name in ("lr", "initial_lr", "max_lr", "min_lr")}


class Compress(Reading):
    """One pass over all runs: what they say of η's weights."""

    name = "compression"
    feed = Feed(PASS_ROWS, None, None)

    def __init__(self, work: Work) -> None:
        self.work, self.compression = work, Compression(work.model)

    def step(self, batch: Batch, votes: tuple[float, float] = NO_VOTE) -> Outcome:
        for block in _blocks(batch.runs):
            self.compression.take(block)
        return Outcome(None, vote(votes, self.work.device))

    def turn(self) -> bool:
        frame, evidence = self.compression.result()
        self.work.found.frame, self.work.found.log_evidence_runs = frame, float(evidence)
        return True

    def state(self) -> dict[str, Any]:
        return self.compression.state()

    def load(self, state: dict[str, Any]) -> None:
        self.compression.load(state)


class Residuals(Reading):
    """Passes over all runs: where the emulator's residual is large."""

    name = "residual"
    feed = Feed(PASS_ROWS, None, None)

    def __init__(self, work: Work) -> None:
        model = work.model
        assert model.varying is not None
        assert isinstance(model.likelihood_z, Gaussian)
        assert isinstance(model.eta, DeepGP)
        assert work.found.frame is not None
        self.work, self.fit = work, ResidualFit(model.varying, model.eta, model.likelihood_z, work.found.frame)

    def step(self, batch: Batch, votes: tuple[float, float] = NO_VOTE) -> Outcome:
        for block in _blocks(batch.runs):
            self.fit.take(block)
        return Outcome(None, vote(votes, self.work.device))

    def turn(self) -> bool:
        return self.fit.turn()

    def state(self) -> dict[str, Any]:
        return self.fit.state()

    def load(self, state: dict[str, Any]) -> None:
        self.fit.load(state)


class Climbing(Reading):
    """Passes over all rows of a table until every climb has ended; climbs share the passes."""

    def __init__(self, name: str, work: Work, climbs: list[Climb[Any]], finish: Callable[[], None]) -> None:
        self.name, self.work, self.climbs, self.finish = name, work, climbs, finish
        of_runs = name == "settling"
        self.feed = Feed(PASS_ROWS if of_runs else None, None if of_runs else PASS_ROWS, None)

    def step(self, batch: Batch, votes: tuple[float, float] = NO_VOTE) -> Outcome:
        for block in _blocks(batch.runs if batch.observations is None else batch.observations):
            for climb in self.climbs:
                if climb.ended is None:
                    climb.take(block)
        return Outcome(None, vote(votes, self.work.device))

    def turn(self) -> bool:
        for climb in self.climbs:
            if climb.ended is None:
                climb.turn()
        if any(climb.ended is None for climb in self.climbs):
            return False
        self.finish()
        return True

    def state(self) -> dict[str, Any]:
        return {"climbs": [climb.state() for climb in self.climbs]}

    def load(self, state: dict[str, Any]) -> None:
        for climb, saved in zip(self.climbs, state["climbs"], strict=True):
            climb.load(saved)


def _blocks(table: Any) -> Iterator[Any]:
    assert table is not None
    return blocks(table)


def blocks(table: Table, size: int = BLOCK) -> Iterator[Table]:
    """Every row once, in blocks; an empty table is one empty block."""
    for start in range(0, max(len(table.weight), 1), size):
        yield take(table, slice(start, start + size))


def learned_theta(phase: Phase) -> Tensor | None:
    """θ̃ as a phase has it at the moment (d2,), if it looks for it."""
    if isinstance(phase, Climbing) and phase.climbs and phase.climbs[0].q.theta_dim:
        return phase.climbs[0].q.theta_mean
    learned = phase.stage.learned if isinstance(phase, Descent) else None
    point = getattr(learned, "theta_mean", getattr(learned, "theta", None))
    return point.detach() if isinstance(point, Tensor) and point.numel() else None
