"""How good predictions are: log predictive density, error and coverage, at rows that were held out or left out.

Held out: p(y) = 1/S Σ_s p(y | draw s), with the last layers' weights integrated out in each.

Leave one out, without fitting again: a draw of the posterior of all rows counts for that without row i in proportion
to 1/p(y_i | draw), and the greatest of these ratios are smoothed by a Pareto distribution (PSIS, Vehtari, Gelman and
Gabry 2017). Under Gaussian noise of variance s² the ratio can be integrated over the weights: where f_i ~ N(m, v) given
the rest of the draw, and h = v/s² is the row's leverage, f_i without row i is N(y_i − (y_i − m)/(1 − h), v/(1 − h)).
Only θ̃ and hidden layers are then left to PSIS. Drawing the weights as well, which other likelihoods need, fails where
h is near one: a row that is fitted by itself, of which the draws do not show what it would be like without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vcal_dist.batches import Observations, Runs, Scaling, Table, take
from vcal_dist.calibration import CalibrationModel
from vcal_dist.errors import ModelError
from vcal_dist.likelihoods import Gaussian, Likelihood
from vcal_dist.predictive import (
    Ensemble,
    Function,
    conditional_moments,
    draw_ensemble,
    in_users_units,
    is_affine,
    sample_outcome,
    sampled_emulator,
    sampled_process,
)
from vcal_dist.quadrature import NODES
from vcal_dist.transforms import OutputScaling
from vcal_dist.weights import Weights

LEAST_DRAWS = 1024  # of weights, to leave one out: the Pareto distribution is fitted to about 100 of them
MOST_LEVERAGE = 1 - 1e-6  # above, rounding decides
EVEN = 0.1  # nats between the greatest and the least ratio, below which they need no smoothing
RELIABLE = 0.7  # k̂
OUTCOMES = 4096  # values of y that are drawn for each row, to find its quantiles
LEVEL = 0.9  # of the intervals whose coverage is counted


class Assessment(NamedTuple):
    """Predictions of values that are known. Everything is in the user's units."""

    rows: int  # with a known value
    log_predictive_density: float  # mean over known values
    rmse: list[float]  # of every output's mean; NaN where no value is known
    coverage: float  # share of the known values inside the central 90 % interval
    method: Literal["held out", "leave one out"]
    unreliable: int  # rows with k̂ above 0.7


def assess_observations(
    model: CalibrationModel,
    components: Sequence[Weights],
    log_weights: Tensor,
    scaling: Scaling,
    observations: Observations,
    *,
    leave_one_out: bool,
    draws: int = 256,
    seed: int = 0,
) -> Assessment:
    """Predictions of y by the process and its noise. `leave_one_out`: the model was fitted to these rows."""
    rows = _known(observations, observations.y, "observations")
    data = _Data(rows.x, None, rows.y, rows.noise, rows.log_jacobian, model.likelihood_y, model.residual_variance())
    ensemble = draw_ensemble(model, components, log_weights, _draws(draws, data.likelihood, leave_one_out), seed)
    return _assess(ensemble, scaling.outputs, data, leave_one_out, seed)


def assess_runs(
    model: CalibrationModel,
    components: Sequence[Weights],
    log_weights: Tensor,
    scaling: Scaling,
    runs: Runs,
    *,
    leave_one_out: bool,
    draws: int = 256,
    seed: int = 0,
) -> Assessment:
    """Predictions of z by the emulator at the runs' own inputs and its residual."""
    rows = _known(runs, runs.z, "runs")
    x, t = rows.u[:, : model.controls], rows.u[:, model.controls :]
    data = _Data(x, t, rows.z, None, rows.log_jacobian, model.likelihood_z, None)
    ensemble = draw_ensemble(model, components, log_weights, _draws(draws, data.likelihood, leave_one_out), seed)
    return _assess(ensemble, scaling.outputs, data, leave_one_out, seed)


class _Data(NamedTuple):
    """Rows of either table: observations, or runs where there is a t."""

    x: Tensor  # (B, d1)
    t: Tensor | None  # (B, d2)
    y: Tensor  # (B, K)
    noise: Tensor | None  # (B, K)
    log_jacobian: Tensor  # (B, K)
    likelihood: Likelihood
    extra: Tensor | None  # (K,) variance around the prediction

    def rows(self, rows: slice) -> _Data:
        t = None if self.t is None else self.t[rows]
        noise = None if self.noise is None else self.noise[rows]
        return self._replace(x=self.x[rows], t=t, y=self.y[rows], noise=noise, log_jacobian=self.log_jacobian[rows])


class _Scores(NamedTuple):
    """What a block of rows adds, (B, K) each but for k̂ (B,)."""

    log_density: Tensor
    mean: Tensor  # of y without noise, in the user's units
    inside: Tensor
    shape: Tensor  # k̂


