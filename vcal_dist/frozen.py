"""log p(y | θ̃) at many points from one pass over the rows, where the rows are too many for a Gram matrix a point.

In y = κφ_η(x, θ)·(m + R v) + φ_δ(x)·w + ε, θ̃ moves the emulator's mean by far more than what is left uncertain of it
after all runs. With the features of that part, κφ_η R, frozen where the mode is, the Gram matrix is the same for all
θ̃. What remains of a point is a vector,

    b(θ̃) = Σ p ψ·(y − κφ_η(x, θ)·m),    ψ = [κφ_η(x, θ̂)R, φ_δ(x)],

so that it costs its features and no matrix. Of nature's hyperparameters, δ's amplitude and σ_y only scale these sums
(σ_y where observations have no noise of their own and the residual is the same everywhere): every point may have
others, at no cost in rows. Length scales stay as the model has them. A residual that depends on the inputs is frozen as
well: what its size says of θ is then left out, and θ less sure.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vcal_dist.batches import Observations
from vcal_dist.calibration import CalibrationModel
from vcal_dist.collapsed import Gram, gram, in_frame, log_evidence_if_any
from vcal_dist.collective import carried, plus, sum_over_ranks
from vcal_dist.errors import ModelError
from vcal_dist.fullrank import Frame
from vcal_dist.likelihoods import Gaussian
from vcal_dist.nature import Nature

NUMBERS = 4_000_000  # features at once: 32 MB


class Shared(NamedTuple):
    """The sums that are the same for all points."""

    G: Tensor  # (K, D, D)
    log_precision: Tensor  # (K,)
    rows: Tensor  # (K,)


class Frozen:
    """The sums over rows for points (P, d2 + ζ's), with the emulator's uncertainty as it is at `centre` (d2,)."""

    def __init__(
        self,
        model: CalibrationModel,
        frame: Frame,
        centre: Tensor,
        points: Tensor,
        nature: Nature | None = None,
        shared: Shared | None = None,
    ) -> None:
        assert not model.random
        assert model.kind != "general"
        self.model, self.frame, self.centre, self.points = model, frame, centre, points
        self.nature = nature  # what of ζ points move: amplitude and noise, if anything
        self.shared = shared  # what an earlier pass has found, with the same centre
        self.sums: list[Tensor] | None = None
        self.summed: list[Tensor] | None = None  # over all processes, once it was asked for

    @torch.no_grad()
    def take(self, observations: Observations) -> None:
        """Adds a block of rows."""
        model, x, y = self.model, observations.x, observations.y
        assert isinstance(model.likelihood_y, Gaussian)
        phi = model.phi_eta(x, model.rows_of_theta(self.centre[None], len(x)), None)[0]  # (B, M_η)
        precision = model.likelihood_y.precision(y, observations.noise, model.residual_variance(phi))
        precision = (precision * observations.weight.unsqueeze(-1)).mT  # (K, B)
        psi = model.design(phi, None if model.delta is None else model.delta(x, None)).double()  # (B, D)
        known = precision > 0
        weighted, square = [], []
        for some in self.points[:, : model.prior.dim].split(max(1, NUMBERS // (max(len(x), 1) * model.eta.width))):
            unit = model.rows_of_theta(some, len(x))
            mean = model.kappa * (model.phi_eta(x, unit, None).double() @ self.frame.mean.mT)  # (S, B, K)
            residual = torch.where(known, (y - mean).mT, 0.0)  # (S, K, B)
            square.append((precision * residual.square()).sum(-1))
            weighted.append((precision * residual) @ psi)  # (S, K, D)
        parts = [torch.cat(weighted), torch.cat(square)]
        if self.shared is None:
            sums = gram(psi, y.mT, precision)
            parts = [sums.G, sums.log_precision, sums.rows, *parts]
        self.sums, self.summed = plus(self.sums, parts), None

    @torch.no_grad()
    def log_density(self, points: Tensor | None = None) -> Tensor:
        """log p(y | θ̃, ζ, runs) + log p(θ̃, ζ), (P,), up to the Jacobian of the scaling.

        Where the pass was for one point, other `points` may have its θ̃ and any ζ.
        """
        if self.sums is None:
            raise ModelError("there are no observations; θ needs at least 1")
        if self.summed is None:
            self.summed = sum_over_ranks(self.sums, symmetric=int(self.shared is None))
        if self.shared is None:
            self.shared = Shared(*self.summed[:3])
        (G, log_precision, rows), (b, square) = self.shared, self.summed[-2:]
        total = Gram(G, b, square, log_precision, rows)
        total = in_frame(total, self.frame.root.contiguous())
        points = self.points if points is None else points
        columns, precision = self._scales(points)  # (P, D), (P, K)
        b, square = total.b.expand(len(points), -1, -1), square.expand(len(points), -1)
        evidence = []
        for some in torch.arange(len(points), device=points.device).split(max(1, NUMBERS // total.G.numel())):
            p, c = precision[some], columns[some].unsqueeze(1)  # (S, K), (S, 1, D)
            scaled = Gram(
                total.G * p[..., None, None] * c.unsqueeze(-1) * c.unsqueeze(-2),
                b[some] * p.unsqueeze(-1) * c,
                square[some] * p,
                log_precision + rows * p.log(),
                rows,
            )
            evidence.append(log_evidence_if_any(scaled).sum(-1))
        return torch.cat(evidence) - 0.5 * points.square().sum(-1) - 0.5 * points.shape[-1] * math.log(2 * math.pi)

    def _scales(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """How much larger, at every point, features (P, D) and precisions (P, K) are than where sums were taken."""
        model, count = self.model, len(points)
        columns, precision = points.new_ones(count, model.width), points.new_ones(count, model.outputs)
        if self.nature is None or self.nature.dim == 0:
            return columns, precision
        assert isinstance(model.likelihood_y, Gaussian)
        residual = None if model.varying is not None else model.residual_variance()  # then σ_y is no part of ζ
        extra = 0.0 if residual is None else residual
        before = model.likelihood_y.noise_variance() + extra
        features = 0 if model.delta is None else model.delta.settings.features.features  # the rest do not scale
        start = model.eta.width
        amplitude = None if model.delta is None else model.delta.last.log_amplitude.double().clone()
        with self.nature.kept():
            for i, zeta in enumerate(points[:, model.prior.dim :]):
                self.nature.put(zeta)
                precision[i] = before / (model.likelihood_y.noise_variance() + extra)
                if model.delta is not None and amplitude is not None:
                    ratio = (model.delta.last.log_amplitude.double() - amplitude).exp()
                    columns[i, start : start + features] = ratio
        return columns, precision

    def state(self) -> dict[str, Any]:
        """The sums so far, over all processes; every one of them must ask."""
        sums = None if self.sums is None else sum_over_ranks(self.sums)
        return {"centre": self.centre, "points": self.points, "shared": self.shared, "sums": sums}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a state; the first process carries the sums on."""
        self.centre, self.points = state["centre"], state["points"]
        self.shared = None if state["shared"] is None else Shared(*state["shared"])
        self.sums, self.summed = carried(state["sums"]), None
