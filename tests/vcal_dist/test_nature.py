"""Nature's hyperparameters as one vector: what belongs to it, its prior, and coordinates in which that is N(0, I)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import scipy.stats
import torch

from vcal_dist.calibration import CalibrationModel, ModelSettings
from vcal_dist.errors import ModelError
from vcal_dist.gp import GPSettings
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.nature import MOST, Nature


def test_coordinates_are_standard_deviations_of_the_prior_in_the_logarithm(kit: Any) -> None:
    model = kit.model("additive", likelihood_y=LikelihoodSettings(noise=0.4, floor=1e-6, spread=2.0)).requires_grad_(
        False
    )
    nature = Nature(model)
    assert nature.names == [
        "amplitude of the discrepancy",
        "length scales of the discrepancy 1",
        "length scales of the discrepancy 2",
        "noise",
    ]
    torch.testing.assert_close(nature.read().detach(), torch.zeros(4, dtype=torch.float64))  # training starts there
    nature.put(torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64))
    assert float(model.delta.last.log_amplitude.exp()) == pytest.approx(0.6 * math.e)
    assert model.delta.last.log_lengthscale.exp().tolist() == pytest.approx([0.7 / math.e, 0.7 * math.exp(0.5)])
    assert float(model.likelihood_y.noise_variance().sqrt()) == pytest.approx(0.4 * math.exp(4.0), rel=1e-6)
    assert nature.of_discrepancy() == [True, True, True, False]
    assert [spread for _, spread in nature.priors()] == [1.0, 1.0, 1.0, 2.0]


def test_the_prior_is_log_normal_around_what_is_set(kit: Any) -> None:
    model = kit.model("additive").requires_grad_(False)
    flat = float(model.log_prior_of_nature())
    with torch.no_grad():
        model.delta.last.log_amplitude += 0.7
        model.likelihood_y.raw_noise -= 1.0
    density = scipy.stats.lognorm(s=1.0, scale=0.6)
    at = 0.6 * math.exp(0.7)
    of_amplitude = density.logpdf(at) + math.log(at) - density.logpdf(0.6) - math.log(0.6)  # as a density of the log
    assert float(model.log_prior_of_nature()) - flat == pytest.approx(of_amplitude - 0.5 * (1.0 / 2.0) ** 2)


def test_what_is_known_is_no_part_of_it(kit: Any) -> None:
    settings = kit.model("additive").settings
    known = replace(
        settings,
        delta=replace(settings.delta, learn=False),
        likelihood_y=LikelihoodSettings(noise=0.4, learn_noise=False),
    )
    model = CalibrationModel(2, kit.prior(1), 1, known, dtype=torch.float64)
    assert Nature(model).dim == 0
    assert float(model.log_prior_of_nature().detach()) == 0.0
    assert Nature(kit.model("none")).names == ["noise"]
    assert Nature(kit.model("additive", hidden=(2,))).names == ["noise"]  # of a deep discrepancy, nothing else
    assert Nature(kit.model("general")).dim == 0  # where the weights do not integrate out


def test_many_noises_stay_points(kit: Any) -> None:
    model = kit.model("additive", outputs=MOST)
    assert Nature(model).dim == 3
    assert "noise" not in Nature(model).names


def test_values_come_back_whatever_happens(kit: Any) -> None:
    model = kit.model("additive")
    nature = Nature(model)
    before = nature.read().detach()

    def fail() -> None:
        with nature.kept():
            nature.put(before + 1)
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert torch.equal(nature.read().detach(), before)


def test_a_spread_must_be_positive() -> None:
    with pytest.raises(ModelError, match=r"spread is 0\.0"):
        GPSettings(spread=0.0)
    with pytest.raises(ModelError, match="spread"):
        LikelihoodSettings(spread=-1.0)


def test_a_length_scale_that_nobody_chose_has_the_median_of_the_cube() -> None:
    settings = ModelSettings(delta=GPSettings(amplitude=0.1))
    from tests.vcal_dist.conftest import Kit

    model = CalibrationModel(3, Kit.prior(1), 1, settings, dtype=torch.float64)
    medians = [math.exp(median) for median, _ in Nature(model).priors()[1:4]]
    assert medians == pytest.approx([math.sqrt(3 / 12)] * 3)
