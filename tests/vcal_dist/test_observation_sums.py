"""The sums of one pass against the rows themselves: densities, scales, missing outputs, resuming."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vcal_dist.batches import take
from vcal_dist.calibration import CalibrationModel
from vcal_dist.densities import collapsed_log_density
from vcal_dist.errors import ModelError
from vcal_dist.features import Kernel, Lengthscales
from vcal_dist.nature import AMPLITUDE, KINDS, NOISE, Nature
from vcal_dist.observation_sums import ObservationSums, why_not
from vcal_dist.passes import compress

ROWS = 40


def setting(kit: Any, kind: str = "additive", *, missing: bool = True, **eta: Any) -> tuple[Any, Any, Any, Any]:
    """A model whose κ is not 1, what its runs say, observations of two outputs and points of θ̃."""
    settings = kit.model(kind, prior=kit.prior(2), outputs=2, free_kappa=True).settings
    shape = {name: eta.pop(name) for name in ("lengthscale",) if name in eta}
    features = replace(settings.eta.features, **eta)
    settings = replace(settings, eta=replace(settings.eta, features=features, **shape))
    model = CalibrationModel(2, kit.prior(2), 2, settings, dtype=torch.float64)
    with torch.no_grad():
        model.kappa.fill_(0.8)
        if features.lengthscales == "full":
            model.eta.last.below_diagonal.copy_(kit.randn(5, 6))
    frame = compress(model, [kit.runs(model, 30, missing=True)]).frame
    rows = kit.observations(model, ROWS, missing=missing)
    rows.weight[[3, 17]] = 0  # held out
    return model, frame, rows, kit.randn(50, 6, 2)


def summed(model: Any, frame: Any, rows: Any, centre: Any, nature: Nature | None = None) -> ObservationSums:
    sums = ObservationSums(model, frame, centre, nature)
    for chosen in torch.arange(ROWS).split([4, 1, 12, 23]):
        sums.take(take(rows, chosen))
    return sums


@pytest.mark.parametrize("kind", ["additive", "none"])
@pytest.mark.parametrize("missing", [False, True])
def test_densities_are_those_of_the_rows(kit: Any, kind: str, missing: bool) -> None:
    model, frame, rows, points = setting(kit, kind, missing=missing)
    exact = collapsed_log_density(model, frame, lambda: [rows], points)
    found = summed(model, frame, rows, points[0]).log_density(points)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", ["gaussian", "matern12", "matern32", "matern52"])
@pytest.mark.parametrize("lengthscales", ["isotropic", "ard", "full"])
def test_every_kernel_with_cosines_and_sines(kit: Any, kernel: Kernel, lengthscales: Lengthscales) -> None:
    model, frame, rows, points = setting(kit, kernel=kernel, lengthscales=lengthscales)
    exact = collapsed_log_density(model, frame, lambda: [rows], points)
    torch.testing.assert_close(summed(model, frame, rows, points[0]).log_density(points), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("columns", [{"constant": 0.7}, {"linear": 0.4}, {"constant": 0.7, "linear": 0.4}])
def test_constant_and_linear_columns_of_the_emulator(kit: Any, columns: dict[str, float]) -> None:
    model, frame, rows, points = setting(kit, **columns)
    exact = collapsed_log_density(model, frame, lambda: [rows], points)
    torch.testing.assert_close(summed(model, frame, rows, points[0]).log_density(points), exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["additive", "none"])
def test_amplitude_and_noise_scale_the_sums(kit: Any, kind: str) -> None:
    """The constant of δ has a prior of its own, and does not scale with the amplitude."""
    model, frame, rows, points = setting(kit, kind)
    nature = Nature(model, (AMPLITUDE, NOISE))
    points = torch.cat([points, 0.7 * kit.randn(52, len(points), nature.dim)], 1)
    exact = collapsed_log_density(model, frame, lambda: [rows], points, nature)
    found = summed(model, frame, rows, points[0, :2], nature).log_density(points)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)


def test_no_digits_are_lost_where_the_noise_is_small(kit: Any) -> None:
    """Residuals of 10⁻⁶ beside outputs of 1: the squares of these differ in the last four digits of a double."""
    model, frame, rows, _ = setting(kit, "none", missing=False)
    centre = torch.tensor([0.1, -0.2], dtype=torch.float64)
    with torch.no_grad():
        model.likelihood_y.raw_noise.fill_(-14.0)
        model.likelihood_z.raw_noise.fill_(-14.0)
        for likelihood in (model.likelihood_y, model.likelihood_z):
            likelihood.floor = 0.0
        unit = model.rows_of_theta(centre[None], ROWS)
        y = model.kappa * (model.phi_eta(rows.x, unit, None)[0] @ frame.mean.mT)
        rows = rows._replace(y=y + 1e-6 * kit.randn(8, ROWS, 2))
    points = centre + 1e-6 * kit.randn(9, 6, 2)
    exact = collapsed_log_density(model, frame, lambda: [rows], points)
    found = summed(model, frame, rows, centre).log_density(points)
    torch.testing.assert_close(found - found[0], exact - exact[0], rtol=1e-5, atol=1e-5)


def test_a_pass_resumes_from_its_middle(kit: Any) -> None:
    model, frame, rows, points = setting(kit)
    whole, begun, resumed = (ObservationSums(model, frame, points[i]) for i in (0, 0, 1))
    for part in (whole, begun):
        part.take(take(rows, slice(0, 9)))
    resumed.load(begun.state())
    for part in (whole, resumed):
        part.take(take(rows, slice(9, None)))
    assert torch.equal(resumed.log_density(points), whole.log_density(points))


def test_what_does_not_compress_says_why(kit: Any) -> None:
    assert not why_not(kit.model("additive"), noise=False)
    assert "noise of their own" in why_not(kit.model("additive"), noise=True)
    assert "general" in why_not(kit.model("general"), noise=False)
    assert "hidden layers" in why_not(kit.model("additive", hidden=(2,)), noise=False)
    assert "variational" in why_not(kit.model("additive", frequencies="variational"), noise=False)
    assert "residual" in why_not(kit.model("additive", varying_residual=True), noise=False)


def test_there_must_be_rows(kit: Any) -> None:
    model, frame, _, points = setting(kit)
    with pytest.raises(ModelError, match="no observations"):
        ObservationSums(model, frame, points[0]).log_density(points)


def test_length_scales_are_refused(kit: Any) -> None:
    model, frame, _, points = setting(kit)
    with pytest.raises(AssertionError, match="length scales"):
        ObservationSums(model, frame, points[0], Nature(model, KINDS))
