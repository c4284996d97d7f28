"""A mixture of Gaussians that follows an unnormalised density: q(θ̃) where one Gaussian is not enough.

Adaptive importance sampling: points are drawn from the mixture so far and from the prior N(0, I), weighted by
density/proposal with the proposals of all rounds as one mixture (Owen and Zhou 2000; Cornuet et al. 2012), and a new
mixture is fitted to them by expectation maximisation, its number of components chosen by the Bayesian information
criterion. Weights are tempered while too few points carry them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

ROUNDS = 6
MOST_COMPONENTS = 5
FROM_PRIOR = (0.4, 0.1)  # share of points from N(0, I), in the first round and in later ones
TAILS = 0.3  # share of the others that come from a wider mixture
WIDER = (3.0, 10.0)  # how much, over √d: covariances in the first round, and for tails
FEW = 50  # effective points
EM_STEPS = 60
FEWEST_PIECES, LIGHT_PIECES = 4, 8  # that components are divided into, and a light one
OVERLAP = 1.9  # standard deviations of a piece from one to the next: their sum ripples by less than a hundredth


class Mixture(NamedTuple):
    """Σ_c exp(log_weights_c) N(means_c, covariances_c)."""

    means: Tensor  # (C, d)
    covariances: Tensor  # (C, d, d)
    log_weights: Tensor  # (C,)

    def log_density(self, points: Tensor) -> Tensor:
        """(P, d) → (P,)."""
        return torch.logsumexp(self.log_joint(points), -1)

    def log_joint(self, points: Tensor) -> Tensor:
        """log of weight times density, (P, C)."""
        lower = torch.linalg.cholesky(self.covariances)  # (C, d, d)
        away = (points.unsqueeze(1) - self.means).unsqueeze(-1)  # (P, C, d, 1)
        scaled = torch.linalg.solve_triangular(lower, away, upper=False).squeeze(-1)
        log_norm = lower.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 0.5 * points.shape[-1] * math.log(2 * math.pi)
        return self.log_weights - log_norm - 0.5 * scaled.square().sum(-1)

    def draw(self, uniform: Tensor) -> Tensor:
        """Points (P, d) from numbers (P, d + 1) in (0, 1): the first chooses the component."""
        ends = self.log_weights.exp().cumsum(0)
        component = torch.searchsorted(ends / ends[-1], uniform[:, 0].contiguous()).clamp_max(len(ends) - 1)
        noise = torch.special.ndtri(uniform[:, 1:])
        lower = torch.linalg.cholesky(self.covariances)
        return self.means[component] + (lower[component] @ noise.unsqueeze(-1)).squeeze(-1)


class Adapted(NamedTuple):
    """The mixture, and how well its points carry the density."""

    mixture: Mixture
    log_evidence: float  # log ∫ density
    effective: float  # the importance sample's effective size (Kish)
    points: Tensor  # (P, d)
    log_weights: Tensor  # (P,) normalised importance weights: expectations with them are exact as P grows


class Adaptation:
    """Follows a density from a first guess, with so many evaluations of it in all, in rounds.

    `propose` says where the density is to be evaluated, `take` hears its logarithm there, until `done`. Where few
    points carry the density after all rounds, there are as many again.
    """

    def __init__(self, start: Mixture, *, evaluations: int, seed: int, rounds: int = ROUNDS) -> None:
        self.start = self.mixture = start
        self.rounds, self.each, self.seed = rounds, max(evaluations // rounds, 8), seed
        self.proposals: list[Mixture] = []
        self.points = start.means.new_empty(0, self.dim, dtype=torch.float64)
        self.log_target = self.log_weight = self.points.new_empty(0)

    @property
    def dim(self) -> int:
        return self.start.means.shape[-1]

    @property
    def done(self) -> bool:
        """Whether all rounds are over."""
        rounds = len(self.log_target) // self.each
        if rounds < self.rounds or rounds == 2 * self.rounds:
            return rounds >= self.rounds
        return bool(self.log_weight.isfinite().any()) and _effective(self.log_weight.softmax(0)) >= FEW

    def propose(self) -> Tensor:
        """The points (P, d) of the next round; the same ones until they are taken."""
        number = len(self.log_target) // self.each
        proposal = _proposal(self.mixture, number)
        self.proposals = [*self.proposals[:number], proposal]
        sobol = SobolEngine(self.dim + 1, scramble=True, seed=self.seed).fast_forward(number * self.each)
        uniform = sobol.draw(self.each, dtype=torch.float64).clamp(1e-6, 1 - 1e-6)
        return proposal.draw(uniform.to(self.points.device))

    def take(self, fresh: Tensor, value: Tensor) -> None:
        """The logarithm of the density (P,) at the points of this round."""
        self.points = torch.cat([self.points, fresh])
        self.log_target = torch.cat([self.log_target, torch.where(value.isfinite(), value.double(), -torch.inf)])
        log_proposal = torch.logsumexp(torch.stack([p.log_density(self.points) for p in self.proposals]), 0)
        self.log_weight = self.log_target - log_proposal + math.log(len(self.proposals))  # deterministic mixture
        weights = _tempered(self.log_weight, self.dim)
        self.mixture = self.mixture if weights is None else fit_mixture(self.points, weights)

    def result(self) -> Adapted:
        """The mixture that follows the density, and the sample behind it."""
        log_evidence = float(torch.logsumexp(self.log_weight, 0)) - math.log(len(self.points))
        if log_evidence == -math.inf:  # no point has any density
            return Adapted(self.start, log_evidence, 0.0, self.points, self.log_weight)
        normalised = torch.log_softmax(self.log_weight, 0)
        return Adapted(self.mixture, log_evidence, _effective(normalised.exp()), self.points, normalised)

    def state(self) -> dict[str, Any]:
        """All that the next round needs."""
        return {name: getattr(self, name) for name in ("mixture", "proposals", "points", "log_target", "log_weight")}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state; tuples may have become lists on the way."""
        self.mixture = Mixture(*state["mixture"])
        self.proposals = [Mixture(*proposal) for proposal in state["proposals"]]
        self.points, self.log_target, self.log_weight = (state[name] for name in ("points", "log_target", "log_weight"))


