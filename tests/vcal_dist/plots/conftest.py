"""One posterior of each kind for all tests of charts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vcal_dist.plots.charts_kit import random_posterior
from tests.vcal_dist.training_kit import generate, problem
from vcal_dist import calibrate
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.mixed import Averaged
from vcal_dist.posterior import Posterior
from vcal_dist.transforms import TransformSettings


@pytest.fixture(scope="session")
def data() -> dict[str, Any]:
    """Runs and observations of one control input and two parameters."""
    return generate(300, 60)


@pytest.fixture(scope="session")
def trained(data: dict[str, Any]) -> Posterior:
    """A posterior that has learnt from them."""
    fit = {"emulator": {"steps": 60}, "theta": {"steps": 40}, "joint": {"steps": 5}, "screening": 64, "starts": 2}
    model = {"eta": {"features": {"features": 30}}, "delta": {"features": {"features": 6}}}
    return calibrate(data, problem(), model=model, fit=fit, progress=False)


@pytest.fixture(scope="session")
def posteriors() -> dict[str, Any]:
    """Posteriors at the limits of what charts are for."""
    general = random_posterior(2, 3, 2, kind="general")
    return {
        "one of each": random_posterior(1, 1, 1),
        "many of each": random_posterior(20, 30, 20),
        "general": general,
        "root": random_posterior(1, 2, 2, kind="general", transform=TransformSettings(kind="sqrt")),
        "log": random_posterior(2, 2, 1, transform=TransformSettings(kind="log")),
        "counts": random_posterior(2, 2, 1, likelihood=LikelihoodSettings(kind="poisson")),
        "classes": random_posterior(1, 2, 1, likelihood=LikelihoodSettings(kind="bernoulli")),
        "averaged": Averaged([random_posterior(2, 3, 1, seed=seed) for seed in (5, 25)], [0.0, 0.5]),
    }
