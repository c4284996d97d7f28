"""The collapsed posterior of θ̃ and nature's hyperparameters ζ at given points, every weight integrated out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from vcal_dist.batches import Observations
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collapsed import Gram, log_evidence, log_evidence_if_any
from vcal_dist.collective import sum_over_ranks, world_size
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
    d2 = model.prior.dim
    prior = -0.5 * points.square().sum(-1) - 0.5 * points.shape[-1] * math.log(2 * math.pi)
    if nature is None or nature.dim == 0:
        together = 1 if model.random else max(1, GRAM_NUMBERS // (model.outputs * model.width**2))
        return prior + torch.cat([_evidence(model, frame, blocks, some, key) for some in points.split(together)])
    values = []
    with nature.kept():
        for point in points:
            nature.put(point[d2:])
            values.append(_evidence(model, frame, blocks, point[None, :d2], key))
    return prior + torch.cat(values)


def _evidence(
    model: CalibrationModel, frame: Frame, blocks: Callable[[], Iterable[Observations]], theta: Tensor, key: Key
) -> Tensor:
    """log p(y | θ̃, runs) at points (P, d2), at the model's hyperparameters: (P,)."""
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
    total = Gram(*sum_over_ranks(total, symmetric=1))
    return (log_evidence if torch.is_grad_enabled() else log_evidence_if_any)(total).sum(-1)


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

    def gradient(zeta: Tensor) -> Tensor:
        nature.put(zeta)
        parameters = [part.parameter for part in nature.parts]
        with torch.enable_grad():
            evidence = _evidence(model, frame, blocks, theta[None], (0,)).sum()
            # Of all processes, once averaged over them; steps, as of arccos0, have no slope in their length scales.
            slopes = torch.autograd.grad(evidence, parameters, allow_unused=True, materialize_grads=True)
        scaled = [part.spread * slope.double().reshape(-1) for part, slope in zip(nature.parts, slopes, strict=True)]
        return sum_over_ranks([torch.cat(scaled)])[0] / world_size() - zeta

    with nature.kept():
        here = nature.read().detach()
        steps = DIFFERENCE * torch.eye(nature.dim, dtype=here.dtype, device=here.device)
        covariance, length = steps, math.inf
        for _ in range(NEWTON_STEPS):
            if length < CLOSE:
                break
            H = torch.stack([(gradient(here - step) - gradient(here + step)) / (2 * DIFFERENCE) for step in steps])
            values, vectors = torch.linalg.eigh(0.5 * (H + H.mT))
            covariance = (vectors / values.clamp_min(1.0)) @ vectors.mT
            newton = covariance @ gradient(here)
            length = float((newton @ torch.linalg.solve(covariance, newton)).sqrt())  # in standard deviations
            here = here + newton * min(1.0, FARTHEST / max(float(newton.norm()), 1e-12))
    return here, covariance
