"""How good predictions are: log predictive density, error and coverage, at rows that were held out or left out.

Cross-validation, of a stacked emulator: each run as emulators predicted it that were trained without it
(`vcal_dist.few_runs`).

Held out: p(y) = 1/S Σ_s p(y | draw s), with the last layers' weights integrated out in each.

Leave one out, without fitting again: a draw of the posterior of all rows counts for that without row i in proportion
to 1/p(y_i | draw), and the greatest of these ratios are smoothed by a Pareto distribution (PSIS, Vehtari, Gelman and
Gabry 2017). Under Gaussian noise of variance s² the ratio can be integrated over the weights: where f_i ~ N(m, v) given
the rest of the draw, and h = v/s² is the row's leverage, f_i without row i is N(y_i − (y_i − m)/(1 − h), v/(1 − h)).
Only θ̃ and hidden layers are then left to PSIS. Drawing the weights as well, which other likelihoods need, fails where
h is near one: a row that is fitted by itself, of which the draws do not show what it would be like without it.

`assess_…` sums all rows up; `judge_…` says of each known value how it was predicted, for charts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vcal_dist.batches import Observations, Runs, Scaling, Table, take
from vcal_dist.calibration import CalibrationModel
from vcal_dist.errors import ModelError
from vcal_dist.leave_one_out import RELIABLE, smoothed
from vcal_dist.likelihoods import Gaussian, Likelihood, LikelihoodSettings, make_likelihood
from vcal_dist.predictive import (
    Ensemble,
    Function,
    conditional_moments,
    draw_ensemble,
    in_users_units,
    is_affine,
    residuals,
    sample_outcome,
    sampled_emulator,
    sampled_process,
    varying_residuals,
)
from vcal_dist.quadrature import NODES
from vcal_dist.transforms import OutputScaling
from vcal_dist.validation import Validation
from vcal_dist.weights import Weights

if TYPE_CHECKING:
    from vcal_dist.posterior import Posterior

Array = NDArray[np.float64]
Method = Literal["held out", "cross-validation", "leave one out"]

LEAST_DRAWS = 1024  # of weights, to leave one out: the Pareto distribution is fitted to about 100 of them
MOST_LEVERAGE = 1 - 1e-6  # above, rounding decides
OUTCOMES = 4096  # values of y that are drawn for each row, to find its quantiles
LEVEL = 0.9  # of the intervals whose coverage is counted
LIMIT = 1.6448536269514722  # of a standard normal's central interval of that level
QUANTILES = 64  # that stand for a Gaussian under a transform


class Assessment(NamedTuple):
    """Predictions of values that are known. Everything is in the user's units."""

    rows: int  # with a known value
    log_predictive_density: float  # mean over known values
    rmse: list[float]  # of every output's mean; NaN where no value is known
    coverage: float  # share of the known values inside the central 90 % interval
    method: Method
    unreliable: int  # rows with k̂ above 0.7


class Judged(NamedTuple):
    """How each of B rows with a known value was predicted, K outputs; in the user's units.

    Predictions are NaN where y is not known, and in a row without which the posterior cannot be told from this one
    (k̂ infinite, as where a row is fitted by itself).

    For counts and classes `pit` is uniform between the probabilities of less than y and of at most y, so that it is
    uniform over (0, 1) wherever the model is the truth (Czado, Gneiting and Held 2009).
    """

    method: Method
    x: Array  # (B, d1)
    t: Array | None  # (B, d2), for runs
    y: Array  # (B, K) the known values
    mean: Array  # (B, K) of a new y, with its noise
    low: Array  # (B, K) its 5 % quantile
    high: Array  # (B, K) its 95 % quantile
    sd: Array  # (B, K)
    pit: Array  # (B, K) the probability that a new y lies below the known one
    unreliable: NDArray[np.bool_]  # (B,) k̂ above 0.7


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
    data, ensemble = _observed(model, components, log_weights, observations, leave_one_out, draws, seed)[:2]
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
    data, ensemble = _simulated(model, components, log_weights, runs, leave_one_out, draws, seed)[:2]
    return _assess(ensemble, scaling.outputs, data, leave_one_out, seed)


