"""Many points of θ̃ from one pass: dense matrices, blocks, missing outputs, and a state in the middle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from vcal_dist.batches import take
from vcal_dist.densities import collapsed_log_density
from vcal_dist.errors import ModelError
from vcal_dist.frozen import Frozen
from vcal_dist.nature import AMPLITUDE, NOISE, Nature
from vcal_dist.passes import compress

F64 = torch.float64


def setting(kit: Any, **options: Any) -> tuple[Any, Any, Any, torch.Tensor]:
    model = kit.model("additive", prior=kit.prior(2), outputs=2, **options)
    frame = compress(model, [kit.runs(model, 30, missing=True)]).frame
    return model, frame, kit.observations(model, 17, missing=True, noise=True), kit.randn(50, 5, 2)


@pytest.mark.parametrize("free_kappa", [False, True])
def test_it_is_the_density_of_the_rows_with_the_emulator_uncertain_as_at_the_centre(kit: Any, free_kappa: bool) -> None:
    model, frame, rows, points = setting(kit, free_kappa=free_kappa)
    centre = kit.randn(51, 2)
    frozen = Frozen(model, frame, centre, points)
    for chosen in torch.arange(17).split([4, 1, 12]):
        frozen.take(take(rows, chosen))
    found = frozen.log_density()
    kappa = float(model.kappa.detach())

    def features(theta: torch.Tensor) -> np.ndarray:
        unit = model.prior.unit(theta[None]).expand(17, -1)
        return kappa * model.eta(torch.cat([rows.x, unit], 1)).detach().numpy()

    delta = model.delta(rows.x).detach().numpy()
    for theta, value in zip(points, found.tolist(), strict=True):
        expected = float(scipy.stats.norm.logpdf(theta.numpy()).sum())
        for k in range(2):
            known = ~rows.y[:, k].isnan().numpy()
            own = model.likelihood_y.noise_variance()[k] + model.residual_variance()[k] + rows.noise[:, k].square()
            uncertain = features(centre) @ frame.root[k].numpy()
            K = uncertain @ uncertain.T + delta @ delta.T + np.diag(own.detach().numpy())
            mean = features(theta) @ frame.mean[k].numpy()
            dense = scipy.stats.multivariate_normal(mean[known], K[np.ix_(known, known)])
            expected += dense.logpdf(rows.y[:, k].numpy()[known])
        assert value == pytest.approx(expected, rel=1e-9)


def test_at_the_centre_it_is_exact(kit: Any) -> None:
    model, frame, rows, points = setting(kit)
    frozen = Frozen(model, frame, points[2], points)
    frozen.take(rows)
    exact = collapsed_log_density(model, frame, lambda: [rows], points)
    assert float(frozen.log_density()[2]) == pytest.approx(float(exact[2]), rel=1e-10)


def test_a_later_round_takes_the_matrix_of_the_first(kit: Any) -> None:
    model, frame, rows, points = setting(kit)
    first = Frozen(model, frame, points[0], points)
    first.take(rows)
    values = first.log_density()
    later = Frozen(model, frame, points[0], points.flip(0), shared=first.shared)
    later.take(rows)
    torch.testing.assert_close(later.log_density(), values.flip(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["additive", "none"])
def test_amplitude_and_noise_only_scale_the_sums(kit: Any, kind: Any) -> None:
    """A point with other ζ is what a model with these values has; δ's constant has a prior of its own."""
    model = kit.model(kind, prior=kit.prior(2), outputs=2)
    frame, rows = compress(model, [kit.runs(model, 30)]).frame, kit.observations(model, 17, missing=True)
    nature = Nature(model, (AMPLITUDE, NOISE))
    points = torch.cat([kit.randn(50, 5, 2), 0.7 * kit.randn(52, 5, nature.dim)], 1)
    frozen = Frozen(model, frame, points[0, :2], points, nature)
    frozen.take(rows)
    found = frozen.log_density()
    for point, value in zip(points, found.tolist(), strict=True):
        with nature.kept():
            nature.put(point[2:])
            alone = Frozen(model, frame, points[0, :2], point[None, :2])
            alone.take(rows)
            expected = float(alone.log_density()) + float(scipy.stats.norm.logpdf(point[2:].numpy()).sum())
        assert value == pytest.approx(expected, rel=1e-10)
    assert torch.equal(nature.read().detach(), torch.zeros(nature.dim, dtype=F64))


def test_it_goes_on_from_the_middle_of_a_pass(kit: Any) -> None:
    model, frame, rows, points = setting(kit)
    whole, begun = (Frozen(model, frame, points[0], points) for _ in range(2))
    whole.take(rows)
    begun.take(take(rows, slice(0, 9)))
    other = Frozen(model, frame, points[1], points[:1])
    other.load(begun.state())
    other.take(take(rows, slice(9, None)))
    torch.testing.assert_close(other.log_density(), whole.log_density(), rtol=1e-12, atol=1e-12)


def test_there_must_be_rows(kit: Any) -> None:
    model, frame, _, points = setting(kit)
    with pytest.raises(ModelError, match="no observations"):
        Frozen(model, frame, points[0], points).log_density()
