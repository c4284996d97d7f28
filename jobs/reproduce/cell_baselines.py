"""What the cell experiment is compared with: least squares on the emulator, and the exact KOH model by sampling."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcal_dist.analytic import ExactPosterior
from vcal_dist.batches import Observations, Runs
from vcal_dist.koh import KOH, Known
from vcal_dist.leave_one_out import RELIABLE, gaussian_leave_one_out, smoothed
from vcal_dist.likelihoods import Gaussian
from vcal_dist.passes import compress
from vcal_dist.posterior import Posterior
from vcal_dist.predictive import Group, draw_ensemble
from vcal_dist.problems import cell
from vcal_dist.sampling import Draws, sample

Array = NDArray[np.float64]


class Sampled(NamedTuple):
    """θ by a sampler, and what says how far to trust it."""

    theta: Array  # (draws, 3)
    seconds: float
    details: dict[str, Any]


def scaled(posterior: Posterior, data: cell.Data) -> tuple[Runs, Observations]:
    """The data as training saw them, the output's transform included."""
    x_runs, t, z, x, y = (torch.as_tensor(values) for values in data)
    return posterior.scaling.runs(x=x_runs, t=t, z=z), posterior.scaling.observations(x=x, y=y)


def least_squares(posterior: Posterior, data: cell.Data, starts: int = 16, seed: int = 0) -> tuple[Array, float]:
    """θ (3,) that minimises Σ (y − η̂(x, θ))² in the user's units, η̂ the emulator that runs alone give, and seconds."""
    from scipy.optimize import minimize
    from scipy.stats import qmc

    begun = time.perf_counter()
    model, outputs = posterior.model, posterior.scaling.outputs
    runs, observations = scaled(posterior, data)
    weights = compress(model, [runs]).frame.mean.mT  # (M, 1)
    y = torch.as_tensor(data.y)

    def squares(unit: Tensor) -> Tensor:
        phi = model.phi_eta(observations.x, unit.expand(1, len(y), -1), None)[0].double()
        return (outputs.inverse(phi @ weights) - y).square().sum()

    def objective(unit: Array) -> tuple[float, Array]:
        at = torch.tensor(unit, requires_grad=True)
        value = 1000 * squares(at)
        (gradient,) = torch.autograd.grad(value, at)
        return value.item(), gradient.numpy()

    first = qmc.Sobol(len(cell.PARAMETERS), seed=seed).random(1024)
    with torch.no_grad():
        order = np.argsort([float(squares(torch.as_tensor(u))) for u in first])
    box = [(0.0, 1.0)] * len(cell.PARAMETERS)
    found = [minimize(objective, first[i], jac=True, method="L-BFGS-B", bounds=box) for i in order[:starts]]
    best: Array = min(found, key=lambda result: float(result.fun)).x
    low, high = cell.BOUNDS
    return low + (high - low) * best, time.perf_counter() - begun


def sampled_koh(
    posterior: Posterior, data: cell.Data, start: Array, known: Known | None, settings: dict[str, int], seed: int
) -> Sampled:
    """θ of the exact KOH model, hyperparameters sampled with it; those of δ only if they are not `known`."""
    begun = time.perf_counter()
    prior = posterior.model.prior
    koh = KOH(prior, *scaled(posterior, data), known)
    inside = np.clip(start, 1e-3, cell.BOUNDS[1] - 1e-3)
    draws = koh.sample(koh.mode(prior.tilde(torch.as_tensor(inside)[None])[0]), seed=seed, **settings)
    logs = draws.values[..., prior.dim :].flatten(0, 1)
    return Sampled(
        koh.theta(draws).numpy(),
        time.perf_counter() - begun,
        _trust(draws, koh.dim)
        | {"hyperparameters, median": dict(zip(koh.names, logs.median(0).values.exp().tolist(), strict=True))}
        | _left_out("sampled", koh.leave_one_out(draws), _jacobian(posterior, data), _efficiency(draws)),
    )


