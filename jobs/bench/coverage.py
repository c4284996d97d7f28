"""Coverage: how often intervals hold the truth, over replicates of the paper's experiments with truths from the prior.

    illustrative      η, δ and θ drawn from their priors, 7 runs, 4 observations; everything but θ is known
    borehole_1000     its own discrepancy, θ from the prior, so many observations, 10⁵ runs and one emulator for all
    borehole_10000
    borehole_full     10⁶ runs and 10⁵ observations
    cell              roots of the exact simulator, discrepancy and noise as the reproduction assumes, 19 observations
    radionuclide      the plume at 10 of 88 wells, fresh observations at all of them; θ from the prior
    borehole_few      100 runs, others in every replicate, and 50 observations
    cell_default      `cell` with the default emulator in place of the reproduction's
    oscillation       30 runs of 25 times each of a damped oscillation with two parameters, 20 observations

For every parameter the share of truths inside 50, 80, 90 and 95 % intervals, beside what chance leaves of so many
replicates (99 % binomial band), and for fresh observations of the same process, pooled over replicates, the same. Each
may be calibrated a second time with many more points, a Gram matrix each, whose 90 % intervals tell how wide they are.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from jobs.console import note
from jobs.reproduce import cell as cell_experiment
from jobs.reproduce import radionuclide as radionuclide_experiment
from storage.problem import Problem, parse_problem
from vcal_dist.assessment import judge_observations
from vcal_dist.batches import Observations, Scaling
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.config import Config
from vcal_dist.fitting import fit
from vcal_dist.plan import Family, FitSettings, StageSettings
from vcal_dist.posterior import Posterior
from vcal_dist.priors import ThetaPrior
from vcal_dist.problems import borehole, cell, illustrative, radionuclide
from vcal_dist.problems.longform import oscillator
from vcal_dist.replicates import Emulator, told
from vcal_dist.sbc import LEVELS, Told, assess
from vcal_dist.transforms import OutputScaling, TransformSettings
from vcal_dist.work import Fitted

Array = NDArray[np.float64]
FRESH = 8  # observations of the illustrative example that judge
TRUTHS = 2026  # seed of the borehole's θ


class Data(NamedTuple):
    """Runs, observations, fresh observations and the truth behind them, in the user's units."""

    x_runs: Array
    t: Array
    z: Array
    x: Array
    y: Array
    fresh_x: Array
    fresh_y: Array
    theta: Array
    noise: Array | None = None
    fresh_noise: Array | None = None


class Found(NamedTuple):
    """What one calibration says of the truth, and on what strength."""

    told: Told
    unrefined: str
    points: int
    effective: float


class Outcome(NamedTuple):
    """One replicate."""

    found: Found
    predictive: list[float]  # PIT of fresh observations
    seconds: float
    patient: Found | None = None  # of a calibration with many more points

    @property
    def told(self) -> Told:
        return self.found.told


class Setup(NamedTuple):
    """How an experiment is calibrated."""

    problem: Problem
    model: ModelSettings
    fit: FitSettings
    transform: TransformSettings
    dtype: torch.dtype


Make = Callable[[int], tuple[Data, Setup]]


# --- the experiments --------------------------------------------------------------------------------------------------


def _illustrative(number: int, features: int = 400) -> tuple[Data, Setup]:
    data = illustrative.generate(number, observations=4 + FRESH)
    order = np.random.default_rng([number, 3]).permutation(4 + FRESH)
    seen, fresh = order[:4], order[4:]
    model = illustrative.settings(features, number, delta_features=40)
    settings = FitSettings(theta=StageSettings(steps=100), joint=StageSettings(steps=20))
    setup = Setup(illustrative.problem(), model, settings, illustrative.TRANSFORM, torch.float64)
    theta = np.array([data.theta_true])
    return Data(data.x_runs, data.t, data.z, data.x[seen], data.y[seen], data.x[fresh], data.y[fresh], theta), setup


def _borehole(number: int, runs: int, observations: int) -> tuple[Data, Setup]:
    of_runs = _borehole_runs(runs)
    theta = np.random.default_rng(TRUTHS).random((number + 1, len(borehole.PARAMETERS)))[-1]
    rng = np.random.default_rng([number, observations])
    x, fresh = rng.random((observations, len(borehole.CONTROLS))), rng.random((200, len(borehole.CONTROLS)))
    y, fresh_y = borehole.observe(x, rng, theta), borehole.observe(fresh, rng, theta)
    setup = Setup(borehole.problem(), ModelSettings(), FitSettings(), TransformSettings(), torch.float32)
    return Data(of_runs.x_runs, of_runs.t, of_runs.z, x, y, fresh, fresh_y, theta), setup


@cache
def _borehole_runs(runs: int) -> borehole.Data:
    return borehole.generate(runs, 1, 0)


