"""The statistics of simulation-based calibration against closed forms and simulations, and its charts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from storage.priors import Normal
from vcal_dist import sbc
from vcal_dist.errors import ModelError
from vcal_dist.plots import simulated
from vcal_dist.priors import ThetaPrior
from vcal_dist.replicates import prior_sd, told
from vcal_dist.sbc import Assessment, Told, assess
from vcal_dist.theta import ThetaPosterior

Array = NDArray[np.float64]


def pits(count: int, shift: float = 0.0, sd: float = 1.0, seed: int = 0) -> Array:
    """PIT values where truths are N(shift, sd²) and posteriors say N(0, 1)."""
    return np.asarray(stats.norm.cdf(shift + sd * np.random.default_rng(seed).standard_normal(count)))


def judged(*columns: Array) -> list[Assessment]:
    return assess([f"t{j}" for j in range(len(columns))], [Told(pit=tuple(row)) for row in np.stack(columns, 1)])


@pytest.mark.parametrize(
    ("shift", "sd", "verdict"),
    [
        (0.0, 1.0, "covers as promised"),
        (0.0, 1.6, "intervals too narrow"),
        (0.0, 0.6, "intervals too wide"),
        (0.6, 1.0, "biased low"),  # truths lie above
        (-0.6, 1.0, "biased high"),
    ],
)
def test_verdicts_name_what_is_wrong(shift: float, sd: float, verdict: str) -> None:
    (found,) = judged(pits(150, shift, sd))
    assert found.verdict == verdict
    assert (found.p < 0.05) == (verdict != "covers as promised")


def test_ranks_that_only_their_shape_gives_away() -> None:
    u = np.random.default_rng(0).random(300)
    u = np.where(u < 0.5, 0.2 + 0.1 * u, 0.8 - 0.1 * u)  # two heaps, with the mean and the mean level of uniform ones
    (found,) = judged(u)
    assert found.verdict == "not as promised"


def test_few_replicates_that_show_nothing_are_no_proof() -> None:
    assert judged(pits(10))[0].verdict == "too few replicates"
    assert judged(np.full(10, 0.999))[0].verdict == "biased low"  # few are enough where it is plain


def test_thresholds_account_for_several_parameters() -> None:
    fine = (np.arange(100) + 0.5) / 100
    u = np.asarray(stats.norm.cdf(0.3 + stats.norm.ppf(fine)))
    assert judged(u)[0].verdict == "biased low"
    (one, *others) = judged(u, *[fine] * 9)
    assert one.verdict == "covers as promised"
    assert one.p == pytest.approx(10 * judged(u)[0].p)
    assert {other.verdict for other in others} == {"covers as promised"}


def test_chance_alone_leads_to_a_finding_as_seldom_as_promised() -> None:
    rng = np.random.default_rng(5)
    found = [min(one.p for one in judged(rng.random(40), rng.random(40))) for _ in range(400)]
    assert 0.01 < np.mean(np.array(found) <= 0.05) < 0.065


def test_holm_against_a_case_by_hand() -> None:
    assert sbc.holm([0.03, 0.01, 0.04]) == pytest.approx([0.06, 0.03, 0.06])
    assert sbc.holm([0.9, 0.8]) == [1.0, 1.0]


def test_binomial_bands_hold_as_much_as_they_say() -> None:
    for count, p in ((40, 0.5), (100, 0.9), (500, 0.95)):
        low, high = sbc.binomial_band(count, p)
        mass = stats.binom.cdf(high, count, p) - stats.binom.cdf(low - 1, count, p)
        assert mass >= 0.99
        assert stats.binom.cdf(low - 1, count, p) <= 0.005
        assert stats.binom.sf(high, count, p) <= 0.005
    found = sbc.coverage(pits(100), (0.5, 0.9))
    assert (found.low[1], found.high[1]) == pytest.approx(
        (stats.binom.ppf(0.005, 100, 0.9) / 100, stats.binom.ppf(0.995, 100, 0.9) / 100)
    )


def test_coverage_is_that_of_central_intervals() -> None:
    u = np.array([0.05, 0.2, 0.26, 0.5, 0.74, 0.8, 0.96])
    assert sbc.coverage(u, (0.5, 0.9)).value == pytest.approx((3 / 7, 6 / 7))  # inside [¼, ¾] and [0.05, 0.95]
    curve = sbc.curve(pits(400, sd=1.5))
    assert dict(zip(curve.at, curve.value, strict=True))[0.9] == pytest.approx(
        2 * stats.norm.cdf(1.645 / 1.5) - 1, abs=0.05
    )


def test_coverage_of_intervals_that_are_told_is_theirs() -> None:
    ends = {level: [(0.0, 1.0)] for level in sbc.LEVELS}
    some = [Told((0.5,), (truth,), (0.5,), (0.1,), ends) for truth in (0.2, 0.4, 0.9, 1.4)]
    (found,) = assess(["t"], some)
    assert found.coverage.value == (0.75,) * 4


def test_the_histogram_counts_every_replicate_in_bins_of_one_width() -> None:
    found = sbc.histogram(np.array([0.0, 0.1, 0.55, 1.0] * 10))
    assert found.at == pytest.approx((0.1, 0.3, 0.5, 0.7, 0.9))
    assert found.value == (20, 0, 10, 0, 10)
    assert (found.low[0], found.high[0]) == (stats.binom.ppf(0.005, 40, 0.2), stats.binom.ppf(0.995, 40, 0.2))


def test_the_whole_ecdf_stays_in_its_band_as_often_as_promised() -> None:
    count, rng = 60, np.random.default_rng(1)
    at, low, high = sbc.simultaneous_band(count)
    counts = (rng.random((4000, count, 1)) <= at).sum(1)
    inside = ((counts >= low) & (counts <= high)).all(1).mean()
    assert inside == pytest.approx(sbc._stays(count, _tail_of(count, low, high)), abs=0.01)
    assert 0.95 <= inside < 0.965


def _tail_of(count: int, low: Array, high: Array) -> float:
    """A tail probability that gives this band."""
    tails, place = sbc._tails(count), np.arange(len(low))
    return 0.999 * float(min(tails[place, low].min(), tails[place, high].min()))


def test_the_p_value_of_the_shape_is_uniform_at_most() -> None:
    rng = np.random.default_rng(3)
    p = np.array([sbc._p_of_shape(rng.random(50)) for _ in range(1500)])
    for level in (0.01, 0.05, 0.2, 0.5):
        assert (p <= level).mean() <= level + 3 * np.sqrt(level * (1 - level) / 1500)
    assert (p <= 0.2).mean() > 0.15


def test_a_band_of_two_values_by_hand() -> None:
    # One point, ½: 0, 1 or 2 of two uniform numbers lie below it with probabilities ¼, ½ and ¼.
    at, low, high = sbc.simultaneous_band(2, 0.5)
    assert (at.tolist(), low.tolist(), high.tolist()) == ([0.5], [1], [1])
    assert (sbc.simultaneous_band(2)[1].tolist(), sbc.simultaneous_band(2)[2].tolist()) == ([0], [2])


def test_ranks_among_draws_are_pit_values_too() -> None:
    rng = np.random.default_rng(6)
    truth, draws = rng.standard_normal(200), rng.standard_normal((200, 500))
    u = sbc.pit_of_ranks((draws < truth[:, None]).sum(1), 500)
    assert np.abs(u - stats.norm.cdf(truth)).max() < 0.1
    assert judged(u)[0].verdict == "covers as promised"
    with pytest.raises(ModelError, match="between 0 and 9"):
        sbc.pit_of_ranks([10], 9)


def test_a_problem_that_draws_everything_anew() -> None:
    """θ ~ N(1, 2²), y ~ N(θ, 1): the posterior is N(m, ⅘), m = (1 + 4y)/5, and in θ̃ it has means (m − 1)/2."""
    prior, rng = ThetaPrior([Normal(mean=1.0, sd=2.0)], [(-9.0, 9.0)], ["level"]), np.random.default_rng(7)
    assert prior_sd(prior) == pytest.approx([2.0])

    def replicates(sd: float) -> list[Told]:
        found = []
        for _ in range(120):
            theta = 1 + 2 * rng.standard_normal()
            mean = (1 + 4 * (theta + rng.standard_normal())) / 5
            tilde = torch.tensor([[(mean - 1) / 2]], dtype=torch.float64)
            variance = torch.tensor([[[sd**2 * 0.8 / 4]]], dtype=torch.float64)
            found.append(told(ThetaPosterior(prior, tilde, variance), torch.tensor([theta], dtype=torch.float64)))
            assert found[-1].mean == pytest.approx((mean,))
            z = (theta - mean) / (sd * np.sqrt(0.8))
            assert found[-1].pit == pytest.approx((stats.norm.cdf(z),), abs=1e-9)
        return found

    (right,) = assess(["level"], replicates(1.0), prior_sd(prior))
    assert right.verdict == "covers as promised"
    assert right.contraction == pytest.approx((0.8,) * 120)  # 1 − 0.8/4
    assert np.std(right.z) == pytest.approx(1.0, abs=0.2)
    assert assess(["level"], replicates(0.6))[0].verdict == "intervals too narrow"


def test_truths_far_outside_are_named() -> None:
    u = np.append(pits(99), 1 - 1e-9)
    (found,) = judged(u)
    assert found.far == (99,)
    assert found.verdict == "truths far outside"
    assert found.tests["tails"] == pytest.approx(2e-7)  # the least of a hundred
    assert min(found.tests["location"], found.tests["spread"], found.tests["shape"]) > 0.05
    assert judged(np.append(pits(99), 1.0))[0].tests["tails"] == 0
    assert judged(np.full(30, 0.5))[0].tests["tails"] == 1


def test_what_is_no_pit_value_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'b' is 1\.5 in replicate 1"):
        assess(["a", "b"], [Told((0.1, 0.2)), Told((0.3, 1.5))])
    with pytest.raises(ModelError, match="2 PIT values for the 1 parameters a"):
        assess(["a"], [Told((0.1, 0.2))])
    with pytest.raises(ModelError, match="no replicate"):
        assess(["a"], [])


def test_charts_show_what_was_found() -> None:
    some = [Told((u,), (0.0,), (1.0,), (0.5,)) for u in pits(40).tolist()]
    (found,) = assess(["rate"], some, [1.0])
    for make in (
        simulated.rank_histogram,
        simulated.ecdf_difference,
        simulated.coverage_curve,
        simulated.contraction,
    ):
        assert "rate" in json.dumps(make(found).to_dict())  # which also checks it
    with pytest.raises(ModelError, match="only PIT values are known"):
        simulated.contraction(judged(pits(30))[0])