def sampled_exact(posterior: Posterior, data: cell.Data, settings: dict[str, int], seed: int) -> Sampled:
    """θ by the no-U-turn sampler at the hyperparameters that training found: what q(θ) approximates.

    Under additive discrepancy all weights integrate out. Under g those of η are sampled too, as w_η = m + Rv with
    v ~ N(0, I) by what the runs say; given them y ~ N(η, Φ_gΦ_g′ + σ²I).
    """
    begun = time.perf_counter()
    model, (runs, observations) = posterior.model, scaled(posterior, data)
    dim = model.prior.dim
    if model.kind == "additive":
        draws = ExactPosterior(model, runs, observations).sample(
            settings["chains"], settings["draws"], settings["tune"], seed
        )
    else:
        frame, x, y = compress(model, [runs]).frame, observations.x, observations.y
        noise = torch.diag(_noise(posterior, observations))

        def log_density(point: Tensor) -> Tensor:
            phi = model.phi_eta(x, model.rows_of_theta(point[None, :dim], len(x)), None)[0].double()
            eta = phi @ (frame.mean[0] + frame.root[0] @ point[dim:])  # (n,)
            phi_g = model.phi_g(eta[:, None], x, None).double()
            normal = torch.distributions.MultivariateNormal(eta, phi_g @ phi_g.mT + noise, validate_args=False)
            value: Tensor = normal.log_prob(y[:, 0]) - 0.5 * point.square().sum()
            return value

        generator = torch.Generator().manual_seed(seed)
        start = 0.1 * torch.randn(settings["chains"], dim + model.eta.width, generator=generator, dtype=torch.float64)
        start[:, :dim] += posterior.theta.means[0]
        draws = sample(log_density, start, seed=seed, draws=settings["draws"], tune=settings["tune"])
    theta = model.prior.theta(draws.values[..., :dim].flatten(0, 1)).numpy()
    return Sampled(theta, time.perf_counter() - begun, _trust(draws, dim))


@torch.no_grad()
def leave_one_out(posterior: Posterior, data: cell.Data, draws: int = 2000, seed: int = 0) -> dict[str, Any]:
    """Σ log p(y_i | the other observations, runs), at hyperparameters that were fitted to all rows, y_i among them.

    Given θ and η the observations are Gaussian, with δ (or g at these η) integrated out, so that p(y_i | y₋ᵢ, θ, η) is
    closed form.
    """
    model = posterior.model
    _, observations = scaled(posterior, data)
    x, y = observations.x, observations.y
    noise = _noise(posterior, observations)

    def of_group(group: Group) -> Tensor:
        unit = model.rows_of_theta(group.theta, len(x))
        phi = model.phi_eta(x, unit, group.draw).double()
        eta = phi @ group.weights[..., model.columns_eta].mT  # (S, n, 1)
        assert model.delta is not None
        last = model.phi_g(eta, x, group.draw) if model.kind == "general" else model.delta(x, group.draw)
        covariance = last.double() @ last.double().mT + torch.diag(noise)
        return gaussian_leave_one_out((y - eta)[..., 0], covariance)

    ensemble = draw_ensemble(model, posterior.components, posterior.log_weights, draws, seed)
    return _left_out("fitted to all rows", ensemble.over(of_group), _jacobian(posterior, data))


def _left_out(hyperparameters: str, each: Tensor, log_jacobian: float, efficiency: float = 1.0) -> dict[str, Any]:
    """Σ log p(y_i | y₋ᵢ) in the user's units from log p(y_i | y₋ᵢ, draw) (S, n), and the y_i whose k̂ tells against it.

    A draw given all of y counts for those without y_i in proportion to 1/p(y_i | y₋ᵢ, draw), smoothed (PSIS).
    """
    log_weights, shape = smoothed(-each, efficiency)  # (S, n), (n,)
    density = torch.logsumexp(each + log_weights, 0)  # (n,)
    return {
        f"leave-one-out log predictive density, hyperparameters {hyperparameters}": float(density.sum()) + log_jacobian,
        "observations with k̂ above 0.7": int((shape > RELIABLE).sum()),
    }


def _efficiency(draws: Draws) -> float:
    """Effective draws for each draw of the chains: the less, the longer a tail k̂ needs."""
    chains, each, _ = draws.values.shape
    return min(float(draws.effective.min()) / (chains * each), 1.0)


def _trust(draws: Draws, dim: int) -> dict[str, Any]:
    """How well the first coordinates mixed."""
    return {
        "largest R̂": float(draws.rhat[:dim].max()),
        "smallest effective size": float(draws.effective[:dim].min()),
        "divergences": draws.divergences,
    }


def _noise(posterior: Posterior, observations: Observations) -> Tensor:
    """The variance of y around f, (n,), the emulator's residual included."""
    likelihood = posterior.model.likelihood_y
    assert isinstance(likelihood, Gaussian)
    return likelihood.precision(observations.y, None, posterior.model.residual_variance()).reciprocal()[:, 0]


def _jacobian(posterior: Posterior, data: cell.Data) -> float:
    """Σ log |ds/dy|: from densities of scaled values to those of y."""
    return float(posterior.scaling.outputs.log_jacobian(torch.as_tensor(data.y)).sum())
