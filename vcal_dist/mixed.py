"""Several posteriors of the same data as one: Bayesian model averaging, kept in a directory.

    averaged = Averaged.by_evidence([Posterior.load(run) for run in ("runs/a", "runs/b")])
    averaged.weights, averaged.summary(), averaged.predict(x).mean
    averaged.save("runs/averaged")

averaged/
  members/0/, members/1/, …   the posteriors, as `Posterior.save` writes them
  posterior.nc                draws of θ for ArviZ
  mixture.json                what the members weigh; written last: where it is, everything is
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from storage import documents
from storage.errors import StoreError
from storage.places import LocalPlace
from storage.regular import open_regular
from storage.room import because
from vcal_dist.answers import Answers, Array, Asked, Block, Predicted, to_numpy
from vcal_dist.errors import ModelError
from vcal_dist.noise import GOLDEN
from vcal_dist.posterior import DRAWS_FILE, FILE, Posterior
from vcal_dist.predictive import allot
from vcal_dist.rows import LEAVE_ONE_OUT
from vcal_dist.theta import ThetaPosterior

FORMAT, SCHEMA = "vcal-dist mixture", 1
MIXTURE, MEMBERS = "mixture.json", "members"
MEMBER_OF_SAMPLE = 104  # in the keys of the noise
NEGLIGIBLE = 2.0**-53  # a weight that is lost when it is added to one


class Averaged(Answers):
    """Posteriors of the same data under different settings, averaged.

    What is known when no one model is known to be right is p(· | data) = Σ_m p(m | data) p(· | data, m), where
    p(m | data) ∝ p(data | m) for models that were equally probable before (Hoeting et al. 1999). So θ and predictions
    vary within the `members` and between them. `by_evidence` takes for log p(data | m) what training found: an
    estimate, or a bound from below, and then a member whose bound is looser weighs too little. Evidence adds up over
    rows: with many of them the best member often weighs nearly one.

    Weights are ∝ exp(log_weights), wherever those come from. In predictions, `draws` are those of each member.
    """

    def __init__(self, posteriors: Sequence[Posterior], log_weights: Sequence[float]) -> None:
        self.members = list(posteriors)
        self._given = [float(value) for value in log_weights]
        if not self.members or len(self._given) != len(self.members):
            raise ModelError(
                f"there are {len(self.members)} posteriors and {len(self._given)} log weights; give one for each, at "
                "least one"
            )
        for i, value in enumerate(self._given):
            if not math.isfinite(value):
                raise ModelError(f"the log weight of {_name(i, self.members[i])} is {value}; leave that posterior out")
        first = self.problem = self.members[0].problem
        for i, member in enumerate(self.members):
            differ = [key for key in type(first).model_fields if getattr(member.problem, key) != getattr(first, key)]
            if differ:
                raise ModelError(
                    f"{_name(i, member)} is of another problem than {_name(0, self.members[0])}, their "
                    f"{' and '.join(differ)} differ; average posteriors of one problem"
                )
        self.log_weights = torch.tensor(self._given, dtype=torch.float64).log_softmax(0)
        self.record = {"weights": self.weights.tolist(), "members": [member.record for member in self.members]}

    @classmethod
    def by_evidence(cls, posteriors: Sequence[Posterior]) -> Self:
        """Weights ∝ exp(bound), the bound on the log evidence of all rows that training has put into each record."""
        bounds = []
        for i, posterior in enumerate(posteriors):
            bound = posterior.record.get("bound")
            if isinstance(bound, bool) or not isinstance(bound, int | float) or not math.isfinite(bound):
                raise ModelError(
                    f"{_name(i, posterior)} has the bound {bound} on its evidence, no finite number (weights "
                    "'meanfield' have none); leave it out, or give log_weights"
                )
            bounds.append(float(bound))
            first, its = _taught_by(0, posteriors[0]), _taught_by(i, posterior)
            both = {key: (its.get(key), first.get(key)) for key in first | its}
            differ = [f"{key} is {one}, not {other}" for key, (one, other) in both.items() if one != other]
            if differ:
                raise ModelError(
                    f"{_name(i, posterior)} was trained on other rows than {_name(0, posteriors[0])}: "
                    f"{', '.join(differ)}; the evidence of different data says nothing of the models: train them on "
                    "the same"
                )
        return cls(posteriors, bounds)

    @property
    def weights(self) -> Array:
        """Of the members, (M,); they sum to one."""
        return to_numpy(self.log_weights.exp())

    @cached_property
    def theta(self) -> ThetaPosterior:
        """The posterior of θ: the components of all members, which share the prior and so θ̃."""
        parts = [member.theta for member in self.members]
        device = parts[0].means.device
        return ThetaPosterior(
            parts[0].prior,
            torch.cat([part.means.to(device) for part in parts]),
            torch.cat([part.covariances.to(device) for part in parts]),
            torch.cat([(part.log_weights.cpu() + w) for part, w in zip(parts, self.log_weights, strict=True)]),
        )

    def _made_of(self) -> str:
        return f"an average of {len(self.members)}, weights {', '.join(f'{w:.3g}' for w in self.weights)}"

    def _predictor(self, asked: Asked) -> Callable[[Block], Predicted]:
        """`asked.draws` are those of each member: its mean and sd are the ones that it gives itself."""
        places = [np.empty(0, np.intp)] * len(self.members)
        if asked.samples:  # their order within a member is random already
            key = (asked.sample_seed, MEMBER_OF_SAMPLE)
            places = [np.sort(part.numpy()) for part in allot(self.log_weights, asked.samples, key)]
        used = [m for m, weight in enumerate(self.weights) if weight > NEGLIGIBLE or len(places[m])]
        weights = self.weights[used, None, None] / self.weights[used].sum()  # (M, 1, 1)
        # Seeds of their own: members with the same features would draw the same functions.
        predictors = [
            self.members[m]._predictor(
                asked._replace(samples=len(places[m]), sample_seed=(asked.sample_seed + m * GOLDEN) % 2**63)
            )
            for m in used
        ]

        def predicted(block: Block) -> Predicted:
            parts = [predict(block) for predict in predictors]
            means, sds = np.stack([part.mean for part in parts]), np.stack([part.sd for part in parts])  # (M, B, K)
            mean = (weights * means).sum(0)
            # Var = E[var] + Var[mean]
            var = (weights * (np.square(sds) + np.square(means - mean))).sum(0)
            samples = np.empty((asked.samples, *mean.shape)) if asked.samples else None
            for m, part in zip(used, parts, strict=True):
                if samples is not None and part.samples is not None:
                    samples[places[m]] = part.samples
            return Predicted(mean, np.sqrt(var), samples)

        return predicted

    # --- files ------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        """Writes members, draws and then `mixture.json`, into a new directory or in place of a mixture."""
        from vcal_dist.inference_data import to_inference_data, write_netcdf

        place = LocalPlace(Path(directory))
        try:
            _make_room(place.path)
            for i, member in enumerate(self.members):
                member.save(place.path / MEMBERS / str(i))
            write_netcdf(place.path / DRAWS_FILE, to_inference_data(self))
            place.make_durable([f"{MEMBERS}/{i}/{FILE}" for i in range(len(self.members))])
            # As given: normalised once more, they would differ in the last bit.
            tree = {"format": FORMAT, "schema": SCHEMA, "log_weights": self._given}
            place.replace(MIXTURE, (json.dumps(tree, indent=2) + "\n").encode(), "")
        except (OSError, StoreError) as error:
            raise ModelError(f"cannot keep posteriors in {directory}: {error}; choose another path") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """The mixture in a directory, on the CPU. Nothing in the files is run as code."""
        path = Path(path)
        path = path / MIXTURE if path.is_dir() else path
        try:
            with open_regular(path) as file:
                tree = json.loads(file.read(documents.MOST_BYTES))
        except OSError as error:
            raise ModelError(f"cannot read {path}: {because(error)}") from error
        except (ValueError, RecursionError) as error:
            raise ModelError(
                f"{path} is not a whole JSON file ({error}); take it from where it was made once more"
            ) from error
        if not isinstance(tree, dict) or tree.get("format") != FORMAT:
            raise ModelError(f"{path} is a JSON file, but no mixture of posteriors")
        if tree.get("schema") != SCHEMA:
            raise ModelError(
                f"{path} has schema {tree.get('schema')}; this version of vcal-dist reads schema {SCHEMA}: "
                "use the one that wrote it"
            )
        given = tree.get("log_weights")
        if not isinstance(given, list) or not all(isinstance(value, float) for value in given):
            raise ModelError(f"{path} is not a sound mixture: log_weights is {given}; accepted: [-1.0, …]")
        members = [Posterior.load(path.parent / MEMBERS / str(i)) for i in range(len(given))]
        try:
            return cls(members, given)
        except ModelError as error:
            raise ModelError(f"{path} is not a sound mixture: {error}") from error


def _name(number: int, posterior: Posterior) -> str:
    """Its number, and where it was trained if it knows."""
    config = posterior.record.get("config")
    output = config.get("output") if isinstance(config, Mapping) else None
    return f"posterior {number}" + (f" ({output})" if output else "")


def _taught_by(number: int, posterior: Posterior) -> dict[str, Any]:
    """What says which rows a posterior has learnt from: how many there were, and which of them were kept out."""
    rows, config = posterior.record.get("rows"), posterior.record.get("config")
    if not isinstance(rows, Mapping):
        raise ModelError(f"the record of {_name(number, posterior)} does not say its 'rows'; give log_weights")
    found: dict[str, Any] = {f"the number of {table}": count for table, count in rows.items()}
    if isinstance(config, Mapping) and max(rows.values()) > LEAVE_ONE_OUT:
        found["data.holdout"] = share = config["data"]["holdout"]
        if share:
            found["data.holdout_rows"] = config["data"]["holdout_rows"]
    return found


def _make_room(directory: Path) -> None:
    """Removes a mixture, so that no crash leaves its weights beside other members; refuses what is none."""
    if not directory.exists():
        return
    own = (MIXTURE, MEMBERS, DRAWS_FILE)
    foreign = [f.name for f in directory.iterdir() if f.name not in own and f.suffix != ".partial"]
    if foreign:
        raise ModelError(
            f"the directory {directory} holds other things ('{foreign[0]}', …); a mixture needs one of its own: choose "
            "another path"
        )
    (directory / MIXTURE).unlink(missing_ok=True)
    if (directory / MEMBERS).exists():
        shutil.rmtree(directory / MEMBERS)
