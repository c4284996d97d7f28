"""Where training starts: lengthscales and hidden layers from the runs, θ̃ from a screening of its prior."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from vcal_dist.batches import Observations, Runs, take
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collapsed import gram, posterior
from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Frame
from vcal_dist.gp import DeepGP
from vcal_dist.likelihoods import Gaussian
from vcal_dist.priors import ThetaPrior
from vcal_dist.stacked_emulator import StackedEmulator

ROWS_OF_A_LAYER = 2000  # for each unit of a hidden layer
SCREENING = ((64, 256), (512, 256))  # observations, and points kept, in the two rounds of screening
APART = 1.0  # distance in θ̃ between starts, in prior standard deviations


@torch.no_grad()
def start_lengthscales(stack: DeepGP, u: Tensor) -> None:
    """Lengthscales of a stack's first layer from the spread of its inputs: ℓ_j = sd(u_j)·√d.

    Inputs on the whole unit cube have √(d/12) in every dimension; runs that cover a part of it get less.
    """
    first = stack.hidden[0].features if stack.hidden else stack.last
    if stack.settings.hidden_lengthscale if stack.hidden else stack.settings.lengthscale:
        return  # chosen by the user
    first.set_lengthscale(spread_of(u))


def spread_of(u: Tensor) -> Tensor:
    """sd(u_j)·√d of each input (d,)."""
    spread: Tensor = (u.double().std(0, correction=0) * u.shape[1] ** 0.5).clamp_min(1e-3)
    return spread


@torch.no_grad()
def start_hidden_layers(stack: DeepGP, u: Tensor, target: Tensor, noise: float, generator: torch.Generator) -> None:
    """Hidden layers one after the other in closed form, as Bayesian linear models of the outputs (Rossi et al. 2019).

    Unit j of a layer with mean zero gets the posterior of a regression of output j mod K on the layer's features, from
    rows of its own. A layer with an identity or linear mean already passes its inputs on; it stays where it is.
    """
    value, seen = u, u
    for layer in stack.hidden:
        if layer.mean == "zero":
            for j in range(layer.weights.outputs):
                chosen = torch.randperm(len(u), generator=generator)[:ROWS_OF_A_LAYER].to(u.device)
                z = target[chosen, j % target.shape[1]]
                sums = gram(layer.features(seen[chosen]), z, torch.where(z.isnan(), 0.0, noise**-2))
                mean, root = posterior(sums)
                layer.weights.mean[j] = mean.to(layer.weights.mean.dtype)
                layer.weights.log_sd[j] = root.square().sum(-1).sqrt().log().to(layer.weights.mean.dtype)
        value = layer(value, seen, None)
        seen = torch.cat([value, u], -1) if stack.settings.feed_inputs else value


def start_model(model: CalibrationModel, runs: Runs, observations: Observations | None, seed: int) -> None:
    """Everything that is known before the first step."""
    generator = torch.Generator().manual_seed(seed)
    assert isinstance(model.eta, DeepGP)
    start_lengthscales(model.eta, runs.u)
    start_hidden_layers(model.eta, runs.u, runs.z, 0.1, generator)
    if model.delta is not None and model.kind == "additive" and observations is not None and len(observations.x) > 1:
        start_lengthscales(model.delta, observations.x)


@torch.no_grad()
def screen_theta(
    model: CalibrationModel, frame: Frame, observations: Observations, *, starts: int, points: int, seed: int
) -> Tensor:
    """The best few θ̃ (starts, d2) of a Sobol design on the prior, at least `APART` from each other.

    All points are scored on a few observations, the best of them on more.
    """
    uniform = SobolEngine(model.prior.dim, scramble=True, seed=seed).draw(points, dtype=torch.float64)
    design = torch.special.ndtri(uniform.clamp(1e-4, 1 - 1e-4)).to(observations.x.device)  # (P, d2)
    known = (~observations.y.isnan().all(-1) & (observations.weight > 0)).nonzero()[:, 0]
    if len(known) == 0:
        raise ModelError("every observation is missing (NaN); θ needs at least one that is known")
    for rows, kept in SCREENING:
        # float32 would not tell one row from the next beyond 2²⁴
        places = torch.linspace(0, len(known) - 1, min(rows, len(known)), dtype=torch.float64, device=known.device)
        chosen = known[places.long()]
        score = _score(model, frame, take(observations, chosen), design)
        design = design[score.argsort(descending=True)[:kept]]
    return _apart(design, starts)


def place_start(prior: ThetaPrior, given: Mapping[str, float], theta: Tensor) -> Tensor:
    """θ̃ (d2,) with those parameters put in their places that the user gives, by name and in the user's units."""
    for name in given:
        if name not in prior.names:
            raise ModelError(f"fit.start names '{name}'; the calibration inputs are {', '.join(prior.names)}")
    placed = theta.clone()
    for j, name in enumerate(prior.names):
        if name in given:
            value = torch.tensor([given[name]], dtype=torch.float64, device=theta.device)
            placed[j] = prior.column(j).tilde(value)[0].to(theta)
    return placed


