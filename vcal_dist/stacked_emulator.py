"""η where runs are few: an ensemble with learned frequencies and two exact Gaussian processes, stacked.

What is known of η after the runs is a Gaussian process with a mean and a covariance of finite rank. It takes the place
of random features whose weights the runs have told: features φ(u) with weights N(m, RRᵀ), such that

    φ = [g_1 … g_K,  deviations],    η_k = g_k + Σ_i R_ii·deviation_i·v_i,    v ~ N(0, I),

so that θ, predictions and diagnostics need not know of it. The deviations are those of the members, a draw of each,
from their mean, those of the experts from theirs (for up to `SEPARATE` outputs), and the two processes' own
(`exact_gp.paths`). They are functions of (x, t), small where runs are near: unlike noise, they do not average out over
observations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vcal_dist.exact_gp import KINDS, Conditioned, Hyperparameters, Paths, covariance
from vcal_dist.fullrank import Frame
from vcal_dist.stacking import Stack

SEPARATE = 8  # outputs that have deviations of members of their own; with more, the processes' stand for them
TINY = 1e-6  # of weights that are known: a root must have an inverse
BLOCK = 512  # rows at once, where no gradient is asked for: what fits a cache is five times as fast
CACHED = 50_000  # numbers at once that a processor's cache holds
MEMBERS = 2  # place of the ensemble among the experts, after the two processes
LIGHT = 0.1  # weight of an expert below which a rough mean goes without it


class Ensemble(NamedTuple):
    """The trained members: f_i(u) = φ_i(u)·W_i."""

    omega: Tensor  # Ω/ℓ (m, d, F)
    weights: Tensor  # mean of W, amplitude included (m, K, 2F)
    drawn: Tensor  # one draw of it from what each member knows, likewise
    noise: Tensor  # σ² (m, K) or (m, 1)


class StackedEmulator(nn.Module):
    """Inputs u → [means, deviations]; `frame` has the weights."""

    random = False
    scale: Tensor

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in tensors.items():
            self.register_buffer(name, value.detach().clone())
        self.inputs = int(tensors["omega"].shape[1])
        self.width = int(tensors["scale"].shape[-1])

    @classmethod
    @torch.no_grad()
    def build(
        cls, ensemble: Ensemble, processes: list[Conditioned], paths: list[Paths], found: Stack, dtype: torch.dtype
    ) -> StackedEmulator:
        """From the trained experts."""
        K = len(found.scale)
        tensors: dict[str, Tensor] = {
            "omega": ensemble.omega.double(),
            "member_weights": ensemble.weights,
            "member_draws": ensemble.drawn,
            "stack": found.weights,
            "precision": torch.zeros((), dtype=dtype),
        }
        for j, (process, path) in enumerate(zip(processes, paths, strict=True)):
            h = process.hyperparameters
            tensors |= {
                f"rows_{j}": process.rows[process.counted[0]],
                f"alpha_{j}": process.alpha[0][process.counted[0]],
                f"lengthscale_{j}": h.lengthscale[0],
                f"amplitude_{j}": h.amplitude[0],
                f"slope_{j}": h.slope[0],
                f"path_omega_{j}": path.omega,
                f"path_amplitude_{j}": path.amplitude,
                f"path_solved_{j}": path.solved[process.counted[0]],
            }
        a, s = found.weights, found.scale.sqrt()  # (J, K), (K,)
        m, separate = len(ensemble.omega), K <= SEPARATE
        blocks = [torch.zeros(K, K, dtype=torch.float64)]  # the means are known
        if separate:
            own = torch.eye(K, dtype=torch.float64)
            of_members = (a[MEMBERS] / max(m - 1, 1)).sqrt() * s  # (K,)
            blocks.append((own * of_members.cpu()).repeat_interleave(m, 1))
            blocks += [own * (a[j].sqrt() * s).cpu() for j in range(len(a))]
            shares = a[:MEMBERS]
        else:
            shares = a[:MEMBERS] / a[:MEMBERS].sum(0)
        for j, path in enumerate(paths):
            blocks.append((shares[j].sqrt() * s).cpu().unsqueeze(-1).expand(K, path.solved.shape[-1]))
        tensors["scale"] = torch.cat(blocks, 1).to(a.device)
        return cls(tensors)

    @classmethod
    def shaped_like(cls, state: dict[str, Tensor], prefix: str) -> StackedEmulator:
        """One that can take the state of another, whose names begin with `prefix`."""
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        return cls({name: torch.zeros_like(value) for name, value in own.items()})

    @property
    def dtype(self) -> torch.dtype:
        """Of the inputs."""
        precision: Tensor = self.get_buffer("precision")
        return precision.dtype

    @property
    def outputs(self) -> int:
        """K."""
        return len(self.scale)

    def frame(self) -> Frame:
        """What the runs say of the weights."""
        K, W = self.scale.shape
        mean = torch.eye(K, W, dtype=torch.float64, device=self.scale.device)
        return Frame(mean, torch.diag_embed(self.scale.clamp_min(TINY)))

    def forward(self, u: Tensor, draw: Any = None) -> Tensor:
        """φ: (..., B, d) → (..., B, W), in float64. There is no noise to draw."""
        rows = u.reshape(-1, u.shape[-1]).double()
        if torch.is_grad_enabled() and rows.requires_grad:
            phi = self._features(rows)
        else:
            phi = torch.cat([self._features(block) for block in rows.split(BLOCK)]) if len(rows) else self._empty(rows)
        return phi.reshape(*u.shape[:-1], self.width)

    @torch.no_grad()
    def rough_mean(self, u: Tensor) -> Tensor:
        """g without the experts of little weight, (..., B, K): cheap enough for a screening of many places."""
        weights = self.get_buffer("stack")
        heavy = (weights >= LIGHT).any(-1)
        weights = weights * heavy.unsqueeze(-1)
        weights = weights / weights.sum(0)
        rows = u.reshape(-1, u.shape[-1]).double()
        found = [self._mean(block, weights) for block in rows.split(BLOCK)]
        return torch.cat(found).reshape(*u.shape[:-1], self.outputs)

    def _mean(self, u: Tensor, stack: Tensor) -> Tensor:
        found = u.new_zeros(len(u), self.outputs)
        if bool(stack[MEMBERS].any()):
            each = _waves(u, self.get_buffer("omega"), self.get_buffer("member_weights"))
            found = stack[MEMBERS] * each.mean(0)
        for j in range(MEMBERS):
            if bool(stack[j].any()):
                found = found + stack[j] * (self._across(j, u) @ self.get_buffer(f"alpha_{j}"))
        return found

    def kl(self) -> Tensor:
        """Nothing here is variational."""
        return self.scale.new_zeros(())

    def log_prior(self) -> Tensor:
        """Nor a point with a prior."""
        return self.scale.new_zeros(())

    def _empty(self, rows: Tensor) -> Tensor:
        return rows.new_zeros(0, self.width)

    def _features(self, u: Tensor) -> Tensor:
        omega, stack = self.get_buffer("omega"), self.get_buffer("stack")
        both = torch.cat([self.get_buffer("member_weights"), self.get_buffer("member_draws")], 1)  # (m, 2K, 2F)
        K, each = self.outputs, _waves(u, omega, both)  # (m, B, 2K)
        ensemble = each[..., :K].mean(0)
        experts, deviations = [], []
        for j in range(MEMBERS):
            mean, deviation = self._process(j, u)
            experts.append(mean)
            deviations.append(deviation)
        experts.append(ensemble)
        g = sum(stack[j] * expert for j, expert in enumerate(experts))
        assert isinstance(g, Tensor)
        columns = [g]
        if self.outputs <= SEPARATE:
            columns.append(
                (each[..., K:] - ensemble).permute(1, 2, 0).reshape(len(u), -1)
            )  # of output 1, of output 2, …
            columns += [expert - g for expert in experts]
        return torch.cat([*columns, *deviations], -1)

    def _across(self, j: int, u: Tensor) -> Tensor:
        """k(u, X) of a Gaussian process, (B, N)."""
        lengthscale, amplitude, slope, rows = (
            self.get_buffer(f"{name}_{j}") for name in ("lengthscale", "amplitude", "slope", "rows")
        )
        h = Hyperparameters(lengthscale[None], amplitude[None], slope[None], slope[None])
        return covariance(KINDS[j], h, u, rows)[0]

    def _process(self, j: int, u: Tensor) -> tuple[Tensor, Tensor]:
        """The mean (B, K) of a Gaussian process, and its deviations."""
        across = self._across(j, u)
        omega, waves, slope, solved = (
            self.get_buffer(f"{name}_{j}") for name in ("path_omega", "path_amplitude", "slope", "path_solved")
        )
        path = Paths(omega, waves, slope.exp(), solved)
        return across @ self.get_buffer(f"alpha_{j}"), path.prior(u) - across @ path.solved


def _waves(u: Tensor, omega: Tensor, weights: Tensor) -> Tensor:
    """Sums of cosines and sines at u (B, d) with weights (m, C, 2F): (m, B, C). As many at once as fit a cache."""
    F = omega.shape[-1]
    together = max(1, CACHED // (max(len(u), 1) * F))
    found = []
    for some, its in zip(omega.split(together), weights.split(together), strict=True):
        P = u @ some  # (s, B, F)
        found.append(P.cos() @ its[..., :F].mT + P.sin() @ its[..., F:].mT)
    return torch.cat(found)
