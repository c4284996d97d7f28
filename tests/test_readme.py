"""Every block of Python, YAML and shell in the README and the pages behind it works, in the order it is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray_kit import RayHead

PAGES = ("data", "training", "sweeps", "clusters", "model", "trust", "safety")


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_readme_runs(root: Path, tmp_path: Path, ray_head: RayHead) -> None:
    pages = [root / "README.md", *(root / "docs" / f"{name}.md" for name in PAGES)]
    assert sorted(pages[1:]) == sorted((root / "docs").glob("*.md"))
    text = "\n".join(page.read_text() for page in pages)
    blocks = re.findall(r"(.*?)^```(\w+)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert {kind for _, kind, _ in blocks} == {"console", "yaml", "python", "bash"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for before, kind, block in blocks:
        if kind == "yaml":
            *_, name = re.findall(r"Save this as\s`(.+?)`", before)
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
            timeout=400,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


def test_promises_are_held_by_tests_that_exist(root: Path) -> None:
    rows = re.findall(
        r"^\| (?!promise)(.+?) \| (.+) \|$", (root / "docs" / "safety.md").read_text(), flags=re.MULTILINE
    )
    assert len(rows) > 15
    for promise, tests in rows:
        names = re.findall(r"`((?:tests/)?[\w/]*test_\w+\.py)`", tests)
        assert names, promise
        for name in names:
            assert list((root / "tests").rglob(Path(name).name)), f"{promise}: {name}"


def test_links_lead_somewhere(root: Path) -> None:
    for page in (root / "README.md", root / "SECURITY.md", *(root / "docs").glob("*.md")):
        text = page.read_text()
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            path, _, heading = target.partition("#")
            found = page.parent / path if path else page
            assert found.exists(), f"{page.name}: {target}"
            if heading:
                headings = re.findall(r"^#+ (.+)$", found.read_text(), flags=re.MULTILINE)
                assert heading in [re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings], target


def test_the_command_table_is_complete(root: Path) -> None:
    """The README names every command that exists."""
    import typer

    from jobs.cli import app

    text = (root / "README.md").read_text()
    names = typer.main.get_command(app).list_commands(None)  # type: ignore[attr-defined]
    assert names
    for name in names:
        assert f"`vcal {name}" in text
