"""The exact KOH reference against formulas written out, against differences, and where θ is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from storage.priors import Uniform
from storage.problem import CalibrationInput, ControlInput, Output, Problem
from vcal_dist.batches import Observations, Runs, Scaling
from vcal_dist.errors import ModelError
from vcal_dist.koh import CONSTANT, JITTER, KOH, PRIORS, Known
from vcal_dist.leave_one_out import gaussian_leave_one_out
from vcal_dist.priors import ThetaPrior
from vcal_dist.transforms import OutputScaling, TransformSettings

PROBLEM = Problem(
    name="line",
    control_inputs=(ControlInput(name="x", bounds=(0.0, 1.0)),),
    calibration_inputs=(CalibrationInput(name="slope", bounds=(0.0, 4.0), prior=Uniform(low=0.0, high=4.0)),),
    outputs=(Output(name="y"),),
)
THETA = 2.5


def data(runs: int, observations: int) -> tuple[ThetaPrior, Runs, Observations]:
    """Runs of t·x + sin 3x, and the same at THETA with a little noise."""
    rng = np.random.default_rng(0)
    x, t = torch.as_tensor(rng.random((runs, 1))), torch.as_tensor(4 * rng.random((runs, 1)))
    at = torch.linspace(0, 1, observations, dtype=torch.float64)[:, None]
    y = THETA * at + torch.sin(3 * at) + 0.02 * torch.as_tensor(rng.standard_normal((observations, 1)))
    z = t * x + torch.sin(3 * x)
    scaling = Scaling(PROBLEM, OutputScaling.from_runs(z, [TransformSettings()], ["y"]), torch.float64)
    return ThetaPrior.from_problem(PROBLEM), scaling.runs(x=x, t=t, z=z), scaling.observations(x=at, y=y)


def point(koh: KOH) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 0.3 * torch.randn(koh.dim, generator=generator, dtype=torch.float64) - 0.5


def matern52(r: float) -> float:
    return (1 + math.sqrt(5) * r + 5 * r**2 / 3) * math.exp(-math.sqrt(5) * r)


def log_normal(value: Tensor, mean: float, sd: float) -> Tensor:
    return -0.5 * ((value - mean) / sd) ** 2 - math.log(sd * math.sqrt(2 * math.pi))


@pytest.mark.parametrize("known", [None, Known(0.3, 0.2)])
def test_the_density_is_that_of_the_joint_normal_written_out(known: Known | None) -> None:
    prior, runs, observations = data(5, 3)
    koh = KOH(prior, runs, observations, known)
    at = point(koh)
    l_x, l_t, amplitude, sigma_z, sigma_y = at[1:6].exp().tolist()
    a_delta, l_delta = known or at[6:].exp().tolist()
    unit = torch.special.ndtr(at[0]).item()
    rows = [(*u.tolist(), False) for u in runs.u] + [(x.item(), unit, True) for x in observations.x]
    K = torch.zeros(8, 8, dtype=torch.float64)
    for i, (x, t, real) in enumerate(rows):
        for j, (x2, t2, real2) in enumerate(rows):
            K[i, j] = amplitude**2 * matern52(math.hypot((x - x2) / l_x, (t - t2) / l_t)) + CONSTANT**2
            if real and real2:
                K[i, j] += a_delta**2 * matern52(abs(x - x2) / l_delta)
            if i == j:
                K[i, j] += sigma_z**2 + JITTER + real * sigma_y**2
    target = torch.cat([runs.z, observations.y])[:, 0]
    expected = torch.distributions.MultivariateNormal(torch.zeros(8, dtype=torch.float64), K).log_prob(target)
    expected += log_normal(at[0], 0.0, 1.0)
    names = ["lengthscale_eta", "lengthscale_eta", "amplitude_eta", "noise_z", "noise_y"]
    names += [] if known else ["amplitude_delta", "lengthscale_delta"]
    for value, name in zip(at[1:], names, strict=True):
        median, spread = PRIORS[name]
        expected += log_normal(value, math.log(median), spread)
    assert koh.log_density(at).item() == pytest.approx(expected.item(), rel=1e-9)


def test_the_gradient_is_the_limit_of_differences() -> None:
    koh = KOH(*data(12, 5))
    at = point(koh).requires_grad_()
    (gradient,) = torch.autograd.grad(koh.log_density(at), at)
    with torch.no_grad():
        for j, step in enumerate(1e-5 * torch.eye(koh.dim, dtype=torch.float64)):
            difference = (koh.log_density(at + step) - koh.log_density(at - step)) / 2e-5
            assert gradient[j].item() == pytest.approx(difference.item(), rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_sampling_finds_the_slope_and_says_how_well_it_mixed() -> None:
    koh = KOH(*data(20, 8), Known(0.02, 0.3))
    start = koh.mode(torch.zeros(1, dtype=torch.float64))
    draws = koh.sample(start, chains=2, draws=100, tune=150, seed=0)
    theta = koh.theta(draws)[:, 0]
    assert abs(theta.mean().item() - THETA) < 3 * theta.std().item() < 0.6
    assert draws.rhat.max() < 1.1
    each = koh.leave_one_out(draws)
    assert each.shape == (200, 8)
    assert each.isfinite().all()


def test_leaving_one_out_equals_conditioning_by_hand() -> None:
    generator = torch.Generator().manual_seed(2)
    root = torch.randn(2, 4, 4, generator=generator, dtype=torch.float64)
    K, r = root @ root.mT + torch.eye(4), torch.randn(2, 4, generator=generator, dtype=torch.float64)
    found = gaussian_leave_one_out(r, K)
    for s in range(2):
        for i in range(4):
            rest = [j for j in range(4) if j != i]
            weights = torch.linalg.solve(K[s][rest][:, rest], K[s][rest, i])
            mean, var = weights @ r[s][rest], K[s][i, i] - weights @ K[s][rest, i]
            expected = torch.distributions.Normal(mean, var.sqrt()).log_prob(r[s][i])
            assert found[s, i].item() == pytest.approx(expected.item(), rel=1e-10)


def test_several_outputs_are_refused() -> None:
    prior, runs, observations = data(5, 3)
    with pytest.raises(ModelError, match="2 outputs"):
        KOH(prior, runs._replace(z=runs.z.repeat(1, 2)), observations)
