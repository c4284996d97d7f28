"""Random features against the kernels that they approximate, and the kernels against independent formulas."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from vcal_dist import features
from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings, Kernel, RandomFeatures

KERNELS = get_args(Kernel)
STATIONARY = ("gaussian", "matern12", "matern32", "matern52")
ELL = (0.5, 0.8, 1.2)

# Forward-mode differentiation makes torch import decompositions that it compiles with its own deprecated torch.jit.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def make(inputs: int, *, seed: int = 1, dtype: torch.dtype = torch.float64, **settings: Any) -> RandomFeatures:
    """Features in float64, with three unequal length scales where there are three inputs."""
    start = ELL if inputs == 3 and settings.get("lengthscales") != "isotropic" else 0.6
    return RandomFeatures(
        inputs, FeatureSettings(**settings), seed=seed, lengthscale=start, amplitude=1.3, dtype=dtype
    ).requires_grad_(False)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def errors(inputs: int, seeds: range, **settings: Any) -> Tensor:
    """φφᵀ − K over seeds and pairs of rows, (seeds, pairs)."""
    u, v = rows(5, inputs), rows(4, inputs, seed=1)
    found = []
    for seed in seeds:
        phi = make(inputs, seed=seed, **settings)
        found.append((phi(u) @ phi(v).mT - phi.kernel(u, v)).flatten())
    return torch.stack(found)


@pytest.mark.parametrize("inputs", [1, 3])
@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_features_are_unbiased_and_converge_to_the_kernel_at_the_monte_carlo_rate(
    kernel: str, orthogonal: bool, inputs: int
) -> None:
    few = errors(inputs, range(120), kernel=kernel, features=62, orthogonal=orthogonal)
    many = errors(inputs, range(120), kernel=kernel, features=992, orthogonal=orthogonal)
    z = many.mean(0) / many.std(0) * math.sqrt(len(many))  # biases in standard errors, one for each pair
    assert z.abs().max() < 4.5
    ratio = few.square().mean().sqrt() / many.square().mean().sqrt()
    assert 3.1 < ratio < 5.1  # 16 times the features: a quarter of the error


@pytest.mark.parametrize("kernel", STATIONARY)
def test_plain_features_have_the_variance_that_the_spectral_density_implies(kernel: str) -> None:
    phi = make(3, kernel=kernel)
    u, v = rows(5, 3), rows(4, 3, seed=1)
    k, k_twice = (phi.kernel(c * u, c * v) / 1.3**2 for c in (1, 2))  # k at r and at 2r
    # Var cos(ωr) = ½(1 + k(2r)) − k(r)²
    expected = 1.3**4 * (0.5 * (1 + k_twice) - k.square()).flatten() / 20
    found = errors(3, range(300), kernel=kernel, features=40, orthogonal=False).square().mean(0)
    assert torch.allclose(found, expected, rtol=0.35)
    assert found.mean() == pytest.approx(expected.mean().item(), rel=0.12)


def gaussian(r: np.ndarray) -> np.ndarray:
    return stats.norm.pdf(r) / stats.norm.pdf(0)


def matern(nu: float) -> Callable[[np.ndarray], np.ndarray]:
    def k(r: np.ndarray) -> np.ndarray:
        s = math.sqrt(2 * nu) * r
        return 2 ** (1 - nu) / special.gamma(nu) * s**nu * special.kv(nu, s)

    return k


@pytest.mark.parametrize("lengthscales", ["isotropic", "ard"])
@pytest.mark.parametrize(
    ("kernel", "k"),
    [("gaussian", gaussian), ("matern12", matern(0.5)), ("matern32", matern(1.5)), ("matern52", matern(2.5))],
)
def test_stationary_kernels_equal_the_bessel_formula(
    kernel: str, k: Callable[[np.ndarray], np.ndarray], lengthscales: str
) -> None:
    u, v = rows(6, 3), rows(5, 3, seed=1)
    ell = np.array(ELL if lengthscales == "ard" else 0.6)
    r = np.sqrt((((u[:, None] - v).numpy() / ell) ** 2).sum(-1))
    phi = make(3, kernel=kernel, lengthscales=lengthscales)
    np.testing.assert_allclose(phi.kernel(u, v).numpy(), 1.3**2 * k(r), rtol=1e-12)
    np.testing.assert_allclose(phi.kernel(u, u).diagonal().numpy(), 1.3**2, rtol=1e-12)


@pytest.mark.parametrize("order", [0, 1])
def test_arc_cosine_kernels_equal_their_integral(order: int) -> None:
    phi = make(3, kernel=f"arccos{order}")
    u, v = rows(3, 3), rows(2, 3, seed=1) - 1.5
    a, b = (np.hstack([np.ones((len(x), 1)), x.numpy() / ELL]) for x in (u, v))
    found = phi.kernel(u, v).numpy()
    for i, j in np.ndindex(3, 2):
        # In the plane of ũ and ṽ: 2∫ N(ω) Θ(ω·ũ) Θ(ω·ṽ) (ω·ũ)ⁿ (ω·ṽ)ⁿ dω, in polar coordinates from ũ.
        alpha = math.acos(a[i] @ b[j] / np.linalg.norm(a[i]) / np.linalg.norm(b[j]))
        t = np.linspace(alpha - np.pi / 2, np.pi / 2, 2001)
        by_angle = integrate.simpson((np.cos(t) * np.cos(t - alpha)) ** order, x=t)
        by_radius = integrate.quad(lambda r: r ** (2 * order + 1) * math.exp(-r * r / 2), 0, np.inf)[0]
        lengths = (np.linalg.norm(a[i]) * np.linalg.norm(b[j])) ** order
        assert found[i, j] == pytest.approx(1.3**2 * 2 * lengths * by_angle * by_radius / (2 * np.pi), rel=1e-8)


def test_the_arc_cosine_kernel_keeps_small_angles_in_float32() -> None:
    u = rows(1, 3)
    v = u + torch.tensor([1e-5, 0, 0])
    exact, single = make(3, kernel="arccos0"), make(3, kernel="arccos0", dtype=torch.float32)
    drop = 1.3**2 - exact.kernel(u, v)
    assert 1e-7 < drop.item() < 1e-4
    assert 1.3**2 - single.kernel(u.float(), v.float()).double() == pytest.approx(drop.item(), abs=5e-7)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_has_a_finite_gradient_where_rows_coincide(kernel: str) -> None:
    phi, u = make(3, kernel=kernel).requires_grad_(True), rows(4, 3).requires_grad_()
    phi.kernel(u, u).sum().backward()
    assert u.grad is not None
    assert u.grad.isfinite().all()
    assert phi.log_lengthscale.grad is not None
    assert phi.log_lengthscale.grad.isfinite().all()


def test_orthogonal_frequencies_lower_the_error() -> None:
    u = rows(20, 8)

    def error(seed: int, orthogonal: bool) -> float:
        settings = FeatureSettings(features=64, orthogonal=orthogonal)
        phi = RandomFeatures(8, settings, seed=seed, lengthscale=1.5, dtype=torch.float64).requires_grad_(False)
        return float((phi(u) @ phi(u).mT - phi.kernel(u, u)).square().mean())

    plain, orthogonal = (np.mean([error(seed, which) for seed in range(40)]) for which in (False, True))
    assert orthogonal < 0.5 * plain


@pytest.mark.parametrize(("inputs", "share"), [(1, 0.25), (2, 0.3), (5, 0.5), (9, 0.65)])
def test_a_low_discrepancy_sequence_lowers_the_error_further(inputs: int, share: float) -> None:
    u = rows(40, inputs)

    def error(seed: int, quasi: bool) -> float:
        settings = FeatureSettings(features=400, quasi=quasi)
        length = 0.5 * math.sqrt(inputs)
        phi = RandomFeatures(inputs, settings, seed=seed, lengthscale=length, dtype=torch.float64).requires_grad_(False)
        return float((phi(u) @ phi(u).mT - phi.kernel(u, u)).square().mean().sqrt())

    orthogonal, quasi = (np.mean([error(seed, which) for seed in range(10)]) for which in (False, True))
    assert quasi < share * orthogonal


@pytest.mark.parametrize("kernel", KERNELS)
def test_frequencies_of_a_low_discrepancy_sequence_have_the_spectral_density(kernel: str) -> None:
    phi = make(3, kernel=kernel, features=6000, quasi=True)
    omega = phi.frequencies()
    degrees = features.DEGREES_OF_FREEDOM.get(kernel)
    law = stats.norm() if degrees is None else stats.t(degrees)
    for entry in omega:
        assert stats.kstest(entry.numpy(), law.cdf).pvalue > 1e-3
    if degrees is None:
        torch.testing.assert_close(omega @ omega.mT / omega.shape[1], torch.eye(len(omega), dtype=torch.float64))
    u, v = rows(5, 3), rows(4, 3, seed=1)
    torch.testing.assert_close(phi(u) @ phi(v).mT, phi.kernel(u, v), rtol=0, atol=0.05)
    assert make(3, kernel=kernel, features=2, quasi=True).frequencies().isfinite().all()  # fewer than directions
    assert not torch.equal(omega, make(3, kernel=kernel, features=6000, quasi=True, seed=9).frequencies())
    assert torch.equal(omega, make(3, kernel=kernel, features=6000, quasi=True).frequencies())


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("kernel", STATIONARY)
def test_norms_of_frequencies_follow_the_spectral_density(kernel: str, orthogonal: bool) -> None:
    d = 5
    square = make(d, kernel=kernel, features=6002, orthogonal=orthogonal).frequencies().square().sum(0) / d
    degrees = features.DEGREES_OF_FREEDOM.get(kernel)
    # |ω|² of a normal vector is χ²(d), of a Student-t vector d·F(d, 2ν).
    law = stats.chi2(d, scale=1 / d) if degrees is None else stats.f(d, degrees)
    assert stats.kstest(square.numpy(), law.cdf).pvalue > 1e-3


@pytest.mark.parametrize("kernel", ["gaussian", "matern32", "arccos1"])
def test_entries_of_orthogonal_frequencies_have_the_marginals_of_plain_ones(kernel: str) -> None:
    omega = make(3, kernel=kernel, features=6002, orthogonal=True).frequencies()
    law = stats.t(3) if kernel == "matern32" else stats.norm()
    for entry in omega:
        for offset in range(len(omega)):  # each place within a block: a Q that is not Haar shows here
            assert stats.kstest(entry[offset :: len(omega)].numpy(), law.cdf).pvalue > 1e-4


def test_orthogonal_frequencies_come_in_orthogonal_blocks_of_which_the_last_may_be_cut() -> None:
    for d, F in [(4, 10), (8, 3), (1, 5)]:
        directions = torch.nn.functional.normalize(make(d, features=2 * F).frequencies(), dim=0)
        assert directions.shape == (d, F)
        same_block = torch.arange(F)[:, None] // d == torch.arange(F) // d
        products = directions.mT @ directions
        assert torch.allclose(products[same_block], torch.eye(F, dtype=torch.float64)[same_block], atol=1e-12)
        if d == 4:
            assert products[~same_block].abs().max() > 0.1
    plain = torch.nn.functional.normalize(make(4, features=8, orthogonal=False).frequencies(), dim=0)
    assert (plain.mT @ plain - torch.eye(4)).abs().max() > 0.1


@pytest.mark.parametrize("kernel", KERNELS)
def test_only_the_seed_decides_the_frequencies(kernel: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = make(3, kernel=kernel, features=20, seed=7)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert torch.equal(first.frequencies(), make(3, kernel=kernel, features=20, seed=7).frequencies())
    assert not torch.allclose(first.frequencies(), make(3, kernel=kernel, features=20, seed=8).frequencies())
    single = make(3, kernel=kernel, features=20, seed=7, dtype=torch.float32)
    assert single.frequencies().dtype == single(rows(2, 3).float()).dtype == torch.float32
    assert torch.equal(single.frequencies(), first.frequencies().float())
    for how in ("learned", "variational"):  # they start at the same draw
        assert torch.allclose(
            first.frequencies(), make(3, kernel=kernel, features=20, seed=7, frequencies=how).frequencies()
        )


@pytest.mark.parametrize(
    ("how", "learnable", "kept"),
    [
        ("fixed", [], ["omega"]),
        ("learned", ["omega"], []),
        ("variational", ["mean", "log_sd"], ["radial"]),
    ],
)
def test_frequencies_are_a_buffer_or_parameters_and_all_of_it_is_saved(
    how: str, learnable: list[str], kept: list[str]
) -> None:
    phi = make(3, features=10, frequencies=how)
    assert {name for name, _ in phi.named_parameters()} == {"log_lengthscale", "log_amplitude", *learnable}
    assert [name for name, _ in phi.named_buffers()] == kept
    other = make(3, features=10, frequencies=how, seed=2)
    other.load_state_dict(phi.state_dict())
    assert torch.equal(other(rows(4, 3)), phi(rows(4, 3)))


@pytest.mark.parametrize("kernel", ["matern32", "arccos1"])
def test_isotropic_ard_and_full_agree_where_they_must(kernel: str) -> None:
    u, v = rows(6, 3), rows(5, 3, seed=1)

    def build(lengthscales: Any, ell: Any) -> RandomFeatures:
        settings = FeatureSettings(kernel=kernel, features=20, lengthscales=lengthscales)  # type: ignore[arg-type]
        return RandomFeatures(3, settings, seed=1, lengthscale=ell, dtype=torch.float64)

    for one, other in [
        (build("isotropic", 0.7), build("ard", [0.7] * 3)),
        (build("ard", 0.7), build("ard", [0.7] * 3)),
        (build("ard", ELL), build("full", ELL)),
    ]:
        assert torch.allclose(one(u), other(u), rtol=1e-13)
        assert torch.allclose(one.kernel(u, v), other.kernel(u, v), rtol=1e-13)
    assert not torch.allclose(build("ard", ELL)(u), build("ard", 0.7)(u))
    # By hand: the features of u/ℓ at unit length scale.
    assert torch.allclose(build("ard", ELL)(u), build("ard", 1.0)(u / torch.tensor(ELL, dtype=u.dtype)), rtol=1e-12)


@pytest.mark.parametrize("kernel", ["gaussian", "arccos1"])
def test_a_full_factor_is_the_metric_between_rows(kernel: str) -> None:
    u, v = rows(6, 3), rows(5, 3, seed=1)
    phi = make(3, kernel=kernel, features=20_000, lengthscales="full")
    phi.below_diagonal.copy_(torch.tensor([0.9, -0.5, 0.4], dtype=torch.float64))
    L = torch.tensor([[1 / 0.5, 0, 0], [0.9, 1 / 0.8, 0], [-0.5, 0.4, 1 / 1.2]], dtype=torch.float64)
    if kernel == "gaussian":
        difference = u[:, None] - v
        exact = 1.3**2 * torch.exp(-0.5 * torch.einsum("bci,ij,bcj->bc", difference, L @ L.mT, difference))
    else:
        at_unit_length = RandomFeatures(
            3, FeatureSettings(kernel="arccos1"), seed=1, amplitude=1.3, dtype=torch.float64
        )
        exact = at_unit_length.kernel(u @ L, v @ L)
    assert torch.allclose(phi.kernel(u, v), exact, rtol=1e-12)
    assert torch.allclose(phi(u) @ phi(v).mT, exact, atol=0.05 * float(exact.detach().max()))


@forward_mode
@pytest.mark.parametrize("lengthscales", ["isotropic", "ard", "full"])
@pytest.mark.parametrize("kernel", ["gaussian", "matern32", "arccos1"])
def test_gradients_equal_finite_differences(kernel: str, lengthscales: str) -> None:
    phi = make(3, kernel=kernel, features=6, lengthscales=lengthscales, constant=2.0, linear=0.5)
    if lengthscales == "full":
        phi.below_diagonal.copy_(torch.tensor([0.9, -0.5, 0.4], dtype=torch.float64))
    names = [name for name, _ in phi.named_parameters()]
    arguments = [p.detach().clone().requires_grad_() for p in (rows(4, 3), phi.frequencies(), *phi.parameters())]

    def call(u: Tensor, Omega: Tensor, *parameters: Tensor) -> Any:
        return functional_call(phi, dict(zip(names, parameters, strict=True)), (u, Omega))

    assert gradcheck(call, arguments, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(call, arguments)


def test_a_fixed_amplitude_gets_no_gradient() -> None:
    phi, u = make(3, features=6), rows(4, 3).requires_grad_()
    phi(u).sum().backward()
    assert phi.log_amplitude.grad is None
    assert u.grad is not None


@forward_mode
def test_features_work_under_vmap() -> None:
    phi, u = make(3, features=6), rows(5, 4, 3)
    assert torch.allclose(torch.func.vmap(phi)(u), phi(u))
    jacobian = torch.func.vmap(torch.func.jacfwd(phi))(u[0][:, None])  # (4, 1, M, 1, 3)
    expected = torch.autograd.functional.jacobian(phi, u[0])  # (4, M, 4, 3)
    assert torch.allclose(jacobian[:, 0, :, 0], expected[torch.arange(4), :, torch.arange(4)])


@pytest.mark.parametrize("kernel", KERNELS)
def test_only_step_features_have_no_gradient_in_their_inputs(kernel: str) -> None:
    phi, u = make(3, kernel=kernel, features=10).requires_grad_(True), rows(4, 3).requires_grad_()
    phi(u).sum().backward()
    assert phi.differentiable == (u.grad is not None) == (kernel != "arccos0")
    assert phi.log_amplitude.grad is not None
    assert phi.log_amplitude.grad == pytest.approx(phi(u).sum().item())  # φ ∝ σ


@pytest.mark.parametrize("kernel", ["gaussian", "matern32", "arccos1"])
def test_variational_frequencies_are_mean_and_sd_times_noise_with_a_fixed_radial_part(kernel: str) -> None:
    fixed = make(3, kernel=kernel, features=10).frequencies()
    phi = make(3, kernel=kernel, features=10, frequencies="variational")
    assert phi.noise_shape == tuple(fixed.shape) == ((4, 10) if kernel == "arccos1" else (3, 5))
    assert torch.allclose(phi.frequencies(), fixed)
    noise = torch.randn(7, *phi.noise_shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    phi.log_sd.copy_(torch.linspace(-3, 0, phi.log_sd.numel()).reshape(phi.log_sd.shape))
    expected = fixed + phi.radial * phi.log_sd.exp() * noise
    assert torch.allclose(phi.frequencies(noise), expected)
    if kernel == "matern32":
        assert phi.radial.std() > 0.1
    else:
        assert torch.equal(phi.radial, torch.ones_like(phi.radial))
    for how in ("fixed", "learned"):
        other = make(3, kernel=kernel, features=10, frequencies=how)
        assert other.noise_shape is None
        assert torch.equal(other.frequencies(noise), other.frequencies())
        assert other.kl() == 0


def test_the_divergence_of_frequencies_equals_its_monte_carlo_estimate() -> None:
    phi = make(2, kernel="matern52", features=6, frequencies="variational")
    phi.log_sd.copy_(torch.tensor([[-1.0, 0.3, 0.0], [-2.0, 0.5, -0.5]]))
    assert phi.noise_shape is not None
    noise = torch.randn(40_000, *phi.noise_shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    base = phi.frequencies(noise) / phi.radial
    q = torch.distributions.Normal(phi.mean, phi.log_sd.exp())
    p = torch.distributions.Normal(torch.zeros_like(phi.mean), 1.0)
    terms = (q.log_prob(base) - p.log_prob(base)).sum((-2, -1))
    assert abs(float(terms.mean() - phi.kl())) < 4 * float(terms.std()) / math.sqrt(len(terms))
    assert phi.kl() > 1
    phi.mean.zero_()
    phi.log_sd.zero_()
    assert phi.kl() == 0


@pytest.mark.parametrize("kernel", ["gaussian", "arccos0"])
def test_constant_and_linear_columns_come_last_and_enter_the_kernel(kernel: str) -> None:
    u, v = rows(6, 3), rows(5, 3, seed=1)
    bare = make(3, kernel=kernel, features=10)
    both = make(3, kernel=kernel, features=10, constant=3.0, linear=0.5)
    assert (bare.width, make(3, constant=3.0, features=10).width, make(3, linear=1, features=10).width) == (10, 11, 13)
    expected = torch.cat([bare(u), torch.full((6, 1), 3.0), 0.5 * (u - 0.5)], 1)
    assert both(u).shape == (6, both.width) == (6, 14)
    assert torch.allclose(both(u), expected)
    extra = both.kernel(u, v) - bare.kernel(u, v)
    assert torch.allclose(extra, both(u)[:, 10:] @ both(v)[:, 10:].mT)


@pytest.mark.parametrize("kernel", ["gaussian", "arccos0", "arccos1"])
def test_leading_dimensions_of_rows_and_frequencies_broadcast(kernel: str) -> None:
    phi = make(3, kernel=kernel, features=8, frequencies="variational", constant=1.0, linear=1.0)
    u, Omega = rows(5, 6, 3), phi.frequencies(rows(5, *(phi.noise_shape or ())))
    each = torch.stack([phi(u[s], Omega[s]) for s in range(5)])
    assert each.shape == (5, 6, phi.width)
    assert torch.allclose(phi(u, Omega), each)
    assert torch.allclose(phi(u), torch.stack([phi(u[s]) for s in range(5)]))
    assert torch.allclose(phi(u[0], Omega), torch.stack([phi(u[0], Omega[s]) for s in range(5)]))
    assert phi(u[0, :0]).shape == (0, phi.width)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"features": 101}, ["features = 101", "odd", "100 or 102"]),
        ({"features": 1}, ["features = 1", "take 2"]),
        ({"features": 0}, ["features = 0", "at least 1"]),
        ({"features": 100.0}, ["features = 100.0", "whole number"]),
        ({"features": True}, ["features = True", "whole number"]),
        ({"kernel": "gausian"}, ["kernel = 'gausian'", "did you mean 'gaussian'?", "matern12", "arccos1"]),
        ({"kernel": "Matern-32"}, ["kernel = 'Matern-32'", "did you mean 'matern32'?"]),
        ({"kernel": None}, ["kernel = None", "accepted: gaussian"]),
        ({"lengthscales": "ards"}, ["lengthscales = 'ards'", "did you mean 'ard'?", "isotropic, ard, full"]),
        ({"frequencies": "learnt"}, ["frequencies = 'learnt'", "did you mean 'learned'?", "fixed"]),
        ({"constant": 0.0}, ["constant = 0.0", "above 0", "leave it out"]),
        ({"constant": math.nan}, ["constant = nan"]),
        ({"linear": -1}, ["linear = -1", "above 0"]),
        ({"linear": "1"}, ["linear = '1'", "finite number"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_the_cure(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        FeatureSettings(**settings)
    for word in words:
        assert word in str(caught.value)


def test_arc_cosine_kernels_take_an_odd_number_of_features() -> None:
    assert make(3, kernel="arccos1", features=101)(rows(4, 3)).shape == (4, 101)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inputs": 0}, ["inputs = 0"]),
        ({"lengthscale": 0.0}, ["lengthscale = 0.0", "above 0"]),
        ({"lengthscale": [1.0, -2.0, 1.0]}, ["lengthscale = -2.0"]),
        ({"lengthscale": [1.0, 2.0]}, ["lengthscale has 2 values", "3 inputs take 3"]),
        ({"amplitude": -1.0}, ["amplitude = -1.0", "above 0"]),
        ({"amplitude": math.inf}, ["amplitude = inf", "finite"]),
    ],
)
def test_a_wrong_start_is_named_with_its_value(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        RandomFeatures(**{"inputs": 3, "settings": FeatureSettings(), "seed": 1, **arguments})
    for word in words:
        assert word in str(caught.value)


def test_rows_of_another_width_are_refused() -> None:
    phi = make(3)
    for call in (lambda u: phi(u), lambda u: phi.kernel(u, rows(2, 3)), lambda u: phi.kernel(rows(2, 3), u)):
        with pytest.raises(ModelError, match=r"take 3 inputs, but the rows have 2 columns"):
            call(rows(4, 2))


def test_the_example_runs() -> None:
    assert doctest.testmod(features) == (0, 2)
