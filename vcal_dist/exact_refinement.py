"""Importance sampling of θ̃ and nature's hyperparameters ζ together, every point with a Gram matrix of its own.

θ̃ is then as uncertain as not knowing ζ makes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from vcal_dist.components import (
    LIGHT,
    Blocks,
    beside,
    carries,
    centre_of,
    pin_components,
    share,
    started,
    started_mixture,
)
from vcal_dist.densities import collapsed_log_density, nature_moments
from vcal_dist.errors import ModelError
from vcal_dist.mixture import FEW, Mixture, adapt
from vcal_dist.nature import Nature
from vcal_dist.passes import close
from vcal_dist.phases import BLOCK, PASS_ROWS, LinAlgError, blocks
from vcal_dist.work import Work

CANDIDATES, OTHERS, FAR_APART = 64, 2, 1.5  # values of ζ that are tried, how many of them are followed, how far apart
CLOSING_STEPS = 8
AGAIN = 2  # times that it begins anew from the best point, where few points have any weight


def refine_exactly(work: Work, nature: Nature | None, evaluations: int) -> None:
    """Points of θ̃, and of ζ with it."""
    found, model = work.found, work.model
    assert work.observations is not None
    assert found.frame is not None
    frame, rows, start = found.frame, share(work.observations), started_mixture(work)

    def density(points: Tensor) -> Tensor:
        # Points come one by one where hidden layers are random or ζ moves, together where not.
        alone = PASS_ROWS if nature is not None else max(PASS_ROWS // len(points), 1)
        size = BLOCK // 4 if model.random else alone
        return collapsed_log_density(model, frame, lambda: blocks(rows, size), points, nature, key=(work.seed, 5))

    if nature is not None:
        starts = _joint_starts(work, nature, density)
        start = _joint_modes(work, nature, density, lambda: blocks(rows), starts)
    found.adapted = adapt(density, start, evaluations=evaluations, seed=work.seed)
    for again in range(1, AGAIN + 1):
        if nature is None or found.adapted.effective >= FEW:
            break
        # Often a point in a mode that no start led to has all the weight.
        best = found.adapted.points[found.adapted.log_weights.argmax()]
        start = _joint_modes(work, nature, density, lambda: blocks(rows), [best, *start.means])
        other = adapt(density, start, evaluations=evaluations, seed=work.seed + again)
        found.adapted = max(found.adapted, other, key=lambda adapted: adapted.effective)
    found.integrated = [] if nature is None else nature.kinds
    if carries(work, found.adapted):
        pin_components(work, found.adapted, nature)


def _joint_modes(
    work: Work, nature: Nature, density: Callable[[Tensor], Tensor], rows: Blocks, starts: Iterable[Tensor]
) -> Mixture:
    """Laplace's Gaussians at the modes of θ̃ and ζ together that starts (d2 + ζ's,) lead to.

    Few rows have several explanations in ζ, such as much noise and a small smooth discrepancy, or little noise and a
    large rough one, and training finds the one that it starts near; θ̃ is known differently well in each.
    """
    frame = work.found.frame
    assert frame is not None
    modes: list[tuple[float, Tensor, Tensor]] = []  # Laplace's log evidence, mean and covariance
    with nature.kept():
        for start in starts:
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
        return beside(started_mixture(work), here, torch.eye(len(here), dtype=here.dtype, device=here.device))
    highest = max(height for height, _, _ in modes)
    kept = [mode for mode in modes if highest - mode[0] < LIGHT]  # also of heights so large that they swallow LIGHT
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
    theta = centre_of(work)
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
