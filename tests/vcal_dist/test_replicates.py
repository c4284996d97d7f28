"""Replicates: data as the model's own prior has them, and calibrations that go on from one emulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from storage.priors import Normal
from storage.store import Store
from tests.vcal_dist.conftest import Kit
from tests.vcal_dist.training_kit import Array, config, make_store, simulate
from vcal_dist.batches import Observations
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.errors import ConfigError, ModelError
from vcal_dist.features import FeatureSettings
from vcal_dist.fitting import fit
from vcal_dist.gp import GPSettings
from vcal_dist.likelihoods import Gaussian, LikelihoodSettings
from vcal_dist.nature import parts
from vcal_dist.priors import ThetaPrior
from vcal_dist.replicates import Emulator, Replicates, check, draw, ranks, simulated
from vcal_dist.sbc import Told, assess

ROWS, DRAWS = 5, 800


def model(*, learn: bool, theta_sd: float = 1e-9, residual: bool = True, outputs: int = 1) -> CalibrationModel:
    """Few features, everything known or nature's hyperparameters with priors; θ all but known."""
    features, constant = FeatureSettings(features=6), FeatureSettings(features=4, constant=0.7)
    settings = ModelSettings(
        eta=GPSettings(features=features, lengthscale=0.5),
        delta=GPSettings(features=constant, amplitude=0.6, lengthscale=0.7, learn=learn, spread=0.5),
        likelihood_z=LikelihoodSettings(noise=0.3),
        likelihood_y=LikelihoodSettings(noise=0.2, learn_noise=learn, spread=0.8),
        emulator_residual=residual,
    )
    prior = ThetaPrior([Normal(mean=0.4, sd=theta_sd)], [(0.0, 1.0)], ["t"])
    return CalibrationModel(2, prior, outputs, settings, dtype=torch.float64)


def whitened(drawn: list[Observations], mean: Tensor, covariance: Tensor) -> Tensor:
    """Draws (S, n) of y's only output such that right ones are N(0, I)."""
    y = torch.stack([one.y[:, 0] for one in drawn])
    return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), (y - mean).mT, upper=False).mT


def assert_standard(values: Tensor) -> None:
    """Means and second moments (S, n) within five standard errors of those of N(0, I)."""
    S, n = values.shape
    assert float(values.mean(0).abs().max()) < 5 / S**0.5
    second = values.mT @ values / S
    assert float((second - torch.eye(n, dtype=values.dtype)).abs().max()) < 5 * (2 / S) ** 0.5


@pytest.mark.parametrize("residual", [True, False])
def test_data_have_the_mean_and_covariance_of_the_model(residual: bool) -> None:
    """y ~ N(φ_η m, φ_η RRᵀφ_ηᵀ + φ_δφ_δᵀ + diag(σ_y² + noise² + σ_z²)), all hyperparameters known."""
    known = model(learn=False, residual=residual)
    design, frame = Kit.observations(known, ROWS, noise=True), Kit.frame(1, known.eta.width, 3)
    drawn = [draw(known, design, (0, k), frame=frame) for k in range(DRAWS)]
    assert not drawn[0].nature
    with torch.no_grad():
        phi = known.phi_eta(design.x, torch.full((1, ROWS, 1), 0.4, dtype=torch.float64), None)[0]
        assert known.delta is not None
        delta, root = known.delta(design.x, None), phi @ frame.root[0]
        assert design.noise is not None
        noise = 0.2**2 + design.noise[:, 0] ** 2 + (0.3**2 if residual else 0.0)
        covariance = root @ root.mT + delta @ delta.mT + torch.diag(noise)
        assert_standard(whitened([one.observations for one in drawn], phi @ frame.mean[0], covariance))


def test_truths_and_hyperparameters_come_from_their_priors() -> None:
    free = model(learn=True, theta_sd=0.1)
    design, frame = Kit.observations(free, ROWS), Kit.frame(1, free.eta.width, 3)
    drawn = [draw(free, design, (0, k), frame=frame) for k in range(DRAWS)]
    columns = [torch.stack([one.theta for one in drawn])]
    for part in parts(free):
        logs = torch.tensor([one.nature[part.name] for one in drawn], dtype=torch.float64).log()
        columns.append((logs - part.median.reshape(-1)) / part.spread)
    assert [len(column.T) for column in columns] == [1, 1, 2, 1]  # θ, δ's amplitude and length scales, σ_y
    assert_standard(torch.cat(columns, 1))
    likelihood = free.likelihood_y
    assert isinstance(likelihood, Gaussian)
    last = drawn[-1].nature["noise"][0]
    assert float(likelihood.noise_variance().detach()) == pytest.approx(last**2 + 1e-8)


