"""Where the integrals of the likelihoods have their nodes: trapezoidal rules, which converge exponentially on them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)
NODES = 128  # between the ends of an integrand whose place and width depend on the row


def reach(q: Tensor) -> tuple[Tensor, Tensor]:
    """How far left and right of 0 one must go until e^x − 1 − x exceeds q (at most a few times too far)."""
    near = torch.sqrt(2 * q)
    return near + q, torch.log1p(near + q)


def nodes(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Equidistant nodes (..., Q) from low to high, and their step: the trapezoidal rule of what vanishes at both."""
    step = (high - low) / (NODES - 1)
    return low[..., None] + step[..., None] * torch.arange(NODES, dtype=low.dtype, device=low.device), step


def log_lambert_w(z: Tensor) -> Tensor:
    """log W(e^z), the root t of t + e^t = z, by Newton's method from its right: monotone, as the function is convex."""
    t = torch.minimum(z, z.clamp_min(1.0).log())
    for _ in range(8):
        t = t - (t + t.exp() - z) / (1 + t.exp())
    return t


def logistic_as_normals() -> tuple[Tensor, Tensor]:
    """Standard deviations τ and log weights of normals whose mixture is the logistic distribution to ten digits.

    u = 2K·Z is logistic when Z is standard normal and K has Kolmogorov's distribution (Andrews and Mallows, 1974).
    Trapezoidal rule in s, K = log(1 + e^s): equidistant where K is large, so that the tail holds to |u| of about 500.
    """
    step = 0.2
    s = torch.arange(-2.0, 12.0, step, dtype=torch.float64)
    k = torch.nn.functional.softplus(s)[:, None]  # (Q, 1)
    n = torch.arange(1, 9, dtype=torch.float64)
    # The two series of Kolmogorov's density, each where it converges fast, with its leading exponential apart:
    # 8k·Σ (−1)^(n+1) n² e^(−2n²k²), and √(2π)·Σ (m²π²/(4k⁴) − 1/k²) e^(−m²π²/(8k²)) with m = 2n − 1
    m2 = (2 * n - 1).square()
    sign = 1 - 2 * ((n + 1) % 2)
    wide = torch.log((8 * k * sign * n**2 * torch.exp(-2 * (n**2 - 1) * k**2)).sum(-1)) - 2 * k[:, 0] ** 2
    terms = (m2 * math.pi**2 / (4 * k**4) - 1 / k**2) * torch.exp(-(m2 - 1) * math.pi**2 / (8 * k**2))
    narrow = 0.5 * LOG_2PI + torch.log(terms.sum(-1)) - math.pi**2 / (8 * k[:, 0] ** 2)
    log_weight = torch.where(k[:, 0] < 1, narrow, wide) + torch.nn.functional.logsigmoid(s)  # dK/ds = 1/(1 + e^(−s))
    return 2 * k[:, 0], torch.log_softmax(log_weight, dim=0)
