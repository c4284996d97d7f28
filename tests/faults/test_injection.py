"""Whatever system call fails, committed rows stay, the error names the path, and the same command recovers."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from tests.faults.conftest import Tally
from tests.faults.injection_kit import Fault, Injector
from tests.faults.operations import OPERATIONS

CHEAP = ("create", "append", "ingest", "checkpoint", "save")  # every error of every call; of the others one each
SAMPLES = {"create": 6, "append": 10, "ingest": 6, "checkpoint": 4, "train": 5, "save": 4}  # the others take long


def survive(injector: Injector, tally: Tally, operation: str, faults: Iterable[Fault]) -> None:
    """Injects one after another, and tells all that went wrong at the end."""
    wrong, struck = [], 0
    for fault in faults:
        result = injector.inject(operation, fault)
        if result.struck is not None:
            struck += 1
            tally.add(f"failed calls: {operation}", 1, int(not result.violations))
        wrong += [f"{operation}, {fault} at {result.struck}: {text}" for text in result.violations]
    assert struck, "no fault was met: the test has lost its point"
    assert not wrong, f"{len(wrong)} violations, of which\n" + "\n".join(wrong[:20])


def every_call(injector: Injector, operation: str) -> list[Fault]:
    """Every error of every call, or every call with its errors in turn."""
    faults = list(injector.faults(operation))
    if operation in CHEAP:
        return faults
    calls: dict[tuple[str, int], list[Fault]] = {}
    for fault in faults:
        calls.setdefault((fault.kind, fault.number), []).append(fault)
    return [errors[turn % len(errors)] for turn, errors in enumerate(calls.values())]


@pytest.mark.parametrize("operation", SAMPLES)
def test_a_sample_of_failed_calls(injector: Injector, tally: Tally, operation: str) -> None:
    faults = list(injector.faults(operation))
    survive(injector, tally, operation, random.Random(operation).sample(faults, SAMPLES[operation]))


@pytest.mark.faults
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_failed_call(injector: Injector, tally: Tally, operation: str) -> None:
    survive(injector, tally, operation, every_call(injector, operation))


def test_a_fault_is_met_where_it_is_aimed_at(injector: Injector) -> None:
    """A shim that is not loaded, or counts nothing, would let everything survive."""
    for kind in ("open", "write", "fsync", "rename", "mkdir"):
        fault = next(fault for fault in injector.faults("append") if fault.kind == kind)
        assert injector.inject("append", fault).struck is not None, fault
