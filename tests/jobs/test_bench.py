"""The benchmarks run and say what they promise; how fast is for a quiet machine to tell."""

from __future__ import annotations

import json

import pytest

from jobs.bench import stream
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
