"""Output transforms against SciPy, autograd and quadrature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from vcal_dist.errors import ModelError
from vcal_dist.transforms import OutputScaling, TransformSettings, fit_power

NAMES = ["plain", "root", "log", "cox", "negative cox", "log by cox"]
TRANSFORMS = [
    TransformSettings(),
    TransformSettings(kind="sqrt"),
    TransformSettings(kind="log"),
    TransformSettings(kind="boxcox", power=0.3),
    TransformSettings(kind="boxcox", power=-0.7),
    TransformSettings(kind="boxcox", power=0),
]


def runs(count: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, len(NAMES), dtype=torch.float64, generator=generator).exp() + 0.1


def scaling() -> OutputScaling:
    return OutputScaling.from_runs(runs(), TRANSFORMS, NAMES)


def single(transform: TransformSettings, mean: float = 0.0, sd: float = 1.0) -> OutputScaling:
    return OutputScaling([transform], torch.tensor([mean]).double(), torch.tensor([sd]).double(), ["flow"])


def test_the_transforms_are_those_of_numpy_and_scipy() -> None:
    z = runs()
    s = OutputScaling(TRANSFORMS, torch.full((6,), 2.0), torch.full((6,), 4.0), NAMES)(z).numpy()
    columns = z.numpy().T
    expected = [columns[0], np.sqrt(columns[1]), np.log(columns[2])]
    expected += [special.boxcox(columns[3], 0.3), special.boxcox(columns[4], -0.7), np.log(columns[5])]
    assert s == pytest.approx((np.stack(expected, -1) - 2) / 4, rel=1e-12)


def test_a_small_power_is_nearly_the_logarithm() -> None:
    z = torch.tensor([[3.0]], dtype=torch.float64)
    s = single(TransformSettings(kind="boxcox", power=1e-12))
    assert s(z).item() == pytest.approx(math.log(3), rel=1e-11)
    assert s.inverse(s(z)).item() == pytest.approx(3, rel=1e-11)


def test_scaled_runs_have_mean_zero_and_sd_one() -> None:
    s = scaling()(runs())
    assert torch.allclose(s.mean(0), torch.zeros(6).double(), atol=1e-12)
    assert torch.allclose(s.std(0), torch.ones(6).double(), rtol=1e-12)


def test_inverse_undoes_forward_in_the_units_of_the_user() -> None:
    z, scale = runs(), scaling()
    assert torch.allclose(scale.inverse(scale(z)), z, rtol=1e-11, atol=0)
    samples = scale(z).expand(3, -1, -1)  # any leading dimensions
    assert torch.equal(scale.inverse(samples)[2], scale.inverse(scale(z)))


def test_the_log_jacobian_is_that_of_autograd() -> None:
    z, scale = runs().requires_grad_(), scaling()
    (slope,) = torch.autograd.grad(scale(z).sum(), z)
    assert torch.allclose(scale.log_jacobian(z), slope.abs().log(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=NAMES)
def test_a_density_with_its_jacobian_integrates_to_one(transform: TransformSettings) -> None:
    scale, noise = single(transform, mean=2.0, sd=0.4), stats.norm(-0.5, 0.2)
    if transform.power == -0.7:
        scale = single(transform, mean=0.5, sd=0.1)  # T(z) < 1/0.7

    def density(log_z: float) -> float:  # ∫ p(z) dz = ∫ p(z)·z d log z; all of the mass is at positive z
        z = torch.tensor([[math.exp(log_z)]], dtype=torch.float64)
        return float(noise.pdf(scale(z).item()) * math.exp(scale.log_jacobian(z).item() + log_z))

    assert integrate.quad(density, -6, 6, limit=200, epsabs=1e-10)[0] == pytest.approx(1, abs=1e-7)


def test_noise_of_an_observation_scales_with_the_slope() -> None:
    scale, z = scaling(), runs(5)
    noise = 1e-6 * z
    # The delta method is the difference quotient of the transform.
    difference = (scale(z + noise) - scale(z - noise)) / 2
    assert torch.allclose(scale.scale_noise(z, noise), difference, rtol=1e-6, atol=0)


def test_nan_stays_nan_and_has_no_jacobian() -> None:
    z, scale = runs(), scaling()
    missing = torch.rand(z.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    holes = z.masked_fill(missing, torch.nan)
    assert torch.equal(scale(holes).isnan(), missing)
    assert torch.equal(scale(holes)[~missing], scale(z)[~missing])
    assert torch.equal(scale.inverse(scale(holes)).isnan(), missing)
    jacobian = scale.log_jacobian(holes)
    assert (jacobian[missing] == 0).all()
    assert torch.equal(jacobian[~missing], scale.log_jacobian(z)[~missing])
    assert torch.equal(scale.scale_noise(holes, z)[missing], z[missing])


def test_statistics_leave_out_missing_values() -> None:
    z = runs()
    z[::3, 1] = torch.nan
    scale = OutputScaling.from_runs(z, TRANSFORMS, NAMES)
    known = np.sqrt(z[:, 1].numpy())
    assert scale.mean[1].item() == pytest.approx(np.nanmean(known), rel=1e-12)
    assert scale.sd[1].item() == pytest.approx(np.nanstd(known, ddof=1), rel=1e-12)
    assert torch.equal(scale.mean[2:], scaling().mean[2:])


def test_without_standardisation_mean_is_zero_and_sd_one() -> None:
    z = torch.ones(4, 1)  # a constant count is no error
    scale = OutputScaling.from_runs(z, [TransformSettings()], ["count"], standardise=False)
    assert (scale.mean.item(), scale.sd.item()) == (0, 1)
    assert torch.equal(scale(z), z)


def test_one_output_can_keep_its_units_beside_others_that_are_standardised() -> None:
    z = torch.stack([torch.arange(4.0), torch.full((4,), 3.0)], 1)  # the second never varies, which is no error here
    kept = TransformSettings(kind="sqrt", standardise=False)
    scale = OutputScaling.from_runs(z, [TransformSettings(), kept], ["a", "b"])
    assert scale.mean.tolist() == [1.5, 0]
    assert scale.sd.tolist() == pytest.approx([np.std(np.arange(4), ddof=1), 1])
    torch.testing.assert_close(scale(z)[:, 1], z[:, 1].sqrt())


def test_float32_is_scaled_in_float64() -> None:
    z = 1e7 + torch.arange(10.0)[:, None]
    scale = OutputScaling.from_runs(z, [TransformSettings()], ["flow"])
    s = scale(z)
    assert s.dtype == scale.log_jacobian(z).dtype == scale.inverse(s).dtype == torch.float32
    exact = (z.double() - z.double().mean()) / z.double().std()
    assert torch.equal(s, exact.float())
    assert torch.equal(scale.inverse(s), z)


def test_beyond_the_range_of_a_transform_the_inverse_is_its_limit() -> None:
    s = torch.tensor([[-50.0], [50.0]], dtype=torch.float64)
    assert single(TransformSettings(kind="sqrt")).inverse(s)[0].item() == 0
    assert single(TransformSettings(kind="boxcox", power=0.5)).inverse(s)[0].item() == 0
    assert single(TransformSettings(kind="boxcox", power=-0.5)).inverse(s)[1].item() == math.inf
    assert single(TransformSettings(kind="boxcox", power=-0.5)).inverse(s)[0].item() > 0


def test_the_statistics_travel_in_the_state() -> None:
    other = OutputScaling(TRANSFORMS, torch.zeros(6).double(), torch.ones(6).double(), NAMES)
    other.load_state_dict(scaling().state_dict())
    assert torch.equal(other(runs()), scaling()(runs()))


@pytest.mark.parametrize("power", [-0.5, 0.0, 0.4])
def test_fit_power_finds_the_power_that_made_the_data(power: float) -> None:
    normal = np.random.default_rng(1).normal(0.5, 0.3, 4000)
    z = torch.from_numpy(special.inv_boxcox(normal, power))
    z[::100] = torch.nan
    found = fit_power(z)
    known = z[~z.isnan()].numpy()
    assert found == pytest.approx(power, abs=0.15)
    for other in (found - 0.05, found + 0.05):
        assert stats.boxcox_llf(found, known) > stats.boxcox_llf(other, known)
    assert TransformSettings(kind="boxcox", power=found).forward(z[1:2]).item() == pytest.approx(
        stats.boxcox(known, found)[0].item(), rel=1e-10
    )


@pytest.mark.parametrize(
    ("kind", "power", "value", "message"),
    [
        ("sqrt", None, -0.5, "'flow' is -0.5 in row 1, but transform sqrt needs values of zero or more"),
        ("log", None, 0.0, "'flow' is 0 in row 1, but transform log needs positive values"),
        ("boxcox", 2.0, -3.0, "'flow' is -3 in row 1, but transform boxcox needs positive values"),
        ("none", None, math.inf, "'flow' is inf in row 1; remove the row"),
    ],
)
def test_a_value_outside_the_domain_is_an_error_that_names_it(
    kind: Any, power: float | None, value: float, message: str
) -> None:
    scale = single(TransformSettings(kind=kind, power=power))
    z = torch.tensor([[1.0], [value], [2.0]])
    with pytest.raises(ModelError, match=message):
        scale(z)
    with pytest.raises(ModelError, match=f"'flow' is {value:g} in row 1"):
        scale.log_jacobian(z)


def test_the_square_root_takes_zero_but_has_no_slope_there() -> None:
    scale = single(TransformSettings(kind="sqrt"))
    zero = torch.zeros(1, 1)
    assert scale(zero).item() == 0
    with pytest.raises(ModelError, match="sqrt needs positive values: its slope at 0 is infinite"):
        scale.log_jacobian(zero)
    with pytest.raises(ModelError, match="sqrt needs positive values"):
        scale.scale_noise(zero, zero + 1)


def test_runs_that_cannot_be_standardised_are_errors() -> None:
    none = [TransformSettings()] * 2
    good = torch.arange(3.0)
    with pytest.raises(ModelError, match="'b' is the same in all 3 runs"):
        OutputScaling.from_runs(torch.stack([good, torch.full((3,), 0.1)], 1), none, ["a", "b"])
    with pytest.raises(ModelError, match="'b' has 1 known values in 3 runs"):
        OutputScaling.from_runs(torch.tensor([[1, 2], [2, torch.nan], [3, torch.nan]]), none, ["a", "b"])
    with pytest.raises(ModelError, match="'a' has 0 known values in 0 runs"):
        OutputScaling.from_runs(torch.zeros(0, 2), none, ["a", "b"])


def test_settings_and_shapes_are_checked() -> None:
    with pytest.raises(ModelError, match="'cube'; accepted: none, sqrt, log, boxcox"):
        TransformSettings(kind="cube")
    with pytest.raises(ModelError, match="needs a finite power, got None"):
        TransformSettings(kind="boxcox")
    with pytest.raises(ModelError, match="needs a finite power, got nan"):
        TransformSettings(kind="boxcox", power=math.nan)
    with pytest.raises(ModelError, match=r"transform log takes no power, got 0\.5"):
        TransformSettings(kind="log", power=0.5)
    with pytest.raises(ModelError, match="1 transforms for 2 outputs"):
        OutputScaling.from_runs(torch.zeros(3, 2), [TransformSettings()], ["a", "b"])
    with pytest.raises(ModelError, match=r"shapes \(2,\) and \(1,\)"):
        OutputScaling([TransformSettings()], torch.zeros(2), torch.ones(1), ["a"])
    with pytest.raises(ModelError, match="'flow' needs a finite mean and a positive sd, got mean 0 and sd 0"):
        single(TransformSettings(), sd=0.0)
    with pytest.raises(ModelError, match=r"expected \(rows, 1\) for the outputs flow, got \(3, 2\)"):
        single(TransformSettings())(torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("values", "message"),
    [([1.0, math.nan], "two or more different"), ([2.0, 2.0], "two or more different"), ([1.0, 0.0], "from 0 to 1")],
)
def test_fit_power_refuses_what_has_no_power(values: list[float], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        fit_power(torch.tensor(values))
