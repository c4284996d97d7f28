"""Checks of the emulator: its error beside the noise of one observation, and beside what all of them tell."""

from __future__ import annotations

import math

import numpy as np
import torch

from vcal_dist.answers import to_numpy
from vcal_dist.report.check import Check
from vcal_dist.report.content import Status
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.row_checks import method_of
from vcal_dist.report.words import figure, plural, with_unit

SMALL_RATIO, LARGE_RATIO = 0.3, 1.0  # emulator's error over noise: 0.3 widens what noise leaves by 4 %, 1 by 41 %
SHIFT = (0.5, 2.0)  # in sds of θ: shifted by so much, an interval of 90 % holds the truth in 86 %, in 36 % of cases
ERROR_THRESHOLD = (
    f"{SMALL_RATIO:g} × noise (care) and {LARGE_RATIO:g} × noise (bad): added to the noise, such an error widens what "
    "can be known of θ by 4 % and by 41 %"
)
SHIFT_THRESHOLD = (
    f"{SHIFT[0]:g} standard deviations of θ (care) and {SHIFT[1]:g} (bad): shifted by so much, a 90 % interval holds "
    "the truth in 86 % and in 36 % of cases"
)


def emulator_error(gathered: Gathered) -> list[Check]:
    """Is the emulator good enough for these observations? Its error, beside the noise, must be small."""
    found = []
    for name, error, noise in emulator_and_noise(gathered):
        ratio = error / noise if noise > 0 else math.inf
        status: Status = "good" if ratio <= SMALL_RATIO else "care" if ratio <= LARGE_RATIO else "bad"
        found.append((ratio, status, name, error, noise))
    if not found:
        return []
    ratio, status, name, error, noise = max(found)
    counted = is_stacked(gathered) and status == "bad"  # intervals of θ contain this error
    status = "care" if counted else status
    several = len(found) > 1
    about = f"For '{name}', the worst of {len(found)} outputs, the" if several else "The"
    what = {
        "good": "small beside the noise: a better emulator would hardly change θ.",
        "care": "not small beside the noise: it widens what can be known of θ.",
        "bad": "larger than the noise: it limits what can be known of θ.",
    }[status]
    if counted:
        what = "larger than the noise: it limits what can be known of θ, whose intervals contain it."
    unit = next(output.unit for output in gathered.posterior.problem.outputs if output.name == name)
    transform = transform_of(gathered, name)
    scale = f", on the scale of its transform ({transform})" if transform != "none" else ""
    shown = [with_unit(figure(value), "" if scale else unit) for value in (error, noise)]
    unseen = "runs that are left out" if method_of(gathered, "runs") == "leave one out" else "unseen runs"
    sentence = (
        f"{about} emulator misses {unseen} by {shown[0]} (root mean square{scale}); an observation's noise is "
        f"{shown[1]}. That is {what}"
    )
    advice = (
        "Give the emulator more features (model.eta.features.features) or steps, a transform of a skewed output, "
        "hidden layers for sharp features, or more runs where the errors are largest."
    )
    if is_stacked(gathered):
        advice = "Add runs where the errors are largest, or transform a skewed output."
    advice = "" if status == "good" else advice
    numbers = {name: ratio for ratio, _, name, *_ in found}
    value = f"{figure(ratio, 2)} × noise"
    return [Check("Emulator's error", status, value, sentence, advice, ratio, ERROR_THRESHOLD, numbers)]


