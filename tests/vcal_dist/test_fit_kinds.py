"""Every kind of model through the whole fit: pairs of choices, not all their combinations, on one small simulator.

η(x, t) = ½ + sin(3x)·(1 + t1) + t2·x²,   nature = η(x, θ) + 0.1 + 0.2x
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from storage.priors import Uniform
from storage.problem import CalibrationInput, ControlInput, Output, Problem
from vcal_dist.batches import Observations, Runs, Scaling, take
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings
from vcal_dist.fitting import fit, run_stage
from vcal_dist.fullrank import FullRank
from vcal_dist.gp import DeepGP, GPSettings
from vcal_dist.initialise import start_hidden_layers
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.objective import Samples, elbo
from vcal_dist.passes import compress
from vcal_dist.phases import blocks
from vcal_dist.plan import SAMPLES, Chosen, FitSettings, StageSettings, Totals
from vcal_dist.priors import ThetaPrior
from vcal_dist.stages import Stage, meanfield_stages, natural_stage, nature_groups
from vcal_dist.transforms import OutputScaling, TransformSettings
from vcal_dist.work import Fitted

F64 = torch.float64
TRUTH = torch.tensor([0.3, 0.7], dtype=F64)
PRIOR_SD = 12**-0.5  # of a uniform θ on the unit interval
STUDENT = LikelihoodSettings(kind="student_t")
POISSON = LikelihoodSettings(kind="poisson")
TRANSFORMS = {
    "none": TransformSettings(),
    "sqrt": TransformSettings(kind="sqrt"),
    "log": TransformSettings(kind="log"),
    "boxcox": TransformSettings(kind="boxcox", power=0.3),
}


# --- the simulator and its data ---------------------------------------------------------------------------------------


def simulator(x: Tensor, t: Tensor, outputs: int) -> Tensor:
    """η, its mirror image in x, and the mean of both: (B, outputs), all positive."""

    def eta(x: Tensor) -> Tensor:
        return 0.5 + torch.sin(3 * x) * (1 + t[:, :1]) + t[:, 1:] * x.square()

    return torch.cat([eta(x), eta(1 - x), 0.5 * (eta(x) + eta(1 - x))], 1)[:, :outputs]


def nature(x: Tensor, outputs: int, discrepancy: bool = True) -> Tensor:
    return simulator(x, TRUTH.expand(len(x), -1), outputs) + (0.1 + 0.2 * x if discrepancy else 0.0)


def logit(f: Tensor) -> Tensor:
    """Classes change where f does."""
    return 4 * (f - f.mean())


def drawn(kind: str, f: Tensor, sd: float, generator: torch.Generator) -> Tensor:
    """An outcome for every f: with noise for numbers, as counts of rate e^f, or as classes."""
    if kind == "poisson":
        return torch.poisson(f.exp(), generator=generator)
    if kind == "bernoulli":
        return torch.bernoulli(torch.sigmoid(f), generator=generator)
    return f + sd * torch.randn(f.shape, generator=generator, dtype=F64)


class Data(NamedTuple):
    runs: Runs
    observations: Observations
    fresh: Tensor  # (B, 3) inputs that no run has
    expected: Tensor  # (B, K) the scaled f there


def data(
    *,
    rows: tuple[int, int] = (60, 25),
    outputs: int = 1,
    kind_z: str = "gaussian",
    kind_y: str = "gaussian",
    transform: str = "none",
    discrepancy: bool = True,
    offset: float = 0.0,
    noise: bool = False,
    missing: bool = False,
    outliers: int = 0,
    dtype: torch.dtype = F64,
    seed: int = 0,
) -> Data:
    """Runs on a Sobol design and observations at random x, in the model's units."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"out{k}" for k in range(outputs)]
    problem = Problem(
        name="kinds",
        control_inputs=(ControlInput(name="x", bounds=(0.0, 1.0)),),
        calibration_inputs=tuple(
            CalibrationInput(name=name, bounds=(0.0, 1.0), prior=Uniform(low=0.0, high=1.0)) for name in ("t1", "t2")
        ),
        outputs=tuple(Output(name=name) for name in names),
    )
    design = torch.quasirandom.SobolEngine(3, scramble=True, seed=seed).draw(rows[0] + 200, dtype=F64)
    u, fresh = design[: rows[0]], design[rows[0] :]
    x = torch.rand(rows[1], 1, generator=generator, dtype=F64)
    link = logit if kind_y == "bernoulli" else lambda f: f
    of_runs, of_fresh = (offset + link(simulator(part[:, :1], part[:, 1:], outputs)) for part in (u, fresh))
    z = drawn(kind_z, of_runs, 0.01, generator)
    y = drawn(kind_y, offset + link(nature(x, outputs, discrepancy)), 0.03, generator)
    own = torch.full_like(y, 0.1) if noise else None
    if noise:
        y = y + 0.1 * torch.randn(y.shape, generator=generator, dtype=F64)
    y[:outliers] += 3.0
    if missing:
        z[::4, 0] = y[1::5, -1] = torch.nan
    standardise = {kind_z, kind_y} <= {"gaussian", "student_t"}
    scaling = Scaling(
        problem, OutputScaling.from_runs(z, [TRANSFORMS[transform]] * outputs, names, standardise), dtype=dtype
    )
    return Data(
        scaling.runs(u[:, :1], u[:, 1:], z),
        scaling.observations(x, y, own),
        fresh.to(dtype),
        scaling.outputs(of_fresh),
    )


