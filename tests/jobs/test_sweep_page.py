"""The charts of a sweep and of its page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jobs.sweeps.page import page
from jobs.sweeps.plot import panel, picture
from jobs.sweeps.settings import Sweep
from jobs.sweeps.trial import Rung, Trial
from vcal_dist.answers import ParameterSummary
from vcal_dist.report.page import render

KEY = "fit.emulator"
CHOICES = [{"steps": 100, "rate": 0.01}, {"steps": 100, "rate": 0.02}]  # that begin alike


@pytest.fixture
def sweep() -> Sweep:
    space = {KEY: {"choice": CHOICES}}
    return Sweep.parse({"store": "s", "output": "o", "sweep": {"space": space, "scheduler": "none"}})


@pytest.fixture
def trials(sweep: Sweep) -> list[Trial]:
    rung = sweep.last_rung
    return [Trial(n, {KEY: choice}, "done", rungs=(Rung(rung, 1, -n, 1.0),)) for n, choice in enumerate(CHOICES)]


def test_choices_that_begin_alike_have_places_of_their_own(sweep: Sweep, trials: list[Trial]) -> None:
    for chart in (panel(sweep, KEY, trials), picture(sweep, trials)):
        spec: dict[str, Any] = chart.to_dict()
        layer = spec.get("concat", [spec])[0]["layer"][0]
        (rows,) = spec["datasets"].values()
        texts = ['{"steps": 100, "rate": 0.01}', '{"steps": 100, "rate": 0.02}']
        assert {row["trial"]: row["value"] for row in rows} == dict(enumerate(texts))
        assert layer["encoding"]["x"]["scale"]["domain"] == texts
        assert 0 < layer["encoding"]["x"]["axis"]["labelLimit"] <= 125  # half a panel


def test_units_that_vega_lite_would_read_as_code_are_shown(
    sweep: Sweep, trials: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = [ParameterSummary("t", "\\upmu m", "uniform", 0.5, 0.1, 0.3, 0.5, 0.7)]
    charts: dict[str, Any] = {}

    def rendered(answer: Any, sections: Any, **said: Any) -> str:
        charts.update({figure.name: figure.chart for section in sections for figure in section.figures()})
        return render(answer, sections, **said)

    monkeypatch.setattr(
        "jobs.sweeps.page.Posterior", SimpleNamespace(load=lambda _: SimpleNamespace(summary=lambda: summary))
    )
    monkeypatch.setattr("jobs.sweeps.page.render", rendered)
    assert "agreement-1" in page(sweep, trials, ())
    assert charts["agreement-1"].to_dict()["layer"][0]["encoding"]["x"]["title"] == "t (∖upmu m)"
