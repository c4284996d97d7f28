"""Predictions hold against dense Gaussians and plain Monte Carlo, and every draw is one function of x."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import vcal_dist.predictive
from vcal_dist.calibration import CalibrationModel
from vcal_dist.errors import ModelError
from vcal_dist.gp import Draw
from vcal_dist.likelihoods import LikelihoodSettings, make_likelihood
from vcal_dist.predictive import (
    Ensemble,
    conditional_moments,
    draw_ensemble,
    in_users_units,
    is_affine,
    moments,
    sampled_delta,
    sampled_emulator,
    sampled_process,
)
from vcal_dist.transforms import OutputScaling, TransformSettings
from vcal_dist.weights import Weights

F64 = torch.float64
ONE = torch.zeros(1, dtype=F64)
UNEQUAL = torch.tensor([0.3, 0.7], dtype=F64).log()

# What a model can be: the options of `kit.model`, and the family of q.
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"kind": "none"}, "full_rank"),
    "none, free κ": ({"kind": "none", "free_kappa": True}, "full_rank"),
    "additive": ({"kind": "additive", "outputs": 2}, "full_rank"),
    "additive, free κ": ({"kind": "additive", "free_kappa": True}, "full_rank"),
    "additive, meanfield": ({"kind": "additive", "outputs": 2}, "mean_field"),
    "additive, deep": ({"kind": "additive", "hidden": (2,)}, "full_rank"),
    "additive, variational": ({"kind": "additive", "frequencies": "variational"}, "full_rank"),
    "general": ({"kind": "general", "outputs": 2}, "full_rank"),
    "general, deep, meanfield": ({"kind": "general", "hidden": (2,)}, "mean_field"),
}
RANDOM = ["additive, deep", "additive, variational", "general, deep, meanfield"]


def built(kit: Any, name: str, count: int = 2) -> tuple[CalibrationModel, list[Weights]]:
    """A model of two parameters and so many components."""
    options, family = KINDS[name]
    model = kit.model(prior=kit.prior(2), **options)
    return model, [getattr(kit, family)(2, model.outputs, model.width, 5 + 10 * c) for c in range(count)]


def ensemble(kit: Any, name: str, draws: int, seed: int = 0) -> Ensemble:
    model, components = built(kit, name)
    return draw_ensemble(model, components, UNEQUAL, draws, seed)


@torch.no_grad()
def plain_monte_carlo(
    kit: Any, model: CalibrationModel, components: list[Any], x: Tensor, count: int
) -> dict[str, Tensor]:
    """(count, B, K) of the three things, from dense normal draws of (θ̃, w)."""
    generator = np.random.default_rng(1)
    found: dict[str, list[Tensor]] = {"process": [], "emulator": [], "discrepancy": []}
    for c, (q, weight) in enumerate(zip(components, UNEQUAL.exp().tolist(), strict=True)):
        mean, covariance = kit.dense(q)
        size = round(count * weight)
        both = torch.from_numpy(generator.multivariate_normal(mean, covariance, size))
        theta, w = both[:, :2], both[:, 2:].reshape(size, model.outputs, model.width)
        draw = Draw((77, c), size)
        eta = model.phi_eta(x, model.prior.unit(theta)[:, None].expand(-1, len(x), -1), draw)
        eta = torch.einsum("sbm,skm->sbk", eta, w[..., : model.eta.width])
        rest = w[..., model.eta.width :]
        f = model.kappa * eta
        if model.kind == "additive":
            assert model.delta is not None
            f = f + torch.einsum("sbm,skm->sbk", model.delta(x, draw).expand(size, -1, -1), rest)
        elif model.kind == "general":
            f = f + torch.einsum("sbm,skm->sbk", model.phi_g(eta, x, draw), rest)
        for name, value in (("process", f), ("emulator", eta), ("discrepancy", f - eta)):
            found[name].append(value)
    return {name: torch.cat(values) for name, values in found.items()}


def assert_moments_of(mean: Tensor, var: Tensor, draws: Tensor, own: float = 0.0) -> None:
    """Equal up to five standard errors of the draws, and `own` relative error of the moments."""
    deviation = draws - draws.mean(0)
    error = deviation.square().mean(0).sqrt() / math.sqrt(len(draws))
    assert bool(((mean - draws.mean(0)).abs() <= 5 * error + own * var.sqrt() + 1e-9).all())
    square = deviation.square()
    error = square.std(0) / math.sqrt(len(draws))
    assert bool(((var - square.mean(0)).abs() <= 5 * error + own * var + 1e-9).all())


# --- the numbers are right ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_moments_and_draws_agree_with_plain_monte_carlo(kit: Any, name: str) -> None:
    model, components = built(kit, name)
    x = kit.rand(1, 3, model.controls)
    expected = plain_monte_carlo(kit, model, components, x, 20_000)
    together = draw_ensemble(model, components, UNEQUAL, 2048, seed=3)
    f, eta = sampled_process(together, x)
    for what, draws in (("process", f), ("emulator", eta), ("discrepancy", f - eta)):
        mean, var = moments(together, x, what)  # type: ignore[arg-type]
        assert mean.shape == var.shape == (3, model.outputs)
        # Draws of hidden layers, and of η's weights under g, are 2048 plain ones: 5/√2048 of a standard deviation.
        assert_moments_of(mean, var, expected[what], own=0.02 if name not in RANDOM and "general" not in name else 0.12)
        assert_moments_of(expected[what].mean(0), expected[what].var(0), draws, own=0.04)


def test_the_discrepancy_has_its_closed_form_at_any_number_of_draws(kit: Any) -> None:
    """Without κ it is φ_δ(x)·w_δ with w_δ ~ q."""
    model, (q,) = built(kit, "additive", 1)
    x = kit.rand(2, 6, model.controls)
    found = moments(draw_ensemble(model, [q], ONE, 3, 0), x, "discrepancy")
    assert model.delta is not None
    phi = model.delta(x).detach().numpy()
    dense_mean, dense_covariance = kit.dense(q)
    for k in range(2):
        columns = slice(2 + k * model.width + model.eta.width, 2 + (k + 1) * model.width)
        np.testing.assert_allclose(found[0][:, k], phi @ dense_mean[columns])
        np.testing.assert_allclose(found[1][:, k], ((phi @ dense_covariance[columns, columns]) * phi).sum(1))


def test_the_emulator_at_chosen_inputs_has_its_closed_form_at_any_number_of_draws(kit: Any) -> None:
    """η(x, t) = φ(x, t)·w_η with w_η ~ q, θ̃ integrated out: exact for features without noise."""
    model, (q,) = built(kit, "additive", 1)
    x, t = kit.rand(2, 6, model.controls), kit.rand(3, 6, 2)
    found = moments(draw_ensemble(model, [q], ONE, 3, 0), x, "emulator", t)
    phi = model.eta(torch.cat([x, t], 1)).detach().numpy()
    dense_mean, dense_covariance = kit.dense(q)
    for k in range(2):
        columns = slice(2 + k * model.width, 2 + k * model.width + model.eta.width)
        np.testing.assert_allclose(found[0][:, k], phi @ dense_mean[columns])
        np.testing.assert_allclose(found[1][:, k], ((phi @ dense_covariance[columns, columns]) * phi).sum(1))


def test_draws_of_the_emulator_vary_together_over_rows_as_the_closed_form_says(kit: Any) -> None:
    model, (q,) = built(kit, "additive", 1)
    x, t = kit.rand(2, 4, model.controls), kit.rand(3, 4, 2)
    draws = sampled_emulator(draw_ensemble(model, [q], ONE, 8192, 0), x, t)[..., 0].numpy()
    phi = model.eta(torch.cat([x, t], 1)).detach().numpy()
    covariance = kit.dense(q)[1][2 : 2 + model.eta.width, 2 : 2 + model.eta.width]
    expected = phi @ covariance @ phi.T
    sd = np.sqrt(np.diag(expected))
    # The standard error of a covariance is below sd·sd·√(2/S).
    np.testing.assert_array_less(np.abs(np.cov(draws.T) - expected), 5 * math.sqrt(2 / 8192) * np.outer(sd, sd))


def test_emulator_weights_move_with_theta(kit: Any) -> None:
    """At θ ~ q the weights are those given θ̃; had they been drawn apart from it, the variance would be another."""
    model, (q,) = built(kit, "none", 1)
    x = kit.rand(2, 5, model.controls)
    together = draw_ensemble(model, [q], ONE, 1024, 0)
    _, var = moments(together, x, "emulator")
    phi = model.phi_eta(x, model.rows_of_theta(together.groups[0].theta, 5), None).detach()
    mean_apart, var_apart = q.moments(phi, model.columns_eta)
    apart = var_apart.mean(0) + mean_apart.var(0)
    assert float((var / apart - 1).abs().max()) > 0.2


def test_sobol_points_leave_less_error_than_random_ones(kit: Any) -> None:
    model, (q,) = built(kit, "none", 1)
    x = kit.rand(2, 8, model.controls)
    exact, _ = moments(draw_ensemble(model, [q], ONE, 2**14, 9), x)
    errors = [moments(draw_ensemble(model, [q], ONE, 256, seed), x)[0] - exact for seed in range(10)]
    root_mean_square = torch.stack(errors).square().mean(0).sqrt()
    of_means = conditional_moments(draw_ensemble(model, [q], ONE, 2**14, 9), x)[0].std(0)
    assert bool((root_mean_square < 0.4 * of_means / math.sqrt(256)).all())


# --- draws are functions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_rows_may_come_in_any_blocks(kit: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    together = ensemble(kit, name, 16)
    x, t = kit.rand(1, 7, 2), kit.rand(2, 7, 2)
    whole = sampled_process(together, x)
    parts = [sampled_process(together, x[rows]) for rows in (slice(0, 3), slice(3, 7))]
    for i in range(2):
        torch.testing.assert_close(torch.cat([part[i] for part in parts], 1), whole[i])
    for what, at in (("process", None), ("discrepancy", None), ("emulator", None), ("emulator", t)):
        monkeypatch.setattr(vcal_dist.predictive, "NUMBERS", 2**22)
        in_one = moments(together, x, what, at)  # type: ignore[arg-type]
        monkeypatch.setattr(vcal_dist.predictive, "NUMBERS", 2 * 16 * together.model.width)
        assert len([*together.blocks(7)]) == 4
        for found, expected in zip(moments(together, x, what, at), in_one, strict=True):  # type: ignore[arg-type]
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", [name for name in KINDS if name.startswith("additive")])
def test_delta_alone_is_the_process_less_the_emulator(kit: Any, name: str) -> None:
    together, x = ensemble(kit, name, 16), kit.rand(1, 7, 2)
    f, eta = sampled_process(together, x)
    torch.testing.assert_close(sampled_delta(together, x), f - together.model.kappa * eta)


@pytest.mark.parametrize("name", RANDOM)
def test_hidden_noise_is_shared_by_rows_and_differs_between_draws(kit: Any, name: str) -> None:
    together = ensemble(kit, name, 8)
    x = kit.rand(1, 1, 2).expand(3, -1)
    t = kit.rand(2, 1, 2).expand(3, -1)
    for found in (*sampled_process(together, x), sampled_emulator(together, x, t)):
        torch.testing.assert_close(found[:, 1:], found[:, :1].expand(-1, 2, -1))
        assert len(found[:, 0, 0].unique()) == 8
    mean, _ = conditional_moments(together, x, "emulator", t)
    for group in together.groups:  # only hidden noise differs between draws of a component here
        assert len(mean[group.places, 0, 0].unique()) == len(group.places)


@torch.no_grad()
def test_a_draw_of_hidden_layers_is_one_function(kit: Any) -> None:
    """h(u) = u·slope + φ(u)·W with one W for all rows: its effect at several rows goes together as it should."""
    model, (q,) = built(kit, "additive, deep", 1)
    (layer,) = model.eta.hidden
    x, t = 0.5 + 3 * kit.randn(1, 5, 2), kit.rand(2, 5, 2)  # far apart
    found, _ = conditional_moments(draw_ensemble(model, [q], ONE, 4096, 0), x, "emulator", t)
    u = torch.cat([x, t], 1)
    W = layer.weights.mean + layer.weights.log_sd.exp() * kit.randn(3, 4096, *layer.weights.mean.shape)
    h = u @ layer.slope + layer.features(u) @ W.mT
    expected = (
        model.eta.last(torch.cat([h, u.expand(4096, -1, -1)], -1))
        @ q.moments(torch.eye(model.eta.width, dtype=F64), model.columns_eta)[0]
    )
    correlations = [np.corrcoef(part[..., 0].T) for part in (found, expected)]
    assert np.abs(correlations[1] - np.eye(5)).max() < 0.98  # neither all the same ...
    assert np.abs(correlations[1] - np.eye(5)).max() > 0.3  # ... nor independent
    np.testing.assert_allclose(*correlations, atol=5 * math.sqrt(2 / 4096))


def test_the_seed_decides_everything_and_nothing_else_does(kit: Any) -> None:
    x = kit.rand(1, 4, 2)
    state = torch.get_rng_state()
    first, again, other = (
        sampled_process(ensemble(kit, "general, deep, meanfield", 8, seed), x)[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not bool((first == other).any())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("draws", [1, 10, 256])
def test_components_are_drawn_by_their_weights_and_in_no_order(kit: Any, draws: int) -> None:
    model, components = built(kit, "additive")
    shares = []
    for seed in range(20):
        together = draw_ensemble(model, components, UNEQUAL + 3.0, draws, seed)
        counts = {id(group.q): len(group.places) for group in together.groups}
        assert sum(counts.values()) == draws
        shares.append(counts.get(id(components[0]), 0) / draws)
        assert abs(shares[-1] - 0.3) < 1 / draws
        assert torch.cat([group.places for group in together.groups]).sort()[0].tolist() == list(range(draws))
    assert abs(float(np.mean(shares)) - 0.3) < 4 * 0.5 / draws / math.sqrt(20)
    if draws == 256:
        first = next(group for group in together.groups if group.q is components[0]).places
        assert 5 < int((first < 64).sum()) < 40  # a fourth of 77 draws, spread over all


def test_draws_stand_at_their_components_places_and_differ_between_components(kit: Any) -> None:
    model, components = built(kit, "additive, meanfield")
    together = draw_ensemble(model, components, UNEQUAL, 64, 0)
    x, t = kit.rand(1, 3, 2), kit.rand(2, 3, 2)
    mean, _ = conditional_moments(together, x, "emulator", t)
    noise = []
    for group, q in zip(together.groups, components, strict=True):
        assert group.q is q
        expected = q.moments(model.eta(torch.cat([x, t], 1)), model.columns_eta)[0].detach()
        torch.testing.assert_close(mean[group.places], expected.expand(len(group.places), -1, -1))
        centre, covariance = q.theta_moments()
        noise.append((group.theta - centre)[:19] / covariance.diagonal().sqrt())
        noise.append(((group.weights - q.mean) / q.log_sd.exp())[:19, 0, :2])  # type: ignore[attr-defined]
    for i in range(4):
        assert not any(bool((noise[i] - noise[j]).abs().min() < 1e-9) for j in range(i))


def test_a_component_without_weight_is_left_out(kit: Any) -> None:
    model, components = built(kit, "additive")
    weights = torch.tensor([0.0, -torch.inf], dtype=F64)
    together = draw_ensemble(model, components, weights, 100, 0)
    assert [group.q for group in together.groups] == [components[0]]


def test_features_in_float32_give_predictions_in_float64(kit: Any) -> None:
    model = kit.model("general", dtype=torch.float32)
    q = kit.full_rank(1, 1, model.width)
    together = draw_ensemble(model, [q], ONE, 8, 0)
    x = kit.rand(1, 3, 2).float()
    for what in ("process", "emulator", "discrepancy"):
        assert {part.dtype for part in moments(together, x, what)} == {F64}  # type: ignore[arg-type]
    assert sampled_process(together, x)[0].dtype == F64


def test_no_rows_give_no_predictions(kit: Any) -> None:
    mean, var = moments(ensemble(kit, "additive", 8), torch.zeros(0, 2, dtype=F64))
    assert mean.shape == var.shape == (0, 2)


@pytest.mark.parametrize(("draws", "seed", "message"), [(0, 0, "draws is 0"), (5, -1, "seed is -1")])
def test_impossible_numbers_are_refused(kit: Any, draws: int, seed: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ensemble(kit, "additive", draws, seed)


# --- the user's units -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "transform", "affine", "expected"),
    [
        ("gaussian", TransformSettings(), True, 3 + 2 * 0.5),
        ("student_t", TransformSettings(), True, 3 + 2 * 0.5),
        ("gaussian", TransformSettings(kind="log"), False, math.exp(3 + 2 * 0.5)),
        ("poisson", TransformSettings(), False, 3 + 2 * math.exp(0.5)),
        ("bernoulli", TransformSettings(), False, 3 + 2 / (1 + math.exp(-0.5))),
    ],
)
def test_the_users_units_are_those_of_y_without_noise(
    kind: Any, transform: TransformSettings, affine: bool, expected: float
) -> None:
    likelihood = make_likelihood(LikelihoodSettings(kind=kind), 1)
    outputs = OutputScaling([transform], torch.tensor([3.0], dtype=F64), torch.tensor([2.0], dtype=F64), ["y"])
    assert is_affine(likelihood, outputs) is affine
    assert float(in_users_units(likelihood, outputs, torch.tensor([[0.5]], dtype=F64))) == pytest.approx(expected)
