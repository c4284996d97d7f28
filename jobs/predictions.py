"""Predictions as columns, block by block: inputs, and for each output mean, sd, 5 % and 95 % quantiles and samples.

Quantiles come from mean and sd where the prediction is a normal distribution. Elsewhere (θ is uncertain and η not
linear in it, a mixture, hidden layers, transforms, counts) they are those of QUANTILE_SAMPLES samples, whose standard
error is about 0.07 standard deviations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import tee
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from jobs.prediction_inputs import Rows
from vcal_dist.answers import Answers, Predicted
from vcal_dist.likelihoods import Gaussian
from vcal_dist.posterior import Posterior
from vcal_dist.prediction_kinds import AT_T, What
from vcal_dist.predictive import is_affine

if TYPE_CHECKING:
    from storage.problem import Problem, Variable

Array = NDArray[np.float64]
QUANTILES = {"q05": 0.05, "q95": 0.95}
NORMAL = {"q05": -1.6448536269514722, "q95": 1.6448536269514722}
QUANTILE_SAMPLES = 1000
NUMBERS = 2**22  # in the samples of a block: 32 MB
MOST_ROWS = 2**14  # of a block
MEANING = {"mean": "mean", "sd": "standard deviation", "q05": "5 % quantile", "q95": "95 % quantile"}


@dataclass(frozen=True)
class Asked:
    """What to predict."""

    what: What = "process"
    samples: int = 0  # to give back
    seed: int = 0
    extrapolate: bool = False
    t: Mapping[str, float] | None = None  # the same calibration inputs for all rows


@dataclass(frozen=True)
class Field:
    """A column of the result; with `samples`, so many columns side by side."""

    name: str
    unit: str
    meaning: str
    samples: int | None = None


def named(what: What) -> str:
    """A kind in words.

    >>> named("process_without_residual")
    'process without residual'
    """
    return what.replace("_", " ")


def fields(problem: Problem, rows: Rows, asked: Asked) -> list[Field]:
    """The columns of the result in their order."""
    at: list[Variable] = [*problem.control_inputs]
    if asked.t is not None or "t" in rows.columns:
        at += problem.calibration_inputs
    found = [Field(v.name, v.unit, v.description) for v in at]
    for output in problem.outputs:
        of = f"of the {named(asked.what)}"
        found += [Field(f"{output.name}_{key}", output.unit, f"{text} {of}") for key, text in MEANING.items()]
        if asked.samples:
            found.append(Field(f"{output.name}_sample", output.unit, f"samples {of}", asked.samples))
    return found


def is_normal(posterior: Answers, rows: Rows, asked: Asked) -> bool:
    """Whether the prediction at a point is a normal distribution.

    Weights are jointly normal with θ̃ in each component, so what is linear in them and does not depend on θ is normal,
    with a Gaussian residual too.
    An average of several posteriors is not.
    """
    if not isinstance(posterior, Posterior):
        return False
    model, outputs = posterior.model, posterior.scaling.outputs
    plain = all(is_affine(likelihood, outputs) for likelihood in (model.likelihood_y, model.likelihood_z))
    if not plain or len(posterior.components) > 1:
        return False
    if asked.what in AT_T:
        if asked.what == "emulator" and not isinstance(model.likelihood_z, Gaussian):
            return False
        return (asked.t is not None or "t" in rows.columns) and not model.eta.random
    additive = model.kind == "additive" and not model.settings.free_kappa
    return asked.what == "discrepancy" and additive and model.delta is not None and not model.delta.random


def drawn(posterior: Answers, rows: Rows, asked: Asked) -> int:
    """How many samples are drawn."""
    return asked.samples if is_normal(posterior, rows, asked) else max(asked.samples, QUANTILE_SAMPLES)


def block_rows(posterior: Answers, rows: Rows, asked: Asked) -> int:
    """How many rows are predicted at a time: what is in memory does not grow with their number."""
    return max(1, min(MOST_ROWS, NUMBERS // (max(1, drawn(posterior, rows, asked)) * len(posterior.problem.outputs))))


def predicted(posterior: Answers, rows: Rows, asked: Asked, size: int) -> Iterator[list[Array]]:
    """Blocks of `size` rows: for each of `fields` an array (B,), or for samples (B, samples)."""
    normal = is_normal(posterior, rows, asked)
    names = [v.name for v in posterior.problem.calibration_inputs]
    fixed = None if asked.t is None else np.array([asked.t[name] for name in names])
    mine, theirs = tee({**block, **({} if fixed is None else {"t": fixed})} for block in rows.blocks(size))
    count = drawn(posterior, rows, asked)
    found = posterior.predict_batches(theirs, asked.what, samples=count, seed=asked.seed, extrapolate=asked.extrapolate)
    for block, prediction in zip(mine, found, strict=True):
        inputs = [block["x"]]
        if "t" in block:
            inputs.append(np.broadcast_to(block["t"], (len(block["x"]), len(names))))
        columns = [*np.concatenate(inputs, axis=1).T]
        for k in range(len(posterior.problem.outputs)):
            columns += _of_output(prediction, k, normal, asked.samples)
        yield columns


def _of_output(prediction: Predicted, k: int, normal: bool, samples: int) -> list[Array]:
    mean, sd = prediction.mean[:, k], prediction.sd[:, k]
    drawn = None if prediction.samples is None else prediction.samples[:, :, k]  # (S, B)
    if normal:
        quantiles = [mean + z * sd for z in NORMAL.values()]
    else:
        assert drawn is not None
        # Values that were drawn, not between them: counts stay counts, and infinite ones do no harm.
        quantiles = [*np.quantile(drawn, list(QUANTILES.values()), axis=0, method="inverted_cdf")]
    found = [mean, sd, *quantiles]
    return [*found, drawn[:samples].T] if samples and drawn is not None else found
