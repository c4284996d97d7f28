"""g and its slope against weights that are known, finite differences and transforms done by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from storage.problem import parse_problem
from vcal_dist.batches import Scaling
from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Arrow, FullRank
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.posterior import Posterior
from vcal_dist.priors import ThetaPrior
from vcal_dist.transforms import OutputScaling, TransformSettings
from vcal_dist.warping import warp

F64 = torch.float64
MEAN, SD = torch.tensor([2.0, 1.5], dtype=F64), torch.tensor([0.5, 0.8], dtype=F64)


def known(kit: Any, transform: TransformSettings, precision: float = 1e10, counts: bool = False) -> Posterior:
    """A posterior with weights that are known to 1/√precision, of two control inputs and two outputs."""
    problem = parse_problem(
        {
            "name": "warped",
            "control_inputs": [{"name": n, "bounds": [0, 10]} for n in ("a", "b")],
            "calibration_inputs": [{"name": "t", "bounds": [0, 1]}],
            "outputs": [{"name": "u"}, {"name": "v"}],
        }
    )
    likelihood = LikelihoodSettings(kind="poisson") if counts else LikelihoodSettings()
    prior = ThetaPrior.from_problem(problem)
    model = kit.model("general", prior=prior, outputs=2, likelihood_y=likelihood, likelihood_z=likelihood)
    q = FullRank(1, 2, model.width)
    weights = precision * torch.eye(model.width, dtype=F64).expand(2, -1, -1)
    arrow = Arrow(torch.full((1, 1), 1e12, dtype=F64), torch.zeros(2, 1, model.width, dtype=F64), weights)
    q.move(torch.zeros(1, dtype=F64), kit.randn(7, 2, model.width), arrow)
    mean, sd = (torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64)) if counts else (MEAN, SD)
    scaling = Scaling(problem, OutputScaling([transform] * 2, mean, sd, ["u", "v"]), F64)
    return Posterior(scaling, model, [q], torch.zeros(1, dtype=F64), {})


@pytest.mark.parametrize("kind", ["none", "sqrt", "log", "counts"])
def test_the_slope_is_that_of_finite_differences_in_the_users_units(kit: Any, kind: Any) -> None:
    transform = TransformSettings(kind="none" if kind == "counts" else kind)
    posterior = known(kit, transform, counts=kind == "counts")
    x, eta = np.array([[1.0, 2.0], [5.0, 9.0], [8.0, 0.0]]), np.array([1.7, 2.2, 2.9])
    found = warp(posterior, x, eta, "v")
    step = 1e-4
    above, below = (warp(posterior, x, eta + sign * step, "v").mean for sign in (1, -1))
    np.testing.assert_allclose(found.slope, (above - below) / (2 * step), rtol=1e-5)
    assert np.ptp(found.slope) > 0.02  # it is no constant
    assert (found.sd < 1e-3).all()


def test_g_is_what_its_weights_say_and_its_slope_that_of_the_model(kit: Any) -> None:
    posterior = known(kit, TransformSettings())
    x, eta = np.array([[1.0, 2.0], [5.0, 9.0]]), np.array([1.7, 2.2])
    q = posterior.components[0]
    assert isinstance(q, FullRank)
    others = (torch.from_numpy(posterior.predict(x, "emulator").mean) - MEAN) / SD  # u stays at its emulator's mean
    scaled = torch.stack([others[:, 0], (torch.from_numpy(eta) - MEAN[1]) / SD[1]], 1)
    weights = q.raw_mean[:, posterior.model.eta.width :]
    unit = torch.from_numpy(x) / 10
    g = scaled + posterior.model.phi_g(scaled, unit, None) @ weights.mT
    found = warp(posterior, x, eta, "v")
    np.testing.assert_allclose(found.mean, (g * SD + MEAN)[:, 1].detach(), rtol=1e-5)
    # Without transforms, scaling cancels in dg/dη.
    np.testing.assert_allclose(found.slope, posterior.model.warping_slope(scaled, unit, weights)[:, 1], rtol=1e-4)


def test_under_a_logarithm_the_slope_follows_the_chain_rule(kit: Any) -> None:
    """log y = log e + 0 without weights of g: y = e, of slope one; an offset c in T-space makes it a factor."""
    posterior = known(kit, TransformSettings(kind="log"))
    q = posterior.components[0]
    assert isinstance(q, FullRank)
    mean = q.raw_mean.clone()
    mean[:, posterior.model.eta.width :] = 0.0
    mean[:, -1] = 0.7  # the features' last column is a constant, one
    q.move(q.theta_mean, mean, q.precision)
    found = warp(posterior, [[3.0, 3.0]] * 3, [0.5, 1.0, 4.0], "u")
    factor = np.exp(0.7 * float(SD[0]))
    np.testing.assert_allclose(found.mean, factor * np.array([0.5, 1.0, 4.0]), rtol=1e-4)
    np.testing.assert_allclose(found.slope, factor, rtol=1e-4)


def test_uncertain_weights_make_g_and_its_slope_uncertain(kit: Any) -> None:
    """Both are linear in the weights of g: their variance is that of the features, and of their derivatives."""
    posterior = known(kit, TransformSettings(), precision=25.0)
    x, eta = np.array([[1.0, 2.0], [5.0, 9.0]]), np.array([1.7, 2.2])
    found = warp(posterior, x, eta, "u", draws=8192)
    others = (torch.from_numpy(posterior.predict(x, "emulator").mean) - MEAN) / SD
    unit = torch.from_numpy(x) / 10

    def features(value: torch.Tensor) -> torch.Tensor:
        scaled = torch.stack([(value - MEAN[0]) / SD[0], others[:, 1]], 1)
        return posterior.model.phi_g(scaled, unit, None).detach()

    at = torch.from_numpy(eta)
    derivative = (features(at + 1e-5) - features(at - 1e-5)) / 2e-5
    np.testing.assert_allclose(found.sd, SD[0] * features(at).norm(dim=1) / 5, rtol=0.03)
    np.testing.assert_allclose(found.slope_sd, SD[0] * derivative.norm(dim=1) / 5, rtol=0.03)


def test_what_cannot_be_warped_is_refused(kit: Any) -> None:
    posterior = known(kit, TransformSettings())
    with pytest.raises(ModelError, match="unknown output 'w'; accepted: u, v"):
        warp(posterior, [[1.0, 1.0]], [1.0], "w")
    with pytest.raises(ModelError, match="x has 1 rows and eta 2 values"):
        warp(posterior, [[1.0, 1.0]], [1.0, 2.0])
    with pytest.raises(ModelError, match="out of bounds"):
        warp(posterior, [[1.0, 11.0]], [1.0])
