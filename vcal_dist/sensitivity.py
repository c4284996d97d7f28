"""Which inputs the output depends on: Sobol indices of the emulator's mean.

    first order   Var(E[z | u_j]) / Var(z)             what u_j does by itself
    total         E[Var(z | all but u_j)] / Var(z)     what it does by itself and with others

over inputs u = (x, t) that are independent: x uniform over its bounds, t from its prior, cut to the bounds. Estimators
and bootstrap intervals are SALib's (Saltelli et al. 2010).
"""

from __future__ import annotations

from typing import Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from storage.problem import Problem
from vcal_dist.answers import Answers, Array, to_numpy
from vcal_dist.errors import ModelError
from vcal_dist.priors import ThetaPrior

BASE = 1024  # points; the emulator is asked at (d1 + d2 + 2) times as many
DRAWS = 64  # of the emulator, where its mean is not closed form
BLOCK = 8192
# Means of all outputs, by base and seed: who asks for one output asks for the others next.
_EMULATED: WeakKeyDictionary[Answers, dict[tuple[int, int], Array]] = WeakKeyDictionary()


class Index(NamedTuple):
    """The indices of one input; errors are half the width of their 95 % intervals."""

    name: str
    kind: Literal["x", "t"]
    first: float
    first_error: float
    total: float
    total_error: float


def sobol_indices(posterior: Answers, output: str | None = None, *, base: int = BASE, seed: int = 0) -> list[Index]:
    """Of every control and calibration input, in their order; all zero where the output is constant."""
    from SALib.analyze import sobol as analysis
    from SALib.sample import sobol as sampling

    problem = posterior.problem
    names = [variable.name for variable in problem.outputs]
    if output is not None and output not in names:
        raise ModelError(f"unknown output '{output}'; accepted: {', '.join(names)}")
    if base < 2 or base & (base - 1):
        raise ModelError(f"base is {base}; accepted: powers of two, which Sobol points need to be even")
    inputs = (*problem.control_inputs, *problem.calibration_inputs)
    cube = {"num_vars": len(inputs), "names": [f"u{j}" for j in range(len(inputs))], "bounds": [[0, 1]] * len(inputs)}
    known = _EMULATED.setdefault(posterior, {})
    if (base, seed) not in known:
        points: Array = sampling.sample(cube, base, calc_second_order=False, seed=seed)
        known[base, seed] = _emulated(posterior, _in_units(problem, points))
    z = known[base, seed][:, 0 if output is None else names.index(output)]
    found = {key: np.zeros(len(inputs)) for key in ("S1", "S1_conf", "ST", "ST_conf")}
    if np.ptp(z) > 1e-12 * np.abs(z).max():
        # SALib takes a seed of zero for none.
        found = analysis.analyze(cube, z, calc_second_order=False, seed=seed + 1)
    controls = len(problem.control_inputs)
    return [
        Index(
            v.name, "x" if j < controls else "t", *(float(found[key][j]) for key in ("S1", "S1_conf", "ST", "ST_conf"))
        )
        for j, v in enumerate(inputs)
    ]


def _in_units(problem: Problem, points: Array) -> Array:
    """x and t from points of the unit cube."""
    controls = len(problem.control_inputs)
    low, high = np.array([v.bounds for v in problem.control_inputs]).T
    x = low + points[:, :controls] * (high - low)
    prior = ThetaPrior.from_problem(problem)
    bounds, support = np.array(prior.bounds), np.array(prior.support)
    ends = np.clip(bounds, support[:, :1], support[:, 1:])  # (d2, 2)
    shares = torch.special.ndtr(prior.tilde(torch.from_numpy(ends.T.copy()))).numpy()  # (2, d2)
    p = shares[0] + points[:, controls:] * (shares[1] - shares[0])
    tilde = torch.special.ndtri(torch.from_numpy(p).clamp(1e-15, 1 - 1e-15))
    return np.concatenate([x, np.clip(to_numpy(prior.theta(tilde)), *ends.T)], 1)


def _emulated(posterior: Answers, inputs: Array) -> Array:
    """The mean of η, of every output, (N, K)."""
    controls = len(posterior.problem.control_inputs)
    blocks = (inputs[start : start + BLOCK] for start in range(0, len(inputs), BLOCK))
    parts = ({"x": block[:, :controls], "t": block[:, controls:]} for block in blocks)
    found = posterior.predict_batches(parts, "emulator_without_residual", draws=DRAWS)
    return np.concatenate([part.mean for part in found])
