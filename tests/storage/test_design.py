"""What a design cannot teach is found, and sound designs are left in peace."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import design_survey
from storage.design import Finding, find_design_faults
from storage.priors import Beta, Gamma, LogNormal, Normal, Prior, TruncatedNormal, Uniform
from storage.store import Store, create

Make = Callable[..., list[Finding]]


def problem(controls: int, parameters: int, priors: dict[int, dict[str, Any]] | None = None) -> dict[str, Any]:
    """Inputs x0, x1 … and t0, t1 … on the unit interval, and an output."""
    calibration = [{"name": f"t{i}", "bounds": [0, 1]} for i in range(parameters)]
    for i, prior in (priors or {}).items():
        calibration[i]["prior"] = prior
    return {
        "name": "unit",
        "control_inputs": [{"name": f"x{i}", "bounds": [0, 1]} for i in range(controls)],
        "calibration_inputs": calibration,
        "outputs": [{"name": "f", "missing": True}],
    }


def hypercube(rng: np.random.Generator, n: int, d: int) -> np.ndarray:
    """A random Latin hypercube."""
    return (np.argsort(rng.random((n, d)), axis=0) + rng.random((n, d))) / n


@pytest.fixture
def findings(tmp_path: Path) -> Make:
    """The findings of a store with these arrays, in several blocks."""
    names = (f"{i}.zarr" for i in itertools.count())

    def make(
        x: np.ndarray,
        t: np.ndarray,
        z: np.ndarray | None = None,
        observed: np.ndarray | None = None,
        y: np.ndarray | None = None,
        run: Any = None,
        priors: dict[int, dict[str, Any]] | None = None,
        **settings: Any,
    ) -> list[Finding]:
        store = create(
            tmp_path / next(names), problem(x.shape[1], t.shape[1], priors), **{"chunk_rows": 16, **settings}
        )
        store.append_runs(x, t, x.sum(1) + t.sum(1) if z is None else z, run)
        if observed is not None:
            store.append_observations(observed, observed.sum(1) + t.mean(0).sum() if y is None else y)
        return find_design_faults(store)

    return make


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


def long_form(rng: np.random.Generator, runs: int, d: int, times: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.tile(np.linspace(0, 1, times), runs)[:, None]
    return x, np.repeat(hypercube(rng, runs, d), times, axis=0)


# --- quiet ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("controls", "parameters"), [(1, 2), (2, 3), (3, 7), (1, 9)])
@pytest.mark.parametrize("per_input", [2, 3, 20])
def test_latin_hypercubes_have_no_findings(controls: int, parameters: int, per_input: int, findings: Make) -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        d = controls + parameters
        design = hypercube(rng, per_input * d, d)
        assert findings(design[:, :controls], design[:, controls:], observed=rng.random((30, controls))) == []


def test_a_random_sample_of_ten_runs_for_each_input_is_never_bad(findings: Make) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        found = findings(rng.random((100, 3)), rng.random((100, 7)), observed=rng.random((30, 3)))
        assert [f for f in found if f.severity == "bad"] == []


def test_long_form_has_no_findings(findings: Make) -> None:
    x, t = long_form(np.random.default_rng(0), 36, 4, 50)
    assert findings(x, t, observed=np.linspace(0, 1, 50)[:, None]) == []


def test_a_hypercube_with_fewer_runs_than_inputs_has_few_runs_and_nothing_else(findings: Make) -> None:
    for n in (3, 5, 7, 9):
        design = hypercube(np.random.default_rng(n), n, 12)
        found = only(findings(design[:, :2], design[:, 2:]))
        assert (found.kind, found.value, found.severity) == ("few_runs", n, "care")
        assert f"only {n} runs" in found.message
        assert len(found.names) == 12


def test_a_store_without_runs_has_no_findings(tmp_path: Path) -> None:
    store = create(tmp_path / "s.zarr", problem(1, 1))
    store.append_observations([0.5], [1.0])
    assert find_design_faults(store) == []


# --- constant and few values ------------------------------------------------------------------------------------------


def test_a_calibration_input_that_never_varies_is_bad(findings: Make) -> None:
    design = hypercube(np.random.default_rng(0), 40, 4)
    design[:, 2] = 0.98
    found = only(findings(design[:, :1], design[:, 1:]))
    assert (found.kind, found.names, found.severity) == ("constant", ("t1",), "bad")
    assert found.value == pytest.approx(0.98)
    assert "'t1': it is 0.98 in all 40 rows" in found.message
    assert "take it out of calibration_inputs" in found.message


@pytest.mark.parametrize("observations_vary", [True, False])
def test_a_control_input_that_never_varies_is_bad_where_observations_do(
    observations_vary: bool, findings: Make
) -> None:
    design = hypercube(np.random.default_rng(0), 40, 4)
    design[:, 0] = 0.5
    observed = np.full((10, 2), 0.5)
    observed[:, 1] = np.linspace(0.1, 0.9, 10)
    observed[5:, 0] += 0.25 * observations_vary
    found = only(findings(design[:, :2], design[:, 2:], observed=observed))
    assert (found.kind, found.names) == ("constant", ("x0",))
    assert found.severity == ("bad" if observations_vary else "care")
    assert ("0.75 in the observations" in found.message) == observations_vary


def test_few_values_are_listed(findings: Make) -> None:
    rng = np.random.default_rng(0)
    design = hypercube(rng, 60, 4)
    design[:, 3] = rng.choice([0, 0.25, 1], 60)
    found = only(findings(design[:, :1], design[:, 1:]))
    assert (found.kind, found.names, found.value, found.severity) == ("few_values", ("t2",), 3, "care")
    assert "0, 0.25 and 1" in found.message
    design[:, 3] = rng.choice([0, 0.25, 0.5, 1], 60)
    assert findings(design[:, :1], design[:, 1:]) == []


# --- dependent --------------------------------------------------------------------------------------------------------


def test_two_calibration_inputs_that_vary_as_one(findings: Make) -> None:
    design = hypercube(np.random.default_rng(0), 50, 5)
    design[:, 4] = 1 - 0.5 * design[:, 2]
    found = only([f for f in findings(design[:, :1], design[:, 1:]) if f.kind == "dependent"])
    assert (found.names, found.severity) == (("t3", "t1"), "bad")
    assert found.value > 0.9999
    assert "'t3' is a linear function of 't1'" in found.message


def test_a_sum_of_others_is_named_with_them_alone(findings: Make) -> None:
    design = hypercube(np.random.default_rng(0), 50, 6)
    design[:, 5] = (design[:, 1] + design[:, 3]) / 2
    found = only([f for f in findings(design[:, :1], design[:, 1:]) if f.kind == "dependent"])
    assert set(found.names) == {"t0", "t2", "t4"}
    assert found.severity == "bad"


def test_runs_count_once_however_many_rows_they_have(findings: Make) -> None:
    """Two runs off the line, with a row each, among thirty on it with fifty rows each."""
    rng = np.random.default_rng(0)
    t = hypercube(rng, 32, 2)
    t[2:, 1] = t[2:, 0]
    t[:2] = [[0, 1], [1, 0]]
    rows = np.repeat(np.arange(32), [1, 1, *[50] * 30])
    by_rows = np.corrcoef(t[rows].T)[0, 1] ** 2
    found = findings(rng.random((len(rows), 1)), t[rows])
    assert by_rows > 0.98 > np.corrcoef(t.T)[0, 1] ** 2
    assert [f.kind for f in found] == []


@pytest.mark.parametrize(("source", "severity"), [(0, "care"), (2, "bad")], ids=["of a control", "of a parameter"])
def test_a_control_input_that_depends_on_another_input(source: int, severity: str, findings: Make) -> None:
    design = hypercube(np.random.default_rng(1), 50, 4)
    design[:, 1] = design[:, source]
    found = only(findings(design[:, :2], design[:, 2:]))
    assert (found.kind, found.severity) == ("dependent", severity)
    assert found.names == ("x1", "x0" if source == 0 else "t0")


def test_correlated_is_not_dependent(findings: Make) -> None:
    design = hypercube(np.random.default_rng(0), 50, 4)
    design[:, 3] = 0.5 * design[:, 2] + 0.5 * design[:, 3]
    assert "dependent" not in [f.kind for f in findings(design[:, :1], design[:, 1:])]


# --- empty box --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "severity"), [(0.8, "care"), (0.3, "bad")])
def test_runs_over_a_part_of_the_prior(width: float, severity: str, findings: Make) -> None:
    design = hypercube(np.random.default_rng(0), 100, 3)
    design[:, 1] *= width
    found = only(findings(design[:, :1], design[:, 1:]))
    assert (found.kind, found.names, found.severity) == ("empty_box", ("t0",), severity)
    assert found.value == pytest.approx(width, abs=0.02)
    assert f"{found.value:.0%} of its prior, uniform(0, 1)" in found.message


def test_it_is_the_prior_and_not_the_bounds_that_counts(findings: Make) -> None:
    design = hypercube(np.random.default_rng(0), 100, 3)
    design[:, 1] *= 0.3
    narrow = {"family": "normal", "mean": 0.15, "sd": 0.05}
    assert findings(design[:, :1], design[:, 1:], priors={0: narrow}) == []
    wide = {"family": "normal", "mean": 0.15, "sd": 5.0}
    found = only(findings(design[:, :1], design[:, 1:], priors={0: wide}))
    assert (found.kind, found.severity) == ("empty_box", "bad")


def test_runs_along_a_diagonal(findings: Make) -> None:
    rng = np.random.default_rng(0)
    design = hypercube(rng, 100, 4)
    design[:, 2] = np.clip(design[:, 1] + 0.03 * rng.standard_normal(100), 0, 1)
    found = only(findings(design[:, :1], design[:, 1:]))
    assert (found.kind, found.severity) == ("empty_box", "care")
    assert "'t0' and 't1' by 0.99" in found.message
    assert 0.05 < found.value < 0.2


@pytest.mark.parametrize(
    "prior",
    [
        Normal(mean=0.4, sd=0.2),
        Uniform(low=-1, high=2),
        LogNormal(mu=-0.5, sigma=0.7),
        Beta(a=2, b=3, low=-1, high=3),
        TruncatedNormal(mean=0.2, sd=0.5, low=0, high=1.5),
        TruncatedNormal(mean=-6, sd=1, low=0, high=2),
        Gamma(shape=2.5, rate=3),
    ],
    ids=lambda prior: prior.family,
)
def test_cdf_against_scipy(prior: Prior) -> None:
    from scipy import stats

    reference: Any = {
        "normal": lambda p: stats.norm(p.mean, p.sd),
        "uniform": lambda p: stats.uniform(p.low, p.high - p.low),
        "lognormal": lambda p: stats.lognorm(p.sigma, scale=math.exp(p.mu)),
        "beta": lambda p: stats.beta(p.a, p.b, p.low, p.high - p.low),
        "truncated_normal": lambda p: stats.truncnorm((p.low - p.mean) / p.sd, (p.high - p.mean) / p.sd, p.mean, p.sd),
        "gamma": lambda p: stats.gamma(p.shape, scale=1 / p.rate),
    }[prior.family](prior)
    for value in (-3.0, -0.5, 0.0, 0.1, 0.5, 1.0, 1.7, 5.0):
        assert prior.cdf(value) == pytest.approx(float(reference.cdf(value)), abs=1e-9)


# --- outside ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "severity"), [(2, "care"), (20, "bad")])
def test_observations_where_there_are_no_runs(count: int, severity: str, findings: Make) -> None:
    rng = np.random.default_rng(0)
    design = hypercube(rng, 200, 3)
    design[:, 0] *= 0.5
    observed = rng.uniform(0.05, 0.45, (50, 1))
    observed[:count] = 0.6
    observed[0] = 0.75
    found = only(findings(design[:, :1], design[:, 1:], observed=observed))
    assert (found.kind, found.names, found.severity) == ("outside", ("x0",), severity)
    assert found.value == count / 50
    assert f"{count} rows of the observations ({2 * count}%) have 'x0' outside" in found.message
    assert "the furthest 0.75" in found.message


@pytest.mark.parametrize(("count", "severity"), [(2, "care"), (40, "bad")])
def test_measured_values_that_no_run_comes_near(count: int, severity: str, findings: Make) -> None:
    rng = np.random.default_rng(0)
    design = hypercube(rng, 200, 3)
    y = rng.uniform(1, 2, 60)
    y[:count] += 5000
    y[50:] = np.nan
    found = only(findings(design[:, :1], design[:, 1:], observed=rng.uniform(0.1, 0.9, (60, 1)), y=y))
    assert (found.kind, found.names, found.severity) == ("outside", ("f",), severity)
    assert found.value == count / 50
    assert "check units" in found.message


def test_a_discrepancy_of_a_third_of_the_range_is_not_outside(findings: Make) -> None:
    rng = np.random.default_rng(0)
    design = hypercube(rng, 200, 3)
    z = design.sum(1)
    y = z.max() + 0.33 * np.ptp(z) * rng.random(30)
    assert findings(design[:, :1], design[:, 1:], z, rng.uniform(0.1, 0.9, (30, 1)), y) == []


# --- numbers of runs, and many rows -----------------------------------------------------------------------------------


def test_files_that_each_count_their_runs_from_one(findings: Make) -> None:
    x, t = long_form(np.random.default_rng(0), 40, 3, 5)
    assert findings(x, t, run=np.repeat(np.arange(40), 5)) == []
    found = only(findings(x, t, run=np.repeat(np.arange(40) % 20, 5)))
    assert (found.kind, found.names, found.value, found.severity) == ("mixed_runs", ("run",), 20, "bad")
    assert "20 numbers for 40 different sets" in found.message


def test_more_runs_than_are_kept_give_the_same_findings(findings: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    t = np.repeat(hypercube(rng, 2000, 3), 3, axis=0)
    t[:, 2] = t[:, 0]
    x = rng.random((6000, 1))
    run = np.repeat(np.arange(2000), 3)
    every = findings(x, t, run=run, chunk_rows=512)
    monkeypatch.setattr(design_survey, "MOST_RUNS", 300)
    fewer = findings(x, t, run=run, chunk_rows=512)
    assert [f.names for f in every] == [("t2", "t0")]
    assert [replace(f, value=0) for f in fewer] == [replace(f, value=0) for f in every]
    # Sums in another order differ in the last digit.
    assert [f.value for f in fewer] == pytest.approx([f.value for f in every], rel=1e-12)
    assert max(f.value for f in fewer) <= 1


def test_the_survey_does_not_depend_on_how_rows_are_cut(make_store: Callable[..., Store]) -> None:
    from storage.workers import workers

    with workers(None) as pool:
        surveys = [
            design_survey.survey_runs(make_store(runs=500, chunk_rows=rows, name=f"{rows}").runs, pool)
            for rows in (7, 64, 1024)
        ]
    for other in surveys[:2]:
        for name in ("rows", "low", "high", "mean", "products", "settings", "t"):
            np.testing.assert_allclose(getattr(other, name), getattr(surveys[2], name), rtol=1e-9)
        for a, b in zip(other.values, surveys[2].values, strict=True):
            assert len(a) == len(b)
        np.testing.assert_array_equal(other.values[2], np.unique(np.arange(97) / 97))
