"""The calibration model: z ~ p(z | η(x*, t)) and y ~ p(y | f(x, θ)).

    none      f = η
    additive  f = κ·η + δ(x)             equation 1 of the paper, with κ = 1 unless it is freed
    general   f = g(η, x) = η + φ_g(η, x)·W_g          equation 2, with the identity in η as the mean of g

All are linear in the weights of their last layer; the columns of w are those of η, then those of δ or g. The
emulator's residual ε_z ~ N(0, σ_z²), what η's features cannot follow, is part of nature's η too: its variance joins
the noise of y (to first order for g). σ_y is what remains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from vcal_dist.errors import ModelError
from vcal_dist.features import FeatureSettings, RandomFeatures
from vcal_dist.gp import DeepGP, Draw, GPSettings
from vcal_dist.likelihoods import Gaussian, LikelihoodSettings, make_likelihood
from vcal_dist.nature import log_prior
from vcal_dist.noise import shared_normal
from vcal_dist.priors import ThetaPrior
from vcal_dist.residual import VaryingResidual
from vcal_dist.stacked_emulator import StackedEmulator
from vcal_dist.weights import Weights

Discrepancy = Literal["none", "additive", "general"]
STACKED = "eta."  # how the names of η's state begin
THETA_NOISE, ETA_NOISE = 101, 102  # keys of the noise, apart from those of layers


def _delta() -> GPSettings:
    # Without a constant, a discrepancy's offset goes into θ, and intervals of θ miss the truth.
    return GPSettings(features=FeatureSettings(constant=1.0), amplitude=0.1, lengthscale=0.7)


MODULE = 10_000  # numbers that would take the memory and the time of a module of none


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What the model is made of. Amplitudes and noises are in standard deviations of the runs' outputs."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    eta: GPSettings = field(default_factory=lambda: GPSettings(features=FeatureSettings(frequencies="learned")))
    discrepancy: Discrepancy = "additive"
    delta: GPSettings = field(default_factory=_delta)  # δ, or g
    free_kappa: bool = False
    likelihood_z: LikelihoodSettings = field(default_factory=LikelihoodSettings)
    likelihood_y: LikelihoodSettings = field(default_factory=LikelihoodSettings)
    emulator: Literal["auto", "features", "stacked"] = "auto"  # of few runs (auto): stacked by cross-validation
    emulator_residual: bool = True
    varying_residual: bool = False  # whether it depends on the inputs: for outputs that are flat here and sharp there
    seed: int = 0

    def __post_init__(self) -> None:
        if self.discrepancy not in ("none", "additive", "general"):
            raise ModelError(f"discrepancy is '{self.discrepancy}'; accepted: none, additive, general")
        if self.emulator not in ("auto", "features", "stacked"):
            raise ModelError(f"emulator is '{self.emulator}'; accepted: auto, features, stacked")
        if self.free_kappa and self.discrepancy == "general":
            raise ModelError("free_kappa goes with discrepancy 'none' or 'additive': g warps η already")
        if self.varying_residual and not self.emulator_residual:
            raise ModelError("varying_residual is true and emulator_residual false; it is then no part of y")
        if self.varying_residual and self.likelihood_z.kind != "gaussian":
            raise ModelError(
                f"varying_residual goes with Gaussian noise of runs; likelihood_z.kind is '{self.likelihood_z.kind}'"
            )


def numbers_in(settings: ModelSettings, controls: int) -> int:
    """About how many numbers a model of such settings has, before it is built; modules cost something too."""
    stacks = [settings.eta] if settings.discrepancy == "none" else [settings.eta, settings.delta]
    total = 0
    for stack in stacks:
        for width in stack.hidden:
            total += (controls + width + 1) * stack.hidden_features.features + MODULE
        total += (controls + max(stack.hidden, default=0) + 1) * stack.features.features + MODULE
    return total


class Prediction(NamedTuple):
    """f at observations, given samples of θ̃ and of hidden layers: moments over the last layers' weights."""

    mean: Tensor  # (S, B, K)
    var: Tensor  # (S, B, K)
    phi_eta: Tensor  # (S, B, M_η)
    phi_delta: Tensor | None  # (B, M_δ) or (S, B, M_δ)
    unit: Tensor  # (S, B, d2) θ on the unit cube, a copy for every row
    eta: Tensor | None  # (S, B, K) the sampled η that g warps


