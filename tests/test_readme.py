"""Every block of Python, YAML and shell in the README works, in the order it is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray_kit import RayHead


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_readme_runs(root: Path, tmp_path: Path, ray_head: RayHead) -> None:
    text = (root / "README.md").read_text()
    blocks = re.findall(r"(.*?)^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert {kind for _, kind, _ in blocks} == {"console", "yaml", "python", "bash"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for before, kind, block in blocks:
        if kind == "yaml":
            *_, name = re.findall(r"Save this as `(.+?)`", before)
            (tmp_path / name).write_text(block)
            continue
        if kind == "console":  # the two set-up commands: this test runs inside one of them
            assert re.findall(r"^\$ (make \w+)", block, flags=re.MULTILINE) == ["make demo", "make test"]
            continue
        command = [sys.executable, "-W", "error", "-c", block] if kind == "python" else ["bash", "-euc", block]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**ray_head.env, "PATH": path, "RAY_ADDRESS": ray_head.address},  # one that runs already
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


def test_the_command_table_is_complete(root: Path) -> None:
    """The README names every command that exists."""
    import typer

    from jobs.cli import app

    text = (root / "README.md").read_text()
    names = typer.main.get_command(app).list_commands(None)  # type: ignore[attr-defined]
    assert names
    for name in names:
        assert f"`vcal {name}" in text
