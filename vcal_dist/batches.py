"""Batches as the model sees them: inputs in the unit cube, outputs transformed and standardised."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from storage.problem import Problem
from vcal_dist.errors import ModelError
from vcal_dist.transforms import OutputScaling


class Runs(NamedTuple):
    """Rows of simulator runs. A row of weight zero only fills a batch up."""

    u: Tensor  # (B, d1 + d2) the control inputs x*, then the calibration inputs t
    z: Tensor  # (B, K) NaN where missing
    log_jacobian: Tensor  # (B, K) of the output's scaling, 0 where missing
    row: Tensor  # (B,) number in the store: keys the Monte Carlo noise
    weight: Tensor  # (B,)


class Observations(NamedTuple):
    """Rows of field observations."""

    x: Tensor  # (B, d1)
    y: Tensor  # (B, K)
    noise: Tensor | None  # (B, K) the observations' own standard deviations
    log_jacobian: Tensor  # (B, K)
    row: Tensor  # (B,)
    weight: Tensor  # (B,)


Table = TypeVar("Table", Runs, Observations)


def take(table: Table, rows: Tensor | slice) -> Table:
    """Some rows of a batch."""
    return type(table)(*(None if part is None else part[rows] for part in table))  # type: ignore[arg-type, redundant-expr]


class Scaling(nn.Module):
    """From the user's units to the model's: bounds map inputs to the unit cube, `outputs` scales z and y alike."""

    low: Tensor
    width: Tensor

    def __init__(self, problem: Problem, outputs: OutputScaling, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.problem, self.outputs, self.dtype = problem, outputs, dtype
        bounds = [variable.bounds for variable in (*problem.control_inputs, *problem.calibration_inputs)]
        low, high = torch.tensor(bounds, dtype=torch.float64).T
        self.register_buffer("low", low)
        self.register_buffer("width", high - low)

    @property
    def controls(self) -> int:
        """d1."""
        return len(self.problem.control_inputs)

    def runs(
        self,
        x: Tensor,
        t: Tensor,
        z: Tensor,
        row: Tensor | None = None,
        weight: Tensor | None = None,
        *,
        check: bool = True,
    ) -> Runs:
        """A batch of runs in the user's units. Rows of a store, which has checked them, need no other `check`."""
        if check:
            self._check("runs", x=x, t=t, z=z)
        row, weight = self._fill(x, row, weight)
        u = (torch.cat([x, t], 1).double() - self.low) / self.width
        z = z.double()
        scaled, jacobian = self.outputs(z, check=check), self.outputs.log_jacobian(z, check=check)
        return Runs(u.to(self.dtype), scaled, jacobian, row, weight)

    def observations(
        self,
        x: Tensor,
        y: Tensor,
        noise: Tensor | None = None,
        row: Tensor | None = None,
        weight: Tensor | None = None,
        *,
        check: bool = True,
    ) -> Observations:
        """A batch of observations in the user's units."""
        if check:
            self._check("observations", x=x, y=y, **({} if noise is None else {"noise": noise}))
        row, weight = self._fill(x, row, weight)
        u = (x.double() - self.low[: self.controls]) / self.width[: self.controls]
        y = y.double()
        if noise is not None:
            noise = self.outputs.scale_noise(y, noise.double())
        scaled, jacobian = self.outputs(y, check=check), self.outputs.log_jacobian(y, check=check)
        return Observations(u.to(self.dtype), scaled, noise, jacobian, row, weight)

    def _fill(self, x: Tensor, row: Tensor | None, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        row = torch.arange(len(x), device=x.device) if row is None else row.long()
        return row, torch.ones(len(x), dtype=torch.float64, device=x.device) if weight is None else weight.double()

    def _check(self, table: str, **arrays: Tensor) -> None:
        """Shapes and finiteness, before anything is computed."""
        names = {
            "x": [v.name for v in self.problem.control_inputs],
            "t": [v.name for v in self.problem.calibration_inputs],
            "z": [v.name for v in self.problem.outputs],
        }
        names["y"] = names["noise"] = names["z"]
        rows = len(next(iter(arrays.values())))
        for name, values in arrays.items():
            columns = names[name]
            if values.ndim != 2 or values.shape[1] != len(columns):
                raise ModelError(
                    f"{name} of the {table} has shape {tuple(values.shape)}; expected (rows, {len(columns)}), "
                    f"a column for each of {', '.join(columns)}"
                )
            if len(values) != rows:
                raise ModelError(
                    f"{name} of the {table} has {len(values)} rows where {next(iter(arrays))} has {rows}; "
                    "give every array the same rows"
                )
            wrong = values.isinf() if name in ("z", "y", "noise") else ~values.isfinite()
            if bool(wrong.any()):
                i, j = (int(index[0]) for index in wrong.nonzero(as_tuple=True))
                raise ModelError(
                    f"{name} of the {table} holds {values[i, j]:g} in row {i}, column '{columns[j]}'; "
                    "inputs must be finite, and outputs finite or NaN (missing)"
                )
