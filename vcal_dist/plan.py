"""How training goes: what can be chosen for each stage, and what follows from N, n and M where nothing is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, NamedTuple, get_args

from vcal_dist.errors import ModelError
from vcal_dist.objective import Samples

Family = Literal["collapsed", "fullrank", "meanfield"]
ROWS_PER_WEIGHT, SMALLEST_BATCH = 20, 2048
SAMPLES = Samples(theta=2, hidden=1)


class Totals(NamedTuple):
    """N runs and n observations that training learns from, frozen when it starts."""

    runs: int
    observations: int


class Default(NamedTuple):
    """What a stage does unless told."""

    steps: int
    rate: float


# The stages of the two schedules, in their order (vcal_dist.stages).
COLLAPSED = {"emulator": Default(1000, 0.03), "theta": Default(250, 0.02), "joint": Default(50, 0.002)}
MEANFIELD = {
    "emulator_weights": Default(2000, 0.01),
    "emulator": Default(2000, 0.003),
    "weights_and_theta": Default(2000, 0.01),
    "everything": Default(2000, 0.003),
}


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """One stage: its length in steps or in epochs, Adam's rate, rows of a global batch, Monte Carlo samples.

    Batches of None have twenty rows for each weight that they decide on, and 2048 at least: a batch's evidence
    over-weighs the prior of the weights, and more so the fewer its rows are.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    steps: int | None = None
    epochs: float | None = None
    rate: float | None = None
    batch_runs: int | None = None
    batch_observations: int | None = None
    samples: Samples | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ModelError(f"steps is {self.steps} and epochs is {self.epochs}; give one of them")
        if self.steps is not None and self.steps < 0:
            raise ModelError(f"steps is {self.steps}; accepted: 0 or more")
        if self.epochs is not None and not 0 <= self.epochs < math.inf:
            raise ModelError(f"epochs is {self.epochs}; accepted: 0 or more")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ModelError(f"rate is {self.rate}; accepted: a positive number")
        for name in ("batch_runs", "batch_observations"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ModelError(f"{name} is {value}; accepted: 1 or more")
        if self.samples is not None and min(self.samples) < 1:
            raise ModelError(f"samples is {tuple(self.samples)}; accepted: 1 or more of θ̃ and of hidden layers")


class Chosen(NamedTuple):
    """One stage with everything decided."""

    name: str
    steps: int
    rate: float
    runs: int | None  # rows of a global batch; None: the stage reads none
    observations: int | None
    samples: Samples


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How training goes. Rates are Adam's."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    weights: Family = "collapsed"
    emulator: StageSettings = field(default_factory=StageSettings)
    theta: StageSettings = field(default_factory=StageSettings)
    joint: StageSettings = field(default_factory=StageSettings)
    emulator_weights: StageSettings = field(default_factory=StageSettings)  # this and the next two: meanfield only
    weights_and_theta: StageSettings = field(default_factory=StageSettings)
    everything: StageSettings = field(default_factory=StageSettings)
    discrepancy_rate: float = 0.05  # of the discrepancy and the noise in the stage of θ
    free_emulator: bool = False  # whether η's features move in the joint stage
    rho: float = 0.05  # step size of natural gradients once they have settled
    screening: int = 4096  # points of θ's prior that are scored
    starts: int = 3  # of them that are followed to a mode each
    start: dict[str, float] = field(default_factory=dict)  # θ to begin from, by name; in place of the best point's
    spread: float | None = None  # sd of q(θ̃) there, in the prior's; null: 0.1, and 1, the prior, for meanfield
    evaluations: int = 768  # of the exact posterior of θ̃, which a mixture then follows; fewer for many observations

    def __post_init__(self) -> None:
        if self.weights not in get_args(Family):
            raise ModelError(f"weights is '{self.weights}'; accepted: {', '.join(get_args(Family))}")
        for name in ("screening", "starts"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}; accepted: 1 or more")
        if self.evaluations < 0:
            raise ModelError(f"evaluations is {self.evaluations}; accepted: 0 or more")
        if not all(math.isfinite(value) for value in self.start.values()):
            raise ModelError(f"start is {self.start}; accepted: finite values of θ by name")
        if self.spread is not None and not 0 < self.spread < math.inf:
            raise ModelError(f"spread is {self.spread}; accepted: a positive number")
        if not 0 < self.discrepancy_rate < math.inf:
            raise ModelError(f"discrepancy_rate is {self.discrepancy_rate}; accepted: a positive number")
        if not 0 < self.rho <= 1:
            raise ModelError(f"rho is {self.rho}; accepted: above 0 and up to 1")
        for other in fields(self):
            value = getattr(self, other.name)
            if isinstance(value, StageSettings) and value != StageSettings() and other.name not in self.stages:
                raise ModelError(
                    f"{other.name} is no stage of the weights '{self.weights}'; its stages: {', '.join(self.stages)}"
                )

    @property
    def stages(self) -> dict[str, Default]:
        """The stages of this schedule with their defaults."""
        return MEANFIELD if self.weights == "meanfield" else COLLAPSED

    def choose(
        self, name: str, totals: Totals, width_eta: int, width: int, *, runs: bool, observations: bool
    ) -> Chosen:
        """One stage with everything decided, for a model whose w has so many columns."""
        stage: StageSettings = getattr(self, name)
        default = self.stages[name]
        batch_runs = _batch(stage.batch_runs, totals.runs, width_eta) if runs else None
        batch_observations = _batch(stage.batch_observations, totals.observations, width) if observations else None
        steps = default.steps if stage.steps is None else stage.steps
        if stage.epochs is not None:
            tables = [(totals.runs, batch_runs), (totals.observations, batch_observations)]
            steps = math.ceil(stage.epochs * max(-(-rows // batch) for rows, batch in tables if batch))
        return Chosen(name, steps, stage.rate or default.rate, batch_runs, batch_observations, stage.samples or SAMPLES)


def _batch(chosen: int | None, rows: int, weights: int) -> int:
    """Rows of a global batch."""
    return max(1, min(rows, chosen or max(ROWS_PER_WEIGHT * weights, SMALLEST_BATCH)))
