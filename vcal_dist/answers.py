"""What one asks of a posterior, whatever it is made of: θ in the user's units, and predictions at control inputs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from storage.problem import Problem
from vcal_dist.errors import ModelError
from vcal_dist.prediction_kinds import AT_T, KINDS, What
from vcal_dist.theta import ThetaPosterior

Array = NDArray[np.float64]
Block = ArrayLike | Mapping[str, ArrayLike]
CORRELATION_DRAWS = 2**17  # a standard error of 0.003


@dataclass(frozen=True)
class ParameterSummary:
    """One θ in the user's units; low and high have equal tails outside."""

    name: str
    unit: str
    prior: str
    mean: float
    sd: float
    low: float
    median: float
    high: float


class Predicted(NamedTuple):
    """A prediction in the user's units for B rows and K outputs."""

    mean: Array  # (B, K)
    sd: Array  # (B, K)
    samples: Array | None  # (samples, B, K), each a function of x, with residual and noise of its own in every row


class Asked(NamedTuple):
    """What to predict of any block of rows."""

    what: What
    samples: int
    draws: int | None
    seed: int  # of mean and sd
    sample_seed: int
    extrapolate: bool


class Answers(ABC):
    """A posterior of a problem's θ and process. `record` says how it was found."""

    problem: Problem
    record: dict[str, Any]

    @property
    @abstractmethod
    def theta(self) -> ThetaPosterior:
        """The posterior of θ: densities, quantiles, intervals."""

    @abstractmethod
    def _predictor(self, asked: Asked) -> Callable[[Block], Predicted]:
        """A function from a block to its prediction: what is random about functions of x is drawn once, here."""

    @abstractmethod
    def _made_of(self) -> str:
        """A few words."""

    # --- θ ----------------------------------------------------------------------------------------------------------

    def sample(self, count: int, seed: int = 0) -> Array:
        """Draws of θ, (count, d2)."""
        generator = torch.Generator(self.theta.means.device).manual_seed(seed)
        return to_numpy(self.theta.sample(count, generator))

    def summary(self, level: float = 0.9) -> list[ParameterSummary]:
        """Every parameter's moments, median and interval of probability `level`."""
        theta, inputs = self.theta, self.problem.calibration_inputs
        half = theta.means.new_tensor([0.5])
        return [
            ParameterSummary(v.name, v.unit, str(v.prior), mean, sd, low, float(theta.quantile(j, half)), high)
            for j, (v, mean, sd) in enumerate(zip(inputs, theta.mean().tolist(), theta.sd().tolist(), strict=True))
            for low, high in [theta.interval(j, level)]
        ]

    def correlation(self) -> Array:
        """Correlations of θ itself, (d2, d2), from draws. (`theta.correlation()` is that of θ̃.)"""
        found: Array = np.atleast_2d(np.corrcoef(self.sample(CORRELATION_DRAWS), rowvar=False))
        return found

    def __repr__(self) -> str:
        rows = [
            (s.name, f"{s.mean:.4g}", f"± {s.sd:.2g}", f"[{s.low:.4g}, {s.high:.4g}]", s.unit, f"prior {s.prior}")
            for s in self.summary()
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        head = f"<posterior of '{self.problem.name}': {self._made_of()}, 90 % intervals"
        return "\n  ".join([head, *lines]) + ">"

    # --- predictions ------------------------------------------------------------------------------------------------

    def predict(
        self,
        x: ArrayLike,
        what: What = "process",
        *,
        t: ArrayLike | None = None,
        noise: ArrayLike | None = None,
        samples: int = 0,
        draws: int | None = None,
        seed: int = 0,
        extrapolate: bool = False,
    ) -> Predicted:
        """Mean, standard deviation and, on request, samples at control inputs x (B, d1), or (B,) where d1 is 1.

        - "process": the real process f(x, θ), with the emulator's residual (κ²σ_z², if `model.emulator_residual`);
        - "emulator": the simulator's output at x and θ, or at calibration inputs `t`, (d2,) or (B, d2): η with its
          residual, the noise of `likelihood_z` or s² where it varies (`model.varying_residual`);
        - "discrepancy": f − η, in which the residual cancels;
        - "observation": a new y, the process with noise, that of the model and the observation's own standard deviation
          `noise` (B, K). (Under a transform, that is added to y, not to T(y).)
        - "process_without_residual", "emulator_without_residual": f and η alone, smooth functions of x.

        All are in the user's units, T⁻¹(f) under a transform T of the outputs. Of counts and classes, process and
        emulator are the mean of y and of z. The process has a residual where the noise of runs is Gaussian; the
        emulator's may be a Student-t as well. A sample is one function of x, with a residual and noise of its own in
        every row. Without transforms, counts or classes, mean and sd are those of `draws` (64) conditional Gaussians,
        else of `draws` (256) samples. x and t outside the problem's bounds are refused unless `extrapolate`.
        """
        if t is not None and what not in AT_T:
            raise ModelError(f"t is given for '{what}'; only the emulator is predicted at chosen calibration inputs")
        if noise is not None and what != "observation":
            raise ModelError(f"noise is given for '{what}'; only an observation has noise")
        block: dict[str, ArrayLike] = {"x": x}
        block |= {name: value for name, value in (("t", t), ("noise", noise)) if value is not None}
        options: dict[str, Any] = {"samples": samples, "draws": draws, "seed": seed, "extrapolate": extrapolate}
        return next(self.predict_batches([block], what, **options))

    def predict_batches(
        self,
        blocks: Iterable[Block],
        what: What = "process",
        *,
        samples: int = 0,
        draws: int | None = None,
        seed: int = 0,
        extrapolate: bool = False,
    ) -> Iterator[Predicted]:
        """Predictions of one block of rows after another: what is in memory does not grow with their number.

        A block is x, or a mapping such as `Table.read_block` of a store gives: its "x", its "t" for the emulator and
        its "noise" for observations, if it has them, are used. A sample is the same function in all blocks; residual
        and noise are drawn row by row.
        """
        if what not in KINDS:
            raise ModelError(f"what is '{what}'; accepted: {', '.join(KINDS)}")
        if samples < 0:
            raise ModelError(f"samples is {samples}; accepted: 0 or more")
        return map(self._predictor(Asked(what, samples, draws, seed, seed, extrapolate)), blocks)


def to_numpy(tensor: Tensor) -> Array:
    """In float64, on the host."""
    values: Array = tensor.detach().double().cpu().numpy()
    return values
