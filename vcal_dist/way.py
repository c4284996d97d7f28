"""How q(θ) came about, as a record for whoever asks whether to trust it."""

from __future__ import annotations

import math
from typing import Any

import torch

from vcal_dist.leave_one_out import smoothed
from vcal_dist.mixture import Adapted
from vcal_dist.nature import NOISE, Nature, parts
from vcal_dist.plan import Family
from vcal_dist.power_scaling import power_scaling_sensitivity
from vcal_dist.work import Fitted

HOPELESS = 99.0  # stands for an infinite k̂, which JSON cannot hold
PROBABILITIES = {"low": 0.05, "median": 0.5, "high": 0.95}


def way(fitted: Fitted, family: Family) -> dict[str, Any]:
    """Everything that a file can hold: starts, closings, and what the importance sample behind a mixture says."""
    adapted, prior = fitted.adapted, fitted.model.prior
    carried = adapted is not None and not fitted.unrefined
    return {
        "family": family,
        "converged": all(closing.converged for closing in fitted.closings[:1]),  # the best mode's come first
        "unrefined": fitted.unrefined,
        "evaluations": 0 if adapted is None else len(adapted.points),
        "effective": 0.0 if adapted is None else adapted.effective,
        "pareto_k": pareto_k(adapted) if adapted is not None and carried else None,
        "starts": [
            {
                "theta": prior.theta(start.theta[None].cpu())[0].tolist(),
                "log_evidence": start.log_evidence,
                "converged": start.converged,
                "mode": start.mode,
            }
            for start in fitted.followed
        ],
        "hyperparameters": hyperparameters(fitted) if carried else {},
        "as_points": taken_as_points(fitted) if carried else [],
        "sensitivity": sensitivity(fitted) if carried else None,
    }


def pareto_k(adapted: Adapted) -> float | None:
    """k̂ of the importance weights; None where they have no tail to tell it from."""
    _, k = smoothed(adapted.log_weights[:, None])
    return None if math.isnan(float(k[0])) else min(float(k[0]), HOPELESS)


def hyperparameters(fitted: Fitted) -> dict[str, dict[str, float]]:
    """Quantiles of nature's hyperparameters that were integrated over, in the units of the settings."""
    assert fitted.adapted is not None
    if not fitted.integrated:
        return {}
    nature, weights = Nature(fitted.model, tuple(fitted.integrated)), fitted.adapted.log_weights.exp()
    found = {}
    columns = fitted.adapted.points[:, fitted.model.prior.dim :].unbind(-1)
    for name, column, (median, spread) in zip(nature.names, columns, nature.priors(), strict=True):
        order = column.argsort()
        below = weights[order].cumsum(0)
        at = {key: int((below < p).sum().clamp_max(len(order) - 1)) for key, p in PROBABILITIES.items()}
        floor = fitted.model.settings.likelihood_y.floor if name.startswith(NOISE) else 0.0
        values = {key: math.exp(median + spread * float(column[order[i]])) for key, i in at.items()}
        found[name] = {key: math.hypot(value, floor) for key, value in values.items()}
    return found


def taken_as_points(fitted: Fitted) -> list[str]:
    """What is learned of nature and was not integrated over."""
    model = fitted.model
    found = [part.name for part in parts(model) if part.name not in fitted.integrated]
    if model.settings.free_kappa:
        found.append("κ")
    if model.delta is not None and model.delta.settings.features.frequencies == "learned":
        found.append("frequencies of the discrepancy")
    return found


def sensitivity(fitted: Fitted) -> dict[str, float] | None:
    """How far each marginal of θ moves with the prior of the discrepancy's hyperparameters; None where none moved."""
    adapted, prior = fitted.adapted, fitted.model.prior
    assert adapted is not None
    if not fitted.integrated:
        return None
    chosen = torch.tensor(Nature(fitted.model, tuple(fitted.integrated)).of_discrepancy(), device=adapted.points.device)
    if not bool(chosen.any()):
        return None
    zeta = adapted.points[:, prior.dim :][:, chosen]
    theta = prior.theta(adapted.points[:, : prior.dim])
    found = power_scaling_sensitivity(theta, adapted.log_weights, -0.5 * zeta.square().sum(-1))
    return dict(zip(prior.names, found.tolist(), strict=True))
