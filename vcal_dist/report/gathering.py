"""Everything that a report needs of a run: its posterior, what was asked for, how training went, rows to judge by.

Rows come from the store that the run was trained on, as far as it can still be reached. They are those that training
did not see; where it saw all, each is predicted as if it alone had been left out. Of many, a random sample is taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import VcalError
from storage.sampling import sample
from storage.store import Store, open_store
from storage.summary import Summary
from storage.table import Table
from vcal_dist.answers import Answers
from vcal_dist.assessment import Judged, judge_observations, judge_runs, judge_validation
from vcal_dist.config import Config
from vcal_dist.errors import ConfigError
from vcal_dist.locations import is_remote, refusal
from vcal_dist.metrics import read_metrics
from vcal_dist.mixed import Averaged
from vcal_dist.posterior import DTYPES, FILE, Posterior
from vcal_dist.rows import AT_HAND, rows_at_hand
from vcal_dist.run_directory import DATA, VERSIONS, WHERE

# As run_directory names them, which loads Lightning and so takes seconds.
MOST_ROWS = 2000  # of each table that are judged and drawn
MOST_VALUES = 4000  # of all outputs together: the page must not grow with their number
LEAST_ROWS = 200
SUMMARY_BLOCKS = 8  # of each table that its statistics come from
SEED = 0  # of the sample: the same run gives the same report

Say = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """Rows that were judged, of how many."""

    judged: Judged
    rows: int  # that were judged
    among: int  # so many that could have been: all that training did not see, or all
    table: int  # rows of the table
    noise: NDArray[np.float64] | None = None  # (B, K) the observations' own standard deviations
    numbers: NDArray[np.int64] | None = None  # (B,) of the rows in the table, from 0


@dataclass(frozen=True)
class Gathered:
    """What a report is written from."""

    place: str  # of the run, as the user calls it
    posterior: Answers
    record: Mapping[str, Any]  # of training; of an average, that of its heaviest member
    config: Config | None
    versions: Mapping[str, str]
    finished: str | None  # when
    metrics: list[dict[str, str]]  # records of training, as in metrics.csv
    truth: Mapping[str, float] | None = None
    store: Store | None = None  # with the rows that the run began with
    unreachable: str | None = None  # why there is no store
    newer: Mapping[str, int] = field(default_factory=dict)  # rows that came to the store later, by table
    summary: Summary | None = None
    runs: Sample | None = None
    observations: Sample | None = None

    @property
    def member(self) -> Posterior:
        """The posterior, or the heaviest of an average: for what only one model has, such as a discrepancy's kind."""
        return heaviest(self.posterior)

    def sample(self, table: str) -> Sample | None:
        """The judged rows of `runs` or `observations`."""
        found: Sample | None = getattr(self, table)
        return found


def gather(
    run: Path,
    posterior: Answers,
    *,
    place: str | None = None,
    truth: Mapping[str, float] | None = None,
    store: str | None = None,
    trust_locations: bool = False,
    say: Say = lambda _: None,
) -> Gathered:
    """From the run's directory and the posterior in it. `place` is what the user calls the directory.

    `store` is where the rows are if not where the run's record says; a store on the network that only the record names
    is opened with `trust_locations`.
    """
    member = heaviest(posterior)
    record = member.record
    config = config_of_run(record)
    source, newer, unreachable = store_of_run(run, posterior, config, store, trust_locations=trust_locations)
    file = run / FILE
    when = None
    if file.is_file():
        when = datetime.fromtimestamp(file.stat().st_mtime, UTC).astimezone().strftime("%Y-%m-%d %H:%M")
    summary = runs = observations = None
    if source is not None and config is not None:
        try:
            say("reading rows of the store")
            summary = source.summary(most_blocks=SUMMARY_BLOCKS)
            runs, observations = _judged(source, config, member, say)
        except (VcalError, OSError) as error:
            source, unreachable, summary = None, str(error), None
    return Gathered(
        place=place or str(run),
        posterior=posterior,
        record=record,
        config=config,
        versions=_versions(run, record),
        finished=when,
        metrics=read_metrics(run),
        truth=truth,
        store=source,
        unreachable=unreachable,
        newer=newer,
        summary=summary,
        runs=runs,
        observations=observations,
    )


def heaviest(posterior: Answers) -> Posterior:
    """The posterior itself, or the member of an average that weighs most."""
    if isinstance(posterior, Averaged):
        return posterior.members[int(np.argmax(posterior.weights))]
    assert isinstance(posterior, Posterior)
    return posterior