def build(
    outputs: int = 1,
    *,
    eta: GPSettings | None = None,
    delta: GPSettings | None = None,
    dtype: torch.dtype = F64,
    **settings: Any,
) -> CalibrationModel:
    prior = ThetaPrior([Uniform(low=0.0, high=1.0)] * 2, [(0.0, 1.0)] * 2, ["t1", "t2"])
    eta = eta or GPSettings(features=FeatureSettings(features=30, frequencies="learned", constant=1.0))
    delta = delta or GPSettings(
        features=FeatureSettings(features=6, constant=0.3, linear=0.3), amplitude=0.1, lengthscale=0.7
    )
    made = ModelSettings(eta=eta, delta=delta, emulator="features", **settings)
    return CalibrationModel(1, prior, outputs, made, dtype=dtype)


def settings_of(
    weights: Any = "collapsed",
    *,
    emulator: int = 60,
    theta: int = 30,
    joint: int = 5,
    meanfield: int = 60,
    joint_rate: float | None = None,
    batch: dict[str, int] | None = None,
    **settings: Any,
) -> FitSettings:
    """A schedule with so many steps in its stages."""
    rows = batch or {}
    stages = {
        "emulator": StageSettings(steps=emulator, **rows),
        "theta": StageSettings(steps=theta, **rows),
        "joint": StageSettings(steps=joint, rate=joint_rate, **rows),
    }
    if weights == "meanfield":
        rates = {"emulator_weights": 0.05, "emulator": 0.015, "weights_and_theta": 0.05, "everything": 0.015}
        stages = {name: StageSettings(steps=meanfield, rate=rate, **rows) for name, rate in rates.items()}
    return FitSettings(weights=weights, screening=256, starts=2, evaluations=128, **stages, **settings)


FEW = settings_of()


# --- what can be asked of every fit -----------------------------------------------------------------------------------


@torch.no_grad()
def emulated(fitted: Fitted, u: Tensor) -> Tensor:
    """E η at u, hidden layers at their means."""
    model = fitted.model
    return fitted.q.moments(model.eta(u, None), model.columns_eta)[0].double()


def error_of_emulator(fitted: Fitted, found: Data) -> float:
    """Root mean square at fresh points, relative to predicting the mean."""
    residual = emulated(fitted, found.fresh) - found.expected
    return float((residual.square().mean() / (found.expected - found.expected.mean(0)).square().mean()).sqrt())


def distance(fitted: Fitted) -> float:
    """From the truth, in the prior's standard deviations."""
    return float((fitted.theta.mean() - TRUTH).norm()) / PRIOR_SD


FROM_PRIOR = float((0.5 - TRUTH).norm()) / PRIOR_SD