def _cell(number: int) -> tuple[Data, Setup]:
    """θ, and δ from the prior that is assumed; noise as the default starts with.

    Outputs are the square roots that the reproduction's transform makes of currents: they may be negative here.
    """
    chosen = cell_experiment.settings(False)
    config = Config.parse({"store": "-", **chosen["sections"], "model": chosen["models"]["additive"]})
    data, rng = cell.generate(cell.RUNS, number), np.random.default_rng([number, 5])
    theta = rng.uniform(*cell.BOUNDS, len(cell.PARAMETERS))
    fresh = rng.random((20, 1))
    x, z = np.concatenate([data.x, fresh]), np.sqrt(data.z)
    root = np.sqrt(cell.simulate(x, np.tile(theta, (len(x), 1))))
    delta, scale = config.model.delta, float(z.std())  # what is assumed is in standard deviations of the runs
    s = np.sqrt(5) * np.abs(x - x.T) / cell_experiment.LENGTHSCALE
    K = (delta.amplitude * scale) ** 2 * (1 + s + s**2 / 3) * np.exp(-s)
    drawn = np.linalg.cholesky(K + 1e-12 * np.eye(len(x))) @ rng.standard_normal((len(x), 1))
    y = root + drawn + config.model.likelihood_y.noise * scale * rng.standard_normal(root.shape)
    seen, model = len(data.x), replace(config.model, seed=number)
    setup = Setup(cell.problem(), model, config.fit, TransformSettings(), torch.float64)
    return Data(data.x_runs, data.t, z, data.x, y[:seen], fresh, y[seen:], theta), setup


def _cell_default(number: int) -> tuple[Data, Setup]:
    data, setup = _cell(number)
    default = replace(setup.model, eta=ModelSettings().eta)
    return data, setup._replace(model=default, fit=replace(setup.fit, emulator=StageSettings()))


def _oscillation(number: int) -> tuple[Data, Setup]:
    """Frequency and damping, the amplitude being known; noise of 0.05, and no discrepancy."""
    rng = np.random.default_rng([number, 7])
    times = np.linspace(0, 1, 25)[:, None]
    design = (np.argsort(rng.random((2, 30)), axis=1).T + rng.random((30, 2))) / 30  # a Latin hypercube
    x_runs, t = np.tile(times, (30, 1)), np.repeat(design, len(times), axis=0)
    theta, x = rng.random(2), rng.random((20 + 200, 1))

    def simulate(x: Array, t: Array) -> Array:
        return oscillator(x, np.hstack([np.full((len(t), 1), 0.5), t]))[:, None]

    y = simulate(x, np.tile(theta, (len(x), 1))) + 0.05 * rng.standard_normal((len(x), 1))
    inputs = {"x": ("time",), "t": ("frequency", "damping")}
    problem = parse_problem(
        {
            "name": "oscillation",
            "control_inputs": [{"name": name, "bounds": [0.0, 1.0]} for name in inputs["x"]],
            "calibration_inputs": [{"name": name, "bounds": [0.0, 1.0]} for name in inputs["t"]],
            "outputs": [{"name": "z"}],
        },
        source="the benchmark",
    )
    setup = Setup(problem, ModelSettings(seed=number), FitSettings(), TransformSettings(), torch.float32)
    return Data(x_runs, t, simulate(x_runs, t), x[:20], y[:20], x[20:], y[20:], theta), setup


def _radionuclide(number: int) -> tuple[Data, Setup]:
    chosen = radionuclide_experiment.settings(False)
    sections = chosen["variants"]["deep"]
    config = Config.parse({"store": "-", **sections})
    data, rng = radionuclide.generate(chosen["runs"], number), np.random.default_rng([number, 6])
    ranges = list(radionuclide.PARAMETERS.values())
    theta = np.array([rng.uniform(each.low, each.high) for each in ranges])
    wells = radionuclide.sites()
    order = rng.permutation(len(wells))
    x, fresh = wells[order[: len(radionuclide.OBSERVED)]], wells

    def observed(x: Array) -> tuple[Array, Array]:
        truth = radionuclide.simulate(x, np.tile(theta, (len(x), 1))) + radionuclide.discrepancy(x)
        noise = np.hypot(radionuclide.NOISE, radionuclide.RELATIVE_NOISE * truth)
        return truth + noise * rng.standard_normal(truth.shape), noise

    (y, noise), (fresh_y, fresh_noise) = observed(x), observed(fresh)
    model = replace(config.model, seed=number, varying_residual=True)  # nothing over most of the field, and a plume
    setup = Setup(radionuclide.problem(), model, config.fit, TransformSettings(), torch.float32)
    return Data(data.x_runs, data.t, data.z, x, y, fresh, fresh_y, theta, noise, fresh_noise), setup