def test_exact_posteriors_of_such_data_cover_as_promised() -> None:
    """p(θ̃ | y) ∝ N(θ̃; 0, 1)·N(y; …) on a grid, with the hyperparameters of the truth."""
    free, told = model(learn=True, theta_sd=0.2), []
    design, frame = Kit.observations(free, ROWS), Kit.frame(1, free.eta.width, 3, scale=0.1)
    grid = torch.linspace(-5, 5, 201, dtype=torch.float64)[:, None]
    for k in range(300):
        drawn = draw(free, design, (10, k), frame=frame)
        with torch.no_grad():
            phi = free.phi_eta(design.x, free.rows_of_theta(grid, ROWS), None)  # (201, n, M_η)
            assert free.delta is not None
            assert isinstance(free.likelihood_y, Gaussian)
            delta, root = free.delta(design.x, None), phi @ frame.root[0]
            noise = 1 / free.likelihood_y.precision(design.y, None, free.residual_variance())[:, 0]
            normal = torch.distributions.MultivariateNormal(
                phi @ frame.mean[0], root @ root.mT + delta @ delta.mT + torch.diag(noise), validate_args=False
            )
            log_p = normal.log_prob(drawn.observations.y[:, 0]) - grid[:, 0] ** 2 / 2
            p = log_p.softmax(0)
            below = p.cumsum(0) - p / 2
        told.append(Told((float(np.interp(drawn.theta.numpy()[0], grid[:, 0].numpy(), below.numpy())),)))
    (found,) = assess(["t"], told)
    assert found.verdict == "covers as promised"
    assert found.coverage.value == pytest.approx((0.5, 0.8, 0.9, 0.95), abs=0.06)


def test_a_simulator_takes_the_place_of_the_emulator() -> None:
    known = model(learn=False)
    design = Kit.observations(known, ROWS)
    truth = Kit.randn(7, ROWS, 1)
    seen = []

    def simulator(theta: Tensor) -> Tensor:
        seen.append(theta)
        return truth

    drawn = [draw(known, design, (0, k), simulate=simulator) for k in range(DRAWS)]
    assert torch.equal(seen[5][0], drawn[5].theta)
    with torch.no_grad():
        assert known.delta is not None
        delta = known.delta(design.x, None)
        covariance = delta @ delta.mT + 0.2**2 * torch.eye(ROWS, dtype=torch.float64)  # no residual of an emulator
    assert_standard(whitened([one.observations for one in drawn], truth[:, 0], covariance))


def test_the_design_keeps_what_is_missing_and_its_noises() -> None:
    known = model(learn=False, outputs=2)
    design, frame = Kit.observations(known, 7, missing=True, noise=True), Kit.frame(2, known.eta.width, 3)
    assert design.noise is not None
    design.noise[design.y.isnan()] = torch.nan
    found = draw(known, design, (0, 0), frame=frame).observations
    assert torch.equal(found.y.isnan(), design.y.isnan())
    assert found.noise is design.noise
    assert torch.equal(found.x, design.x)
    other = draw(known, design, (0, 1), frame=frame).observations
    again = draw(known, design, (0, 0), frame=frame).observations
    assert torch.equal(again.y.nan_to_num(), found.y.nan_to_num())
    assert not torch.isclose(other.y, found.y).any()


# --- of a configuration -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("replicates") / "small.zarr", runs=120, observations=15)


def of(store: Store, **options: Any) -> Replicates:
    simulator = options.pop("simulator", None)
    return Replicates(config(store.url, "unused", **options), store, simulator)


def test_replicates_end_where_training_from_the_start_ends(store: Store) -> None:
    steps = {"emulator": {"batch_runs": None}, "theta": {"batch_observations": None}}  # all rows: no order of batches
    found = of(store, fit=steps | {"joint": {"batch_observations": None}})
    found.train_emulator()
    drawn = found.draw(0, 3)
    one = found.calibrate(drawn.observations).theta
    whole = fit(found._model(), found.runs, drawn.observations, found.config.fit, seed=found.config.seed).theta
    assert torch.allclose(one.means, whole.means, rtol=0, atol=1e-8)
    assert torch.allclose(one.covariances, whole.covariances, rtol=0, atol=1e-8)
    other = found.calibrate(found.draw(0, 4).observations).theta
    assert not torch.allclose(one.mean(), other.mean(), atol=1e-3)
    assert torch.equal(found.calibrate(drawn.observations).theta.means, one.means)  # nothing is left of the other


def test_an_emulator_comes_back_from_its_file(store: Store, tmp_path: Path) -> None:
    found = of(store)
    emulator = found.train_emulator()
    emulator.save(tmp_path / "emulator.safetensors")
    before = found.draw(0, 0).observations.y
    found.emulator = Emulator.load(tmp_path / "emulator.safetensors")
    assert torch.equal(found.draw(0, 0).observations.y, before)


