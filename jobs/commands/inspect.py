"""`vcal inspect`: what a store holds and whether it is healthy, or how a run went and what it found."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jobs.console import number, print_json, size, stdout, table
from jobs.run_state import is_mixture, is_run
from jobs.tables import first_rows, variables

if TYPE_CHECKING:
    from storage import Store
    from storage.table import Table

# Without --verify, ranges come from blocks with about this many rows: a glance stays a glance on any store.
QUICK_ROWS = 2_000_000
ROWS = 5  # shown unless told


def inspect(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A store (a directory or an s3:// URL), a run, or several averaged.")
    ],
    rows: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help=f"How many of a store's first rows to show ({ROWS} unless given)."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every chunk of a store; name the damaged ones, exit 1 if any.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show what a store or a run holds. Exit status 1 if a part of it is damaged.

    Of a store: problem, sizes, ranges, first rows and health. Of a run, finished or not: how far it is, the posterior
    of θ, how well it predicts, the stages of training, versions and files.
    """
    damage: list[str] = []
    if is_mixture(path):
        _inspect_mixture(path, json)
    elif is_run(path):
        given = [name for name, value in (("--rows", rows is not None), ("--verify", verify)) if value]
        if given:
            raise typer.BadParameter(f"{' and '.join(given)}: looks into a store, but {path} is a run; leave it out")
        from jobs.inspect_run import inspect_run

        damage = inspect_run(path, json=json)
    else:
        import storage

        try:
            store = storage.open(path)
        except storage.StoreError:
            if "://" in path or storage.exists(path):  # runs at URLs are not looked at
                raise
            cure = "make a store with 'vcal ingest', or a run with 'vcal train'"
            raise storage.StoreError(f"there is neither a store nor a run at {path}; {cure}") from None
        description = describe(store, rows=ROWS if rows is None else rows, verify=verify)
        damage = description["health"]["damage"]
        if json:
            print_json(description)
        else:
            show(description)
    if damage:
        raise typer.Exit(1)


def _inspect_mixture(path: str, json: bool) -> None:
    """Of posteriors that were averaged: what they weigh, and θ."""
    from jobs.run_state import load_posterior

    found = load_posterior(path)
    if not json:
        stdout().print(repr(found))
        return
    parameters = [vars(row) for row in found.summary()]
    print_json({"kind": "mixture", "path": path, "weights": found.record["weights"], "parameters": parameters})