def most_rows(outputs: int) -> int:
    """How many rows of a table a page of so many outputs takes."""
    return max(LEAST_ROWS, min(MOST_ROWS, MOST_VALUES // outputs))


def config_of_run(record: Mapping[str, Any]) -> Config | None:
    """A posterior that was made from arrays in memory has none. Where it was computed is left out.

    The record may be a stranger's, and to compute somewhere can mean to run code that comes from there.
    """
    if "config" not in record:
        return None
    try:
        plain = Config.parse(record["config"], "the posterior's record").plain()
    except ConfigError:  # of another version
        return None
    for key in WHERE:
        section, name = key.split(".")
        del plain[section][name]
    return Config.parse(plain)


def store_of_run(
    run: Path,
    posterior: Answers,
    config: Config | None,
    given: str | None = None,
    *,
    trust_locations: bool = False,
) -> tuple[Store | None, dict[str, int], str | None]:
    """The store with the rows that the run began with, how many came since, or why it cannot be used.

    It is the given one, or the one in the record of the run; on the network only if that is to be trusted.
    """
    if config is None:
        return None, {}, "the run's record does not say which store it was trained on"
    record = heaviest(posterior).record
    inside = [str(run / DATA)] if (run / DATA).is_dir() else []
    store, failed = None, ""
    if given is not None:
        places = [given]
    elif trust_locations or not is_remote(config.store):
        places = [config.store, *inside]
    else:
        places = inside
        failed = refusal("the run's record", {"store": config.store}, f"give it with --store {config.store}")
    for url in places:
        try:
            store = open_store(url)
            break
        except (VcalError, OSError) as error:
            failed = failed or str(error)
    if store is None:
        return None, {}, failed
    if store.problem != posterior.problem:
        return None, {}, f"the store {store.url} holds another problem now than the one that the run was trained on"
    rows = record.get("rows") or {"runs": store.runs.rows, "observations": store.observations.rows}
    found = {"runs": store.runs.rows, "observations": store.observations.rows}
    fewer = [f"{found[name]:,} {name} in place of {rows[name]:,}" for name in found if found[name] < rows[name]]
    if fewer:
        return None, {}, f"the store {store.url} has {' and '.join(fewer)}"
    newer = {name: found[name] - rows[name] for name in found if found[name] > rows[name]}
    return store.first(rows["runs"], rows["observations"]), newer, None


def _judged(store: Store, config: Config, member: Posterior, say: Say) -> tuple[Sample | None, Sample | None]:
    at_hand = rows_at_hand(
        store,
        config.model,
        config.transforms,
        fit=config.fit,
        holdout=config.data.holdout,
        holdout_rows=config.data.holdout_rows,
        dtype=DTYPES[config.devices.precision],
        stacked=member.validation is not None,
    )
    most = most_rows(len(member.problem.outputs))
    found: list[Sample | None] = []
    for table, held in ((store.runs, at_hand.held_runs), (store.observations, at_hand.held_observations)):
        rows, numbers, among = _chosen(table, held.numpy(), most)
        # An earlier version held rows out, not runs: what it held out cannot be told from here.
        unknown = table.name == "runs" and at_hand.run is not None and "runs" not in member.record
        if not len(rows["x"]) or unknown:
            found.append(None)
            continue
        if table.name == "runs" and member.validation is not None:
            judged = judge_validation(member, rows["x"], rows["t"], rows["z"], numbers)
            found.append(Sample(judged, len(judged.x), among, table.rows, None, numbers))
            continue
        left_out = not len(held)
        say(f"predicting {len(rows['x']):,} {table.name}{', each as if it had been left out' if left_out else ''}")
        if table.name == "runs":
            judged = judge_runs(member, rows["x"], rows["t"], rows["z"], leave_one_out=left_out)
        else:
            judged = judge_observations(member, rows["x"], rows["y"], rows.get("noise"), leave_one_out=left_out)
        found.append(Sample(judged, len(rows["x"]), among, table.rows, rows.get("noise"), numbers))
    return found[0], found[1]


def _chosen(
    table: Table, held: NDArray[np.int64], most: int
) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.int64], int]:
    """Rows with a known output that were kept out, or any where none was; their numbers, and among how many.

    There are at most so many of them.
    """
    values, numbers = sample(table, AT_HAND)
    known = ~np.isnan(values["z" if table.name == "runs" else "y"]).all(axis=1)
    rows = np.flatnonzero(known & np.isin(numbers, held) if len(held) else known)
    among = len(rows) if len(held) or len(numbers) == table.rows else table.rows
    if len(rows) > most:
        rows = np.sort(np.random.default_rng(SEED).choice(rows, most, replace=False))
    return {name: part[rows].astype(np.float64) for name, part in values.items()}, numbers[rows], among


def _versions(run: Path, record: Mapping[str, Any]) -> dict[str, str]:
    try:
        found = json.loads((run / VERSIONS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        found = record.get("versions")
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}