class Experiment(NamedTuple):
    """How replicates are made, and how many unless told."""

    make: Make
    replicates: int
    shares_runs: bool = False


def _borehole_few(number: int) -> tuple[Data, Setup]:
    data, setup = _borehole(number, 100, 50)
    runs = borehole.generate(100, 1, number)
    data = data._replace(x_runs=runs.x_runs, t=runs.t, z=runs.z)
    return data, setup._replace(model=ModelSettings(seed=number))


def _borehole_1000(number: int) -> tuple[Data, Setup]:
    return _borehole(number, 100_000, 1_000)


def _borehole_10000(number: int) -> tuple[Data, Setup]:
    return _borehole(number, 100_000, 10_000)


def _borehole_full(number: int) -> tuple[Data, Setup]:
    return _borehole(number, 1_000_000, 100_000)


def _borehole_small(number: int) -> tuple[Data, Setup]:
    """For a quick look that everything works."""
    data, setup = _borehole(number, 5_000, 200)
    short = FitSettings(emulator=StageSettings(steps=100), theta=StageSettings(steps=60), joint=StageSettings(steps=5))
    return data, setup._replace(fit=short)


EXPERIMENTS = {
    "illustrative": Experiment(_illustrative, 200),
    "borehole_1000": Experiment(_borehole_1000, 50, shares_runs=True),
    "borehole_10000": Experiment(_borehole_10000, 50, shares_runs=True),
    "borehole_full": Experiment(_borehole_full, 10, shares_runs=True),
    "borehole_small": Experiment(_borehole_small, 4, shares_runs=True),
    "cell": Experiment(_cell, 40),
    "radionuclide": Experiment(_radionuclide, 20),
    "borehole_few": Experiment(_borehole_few, 100),
    "cell_default": Experiment(_cell_default, 100),
    "oscillation": Experiment(_oscillation, 100),
}


# --- one replicate ----------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """How each replicate is calibrated."""

    name: str
    weights: Family = "collapsed"
    steps: int | None = None  # of meanfield
    against: int | None = None  # evaluations of another calibration, to compare widths with
    shared: str | None = None  # where the emulator of all replicates lies


def one(asked: Asked, number: int) -> Outcome:
    """Calibrates a replicate."""
    torch.set_num_threads(1)
    data, setup = EXPERIMENTS[asked.name].make(number)
    meanfield = asked.weights == "meanfield"
    settings = _meanfield(asked.steps) if meanfield else replace(setup.fit, weights=asked.weights)
    if meanfield:
        setup = setup._replace(model=replace(setup.model, varying_residual=False))
    scaling, _, _ = _prepared(data, setup)
    begun = time.perf_counter()
    fitted = _calibrated(asked, data, setup, settings, number)
    seconds = time.perf_counter() - begun
    posterior = Posterior.from_fitted(setup.problem, scaling, fitted)
    judged = judge_observations(posterior, data.fresh_x, data.fresh_y, data.fresh_noise, leave_one_out=False)
    truth = torch.from_numpy(data.theta)
    outcome = Outcome(_of(fitted, truth), judged.pit[:, 0].tolist(), seconds)
    if asked.against is None:
        return outcome
    patient = replace(settings, evaluations=asked.against)
    return outcome._replace(patient=_of(_calibrated(asked, data, setup, patient, number, patient=True), truth))


def _of(fitted: Fitted, truth: torch.Tensor) -> Found:
    adapted = fitted.adapted
    points, effective = (0, 0.0) if adapted is None else (len(adapted.points), adapted.effective)
    return Found(told(fitted.theta, truth), fitted.unrefined, points, effective)


def _calibrated(
    asked: Asked, data: Data, setup: Setup, settings: FitSettings, number: int, *, patient: bool = False
) -> Fitted:
    scaling, model, observations = _prepared(data, setup)
    if asked.shared is None:  # rows are few, and patience makes no difference
        return fit(model, _runs(scaling, data), observations, settings, seed=number)
    emulator = Emulator.load(Path(asked.shared))
    return emulator.calibrate(model, observations, settings, len(data.z), number, patient=patient)


def _prepared(data: Data, setup: Setup) -> tuple[Scaling, CalibrationModel, Observations]:
    names = [output.name for output in setup.problem.outputs]
    outputs = OutputScaling.from_runs(torch.from_numpy(data.z), [setup.transform], names)
    scaling = Scaling(setup.problem, outputs, setup.dtype)
    prior = ThetaPrior.from_problem(setup.problem)
    model = CalibrationModel(data.x.shape[1], prior, len(names), setup.model, dtype=setup.dtype)
    noise = None if data.noise is None else torch.from_numpy(data.noise)
    return scaling, model, scaling.observations(torch.from_numpy(data.x), torch.from_numpy(data.y), noise)


def _runs(scaling: Scaling, data: Data) -> Any:
    return scaling.runs(*(torch.from_numpy(part) for part in (data.x_runs, data.t, data.z)))


