"""Passes over all rows, each once: the runs' compression, and the closing Gauss–Newton iterations.

Both are natural-gradient steps of size one. `Compression` and `Climb` take blocks of rows one by one, sum float64
statistics over blocks and processes, and hold nothing that grows with the rows; their state, in the middle of a pass
too, is a few matrices. `compress`, `settle` and `close` run them over blocks that are at hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor

from vcal_dist import gaussian
from vcal_dist.batches import Observations, Runs, Table
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collapsed import Gram, log_evidence, posterior
from vcal_dist.collective import carried, plus, sum_over_ranks
from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Arrow, Frame, FullRank
from vcal_dist.gp import Draw
from vcal_dist.natural import Statistics, flatten, natural_step, runs_statistics, statistics_of, summed_statistics
from vcal_dist.objective import Key, Samples, runs_gram

HIDDEN_SAMPLES = 8  # of hidden layers in a pass
PATIENCE = 5  # steps that hold before a longer one is tried again
SETTLED = 1e-6  # nats
SMALLEST_STEP = 1 / 64  # of Gauss–Newton: below, no step raises the bound


class Compressed(NamedTuple):
    """The runs as what they say of η's weights, N(m, RRᵀ), and the log of their evidence."""

    frame: Frame
    log_evidence: Tensor  # with hidden layers, its lower bound but for their KL


class Closing(NamedTuple):
    """How the closing iterations ended."""

    log_evidence: float  # of y near this mode: Laplace's in θ̃, a bound (exact for Gaussian noise) in w; or of z
    iterations: int
    damped: int
    converged: bool


