"""The comparison partner of the emulator's benchmark learns, and says what it needs."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from jobs.bench.svgp import svgp_errors
from storage.errors import VcalError
from vcal_dist.problems import borehole


def standardised_borehole(rows: int, fresh: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = borehole.generate(rows + fresh, 1, seed=0)
    u = torch.as_tensor(np.hstack([data.x_runs, data.t]), dtype=torch.float32)
    z = torch.as_tensor(data.z[:, 0], dtype=torch.float32)
    z = (z - z[:rows].mean()) / z[:rows].std()
    return u[:rows], z[:rows], u[rows:], z[rows:]


@pytest.mark.parametrize("tuned", [True, False])
def test_the_error_falls_far_below_that_of_the_mean(tuned: bool) -> None:
    late, early = svgp_errors(*standardised_borehole(2000, 500), seconds=[2.0, 0.2], tuned=tuned)
    assert late < (0.1 if tuned else 0.8)
    assert late <= early  # in the order asked for


def test_times_that_cannot_be_are_named() -> None:
    with pytest.raises(VcalError, match=r"seconds is \[0\.0\]"):
        svgp_errors(*standardised_borehole(10, 10), seconds=[0.0])


def test_without_gpytorch_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(VcalError, match=r"pip install vcal-dist\[bench\]"):
        svgp_errors(*standardised_borehole(10, 10), seconds=[1.0])
