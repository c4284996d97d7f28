"""`vcal bench emulators`: designs, scores and summary are what they say; methods learn and say how sure they are."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jobs.bench import emulator_methods, emulators, exact_gp, svgp
from jobs.bench.emulator_methods import Design, Fitted
from jobs.bench.emulators import Cell, Scores, Task
from jobs.bench.exact_gp import fit_exact_gp
from jobs.cli import main
from jobs.workers import in_processes
from storage.errors import VcalError
from vcal_dist.problems.longform import LONG_FORMS


def test_methods_and_sizes_of_every_function() -> None:
    tasks = emulators.choose(["friedman", "plume", "reservoir"], [50, 10_000, 20, 50], 2)
    of: dict[tuple[str, int], list[str]] = {}
    for task in tasks:
        if task.seed == 1:
            of.setdefault((task.function, task.runs), []).append(task.method)
    assert of == {
        ("friedman", 20): ["default", "exact_gp"],
        ("friedman", 50): ["default", "exact_gp"],
        ("friedman", 10_000): ["default", "svgp"],
        ("plume", 36): ["default", "exact_gp", "svgp"],
        ("reservoir", 300): ["default", "exact_gp", "svgp"],
    }
    assert len(tasks) == len(set(tasks)) == 2 * sum(map(len, of.values()))
    assert tasks[0].function == "reservoir"  # the most rows


@pytest.mark.parametrize(
    ("functions", "sizes", "message"),
    [(["nothing"], [20], "no function 'nothing'; accepted: borehole,"), (["ridge"], [20, 1], "a size is 1;")],
)
def test_what_cannot_be_measured_is_named(functions: list[str], sizes: list[int], message: str) -> None:
    with pytest.raises(VcalError, match=message):
        emulators.choose(functions, sizes, 1)


def test_a_design_is_a_latin_hypercube_of_its_seed() -> None:
    design, fresh, truth = emulators.make("otl_circuit", 30, 4)
    assert design.u.shape == (30, 6)
    for column in design.u.T:
        assert sorted(np.floor(column * 30).astype(int)) == list(range(30))
    assert (design.controls, design.run.tolist()) == (0, list(range(30)))
    assert fresh.shape == (emulators.FRESH, 6)
    assert truth.shape == (emulators.FRESH,)
    again, other = emulators.make("otl_circuit", 30, 4)[0], emulators.make("otl_circuit", 30, 5)[0]
    np.testing.assert_array_equal(design.z, again.z)
    assert not np.allclose(np.sort(design.z), np.sort(other.z))


def test_fresh_points_of_a_long_form_problem_are_whole_other_runs() -> None:
    design, fresh, _ = emulators.make("oscillator", 25, 0)
    places, controls = LONG_FORMS["oscillator"].x.shape
    assert design.u.shape == (25 * places, 4)
    assert design.controls == controls
    assert np.bincount(design.run).tolist() == [places] * 25
    assert len(fresh) >= emulators.FRESH
    assert (fresh.reshape(-1, places, 4)[:, :, :controls] == LONG_FORMS["oscillator"].x).all()
    seen, new = ({tuple(t) for t in u[:, controls:]} for u in (design.u, fresh))
    assert len(seen) == 25
    assert not seen & new


def test_scores_of_the_right_distribution_and_of_one_that_is_too_sure() -> None:
    rng = np.random.default_rng(0)
    mean, sd = rng.standard_normal(200_000), np.full(200_000, 0.5)
    truth = mean + sd * rng.standard_normal(200_000)
    right = emulators.score(mean, sd, truth)
    assert right.rmse == pytest.approx(0.5, rel=0.01)
    assert right.coverage == pytest.approx(0.9, abs=0.005)
    assert right.log_density == pytest.approx(-0.5 * math.log(2 * math.pi * math.e * 0.25), abs=0.01)
    sure = emulators.score(mean, sd / 2, truth)
    assert sure.coverage == pytest.approx(0.589, abs=0.005)  # P(|N(0, 1)| < 1.645/2)
    assert sure.log_density < right.log_density
    none = emulators.score(mean, 0 * sd, truth)
    assert (none.coverage, none.log_density) == (0, -math.inf)


def scored(method: str, rows: int = 60, name: str = "friedman") -> Scores:
    design, fresh, truth = emulators.make(name, rows, 0)
    mean, sd = emulator_methods.METHODS[method](design, 0).predict(fresh)
    scale = truth.std()
    return emulators.score(mean / scale, sd / scale, truth / scale)


def test_the_exact_gaussian_process_learns_a_smooth_function_and_knows_how_well() -> None:
    found = scored("exact_gp")
    assert found.rmse < 0.1
    assert 0.6 < found.coverage <= 1
    assert found.log_density > 1  # −1.42 of the constant


def test_the_exact_gaussian_process_interpolates_and_keeps_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_gp, "STARTS", ((exact_gp.MOST_ROWS, 1),))
    design, fresh, _ = emulators.make("otl_circuit", 40, 0)
    mean, sd = fit_exact_gp(design.u, design.z, 0)(design.u[1:])
    np.testing.assert_allclose(mean, design.z[1:], atol=0.01 * design.z.std())
    one, scaled = (fit_exact_gp(design.u, z, 0)(fresh) for z in (design.z, 100 * design.z + 7))
    np.testing.assert_allclose(scaled[0], 100 * one[0] + 7, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(scaled[1], 100 * one[1], rtol=1e-2)
    assert np.median(one[1]) > 3 * np.median(sd)


def test_the_exact_gaussian_process_refuses_too_many_rows() -> None:
    with pytest.raises(ValueError, match="2001 rows"):
        fit_exact_gp(np.zeros((2001, 1)), np.zeros(2001), 0)


def test_of_long_runs_the_exact_gaussian_process_takes_a_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, ...]] = []

    def fit(u: Any, z: Any, seed: int) -> Any:
        taken.append((*u.shape, len(z), seed))

    monkeypatch.setattr(emulator_methods, "fit_exact_gp", fit)
    emulator_methods.fit_exact(emulators.make("plume", 36, 0)[0], 3)
    assert taken == [(2000, 5, 2000, 3)]


def test_the_sparse_one_says_how_sure_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that counts steps: 40 of the start and 60 of the training, however busy the machine is."""
    monkeypatch.setattr(svgp, "time", SimpleNamespace(perf_counter=count(0.0, 0.01).__next__))
    monkeypatch.setattr(emulator_methods, "SECONDS_SVGP", 1.0)
    found = scored("svgp", 1000)
    assert found.rmse < 0.2
    assert found.coverage > 0.8


