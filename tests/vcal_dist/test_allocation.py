"""Freed memory stays with the process: matrices that are made again and again need no new pages."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

SCRIPT = """
import resource
import torch
from vcal_dist.allocation import keep_pages

torch.set_num_threads(1)


def faults(megabytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        first = torch.ones(megabytes * 131072, dtype=torch.float64)
        second = first * 2
        del first, second
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


listened = keep_pages()
faults(12)
print(listened, faults(12))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_pages_are_used_again(run_python: Callable[[str], str]) -> None:
    listened, faults = run_python(SCRIPT).split()
    assert listened == "True"
    assert int(faults) < 3072  # the pages of one such matrix; without it, 40 of them
