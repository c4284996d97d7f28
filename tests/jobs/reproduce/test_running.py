"""The frame of the experiments: seeds, what is kept of them, the summary, and what is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pytest

import storage
from jobs.commands.reproduce import show
from jobs.reproduce.experiment import Experiment, Figure, Lines, Outcome, Say, ingested
from jobs.reproduce.running import reproduce, summarise
from vcal_dist.errors import ConfigError
from vcal_dist.plots.style import rows
from vcal_dist.problems import borehole


class Counted:
    """An experiment that knows how often it was run: θ is the square of its seed, and only seed 0 has `extra`."""

    def __init__(self, size: int = 3) -> None:
        self.ran: list[int] = []
        self.size = size
        self.fail = False
        self.experiment = Experiment(
            name="counted",
            title="Counting",
            notes=("A note.",),
            figures=lambda quick: (
                Figure("square", "square of the seed", paper=7.0, unit="m"),
                Figure("extra", "only of the first seed", floor=0.5),
                Figure("never", "never run", paper=0.14),
            ),
            settings=lambda quick: {"size": 1 if quick else self.size, "levels": (0.9, 0.95)},
            run=self.run,
            table=lambda details: Lines("More", ("draw", "value"), [("last", str(details["draws"][-1]))]),
        )

    def run(self, folder: Path, seed: int, settings: dict[str, Any], say: Say) -> Outcome:
        if self.fail:
            raise RuntimeError("out of luck")
        self.ran.append(seed)
        say(f"seed {seed}")
        chart = alt.Chart(rows(a=[1, 2])).mark_point().encode(x="a:Q")
        ours = {"square": np.float64(seed**2)} | ({} if seed else {"extra": 0.25})
        return Outcome(ours, {"square": float(seed)}, {"draws": np.arange(2)}, {"dots": chart})


def run(counted: Counted, output: Path, seeds: int, *, quick: bool = False) -> dict[str, Any]:
    return reproduce(counted.experiment, output, seeds=seeds, quick=quick, say=lambda _: None)


def test_seeds_are_summarised_by_median_and_range(tmp_path: Path) -> None:
    results = run(Counted(), tmp_path, 4)
    assert results["ours"]["square"] == {"median": 2.5, "low": 0, "high": 9, "values": [0, 1, 4, 9]}
    assert results["ours"]["extra"] == {"median": 0.25, "low": 0.25, "high": 0.25, "values": [0.25, None, None, None]}
    assert results["ours"]["never"] is None
    assert results["paper"] == {"square": 7.0, "extra": None, "never": 0.14}
    assert results["floor"] == {"square": 1.5, "extra": 0.5, "never": None}  # of the data, or given
    assert len(results["seconds"]) == results["seeds"] == 4
    assert results["versions"]["torch"]


def test_results_are_in_a_file_as_they_are_returned_with_figures_of_the_first_seed(tmp_path: Path) -> None:
    results = run(Counted(), tmp_path, 2)
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["details"] == [{"draws": [0, 1]}] * 2
    assert written["ours"] == results["ours"]
    assert written["settings"] == {"size": 3, "levels": [0.9, 0.95]}
    assert (tmp_path / "figures" / "dots.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "figures" / "dots.pdf").read_bytes().startswith(b"%PDF")


def test_seeds_that_are_done_are_not_run_again(tmp_path: Path) -> None:
    counted = Counted()
    first = run(counted, tmp_path, 2)
    again = run(counted, tmp_path, 3)
    assert counted.ran == [0, 1, 2]
    assert again["ours"]["square"]["values"][:2] == first["ours"]["square"]["values"]
    assert again["seconds"][:2] == first["seconds"]


def test_a_seed_that_failed_is_run_again(tmp_path: Path) -> None:
    counted = Counted()
    counted.fail = True
    with pytest.raises(RuntimeError, match="out of luck"):
        run(counted, tmp_path, 1)
    counted.fail = False
    assert run(counted, tmp_path, 1)["ours"]["square"]["median"] == 0


def test_data_and_runs_of_other_settings_are_not_taken_for_these(tmp_path: Path) -> None:
    run(Counted(), tmp_path, 1)
    for other, quick in ((Counted(size=4), False), (Counted(), True)):
        with pytest.raises(ConfigError, match=r"seed-0 holds an experiment with other settings; delete it"):
            run(other, tmp_path, 1, quick=quick)
        assert other.ran == []


def test_the_table_has_papers_and_ours_and_the_floor_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(run(Counted(), tmp_path, 4), Counted().experiment, tmp_path)
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "figure paper ours, median of 4 range floor" in printed
    assert "square of the seed, m 7 2.5 0 to 9 1.5" in printed
    assert "only of the first seed – 0.25 1 seed 0.5" in printed
    assert "never run 0.14 – –" in printed
    assert "A note." in printed
    assert "last 1" in printed


def test_one_seed_has_no_range_and_a_quick_run_says_that_it_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(run(Counted(), tmp_path, 1, quick=True), Counted().experiment, tmp_path)
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any("quick: smaller than the paper" in line for line in printed)
    assert "square of the seed, m 7 0 0" in printed


def test_what_json_cannot_hold_is_an_error_that_names_it(tmp_path: Path) -> None:
    counted = Counted()
    done = [{"ours": {}, "floor": {}, "details": {}, "settings": {}, "seconds": 0.0}]
    assert summarise(counted.experiment, done, quick=False)["ours"]["square"] is None
    broken = Experiment("b", "B", (), lambda _: (), lambda _: {}, lambda *_: Outcome({}, {}, {"no": object()}))
    with pytest.raises(TypeError, match="results hold a object"):
        reproduce(broken, tmp_path, seeds=1, quick=False, say=lambda _: None)


def test_data_are_ingested_once_and_leave_no_files_beside_the_store(tmp_path: Path) -> None:
    data = borehole.generate(30, 20, seed=1)
    tables = {"x": data.x_runs, "t": data.t, "z": data.z}, {"x": data.x, "y": data.y}
    store = ingested(tmp_path / "seed-0", borehole.problem(), *tables)
    assert [path.name for path in store.parent.iterdir()] == [store.name]
    np.testing.assert_array_equal(storage.open(store).runs.read()["z"], data.z)
    before = store.stat().st_mtime_ns
    assert ingested(tmp_path / "seed-0", borehole.problem(), *tables) == store
    assert store.stat().st_mtime_ns == before
    assert storage.open(store).observations.rows == 20