class Compression:
    """p(W_η | all runs), exactly, from one pass under Gaussian noise.

    Hidden layers enter by the mean over samples: the result is then the best q(W_η) given q of the hidden layers.
    """

    def __init__(self, model: CalibrationModel, key: Key = (0,)) -> None:
        self.model, self.draw = model, Draw(key, HIDDEN_SAMPLES)
        self.sums: list[Tensor] | None = None  # a Gram's, and the Jacobian of the outputs' scaling

    @torch.no_grad()
    def take(self, runs: Runs) -> None:
        """Adds a block."""
        jacobian = (runs.log_jacobian.sum(-1) * runs.weight).sum()
        self.sums = plus(self.sums, [*runs_gram(self.model, runs, self.draw), jacobian])

    @torch.no_grad()
    def result(self) -> Compressed:
        """What all blocks of all processes say."""
        if self.sums is None:
            raise ModelError("there are no runs to compress; the emulator needs at least one")
        *parts, jacobian = sum_over_ranks(self.sums, symmetric=1)
        total = Gram(*parts)
        return Compressed(Frame(*posterior(total)), log_evidence(total).sum() + jacobian)

    def state(self) -> dict[str, Any]:
        """The sums so far, over all processes; every one of them must ask."""
        return {"sums": None if self.sums is None else sum_over_ranks(self.sums)}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state; the first process carries the sums on."""
        self.sums = carried(state["sums"])


def compress(model: CalibrationModel, blocks: Iterable[Runs], *, key: Key = (0,)) -> Compressed:
    """`Compression` of blocks that are at hand."""
    compression = Compression(model, key)
    for block in blocks:
        compression.take(block)
    return compression.result()


def settle(
    model: CalibrationModel, q: FullRank, blocks: Callable[[], Iterable[Runs]], *, iterations: int = 30
) -> Closing:
    """q(W_η) for any likelihood of runs: natural-gradient steps of size one over all runs until they stand still."""
    return run(settling(model, q, iterations=iterations), blocks)


def settling(model: CalibrationModel, q: FullRank, *, iterations: int = 30) -> Climb[Runs]:
    """The climb of `settle`."""
    samples = Samples(1, HIDDEN_SAMPLES)

    def statistics(runs: Runs) -> Statistics:
        with torch.no_grad():
            return runs_statistics(model, q, runs, samples=samples)

    def bound(found: Statistics) -> float:
        return float(found.log_likelihood - q.kl())

    return Climb(model, q, statistics, bound, iterations=iterations, tolerance=SETTLED, relax=False)


def close(
    model: CalibrationModel,
    q: FullRank,
    blocks: Callable[[], Iterable[Observations]],
    *,
    iterations: int = 30,
    tolerance: float = 1e-3,
    key: Key = (0,),
) -> Closing:
    """q(θ̃, w) given all observations and, through q's frame, all runs: Gauss–Newton, f linearised at the mean of θ̃.

    An iteration has two passes. The first finds w at θ̃ as it is, exactly where the noise is Gaussian and f linear in
    w; the second moves θ̃ and w together. So it climbs log p(y, θ̃) with w integrated out. The posterior is exact where
    f is linear in θ̃. (Steps on the ELBO itself, with θ̃ spread out, end in a θ̃ that is too narrow where f is curved:
    weights that are linear in θ̃ cannot follow.)
    """
    return run(closing(model, q, iterations=iterations, tolerance=tolerance, key=key), blocks)


def closing(
    model: CalibrationModel, q: FullRank, *, iterations: int = 30, tolerance: float = 1e-3, key: Key = (0,)
) -> Climb[Observations]:
    """The climb of `close`."""
    hidden = HIDDEN_SAMPLES if model.random or model.kind == "general" else 1

    def statistics(block: Observations) -> Statistics:
        return gaussian.statistics(model, q, block, theta=q.theta_mean.expand(hidden, -1), key=key, learn=False)

    def log_joint(found: Statistics) -> float:
        return float(found.log_likelihood - q.kl_weights() - 0.5 * q.theta_mean.square().sum())

    return Climb(model, q, statistics, log_joint, iterations=iterations, tolerance=tolerance, relax=True)


def run(climb: Climb[Table], blocks: Callable[[], Iterable[Table]]) -> Closing:
    """Passes over blocks that are at hand until the climb has ended."""
    while climb.ended is None:
        for block in blocks():
            climb.take(block)
        climb.turn()
    return climb.ended


class Climb(Generic[Table]):
    """Steps of size one until the height stands still; with `relax`, the weights are found anew before each is judged.

    A step that lowers it by more than the tolerance (nats, and what the features' precision leaves uncertain of the
    value) is taken back and halved. Converged: a step promised less than the tolerance, and moved it by less.
    """

    def __init__(
        self,
        model: CalibrationModel,
        q: FullRank,
        statistics: Callable[[Table], Statistics],
        height: Callable[[Statistics], float],
        *,
        iterations: int,
        tolerance: float,
        relax: bool,
    ) -> None:
        self.model = model
        self.q = q
        self.statistics: Callable[[Table], Statistics] = statistics
        self.height = height
        self.iterations, self.tolerance, self.relax = iterations, tolerance, relax
        self.sums: list[Tensor] | None = None
        self.relaxing = relax
        self.kept: tuple[list[Tensor], list[Tensor]] | None = None  # q's mean and precision, and what rows said there
        self.best, self.rho, self.decrement = -math.inf, 1.0, math.inf
        self.iteration, self.damped, self.held = 0, 0, 0
        self.ended: Closing | None = None

    def take(self, block: Table) -> None:
        """Adds a block of the pass under way."""
        self.sums = plus(self.sums, flatten(self.statistics(block)))

    def turn(self) -> None:
        """Ends a pass over all rows: moves q, or finds that nothing is left to do."""
        found, self.sums = summed_statistics(self.sums), None
        if self.relaxing:
            self.damped += natural_step(self.q, found, 1.0, hold_theta=True).damped
        else:
            self._judge(found)
        self.relaxing = self.relax and not self.relaxing

    def _judge(self, found: Statistics) -> None:
        now = self.height(found)
        self.iteration += 1
        if self.kept is None and not math.isfinite(now):
            raise ModelError(
                f"the bound is {now} at the start of a pass over all rows; check the outputs for outliers, "
                "or lower the learning rates"
            )
        slack = self.tolerance + torch.finfo(self.model.dtype).eps * abs(now)
        if self.kept is not None and not now > self.best - slack:
            self.rho, self.damped, self.held = self.rho / 2, self.damped + 1, 0
            self._back()
            if self.rho < SMALLEST_STEP:
                return self._end(converged=False)
        else:
            converged = abs(now - self.best) < slack and self.decrement < slack
            # Where f is curved, steps of the same length may lead from one side of the top to the other and back.
            beyond = self.kept is not None and now - self.best < slack < self.decrement
            self.best, self.held = now, self.held + 1
            self.kept = self._here(), flatten(found)
            if converged:
                return self._end(converged=True)
            if beyond and self.rho > SMALLEST_STEP:
                self.rho, self.held = self.rho / 2, 0
            elif self.held % PATIENCE == 0:  # sooner, every other step would be taken back where f is curved
                self.rho = min(1.0, 2 * self.rho)
        if self.iteration == self.iterations:  # another step would never be judged
            return self._end(converged=False)
        assert self.kept is not None
        step = natural_step(self.q, statistics_of(self.kept[1]), self.rho)
        self.decrement, self.damped = step.decrement, self.damped + step.damped
        return None

    def _here(self) -> list[Tensor]:
        return [self.q.theta_mean, self.q.mean, *self.q.precision]

    def _back(self) -> None:
        assert self.kept is not None
        theta_mean, mean, *precision = self.kept[0]
        self.q.move(theta_mean, mean, Arrow(*precision))

    def _end(self, *, converged: bool) -> None:
        value = _laplace(self.best, self.q) if self.q.theta_dim else self.best
        self.ended = Closing(value, self.iteration, self.damped, converged)

    _PLAIN = ("relaxing", "best", "rho", "decrement", "iteration", "damped", "held")

    def state(self) -> dict[str, Any]:
        """Where the climb is, in the middle of a pass too; every process must ask."""
        return {
            **{name: getattr(self, name) for name in self._PLAIN},
            "q": self.q.state_dict(),
            "kept": self.kept,
            "sums": None if self.sums is None else sum_over_ranks(self.sums),
            "ended": self.ended,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state; the first process carries the sums on."""
        for name in self._PLAIN:
            setattr(self, name, state[name])
        self.q.load_state_dict(state["q"])
        self.kept = None if state["kept"] is None else (list(state["kept"][0]), list(state["kept"][1]))
        self.sums = carried(state["sums"])
        self.ended = None if state["ended"] is None else Closing(*state["ended"])


def _laplace(log_joint: float, q: FullRank) -> float:
    """log ∫ p(y, θ̃) dθ̃ around the mean: p(y, θ̃ = μ) but for (2π)^(−d2/2), times √|Σ_θθ|."""
    return log_joint + float(torch.linalg.slogdet(q.theta_root).logabsdet)
