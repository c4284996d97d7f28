"""A picture of a sweep: for every setting the metric against its values, coloured by the length of the training."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.sweeps.settings import Sweep
from jobs.sweeps.space import Dimension, same
from jobs.sweeps.trial import Rung, Trial
from storage.places import write_durably

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 4
PANEL = (3.4, 2.6)  # inches
FAR = 4.0  # times the spread of the better half, below which points are shown at the edge


def plot(sweep: Sweep, trials: list[Trial], path: Path) -> None:
    """Writes the picture; `trials` are sorted, best first. Nothing is written before there is a result."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    points = [(trial, rung) for trial in reversed(trials) for rung in trial.rungs]  # the best on top
    keys = [key for key in sweep.space.dimensions if any(key in trial.settings for trial, _ in points)]
    if not keys:
        return
    columns = min(COLUMNS, len(keys))
    rows = -(-len(keys) // columns)
    figure = Figure(figsize=(PANEL[0] * columns + 0.4, PANEL[1] * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    low, high = _limits([rung.metric for _, rung in points])
    for i, axes in enumerate(panels):
        if i >= len(keys):
            axes.set_axis_off()
            continue
        _panel(axes, sweep, keys[i], points, trials, (low, high))
        if i % columns == 0:
            axes.set_ylabel(sweep.settings.metric.replace("_", " "), fontsize=8)
        else:
            axes.tick_params(labelleft=False)
    handles, labels = {}, {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label], labels[label] = handle, label
    count = f"{len(trials)} trial{'s' if len(trials) != 1 else ''}"
    figure.suptitle(f"Sweep {sweep.output.name}: {count}", fontsize=10)
    figure.legend(handles.values(), labels.values(), loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=130)
    write_durably(path, data.getvalue())


def _panel(
    axes: Axes,
    sweep: Sweep,
    key: str,
    points: list[tuple[Trial, Rung]],
    trials: list[Trial],
    limits: tuple[float, float],
) -> None:
    from matplotlib import colormaps

    dimension, (low, high) = sweep.space.dimensions[key], limits
    colours = colormaps["viridis_r"]
    for rung in sweep.rungs:
        here = [(trial, found.metric) for trial, found in points if found.rung == rung and key in trial.settings]
        share = (rung - sweep.rungs[0]) / max(len(sweep.rungs) - 1, 1)
        options: dict[str, Any] = {"color": colours(0.15 + 0.75 * share), "s": 16 + 14 * share, "linewidths": 0}
        factor = sweep.budget(sweep.last_rung - rung)
        name = "whole schedule" if factor == 1 else f"1/{factor} of the schedule"
        inside = [(_place(dimension, key, trial), value) for trial, value in here if value >= low]
        below = [_place(dimension, key, trial) for trial, value in here if value < low]
        if inside:
            axes.scatter(*zip(*inside, strict=True), label=name, alpha=0.85, **options)
        if below:
            axes.scatter(
                below, [low] * len(below), marker="v", label=None if inside else name, clip_on=False, **options
            )
    failed = [_place(dimension, key, t) for t in trials if t.state == "failed" and key in t.settings]
    if failed:
        edge = [low] * len(failed)
        axes.scatter(failed, edge, marker="x", color="firebrick", s=18, linewidths=1, clip_on=False, label="failed")
    best = trials[0]
    if best.state == "done" and best.last is not None and key in best.settings:
        at = (_place(dimension, key, best), best.last.metric)
        axes.scatter(*at, marker="*", s=110, color="none", edgecolors="crimson", linewidths=1.2, label="best", zorder=5)
    axes.set_ylim(low, high)
    axes.set_title(key, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _scale(axes, dimension)


def _scale(axes: Axes, dimension: Dimension) -> None:
    """The axis of a setting's values: the whole range, so that pictures of one sweep can be compared."""
    if dimension.choice is not None:
        labels = [value if isinstance(value, str) else json.dumps(value) for value in dimension.choice]
        short = [label if len(label) <= 14 else f"{label[:13]}…" for label in labels]
        crowded = sum(map(len, short)) > 34
        axes.set_xticks(range(len(short)), short, rotation=30 if crowded else 0, ha="right" if crowded else "center")
        axes.set_xlim(-0.5, len(short) - 0.5)
        return
    low, high = dimension.ends
    if dimension.loguniform is None:
        margin = 0.03 * (high - low)
        axes.set_xlim(low - margin, high + margin)
        return
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    margin = (high / low) ** 0.03
    axes.set_xscale("log")
    axes.set_xlim(low / margin, high * margin)
    fine = high / low < 1000
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if fine else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _place(dimension: Dimension, key: str, trial: Trial) -> float:
    """Where a trial stands on the axis; on a strip beside its category, trials apart from each other."""
    value = trial.settings[key]
    if dimension.choice is None:
        return float(value)
    number = next(i for i, choice in enumerate(dimension.choice) if same(choice, value))
    return number + 0.5 * ((trial.number * 0.618034) % 1.0 - 0.5)


def _limits(metrics: list[float]) -> tuple[float, float]:
    """The range that is shown: a few trials that went wrong must not flatten all others."""
    ordered = sorted(metrics)
    best, middle = ordered[-1], ordered[len(ordered) // 2]
    low = max(ordered[0], best - FAR * (best - middle)) if best > middle else ordered[0]
    margin = 0.06 * (best - low) or 0.05 * max(abs(best), 1e-6)
    if not math.isfinite(margin):
        return low, best
    return low - margin, best + margin