def assess_validation(scaling: Scaling, runs: Runs, validation: Validation) -> Assessment:
    """Cross-validation over whole runs; `runs` are the rows in memory."""
    rows = take(runs, torch.isin(runs.row.to(validation.row.device), validation.row).to(runs.row.device))
    known, outputs = ~rows.z.isnan(), scaling.outputs
    mean, sd = validation.mean.to(rows.z), validation.sd.to(rows.z)
    density = torch.distributions.Normal(mean, sd).log_prob(rows.z.nan_to_num()) + rows.log_jacobian
    inside = (rows.z - mean).abs() <= LIMIT * sd
    error = (_spread_out(outputs, mean, sd).mean(0) - outputs.inverse(rows.z)).square()
    return Assessment(
        rows=int(known.any(-1).sum()),
        log_predictive_density=float(density[known].mean()),
        rmse=[math.sqrt(float(error[known[:, k], k].mean())) for k in range(known.shape[1])],
        coverage=float(inside[known].double().mean()),
        method="cross-validation",
        unreliable=0,
    )


def judge_validation(posterior: Posterior, x: Array, t: Array, z: Array, numbers: NDArray[np.int64]) -> Judged:
    """Every z of a run beside what emulators said of it that had not seen that run; rows by their numbers in the store.

    Rows that were not validated are left out.
    """
    validation, outputs = posterior.validation, posterior.scaling.outputs
    assert validation is not None
    at = np.flatnonzero(np.isin(numbers, validation.row.cpu().numpy()))
    places = torch.searchsorted(validation.row.cpu(), torch.from_numpy(numbers[at].astype(np.int64)))
    mean, sd = validation.mean.cpu()[places], validation.sd.cpu()[places]
    scaled = outputs(torch.from_numpy(z[at]), check=False)
    drawn = _spread_out(outputs, mean, sd)  # (Q, B, K)
    moments = [drawn.mean(0), outputs.inverse(mean - LIMIT * sd), outputs.inverse(mean + LIMIT * sd), drawn.std(0)]
    if all(transform.kind == "none" for transform in outputs.transforms):
        moments[-1] = sd * outputs.sd
    pit = torch.special.ndtr((scaled - mean) / sd)
    found = [part.masked_fill(scaled.isnan(), torch.nan).numpy() for part in (*moments, pit)]
    mean_z, low, high, sd_z, places_in = found
    reliable = np.zeros(len(at), dtype=bool)
    return Judged("cross-validation", x[at], t[at], z[at], mean_z, low, high, sd_z, places_in, reliable)


def _spread_out(outputs: OutputScaling, mean: Tensor, sd: Tensor) -> Tensor:
    """Even quantiles of N(mean, sd²) in the user's units, (Q, B, K)."""
    levels = (torch.arange(QUANTILES, dtype=mean.dtype, device=mean.device) + 0.5) / QUANTILES
    return outputs.inverse(mean + sd * torch.special.ndtri(levels)[:, None, None])


def judge_observations(
    posterior: Posterior,
    x: ArrayLike,
    y: ArrayLike,
    noise: ArrayLike | None = None,
    *,
    leave_one_out: bool,
    draws: int = 256,
    seed: int = 0,
) -> Judged:
    """Every observed y beside its prediction; rows that know no output are left out.

    x (B, d1), y (B, K) and the observations' own standard deviations `noise` (B, K) are in the user's units.
    `leave_one_out`: the posterior has learnt from these rows.
    """
    scaling, device = posterior.scaling, posterior.model.kappa.device
    x, y = _matrix(x, scaling.controls), _matrix(y, posterior.model.outputs)
    own = None if noise is None else torch.from_numpy(_matrix(noise, posterior.model.outputs)).to(device)
    table = scaling.observations(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device), own)
    found = _observed(posterior.model, posterior.components, posterior.log_weights, table, leave_one_out, draws, seed)
    return _judge(*found, scaling.outputs, leave_one_out, seed, x, None, y)


