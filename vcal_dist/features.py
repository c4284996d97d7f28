"""Random-feature expansions of kernels: φ(u)·φ(v) ≈ k(u, v), so that φ(u)·W with W ~ N(0, I) is a Gaussian process.

Stationary kernels have cosine and sine features whose frequencies Ω come from the kernel's spectral density (Rahimi and
Recht 2007), with orthogonal directions (Yu et al. 2016) or from a low-discrepancy sequence (Avron et al. 2016) on
request. Arc-cosine kernels have step or ReLU features (Cho and Saul 2009). Ω is fixed, learned, or variational (Cutajar
et al. 2017).

Shapes: d inputs, F frequencies, M features (M = 2F for cosines and sines, M = F for arc-cosine), B and C rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

from vcal_dist.errors import ModelError

Kernel = Literal["gaussian", "matern12", "matern32", "matern52", "arccos0", "arccos1"]
Lengthscales = Literal["isotropic", "ard", "full"]
Frequencies = Literal["fixed", "learned", "variational"]

DEGREES_OF_FREEDOM = {"matern12": 1, "matern32": 3, "matern52": 5}  # 2ν of the Student-t that Ω comes from
ARC_COSINE_ORDER = {"arccos0": 0, "arccos1": 1}
INITIAL_SD = 0.1  # of q(Ω): small, so that training starts near the features of the prior draw


@dataclass(frozen=True, kw_only=True)
class FeatureSettings:
    """Which kernel, how many features stand for it, and what is learned of them.

    `features` is M: two for each frequency with cosines and sines, one for each with an arc-cosine kernel. `quasi`
    takes frequencies from a low-discrepancy sequence, in place of `orthogonal` ones: fixed ones of a Gaussian kernel
    then miss it by two to eight times less where length scales are long, or inputs one or two; with many inputs and
    short length scales there is no difference. `constant` and `linear` are the prior standard deviations of an
    intercept (one more column) and of slopes around the cube's centre (d more columns).
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    kernel: Kernel = "gaussian"
    features: int = 100
    lengthscales: Lengthscales = "ard"
    orthogonal: bool = True
    quasi: bool = False
    frequencies: Frequencies = "fixed"
    constant: float | None = None
    linear: float | None = None

    def __post_init__(self) -> None:
        _check_word("kernel", self.kernel, get_args(Kernel))
        _check_word("lengthscales", self.lengthscales, get_args(Lengthscales))
        _check_word("frequencies", self.frequencies, get_args(Frequencies))
        M = self.features
        _check_count("features", M)
        if M % 2 and self.kernel not in ARC_COSINE_ORDER:
            even = f"{M - 1} or {M + 1}" if M > 1 else "2"
            raise ModelError(
                f"features = {M} is odd, but the {self.kernel} kernel takes a cosine and a sine for each frequency: "
                f"take {even}"
            )
        for name in ("constant", "linear"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name), " (a prior standard deviation), or nothing to leave it out")


