"""Every kind of model from a store to a posterior in a file: pairs of choices, not all their combinations."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest

from storage.store import Store, create
from tests.vcal_dist.training_kit import CHUNK, TRUTH, append, config, generate, metrics, problem, tensors
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.gp import GPSettings
from vcal_dist.plan import FitSettings, Totals
from vcal_dist.posterior import Posterior
from vcal_dist.prediction_kinds import What
from vcal_dist.priors import ThetaPrior
from vcal_dist.refinement import exact_points
from vcal_dist.training import train
from vcal_dist.work import Work

X = np.linspace(0, 1, 7)[:, None]
TRANSFORMS: dict[str, Any] = {
    "none": {},
    "sqrt": {"f0": {"kind": "sqrt"}},
    "log": {"f0": {"kind": "log"}},
    "boxcox": {"f0": {"kind": "boxcox", "power": 0.3}},
}


class Kind(NamedTuple):
    """One choice of everything."""

    weights: str
    depth: str
    discrepancy: str
    likelihoods: str  # of runs and of observations
    transform: str
    noise: str  # whether observations come with a noise of their own
    missing: str  # two outputs, some of them missing
    frequencies: str


# A cover of all pairs that can be: counts and classes have neither a transform nor a noise column, and no closed form.
TABLE = """
collapsed | shallow | none     | gaussian gaussian   | none   | no  | yes | fixed
collapsed | deep    | additive | gaussian gaussian   | log    | yes | no  | learned
collapsed | shallow | general  | student_t gaussian  | sqrt   | no  | yes | learned
collapsed | deep    | general  | gaussian student_t  | boxcox | yes | yes | fixed
collapsed | shallow | additive | gaussian poisson    | none   | no  | no  | variational
fullrank  | deep    | none     | poisson poisson     | none   | no  | yes | learned
fullrank  | shallow | additive | student_t student_t | none   | yes | no  | fixed
fullrank  | shallow | general  | gaussian gaussian   | log    | no  | no  | variational
fullrank  | deep    | additive | bernoulli bernoulli | none   | no  | yes | fixed
meanfield | shallow | none     | gaussian student_t  | sqrt   | yes | no  | variational
meanfield | deep    | general  | bernoulli bernoulli | none   | no  | no  | variational
meanfield | shallow | general  | poisson poisson     | none   | no  | yes | fixed
meanfield | deep    | additive | student_t gaussian  | boxcox | no  | yes | learned
"""
KINDS = [Kind(*(cell.strip() for cell in line.split("|"))) for line in TABLE.strip().splitlines()]


def made(kind: Kind, url: Path) -> Store:
    """Data that the likelihoods could have made: numbers, counts of rate e^f, or classes."""
    outputs = 2 if kind.missing == "yes" else 1
    arrays, rng = generate(80, 25, outputs), np.random.default_rng(1)
    for name, likelihood in zip(("z", "y"), kind.likelihoods.split(), strict=True):
        f = arrays[name]
        if likelihood == "poisson":
            arrays[name] = rng.poisson(np.exp(f)).astype(float)
        elif likelihood == "bernoulli":
            arrays[name] = (f + 0.5 * rng.logistic(size=f.shape) > f.mean()).astype(float)
    if kind.missing == "yes":
        arrays["z"][::4, 0] = arrays["y"][1::5, -1] = np.nan
    if kind.noise == "yes":
        arrays["noise"] = np.full_like(arrays["y"], 0.05)
    store = create(url, problem(outputs), chunk_rows=CHUNK)
    append(store, arrays)
    return store


def asked(kind: Kind, store: Path, run: Path) -> Any:
    likelihood_z, likelihood_y = kind.likelihoods.split()
    hidden = {"hidden": [2], "mean": "linear", "hidden_features": {"features": 6, "constant": 0.5}}
    deep = hidden if kind.depth == "deep" else {}
    return config(
        store,
        run,
        kind.weights,
        model={
            "eta": {"features": {"features": 12, "frequencies": kind.frequencies, "constant": 1.0}, **deep},
            "delta": {"features": {"features": 4, "constant": 0.3}, **deep},
            "discrepancy": kind.discrepancy,
            "likelihood_z": {"kind": likelihood_z},
            "likelihood_y": {"kind": likelihood_y},
        },
        transforms=TRANSFORMS[kind.transform],
        fit={"starts": 1},
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind).replace(" ", "_"))
def test_every_kind_is_trained_saved_and_loaded(tmp_path: Path, kind: Kind) -> None:
    store, run = made(kind, tmp_path / "s.zarr"), tmp_path / "run"
    posterior = train(asked(kind, tmp_path / "s.zarr", run), progress=False)
    loaded = Posterior.load(run)
    outputs = len(store.problem.outputs)
    for what in get_args(What):
        found, again = (each.predict(X, what, samples=3, draws=16, seed=2) for each in (posterior, loaded))
        for part, same in zip(found, again, strict=True):
            np.testing.assert_array_equal(part, same)
            assert part is not None
            assert np.isfinite(part).all()
        assert found.mean.shape == (len(X), outputs)
        assert (found.sd >= 0).all()
    for name, value in tensors(run).items():
        assert bool(value.isfinite().all()), name
    for row, other in zip(posterior.summary(), loaded.summary(), strict=True):
        assert row == other
        assert 0 < row.low < row.median < row.high < 1
    assert all(math.isfinite(float(row["loss"])) for row in metrics(run) if row["loss"])
    judged = posterior.record["assessment"]
    assert {name: part["rows"] for name, part in judged.items()}.keys() == {"runs", "observations"}
    assert all(math.isfinite(part["log_predictive_density"]) for part in judged.values())


@pytest.mark.parametrize("first", ["weights", "depth", "discrepancy"])
@pytest.mark.parametrize("second", ["depth", "discrepancy", "noise", "missing", "frequencies"])
def test_the_kinds_cover_pairs_of_choices(first: str, second: str) -> None:
    choices = [{getattr(kind, field) for kind in KINDS} for field in (first, second)]
    pairs = {(getattr(kind, first), getattr(kind, second)) for kind in KINDS}
    assert first == second or pairs == set(itertools.product(*choices))


def test_two_outputs_of_which_one_is_transformed_keep_their_units(tmp_path: Path) -> None:
    """f0 is trained as its logarithm and predicted as itself; f1 stays."""
    run = tmp_path / "run"
    arrays = generate(300, 60, outputs=2)
    append(create(tmp_path / "s.zarr", problem(2), chunk_rows=CHUNK), arrays)
    sections = {"transforms": {"f0": {"kind": "log"}}, "fit": {"emulator": {"steps": 150}, "theta": {"steps": 40}}}
    posterior = train(config(tmp_path / "s.zarr", run, **sections), progress=False)
    predicted = posterior.predict(arrays["x"][:20], draws=64)
    error = np.abs(predicted.mean - arrays["y"][:20])
    assert error.max() < 0.3
    assert np.sqrt((error**2).mean(0)).max() < 0.12
    assert {"f0", "f1"} == posterior.noise.keys()


def test_with_steps_enough_theta_is_found(tmp_path: Path) -> None:
    """The stream feeds the model what the store holds."""
    arrays = generate(450, 80)
    arrays["y"] -= 0.1 + 0.2 * arrays["x"]  # nature without a discrepancy
    append(create(tmp_path / "s.zarr", problem(), chunk_rows=CHUNK), arrays)
    fit = {"emulator": {"steps": 200}, "theta": {"steps": 60}, "joint": {"steps": 10}}
    model = {"eta": {"features": {"features": 30}}, "discrepancy": "none"}
    posterior = train(config(tmp_path / "s.zarr", tmp_path / "run", fit=fit, model=model), progress=False)
    emulator = [float(row["loss"]) for row in metrics(tmp_path / "run") if row["phase"] == "emulator"]
    assert np.mean(emulator[-5:]) < np.mean(emulator[:5]) - 1.5
    judged = posterior.record["assessment"]
    assert judged["runs"]["rmse"][0] < 0.03  # of outputs between 0.5 and 3.5, with noise 0.01
    assert judged["observations"]["rmse"][0] < 0.04  # with noise 0.03
    mean, sd = (np.array([getattr(row, part) for row in posterior.summary()]) for part in ("mean", "sd"))
    assert (np.abs(mean - TRUTH) < 4 * sd).all()
    assert (sd < 0.05).all()  # 0.29 before


@pytest.mark.parametrize(("weights", "announced"), [("collapsed", "no steps"), ("fullrank", "3 steps")])
def test_the_plan_announces_steps_of_an_emulator_only_where_they_are_taken(
    tmp_path: Path, weights: str, announced: str
) -> None:
    """With all of η known, integrated weights leave nothing to learn from runs; natural gradients still find q."""
    store = create(tmp_path / "s.zarr", problem(), chunk_rows=CHUNK)
    append(store, generate(40, 12))
    said: list[str] = []
    known = {"lengthscale": 0.5, "learn": False, "features": {"features": 8, "frequencies": "fixed"}}
    sections = {"model": {"eta": known, "likelihood_z": {"noise": 0.05, "learn_noise": False}}}
    steps = {"emulator": {"steps": 3}, "theta": {"steps": 3}, "joint": {"steps": 0}, "starts": 1}
    run = tmp_path / "run"
    train(config(tmp_path / "s.zarr", run, weights, **sections, fit=steps), progress=False, say=said.append)
    (line,) = [line for line in said if line.startswith("  emulator:")]
    assert announced in line
    assert "  joint: no steps" in said
    assert ("emulator" in {row["phase"] for row in metrics(run)}) == (announced != "no steps")


def test_samples_of_hidden_layers_count_as_rows_that_the_refinement_of_theta_may_take() -> None:
    prior = ThetaPrior.from_problem(problem())

    def evaluations(hidden: tuple[int, ...], observations: int) -> int:
        model = CalibrationModel(1, prior, 1, ModelSettings(eta=GPSettings(hidden=hidden)))
        return exact_points(Work(model, FitSettings(evaluations=512), Totals(100, observations), 0, None))[0]

    assert evaluations((), 3_906) == evaluations((3,), 488) == 512
    assert evaluations((), 8_000) == evaluations((3,), 1_000) == 250
