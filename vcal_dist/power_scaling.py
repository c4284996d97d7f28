"""How much a posterior depends on a prior: power-scaling (Kallioinen, Paananen, Bürkner and Vehtari 2023).

The prior p is raised to a power α near one, which only changes the weights of an importance sample,

    w_α ∝ w · p^(α − 1),

and how far a marginal moves is the cumulative Jensen–Shannon distance between its distribution functions before and
after (Nguyen and Vreeken 2015), for each doubling of α. It is what the R package priorsense calls the prior's
sensitivity, and flags above 0.05.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ALPHA = 0.99  # and 1/0.99
# A distance is relative to the range that it is taken over: that of 4,000 draws, as of Stan's four chains, for which
# the threshold was found. An importance sample reaches further, with points of no weight.
DRAWS = 4000


def power_scaling_sensitivity(points: Tensor, log_weights: Tensor, log_prior: Tensor) -> Tensor:
    """Of each of d marginals, (d,): ½ Σ_α CJS(w, w_α) / log₂(1/0.99), α being 0.99 and 1/0.99.

    `points` (P, d) of θ carry `log_weights` (P,) of the posterior; `log_prior` (P,) is the log density there of the
    prior that is scaled, such as that of the discrepancy's hyperparameters, but for a constant.
    """
    carried = log_weights.isfinite()
    points, log_weights, log_prior = (part[carried].double() for part in (points, log_weights, log_prior))
    base = log_weights.softmax(0)
    distances = []
    for alpha in (ALPHA, 1 / ALPHA):
        scaled = (log_weights + (alpha - 1) * log_prior).softmax(0)
        distances.append(torch.stack([cumulative_distance(column, base, scaled) for column in points.unbind(-1)]))
    return torch.stack(distances).mean(0) / math.log2(1 / ALPHA)


def cumulative_distance(values: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """The cumulative Jensen–Shannon distance of one sample (P,) with two sets of weights (P,), from 0 to 1.

    √( ∫ F log₂(F/M) + G log₂(G/M) / ∫ F + G ), M = (F + G)/2, of the distribution functions F and G, or of what they
    leave to one, whichever is greater.
    """
    order = values.argsort()
    widths = values[order].diff()
    F, G = (weights[order].cumsum(0)[:-1] for weights in (p, q))
    inside = (F >= 1 / DRAWS) & (F <= 1 - 1 / DRAWS)
    F, G, widths = F[inside], G[inside], widths[inside]
    return torch.maximum(_distance(widths, F, G), _distance(widths, 1 - F, 1 - G))


def _distance(widths: Tensor, F: Tensor, G: Tensor) -> Tensor:
    middle = (F + G) / 2
    apart = torch.special.xlogy(F, F / middle) + torch.special.xlogy(G, G / middle)
    bound = (widths * (F + G)).sum()
    return ((widths * apart).sum() / math.log(2) / bound.clamp_min(torch.finfo(bound.dtype).tiny)).clamp_min(0).sqrt()
