"""`vcal bench`: the benchmarks."""

from typing import Annotated, Any, Literal

import typer

from jobs.console import number, print_json, stdout, table

app = typer.Typer(help="Measure speed and memory on this machine.", no_args_is_help=True)

Quick = Annotated[bool, typer.Option("--quick", help="Smaller data: finishes within a minute or two on two cores.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


@app.command()
def stream(quick: Quick = False, json: Json = False) -> None:
    """Rows per second from the store, beside a DataLoader over rows and a bare sequential read."""
    from jobs.bench.stream import run

    _show("vcal bench stream", run(quick=quick), json)


@app.command()
def emulator(quick: Quick = False, json: Json = False) -> None:
    """Accuracy of the emulator on the borehole, beside mean-field training and GPyTorch's SVGP at the same time."""
    from jobs.bench.emulator import run

    _show("vcal bench emulator", run(quick=quick), json)


@app.command()
def emulators(
    quick: Quick = False,
    functions: Annotated[
        str | None, typer.Option(help="Names with commas between them.", show_default="all; with --quick three")
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Numbers of runs with commas between them; long-form problems have their own.",
            show_default="20 to 100000; with --quick 20 to 300",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Designs of every size.", show_default="3; with --quick 1")
    ] = None,
    json: Json = False,
) -> None:
    """Accuracy and coverage of the default emulator over functions of the literature, beside GPyTorch's."""
    from jobs.bench.emulators import run

    names = None if functions is None else [name.strip() for name in functions.split(",")]
    figures = run(quick=quick, functions=names, sizes=_whole_numbers(sizes), seeds=seeds)
    if not json:
        _show_cells(figures.pop("cells"))
    _show("vcal bench emulators", figures, json)


@app.command()
def train(quick: Quick = False, json: Json = False) -> None:
    """Training from the store: time, accuracy, overhead beside a bare loop, waiting, two processes, memory."""
    from jobs.bench.train import run

    _show("vcal bench train", run(quick=quick), json)


@app.command()
def coverage(
    experiment: Annotated[
        Literal[
            "illustrative",
            "borehole_1000",
            "borehole_10000",
            "borehole_full",
            "borehole_small",
            "borehole_few",
            "cell",
            "cell_default",
            "radionuclide",
            "oscillation",
        ],
        typer.Argument(help="Whose truths and data are drawn again and again."),
    ],
    replicates: Annotated[
        int | None, typer.Option(min=1, help="How many.", show_default="as many as the experiment has")
    ] = None,
    first: Annotated[
        int, typer.Option(min=0, help="Number of the first: others than those that were looked at before.")
    ] = 0,
    weights: Annotated[Literal["collapsed", "fullrank", "meanfield"], typer.Option(help="Family of weights.")] = (
        "collapsed"
    ),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Of each stage of meanfield.", show_default="its default")
    ] = None,
    against: Annotated[
        int | None,
        typer.Option(
            min=200, help="Calibrates again with so many evaluations, and compares the widths.", show_default="off"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """How often intervals of θ and of fresh observations hold what they promise, over replicates of an experiment."""
    from jobs.bench.coverage import Asked, run

    if against is not None and weights != "collapsed":
        raise typer.BadParameter(
            f"weights are '{weights}'; only collapsed ones have evaluations", param_hint="--against"
        )
    found = run(Asked(experiment, weights, steps, against), first=first, replicates=replicates)
    _show(f"vcal bench coverage {experiment}", found, json)


@app.command()
def predictions(
    problems: Annotated[
        str | None, typer.Option(help="Names with commas between them.", show_default="all five")
    ] = None,
    replicates: Annotated[int, typer.Option(min=1, help="Truths and data sets of every problem.")] = 8,
    json: Json = False,
) -> None:
    """How many fresh values 90 % intervals of `vcal predict` hold: of the simulator, the process, an observation."""
    from jobs.bench.predictions import run

    names = None if problems is None else [name.strip() for name in problems.split(",")]
    _show("vcal bench predictions", run(problems=names, replicates=replicates), json)


def _whole_numbers(text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"'{text}' is no list of whole numbers such as 20,50", param_hint="--sizes") from None


def _show_cells(cells: list[dict[str, Any]]) -> None:
    numbers = ("N", "seed", "rmse", "coverage", "log density", "seconds", "reported rmse", "reported coverage")
    result = table("cells", "function", "N", "seed", "method", *numbers[2:], right=numbers)
    for cell in cells:
        values = [number(None, 3)] * 6
        if not cell["failed"]:
            names = ("rmse", "coverage", "log_density", "seconds", "reported_rmse", "reported_coverage")
            values = [number(cell[name], 3) for name in names]
        result.add_row(cell["function"], number(cell["runs"]), str(cell["seed"]), cell["method"], *values)
    stdout().print(result)


def _show(title: str, figures: dict[str, Any], json: bool) -> None:
    if json:
        print_json(figures)
        return
    result = table(title, "figure", "value", right=("value",))
    for name, value in figures.items():
        result.add_row(name, number(value) if isinstance(value, int | float | None) else str(value))
    stdout().print(result)
