"""The collapsed posterior of θ̃ and nature's hyperparameters ζ at given points, every weight integrated out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vcal_dist.batches import Observations
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collapsed import Gram, log_evidence, log_evidence_if_any
from vcal_dist.collective import rank, sum_over_ranks, world_size
from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Frame
from vcal_dist.gp import Draw
from vcal_dist.likelihoods import Gaussian
from vcal_dist.nature import Nature
from vcal_dist.objective import CollapsedTheta, Key, observations_gram, over_samples
from vcal_dist.passes import HIDDEN_SAMPLES

GRAM_NUMBERS = 4_000_000  # held at once: 32 MB
DIFFERENCE = 0.05  # of ζ, for its curvature
NEWTON_STEPS, FARTHEST, CLOSE = 6, 1.0, 0.5  # towards the mode of ζ; a step is no longer, and one below in sds the last


def is_conjugate(model: CalibrationModel) -> bool:
    """Whether the last layers' weights integrate out given θ̃ and hidden layers: Gaussian noise, no g."""
    gaussian = isinstance(model.likelihood_z, Gaussian) and isinstance(model.likelihood_y, Gaussian)
    return gaussian and model.kind != "general"


@torch.no_grad()
def collapsed_log_density(
    model: CalibrationModel,
    frame: Frame,
    blocks: Callable[[], Iterable[Observations]],
    points: Tensor,
    nature: Nature | None = None,
    *,
    key: Key = (0,),
) -> Tensor:
    """log p(y | θ̃, ζ, runs) + log p(θ̃, ζ) at points (P, d2 + ζ's), every weight of a last layer integrated out: (P,).

    ζ are nature's hyperparameters; without them the model's own values count. Exact without hidden layers and g, up to
    the Jacobian of the scaling, a constant. With hidden layers it is the bound of the best q(w | θ̃) given theirs, so
    that its exponential is the best q(θ̃): points come one by one, each with the same noise.
    """
    prior = -0.5 * points.square().sum(-1) - 0.5 * points.shape[-1] * math.log(2 * math.pi)
    at_once = max(1, GRAM_NUMBERS // (model.outputs * model.width**2))
    values = [_evidences(_grams(model, frame, blocks, some, nature, key)) for some in points.split(at_once)]
    return prior + torch.cat(values)


def _grams(
    model: CalibrationModel,
    frame: Frame,
    blocks: Callable[[], Iterable[Observations]],
    points: Tensor,
    nature: Nature | None,
    key: Key,
) -> Gram:
    """Of this process' rows at points (P, d2 + ζ's): with a leading dimension of P."""
    d2 = model.prior.dim
    if nature is not None and nature.dim:
        found = []
        with nature.kept():
            for point in points:
                nature.put(point[d2:])
                found.append(_gram(model, frame, blocks, point[None, :d2], key))
    elif model.random:  # samples of hidden layers take the place of points
        found = [_gram(model, frame, blocks, point[None], key) for point in points]
    else:
        return _gram(model, frame, blocks, points, key)
    return Gram(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _gram(
    model: CalibrationModel, frame: Frame, blocks: Callable[[], Iterable[Observations]], theta: Tensor, key: Key
) -> Gram:
    """Of this process' rows at points (P, d2), at the model's hyperparameters; of random models at one point."""
    total: Gram | None = None
    for block in blocks():
        point = CollapsedTheta(model, frame, theta[0] if model.random else theta)
        draw = Draw(key, HIDDEN_SAMPLES, block.row) if model.random else None
        sums = observations_gram(model, point, block, draw)
        if model.random:
            sums = Gram(*(part.unsqueeze(0) for part in over_samples(sums)))
        total = sums if total is None else total.plus(sums)
    if total is None:
        raise ModelError("there are no observations; θ needs at least 1")
    G, b, square, *of_all_points = total  # (P, K, …), and precisions that may be those of all points, (K,)
    return Gram(G, b, square, *(part.expand_as(square) for part in of_all_points))


def _evidences(grams: Gram) -> Tensor:
    """log p(y | θ̃, runs) at points (P,) of what each process has of their Gram matrices.

    In two collective calls for all points: one for each of a thousand points takes longer than all that is computed.
    Every point is one process' own, so that its value is the same everywhere, also where machines round differently.
    """
    total, own = Gram(*sum_over_ranks(grams, symmetric=1)), slice(rank(), None, world_size())
    values = torch.zeros(len(total.G), dtype=torch.float64, device=total.G.device)
    values[own] = log_evidence_if_any(Gram(*(part[own] for part in total))).sum(-1)
    return sum_over_ranks([values])[0]


def nature_moments(
    model: CalibrationModel,
    frame: Frame,
    blocks: Callable[[], Iterable[Observations]],
    theta: Tensor,
    nature: Nature,
) -> tuple[Tensor, Tensor]:
    """Laplace's mean and covariance of ζ given θ̃ (d2,), by a few Newton steps from the model's values.

    The curvature is that of central differences of the gradient, and never below the prior's.
    """

    parameters = [part.parameter for part in nature.parts]

    def gradients(points: Tensor) -> Tensor:
        """At values of ζ (P, ζ's), in two collective calls: what the sums are, and what each process' rows add."""
        with torch.no_grad():
            grams = _grams(model, frame, blocks, torch.cat([theta.expand(len(points), -1), points], 1), nature, (0,))
        total = Gram(*(part.requires_grad_() for part in sum_over_ranks(grams, symmetric=1)))
        with torch.enable_grad():
            upstream = torch.autograd.grad(log_evidence(total).sum(), total)
        found = []
        for i, zeta in enumerate(points):
            nature.put(zeta)
            with torch.enable_grad():
                own = _gram(model, frame, blocks, theta[None], (0,))
                means = [
                    (part, slope[i : i + 1]) for part, slope in zip(own, upstream, strict=True) if part.requires_grad
                ]
                # Steps, as of arccos0, have no slope in their length scales.
                slopes = torch.autograd.grad(
                    [part for part, _ in means],
                    parameters,
                    [slope for _, slope in means],
                    allow_unused=True,
                    materialize_grads=True,
                )
            scaled = [
                part.spread * slope.double().reshape(-1) for part, slope in zip(nature.parts, slopes, strict=True)
            ]
            found.append(torch.cat(scaled))
        return sum_over_ranks([torch.stack(found)])[0] - points

    with nature.kept():
        here = nature.read().detach()
        steps = DIFFERENCE * torch.eye(nature.dim, dtype=here.dtype, device=here.device)
        covariance, length = steps, math.inf
        for _ in range(NEWTON_STEPS):
            if length < CLOSE:
                break
            slopes = gradients(torch.cat([here[None], here - steps, here + steps]))
            slope, before, after = slopes[0], slopes[1 : 1 + nature.dim], slopes[1 + nature.dim :]
            H = (before - after) / (2 * DIFFERENCE)
            values, vectors = torch.linalg.eigh(0.5 * (H + H.mT))
            covariance = (vectors / values.clamp_min(1.0)) @ vectors.mT
            newton = covariance @ slope
            length = float((newton @ torch.linalg.solve(covariance, newton)).sqrt())  # in standard deviations
            here = here + newton * min(1.0, FARTHEST / max(float(newton.norm()), 1e-12))
    return here, covariance
