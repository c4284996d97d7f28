"""Components with a given marginal of θ̃: weights from all observations, linearised in θ̃; how far that is off."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vcal_dist import gaussian
from vcal_dist.batches import Observations
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collective import carried, plus, sum_over_ranks
from vcal_dist.fullrank import Frame, FullRank
from vcal_dist.gp import Draw
from vcal_dist.natural import flatten, natural_step, summed_statistics
from vcal_dist.objective import Key
from vcal_dist.passes import HIDDEN_SAMPLES


class Pin:
    """Gives q the marginal N(theta, covariance) of θ̃, and w given θ̃ from the observations, linearised at its mean.

    Two passes: the slopes in θ̃ belong to the weights that the first one finds.
    """

    def __init__(
        self, model: CalibrationModel, q: FullRank, theta: Tensor, covariance: Tensor, key: Key = (0,)
    ) -> None:
        self.model, self.q, self.covariance, self.key = model, q, covariance, key
        q.move(theta.clone(), q.mean, q.precision)
        self.passes = 0
        self.sums: list[Tensor] | None = None

    def take(self, block: Observations) -> None:
        """Adds a block of the pass under way."""
        copies = self.q.theta_mean.expand(HIDDEN_SAMPLES if self.model.random else 1, -1)
        found = gaussian.statistics(self.model, self.q, block, theta=copies, key=self.key, learn=False)
        self.sums = plus(self.sums, flatten(found))

    def turn(self) -> bool:
        """Ends a pass; whether it was the last."""
        q = self.q
        natural_step(q, summed_statistics(self.sums), 1.0, hold_theta=True)
        self.sums, self.passes = None, self.passes + 1
        if self.passes < 2:
            return False
        A = torch.linalg.inv(self.covariance) + (q.precision.cross @ q.factors.gain).sum(0)
        q.move(q.theta_mean, q.mean, q.precision._replace(theta=0.5 * (A + A.mT)))
        return True

    def state(self) -> dict[str, Any]:
        """Where it is, in the middle of a pass too; every process must ask."""
        sums = None if self.sums is None else sum_over_ranks(self.sums)
        return {"q": self.q.state_dict(), "covariance": self.covariance, "passes": self.passes, "sums": sums}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state; the first process carries the sums on."""
        self.q.load_state_dict(state["q"])
        self.covariance, self.passes, self.sums = state["covariance"], state["passes"], carried(state["sums"])


def pin(
    model: CalibrationModel,
    q: FullRank,
    blocks: Callable[[], Iterable[Observations]],
    theta: Tensor,
    covariance: Tensor,
    *,
    key: Key = (0,),
) -> None:
    """`Pin` with blocks that are at hand."""
    pinning, done = Pin(model, q, theta, covariance, key), False
    while not done:
        for block in blocks():
            pinning.take(block)
        done = pinning.turn()


@torch.no_grad()
def curvature(
    model: CalibrationModel,
    q: FullRank,
    blocks: Callable[[], Iterable[Observations]],
    theta: Tensor,
    *,
    key: Key = (0,),
) -> float:
    """How far f at points θ̃ (P, d2) is from what q says of it there, as weights that are linear in θ̃ cannot follow.

    The mean square over points and rows, in standard deviations of f given θ̃: small beside one where q(f) is right.
    """
    hidden = HIDDEN_SAMPLES if model.random else 1
    exact = FullRank(q.theta_dim, q.outputs, q.width, frame=Frame(q.frame_mean, q.frame_root), absorbed=q.absorbed)
    exact.move(q.theta_mean, q.mean, q.precision)
    total = torch.zeros(2, dtype=torch.float64, device=theta.device)
    for point in theta:
        pin(model, exact, blocks, point, torch.eye(len(point)).to(point), key=key)
        copies = point.expand(hidden, -1)
        for block in blocks():
            unit, draw = model.rows_of_theta(copies, len(block.x)), Draw(key, hidden, block.row)
            at, linear = (model.predict(each, block.x, copies, unit, draw) for each in (exact, q))
            away = (linear.mean.mean(0) - at.mean.mean(0)).square() / at.var.mean(0)  # (B, K)
            counted = (block.weight.unsqueeze(-1) * ~block.y.isnan()).double()
            total += torch.stack([(away * counted).sum(), counted.sum()])
    squares, values = sum_over_ranks([total])[0].tolist()
    return squares / max(values, 1.0)
