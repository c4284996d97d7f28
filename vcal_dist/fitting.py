"""Calibration of arrays in memory: the stages of `vcal_dist.stages` and the passes of `vcal_dist.passes` in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from vcal_dist.batches import Observations, Runs, Table, take
from vcal_dist.calibration import CalibrationModel
from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Frame, FullRank
from vcal_dist.initialise import screen_theta, start_model
from vcal_dist.mixture import Adapted, Mixture, adapt
from vcal_dist.objective import CollapsedTheta
from vcal_dist.passes import Closing, close, collapsed_log_density, compress, is_exact, pin, settle
from vcal_dist.stages import (
    FitSettings,
    Stage,
    Totals,
    collapsed_emulator,
    collapsed_theta,
    emulator_groups,
    is_collapsible,
    joint_stage,
    meanfield_stages,
    natural_stage,
    nature_groups,
)
from vcal_dist.theta import ThetaPosterior
from vcal_dist.weights import MeanField, Weights

BLOCK = 8192  # rows of a block in a pass, over all samples of θ̃: their features should stay in the cache
ROWS_OF_CANDIDATES = 4096
ROWS_OF_REFINEMENT = 2_000_000  # over all points where the exact posterior is evaluated
SAME_MODE = 1.0  # Mahalanobis distance below which two closings found the same mode
Report = Callable[[str, int, float], None]  # stage, step, loss


@dataclass
class Fitted:
    """A calibrated model: q(θ̃, w), or several with weights where the posterior has several modes."""

    model: CalibrationModel
    components: list[Weights]
    log_weights: Tensor  # (C,) normalised
    closings: list[Closing] = field(default_factory=list)  # of Gauss–Newton, before a mixture took its place
    log_evidence_runs: float | None = None
    counts: dict[str, int] = field(default_factory=dict)
    adapted: Adapted | None = None  # the importance sample behind a mixture

    @property
    def q(self) -> Weights:
        """The component of most weight."""
        return self.components[int(self.log_weights.argmax())]

    @property
    def theta(self) -> ThetaPosterior:
        """The posterior of θ in the user's units."""
        moments = [q.theta_moments() for q in self.components]
        means = torch.stack([mean.detach().double() for mean, _ in moments])
        covariances = torch.stack([covariance.detach().double() for _, covariance in moments])
        return ThetaPosterior(self.model.prior, means, covariances, self.log_weights)


def fit(
    model: CalibrationModel,
    runs: Runs,
    observations: Observations,
    settings: FitSettings | None = None,
    *,
    seed: int = 0,
    report: Report | None = None,
) -> Fitted:
    """Trains the model on all runs and observations, by the schedule of `settings.weights`."""
    settings = settings or FitSettings()
    if seed < 0:
        raise ModelError(f"seed is {seed}; accepted: 0 or more")
    check(model, runs, observations)
    totals = Totals(len(runs.u), len(observations.x))
    start_model(model, runs, observations, seed)
    if settings.weights == "meanfield":
        return _fit_meanfield(model, runs, observations, totals, settings, seed, report)
    frame, evidence = fit_emulator(model, runs, settings, seed=seed, report=report)
    return _fit_theta(model, runs, observations, totals, frame, evidence, settings, seed, report)


def fit_emulator(
    model: CalibrationModel, runs: Runs, settings: FitSettings, *, seed: int = 0, report: Report | None = None
) -> tuple[Frame, float | None]:
    """Steps 1 and 2: η's hyperparameters and features, then what all runs say of its weights."""
    totals = Totals(len(runs.u), 0)
    if is_collapsible(model, settings)[0]:
        run_stage(collapsed_emulator(model, totals, settings, seed), runs, None, seed, report)
        return compress_runs(model, runs, settings, None)
    q = FullRank(0, model.outputs, model.eta.width, device=runs.u.device)
    stage = natural_stage(
        "emulator",
        model,
        q,
        totals,
        settings,
        seed,
        steps=settings.emulator_steps,
        groups=emulator_groups(model, settings.emulator_rate),
        runs=True,
        observations=False,
    )
    run_stage(stage, runs, None, seed, report)
    return compress_runs(model, runs, settings, Frame(q.raw_mean, q.raw_root))


