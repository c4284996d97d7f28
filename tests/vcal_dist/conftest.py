"""Small models, batches and Gaussians in float64, and dense computations to hold them against."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from storage.priors import Normal, Uniform
from vcal_dist.batches import Observations, Runs
from vcal_dist.calibration import CalibrationModel, Discrepancy, ModelSettings
from vcal_dist.features import FeatureSettings
from vcal_dist.fullrank import Arrow, Frame, FullRank
from vcal_dist.gp import GPSettings
from vcal_dist.likelihoods import LikelihoodSettings
from vcal_dist.priors import ThetaPrior
from vcal_dist.weights import MeanField

if TYPE_CHECKING:
    from tests.vcal_dist.training_kit import Processes

F64 = torch.float64
Array = NDArray[np.float64]


class Kit:
    """What the tests of the model's core build their cases from."""

    @staticmethod
    def generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    @staticmethod
    def randn(seed: int, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=Kit.generator(seed), dtype=F64)

    @staticmethod
    def rand(seed: int, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=Kit.generator(seed), dtype=F64)

    @staticmethod
    def prior(dim: int, family: Literal["normal", "uniform"] = "uniform", sd: float = 0.2) -> ThetaPrior:
        one = Normal(mean=0.5, sd=sd) if family == "normal" else Uniform(low=0.0, high=1.0)
        return ThetaPrior([one] * dim, [(0.0, 1.0)] * dim, [f"t{j}" for j in range(dim)])

    @staticmethod
    def model(
        kind: Discrepancy = "additive",
        *,
        controls: int = 2,
        prior: ThetaPrior | None = None,
        outputs: int = 1,
        hidden: tuple[int, ...] = (),
        features: int = 6,
        frequencies: Literal["fixed", "learned", "variational"] = "fixed",
        free_kappa: bool = False,
        likelihood_z: LikelihoodSettings | None = None,
        likelihood_y: LikelihoodSettings | None = None,
        emulator_residual: bool = True,
        varying_residual: bool = False,
        dtype: torch.dtype = F64,
        seed: int = 3,
    ) -> CalibrationModel:
        """A model with few features; hidden layers, if any, in both stacks, away from where they start."""
        deep: dict[str, Any] = {
            "hidden": hidden,
            "mean": "linear",
            "hidden_features": FeatureSettings(features=4, constant=0.5),
        }
        settings = ModelSettings(
            eta=GPSettings(
                features=FeatureSettings(features=features, frequencies=frequencies), lengthscale=0.6, **deep
            ),
            delta=GPSettings(
                features=FeatureSettings(features=4, constant=1.0), amplitude=0.6, lengthscale=0.7, **deep
            ),
            discrepancy=kind,
            free_kappa=free_kappa,
            likelihood_z=likelihood_z or LikelihoodSettings(noise=0.3),
            likelihood_y=likelihood_y or LikelihoodSettings(noise=0.4),
            emulator_residual=emulator_residual,
            varying_residual=varying_residual,
            seed=seed,
        )
        model = CalibrationModel(controls, prior or Kit.prior(1), outputs, settings, dtype=dtype)
        generator = Kit.generator(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "weights.mean" in name or "slope" in name or "below_diagonal" in name:
                    parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=F64)
                if "weights.log_sd" in name:
                    parameter += 3.0 + 0.3 * torch.randn(parameter.shape, generator=generator, dtype=F64)
            if free_kappa:
                model.kappa += 0.3
        return model

    @staticmethod
    def runs(model: CalibrationModel, rows: int, seed: int = 0, *, missing: bool = False) -> Runs:
        u, z = Kit.rand(seed, rows, model.eta.inputs), Kit.randn(seed + 1, rows, model.outputs)
        if missing:
            z[::3, 0] = torch.nan
        jacobian = torch.where(z.isnan(), 0.0, Kit.randn(seed + 2, rows, model.outputs))
        dtype = model.eta.last.log_amplitude.dtype
        return Runs(u.to(dtype), z, jacobian, 5 + torch.arange(rows), torch.ones(rows, dtype=F64))

    @staticmethod
    def observations(
        model: CalibrationModel, rows: int, seed: int = 10, *, missing: bool = False, noise: bool = False
    ) -> Observations:
        x, y = Kit.rand(seed, rows, model.controls), Kit.randn(seed + 1, rows, model.outputs)
        if missing:
            y[1::3, 0] = torch.nan
        jacobian = torch.where(y.isnan(), 0.0, Kit.randn(seed + 2, rows, model.outputs))
        own = 0.1 + Kit.rand(seed + 3, rows, model.outputs) if noise else None
        dtype = model.eta.last.log_amplitude.dtype
        return Observations(x.to(dtype), y, own, jacobian, 7 + torch.arange(rows), torch.ones(rows, dtype=F64))

    # --- Gaussians over (θ̃, w) -----------------------------------------------------------------------------------

    @staticmethod
    def frame(outputs: int, width: int, seed: int, scale: float = 0.5) -> Frame:
        """Upper triangular roots, well away from the identity."""
        root = scale * Kit.randn(seed, outputs, width, width).triu(1) / width**0.5
        root = root + torch.diag_embed(scale * (0.5 + Kit.rand(seed + 1, outputs, width)))
        return Frame(Kit.randn(seed + 2, outputs, width), root)

    @staticmethod
    def arrow(theta_dim: int, outputs: int, width: int, seed: int) -> Arrow:
        """A positive definite arrow with strong entries between θ̃ and the weights."""
        half = Kit.randn(seed, outputs, width, 2 * width)
        P = half @ half.mT / width + 0.1 * torch.eye(width, dtype=F64)
        C = Kit.randn(seed + 1, outputs, theta_dim, width)
        half = Kit.randn(seed + 2, theta_dim, theta_dim + 2)
        A = half @ half.mT + 0.3 * torch.eye(theta_dim, dtype=F64) + (C @ torch.linalg.solve(P, C.mT)).sum(0)
        return Arrow(A, C, P)

    @staticmethod
    def full_rank(
        theta_dim: int, outputs: int, width: int, seed: int = 5, *, frame: Frame | None = None, absorbed: bool = False
    ) -> FullRank:
        """A random state."""
        q = FullRank(theta_dim, outputs, width, frame=frame, absorbed=absorbed)
        mean = Kit.randn(seed + 4, outputs, width)
        q.move(0.5 * Kit.randn(seed + 3, theta_dim), mean, Kit.arrow(theta_dim, outputs, width, seed))
        return q

    @staticmethod
    def mean_field(theta_dim: int, outputs: int, width: int, seed: int = 5) -> MeanField:
        q = MeanField(theta_dim, outputs, width, dtype=F64)
        with torch.no_grad():
            for i, parameter in enumerate(q.parameters()):
                parameter += 0.6 * Kit.randn(seed + i, *parameter.shape)
        return q

    @staticmethod
    def dense_arrow(arrow: Arrow) -> Array:
        """The arrow as one matrix over (θ̃, v_1, …, v_K)."""
        d, (K, D) = len(arrow.theta), arrow.weights.shape[:2]
        full = np.zeros((d + K * D, d + K * D))
        full[:d, :d] = arrow.theta
        for k in range(K):
            rows = slice(d + k * D, d + (k + 1) * D)
            full[rows, rows] = arrow.weights[k]
            full[:d, rows] = arrow.cross[k]
            full[rows, :d] = arrow.cross[k].mT
        return full

    @staticmethod
    def dense(q: FullRank | MeanField) -> tuple[Array, Array]:
        """Mean and covariance of (θ̃, w_1, …, w_K), in the weights' own coordinates."""
        if isinstance(q, MeanField):
            variances = [(2 * q.theta_log_sd).exp(), (2 * q.log_sd).exp().flatten()]
            mean = torch.cat([q.theta_mean, q.mean.flatten()])
            return mean.detach().numpy(), np.diag(torch.cat(variances).detach().numpy())
        covariance = np.linalg.inv(Kit.dense_arrow(q.precision))
        frame = np.eye(len(covariance))
        mean = [q.theta_mean.numpy()]
        for k in range(q.outputs):
            rows = slice(q.theta_dim + k * q.width, q.theta_dim + (k + 1) * q.width)
            T = q.frame_root[k].numpy()
            frame[rows, rows] = T
            mean.append(q.frame_mean[k].numpy() + T @ q.mean[k].numpy())
        return np.concatenate(mean), frame @ covariance @ frame.T

    @staticmethod
    def gaussian_kl(mean: Array, covariance: Array, prior_mean: Array, prior_covariance: Array) -> float:
        """KL(N(mean, covariance) ‖ N(prior_mean, prior_covariance))."""
        inverse, gap = np.linalg.inv(prior_covariance), prior_mean - mean
        log_dets = np.linalg.slogdet(prior_covariance)[1] - np.linalg.slogdet(covariance)[1]
        return float(0.5 * (np.trace(inverse @ covariance) + gap @ inverse @ gap - len(mean) + log_dets))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are small here: more threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    """Builders of small cases."""
    return Kit


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Trainings in processes of their own."""
    from tests.vcal_dist.training_kit import Processes  # not where `test_collective` runs as a script beside this file

    found = Processes(tmp_path_factory.mktemp("processes"))
    yield found
    found.close()
