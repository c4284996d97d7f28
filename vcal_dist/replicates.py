"""Replicates of a calibration, for `vcal_dist.sbc`: truths from the prior, data of each, and what comes of the data.

Data are drawn from the model's own prior at the design of a store, x, noises and which outputs are missing:

    θ̃ ~ N(0, I)     ζ ~ N(0, I), nature's hyperparameters (vcal_dist.nature)     w ~ N(0, I)     ε ~ N(0, I)
    y = η(x, θ) + φ_δ(x)·w + σ·ε,     σ² = σ_y² + noise² (+ σ_z²)

η is the emulator with weights from N(m, RRᵀ), which is what the runs say of them, and then its residual σ_z² is part of
the noise; or it is a simulator. All is in the model's own units, with noises as they are at the real data. Then a
calibration with the settings of a configuration finds the posterior of θ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from storage.errors import VcalError
from storage.store import Store
from vcal_dist import tensorfile
from vcal_dist.batches import Observations, Runs, take
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError, ModelError
from vcal_dist.fitting import drive, fit, fit_emulator
from vcal_dist.fullrank import Frame
from vcal_dist.gp import Draw
from vcal_dist.initialise import start_model
from vcal_dist.likelihoods import Gaussian
from vcal_dist.nature import parts
from vcal_dist.noise import shared_normal
from vcal_dist.plan import FitSettings, Totals
from vcal_dist.priors import ThetaPrior
from vcal_dist.rows import keep_out
from vcal_dist.sbc import LEVELS, Told
from vcal_dist.schedule import Schedule, emulator_phases, phases_of
from vcal_dist.theta import ThetaPosterior
from vcal_dist.training import prepare
from vcal_dist.work import Fitted, Found, Work

Array = NDArray[np.float64]
Simulator = Callable[[Array, Array], ArrayLike]  # x (B, d1), t (B, d2) → z (B, K), in the user's units
KEY = 311  # keeps the numbers of replicates apart from those of training
THETA, NATURE, WEIGHTS, DISCREPANCY, NOISE = range(5)
DRAWS = 999  # of a posterior, among which a truth has its rank


class Drawn(NamedTuple):
    """The truth of a replicate, and its data."""

    theta: Tensor  # (d2,) θ̃
    nature: dict[str, list[float]]  # its hyperparameters ξ, by the name of their kind; what is held is not among them
    observations: Observations


@torch.no_grad()
def draw(
    model: CalibrationModel,
    design: Observations,
    key: Sequence[int],
    *,
    frame: Frame | None = None,
    simulate: Callable[[Tensor], Tensor] | None = None,
) -> Drawn:
    """Observations at the design's x, with its noises and with its outputs missing, of a truth from the prior.

    η is the emulator, whose weights are N(m, RRᵀ) by the `frame`, or `simulate`, from θ̃ (1, d2) to z (n, K) in the
    model's units. The model keeps the hyperparameters that were drawn.
    """

    def normal(purpose: int, *shape: int, number: int = 0) -> Tensor:
        return shared_normal((*key, KEY, purpose, number), shape, dtype=torch.float64, device=torch.device("cpu"))

    likelihood, x = model.likelihood_y, design.x
    assert isinstance(likelihood, Gaussian)
    theta = normal(THETA, 1, model.prior.dim)
    nature = {}
    for i, part in enumerate(parts(model)):
        logs = part.median + part.spread * normal(NATURE, *part.parameter.shape, number=i)
        part.parameter.copy_(logs)
        nature[part.name] = logs.exp().reshape(-1).tolist()
    if simulate is not None:
        f, residual = simulate(theta), None
    else:
        assert frame is not None
        weights = frame.mean + (frame.root @ normal(WEIGHTS, *frame.mean.shape, 1)).squeeze(-1)  # W_η = m + R·v
        hidden = Draw((*key, KEY), 1) if model.eta.random else None
        phi = model.phi_eta(x, model.rows_of_theta(theta, len(x)), hidden)[0]  # (n, M_η)
        f, residual = phi.double() @ weights.mT, model.residual_variance(phi)
    if model.delta is not None:
        phi = model.delta(x, None)  # (n, M_δ)
        f = f + phi.double() @ normal(DISCREPANCY, model.outputs, model.delta.width).mT
    precision = likelihood.precision(design.y, design.noise, residual)  # (n, K), 0 where missing
    y = f + precision.rsqrt() * normal(NOISE, *f.shape)
    y = torch.where(design.y.isnan(), torch.nan, y)
    # Of a density in the user's units: no part of θ's posterior.
    return Drawn(theta[0], nature, design._replace(y=y, log_jacobian=torch.zeros_like(y)))


def told(posterior: ThetaPosterior, truth: Tensor) -> Told:
    """What a posterior says of the true θ (d2,), in the user's units."""
    places = range(posterior.dim)
    return Told(
        pit=tuple(float(posterior.marginal_cdf(j, truth[j : j + 1])) for j in places),
        truth=tuple(truth.tolist()),
        mean=tuple(posterior.mean().tolist()),
        sd=tuple(posterior.sd().tolist()),
        intervals={level: [posterior.interval(j, level) for j in places] for level in LEVELS},
    )