def compress_runs(
    model: CalibrationModel, runs: Runs, settings: FitSettings, start: Frame | None
) -> tuple[Frame, float | None]:
    """What all runs say of η's weights, exactly or, where it is not closed form, by settling from a first guess."""
    if is_collapsible(model, settings)[0]:
        compressed = compress(model, blocks(runs))
        return compressed.frame, float(compressed.log_evidence)
    q = FullRank(0, model.outputs, model.eta.width, device=runs.u.device)
    if start is not None:
        mean, root = start
        identity = torch.eye(root.shape[-1], dtype=root.dtype, device=root.device).expand_as(root)
        inverse = torch.linalg.solve_triangular(root, identity, upper=True)
        q.move(q.theta_mean, mean, q.precision._replace(weights=inverse.mT @ inverse))
    settle(model, q, lambda: blocks(runs))
    return Frame(q.raw_mean, q.raw_root), None


def _fit_theta(
    model: CalibrationModel,
    runs: Runs,
    observations: Observations,
    totals: Totals,
    frame: Frame,
    evidence: float | None,
    settings: FitSettings,
    seed: int,
    report: Report | None,
) -> Fitted:
    """Steps 3 to 5: θ̃ and the discrepancy, joint SVI, the closing pass from every start."""
    starts = screen_theta(model, frame, observations, starts=settings.starts, points=settings.screening, seed=seed)
    counts = {"damped": 0}

    def closed(theta: Tensor, frame: Frame, rows: Observations = observations) -> tuple[FullRank, Closing]:
        q = started(model, frame, theta)
        return q, close(model, q, lambda: blocks(rows), key=(seed, 5))

    theta = starts[0]
    if is_collapsible(model, settings)[1]:
        point = CollapsedTheta(model, frame, theta)
        run_stage(collapsed_theta(model, point, totals, settings, seed), None, observations, seed, report)
        theta = point.theta.detach()
        q, _ = closed(theta, frame)
    else:
        q = started(model, frame, theta)
        stage = natural_stage(
            "theta",
            model,
            q,
            totals,
            settings,
            seed,
            steps=settings.theta_steps,
            groups=nature_groups(model, settings.discrepancy_rate),
            runs=False,
            observations=True,
        )
        run_stage(stage, None, observations, seed, report)
        counts["damped"] += stage.counts["damped"]

    if settings.joint_steps:
        q, stage = joint_stage(model, q, totals, settings, seed)
        run_stage(stage, runs if stage.runs else None, observations, seed, report)
        counts["damped"] += stage.counts["damped"]
        if settings.free_emulator:  # the frame belongs to the features that were
            frame, evidence = compress_runs(model, runs, settings, frame)

    candidates = [q.theta_mean, *starts[1:]]
    if totals.observations > ROWS_OF_CANDIDATES:  # a part of the rows tells which starts lead to a mode of their own
        every = take(observations, slice(None, None, -(-totals.observations // ROWS_OF_CANDIDATES)))
        survivors, _ = distinct([closed(theta, frame, every) for theta in candidates])
        candidates = [survivor.theta_mean for survivor in survivors]
    components, closings = distinct([closed(theta, frame) for theta in candidates])
    counts["damped"] += sum(closing.damped for closing in closings)
    log_weights = torch.log_softmax(
        torch.tensor([closing.log_evidence for closing in closings], dtype=torch.float64), 0
    )
    fitted = Fitted(model, list(components), log_weights, closings, evidence, counts)
    evaluations = min(settings.evaluations, ROWS_OF_REFINEMENT // totals.observations)
    if settings.weights == "collapsed" and is_exact(model) and evaluations >= 32 * (model.prior.dim + 1):
        return refine(fitted, frame, observations, evaluations, seed)
    return fitted


def refine(fitted: Fitted, frame: Frame, observations: Observations, evaluations: int, seed: int) -> Fitted:
    """q(θ̃) as a mixture that follows the exact posterior of θ̃, all weights integrated out.

    A joint Gaussian has weights that are linear in θ̃ with one covariance everywhere; where θ̃ is uncertain and η
    curved, that makes its θ̃ too narrow, and no Gaussian is skewed. Here w is Gaussian given θ̃, around each component.
    """
    model = fitted.model
    moments = [q.theta_moments() for q in fitted.components]
    start = Mixture(
        torch.stack([mean for mean, _ in moments]),
        torch.stack([covariance for _, covariance in moments]),
        fitted.log_weights.to(moments[0][0].device),
    )
    adapted = adapt(
        lambda theta: collapsed_log_density(model, frame, lambda: blocks(observations, len(theta)), theta),
        start,
        evaluations=evaluations,
        seed=seed,
    )
    if adapted.effective < 4 * (model.prior.dim + 1):  # too few points carry it to say more than Gauss–Newton
        return replace(fitted, adapted=adapted)
    mixture = adapted.mixture
    components: list[Weights] = []
    for mean, covariance in zip(mixture.means, mixture.covariances, strict=True):
        q = started(model, frame, mean)
        pin(model, q, lambda: blocks(observations), mean, covariance)
        components.append(q)
    return replace(fitted, components=components, log_weights=mixture.log_weights, adapted=adapted)


def _fit_meanfield(
    model: CalibrationModel,
    runs: Runs,
    observations: Observations,
    totals: Totals,
    settings: FitSettings,
    seed: int,
    report: Report | None,
) -> Fitted:
    """The paper's own schedule."""
    q = MeanField(model.prior.dim, model.outputs, model.width, dtype=runs.u.dtype).to(runs.u.device)
    for stage in meanfield_stages(model, q, totals, settings, seed):
        run_stage(stage, runs, observations if stage.observations else None, seed, report)
    return Fitted(model, [q], torch.zeros(1, dtype=torch.float64))


def started(model: CalibrationModel, frame: Frame, theta: Tensor) -> FullRank:
    """q with what the runs say of η's weights as its prior, and θ̃ close to a start."""
    wide = frame.widen(model.width - model.eta.width)
    q = FullRank(model.prior.dim, model.outputs, model.width, frame=wide, absorbed=True)
    precision = q.precision._replace(theta=100.0 * q.precision.theta)  # narrow: the mode at this start, no other
    q.move(theta.double().clone(), q.mean, precision)
    return q


def distinct(found: list[tuple[FullRank, Closing]]) -> tuple[list[FullRank], list[Closing]]:
    """The modes, best first: of closings that met, the one with the higher evidence; those too light to matter go."""
    kept: list[tuple[FullRank, Closing]] = []
    for q, closing in sorted(found, key=lambda pair: -pair[1].log_evidence):
        light = kept and closing.log_evidence < kept[0][1].log_evidence - 10
        if light or any(_distance(q, other) < SAME_MODE for other, _ in kept):
            continue
        kept.append((q, closing))
    return [q for q, _ in kept], [closing for _, closing in kept]


def _distance(q: FullRank, other: FullRank) -> float:
    difference = q.theta_mean - other.theta_mean
    covariance = q.theta_moments()[1] + other.theta_moments()[1]
    return float((difference @ torch.linalg.solve(covariance / 2, difference)).sqrt())


def run_stage(
    stage: Stage, runs: Runs | None, observations: Observations | None, seed: int, report: Report | None = None
) -> None:
    """Adam with a one-cycle rate over shuffled batches; a stage with nothing to learn by Adam still takes its steps."""
    if not stage.steps or not (stage.groups or stage.natural):
        return
    optimizer = scheduler = None
    if stage.groups:
        optimizer = torch.optim.Adam(stage.groups, betas=(0.9, 0.95))
        rates = [group["lr"] for group in stage.groups]
        # OneCycleLR divides by the steps of its warm-up less one; a shorter stage ends before its cycle does.
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rates, total_steps=max(stage.steps, 20), pct_start=0.1
        )
    of_runs = shuffled(runs, stage.runs, (seed, 1)) if runs is not None and stage.runs else None
    of_observations = (
        shuffled(observations, stage.observations, (seed, 2))
        if observations is not None and stage.observations
        else None
    )
    for step in range(stage.steps):
        loss = stage.loss(next(of_runs) if of_runs else None, next(of_observations) if of_observations else None, step)
        if not bool(loss.isfinite()):
            raise ModelError(
                f"the loss of stage '{stage.name}' is {float(loss.detach())} in step {step}; lower its learning rate, "
                "or check the data for outliers"
            )
        if optimizer is not None and scheduler is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        if report is not None:
            report(stage.name, step, float(loss.detach()))


def shuffled(table: Table, size: int, seed: tuple[int, int]) -> Iterator[Table]:
    """Endless batches, every row once an epoch (the last rows of an epoch that fill no batch wait for the next)."""
    rows = len(table.weight)
    if size >= rows:
        while True:
            yield table
    generator = torch.Generator().manual_seed(seed[0] * 7919 + seed[1])
    while True:
        order = torch.randperm(rows, generator=generator).to(table.weight.device)
        for chosen in order.split(size):
            if len(chosen) == size:
                yield take(table, chosen)


def blocks(table: Table, samples: int = 1) -> Iterable[Table]:
    """Every row once, in blocks."""
    size = max(BLOCK // samples, 1)
    for start in range(0, len(table.weight), size):
        yield take(table, slice(start, start + size))


def check(model: CalibrationModel, runs: Runs, observations: Observations) -> None:
    """What cannot work, said before any work is done."""
    if len(runs.u) < 2:
        raise ModelError(f"there are {len(runs.u)} runs; an emulator needs at least 2")
    if len(observations.x) < 1:
        raise ModelError("there are no observations; θ needs at least 1")
    for name, found, expected in (
        ("runs' inputs", runs.u.shape[1], model.eta.inputs),
        ("runs' outputs", runs.z.shape[1], model.outputs),
        ("observations' inputs", observations.x.shape[1], model.controls),
        ("observations' outputs", observations.y.shape[1], model.outputs),
    ):
        if found != expected:
            raise ModelError(f"the {name} have {found} columns; the model was built for {expected}")
    for name, inputs in (("runs", runs.u), ("observations", observations.x)):
        if inputs.dtype != model.dtype:
            raise ModelError(
                f"the inputs of the {name} are {inputs.dtype}, the model is {model.dtype}; give Scaling that dtype"
            )
        if not bool(inputs.isfinite().all()):
            raise ModelError(f"the inputs of the {name} hold values that are not finite; drop those rows")
    names = [str(k) for k in range(model.outputs)]
    noise = observations.noise
    if noise is not None:
        # Also refuses the column where the likelihood has no use for it.
        model.likelihood_y.expected_log_prob(observations.y[:1], observations.y[:1], observations.y[:1] * 0, noise[:1])
        wrong = ~observations.y.isnan() & ~((noise > 0) & noise.isfinite())
        if bool(wrong.any()):
            i, k = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
            raise ModelError(
                f"the noise of observation {i}, output {k}, is {float(noise[i, k]):g}; "
                "accepted: a positive standard deviation wherever the output is known"
            )
    model.likelihood_z.check(runs.z, names)
    model.likelihood_y.check(observations.y, names)
    unknown = runs.z.isnan().all(0).nonzero()[:, 0].tolist()
    if unknown:
        raise ModelError(f"output '{unknown[0]}' is missing (NaN) in every run; an emulator needs known values")
    if bool(observations.y.isnan().all()):
        raise ModelError("every observation is missing (NaN); θ needs at least one that is known")
