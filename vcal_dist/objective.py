"""What is maximised, as plain functions of batches: the evidence lower bound, and the collapsed evidence.

The bound (equation 5 of the paper) of N runs and n observations, from batches of B and b rows over all processes,

    ELBO = (N/B) Σ_runs E_q log p(z | η) + (n/b) Σ_observations E_q log p(y | f) − KL(q ‖ p),

is unbiased on batches. Expectations over the last layers' weights are in closed form (or by quadrature in one
dimension); those over θ̃ and hidden layers are Monte Carlo means. Jacobians of the outputs' scaling are included, so
that bounds are densities in the user's units and can be compared between transforms.

The collapsed evidence integrates the last layers' weights out exactly, but of a batch, which it couples: it is no
estimate of the full bound and is never compared between batch sizes. Samples of hidden layers are shared by all rows
there; with noise of their own for every row it would not be a bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vcal_dist.batches import Observations, Runs
from vcal_dist.calibration import THETA_NOISE, CalibrationModel, Prediction
from vcal_dist.collapsed import Gram, gram, in_frame, joined_gram, log_evidence
from vcal_dist.collective import sum_over_ranks
from vcal_dist.fullrank import Frame
from vcal_dist.gp import Draw
from vcal_dist.likelihoods import Gaussian
from vcal_dist.noise import shared_normal
from vcal_dist.weights import MeanField, Weights

Key = tuple[int, ...]


class Samples(NamedTuple):
    """Monte Carlo samples of θ̃, and of hidden layers for each of them."""

    theta: int = 1
    hidden: int = 1


class Bound(NamedTuple):
    """The parts of the ELBO, scaled to all rows."""

    runs: Tensor
    observations: Tensor
    kl: Tensor

    @property
    def total(self) -> Tensor:
        return self.runs + self.observations - self.kl


def elbo(
    model: CalibrationModel,
    q: Weights,
    runs: Runs | None,
    observations: Observations | None,
    *,
    scale_runs: float = 1.0,
    scale_observations: float = 1.0,
    key: Key = (0,),
    samples: Samples = Samples(),  # noqa: B008 - immutable
) -> Bound:
    """The ELBO from this process' rows of two batches; the scales are N/B and n/b with the *global* batch sizes."""
    nothing = torch.zeros((), dtype=torch.float64, device=model.kappa.device)
    of_runs, of_observations = nothing, nothing
    if runs is not None:
        of_runs = scale_runs * runs_log_likelihood(model, q, runs, key=key, samples=samples)
    if observations is not None:
        rows = observations_log_likelihood(model, q, observations, key=key, samples=samples)
        of_observations = scale_observations * rows
    return Bound(of_runs, of_observations, q.kl() + model.kl())


def runs_log_likelihood(
    model: CalibrationModel,
    q: Weights,
    runs: Runs,
    *,
    key: Key = (0,),
    samples: Samples = Samples(),  # noqa: B008
) -> Tensor:
    """Σ E_q log p(z | η) over the rows of a batch."""
    phi = model.eta(runs.u, Draw(key, samples.hidden, runs.row))  # (B, M) or (S, B, M)
    mean, var = q.moments(phi, model.columns_eta)
    return weigh(model.likelihood_z.expected_log_prob(runs.z, mean, var), runs)


def observations_log_likelihood(
    model: CalibrationModel,
    q: Weights,
    observations: Observations,
    *,
    key: Key = (0,),
    samples: Samples = Samples(),  # noqa: B008
) -> Tensor:
    """Σ E_q log p(y | f) over the rows of a batch."""
    theta = sample_theta(q, samples, key)
    draw = Draw(key, len(theta), observations.row)
    unit = model.rows_of_theta(theta, len(observations.x))
    f = model.predict(q, observations.x, theta, unit, draw)
    return weigh(expected_y(model, observations, f), observations)


def expected_y(model: CalibrationModel, observations: Observations, f: Prediction) -> Tensor:
    """E log p(y | f) for each row and output, the emulator's residual included."""
    residual = model.residual_variance(f.phi_eta)
    return model.likelihood_y.expected_log_prob(observations.y, f.mean, f.var, observations.noise, residual)


def weigh(log_prob: Tensor, batch: Runs | Observations) -> Tensor:
    """Σ over rows and outputs, mean over samples, of log p (..., B, K) and the Jacobian of the scaling."""
    per_row = (log_prob + batch.log_jacobian).sum(-1) * batch.weight  # (..., B)
    return per_row.sum(-1).mean()


def sample_theta(q: Weights, samples: Samples, key: Key) -> Tensor:
    """Samples of θ̃, each repeated for its samples of hidden layers; in antithetic pairs where their number is even."""
    device = next(iter(q.theta_moments())).device
    half = samples.theta // 2 if samples.theta % 2 == 0 else samples.theta
    noise = shared_normal((*key, THETA_NOISE), (half, q.theta_dim), dtype=torch.float64, device=device)
    if half < samples.theta:
        noise = torch.cat([noise, -noise])
    return q.theta(noise).repeat_interleave(samples.hidden, 0)


# --- the collapsed evidence -----------------------------------------------------------------------------------------


