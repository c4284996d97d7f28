"""Importance sampling of θ̃, δ's amplitude and σ_y where rows are many; δ's length scales are taken as known.

Where observations compress (`vcal_dist.observation_sums`), one pass over them gives the exact density at every point.
Elsewhere all points of a round share a pass and a Gram matrix (`vcal_dist.frozen`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vcal_dist.collective import vote
from vcal_dist.components import (
    beside,
    carries,
    centre_of,
    most_probable,
    pin_components,
    started,
    started_mixture,
)
from vcal_dist.frozen import Frozen, Shared
from vcal_dist.fullrank import Frame
from vcal_dist.mixture import Adaptation, Adapted, Mixture, marginal
from vcal_dist.nature import Nature
from vcal_dist.observation_sums import ObservationSums, why_not
from vcal_dist.phases import NO_VOTE, PASS_ROWS, Batch, Feed, Outcome, Reading, blocks
from vcal_dist.pinning import Pin
from vcal_dist.work import Work

NEWTON_STEPS, SMALL = 12, 0.005  # SMALL: of ζ, for differences


class Refining(Reading):
    """One pass over all observations, or one for each round of importance sampling; then the components' weights."""

    name = "refinement"
    feed = Feed(None, PASS_ROWS, None)
    fixed_form = False  # rounds have different numbers of points

    def __init__(self, work: Work, evaluations: int, nature: Nature) -> None:
        self.work, self.evaluations = work, evaluations
        self.nature = nature
        self.adaptation: Adaptation | None = None
        self.pins: list[Pin] = []
        self.density: ObservationSums | Frozen | None  # what takes rows, until the components do
        if compresses(work):
            self.density = ObservationSums(work.model, self._frame, centre_of(work), nature)
        elif self.nature.dim:  # a first pass tells ζ where the mode is
            self.density = self._pass(torch.cat([centre_of(work), self.nature.read().detach()])[None])
        else:
            self._begin(started_mixture(work))
            self.density = self._round()

    @property
    def _frame(self) -> Frame:
        frame = self.work.found.frame
        assert frame is not None
        return frame

    def _begin(self, start: Mixture) -> None:
        self.adaptation = Adaptation(start, evaluations=self.evaluations, seed=self.work.seed)

    def _round(self, shared: Shared | None = None) -> Frozen:
        assert self.adaptation is not None
        return self._pass(self.adaptation.propose(), shared)

    def _pass(self, points: Tensor, shared: Shared | None = None) -> Frozen:
        return Frozen(self.work.model, self._frame, centre_of(self.work), points, self.nature, shared)

    def _with_nature(self, first: ObservationSums | Frozen) -> Mixture:
        """q(θ̃) of the closing, and beside it ζ given θ̃ at the mode, for which no more rows are needed."""

        def density(zeta: Tensor) -> Tensor:
            return first.log_density(torch.cat([first.centre.expand(len(zeta), -1), zeta], 1))

        return beside(started_mixture(self.work), *_laplace(density, self.nature.read().detach()))

    def step(self, batch: Batch, votes: tuple[float, float] = NO_VOTE) -> Outcome:
        assert batch.observations is not None
        for block in blocks(batch.observations):
            for taker in self.pins if self.density is None else [self.density]:
                taker.take(block)
        return Outcome(None, vote(votes, self.work.device))

    def turn(self) -> bool:
        found, density = self.work.found, self.density
        if density is None:
            turned = [pinned.turn() for pinned in self.pins]  # all of them
            if not all(turned):
                return False
            assert found.adapted is not None
            found.components = [pinned.q for pinned in self.pins]
            found.log_weights = self._mixture(found.adapted).log_weights
            return True
        if isinstance(density, ObservationSums):
            self._begin(self._with_nature(density) if self.nature.dim else started_mixture(self.work))
            assert self.adaptation is not None
            while not self.adaptation.done:
                points = self.adaptation.propose()
                self.adaptation.take(points, density.log_density(points))
            return self._adapted(self.adaptation)
        if self.adaptation is None:
            density.log_density()  # which finds what all passes share
            self._begin(self._with_nature(density))
            self.density = self._round(density.shared)
            return False
        self.adaptation.take(density.points, density.log_density())
        if not self.adaptation.done:
            self.density = self._round(density.shared)
            return False
        return self._adapted(self.adaptation)

    def _adapted(self, adaptation: Adaptation) -> bool:
        """What follows the last round; whether the phase is over."""
        found = self.work.found
        self.density, found.adapted, found.integrated = None, adaptation.result(), self.nature.kinds
        if not carries(self.work, found.adapted):
            return True
        if self.work.complete:
            pin_components(self.work, found.adapted, self.nature)
            return True
        if self.nature.dim:
            self.nature.put(most_probable(found.adapted, self.work.model.prior.dim))
        self.pins = self._pins(found.adapted)
        return False

    def _pins(self, adapted: Adapted) -> list[Pin]:
        mixture, model, key = self._mixture(adapted), self.work.model, (self.work.seed, 5)
        return [
            Pin(model, started(self.work, mean), mean, covariance, key)
            for mean, covariance in zip(mixture.means, mixture.covariances, strict=True)
        ]

    def _mixture(self, adapted: Adapted) -> Mixture:
        return marginal(adapted, self.work.model.prior.dim) if self.nature.dim else adapted.mixture

    def state(self) -> dict[str, Any]:
        return {
            "start": None if self.adaptation is None else self.adaptation.start,
            "adaptation": None if self.adaptation is None else self.adaptation.state(),
            "density": None if self.density is None else self.density.state(),
            "pins": [pinned.state() for pinned in self.pins],
        }

    def load(self, state: dict[str, Any]) -> None:
        if state["adaptation"] is not None:
            self._begin(Mixture(*state["start"]))
            assert self.adaptation is not None
            self.adaptation.load(state["adaptation"])
        if state["density"] is not None:
            if not isinstance(self.density, ObservationSums) and self.adaptation is not None:
                self.density = self._round()
            assert self.density is not None
            self.density.load(state["density"])
            return
        assert self.adaptation is not None
        self.density, self.pins = None, self._pins(self.adaptation.result())
        for pinned, saved in zip(self.pins, state["pins"], strict=True):
            pinned.load(saved)


