"""A sweep as one page: the best trial, what every setting did to the metric, whether trials agree, all of them."""

from __future__ import annotations

from shlex import quote
from typing import Any

import altair as alt

import vcal_dist
from jobs.sweeps.plot import climb, panel, tried
from jobs.sweeps.settings import Sweep
from jobs.sweeps.trial import Folder, Trial
from vcal_dist.errors import ConfigError
from vcal_dist.plots.naming import label
from vcal_dist.plots.style import DATA, POSTERIOR, TRUTH, rows, styled
from vcal_dist.posterior import Posterior
from vcal_dist.report.answer import Answer, Tile
from vcal_dist.report.content import Block, Cell, Figure, Fold, Pill, Section, Status, Table, Text
from vcal_dist.report.page import render
from vcal_dist.report.words import figure, plural

AGREEING = 12  # trials whose posteriors are compared
PARAMETERS = 12  # of each
SHOWN = 40  # trials in the table; the others are folded
STATES: dict[str, Pill] = {
    "done": Pill("trained in full", "good"),
    "stopped": Pill("stopped early", "plain"),
    "running": Pill("not finished", "care"),
    "failed": Pill("failed", "bad"),
}


def page(sweep: Sweep, trials: list[Trial], mixed: tuple[int, ...]) -> str:
    """The page; `trials` are sorted, best first."""
    sections = [
        Section("settings", "What every setting did", _settings(sweep, trials)),
        Section("agreement", "Do the trials agree?", _agreement(sweep, trials)),
        Section("trials", "All trials", _table(sweep, trials)),
        Section("next", "How to go on", _next(sweep, trials, mixed)),
    ]
    shown = [section for section in sections if section.blocks]
    return render(_answer(sweep, trials), shown, place=str(sweep.output), version=vcal_dist.__version__)


def _answer(sweep: Sweep, trials: list[Trial]) -> Answer:
    done = [trial for trial in trials if trial.state == "done"]
    best = done[0] if done else None
    metric = sweep.settings.metric.replace("_", " ")
    status: Status = "good" if best else "bad"
    if best is None or best.last is None:
        headline, sentence = "No trial was trained in full", "The table of trials says why."
    else:
        headline = f"Trial {best.number} is the best of {len(trials)}"
        sentence = f"Its {metric} is {figure(best.last.metric, 5)}"
        if len(done) > 1 and done[1].last is not None:
            sentence += f", the next one's {figure(done[1].last.metric, 5)}"
        sentence += ". Figures of trials can be compared where they were trained with the same part of the schedule."
    counts = {state: sum(trial.state == state for trial in trials) for state in STATES}
    seconds = sum(rung.seconds or 0.0 for trial in trials for rung in trial.rungs)
    tiles = [Tile(str(counts["done"]), "trained in full"), Tile(str(counts["stopped"]), "stopped early")]
    tiles += [Tile(str(counts["failed"]), "failed")] if counts["failed"] else []
    tiles.append(Tile(f"{figure(seconds, 2)} s", "of training in all"))
    blocks: list[Block] = []
    if best is not None:
        lines: list[list[Cell]] = [[key, _text(value)] for key, value in best.settings.items()]
        blocks = [Table(["setting of the best trial", "value"], lines, ("value",))]
    return Answer(
        title=sweep.output.name,
        description="",
        facts=f"{plural(len(trials), 'trial')} · {metric} · search: {sweep.settings.search}, "
        f"scheduler: {sweep.settings.scheduler}",
        status=status,
        headline=headline,
        sentence=sentence,
        reasons=[],
        tiles=tiles,
        section=Section("best", "The best trial", blocks),
        over="Sweep",
    )


def _settings(sweep: Sweep, trials: list[Trial]) -> list[Block]:
    keys = tried(sweep, trials)
    if not keys:
        return []
    blocks: list[Block] = [
        Text(
            "Every point is one training of one trial; the ring is the best trial. Triangles lie below the axis.",
            "note",
        ),
        *(Figure(f"setting-{i}", panel(sweep, key, trials), "", "half") for i, key in enumerate(keys, 1)),
    ]
    if any(len(trial.rungs) > 1 for trial in trials):
        caption = "Every line is a trial: what it gained from longer schedules."
        blocks.append(Figure("schedules", climb(sweep, trials), caption))
    return blocks


