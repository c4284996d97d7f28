"""The order of the phases, and the one counter of training: which phase, which leg of it, which batch of the leg.

    collapsed, fullrank   emulator · compression (settling) · (residual) · screening · theta · closing of theta ·
                          joint · candidates · closing · refinement
                          of few runs: emulator · cross-validation · screening · …
    meanfield             the paper's four stages

Whoever drives it (`vcal_dist.fitting` over arrays in memory, `vcal_dist.module` under Lightning) gives batches of
`schedule.phase.feed` to `step`, and calls `turn` at the end of every leg, until `phase` is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vcal_dist import few_runs, tensorfile
from vcal_dist.batches import take
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collective import same_everywhere, world_size
from vcal_dist.components import LIGHT, NARROW, share, started
from vcal_dist.errors import MISFITS, Diverged, Malformed, ModelError
from vcal_dist.fullrank import Frame, FullRank
from vcal_dist.initialise import APART, place_start, screen_theta
from vcal_dist.objective import CollapsedTheta
from vcal_dist.passes import Closing, close, closing, settling
from vcal_dist.phases import (
    NO_VOTE,
    Batch,
    Climbing,
    Compress,
    Descent,
    Instant,
    LinAlgError,
    Outcome,
    Phase,
    Reading,
    Residuals,
    blocks,
)
from vcal_dist.plan import FitSettings
from vcal_dist.refinement import refinement
from vcal_dist.stacked_emulator import StackedEmulator
from vcal_dist.stages import (
    Stage,
    choose,
    collapsed_emulator,
    collapsed_theta,
    freed,
    is_collapsible,
    joint_stage,
    meanfield_stage,
    natural_emulator,
    natural_theta,
)
from vcal_dist.weights import MeanField
from vcal_dist.work import Followed, Found, Work

ROWS_OF_CANDIDATES = 4096
SAME_MODE = 1.0  # Mahalanobis distance below which two closings found the same mode
Build = Callable[[Work], Phase]


class Schedule:
    """The phases in their order, and where training is."""

    def __init__(self, work: Work, builds: list[Build] | None = None) -> None:
        self.work = work
        self.builds = phases_of(work) if builds is None else builds
        self.number = -1  # of the phase
        self.leg = self.batch = 0  # of the phase, and of the leg
        self.steps = 0  # batches taken in all
        self.phase: Reading | None = None  # the one under way; None before the first and after the last
        self.announce: Callable[[str], None] = lambda _: None  # hears of phases that take no rows

    def start(self) -> None:
        """Goes to the first phase that takes rows."""
        self._next()

    def step(self, batch: Batch, votes: tuple[float, float] = NO_VOTE) -> Outcome:
        """Takes the next batch of the leg."""
        assert self.phase is not None
        outcome = self.phase.step(batch, votes)
        self.batch += 1
        self.steps += 1
        return outcome

    def turn(self) -> None:
        """Ends a leg, and the phase with it if that is done."""
        assert self.phase is not None
        self.leg, self.batch = self.leg + 1, 0
        if _turned(self.phase):
            self._next()

    def _next(self) -> None:
        """The next phase that takes rows; what needs none is done on the way."""
        while True:
            self._agree()
            self.number += 1
            self.leg = self.batch = 0
            self.phase = None
            if self.number == len(self.builds):
                return
            phase = self.builds[self.number](self.work)
            if isinstance(phase, Reading) and phase.feed.batches != 0:
                self.phase = phase
                return
            self.announce(phase.name)
            _turned(phase)

    def _agree(self) -> None:
        """Every process goes on from what the first one has: machines may round differently what all compute alike."""
        if world_size() > 1:
            found = self.work.found.state()
            same_everywhere(list(tensorfile.leaves([dict(self.work.model.state_dict()), found])))
            self.work.found = Found.from_state(found)

    def state(self) -> dict[str, Any]:
        """All that training needs to go on with the next batch, on any number of processes; every one must ask."""
        return {
            "name": None if self.phase is None else self.phase.name,
            "number": self.number,
            "leg": self.leg,
            "batch": self.batch,
            "steps": self.steps,
            "model": dict(self.work.model.state_dict()),
            "found": self.work.found.state(),
            "phase": None if self.phase is None else self.phase.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state, wherever its tensors are; raises `Malformed` if it is none of such a training."""
        try:
            self._load(moved(state, self.work.device))
        except torch.OutOfMemoryError:  # which says nothing of the file
            raise
        except MISFITS as error:  # it is a file's, and may say anything
            raise Malformed(f"it does not fit this training: {error}") from error

    def _load(self, state: dict[str, Any]) -> None:
        self.work.model.adopt(state["model"])
        self.work.found = Found.from_state(state["found"])
        self.number, self.leg, self.batch, self.steps = (state[key] for key in ("number", "leg", "batch", "steps"))
        if not 0 <= self.number <= len(self.builds) or min(self.leg, self.batch, self.steps) < 0:
            raise Malformed(f"schedule.number is {self.number}, leg {self.leg}, batch {self.batch}, steps {self.steps}")
        self.phase = None
        if self.number == len(self.builds):
            return
        phase = self.builds[self.number](self.work)
        assert isinstance(phase, Reading), "no checkpoint is written in a phase that reads nothing"
        if phase.name != state["name"]:
            raise Malformed(f"schedule.name is '{state['name']}' where phase {self.number} is '{phase.name}'")
        if phase.feed.batches is not None and self.batch > phase.feed.batches:
            raise Malformed(f"schedule.batch is {self.batch} of {phase.feed.batches}")
        if phase.fixed_form:
            tensorfile.check_form(phase.state(), state["phase"], "schedule.phase")
        self.phase = phase
        phase.load(state["phase"])


