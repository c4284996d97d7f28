"""The emulator's accuracy: the borehole, M = 100 features, the three ways and GPyTorch's SVGP at the same time.

Errors are root mean squares on fresh points, in standard deviations of z. `collapsed` runs as it does in training and
sets the time; the others get that much wall-clock time in the same run, `fullrank` its own schedule.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jobs.console import note
from storage.errors import VcalError
from vcal_dist.batches import Runs, Scaling
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.features import FeatureSettings
from vcal_dist.fitting import fit_emulator, run_stage
from vcal_dist.fullrank import Frame, FullRank
from vcal_dist.gp import GPSettings
from vcal_dist.initialise import start_model
from vcal_dist.objective import Samples
from vcal_dist.plan import COLLAPSED, FitSettings, StageSettings, Totals
from vcal_dist.priors import ThetaPrior
from vcal_dist.problems import borehole
from vcal_dist.stages import meanfield_stages
from vcal_dist.transforms import OutputScaling, TransformSettings
from vcal_dist.weights import MeanField, Weights

QUICK, FULL = 100_000, 1_000_000  # runs
STEPS = COLLAPSED["emulator"].steps
FEATURES = 100
FRESH = 20_000
TRIAL_STEPS = 30  # of `meanfield`, to learn how many fit into the time
SHORTEST = 1.0  # seconds for the others: below, they would be judged by their start-up


class Data(NamedTuple):
    """Runs as the model sees them, and fresh points with their true outputs."""

    runs: Runs
    fresh_u: Tensor  # (F, 8)
    fresh_z: Tensor  # (F, 1)


def run(*, quick: bool) -> dict[str, Any]:
    """All figures; with `quick` from 10⁵ runs, and without GPyTorch if it is not installed."""
    count = QUICK if quick else FULL
    note(f"making {count:,} runs of the borehole")
    data = make_data(count)
    note("collapsed")
    collapsed_error, seconds = timed_fit(data, "collapsed", "learned")
    note("fullrank")
    fullrank_error, fullrank_seconds = timed_fit(data, "fullrank", "learned")
    same = max(seconds, SHORTEST)
    note(f"meanfield, for {same:.1f} s")
    figures: dict[str, Any] = {
        "collapsed_error": collapsed_error,
        "collapsed_seconds": seconds,
        "fullrank_error": fullrank_error,
        "fullrank_seconds": fullrank_seconds,
        "meanfield_error_same_time": meanfield_error(data, same),
        **svgp(data, same, quick),
    }
    figures["meanfield_over_collapsed"] = figures["meanfield_error_same_time"] / collapsed_error
    for name in ("svgp", "svgp_example"):
        other = figures.get(f"{name}_error_same_time")
        if other is not None:
            figures[f"{name}_over_collapsed"] = other / collapsed_error
    rounded = {name: value if value is None else float(f"{value:.3g}") for name, value in figures.items()}
    return {**rounded, "runs": count, "features": FEATURES, "threads": torch.get_num_threads()}


def make_data(count: int, seed: int = 0) -> Data:
    """Runs on a Latin hypercube, and fresh uniform points."""
    made = borehole.generate(count, 1, seed=seed)
    x, t, z = (torch.as_tensor(part) for part in (made.x_runs, made.t, made.z))
    outputs = OutputScaling.from_runs(z, [TransformSettings()], ["flow"])
    fresh = np.random.default_rng(seed + 1).random((FRESH, x.shape[1] + t.shape[1]))
    fresh_z = outputs(torch.as_tensor(borehole.simulate(fresh[:, : x.shape[1]], fresh[:, x.shape[1] :])))
    runs = Scaling(borehole.problem(), outputs).runs(x, t, z)
    return Data(runs, torch.as_tensor(fresh, dtype=torch.float32), fresh_z)


def make_model(frequencies: Any) -> CalibrationModel:
    """A shallow emulator of 100 features."""
    features = FeatureSettings(features=FEATURES, frequencies=frequencies)
    settings = ModelSettings(eta=GPSettings(features=features), discrepancy="none")
    prior = ThetaPrior.from_problem(borehole.problem())
    return CalibrationModel(len(borehole.CONTROLS), prior, 1, settings)


def timed_fit(data: Data, weights: Any, frequencies: str) -> tuple[float, float]:
    """Error and seconds of the emulator's stage and its pass over all runs."""
    model = make_model(frequencies)
    begun = time.perf_counter()
    start_model(model, data.runs, None, seed=0)
    frame = fit_emulator(model, data.runs, FitSettings(weights=weights, emulator=StageSettings(steps=STEPS))).frame
    seconds = time.perf_counter() - begun
    return error(model, as_weights(frame), data), seconds


def as_weights(frame: Frame) -> FullRank:
    """What the runs say of the weights, as q."""
    return FullRank(0, *frame.mean.shape, frame=frame, absorbed=True)


def meanfield_error(data: Data, seconds: float) -> float:
    """The paper's first stage (weights, then everything at a smaller rate) in the given time."""
    totals = Totals(len(data.runs.u), 0)

    def train(steps: int) -> tuple[CalibrationModel, MeanField]:
        model = make_model("fixed")
        start_model(model, data.runs, None, seed=0)
        q = MeanField(0, 1, model.width)
        rates = {"emulator_weights": 0.03, "emulator": 0.009}
        stages = {
            name: StageSettings(steps=max(steps // 2, 1), rate=rate, samples=Samples()) for name, rate in rates.items()
        }
        settings = FitSettings(weights="meanfield", **stages)  # type: ignore[arg-type]
        for stage in list(meanfield_stages(model, q, totals, settings, seed=0))[:2]:
            run_stage(stage, data.runs, None, seed=0)
        return model, q

    train(2)
    begun = time.perf_counter()
    train(TRIAL_STEPS)
    rate = TRIAL_STEPS / (time.perf_counter() - begun)
    return error(*train(int(rate * seconds)), data)


def svgp(data: Data, seconds: float, quick: bool) -> dict[str, float | None]:
    """GPyTorch's SVGP, tuned and (not with `quick`) as in its example; None where it is not installed, with `quick`."""
    from jobs.bench.svgp import svgp_errors

    found: dict[str, float | None] = {}
    for name, tuned in (("svgp", True), ("svgp_example", False))[: 1 if quick else 2]:
        note(f"SVGP{'' if tuned else ' as in its example'}, for {seconds:.1f} s")
        try:
            (value,) = svgp_errors(
                data.runs.u, data.runs.z[:, 0], data.fresh_u, data.fresh_z[:, 0], seconds=[seconds], tuned=tuned
            )
        except VcalError:
            if not quick:
                raise
            value = None
        found[f"{name}_error_same_time"] = value
    return found


@torch.no_grad()
def error(model: CalibrationModel, q: Weights, data: Data) -> float:
    """Root mean square error of the emulator's mean on fresh points."""
    mean, _ = q.moments(model.eta(data.fresh_u), model.columns_eta)
    return float((mean - data.fresh_z).square().mean().sqrt())
