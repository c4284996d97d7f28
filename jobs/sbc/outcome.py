"""What replicates say together: every parameter's assessment, in words, as JSON and for the page."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.sbc.directory import Asked, read
from storage.problem import Problem
from vcal_dist.errors import ConfigError
from vcal_dist.report.content import Status
from vcal_dist.report.words import listed, percent, plural, signed
from vcal_dist.sbc import BAND, LEVELS, THRESHOLD, TOGETHER, Assessment, Told, Verdict, assess

STATUS: dict[Verdict, Status] = {
    "covers as promised": "good",
    "too few replicates": "care",
    "intervals too wide": "care",
    "intervals too narrow": "bad",
    "biased low": "bad",
    "biased high": "bad",
    "truths far outside": "bad",
    "not as promised": "bad",
}
LEAST_P = 0.001  # that is told in digits
MOST_FAILED = 0.05  # of the replicates, above which those that did not fail may not speak for all


@dataclass(frozen=True)
class Outcome:
    """All replicates together."""

    asked: Asked
    problem: Problem
    replicates: int  # asked for
    numbers: list[int]  # those that did not fail, in the order that assessments have them in
    failed: list[dict[str, Any]]  # records of those that did
    unrefined: dict[str, list[int]]  # those whose posterior does not follow the exact one, by why it does not
    seconds: float  # of all calibrations
    parameters: list[Assessment]

    def plain(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "problem": self.problem.name,
            "output": str(self.asked.output),
            "store": self.asked.settings.store,
            "simulator": self.asked.simulator,
            "seed": self.asked.seed,
            "replicates": self.replicates,
            "judged": self.numbers,
            "failed": self.failed,
            "unrefined": self.unrefined,
            "seconds": self.seconds,
            "threshold": THRESHOLD,
            "bands": {"coverage": BAND, "histogram": BAND, "curve": TOGETHER, "ecdf": TOGETHER},
            "sentence": in_a_sentence(self),
            "parameters": [
                asdict(one)
                | {
                    "sentence": sentence(one),
                    "far": [self.numbers[place] for place in one.far],
                    "z_mean": float(np.mean(one.z)),
                    "z_sd": float(np.std(one.z)),
                    "contraction_mean": float(np.mean(one.contraction)),
                }
                for one in self.parameters
            ],
        }


def collect(asked: Asked, problem: Problem, replicates: int, prior_sd: list[float]) -> Outcome:
    """Judges the first so many replicates, all of which must be there; those that failed are counted and named."""
    names = [variable.name for variable in problem.calibration_inputs]
    found = ((number, read(asked, number)) for number in range(replicates))
    records = [_sound(asked, number, record, names) for number, record in found if record is not None]
    good = [record for record in records if "failed" not in record]
    failed = [record for record in records if "failed" in record]
    if not good:
        raise ConfigError(
            f"all {replicates} replicates failed, the first with: {failed[0]['failed']}. They lie in "
            f"{asked.replicate(0).parent}; mend what is wrong, and choose another --output"
        )
    seconds = sum(record["seconds"] for record in records)
    parameters = assess(names, [_told(record, names) for record in good], prior_sd)
    unrefined: dict[str, list[int]] = {}
    for record in good:
        if record["unrefined"]:
            unrefined.setdefault(record["unrefined"], []).append(record["number"])
    numbers = [record["number"] for record in good]
    return Outcome(asked, problem, replicates, numbers, failed, unrefined, seconds, parameters)


class _Failed(BaseModel):
    """What every replicate has; with `failed`, it has nothing else to tell."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    number: int
    seconds: float


class _Done(_Failed):
    """What is made of a replicate that did not fail: values by the names of parameters, null where there is none."""

    truth: dict[str, float | None]
    pit: dict[str, float | None]
    mean: dict[str, float | None]
    sd: dict[str, float | None]
    intervals: dict[str, dict[str, tuple[float, float]]]  # by their level
    unrefined: str


