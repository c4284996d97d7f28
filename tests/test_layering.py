"""Imports go one way, jobs → vcal_dist → storage, and the light entrances stay light."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGES = ("storage", "vcal_dist", "jobs")
FORBIDDEN = {
    "storage": {"vcal_dist", "jobs", "torch", "lightning", "pytorch_lightning", "ray"},
    "vcal_dist": {"jobs", "ray"},
    "jobs": set(),
}


def imported(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level name of every import, also inside functions and by importlib with a literal name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value).partition(".")[0]


def test_the_search_sees_every_kind_of_import() -> None:
    source = """
import a.b
from c.d import e
def f():
    import g
    importlib.import_module("h.i")
"""
    assert [name for _, name in sorted(imported(source))] == ["a", "c", "g", "h"]


@pytest.mark.parametrize("package", PACKAGES)
def test_import_direction(package: str, root: Path) -> None:
    files = sorted((root / package).rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(root)}:{line} imports {name}"
        for file in files
        for line, name in imported(file.read_text(encoding="utf-8"))
        if name in FORBIDDEN[package]
    ]
    assert wrong == []


def loaded_by(run_python: Callable[[str], str], script: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after a script."""
    lister = "import json, sys; print('\\n' + json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    return set(json.loads(run_python(f"{script}\n{lister}").splitlines()[-1]))


def test_importing_storage_is_cheap(run_python: Callable[[str], str]) -> None:
    heavy = {"torch", "lightning", "ray", "pandas", "pyarrow", "xarray", "distributed", "dask", "zarr"}
    loaded = loaded_by(run_python, "import storage")
    assert "storage" in loaded
    assert loaded & heavy == set()


@pytest.mark.parametrize("arguments", [["--help"], ["ingest", "--help"], ["bench", "--help"], ["--version"]])
def test_help_is_cheap(run_python: Callable[[str], str], arguments: list[str]) -> None:
    heavy = {"torch", "lightning", "ray", "zarr", "dask", "numpy", "pandas", "pyarrow", "xarray", "distributed"}
    script = f"""
import jobs.cli
try:
    jobs.cli.main({arguments!r})
except SystemExit as end:
    assert not end.code, end.code
"""
    loaded = loaded_by(run_python, script)
    assert "typer" in loaded
    assert loaded & heavy == set()


def test_every_command_module_is_covered_by_the_help(root: Path) -> None:
    # A command that neither cli.py nor a group of commands imports would escape the check above.
    commands = root / "jobs" / "commands"
    modules = {file.stem for file in commands.glob("*.py")} - {"__init__"}
    sources = [(root / "jobs" / "cli.py"), *(commands / f"{name}.py" for name in ("submit",))]
    names = {
        alias.name if node.module == "jobs.commands" else (node.module or "").rpartition(".")[2]
        for source in sources
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jobs.commands")
        for alias in node.names
    }
    assert modules == names
