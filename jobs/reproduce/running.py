"""Runs an experiment once for every seed, and gathers what came of it into `results.json` and figures."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

from jobs.reproduce.experiment import Experiment, Outcome, Say
from storage import documents
from storage.places import write_durably
from vcal_dist.errors import ConfigError
from vcal_dist.run_directory import versions

RESULTS, SETTINGS, OUTCOME, FIGURES = "results.json", "settings.json", "outcome.json", "figures"
FORMATS = ("png", "pdf")


def reproduce(experiment: Experiment, output: Path, *, seeds: int, quick: bool, say: Say) -> dict[str, Any]:
    """Every seed that is not done yet; then `output`/results.json, which is also returned."""
    from vcal_dist.plots.style import write

    settings = experiment.settings(quick)
    folders = claim(experiment, output, seeds=seeds, quick=quick)
    done = []
    for seed, folder in enumerate(folders):
        found = _read(folder / OUTCOME)
        if found is None:
            say(f"{experiment.name}, seed {seed}: {experiment.title}")
            begun = time.perf_counter()
            outcome = experiment.run(folder, seed, settings, say)
            if seed == 0:
                (output / FIGURES).mkdir(parents=True, exist_ok=True)
                for name, chart in outcome.charts.items():
                    for kind in FORMATS:
                        write(chart, output / FIGURES / f"{name}.{kind}")
            found = _plain(outcome, settings, time.perf_counter() - begun)
            write_durably(folder / OUTCOME, _json(found))
        done.append(found)
    results = summarise(experiment, done, quick=quick)
    write_durably(output / RESULTS, _json(results))
    return results


def claim(experiment: Experiment, output: Path, *, seeds: int, quick: bool) -> list[Path]:
    """The folders of the seeds, or an error if one holds something else: before any work."""
    folders = [output / f"seed-{seed}" for seed in range(seeds)]
    for folder in folders:
        _claim(folder, experiment.settings(quick))
    return folders


def summarise(experiment: Experiment, done: list[dict[str, Any]], *, quick: bool) -> dict[str, Any]:
    """All seeds together: the paper's figures, ours with median and range, and the floor."""
    figures = experiment.figures(quick)
    floors = [outcome["floor"] for outcome in done]
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "quick": quick,
        "seeds": len(done),
        "notes": list(experiment.notes),
        "settings": done[0]["settings"],
        "figures": {figure.key: {"label": figure.label, "unit": figure.unit} for figure in figures},
        "paper": {figure.key: figure.paper for figure in figures},
        "ours": {figure.key: _spread([outcome["ours"].get(figure.key) for outcome in done]) for figure in figures},
        "floor": {
            figure.key: figure.floor
            if figure.floor is not None
            else (_spread([floor.get(figure.key) for floor in floors]) or {}).get("median")
            for figure in figures
        },
        "seconds": [outcome["seconds"] for outcome in done],
        "details": [outcome["details"] for outcome in done],
        "versions": versions(),
    }


def _spread(values: list[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "low": min(known), "high": max(known), "values": values}


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Refuses a folder whose data and runs are those of other settings: they would be taken for these."""
    if not folder.exists() or not any(folder.iterdir()):
        write_durably(folder / SETTINGS, _json(settings))
    elif _read(folder / SETTINGS) != json.loads(_json(settings)):
        raise ConfigError(
            f"{folder} holds an experiment with other settings; delete it, or choose another directory with --output"
        )


def _read(path: Path) -> dict[str, Any] | None:
    """What an earlier command left in a file, if it is there."""
    if not path.is_file():
        return None
    return documents.read(path, ConfigError, f"delete {path.parent}, and the experiment runs again")


def _plain(outcome: Outcome, settings: dict[str, Any], seconds: float) -> dict[str, Any]:
    kept = {name: dict(getattr(outcome, name)) for name in ("ours", "floor", "details")}
    return {**kept, "settings": settings, "seconds": seconds}


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False, default=_listed) + "\n").encode()


def _listed(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"results hold a {type(value).__name__}, which JSON cannot")
