"""What all tests share."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def run_python() -> Callable[[str], str]:
    """Run a script in a new interpreter and return what it prints: for facts about a fresh process."""

    def run(script: str) -> str:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def _has_gpu() -> bool:
    # torch takes seconds to import; most machines without a GPU are known without it.
    if shutil.which("nvidia-smi") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are collected, and deselected where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        config.hook.pytest_deselected(items=marked)
        items[:] = [item for item in items if item not in marked]
