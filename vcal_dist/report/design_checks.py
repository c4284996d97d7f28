"""Checks of the data themselves: inputs that teach nothing, and observations where there are no runs."""

from __future__ import annotations

from typing import Any

from vcal_dist.report.check import Check
from vcal_dist.report.content import Status
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.words import plural

DESIGN_THRESHOLD = (
    "none of: an input that never varies, inputs that depend on each other, fewer than 4 distinct values, runs that "
    "leave out more than 10 % (bad: 50 %) of a prior, observations beyond the runs' inputs or far from all their "
    "outputs (storage.design)"
)


def design_of_the_runs(gathered: Gathered) -> list[Check]:
    """What no training can make up for, as it was found when training began."""
    found = findings(gathered)
    if found is None:
        return []
    status: Status = "good"
    if found:
        status = "bad" if any(each["severity"] == "bad" for each in found) else "care"
    sentence = "Every input varies, on its own, over its prior; observations lie where there are runs."
    if found:
        messages = [str(each["message"]).partition(";")[0] for each in found]
        sentence = " ".join(f"{message[:1].upper()}{message[1:]}." for message in messages)
    cures = [cure for each in found if (cure := str(each["message"]).partition(";")[2].strip())]
    advice = " ".join(f"{cure[:1].upper()}{cure[1:]}." for cure in dict.fromkeys(cures))
    value = plural(len(found), "finding") if found else "nothing found"
    return [Check("Design of the runs", status, value, sentence, advice, float(len(found)), DESIGN_THRESHOLD)]


def findings(gathered: Gathered) -> list[dict[str, Any]] | None:
    """What `storage.find_design_faults` found in the store; None where nobody looked."""
    kept = gathered.record.get("design")
    return None if kept is None else list(kept)


def never_varied(gathered: Gathered) -> set[str]:
    """Calibration inputs that were the same in all runs: of these nothing can be learned."""
    return {name for each in findings(gathered) or [] if each["kind"] == "constant" for name in each["names"]}
