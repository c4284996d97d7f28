"""No chart is left out in silence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tests.vcal_dist.plots.charts_kit import judged, random_posterior
from vcal_dist.report import Gathered, parts, sections
from vcal_dist.report.content import Block, Figure, Fold, Text
from vcal_dist.report.diagnostics import Verdict
from vcal_dist.report.gathering import Sample

NOTHING = Verdict("good", [])


def texts(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Text):
            yield block.text
        elif isinstance(block, Fold):
            yield from texts(block.blocks)


def test_charts_beyond_the_first_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MOST_PARAMETERS", 2), ("MOST_CONTROLS", 1), ("SHOWN_OUTPUTS", 1), ("PAIRS", 2)):
        monkeypatch.setattr(sections, name, most)
    monkeypatch.setattr(parts, "SHOWN_OUTPUTS", 1)
    gathered = Gathered("here", random_posterior(3, 4, 2, kind="none"), {}, None, {}, None, [])
    of_theta = list(sections.parameters(gathered, NOTHING))
    assert any(text.startswith("Of 4 parameters the last 2 have no chart here") for text in texts(of_theta))
    of_rows = list(sections.observations(gathered, NOTHING))
    assert sum(isinstance(block, Figure) for block in of_rows) == 1  # the process of the first output
    told = list(texts(of_rows))
    assert any(text.startswith("Of 3 control inputs the last 2 have no chart here") for text in told)
    assert any(text.startswith("The process along the control inputs is drawn of the first 1 output") for text in told)


def test_an_output_that_cannot_be_judged_is_told_of_once() -> None:
    posterior = random_posterior(1, 1, kind="none")
    rows = judged(posterior, 5)
    nothing = np.full_like(rows.y, np.nan)
    for spoilt, words in (
        (rows._replace(mean=nothing), "every one is fitted by itself"),
        (rows._replace(mean=nothing, y=nothing), "knows this output"),
    ):
        gathered = Gathered("here", posterior, {}, None, {}, None, [], observations=Sample(spoilt, 5, 5, 5))
        blocks = list(sections.observations(gathered, NOTHING))
        assert sum(words in text for text in texts(blocks)) == 1
        assert not any("No chart" in text for text in texts(blocks))
        assert [block.name.split("-")[0] for block in blocks if isinstance(block, Figure)] == ["process"]