@torch.no_grad()
def _assess(ensemble: Ensemble, outputs: OutputScaling, data: _Data, leave_one_out: bool, seed: int) -> Assessment:
    generator = torch.Generator(data.x.device).manual_seed(seed)
    # Predictive densities that are integrals take their nodes for every draw and output.
    blocks = ensemble.blocks(len(data.x), NODES * ensemble.model.outputs)
    found = [_score(ensemble, outputs, data.rows(rows), leave_one_out, generator) for rows in blocks]
    log_density, mean, inside, shape = (torch.cat(parts) for parts in zip(*found, strict=True))
    known = ~data.y.isnan()
    error = (mean - outputs.inverse(data.y)).square()
    return Assessment(
        rows=len(data.x),
        log_predictive_density=float((log_density + data.log_jacobian)[known].mean()),
        rmse=[math.sqrt(float(error[known[:, k], k].mean())) for k in range(known.shape[1])],
        coverage=float(inside[known].double().mean()),
        method="leave one out" if leave_one_out else "held out",
        unreliable=int((shape > RELIABLE).sum()),
    )


def _score(
    ensemble: Ensemble, outputs: OutputScaling, data: _Data, leave_one_out: bool, generator: torch.Generator
) -> _Scores:
    what: Function = "process" if data.t is None else "emulator"
    if leave_one_out and not isinstance(data.likelihood, Gaussian):
        mean = sampled_process(ensemble, data.x)[0] if data.t is None else sampled_emulator(ensemble, data.x, data.t)
        var = torch.zeros_like(mean)
    else:
        mean, var = conditional_moments(ensemble, data.x, what, data.t)  # (S, B, K)
    impossible = torch.zeros_like(mean[0, :, 0], dtype=torch.bool)  # (B,)
    if leave_one_out and isinstance(data.likelihood, Gaussian):
        leverage = var * data.likelihood.precision(data.y, data.noise, data.extra)
        # Above one, f would be less certain than by this row alone: q has not learned from it.
        impossible = (leverage > MOST_LEVERAGE).any(-1).any(0)
        rest = 1 - leverage.clamp(max=MOST_LEVERAGE)
        mean, var = mean - (data.y.nan_to_num() - mean) * (1 / rest - 1), var / rest
    log_density = data.likelihood.log_predictive(data.y, mean, var, data.noise, data.extra)
    log_weights = torch.full_like(mean[..., 0], -math.log(len(mean)))  # (S, B)
    shape = torch.zeros_like(mean[0, :, 0])
    if leave_one_out:
        log_weights, shape = _smoothed(-log_density.sum(-1))  # a value that is not known has log density zero
    weights = log_weights.exp().unsqueeze(-1)  # (S, B, 1)
    # Without transforms the weights' own spread need not be drawn.
    f = mean if is_affine(data.likelihood, outputs) else _drawn(mean, var, generator)
    return _Scores(
        torch.logsumexp(log_density + log_weights.unsqueeze(-1), 0),
        (in_users_units(data.likelihood, outputs, f) * weights).sum(0),
        _inside(data, mean, var, weights, generator),
        shape.masked_fill(impossible, torch.inf),
    )


def _smoothed(log_ratios: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised log weights (S, B) and k̂ (B,)."""
    from vcal_dist.inference_data import import_arviz

    with np.errstate(over="ignore"):  # of a tail that is too heavy; it is cut to the largest ratio
        weights, shape = import_arviz().psislw(log_ratios.mT.cpu().numpy())
    # Ratios that are nearly the same have no tail to fit a distribution to: its k̂ would mean nothing, or be infinite.
    even = (log_ratios.amax(0) - log_ratios.amin(0)) < EVEN
    return torch.from_numpy(weights.T).to(log_ratios), torch.from_numpy(shape).to(log_ratios).masked_fill(even, 0.0)


def _inside(data: _Data, mean: Tensor, var: Tensor, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Whether y lies between its quantiles (1 ∓ level)/2 given f ~ N(mean, var) (S, B, K) with weights (S, B, 1)."""
    times = -(-OUTCOMES // len(mean))
    at_most, below = torch.zeros_like(mean[0]), torch.zeros_like(mean[0])
    for _ in range(times):
        f = _drawn(mean, var, generator)
        y = sample_outcome(data.likelihood, f, generator, data.noise, data.extra)
        at_most += ((y <= data.y) * weights).sum(0) / times
        below += ((y < data.y) * weights).sum(0) / times
    # The two differ for counts and classes, whose quantiles are values that y can take.
    return (at_most >= (1 - LEVEL) / 2) & (below < (1 + LEVEL) / 2)


def _drawn(mean: Tensor, var: Tensor, generator: torch.Generator) -> Tensor:
    return mean + var.sqrt() * torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)


def _known(table: Table, values: Tensor, name: str) -> Table:
    """The rows that count and have a known value."""
    rows = (table.weight > 0) & ~values.isnan().all(-1)
    if not bool(rows.any()):
        raise ModelError(f"none of the {len(values)} {name} has a known value and a weight; there is nothing to assess")
    return take(table, rows)


def _draws(draws: int, likelihood: Likelihood, leave_one_out: bool) -> int:
    return max(draws, LEAST_DRAWS) if leave_one_out and not isinstance(likelihood, Gaussian) else draws
