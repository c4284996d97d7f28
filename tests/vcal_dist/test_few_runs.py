"""The emulator of few runs: what it says of runs it has not seen is what fresh runs say of it."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.vcal_dist.conftest import F64, Kit
from vcal_dist import few_runs
from vcal_dist.batches import Runs
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings
from vcal_dist.few_runs import is_stacked, why_not
from vcal_dist.fitting import FittedEmulator, few_rows, fit_emulator
from vcal_dist.fullrank import FullRank
from vcal_dist.gp import GPSettings
from vcal_dist.initialise import start_model
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.plan import FitSettings, StageSettings
from vcal_dist.stacked_emulator import TINY, StackedEmulator
from vcal_dist.validation import Validation

TIMES = 12
STEPS = FitSettings(emulator=StageSettings(steps=200))


def oscillator(x: Tensor, t: Tensor) -> Tensor:
    """A damped oscillation over time x, with two parameters; and its decay alone."""
    decay = torch.exp(-(0.5 + 2 * t[:, :1]) * x)
    return torch.cat([decay * torch.cos((4 + 5 * t[:, 1:]) * x), 2 * decay], -1)


def long_form(count: int, seed: int, outputs: int) -> Runs:
    """So many runs at TIMES times each, in the order of time: siblings are far apart."""
    t = Kit.rand(seed, count, 2).repeat(TIMES, 1)
    x = torch.linspace(0, 1, TIMES, dtype=F64).repeat_interleave(count)[:, None]
    z = oscillator(x, t)[:, :outputs]
    rows = len(z)
    u = torch.cat([x, t], -1).float()
    return Runs(u, z, torch.zeros_like(z), torch.arange(rows), torch.ones(rows, dtype=F64))


class Trained:
    """An emulator of 30 runs, and 60 that it has not seen."""

    def __init__(self, outputs: int) -> None:
        self.runs, self.fresh = long_form(30, 1, outputs), long_form(60, 2, outputs)
        if outputs > 1:
            self.runs.z[5:40, 1] = torch.nan
        self.model = CalibrationModel(1, Kit.prior(2), outputs, ModelSettings(discrepancy="none"))
        start_model(self.model, self.runs, None, 0)
        self.fitted: FittedEmulator = fit_emulator(self.model, self.runs, STEPS)

    @torch.no_grad()
    def predict(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of z."""
        q = FullRank(0, *self.fitted.frame.mean.shape, frame=self.fitted.frame, absorbed=True)
        mean, var = q.moments(self.model.eta(u), self.model.columns_eta)
        return self.model.likelihood_z.moments(mean, var)[0], (var + self.model.likelihood_z.noise_variance()).sqrt()

    @property
    def validation(self) -> Validation:
        assert self.fitted.validation is not None
        return self.fitted.validation


@pytest.fixture(scope="module")
def one() -> Trained:
    return Trained(1)


@pytest.fixture(scope="module")
def two() -> Trained:
    return Trained(2)


@pytest.mark.parametrize("name", ["one", "two"])
def test_reported_error_and_coverage_are_those_at_fresh_runs(name: str, request: pytest.FixtureRequest) -> None:
    trained: Trained = request.getfixturevalue(name)
    mean, sd = trained.predict(trained.fresh.u)
    for k in range(mean.shape[1]):
        error = (mean - trained.fresh.z)[:, k]
        known = ~trained.runs.z[:, k].isnan()
        left = (trained.validation.mean - trained.runs.z)[known, k]
        ratio = float(left.square().mean().sqrt() / error.square().mean().sqrt())
        assert 0.5 < ratio < 3  # of thirty runs; the benchmark measures it over many designs
        covered = float((error.abs() < 1.645 * sd[:, k]).double().mean())
        reported = float((left.abs() < 1.645 * trained.validation.sd[known, k]).double().mean())
        assert covered > 0.75
        assert abs(covered - reported) < 0.15


def test_every_row_is_predicted_by_members_that_saw_none_of_its_run(one: Trained) -> None:
    data = few_runs.fold_runs(one.runs, None, 1, 0)
    assert int(data.run.max()) == 29
    for members in data.counted.reshape(few_runs.REPEATS, data.folds, -1):
        assert bool(((~members).sum(0) == 1).all())  # one of a repeat's members has not seen a row
        for run in range(30):
            seen = members[:, data.run == run]
            assert bool((seen == seen[:, :1]).all())  # nor its siblings


def test_variance_is_that_of_the_stack(one: Trained) -> None:
    """Features with weights N(m, RRᵀ) have the mean and, nearly, the variance that stacking has."""
    eta, frame = one.model.eta, one.fitted.frame
    assert isinstance(eta, StackedEmulator)
    u = one.fresh.u[:200]
    phi = eta(u).detach()
    torch.testing.assert_close(phi @ frame.mean.mT, phi[:, :1])
    stack = eta.get_buffer("stack")[:, 0]
    # By hand: deviations of members, of experts and of the two processes, each with the weight of its expert.
    m = len(eta.get_buffer("omega"))
    members, experts, rest = phi[:, 1 : 1 + m], phi[:, 1 + m : 4 + m], phi[:, 4 + m :]
    half = rest.shape[1] // 2
    parts = [rest[:, :half].square().sum(-1), rest[:, half:].square().sum(-1), members.square().sum(-1) / (m - 1)]
    expected = sum(stack[j] * (parts[j] + experts[:, j].square()) for j in range(3))
    found = (phi @ frame.root[0]).square().sum(-1)
    scale = found / expected
    assert float(scale.std() / scale.mean()) < 1e-3  # s², the same everywhere
    # The experts' weighted deviations from their mean cancel.
    assert float((experts @ stack).abs().max()) < 1e-6


