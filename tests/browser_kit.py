"""Chromium of the system, driven by Playwright: a page of a file at some width, and everything that went on in it."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

PHONE, DESKTOP = (390, 844), (1280, 900)
PATIENCE = 60_000  # milliseconds, on a busy machine


@dataclass
class Shown:
    """A page in the browser, with what it said and asked for."""

    page: Any
    said: list[str] = field(default_factory=list)  # on the console, errors included
    asked: list[str] = field(default_factory=list)  # addresses

    def draw_all(self) -> None:
        """Waits until every chart is drawn, or has failed."""
        self.page.wait_for_selector("html[data-drawn]", state="attached", timeout=PATIENCE)

    def unfold(self) -> None:
        """Opens what is folded, but for the menus of charts."""
        self.page.evaluate("document.querySelectorAll('details.fold').forEach(fold => { fold.open = true; })")

    def charts(self) -> list[dict[str, Any]]:
        """Of every chart its name, its size on the page, and how many marks it has."""
        found: list[dict[str, Any]] = self.page.evaluate(
            """() => [...document.querySelectorAll('.chart')].map(place => {
              const svg = place.querySelector('svg.marks');
              const box = svg ? svg.getBoundingClientRect() : {width: 0, height: 0};
              const marks = svg ? svg.querySelectorAll(
                '.role-mark path, .role-mark line, .role-mark text, .role-mark rect').length : 0;
              return {name: place.dataset.name, state: place.dataset.state, width: box.width, height: box.height, marks,
                      right: box.right};
            })"""
        )
        return found

    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


def executable() -> str:
    """The browser's program; without one the test is skipped."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    return found


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    program = executable()
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield running
        finally:
            running.close()


@contextlib.contextmanager
def shown(running: Any, file: Path, size: tuple[int, int] = DESKTOP) -> Iterator[Shown]:
    """A file in a page of its own."""
    page = running.new_page(viewport={"width": size[0], "height": size[1]})
    found = Shown(page)
    page.on("console", lambda message: found.said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.said.append(f"error: {error}"))
    page.on("request", lambda request: found.asked.append(request.url))
    try:
        page.goto(file.resolve().as_uri(), wait_until="load", timeout=PATIENCE)
        yield found
    finally:
        page.close()
