"""Draws from an unnormalised log density of a few dimensions: the no-U-turn sampler of nutpie.

nutpie adapts a diagonal-plus-low-rank metric to draws and gradients: on correlated Gaussians of 3 to 20 dimensions it
took a sixth to a fourteenth of the gradients of its diagonal metric, and a third to a tenth of those of a dense metric
from draws alone, tuning included. The chains run one after another: the log
density already uses all cores, and a chain then depends on its own start and seed only.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vcal_dist.errors import ModelError

Array = NDArray[np.float64]
NUDGE = 1e-4  # of a start whose gradient has zeros, relative to 1 + |start|
POLL = 0.1  # seconds between two looks whether a chain has failed


class Draws(NamedTuple):
    """Draws after tuning, and how far to trust them: R̂ near 1 and an effective size of some hundreds."""

    values: Tensor  # (chains, draws, dim), float64
    divergences: int  # transitions that left the region where the integrator is accurate
    rhat: Tensor  # (dim,), rank-normalised split R̂ (Vehtari et al. 2021)
    effective: Tensor  # (dim,), bulk effective sample size over all chains


def sample(
    log_density: Callable[[Tensor], Tensor], start: Tensor, *, draws: int = 1000, tune: int = 500, seed: int
) -> Draws:
    """Draws from exp(log_density), one chain from each row of `start` (chains, dim).

    `log_density` takes a float64 point (dim,) on the device of `start` and returns a scalar; its gradient comes from
    autograd. Where it is not finite the density counts as zero. What it raises is raised here.
    """
    if start.ndim != 2 or 0 in start.shape:
        raise ModelError(f"start must have the shape (chains, dim), one row a chain; it has {tuple(start.shape)}")
    if draws < 4:
        raise ModelError(f"draws is {draws}; R̂ and the effective sample size need at least 4")
    if tune < 1:
        raise ModelError(f"tune is {tune}; the sampler finds its step size in at least 1 tuning draw")
    density = _Density(log_density, start.device)
    seeds = np.random.SeedSequence(seed).spawn(len(start))
    rows = start.detach().to("cpu", torch.float64).numpy()
    points = [_checked(density, row, chain, seeds[chain]) for chain, row in enumerate(rows)]
    chains = [_chain(density, point, draws, tune, state) for point, state in zip(points, seeds, strict=True)]
    values = np.stack([positions for positions, _ in chains])  # (chains, draws, dim)
    arviz = _import_nutpie()[1]

    def of_columns(diagnostic: Callable[[Array], Any]) -> Tensor:  # (dim,)
        columns = np.moveaxis(values, -1, 0)  # (dim, chains, draws)
        return torch.tensor([float(diagnostic(column)) for column in columns], dtype=torch.float64, device=start.device)

    return Draws(
        values=torch.as_tensor(values, device=start.device),
        divergences=sum(count for _, count in chains),
        rhat=of_columns(lambda column: arviz.rhat(column, method="rank")),
        effective=of_columns(lambda column: arviz.ess(column, method="bulk")),
    )


class _Density:
    """The log density and its gradient as nutpie calls them, from a thread of its own.

    An exception there would end in a panic of the Rust code and lose its type. So the first one is kept for the thread
    that waits, and until that one stops the chain, a standard normal stands in for the density.
    """

    def __init__(self, log_density: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.log_density = log_density
        self.device = device
        self.failure: BaseException | None = None

    def evaluate(self, point: Array) -> tuple[float, Array]:
        """log p and ∂ log p/∂point."""
        with torch.enable_grad():
            position = torch.tensor(point, dtype=torch.float64, device=self.device, requires_grad=True)
            value = self.log_density(position)
            if value.numel() != 1:
                raise ModelError(f"log_density must return a scalar; it returned the shape {tuple(value.shape)}")
            (gradient,) = torch.autograd.grad(value.sum(), position)
        return value.item(), gradient.to("cpu", torch.float64).contiguous().numpy()

    def __call__(self, point: Array) -> tuple[float, Array]:
        if self.failure is None:
            try:
                value, gradient = self.evaluate(point)
            except BaseException as error:
                self.failure = error
            else:
                finite = np.isfinite(value) and np.isfinite(gradient).all()
                return (value, gradient) if finite else (-np.inf, np.zeros_like(point))
        return -0.5 * float(point @ point), -point


def _checked(density: _Density, start: Array, chain: int, seed: np.random.SeedSequence) -> Array:
    """The start of a chain, moved a little where the gradient has zeros: nutpie takes its first scales from it."""
    value, gradient = density.evaluate(start)
    if not np.isfinite(value) or not np.isfinite(gradient).all():
        raise ModelError(
            f"the log density is {value:g} with gradient {gradient} at start {chain}, {start}; "
            "start where both are finite"
        )
    if gradient.all():
        return start
    noise = np.random.default_rng(seed).standard_normal(start.shape)
    moved: Array = start + NUDGE * (1 + np.abs(start)) * noise
    gradient = density.evaluate(moved)[1]
    if not gradient.all():
        raise ModelError(
            f"the gradient of the log density at start {chain}, {start}, and next to it is {gradient}; "
            "leave out coordinates that it does not depend on, or start where it is not flat"
        )
    return moved


def _chain(density: _Density, start: Array, draws: int, tune: int, seed: np.random.SeedSequence) -> tuple[Array, int]:
    """Positions (draws, dim) and the number of divergences of one chain."""
    trace = _trace(density, start, draws, tune, seed)
    if density.failure is not None:  # raised here: its traceback would keep the sampler of `_trace` and its threads
        raise density.failure
    return trace["posterior"]["position"].to_numpy()[0], int(trace["sample_stats"]["diverging"].sum())


def _trace(density: _Density, start: Array, draws: int, tune: int, seed: np.random.SeedSequence) -> Any:
    """What nutpie says of one chain; None when the density failed."""
    nutpie, _ = _import_nutpie()
    model = nutpie.compiled_pyfunc.from_pyfunc(
        ndim=len(start),
        make_logp_fn=lambda: density,
        make_expand_fn=lambda *_: lambda point: {"position": point},
        expanded_dtypes=[np.dtype(np.float64)],
        expanded_shapes=[(len(start),)],
        expanded_names=["position"],
        make_initial_point_fn=lambda _: start,
    )
    sampler = nutpie.sample(
        model,
        draws=draws,
        tune=tune,
        chains=1,
        cores=1,
        seed=int(seed.generate_state(1, np.uint64)[0]),
        low_rank_modified_mass_matrix=True,
        progress_bar=False,
        blocking=False,  # when it blocks, it answers an interrupt with the draws so far
    )
    trace = None
    try:
        while trace is None and density.failure is None:
            with contextlib.suppress(TimeoutError):
                trace = sampler.wait(timeout=POLL)
    finally:
        if trace is None:
            sampler.cancel()
    return trace


def _import_nutpie() -> tuple[Any, Any]:
    """nutpie and ArviZ, which brings Matplotlib: seconds that only those pay who sample."""
    with warnings.catch_warnings():
        # Once a day ArviZ 0.x announces ArviZ 1: https://github.com/arviz-devs/arviz/issues/2491
        warnings.simplefilter("ignore", FutureWarning)
        import arviz
        import nutpie
        import nutpie.compiled_pyfunc
    return nutpie, arviz
