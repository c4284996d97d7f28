"""What all tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.ray_kit import RayHead

# Words in the files of tests that wait for a cluster, and that look at the quick experiments.
CLUSTERS, REPRODUCED = ("ray_head", "slurm_kit", "hosts_kit"), ("reproduced: Reproduced",)
ROOT = Path(__file__).resolve().parent.parent


os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, and what commands print would be folded


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


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """A bucket of a server on this machine that speaks S3, to be found by the usual chain: the environment."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"
    server.stop()


@pytest.fixture(scope="session")
def ray_head(s3_url: str) -> Iterator[RayHead]:
    """A Ray cluster of one node on this machine, one for all tests: starting it takes seconds."""
    from tests.ray_kit import RayHead

    head = RayHead()  # without a token: Ray decides once in a process whether it brings one
    try:
        yield head.start()
    finally:
        head.stop()


def _has_gpu() -> bool:
    # torch takes seconds to import; most machines without a GPU are known without it.
    if shutil.which("nvidia-smi") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Who shares a process with whom where `make test` runs two of them side by side.

    Files stay together, for what their tests share. Those that wait for the Ray head or the SLURM, which there is one
    of, share one process, and so do those that look at the quick experiments, which take minutes. (Groups of
    pytest-xdist 3.8 have no effect under pytest 9.2.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            for words in (CLUSTERS, REPRODUCED):
                if _names(config.rootpath / file, words):
                    return words[0]
            return file

    return ByFile(config, log)


@cache
def _names(path: Path, words: tuple[str, ...]) -> bool:
    return any(word in path.read_text(encoding="utf-8") for word in words)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that wait for a cluster, the longest, come first.

    Deselected are those marked `gpu` where there is none, and those marked `faults`, which take hours, unless the
    command line names that mark.
    """
    items.sort(key=lambda item: not _names(item.path, CLUSTERS))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    left = marked if marked and not _has_gpu() else []
    if "faults" not in config.option.markexpr:
        left = [*left, *(item for item in items if item.get_closest_marker("faults"))]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
