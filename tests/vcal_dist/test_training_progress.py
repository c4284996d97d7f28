"""The bar of training: name, bar, count and time are legible on a terminal of any usual width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vcal_dist.progress import Progress, make_bar, said
from vcal_dist.records import Records


def latest(parameters: int) -> Progress:
    names = ["rw", "r", "Tl"] if parameters == 3 else [f"conductivity_{j}" for j in range(parameters)]
    records = Records(None, 10, names)
    records.latest = {"loss": 12.3456, "emulator_error": 0.0123, "rows_per_second": 123456.0}
    records.latest |= {f"theta.{name}": 0.51234 for name in names}
    return Progress(records)


def drawn(parameters: int, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    bar = make_bar(console)
    bar.add_task("weights_and_theta", total=20_000, completed=10_000, figures=latest(parameters).figures())
    with console.capture() as captured:
        console.print(bar.get_renderable())
    return captured.get().splitlines()


@pytest.mark.parametrize("parameters", [3, 30])
@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_a_narrow_terminal_cuts_figures_and_not_the_count(parameters: int, width: int) -> None:
    (line,) = drawn(parameters, width)
    kept = f"{'weights_and_theta':<18} {'━' * 10:<20} 10000/20000 0:00:00 "
    assert line.startswith(kept)
    assert line.removeprefix(kept).strip() == said(latest(parameters).figures(), width - len(kept))


@pytest.mark.parametrize(("parameters", "second"), [(3, "θ rw 0.512 …"), (30, "emulator error 0.012")])
def test_what_a_hundred_columns_have_room_for(parameters: int, second: str) -> None:
    assert drawn(parameters, 100)[0].split("0:00:00")[1].strip() == f"bound/row -12.346 · {second}"


def test_figures_are_left_out_whole_and_theta_parameter_by_parameter() -> None:
    figures = latest(3).figures()
    everything = "bound/row -12.346 · θ rw 0.512, r 0.512, Tl 0.512 · emulator error 0.012 · 123 k rows/s"
    assert said(figures) == said(figures, len(everything)) == everything
    assert said(figures, len(everything) - 1) == everything.rpartition(" · ")[0]
    assert said(figures, 42) == "bound/row -12.346 · θ rw 0.512, r 0.512 …"
    assert said(figures, 20) == "bound/row -12.346"
    assert said(figures, 16) == "θ rw 0.512 …"
    assert said(figures, 3) == ""
    assert said(latest(30).figures()).count("conductivity") == 4
