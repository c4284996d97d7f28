"""`vcal reproduce all --quick`: the paper's four experiments at small sizes, from files to figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.jobs.reproduce.conftest import Reproduced

NAMES = ("illustrative", "cell", "radionuclide", "borehole")


@pytest.fixture(scope="module")
def results(reproduced: Reproduced) -> dict[str, dict[str, Any]]:
    return {name: json.loads((reproduced.output / name / "results.json").read_text()) for name in NAMES}


def ours(results: dict[str, dict[str, Any]], name: str) -> dict[str, float]:
    return {key: found["median"] for key, found in results[name]["ours"].items() if found is not None}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_experiment_prints_the_papers_figures_beside_ours_and_leaves_figures(
    reproduced: Reproduced, results: dict[str, dict[str, Any]]
) -> None:
    for name, found in results.items():
        assert found["title"].split("(")[0].strip()[:20] in reproduced.printed
        assert found["quick"]
        assert found["versions"]["torch"]
        assert found["paper"].keys() == found["ours"].keys() == found["floor"].keys() == found["figures"].keys()
        pictures = sorted((reproduced.output / name / "figures").iterdir())
        assert {path.suffix for path in pictures} == {".png", ".pdf"}
        assert all(path.stat().st_size > 5000 for path in pictures)
    assert results["cell"]["paper"]["additive"] == 1.83
    assert results["cell"]["paper"]["koh"] == 5.10
    assert results["borehole"]["paper"]["seconds_default"] == pytest.approx(1.4 * 3600)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_is_nearest_to_the_exact_posterior(results: dict[str, dict[str, Any]]) -> None:
    found = ours(results, "illustrative")
    assert found["distance_collapsed"] < 0.15
    assert found["distance_collapsed"] < min(found["distance_fullrank"], found["distance_meanfield"])
    assert found["sd_collapsed"] == pytest.approx(results["illustrative"]["floor"]["sd_collapsed"], rel=0.2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quick_cell_is_calibrated_to_within_a_factor_of_two_of_the_paper(
    results: dict[str, dict[str, Any]],
) -> None:
    found, paper, floor = (ours(results, "cell"), *(results["cell"][key] for key in ("paper", "floor")))
    assert floor["l2"] == pytest.approx(0.64221, abs=1e-5)
    # 2.09, 1.99 and 1.01 with quick sizes; a uniform θ has 93.
    for name in ("additive", "general"):
        assert floor[name] < found[name] < 2 * paper[name]
    assert floor["l2"] < found["l2"] < paper["l2"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_deep_emulator_captures_the_spike_and_a_shallow_one_does_not(results: dict[str, dict[str, Any]]) -> None:
    found = ours(results, "radionuclide")
    spike = results["radionuclide"]["details"][0]["spike"]["nature"]
    assert found["spike_truth_deep"] < 0.1 * spike
    assert found["spike_truth_shallow"] > 2 * found["spike_truth_deep"]
    assert found["lpd_deep"] > found["lpd_shallow"] + 0.5
    assert found["rmse_deep"] < 0.7 * found["rmse_shallow"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_borehole_reaches_its_floor_with_the_truth_inside(results: dict[str, dict[str, Any]]) -> None:
    found, floor = ours(results, "borehole"), results["borehole"]["floor"]["measure_default"]
    assert floor == pytest.approx(0.008, abs=5e-4)
    assert 0.8 * floor < found["measure_default"] < 0.012
    assert 0.3 < found["measure_uniform"] < 0.45
    assert found["inside_default"] == 3
    assert found["emulator_default"] < 0.01 < found["emulator_meanfield"]
    assert found["sigma_default"] == pytest.approx(0.005, rel=0.1)