def ranks(posterior: ThetaPosterior, truth: Tensor, generator: torch.Generator) -> list[int]:
    """How many of `DRAWS` draws of a posterior lie below the true θ (d2,), parameter by parameter."""
    found: list[int] = (posterior.sample(DRAWS, generator) < truth).sum(0).tolist()
    return found


def prior_sd(prior: ThetaPrior) -> list[float]:
    """Standard deviations of θ before any data, in the user's units."""
    one = torch.eye(prior.dim, dtype=torch.float64)
    sd: list[float] = ThetaPosterior(prior, torch.zeros_like(one[:1]), one[None]).sd().tolist()
    return sd


# --- the replicates of a configuration --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emulator:
    """What all replicates begin from: the model's state after the phases that read the runs, and what they found."""

    state: Mapping[str, Tensor]
    frame: Frame
    log_evidence: float | None

    def save(self, path: Path) -> None:
        """Writes it to a file."""
        tree = {"state": dict(self.state), "frame": list(self.frame), "log_evidence": self.log_evidence}
        tensorfile.write(path, tree)

    @classmethod
    def load(cls, path: Path) -> Emulator:
        """What `save` wrote."""
        tree = tensorfile.read(path)
        return cls(tree["state"], Frame(*tree["frame"]), tree["log_evidence"])

    @classmethod
    def train(
        cls, model: CalibrationModel, runs: Runs, design: Observations, settings: FitSettings, seed: int
    ) -> Emulator:
        """Trains a model's η on all runs; nothing of it depends on y."""
        start_model(model, runs, design, seed)
        frame, evidence, _ = fit_emulator(model, runs, settings, seed=seed)
        return cls({key: value.detach().clone() for key, value in model.state_dict().items()}, frame, evidence)

    def calibrate(
        self,
        model: CalibrationModel,
        observations: Observations,
        settings: FitSettings,
        runs: int,
        seed: int,
        *,
        patient: bool = False,
    ) -> Fitted:
        """Goes on with observations, in a model like the one that was trained on so many runs."""
        model.adopt(self.state)
        found = Found(frame=self.frame, log_evidence_runs=self.log_evidence)
        totals = Totals(runs, len(observations.x))
        work = Work(model, settings, totals, seed, observations, patient=patient, found=found)
        drive(Schedule(work, phases_of(work)[len(emulator_phases(work)) :]), None, observations)
        return Fitted.from_work(work)


