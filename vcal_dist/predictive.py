"""Predictions of a fitted model at control inputs x, in the model's units and in the user's.

    f(x, θ)         η(x, θ) or η(x, t)         f − η

q is a mixture of components (`vcal_dist.weights`). An `Ensemble` holds S joint draws of what is uncertain: component,
θ̃, weights w, and the noise of hidden layers and frequencies, each shared by all rows. So a draw is a function of x, and
rows may come in any blocks. Two answers follow from it:

- `sampled_process`, `sampled_emulator`: the draws themselves, (S, B, K);
- `moments`: mean and variance, (B, K), of S conditional Gaussians: the last layers' weights are integrated out in
  closed form given the rest (under g, which is not linear in η, those of g given those of η), so that what is left to
  Monte Carlo is of few dimensions. θ̃ comes from scrambled Sobol points, more even than random ones.

These are of functions of x. The emulator's residual, what η's features cannot follow, is not one of them: it is
independent from row to row. `users_moments` and `users_samples` add it where `prediction_kinds` says so: around η the
noise of `likelihood_z`, or s² where it varies; around f `CalibrationModel.residual_variance`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from vcal_dist.calibration import ETA_NOISE, CalibrationModel, join
from vcal_dist.errors import ModelError
from vcal_dist.gp import Draw
from vcal_dist.likelihoods import Bernoulli, Gaussian, Likelihood, Poisson, StudentT
from vcal_dist.noise import row_normal, shared_normal
from vcal_dist.prediction_kinds import What
from vcal_dist.transforms import OutputScaling
from vcal_dist.weights import Weights

Function = Literal["process", "emulator", "discrepancy"]  # f, η and f − η, without residual
FUNCTION: dict[What, Function] = {
    "process": "process",
    "emulator": "emulator",
    "discrepancy": "discrepancy",
    "observation": "process",
    "process_without_residual": "process",
    "emulator_without_residual": "emulator",
}
PREDICTION = 103  # in the keys of the noise, apart from what training draws
RESIDUAL = 105
NUMBERS = 2**22  # features over all draws and rows of a block: 32 MB of float64
SOBOL_BITS = 30  # of the points that torch draws


@dataclass(frozen=True)
class Group:
    """The draws that come from one component."""

    q: Weights
    theta: Tensor  # θ̃ (S_c, d2)
    places: Tensor  # (S_c,) where these draws stand among all
    key: tuple[int, ...]

    @property
    def draw(self) -> Draw:
        """The noise of hidden layers: the same for all rows."""
        return Draw(self.key, len(self.theta))

    @cached_property
    def weights(self) -> Tensor:
        """w (S_c, K, D); for g, η's are those that `CalibrationModel.predict` draws too."""
        shape = (len(self.theta), self.q.outputs, self.q.width)
        noise = shared_normal((*self.key, ETA_NOISE), shape, dtype=torch.float64, device=self.theta.device)
        return self.q.sample(noise, self.theta).double()


