"""Where commands write: rich text for people on stdout and stderr, one JSON object for programs."""

import json
import logging
import math
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from storage.text import cleaned, escaped_json, redacted

# In a pipe or a log there is no terminal to ask; rich would then fold tables at 80 columns.
WIDTH_WITHOUT_TERMINAL = 140


class SafeConsole(Console):
    """Shows texts without secrets, and none of their characters as a command to the terminal."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string goes this way: lines, headings and cells."""
        return super().render_str(cleaned(redacted(text)), **options)

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Texts that have a style already go this way, inside of others too."""
        if isinstance(renderable, Text) and (plain := cleaned(redacted(renderable.plain))) != renderable.plain:
            renderable = renderable.copy()
            renderable.plain = plain
        return super().render(renderable, options)


class ConsoleHandler(logging.Handler):
    """Shows warnings of the packages on stderr as they are, but for secrets and control characters."""

    def emit(self, record: logging.LogRecord) -> None:
        stderr().print(self.format(record), soft_wrap=True)


def show_warnings() -> None:
    """Lets the packages' own loggers speak through the console, and those of libraries: they repeat names in files."""
    warnings.showwarning = _show_warning
    logging.lastResort = ConsoleHandler(logging.WARNING)
    for name in ("storage", "vcal_dist"):
        logger = logging.getLogger(name)
        if not any(isinstance(handler, ConsoleHandler) for handler in logger.handlers):
            logger.addHandler(ConsoleHandler(logging.WARNING))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """As Python does it, which sends the text as it is."""
    text = warnings.formatwarning(message, category, filename, lineno, line).rstrip()
    if file is None:
        stderr().print(text, soft_wrap=True)
    else:
        file.write(f"{cleaned(redacted(text))}\n")


def stdout() -> Console:
    """The console for results."""
    return _console(stderr=False)


def stderr() -> Console:
    """The console for errors and notes that must not mix with results."""
    return _console(stderr=True)


def note(text: str) -> None:
    """Says what goes on, apart from the result."""
    stderr().print(f"{text} …", style="dim", soft_wrap=True)


def vcal(*arguments: str) -> str:
    """A command to type in the same shell: by the path that this one was called by, unless its name alone finds it."""
    own, found = Path(sys.argv[0]), shutil.which("vcal")
    away = own.name == "vcal" and own.is_file() and (found is None or not own.samefile(found))
    return shlex.join([sys.argv[0] if away else "vcal", *arguments])


def _console(stderr: bool) -> Console:
    # rich reads COLUMNS by itself; the markup of paths and names must never be interpreted.
    console = SafeConsole(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDTH_WITHOUT_TERMINAL
    return console


def table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the one style of all commands; columns named in `right` are aligned to the right."""
    result = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold cyan", box=None, pad_edge=False
    )
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return result


def print_json(value: Any) -> None:
    """One JSON object on stdout; numbers that JSON cannot hold become null."""
    stdout().print(escaped_json(json.dumps(_plain(value), indent=2, ensure_ascii=False)), soft_wrap=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def number(value: float | int | None, digits: int = 6) -> str:
    """A number for a table: integers with thousands separated, others with significant digits."""
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
