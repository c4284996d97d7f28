"""Strategies that change sound documents and files in ways that matter, and the limits that readers must keep.

A document is changed where it has structure: a value takes the place of another, goes, moves, or comes twice. A file is
changed in its bytes: flipped, cut, repeated, joined with a part of itself.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import resource
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

from hypothesis import strategies as st

from storage.errors import VcalError

SECONDS, BYTES = 10, 1 << 30  # that one input may take
Tree = Any
Path = tuple[Any, ...]

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]
ODD_TEXTS = [
    "", " ", "\0", "a\nb", "\x1b[31m", "\ud800", "nan", "1:30", "010", "0x1f", "yes", "null", "~", "..", "../../etc",
    "x" * 5000, "a.b", "a/b", "run", "𝕏", "\u202e", "%s", "{}", "[0, 1]", "1e999", "2020-01-01",
]  # fmt: skip
ODD_NUMBERS = [
    0,
    -1,
    1,
    2,
    3,
    7,
    255,
    2**31,
    2**53 + 1,
    2**63,
    10**30,
    1e-320,
    0.5,
    -0.0,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
]
ODD = st.one_of(
    st.sampled_from([None, True, False, [], {}, [[]], [None], {"": 0}, {"a": {"a": {}}}, DEEP, [0] * 1000]),
    st.sampled_from(ODD_TEXTS),
    st.sampled_from(ODD_NUMBERS),
    st.integers(-5, 100),
    st.floats(allow_nan=False, width=32),
    st.lists(st.sampled_from([0, 1, -1, 2.5, None, "x", True]), max_size=4),
)


# --- documents --------------------------------------------------------------------------------------------------------


def places(tree: Tree, above: Path = ()) -> Iterator[Path]:
    """Where a tree has values, from its root."""
    yield above
    if isinstance(tree, dict | list) and len(above) < 12:
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from places(tree[key], (*above, key))


def at(tree: Tree, path: Path) -> Tree:
    for key in path:
        tree = tree[key]
    return tree


@st.composite
def changed(draw: st.DrawFn, sound: Tree, values: st.SearchStrategy[Any] = ODD, most: int = 4) -> Tree:
    """A copy of a tree with a few places changed."""
    tree = copy.deepcopy(sound)
    for _ in range(draw(st.integers(1, most))):
        path = draw(st.sampled_from(list(places(tree))))
        how = draw(st.sampled_from(["replace", "replace", "remove", "double", "rename", "move"]))
        if not path:
            if how == "replace" and draw(st.integers(0, 20)) == 0:
                return copy.deepcopy(draw(values))
            continue
        above, key = at(tree, path[:-1]), path[-1]
        if how == "replace":
            above[key] = copy.deepcopy(draw(values))  # the next change may be inside of it
        elif how == "remove":
            del above[key]
        elif how == "move":
            above[key] = copy.deepcopy(at(tree, draw(st.sampled_from(list(places(tree))))))
        elif isinstance(above, list):
            above.insert(key, copy.deepcopy(above[key]))
        else:
            name = draw(st.sampled_from([*ODD_TEXTS, f"{key}s", str(key).upper()]))
            above[name] = copy.deepcopy(above[key]) if how == "double" else above.pop(key)
    return tree


SNIPPETS = [
    "&a [1, 2]", "*a", "!!python/object/apply:os.system [true]", "!!int x", "? [a]\n: b", "<<: *a", "%YAML 2.0\n",
    "---\n", "...\n", "\t", "\ufeff", "\x85", "'", '"', "{", "[", "# ", ": ", "- ", "a: 1\na: 2\n", "010", "1:30",
    "!!binary aGk=", "!!set {a}",
]  # fmt: skip


@st.composite
def yaml_text(draw: st.DrawFn, sound: Tree) -> bytes:
    """A changed document as YAML, perhaps with its text changed too."""
    text = json.dumps(draw(changed(sound)), indent=draw(st.sampled_from([None, 1])))
    for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
        where = draw(st.integers(0, len(text)))
        text = text[:where] + draw(st.sampled_from(SNIPPETS)) + text[where + draw(st.integers(0, 3)) :]
    data = text.encode("utf-8", errors="surrogatepass")
    return draw(damaged(data)) if draw(st.integers(0, 9)) == 0 else data


# --- bytes ------------------------------------------------------------------------------------------------------------


@st.composite
def damaged(draw: st.DrawFn, sound: bytes, most: int = 4) -> bytes:
    """A copy of a file with a few bytes changed, cut out, or repeated."""
    data = bytearray(sound)
    for _ in range(draw(st.integers(1, most))):
        if not data:
            break
        where = draw(st.integers(0, len(data) - 1))
        if draw(st.booleans()):
            where = min(where, draw(st.integers(0, 400)))  # headers lie in front
        length = draw(st.integers(1, 16))
        match draw(st.sampled_from(["flip", "set", "cut", "end", "repeat", "insert"])):
            case "flip":
                data[where] ^= 1 << draw(st.integers(0, 7))
            case "set":
                size = min(length, len(data) - where)
                data[where : where + size] = draw(st.sampled_from([b"\0", b"\xff", b"\x7f", b"9", b",", b"\n"])) * size
            case "cut":
                del data[where : where + length]
            case "end":
                del data[where:]
            case "repeat":
                data[where:where] = data[where : where + length]
            case _:
                data[where:where] = draw(st.binary(min_size=1, max_size=8))
    return bytes(data)


CELLS = [
    "",
    "nan",
    "inf",
    "1e999",
    "-1",
    '"',
    '"a',
    "a\nb",
    "0x10",
    "1,5",
    "\0",
    "\xff",
    "1" * 400,
    "1d3",
    "٣",
    "#",
    ";",
    "\t",
]


@st.composite
def csv_text(draw: st.DrawFn, names: list[str]) -> bytes:
    """Rows under a header, with cells and separators that simulators write by mistake."""
    separator, end = draw(st.sampled_from(",,,;\t |")), draw(st.sampled_from(["\n", "\n", "\r\n", "\r", ""]))
    number = st.floats(0, 1).map(repr)
    header = draw(st.lists(st.sampled_from([*names, *names, "other", "", "a b"]), min_size=1, max_size=7))
    header = draw(st.sampled_from([names, names, header]))
    lines = [separator.join(header)]
    for _ in range(draw(st.integers(0, 6))):
        row = [draw(st.one_of(number, number, number, st.sampled_from(CELLS))) for _ in header]
        lines.append(separator.join(row[: draw(st.sampled_from([len(row), len(row), len(row) - 1, len(row) + 1]))]))
    text = (
        draw(st.sampled_from(["", "", "# comment\n", "\ufeff", "\n\n"]))
        + end.join(lines)
        + draw(st.sampled_from(["", end]))
    )
    return text.encode(draw(st.sampled_from(["utf-8", "utf-8", "utf-16", "latin-1"])), errors="replace")


# --- limits -----------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """Not an Exception: no reader may take it for a fault of its input."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooLong(f"more than {SECONDS} s of computing time")


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """An input that takes too long or too much memory fails; computing time, as the machine may be busy."""
    before = signal.signal(signal.SIGPROF, _stop)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 - in a loop of thousands
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    # Memory that is only reserved counts here, such as what each thread may use: hence four times as much.
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 4 * BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most) * 1024
    assert taken < BYTES, f"took {taken / 1e9:.1f} GB"


@contextlib.contextmanager
def fair() -> Iterator[None]:
    """Only the project's own errors, and those of the file system that name a path, may come out."""
    with limits():
        try:
            yield
        except VcalError:
            pass
        except OSError as error:
            if error.filename is None:
                raise