def _sound(asked: Asked, number: int, record: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The record, if it is one of this replicate: the file may be a stranger's."""
    try:
        if "failed" in record:
            told = _Failed.model_validate_json(json.dumps(record))
            sound = isinstance(record["failed"], str)
        else:
            told = _Done.model_validate_json(json.dumps(record))
            parts: list[Mapping[str, Any]] = [told.truth, told.pit, told.mean, told.sd, *told.intervals.values()]
            sound = all(set(names) <= part.keys() for part in parts) and set(map(str, LEVELS)) <= told.intervals.keys()
            sound = sound and all(math.isfinite(float(level)) for level in told.intervals)
        why = "" if sound and told.number == number else "it is of another replicate, or of other parameters"
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except ValueError as error:
        why = str(error)
    if why:
        raise ConfigError(
            f"{asked.replicate(number)} is damaged ({why}); delete it, and the same command runs that replicate again"
        )
    return record


def _told(record: dict[str, Any], names: list[str]) -> Told:
    def values(key: str) -> tuple[float, ...]:
        return tuple(np.nan if record[key][name] is None else record[key][name] for name in names)

    intervals = {float(level): [tuple(ends[name]) for name in names] for level, ends in record["intervals"].items()}
    return Told(values("pit"), values("truth"), values("mean"), values("sd"), intervals)


def sentence(found: Assessment) -> str:
    """Why a parameter has its verdict."""
    covered = _at_90(found)
    above = float(np.mean(np.array(found.pit) > 0.5))
    match found.verdict:
        case "covers as promised":
            return f"{covered}: nothing speaks against them."
        case "too few replicates":
            return f"{covered}: too few to tell much; run more replicates."
        case "intervals too narrow":
            return f"{covered}: posteriors are surer than they may be."
        case "intervals too wide":
            return f"{covered}: posteriors are less sure than they could be."
        case "biased low" | "biased high":
            return f"The truth is above the posterior’s median in {percent(above)} of the replicates. {covered}."
        case "truths far outside":
            return f"{covered}, but some truths lie further outside than chance can explain."
        case "not as promised":
            return f"{covered}, but the ranks are not uniform: see their ECDF."


def _at_90(found: Assessment) -> str:
    place = found.coverage.at.index(0.9)
    share, low, high = (part[place] for part in (found.coverage.value, found.coverage.low, found.coverage.high))
    return (
        f"90 % intervals hold {percent(share)} of {plural(found.replicates, 'truth')} "
        f"({percent(low)} to {percent(high)} by chance)"
    )


def summary(found: Assessment) -> tuple[str, str]:
    """z, its mean and standard deviation, which are 0 and 1 for right posteriors that are Gaussian, and contraction."""
    return f"{signed(float(np.mean(found.z)))} ± {np.std(found.z):.2f}", percent(float(np.mean(found.contraction)))


def p_value(p: float) -> str:
    """With two digits, as long as they say something."""
    return f"{p:.2g}" if p >= LEAST_P else f"< {LEAST_P:g}"


def notes(outcome: Outcome) -> list[str]:
    """What else to know of the replicates: where to look first."""
    found = []
    for one in outcome.parameters:
        if one.far:
            numbers = listed([str(outcome.numbers[place]) for place in one.far])
            found.append(f"The truth of {one.name} lies far outside its posterior in replicate {numbers}.")
    for why, numbers_of in outcome.unrefined.items():
        numbers = listed([str(number) for number in numbers_of])
        found.append(f"The posterior does not follow the exact one in replicate {numbers}: {why}.")
    return found


def in_a_sentence(outcome: Outcome) -> str:
    """All parameters in one sentence, and what failed."""
    wrong = [f"{one.name}: {one.verdict}" for one in outcome.parameters if STATUS[one.verdict] != "good"]
    said = "; ".join(wrong) if wrong else "Every parameter’s intervals cover as promised"
    if outcome.failed:
        count = len(outcome.failed)
        said += (
            f". {plural(count, 'replicate')} of {outcome.replicates} failed, and what is said is without {_them(count)}"
        )
    return f"{said}."


def status(outcome: Outcome) -> Status:
    """The worst of the parameters; many that failed are no good sign either."""
    found: set[Status] = {STATUS[one.verdict] for one in outcome.parameters}
    if len(outcome.failed) > MOST_FAILED * outcome.replicates:
        found.add("care")
    return "bad" if "bad" in found else "care" if "care" in found else "good"


def _them(count: int) -> str:
    return "it" if count == 1 else "them"
