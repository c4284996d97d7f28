"""One small calibration that the tests of reports share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vcal_dist.report.runs_kit import trained


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parameters, 450 runs of which some are held out, 60 observations of which none is."""
    return trained(tmp_path_factory.mktemp("small"))
