"""Whatever a file says, reading it ends soon, takes little memory, and raises the project's own errors only."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.faults.conftest import Tally, size
from tests.faults.fuzz_kit import fair
from tests.faults.fuzz_targets import TARGETS

# Destructors of h5netcdf and SciPy fail for files that were never opened.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SAMPLE, CASES = 300, size("FUZZ", 100_000)
MEMORY = Path("/dev/shm")


def fuzz(name: str, cases: int, tally: Tally, *, repeatable: bool) -> None:
    """So many inputs. The first that fails is shown as it is: to make it smaller could take ten seconds a try."""
    target = TARGETS[name]
    tried = 0

    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        derandomize=repeatable,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    @given(target.inputs())
    def read(case: Any) -> None:
        nonlocal tried
        tried += 1
        folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        try:
            with fair(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of libraries, about what they read
                target.read(case, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    failed = 1
    try:
        read()
        failed = 0
    finally:
        tally.add(f"fuzzed: {name}", tried, tried - failed)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_sound_is_read(name: str, tmp_path: Path) -> None:
    """A reader that refuses everything would pass the other tests."""
    for number, case in enumerate(TARGETS[name].sound()):
        (tmp_path / str(number)).mkdir()
        TARGETS[name].read(case, tmp_path / str(number))


@pytest.mark.parametrize("name", TARGETS)
def test_a_sample_of_inputs(name: str, tally: Tally) -> None:
    fuzz(name, max(8, int(SAMPLE * TARGETS[name].share)), tally, repeatable=True)


@pytest.mark.faults
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", TARGETS)
def test_many_inputs(name: str, tally: Tally) -> None:
    fuzz(name, int(CASES * TARGETS[name].share), tally, repeatable=False)
