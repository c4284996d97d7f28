"""Where faults are injected, and the table of what was tried and what survived."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.injection_kit import Injector

KEY = pytest.StashKey["Tally"]()


def size(name: str, default: int) -> int:
    """How many cases: `make test-faults` says it in the environment."""
    return int(os.environ.get(f"VCAL_FAULTS_{name}", default))


@dataclass
class Tally:
    """How much was tried, and how much of it survived."""

    lines: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, what: str, tried: int, survived: int) -> None:
        before = self.lines.get(what, (0, 0))
        self.lines[what] = before[0] + tried, before[1] + survived


@pytest.hookimpl
def pytest_configure(config: pytest.Config) -> None:
    config.stash[KEY] = Tally()


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash[KEY].lines
    if not lines:
        return
    terminalreporter.section("faults: tried and survived")
    total = (sum(tried for tried, _ in lines.values()), sum(survived for _, survived in lines.values()))
    for what, (tried, survived) in [*lines.items(), ("all", total)]:
        terminalreporter.write_line(f"{what:<42} {tried:>9,} {survived:>9,}")


@pytest.fixture(scope="session")
def tally(request: pytest.FixtureRequest) -> Tally:
    return request.config.stash[KEY]


@pytest.fixture(scope="session")
def injector() -> Iterator[Injector]:
    """In memory where that is possible: nothing here depends on the disk, and thousands of fsyncs take long."""
    if not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("faults are injected by a library that a C compiler makes; there is none")
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="vcal-faults-", dir=memory if memory.is_dir() else None))
    injector = Injector(folder)
    try:
        yield injector
    finally:
        injector.close()
        shutil.rmtree(folder)