def assert_sound(fitted: Fitted, found: Data) -> None:
    """Numbers are finite, the posterior is one, and the bound can be computed."""
    for name, value in fitted.model.state_dict().items():
        assert bool(value.isfinite().all()), name
    for q in fitted.components:
        assert isinstance(q, torch.nn.Module)
        for name, value in q.state_dict().items():
            assert bool(value.isfinite().all()), name
    mean, sd = fitted.theta.mean(), fitted.theta.sd()
    assert bool(((mean > 0) & (mean < 1)).all())
    assert bool((sd > 0).all())
    assert bool((sd < 1.1 * PRIOR_SD).all())
    assert float(fitted.log_weights.exp().sum()) == pytest.approx(1.0)
    assert all(math.isfinite(closing.log_evidence) for closing in fitted.closings)
    assert fitted.log_evidence_runs is None or math.isfinite(fitted.log_evidence_runs)
    with torch.no_grad():
        bound = elbo(fitted.model, fitted.q, found.runs, found.observations, samples=Samples(2, 2))
    assert all(math.isfinite(float(part)) for part in bound)


# --- pairs of choices -------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """One choice of everything."""

    weights: str
    eta: str  # shallow, or the mean of its hidden layer, and whether inputs are fed to the last one
    discrepancy: str
    free_kappa: bool
    likelihoods: str  # of z and of y
    outputs: int  # 3 with missing values
    noise: bool  # a column with the observations' own
    transform: str
    frequencies: str
    kernel: str
    lengthscales: str
    free_emulator: bool
    dtype: str


# A greedy cover of pairs of choices; meanfield has no joint stage, so that `free_emulator` says nothing there.
TABLE = """
collapsed|zero        |none         |yes|gaussian gaussian  |3|yes|boxcox|variational|matern52|isotropic|no |float64
collapsed|linear      |general deep |no |poisson poisson    |1|no |none  |variational|matern32|ard      |yes|float64
collapsed|linear      |additive deep|yes|student_t gaussian |3|yes|sqrt  |variational|matern12|full     |no |float32
collapsed|shallow     |general      |no |gaussian student_t |3|yes|boxcox|variational|arccos1 |ard      |yes|float64
collapsed|zero        |additive     |no |gaussian poisson   |3|no |none  |learned    |gaussian|ard      |yes|float64
collapsed|zero fed    |additive     |yes|bernoulli bernoulli|1|no |none  |variational|matern52|full     |yes|float64
fullrank |shallow     |additive     |no |gaussian student_t |1|no |sqrt  |fixed      |matern12|isotropic|yes|float32
fullrank |zero fed    |additive deep|yes|student_t gaussian |1|yes|log   |learned    |gaussian|ard      |yes|float64
fullrank |zero fed    |none         |no |gaussian poisson   |3|no |none  |fixed      |matern52|ard      |no |float32
fullrank |zero        |general deep |no |gaussian gaussian  |1|no |log   |fixed      |arccos1 |full     |yes|float32
fullrank |linear      |general      |no |gaussian gaussian  |1|no |boxcox|variational|gaussian|isotropic|no |float32
meanfield|identity fed|general      |no |bernoulli bernoulli|3|no |none  |learned    |arccos1 |full     |no |float32
meanfield|identity fed|additive     |yes|gaussian student_t |1|yes|boxcox|fixed      |matern32|full     |no |float64
meanfield|shallow     |additive deep|yes|poisson poisson    |3|no |none  |fixed      |gaussian|isotropic|no |float32
meanfield|shallow     |general deep |no |student_t gaussian |3|yes|log   |learned    |matern32|isotropic|no |float32
meanfield|identity fed|none         |yes|gaussian gaussian  |1|no |sqrt  |learned    |matern12|ard      |no |float64
"""


def kinds() -> list[Kind]:
    """The rows of the table."""
    words: dict[str, Any] = {"yes": True, "no": False, "1": 1, "3": 3}
    rows = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]
    return [Kind(*(words.get(cell, cell) for cell in row)) for row in rows]


KINDS = kinds()