def adapt(
    log_density: Callable[[Tensor], Tensor], start: Mixture, *, evaluations: int, seed: int, rounds: int = ROUNDS
) -> Adapted:
    """`Adaptation` to a density that is at hand, (P, d) → (P,)."""
    adaptation = Adaptation(start, evaluations=evaluations, seed=seed, rounds=rounds)
    while not adaptation.done:
        points = adaptation.propose()
        adaptation.take(points, log_density(points))
    return adaptation.result()


def marginal(adapted: Adapted, columns: int) -> Mixture:
    """The mixture of the first coordinates alone, fitted to the points: fewer dimensions show more of a shape."""
    weights = _tempered(adapted.log_weights, columns)
    assert weights is not None
    return fit_mixture(adapted.points[:, :columns], weights)


def divided(mixture: Mixture, axes: Tensor, pieces: int) -> Mixture:
    """Each component as narrower ones along an axis, in all about so many: nearly the same density, the same moments.

    With r one of the columns of a root of C = RRᵀ, `axes` (C, d), and any 0 < s < 1,

        N(m, C) = ∫ N(a; 0, 1 − s²) N(·; m + a·r, C − (1 − s²)rrᵀ) da,

    with even points in place of the integral, as far apart as s allows. A light component has a few too: whole, it
    would be wide, and what is wrong with f far from its mean would outweigh what is right with all others.
    """
    means, covariances, log_weights = [], [], []
    for c, share in enumerate(mixture.log_weights.softmax(0).tolist()):
        count = max(round(pieces * share), min(pieces, LIGHT_PIECES))
        points, weights, s = _even(count) if count >= FEWEST_PIECES else (torch.zeros(1), torch.ones(1), 1.0)
        points, weights = points.to(mixture.means), weights.to(mixture.means)
        rest = mixture.covariances[c] - (1 - s**2) * torch.outer(axes[c], axes[c])
        means.append(mixture.means[c] + points.unsqueeze(-1) * axes[c])
        covariances.append(rest.expand(len(points), -1, -1))
        log_weights.append(mixture.log_weights[c] + weights.log())
    return Mixture(torch.cat(means), torch.cat(covariances), torch.cat(log_weights))


def _even(count: int) -> tuple[Tensor, Tensor, float]:
    """Points (count,) of N(0, 1 − s²) with exactly its moments, their weights, and s."""
    points = torch.linspace(-3, 3, count, dtype=torch.float64)
    weights = (-0.5 * points.square()).softmax(0)
    points = points / (weights @ points.square()).sqrt()
    apart = float(points[1] - points[0]) / OVERLAP
    s = apart / math.hypot(1, apart)  # so that points are OVERLAP·s apart
    return math.sqrt(1 - s**2) * points, weights, s