def _score(model: CalibrationModel, frame: Frame, observations: Observations, design: Tensor) -> Tensor:
    """The likelihood of observations under the emulator's mean at every point, times the prior; (P,).

    Discrepancy and noise are as they start: r ~ N(0, Φ_δΦ_δᵀ + σ²I), r = y − κ·φ_η m. Factorised once, it costs a
    product a point.
    """
    x, y = observations.x, observations.y  # (R, d1), (R, K)
    mean, residual = _emulated(model, frame, x, design)  # (P, R, K)
    score = -0.5 * design.square().sum(-1)
    if not isinstance(model.likelihood_y, Gaussian):
        expected = model.likelihood_y.expected_log_prob(y, mean, torch.zeros_like(mean), observations.noise)
        return score + expected.sum((-1, -2))
    precision = model.likelihood_y.precision(y, observations.noise, residual)  # (R, K)
    spread = torch.zeros(len(x), len(x), dtype=torch.float64, device=x.device)
    if model.delta is not None:  # g is taken where the observations are
        phi = model.delta(x, None) if model.kind == "additive" else model.phi_g(torch.nan_to_num(y), x, None)
        spread = phi.double() @ phi.double().mT
    for k in range(model.outputs):
        known = precision[:, k] > 0
        lower = torch.linalg.cholesky(spread[known][:, known] + torch.diag(1 / precision[known, k]))
        residual = (y[:, k] - mean[..., k])[:, known]  # (P, R)
        score -= 0.5 * torch.linalg.solve_triangular(lower, residual.mT, upper=False).square().sum(0)
    return score


def _emulated(model: CalibrationModel, frame: Frame, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor | None]:
    """κ·φ_η(x, θ) m for θ̃ (P, d2), (P, R, K), and the residual's variance; its mean over all θ̃ if it depends on it."""
    if isinstance(model.eta, StackedEmulator):  # whose weights' mean is that of its first columns
        found = [
            model.eta.rough_mean(torch.cat([x.expand(len(some), -1, -1), model.rows_of_theta(some, len(x)).to(x)], -1))
            for some in theta.split(64)
        ]
        return model.kappa * torch.cat(found), model.residual_variance()
    means, residuals = [], []
    for some in theta.split(64):
        phi = model.phi_eta(x, model.rows_of_theta(some, len(x)), None).double()  # (S, R, M_η)
        means.append(model.kappa * (phi @ frame.mean.mT))
        residuals.append(model.residual_variance(phi))
    first = residuals[0]
    if first is not None and first.ndim == 3:
        first = torch.cat([each for each in residuals if each is not None]).mean(0)
    return torch.cat(means), first


def _apart(design: Tensor, count: int) -> Tensor:
    """The first points that keep their distance from each other."""
    chosen = [design[0]]
    for point in design[1:]:
        if len(chosen) == count:
            break
        if all(float((point - other).norm()) >= APART for other in chosen):
            chosen.append(point)
    return torch.stack(chosen)
