"""What every way to a mixture q(θ̃) begins with, and how its components come to their weights w.

w is Gaussian given θ̃, around each component of the mixture; where f curves within one, narrower ones take its place,
without which f at the observations would be too uncertain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vcal_dist.batches import Observations, take
from vcal_dist.collective import rank, world_size
from vcal_dist.fullrank import FullRank
from vcal_dist.mixture import FEWEST_PIECES, Adapted, Mixture, divided, marginal
from vcal_dist.nature import Nature
from vcal_dist.phases import blocks
from vcal_dist.pinning import curvature, pin
from vcal_dist.work import Work

LIGHT = 10.0  # nats below the best mode, where another does not matter
NARROW = 0.1  # sd of θ̃ at a start: the mode there, no other
CORNERS = 1.5  # standard deviations of θ̃ from a component's mean, where it is seen how f curves
CURVED, PIECES = 0.1, 32  # mean square of f's error there, in its variance, above which components become so many ...
ROWS_OF_PIECES = 100_000  # ... or as many as this leaves time for
Blocks = Callable[[], Iterator[Observations]]


def centre_of(work: Work) -> Tensor:
    """θ̃ (d2,) of the heaviest component."""
    assert work.found.log_weights is not None
    return work.found.components[int(work.found.log_weights.argmax())].theta_moments()[0].detach().double()


def started_mixture(work: Work) -> Mixture:
    """q(θ̃) of the closing."""
    assert work.found.log_weights is not None
    moments = [q.theta_moments() for q in work.found.components]
    means, covariances = (torch.stack([each.detach().double() for each in part]) for part in zip(*moments, strict=True))
    return Mixture(means, covariances, work.found.log_weights)


def carries(work: Work, adapted: Adapted) -> bool:
    """Whether enough points have weight to say more than the closing did."""
    if adapted.effective >= 4 * (work.model.prior.dim + 1):
        return True
    work.found.unrefined = f"of {len(adapted.points)} points that were tried, too few have any weight"
    return False


def most_probable(adapted: Adapted, d2: int) -> Tensor:
    """ζ that predictions are made with: the mean of the heaviest component, since between two there may be none."""
    return adapted.mixture.means[int(adapted.mixture.log_weights.argmax()), d2:]


def pin_components(work: Work, adapted: Adapted, nature: Nature | None) -> None:
    """The mixture's components with their weights, from rows at hand; ζ at its most probable value."""
    found, model = work.found, work.model
    assert work.observations is not None
    rows, mixture = share(work.observations), adapted.mixture
    if nature is not None and nature.dim:
        d2 = model.prior.dim
        mixture = marginal(adapted, d2)
        nature.put(most_probable(adapted, d2))

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


def beside(mixture: Mixture, mean: Tensor, covariance: Tensor) -> Mixture:
    """A mixture with more coordinates, independent of it and Gaussian."""
    C, d, more = len(mixture.means), mixture.means.shape[-1], len(mean)
    both = mixture.covariances.new_zeros(C, d + more, d + more)
    both[:, :d, :d], both[:, d:, d:] = mixture.covariances, covariance
    return Mixture(torch.cat([mixture.means, mean.expand(C, -1)], -1), both, mixture.log_weights)