def _proposal(mixture: Mixture, number: int) -> Mixture:
    """Of a round: the mixture, a little wider and with a share much wider, for tails, and a share of N(0, I).

    What is wasted on wide ones grows as a power of the dimension, and so they are the narrower the more there are.
    """
    dim, prior = mixture.means.shape[-1], FROM_PRIOR[min(number, 1)]
    near, wide = (1 + part / math.sqrt(dim) for part in (WIDER if number == 0 else (0.5 * math.sqrt(dim), WIDER[1])))
    identity = torch.eye(dim, dtype=mixture.means.dtype, device=mixture.means.device)
    shares = [math.log((1 - prior) * (1 - TAILS)), math.log((1 - prior) * TAILS)]
    return Mixture(
        torch.cat([mixture.means, mixture.means, torch.zeros_like(mixture.means[:1])]),
        torch.cat([near * mixture.covariances, wide * mixture.covariances, identity.unsqueeze(0)]),
        torch.cat(
            [*(mixture.log_weights + share for share in shares), mixture.log_weights.new_tensor([math.log(prior)])]
        ),
    )


def _effective(weights: Tensor) -> float:
    return float(weights.sum().square() / weights.square().sum())


def _tempered(log_weight: Tensor, dim: int) -> Tensor | None:
    """Normalised weights, to the highest power up to one that leaves enough points to fit a Gaussian to.

    None where too few points have any density.
    """
    needed = min(4.0 * (dim + 1), len(log_weight) / 2)
    possible = log_weight.isfinite()
    if int(possible.sum()) < needed:
        return None

    def to_the_power(power: float) -> Tensor:
        return torch.softmax(torch.where(possible, power * log_weight, -torch.inf), 0)  # 0·∞ is not a number

    low, high = -60.0, 0.0  # log2 of the power
    if _effective(to_the_power(1.0)) >= needed:
        return to_the_power(1.0)
    for _ in range(30):
        middle = (low + high) / 2
        enough = _effective(to_the_power(2.0**middle)) >= needed
        low, high = (middle, high) if enough else (low, middle)
    return to_the_power(2.0**low)


def fit_mixture(points: Tensor, weights: Tensor) -> Mixture:
    """The mixture of weighted points with the least Bayesian information criterion."""
    size, dim = _effective(weights), points.shape[-1]
    parameters = 1 + dim + dim * (dim + 1) // 2
    best, least = None, math.inf
    for count in range(1, MOST_COMPONENTS + 1):
        if count > 1 and size < 5 * count * parameters:
            break
        mixture = _expectation_maximisation(points, weights, count)
        criterion = -2 * size * float(weights @ mixture.log_density(points)) + count * parameters * math.log(size)
        if criterion < least:
            best, least = mixture, criterion
    assert best is not None
    return best


def _expectation_maximisation(points: Tensor, weights: Tensor, count: int) -> Mixture:
    """Started from slices of equal weight along the direction of most spread."""
    mean = weights @ points
    centred = points - mean
    covariance = centred.mT @ (weights.unsqueeze(-1) * centred)
    direction = torch.linalg.eigh(covariance).eigenvectors[:, -1]
    order = (centred @ direction).argsort()
    slices = (weights[order].cumsum(0) * count).long().clamp(0, count - 1)
    membership = torch.zeros(len(points), count, dtype=points.dtype, device=points.device)
    membership[order, slices] = 1.0
    # A component that shrinks onto few points says more of them than of the density.
    identity = torch.eye(points.shape[-1], dtype=points.dtype, device=points.device)
    floor = 1e-3 * covariance + 1e-18 * identity
    mixture = _maximise(points, weights, membership, floor)
    for _ in range(EM_STEPS if count > 1 else 0):
        membership = torch.softmax(mixture.log_joint(points), -1)  # (P, C)
        mixture = _maximise(points, weights, membership, floor)
    return mixture


def _maximise(points: Tensor, weights: Tensor, membership: Tensor, floor: Tensor) -> Mixture:
    share = weights.unsqueeze(-1) * membership  # (P, C)
    total = share.sum(0).clamp_min(1e-12)  # (C,)
    means = share.mT @ points / total.unsqueeze(-1)
    away = points.unsqueeze(1) - means  # (P, C, d)
    covariances = torch.einsum("pc,pci,pcj->cij", share, away, away) / total[:, None, None] + floor
    return Mixture(means, covariances, (total / total.sum()).log())