def described(kind: Kind) -> tuple[CalibrationModel, Data, FitSettings]:
    """The model, data of its kind, and settings."""
    kind_z, kind_y = kind.likelihoods.split()
    dtype = getattr(torch, kind.dtype)
    features = FeatureSettings(
        features=24,
        kernel=kind.kernel,  # type: ignore[arg-type]
        lengthscales=kind.lengthscales,  # type: ignore[arg-type]
        frequencies=kind.frequencies,  # type: ignore[arg-type]
        constant=1.0,
    )
    hidden: dict[str, Any] = {"hidden_features": FeatureSettings(features=12, constant=0.5)}
    mean, *fed = kind.eta.split()
    deep = {} if mean == "shallow" else {"hidden": (3 if mean == "identity" else 2,), "mean": mean}
    eta = GPSettings(features=features, feed_inputs=bool(fed), **deep, **hidden)  # type: ignore[arg-type]
    name, *below = kind.discrepancy.split()
    delta = GPSettings(
        features=FeatureSettings(features=6, constant=0.3),
        amplitude=0.1,
        hidden=(2,) if below else (),
        mean="linear",
        **hidden,
    )
    model = build(
        kind.outputs,
        eta=eta,
        delta=delta,
        dtype=dtype,
        discrepancy=name,
        free_kappa=kind.free_kappa,
        likelihood_z=LikelihoodSettings(kind=kind_z),  # type: ignore[arg-type]
        likelihood_y=LikelihoodSettings(kind=kind_y),  # type: ignore[arg-type]
    )
    found = data(
        outputs=kind.outputs,
        kind_z=kind_z,
        kind_y=kind_y,
        transform=kind.transform,
        discrepancy=name != "none",
        noise=kind.noise,
        missing=kind.outputs == 3,
        dtype=dtype,
    )
    weights: Any = kind.weights
    return model, found, settings_of(weights, free_emulator=kind.free_emulator)


STAGES = {
    "collapsed": ["emulator", "theta", "joint"],
    "fullrank": ["emulator", "theta", "joint"],
    "meanfield": ["emulator_weights", "emulator", "weights_and_theta", "everything"],
}


@pytest.mark.parametrize(
    "kind", KINDS, ids=lambda kind: f"{kind.weights}-{kind.eta}-{kind.discrepancy}".replace(" ", "_")
)
def test_every_kind_of_model_can_be_fitted(kind: Kind) -> None:
    model, found, settings = described(kind)
    losses: dict[str, list[float]] = defaultdict(list)
    fitted = fit(
        model,
        found.runs,
        found.observations,
        settings,
        seed=1,
        report=lambda stage, _, loss: losses[stage].append(loss),
    )
    assert_sound(fitted, found)
    assert list(losses) == STAGES[kind.weights]
    assert all(math.isfinite(loss) for stage in losses.values() for loss in stage)
    assert error_of_emulator(fitted, found) < 0.75  # of 60 runs, some of them classes, after 60 steps


@pytest.mark.parametrize("field", Kind._fields[1:])
def test_the_kinds_meet_every_choice_more_than_once(field: str) -> None:
    ways = defaultdict(set)
    for kind in KINDS:
        ways[getattr(kind, field)].add(kind)
    assert min(len(met) for met in ways.values()) > 1
    if field in ("discrepancy", "free_kappa", "outputs", "noise", "lengthscales", "dtype"):
        assert all({kind.weights for kind in met} == set(STAGES) for met in ways.values())


# --- θ is found -------------------------------------------------------------------------------------------------------

ENOUGH = settings_of(emulator=150, theta=60, joint=10)


def test_a_shallow_gaussian_model_finds_theta_and_the_noise() -> None:
    found = data(rows=(60, 40))
    fitted = fit(build(), found.runs, found.observations, ENOUGH, seed=1)
    assert_sound(fitted, found)
    assert error_of_emulator(fitted, found) < 0.05
    assert distance(fitted) < 0.7 * FROM_PRIOR
    mean, sd = fitted.theta.mean(), fitted.theta.sd()
    assert bool((sd < 0.5 * PRIOR_SD).all())
    assert bool(((mean - TRUTH).abs() < 3 * sd).all())
    assert fitted.adapted is not None  # the exact posterior was followed
    assert fitted.log_evidence_runs is not None
    assert all(closing.converged for closing in fitted.closings)


@pytest.mark.parametrize("seed", [0, 1])
def test_with_outliers_a_student_t_comes_nearer_to_the_truth_than_a_gaussian(seed: int) -> None:
    found = data(rows=(60, 40), outliers=6, seed=seed)
    gaussian, student = (
        fit(build(likelihood_y=likelihood), found.runs, found.observations, ENOUGH, seed=1)
        for likelihood in (LikelihoodSettings(), STUDENT)
    )
    assert_sound(student, found)
    assert distance(student) < min(0.8 * distance(gaussian), 0.8 * FROM_PRIOR)


