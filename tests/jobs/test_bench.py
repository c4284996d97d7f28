"""The benchmarks run and say what they promise; how fast is for a quiet machine to tell."""

from __future__ import annotations

import json

import pytest

from jobs.bench import emulator, stream, train
from jobs.cli import main


@pytest.mark.slow
def test_stream(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(stream, "QUICK", stream.Size(rows=200_000, csv_rows=20_000, turns=1))
    with pytest.raises(SystemExit) as done:
        main(["bench", "stream", "--quick", "--json"])
    assert done.value.code == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    assert {
        "stream_rows_per_s",
        "stream_uncompressed_rows_per_s",
        "getitem_rows_per_s",
        "sequential_rows_per_s",
        "peak_rss_mb",
        "base_rss_mb",
        "ingest_csv_rows_per_s",
    } <= set(figures)
    assert all(value > 0 for value in figures.values() if not isinstance(value, str))
    assert figures["peak_rss_mb"] < 256 + 400
    assert "streaming, turn 1 of 1" in printed.err


@pytest.mark.slow
def test_emulator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(emulator, "QUICK", 3000)
    monkeypatch.setattr(emulator, "STEPS", 60)
    with pytest.raises(SystemExit) as done:
        main(["bench", "emulator", "--quick", "--json"])
    assert done.value.code == 0
    figures = json.loads(capsys.readouterr().out)
    assert {
        "collapsed_error",
        "collapsed_seconds",
        "fullrank_error",
        "meanfield_error_same_time",
        "svgp_error_same_time",
    } <= set(figures)
    assert figures["collapsed_error"] < 0.1
    assert figures["meanfield_error_same_time"] > figures["collapsed_error"]
    assert figures["runs"] == 3000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_train(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {"emulator": 60, "theta": 20, "joint": 3}
    monkeypatch.setattr(train, "QUICK", train.Size(5000, 1000, steps, large=100_000, turns=1))
    monkeypatch.setattr(train, "FEW", 100)  # fewer than all, as at the sizes of the benchmark
    with pytest.raises(SystemExit) as done:
        main(["bench", "train", "--quick", "--json"])
    assert done.value.code == 0
    figures = json.loads(capsys.readouterr().out)
    assert {
        "seconds",
        "error",
        "bare_loop_ratio",
        "data_wait_fraction",
        "two_process_speedup",
        "peak_rss_mb",
    } <= set(figures)
    assert all(value > 0 for value in figures.values() if not isinstance(value, str))
    assert figures["error"] < 0.1  # a uniform θ has 0.32
    assert figures["data_wait_fraction"] < 1
    assert figures["peak_rss_mb"] < figures["base_rss_mb"] + 256 + 200
