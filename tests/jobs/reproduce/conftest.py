"""The quick experiments, run once for all tests that look at them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Reproduced:
    """What `vcal reproduce all --quick` has printed and written."""

    printed: str
    output: Path


@pytest.fixture(scope="session")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> Reproduced:
    """The command itself, as a user runs it."""
    output = tmp_path_factory.mktemp("quick")
    command = [sys.executable, "-m", "jobs.cli", "reproduce", "all", "--quick", "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return Reproduced(done.stdout, output)
