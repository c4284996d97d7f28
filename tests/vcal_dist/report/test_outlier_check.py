"""Outliers: on residuals of known distributions, pooled and by output, transformed and not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from tests.vcal_dist.plots.charts_kit import random_posterior
from vcal_dist.assessment import Judged
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.report.check import Check
from vcal_dist.report.content import Status
from vcal_dist.report.gathering import Gathered, Sample
from vcal_dist.report.outlier_check import outliers
from vcal_dist.transforms import TransformSettings

Array = NDArray[np.float64]


def checked(z: Array, *, kind: Any = "gaussian", transform: Any = "none", unreliable: int = 0) -> list[Check]:
    """The check of observations that lie z standard deviations (B, K) from their predictions."""
    posterior = random_posterior(
        1, 1, outputs=z.shape[1], likelihood=LikelihoodSettings(kind=kind), transform=TransformSettings(kind=transform)
    )

    def in_units(value: Array | float) -> Array:
        """5 ± 2 before the transform is undone."""
        whole = 5 + 2 * np.broadcast_to(value, z.shape)
        return np.exp(whole) if transform == "log" else whole

    y, edge = in_units(z), stats.norm.isf(0.05)
    rows = np.arange(len(z))
    judged = Judged(
        "leave one out", y, None, y, in_units(0.0), in_units(-edge), in_units(edge), y, y, rows < unreliable
    )
    sample = Sample(judged, len(z), len(z), len(z), numbers=rows + 100)
    return outliers(Gathered("here", posterior, {}, None, {}, None, [], observations=sample))


def even(rows: int, outputs: int = 1) -> Array:
    """Residuals as they should be."""
    rng = np.random.default_rng(2)
    z: Array = stats.norm.ppf((np.arange(rows) + 0.5) / rows)[:, None]
    return np.concatenate([rng.permutation(z) for _ in range(outputs)], 1)


def with_outliers(z: Array, count: int, far: float) -> Array:
    z = z.copy()
    z[:count, 0] = far
    return z


@pytest.mark.parametrize("transform", ["none", "log"])
@pytest.mark.parametrize(
    ("rows", "count", "far", "status"),
    [
        (60, 0, 0.0, "good"),
        (60, 1, 4.05, "good"),  # one in 260 samples
        (60, 1, 7.0, "care"),  # by how far it is
        (60, 2, 5.0, "care"),
        (60, 3, 5.0, "bad"),
        (2000, 1, 4.2, "good"),
        (2000, 3, 4.2, "care"),
        (2000, 6, 4.2, "bad"),
        (10, 1, 9.0, "care"),
    ],
)
def test_outliers_are_judged_by_chance(transform: str, rows: int, count: int, far: float, status: Status) -> None:
    (check,) = checked(with_outliers(even(rows), count, far), transform=transform)
    assert (check.status, check.number) == (status, count)
    assert ("student_t" in check.advice) == (status != "good")
    if count:
        assert f"{count} of {rows:,} observations (row{'s' if count > 1 else ''} 100" in check.sentence


def test_outliers_do_not_hide_behind_the_noise_that_they_widen() -> None:
    # Six of 60 at ten standard deviations make the fitted noise 3.3 times as wide: they lie three of it away.
    z = with_outliers(even(60), 6, 10.0)
    (check,) = checked(z / np.sqrt(np.mean(z**2)))
    assert (check.status, check.number) == ("bad", 6)


def test_noise_that_is_too_wide_or_off_as_a_whole_has_no_outliers() -> None:
    for z in (0.5 * even(200), even(200) + 6):  # other checks see those
        (check,) = checked(z)
        assert check.status == "good"


def test_an_output_among_many_is_seen_and_rows_are_counted_once() -> None:
    z = even(100, 5)
    assert checked(z)[0].status == "good"
    z[:4] = 8.0
    (check,) = checked(z)
    assert (check.status, check.number) == ("bad", 4)
    z = even(100, 5)
    z[:4, 4] = 8.0
    assert checked(z)[0].status == "bad"


def test_values_that_are_not_known_are_no_outliers() -> None:
    z = even(60, 2)
    z[::2, 0] = np.nan
    z[:3] = np.nan
    (check,) = checked(z)
    assert (check.status, check.value) == ("good", "0 of 57")


def test_nothing_is_said_of_other_noise_of_few_rows_or_where_leaving_out_fails() -> None:
    z = with_outliers(even(60), 3, 9.0)
    assert checked(z, kind="student_t") == []
    assert checked(z[:4]) == []
    assert checked(z, unreliable=40) == []
    assert checked(z, unreliable=3)[0].status == "bad"
