"""The last phase: q(θ̃) as a mixture that follows the exact posterior of θ̃, all weights integrated out.

A joint Gaussian has weights that are linear in θ̃ with one covariance everywhere; where θ̃ is uncertain and η curved,
that makes its θ̃ too narrow, and no Gaussian is skewed or ends at a bound. Importance sampling (`vcal_dist.mixture`)
sees the posterior as it is. Its points are

- of θ̃ and nature's hyperparameters ζ together, each with a Gram matrix of its own, where the rows are few: θ̃ is then
  as uncertain as not knowing ζ makes it;
- of θ̃, δ's amplitude and σ_y where rows are many, all points of a round in one pass (`vcal_dist.frozen`); δ's length
  scales are then taken as known.

Then w is Gaussian given θ̃, around each component of the mixture; where f curves within one, narrower ones take its
place, without which f at the observations would be too uncertain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from vcal_dist.batches import Observations, take
from vcal_dist.collective import rank, vote, world_size
from vcal_dist.errors import ModelError
from vcal_dist.frozen import Frozen, Shared
from vcal_dist.fullrank import FullRank
from vcal_dist.mixture import FEWEST_PIECES, Adaptation, Adapted, Mixture, adapt, divided, marginal
from vcal_dist.nature import AMPLITUDE, KINDS, NOISE, Nature
from vcal_dist.passes import (
    HIDDEN_SAMPLES,
    Pin,
    close,
    collapsed_log_density,
    curvature,
    is_conjugate,
    nature_moments,
    pin,
)
from vcal_dist.phases import (
    BLOCK,
    NO_VOTE,
    PASS_ROWS,
    Batch,
    Feed,
    Instant,
    LinAlgError,
    Outcome,
    Phase,
    Reading,
    blocks,
)
from vcal_dist.work import Work

ROWS_EXACT = 2_000_000  # over all points, and samples of hidden layers, that have a Gram matrix each
PATIENT = 20  # times as many where time does not matter
ROWS_FROZEN = 25_000_000  # over all points that share one
CANDIDATES, OTHERS, FAR_APART = 64, 2, 1.5  # values of ζ that are tried, how many of them are followed, how far apart
CLOSING_STEPS, NEWTON_STEPS, SMALL = 8, 12, 0.005  # SMALL: of ζ, for differences
LIGHT = 10.0  # nats below the best mode, where another does not matter
NARROW = 0.1  # sd of θ̃ at a start: the mode there, no other
CORNERS = 1.5  # standard deviations of θ̃ from a component's mean, where it is seen how f curves
CURVED, PIECES = 0.1, 32  # mean square of f's error there, in its variance, above which components become so many ...
ROWS_OF_PIECES = 100_000  # ... or as many as this leaves time for
Blocks = Callable[[], Iterator[Observations]]


def refinement(work: Work) -> Phase:
    """The phase, in the way that the rows allow."""
    evaluations, nature = exact_points(work)
    if evaluations and work.complete:
        return Instant("refinement", lambda: _refine_exactly(work, nature, evaluations))
    many = frozen_points(work)
    if many:
        return Refining(work, many)

    def leave() -> None:
        work.found.unrefined = why_not(work)

    return Instant("refinement", leave)


def needed(dim: int) -> int:
    """Points that a posterior of so many dimensions takes."""
    return 32 * (dim + 1)


def exact_points(work: Work) -> tuple[int, Nature | None]:
    """How many points have a Gram matrix of their own, and what of nature they move; none where rows are too many."""
    if impossible(work):
        return 0, None
    model, samples = work.model, HIDDEN_SAMPLES if work.model.random else 1
    count = _at_most(work, (PATIENT if work.patient else 1) * ROWS_EXACT // samples)
    whole = Nature(model, () if model.random else KINDS)
    nature = _as_much_as(work, count, KINDS, (AMPLITUDE, NOISE), (AMPLITUDE,)) if whole.dim else whole
    if nature.dim < whole.dim and (frozen_points(work) > count or not work.complete):  # more points in less time
        return 0, None
    return (count, nature if nature.dim else None) if count >= needed(model.prior.dim) else (0, None)


def _as_much_as(work: Work, points: int, *choices: tuple[str, ...]) -> Nature:
    """The first choice of nature's hyperparameters for which there are points enough; or none of them."""
    for kinds in choices:
        nature = Nature(work.model, kinds)
        if nature.dim and points >= needed(work.model.prior.dim + nature.dim):
            return nature
    return Nature(work.model, ())


