"""The last phase: q(θ̃) as a mixture that follows the exact posterior of θ̃, all weights integrated out.

A joint Gaussian has weights that are linear in θ̃ with one covariance everywhere; where θ̃ is uncertain and η curved,
that makes its θ̃ too narrow, and no Gaussian is skewed or ends at a bound. Importance sampling (`vcal_dist.mixture`)
sees the posterior as it is. Its points are

- of θ̃ and nature's hyperparameters ζ together where the rows are few (`vcal_dist.exact_refinement`),
- of θ̃, δ's amplitude and σ_y where rows are many (`vcal_dist.streamed_refinement`).
"""

from __future__ import annotations

from vcal_dist.densities import is_conjugate
from vcal_dist.exact_refinement import refine_exactly
from vcal_dist.nature import AMPLITUDE, KINDS, NOISE, Nature
from vcal_dist.passes import HIDDEN_SAMPLES
from vcal_dist.phases import Instant, Phase
from vcal_dist.streamed_refinement import Refining, compresses
from vcal_dist.work import Work

ROWS_EXACT = 2_000_000  # over all points, and samples of hidden layers, that have a Gram matrix each
PATIENT = 20  # times as many where time does not matter
ROWS_FROZEN = 25_000_000  # over all points that share one, where the rows do not compress


def refinement(work: Work) -> Phase:
    """The phase, in the way that the rows allow."""
    evaluations, nature = exact_points(work)
    if evaluations and work.complete:
        return Instant("refinement", lambda: refine_exactly(work, nature, evaluations))
    many = streamed_points(work)
    if many:
        return Refining(work, many, scaling_nature(work))

    def leave() -> None:
        work.found.unrefined = why_not(work)

    return Instant("refinement", leave)


def needed(dim: int) -> int:
    """Points that a posterior of so many dimensions takes."""
    return 32 * (dim + 1)


def exact_points(work: Work) -> tuple[int, Nature | None]:
    """How many points have a Gram matrix of their own, and what of nature they move; none where rows are too many."""
    if impossible(work):
        return 0, None
    model, samples = work.model, HIDDEN_SAMPLES if work.model.random else 1
    count = _at_most(work, (PATIENT if work.patient else 1) * ROWS_EXACT // samples)
    whole = Nature(model, () if model.random else KINDS)
    nature = _as_much_as(work, count, KINDS, (AMPLITUDE, NOISE), (AMPLITUDE,)) if whole.dim else whole
    if nature.dim < whole.dim and (streamed_points(work) > count or not work.complete):  # more points in less time
        return 0, None
    return (count, nature if nature.dim else None) if count >= needed(model.prior.dim) else (0, None)


def _as_much_as(work: Work, points: int, *choices: tuple[str, ...]) -> Nature:
    """The first choice of nature's hyperparameters for which there are points enough; or none of them."""
    for kinds in choices:
        nature = Nature(work.model, kinds)
        if nature.dim and points >= needed(work.model.prior.dim + nature.dim):
            return nature
    return Nature(work.model, ())


def streamed_points(work: Work) -> int:
    """How many points follow from few passes over the rows; none where even these would be too few."""
    if impossible(work) or work.model.random:
        return 0
    free = work.patient or compresses(work)  # of the rows
    count = work.settings.evaluations if free else _at_most(work, ROWS_FROZEN)
    return count if count >= needed(work.model.prior.dim) else 0


def _at_most(work: Work, rows: int) -> int:
    """Points that were asked for, or that so many rows over all points allow."""
    return min(work.settings.evaluations, rows // max(work.totals.observations, 1))


def impossible(work: Work) -> str:
    """What about the model or the settings keeps a mixture from following the exact posterior, if anything does."""
    model, settings, least = work.model, work.settings, needed(work.model.prior.dim)
    if settings.weights != "collapsed":
        return f"weights are '{settings.weights}'"
    if model.kind == "general":
        return "under a general discrepancy the weights do not integrate out"
    if not is_conjugate(model):
        return "where the noise is not Gaussian the weights do not integrate out"
    if settings.evaluations < least:
        return f"fit.evaluations is {settings.evaluations}, and {least} are needed"
    return ""


def why_not(work: Work) -> str:
    """Why no mixture follows the exact posterior."""
    return impossible(work) or f"{work.totals.observations:,} observations would make that slow"


def scaling_nature(work: Work) -> Nature:
    """What of ζ only scales sums over rows."""
    own = work.model.varying is not None or (work.observations is not None and work.observations.noise is not None)
    both = () if own else ((AMPLITUDE, NOISE),)
    return _as_much_as(work, streamed_points(work), *both, (AMPLITUDE,))
