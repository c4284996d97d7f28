"""The emulator of few runs: trained in folds of whole runs, stacked by what it said of runs it had not seen.

1. Members with learned frequencies, each without one fold of the runs (`members`): the steps of the stage 'emulator'.
2. Two exact Gaussian processes for each fold, and of all runs (`exact_gp`), everything learned from scratch.
3. Weights of the three, and the scale of their variance, from the held-out predictions (`stacking`).
4. η becomes the stack of them (`stacked_emulator`), and its noise what is left from row to row.

The held-out predictions are also the emulator's validation: no run had a say in what is said of it, but for the three
numbers of an output that stacking finds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vcal_dist import exact_gp
from vcal_dist.batches import Observations, Runs, take
from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.exact_gp import KINDS, Conditioned
from vcal_dist.folds import assign_folds, inseparable
from vcal_dist.initialise import spread_of
from vcal_dist.likelihoods import Gaussian
from vcal_dist.members import Members, Posterior
from vcal_dist.noise import row_normal
from vcal_dist.plan import FitSettings
from vcal_dist.stacked_emulator import MEMBERS, SEPARATE, Ensemble, StackedEmulator
from vcal_dist.stacking import Expert, Stack, stack, stacked
from vcal_dist.stages import Stage, choose
from vcal_dist.validation import Validation
from vcal_dist.work import Work

FEWEST = 4  # runs that can be held out in turn
MANY = 2000  # runs, or PER_COORDINATE for each learned coordinate of the frequencies, from which one emulator will do
PER_COORDINATE = 4
FEW = 150  # runs up to which there are more folds
FOLDS, FOLDS_OF_FEW, REPEATS = 5, 10, 2
STEPS = 400
BATCH = 6000  # rows of a step, over all members
GP_ROWS = 1000  # that a process is conditioned on
LEARNING_ROWS = 300  # that its hyperparameters come from
VALIDATED = 8192  # rows at most
ROW_KEY = 79


def is_stacked(settings: ModelSettings, fit: FitSettings, runs: int, inputs: int) -> bool:
    """Whether the emulator of so many distinct runs is stacked; `settings.emulator` decides unless it is auto."""
    if why_not(settings, fit, runs):
        return False
    coordinates = settings.eta.features.features // 2 * inputs
    return settings.emulator == "stacked" or runs <= max(MANY, PER_COORDINATE * coordinates)


def why_not(settings: ModelSettings, fit: FitSettings, runs: int) -> str:
    """What keeps the emulator from being stacked, if anything does."""
    eta = settings.eta
    for reason, applies in (
        ("model.emulator is 'features'", settings.emulator == "features"),
        (f"fit.weights is '{fit.weights}'", fit.weights != "collapsed"),
        ("fit.free_emulator is true", fit.free_emulator),
        (f"likelihood_z.kind is '{settings.likelihood_z.kind}'", settings.likelihood_z.kind != "gaussian"),
        ("the noise of the runs is given (likelihood_z.learn_noise)", not settings.likelihood_z.learn_noise),
        ("model.varying_residual is true", settings.varying_residual),
        ("η is deep (model.eta.hidden)", bool(eta.hidden)),
        ("η's kernel is known (model.eta.learn)", not eta.learn),
        (f"η's frequencies are {eta.features.frequencies}", eta.features.frequencies != "learned"),
        (f"η's kernel is {eta.features.kernel}", eta.features.kernel != "gaussian"),
        (f"there are {runs} distinct runs, and {FEWEST} are needed", runs < FEWEST),
    ):
        if applies:
            return reason
    return ""


class Folded(NamedTuple):
    """The rows, and which of them each member is trained without."""

    u: Tensor  # (B, d)
    z: Tensor  # (B, K)
    row: Tensor  # (B,)
    run: Tensor  # (B,)
    fold: Tensor  # (REPEATS, B)
    folds: int

    @property
    def counted(self) -> Tensor:
        """(m, B), the members of a repeat one after the other."""
        held = torch.arange(self.folds, device=self.fold.device)[:, None]
        return torch.cat([fold != held for fold in self.fold])


def fold_runs(runs: Runs, run: Tensor | None, controls: int, seed: int) -> Folded:
    """All rows that count, in folds of whole runs and of all their replicates if these are not too few for folds."""
    rows = (runs.weight > 0) & ~runs.z.isnan().all(-1)
    chosen = take(runs, rows)
    own = None if run is None else run[rows]
    numbers = inseparable(chosen.u[:, controls:], own)
    if int(numbers.max()) + 1 < FEWEST:  # nearly all are replicates; without numbers every row is a run
        own = torch.arange(len(numbers), device=numbers.device) if own is None else own
        numbers = torch.unique(own, return_inverse=True)[1]
    distinct = int(numbers.max()) + 1
    folds = count_folds(distinct)
    fold = assign_folds(numbers, folds, REPEATS, seed)
    return Folded(chosen.u, chosen.z, chosen.row, numbers, fold, folds)


def count_folds(runs: int) -> int:
    """Of so many distinct runs."""
    return min(FOLDS_OF_FEW if runs <= FEW else FOLDS, runs)


def batch_rows(runs: int) -> int:
    """Rows of a step, of so many distinct runs."""
    return BATCH // (REPEATS * count_folds(runs))


def make_members(model: CalibrationModel, data: Folded, seed: int) -> Members:
    """The ensemble before its first step."""
    settings = model.settings
    lengthscale = settings.eta.lengthscale
    start = spread_of(data.u) if lengthscale is None else torch.tensor(lengthscale, dtype=torch.float64)
    return Members(
        data.counted,
        model.outputs,
        settings.eta.features,
        start.expand(data.u.shape[1]).to(data.u.device),
        noise=settings.likelihood_z.noise,
        seed=seed + settings.seed,
        dtype=model.dtype,
    )


def members_loss(members: Members, data: Folded, seed: int, step: int) -> Tensor:
    """The mean over members of −(log evidence + log p(Ω)) for each row; of a part of the rows where they are many."""
    rows, batch = len(data.u), BATCH // len(members.omega)
    chosen: Tensor | slice = slice(None)
    if rows > batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = torch.randperm(rows, generator=generator)[:batch].to(data.u.device)
    evidence = members.log_evidence(data.u[chosen], data.z[chosen], members.counted[:, chosen])
    known = members.counted.sum(-1) * data.z.shape[1]
    return -(evidence + members.log_prior() / known).mean()


def members_stage(work: Work, members: Members, data: Folded) -> Stage:
    """The ensemble, by Adam on the sum of its evidences; rows are those in memory."""
    asked = work.settings.emulator
    chosen = choose(work.model, work.totals, work.settings, "emulator", runs=True, observations=False)
    steps = STEPS if asked.steps is None and asked.epochs is None else chosen.steps

    def loss(_: Runs | None, __: Observations | None, step: int) -> Tensor:
        return members_loss(members, data, work.seed, step)

    groups = [{"params": list(members.parameters()), "lr": chosen.rate}]
    return Stage("emulator", steps, groups, loss, learned=members)


def held_out_log_density(validation: Validation, runs: Runs | None) -> float:
    """The log density of all known values that were held out, in the user's units."""
    assert runs is not None
    at = torch.isin(runs.row, validation.row)
    z, jacobian = runs.z[at], runs.log_jacobian[at]
    density = torch.distributions.Normal(validation.mean, validation.sd).log_prob(torch.nan_to_num(z)) + jacobian
    return float(density[~z.isnan()].sum())


