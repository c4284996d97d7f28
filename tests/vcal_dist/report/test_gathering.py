"""A report is made of the rows that training did not see, of a sample where there are many, or says what is missing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from storage.store import open_store
from vcal_dist.metrics import read_metrics
from vcal_dist.posterior import Posterior
from vcal_dist.report import gather, gathering, html


def test_held_out_rows_are_those_that_training_judged(small_run: Path) -> None:
    found = gather(small_run, Posterior.load(small_run))
    recorded = found.record["assessment"]
    assert found.runs is not None
    assert found.observations is not None
    assert (found.runs.judged.method, found.observations.judged.method) == ("held out", "leave one out")
    assert (found.runs.rows, found.observations.rows) == (recorded["runs"]["rows"], recorded["observations"]["rows"])
    for sample, name in ((found.runs, "runs"), (found.observations, "observations")):
        error = np.sqrt(np.mean(np.square(sample.judged.mean - sample.judged.y)))
        assert error == pytest.approx(recorded[name]["rmse"][0], rel=0.05)


def test_many_rows_are_sampled_and_the_page_says_so(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "most_rows", lambda outputs: 15)
    found = gather(small_run, Posterior.load(small_run))
    assert found.observations is not None
    assert (found.observations.rows, found.observations.among) == (15, 60)
    everything = gathering.open_store(found.config.store).observations.read()["x"] if found.config else None
    assert everything is not None
    assert np.isin(found.observations.judged.x, everything.astype(np.float64)).all()
    assert "A random sample of 15 of 60 observations" in html(found)


@pytest.mark.parametrize(("outputs", "rows"), [(1, 2000), (2, 2000), (20, 200), (500, 200)])
def test_the_sample_shrinks_with_the_outputs(outputs: int, rows: int) -> None:
    assert gathering.most_rows(outputs) == rows


def test_without_its_store_a_run_is_still_reported(small_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(small_run, run)
    store = small_run.parent / "data.zarr"
    hidden = small_run.parent / "hidden.zarr"
    store.rename(hidden)
    try:
        found = gather(run, Posterior.load(run))
        page = html(found)
    finally:
        hidden.rename(store)
    assert (found.store, found.runs, found.observations) == (None, None, None)
    assert "there is no store at" in str(found.unreachable)
    assert "Charts that need observations are left out: there is no store at" in page
    assert "of 22 runs that training did not see lie inside" in page  # training has recorded that


def test_rows_that_came_later_are_counted_and_not_read(small_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(small_run.parent, folder)
    posterior = Posterior.load(folder / "run")
    posterior.record["config"]["store"] = str(folder / "data.zarr")
    open_store(folder / "data.zarr").append_observations([[0.5]] * 3, [[1.0]] * 3)
    found = gather(folder / "run", posterior)
    assert found.newer == {"observations": 3}
    assert found.observations is not None
    assert found.observations.rows == 60


def test_files_are_called_what_training_calls_them() -> None:
    from vcal_dist import run_directory

    theirs = (run_directory.VERSIONS, run_directory.DATA)
    assert theirs == (gathering.VERSIONS, gathering.DATA)


def test_half_a_row_of_metrics_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,phase,seconds,loss\n1,emulator,0.1,2.5\n2,emulator,", encoding="utf-8")
    assert [row["step"] for row in read_metrics(tmp_path)] == ["1"]
    assert read_metrics(tmp_path / "none") == []
