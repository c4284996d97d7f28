"""What `fit` cannot work with is said before any training, with the thing, its value and the cure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from storage.errors import ProblemError, VcalError
from storage.priors import Beta, Gamma, LogNormal, Normal, TruncatedNormal, Uniform
from storage.problem import parse_problem
from vcal_dist.batches import Observations, Runs, take
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings
from vcal_dist.fitting import fit, run_stage
from vcal_dist.gp import GPSettings
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.objective import Samples
from vcal_dist.plan import FitSettings, StageSettings
from vcal_dist.priors import ThetaPrior
from vcal_dist.stages import Stage

F64 = torch.float64
STAGES = {
    "collapsed": ["emulator", "theta", "joint"],
    "fullrank": ["emulator", "theta", "joint"],
    "meanfield": ["emulator_weights", "emulator", "weights_and_theta", "everything"],
}
FAMILIES = ["collapsed", "fullrank", "meanfield"]


def quick(weights: Any) -> FitSettings:
    stages = {name: StageSettings(steps=2) for name in STAGES[weights]}
    return FitSettings(weights=weights, screening=64, **stages)  # type: ignore[arg-type]


def refused(model: CalibrationModel, runs: Runs, observations: Observations, weights: Any = "collapsed") -> str:
    """The message with which `fit` refuses, before it has taken a step or moved a parameter."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps: list[str] = []

    def report(stage: str, step: int, loss: float) -> None:
        steps.append(stage)

    with pytest.raises(ModelError) as error:
        fit(model, runs, observations, quick(weights), report=report)
    assert not steps, f"trained {set(steps)} before it refused: {error.value}"
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} moved before it refused"
    return str(error.value)


def case(kit: Any, **settings: Any) -> tuple[CalibrationModel, Runs, Observations]:
    model = kit.model("additive", outputs=2, **settings)
    return model, kit.runs(model, 20), kit.observations(model, 10)


@pytest.mark.parametrize("weights", FAMILIES)
def test_the_case_itself_is_sound(kit: Any, weights: Any) -> None:
    """Otherwise every refusal below could have another reason."""
    steps: list[str] = []
    fitted = fit(*case(kit), quick(weights), report=lambda stage, step, loss: steps.append(stage))
    assert steps
    assert bool(fitted.log_weights.isfinite().all())


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("weights", FAMILIES)
def test_fewer_than_two_runs_are_refused(kit: Any, rows: int, weights: Any) -> None:
    model, runs, observations = case(kit)
    text = refused(model, take(runs, slice(0, rows)), observations, weights)
    assert f"there are {rows} runs" in text
    assert "at least 2" in text


@pytest.mark.parametrize("weights", FAMILIES)
def test_no_observations_are_refused(kit: Any, weights: Any) -> None:
    model, runs, observations = case(kit)
    text = refused(model, runs, take(observations, slice(0, 0)), weights)
    assert "no observations" in text
    assert "at least 1" in text


@pytest.mark.parametrize("weights", FAMILIES)
def test_observations_of_which_none_is_known_are_refused(kit: Any, weights: Any) -> None:
    model, runs, observations = case(kit)
    text = refused(model, runs, observations._replace(y=torch.full_like(observations.y, torch.nan)), weights)
    assert "every observation is missing" in text
    assert "at least one" in text


@pytest.mark.parametrize("weights", FAMILIES)
def test_an_output_that_no_run_knows_is_refused(kit: Any, weights: Any) -> None:
    model, runs, observations = case(kit)
    z = runs.z.clone()
    z[:, 1] = torch.nan
    text = refused(model, runs._replace(z=z), observations, weights)
    assert "output '1'" in text
    assert "missing" in text


def widen(table: Any, part: str, columns: int) -> Any:
    values: Tensor = getattr(table, part)
    wider = torch.cat([values, torch.zeros(len(values), max(columns, 0), dtype=values.dtype)], 1)
    return table._replace(**{part: wider[:, : values.shape[1] + columns]})


@pytest.mark.parametrize("columns", [-1, 1])
@pytest.mark.parametrize(
    ("table", "part", "name", "expected"),
    [
        ("runs", "u", "runs' inputs", 3),
        ("runs", "z", "runs' outputs", 2),
        ("observations", "x", "observations' inputs", 2),
        ("observations", "y", "observations' outputs", 2),
    ],
)
def test_batches_of_another_width_than_the_models_are_refused(
    kit: Any, table: str, part: str, name: str, expected: int, columns: int
) -> None:
    model, runs, observations = case(kit)
    tables = {"runs": runs, "observations": observations}
    tables[table] = widen(tables[table], part, columns)
    text = refused(model, tables["runs"], tables["observations"])
    assert f"the {name} have {expected + columns} columns" in text
    assert f"built for {expected}" in text


# --- outputs that the likelihood cannot have made ---------------------------------------------------------------------