class Replicates:
    """What the replicates of a configuration share: rows that it learns from, the model, and where η comes from."""

    def __init__(self, config: Config, store: Store, simulator: Simulator | None = None) -> None:
        check(config.model)
        self.config, self.store, self.simulator = config, store, simulator
        self.prepared = prepare(config, store)
        self.emulator: Emulator | None = None
        found = store.observations.read()
        at_hand = self.prepared.at_hand
        x, y, *noise = (torch.as_tensor(found[name]) for name in ("x", "y", "noise") if name in found)
        design = keep_out(at_hand.scaling.observations(x, y, *noise), at_hand.held_observations)
        kept = design.weight > 0
        self.design = take(design, kept)
        self.x: Array = found["x"][kept.numpy()].astype(np.float64)  # (n, d1) in the user's units

    @property
    def shares_emulator(self) -> bool:
        """Whether training learns of η from the runs alone, so that all replicates go on from one emulator."""
        return self.config.fit.weights != "meanfield" and not self.config.fit.free_emulator

    @property
    def needs_emulator(self) -> bool:
        """Whether there is any use for one."""
        return self.shares_emulator or self.simulator is None

    @cached_property
    def runs(self) -> Runs:
        """All runs that training learns from."""
        at_hand, found = self.prepared.at_hand, self.store.runs.read()
        x, t, z = (torch.as_tensor(found[name]) for name in ("x", "t", "z"))
        runs = keep_out(at_hand.scaling.runs(x, t, z), at_hand.held_runs)
        return take(runs, runs.weight > 0)

    def train_emulator(self) -> Emulator:
        """Trains η on all runs; `meanfield` has no such stage, and takes the one of `collapsed`."""
        config = self.config
        settings = FitSettings(emulator=config.fit.emulator) if config.fit.weights == "meanfield" else config.fit
        self.emulator = Emulator.train(self._model(), self.runs, self.design, settings, config.seed)
        return self.emulator

    def draw(self, seed: int, number: int) -> Drawn:
        """The truth and the data of a replicate."""
        model = self._model(self.emulator)
        if self.simulator is not None:
            return draw(model, self.design, (seed, number), simulate=lambda theta: self._simulate(theta, self.x))
        assert self.emulator is not None
        return draw(model, self.design, (seed, number), frame=self.emulator.frame)

    def calibrate(self, observations: Observations) -> Fitted:
        """Trains on observations as the configuration says."""
        config = self.config
        if not self.shares_emulator:
            return fit(self._model(), self.runs, observations, config.fit, seed=config.seed)
        assert self.emulator is not None
        runs = self.prepared.totals.runs
        return self.emulator.calibrate(self._model(), observations, config.fit, runs, config.seed)

    def try_simulator(self) -> None:
        """Asks the simulator, if there is one, for two rows at the prior's median: a mistake shows before any work."""
        if self.simulator is None:
            return
        try:
            self._simulate(torch.zeros(1, self.prepared.model.prior.dim, dtype=torch.float64), self.x[:2])
        except VcalError:
            raise
        except Exception as error:  # whatever the user's code raises
            raise ModelError(f"the simulator fails at the prior's median: {type(error).__name__}: {error}") from error

    def _model(self, emulator: Emulator | None = None) -> CalibrationModel:
        """A model to train, as it begins or with an emulator in it."""
        model = copy.deepcopy(self.prepared.model)
        if emulator is not None:
            model.adopt(emulator.state)
        return model

    def _simulate(self, theta: Tensor, x: Array) -> Tensor:
        """The simulator at x (B, d1) and one θ̃ (1, d2), in the model's units: (B, K)."""
        assert self.simulator is not None
        t = np.repeat(self.prepared.model.prior.theta(theta).numpy(), len(x), 0)
        z = simulated(self.simulator, x, t, len(self.store.problem.outputs))
        scaled: Tensor = self.prepared.at_hand.scaling.outputs(torch.from_numpy(z))
        return scaled


def simulated(simulator: Simulator, x: Array, t: Array, outputs: int) -> Array:
    """What a simulator gives for x (B, d1) and t (B, d2), once it is known to make sense: (B, K)."""
    z = np.asarray(simulator(x.copy(), t.copy()), np.float64)
    if outputs == 1 and z.shape == (len(x),):
        z = z[:, None]
    if z.shape != (len(x), outputs):
        raise ModelError(
            f"the simulator gave an array of shape {z.shape} for x {x.shape} and t {t.shape}; "
            f"expected {(len(x), outputs)}: a row for each of x and t, a column for each output"
        )
    wrong = ~np.isfinite(z)
    if wrong.any():
        i, k = (int(index) for index in np.argwhere(wrong)[0])
        raise ModelError(
            f"the simulator gave {z[i, k]} for output {k} at x = {x[i].tolist()} and t = {t[i].tolist()}; it must be "
            "finite wherever the prior of θ leads"
        )
    return z


def check(settings: ModelSettings) -> None:
    """Refuses a model from whose prior no data can be drawn here, before any work."""
    delta = settings.delta
    refused: list[tuple[bool, str, Any, str]] = [
        (settings.discrepancy == "general", "discrepancy", settings.discrepancy, "none, additive"),
        (settings.likelihood_y.kind != "gaussian", "likelihood_y.kind", settings.likelihood_y.kind, "gaussian"),
        (settings.free_kappa, "free_kappa", "true", "false, since κ has no prior to draw it from"),
    ]
    if settings.discrepancy == "additive":
        learned = delta.features.frequencies != "fixed"
        refused += [
            (bool(delta.hidden), "delta.hidden", list(delta.hidden), "[], a shallow discrepancy"),
            (learned, "delta.features.frequencies", delta.features.frequencies, "fixed"),
            (
                delta.learn and delta.features.lengthscales == "full",
                "delta.features.lengthscales",
                delta.features.lengthscales,
                "isotropic, ard, or learn: false",
            ),
        ]
    for wrong, key, value, accepted in refused:
        if wrong:
            raise ConfigError(
                f"model.{key} is {value}; data for simulation-based calibration can be drawn with: {accepted}. "
                "With another model, draw data yourself and give what posteriors say of them to vcal_dist.sbc.assess"
            )
