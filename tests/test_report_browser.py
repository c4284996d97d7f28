"""Reports in a real browser: every chart drawn, nothing said on the console, no network asked, no overflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser_kit import DESKTOP, PHONE, browser, shown
from tests.vcal_dist.report.runs_kit import BREAK, STRANGE, trained
from vcal_dist.posterior import Posterior
from vcal_dist.report import gather, html

MEGABYTE = 1e6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One parameter and ten observations under names that bite; a general discrepancy; thirty parameters."""
    sizes: dict[str, dict[str, Any]] = {
        "strange": {"parameters": 1, "observations": 10, "runs": 60, "strange": True},
        "general": {"controls": 2, "model": {"discrepancy": "general"}},
        "many": {"controls": 3, "parameters": 30, "outputs": 20, "runs": 500, "observations": 450},
    }
    found = {}
    for name, size in sizes.items():
        run = trained(tmp_path_factory.mktemp(name), **size)
        found[name] = run.parent / "report.html"
        truth = {v.name: 0.4 for v in Posterior.load(run).problem.calibration_inputs}
        found[name].write_text(html(gather(run, Posterior.load(run), truth=truth)), encoding="utf-8")
    return found


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("name", ["strange", "general", "many"])
def test_a_report_is_drawn_whole(running: Any, pages: dict[str, Path], name: str, size: tuple[int, int]) -> None:
    with shown(running, pages[name], size) as seen:
        seen.draw_all()
        assert seen.overflow() <= 0
        seen.unfold()
        assert seen.overflow() <= 0
        charts = seen.charts()
        assert len(charts) >= {"strange": 12, "general": 18, "many": 100}[name]
        assert [chart for chart in charts if chart["state"] != "drawn" or not chart["marks"]] == []
        assert [c for c in charts if c["width"] < 100 or c["height"] < 40 or c["right"] > size[0]] == []
        assert seen.said == []
        assert [address for address in seen.asked if not address.startswith("data:,")] == [pages[name].as_uri()]


def test_names_are_shown_as_they_are(running: Any, pages: dict[str, Path]) -> None:
    with shown(running, pages["strange"]) as seen:
        seen.draw_all()
        seen.unfold()
        assert seen.page.locator("h1").inner_text() == STRANGE
        assert seen.page.locator(".description").inner_text() == BREAK
        assert seen.page.locator("img").count() == 0
        axes = seen.page.locator(".role-axis-title").all_text_contents()
        assert any(f"t0 {STRANGE}" in text for text in axes)
        assert seen.said == []


def test_charts_follow_the_width_of_the_window_and_answer_the_pointer(running: Any, pages: dict[str, Path]) -> None:
    with shown(running, pages["general"]) as seen:
        seen.draw_all()
        before = {chart["name"]: chart["width"] for chart in seen.charts()}
        seen.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        seen.page.wait_for_timeout(600)
        assert all(chart["width"] <= PHONE[0] for chart in seen.charts())
        assert before["observed-y0"] > PHONE[0]
        assert seen.overflow() <= 0
        chart = seen.page.locator(".chart[data-name='observed-y0']")
        chart.scroll_into_view_if_needed()
        chart.locator(".role-mark.mark-symbol path").first.hover(force=True)
        tip = seen.page.locator("#vg-tooltip-element.visible")
        tip.wait_for(timeout=5000)
        assert "predicted" in tip.inner_text()
        assert seen.said == []


def test_on_paper_nothing_is_folded(running: Any, pages: dict[str, Path]) -> None:
    with shown(running, pages["general"]) as seen:
        seen.draw_all()
        folded = seen.page.locator("details.fold:not([open])").count()
        assert folded > 0
        paper = seen.page.pdf()
        assert paper.startswith(b"%PDF")
        assert len(paper) > 100_000
        assert seen.page.locator("details.fold:not([open])").count() == folded  # as it was


def test_a_report_stays_small(pages: dict[str, Path]) -> None:
    sizes = {name: page.stat().st_size / MEGABYTE for name, page in pages.items()}
    assert 0.9 < sizes["strange"] < 2
    assert sizes["many"] < 10
