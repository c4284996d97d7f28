"""The posterior of a calibration: what is known of θ and of the process, in the user's units, kept in a directory.

    posterior = Posterior.load("runs/borehole")
    posterior.summary()
    posterior.predict(x).mean, posterior.predict(x, "discrepancy", samples=20).samples

`posterior.safetensors` holds all of it: problem, scaling, model, q(θ̃, w) and a record of how it was found.
`posterior.nc` holds draws of θ for ArviZ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from pydantic import TypeAdapter
from torch import Tensor, nn

from storage.checks import find_faults
from storage.labels import by_name
from storage.problem import Column, Problem, parse_problem
from vcal_dist import tensorfile
from vcal_dist.answers import Answers, Array, Asked, Block, Predicted, to_numpy
from vcal_dist.batches import Scaling
from vcal_dist.calibration import CalibrationModel, ModelSettings, numbers_in
from vcal_dist.errors import MISFITS, Malformed, ModelError
from vcal_dist.families import from_state, to_state
from vcal_dist.likelihoods import Gaussian, StudentT
from vcal_dist.posterior_record import check_record
from vcal_dist.prediction_kinds import AT_T, What
from vcal_dist.predictive import (
    Inputs,
    draw_ensemble,
    is_closed_form,
    mean_residual,
    users_moments,
    users_samples,
)
from vcal_dist.priors import ThetaPrior
from vcal_dist.theta import ThetaPosterior
from vcal_dist.transforms import OutputScaling, TransformSettings
from vcal_dist.validation import Validation
from vcal_dist.weights import Weights

FORMAT, SCHEMA, READ = "vcal-dist posterior", 2, (1, 2)  # 1: without stacked emulators
FILE, DRAWS_FILE = "posterior.safetensors", "posterior.nc"
ALWAYS = 10_000_000  # numbers of a model that any machine has room for
DTYPES = {"float32": torch.float32, "float64": torch.float64}
_MODEL: TypeAdapter[ModelSettings] = TypeAdapter(ModelSettings)
_TRANSFORMS: TypeAdapter[tuple[TransformSettings, ...]] = TypeAdapter(tuple[TransformSettings, ...])


class Found(Protocol):
    """What a posterior takes from a fit."""

    @property
    def model(self) -> CalibrationModel: ...

    @property
    def components(self) -> Sequence[Weights]: ...

    @property
    def log_weights(self) -> Tensor: ...

    @property
    def validation(self) -> Validation | None: ...


class Posterior(Answers):
    """θ, the emulator, the discrepancy and the process after calibration. It does not change.

    A mixture of `components`, joint Gaussians over θ̃ and weights, with `log_weights`. `record` is whatever JSON can
    hold about how it was found.
    """

    def __init__(
        self,
        scaling: Scaling,
        model: CalibrationModel,
        components: Sequence[Weights],
        log_weights: Tensor,
        record: Mapping[str, Any],
        validation: Validation | None = None,
    ) -> None:
        self.validation = validation  # how a stacked emulator predicted runs that it had not seen
        self.problem, self.scaling, self.model = scaling.problem, scaling, model
        self.components, self.log_weights, self.record = list(components), log_weights, dict(record)

    @classmethod
    def from_fitted(
        cls, problem: Problem, scaling: Scaling, fitted: Found, record: Mapping[str, Any] | None = None
    ) -> Self:
        """A copy of what a fit has found, on its device; training may go on without changing it."""
        model, prior = fitted.model, ThetaPrior.from_problem(problem)
        for name, of_model, of_problem in (
            ("problem", scaling.problem, problem),
            ("priors", model.prior.priors, prior.priors),
            ("bounds of the calibration inputs", model.prior.bounds, prior.bounds),
            ("number of control inputs", model.controls, len(problem.control_inputs)),
            ("number of outputs", model.outputs, len(problem.outputs)),
            ("precision", model.dtype, scaling.dtype),
        ):
            if of_model != of_problem:
                raise ModelError(f"the {name} of the model, {of_model}, is not that of the problem, {of_problem}")
        live = cls(scaling, model, fitted.components, fitted.log_weights, record or {}, fitted.validation)
        # By the way that a file is read, so that a loaded posterior predicts the same to the last bit.
        return cls._from_tree(live._tree(), problem, model.kappa.device)

    # --- θ ----------------------------------------------------------------------------------------------------------

    @cached_property
    def theta(self) -> ThetaPosterior:
        """The posterior of θ: densities, quantiles, intervals."""
        return ThetaPosterior.of(self.model.prior, self.components, self.log_weights)

    @property
    def noise(self) -> dict[str, float]:
        """σ_y of every output, without the emulator's residual: a standard deviation, for Student-t the scale.

        It is in the user's units where the output has no transform T, and in those of T(y) otherwise. Counts and
        classes have none.
        """
        likelihood, outputs = self.model.likelihood_y, self.scaling.outputs
        if not isinstance(likelihood, Gaussian | StudentT):
            return {}
        return dict(zip(outputs.names, to_numpy(likelihood.noise_variance().sqrt() * outputs.sd).tolist(), strict=True))

    def residual(self, x: ArrayLike) -> Array:
        """What the emulator leaves unexplained of y at x (B, d1): standard deviations (B, K), like those of `noise`."""
        inputs = self._inputs({"x": x}, "process", extrapolate=True)
        ensemble = draw_ensemble(self.model, self.components, self.log_weights, 64, 0)
        variance, sd = mean_residual(ensemble, inputs, "process"), self.scaling.outputs.sd
        scaled = sd * 0.0 if variance is None else sd * variance.sqrt()
        return to_numpy(scaled.expand(len(inputs.x), -1))

    def _made_of(self) -> str:
        count = len(self.components)
        return f"{self.model.kind} discrepancy, {count} component{'s' if count > 1 else ''}"

    # --- predictions ------------------------------------------------------------------------------------------------

    def _predictor(self, asked: Asked) -> Callable[[Block], Predicted]:
        what, outputs, draws = asked.what, self.scaling.outputs, asked.draws
        mixture = (self.model, self.components, self.log_weights)
        if draws is None:  # weights that are integrated out leave few dimensions to sample
            draws = 64 if is_closed_form(self.model, outputs, what) else 256
        of_moments = draw_ensemble(*mixture, draws, asked.seed)
        of_samples = draw_ensemble(*mixture, asked.samples, asked.sample_seed) if asked.samples else None
        noise, sample_noise = (
            torch.Generator(self.model.kappa.device).manual_seed(seed) for seed in (asked.seed, asked.sample_seed)
        )

        done = 0  # rows

        def predicted(block: Block) -> Predicted:
            nonlocal done
            inputs = self._inputs(block, what, asked.extrapolate)._replace(first=done)
            done += len(inputs.x)
            mean, sd = users_moments(of_moments, outputs, inputs, what, noise)
            samples = None
            if of_samples is not None:
                samples = to_numpy(users_samples(of_samples, outputs, inputs, what, sample_noise))
            return Predicted(to_numpy(mean), to_numpy(sd), samples)

        return predicted

    def _inputs(self, block: Block, what: What, extrapolate: bool) -> Inputs:
        """A block in the model's units, or an error that names what is wrong with it."""
        parts: Mapping[str, ArrayLike] = block if isinstance(block, Mapping) else {"x": block}
        if "x" not in parts:
            raise ModelError(f"a block has {', '.join(parts) or 'nothing'}; it needs x, the control inputs")
        columns, low, width = self.problem.runs_columns, self.scaling.low, self.scaling.width
        d1, device = self.scaling.controls, self.model.kappa.device
        values = _matrix("x", parts["x"], columns["x"])
        _check_bounds("x", values, columns["x"], extrapolate)
        x = ((torch.from_numpy(values).to(device) - low[:d1]) / width[:d1]).to(self.scaling.dtype)
        t = noise = None
        if what in AT_T and "t" in parts:
            chosen = np.asarray(by_name("t", parts["t"], columns["t"]))
            if chosen.shape == (len(columns["t"]),):  # one point for all rows
                chosen = np.broadcast_to(chosen, (len(values), len(columns["t"])))
            chosen = _matrix("t", chosen, columns["t"], len(values))
            _check_bounds("t", chosen, columns["t"], extrapolate)
            t = (torch.from_numpy(chosen).to(device) - low[d1:]) / width[d1:]
        if what == "observation" and "noise" in parts:
            if not self.model.likelihood_y.takes_noise:
                raise ModelError(f"noise is given, but a {self.model.likelihood_y.kind} likelihood has none to add to")
            own = _matrix("noise", parts["noise"], columns["z"], len(values))
            if (own < 0).any() or np.isinf(own).any():
                raise ModelError(f"noise ranges from {own.min():g} to {own.max():g}; accepted: standard deviations")
            noise = torch.from_numpy(own).to(device)
        return Inputs(x, t, noise)

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        """Writes `posterior.nc` and then `posterior.safetensors`, each in one step: where the latter is, both are."""
        from vcal_dist.inference_data import to_inference_data, write_netcdf

        write_netcdf(Path(directory) / DRAWS_FILE, to_inference_data(self))
        tensorfile.write(Path(directory) / FILE, self._tree())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The posterior in a directory, or in its file, on the CPU. Nothing in the file is run as code."""
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        tree = tensorfile.read(path)
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise ModelError(f"{path} is a file of vcal-dist, but not a posterior")
        if type(tree.get("schema")) is not int or tree["schema"] not in READ:
            raise ModelError(
                f"{path} has schema {tree.get('schema')}; this version of vcal-dist reads schemas 1 and 2: "
                "use the one that wrote it"
            )
        try:
            problem = parse_problem(tree["problem"], source=str(path))
            return cls._from_tree(tree, problem, torch.device("cpu"))
        except KeyError as error:
            raise Malformed(f"{path} is not a whole posterior: it has no {error}") from error
        except MISFITS as error:  # it may be a stranger's, and say anything
            why = " ".join(str(error).split())  # torch and pydantic take several lines
            raise Malformed(f"{path} is not a sound posterior: {why}") from error

    def _tree(self) -> dict[str, Any]:
        """Everything, as `tensorfile` keeps it."""
        outputs = self.scaling.outputs
        return {
            "format": FORMAT,
            "schema": SCHEMA,
            "problem": self.problem.model_dump(mode="json"),
            "scaling": {
                "transforms": _TRANSFORMS.dump_python(outputs.transforms, mode="json"),
                "mean": outputs.mean,
                "sd": outputs.sd,
            },
            "model": {
                "settings": _MODEL.dump_python(self.model.settings, mode="json"),
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "state": self.model.state_dict(),
            },
            "components": [to_state(q) for q in self.components],
            "log_weights": self.log_weights,
            "record": self.record,
            "validation": None if self.validation is None else list(self.validation),
        }

    @classmethod
    def _from_tree(cls, tree: dict[str, Any], problem: Problem, device: torch.device) -> Self:
        names = [output.name for output in problem.outputs]
        scaled, described, dtype = tree["scaling"], tree["model"], DTYPES[tree["model"]["dtype"]]
        transforms = _TRANSFORMS.validate_python(scaled["transforms"])
        scaling = Scaling(problem, OutputScaling(transforms, scaled["mean"], scaled["sd"], names), dtype)
        settings = _MODEL.validate_python(described["settings"])
        check_record(tree["record"])
        if not tensorfile.is_finite(
            [scaled, described, tree["components"], tree["log_weights"], tree.get("validation")]
        ):
            raise Malformed("it holds numbers that are not finite")
        asked, held = numbers_in(settings, len(problem.control_inputs)), sum(map(Tensor.numel, tensorfile.leaves(tree)))
        if asked > ALWAYS + 4 * held:
            raise Malformed(f"its settings ask for a model of {asked:,} numbers, the file holds {held:,}")
        prior = ThetaPrior.from_problem(problem)
        model = CalibrationModel(len(problem.control_inputs), prior, len(names), settings, dtype=dtype)
        model.adopt(described["state"])
        components = [_component(part, model) for part in tree["components"]]
        log_weights = tree["log_weights"]
        if log_weights.shape != (len(components),) or not components:
            raise ModelError(f"there are {len(components)} components, and log weights {tuple(log_weights.shape)}")
        for part in (scaling, model, *components):
            assert isinstance(part, nn.Module)
            part.to(device).requires_grad_(False)
        for q in components:
            _check_prediction(model, q)
        log_weights = log_weights.detach().double().to(device).log_softmax(0)
        kept = tree.get("validation")
        validation = None if kept is None else _validation(kept, len(names), device)
        return cls(scaling, model, components, log_weights, copy.deepcopy(tree["record"]), validation)


def _component(state: dict[str, Any], model: CalibrationModel) -> Weights:
    shape = tuple(state["shape"])
    if shape != (model.prior.dim, model.outputs, model.width):
        raise ModelError(
            f"a component has {shape[0]} parameters, {shape[1]} outputs and {shape[2]} weights; the model has "
            f"{model.prior.dim}, {model.outputs} and {model.width}"
        )
    return from_state(state)


@torch.no_grad()
def _check_prediction(model: CalibrationModel, q: Weights) -> None:
    """Raises where finite numbers make a model that has none at the centre of the inputs, or shapes do not fit."""
    theta, _ = q.theta_moments()
    theta = theta.double()[None]
    x = torch.full((1, model.controls), 0.5, dtype=model.dtype, device=theta.device)
    found = model.predict(q, x, theta, model.rows_of_theta(theta, 1), None)
    if not bool((found.mean + found.var).isfinite().all()):
        raise Malformed("it predicts what is not finite")


def _validation(kept: Sequence[Tensor], outputs: int, device: torch.device) -> Validation:
    found = Validation(*(part.to(device) for part in kept))
    if found.row.ndim != 1 or not found.mean.shape == found.sd.shape == (len(found.row), outputs):
        raise Malformed(f"its validation has the shapes {[tuple(part.shape) for part in kept]}")
    return found


def _matrix(name: str, values: ArrayLike, columns: Sequence[Column], rows: int | None = None) -> Array:
    """Values as (rows, columns); a single column may come without its dimension, and a table's are found by name."""
    try:
        matrix = np.array(by_name(name, values, columns), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ModelError(f"{name} is not an array of numbers ({error})") from None
    if matrix.ndim == 1 and len(columns) == 1:
        matrix = matrix[:, None]
    if matrix.ndim != 2 or matrix.shape[1] != len(columns) or rows not in (None, len(matrix)):
        names = ", ".join(column.name for column in columns)
        raise ModelError(
            f"{name} has shape {np.shape(values)}; accepted: ({'rows' if rows is None else rows}, {len(columns)}), "
            f"a column for each of {names}"
        )
    return matrix


def _check_bounds(name: str, values: Array, columns: Sequence[Column], extrapolate: bool) -> None:
    if extrapolate:
        columns = [Column(name=column.name) for column in columns]
    faults, _ = find_faults(values, columns)
    if faults:
        cure = (
            "correct them" if extrapolate else "correct them, or predict with extrapolate=True where there are no data"
        )
        raise ModelError(f"{name}: {'; '.join(map(str, faults))} (rows counted from 0): {cure}")