@torch.no_grad()
def finish(model: CalibrationModel, members: Members, data: Folded, seed: int) -> Validation:
    """Stacks the experts, makes them the model's η, and says how they predicted the runs they had not seen."""
    given = members.posterior(data.u, data.z)
    chosen = spread_rows(data.run, data.row, VALIDATED)  # all rows if they are few
    experts, kept = [], []
    filled = torch.where(data.z.isnan(), members.predict(data.u, given.mean).mean(0), data.z)
    for kind in KINDS:
        expert, process = _process(kind, data, filled, chosen)
        experts.append(expert)
        kept.append(process)
    experts.append(_ensemble(members, given, data, chosen))
    shapes = [True, True, model.outputs <= SEPARATE]
    z = data.z[chosen]
    found = stack(z, experts, shapes, int(data.run.max()) + 1)
    predicted = stacked(found, experts, shapes)
    scale = members.log_amplitude.exp() * math.sqrt(2 / members.features)
    amplitude, generator = scale.double()[:, None, None], torch.Generator().manual_seed(seed)
    ensemble = Ensemble(
        members.stretched().double(),
        given.mean * amplitude,
        given.draw(generator) * amplitude,
        members.noise_variance(),
    )
    paths = [exact_gp.paths(process, seed) for process in kept]
    model.eta = StackedEmulator.build(ensemble, kept, paths, found, model.dtype).to(model.kappa.device)
    _set_noise(model, _white(found, ensemble, kept, shapes))
    return Validation(data.row[chosen], predicted.mean, predicted.var.sqrt())


