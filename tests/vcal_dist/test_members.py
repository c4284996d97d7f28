"""Members of an ensemble: their evidence and posterior against dense linear algebra."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from tests.vcal_dist.conftest import F64, Kit
from vcal_dist.features import FeatureSettings
from vcal_dist.members import SEPARATE_NOISE, Members

ROWS, INPUTS = 9, 2


def make(outputs: int, missing: bool) -> tuple[Members, Tensor, Tensor]:
    counted = torch.ones(3, ROWS, dtype=torch.bool)
    counted[0, :3], counted[1, 4:] = False, False
    lengthscale = torch.tensor([0.5, 1.0], dtype=F64)
    settings = FeatureSettings(features=6)
    members = Members(counted, outputs, settings, lengthscale, noise=0.2, seed=1, dtype=F64)
    with torch.no_grad():
        members.log_noise += 0.3 * Kit.rand(5, *members.log_noise.shape)
        members.log_amplitude += Kit.rand(6, 3)
    z = Kit.rand(8, ROWS, outputs)
    if missing:
        z[2, 0], z[5, -1] = torch.nan, torch.nan
    return members, Kit.rand(7, ROWS, INPUTS), z


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("outputs", [1, 2, SEPARATE_NOISE + 1])
def test_evidence_and_weights_are_the_dense_ones(outputs: int, missing: bool) -> None:
    members, u, z = make(outputs, missing)
    evidence, phi = members.log_evidence(u, z, members.counted).detach(), members(u).detach()
    weights, noise = members.posterior(u, z).mean, members.noise_variance().detach().expand(-1, outputs)
    for i in range(3):
        total, rows = 0.0, 0
        for k in range(outputs):
            known = members.counted[i] & ~z[:, k].isnan()
            f, value = phi[i, known], z[known, k]
            cov = f @ f.mT + noise[i, k] * torch.eye(len(f), dtype=F64)
            total += multivariate_normal(cov=cov.numpy()).logpdf(value.numpy())
            rows += len(f)
            torch.testing.assert_close(weights[i, k], f.mT @ torch.linalg.solve(cov, value))
        assert float(evidence[i]) == pytest.approx(total / rows, rel=1e-9)


@pytest.mark.parametrize("outputs", [2, SEPARATE_NOISE + 1])
def test_gradients_of_the_evidence_are_those_of_differences(outputs: int) -> None:
    members, u, z = make(outputs, missing=False)
    members.log_evidence(u, z, members.counted).sum().backward()
    for parameter in members.parameters():
        flat, found = parameter.data.view(-1), parameter.grad
        assert found is not None
        place, step = 1, 1e-5

        def value(shift: float, flat: Tensor = flat, place: int = place) -> float:
            flat[place] += shift
            with torch.no_grad():
                result = float(members.log_evidence(u, z, members.counted).sum())
            flat[place] -= shift
            return result

        slope = (value(step) - value(-step)) / (2 * step)
        assert float(found.reshape(-1)[place]) == pytest.approx(slope, rel=1e-5, abs=1e-9)
