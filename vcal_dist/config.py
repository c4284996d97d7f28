"""The configuration of a training run: everything that decides what it computes, on what, and where.

    config = Config.parse({"store": "borehole.zarr", "fit": {"emulator": {"steps": 200}}}, source="mine.yaml")

A key that is left out keeps its default, also inside a section: `model: {delta: {amplitude: 0.2}}` changes nothing else
of δ. The settings of the model and of the training are the dataclasses that the code itself works with. Nothing is
converted silently: "3" is not 3, and neither is true.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from storage.priors import Positive, Strict
from storage.streaming import DEFAULT_MEMORY, parse_memory
from storage.text import has_secret, redacted
from storage.validation import explain, show
from vcal_dist.calibration import ModelSettings
from vcal_dist.errors import ConfigError
from vcal_dist.objective import Samples
from vcal_dist.plan import FitSettings
from vcal_dist.transforms import TransformSettings

DRAFT = "https://json-schema.org/draft/2020-12/schema"
SCHEDULERS = ("threads", "synchronous")

Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # generators take no more


def _location(text: str) -> str:
    if has_secret(text):
        raise ValueError(
            f"{redacted(text)} holds a password or a signature, which would be kept in every file of the run; give it "
            "in the environment (AWS_…, or FSSPEC_<PROTOCOL>_PASSWORD) or in ~/.config/fsspec"
        )
    return text


Text = Annotated[str, Field(min_length=1)]
Location = Annotated[Text, AfterValidator(_location)]


def _memory(memory: str | int) -> str | int:
    parse_memory(memory)
    return memory  # as it was written


def _scheduler(scheduler: str) -> str:
    if scheduler in SCHEDULERS or ":" in scheduler:
        return _location(scheduler)
    near = get_close_matches(scheduler, SCHEDULERS, n=1)
    raise ValueError(
        f"scheduler is '{scheduler}'{f' (did you mean {near[0]!r}?)' if near else ''}; accepted: "
        f"{', '.join(SCHEDULERS)}, or the address of a Dask scheduler such as tcp://host:8786"
    )


class Section(Strict):
    """A part of the configuration."""

    model_config = ConfigDict(strict=True)


class Generate(Section):
    """A built-in example, of which the store is made when it does not exist yet."""

    example: Literal["borehole"] = "borehole"
    runs: Count = 1_000_000  # simulator runs
    observations: Count = 100_000  # field observations
    seed: Seed = 0  # of the example's inputs and noise


class DataSettings(Section):
    """How rows come from the store, and which of them judge in place of teaching."""

    memory: Annotated[str | int, AfterValidator(_memory)] = DEFAULT_MEMORY  # of each process for reading, e.g. 512 MB
    resident: Literal["auto"] | bool = "auto"  # whether scaled rows stay on the device; auto: when they fit
    holdout: Annotated[float, Field(ge=0, le=0.5)] = 0.05  # share of the rows that judges, and does not teach
    holdout_rows: Count = 2000  # such rows at most, of the runs and of the observations
    scheduler: Annotated[str, AfterValidator(_scheduler)] = "threads"  # or synchronous, or a Dask scheduler's address


class DeviceSettings(Section):
    """Where training runs: one process for each device."""

    accelerator: Literal["auto", "cpu", "gpu"] = "auto"  # auto: a CUDA GPU where there is one
    devices: Literal["auto"] | Count = "auto"  # on each node; auto: all GPUs, or one process on a CPU
    num_nodes: Count = 1
    backend: Literal["auto", "gloo", "nccl"] = "auto"  # how processes talk; auto: nccl between GPUs, gloo elsewhere
    precision: Literal["float32", "float64"] = "float32"  # of the features; sums over rows are float64 always
    threads: Count | None = None  # of each process; null: the machine's cores, shared out
    timeout: Positive = 600.0  # seconds that processes wait for each other before they give up

    @model_validator(mode="after")
    def _go_together(self) -> Self:
        if self.backend == "nccl" and self.accelerator == "cpu":
            raise ValueError("backend is 'nccl', which needs GPUs; accepted with 'cpu': auto, gloo")
        return self


class CheckpointSettings(Section):
    """When the state of training is saved; also at the end of every stage."""

    every_steps: Count | None = None  # null: by time only
    every_seconds: Positive | None = 60.0  # null: by steps only
    keep_best: bool = True  # beside the last one, the one with the lowest loss, smoothed, of its stage


class Config(Section):
    """A training run. Only the store is required."""

    store: Location  # path or URL of the Zarr store
    output: Location | None = None  # the run directory; null: runs/<name of the configuration file>
    seed: Seed = 0  # of batches, starts and samples
    generate: Generate | None = None  # what makes the store if there is none; null: it must exist
    model: ModelSettings = ModelSettings()
    transforms: dict[str, TransformSettings] = Field(default_factory=dict)  # of outputs, by name
    fit: FitSettings = FitSettings()
    data: DataSettings = DataSettings()
    devices: DeviceSettings = DeviceSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    record_every: Count = 20  # steps between rows of the metrics; fewer in short stages of θ

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: str = "the configuration") -> Self:
        """The configuration in a mapping, or an error that lists every mistake in it."""
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"{source}: expected a mapping with the keys {', '.join(cls.model_fields)}; got {show(data)}"
            )
        try:
            given = json.loads(json.dumps(dict(data)))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{source} holds what a configuration cannot ({error}); accepted: mappings with texts as keys, lists, "
                "texts, numbers, true, false and null"
            ) from None
        filled = _fill(given, _defaults(cls))
        try:
            # As JSON: strict there means that lists may become tuples and mappings dataclasses, but not "3" a number.
            return cls.model_validate_json(json.dumps(filled), strict=True)
        except ValidationError as error:
            raise ConfigError(f"{source} is not a valid configuration:\n{explain(error, cls, filled)}") from None

    def plain(self) -> dict[str, Any]:
        """Everything as texts, numbers, lists and mappings, with no key left out; `parse` makes an equal one of it."""
        return self.model_dump(mode="json")

    @classmethod
    def schema(cls) -> dict[str, Any]:  # type: ignore[override] # pydantic's own is deprecated
        """The JSON schema (draft 2020-12), for editors."""
        schema = cls.model_json_schema()
        samples = schema["$defs"]["Samples"]  # pydantic reads a mapping too, but does not say so
        named = dict(zip(Samples._fields, samples["prefixItems"], strict=True))
        schema["$defs"]["Samples"] = {
            "anyOf": [samples, {"type": "object", "properties": named, "additionalProperties": False}],
            "description": Samples.__doc__,
        }
        for part in _parts(cls(store="-", generate=Generate(), transforms={"-": TransformSettings()})):
            kind = type(part)
            described = schema if kind is cls else schema["$defs"][kind.__name__]
            described["description"] = inspect.cleandoc(kind.__doc__ or "").partition(">>>")[0].strip()
            comments = _comments(kind)
            for name, key in described["properties"].items():
                if name in comments:
                    key["description"] = comments[name]
                # A default that depends on the place, as of the features of η and of δ, stands with `model` only.
                value = getattr(part, name)
                if kind is not cls and key.get("default") != (list(value) if isinstance(value, tuple) else value):
                    key.pop("default", None)
        return {"$schema": DRAFT, **schema, "title": "Configuration of a vcal training run"}


def _fill(given: Any, default: Any) -> Any:
    """What is given, and the default of what it leaves out; a section that holds nothing leaves everything out."""
    if not isinstance(default, dict) or not isinstance(given, dict | None):
        return given
    given = given or {}
    return default | {key: _fill(value, default.get(key)) for key, value in given.items()}


def _defaults(config: type[Config]) -> dict[str, Any]:
    return config(store="-").model_dump(mode="json", exclude={"store"})


def _parts(part: Any) -> Iterator[Any]:
    """The sections and settings inside a configuration, itself included."""
    if isinstance(part, BaseModel) or is_dataclass(part):
        yield part
        for value in vars(part).values():
            yield from _parts(value)
    elif isinstance(part, dict):
        for value in part.values():
            yield from _parts(value)


def _comments(part: type) -> dict[str, str]:
    """What the source says beside each field."""
    return dict(re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(part), re.MULTILINE))