def emulator_error_in_theta(gathered: Gathered) -> list[Check]:
    """Is the emulator good enough for so many observations? Noise averages out over them, its error does not.

    θ is told by one direction of the n outputs: that in which it moves them and the discrepancy does not. What is known
    along it, up to the noise s, gives θ's standard deviation. The emulator's error e is a vector of length e·√n. Spread
    evenly over the M directions of η's features (over n, if these are fewer), it has e·√(n/M) along any one of them,
    and so it typically moves θ by

        r = e·√(n/M) / s

    standard deviations; by √M·r, were it all along θ's direction. s is the noise that the posterior reckons with: σ_y,
    the observations' own, and the emulator's residual.
    """
    model = gathered.member.model
    if is_stacked(gathered):  # its error is a function of (x, t) in the model, and θ as uncertain as that makes it
        return []
    found = []
    for name, error, noise in emulator_and_noise(gathered):
        n, whole = learned_from(gathered, name), math.hypot(noise, residual_of(gathered, name))
        if n:
            directions = min(model.eta.width, n)
            found.append((error * math.sqrt(n / directions) / whole if whole > 0 else math.inf, name, n))
    if not found:
        return []
    shift, name, n = max(found)
    status: Status = "good" if shift <= SHIFT[0] else "care" if shift <= SHIFT[1] else "bad"
    counted = plural(n, "observation")
    if len(found) > 1:
        counted = f"{plural(n, 'value')} of '{name}', the worst of {len(found)} outputs,"
    what = {
        "good": "little",
        "care": "not little: intervals of θ may be off by so much",
        "bad": "too much: intervals of θ are off, or wide from a discrepancy that follows the emulator's error",
    }[status]
    sentence = (
        f"The emulator's error does not average out over observations, as noise does: it typically moves θ by "
        f"{figure(shift, 2)} of the standard deviations to which {counted} could tell it. That is {what}."
    )
    features = model.settings.eta.features.features
    advice = (
        ""
        if status == "good"
        else f"Raise model.eta.features.features from {features} to {2 * features}, and once more until this falls. If "
        "the error stays, train longer (fit.emulator.steps), add runs, or hidden layers for sharp features."
    )
    numbers = {name: shift for shift, name, _ in found}
    value = f"{figure(shift, 2)} sd"
    return [Check("Emulator's error in θ", status, value, sentence, advice, shift, SHIFT_THRESHOLD, numbers)]


def is_stacked(gathered: Gathered) -> bool:
    """Whether the emulator is one of few runs."""
    return gathered.member.validation is not None


def learned_from(gathered: Gathered, output: str) -> int:
    """Known values of an output among the observations that training has learnt from; 0 where nobody knows."""
    sample = gathered.observations
    if sample is None:
        return int((gathered.record.get("rows") or {}).get("observations", 0))
    rows = sample.table - (sample.among if sample.judged.method == "held out" else 0)
    k = gathered.member.scaling.outputs.names.index(output)
    return round(rows * float((~np.isnan(sample.judged.y[:, k])).mean()))


def residual_of(gathered: Gathered, output: str) -> float:
    """The emulator's residual that the model adds to the noise of an output, on the scale of its transform.

    The root mean square over observations, or over runs where there are none at hand.
    """
    sample = gathered.observations or gathered.runs
    if sample is None:
        return 0.0
    k = gathered.member.scaling.outputs.names.index(output)
    return math.sqrt(float(np.square(gathered.member.residual(sample.judged.x)[:, k]).mean()))


def emulator_and_noise(gathered: Gathered) -> list[tuple[str, float, float]]:
    """For every output its name, the emulator's root mean square error at unseen runs, and the noise of y beside it.

    The noise is σ_y with the middle one of the observations' own. Both are on the scale of the output's transform,
    where σ_y is the same everywhere. Counts and classes have no σ_y, and runs that are counts scatter themselves:
    nothing is said of them.
    """
    runs, field, member = gathered.runs, gathered.observations, gathered.member
    if runs is None or member.model.likelihood_z.kind not in ("gaussian", "student_t"):
        return []
    outputs = member.scaling.outputs
    mean, z = (outputs(torch.from_numpy(part), check=False) for part in (runs.judged.mean, runs.judged.y))
    errors = to_numpy((mean - z) * outputs.sd)
    found = []
    for k, (name, noise) in enumerate(member.noise.items()):
        known = errors[np.isfinite(errors[:, k]), k]
        if not len(known):
            continue
        if field is not None and field.noise is not None:
            slope = outputs.transforms[k].log_slope(torch.from_numpy(field.judged.y[:, k])).exp().numpy()  # dT/dy
            own = field.noise[:, k] * slope
            own = own[np.isfinite(own)]
            noise = math.hypot(noise, float(np.median(own)) if len(own) else 0.0)
        found.append((name, math.sqrt(float(np.square(known).mean())), noise))
    return found


def transform_of(gathered: Gathered, output: str) -> str:
    """The kind of an output's transform."""
    outputs = gathered.member.scaling.outputs
    return outputs.transforms[outputs.names.index(output)].kind