def test_the_default_learns() -> None:
    found = scored("default", 300)
    assert found.rmse < 0.05
    assert found.log_density > 1


def cell(function: str, runs: int, seed: int, method: str, coverage: float, rmse: float, density: float) -> Cell:
    return Cell(function, runs, seed, method, runs, rmse, coverage, density, 1.0)


def test_summary() -> None:
    cells = [
        cell("ridge", 20, 0, "default", 0.40, 0.5, -1.0),
        cell("ridge", 20, 0, "exact_gp", 0.10, 0.4, -0.5),
        cell("ridge", 50, 0, "default", 0.70, 0.2, 1.0),
        cell("ridge", 50, 1, "default", 0.90, 0.2, 3.0),
        cell("ridge", 50, 2, "default", 0.95, 0.9, -99.0)._replace(failed="no"),
        cell("ridge", 50, 0, "exact_gp", 0.10, 0.4, 1.5),
        cell("step", 50, 0, "default", 0.98, 0.3, 1.0)._replace(reported_rmse=0.15),
        cell("step", 50, 0, "exact_gp", 0.10, 0.3, 1.0),
        cell("step", 10_000, 0, "default", 0.90, 0.1, 2.0)._replace(reported_rmse=0.11),
        cell("step", 10_000, 0, "svgp", 0.10, 0.2, 9.0),
        cell("plume", 36, 0, "default", 0.3, 0.1, 2.0),
    ]
    found = emulators.summarise(cells)
    assert found["worst_coverage"] == pytest.approx(0.8)  # mean over seeds
    assert found["worst_coverage_of"] == "ridge, N = 50"
    assert found["highest_coverage"] == 0.98
    assert found["worst_coverage_20"] == 0.40
    assert found["worst_coverage_long_form"] == 0.3
    assert found["median_log_density_gain_over_exact_gp"] == 0  # of −0.5, 0.5 and 0
    assert found["share_log_density_no_worse"] == pytest.approx(2 / 3)
    assert found["share_rmse_better"] == pytest.approx(1 / 3)
    assert found["reported_over_true_rmse_min"] == pytest.approx(0.5)
    assert found["reported_over_true_rmse_max"] == pytest.approx(1.1)
    assert found["failed"] == 1
    assert emulators.summarise([])["worst_coverage"] is None


