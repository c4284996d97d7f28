"""Draws of θ as ArviZ knows them: groups `posterior` and `prior`, one variable for each parameter, in its unit.

A parameter's name is its variable's name, also with blanks or Greek letters. Only what NetCDF cannot hold changes:
control characters and "/" become "_", and "_" is added to ".", to "chain" and "draw" (the dimensions), and to a name
that another one would have become. The name as it was stands in the attribute `long_name`.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import ArrayLike

from storage.errors import StoreError
from storage.places import LocalPlace
from vcal_dist.errors import ModelError

if TYPE_CHECKING:
    import arviz

    from vcal_dist.answers import Answers


def import_arviz() -> Any:
    """ArviZ, which brings Matplotlib: seconds that only those pay who use it."""
    with warnings.catch_warnings():
        # Once a day ArviZ 0.x announces ArviZ 1: https://github.com/arviz-devs/arviz/issues/2491
        warnings.simplefilter("ignore", FutureWarning)
        import arviz
    return arviz


def to_inference_data(
    posterior: Answers, draws: int = 4000, seed: int = 0, log_likelihood: Mapping[str, ArrayLike] | None = None
) -> arviz.InferenceData:
    """Draws of the posterior and of the prior as one chain; they are independent.

    `log_likelihood` has an array (draws, rows) for each output.
    """
    import numpy as np

    inputs, prior = posterior.problem.calibration_inputs, posterior.theta.prior
    generator = torch.Generator().manual_seed(seed)
    tilde = torch.randn(draws, prior.dim, generator=generator, dtype=torch.float64)
    names = variable_names([v.name for v in inputs])
    groups: dict[str, Any] = {
        group: {name: values[None, :, j] for j, name in enumerate(names)}
        for group, values in (("posterior", posterior.sample(draws, seed)), ("prior", prior.theta(tilde).numpy()))
    }
    if log_likelihood is not None:
        given = {name: np.asarray(values, dtype=np.float64) for name, values in log_likelihood.items()}
        for name, values in given.items():
            if values.ndim != 2 or len(values) != draws:
                raise ModelError(f"the log likelihood of '{name}' has shape {values.shape}; accepted: ({draws}, rows)")
        groups["log_likelihood"] = {
            name: values[None] for name, values in zip(variable_names([*given]), given.values(), strict=True)
        }
    data = import_arviz().from_dict(
        **groups, attrs={"problem": posterior.problem.name, "vcal_dist_version": version("vcal-dist")}
    )
    for group in ("posterior", "prior"):
        for name, v in zip(names, inputs, strict=True):
            data[group][name].attrs |= {"units": v.unit, "description": v.description, "long_name": v.name}
    return data


def write_netcdf(path: Path, data: arviz.InferenceData) -> None:
    """Replaces a file in one step, like `tensorfile.write`.

    HDF5 writes into memory: where a disk fails below it, it raises several kinds of errors, or ends the process.
    """
    content, tree = io.BytesIO(), data.to_datatree()  # type: ignore[no-untyped-call]
    packed = {
        f"/{group}": {
            name: {"zlib": True} for name, values in tree[group].dataset.variables.items() if _is_number(values)
        }
        for group in tree.children
    }
    tree.to_netcdf(content, engine="h5netcdf", encoding=packed)
    try:
        LocalPlace(path.parent).replace(path.name, content.getvalue(), "")
    except StoreError as error:
        raise ModelError(str(error)) from error


def _is_number(values: Any) -> bool:
    return values.dtype.kind in "biuf"


def variable_names(names: Sequence[str]) -> list[str]:
    """Different names that NetCDF can hold, the same as given wherever it can.

    >>> variable_names(["rate θ", "chain", "a/b", "a_b"])
    ['rate θ', 'chain_', 'a_b_', 'a_b']
    """
    found: list[str] = []
    for name in names:
        safe = re.sub(r"[/\x00-\x1f\x7f]", "_", name)
        while safe in (".", "chain", "draw", *found) or (safe != name and safe in names):
            safe += "_"
        found.append(safe)
    return found
