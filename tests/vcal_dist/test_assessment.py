"""Assessments against closed forms: with θ pinned and Gaussian noise everything is linear and Gaussian."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

import vcal_dist.predictive
from storage.problem import CalibrationInput, ControlInput, Output, Problem
from vcal_dist.assessment import assess_observations, assess_runs, judge_observations, judge_runs
from vcal_dist.batches import Scaling
from vcal_dist.calibration import CalibrationModel
from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Arrow, FullRank
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.posterior import Posterior
from vcal_dist.transforms import OutputScaling, TransformSettings
from vcal_dist.weights import Weights

F64 = torch.float64
ONE = torch.zeros(1, dtype=F64)
VARIANCE = 0.4**2 + 0.3**2  # of the kit's observations: σ_y² and the emulator's residual
MEAN, SD = (0.5, -2.0), (0.8, 0.6)


def scaling(outputs: int = 1, transform: TransformSettings | None = None, standardise: bool = True) -> Scaling:
    problem = Problem(
        name="assessed",
        control_inputs=tuple(ControlInput(name=f"x{j}", bounds=(0.0, 1.0)) for j in range(2)),
        calibration_inputs=(CalibrationInput.model_validate({"name": "t0", "bounds": (0.0, 1.0)}),),
        outputs=tuple(Output(name=f"y{k}") for k in range(outputs)),
    )
    mean, sd = (torch.tensor(part[:outputs], dtype=F64) for part in (MEAN, SD))
    if not standardise:
        mean, sd = torch.zeros_like(mean), torch.ones_like(sd)
    names = [output.name for output in problem.outputs]
    return Scaling(problem, OutputScaling([transform or TransformSettings()] * outputs, mean, sd, names), F64)


@torch.no_grad()
def design(model: CalibrationModel, x: Tensor, theta: float = 0.0) -> Tensor:
    """ψ with f = ψ·w at one θ̃."""
    point = torch.full((1, 1), theta, dtype=F64)
    phi_eta = model.phi_eta(x, model.rows_of_theta(point, len(x)), None)
    return model.design(phi_eta, None if model.delta is None else model.delta(x))[0]


def pinned(mean: Tensor, precision: Tensor, theta: float = 0.0) -> FullRank:
    """q with Gaussian weights (K, D), (K, D, D) and θ̃ known to 1e-6."""
    K, D = mean.shape
    q = FullRank(1, K, D)
    arrow = Arrow(torch.full((1, 1), 1e12, dtype=F64), torch.zeros(K, 1, D, dtype=F64), precision)
    q.move(torch.full((1,), theta, dtype=F64), mean, arrow)
    return q


def conditioned(psi: Tensor, y: Tensor, variance: float = VARIANCE) -> tuple[Tensor, Tensor]:
    """The exact posterior of w ~ N(0, I) given y = ψw + N(0, variance), mean (K, D) and precision (K, D, D)."""
    P = torch.eye(psi.shape[1], dtype=F64) + psi.mT @ psi / variance
    mean = torch.linalg.solve(P, psi.mT @ y / variance).mT
    return mean, P.expand(y.shape[1], -1, -1).clone()


def log_normal(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return torch.from_numpy(stats.norm.logpdf(y.numpy(), mean.numpy(), variance.sqrt().numpy()))


@dataclass
class Case:
    """A model whose weights have been learned from y at x."""

    model: CalibrationModel
    q: FullRank
    x: Tensor
    y: Tensor  # scaled
    psi: Tensor


def learned(kit: Any, rows: int, outputs: int = 1, seed: int = 0, **options: Any) -> Case:
    model = kit.model("additive", outputs=outputs, **options)
    x = kit.rand(seed + 20, rows, 2)
    psi = design(model, x)
    y = psi @ kit.randn(seed + 21, psi.shape[1], outputs) + math.sqrt(VARIANCE) * kit.randn(seed + 22, rows, outputs)
    return Case(model, pinned(*conditioned(psi, y)), x, y, psi)


def in_units(scaled: Tensor) -> Tensor:
    K = scaled.shape[1]
    return scaled * torch.tensor(SD[:K], dtype=F64) + torch.tensor(MEAN[:K], dtype=F64)


# --- held out ---------------------------------------------------------------------------------------------------------


def test_held_out_density_and_error_are_those_of_the_closed_form(kit: Any) -> None:
    case, units = learned(kit, 40, outputs=2), scaling(2)
    x, y, own = kit.rand(1, 300, 2), 1.3 * kit.randn(2, 300, 2), 0.1 + 0.3 * kit.rand(3, 300, 2)
    y[::3, 0] = torch.nan
    observations = units.observations(x, in_units(y), own)
    found = assess_observations(case.model, [case.q], ONE, units, observations, leave_one_out=False, draws=512)
    psi = design(case.model, x)
    mean, var = psi @ case.q.raw_mean.mT, torch.stack([(psi @ root).square().sum(1) for root in case.q.raw_root], 1)
    variance = var + VARIANCE + (own / torch.tensor(SD)).square()
    # In the user's units all is wider by sd.
    density = log_normal(y, mean, variance) - torch.tensor(SD, dtype=F64).log()
    assert found.log_predictive_density == pytest.approx(float(density.nanmean()), abs=1e-5)
    rmse = [sd * math.sqrt(float((y - mean)[:, k].square().nanmean())) for k, sd in enumerate(SD)]
    assert found.rmse == pytest.approx(rmse, rel=1e-5)
    inside = ((y - mean).abs() < 1.6448536269514722 * variance.sqrt())[~y.isnan()].double().mean()
    assert found.coverage == pytest.approx(float(inside), abs=0.006)  # three of 500 values
    assert (found.rows, found.method, found.unreliable) == (300, "held out", 0)


def test_coverage_is_ninety_percent_where_the_model_is_the_truth(kit: Any) -> None:
    case, units = learned(kit, 40), scaling()
    x = kit.rand(1, 1000, 2)
    psi = design(case.model, x)
    var = (psi @ case.q.raw_root[0]).square().sum(1, keepdim=True) + VARIANCE
    y = psi @ case.q.raw_mean.mT + var.sqrt() * kit.randn(2, 1000, 1)
    observations = units.observations(x, in_units(y))
    found = assess_observations(case.model, [case.q], ONE, units, observations, leave_one_out=False)
    assert found.coverage == pytest.approx(0.9, abs=3 * math.sqrt(0.09 / 1000))


def test_a_mixture_predicts_by_its_mixed_density(kit: Any) -> None:
    model, units = kit.model("none"), scaling()
    thetas, weights = (-1.0, 1.5), (0.25, 0.75)
    precision = (50 * torch.eye(model.width, dtype=F64))[None]
    mean = 2 * kit.randn(4, 1, model.width)
    components: list[Weights] = [pinned(mean, precision, theta) for theta in thetas]
    x, y = kit.rand(1, 200, 2), kit.randn(2, 200, 1)
    log_weights = torch.tensor(weights, dtype=F64).log()
    observations = units.observations(x, in_units(y))
    found = assess_observations(model, components, log_weights, units, observations, leave_one_out=False, draws=64)
    parts = []
    for theta, weight in zip(thetas, weights, strict=True):
        psi = design(model, x, theta)
        parts.append(math.log(weight) + log_normal(y, psi @ mean.mT, (psi.square().sum(1) / 50 + VARIANCE)[:, None]))
    density = torch.logsumexp(torch.stack(parts), 0) - math.log(SD[0])
    assert found.log_predictive_density == pytest.approx(float(density.mean()), abs=1e-5)
    apart = 0.25 * parts[0].mean() + 0.75 * parts[1].mean()
    assert abs(float(density.mean() - apart)) > 0.1  # mixing densities is not mixing their logarithms


def test_the_density_is_one_of_y_itself_under_a_transform(kit: Any) -> None:
    """T = log: y is log-normal."""
    case, units = learned(kit, 40), scaling(transform=TransformSettings(kind="log"))
    x, scaled = kit.rand(1, 50, 2), kit.randn(2, 50, 1)
    y = in_units(scaled).exp()
    found = assess_observations(
        case.model, [case.q], ONE, units, units.observations(x, y), leave_one_out=False, draws=4096
    )
    psi = design(case.model, x)
    mean, var = psi @ case.q.raw_mean.mT, (psi @ case.q.raw_root[0]).square().sum(1, keepdim=True)
    sigma = SD[0] * (var + VARIANCE).sqrt().numpy()
    density = stats.lognorm.logpdf(y.numpy(), sigma, scale=np.exp(MEAN[0] + SD[0] * mean.numpy()))
    assert found.log_predictive_density == pytest.approx(float(density.mean()), abs=1e-4)
    # E[T⁻¹(f)] of the process, without noise
    expected = (MEAN[0] + SD[0] * mean + SD[0] ** 2 * var / 2).exp()
    assert found.rmse[0] == pytest.approx(math.sqrt(float((expected - y).square().mean())), rel=0.01)


def test_counts_have_their_predictive_probability_and_inclusive_intervals(kit: Any) -> None:
    counts = LikelihoodSettings(kind="poisson")
    model = kit.model("none", likelihood_y=counts, likelihood_z=counts)
    units = scaling(standardise=False)
    precision = (30 * torch.eye(model.width, dtype=F64))[None]
    q = pinned(kit.randn(4, 1, model.width), precision)
    x = kit.rand(1, 12, 2)
    psi = design(model, x)
    mean, sd = (psi @ q.raw_mean.mT)[:, 0].numpy(), (psi.square().sum(1) / 30).sqrt().numpy()

    def probability(i: int, count: int) -> float:
        def integrand(f: float) -> float:
            return float(stats.poisson.pmf(count, math.exp(f)) * stats.norm.pdf(f, mean[i], sd[i]))

        return float(integrate.quad(integrand, mean[i] - 9 * sd[i], mean[i] + 9 * sd[i])[0])

    probabilities = np.array([[probability(i, count) for count in range(14)] for i in range(12)])
    cdf = probabilities.cumsum(1)
    high = (cdf >= 0.95).argmax(1)
    # Where 4096 draws tell which count is the quantile.
    clear = (cdf[:, -2] > 0.99) & (np.abs(cdf - 0.95).min(1) > 0.015)
    assert clear.sum() >= 6
    for y, coverage in ((high, 1.0), (high + 1, 0.0)):
        table = units.observations(x[clear], torch.from_numpy(y[clear]).double()[:, None])
        found = assess_observations(model, [q], ONE, units, table, leave_one_out=False)
        density = np.log(probabilities[np.arange(12), y])[clear].mean()
        assert found.log_predictive_density == pytest.approx(float(density), abs=1e-5)
        assert found.coverage == coverage


def test_runs_are_predicted_by_the_emulator_at_their_own_inputs(kit: Any) -> None:
    model, units = kit.model("additive"), scaling()
    q = kit.full_rank(1, 1, model.width)  # w and θ̃ correlated: the runs' predictions do not depend on θ̃
    u, z = kit.rand(1, 200, 3), 2 * kit.randn(2, 200, 1)
    found = assess_runs(
        model, [q], ONE, units, units.runs(u[:, :2], u[:, 2:], in_units(z)), leave_one_out=False, draws=8
    )
    phi = model.eta(u).detach()
    dense_mean, dense_covariance = (torch.from_numpy(part) for part in kit.dense(q))
    columns = slice(1, 1 + phi.shape[1])
    mean = (phi @ dense_mean[columns])[:, None]
    var = ((phi @ dense_covariance[columns, columns]) * phi).sum(1, keepdim=True)
    density = log_normal(z, mean, var + 0.3**2) - math.log(SD[0])
    assert found.log_predictive_density == pytest.approx(float(density.mean()))
    assert found.rmse == pytest.approx([SD[0] * math.sqrt(float((z - mean).square().mean()))])


# --- leave one out ----------------------------------------------------------------------------------------------------


def refitted(psi: Tensor, y: Tensor, variance: float) -> tuple[Tensor, Tensor]:
    """Mean and variance of each y from all other rows, (n, 1) each, by fitting n times."""
    means, variances = [], []
    for i in range(len(y)):
        rest = torch.arange(len(y)) != i
        mean, precision = conditioned(psi[rest], y[rest], variance)
        means.append(psi[i] @ mean[0])
        variances.append(psi[i] @ torch.linalg.solve(precision[0], psi[i]) + variance)
    return torch.stack(means)[:, None], torch.stack(variances)[:, None]


def of_runs(kit: Any, rows: int, likelihood_z: LikelihoodSettings) -> Case:
    model = kit.model("none", likelihood_z=likelihood_z)
    u = kit.rand(1, rows, 3)
    phi = model.eta(u).detach()
    z = phi @ kit.randn(2, phi.shape[1], 1) + 0.3 * kit.randn(3, rows, 1)
    return Case(model, pinned(*conditioned(phi, z, 0.3**2)), u, z, phi)


@pytest.mark.parametrize("table", ["observations", "runs"])
@pytest.mark.parametrize("kind", ["gaussian", "student_t"])
def test_leaving_one_out_is_what_fitting_again_without_it_gives(kit: Any, table: str, kind: Any) -> None:
    """A Student-t of 10⁷ degrees of freedom is a Gaussian whose weights are drawn."""
    units, rows, seeds = scaling(), 60, 2 if kind == "gaussian" else 5
    if table == "observations":
        noise, variance, assess = LikelihoodSettings(kind=kind, noise=0.4, degrees=1e7), VARIANCE, assess_observations
        case = learned(kit, rows, likelihood_y=noise)
        batch: Any = units.observations(case.x, in_units(case.y))
    else:
        noise, variance, assess = LikelihoodSettings(kind=kind, noise=0.3, degrees=1e7), 0.3**2, assess_runs  # type: ignore[assignment]
        case = of_runs(kit, rows, noise)
        batch = units.runs(case.x[:, :2], case.x[:, 2:], in_units(case.y))
    found = [assess(case.model, [case.q], ONE, units, batch, leave_one_out=True, seed=seed) for seed in range(seeds)]
    mean, var = refitted(case.psi, case.y, variance)
    exact = float(log_normal(case.y, mean, var).mean()) - math.log(SD[0])
    densities = np.array([one.log_predictive_density for one in found])
    rmse = SD[0] * math.sqrt(float((mean - case.y).square().mean()))
    if kind == "gaussian":  # θ̃ is pinned and the weights are integrated out: nothing is left to chance
        np.testing.assert_allclose(densities, exact, atol=1e-5)
        np.testing.assert_allclose([one.rmse[0] for one in found], rmse, rtol=1e-5)
        assert {one.unreliable for one in found} == {0}
    else:  # the seeds tell the Monte Carlo error; the bias of PSIS is of the order of 1/S
        assert densities.std() < 0.01
        assert abs(densities.mean() - exact) < 4 * densities.std() / math.sqrt(seeds) + 0.001
        assert np.mean([one.rmse[0] for one in found]) == pytest.approx(rmse, rel=0.01)
        assert max(one.unreliable for one in found) <= 2
    inside = float(((case.y - mean).abs() < 1.6448536269514722 * var.sqrt()).double().mean())
    assert np.mean([one.coverage for one in found]) == pytest.approx(inside, abs=1.5 / rows)
    assert {(one.rows, one.method) for one in found} == {(rows, "leave one out")}
    # It is not the density of rows that the fit has seen.
    seen = assess(case.model, [case.q], ONE, units, batch, leave_one_out=False).log_predictive_density
    assert seen - exact > 0.05


def test_leaving_one_out_weighs_what_is_left_of_theta(kit: Any) -> None:
    """θ̃ on two points: p(θ̃ | all but one) follows from Bayes' rule and the evidence of the rest."""
    units, rows, thetas = scaling(), 12, (-0.7, 0.9)
    model = kit.model("none")
    x = kit.rand(1, rows, 2)
    designs = [design(model, x, theta) for theta in thetas]
    y = designs[0] @ kit.randn(2, model.width, 1) + math.sqrt(VARIANCE) * kit.randn(3, rows, 1)

    def evidence(psi: Tensor, y: Tensor) -> float:
        covariance = psi @ psi.mT + VARIANCE * torch.eye(len(y), dtype=F64)
        return float(stats.multivariate_normal.logpdf(y[:, 0].numpy(), cov=covariance.numpy()))

    log_weights = torch.tensor([evidence(psi, y) for psi in designs], dtype=F64).log_softmax(0)
    assert 0.05 < float(log_weights.exp()[0]) < 0.95  # both count
    exact = []
    for i in range(rows):
        rest = torch.arange(rows) != i
        of_rest = [evidence(psi[rest], y[rest]) for psi in designs]
        of_all = [evidence(psi, y) for psi in designs]
        exact.append(np.logaddexp(*of_all) - np.logaddexp(*of_rest))  # p(y_i | y₋ᵢ), θ̃ summed over
    components: list[Weights] = [
        pinned(*conditioned(psi, y), theta) for psi, theta in zip(designs, thetas, strict=True)
    ]
    table = units.observations(x, in_units(y))
    found = assess_observations(model, components, log_weights, units, table, leave_one_out=True, draws=4096)
    assert found.log_predictive_density == pytest.approx(float(np.mean(exact)) - math.log(SD[0]), abs=1e-3)


