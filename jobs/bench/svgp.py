"""The emulator's comparison partner: GPyTorch's sparse variational Gaussian process (SVGP) with natural gradients.

With `tuned=False` it is set as in GPyTorch's own example of natural gradients: its default kernel and noise in float32,
learned inducing inputs, steps of 0.1 (natural) and 0.01 (Adam). Otherwise it does as well as it can. What each setting
is worth was measured on the borehole with 10⁶ runs, as the error on fresh points in standard deviations of z, after
ten seconds of one core:

- The hyperparameters start from the exact evidence of the inducing rows: 0.0004, against 0.0007 to 0.0009 from the
  best fixed start. The bound alone hardly improves them, because the variational distribution lags behind them, so
  Adam only refines what the start found: at ten times its rate the error is 0.0005 to 0.0006.
- A squared exponential kernel: 0.0004, against 0.0017 with Matérn-5/2.
- Before that start was there: float64 against float32 0.002 and 0.005 to 0.007; fixed inducing inputs against learned
  ones 0.001 and 0.013; batches of 256 to 2048 rows made no difference.
- The natural gradient's step size falls as 1/step, which averages what the batches say, so the error at every time is
  that of a finished fit; Adam's falls to zero at the last of the times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from storage.errors import VcalError

INDUCING = 500
BATCH = 1024
START_SHARE = 0.4  # of the shortest time, at most, for the exact evidence ...
START_STEPS = 100  # ... and at most so many steps
START_RATE = 0.1
SETTLE = 5  # steps before Adam begins: the first gradients are huge and would dwarf all later ones in its memory
ADAM_RATE = 0.001
NATURAL_FLOOR = 0.05  # of the natural step size: the hyperparameters move, so old batches must fade
PIECE = 4096  # fresh points predicted at once
NOISE_ROWS = 10_000  # that the noise of a finished fit comes from


def svgp_errors(
    u: Tensor,
    z: Tensor,
    fresh_u: Tensor,
    fresh_z: Tensor,
    *,
    seconds: Sequence[float],
    seed: int = 0,
    tuned: bool = True,
) -> list[float]:
    """Root mean square errors of the predictive mean on fresh points after each of `seconds` of training.

    u (N, d) lies in the unit cube and z (N,) is standardised. One fit runs for max(seconds) of wall-clock time, of
    which the time spent on evaluating it is no part; the errors come in the order of `seconds`.
    """
    gpytorch = import_gpytorch()
    errors = {
        due: _error(gpytorch, model, fresh_u, fresh_z)
        for due, model, _ in _trained(gpytorch, u, z, seconds=seconds, seed=seed, tuned=tuned)
    }
    return [errors[due] for due in seconds]


def fit_svgp(u: Tensor, z: Tensor, *, seconds: float, seed: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Mean and variance of a new z, as a function of u (n, d), after so many seconds of tuned training.

    The noise is the one that maximises the bound given q(f), E[(z − f)²] over rows: Adam's small steps leave it near
    its start, and intervals then hold hardly any outputs.
    """
    gpytorch = import_gpytorch()
    ((_, model, _),) = _trained(gpytorch, u, z, seconds=[seconds], seed=seed, tuned=True)
    model.eval()

    @torch.no_grad()
    def moments(u: Tensor) -> tuple[Tensor, Tensor]:
        pieces = [model(piece.double()) for piece in u.split(PIECE)]
        return torch.cat([each.mean for each in pieces]), torch.cat([each.variance for each in pieces])

    rows = torch.randperm(len(u), generator=torch.Generator().manual_seed(seed))[:NOISE_ROWS]
    mean, variance = moments(u[rows])
    noise = ((z[rows] - mean).square() + variance).mean()

    def predict(u: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = moments(u)
        return mean, variance + noise

    return predict


def _trained(
    gpytorch: Any, u: Tensor, z: Tensor, *, seconds: Sequence[float], seed: int, tuned: bool
) -> Iterator[tuple[float, Any, Any]]:
    """One fit, as it is after each of `seconds`: the time, model and likelihood. The caller's time does not count."""
    if not seconds or min(seconds) <= 0:
        raise VcalError(f"seconds is {list(seconds)}; give one positive time or more")
    generator = torch.Generator(u.device).manual_seed(seed)
    begun = time.perf_counter()
    rows = torch.randperm(len(u), generator=generator, device=u.device)[:INDUCING]
    dtype = torch.float64 if tuned else torch.float32
    inducing, values = u[rows].to(dtype), z[rows].to(dtype)  # (M, d), (M,)
    model = _sparse_model(gpytorch, inducing, tuned)
    likelihood = _noise(gpytorch) if tuned else gpytorch.likelihoods.GaussianLikelihood()
    likelihood = likelihood.to(inducing)
    if tuned:
        _start(gpytorch, model, likelihood, inducing, values, until=begun + START_SHARE * min(seconds))

    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(u))
    natural = gpytorch.optim.NGD(model.variational_parameters(), num_data=len(u), lr=1.0 if tuned else 0.1)
    adam = torch.optim.Adam([*model.hyperparameters(), *likelihood.parameters()], lr=ADAM_RATE if tuned else 0.01)
    step = 0
    for due in sorted(set(seconds)):
        while (spent := time.perf_counter() - begun) < due:
            step += 1
            if tuned:
                natural.param_groups[0]["lr"] = max(1 / step, NATURAL_FLOOR)
                adam.param_groups[0]["lr"] = ADAM_RATE * 0.5 * (1 + math.cos(math.pi * spent / max(seconds)))
            batch = torch.randint(len(u), (BATCH,), generator=generator, device=u.device)
            natural.zero_grad()
            adam.zero_grad()
            (-bound(model(u[batch].to(dtype)), z[batch].to(dtype))).backward()
            natural.step()
            if step > SETTLE or not tuned:
                adam.step()
        paused = time.perf_counter()
        yield due, model, likelihood
        begun += time.perf_counter() - paused


