"""The closed form of the observations' statistics under Gaussian noise is what autodiff gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vcal_dist.gaussian import gaussian_statistics, is_gaussian
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.natural import observations_statistics


@pytest.mark.parametrize("hidden", [(), (2,)], ids=["shallow", "deep"])
@pytest.mark.parametrize(("kind", "free_kappa"), [("none", False), ("additive", False), ("additive", True)])
@pytest.mark.parametrize("noise", [False, True])
def test_the_closed_form_is_what_autodiff_gives(
    kit: Any, kind: Any, free_kappa: bool, noise: bool, hidden: tuple[int, ...]
) -> None:
    model = kit.model(kind, outputs=2, hidden=hidden, free_kappa=free_kappa)
    if free_kappa:
        model.kappa.data.fill_(1.3)
    q = kit.full_rank(1, 2, model.width)
    observations = kit.observations(model, 9, missing=True, noise=noise)
    observations = observations._replace(weight=torch.tensor([1.0, 0.0, 1, 1, 1, 0, 1, 1, 1], dtype=torch.float64))
    theta = torch.tensor([[0.3], [-0.8]] if hidden else [[0.3]], dtype=torch.float64)
    found = gaussian_statistics(model, q, observations, theta, key=(3,), learn=True)
    expected = observations_statistics(model, q, observations, theta=theta, key=(3,))
    without = gaussian_statistics(model, q, observations, theta, key=(3,), learn=False)
    for mine, its, third in zip(*([*part.curvature, *part[1:]] for part in (found, expected, without)), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(third, its.detach(), rtol=1e-10, atol=1e-10)
    assert not without.log_likelihood.requires_grad
    learned = {name: parameter for name, parameter in model.named_parameters() if parameter.numel()}
    gradients = [
        torch.autograd.grad(part.log_likelihood, list(learned.values()), allow_unused=True, materialize_grads=True)
        for part in (found, expected)
    ]
    for name, mine, its in zip(learned, *gradients, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-9, msg=name)


def test_it_is_for_gaussian_noise_without_g_only(kit: Any) -> None:
    assert is_gaussian(kit.model("additive", hidden=(2,)))
    assert not is_gaussian(kit.model("general"))
    assert not is_gaussian(kit.model("additive", likelihood_y=LikelihoodSettings(kind="student_t")))