def fitted_by_itself(kit: Any, kind: Any) -> tuple[Case, Any, Scaling]:
    """Fewer rows than weights, and little noise: a leverage near one."""
    units = scaling()
    noise = LikelihoodSettings(kind=kind, noise=0.02, degrees=1e7)
    model = kit.model("none", likelihood_y=noise, emulator_residual=False)
    x = kit.rand(1, 4, 2)
    psi = design(model, x)
    y = 2 * kit.randn(2, 4, 1)
    return Case(model, pinned(*conditioned(psi, y, 0.02**2)), x, y, psi), units.observations(x, in_units(y)), units


def test_rows_that_are_fitted_by_themselves_are_left_out_in_closed_form(kit: Any) -> None:
    case, table, units = fitted_by_itself(kit, "gaussian")
    found = assess_observations(case.model, [case.q], ONE, units, table, leave_one_out=True)
    mean, var = refitted(case.psi, case.y, 0.02**2)
    exact = float(log_normal(case.y, mean, var).mean()) - math.log(SD[0])
    assert exact < -2  # where the rows' own fit says 2
    assert found.log_predictive_density == pytest.approx(exact, rel=1e-3)
    assert found.unreliable == 0


def test_draws_of_rows_that_are_fitted_by_themselves_are_unreliable(kit: Any) -> None:
    case, table, units = fitted_by_itself(kit, "student_t")
    found = [assess_observations(case.model, [case.q], ONE, units, table, leave_one_out=True, seed=s) for s in range(5)]
    assert sum(one.unreliable for one in found) >= 10  # k̂ estimates the leverage, with an error of about 0.2