@pytest.mark.parametrize("offset", [0.0, 2.0, 4.0])  # counts of about 6, 45 and 330
def test_counts_find_theta_whatever_their_size(offset: float) -> None:
    found = data(rows=(150, 120), kind_z="poisson", kind_y="poisson", discrepancy=False, offset=offset)
    model = build(likelihood_z=POISSON, likelihood_y=POISSON, discrepancy="none")
    fitted = fit(model, found.runs, found.observations, ENOUGH, seed=1)
    assert_sound(fitted, found)
    assert error_of_emulator(fitted, found) < 0.4
    assert distance(fitted) < 0.7 * FROM_PRIOR
    assert bool((fitted.theta.sd() < 0.5 * PRIOR_SD).all())


@pytest.mark.parametrize("steps", [150, 600])
@pytest.mark.parametrize("random", ["hidden layer", "frequencies"])
def test_an_emulator_with_random_features_finds_theta_however_long_it_is_trained(random: str, steps: int) -> None:
    features = FeatureSettings(features=24, constant=1.0)
    eta = GPSettings(features=features, hidden_features=FeatureSettings(features=12, constant=0.5), hidden=(3,))
    if random == "frequencies":
        eta = GPSettings(features=replace(features, frequencies="variational"))
    found = data(rows=(60, 40), discrepancy=False)
    settings = settings_of(emulator=steps, theta=60, joint=10)
    fitted = fit(build(eta=eta, discrepancy="none"), found.runs, found.observations, settings, seed=1)
    assert_sound(fitted, found)
    assert error_of_emulator(fitted, found) < 0.15
    assert distance(fitted) < 0.5 * FROM_PRIOR
    mean, sd = fitted.theta.mean(), fitted.theta.sd()
    assert bool((sd < 0.5 * PRIOR_SD).all())
    assert bool(((mean - TRUTH).abs() < 4 * sd).all())


# --- seeds and batches ------------------------------------------------------------------------------------------------

WITH_NOISE = [kind for kind in KINDS if kind.frequencies == "variational" or kind.eta != "shallow"]


@pytest.mark.parametrize("weights", ["collapsed", "fullrank", "meanfield"])
def test_the_same_seed_gives_the_same_fit_and_another_seed_another(weights: str) -> None:
    kind = next(kind for kind in WITH_NOISE if kind.weights == weights)
    fits = []
    for seed in (5, 5, 6):
        model, found, settings = described(kind)
        settings = settings_of(weights, emulator=4, theta=4, joint=2, meanfield=4, batch={"batch_runs": 20})
        fits.append(fit(model, found.runs, found.observations, settings, seed=seed))
    first, again, other = (fitted.theta for fitted in fits)
    assert torch.equal(first.means, again.means)
    assert torch.equal(first.covariances, again.covariances)
    for name, value in fits[0].model.state_dict().items():
        assert torch.equal(value, fits[1].model.state_dict()[name]), name
    assert not torch.equal(first.mean(), other.mean())


def test_batches_find_theta_whichever_way_they_are_split() -> None:
    found = data(rows=(60, 40))
    batch = {"batch_runs": 30, "batch_observations": 20}
    settings = settings_of(emulator=150, theta=60, joint=10, batch=batch)
    first, other = (fit(build(), found.runs, found.observations, settings, seed=seed).theta for seed in (1, 2))
    gap = (first.mean() - other.mean()).abs()
    assert bool((gap > 0).all())
    assert bool((gap < first.sd()).all())
    for posterior in (first, other):
        assert bool(((posterior.mean() - TRUTH).abs() < 3 * posterior.sd()).all())


# --- what the parts owe each other ------------------------------------------------------------------------------------