def describe(store: Store, rows: int, verify: bool = False) -> dict[str, Any]:
    """Everything that `vcal inspect` shows of a store, in plain values."""
    from storage.design import find_design_faults
    from storage.errors import StoreError

    tables = {"runs": store.runs, "observations": store.observations}
    damage = [str(chunk) for chunk in store.verify()] if verify else []
    examined = verify or store.runs.rows + store.observations.rows <= QUICK_ROWS
    runs = store.kept_run_count
    findings: list[dict[str, Any]] | None = None
    ranges: dict[str, Any] = {name: {} for name in tables}
    first: dict[str, Any] = {name: {} for name in tables}
    rows_read = dict.fromkeys(tables, 0)
    if not damage:
        quick_blocks = max(1, QUICK_ROWS // max(table_.block_rows for table_ in tables.values()))
        try:
            summary = store.summary(most_blocks=None if verify else quick_blocks)
            rows_read = summary.rows_read
            for name, table_ in tables.items():
                ranges[name] = {
                    column: {key: getattr(item, key) for key in _STATISTICS}
                    for column, item in getattr(summary, name).items()
                }
                first[name] = _first_rows(table_, rows)
            if examined:
                runs = store.count_runs()
                findings = [asdict(finding) for finding in find_design_faults(store)]
        except StoreError as error:  # a damaged store still shows its schema and says what is wrong
            damage = [str(error)]
    return {
        "kind": "store",
        "path": str(store.url),
        "problem": store.problem.model_dump(mode="json"),
        "priors": {v.name: str(v.prior) for v in store.problem.calibration_inputs},
        "tables": {
            name: {
                "rows": table_.rows,
                **({"runs": runs} if name == "runs" else {}),
                "chunk_rows": table_.chunk_rows,
                "dtype": str(table_.dtype),
                "compression": table_.compression,
                "stored_bytes": store.stored_bytes(name),
                "columns": {array: list(names) for array, names in table_.columns.items()}
                | ({"run": ["run"]} if table_.numbered else {}),
                "ranges_from_rows": rows_read[name],
                "ranges": ranges[name],
                "first_rows": first[name],
            }
            for name, table_ in tables.items()
        },
        "design": findings,  # None if it was not examined
        "provenance": store.provenance,
        "health": {"verified": verify, "document_checksum": store.has_checksum, "damage": damage},
    }


_STATISTICS = ("count", "missing", "minimum", "maximum", "mean", "sd")


def _first_rows(source: Table, rows: int) -> dict[str, list[float]]:
    """The first values of every column."""
    columns = {**source.columns, **({"run": ["run"]} if source.numbered else {})}
    arrays = source.read(0, min(rows, source.rows), arrays=list(columns))
    return {column: arrays[array][:, i].tolist() for array, names in columns.items() for i, column in enumerate(names)}


def show(description: dict[str, Any]) -> None:
    """Print what `describe` found."""
    out = stdout()
    problem = description["problem"]
    out.print(f"{problem['name']}  {description['path']}", style="bold")
    if problem["description"]:
        out.print(problem["description"])
    parts = (variables(problem, description["priors"]), _sizes(description), *_values(description))
    for part in parts:
        out.print()
        out.print(part)
    out.print()
    health = description["health"]
    if not health["damage"]:
        _show_design(description["design"])
    if health["damage"]:
        out.print(f"damaged: {len(health['damage'])}", style="bold red")
        for line in health["damage"]:
            out.print(f"  {line}", style="red")
    elif health["verified"]:
        out.print("healthy: every chunk was read and matches its checksum", style="green")
    else:
        out.print("healthy as far as its metadata tell; --verify reads every chunk", style="green")
    if not health["document_checksum"]:
        out.print(
            "problem and priors carry no checksum, since an earlier version wrote the store; the next append adds it",
            style="yellow",
        )


def _show_design(findings: list[dict[str, Any]] | None) -> None:
    out = stdout()
    if findings is None:
        out.print("design: not examined; --verify reads all rows and says what cannot be learned from them")
    elif findings:
        out.print(f"design: {len(findings)} finding{'s' * (len(findings) != 1)}", style="bold yellow")
        for finding in findings:
            style = "red" if finding["severity"] == "bad" else "yellow"
            out.print(f"  {finding['severity']}: {finding['message']}", style=style)


def _sizes(description: dict[str, Any]) -> Any:
    headings = ("rows", "runs", "rows per chunk", "on disk", "numbers", "compression")
    result = table("Tables", "table", *headings, right=headings[:-2])
    for name, item in description["tables"].items():
        chunk_rows, stored = number(item["chunk_rows"]), size(item["stored_bytes"])
        runs = "" if item.get("runs") is None else number(item["runs"])
        result.add_row(name, number(item["rows"]), runs, chunk_rows, stored, item["dtype"], item["compression"])
    return result


def _values(description: dict[str, Any]) -> list[Any]:
    """For each table, ranges and first rows, a line a column: any number of columns fits the width."""
    results = []
    for name, item in description["tables"].items():
        if item["ranges"] and item["rows"]:
            part = "" if item["ranges_from_rows"] == item["rows"] else f", from {item['ranges_from_rows']:,} rows"
            result = table(f"Ranges of {name}{part}", "column", *_STATISTICS, right=_STATISTICS)
            for column, values in item["ranges"].items():
                result.add_row(column, *(number(values[key]) for key in _STATISTICS))
            results.append(result)
        results += first_rows(f"First rows of {name}", item["first_rows"])
    return results
