"""The page holds the user's words as text, its charts as data, and one script that its policy names."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import altair as alt
import pytest

from tests.vcal_dist.report.runs_kit import BREAK, STRANGE, TAG, trained
from vcal_dist.plots.style import rows, styled, titled
from vcal_dist.posterior import Posterior
from vcal_dist.report import gather, html
from vcal_dist.report.content import Figure, Fold, Section
from vcal_dist.report.diagnostics import diagnose
from vcal_dist.report.figures import file_name, write_figures
from vcal_dist.report.page import finite, titles

SECTIONS = (
    "answer prior-and-posterior observations emulator discrepancy sensitivity training diagnostics data-and-settings"
)


class Read(HTMLParser):
    """Elements with their attributes, and the text of scripts and of everything else."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag if tag in ("script", "style") else self._inside
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.text += data


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Read:
    run = trained(tmp_path_factory.mktemp("strange"), parameters=1, observations=10, runs=60, strange=True)
    return Read(html(gather(run, Posterior.load(run))))


def test_every_check_is_on_the_page(small_run: Path) -> None:
    gathered = gather(small_run, Posterior.load(small_run))
    text = Read(html(gathered)).text
    names = [check.name for check in diagnose(gathered).checks]
    assert {"Emulator's error in θ", "Starts", "θ and discrepancy"} <= set(names)
    assert [name for name in names if name not in text] == []


def test_names_units_and_descriptions_are_text(strange: Read) -> None:
    assert len(strange.scripts) == 2
    assert all(tag != "img" and not any(name.startswith("on") for name in found) for tag, found in strange.elements)
    for text in (STRANGE, BREAK, BREAK + TAG, "run <b>"):
        assert text in strange.text


def test_charts_are_data_that_cannot_leave_their_element(strange: Read) -> None:
    data, _ = strange.scripts
    assert "<" not in data
    charts = json.loads(data)
    places = {str(found["id"]) for tag, found in strange.elements if found.get("class") == "chart"}
    assert places == set(charts)
    assert len(charts) >= 12
    assert BREAK in json.dumps(charts, ensure_ascii=False)  # in the title of an axis


def test_the_policy_admits_this_script_alone(strange: Read) -> None:
    (policy,) = (found["content"] for tag, found in strange.elements if "http-equiv" in found)
    assert policy is not None
    digest = base64.b64encode(hashlib.sha256(strange.scripts[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy


def test_nothing_is_loaded_from_elsewhere(strange: Read) -> None:
    loaded = [found.get("src") or found.get("href") for _, found in strange.elements]
    assert [address for address in loaded if address and not address.startswith(("#", "data:,"))] == []
    assert "http" not in strange.scripts[0]


def test_every_section_is_there_and_in_the_contents(strange: Read) -> None:
    assert [found["id"] for tag, found in strange.elements if tag == "section"] == SECTIONS.split()
    targets = [found["href"] for tag, found in strange.elements if tag == "a"]
    assert targets[: len(SECTIONS.split())] == [f"#{key}" for key in SECTIONS.split()]


def test_figures_become_files_of_their_own_names(tmp_path: Path) -> None:
    chart = styled(alt.Chart(rows(x=[1, 2], y=[3, 1])).mark_line().encode(x="x:Q", y="y:Q"))
    names = ["a/b", "A b", "θ"]  # the first two are one to some file systems
    section = Section("s", "S", [Figure(names[0], chart), Fold("more", [Figure(name, chart) for name in names[1:]])])
    written = write_figures([section], tmp_path / "figures", "pdf")
    assert [path.name for path in written] == ["a-b.pdf", "A-b-2.pdf", "θ.pdf"]
    assert all(path.read_bytes().startswith(b"%PDF") for path in written)


def test_file_names_hold_no_path() -> None:
    assert file_name("observed-../../etc <b>: flow θ") == "observed-..-..-etc-b-flow-θ"
    assert file_name("///") == "figure"
    assert not re.search(r"[/\\\0]", file_name("a/b\\c\0d"))
    assert len(file_name("水" * 200).encode()) <= 180  # with what is added while it is written, 255 are the limit


def test_titles_that_were_broken_into_lines_are_whole_again() -> None:
    assert titles("A title") == ("A title", "")
    assert titles({"text": ["rw"], "subtitle": ["one note", "another"]}) == ("rw", "one note; another")
    # Lines of every length, ends of parts at ends of lines among them.
    for length in range(20, 90):
        notes = ("each-row " * 20)[:length].strip() + "; dashed: where it should lie; line: their mean", "another"
        chart = titled(alt.Chart(rows(x=[1])).mark_point(), "a title that-is too long for a line " * 3, *notes)
        text, subtitle = titles(chart.to_dict()["title"])
        assert subtitle == "; ".join(notes)
        assert text == ("a title that-is too long for a line " * 3).strip()


def test_numbers_that_json_has_not_become_null() -> None:
    found = finite({"domain": [0.5, math.nan], "values": [{"a": math.inf, "b": "nan", "c": 1, "d": True}]})
    assert found == {"domain": [0.5, None], "values": [{"a": None, "b": "nan", "c": 1, "d": True}]}