def mean_of_the_runs(design: Design, seed: int) -> Fitted:
    """An emulator that knows nothing but what outputs are like."""
    mean, sd = design.z.mean(), design.z.std()
    return Fitted(lambda u: (np.full(len(u), mean), np.full(len(u), sd)), reported_rmse=float(sd))


def nothing(design: Design, seed: int) -> Fitted:
    raise ArithmeticError("no factor")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells in this process, by methods that cost nothing."""

    def one_by_one(work: Any, tasks: Any, workers: int) -> Iterator[Any]:
        yield from map(work, tasks)

    monkeypatch.setattr(emulators, "in_processes", one_by_one)
    monkeypatch.setattr(emulators, "METHODS", {"default": mean_of_the_runs, "exact_gp": nothing})


def test_a_cell_is_in_standard_deviations_and_a_failure_is_part_of_it(here: None) -> None:
    own = emulators.measure(Task("wing_weight", 200, 0, "default"))
    assert own.rmse == pytest.approx(1, abs=0.05)
    assert own.log_density == pytest.approx(-0.5 * math.log(2 * math.pi * math.e), abs=0.1)
    assert own.reported_rmse == pytest.approx(1, abs=0.05)
    assert own.rows == 200
    failed = emulators.measure(Task("wing_weight", 200, 0, "exact_gp"))
    assert failed.failed == "ArithmeticError: no factor"
    assert math.isnan(failed.rmse)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as done:
        main(["bench", "emulators", *arguments])
    assert isinstance(done.value.code, int)
    return done.value.code, *capsys.readouterr()


def test_the_command(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--quick", "--functions", "ridge, step", "--sizes", "20,50", "--seeds", "2")
    code, out, err = call(capsys, *options, "--json")
    assert code == 0
    found = json.loads(out)
    assert len(found["cells"]) == 2 * 2 * 2 * 2
    assert [each["rmse"] is None for each in found["cells"]] == [each["failed"] != "" for each in found["cells"]]
    assert found["failed"] == 8
    assert found["median_log_density_gain_over_exact_gp"] is None
    assert found["reported_over_true_rmse_min"] == pytest.approx(1, abs=0.1)
    assert "exact_gp failed: ridge, N = 50, seed 1: ArithmeticError: no factor" in err
    code, out, _ = call(capsys, *options)
    assert code == 0
    assert sum(line.split()[:2] == ["step", "50"] for line in out.splitlines()) == 4  # a row a cell
    assert "worst_coverage_of" in out


@pytest.mark.parametrize(
    ("option", "value", "code", "message"),
    [("--sizes", "20,many", 2, "20,many"), ("--functions", "circle", 1, "no function 'circle'")],
)
def test_options_that_cannot_be_are_named(
    option: str, value: str, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, _, err = call(capsys, option, value)
    assert found == code
    assert message in err


def test_processes_bring_results_and_end_when_nobody_waits() -> None:
    assert sorted(in_processes(abs, [-3, 2], 2)) == [2, 3]
    before = multiprocessing.active_children()
    results = in_processes(time.sleep, [0.0, 600.0, 600.0], 2)
    next(results)
    results.close()
    for _ in range(300):  # the pool's own thread may be the one that reaps them
        if set(multiprocessing.active_children()) <= set(before):
            break
        time.sleep(0.1)
    assert set(multiprocessing.active_children()) <= set(before)
