"""Several emulators as one: weights and a variance that come from what each said of runs it had never seen.

For one output, experts j with means m_j and variances v_j have the mixture's mean and variance, the latter scaled:

    m = Σ_j a_j m_j,    V = s²·Σ_j a_j (v_j + (m_j − m)²).

a maximises the log density of the runs that were held out, s² being its best value there (stacking: Yao et al. 2018).
s² is then the value with which 90 % intervals hold 90 % of these runs, and a little more where they are few: it is
itself uncertain, and intervals hold less in the mean over designs if it is as often too small as too large.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

STEP = 0.05  # of the weights that are tried
LEAST = 0.002  # weight of every expert: none is known to be useless
PRIOR_ROWS = 4.0  # with s² = 1, beside those that were held out
LEVEL = 0.9
EXTRA = 1.5  # of s², over the root of the number of runs
QUANTILE = 1.6448536269514722  # of |z| at the level


class Expert(NamedTuple):
    """What one emulator says of rows it has not seen."""

    mean: Tensor  # (B, K)
    var: Tensor  # (B, K) noise included


class Stack(NamedTuple):
    """How the experts of each output go together."""

    weights: Tensor  # a (J, K)
    scale: Tensor  # s² (K,)


def combine(weights: Tensor, means: Tensor, variances: Tensor, spread: bool) -> tuple[Tensor, Tensor]:
    """m and V/s² for weights (..., J) and experts (J, B): (..., B). Without `spread`, V leaves (m_j − m)² out."""
    mean = weights @ means
    var = weights @ variances
    if spread:
        var = var + sum(weights[..., j : j + 1] * (means[j] - mean).square() for j in range(len(means)))
    return mean, var


def stack(z: Tensor, experts: list[Expert], shapes: list[bool], runs: int) -> Stack:
    """From known values z (B, K; NaN where missing) of so many runs. `shapes`: whose variances count, if not all do.

    Where only some do, as with many outputs, V = s²·Σ_j b_j v_j with b the weights of those alone.
    """
    grid = _simplex(len(experts)).to(z)
    everything = all(shapes)
    chosen, scales = [], []
    for k in range(z.shape[1]):
        known = ~z[:, k].isnan()
        means, variances = (torch.stack([getattr(e, part)[known, k] for e in experts]) for part in ("mean", "var"))
        mean, var = combine(grid, means, variances, everything)
        if not everything:
            b = grid * torch.tensor(shapes, device=z.device)
            var = (b / b.sum(-1, keepdim=True)) @ variances
        ratio = (z[known, k] - mean).square() / var  # (G, B)
        best = (ratio.sum(-1) + PRIOR_ROWS) / (ratio.shape[-1] + PRIOR_ROWS)  # s² of most density
        density = -0.5 * (ratio / best.unsqueeze(-1) + (best.unsqueeze(-1) * var).log()).mean(-1)
        i = int(density.argmax())
        honest = (torch.quantile(ratio[i].sqrt(), LEVEL) / QUANTILE).square()
        chosen.append(grid[i])
        scales.append(honest.clamp_min(1e-12) * (1 + EXTRA / math.sqrt(runs)))
    return Stack(torch.stack(chosen, -1), torch.stack(scales))


def stacked(found: Stack, experts: list[Expert], shapes: list[bool]) -> Expert:
    """Mean and variance (B, K) of all together."""
    means, variances = [], []
    for k in range(len(found.scale)):
        a = found.weights[:, k]
        own = torch.stack([expert.var[:, k] for expert in experts])
        mean, var = combine(a, torch.stack([expert.mean[:, k] for expert in experts]), own, all(shapes))
        if not all(shapes):
            b = a * torch.tensor(shapes, device=a.device)
            var = (b / b.sum()) @ own
        means.append(mean)
        variances.append(found.scale[k] * var)
    return Expert(torch.stack(means, -1), torch.stack(variances, -1))


def _simplex(experts: int) -> Tensor:
    """Weights (G, J) on a grid, all at least LEAST."""
    count = round(1 / STEP)
    axes = torch.cartesian_prod(*([torch.arange(count + 1)] * (experts - 1))).reshape(-1, experts - 1)
    inside = axes[axes.sum(-1) <= count]
    whole = torch.cat([inside, count - inside.sum(-1, keepdim=True)], -1).double() / count
    return LEAST + (1 - LEAST * experts) * whole


def coverage(z: Tensor, predicted: Expert) -> float:
    """Share of the known values inside their central 90 % intervals."""
    known = ~z.isnan()
    inside = (z - predicted.mean).abs() <= QUANTILE * predicted.var.sqrt()
    return float(inside[known].double().mean()) if bool(known.any()) else math.nan
