"""Stacks of Gaussian processes: depth one is a layer of features, means, widths, and noise that no split changes."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor

from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, ModelError
from vcal_dist.features import FeatureSettings, RandomFeatures
from vcal_dist.gp import DeepGP, Draw, GPSettings

F64 = torch.float64
FEW = FeatureSettings(features=6, constant=1.0)


def stack(kit: Any, inputs: int = 3, number: int = 0, **settings: Any) -> DeepGP:
    """A stack whose hidden weights are away from where they start."""
    chosen = GPSettings(**{"features": FEW, "hidden_features": FeatureSettings(features=4), **settings})
    made = DeepGP(inputs, chosen, seed=4, number=number, dtype=F64)
    with torch.no_grad():
        for i, layer in enumerate(made.hidden):
            layer.weights.mean += kit.randn(40 + i, *layer.weights.mean.shape)
            layer.weights.log_sd += 3 + 0.5 * kit.randn(50 + i, *layer.weights.log_sd.shape)
    return made


def gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max())


def test_a_stack_of_depth_one_is_its_features(kit: Any) -> None:
    shallow = stack(kit, lengthscale=0.7, amplitude=1.3)
    alone = RandomFeatures(3, FEW, seed=0, lengthscale=0.7, amplitude=1.3, dtype=F64)
    alone.load_state_dict(shallow.last.state_dict())
    u = kit.rand(1, 5, 3)
    assert torch.equal(shallow(u), alone(u))
    assert torch.equal(shallow(u, Draw((0,), 3, torch.arange(5))), alone(u))
    assert not shallow.random
    assert float(shallow.kl()) == 0.0
    assert shallow.width == 7


@pytest.mark.parametrize("mean", ["identity", "linear", "zero"])
@pytest.mark.parametrize("feed_inputs", [True, False])
def test_hidden_values_are_the_layers_one_after_the_other(kit: Any, mean: str, feed_inputs: bool) -> None:
    widths = (3, 3) if mean == "identity" else (2, 4)
    deep = stack(kit, hidden=widths, mean=mean, feed_inputs=feed_inputs)
    u = kit.rand(1, 5, 3)
    h, seen = u, u
    for layer in deep.hidden:
        step = layer.features(seen) @ layer.weights.mean.mT
        h = {"identity": lambda: h, "linear": lambda: h @ layer.slope, "zero": lambda: 0.0}[mean]() + step  # noqa: B023
        seen = torch.cat([h, u], 1) if feed_inputs else h
    assert seen.shape[1] == widths[-1] + (3 if feed_inputs else 0)
    torch.testing.assert_close(deep(u), deep.last(seen))
    assert deep.random


def test_an_identity_mean_needs_layers_as_wide_as_what_they_follow() -> None:
    with pytest.raises(ModelError, match=r"width 2 after one of width 3.*'linear' or 'zero', or width 3"):
        DeepGP(3, GPSettings(hidden=(2,)), seed=0)
    with pytest.raises(ModelError, match="width 4 after one of width 3"):
        DeepGP(3, GPSettings(hidden=(3, 4)), seed=0)


def test_wrong_settings_and_inputs_are_refused(kit: Any) -> None:
    with pytest.raises(ModelError, match=r"hidden is \(0,\)"):
        GPSettings(hidden=(0,))
    with pytest.raises(ModelError, match="mean is 'idenity'"):
        GPSettings(mean="idenity")  # type: ignore[arg-type]
    for name in ("amplitude", "lengthscale", "hidden_amplitude", "hidden_lengthscale"):
        for value in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ModelError, match=f"{name} is"):
                GPSettings(**{name: value})
    with pytest.raises(ModelError, match="3 inputs"):
        stack(kit)(kit.rand(1, 5, 2))


def test_a_shared_draw_is_one_sample_of_the_weights_for_all_rows(kit: Any) -> None:
    deep = stack(kit, hidden=(3, 3))
    u = kit.rand(1, 6, 3)
    phi = deep(u, Draw((7,), 4))
    assert phi.shape == (4, 6, 7)
    same = deep(u[:1].expand(6, -1), Draw((7,), 4))
    torch.testing.assert_close(same, same[:, :1].expand_as(same), rtol=1e-14, atol=0)  # equal inputs, equal values
    order = torch.tensor([3, 0, 5])
    torch.testing.assert_close(deep(u[order], Draw((7,), 4)), phi[:, order], rtol=1e-13, atol=1e-14)
    assert gap(phi[0], phi[1]) > 1e-3  # samples differ
    assert gap(phi, deep(u, Draw((8,), 4))) > 1e-3  # keys differ


def test_a_shared_draw_is_the_weights_put_in(kit: Any) -> None:
    deep = stack(kit, hidden=(3,))
    u = kit.rand(1, 6, 3)
    h = deep.hidden_values(u, Draw((7,), 2))[..., :3]  # (S, B, 3)
    phi = deep.hidden[0].features(u)
    # h − u lies in the span of the features: rows are coupled through S weight matrices and nothing else.
    solution = torch.linalg.lstsq(phi.expand(2, -1, -1), h - u).solution
    torch.testing.assert_close(phi @ solution, h - u, rtol=1e-9, atol=1e-10)


def test_noise_of_rows_depends_on_the_row_alone(kit: Any) -> None:
    deep = stack(kit, hidden=(3, 3))
    u, rows = kit.rand(1, 8, 3), torch.tensor([4, 9, 2, 7, 11, 0, 100, 5])
    phi = deep(u, Draw((7,), 3, rows))
    order = torch.randperm(8, generator=kit.generator(2))
    torch.testing.assert_close(deep(u[order], Draw((7,), 3, rows[order])), phi[:, order], rtol=1e-13, atol=1e-14)
    for part in torch.arange(8).split([1, 5, 2]):
        torch.testing.assert_close(deep(u[part], Draw((7,), 3, rows[part])), phi[:, part], rtol=1e-13, atol=1e-14)
    same = deep(u[:1].expand(8, -1), Draw((7,), 3, rows))
    assert gap(same[:, 0], same[:, 1]) > 1e-3  # equal inputs, noise of their own


def test_stacks_of_different_numbers_have_different_noise(kit: Any) -> None:
    u, draw = kit.rand(1, 8, 3), Draw((7,), 2, torch.arange(8))
    values = [stack(kit, number=number, hidden=(3,)).hidden_values(u, draw) for number in (0, 1)]
    assert gap(values[0], values[1]) > 1e-3


def test_the_layers_of_a_stack_have_different_noise(kit: Any) -> None:
    deep = stack(kit, hidden=(3, 3), mean="zero", feed_inputs=False)
    rows = 4000
    u, draw = kit.rand(1, 1, 3).expand(rows, -1), Draw((7,), 1, torch.arange(rows))
    noise, value = [], u
    with torch.no_grad():
        for layer in deep.hidden:
            mean, var = layer.weights.moments(layer.features(value))
            after = layer(value, value, draw)[0]
            noise.append((after - mean) / var.sqrt())  # (B, 3)
            value = after
    assert float((noise[0].mT @ noise[1] / rows).abs().max()) < 5 / rows**0.5


@pytest.mark.parametrize("rows", [True, False])
def test_both_kinds_of_noise_have_the_moments_of_the_weights(kit: Any, rows: bool) -> None:
    deep = stack(kit, hidden=(2,), mean="zero", feed_inputs=False)
    u, samples = kit.rand(1, 3, 3), 20_000
    with torch.no_grad():
        if rows:  # as many rows of each input as there are samples of shared weights
            draw = Draw((7,), 1, torch.arange(3 * samples))
            h = deep.hidden_values(u.repeat(samples, 1), draw).view(samples, 3, 2)
        else:
            h = deep.hidden_values(u, Draw((7,), samples))  # (S, B, 2)
        layer = deep.hidden[0]
        phi = layer.features(u)
        mean, var = phi @ layer.weights.mean.mT, phi.square() @ (2 * layer.weights.log_sd).exp().mT
    assert float(((h.mean(0) - mean) / (var / samples).sqrt()).abs().max()) < 4.5
    assert float((h.var(0) / var - 1).abs().max()) < 4.5 * (2 / samples) ** 0.5
    # Between rows: none with noise of their own, ΦSΦᵀ with shared weights.
    covariance = torch.einsum("sbk,sck->kbc", h - mean, h - mean) / samples
    shared = torch.einsum("bm,km,cm->kbc", phi, (2 * layer.weights.log_sd).exp(), phi).detach()
    expected = torch.diag_embed(var.mT) if rows else shared
    scale = torch.einsum("bk,ck->kbc", var.sqrt(), var.sqrt())
    assert float(((covariance - expected) / scale).abs().max()) < 6 / samples**0.5


def test_the_divergence_sums_over_layers_and_frequencies(kit: Any) -> None:
    variational = FeatureSettings(features=4, frequencies="variational")
    deep = stack(kit, hidden=(3, 3), features=variational, hidden_features=variational)
    parts = [deep.last.kl()]
    for layer in deep.hidden:
        sd = layer.weights.log_sd.exp()
        q = torch.distributions.Normal(layer.weights.mean, sd)
        prior = torch.distributions.Normal(torch.zeros_like(sd), torch.ones_like(sd))
        parts += [torch.distributions.kl_divergence(q, prior).sum(), layer.features.kl()]
    assert min(float(part.detach()) for part in parts) > 0.1
    torch.testing.assert_close(deep.kl(), torch.stack(parts).sum())


def test_learned_frequencies_of_every_layer_are_in_the_log_prior(kit: Any) -> None:
    learned = FeatureSettings(features=4, frequencies="learned")
    deep = stack(kit, hidden=(3, 3), features=learned, hidden_features=learned)
    omegas: list[Tensor] = [deep.last.omega, *(layer.features.omega for layer in deep.hidden)]
    torch.testing.assert_close(deep.log_prior(), -0.5 * sum(omega.square().sum() for omega in omegas))  # type: ignore[arg-type]


def test_variational_frequencies_are_shared_by_all_rows_and_processes(kit: Any) -> None:
    made = stack(kit, features=FeatureSettings(features=4, frequencies="variational"))
    u = kit.rand(1, 6, 3)
    phi = made(u, Draw((7,), 3, torch.arange(6)))
    assert phi.shape == (3, 6, 4)
    torch.testing.assert_close(made(u[4:], Draw((7,), 3, torch.arange(4, 6))), phi[:, 4:], rtol=1e-13, atol=1e-14)
    assert torch.equal(made(u, Draw((7,), 3)), phi)
    assert gap(phi[0], phi[1]) > 1e-3


def test_every_layer_has_frequencies_of_its_own(kit: Any) -> None:
    deep = stack(kit, hidden=(3, 3), feed_inputs=False, features=FeatureSettings(features=4))
    omegas = [deep.last.omega, *(layer.features.omega for layer in deep.hidden)]
    for i in range(3):
        for j in range(i):
            assert gap(omegas[i], omegas[j]) > 0.1


def test_gradients_reach_hidden_means_and_variances_through_both_kinds_of_noise(kit: Any) -> None:
    for rows in (None, torch.arange(6)):
        deep = stack(kit, hidden=(3,))
        deep(kit.rand(1, 6, 3), Draw((7,), 2, rows)).square().sum().backward()
        phi = deep(kit.rand(1, 6, 3), Draw((7,), 2, rows))
        (phi * kit.randn(5, *phi.shape)).sum().backward()
        for parameter in deep.hidden[0].weights.parameters():
            if parameter.numel():
                assert parameter.grad is not None
                assert float(parameter.grad.abs().max()) > 1e-6


@pytest.mark.parametrize("hidden", [(), (3,)])
def test_what_is_known_has_no_gradient_and_weights_still_have_theirs(kit: Any, hidden: tuple[int, ...]) -> None:
    full = FeatureSettings(features=6, lengthscales="full", frequencies="learned")
    known = stack(
        kit, hidden=hidden, features=full, hidden_features=full, lengthscale=0.5, hidden_lengthscale=0.5, learn=False
    )
    learned = {name for name, parameter in known.named_parameters() if parameter.requires_grad}
    held = {name for name, parameter in known.named_parameters() if not parameter.requires_grad}
    layers = ["last", *(f"hidden.{i}.features" for i in range(len(hidden)))]
    hyperparameters = ("log_lengthscale", "log_amplitude", "below_diagonal")
    assert held == {f"{layer}.{name}" for layer in layers for name in hyperparameters}
    assert {f"{layer}.omega" for layer in layers} <= learned  # frequencies have a setting of their own
    known(kit.rand(1, 5, 3), Draw((0,)) if hidden else None).sum().backward()
    assert all(parameter.grad is None for name, parameter in known.named_parameters() if name in held)
    assert known.last.omega.grad is not None


def test_a_length_scale_for_each_input_is_the_kernels() -> None:
    scales = (0.5, 2.0)
    ard = DeepGP(2, GPSettings(features=FeatureSettings(features=4), lengthscale=scales), seed=0, dtype=F64)
    u, v = torch.tensor([[0.1, 0.2]], dtype=F64), torch.tensor([[0.6, 0.9]], dtype=F64)
    expected = math.exp(-0.5 * ((0.5 / 0.5) ** 2 + (0.7 / 2.0) ** 2))
    assert ard.last.kernel(u, v).item() == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ModelError, match="has 2 values, but ard length scales of 3 inputs take 3"):
        DeepGP(3, GPSettings(lengthscale=scales), seed=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lengthscale": (0.5, 0.0)}, r"lengthscale is \(0.5, 0.0\); accepted: a positive number, or one for each"),
        ({"lengthscale": ()}, r"lengthscale is \(\); accepted"),
        ({"learn": False}, "learn is false, but no lengthscale is given"),
        ({"learn": False, "lengthscale": 1.0, "hidden": (2,)}, "no hidden_lengthscale is given"),
    ],
)
def test_settings_of_what_is_known_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        GPSettings(**wrong)


@pytest.mark.parametrize("lengthscale", [0.5, 2, [0.5, 1.5], None])
def test_a_length_scale_of_either_kind_is_a_configuration(lengthscale: Any) -> None:
    given = {"store": "s.zarr", "model": {"eta": {"lengthscale": lengthscale}}}
    jsonschema.validate(given, Config.schema())
    config = Config.parse(given)
    assert config.model.eta.lengthscale == (tuple(lengthscale) if isinstance(lengthscale, list) else lengthscale)
    assert Config.parse(json.loads(json.dumps(config.plain()))) == config


@pytest.mark.parametrize("lengthscale", ["0.5", [0.5, "1"], {"x": 1.0}])
def test_a_length_scale_that_is_no_number_is_refused(lengthscale: Any) -> None:
    given = {"store": "s.zarr", "model": {"eta": {"lengthscale": lengthscale}}}
    with pytest.raises(ConfigError, match="lengthscale"):
        Config.parse(given)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(given, Config.schema())