def over_samples(sums: Gram) -> Gram:
    """The mean over samples of hidden layers of the sums (S, K, …) that depend on them: (K, …).

    The evidence of mean sums is that of weights which do not depend on the sample, as in q. It is never above the mean
    of the samples' evidences (Hölder), so it bounds the full evidence, less KL, for any number of samples. With a
    single one, weights could follow the sample, and hidden layers would drift to their prior at no cost.
    """
    return Gram(*(part.mean(0) if part.ndim > dims else part for part, dims in zip(sums, (3, 2, 1, 1, 1), strict=True)))


def runs_gram(model: CalibrationModel, runs: Runs, draw: Draw | None) -> Gram:
    """This process' sums over runs, (K, …), their mean over samples of hidden layers."""
    assert isinstance(model.likelihood_z, Gaussian), "weights integrate out under Gaussian noise"
    precision = model.likelihood_z.precision(runs.z) * runs.weight.unsqueeze(-1)  # (B, K)
    return over_samples(gram(model.eta(runs.u, draw).unsqueeze(-3), runs.z.mT, precision.mT))


class Evidence(NamedTuple):
    """The log evidence of a global batch, and how many rows it has."""

    value: Tensor
    rows: Tensor


def collapsed_runs(model: CalibrationModel, runs: Runs, draw: Draw | None) -> Evidence:
    """log p(z of the global batch | hyperparameters, Ω); a lower bound, less KL, where hidden layers are random."""
    return _evidence(runs_gram(model, runs, draw), runs)


class CollapsedTheta(nn.Module):
    """θ̃ as a point, and the runs as what they say of η's weights, N(m, RRᵀ): w_η = m + R v.

    Under g, which is not linear in η, v is sampled from a factorised q(v), started at what the runs say, N(0, I).
    """

    def __init__(self, model: CalibrationModel, frame: Frame, start: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(start.detach().double().clone())  # (d2,), or several points (S, d2)
        self.v: MeanField | None = None
        if model.kind == "general":
            self.v = MeanField(0, *frame.mean.shape, dtype=torch.float64).to(frame.mean.device)
        self.register_buffer("frame_mean", frame.mean)
        # As a file gives it back, too: products of matrices laid out differently are not the same bit for bit.
        self.register_buffer("frame_root", frame.root.contiguous())

    frame_mean: Tensor  # m (K, M_η)
    frame_root: Tensor  # R (K, M_η, M_η)

    def log_prior(self) -> Tensor:
        """log p(θ̃) up to a constant, minus KL(q(v) ‖ N(0, I))."""
        return -0.5 * self.theta.square().sum() - (0.0 if self.v is None else self.v.kl())


def collapsed_observations(
    model: CalibrationModel, point: CollapsedTheta, observations: Observations, draw: Draw | None
) -> Evidence:
    """log p(y of the global batch | θ̃, hyperparameters, runs), bounded likewise where hidden layers or v are random."""
    return _evidence(over_samples(observations_gram(model, point, observations, draw)), observations)


def observations_gram(
    model: CalibrationModel, point: CollapsedTheta, observations: Observations, draw: Draw | None
) -> Gram:
    """This process' sums over observations, (S, K, …), in the runs' frame; residuals are y − κφ_η m, or y − η."""
    assert isinstance(model.likelihood_y, Gaussian), "weights integrate out under Gaussian noise"
    x, y = observations.x, observations.y
    count = 1 if draw is None or not (model.random or point.v is not None) else draw.samples
    unit = model.rows_of_theta(point.theta.expand(count, -1) if point.theta.ndim == 1 else point.theta, len(x))
    phi = model.phi_eta(x, unit, draw).double()  # (S, B, M_η)
    precision = model.likelihood_y.precision(y, observations.noise, model.residual_variance(phi))
    precision = (precision * observations.weight.unsqueeze(-1)).mT  # (K, B), or (S, K, B) where it depends on θ
    m, R = point.frame_mean, point.frame_root
    if point.v is not None:
        key = (0,) if draw is None else draw.key
        noise = shared_normal((*key, THETA_NOISE), (count, *m.shape), dtype=torch.float64, device=x.device)
        v = point.v.sample(noise, noise.new_zeros(count, 0))  # (S, K, M_η)
        eta = phi @ (m + torch.einsum("kde,ske->skd", R, v)).mT  # (S, B, K)
        return gram(model.phi_g(eta, x, draw).unsqueeze(-3), (y - eta).mT, precision)
    target = (y - model.kappa * (phi @ m.mT)).mT  # (S, K, B)
    phi, few = phi.unsqueeze(-3), len(x) < m.shape[-1]
    if few:
        phi = phi @ R  # (S, K, B, M_η)
    phi_delta = None if model.delta is None else model.delta(x, draw)
    shared = phi_delta is not None and phi_delta.ndim == 2 and precision.ndim == 2
    if shared and len(phi) > 1 and not torch.is_grad_enabled():
        assert phi_delta is not None
        sums = joined_gram(model.kappa * phi, phi_delta, target, precision)
    else:
        if phi_delta is not None and phi_delta.ndim == 3:  # of samples
            phi_delta = phi_delta.unsqueeze(-3)
        sums = gram(model.design(phi, phi_delta), target, precision)
    return sums if few else in_frame(sums, R)


def _evidence(sums: Gram, batch: Runs | Observations) -> Evidence:
    jacobian = (batch.log_jacobian.sum(-1) * batch.weight).sum()
    *summed, jacobian, rows = sum_over_ranks([*sums, jacobian, batch.weight.sum()], symmetric=1)
    return Evidence(log_evidence(Gram(*summed)).sum() + jacobian, rows)