def _turned(phase: Phase) -> bool:
    """Ends a leg; sums that no weights can come of are those of a model that a stage before has spoilt."""
    try:
        return phase.turn()
    except LinAlgError as error:
        raise Diverged(
            f"the numbers of the model have no solution in phase '{phase.name}'; lower the learning rates before it"
        ) from error


def phases_of(work: Work) -> list[Build]:
    """The phases of a calibration."""
    settings = work.settings
    check_family(work.model, settings)
    if settings.weights == "meanfield":
        return [_start_meanfield, *(partial(_meanfield, number) for number in range(4)), _end_meanfield]
    found = [*emulator_phases(work), _screening, _theta]
    if is_collapsible(work.model, settings)[1]:
        found.append(_closing_of_theta)
    if choose(work.model, work.totals, settings, "joint", runs=False, observations=True).steps:
        found += [_joint, *emulator_phases(work)[1:]] if settings.free_emulator else [_joint]
    return [*found, _candidates, _closing, refinement]


def check_family(model: CalibrationModel, settings: FitSettings) -> None:
    """What the weights' family has no way to do, said before any work."""
    if settings.weights == "meanfield" and model.varying is not None:
        raise ModelError("model.varying_residual goes with fit.weights collapsed or fullrank, not with meanfield")


def emulator_phases(work: Work) -> list[Build]:
    """Those of them that read the runs alone."""
    if work.runs is not None:
        few = FewRuns(work)
        return [few.emulator, few.cross_validation]
    return [_emulator, _compression, *([] if work.model.varying is None else [Residuals])]


def refining(work: Work) -> list[Build]:
    """The phases that refine what an earlier training has found: the runs, then the posterior of θ̃."""
    return [_compression, _resume, _candidates, _closing, refinement]


# --- the phases of `collapsed` and `fullrank` -------------------------------------------------------------------------


def _emulator(work: Work) -> Phase:
    """η's hyperparameters and features."""
    if is_collapsible(work.model, work.settings)[0]:
        return Descent(collapsed_emulator(work.model, work.totals, work.settings, work.seed))
    q = FullRank(0, work.model.outputs, work.model.eta.width, device=work.device)

    def finish(_: Stage) -> None:
        work.found.frame = Frame(q.raw_mean, q.raw_root)

    return Descent(natural_emulator(work.model, q, work.totals, work.settings, work.seed), finish)


class FewRuns:
    """The two phases of an emulator of few runs (`vcal_dist.few_runs`), and the ensemble that they share."""

    def __init__(self, work: Work) -> None:
        assert work.runs is not None
        self.data = few_runs.fold_runs(work.runs, work.run, work.model.controls, work.seed)
        self.members = few_runs.make_members(work.model, self.data, work.seed)

    def emulator(self, work: Work) -> Phase:
        """The ensemble's frequencies and hyperparameters."""
        return Descent(few_runs.members_stage(work, self.members, self.data))

    def cross_validation(self, work: Work) -> Phase:
        """What the experts said of runs they had not seen decides how they go together."""

        def do() -> None:
            found, model = work.found, work.model
            found.validation = few_runs.finish(model, self.members, self.data, work.seed)
            assert isinstance(model.eta, StackedEmulator)
            found.frame = model.eta.frame()
            found.log_evidence_runs = few_runs.held_out_log_density(found.validation, work.runs)

        return Instant("cross-validation", do)