def _sparse_model(gpytorch: Any, inducing: Tensor, tuned: bool) -> Any:
    """A constant mean, an ARD squared exponential kernel, and a whitened q(f(inducing)) in natural parameters."""

    class Sparse(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            distribution = gpytorch.variational.NaturalVariationalDistribution(len(inducing))
            strategy = gpytorch.variational.VariationalStrategy(
                self, inducing, distribution, learn_inducing_locations=not tuned
            )
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ConstantMean()
            kernel = gpytorch.kernels.RBFKernel(ard_num_dims=inducing.shape[1])
            self.covar_module = gpytorch.kernels.ScaleKernel(kernel)
            if tuned:  # smooth over the unit cube, with the large variance that goes with it
                kernel.lengthscale = 4.0
                self.covar_module.outputscale = 16.0

        def forward(self, points: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(points), self.covar_module(points))

    return Sparse().to(inducing)


def _noise(gpytorch: Any) -> Any:
    """Gaussian noise that may become as small as a deterministic simulator's; GPyTorch's own floor is 10⁻⁴."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood(noise_constraint=gpytorch.constraints.GreaterThan(1e-8))
    likelihood.noise = 1e-5
    return likelihood


def _start(gpytorch: Any, model: Any, likelihood: Any, points: Tensor, values: Tensor, *, until: float) -> None:
    """Fits mean, kernel and noise by the exact evidence of a few rows, until a time or for a number of steps."""

    class Exact(gpytorch.models.ExactGP):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(points, values, likelihood)
            self.mean_module, self.covar_module = model.mean_module, model.covar_module

        def forward(self, points: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(points), self.covar_module(points))

    exact = Exact().train()
    evidence = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, exact)
    adam = torch.optim.Adam(exact.parameters(), lr=START_RATE)
    # At a few hundred rows a Cholesky factor is faster and more accurate than GPyTorch's conjugate gradients.
    with gpytorch.settings.fast_computations(False, False, False):
        for _ in range(START_STEPS):
            if time.perf_counter() > until:
                break
            adam.zero_grad()
            (-evidence(exact(points), values)).backward()
            adam.step()


def _error(gpytorch: Any, model: Any, fresh_u: Tensor, fresh_z: Tensor) -> float:
    """Root mean square error of the predictive mean."""
    model.eval()
    with torch.no_grad(), gpytorch.settings.skip_posterior_variances():
        dtype = model.mean_module.constant.dtype
        mean = torch.cat([model(piece.to(dtype)).mean for piece in fresh_u.split(PIECE)])
    model.train()
    return float((mean - fresh_z).square().mean().sqrt())


def import_gpytorch() -> Any:
    """GPyTorch, which only benchmarks need."""
    try:
        import gpytorch
    except ImportError as error:
        raise VcalError("the comparison with GPyTorch needs GPyTorch: pip install vcal-dist[bench]") from error
    return gpytorch