def compresses(work: Work) -> bool:
    """Whether one pass over the observations is enough."""
    assert work.observations is not None
    return not why_not(work.model, noise=work.observations.noise is not None)


def _laplace(density: Callable[[Tensor], Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of a Gaussian at the mode, by Newton steps with differences of values; prior's N(0, I)."""
    here, d = start, len(start)
    identity = torch.eye(d, dtype=start.dtype, device=start.device)
    covariance = identity
    pairs = [(i, j) for i in range(d) for j in range(i)]
    for _ in range(NEWTON_STEPS):
        moves = [0 * here, *identity, *(-identity), *(identity[i] + identity[j] for i, j in pairs)]
        value = density(here + SMALL * torch.stack(moves))
        if not bool(value.isfinite().all()):
            break
        middle, up, down, both = value[0], value[1 : d + 1], value[d + 1 : 2 * d + 1], value[2 * d + 1 :]
        H = torch.diag(2 * middle - up - down) / SMALL**2
        for (i, j), found in zip(pairs, both, strict=True):
            H[i, j] = H[j, i] = (up[i] + up[j] - middle - found) / SMALL**2
        values, vectors = torch.linalg.eigh(H)
        covariance = (vectors / values.clamp_min(1.0)) @ vectors.mT  # never wider than the prior
        newton = covariance @ ((up - down) / (2 * SMALL))
        length = float((newton @ torch.linalg.solve(covariance, newton)).sqrt())  # in standard deviations
        here = here + newton / max(1.0, float(newton.norm()))
        if length < 0.1:
            break
    return here, covariance
