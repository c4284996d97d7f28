"""Folds of whole runs."""

from __future__ import annotations

import torch

from vcal_dist.batches import Runs
from vcal_dist.few_runs import fold_runs, spread_order
from vcal_dist.folds import assign_folds, inseparable, run_numbers


def test_rows_with_the_same_calibration_inputs_are_one_run() -> None:
    t = torch.tensor([[0.1, 0.2], [0.1, 0.3], [0.1, 0.2], [0.4, 0.3]])
    numbers = run_numbers(t)
    assert numbers[0] == numbers[2]
    assert len(numbers.unique()) == 3


def test_runs_with_the_same_calibration_inputs_stay_together() -> None:
    t = torch.tensor([[0.1], [0.1], [0.2], [0.2], [0.3], [0.4]])
    assert inseparable(t, None).tolist() == [0, 0, 1, 1, 2, 3]
    run = torch.tensor([7, 7, 2, 3, 5, 5])  # 2 and 3 are replicates; 5 has two values of t
    found = inseparable(t, run).tolist()
    assert sorted(set(found)) == [0, 1, 2]
    assert len(set(zip(found, [0, 0, 1, 1, 2, 2], strict=True))) == 3


def test_runs_that_are_nearly_all_replicates_are_held_out_one_by_one() -> None:
    """Where t never varies, every member must still learn from some of the runs."""
    u = torch.rand(20, 2, generator=torch.Generator().manual_seed(1))
    u[:, 1] = 0.5
    z = u[:, :1].double()
    runs = Runs(u, z, torch.zeros_like(z), torch.arange(20), torch.ones(20, dtype=torch.float64))
    for run, count in ((None, 20), (torch.arange(20) // 4, 5)):
        data = fold_runs(runs, run, 1, seed=0)
        assert int(data.run.max()) + 1 == count
        assert bool((data.counted.sum(-1) > 0).all())


def test_all_rows_of_a_run_are_in_one_fold_and_folds_are_even() -> None:
    run = torch.arange(23).repeat_interleave(7)
    fold = assign_folds(run, 5, 3, seed=1)
    assert fold.shape == (3, 161)
    for repeat in fold:
        by_run = repeat.reshape(23, 7)
        assert bool((by_run == by_run[:, :1]).all())
        sizes = torch.bincount(by_run[:, 0], minlength=5)
        assert int(sizes.max() - sizes.min()) <= 1
    assert not torch.equal(fold[0], fold[1])
    assert torch.equal(fold, assign_folds(run, 5, 3, seed=1))


def test_rows_are_spread_over_runs() -> None:
    run = torch.cat([torch.zeros(90), torch.ones(7), torch.full((3,), 2)]).long()
    order = spread_order(run, torch.arange(100))
    assert sorted(order.tolist()) == list(range(100))
    assert set(run[order[:3]].tolist()) == {0, 1, 2}
    assert torch.bincount(run[order[:9]]).tolist() == [3, 3, 3]