def test_deviations_vanish_where_runs_are_and_grow_away_from_them(one: Trained) -> None:
    near, far = (one.predict(part)[1].mean() for part in (one.runs.u, one.fresh.u))
    assert float(near) < 0.7 * float(far)


def test_a_state_can_be_taken_by_a_new_model(two: Trained) -> None:
    other = CalibrationModel(1, Kit.prior(2), 2, ModelSettings(discrepancy="none"))
    other.adopt(copy.deepcopy(two.model.state_dict()))
    assert isinstance(other.eta, StackedEmulator)
    torch.testing.assert_close(other.eta(two.fresh.u), two.model.eta(two.fresh.u), rtol=0, atol=0)
    torch.testing.assert_close(other.eta.frame().root, two.fitted.frame.root, rtol=0, atol=0)
    assert other.width == two.model.width
    assert other.dtype == torch.float32


def test_features_have_gradients_and_any_leading_shape(one: Trained) -> None:
    u = one.fresh.u[:6].clone().requires_grad_()
    phi = one.model.eta(u)
    with torch.no_grad():
        torch.testing.assert_close(one.model.eta(u.reshape(2, 3, -1)).reshape(6, -1), phi, rtol=1e-9, atol=1e-10)
    (slope,) = torch.autograd.grad(phi[:, 0].sum(), u)
    step = torch.zeros_like(u)
    step[:, 2] = 1e-3
    with torch.no_grad():
        numeric = (one.model.eta(u + step)[:, 0] - one.model.eta(u - step)[:, 0]) / 2e-3
    torch.testing.assert_close(slope[:, 2].double(), numeric, rtol=2e-2, atol=2e-2)


def test_roots_have_an_inverse(two: Trained) -> None:
    diagonal = two.fitted.frame.root.diagonal(dim1=-2, dim2=-1)
    assert float(diagonal.min()) == TINY
    assert two.fitted.frame.mean.shape == (2, two.model.width)


def test_who_is_stacked() -> None:
    default, fit = ModelSettings(), FitSettings()
    assert is_stacked(default, fit, 300, 8)
    assert is_stacked(default, fit, 2000, 8)
    assert not is_stacked(default, fit, 2001, 8)
    assert is_stacked(default, fit, 6000, 30)  # 1,500 learned coordinates
    assert not is_stacked(default, fit, 6001, 30)
    assert is_stacked(replace(default, emulator="stacked"), fit, 10_000, 8)
    assert not is_stacked(default, fit, 3, 8)


@pytest.mark.parametrize(
    ("runs", "rows", "few"),
    [(3000, 1, False), (1900, 20, True), (10, 3000, True), (3000, 10, False), (2, 30_000, False)],
)
@pytest.mark.parametrize("by_run", [False, True])
def test_runs_are_counted_whatever_the_first_rows_are(runs: int, rows: int, few: bool, by_run: bool) -> None:
    t = Kit.rand(1, runs, 2)
    u = torch.cat([torch.zeros(runs * rows, 1), t.repeat_interleave(rows, 0) if by_run else t.repeat(rows, 1)], 1)
    z = torch.zeros(len(u), 1)
    table = Runs(u, z, z, torch.arange(len(u)), torch.ones(len(u), dtype=F64))
    model = CalibrationModel(1, Kit.prior(2), 1, ModelSettings(discrepancy="none"))
    assert (few_rows(model, table, FitSettings()) is not None) == few


@pytest.mark.parametrize(
    ("settings", "fit", "word"),
    [
        (ModelSettings(emulator="features"), FitSettings(), "features"),
        (ModelSettings(), FitSettings(weights="fullrank"), "fullrank"),
        (ModelSettings(), FitSettings(free_emulator=True), "free_emulator"),
        (ModelSettings(varying_residual=True), FitSettings(), "varying_residual"),
        (ModelSettings(eta=GPSettings(hidden=(3,))), FitSettings(), "deep"),
        (ModelSettings(eta=GPSettings(features=FeatureSettings(frequencies="fixed"))), FitSettings(), "fixed"),
        (ModelSettings(likelihood_z=LikelihoodSettings(learn_noise=False)), FitSettings(), "noise"),
        (ModelSettings(likelihood_z=LikelihoodSettings(kind="student_t")), FitSettings(), "student_t"),
    ],
)
def test_what_keeps_an_emulator_from_being_stacked(settings: ModelSettings, fit: FitSettings, word: str) -> None:
    assert word in why_not(settings, fit, 100)
    assert not is_stacked(settings, fit, 100, 3)


def test_an_unknown_emulator_is_refused() -> None:
    with pytest.raises(ModelError, match="accepted: auto, features, stacked"):
        ModelSettings(emulator="gp")  # type: ignore[arg-type]