@pytest.mark.parametrize(("weights", "free"), [("meanfield", False), ("collapsed", True)])
def test_what_shares_no_phases_is_trained_anew(store: Store, weights: str, free: bool) -> None:
    found = of(store, weights=weights, fit={"free_emulator": free} if free else {})
    assert found.needs_emulator
    assert not found.shares_emulator
    found.train_emulator()
    posterior = found.calibrate(found.draw(0, 0).observations).theta
    assert 0 < float(posterior.mean()[0]) < 1
    found.simulator = lambda x, t: simulate(x, t)
    assert not found.needs_emulator


def test_rows_that_are_kept_out_of_training_are_no_part_of_the_design(tmp_path: Path) -> None:
    large = make_store(tmp_path / "large.zarr", runs=450, observations=450)
    found = of(large)
    assert len(found.design.x) == len(found.x) == found.prepared.totals.observations < 450
    assert len(found.runs.u) == found.prepared.totals.runs < 450
    scaled = (torch.from_numpy(found.x) - 0.0) / 1.0  # the bounds of x
    assert torch.allclose(found.design.x.double(), scaled, atol=1e-6)


def test_a_simulator_sees_the_users_units(store: Store) -> None:
    seen: list[tuple[Array, Array]] = []

    def simulator(x: Array, t: Array) -> Array:
        seen.append((x, t))
        return simulate(x, t)

    held = {"learn_noise": False, "noise": 2e-4}
    found = of(store, simulator=simulator, model={"discrepancy": "none", "likelihood_y": held})
    drawn = found.draw(1, 2)
    (x, t), scaling = seen[0], found.prepared.at_hand.scaling.outputs
    truth = found.prepared.model.prior.theta(drawn.theta).numpy()
    assert np.array_equal(x, store.observations.read()["x"])
    assert np.array_equal(t, np.broadcast_to(truth, (15, 2)))
    y = scaling.inverse(drawn.observations.y).numpy()
    assert np.abs(y - simulate(x, t)).max() < 1e-3


def test_ranks_are_the_share_of_draws_below_the_truth(store: Store) -> None:
    found = of(store)
    found.train_emulator()
    drawn = found.draw(0, 1)
    posterior = found.calibrate(drawn.observations).theta
    truth = found.prepared.model.prior.theta(drawn.theta)
    rank = ranks(posterior, truth, torch.Generator().manual_seed(0))
    expected = [float(posterior.marginal_cdf(j, truth[j : j + 1])) for j in range(2)]
    assert np.array(rank) / 999 == pytest.approx(expected, abs=0.07)


def test_what_a_simulator_gives_is_checked() -> None:
    x, t = np.zeros((3, 1)), np.full((3, 2), 0.5)
    assert simulated(lambda x, t: x[:, 0], x, t, 1).shape == (3, 1)
    with pytest.raises(ModelError, match=r"shape \(2, 1\).*expected \(3, 1\)"):
        simulated(lambda x, t: x[:2], x, t, 1)
    with pytest.raises(ModelError, match=r"gave nan for output 0 at x = \[0\.0\] and t = \[0\.5, 0\.5\]"):
        simulated(lambda x, t: x * np.nan, x, t, 1)


def test_a_simulator_that_fails_is_told_before_any_work(store: Store) -> None:
    def broken(x: Array, t: Array) -> Array:
        raise KeyError("mesh")

    with pytest.raises(ModelError, match="prior's median: KeyError: 'mesh'"):
        of(store, simulator=broken).try_simulator()


DEEP = replace(ModelSettings().delta, hidden=(1,), mean="zero")
LEARNED = replace(ModelSettings().delta, features=FeatureSettings(frequencies="learned"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (ModelSettings(discrepancy="general"), "model.discrepancy is general; .* none, additive"),
        (ModelSettings(likelihood_y=LikelihoodSettings(kind="poisson")), "model.likelihood_y.kind is poisson"),
        (ModelSettings(free_kappa=True), "model.free_kappa is true; .* κ has no prior"),
        (ModelSettings(delta=DEEP), r"model.delta.hidden is \[1\]"),
        (ModelSettings(delta=LEARNED), "model.delta.features.frequencies is learned"),
    ],
)
def test_models_that_no_data_can_be_drawn_from_are_refused(settings: ModelSettings, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(settings)


def test_a_discrepancy_that_is_not_there_is_no_matter() -> None:
    with pytest.raises(ConfigError):
        check(ModelSettings(delta=DEEP))
    check(ModelSettings(discrepancy="none", delta=DEEP))