def judge_runs(
    posterior: Posterior,
    x: ArrayLike,
    t: ArrayLike,
    z: ArrayLike,
    *,
    leave_one_out: bool,
    draws: int = 256,
    seed: int = 0,
) -> Judged:
    """Every z of a run beside the emulator's prediction of it, with its residual; t is (B, d2)."""
    scaling, device = posterior.scaling, posterior.model.kappa.device
    x, t, z = (
        _matrix(values, columns)
        for values, columns in ((x, scaling.controls), (t, posterior.model.prior.dim), (z, posterior.model.outputs))
    )
    table = scaling.runs(*(torch.from_numpy(part).to(device) for part in (x, t, z)))
    found = _simulated(posterior.model, posterior.components, posterior.log_weights, table, leave_one_out, draws, seed)
    return _judge(*found, scaling.outputs, leave_one_out, seed, x, t, z)


class _Data(NamedTuple):
    """Rows of either table: observations, or runs where there is a t."""

    x: Tensor  # (B, d1)
    t: Tensor | None  # (B, d2)
    y: Tensor  # (B, K)
    noise: Tensor | None  # (B, K)
    log_jacobian: Tensor  # (B, K)
    likelihood: Likelihood
    extra: Tensor | None = None  # (K,) or (S, B, K) variance around the prediction, given each draw

    def rows(self, rows: slice) -> _Data:
        t = None if self.t is None else self.t[rows]
        noise = None if self.noise is None else self.noise[rows]
        return self._replace(x=self.x[rows], t=t, y=self.y[rows], noise=noise, log_jacobian=self.log_jacobian[rows])


def _observed(
    model: CalibrationModel,
    components: Sequence[Weights],
    log_weights: Tensor,
    observations: Observations,
    leave_one_out: bool,
    draws: int,
    seed: int,
) -> tuple[_Data, Ensemble, Tensor]:
    """The known observations, the draws that predict them, and their numbers."""
    rows = _known(observations, observations.y, "observations")
    data = _Data(rows.x, None, rows.y, rows.noise, rows.log_jacobian, model.likelihood_y)
    draws = _draws(draws, model, data, leave_one_out)
    return data, draw_ensemble(model, components, log_weights, draws, seed), rows.row


def _simulated(
    model: CalibrationModel,
    components: Sequence[Weights],
    log_weights: Tensor,
    runs: Runs,
    leave_one_out: bool,
    draws: int,
    seed: int,
) -> tuple[_Data, Ensemble, Tensor]:
    """The same of runs."""
    rows = _known(runs, runs.z, "runs")
    x, t = rows.u[:, : model.controls], rows.u[:, model.controls :]
    data = _Data(x, t, rows.z, None, rows.log_jacobian, model.likelihood_z)
    if model.varying is not None:  # s² takes the place of σ_z²
        nothing = LikelihoodSettings(noise=2e-9, floor=1e-9, learn_noise=False)
        data = data._replace(likelihood=make_likelihood(nothing, model.outputs).to(model.kappa.device))
    draws = _draws(draws, model, data, leave_one_out)
    return data, draw_ensemble(model, components, log_weights, draws, seed), rows.row


class _Scores(NamedTuple):
    """What a block of rows adds, (B, K) each but for k̂ (B,) and the moments (4, B, K)."""

    log_density: Tensor
    mean: Tensor  # of y without noise, in the user's units
    at_most: Tensor  # P(new y ≤ y)
    below: Tensor  # P(new y < y)
    shape: Tensor  # k̂
    moments: Tensor  # mean, 5 % and 95 % quantile and sd of a new y in the user's units, if asked for


@torch.no_grad()
def _assess(ensemble: Ensemble, outputs: OutputScaling, data: _Data, leave_one_out: bool, seed: int) -> Assessment:
    found = _scores(ensemble, outputs, data, leave_one_out, seed, with_moments=False)
    # Rows that cannot be left out in closed form have no prediction that means anything.
    known = ~(data.y.isnan() | found.shape.isinf()[:, None])
    if not bool(known.any()):
        known = ~data.y.isnan()
    error = (found.mean - outputs.inverse(data.y)).square()
    # The two differ for counts and classes, whose quantiles are values that y can take.
    inside = (found.at_most >= (1 - LEVEL) / 2) & (found.below < (1 + LEVEL) / 2)
    return Assessment(
        rows=len(data.x),
        log_predictive_density=float((found.log_density + data.log_jacobian)[known].mean()),
        rmse=[math.sqrt(float(error[known[:, k], k].mean())) for k in range(known.shape[1])],
        coverage=float(inside[known].double().mean()),
        method="leave one out" if leave_one_out else "held out",
        unreliable=int((found.shape > RELIABLE).sum()),
    )


