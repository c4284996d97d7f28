"""The record beside a posterior: how it was trained. It comes from a file, so its form is checked where it is read.

Whoever shows a run takes these values for what they should be; keys that are not here may be anything.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from vcal_dist.errors import Malformed


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class Rows(_Part):
    """Of the store when training began."""

    runs: NonNegativeInt
    observations: NonNegativeInt


class Assessed(_Part):
    """How well rows of a table are predicted."""

    rows: NonNegativeInt
    log_predictive_density: float
    rmse: list[float]
    coverage: float
    method: str = ""
    unreliable: NonNegativeInt = 0


class Start(_Part):
    """One that was followed to a mode."""

    theta: list[float]
    log_evidence: float
    converged: bool
    mode: int


class Theta(_Part):
    """How q(θ) was computed."""

    family: str
    converged: bool
    unrefined: str
    evaluations: NonNegativeInt
    effective: float
    pareto_k: float | None = None
    starts: list[Start] = Field(default_factory=list)
    hyperparameters: dict[str, dict[str, float]] = Field(default_factory=dict)
    as_points: list[str] = Field(default_factory=list)
    sensitivity: dict[str, float] | None = None


class DesignFinding(_Part):
    """What the runs cannot teach."""

    kind: str
    severity: str
    names: list[str]
    message: str


class Refined(_Part):
    """What a refinement changed."""

    seconds: float


class Record(_Part):
    """All of it; nothing is required."""

    config: dict[str, Any] | None = None
    versions: dict[str, str] | None = None
    rows: Rows | None = None
    seconds: float | None = None
    assessment: dict[str, Assessed] | None = None
    counts: dict[str, int] | None = None
    theta: Theta | None = None
    log_evidence_runs: float | None = None
    bound: float | None = None
    runs: NonNegativeInt | None = None
    design: list[DesignFinding] | None = None
    refined: Refined | None = None


def check_record(record: Any) -> None:
    """Raises for a record that says something else than training writes, by its key."""
    try:
        Record.model_validate(_as_read(record))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Malformed(f"its record{' at ' if where else ''}{where}: {first['msg']}") from None


def _as_read(tree: Any) -> Any:
    """As it comes back from a file: tuples are lists."""
    if isinstance(tree, dict):
        return {key: _as_read(value) for key, value in tree.items()}
    return [_as_read(value) for value in tree] if isinstance(tree, list | tuple) else tree