def _compression(work: Work) -> Phase:
    """What all runs say of η's weights, exactly or, where it is not closed form, by settling from a first guess."""
    if isinstance(work.model.eta, StackedEmulator):
        frame = work.model.eta.frame()  # training has found it

        def take_over() -> None:
            work.found.frame = frame

        return Instant("compression", take_over)
    if is_collapsible(work.model, work.settings)[0]:
        return Compress(work)
    q = FullRank(0, work.model.outputs, work.model.eta.width, device=work.device)
    start = work.found.frame
    if start is not None:
        identity = torch.eye(q.width, dtype=start.root.dtype, device=start.root.device).expand_as(start.root)
        inverse = torch.linalg.solve_triangular(start.root, identity, upper=True)
        q.move(q.theta_mean, start.mean.clone(), q.precision._replace(weights=inverse.mT @ inverse))

    climb = settling(work.model, q)

    def finish() -> None:
        assert climb.ended is not None
        work.found.frame, work.found.log_evidence_runs = Frame(q.raw_mean, q.raw_root), climb.ended.log_evidence

    return Climbing("settling", work, [climb], finish)


def _screening(work: Work) -> Phase:
    """Starts for θ̃."""

    def do() -> None:
        settings = work.settings
        assert work.found.frame is not None
        assert work.observations is not None
        starts = screen_theta(
            work.model,
            work.found.frame,
            work.observations,
            starts=settings.starts,
            points=settings.screening,
            seed=work.seed,
        )
        starts[0] = place_start(work.model.prior, settings.start, starts[0])
        work.found.starts = starts

    return Instant("screening", do)


def _theta(work: Work) -> Phase:
    """θ̃ and the discrepancy."""
    found, model = work.found, work.model
    assert found.frame is not None
    assert found.starts is not None
    if is_collapsible(model, work.settings)[1]:
        point = CollapsedTheta(model, found.frame, found.starts[0])

        def finish(_: Stage) -> None:
            assert found.starts is not None
            found.starts = torch.cat([point.theta.detach()[None], found.starts[1:]])

        return Descent(collapsed_theta(model, point, work.totals, work.settings, work.seed), finish)
    q = started(work, found.starts[0], work.settings.spread or NARROW)
    return Descent(natural_theta(model, q, work.totals, work.settings, work.seed), partial(_keep, work))


def _keep(work: Work, stage: Stage) -> None:
    """q of a stage as the one to go on with."""
    assert isinstance(stage.learned, FullRank)
    work.found.q = stage.learned
    work.found.counts["damped"] += stage.counts["damped"]


def _closing_of_theta(work: Work) -> Phase:
    """A joint Gaussian at the point that was found, to begin the joint stage with."""
    found = work.found
    assert found.starts is not None
    q = started(work, found.starts[0])

    def finish() -> None:
        found.q = q

    # Within a nat is enough: the noise of the joint stage's batches is larger.
    return Climbing("closing of theta", work, [closing(work.model, q, tolerance=1.0, key=(work.seed, 5))], finish)


def _joint(work: Work) -> Phase:
    """Mini-batch SVI."""
    q = work.found.q
    assert isinstance(q, FullRank)
    if work.settings.free_emulator:
        q = freed(q)
    return Descent(joint_stage(work.model, q, work.totals, work.settings, work.seed), partial(_keep, work))


def _resume(work: Work) -> Phase:
    """Starts for θ̃: where the components of an earlier training are, and others."""
    screening = _screening(work)

    def do() -> None:
        found = work.found
        assert found.log_weights is not None
        chosen: list[Tensor] = []  # neighbours of a divided component lead to the same mode
        for c in found.log_weights.argsort(descending=True).tolist():
            mean = found.components[c].theta_moments()[0].detach().double()
            if all(float((mean - other).norm()) > APART for other in chosen):
                chosen.append(mean)
        screening.turn()
        assert found.starts is not None
        found.starts = torch.cat([torch.stack(chosen[: work.settings.starts]), found.starts])

    return Instant("screening", do)