class RandomFeatures(nn.Module):
    """The features φ(u) of one Gaussian process, with the length scales, the amplitude and the frequencies behind them.

    With v = u/ℓ (one ℓ, or one for each input) or v = u·L (`full`: A = LLᵀ, L lower triangular):

    - Gaussian, Matérn-ν: φ(u) = σ/√F · [cos(vΩ), sin(vΩ)], for k = σ²·exp(−r²/2) or the Matérn function of √(2ν)·r,
      r = |v − v'|;
    - arc-cosine of order n: φ(u) = σ·√(2/M) · Θ(ũΩ)·(ũΩ)ⁿ with ũ = [1, v]. Without the one, k would depend on the
      directions of v and v' seen from the corner u = 0 of the cube, and the process would be tied to 0 there (n = 1) or
      constant along every ray from it (n = 0).

    `constant` and `linear` add the columns c and l·(u − ½), in this order, after the M features.

    >>> phi = RandomFeatures(2, FeatureSettings(kernel="matern52", features=100, constant=1.0), seed=1, lengthscale=0.5)
    >>> phi(torch.rand(7, 2)).shape
    torch.Size([7, 101])
    """

    omega: Tensor  # Ω when it is not variational: (d, F), for arc-cosine (d + 1, M)
    radial: Tensor  # the radial part when it is: (F,)

    def __init__(
        self,
        inputs: int,
        settings: FeatureSettings,
        *,
        seed: int,
        lengthscale: float | Sequence[float] = 1.0,
        amplitude: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _check_count("inputs", inputs)
        _check_positive("amplitude", amplitude)
        self.inputs = inputs
        self.settings = settings
        self.width = settings.features + (settings.constant is not None) + inputs * (settings.linear is not None)
        self._order = ARC_COSINE_ORDER.get(settings.kernel)  # None for cosines and sines
        self.differentiable = settings.kernel != "arccos0"  # a step has no gradient in its inputs

        # ℓ: (1,) isotropic, (d,) ard; full has it as the inverse of L's diagonal, and starts at L = diag(1/ℓ).
        ell = _start_of_lengthscale(lengthscale, inputs, settings.lengthscales)
        self.log_lengthscale = nn.Parameter(ell.log().to(dtype))
        if settings.lengthscales == "full":
            self.below_diagonal = nn.Parameter(torch.zeros(inputs * (inputs - 1) // 2, dtype=dtype))
        self.log_amplitude = nn.Parameter(torch.tensor(math.log(amplitude), dtype=dtype))

        base, radial = _draw(inputs, settings, seed)
        self.noise_shape: tuple[int, int] | None = None
        if settings.frequencies == "variational":
            self.noise_shape = (base.shape[0], base.shape[1])
            self.mean = nn.Parameter(base.to(dtype))
            self.log_sd = nn.Parameter(torch.full_like(self.mean, math.log(INITIAL_SD)))
            self.register_buffer("radial", radial.to(dtype))
        elif settings.frequencies == "learned":
            self.omega = nn.Parameter((base * radial).to(dtype))
        else:
            self.register_buffer("omega", (base * radial).to(dtype))

    def frequencies(self, noise: Tensor | None = None) -> Tensor:
        """Ω at unit length scale, (d, F) or for arc-cosine (d + 1, M).

        Variational frequencies turn standard-normal noise (..., *noise_shape) into draws of q(Ω), and give their mean
        without it. Fixed and learned ones take no notice of the noise.
        """
        if self.noise_shape is None:
            return self.omega
        base = self.mean if noise is None else self.mean + self.log_sd.exp() * noise
        return base * self.radial

    def kl(self) -> Tensor:
        """KL(q(Ω) || p(Ω)); zero unless the frequencies are variational.

        The radial part is the same in q and p, so this is the divergence of N(mean, sd²) from N(0, I).
        """
        if self.noise_shape is None:
            return self.log_amplitude.new_zeros(())
        # KL = Σ ½(m² + s² − 1) − log s
        return (0.5 * (self.mean.square() + (2 * self.log_sd).exp() - 1) - self.log_sd).sum()

    def log_prior(self) -> Tensor:
        """log p(Ω) of learned frequencies, up to a constant: it keeps them near the kernel where the rows are few.

        Each column is standard normal, or for Matérn-ν Student-t with 2ν degrees of freedom; zero unless learned.
        """
        if self.settings.frequencies != "learned":
            return self.log_amplitude.new_zeros(())
        square = self.omega.square().sum(0)  # |ω|² (F,)
        if self.settings.kernel not in DEGREES_OF_FREEDOM:
            return -0.5 * square.sum()
        degrees = DEGREES_OF_FREEDOM[self.settings.kernel]
        return -0.5 * (degrees + self.inputs) * torch.log1p(square / degrees).sum()

    @torch.no_grad()
    def set_lengthscale(self, lengthscale: Tensor) -> None:
        """Starts the length scales anew, from one for each input; isotropic ones take their geometric mean."""
        log = lengthscale.to(self.log_lengthscale).log()
        self.log_lengthscale.copy_(log.mean() if self.settings.lengthscales == "isotropic" else log)

    def hold(self) -> None:
        """Keeps length scales and amplitude as they are: training does not move them."""
        held = [self.log_lengthscale, self.log_amplitude]
        for parameter in [*held, self.below_diagonal] if self.settings.lengthscales == "full" else held:
            parameter.requires_grad_(False)

    def forward(self, u: Tensor, frequencies: Tensor | None = None) -> Tensor:
        """φ(u): (..., B, d) -> (..., B, width); frequencies may have leading dimensions too, and they broadcast."""
        self._check_width(u)
        Omega = self.frequencies() if frequencies is None else frequencies
        scale = self.log_amplitude.exp() * math.sqrt(2 / self.settings.features)  # σ·√(2/M), which is σ/√F with M = 2F
        # The length scales enter through Ω, (u/ℓ)Ω = u(Ω/ℓ), which has far fewer rows than u.
        if self._order is None:
            phi: Tensor = _CosSin.apply(u @ self.stretch(Omega), scale)  # type: ignore[no-untyped-call]
        elif self._order == 0:
            phi = scale * (u @ self.stretch(Omega[..., 1:, :]) + Omega[..., :1, :] > 0)
        else:  # a ReLU is homogeneous: scaling Ω scales φ
            Omega = scale * Omega
            phi = torch.relu(u @ self.stretch(Omega[..., 1:, :]) + Omega[..., :1, :])
        columns = [phi]  # (..., B, M)
        if self.settings.constant is not None:
            columns.append(phi.new_full((1,), self.settings.constant).expand(*phi.shape[:-1], 1))
        if self.settings.linear is not None:
            columns.append((self.settings.linear * (u - 0.5)).expand(*phi.shape[:-1], self.inputs))
        return phi if len(columns) == 1 else torch.cat(columns, -1)

    def kernel(self, u: Tensor, v: Tensor) -> Tensor:
        """The exact kernel that φ approximates, (B, d), (C, d) -> (B, C), at the current length scales and amplitude.

        It belongs to the prior of Ω: learned frequencies, or a q(Ω) that has moved, mean another kernel.
        """
        self._check_width(u)
        self._check_width(v)
        L = self.stretch(torch.eye(self.inputs, dtype=self.log_amplitude.dtype, device=self.log_amplitude.device))
        correlation = _stationary if self._order is None else _arc_cosine
        k = (2 * self.log_amplitude).exp() * correlation(u @ L, v @ L, self.settings.kernel)
        if self.settings.constant is not None:
            k = k + self.settings.constant**2
        if self.settings.linear is not None:
            k = k + self.settings.linear**2 * (u - 0.5) @ (v - 0.5).mT
        return k

    def stretch(self, Omega: Tensor) -> Tensor:
        """LΩ, from frequencies of v to frequencies of u; L = diag(1/ℓ) unless `full`."""
        inverse = (-self.log_lengthscale).exp()
        if self.settings.lengthscales != "full":
            return inverse[:, None] * Omega
        i, j = torch.tril_indices(self.inputs, self.inputs, offset=-1, device=inverse.device)
        return torch.diag(inverse).index_put((i, j), self.below_diagonal) @ Omega

    def _check_width(self, u: Tensor) -> None:
        if u.shape[-1] != self.inputs:
            raise ModelError(
                f"The features take {self.inputs} inputs, but the rows have {u.shape[-1]} columns "
                f"(shape {tuple(u.shape)}): give {self.inputs} columns, or build the features with inputs={u.shape[-1]}"
            )


class _CosSin(torch.autograd.Function):
    """(P, a) -> a·[cos P, sin P], with the derivatives taken from the result.

    This is the hot loop, and plain autograd would compute every cosine and sine once more in the backward pass: forward
    and backward take 1.8 ms in place of 2.4 ms for 4096 rows, 8 inputs and 50 frequencies on one core. The formulas are
    made of differentiable operations, so that forward mode, vmap and higher derivatives work.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(P: Tensor, a: Tensor) -> Tensor:
        return torch.cat([P.cos(), P.sin()], -1).mul_(a)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])
        ctx.save_for_forward(output, inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        phi, a = ctx.saved_tensors
        cos, sin = phi.chunk(2, -1)
        by_cos, by_sin = grad.chunk(2, -1)
        by_a = torch.tensordot(grad, phi, grad.dim()) / a if ctx.needs_input_grad[1] else None
        return by_sin * cos - by_cos * sin, by_a

    @staticmethod
    def jvp(ctx: Any, dP: Tensor, da: Tensor) -> Tensor:
        phi, a = ctx.saved_tensors
        cos, sin = phi.chunk(2, -1)
        dphi: Tensor = torch.cat([-sin * dP, cos * dP], -1) + phi * (da / a)
        return dphi


def _draw(inputs: int, settings: FeatureSettings, seed: int) -> tuple[Tensor, Tensor]:
    """The base N(0, I) draws and the radial part whose product is Ω: (d, F) and (F,), in float64 on the CPU.

    The same on every rank and device and after every restart, because only the seed decides.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    arc_cosine = settings.kernel in ARC_COSINE_ORDER
    d = inputs + 1 if arc_cosine else inputs
    F = settings.features if arc_cosine else settings.features // 2

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    degrees = DEGREES_OF_FREEDOM.get(settings.kernel, 0)
    if settings.quasi:
        return _low_discrepancy(d, degrees, F, seed)
    base = normal(d, F)
    if settings.orthogonal:
        # Blocks of d orthogonal directions, independent of the norms: each column is still N(0, I).
        Q, R = torch.linalg.qr(normal(-(-F // d), d, d))
        Q = Q * R.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]  # QR with a positive diagonal: Q is Haar
        base = Q.transpose(0, 1).reshape(d, -1)[:, :F] * base.norm(dim=0)  # |column| ~ chi(d)
    radial = torch.ones(F, dtype=torch.float64)
    if degrees:
        radial = (degrees / normal(degrees, F).square().sum(0)).sqrt()  # √(2ν/χ²), one for all d entries of a column
    return base, radial


def draw_frequencies(inputs: int, settings: FeatureSettings, seed: int) -> Tensor:
    """Ω (d, F) at unit length scale, from the kernel's spectral density."""
    base, radial = _draw(inputs, settings, seed)
    return base * radial


def _low_discrepancy(d: int, degrees: int, F: int, seed: int) -> tuple[Tensor, Tensor]:
    """As `_draw`, from a scrambled Sobol sequence, the base with ΩΩᵀ/F = I: k's curvature at 0 is then right."""
    uniform = SobolEngine(d + degrees, scramble=True, seed=seed).draw(F, dtype=torch.float64).clamp(1e-9, 1 - 1e-9)
    base, rest = torch.special.ndtri(uniform).mT.split([d, degrees])
    if 2 * d <= F:  # fewer say little of all directions
        base = torch.linalg.solve_triangular(torch.linalg.cholesky(base @ base.mT / F), base, upper=False)
    radial = (degrees / rest.square().sum(0)).sqrt() if degrees else torch.ones(F, dtype=torch.float64)
    return base.contiguous(), radial


def _stationary(u: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    """The Gaussian and Matérn correlations of rows at unit length scale."""
    # Without matrix products: they lose the small distances to cancellation.
    r = torch.cdist(u, v, compute_mode="donot_use_mm_for_euclid_dist")
    if kernel == "gaussian":
        return torch.exp(-0.5 * r.square())
    s = math.sqrt(DEGREES_OF_FREEDOM[kernel]) * r  # √(2ν)·r
    polynomial = {"matern12": torch.ones_like(s), "matern32": 1 + s, "matern52": 1 + s + s.square() / 3}
    return polynomial[kernel] * torch.exp(-s)


def _arc_cosine(u: Tensor, v: Tensor, kernel: Kernel) -> Tensor:
    """k_n = |ũ|ⁿ|ṽ|ⁿ·J_n(α)/π, α the angle between ũ = [1, u] and ṽ = [1, v]."""
    u, v = (nn.functional.pad(x, (1, 0), value=1.0) for x in (u, v))
    u_length, v_length = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (u, v))  # (B, 1), (C, 1)
    u, v = u / u_length, v / v_length
    # α = 2·atan2(|û − v̂|, |û + v̂|): the arc cosine of û·v̂ loses half of the digits at small angles.
    mode = "donot_use_mm_for_euclid_dist"
    alpha = 2 * torch.atan2(torch.cdist(u, v, compute_mode=mode), torch.cdist(u, -v, compute_mode=mode))
    if kernel == "arccos0":
        return (math.pi - alpha) / math.pi  # J₀ = π − α
    J1 = alpha.sin() + (math.pi - alpha) * alpha.cos()  # (B, C)
    k1: Tensor = u_length * v_length.mT * J1 / math.pi
    return k1


def _start_of_lengthscale(lengthscale: float | Sequence[float], inputs: int, kind: Lengthscales) -> Tensor:
    """ℓ as (1,) for isotropic and (d,) otherwise, in float64."""
    wanted = 1 if kind == "isotropic" else inputs
    values = list(lengthscale) if isinstance(lengthscale, Sequence) else [lengthscale] * wanted
    if len(values) != wanted:
        raise ModelError(
            f"lengthscale has {len(values)} values, but {kind} length scales of {inputs} inputs take {wanted}: "
            "give as many, or one number for all"
        )
    for value in values:
        _check_positive("lengthscale", value)
    return torch.tensor(values, dtype=torch.float64)


def _check_word(name: str, value: object, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        nearest = get_close_matches(str(value).lower(), accepted, n=1)
        meant = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ModelError(f"{name} = {value!r} is not known{meant}; accepted: {', '.join(accepted)}")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name} = {value!r} must be a whole number of at least 1")


def _check_positive(name: str, value: object, cure: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{name} = {value!r} must be a finite number above 0{cure}")
