"""One calibration under way: the model, the settings, rows at hand, and what the phases have found so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vcal_dist.batches import Observations, Runs
from vcal_dist.calibration import CalibrationModel
from vcal_dist.errors import ModelError
from vcal_dist.families import from_state, to_state
from vcal_dist.fullrank import Frame
from vcal_dist.mixture import Adapted, Mixture
from vcal_dist.passes import Closing
from vcal_dist.plan import FitSettings, Totals
from vcal_dist.theta import ThetaPosterior
from vcal_dist.validation import Validation
from vcal_dist.weights import Weights


class Followed(NamedTuple):
    """A start that was followed to a mode, on all observations or, where these are many, on a part of them."""

    theta: Tensor  # θ̃ (d2,) where it ended
    log_evidence: float
    converged: bool
    mode: int  # among those that were kept, the best being 0; −1 where it was too light to be


@dataclass
class Found:
    """What is known so far; the phases fill it in order."""

    frame: Frame | None = None  # what all runs say of η's weights
    log_evidence_runs: float | None = None
    validation: Validation | None = None  # of a stacked emulator
    starts: Tensor | None = None  # (C, d2) θ̃ to begin from, the best first
    q: Weights | None = None  # while there is one
    components: list[Weights] = field(default_factory=list)  # the result, with
    log_weights: Tensor | None = None  # (C,)
    closings: list[Closing] = field(default_factory=list)
    followed: list[Followed] = field(default_factory=list)
    adapted: Adapted | None = None
    unrefined: str = ""  # why no mixture follows the exact posterior, if none does
    integrated: list[str] = field(default_factory=list)  # kinds of hyperparameters that its points move, after θ̃
    counts: dict[str, int] = field(default_factory=lambda: {"damped": 0})

    def state(self) -> dict[str, Any]:
        """Tensors and plain values."""
        return {
            "frame": self.frame,
            "log_evidence_runs": self.log_evidence_runs,
            "validation": self.validation,
            "starts": self.starts,
            "q": None if self.q is None else to_state(self.q),
            "components": [to_state(q) for q in self.components],
            "log_weights": self.log_weights,
            "closings": self.closings,
            "followed": self.followed,
            "adapted": self.adapted,
            "unrefined": self.unrefined,
            "integrated": self.integrated,
            "counts": self.counts,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Found:
        """What `state` said; tuples may have become lists on the way."""
        frame, adapted = state["frame"], state["adapted"]
        for name in ("starts", "log_weights"):
            if not isinstance(state[name], Tensor | None):
                raise ModelError(f"found.{name} is {state[name]!r}; accepted: a tensor")
        if not isinstance(state["log_evidence_runs"], float | None):
            raise ModelError(f"found.log_evidence_runs is {state['log_evidence_runs']!r}; accepted: a number")
        if adapted is not None:
            adapted = Adapted(Mixture(*adapted[0]), *adapted[1:])
        return cls(
            frame=None if frame is None else Frame(*frame),
            log_evidence_runs=state["log_evidence_runs"],
            validation=None if state.get("validation") is None else Validation(*state["validation"]),
            starts=state["starts"],
            q=None if state["q"] is None else from_state(state["q"]),
            components=[from_state(q) for q in state["components"]],
            log_weights=state["log_weights"],
            closings=[Closing(*closing) for closing in state["closings"]],
            followed=[Followed(*followed) for followed in state.get("followed", [])],
            adapted=adapted,
            unrefined=state["unrefined"],
            integrated=list(state.get("integrated", [])),
            counts=dict(state["counts"]),
        )


@dataclass
class Work:
    """What the phases work on.

    `observations` are rows that every process holds, the same ones: all of them if they are few, or an even sample.
    """

    model: CalibrationModel
    settings: FitSettings
    totals: Totals
    seed: int
    observations: Observations | None
    runs: Runs | None = None  # rows of runs that every process holds, for an emulator of few runs
    run: Tensor | None = None  # (B,) which run each of these belongs to; None: those with the same t are one
    complete: bool = True  # whether the observations at hand are all there are
    patient: bool = False  # whether the refinement may take its time
    found: Found = field(default_factory=Found)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.kappa.device


@dataclass
class Fitted:
    """A calibrated model: q(θ̃, w), or several with weights where the posterior has several modes."""

    model: CalibrationModel
    components: list[Weights]
    log_weights: Tensor  # (C,) normalised
    closings: list[Closing] = field(default_factory=list)  # of Gauss–Newton, before a mixture took its place
    log_evidence_runs: float | None = None
    counts: dict[str, int] = field(default_factory=dict)
    adapted: Adapted | None = None  # the importance sample behind a mixture
    unrefined: str = ""  # why no mixture follows the exact posterior, if none does
    integrated: list[str] = field(default_factory=list)  # kinds of hyperparameters that its points move, after θ̃
    followed: list[Followed] = field(default_factory=list)
    validation: Validation | None = None  # of a stacked emulator

    @classmethod
    def from_work(cls, work: Work) -> Fitted:
        """What was found, once all phases are done."""
        found = work.found
        assert found.log_weights is not None
        return cls(
            work.model,
            found.components,
            found.log_weights,
            found.closings,
            found.log_evidence_runs,
            found.counts,
            found.adapted,
            found.unrefined,
            found.integrated,
            found.followed,
            found.validation,
        )

    def cpu(self) -> Fitted:
        """The same, moved to the host."""
        for module in (self.model, *self.components):
            assert isinstance(module, nn.Module)
            module.cpu()
        self.log_weights = self.log_weights.cpu()
        return self

    @property
    def bound(self) -> float | None:
        """The log evidence of all runs and observations, or its bound, with hyperparameters as points; by all modes.

        It compares settings on the same rows. Without closing passes (`meanfield`) there is none.
        """
        if self.log_evidence_runs is None or not self.closings:
            return None
        of_modes = torch.tensor([closing.log_evidence for closing in self.closings], dtype=torch.float64)
        return self.log_evidence_runs + float(torch.logsumexp(of_modes, 0)) - float(self.model.kl().detach())

    @property
    def q(self) -> Weights:
        """The component of most weight."""
        return self.components[int(self.log_weights.argmax())]

    @property
    def theta(self) -> ThetaPosterior:
        """The posterior of θ in the user's units."""
        return ThetaPosterior.of(self.model.prior, self.components, self.log_weights)