def of_kind(kit: Any, kind: Any, values: Callable[[Tensor], Tensor]) -> tuple[CalibrationModel, Runs, Observations]:
    likelihood = LikelihoodSettings(kind=kind)
    model, runs, observations = case(kit, likelihood_z=likelihood, likelihood_y=likelihood)
    nothing: dict[str, Tensor] = {"log_jacobian": torch.zeros_like(runs.z)}
    runs = runs._replace(z=values(runs.z), **nothing)
    return model, runs, observations._replace(y=values(observations.y), log_jacobian=0 * observations.y)


COUNTS = {
    "poisson": (lambda z: (3 * z.abs()).floor(), [-2.0, 0.5, math.inf]),
    "bernoulli": (lambda z: (z > 0).double(), [-1.0, 2.0, 0.5]),
}


@pytest.mark.parametrize("table", ["runs", "observations"])
@pytest.mark.parametrize(
    ("kind", "value"), [(kind, value) for kind, (_, wrong) in COUNTS.items() for value in wrong], ids=str
)
def test_a_value_that_is_no_count_or_class_is_refused(kit: Any, table: str, kind: str, value: float) -> None:
    model, runs, observations = of_kind(kit, kind, COUNTS[kind][0])
    (runs.z if table == "runs" else observations.y)[4, 1] = value
    text = refused(model, runs, observations, "fullrank")
    for word in (f"is {value:g} in row 4", "output '1'", kind, "NaN if it was not observed"):
        assert word in text


def test_standardised_outputs_are_no_counts(kit: Any) -> None:
    """The mistake behind it: counts that were standardised as if they were measurements."""
    model, runs, observations = of_kind(kit, "poisson", COUNTS["poisson"][0])
    z = (runs.z - runs.z.mean(0)) / runs.z.std(0)
    assert "poisson likelihood takes whole numbers from 0" in refused(model, runs._replace(z=z), observations)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_an_infinite_output_is_refused(kit: Any, value: float) -> None:
    model, runs, observations = case(kit)
    observations.y[3, 0] = value
    text = refused(model, runs, observations)
    assert f"output '0' is {value:g} in row 3" in text
    assert "gaussian" in text


@pytest.mark.parametrize("weights", FAMILIES)
def test_noise_of_observations_that_are_counts_is_refused(kit: Any, weights: Any) -> None:
    model, runs, observations = of_kind(kit, "poisson", COUNTS["poisson"][0])
    text = refused(model, runs, observations._replace(noise=torch.ones_like(observations.y)), weights)
    for word in ("poisson", "noise", "remove the column"):
        assert word in text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_training_with_stage_and_step(kit: Any, value: float) -> None:
    _, runs, _ = case(kit)
    weight = torch.nn.Parameter(torch.ones((), dtype=F64))

    def loss(rows: Runs | None, _: Observations | None, step: int) -> Tensor:
        return weight.square() * (value if step == 2 else 1.0)

    stage = Stage("emulator", 5, [{"params": [weight], "lr": 0.1}], loss, runs=20)
    with pytest.raises(ModelError) as error:
        run_stage(stage, runs, None, seed=0)
    for word in ("stage 'emulator'", f"{value}", "step 2", "lower its learning rate"):
        assert word in str(error.value)
    assert bool(weight.detach().isfinite())


# --- settings ---------------------------------------------------------------------------------------------------------


OF_A_STAGE = ["steps", "epochs", "rate", "batch_runs", "batch_observations", "samples"]


def settings(name: str, value: Any) -> StageSettings | FitSettings:
    return StageSettings(**{name: value}) if name in OF_A_STAGE else FitSettings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        *(("rho", value, "above 0 and up to 1") for value in (0.0, -0.1, 1.5, math.nan, math.inf)),
        *(
            (name, value, "a positive number")
            for name in ("rate", "discrepancy_rate")
            for value in (0.0, -0.01, math.nan, math.inf)
        ),
        *((name, -1, "0 or more") for name in ("steps", "evaluations")),
        *(("epochs", value, "0 or more") for value in (-0.5, math.nan, math.inf)),
        *(
            (name, value, "1 or more")
            for name in ("batch_runs", "batch_observations", "screening", "starts")
            for value in (0, -3)
        ),
        *(("weights", word, "collapsed, fullrank, meanfield") for word in ("colapsed", "Collapsed", "", None)),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_refused_where_it_is_written(name: str, value: Any, cure: str) -> None:
    with pytest.raises(ModelError) as error:
        settings(name, value)
    text = str(error.value)
    assert name in text
    assert str(value) in text
    assert cure in text


@pytest.mark.parametrize("samples", [Samples(0, 1), Samples(1, 0), Samples(-2, 1)])
def test_no_samples_are_refused(samples: Samples) -> None:
    with pytest.raises(ModelError) as error:
        StageSettings(samples=samples)
    assert f"samples is {tuple(samples)}" in str(error.value)
    assert "1 or more" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("rho", 1.0), ("steps", 0), ("epochs", 0.0), ("evaluations", 0), ("batch_runs", 1), ("starts", 1)],
)
def test_settings_at_the_end_of_their_range_are_taken(name: str, value: Any) -> None:
    assert getattr(settings(name, value), name) == value