def test_a_row_of_which_the_posterior_knows_less_than_the_row_is_unreliable(kit: Any) -> None:
    case, units = learned(kit, 20), scaling()
    q = pinned(case.q.mean, 0.01 * torch.eye(case.model.width, dtype=F64)[None])  # it has not learned from the rows
    table = units.observations(case.x, in_units(case.y))
    found = assess_observations(case.model, [q], ONE, units, table, leave_one_out=True)
    assert found.unreliable == 20
    assert math.isfinite(found.log_predictive_density)


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_rows_without_weight_or_value_change_nothing(kit: Any, leave_one_out: bool) -> None:
    case, units = learned(kit, 30, outputs=2), scaling(2)
    y = case.y.clone()
    y[::4, 1] = torch.nan
    plain = units.observations(case.x, in_units(y))
    padded = units.observations(
        torch.cat([kit.rand(7, 3, 2), case.x, kit.rand(8, 2, 2)]),
        torch.cat([torch.full((3, 2), torch.nan, dtype=F64), in_units(y), torch.full((2, 2), 1e6, dtype=F64)]),
        weight=torch.cat([torch.ones(33), torch.zeros(2)]),
    )
    first, second = (
        assess_observations(case.model, [case.q], ONE, units, table, leave_one_out=leave_one_out)
        for table in (plain, padded)
    )
    assert first == second
    assert first.rows == 30


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("kind", ["additive", "general"])
def test_blocks_change_nothing_and_seeds_little(
    kit: Any, kind: str, leave_one_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, units = kit.model(kind, hidden=(2,), likelihood_y=LikelihoodSettings(kind="student_t", noise=0.4)), scaling()
    q = kit.full_rank(1, 1, model.width)
    observations = units.observations(kit.rand(1, 12, 2), in_units(kit.randn(2, 12, 1)))

    def assessed(seed: int) -> Any:
        return assess_observations(model, [q], ONE, units, observations, leave_one_out=leave_one_out, seed=seed)

    whole, again, other = assessed(0), assessed(0), assessed(1)
    assert whole == again
    assert whole.log_predictive_density != other.log_predictive_density
    assert whole.log_predictive_density == pytest.approx(other.log_predictive_density, abs=0.3)
    monkeypatch.setattr(vcal_dist.predictive, "NUMBERS", 5 * 1024 * 128)
    in_blocks = assessed(0)
    assert in_blocks.log_predictive_density == pytest.approx(whole.log_predictive_density, rel=1e-9)
    assert math.isfinite(in_blocks.rmse[0])


@pytest.mark.parametrize("kind", ["poisson", "bernoulli"])
def test_counts_and_classes_that_were_left_out_are_less_likely_than_those_that_were_seen(kit: Any, kind: Any) -> None:
    likelihood = LikelihoodSettings(kind=kind)
    model = kit.model("none", likelihood_y=likelihood, likelihood_z=likelihood)
    units = scaling(standardise=False)
    x = kit.rand(1, 20, 2)
    psi = design(model, x)
    q = pinned(*conditioned(psi, kit.randn(2, 20, 1), 1.0))  # as certain as from 20 rows with noise of one
    y = (psi @ q.raw_mean.mT > 0).double() * (1 if kind == "bernoulli" else 3)  # what q says: rows it has seen
    table = units.observations(x, y)
    seen, left_out = (
        assess_observations(model, [q], ONE, units, table, leave_one_out=leave_one_out)
        for leave_one_out in (False, True)
    )
    assert left_out.log_predictive_density < seen.log_predictive_density - 0.005
    assert left_out.rmse[0] > seen.rmse[0]
    assert left_out.unreliable == 0


def test_nothing_to_assess_is_refused(kit: Any) -> None:
    case, units = learned(kit, 5), scaling()
    table = units.observations(case.x, torch.full((5, 1), torch.nan, dtype=F64))
    with pytest.raises(ModelError, match="none of the 5 observations has a known value"):
        assess_observations(case.model, [case.q], ONE, units, table, leave_one_out=False)


# --- row by row -------------------------------------------------------------------------------------------------------


def test_rows_are_judged_by_the_closed_form_in_the_users_units(kit: Any) -> None:
    case, units = learned(kit, 40, outputs=2), scaling(2)
    x, y, own = kit.rand(1, 60, 2), 1.3 * kit.randn(2, 60, 2), 0.1 + 0.3 * kit.rand(3, 60, 2)
    y[::3, 0], y[5] = torch.nan, torch.nan
    posterior = Posterior(units, case.model, [case.q], ONE, {})
    found = judge_observations(posterior, x.numpy(), in_units(y).numpy(), own.numpy(), leave_one_out=False)
    assert (found.method, found.t, found.unreliable.sum()) == ("held out", None, 0)
    rows = np.delete(np.arange(60), 5)  # the row that knows nothing is left out
    np.testing.assert_array_equal(found.x, x.numpy()[rows])
    np.testing.assert_array_equal(found.y, in_units(y).numpy()[rows])
    psi = design(case.model, x)
    mean, var = psi @ case.q.raw_mean.mT, torch.stack([(psi @ root).square().sum(1) for root in case.q.raw_root], 1)
    sd = (var + VARIANCE + (own / torch.tensor(SD)).square()).sqrt() * torch.tensor(SD)
    unknown = y.isnan().numpy()[rows]
    for name, expected, tolerance in (
        ("mean", in_units(mean), 1e-5),
        ("sd", sd, 1e-5),
        ("low", in_units(mean) - 1.645 * sd, 0.1),
        ("high", in_units(mean) + 1.645 * sd, 0.1),
        ("pit", torch.special.ndtr((in_units(y) - in_units(mean)) / sd), 0.03),
    ):
        values = expected.numpy()[rows].copy()
        values[unknown] = np.nan
        np.testing.assert_allclose(getattr(found, name), values, atol=tolerance, err_msg=name)


def test_judging_counts_what_the_assessment_counts(kit: Any) -> None:
    case, units = learned(kit, 30), scaling()
    posterior = Posterior(units, case.model, [case.q], ONE, {})
    for leave_one_out in (False, True):
        table = units.observations(case.x, in_units(case.y))
        whole = assess_observations(case.model, [case.q], ONE, units, table, leave_one_out=leave_one_out)
        found = judge_observations(posterior, case.x.numpy(), in_units(case.y).numpy(), leave_one_out=leave_one_out)
        assert ((found.pit >= 0.05) & (found.pit < 0.95)).mean() == whole.coverage
        assert np.sqrt(np.square(found.y - found.mean).mean()) == pytest.approx(whole.rmse[0])


@pytest.mark.parametrize("kind", ["gaussian", "poisson"])
def test_pit_is_uniform_where_the_model_is_the_truth(kit: Any, kind: Any) -> None:
    likelihood = LikelihoodSettings(kind=kind, noise=0.4)
    model = kit.model("none", likelihood_y=likelihood, likelihood_z=likelihood, emulator_residual=False)
    units = scaling(standardise=False)
    posterior = Posterior(units, model, [kit.full_rank(1, 1, model.width)], ONE, {})
    x = kit.rand(1, 400, 2).numpy()
    drawn = posterior.predict(x, "observation", samples=400, seed=3).samples
    assert drawn is not None
    y = drawn[np.arange(400), np.arange(400)]  # of another draw in every row
    found = judge_observations(posterior, x, y, leave_one_out=False, draws=1024)
    assert stats.kstest(found.pit[:, 0], "uniform").pvalue > 0.01
    assert ((found.y >= found.low) & (found.y <= found.high)).mean() >= 0.86


@pytest.mark.parametrize("table", ["observations", "runs"])
def test_judging_a_row_left_out_is_predicting_it_by_a_fit_without_it(kit: Any, table: str) -> None:
    units, variance = scaling(), VARIANCE if table == "observations" else 0.3**2
    case = learned(kit, 25) if table == "observations" else of_runs(kit, 25, LikelihoodSettings(noise=0.3))
    posterior = Posterior(units, case.model, [case.q], ONE, {})
    if table == "observations":
        found = judge_observations(posterior, case.x.numpy(), in_units(case.y).numpy(), leave_one_out=True)
    else:
        found = judge_runs(
            posterior, *(part.numpy() for part in (case.x[:, :2], case.x[:, 2:], in_units(case.y))), leave_one_out=True
        )
        np.testing.assert_array_equal(found.t, case.x[:, 2:])
    mean, var = refitted(case.psi, case.y, variance)
    np.testing.assert_allclose(found.mean, in_units(mean), atol=1e-4)
    np.testing.assert_allclose(found.sd, SD[0] * var.sqrt(), rtol=1e-4)
    np.testing.assert_allclose(found.pit, stats.norm.cdf(case.y, mean, var.sqrt()), atol=0.03)
    assert found.method == "leave one out"


def test_a_row_that_cannot_be_left_out_has_no_prediction(kit: Any) -> None:
    case, units = learned(kit, 20), scaling()
    q = pinned(case.q.mean, 0.01 * torch.eye(case.model.width, dtype=F64)[None])  # it has not learned from the rows
    posterior = Posterior(units, case.model, [q], ONE, {})
    found = judge_observations(posterior, case.x.numpy(), in_units(case.y).numpy(), leave_one_out=True)
    assert found.unreliable.all()
    assert np.isnan(found.mean).all()
    assert np.isnan(found.pit).all()
    assert not np.isnan(found.y).any()


def test_under_a_transform_quantiles_and_moments_are_those_of_y(kit: Any) -> None:
    """T = log: y is log-normal."""
    case, units = learned(kit, 40), scaling(transform=TransformSettings(kind="log"))
    x, scaled = kit.rand(1, 30, 2), kit.randn(2, 30, 1)
    posterior = Posterior(units, case.model, [case.q], ONE, {})
    found = judge_observations(posterior, x.numpy(), in_units(scaled).exp().numpy(), leave_one_out=False)
    psi = design(case.model, x)
    mean, var = psi @ case.q.raw_mean.mT, (psi @ case.q.raw_root[0]).square().sum(1, keepdim=True)
    exact = stats.lognorm(SD[0] * (var + VARIANCE).sqrt().numpy(), scale=np.exp(MEAN[0] + SD[0] * mean.numpy()))
    np.testing.assert_allclose(found.low, exact.ppf(0.05), rtol=0.08)
    np.testing.assert_allclose(found.high, exact.ppf(0.95), rtol=0.08)
    np.testing.assert_allclose(found.mean, exact.mean(), rtol=0.04)
    np.testing.assert_allclose(found.sd, exact.std(), rtol=0.15)
    np.testing.assert_allclose(found.pit, exact.cdf(in_units(scaled).exp().numpy()), atol=0.03)