def _agreement(sweep: Sweep, trials: list[Trial]) -> list[Block]:
    """The 90 % intervals of θ of the best trials: where starts lead to other answers, one sees it here."""
    done = [trial for trial in trials if trial.state == "done"][:AGREEING]
    if len(done) < 2:
        return []
    summaries = {t.number: Posterior.load(Folder(sweep, t.number).rung(sweep.last_rung)).summary() for t in done}
    blocks: list[Block] = [
        Text(
            f"The 90 % intervals and medians of the {len(done)} best trials that were trained in full, best on top. "
            "Trials that disagree by more than their widths found different modes, or some did not train long enough.",
            "note",
        )
    ]
    parameters = summaries[done[0].number]
    for number, summary in summaries.items():
        if [row.name for row in summary] != [row.name for row in parameters]:
            raise ConfigError(
                f"trial {number} has a posterior of other parameters than trial {done[0].number}, so that it is of "
                f"another problem; delete {Folder(sweep, number).path}, and the trial runs again"
            )
    for j, parameter in enumerate(parameters[:PARAMETERS]):
        found = [summaries[trial.number][j] for trial in done]
        chart = _intervals([trial.number for trial in done], found, label(parameter))
        blocks.append(Figure(f"agreement-{j + 1}", chart, "", "half"))
    if len(parameters) > PARAMETERS:
        blocks.append(Text(f"The other {len(parameters) - PARAMETERS} parameters are left out.", "note"))
    return blocks


def _intervals(numbers: list[int], found: list[Any], title: str) -> Any:
    data = rows(
        trial=[f"trial {number}" for number in numbers],
        low=[row.low for row in found],
        middle=[row.median for row in found],
        high=[row.high for row in found],
        best=[i == 0 for i in range(len(found))],
    )
    base = alt.Chart(data).encode(
        y=alt.Y("trial:N", sort=[f"trial {number}" for number in numbers], title=None),
        tooltip=["trial:N", alt.Tooltip("low:Q"), alt.Tooltip("middle:Q", title="median"), alt.Tooltip("high:Q")],
    )
    colour = alt.condition("datum.best", alt.value(TRUTH), alt.value(POSTERIOR))
    bars = base.mark_rule(strokeWidth=3).encode(
        x=alt.X("low:Q", title=title).scale(zero=False), x2="high:Q", color=colour
    )
    points = base.mark_point(filled=True, size=50, color=DATA).encode(x="middle:Q")
    return styled(alt.layer(bars, points).properties(width="container", height=max(90, 22 * len(found))))


def _table(sweep: Sweep, trials: list[Trial]) -> list[Block]:
    headings = ["trial", "state", sweep.settings.metric.replace("_", " "), "seconds", "settings"]
    right = (headings[2], "seconds")
    lines = [_line(trial) for trial in trials]
    blocks: list[Block] = [Table(headings, lines[:SHOWN], right)] if lines else []
    if len(lines) > SHOWN:
        blocks.append(Fold(f"The other {len(lines) - SHOWN} trials", [Table(headings, lines[SHOWN:], right)]))
    return blocks


def _line(trial: Trial) -> list[Cell]:
    spent = sum(rung.seconds or 0.0 for rung in trial.rungs)
    settings = ", ".join(f"{key} = {_text(value)}" for key, value in trial.settings.items())
    said = f"{settings}\n{trial.reason}" if trial.reason else settings
    metric = "–" if trial.last is None else figure(trial.last.metric, 5)
    return [str(trial.number), STATES[trial.state], metric, figure(spent, 3), said]


def _next(sweep: Sweep, trials: list[Trial], mixed: tuple[int, ...]) -> list[Block]:
    if not any(trial.state == "done" for trial in trials):
        return []
    best, config, mixture = (quote(str(sweep.output / name)) for name in ("best", "best.yaml", "mixture"))
    lines = [f"vcal report {best}", f"vcal train {config} output=runs/again"]
    lines += [f"vcal report {mixture}    # the {len(mixed)} best, weighted by their evidence"] if mixed else []
    return [Text("\n".join(lines), "code")]


def _text(value: Any) -> str:
    return figure(value, 4) if isinstance(value, float) else str(value)
