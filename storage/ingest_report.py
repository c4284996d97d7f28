"""What an ingest tells people: what was written and left out, or why nothing was."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from storage.checks import NOT_WHOLE
from storage.design import Finding
from storage.problem import NOISE_SUFFIX, RUN, Problem
from storage.tally import TEXT, FileFault

MOST_LINES = 20


@dataclass(frozen=True)
class TableReport:
    """One table of an ingest."""

    rows: int  # written
    files: int
    dropped: int  # rows left out
    faults: tuple[FileFault, ...]  # why; a row may have several
    ignored: tuple[str, ...]  # columns that the problem does not name
    noise: bool
    notes: tuple[str, ...]  # on files that look odd


@dataclass(frozen=True)
class IngestReport:
    """What an ingest has done."""

    store: str
    tables: dict[str, TableReport]
    dtype: str
    why: str  # this dtype
    seconds: float
    again: tuple[str, ...] = ()  # files that had been ingested before
    lacking: tuple[str, ...] = ()  # tables of the store that have no rows yet
    identity: tuple[int, int] | None = None  # rows and simulator runs in the store now; None if not counted
    findings: tuple[Finding, ...] | None = ()  # what is wrong with the store's design; None if it was not examined

    @property
    def rows(self) -> dict[str, int]:
        """Rows written, by table."""
        return {name: table.rows for name, table in self.tables.items()}

    @property
    def dropped(self) -> dict[tuple[str, str, str], int]:
        """Values that cost their rows, by file, column and kind."""
        faults = [fault for table in self.tables.values() for fault in table.faults]
        return {(f.file, f.fault.column, f.fault.kind): f.fault.count for f in faults}

    def _runs(self, table: TableReport) -> str:
        """How many runs the new rows are of, where they are all rows of the store."""
        new = self.identity is not None and self.identity[0] == table.rows
        return f" of {_of_runs(self.identity[1])}" if new and self.identity else ""

    def lines(self) -> list[str]:
        """The report in words."""
        lines = []
        for name, table in self.tables.items():
            noise = ", with their noise" if table.noise else ""
            runs = self._runs(table) if name == "runs" else ""
            files = f"{table.files:,} file{'s' * (table.files != 1)}"
            lines.append(f"{name}: {table.rows:,} rows{runs} from {files}{noise}")
            if runs == "" and name == "runs" and self.identity:
                lines.append(f"  the store now has {self.identity[0]:,} rows of {_of_runs(self.identity[1])}")
            if table.dropped:
                lines.append(f"  dropped {table.dropped:,} of {table.rows + table.dropped:,} rows:")
                lines += [f"    {line}" for line in _some(table.faults)]
            if table.ignored:
                lines.append(f"  ignored columns: {_names(table.ignored)}")
            lines += [f"  note: {note}" for note in table.notes[:MOST_LINES]]
        lines += design_lines(self.findings or ())
        if self.again:
            lines.append(f"note: ingested before, so that their rows may now be there twice: {_names(self.again)}")
        rate = sum(self.rows.values()) / max(self.seconds, 1e-9)
        lines.append(f"stored as {self.dtype}: {self.why}")
        lines.append(f"{self.store} written in {self.seconds:.1f} s, {rate:,.0f} rows/s")
        lines += [f"there are no {name} yet, and training needs them: add some with --append" for name in self.lacking]
        return lines


def refusal(faults: Sequence[FileFault], problem: Problem, *, none_left: str | None = None) -> str:
    """Why nothing was written, and what helps."""
    outputs = {output.name for output in problem.outputs}
    cures = ["mend the files"]
    if any(f.fault.kind.startswith("out of bounds") and not f.fault.column.endswith(NOISE_SUFFIX) for f in faults):
        cures.append("widen the bounds in the problem file")
    if any(f.fault.kind.startswith("missing") and f.fault.column in outputs for f in faults):
        cures.append("set 'missing: true' for an output that may be missing")
    if any(f.fault.column == RUN and f.fault.kind in (TEXT, NOT_WHOLE) for f in faults) and RUN not in _variables(
        problem
    ):
        cures.append(f"number the runs with whole numbers in the column '{RUN}', or give that column another name")
    if any(f.fault.kind == TEXT and re.fullmatch(r"'[-+]?\d+,\d+'", f.fault.value) for f in faults):
        cures.append("write numbers with a decimal point instead of a comma")
    if none_left is None:
        cures.append("leave such rows out with --drop-invalid (drop_invalid=True)")
    what = f"no row of the {none_left} can be used" if none_left else "rows that the problem does not admit"
    cure = f"{', '.join(cures[:-1])}, or {cures[-1]}" if len(cures) > 1 else cures[0]
    body = "\n".join(f"  {line}" for line in _some(faults))
    return f"{what}; nothing was written (rows are counted from 1, below the header):\n{body}\nTo go on, {cure}."


def design_lines(findings: Sequence[Finding]) -> list[str]:
    """Findings in words, a line each."""
    return [f"{'WARNING' if f.severity == 'bad' else 'note'}: {f.message}" for f in findings]


def _of_runs(count: int) -> str:
    return f"{count:,} run{'s' * (count != 1)}"


def _variables(problem: Problem) -> set[str]:
    return {v.name for v in (*problem.control_inputs, *problem.calibration_inputs, *problem.outputs)}


def _some(faults: Sequence[FileFault]) -> list[str]:
    lines = [str(fault) for fault in faults[:MOST_LINES]]
    more = len(faults) - MOST_LINES
    return [*lines, f"and {more:,} more such lines"] if more > 0 else lines


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_LINES]) + (f" and {len(names) - MOST_LINES} more" if len(names) > MOST_LINES else "")
