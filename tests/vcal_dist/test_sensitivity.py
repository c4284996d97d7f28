"""Sobol indices of emulators whose indices are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from storage.problem import Problem, parse_problem
from vcal_dist.answers import Answers, Asked, Block, Predicted
from vcal_dist.errors import ModelError
from vcal_dist.priors import ThetaPrior
from vcal_dist.sensitivity import sobol_indices
from vcal_dist.theta import ThetaPosterior

Array = NDArray[np.float64]


class Known(Answers):
    """A posterior whose emulator's mean is a given function of x and t."""

    def __init__(self, problem: Problem, mean: Callable[[Array, Array], Array]) -> None:
        self.problem, self.record, self.mean = problem, {}, mean

    @property
    def theta(self) -> ThetaPosterior:
        prior = ThetaPrior.from_problem(self.problem)
        return ThetaPosterior(prior, torch.zeros(1, prior.dim), torch.eye(prior.dim)[None])

    def _predictor(self, asked: Asked) -> Callable[[Block], Predicted]:
        assert asked.what == "emulator_without_residual"

        def predicted(block: Any) -> Predicted:
            mean = self.mean(block["x"], block["t"])
            return Predicted(mean, np.zeros_like(mean), None)

        return predicted

    def _made_of(self) -> str:
        return "a function"


def problem(parameters: list[dict[str, Any]], bounds: tuple[float, float], outputs: int = 1) -> Problem:
    return parse_problem(
        {
            "name": "known",
            "control_inputs": [{"name": "x", "bounds": bounds}],
            "calibration_inputs": [{"name": f"t{j}", **given} for j, given in enumerate(parameters)],
            "outputs": [{"name": f"y{k}"} for k in range(outputs)],
        }
    )


def test_indices_of_the_ishigami_function_are_those_of_its_closed_form() -> None:
    """z = sin a + 7 sin² b + 0.1 c⁴ sin a with inputs uniform over (−π, π)."""

    def ishigami(x: Array, t: Array) -> Array:
        a, b, c = x[:, 0], t[:, 0], t[:, 1]
        z = np.sin(a) + 7 * np.sin(b) ** 2 + 0.1 * c**4 * np.sin(a)
        return np.stack([np.ones_like(z), z], 1)

    ends = (-np.pi, np.pi)
    posterior = Known(problem([{"bounds": ends}] * 2, ends, outputs=2), ishigami)
    found = sobol_indices(posterior, "y1", base=4096)
    of_a, of_b = (1 + 0.1 * np.pi**4 / 5) ** 2 / 2, 49 / 8
    of_both = 0.01 * np.pi**8 * (1 / 18 - 1 / 50)
    total = of_a + of_b + of_both
    assert [index.name for index in found] == ["x", "t0", "t1"]
    assert [index.kind for index in found] == ["x", "t", "t"]
    assert [index.first for index in found] == pytest.approx(np.array([of_a, of_b, 0]) / total, abs=0.02)
    assert [index.total for index in found] == pytest.approx(
        np.array([of_a + of_both, of_b, of_both]) / total, abs=0.02
    )
    assert all(0 < index.first_error < 0.1 for index in found)
    assert all(0 < index.total_error < 0.1 for index in found)
    assert sobol_indices(posterior, "y1", base=4096) == found  # a function of its seed


def test_parameters_vary_as_their_priors_cut_to_the_bounds() -> None:
    """Of a sum, the indices are the shares of the variances."""
    normal = {"bounds": (0.0, 2.0), "prior": {"family": "normal", "mean": 0.5, "sd": 1.0}}
    gamma = {"bounds": (-1.0, 1.5), "prior": {"family": "gamma", "shape": 2.0, "rate": 3.0}}  # no support below zero
    posterior = Known(problem([normal, gamma], (0, 1)), lambda x, t: x + t[:, :1] + 2 * t[:, 1:])
    variances = np.array([1 / 12, stats.truncnorm(-0.5, 1.5).var(), 4 * _variance(stats.gamma(2, scale=1 / 3), 1.5)])
    found = sobol_indices(posterior, base=2048)
    for of in ("first", "total"):
        assert [getattr(index, of) for index in found] == pytest.approx(variances / variances.sum(), abs=0.02)


def _variance(distribution: Any, high: float) -> float:
    """Of a distribution cut at `high`."""
    mass = distribution.cdf(high)
    first, second = (distribution.expect(lambda v, n=n: v**n, ub=high) / mass for n in (1, 2))
    return float(second - first**2)


def test_an_output_that_never_changes_depends_on_nothing() -> None:
    posterior = Known(problem([{"bounds": (0, 1)}], (0, 1)), lambda x, t: np.full((len(x), 1), 5.0))
    assert {value for index in sobol_indices(posterior, base=64) for value in index[2:]} == {0.0}


def test_a_base_that_is_no_power_of_two_is_refused() -> None:
    posterior = Known(problem([{"bounds": (0, 1)}], (0, 1)), lambda x, t: x)
    with pytest.raises(ModelError, match="base is 100; accepted: powers of two"):
        sobol_indices(posterior, base=100)
    with pytest.raises(ModelError, match="unknown output 'z'; accepted: y0"):
        sobol_indices(posterior, "z")
