"""Charts of θ against the posterior that they show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.vcal_dist.plots.charts_kit import column, of_mark, random_posterior, subtitle
from vcal_dist import plots
from vcal_dist.fullrank import Arrow, FullRank
from vcal_dist.plots.densities import contraction, prior_rank
from vcal_dist.plots.joint import _region
from vcal_dist.posterior import Posterior


def test_densities_before_and_after_integrate_to_one(trained: Posterior) -> None:
    chart = plots.marginal(trained, "t1", truth=0.3)
    line = of_mark(chart, "line")[0]
    for kind in ("prior", "posterior"):
        value, density = column(line, "value", kind=kind), column(line, "density", kind=kind)
        # The chart may show a part of the prior's range.
        share = np.ptp(value) if kind == "prior" else 1.0
        assert np.trapezoid(density, value) == pytest.approx(share, abs=0.01)
    shaded = of_mark(chart, "area")[0]
    assert np.trapezoid(column(shaded, "density"), column(shaded, "value")) == pytest.approx(0.9, abs=0.005)
    low, high = trained.theta.interval("t1", 0.9)
    assert column(shaded, "value")[[0, -1]] == pytest.approx([low, high], rel=1e-5)
    truth = [layer for layer in of_mark(chart, "rule") if layer["rows"][0].get("kind") == "truth"]
    assert truth[0]["rows"][0]["value"] == 0.3
    assert f"90\N{NO-BREAK SPACE}% interval {low:.4g} to {high:.4g}" in subtitle(chart)


def test_a_posterior_much_narrower_than_its_prior_has_an_axis_of_its_own() -> None:
    posterior = random_posterior(1, 1)
    q = posterior.components[0]
    assert isinstance(q, FullRank)
    q.move(q.theta_mean, q.mean, Arrow(1e6 * q.precision.theta, q.precision.cross, q.precision.weights))
    chart = plots.marginal(posterior, posterior.problem.calibration_inputs[0].name)
    value = column(of_mark(chart, "line")[0], "value", kind="posterior")
    low, high = posterior.theta.interval(0, 0.9)
    assert np.ptp(value) < 10 * (high - low)
    assert "most of it outside this range" in subtitle(chart)


def test_pairs_show_the_parameters_that_were_told_most_of(posteriors: dict[str, Any]) -> None:
    posterior = posteriors["many of each"]
    chart = plots.pairs(posterior)
    panels = chart.to_dict()["concat"]
    assert len(panels) == 36
    titles = [" ".join(panel["title"]["text"].split()) for panel in panels if "title" in panel]
    names = np.array([v.name for v in posterior.problem.calibration_inputs])
    most = np.sort(np.argsort(-contraction(posterior.theta))[:6])
    assert titles == [" ".join(name.split()) for name in names[most]]
    assert "the 6 of 30 parameters" in subtitle(chart)


def test_regions_hold_their_share_of_the_posterior(trained: Posterior) -> None:
    from matplotlib.path import Path

    draws = trained.sample(20_000, seed=7)
    for level in (0.5, 0.9):
        lines = _region(trained.theta, trained.sample(4000), [(0.0, 1.0)] * 2, level)
        inside = np.sum([Path(line).contains_points(draws) for line in lines], axis=0) % 2
        assert inside.mean() == pytest.approx(level, abs=0.025)


def test_correlations_stand_above_the_diagonal(trained: Posterior) -> None:
    chart = plots.pairs(trained)
    (text,) = of_mark(chart, "text")
    assert float(text["rows"][0]["text"]) == pytest.approx(trained.correlation()[0, 1], abs=0.04)


def test_one_parameter_has_no_pairs(posteriors: dict[str, Any]) -> None:
    posterior = posteriors["one of each"]
    assert "layer" in plots.pairs(posterior).to_dict()


def test_intervals_are_on_the_scale_of_the_prior(posteriors: dict[str, Any]) -> None:
    posterior = posteriors["many of each"]
    name = posterior.problem.calibration_inputs[2].name  # of a gamma prior
    chart = plots.intervals(posterior, truth={name: 1.2})
    rows = of_mark(chart, "bar")[0]["rows"]
    assert len(rows) == 30
    told = [row["told"] for row in rows]
    assert told == sorted(told, reverse=True)
    row = next(row for row in rows if row["parameter"] == name)
    # Φ⁻¹ of the ranks are quantiles of q(θ̃), which is Gaussian.
    tilde = torch.special.ndtri(torch.tensor([row[f"r{n}"] for n in range(5)], dtype=torch.float64))
    mean, sd = posterior.theta.means[0, 2], posterior.theta.covariances[0, 2, 2].sqrt()
    expected = mean + sd * torch.special.ndtri(torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95], dtype=torch.float64))
    torch.testing.assert_close(tilde, expected, atol=1e-4, rtol=1e-3)
    (truth,) = of_mark(chart, "tick")
    assert truth["rows"][0]["rank"] == pytest.approx(prior_rank(posterior.theta.prior, 2, np.array([1.2]))[0], rel=1e-5)
    low, high = posterior.theta.interval(2, 0.9)
    assert row["most"] == f"{low:.4g} to {high:.4g} kg.m∖"