class Ensemble(NamedTuple):
    """S joint draws, by component."""

    model: CalibrationModel
    groups: list[Group]
    size: int  # S

    def blocks(self, rows: int, columns: int = 0) -> Iterator[slice]:
        """Rows to predict at once, where a row takes so many numbers for every draw, or what its features take."""
        size = max(1, NUMBERS // (self.size * max(self.model.width, columns)))
        return (slice(start, start + size) for start in range(0, rows, size))

    def over(self, compute: Callable[[Group], Tensor]) -> Tensor:
        """What a function gives for the draws of each component, (S_c, …), in the order of all draws: (S, …)."""
        parts = [compute(group) for group in self.groups]
        order = torch.cat([group.places for group in self.groups]).argsort()
        return torch.cat(parts)[order]


@torch.no_grad()
def draw_ensemble(
    model: CalibrationModel, components: Sequence[Weights], log_weights: Tensor, draws: int, seed: int
) -> Ensemble:
    """Draws in random order, a function of the seed only; of a component as many as its weight says, up to one."""
    device = model.kappa.device
    groups = []
    for c, (q, places) in enumerate(zip(components, allot(log_weights, draws, (seed, PREDICTION)), strict=True)):
        if len(places):
            key = (seed, PREDICTION, 1 + c)
            theta = q.theta(_sobol_normal(len(places), q.theta_dim, key).to(device))
            groups.append(Group(q, theta, places.to(device), key))
    return Ensemble(model, groups, draws)


def allot(log_weights: Tensor, draws: int, key: tuple[int, ...]) -> list[Tensor]:
    """For each component the places of its draws among all, in random order; the key begins with the seed."""
    if draws < 1:
        raise ModelError(f"the number of draws is {draws}; accepted: 1 or more")
    if not 0 <= key[0] < 2**63:
        raise ModelError(f"seed is {key[0]}; accepted: 0 to 2⁶³ − 1")
    # Systematic sampling: the k-th draw is of the component where their summed weights pass (k + u)/S.
    u = torch.special.ndtr(shared_normal(key, (1,), dtype=torch.float64, device=torch.device("cpu")))
    summed = log_weights.detach().double().cpu().softmax(0).cumsum(0)
    of_draw = torch.searchsorted(summed, (torch.arange(draws) + u) / draws).clamp(max=len(summed) - 1)
    order = shared_normal((*key, 0), (draws,), dtype=torch.float64, device=torch.device("cpu")).argsort()
    return [order[of_draw == c] for c in range(len(summed))]


@torch.no_grad()
def conditional_moments(
    ensemble: Ensemble, x: Tensor, what: Function = "process", t: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and variance (S, B, K) over the last layers' weights, given each draw of the rest.

    `t` (B, d2), on the unit cube, takes the place of θ in the emulator: its weights are then those of all θ̃ together.
    """
    both = ensemble.over(lambda group: torch.stack(_given(ensemble.model, group, x, what, t), 1))  # (S, 2, B, K)
    return both[:, 0], both[:, 1]


@torch.no_grad()
def moments(
    ensemble: Ensemble, x: Tensor, what: Function = "process", t: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and variance, (B, K), at any number of rows."""
    blocks = [
        total(*conditional_moments(ensemble, x[rows], what, None if t is None else t[rows]))
        for rows in ensemble.blocks(len(x))
    ]
    if not blocks:
        empty = torch.zeros(0, ensemble.model.outputs, dtype=torch.float64, device=x.device)
        return empty, empty
    mean, var = zip(*blocks, strict=True)
    return torch.cat(mean), torch.cat(var)


def total(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Moments over draws from those given each: Var = E[var] + Var[mean]. (S, B, K) → (B, K)."""
    centre = mean.mean(0)
    return centre, var.mean(0) + (mean - centre).square().mean(0)


@torch.no_grad()
def residuals(ensemble: Ensemble, x: Tensor) -> Tensor | None:
    """The variance of the emulator's residual around f: (K,), or (S, B, K) where it depends on the inputs."""
    varying = varying_residuals(ensemble, x)
    return ensemble.model.residual_variance() if varying is None else ensemble.model.kappa.square() * varying


@torch.no_grad()
def varying_residuals(ensemble: Ensemble, x: Tensor, t: Tensor | None = None) -> Tensor | None:
    """s² (S, B, K) at θ, or at t; None where the residual is the same everywhere."""
    model = ensemble.model
    if model.varying is None:
        return None
    varying, shape = model.varying, (len(x), model.outputs)
    return ensemble.over(lambda group: varying(_phi(model, group, x, t)).expand(len(group.theta), *shape))


@torch.no_grad()
def sampled_emulator(ensemble: Ensemble, x: Tensor, t: Tensor | None = None) -> Tensor:
    """η at every draw, (S, B, K): at its own θ, or at t (B, d2) on the unit cube."""
    return ensemble.over(lambda group: _eta(ensemble.model, group, x, t))


@torch.no_grad()
def sampled_process(ensemble: Ensemble, x: Tensor) -> tuple[Tensor, Tensor]:
    """f and η at every draw and its own θ, both (S, B, K)."""
    model = ensemble.model

    def of_group(group: Group) -> Tensor:
        eta = _eta(model, group, x, None)
        last = group.weights[..., model.eta.width :].mT  # (S_c, M_δ, K)
        if model.delta is None:
            f = model.kappa * eta
        elif model.kind == "general":
            f = eta + model.phi_g(eta, x, group.draw).double() @ last
        else:
            f = model.kappa * eta + model.delta(x, group.draw).double() @ last
        return torch.stack([f, eta], 1)

    both = ensemble.over(of_group)  # (S, 2, B, K)
    return both[:, 0], both[:, 1]


@torch.no_grad()
def sampled_delta(ensemble: Ensemble, x: Tensor) -> Tensor:
    """An additive δ at every draw, (S, B, K)."""
    model = ensemble.model
    delta = model.delta
    assert delta is not None

    def of_group(group: Group) -> Tensor:
        found = delta(x, group.draw).double() @ group.weights[..., model.eta.width :].mT
        return found.expand(len(group.theta), *found.shape[-2:])

    return ensemble.over(of_group)


# --- from the model's units to the user's ----------------------------------------------------------------------------


class Inputs(NamedTuple):
    """Where to predict."""

    x: Tensor  # (B, d1) on the unit cube
    t: Tensor | None = None  # (B, d2) on the unit cube, in place of θ
    noise: Tensor | None = None  # (B, K) of observations, in the user's units
    first: int = 0  # number of the first row among all that are predicted

    def rows(self, rows: slice) -> Inputs:
        """Some of them."""
        t, noise = (None if part is None else part[rows] for part in (self.t, self.noise))
        return Inputs(self.x[rows], t, noise, self.first + rows.start)


@torch.no_grad()
def users_moments(
    ensemble: Ensemble, outputs: OutputScaling, inputs: Inputs, what: What, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (B, K): exact given the draws where units are affine in f, else those of samples."""
    model = ensemble.model
    if not is_closed_form(model, outputs, what):
        draws = _users_samples(ensemble, outputs, inputs, what, generator, same_residual=True)
        mean = draws.mean(0)
        return mean, (draws - mean).square().mean(0).sqrt()
    mean, var = moments(ensemble, inputs.x, FUNCTION[what], inputs.t)
    residual = mean_residual(ensemble, inputs, what)  # may depend on the draw, and its mean counts
    if what == "observation":  # y = f + residual + noise
        own = None if inputs.noise is None else inputs.noise / outputs.sd
        mean, var = model.likelihood_y.moments(mean, var, own, residual)
    elif what == "emulator" and isinstance(model.likelihood_z, StudentT):
        mean, var = model.likelihood_z.moments(mean, var)
    elif residual is not None:
        var = var + residual
    return mean * outputs.sd + (0.0 if what == "discrepancy" else outputs.mean), var.sqrt() * outputs.sd


@torch.no_grad()
def users_samples(
    ensemble: Ensemble, outputs: OutputScaling, inputs: Inputs, what: What, generator: torch.Generator
) -> Tensor:
    """Draws (S, B, K); residual and noise are independent from row to row, the noise by the generator."""
    return _users_samples(ensemble, outputs, inputs, what, generator, same_residual=False)


def _users_samples(
    ensemble: Ensemble,
    outputs: OutputScaling,
    inputs: Inputs,
    what: What,
    generator: torch.Generator,
    same_residual: bool,
) -> Tensor:
    """With `same_residual`, that of process and emulator is drawn once for all rows and blocks.

    For mean and sd of each row that is as good, and it leaves them smooth functions of x.
    """
    model = ensemble.model
    parts = [torch.zeros(ensemble.size, 0, model.outputs, dtype=torch.float64, device=inputs.x.device)]
    for block in map(inputs.rows, ensemble.blocks(len(inputs.x))):
        x, noise = block.x, block.noise
        if what == "discrepancy" and _is_delta(model, outputs):  # η costs most, and is not needed
            parts.append(sampled_delta(ensemble, x) * outputs.sd)
            continue
        if FUNCTION[what] == "emulator":
            likelihood, f, eta = model.likelihood_z, sampled_emulator(ensemble, x, block.t), None
        else:
            likelihood, (f, eta) = model.likelihood_y, sampled_process(ensemble, x)
        f = f + _residual(ensemble, block, what, generator, same_residual and what != "observation")
        if what == "observation":
            if noise is None or is_affine(likelihood, outputs):
                own = None if noise is None else noise / outputs.sd
                parts.append(outputs.inverse(likelihood.sample(f, generator, own)))
            else:
                y = outputs.inverse(likelihood.sample(f, generator))
                parts.append(y + noise * _randn_like(y, generator))
            continue
        value = in_users_units(likelihood, outputs, f)
        if what == "discrepancy":
            assert eta is not None
            value = value - in_users_units(model.likelihood_z, outputs, eta)
        parts.append(value)
    return torch.cat(parts, 1)


def _is_delta(model: CalibrationModel, outputs: OutputScaling) -> bool:
    """Whether the process is η plus something that does not depend on it, in the user's units too."""
    affine = all(is_affine(likelihood, outputs) for likelihood in (model.likelihood_y, model.likelihood_z))
    return model.delta is not None and model.kind == "additive" and affine and float(model.kappa) == 1.0


def _residual(ensemble: Ensemble, inputs: Inputs, what: What, generator: torch.Generator, same: bool) -> Tensor | float:
    """A draw of what lies around f or η: (S, B, K) by the numbers of the rows, or (S, 1, K), the same for all.

    Whatever the blocks, a sample has the same residual in a row as process, emulator and observation.
    """
    model, device = ensemble.model, inputs.x.device
    rows = 1 if same else len(inputs.x)
    if what == "emulator" and isinstance(model.likelihood_z, StudentT):
        if same:
            generator = torch.Generator(device).manual_seed(generator.initial_seed())
        zero = torch.zeros(ensemble.size, rows, model.outputs, dtype=torch.float64, device=device)
        return model.likelihood_z.sample(zero, generator)
    variance = residual_around(ensemble, inputs.x, inputs.t, what)
    if variance is None:
        return 0.0
    numbers = (0 if same else inputs.first) + torch.arange(rows, device=device)
    key = (ensemble.groups[0].key[0], RESIDUAL)
    unit = row_normal(key, numbers, ensemble.size * model.outputs, dtype=torch.float64)
    return variance.sqrt() * unit.reshape(rows, ensemble.size, model.outputs).transpose(0, 1)


@torch.no_grad()
def residual_around(ensemble: Ensemble, x: Tensor, t: Tensor | None, what: What) -> Tensor | None:
    """The variance of the Gaussian residual that a prediction has: (K,) or (S, B, K); None if it has none."""
    if what in ("process", "observation"):
        return residuals(ensemble, x)
    likelihood = ensemble.model.likelihood_z
    if what != "emulator" or not isinstance(likelihood, Gaussian):
        return None
    varying = varying_residuals(ensemble, x, t)
    return likelihood.noise_variance() if varying is None else varying


@torch.no_grad()
def mean_residual(ensemble: Ensemble, inputs: Inputs, what: What) -> Tensor | None:
    """`residual_around`, in the mean over draws: (K,) or (B, K)."""
    blocks = [*map(inputs.rows, ensemble.blocks(len(inputs.x)))] or [inputs]
    found = [residual_around(ensemble, block.x, block.t, what) for block in blocks]
    if found[0] is None or found[0].ndim == 1:
        return found[0]
    return torch.cat([block.mean(0) for block in found if block is not None])


def is_closed_form(model: CalibrationModel, outputs: OutputScaling, what: What) -> bool:
    """Whether moments in the user's units follow from those of f, without samples."""
    function = FUNCTION[what]
    likelihoods = [model.likelihood_y] if function != "emulator" else []
    likelihoods += [model.likelihood_z] if function != "process" else []
    return all(is_affine(likelihood, outputs) for likelihood in likelihoods)


def is_affine(likelihood: Likelihood, outputs: OutputScaling) -> bool:
    """Whether the user's units are those of f up to a shift and a factor: no transform, and y lies around f."""
    plain = all(transform.kind == "none" for transform in outputs.transforms)
    return plain and not isinstance(likelihood, Poisson | Bernoulli)


def in_users_units(likelihood: Likelihood, outputs: OutputScaling, f: Tensor) -> Tensor:
    """What y would be without noise, (..., K): T⁻¹(f), and for counts and classes the mean of y given f."""
    if isinstance(likelihood, Poisson):
        f = f.exp()
    elif isinstance(likelihood, Bernoulli):
        f = f.sigmoid()
    return outputs.inverse(f)


def sample_outcome(
    likelihood: Likelihood, f: Tensor, generator: torch.Generator, noise: Tensor | None, extra: Tensor | None
) -> Tensor:
    """One scaled y for every f, around which there is more variance `extra`."""
    if extra is not None:
        f = f + extra.sqrt() * _randn_like(f, generator)
    return likelihood.sample(f, generator, noise)


def _randn_like(f: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(f.shape, generator=generator, dtype=f.dtype, device=f.device)


# --- one component ---------------------------------------------------------------------------------------------------


def _given(model: CalibrationModel, group: Group, x: Tensor, what: Function, t: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and variance (S_c, B, K) given the draws of a component."""
    q, theta, draw = group.q, group.theta, group.draw
    if what == "emulator":
        if t is not None:
            mean, var = q.moments(_phi(model, group, x, t), model.columns_eta)
        else:
            mean, var = q.moments(_phi(model, group, x, None), model.columns_eta, theta)
    elif what == "process" or model.kind == "general":
        f = model.predict(q, x, theta, model.rows_of_theta(theta, len(x)), draw)
        mean, var = f.mean, f.var
        if what == "discrepancy":
            assert f.eta is not None
            mean = mean - f.eta
    else:  # f − η = [(κ − 1)φ_η, φ_δ]·w
        phi_delta = None if model.delta is None else model.delta(x, draw)
        if model.settings.free_kappa:
            phi_eta = _phi(model, group, x, None)
            psi = join(phi_eta * (model.kappa - 1).to(phi_eta.dtype), phi_delta)
            mean, var = q.moments(psi, theta=theta)
        elif phi_delta is not None:  # does not depend on θ̃, which can be integrated out as well
            mean, var = q.moments(phi_delta, slice(model.eta.width, None))
        else:
            mean = var = torch.zeros((), device=x.device)
    shape = (len(theta), len(x), model.outputs)  # without hidden layers, some features are the same for all draws
    return mean.double().expand(shape), var.double().expand(shape)


def _phi(model: CalibrationModel, group: Group, x: Tensor, t: Tensor | None) -> Tensor:
    """η's features (S_c, B, M), at t without noise of hidden layers (B, M)."""
    if t is None:
        return model.phi_eta(x, model.rows_of_theta(group.theta, len(x)), group.draw)
    features: Tensor = model.eta(torch.cat([x, t.to(x.dtype)], -1), group.draw)
    return features


def _eta(model: CalibrationModel, group: Group, x: Tensor, t: Tensor | None) -> Tensor:
    """η (S_c, B, K) with the drawn weights."""
    return _phi(model, group, x, t).double() @ group.weights[..., model.columns_eta].mT


def _sobol_normal(count: int, dim: int, key: tuple[int, ...]) -> Tensor:
    """Standard normal numbers (count, dim) from scrambled Sobol points."""
    # The engine's seed, of 32 bits, is a hash of the key.
    seed = int(shared_normal(key, (1,), dtype=torch.float64, device=torch.device("cpu")).view(torch.int64)) % 2**32
    points = SobolEngine(dim, scramble=True, seed=seed).draw(count, dtype=torch.float64)
    return torch.special.ndtri(points + 2.0 ** -(SOBOL_BITS + 1))  # never 0, where it is infinite