@pytest.mark.parametrize("free_emulator", [False, True])
@pytest.mark.parametrize("weights", ["collapsed", "fullrank"])
def test_the_runs_in_q_are_those_of_the_emulator_as_it_ends(weights: Any, free_emulator: bool) -> None:
    found = data()
    settings = settings_of(weights, free_emulator=free_emulator, joint=30, joint_rate=0.02)
    fitted = fit(build(), found.runs, found.observations, settings, seed=1)
    of_runs = compress(fitted.model, blocks(found.runs)).frame
    with torch.no_grad():
        phi = fitted.model.eta(found.fresh).double()
    for q in fitted.components:
        assert isinstance(q, FullRank)
        M = fitted.model.eta.width
        torch.testing.assert_close(phi @ q.frame_mean[:, :M].mT, phi @ of_runs.mean.mT, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", ["natural", "meanfield"])
def test_two_processes_with_half_a_batch_each_step_like_one_with_all_of_it(
    kit: Any, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes have the same rows here, so that a sum over them is twice what one has."""
    halves = torch.arange(10) % 5
    results = []
    for processes in (1, 2):
        model = kit.model("additive")
        runs, observations = kit.runs(model, 5), kit.observations(model, 5)
        if processes == 1:
            runs, observations = take(runs, halves), take(observations, halves)
        else:
            monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
            monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
            monkeypatch.setattr("vcal_dist.collective._reduce", lambda tensor: tensor.mul_(2))
        totals, weights = Totals(30, 40), "meanfield" if stage == "meanfield" else "collapsed"
        settings = settings_of(weights, rho=0.5)
        if stage == "natural":
            q = kit.full_rank(1, 1, model.width)
            groups = nature_groups(model, 0.1)
            chosen = Chosen("joint", 1, 0.1, 10, 10, SAMPLES)
            step = natural_stage(chosen, model, q, totals, 0, groups=groups, rho=settings.rho)
        else:
            q = kit.mean_field(1, 1, model.width)
            *_, step = meanfield_stages(model, q, totals, settings, 0)
        step.loss(runs, observations, 0).backward()
        assert isinstance(model.likelihood_y, torch.nn.Module)
        gradient = model.likelihood_y.get_parameter("raw_noise").grad
        results.append({"gradient": gradient, **{name: value.detach() for name, value in q.state_dict().items()}})
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, msg=name)


def test_hidden_layers_start_from_the_outputs_that_are_known() -> None:
    settings = GPSettings(hidden=(1,), mean="zero", hidden_features=FeatureSettings(features=8))
    u = torch.rand(60, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    target = 3 + u[:, :1]
    started = []
    for rows in (slice(None), slice(0, 30)):
        stack = DeepGP(2, settings, seed=0, dtype=F64)
        known = torch.where(torch.arange(60)[:, None] < 30, target, torch.nan)
        start_hidden_layers(stack, u[rows], known[rows], 0.1, torch.Generator().manual_seed(0))
        started.append(stack.hidden[0].weights)
    torch.testing.assert_close(started[0].mean, started[1].mean)
    torch.testing.assert_close(started[0].log_sd, started[1].log_sd)


def test_a_loss_that_is_not_finite_ends_with_an_error_that_names_the_stage() -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    stage = Stage("emulator", 3, [{"params": [parameter], "lr": 0.1}], lambda *_: parameter + math.inf)
    with pytest.raises(ModelError, match="stage 'emulator' is inf in step 0"):
        run_stage(stage, None, None, 0)


@pytest.mark.parametrize("value", [math.nan, -0.1])
def test_noise_that_is_no_standard_deviation_is_refused_before_any_work(value: float) -> None:
    found = data(noise=True)
    assert found.observations.noise is not None
    found.observations.noise[3] = value
    steps: list[str] = []
    with pytest.raises(ModelError, match="noise"):
        fit(build(), found.runs, found.observations, FEW, report=lambda stage, *_: steps.append(stage))
    assert not steps


def test_a_column_of_noise_that_a_likelihood_cannot_take_is_refused_before_any_work() -> None:
    found = data(kind_z="poisson", kind_y="poisson")
    observations = found.observations._replace(noise=torch.full_like(found.observations.y, 0.1))
    steps: list[str] = []
    model = build(likelihood_z=POISSON, likelihood_y=POISSON)
    with pytest.raises(ModelError, match="noise"):
        fit(model, found.runs, observations, FEW, report=lambda stage, *_: steps.append(stage))
    assert not steps