def _candidates(work: Work) -> Phase:
    """The starts that lead to modes of their own, told from a part of the observations where these are many."""

    def do() -> None:
        found = work.found
        assert found.starts is not None
        if isinstance(found.q, FullRank):
            found.starts = torch.cat([found.q.theta_mean[None], found.starts[1:]])
        if work.totals.observations <= ROWS_OF_CANDIDATES:
            return
        assert work.observations is not None
        every = -(-len(work.observations.x) // ROWS_OF_CANDIDATES)
        rows = share(take(work.observations, slice(None, None, every)))
        survivors = []
        for start in found.starts:
            q = started(work, start)
            survivors.append((q, close(work.model, q, lambda: blocks(rows), key=(work.seed, 5))))
        kept, _, found.followed = distinct(survivors)
        found.starts = torch.stack([q.theta_mean for q in kept])

    return Instant("candidates", do)


def _closing(work: Work) -> Phase:
    """The closing passes from every start, together; the modes that remain are the posterior."""
    found = work.found
    assert found.starts is not None
    starts = [started(work, start) for start in found.starts]
    climbs = [closing(work.model, q, key=(work.seed, 5)) for q in starts]

    def finish() -> None:
        ends = [(q, climb.ended) for q, climb in zip(starts, climbs, strict=True) if climb.ended is not None]
        components, found.closings, followed = distinct(ends)
        found.components, found.followed = list(components), found.followed or followed
        found.counts["damped"] += sum(closing.damped for closing in found.closings)
        evidences = torch.tensor([closing.log_evidence for closing in found.closings], dtype=torch.float64)
        found.log_weights = torch.log_softmax(evidences, 0).to(work.device)

    return Climbing("closing", work, climbs, finish)


# --- the paper's own schedule -----------------------------------------------------------------------------------------


def _start_meanfield(work: Work) -> Phase:
    def do() -> None:
        model, settings = work.model, work.settings
        q = MeanField(model.prior.dim, model.outputs, model.width, dtype=model.dtype).to(work.device)
        with torch.no_grad():
            q.theta_mean.copy_(place_start(model.prior, settings.start, q.theta_mean))
            q.theta_log_sd.fill_(math.log(settings.spread or 1.0))
        work.found.q = q

    return Instant("start", do)


def _meanfield(number: int, work: Work) -> Phase:
    assert isinstance(work.found.q, MeanField)
    return Descent(meanfield_stage(number, work.model, work.found.q, work.totals, work.settings, work.seed))


def _end_meanfield(work: Work) -> Phase:
    def do() -> None:
        assert work.found.q is not None
        work.found.components = [work.found.q]
        work.found.log_weights = torch.zeros(1, dtype=torch.float64, device=work.device)

    return Instant("end", do)


# --- what they share --------------------------------------------------------------------------------------------------


def distinct(found: list[tuple[FullRank, Closing]]) -> tuple[list[FullRank], list[Closing], list[Followed]]:
    """The modes, best first: of closings that met, the one with the higher evidence; those too light to matter go."""
    kept: list[tuple[FullRank, Closing]] = []
    followed = []
    for q, ended in sorted(found, key=lambda pair: -pair[1].log_evidence):
        mode = next((i for i, (other, _) in enumerate(kept) if _distance(q, other) < SAME_MODE), -1)
        if mode < 0 and not (kept and ended.log_evidence < kept[0][1].log_evidence - LIGHT):
            mode = len(kept)
            kept.append((q, ended))
        followed.append(Followed(q.theta_mean.clone(), ended.log_evidence, ended.converged, mode))
    return [q for q, _ in kept], [ended for _, ended in kept], followed


def _distance(q: FullRank, other: FullRank) -> float:
    difference = q.theta_mean - other.theta_mean
    covariance = q.theta_moments()[1] + other.theta_moments()[1]
    return float((difference @ torch.linalg.solve(covariance / 2, difference)).sqrt())


def moved(tree: Any, device: torch.device) -> Any:
    """A tree with its tensors on a device; Adam's own state goes where its parameters are, but for its counters."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: value if key == "adam" else moved(value, device) for key, value in tree.items()}
    return [moved(value, device) for value in tree] if isinstance(tree, list | tuple) else tree
