"""Two processes with shares of a batch, unequal or empty, compute what one process computes from all of it.

The tests start this file as a script, twice, as the two ranks of a group.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vcal_dist.batches import take
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collective import sum_over_ranks, world_size
from vcal_dist.densities import collapsed_log_density
from vcal_dist.fullrank import FullRank
from vcal_dist.gp import Draw
from vcal_dist.natural import Statistics, observations_statistics, runs_statistics
from vcal_dist.objective import CollapsedTheta, Samples, collapsed_observations, collapsed_runs, elbo
from vcal_dist.observation_sums import ObservationSums
from vcal_dist.passes import close, compress, settle

F64 = torch.float64
ROWS = 11
SHARES = {"unequal": [7, 4], "empty": [ROWS, 0], "empty first": [0, ROWS]}
Result = dict[str, Tensor]
Share = Callable[[Any], Any]


def gradients(value: Tensor, *modules: nn.Module) -> Result:
    named = {f"{i}.{n}": p for i, module in enumerate(modules) for n, p in module.named_parameters() if p.numel()}
    found = torch.autograd.grad(value, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, found, strict=True))


def statistics_of(statistics: Statistics) -> Result:
    names = ("theta", "cross", "weights", "gradient_theta", "gradient_weights")
    return dict(zip(names, [*statistics.curvature, *statistics[1:3]], strict=True))


def deep_or_shallow(kit: Any, kind: str, depth: str) -> CalibrationModel:
    hidden = (2,) if depth == "deep" else ()
    return kit.model(kind, outputs=2, hidden=hidden, frequencies="learned", free_kappa=kind == "additive")


# --- what is computed, each from a rank's share of the rows -----------------------------------------------------------


def evidence_of_runs(kit: Any, share: Share, kind: str, depth: str) -> Result:
    model = deep_or_shallow(kit, kind, depth)
    runs = share(kit.runs(model, ROWS, missing=True))
    value, rows = collapsed_runs(model, runs, Draw((3,), 2))
    return {"value": value.detach(), "rows": rows, **gradients(value, model)}


def evidence_of_observations(kit: Any, share: Share, kind: str, depth: str) -> Result:
    model = deep_or_shallow(kit, kind, depth)
    observations = share(kit.observations(model, ROWS, missing=True, noise=True))
    point = CollapsedTheta(model, kit.frame(2, model.eta.width, 30), torch.tensor([0.4]))
    value, rows = collapsed_observations(model, point, observations, Draw((3,), 2))
    return {"value": value.detach(), "rows": rows, **gradients(value, model, point)}


def loss_of_the_bound(kit: Any, share: Share, kind: str, depth: str) -> Result:
    """−W·Σ_local + KL: the loss whose gradient the ranks average."""
    model = deep_or_shallow(kit, kind, depth)
    q = kit.mean_field(1, 2, model.width)
    runs, observations = share(kit.runs(model, ROWS, missing=True)), share(kit.observations(model, ROWS, missing=True))
    W = world_size()
    options: dict[str, Any] = {"key": (3,), "samples": Samples(2, 2)}
    loss = -elbo(model, q, runs, observations, scale_runs=W * 2.0, scale_observations=W * 3.0, **options).total
    return {"value": loss.detach(), **gradients(loss, model, q)}


def natural_statistics(kit: Any, share: Share, kind: str, depth: str) -> Result:
    model = deep_or_shallow(kit, kind, depth)
    q = kit.full_rank(1, 2, model.width)
    runs, observations = share(kit.runs(model, ROWS, missing=True)), share(kit.observations(model, ROWS, missing=True))
    found = runs_statistics(model, q, runs, key=(3,)).plus(observations_statistics(model, q, observations, key=(3,)))
    return statistics_of(found.over_ranks())


def passes_over_runs(kit: Any, share: Share, kind: str, depth: str) -> Result:
    model = deep_or_shallow(kit, kind, depth)
    runs = share(kit.runs(model, ROWS, missing=True))
    frame, log_evidence = compress(model, [runs])
    q = FullRank(0, 2, model.eta.width)
    settle(model, q, lambda: [runs])
    return {
        "mean": frame.mean,
        "root": frame.root,
        "evidence": log_evidence,
        "settled": q.mean,
        "P": q.precision_weights,
    }


def density_on_points(kit: Any, share: Share, kind: str, depth: str) -> Result:
    model = deep_or_shallow(kit, kind, depth)
    observations = share(kit.observations(model, ROWS, missing=True))
    frame, theta = kit.frame(2, model.eta.width, 30), torch.linspace(-1, 1, 5, dtype=F64)[:, None]
    return {"density": collapsed_log_density(model, frame, lambda: [observations], theta)}


def density_from_sums(kit: Any, share: Share, kind: str, depth: str) -> Result:
    model = deep_or_shallow(kit, kind, depth)
    sums = ObservationSums(model, kit.frame(2, model.eta.width, 30), torch.zeros(1, dtype=F64))
    sums.take(share(kit.observations(model, ROWS, missing=True)))
    density = sums.log_density(torch.linspace(-1, 1, 5, dtype=F64)[:, None])
    return {"density": density, **dict(zip(("G", "b", "square", "rows"), sums.result(), strict=True))}


def closing(kit: Any, share: Share, kind: str, depth: str) -> Result:
    model = deep_or_shallow(kit, kind, depth)
    observations = share(kit.observations(model, ROWS, missing=True))
    frame = kit.frame(2, model.eta.width, 30, scale=0.1).widen(model.width - model.eta.width)
    q = FullRank(1, 2, model.width, frame=frame, absorbed=True)
    end = close(model, q, lambda: [observations])
    numbers = torch.tensor([end.log_evidence, end.iterations, end.damped, end.converged], dtype=F64)
    return {"end": numbers, "theta": q.theta_mean, "mean": q.mean, **{f"{i}": p for i, p in enumerate(q.precision)}}


COMPUTED = {
    f.__name__: f
    for f in (
        evidence_of_runs,
        evidence_of_observations,
        loss_of_the_bound,
        natural_statistics,
        passes_over_runs,
        density_on_points,
        density_from_sums,
        closing,
    )
}
CASES = [
    *(("evidence_of_runs", "none", depth) for depth in ("shallow", "deep")),
    *(
        ("evidence_of_observations", kind, depth)
        for kind in ("none", "additive", "general")
        for depth in ("shallow", "deep")
    ),
    *(("loss_of_the_bound", kind, "deep") for kind in ("additive", "general")),
    *(("natural_statistics", kind, depth) for kind in ("additive", "general") for depth in ("shallow", "deep")),
    *(("passes_over_runs", "none", depth) for depth in ("shallow", "deep")),
    ("density_on_points", "additive", "shallow"),
    ("density_from_sums", "additive", "shallow"),
]
CLOSING = [("closing", "additive", "shallow"), ("closing", "general", "deep")]


def compute(kit: Any, case: tuple[str, str, str], share: Share) -> Result:
    name, kind, depth = case
    return COMPUTED[name](kit, share, kind, depth)


# --- the two processes ------------------------------------------------------------------------------------------------


def run_rank(rank: int, folder: Path, cases: list[tuple[str, str, str]]) -> None:
    """Every case with every way to share the rows, written to a file of this rank."""
    from conftest import Kit  # this file runs as a script, beside it

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    results = {}
    for case in cases:
        for name, sizes in SHARES.items():

            def share(table: Any, sizes: list[int] = sizes) -> Any:
                return take(table, torch.arange(ROWS).split(sizes)[rank])

            results[(*case, name)] = compute(Kit, case, share)
    ones = torch.ones(3, dtype=F64, requires_grad=True)
    doubled, other = sum_over_ranks([ones * (rank + 1), torch.full((2, 2), float(rank), dtype=F64)])
    doubled.square().sum().backward()
    assert ones.grad is not None
    results[("sum",)] = {"doubled": doubled.detach(), "other": other, "gradient": ones.grad}
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def start(folder: Path, which: str) -> list[dict[tuple[str, ...], Result]]:
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(rank), str(folder), which], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert not any(rank.returncode for rank in ranks), "\n".join(error[-1500:] for error in errors)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, ...], Result]]:
    """What the two processes found."""
    return start(tmp_path_factory.mktemp("ranks"), "cases")


def assert_equal(found: Tensor, expected: Tensor, name: str) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * scale + 1e-13, msg=lambda m: f"{name}: {m}")


IS_SUM = ("value", "rows")  # every rank holds the same; gradients are averaged over the ranks


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_two_processes_find_what_one_finds(kit: Any, ranks: Any, case: tuple[str, str, str], share: str) -> None:
    expected = compute(kit, case, lambda table: table)
    first, second = (results[(*case, share)] for results in ranks)
    averaged = case[0] in ("evidence_of_runs", "evidence_of_observations", "loss_of_the_bound")
    nonzero = sum(bool(value.abs().max() > 0) for value in expected.values() if value.numel())
    assert nonzero >= min(len(expected), 4)
    for name, value in expected.items():
        if averaged and (name not in IS_SUM or case[0] == "loss_of_the_bound"):
            assert_equal((first[name] + second[name]) / 2, value, name)
        else:
            assert_equal(first[name], value, name)
            assert torch.equal(first[name], second[name])


def test_a_sum_over_ranks_sums_values_and_gradients(ranks: Any) -> None:
    for rank, results in enumerate(ranks):
        found = results[("sum",)]
        assert torch.equal(found["doubled"], torch.full((3,), 3.0, dtype=F64))
        assert torch.equal(found["other"], torch.ones(2, 2, dtype=F64))
        # L = Σ s² on both ranks: the gradient 2s is summed over ranks, then times this rank's factor.
        assert torch.equal(found["gradient"], torch.full((3,), 12.0 * (rank + 1), dtype=F64))


def test_a_single_process_sums_nothing() -> None:
    tensor = torch.ones(2)
    assert world_size() == 1
    assert sum_over_ranks([tensor])[0] is tensor


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("case", CLOSING, ids=" ".join)
def test_two_processes_close_as_one_does(kit: Any, closed: Any, case: tuple[str, str, str], share: str) -> None:
    expected = compute(kit, case, lambda table: table)
    first, second = (results[(*case, share)] for results in closed)
    for name, value in expected.items():
        torch.testing.assert_close(first[name], value, rtol=1e-8, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")  # type: ignore[misc]
        assert torch.equal(first[name], second[name])


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, ...], Result]]:
    """The closing pass decides by its bound how to go on: ranks that disagreed would wait for each other."""
    return start(tmp_path_factory.mktemp("closing"), "closing")


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), Path(sys.argv[2]), CLOSING if sys.argv[3] == "closing" else CASES)