def frozen_points(work: Work) -> int:
    """How many points can share a Gram matrix; none where even these would be too few."""
    if impossible(work) or work.model.random:
        return 0
    count = work.settings.evaluations if work.patient else _at_most(work, ROWS_FROZEN)
    return count if count >= needed(work.model.prior.dim) else 0


def _at_most(work: Work, rows: int) -> int:
    """Points that were asked for, or that so many rows over all points allow."""
    return min(work.settings.evaluations, rows // max(work.totals.observations, 1))


def impossible(work: Work) -> str:
    """What about the model or the settings keeps a mixture from following the exact posterior, if anything does."""
    model, settings, least = work.model, work.settings, needed(work.model.prior.dim)
    if settings.weights != "collapsed":
        return f"weights are '{settings.weights}'"
    if model.kind == "general":
        return "under a general discrepancy the weights do not integrate out"
    if not is_conjugate(model):
        return "where the noise is not Gaussian the weights do not integrate out"
    if settings.evaluations < least:
        return f"fit.evaluations is {settings.evaluations}, and {least} are needed"
    return ""


def why_not(work: Work) -> str:
    """Why no mixture follows the exact posterior."""
    return impossible(work) or f"{work.totals.observations:,} observations would make that slow"


# --- a Gram matrix a point --------------------------------------------------------------------------------------------


def _refine_exactly(work: Work, nature: Nature | None, evaluations: int) -> None:
    """Points of θ̃, and of ζ with it."""
    found, model = work.found, work.model
    assert work.observations is not None
    assert found.frame is not None
    frame, rows, start = found.frame, share(work.observations), _started_mixture(work)

    def density(points: Tensor) -> Tensor:
        # Points come one by one where hidden layers are random or ζ moves, together where not.
        alone = PASS_ROWS if nature is not None else max(PASS_ROWS // len(points), 1)
        size = BLOCK // 4 if model.random else alone
        return collapsed_log_density(model, frame, lambda: blocks(rows, size), points, nature, key=(work.seed, 5))

    if nature is not None:
        start = _joint_modes(work, nature, density, lambda: blocks(rows))
    found.adapted = adapt(density, start, evaluations=evaluations, seed=work.seed)
    found.integrated = [] if nature is None else nature.kinds
    if _carries(work, found.adapted):
        _settle(work, found.adapted, nature)


def _joint_modes(work: Work, nature: Nature, density: Callable[[Tensor], Tensor], rows: Blocks) -> Mixture:
    """Laplace's Gaussians at the modes of θ̃ and ζ together, from where training ended and from elsewhere in ζ.

    Few rows have several explanations in ζ, such as much noise and a small smooth discrepancy, or little noise and a
    large rough one, and training finds the one that it starts near; θ̃ is known differently well in each.
    """
    frame = work.found.frame
    assert frame is not None
    modes: list[tuple[float, Tensor, Tensor]] = []  # Laplace's log evidence, mean and covariance
    with nature.kept():
        for start in _joint_starts(work, nature, density):
            point, covariance, d2 = start, start, work.model.prior.dim
            try:
                for _ in range(2):  # each knows the other better the second time
                    nature.put(point[d2:])
                    q = started(work, point[:d2])
                    close(work.model, q, rows, iterations=CLOSING_STEPS, tolerance=0.1, key=(work.seed, 5))
                    theta, of_theta = q.theta_moments()
                    zeta, of_zeta = nature_moments(work.model, frame, rows, theta, nature)
                    point, covariance = torch.cat([theta, zeta]), torch.block_diag(of_theta, of_zeta)
                height = float(density(point[None])) + 0.5 * float(torch.linalg.slogdet(covariance).logabsdet)
            except (ModelError, LinAlgError):  # of values that no rows could have
                continue
            if math.isfinite(height) and all(_apart(point, mean, both) for _, mean, both in modes):
                modes.append((height, point, covariance))
    if not modes:
        here = nature.read().detach()
        return _beside(_started_mixture(work), here, torch.eye(len(here), dtype=here.dtype, device=here.device))
    highest = max(height for height, _, _ in modes)
    kept = [mode for mode in modes if mode[0] > highest - LIGHT]
    heights = torch.tensor([height for height, _, _ in kept], dtype=torch.float64)
    return Mixture(
        torch.stack([mean for _, mean, _ in kept]),
        torch.stack([covariance for _, _, covariance in kept]),
        heights.log_softmax(0).to(kept[0][1]),
    )


def _joint_starts(work: Work, nature: Nature, density: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """(θ̃, ζ) to begin from: each mode of θ̃ as training left ζ, then the best of a design on ζ's prior beside them."""
    assert work.found.log_weights is not None
    thetas = torch.stack([q.theta_moments()[0].detach().double() for q in work.found.components])
    here = nature.read().detach()
    yield from torch.cat([thetas, here.expand(len(thetas), -1)], 1)
    uniform = SobolEngine(nature.dim, scramble=True, seed=work.seed).draw(CANDIDATES, dtype=torch.float64)
    design = torch.special.ndtri(uniform.clamp(1e-4, 1 - 1e-4)).to(thetas.device)
    theta = _centre(work)
    value = density(torch.cat([theta.expand(len(design), -1), design], 1))
    chosen = [here]
    for zeta in design[value.nan_to_num(-torch.inf).argsort(descending=True)]:
        if len(chosen) > OTHERS:
            return
        if all(float((zeta - other).norm()) > FAR_APART for other in chosen):
            chosen.append(zeta)
            yield torch.cat([theta, zeta])


def _apart(point: Tensor, mean: Tensor, covariance: Tensor) -> bool:
    away = point - mean
    return float(away @ torch.linalg.solve(covariance, away)) > 1.0


def _beside(mixture: Mixture, mean: Tensor, covariance: Tensor) -> Mixture:
    """A mixture with more coordinates, independent of it and Gaussian."""
    C, d, more = len(mixture.means), mixture.means.shape[-1], len(mean)
    both = mixture.covariances.new_zeros(C, d + more, d + more)
    both[:, :d, :d], both[:, d:, d:] = mixture.covariances, covariance
    return Mixture(torch.cat([mixture.means, mean.expand(C, -1)], -1), both, mixture.log_weights)


# --- one for all points -----------------------------------------------------------------------------------------------


class Refining(Reading):
    """Rounds of importance sampling, a pass over all observations each; then the weights around each component."""

    name = "refinement"
    feed = Feed(None, PASS_ROWS, None)

    def __init__(self, work: Work, evaluations: int) -> None:
        self.work, self.evaluations = work, evaluations
        self.nature = _scaling_nature(work)
        self.adaptation: Adaptation | None = None
        self.pins: list[Pin] = []
        if self.nature.dim:  # a first pass tells ζ where the mode is
            self.frozen: Frozen | None = self._pass(torch.cat([_centre(work), self.nature.read().detach()])[None])
        else:
            self._begin(_started_mixture(work))

    def _begin(self, start: Mixture) -> None:
        self.adaptation = Adaptation(start, evaluations=self.evaluations, seed=self.work.seed)
        self.frozen = self._pass(self.adaptation.propose())

    def _pass(self, points: Tensor, shared: Shared | None = None) -> Frozen:
        frame = self.work.found.frame
        assert frame is not None
        return Frozen(self.work.model, frame, _centre(self.work), points, self.nature, shared)

    def _with_nature(self, first: Frozen) -> Mixture:
        """q(θ̃) of the closing, and beside it ζ given θ̃ at the mode, for which no more rows are needed."""

        def density(zeta: Tensor) -> Tensor:
            return first.log_density(torch.cat([first.centre.expand(len(zeta), -1), zeta], 1))

        here = first.points[0, self.work.model.prior.dim :]
        return _beside(_started_mixture(self.work), *_laplace(density, here))

    def step(self, batch: Batch, votes: tuple[float, float] = NO_VOTE) -> Outcome:
        assert batch.observations is not None
        for block in blocks(batch.observations):
            for taker in self.pins if self.frozen is None else [self.frozen]:
                taker.take(block)
        return Outcome(None, vote(votes, self.work.device))

    def turn(self) -> bool:
        found = self.work.found
        if self.frozen is None:
            turned = [pinned.turn() for pinned in self.pins]  # all of them
            if not all(turned):
                return False
            assert found.adapted is not None
            found.components = [pinned.q for pinned in self.pins]
            found.log_weights = self._mixture(found.adapted).log_weights
            return True
        if self.adaptation is None:
            first = self.frozen
            first.log_density()  # which finds what all passes share
            self._begin(self._with_nature(first))
            self.frozen.shared = first.shared
            return False
        self.adaptation.take(self.frozen.points, self.frozen.log_density())
        if not self.adaptation.done:
            self.frozen = self._pass(self.adaptation.propose(), self.frozen.shared)
            return False
        self.frozen, found.adapted, found.integrated = None, self.adaptation.result(), self.nature.kinds
        if not _carries(self.work, found.adapted):
            return True
        if self.work.complete:
            _settle(self.work, found.adapted, self.nature)
            return True
        if self.nature.dim:
            self.nature.put(_most_probable(found.adapted, self.work.model.prior.dim))
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
            "frozen": None if self.frozen is None else self.frozen.state(),
            "pins": [pinned.state() for pinned in self.pins],
        }

    def load(self, state: dict[str, Any]) -> None:
        if state["adaptation"] is not None:
            self._begin(Mixture(*state["start"]))
            assert self.adaptation is not None
            self.adaptation.load(state["adaptation"])
        if state["frozen"] is not None:
            assert self.frozen is not None
            self.frozen.load(state["frozen"])
            return
        assert self.adaptation is not None
        self.frozen, self.pins = None, self._pins(self.adaptation.result())
        for pinned, saved in zip(self.pins, state["pins"], strict=True):
            pinned.load(saved)


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


# --- what both share --------------------------------------------------------------------------------------------------


def _scaling_nature(work: Work) -> Nature:
    """What of ζ only scales sums over rows."""
    own = work.observations is not None and work.observations.noise is not None
    both = () if own else ((AMPLITUDE, NOISE),)
    return _as_much_as(work, frozen_points(work), *both, (AMPLITUDE,))


def _centre(work: Work) -> Tensor:
    """θ̃ (d2,) of the heaviest component."""
    assert work.found.log_weights is not None
    return work.found.components[int(work.found.log_weights.argmax())].theta_moments()[0].detach().double()


def _started_mixture(work: Work) -> Mixture:
    """q(θ̃) of the closing."""
    assert work.found.log_weights is not None
    moments = [q.theta_moments() for q in work.found.components]
    means, covariances = (torch.stack([each.detach().double() for each in part]) for part in zip(*moments, strict=True))
    return Mixture(means, covariances, work.found.log_weights)


def _carries(work: Work, adapted: Adapted) -> bool:
    """Whether enough points have weight to say more than the closing did."""
    if adapted.effective >= 4 * (work.model.prior.dim + 1):
        return True
    work.found.unrefined = f"of {len(adapted.points)} points that were tried, too few have any weight"
    return False


def _most_probable(adapted: Adapted, d2: int) -> Tensor:
    """ζ that predictions are made with: the mean of the heaviest component, since between two there may be none."""
    return adapted.mixture.means[int(adapted.mixture.log_weights.argmax()), d2:]


def _settle(work: Work, adapted: Adapted, nature: Nature | None) -> None:
    """The mixture's components with their weights, from rows at hand; ζ at its most probable value."""
    found, model = work.found, work.model
    assert work.observations is not None
    rows, mixture = share(work.observations), adapted.mixture
    if nature is not None and nature.dim:
        d2 = model.prior.dim
        mixture = marginal(adapted, d2)
        nature.put(_most_probable(adapted, d2))

    def pinned(mixture: Mixture) -> list[FullRank]:
        components = []
        for mean, covariance in zip(mixture.means, mixture.covariances, strict=True):
            components.append(started(work, mean))
            pin(model, components[-1], lambda: blocks(rows), mean, covariance, key=(work.seed, 5))
        return components

    components = pinned(mixture)
    pieces = min(PIECES, ROWS_OF_PIECES // work.totals.observations)
    if pieces >= FEWEST_PIECES:
        curved, axes = _most_curved(work, components, lambda: blocks(rows))
        if curved > CURVED:
            mixture = divided(mixture, axes, pieces)
            components = pinned(mixture)
    found.components, found.log_weights = list(components), mixture.log_weights


def _most_curved(work: Work, components: list[FullRank], rows: Blocks) -> tuple[float, Tensor]:
    """For each component the principal axis of θ̃ along which f curves most (C, d2), and how much at the most."""
    most, axes = 0.0, []
    for q in components:
        values, vectors = torch.linalg.eigh(q.theta_moments()[1])
        principal = (vectors * values.clamp_min(0).sqrt()).mT  # (d2, d2) an axis a row, as long as its sd
        ends = q.theta_mean + CORNERS * principal
        found = [curvature(work.model, q, rows, end[None], key=(work.seed, 5)) for end in ends]
        most, best = max(most, max(found)), found.index(max(found))
        axes.append(principal[best])
    return most, torch.stack(axes)


def started(work: Work, theta: Tensor, spread: float = NARROW) -> FullRank:
    """q with what the runs say of η's weights as its prior, and θ̃ close to a start."""
    model, frame = work.model, work.found.frame
    assert frame is not None
    wide = frame.widen(model.width - model.eta.width)
    q = FullRank(model.prior.dim, model.outputs, model.width, frame=wide, absorbed=True)
    precision = q.precision._replace(theta=q.precision.theta / spread**2)
    q.move(theta.double().clone(), q.mean, precision)
    return q


def share(rows: Observations) -> Observations:
    """This process' part of rows that every process holds: sums over the processes then count each once."""
    return take(rows, slice(rank(), None, world_size()))
