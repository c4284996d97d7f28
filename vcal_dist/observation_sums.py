"""The observations as sums that belong to no θ: after one pass, log p(y | θ̃) costs nothing that grows with the rows.

η's features are cosines and sines of a + c with a = xΩ_x, c = θΩ_t, so that by the angle-addition theorem

    [cos(a + c), sin(a + c)] = [cos a, sin a]·T(θ),    T(θ) = [[cos c, sin c], [−sin c, cos c]]   (diagonal blocks):

θ leaves the rows. With ψ(x) = [ψ_η(x), φ_δ(x)], the residuals r = y − κψ_η(x)·T(θ̂)m of some θ̂ (as y itself, but no
digits are lost where the noise is small), and weights 1 for known outputs,

    G₀ = Σ ψψᵀ,    b₀ = Σ ψr,    s₀ = Σ r²,    n

of one pass over the rows give for any θ, amplitude c_δ of δ and precision p = 1/(σ_y² + κ²σ_z²) the sums that
`collapsed.log_evidence` takes: with w_η = m + Rv, Q = blockdiag(κT(θ)R, c_δ) and d = κ(T(θ) − T(θ̂))m,

    G = p·QᵀG₀Q,    b = p·Qᵀ(b₀ − G₀[:, η]d),    s = p·(s₀ − 2·b₀ᵀd + dᵀG₀d).

A constant column of η is a column of ψ_η, a linear one too, or a multiple of the constant if it is one of θ.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vcal_dist.batches import Observations
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collapsed import Gram, log_evidence_if_any
from vcal_dist.collective import carried, plus, rank, sum_over_ranks, world_size
from vcal_dist.errors import ModelError
from vcal_dist.features import ARC_COSINE_ORDER
from vcal_dist.fullrank import Frame
from vcal_dist.gp import DeepGP
from vcal_dist.likelihoods import Gaussian
from vcal_dist.nature import AMPLITUDE, NOISE, Nature

NUMBERS = 4_000_000  # held at once for several points: 32 MB
SCALING = (AMPLITUDE, NOISE)  # what of ζ only scales the sums


def why_not(model: CalibrationModel, noise: bool) -> str:
    """What keeps observations, with a noise of their own or not, from being compressed, if anything does."""
    eta = model.eta
    for reason, applies in (
        ("η is stacked from several emulators", not isinstance(eta, DeepGP)),
        ("the model has hidden layers or variational frequencies", model.random),
        ("η's kernel has no cosines and sines", model.settings.eta.features.kernel in ARC_COSINE_ORDER),
        ("the discrepancy is general", model.kind == "general"),
        ("the noise of y is not Gaussian", not isinstance(model.likelihood_y, Gaussian)),
        ("the emulator's residual depends on the inputs", model.varying is not None),
        ("observations have a noise of their own", noise),
    ):
        if applies:
            return reason
    return ""


class Rotation:
    """T(θ), which makes weights of φ_η(x, θ) those of ψ_η(x)."""

    def __init__(self, model: CalibrationModel) -> None:
        assert isinstance(model.eta, DeepGP)
        last = model.eta.last
        self.settings, self.controls, self.prior = last.settings, model.controls, model.prior
        omega = last.stretch(last.frequencies()).detach().double()  # (d1 + d2, F)
        self.of_x, self.of_t = omega.split([model.controls, model.prior.dim])
        self.scale = float(last.log_amplitude.detach().exp()) * math.sqrt(2 / self.settings.features)
        self.linear = self.settings.linear is not None

    @property
    def width(self) -> int:
        """Columns of ψ_η."""
        constant = self.settings.constant is not None or self.linear
        return 2 * self.of_x.shape[1] + constant + self.controls * self.linear

    def features(self, x: Tensor) -> Tensor:
        """ψ_η at x (B, d1): (B, width)."""
        x = x.double()
        a = x @ self.of_x
        columns = [self.scale * a.cos(), self.scale * a.sin()]
        if self.settings.constant is not None or self.linear:
            columns.append(torch.ones_like(a[:, :1]))
        if self.settings.linear is not None:
            columns.append(self.settings.linear * (x - 0.5))
        return torch.cat(columns, -1)

    def turn(self, theta: Tensor, weights: Tensor) -> Tensor:
        """T(θ)·W at θ̃ (P, d2) for weights (..., M_η, C): (P, ..., width, C)."""
        unit = self.prior.unit(theta).double()  # (P, d2)
        c = unit @ self.of_t
        c = c.reshape(len(c), *[1] * (weights.ndim - 2), -1, 1)  # (P, ..., F, 1)
        F = self.of_x.shape[1]
        u, v, rest = weights.split([F, F, weights.shape[-2] - 2 * F], -2)
        cos, sin = c.cos(), c.sin()
        found = [cos * u + sin * v, cos * v - sin * u]
        constant = rest.new_zeros(len(unit), *rest.shape[:-2], 1, rest.shape[-1])
        if self.settings.constant is not None:
            first, rest = rest.split([1, rest.shape[-2] - 1], -2)
            constant = constant + self.settings.constant * first
        if self.settings.linear is not None:
            of_x, of_t = rest.split([self.controls, self.prior.dim], -2)
            place = self.settings.linear * (unit - 0.5).reshape(len(unit), *[1] * (weights.ndim - 2), 1, -1)
            constant = constant + place @ of_t
            found += [constant, of_x.expand(len(unit), *of_x.shape)]
        elif self.settings.constant is not None:
            found.append(constant)
        return torch.cat(found, -2)


class Sums(NamedTuple):
    """Of all rows, for outputs K; G₀ has one matrix for all outputs where none is ever missing."""

    G: Tensor  # (K or 1, D, D)
    b: Tensor  # (K, D)
    square: Tensor  # (K,)
    rows: Tensor  # (K,)


class ObservationSums:
    """One pass over the observations, and the density of θ̃, δ's amplitude and σ_y from what it leaves.

    `take` adds a block of rows of this process; `log_density` is then that of the rows of all processes, exactly.
    """

    def __init__(self, model: CalibrationModel, frame: Frame, centre: Tensor, nature: Nature | None = None) -> None:
        assert not why_not(model, noise=False)
        assert nature is None or set(nature.kinds) <= set(SCALING), "length scales are no scales of the sums"
        self.model, self.frame, self.nature = model, frame, nature
        self.centre = centre  # θ̂ (d2,), close to which residuals are small
        self.rotation = Rotation(model)
        self.amplitude = None if model.delta is None else model.delta.last.log_amplitude.detach().double().clone()
        self.sums: list[Tensor] | None = None  # of this process' rows
        self.total: Sums | None = None  # of those of all processes, once it was asked for

    @property
    def eta(self) -> slice:
        """ψ_η's columns of ψ."""
        return slice(0, self.rotation.width)

    @torch.no_grad()
    def take(self, observations: Observations) -> None:
        """Adds a block of rows."""
        assert observations.noise is None
        model, x = self.model, observations.x
        psi_eta = self.rotation.features(x)  # (B, width)
        psi = psi_eta if model.delta is None else torch.cat([psi_eta, model.delta(x, None).double()], -1)
        y = observations.y.double()
        known = ~y.isnan() & (observations.weight > 0).unsqueeze(-1)  # (B, K); the others are held out, or padding
        mean = model.kappa * (psi_eta @ self.rotation.turn(self.centre[None], self.frame.mean.mT)[0])
        r = torch.where(known, y - mean, 0.0)
        weight = known.double()
        same = bool((known == known[:, :1]).all())
        G = torch.stack([(psi * weight[:, k : k + 1]).mT @ psi for k in ([0] if same else range(model.outputs))])
        parts = [G, r.mT @ psi, r.square().sum(0), weight.sum(0)]
        if self.sums is not None and len(self.sums[0]) != len(G):  # from now on one for each output
            self.sums[0], parts[0] = (each.expand(model.outputs, -1, -1).clone() for each in (self.sums[0], G))
        self.sums, self.total = plus(self.sums, parts), None

    def result(self) -> Sums:
        """The sums over all processes; every one of them must ask."""
        if self.total is None:
            if self.sums is None:
                raise ModelError("there are no observations; θ needs at least 1")
            self.total = Sums(*sum_over_ranks(self._for_each_output(self.sums), symmetric=1))
            if bool((self.total.rows == self.total.rows[0]).all()) and bool((self.total.G[:1] == self.total.G).all()):
                self.total = self.total._replace(G=self.total.G[:1])
        return self.total

    def _for_each_output(self, sums: list[Tensor]) -> list[Tensor]:
        return [sums[0].expand(self.model.outputs, -1, -1).contiguous(), *sums[1:]]

    @torch.no_grad()
    def log_density(self, points: Tensor) -> Tensor:
        """log p(y | θ̃, ζ, runs) + log p(θ̃, ζ) at points (P, d2 + ζ's), up to the Jacobian of the scaling: (P,)."""
        own = slice(rank(), None, world_size())  # each point is one process' own: its value is the same everywhere
        values = torch.zeros(len(points), dtype=torch.float64, device=points.device)
        self.result()  # in which all take part
        values[own] = self._log_evidences(points[own])
        prior = -0.5 * points.square().sum(-1) - 0.5 * points.shape[-1] * math.log(2 * math.pi)
        return prior + sum_over_ranks([values])[0]

    def _log_evidences(self, points: Tensor) -> Tensor:
        columns, precision = self._scales(points)
        at_once = max(1, NUMBERS // (self.model.outputs * self.model.width**2))
        found = [
            log_evidence_if_any(self._gram(self.result(), *some)).sum(-1)
            for some in zip(
                points[:, : self.model.prior.dim].split(at_once),
                columns.split(at_once),
                precision.split(at_once),
                strict=True,
            )
        ]
        return torch.cat(found)

    def _gram(self, sums: Sums, theta: Tensor, columns: Tensor, precision: Tensor) -> Gram:
        """What the rows say of the weights (v, w_δ) at points: leading dimensions (P, K)."""
        kappa, eta, D = self.model.kappa.detach(), self.eta, self.model.width
        turned = self.rotation.turn(theta, kappa * self.frame.root)  # κT(θ)R (P, K, width, M)
        at = self.rotation.turn(theta, kappa * self.frame.mean.unsqueeze(-1))  # κT(θ)m (P, K, width, 1)
        d = at - self.rotation.turn(self.centre[None], kappa * self.frame.mean.unsqueeze(-1))
        G0, c = sums.G, columns.unsqueeze(1)  # (K or 1, D, D), (P, 1, columns of δ)
        along = G0[:, :, eta] @ d  # (P, K, D, 1)
        left = sums.b - along.squeeze(-1)  # (P, K, D)
        b = torch.cat([(turned.mT @ left[..., eta, None]).squeeze(-1), left[..., eta.stop :] * c], -1)
        square = sums.square - 2 * (sums.b[:, eta] * d.squeeze(-1)).sum(-1) + (d * along[..., eta, :]).sum((-1, -2))
        across = (turned.mT @ G0[:, eta, eta.stop :]) * c.unsqueeze(-2)  # (P, K, M, columns of δ)
        G = theta.new_empty(len(theta), self.model.outputs, D, D)
        M = self.model.eta.width
        G[..., :M, :M] = turned.mT @ (G0[:, eta, eta] @ turned)
        G[..., :M, M:], G[..., M:, :M] = across, across.mT
        G[..., M:, M:] = G0[:, eta.stop :, eta.stop :] * c.unsqueeze(-1) * c.unsqueeze(-2)
        p, rows = precision, sums.rows  # (P, K), (K,)
        return Gram(p[..., None, None] * G, p.unsqueeze(-1) * b, p * square, rows * p.log(), rows.expand_as(p))

    @torch.no_grad()
    def _scales(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """At every point: how much larger δ's columns are than in the sums (P, M_δ), and the precisions (P, K)."""
        model, likelihood = self.model, self.model.likelihood_y
        assert isinstance(likelihood, Gaussian)
        residual = model.residual_variance()
        extra = torch.zeros(()) if residual is None else residual.detach().double()
        waves = 0 if model.delta is None else model.delta.settings.features.features  # the other columns do not scale
        columns = points.new_ones(len(points), 0 if model.delta is None else model.delta.width)
        precision = points.new_empty(len(points), model.outputs)

        def read(some: slice | int) -> None:
            precision[some] = 1 / (likelihood.noise_variance().double() + extra)
            if model.delta is not None and self.amplitude is not None:
                columns[some, :waves] = (model.delta.last.log_amplitude.double() - self.amplitude).exp()

        if self.nature is None or points.shape[-1] == model.prior.dim:
            read(slice(None))
        else:
            with self.nature.kept():
                for i, zeta in enumerate(points[:, model.prior.dim :]):
                    self.nature.put(zeta)
                    read(i)
        return columns, precision

    def state(self) -> dict[str, Any]:
        """The sums so far, over all processes; every one of them must ask."""
        sums = None if self.sums is None else sum_over_ranks(self._for_each_output(self.sums))
        return {"centre": self.centre, "amplitude": self.amplitude, "sums": sums}

    def load(self, state: dict[str, Any]) -> None:
        """Resumes from a state; the first process carries the sums on."""
        self.centre, self.amplitude = state["centre"], state["amplitude"]
        self.sums, self.total = carried(state["sums"]), None