def spread_rows(run: Tensor, row: Tensor, most: int) -> Tensor:
    """At most so many rows, as many of every run as of the others; their places, sorted."""
    if len(run) <= most:
        return torch.arange(len(run), device=run.device)
    return spread_order(run, row)[:most].sort().values


def spread_order(run: Tensor, row: Tensor) -> Tensor:
    """All rows in random order, the first one of every run, then the second of every run, and so on."""
    order = row_normal((ROW_KEY,), row, 1, dtype=torch.float64)[:, 0].argsort()
    by_run = order[run[order].argsort(stable=True)]
    sizes = torch.bincount(run)
    first = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    rank = torch.empty_like(run)
    rank[by_run] = torch.arange(len(run), device=run.device) - first
    return order[rank[order].argsort(stable=True)]


def _process(kind: exact_gp.Kind, data: Folded, z: Tensor, chosen: Tensor) -> tuple[Expert, Conditioned]:
    """Held-out predictions of a Gaussian process at the chosen rows, and the process of all runs."""
    rows = spread_order(data.run, data.row)[:GP_ROWS]
    held = torch.arange(data.folds, device=data.fold.device)[:, None]
    counted = torch.cat([torch.ones_like(data.fold[:1], dtype=torch.bool), data.fold[0] != held])  # (1 + folds, B)
    some = rows[:LEARNING_ROWS]
    h = exact_gp.learn(kind, data.u[some].double(), z[some], counted[:, some])
    u = data.u[chosen].double()
    mean, var = torch.zeros_like(data.z[chosen]), torch.zeros(len(chosen), dtype=torch.float64, device=u.device)
    for fold in range(data.folds):
        own = exact_gp.condition(kind, h.take(1 + fold), data.u[rows].double(), z[rows], counted[1 + fold, rows][None])
        at = (data.fold[0, chosen] == fold).nonzero()[:, 0]
        for part in at.split(2048):
            its_mean, its_var = own.moments(u[part])
            mean[part], var[part] = its_mean[0], its_var[0] + own.hyperparameters.noise_variance()[0]
    whole = exact_gp.condition(kind, h.take(0), data.u[rows].double(), z[rows], counted[:1, rows])
    return Expert(mean, var.unsqueeze(-1).expand_as(mean)), whole


def _ensemble(members: Members, given: Posterior, data: Folded, chosen: Tensor) -> Expert:
    """The mean of the members that have not seen a row, and their spread beside what each does not know itself."""
    each, own = members.predict(data.u[chosen], given.mean), members.variance(data.u[chosen], given)  # (m, B, K)
    places = data.fold[:, chosen] + data.folds * torch.arange(REPEATS, device=data.fold.device)[:, None]  # (REPEATS, B)
    unseen = each[places, torch.arange(len(chosen), device=each.device)]  # (REPEATS, B, K)
    own = own[places, torch.arange(len(chosen), device=each.device)]
    return Expert(unseen.mean(0), unseen.var(0) + (own + members.noise_variance()[places]).mean(0))


def _white(found: Stack, ensemble: Ensemble, processes: list[Conditioned], shapes: list[bool]) -> Tensor:
    """The part of the variance that is noise from row to row, (K,)."""
    own = [process.hyperparameters.noise_variance()[0] for process in processes]
    a = found.weights * torch.tensor(shapes, device=found.weights.device).unsqueeze(-1)
    a = a / a.sum(0)
    of_processes = torch.stack(own) @ a[:MEMBERS]
    return found.scale * (of_processes + a[MEMBERS] * ensemble.noise.mean(0))


def _set_noise(model: CalibrationModel, variance: Tensor) -> None:
    likelihood = model.likelihood_z
    assert isinstance(likelihood, Gaussian)
    above = (variance - likelihood.floor**2).clamp_min(1e-16)
    likelihood.raw_noise.copy_(0.5 * above.log().to(likelihood.raw_noise))
