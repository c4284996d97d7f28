"""The model's own formulas: the warping's slope for plots, and the prior of learned frequencies."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.stats
import torch

from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings, RandomFeatures
from vcal_dist.gp import GPSettings
from vcal_dist.priors import ThetaPrior
from vcal_dist.problems import borehole

F64 = torch.float64


def make(discrepancy: Any, outputs: int) -> CalibrationModel:
    delta = GPSettings(features=FeatureSettings(features=12, constant=1.0), amplitude=0.5, lengthscale=0.7)
    settings = ModelSettings(discrepancy=discrepancy, delta=delta)
    return CalibrationModel(5, ThetaPrior.from_problem(borehole.problem()), outputs, settings, dtype=F64)


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_slope_of_the_warping_is_a_difference_quotient(outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    model = make("general", outputs)
    assert model.delta is not None
    x = torch.rand(7, 5, generator=generator, dtype=F64)
    eta = torch.randn(7, outputs, generator=generator, dtype=F64)
    weights = torch.randn(outputs, model.delta.width, generator=generator, dtype=F64)

    def g(eta: torch.Tensor) -> torch.Tensor:
        return eta + model.phi_g(eta, x, None) @ weights.mT

    slope = model.warping_slope(eta, x, weights)
    assert slope.shape == (7, outputs)
    for k in range(outputs):
        step = torch.zeros(outputs, dtype=F64)
        step[k] = 1e-6
        quotient = (g(eta + step) - g(eta - step))[:, k] / 2e-6
        torch.testing.assert_close(slope[:, k], quotient, rtol=1e-6, atol=1e-8)
    # Without weights g is the identity in η, as in the additive model.
    torch.testing.assert_close(model.warping_slope(eta, x, 0 * weights), torch.ones_like(eta))


def test_only_a_general_discrepancy_warps() -> None:
    model = make("additive", 1)
    with pytest.raises(ModelError, match="discrepancy is 'additive'"):
        model.warping_slope(torch.zeros(1, 1), torch.zeros(1, 5), torch.zeros(1, 13))


@pytest.mark.parametrize(("kernel", "degrees"), [("gaussian", None), ("matern12", 1), ("matern32", 3), ("matern52", 5)])
def test_learned_frequencies_have_the_density_of_their_kernel(kernel: Any, degrees: int | None) -> None:
    def difference(d: int) -> tuple[float, float]:
        """log p(Ω) of two matrices, subtracted: its constant is left out."""
        ours, exact = [], []
        for seed in (1, 2):
            settings = FeatureSettings(kernel=kernel, features=10, frequencies="learned")
            features = RandomFeatures(d, settings, seed=seed, dtype=F64)
            columns = features.omega.detach().numpy().T  # (F, d)
            law = scipy.stats.multivariate_t(shape=torch.eye(d).numpy(), df=degrees) if degrees else None
            density = law.logpdf(columns) if law else scipy.stats.norm.logpdf(columns)
            ours.append(float(features.log_prior().detach()))
            exact.append(float(density.sum()))
        return ours[0] - ours[1], exact[0] - exact[1]

    for d in (1, 3):
        ours, exact = difference(d)
        assert ours == pytest.approx(exact, rel=1e-10)


def test_fixed_frequencies_have_no_prior() -> None:
    assert float(RandomFeatures(2, FeatureSettings(features=10), seed=0).log_prior().detach()) == 0.0


@pytest.mark.parametrize(("kind", "expected"), [("ard", [0.5, 2.0]), ("isotropic", [1.0])])
def test_lengthscales_can_be_started_anew(kind: Any, expected: list[float]) -> None:
    features = RandomFeatures(2, FeatureSettings(features=10, lengthscales=kind), seed=0, dtype=F64)
    features.set_lengthscale(torch.tensor([0.5, 2.0], dtype=F64))
    torch.testing.assert_close(features.log_lengthscale.exp(), torch.tensor(expected, dtype=F64))