@torch.no_grad()
def _judge(
    data: _Data,
    ensemble: Ensemble,
    rows: Tensor,
    outputs: OutputScaling,
    leave_one_out: bool,
    seed: int,
    x: Array,
    t: Array | None,
    y: Array,
) -> Judged:
    found = _scores(ensemble, outputs, data, leave_one_out, seed, with_moments=True)
    generator = torch.Generator(data.x.device).manual_seed(seed + 1)
    u = torch.rand(data.y.shape, generator=generator, dtype=found.below.dtype, device=data.y.device)
    pit = found.below + u * (found.at_most - found.below)
    # Rows that cannot be left out in closed form have no prediction that means anything.
    known, numbers = ~(data.y.isnan() | found.shape.isinf()[:, None]), rows.cpu().numpy()
    mean, low, high, sd, pit = (part.masked_fill(~known, torch.nan).cpu().numpy() for part in (*found.moments, pit))
    method: Method = "leave one out" if leave_one_out else "held out"
    inputs = None if t is None else t[numbers]
    unreliable = (found.shape > RELIABLE).cpu().numpy()
    return Judged(method, x[numbers], inputs, y[numbers], mean, low, high, sd, pit, unreliable)


def _scores(
    ensemble: Ensemble, outputs: OutputScaling, data: _Data, leave_one_out: bool, seed: int, *, with_moments: bool
) -> _Scores:
    generator = torch.Generator(data.x.device).manual_seed(seed)
    # Predictive densities that are integrals take their nodes for every draw and output.
    blocks = ensemble.blocks(len(data.x), NODES * ensemble.model.outputs)
    found = [_score(ensemble, outputs, data.rows(rows), leave_one_out, generator, with_moments) for rows in blocks]
    return _Scores(*(torch.cat(parts, -2 if parts[0].ndim > 1 else 0) for parts in zip(*found, strict=True)))


def _score(
    ensemble: Ensemble,
    outputs: OutputScaling,
    data: _Data,
    leave_one_out: bool,
    generator: torch.Generator,
    with_moments: bool,
) -> _Scores:
    what: Function = "process" if data.t is None else "emulator"
    closed = _leaves_out_in_closed_form(ensemble.model, data)
    around = residuals(ensemble, data.x) if data.t is None else varying_residuals(ensemble, data.x, data.t)
    data = data._replace(extra=around)
    if leave_one_out and not closed:
        mean = sampled_process(ensemble, data.x)[0] if data.t is None else sampled_emulator(ensemble, data.x, data.t)
        var = torch.zeros_like(mean)
    else:
        mean, var = conditional_moments(ensemble, data.x, what, data.t)  # (S, B, K)
    impossible = torch.zeros_like(mean[0, :, 0], dtype=torch.bool)  # (B,)
    if leave_one_out and closed:
        assert isinstance(data.likelihood, Gaussian)
        counted = data.likelihood.precision(data.y, data.noise, data.extra)
        if data.t is not None:  # the weights have learnt from runs with σ_z
            assert isinstance(ensemble.model.likelihood_z, Gaussian)
            counted = ensemble.model.likelihood_z.precision(data.y)
        leverage = var * counted
        # Above one, f would be less certain than by this row alone: q has not learned from it.
        impossible = (leverage > MOST_LEVERAGE).any(-1).any(0)
        rest = 1 - leverage.clamp(max=MOST_LEVERAGE)
        mean, var = mean - (data.y.nan_to_num() - mean) * (1 / rest - 1), var / rest
    log_density = data.likelihood.log_predictive(data.y, mean, var, data.noise, data.extra)
    log_weights = torch.full_like(mean[..., 0], -math.log(len(mean)))  # (S, B)
    shape = torch.zeros_like(mean[0, :, 0])
    if leave_one_out:
        log_weights, shape = smoothed(-log_density.sum(-1))  # a value that is not known has log density zero
    weights = log_weights.exp().unsqueeze(-1)  # (S, B, 1)
    # Without transforms the weights' own spread need not be drawn.
    f = mean if is_affine(data.likelihood, outputs) else _drawn(mean, var, generator)
    without_noise = (in_users_units(data.likelihood, outputs, f) * weights).sum(0)
    at_most, below, moments = _outcomes(data, outputs, mean, var, weights, generator, with_moments)
    return _Scores(
        torch.logsumexp(log_density + log_weights.unsqueeze(-1), 0),
        without_noise,
        at_most,
        below,
        shape.masked_fill(impossible, torch.inf),
        moments,
    )