def _meanfield(steps: int | None) -> FitSettings:
    if steps is None:
        return FitSettings(weights="meanfield")
    stages = {
        name: StageSettings(steps=steps) for name in ("emulator_weights", "emulator", "weights_and_theta", "everything")
    }
    return FitSettings(weights="meanfield", **stages)  # type: ignore[arg-type]


def _train_emulator(name: str, path: Path) -> None:
    """The emulator of all replicates."""
    data, setup = EXPERIMENTS[name].make(0)
    scaling, model, observations = _prepared(data, setup)
    Emulator.train(model, _runs(scaling, data), observations, setup.fit, 0).save(path)


# --- all of them ------------------------------------------------------------------------------------------------------


def run(asked: Asked, *, first: int = 0, replicates: int | None = None) -> dict[str, Any]:
    """Everything that one experiment says, over all replicates."""
    experiment = EXPERIMENTS[asked.name]
    numbers = range(first, first + (replicates or experiment.replicates))
    count = len(numbers)
    with tempfile.TemporaryDirectory(prefix="vcal-bench-") as folder:
        if experiment.shares_runs and asked.weights != "meanfield":
            note("training the emulator")
            path = Path(folder) / "emulator.safetensors"
            _train_emulator(asked.name, path)
            asked = asked._replace(shared=str(path))
        outcomes: dict[int, Outcome] = {}
        for done, (number, outcome) in enumerate(_parallel(asked, numbers), 1):
            outcomes[number] = outcome
            if done % max(1, count // 20) == 0:
                note(f"{done} of {count}")
    return summarise(asked.name, outcomes, asked.weights)


def _parallel(asked: Asked, numbers: range) -> Iterator[tuple[int, Outcome]]:
    workers = min(len(numbers), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(one, asked, number): number for number in numbers}
        for future in as_completed(futures):
            yield futures[future], future.result()


def summarise(name: str, numbered: dict[int, Outcome], weights: str) -> dict[str, Any]:
    """Coverage of θ and of fresh observations, over replicates by their numbers."""
    numbers = sorted(numbered)
    outcomes = [numbered[number] for number in numbers]
    parameters = [v.name for v in EXPERIMENTS[name].make(0)[1].problem.calibration_inputs]
    found: dict[str, Any] = {"experiment": name, "weights": weights, "replicates": len(outcomes)}
    for j, parameter in enumerate(assess(parameters, [outcome.told for outcome in outcomes])):
        of = parameter.coverage
        for level, share, low, high in zip(of.at, of.value, of.low, of.high, strict=True):
            found[f"{parameter.name} in {100 * level:.0f} %"] = f"{share:.3f} ({low:.3f} to {high:.3f})"
        errors = [abs(outcome.told.mean[j] - outcome.told.truth[j]) for outcome in outcomes]
        found[f"{parameter.name} error"] = f"mean {statistics.mean(errors):.4g}, largest {max(errors):.4g}"
        found[f"{parameter.name} sd"] = statistics.mean(outcome.told.sd[j] for outcome in outcomes)
        found[f"{parameter.name} verdict"] = f"{parameter.verdict} (p = {parameter.p:.2g})"
        if parameter.far:
            found[f"{parameter.name} far outside in replicate"] = ", ".join(str(numbers[i]) for i in parameter.far)
        ratios = [_width(outcome.told, j) / _width(outcome.patient.told, j) for outcome in outcomes if outcome.patient]
        if ratios:
            found[f"{parameter.name} width beside that of many points"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
    inside = [
        all(
            low <= truth <= high
            for (low, high), truth in zip(outcome.told.intervals[0.95], outcome.told.truth, strict=True)
        )
        for outcome in outcomes
    ]
    found["all parameters in 95 %"] = f"{sum(inside)} of {len(inside)}"
    pit = np.concatenate([outcome.predictive for outcome in outcomes])
    for level in LEVELS:
        found[f"fresh observations in {100 * level:.0f} %"] = float(np.mean(np.abs(2 * pit - 1) <= level))
    found["fresh observations"] = len(pit)
    found["not compared with the exact posterior"] = sum(bool(outcome.found.unrefined) for outcome in outcomes)
    found["effective draws, median"] = statistics.median(outcome.found.effective for outcome in outcomes)
    many = [outcome.patient for outcome in outcomes if outcome.patient is not None]
    if many:
        found["many points, least"] = min(each.points for each in many)
        found["effective draws of many points, least"] = min(each.effective for each in many)
        found["many points that carry too little"] = sum(bool(each.unrefined) for each in many)
    found["seconds, median"] = statistics.median(outcome.seconds for outcome in outcomes)
    return found


def _width(told: Told, j: int) -> float:
    low, high = told.intervals[0.9][j]
    return high - low
