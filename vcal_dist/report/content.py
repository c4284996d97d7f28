"""What a report is made of: sections of texts, tables and figures, whatever they become, a page or files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["good", "care", "bad"]


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: Literal["plain", "note", "code"] = "plain"


@dataclass(frozen=True)
class Pill:
    """A cell with a word on a colour."""

    text: str
    status: Status | Literal["plain"] = "plain"


@dataclass(frozen=True)
class Span:
    """A cell with a picture of an interval: all values are shares of its width."""

    outer: tuple[float, float]  # of the prior
    inner: tuple[float, float]  # of the posterior
    middle: float
    truth: float | None = None


@dataclass(frozen=True)
class Share:
    """A cell with a bar, from 0 to 1, and its text."""

    value: float
    text: str


Cell = str | Pill | Span | Share


@dataclass(frozen=True)
class Table:
    """Rows under headings; columns in `right` are numbers. On a narrow screen a row becomes a card if it `stacks`."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: Sequence[str] = ()
    caption: str = ""
    stacks: bool = False


@dataclass(frozen=True)
class Facts:
    """Names and what they are."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Finding:
    """A status with its name, its figure, a sentence and advice."""

    name: str
    status: Status
    word: str  # the status in a word
    value: str
    sentence: str
    advice: str


@dataclass(frozen=True)
class Findings:
    """A list of them."""

    rows: Sequence[Finding]


@dataclass(frozen=True)
class Figure:
    """A chart (of Altair) with its caption; `name` becomes its file's.

    Panels of one that `flows` may be arranged anew on a narrow screen.
    """

    name: str
    chart: Any
    caption: str = ""
    size: Literal["full", "half", "third"] = "full"
    flows: bool = True


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown on request."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Heading:
    """Within a section."""

    text: str


Block = Text | Table | Facts | Findings | Figure | Fold | Heading


@dataclass(frozen=True)
class Section:
    """A part of the report with its place in the table of contents."""

    key: str
    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)

    def figures(self) -> Iterator[Figure]:
        """All of them, folded ones too."""
        yield from _figures(self.blocks)


def _figures(blocks: Sequence[Block]) -> Iterator[Figure]:
    for block in blocks:
        if isinstance(block, Figure):
            yield block
        elif isinstance(block, Fold):
            yield from _figures(block.blocks)
