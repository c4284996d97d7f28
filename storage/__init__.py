"""Data at rest and the way out of it: problem files, Zarr stores, ingest, and the shuffled stream.

    store = storage.create("borehole.zarr", "problem.yaml")
    store.append_runs(x, t, z)
    for batch in storage.stream(store, runs=4096): ...

Names load on first use, so that a simulator farm can `import storage` at no cost.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.errors import (
        CommitUnknown,
        DamagedChunk,
        IngestError,
        ProblemError,
        StoreError,
        StreamError,
        VcalError,
    )
    from storage.ingestion import ingest
    from storage.problem import Problem, load_problem
    from storage.store import Store, create, exists
    from storage.store import open_store as open  # noqa: A004 - storage.open, as in zarr.open
    from storage.streaming import stream

_HOME = {
    "CommitUnknown": "errors",
    "DamagedChunk": "errors",
    "IngestError": "errors",
    "ProblemError": "errors",
    "StoreError": "errors",
    "StreamError": "errors",
    "VcalError": "errors",
    "ingest": "ingestion",
    "Problem": "problem",
    "load_problem": "problem",
    "Store": "store",
    "create": "store",
    "exists": "store",
    "open": "store",
    "stream": "streaming",
}

__all__ = [
    "CommitUnknown",
    "DamagedChunk",
    "IngestError",
    "Problem",
    "ProblemError",
    "Store",
    "StoreError",
    "StreamError",
    "VcalError",
    "create",
    "exists",
    "ingest",
    "load_problem",
    "open",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'storage' has no attribute {name!r}")
    module = importlib.import_module(f"storage.{_HOME[name]}")
    value = getattr(module, "open_store" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
