"""What a result was made of: the problem, the data, the configuration, versions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from storage import strict_yaml
from storage.summary import ColumnSummary
from storage.text import redacted
from vcal_dist.config import Config
from vcal_dist.mixed import Averaged
from vcal_dist.report.content import Block, Facts, Fold, Table, Text
from vcal_dist.report.gathering import Gathered
from vcal_dist.report.words import figure, percent, plain, plural

if TYPE_CHECKING:
    from vcal_dist.report.diagnostics import Verdict

MOST_SOURCES = 30


def provenance(gathered: Gathered, _: Verdict) -> Iterator[Block]:
    """Problem, data, where they came from, settings, versions."""
    yield _run(gathered)
    yield Fold("The problem: inputs, parameters and outputs", [_problem(gathered)])
    if gathered.summary is not None:
        yield Fold("The data in figures", list(_data(gathered)))
    if gathered.store is not None:
        yield Fold("Where the data came from", list(_sources(gathered)))
    if isinstance(gathered.posterior, Averaged):
        yield Fold("The members of the average", [_members(gathered.posterior)])
    if gathered.config is not None:
        yield Fold("Settings that are not the defaults", [Text(strict_yaml.dump(changed(gathered.config)), "code")])
        yield Fold("The whole configuration", [Text(strict_yaml.dump(gathered.config.plain()), "code")])
    if gathered.versions:
        yield Fold("Versions", [Facts(list(gathered.versions.items()))])


def _run(gathered: Gathered) -> Facts:
    config, record = gathered.config, gathered.record
    rows = [("run", gathered.place)]
    if gathered.finished:
        rows.append(("finished", gathered.finished))
    if config is not None:
        rows.append(("store", config.store + ("" if gathered.store is not None else " (cannot be used now)")))
    counted = record.get("rows")
    if counted:
        told = {name: f"{int(count):,} {name}" for name, count in counted.items()}
        distinct = record.get("runs")
        if distinct is not None and distinct < counted.get("runs", 0):
            told["runs"] = f"{int(counted['runs']):,} rows of {int(distinct):,} runs"
        rows.append(("rows", " and ".join(told.values())))
    model = gathered.member.model
    discrepancy = {"none": "f = η", "additive": "f = η + δ(x)", "general": "f = g(η, x)"}[model.kind]
    layers = len(model.settings.eta.hidden)
    depth = f", {plural(layers, 'hidden layer')}" if layers else ""
    kernel = model.settings.eta.features.kernel
    emulator = f"emulator with a {kernel} kernel, {model.eta.width} features{depth}"
    if gathered.member.validation is not None:
        emulator = "emulator of few runs, stacked by cross-validation"
    rows.append(("model", f"{discrepancy}; {emulator}"))
    rows.append(("likelihood", f"{model.likelihood_y.kind} observations, {model.likelihood_z.kind} runs"))
    if config is not None:
        rows.append(("weights", f"{config.fit.weights}, seed {config.seed}"))
    for name, sigma in list(gathered.member.noise.items())[:6]:
        rows.append((f"noise of {name}", figure(sigma, 4)))
    for name, value in (("bound on the log evidence", record.get("bound")),):
        if isinstance(value, int | float):
            rows.append((name, figure(float(value), 7)))
    return Facts(rows)


def _problem(gathered: Gathered) -> Table:
    problem = gathered.posterior.problem
    rows = []
    groups: tuple[tuple[str, Any], ...] = (
        ("control input x", problem.control_inputs),
        ("parameter θ", problem.calibration_inputs),
        ("output", problem.outputs),
    )
    for role, variables in groups:
        for v in variables:
            bounds = "–" if v.bounds is None else f"{plain(v.bounds[0])} to {plain(v.bounds[1])}"
            rows.append((v.name, role, v.unit, bounds, str(getattr(v, "prior", "")), v.description))
    return Table(("name", "role", "unit", "bounds", "prior", "description"), rows)


def _data(gathered: Gathered) -> Iterator[Block]:
    summary, store = gathered.summary, gathered.store
    assert summary is not None
    assert store is not None
    tables: tuple[tuple[str, dict[str, ColumnSummary], int], ...] = (
        ("runs", summary.runs, store.runs.rows),
        ("observations", summary.observations, store.observations.rows),
    )
    for name, columns, rows in tables:
        read = summary.rows_read[name]
        caption = f"{name}: {rows:,}" + (f", of which {read:,} were read for these figures" if read < rows else "")
        headings = ("column", "least", "mean", "sd", "most", "missing")
        lines = [
            (
                column,
                *(plain(value, 4) for value in (c.minimum, c.mean, c.sd, c.maximum)),
                percent(c.missing / max(1, c.count + c.missing)),
            )
            for column, c in columns.items()
        ]
        yield Table(headings, lines, headings[1:], caption)


def _sources(gathered: Gathered) -> Iterator[Block]:
    assert gathered.store is not None
    found = gathered.store.provenance
    yield Text(f"The store was made at {found.get('created', '?')} by vcal-dist {found.get('vcal_dist', '?')}.")
    sources = found.get("sources") or []
    if sources:
        keys = list(dict.fromkeys(key for source in sources for key in source))
        rows = [[_plain(source.get(key, "")) for key in keys] for source in sources[:MOST_SOURCES]]
        more = f"the first {MOST_SOURCES} of {len(sources):,} files" if len(sources) > MOST_SOURCES else ""
        yield Table(keys, rows, caption=more)


def _members(posterior: Averaged) -> Table:
    rows = []
    for weight, member in zip(posterior.weights, posterior.members, strict=True):
        record = member.record
        where = (record.get("config") or {}).get("output") or "–"
        bound = record.get("bound")
        rows.append((str(where), percent(float(weight)), figure(bound, 7) if isinstance(bound, int | float) else "–"))
    return Table(("run", "weight", "bound on the log evidence"), rows, ("weight", "bound on the log evidence"))


def changed(config: Config) -> dict[str, Any]:
    """What a configuration says beyond its defaults."""
    found = _different(config.plain(), Config(store="-").plain())
    assert isinstance(found, dict)
    return found


def _different(given: Any, default: Any) -> Any:
    """The keys whose values differ; a section only where something in it does."""
    if not isinstance(given, dict) or not isinstance(default, dict):
        return given
    return {key: _different(value, default.get(key)) for key, value in given.items() if value != default.get(key)}


def _plain(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return redacted(", ".join(map(str, value)) if isinstance(value, list) else str(value))
    return f"{value:,}" if isinstance(value, int) else plain(value)
