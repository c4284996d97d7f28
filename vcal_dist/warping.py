"""What general discrepancy does to the simulator: y = g(η, x) and its slope ∂g/∂η, in the user's units.

With e = T⁻¹(η), the simulator's value, and y = T⁻¹(g(T(e), x)) both are functions of e, and the slope is dy/de: the
chain rule goes through the outputs' transforms, and through the links of counts and classes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from vcal_dist.answers import Array, to_numpy
from vcal_dist.errors import ModelError
from vcal_dist.likelihoods import Bernoulli, Likelihood, Poisson
from vcal_dist.posterior import Posterior
from vcal_dist.predictive import Group, draw_ensemble, in_users_units
from vcal_dist.transforms import OutputScaling


class Warp(NamedTuple):
    """g and ∂g/∂η at B points: moments over the posterior."""

    mean: Array  # (B,)
    sd: Array
    slope: Array
    slope_sd: Array


def warp(
    posterior: Posterior, x: ArrayLike, eta: ArrayLike, output: str | None = None, *, draws: int = 512, seed: int = 0
) -> Warp:
    """g(η, x) of one output at control inputs x (B, d1) and values η (B,) of the simulator, both in the user's units.

    g may depend on all outputs of the simulator: the others stay at the emulator's mean there.
    """
    model, scaling = posterior.model, posterior.scaling
    if model.kind != "general":
        raise ModelError(f"the discrepancy is '{model.kind}'; only 'general' warps the simulator's output")
    names = [variable.name for variable in posterior.problem.outputs]
    if output is not None and output not in names:
        raise ModelError(f"unknown output '{output}'; accepted: {', '.join(names)}")
    k = 0 if output is None else names.index(output)
    values = np.array(eta, dtype=np.float64).reshape(-1)
    mean = posterior.predict(x, "emulator_without_residual").mean  # (B, K), and a check of x
    if len(mean) != len(values):
        raise ModelError(f"x has {len(mean)} rows and eta {len(values)} values; give one for each row")
    device = model.kappa.device
    fixed = mean.copy()
    fixed[:, k] = values
    at = np.asarray(x, dtype=np.float64).reshape(len(values), -1)
    low, width = scaling.low[: scaling.controls], scaling.width[: scaling.controls]
    unit = ((torch.from_numpy(at).to(device) - low) / width).to(scaling.dtype)
    ensemble = draw_ensemble(model, posterior.components, posterior.log_weights, draws, seed)
    inputs = torch.from_numpy(fixed).to(device)
    parts = []
    for rows in ensemble.blocks(len(values)):
        part_x, part_eta = unit[rows], inputs[rows]

        def of_group(group: Group, x: Tensor = part_x, eta: Tensor = part_eta) -> Tensor:
            return _warped(posterior, group, x, eta, k)

        parts.append(ensemble.over(of_group))  # (S, 2, B)
    both = torch.cat(parts, -1)
    centre = both.mean(0)
    spread = (both - centre).square().mean(0).sqrt()
    (g, slope), (sd, slope_sd) = to_numpy(centre), to_numpy(spread)
    return Warp(g, sd, slope, slope_sd)


def _warped(posterior: Posterior, group: Group, x: Tensor, eta: Tensor, k: int) -> Tensor:
    """g and its slope with the weights of every draw, (S_c, 2, B)."""
    model, outputs = posterior.model, posterior.scaling.outputs
    weights = group.weights[..., model.eta.width :].mT  # (S_c, M_g, K)
    with torch.enable_grad():
        # A copy for every draw, so that one backward pass gives the slopes of all.
        value = eta.expand(len(weights), -1, -1).clone().requires_grad_()
        scaled = _scaled(model.likelihood_z, outputs, value)
        g = scaled + model.phi_g(scaled, x, group.draw).to(scaled.dtype) @ weights
        y = in_users_units(model.likelihood_y, outputs, g)[..., k]
        (slope,) = torch.autograd.grad(y.sum(), value)
    return torch.stack([y.detach(), slope[..., k]], 1)


def _scaled(likelihood: Likelihood, outputs: OutputScaling, value: Tensor) -> Tensor:
    """η of the simulator's values in the user's units."""
    scaled = outputs(value.flatten(0, -2)).reshape(value.shape)
    if isinstance(likelihood, Poisson):
        return scaled.log()
    if isinstance(likelihood, Bernoulli):
        return torch.logit(scaled)
    return scaled