def _outcomes(
    data: _Data,
    outputs: OutputScaling,
    mean: Tensor,
    var: Tensor,
    weights: Tensor,
    generator: torch.Generator,
    with_moments: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """P(new y ≤ y), P(new y < y) and moments, given f ~ N(mean, var) (S, B, K) with weights (S, B, 1)."""
    times = -(-OUTCOMES // len(mean))
    at_most, below = torch.zeros_like(mean[0]), torch.zeros_like(mean[0])
    drawn = []
    for _ in range(times):
        f = _drawn(mean, var, generator)
        y = sample_outcome(data.likelihood, f, generator, data.noise, data.extra)
        at_most += ((y <= data.y) * weights).sum(0) / times
        below += ((y < data.y) * weights).sum(0) / times
        if with_moments:
            drawn.append(outputs.inverse(y))
    if not with_moments:
        return at_most, below, mean.new_zeros(4, *mean.shape[1:])
    weights = weights.expand_as(mean)
    values, order = torch.cat(drawn).sort(0)
    summed = (weights.repeat(times, 1, 1) / times).gather(0, order).cumsum(0)
    low, high = (
        values.gather(0, (summed < p).sum(0, keepdim=True).clamp(max=len(values) - 1))[0]
        for p in ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    )
    if is_affine(data.likelihood, outputs):
        each, own = data.likelihood.moments(mean, var, data.noise, data.extra)
        centre = (each * weights).sum(0)
        spread = ((own + (each - centre).square()) * weights).sum(0).sqrt()  # E[var] + Var[mean]
        return at_most, below, torch.stack([centre * outputs.sd + outputs.mean, low, high, spread * outputs.sd])
    share = weights.repeat(times, 1, 1).gather(0, order) / times
    centre = (values * share).sum(0)
    return at_most, below, torch.stack([centre, low, high, ((values - centre).square() * share).sum(0).sqrt()])


def _drawn(mean: Tensor, var: Tensor, generator: torch.Generator) -> Tensor:
    return mean + var.sqrt() * torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=mean.device)


def _known(table: Table, values: Tensor, name: str) -> Table:
    """The rows that count and have a known value."""
    rows = (table.weight > 0) & ~values.isnan().all(-1)
    if not bool(rows.any()):
        raise ModelError(f"none of the {len(values)} {name} has a known value and a weight; there is nothing to assess")
    return take(table, rows)


def _leaves_out_in_closed_form(model: CalibrationModel, data: _Data) -> bool:
    """Whether a row can be taken out of the weights' Gaussian given a draw of the rest.

    Not where g warps η: its weights' Gaussian holds at the middle of q, and at a draw of η's weights only nearly.
    """
    return isinstance(data.likelihood, Gaussian) and (data.t is not None or model.kind != "general")


def _draws(draws: int, model: CalibrationModel, data: _Data, leave_one_out: bool) -> int:
    return max(draws, LEAST_DRAWS) if leave_one_out and not _leaves_out_in_closed_form(model, data) else draws


def _matrix(values: ArrayLike, columns: int) -> Array:
    """In float64; a single column may come without its dimension."""
    matrix = np.array(values, dtype=np.float64)
    return matrix[:, None] if matrix.ndim == 1 and columns == 1 else matrix
