"""`vcal report`: one page beside the run, or where one wants it; figures for a paper; runs of every kind and place."""

from __future__ import annotations

import shutil
from pathlib import Path

import fsspec
import pytest

from jobs.cli import main
from tests.vcal_dist.report.runs_kit import trained
from vcal_dist.mixed import Averaged
from vcal_dist.posterior import Posterior


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("reported"), parameters=1, observations=12, runs=80)


def report(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(["report", *map(str, arguments)])
    return int(end.value.code or 0)


def test_a_page_is_written_beside_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(run) == 0
    said = capsys.readouterr()
    assert said.out == f"{run / 'report.html'}\n"
    assert "predicting 12 observations, each as if it had been left out …" in said.err
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<h1>small</h1>" in page
    assert str(run) in page


def test_figures_are_written_where_one_wants_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(run, "--format", "png", "-o", tmp_path / "for the paper") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'for the paper'}\n"
    written = list((tmp_path / "for the paper").iterdir())
    names = {path.name for path in written}
    assert names >= {"marginal-t0.png", "observed-y0.png", "process-y0-x0.png", "emulator-y0.png", "training-loss.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_figures_show_units_that_vega_lite_would_read_as_code(tmp_path: Path) -> None:
    run = trained(tmp_path, parameters=1, observations=10, runs=60, strange=True)
    assert report(run, "--format", "pdf") == 0
    assert len(list((run / "figures").glob("*.pdf"))) >= 12


def test_a_figure_that_cannot_be_drawn_is_told_with_its_file(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(*_: object, **__: object) -> bytes:
        raise ValueError("Vega-Lite to PNG conversion failed:\nError: no such thing\n    at l (https://cdn/vega:1:2)")

    monkeypatch.setattr("vl_convert.vegalite_to_png", convert)
    assert report(run, "--format", "png", "-o", tmp_path / "p") == 1
    said = capsys.readouterr().err
    assert "marginal-t0.png" in said.replace("\n", "")
    assert "Error: no such thing" in " ".join(said.split())
    assert "cdn" not in said


def test_figures_are_added_to_a_folder_and_the_help_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.png").write_text("mine")
    (tmp_path / "pairs.png").write_text("of an earlier report, with another parameter")
    (tmp_path / "marginal-t0.png").write_text("of an earlier report")
    assert report(run, "--format", "png", "-o", tmp_path) == 0
    assert (tmp_path / "mine.png").read_text() == "mine"
    assert (tmp_path / "pairs.png").is_file()
    assert (tmp_path / "marginal-t0.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", "300")
    assert report("--help") == 0
    assert "a folder to which figures are added" in " ".join(capsys.readouterr().out.split())


def test_an_average_is_reported_beside_its_directory(run: Path, tmp_path: Path) -> None:
    posterior = Posterior.load(run)
    mixture = tmp_path / "mixture"
    Averaged([posterior, posterior], [0.0, -1.0]).save(mixture)
    assert report(mixture) == 0
    page = (tmp_path / "mixture-report.html").read_text(encoding="utf-8")
    assert "an average of 2 calibrations" in page
    assert "Predicted by the heaviest member of the average." in page
    Averaged.load(mixture).save(mixture)  # nothing in it stands in the way


def test_a_run_in_an_object_store_has_its_report_there(
    run: Path, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)
    files.put(str(run), f"{s3_url}/reported", recursive=True)
    assert report(f"{s3_url}/reported") == 0
    assert capsys.readouterr().out == f"{s3_url}/reported/report.html\n"
    assert f"{s3_url}/reported".encode() in files.cat(f"{s3_url}/reported/report.html")


def test_what_is_no_finished_run_is_said(
    run: Path, tmp_path: Path, s3_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "unfinished", ignore=shutil.ignore_patterns("posterior.*", "report.html"))
    for path, words in (
        (tmp_path / "unfinished", "is not finished"),
        (tmp_path / "nothing", "there is no run at"),
        (run.parent / "data.zarr", "is a store of data, not a run"),
        (f"{s3_url}/nothing", "there is no run at"),
    ):
        assert report(path) == 1
        assert words in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "unfinished" / "report.html").exists()


def test_of_a_sweep_it_is_said_where_its_page_and_its_best_run_are(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "sweep.yaml").write_text("sweep: {}\n")
    assert report(sweep) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "is a sweep, not a run: it has no page yet; none of its trials is finished yet" in said
    shutil.copytree(run, sweep / "best")
    (sweep / "sweep.html").write_text("a page")
    assert report(sweep) == 1
    said = capsys.readouterr().err.replace("\n", "").replace(" ", "")
    assert f"{sweep}/sweep.html;reportitsbestrunwith:vcalreport{sweep}/best" in said
    assert report(sweep / "best") == 0


def test_a_place_that_cannot_be_written_is_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    for arguments in (["-o", tmp_path / "file" / "report.html"], ["-o", tmp_path / "file", "--format", "png"]):
        assert report(run, *arguments) == 1
        assert "choose another path" in " ".join(capsys.readouterr().err.split())