def test_steps_and_epochs_together_are_refused() -> None:
    with pytest.raises(ModelError, match=r"steps is 5 and epochs is 2\.0; give one of them"):
        StageSettings(steps=5, epochs=2.0)


def test_a_stage_of_another_schedule_is_refused() -> None:
    with pytest.raises(ModelError, match=r"theta is no stage of the weights 'meanfield'; its stages: emu"):
        FitSettings(weights="meanfield", theta=StageSettings(steps=5))
    with pytest.raises(ModelError, match=r"everything is no stage of the weights 'collapsed'"):
        FitSettings(everything=StageSettings(steps=5))


@pytest.mark.parametrize("features", [1, 7, 101])
def test_an_odd_number_of_features_is_refused_with_its_neighbours(features: int) -> None:
    with pytest.raises(ModelError) as error:
        FeatureSettings(features=features)
    text = str(error.value)
    assert f"features = {features} is odd" in text
    assert f"{features + 1}" in text
    assert FeatureSettings(features=features, kernel="arccos1").features == features  # which has no pairs


def test_settings_of_a_model_are_refused_with_what_is_accepted(kit: Any) -> None:
    for settings, words in (
        ({"discrepancy": "multiplicative"}, ["'multiplicative'", "none, additive, general"]),
        ({"discrepancy": "general", "free_kappa": True}, ["free_kappa", "none' or 'additive"]),
    ):
        with pytest.raises(ModelError) as error:
            ModelSettings(**settings)  # type: ignore[arg-type]
        assert all(word in str(error.value) for word in words)
    step = ModelSettings(eta=GPSettings(features=FeatureSettings(features=4, kernel="arccos0")))
    with pytest.raises(ModelError, match=r"arccos0 has no gradient.*use arccos1"):
        CalibrationModel(1, kit.prior(1), 1, step)
    for controls, outputs in ((0, 1), (1, 0)):
        with pytest.raises(ModelError, match=f"{controls} control inputs and {outputs} outputs; accepted: 1 or more"):
            CalibrationModel(controls, kit.prior(1), outputs)


# --- priors -----------------------------------------------------------------------------------------------------------


PRIORS: list[tuple[Any, list[str]]] = [
    (Uniform(low=-1.0, high=0.5), ["[-1, 0.5]", "[0, 1]", "narrow the prior or widen the bounds"]),
    (Beta(a=2, b=2, low=0.0, high=3.0), ["[0, 3]", "[0, 1]", "narrow the prior or widen the bounds"]),
    (TruncatedNormal(mean=0.5, sd=1.0, low=0.2, high=1.2), ["[0.2, 1.2]", "narrow the prior or widen the bounds"]),
    (Uniform(low=0.6, high=0.6), ["low < high", "[0.6, 0.6]"]),
    (Normal(mean=3.0, sd=1.0), ["centred at 3", "[0, 1]", "check the units"]),
    (LogNormal(mu=2.0, sigma=0.5), ["centred at 7.38906", "check the units"]),
    (Gamma(shape=30.0, rate=10.0), ["centred at 3", "check the units"]),
]


@pytest.mark.parametrize(("prior", "words"), PRIORS, ids=lambda value: getattr(value, "family", ""))
def test_a_prior_outside_the_bounds_is_refused_by_name(prior: Any, words: list[str]) -> None:
    data = {
        "name": "pump",
        "control_inputs": [{"name": "speed", "bounds": [0, 1]}],
        "calibration_inputs": [{"name": "loss", "bounds": [0, 1], "prior": prior.model_dump()}],
        "outputs": [{"name": "flow"}],
    }
    with pytest.raises(ProblemError) as by_problem:
        parse_problem(data)
    with pytest.raises(ModelError) as by_model:
        ThetaPrior([prior], [(0.0, 1.0)], ["loss"])
    for error in (by_problem, by_model):
        assert isinstance(error.value, VcalError)
        for word in ("loss", *words):
            assert word in str(error.value)


@pytest.mark.parametrize(
    ("prior", "value"),
    [(Uniform(low=0.2, high=0.8), 0.1), (LogNormal(mu=-1.0, sigma=0.5), -0.2), (Gamma(shape=2, rate=5), -1e-3)],
)
def test_a_theta_outside_the_support_of_its_prior_is_named(prior: Any, value: float) -> None:
    with pytest.raises(ModelError) as error:
        ThetaPrior([prior], [(0.0, 1.0)], ["loss"]).tilde(torch.tensor([[value]], dtype=F64))
    for word in ("'loss'", f"{value:g}", "support", str(prior), "widen the prior"):
        assert word in str(error.value)