class CalibrationModel(nn.Module):
    """η, δ or g, κ, the prior of θ and the two likelihoods. Weights and θ̃ live in q."""

    def __init__(
        self,
        controls: int,
        prior: ThetaPrior,
        outputs: int,
        settings: ModelSettings | None = None,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        settings = settings or ModelSettings()
        if controls < 1 or outputs < 1:
            raise ModelError(f"the model has {controls} control inputs and {outputs} outputs; accepted: 1 or more")
        self.settings, self.controls, self.outputs, self.prior = settings, controls, outputs, prior
        self.kind = settings.discrepancy
        # η is random features, until training stacks an emulator of few runs.
        self.eta: DeepGP | StackedEmulator
        self.eta = DeepGP(controls + prior.dim, settings.eta, seed=settings.seed, number=0, dtype=dtype)
        self.delta: DeepGP | None = None
        if self.kind != "none":
            inputs = controls + (outputs if self.kind == "general" else 0)
            self.delta = DeepGP(inputs, settings.delta, seed=settings.seed + 1, number=1, dtype=dtype)
        kappa = torch.ones((), dtype=torch.float64)  # one factor for all outputs
        self.kappa: Tensor
        if settings.free_kappa:
            self.kappa = nn.Parameter(kappa)
        else:
            self.register_buffer("kappa", kappa)
        self.likelihood_z = make_likelihood(settings.likelihood_z, outputs)
        self.likelihood_y = make_likelihood(settings.likelihood_y, outputs)
        self.varying: VaryingResidual | None = None
        if settings.varying_residual:
            noise = settings.likelihood_z
            self.varying = VaryingResidual(outputs, self.eta.width, noise.noise, noise.floor)
        for name, stack in (("η", self.eta), ("g", self.delta if self.kind == "general" else None)):
            if isinstance(stack, DeepGP) and not all(layer.differentiable for layer in _feature_layers(stack)):
                raise ModelError(
                    f"the kernel arccos0 has no gradient in its inputs, so θ cannot be learned through {name}; "
                    "use arccos1 or another kernel"
                )

    @property
    def columns_eta(self) -> slice:
        """η's columns of w."""
        return slice(0, self.eta.width)

    @property
    def width(self) -> int:
        """D, the columns of w."""
        return self.eta.width + (self.delta.width if self.delta is not None else 0)

    @property
    def random(self) -> bool:
        """Whether features depend on the noise of hidden layers or frequencies."""
        return self.eta.random or (self.delta is not None and self.delta.random)

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the features."""
        return self.eta.dtype

    def adopt(self, state: Mapping[str, Tensor]) -> None:
        """Takes a state, whose η may be stacked."""
        if f"{STACKED}scale" in state:
            self.eta = StackedEmulator.shaped_like(dict(state), STACKED).to(self.kappa.device)
        self.load_state_dict(dict(state))

    def kl(self) -> Tensor:
        """KL of everything random that is not in q(θ̃, w): hidden weights and variational frequencies."""
        return self.eta.kl() + (self.delta.kl() if self.delta is not None else 0.0)

    def log_prior(self) -> Tensor:
        """log p of what is learned as a point and has a prior: frequencies, and nature's hyperparameters."""
        return self.eta.log_prior() + self.log_prior_of_nature()

    def log_prior_of_nature(self) -> Tensor:
        """The part of it that belongs to the observations."""
        return log_prior(self) + (self.delta.log_prior() if self.delta is not None else 0.0)

    def residual_variance(self, phi_eta: Tensor | None = None) -> Tensor | None:
        """κ²σ_z² (K,), the emulator's share of the noise of y; None if it has none.

        Where it depends on the inputs: κ²s² (..., B, K) at η's features (..., B, M).
        """
        if not self.settings.emulator_residual or not isinstance(self.likelihood_z, Gaussian):
            return None
        if self.varying is None:
            return self.kappa.square() * self.likelihood_z.noise_variance()
        assert phi_eta is not None, "the residual depends on the inputs"
        return self.kappa.square() * self.varying(phi_eta)

    def rows_of_theta(self, theta: Tensor, rows: int) -> Tensor:
        """θ̃ (S, d2) on the unit cube, once for every row: (S, B, d2)."""
        return self.prior.unit(theta).unsqueeze(-2).expand(-1, rows, -1)

    def phi_eta(self, x: Tensor, unit: Tensor, draw: Draw | None) -> Tensor:
        """η's features at x (B, d1) and θ (S, B, d2)."""
        u = torch.cat([x.expand(len(unit), -1, -1), unit.to(x.dtype)], -1)
        features: Tensor = self.eta(u, draw)
        return features

    def predict(self, q: Weights, x: Tensor, theta: Tensor, unit: Tensor, draw: Draw | None) -> Prediction:
        """Moments of f(x, θ) given samples θ̃ (S, d2), `unit` being `rows_of_theta(theta)`.

        For g, η itself is a sample, from weights shared by all rows: the mean and variance are over W_g given them.
        """
        phi_eta = self.phi_eta(x, unit, draw)
        if self.kind == "general":
            assert self.delta is not None
            key = (0,) if draw is None else draw.key
            shape = (len(theta), self.outputs, self.width)
            noise = shared_normal((*key, ETA_NOISE), shape, dtype=torch.float64, device=x.device)
            first = q.sample(noise, theta)[..., self.columns_eta]  # W_η (S, K, M_η)
            eta = phi_eta.to(first.dtype) @ first.mT  # (S, B, K)
            phi_g = self.phi_g(eta, x, draw)
            mean, var = q.moments_given(phi_g, first, theta)
            return Prediction(eta + mean, var, phi_eta, phi_g, unit, eta)
        phi_delta = None if self.delta is None else self.delta(x, draw)
        mean, var = q.moments(self.design(phi_eta, phi_delta), theta=theta)
        return Prediction(mean, var, phi_eta, phi_delta, unit, None)

    def design(self, phi_eta: Tensor, phi_delta: Tensor | None) -> Tensor:
        """ψ = [κφ_η, φ_δ], such that f = ψ·w."""
        if self.settings.free_kappa:
            phi_eta = phi_eta * self.kappa.to(phi_eta.dtype)
        return join(phi_eta, phi_delta)

    def warping_slope(self, eta: Tensor, x: Tensor, weights: Tensor, draw: Draw | None = None) -> Tensor:
        """∂g_k/∂η_k at η (B, K) and x (B, d1) for weights W_g (K, M_g): one where g only adds. (B, K), for plots."""
        if self.kind != "general":
            raise ModelError(f"the discrepancy is '{self.kind}'; only 'general' warps η")
        with torch.enable_grad():
            eta = eta.detach().requires_grad_()
            g = eta + self.phi_g(eta, x, draw).to(eta.dtype) @ weights.to(eta.dtype).mT
            slopes = [
                torch.autograd.grad(g[..., k].sum(), eta, retain_graph=True)[0][..., k] for k in range(g.shape[-1])
            ]
        return torch.stack(slopes, -1)

    def phi_g(self, eta: Tensor, x: Tensor, draw: Draw | None) -> Tensor:
        """g's features at η (S, B, K) and x (B, d1)."""
        assert self.delta is not None
        inputs = torch.cat([eta.to(x.dtype), x.expand(*eta.shape[:-1], -1)], -1)
        features: Tensor = self.delta(inputs, draw)
        return features


def _feature_layers(stack: DeepGP) -> list[RandomFeatures]:
    return [stack.last, *(layer.features for layer in stack.hidden)]


def join(phi_eta: Tensor, phi_delta: Tensor | None) -> Tensor:
    """The columns of η and those of δ or g side by side, over all samples."""
    if phi_delta is None:
        return phi_eta
    return torch.cat([phi_eta, phi_delta.to(phi_eta.dtype).expand(*phi_eta.shape[:-1], -1)], -1)
