"""Where training starts: lengthscales, hidden layers, and a screening that finds the basin of the true θ̃."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vcal_dist import initialise
from vcal_dist.batches import Observations, take
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.collapsed import gram, posterior
from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings
from vcal_dist.fullrank import Frame, FullRank
from vcal_dist.gp import DeepGP, GPSettings
from vcal_dist.initialise import APART, screen_theta, start_hidden_layers, start_lengthscales, start_model
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.passes import close

F64 = torch.float64


def stack(**settings: Any) -> DeepGP:
    features = {name: FeatureSettings(features=20) for name in ("features", "hidden_features")}
    return DeepGP(2, GPSettings(**{**features, **settings}), seed=1, dtype=F64)


# --- lengthscales ---------------------------------------------------------------------------------------------------


def test_inputs_on_the_whole_cube_get_the_spread_of_a_uniform_and_half_of_it_half(kit: Any) -> None:
    gp = stack()
    u = kit.rand(0, 4000, 2)
    start_lengthscales(gp, u)
    whole = gp.last.log_lengthscale.exp().detach()
    torch.testing.assert_close(whole, torch.full((2,), math.sqrt(2 / 12), dtype=F64), rtol=0.03, atol=0)
    start_lengthscales(gp, 0.4 + u * torch.tensor([0.5, 1.0], dtype=F64))
    half = gp.last.log_lengthscale.exp().detach()
    torch.testing.assert_close(half, whole * torch.tensor([0.5, 1.0], dtype=F64))


def test_one_lengthscale_for_all_inputs_is_the_geometric_mean_of_theirs(kit: Any) -> None:
    gp = stack(features=FeatureSettings(features=20, lengthscales="isotropic"))
    u = kit.rand(0, 50, 2) * torch.tensor([0.2, 0.9], dtype=F64)
    start_lengthscales(gp, u)
    expected = math.sqrt(2) * math.sqrt(np.std(u[:, 0].numpy()) * np.std(u[:, 1].numpy()))
    assert gp.last.log_lengthscale.exp().item() == pytest.approx(expected)


def test_a_lengthscale_that_the_user_chose_stays(kit: Any) -> None:
    shallow, deep = stack(lengthscale=0.123), stack(hidden=(2,), hidden_lengthscale=0.456)
    for gp in (shallow, deep):
        start_lengthscales(gp, kit.rand(0, 50, 2))
    torch.testing.assert_close(shallow.last.log_lengthscale.exp(), torch.full((2,), 0.123, dtype=F64))
    torch.testing.assert_close(deep.hidden[0].features.log_lengthscale.exp(), torch.full((2,), 0.456, dtype=F64))


def test_in_a_deep_stack_the_layer_that_sees_the_inputs_gets_them(kit: Any) -> None:
    gp = stack(hidden=(2, 2), lengthscale=0.7)  # the choice for the last layer is none for the first
    u = kit.rand(0, 50, 2)
    later = [gp.hidden[1].features.log_lengthscale.clone(), gp.last.log_lengthscale.clone()]
    start_lengthscales(gp, u)
    torch.testing.assert_close(
        gp.hidden[0].features.log_lengthscale.exp(), torch.tensor(math.sqrt(2) * u.numpy().std(0))
    )
    assert torch.equal(gp.hidden[1].features.log_lengthscale, later[0])
    assert torch.equal(gp.last.log_lengthscale, later[1])


def test_an_input_that_never_varies_leaves_a_positive_lengthscale(kit: Any) -> None:
    gp = stack()
    u = kit.rand(0, 50, 2)
    u[:, 1] = 0.3
    start_lengthscales(gp, u)
    assert bool(gp.last.log_lengthscale.isfinite().all())


# --- hidden layers --------------------------------------------------------------------------------------------------


def outputs_of(u: Tensor) -> Tensor:
    return torch.stack([torch.sin(5 * u[:, 0]) * u[:, 1], torch.cos(4 * u[:, 0] + 2 * u[:, 1])], -1)


def regression_error(gp: DeepGP, u: Tensor, z: Tensor) -> float:
    """Of the last layer, its weights in closed form, at the means of the hidden ones."""
    with torch.no_grad():
        phi = gp(u)
        known = ~z.isnan()
        sums = gram(phi.expand(z.shape[1], -1, -1), z.mT, 100.0 * known.mT)
        fitted = phi @ posterior(sums)[0].mT
        return float((fitted - z)[known].square().mean().sqrt())


def zero_mean(hidden: tuple[int, ...], **settings: Any) -> DeepGP:
    return stack(hidden=hidden, mean="zero", hidden_lengthscale=0.4, lengthscale=1.0, hidden_amplitude=1.0, **settings)


@pytest.mark.parametrize("hidden", [(2,), (4,), (2, 2), (3, 4, 2)])
@pytest.mark.parametrize("feed_inputs", [False, True])
def test_layers_started_one_after_the_other_leave_little_to_the_last(
    kit: Any, hidden: tuple[int, ...], feed_inputs: bool
) -> None:
    gp = zero_mean(hidden, feed_inputs=feed_inputs)
    if feed_inputs:  # what the last layer sees of the inputs themselves says nothing at this lengthscale
        with torch.no_grad():
            gp.last.log_lengthscale[-2:] = 3.0
    u = kit.rand(0, 300, 2)
    z = outputs_of(u)
    before = regression_error(gp, u, z)
    start_hidden_layers(gp, u, z, 0.1, kit.generator(0))
    after = regression_error(gp, u, z)
    assert before > 0.2
    assert after < 0.5 * before


def test_every_unit_is_the_posterior_of_a_regression_of_its_output(kit: Any) -> None:
    gp = zero_mean((3,))
    u = kit.rand(0, 100, 2)
    z = outputs_of(u)
    start_hidden_layers(gp, u, z, 0.2, kit.generator(0))
    layer = gp.hidden[0]
    phi = layer.features(u).detach().numpy()
    Lambda = np.eye(phi.shape[1]) + phi.T @ phi / 0.04
    for unit, output in ((0, 0), (1, 1), (2, 0)):
        expected = np.linalg.solve(Lambda, phi.T @ z[:, output].numpy() / 0.04)
        np.testing.assert_allclose(layer.weights.mean[unit].detach(), expected, rtol=1e-7, atol=1e-9)
        sd = np.sqrt(np.linalg.inv(Lambda).diagonal())
        np.testing.assert_allclose(layer.weights.log_sd[unit].detach().exp(), sd, rtol=1e-7)


def test_units_of_the_same_output_learn_from_rows_of_their_own(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialise, "ROWS_OF_A_LAYER", 30)
    found = []
    for seed in (0, 0, 1):
        gp = zero_mean((2,))
        u = kit.rand(0, 100, 2)
        start_hidden_layers(gp, u, outputs_of(u)[:, :1], 0.1, kit.generator(seed))
        found.append(gp.hidden[0].weights.mean.detach())
    assert not torch.allclose(found[0][0], found[0][1], rtol=1e-3)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("mean", ["identity", "linear"])
def test_a_layer_that_passes_its_inputs_on_stays_where_it_is(kit: Any, mean: str) -> None:
    gp = stack(hidden=(2, 2), mean=mean)
    before = {name: value.clone() for name, value in gp.state_dict().items()}
    u = kit.rand(0, 50, 2)
    start_hidden_layers(gp, u, outputs_of(u), 0.1, kit.generator(0))
    for name, value in gp.state_dict().items():
        assert torch.equal(value, before[name])


def test_missing_outputs_of_runs_leave_hidden_layers_where_the_known_ones_put_them(kit: Any) -> None:
    u = kit.rand(0, 120, 2)
    z = outputs_of(u) + 1.0
    gaps = z.clone()
    gaps[::2] = torch.nan
    with_gaps, without = zero_mean((2,)), zero_mean((2,))
    start_hidden_layers(with_gaps, u, gaps, 0.1, kit.generator(0))
    start_hidden_layers(without, u[1::2], z[1::2], 0.1, kit.generator(0))
    for (name, mine), its in zip(with_gaps.state_dict().items(), without.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, its, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["none", "additive", "general"])
def test_a_model_starts_the_same_from_the_same_seed_with_delta_where_it_is_of_x_alone(kit: Any, kind: Any) -> None:
    gp = GPSettings(features=FeatureSettings(features=6), hidden=(2,), mean="zero")
    settings = ModelSettings(eta=gp, delta=GPSettings(features=FeatureSettings(features=6)), discrepancy=kind)
    models = [CalibrationModel(2, kit.prior(1), 1, settings, dtype=F64) for _ in range(3)]
    runs, observations = kit.runs(models[0], 30, missing=True), kit.observations(models[0], 10)
    for model in models[:2]:
        start_model(model, runs, observations, seed=4)
    for mine, its in zip(models[0].state_dict().values(), models[1].state_dict().values(), strict=True):
        assert torch.equal(mine, its)
        assert bool(mine.isfinite().all())
    if models[0].delta is not None and models[2].delta is not None:
        moved = not torch.equal(models[0].delta.last.log_lengthscale, models[2].delta.last.log_lengthscale)
        assert moved == (kind == "additive")
        start_model(models[2], runs, take(observations, slice(0, 1)), seed=4)  # one row has no spread
        assert bool(models[2].delta.last.log_lengthscale.exp().min() > 0.1)


# --- screening ------------------------------------------------------------------------------------------------------


def wiggly(
    kit: Any, kind: Any = "none", *, dim: int = 1, rows: int = 40, outputs: int = 1, truth: float = 1.1, **settings: Any
) -> tuple[CalibrationModel, Frame, Observations, Tensor]:
    """An emulator that is known exactly and has several modes in θ̃, and observations of it with little noise."""
    model = CalibrationModel(
        1,
        kit.prior(dim),
        outputs,
        ModelSettings(
            eta=GPSettings(features=FeatureSettings(features=40), lengthscale=0.15),
            delta=GPSettings(features=FeatureSettings(features=4), amplitude=0.1, lengthscale=0.7),
            discrepancy=kind,
            **{
                "likelihood_z": LikelihoodSettings(noise=0.01),
                "likelihood_y": LikelihoodSettings(noise=0.1),
                **settings,
            },
        ),
        dtype=F64,
    )
    M = model.eta.width
    frame = Frame(kit.randn(3, outputs, M), 1e-6 * torch.eye(M, dtype=F64).repeat(outputs, 1, 1))
    theta = torch.tensor([truth, -0.7], dtype=F64)[:dim]
    observations = kit.observations(model, rows)
    with torch.no_grad():
        eta = model.phi_eta(observations.x, model.rows_of_theta(theta[None], rows), None)[0] @ frame.mean.mT
    return model, frame, observations._replace(y=eta + 0.1 * observations.y), theta


def closed_from(model: CalibrationModel, frame: Frame, observations: Observations, start: Tensor) -> Tensor:
    q = FullRank(
        len(start), model.outputs, model.width, frame=frame.widen(model.width - model.eta.width), absorbed=True
    )
    q.move(start, q.mean, q.precision._replace(theta=100 * q.precision_theta))
    close(model, q, lambda: [observations])
    return q.theta_mean


@pytest.mark.parametrize("kind", ["none", "additive", "general"])
@pytest.mark.parametrize("dim", [1, 2])
def test_screening_finds_the_basin_of_the_truth(kit: Any, kind: Any, dim: int) -> None:
    model, frame, observations, theta = wiggly(kit, kind, dim=dim)
    starts = screen_theta(model, frame, observations, starts=3, points=1024, seed=0)
    assert starts.shape[1] == dim
    assert 2 <= len(starts) <= 3
    assert starts.dtype == F64
    assert float((starts[0] - theta).norm()) < 0.2
    for i in range(len(starts)):
        for j in range(i):
            assert float((starts[i] - starts[j]).norm()) >= APART
    if kind != "general":
        assert float((closed_from(model, frame, observations, starts[0]) - theta).norm()) < 0.1
        elsewhere = [torch.full((dim,), value, dtype=F64) for value in (-2.0, -1.0, 2.0)]
        ends = [closed_from(model, frame, observations, start) for start in elsewhere]
        assert max(float((end - theta).norm()) for end in ends) > 0.5  # without screening, another mode


def test_screening_counts_the_prior(kit: Any) -> None:
    """Where observations say nothing of θ̃, the best start is the middle of the prior."""
    model, frame, observations, _ = wiggly(kit, dim=2)
    with torch.no_grad():
        model.eta.last.log_lengthscale[1:] = 30.0
    starts = screen_theta(model, frame, observations, starts=2, points=512, seed=0)
    assert float(starts[0].norm()) < 0.2
    assert float(starts[1].norm()) < APART + 0.4


def test_screening_is_decided_by_its_seed(kit: Any) -> None:
    model, frame, observations, _ = wiggly(kit, dim=2)
    first, again, other = (
        screen_theta(model, frame, observations, starts=2, points=256, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("points", [1, 2, 7])
def test_fewer_starts_come_back_where_no_more_keep_their_distance(kit: Any, points: int) -> None:
    model, frame, observations, _ = wiggly(kit)
    starts = screen_theta(model, frame, observations, starts=50, points=points, seed=0)
    assert 1 <= len(starts) <= points


@pytest.mark.parametrize("kind", ["poisson", "student_t"])
def test_screening_works_under_other_noise(kit: Any, kind: Any) -> None:
    likelihood = LikelihoodSettings(kind=kind, noise=0.1)
    model, frame, observations, theta = wiggly(kit, "additive", rows=200, likelihood_y=likelihood)
    if kind == "poisson":
        generator = kit.generator(0)
        observations = observations._replace(y=torch.poisson((observations.y).exp(), generator=generator))
    starts = screen_theta(model, frame, observations, starts=2, points=512, seed=0)
    assert float((starts[0] - theta).norm()) < 0.2


@pytest.mark.parametrize("likelihood", ["gaussian", "student_t"])
def test_observations_that_are_missing_or_of_weight_zero_play_no_part(kit: Any, likelihood: Any) -> None:
    settings = LikelihoodSettings(kind=likelihood, noise=0.1)
    model, frame, observations, _ = wiggly(kit, "additive", outputs=2, likelihood_y=settings)
    y, weight = observations.y.clone(), observations.weight.clone()
    y[3] = torch.nan
    y[7:12] = torch.nan
    weight[20:] = 0.0
    known = torch.tensor([i for i in range(20) if i != 3 and not 7 <= i < 12])
    options: dict[str, Any] = {"starts": 3, "points": 256, "seed": 0}
    found = screen_theta(model, frame, observations._replace(y=y, weight=weight), **options)
    assert torch.equal(found, screen_theta(model, frame, take(observations, known), **options))


def test_an_output_that_was_never_observed_leaves_the_word_to_the_other(kit: Any) -> None:
    model, frame, observations, theta = wiggly(kit, "additive", outputs=2)
    y = observations.y.clone()
    y[:, 1] = torch.nan
    y[::3, 0] = torch.nan
    starts = screen_theta(model, frame, observations._replace(y=y), starts=1, points=512, seed=0)
    assert float((starts[0] - theta).norm()) < 0.2


def test_observations_of_which_none_is_known_are_an_error(kit: Any) -> None:
    model, frame, observations, _ = wiggly(kit)
    options: dict[str, Any] = {"starts": 1, "points": 64, "seed": 0}
    with pytest.raises(ModelError, match=r"every observation is missing \(NaN\).*at least one"):
        screen_theta(model, frame, observations._replace(y=torch.full_like(observations.y, torch.nan)), **options)
    with pytest.raises(ModelError, match="every observation"):
        screen_theta(model, frame, observations._replace(weight=0 * observations.weight), **options)


def test_rows_are_chosen_from_any_number_of_observations(kit: Any) -> None:
    """Beyond 2²⁴ rows float32 no longer tells one row from the next."""
    model, frame, observations, _ = wiggly(kit)
    n = 2**24 + 4
    many = Observations(*(None if part is None else part[:1].expand(n, *part.shape[1:]) for part in observations))
    assert screen_theta(model, frame, many, starts=1, points=8, seed=0).shape == (1, 1)
