"""The configuration: what is accepted, what an error says, and that it survives being written down."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.streaming import parse_memory
from vcal_dist.calibration import Discrepancy, ModelSettings
from vcal_dist.config import CheckpointSettings, Config, DataSettings, DeviceSettings, Generate
from vcal_dist.errors import ConfigError
from vcal_dist.features import FeatureSettings, Frequencies, Kernel, Lengthscales
from vcal_dist.gp import GPSettings
from vcal_dist.likelihoods import LikelihoodKind, LikelihoodSettings
from vcal_dist.objective import Samples
from vcal_dist.plan import Family, FitSettings, StageSettings
from vcal_dist.transforms import TransformSettings


def nested(dotted: str, value: Any) -> dict[str, Any]:
    """A configuration with one key beside the store."""
    for key in reversed(dotted.split(".")):
        value = {key: value}
    return {"store": "s.zarr"} | value


def refusal(data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.parse(data, source="mine.yaml")
    return str(caught.value)


def test_only_the_store_is_required() -> None:
    assert Config.parse({"store": "s.zarr"}) == Config(store="s.zarr")
    assert "store: required, but missing" in refusal({})


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("sed", 1, "sed: unknown key (did you mean 'seed'?); accepted: store, output, seed, "),
        (
            "fit.emulator.rat",
            0.1,
            "fit.emulator.rat: unknown key (did you mean 'rate'?); accepted: steps, epochs, rate, ",
        ),
        ("model.eta.features.kernle", "gaussian", "model.eta.features.kernle: unknown key (did you mean 'kernel'?)"),
        ("model.likelihood_y.nose", 1, "model.likelihood_y.nose: unknown key (did you mean 'noise'?)"),
        (
            "transforms.flow.kid",
            "log",
            "transforms.flow.kid: unknown key (did you mean 'kind'?); accepted: kind, power",
        ),
        # An output may be called as a key of its transform is.
        (
            "transforms.kind.kid",
            "log",
            "transforms.kind.kid: unknown key (did you mean 'kind'?); accepted: kind, power",
        ),
        (
            "fit.weights",
            "colapsed",
            "fit.weights: got 'colapsed' (did you mean 'collapsed'?); accepted: collapsed, fullrank, meanfield",
        ),
        (
            "transforms.flow.kind",
            "lgo",
            "transforms.flow.kind: got 'lgo' (did you mean 'log'?); accepted: none, sqrt, log, boxcox",
        ),
        ("generate.example", "hole", "generate.example: got 'hole' (did you mean 'borehole'?); accepted: borehole"),
        # Types: nothing is converted.
        ("seed", "3", "seed: got '3'; accepted: a whole number"),
        ("seed", True, "seed: got True; accepted: a whole number"),
        ("seed", 3.5, "seed: got 3.5; accepted: a whole number"),
        ("fit.emulator.steps", True, "fit.emulator.steps: got True; accepted: a whole number, or null"),
        ("fit.emulator.rate", "1e-3", "fit.emulator.rate: got '1e-3'; accepted: a number, or null"),
        ("fit.rho", True, "fit.rho: got True; accepted: a number"),
        ("model.free_kappa", 1, "model.free_kappa: got 1; accepted: true or false"),
        ("model.eta.hidden", 8, "model.eta.hidden: got 8; accepted: a list"),
        ("model.eta.hidden", [8, 8.5], "model.eta.hidden[1]: got 8.5; accepted: a whole number"),
        ("model.eta", 8, "model.eta: got 8; accepted: a mapping with the keys features, lengthscale, "),
        (
            "generate",
            5,
            "generate: got 5; accepted: a mapping with the keys example, runs, observations, seed, or null",
        ),
        ("generate.runs", 1e6, "generate.runs: got 1000000.0 (did you mean 1000000?); accepted: a whole number"),
        ("transforms", [], "transforms: got []; accepted: a mapping"),
        ("store", 5, "store: got 5; accepted: a text"),
        ("store", "", "store: string should have at least 1 character, got ''"),
        ("output", 5, "output: got 5; accepted: a text, or null"),
        ("fit.theta.samples", [1, 2, 3], "fit.theta.samples: got [1, 2, 3]; accepted: 2 values at most, or null"),
        ("fit.theta.samples", {"theta": "2"}, "fit.theta.samples.theta: got '2'; accepted: a whole number"),
        ("data.resident", "yes", "data.resident: got 'yes'; accepted: auto, or true or false"),
        ("devices.devices", "al", "devices.devices: got 'al'; accepted: auto, or a whole number"),
        ("devices.devices", True, "devices.devices: got True; accepted: auto, or a whole number"),
        ("data.memory", 1.5, "data.memory: got 1.5; accepted: a text, or a whole number"),
        # Ranges.
        ("seed", -1, "seed: got -1; accepted: 0 or more"),
        ("seed", 2**63, "seed: got 9223372036854775808; accepted: less than 9223372036854775808"),
        ("devices.devices", 0, "devices.devices: got 0; accepted: auto, or 1 or more"),
        ("devices.threads", 0, "devices.threads: got 0; accepted: 1 or more, or null"),
        ("data.holdout", 0.6, "data.holdout: got 0.6; accepted: 0.5 or less"),
        ("data.holdout", -0.1, "data.holdout: got -0.1; accepted: 0 or more"),
        ("data.holdout_rows", 0, "data.holdout_rows: got 0; accepted: 1 or more"),
        ("checkpoints.every_seconds", 0, "checkpoints.every_seconds: got 0; accepted: greater than 0, or null"),
        (
            "checkpoints.every_seconds",
            float("nan"),
            "checkpoints.every_seconds: got nan; accepted: a finite number, or null",
        ),
        ("record_every", 0, "record_every: got 0; accepted: 1 or more"),
        # What the settings themselves check, at the key that they name.
        ("model.eta.features.features", 101, "model.eta.features.features: features = 101 is odd"),
        ("model.delta.amplitude", -1, "model.delta.amplitude: amplitude is -1.0; accepted: a positive number"),
        ("fit.rho", float("nan"), "fit.rho: rho is nan; accepted: above 0 and up to 1"),
        ("fit.joint", {"steps": 3, "epochs": 2}, "fit.joint.steps: steps is 3 and epochs is 2.0; give one of them"),
        ("fit.everything.steps", 9, "fit.everything: everything is no stage of the weights 'collapsed'"),
        ("transforms.flow.kind", "boxcox", "transforms.flow: transform boxcox needs a finite power"),
        ("data.memory", "lots", "data.memory: memory is 'lots'; accepted: a number of bytes, or a text such as"),
        ("data.memory", " ", "data.memory: memory is ' '; accepted"),
        ("data.memory", "1e400 GB", "data.memory: memory is '1e400 GB'; accepted"),
        ("data.memory", -1, "data.memory: memory is '-1'; accepted"),
        (
            "data.scheduler",
            "thread",
            "data.scheduler: scheduler is 'thread' (did you mean 'threads'?); accepted: threads, synchronous, or",
        ),
        (
            "devices",
            {"accelerator": "cpu", "backend": "nccl"},
            "devices.backend: backend is 'nccl', which needs GPUs; accepted with 'cpu': auto, gloo",
        ),
    ],
)
def test_an_error_is_one_line_with_key_value_and_what_is_accepted(key: str, value: Any, line: str) -> None:
    head, *lines = refusal(nested(key, value)).splitlines()
    assert head == "mine.yaml is not a valid configuration:"
    assert len(lines) == 1
    assert lines[0].startswith(f"  - {line}")


def test_all_mistakes_are_told_at_once() -> None:
    data = {
        "seed": "x",
        "fit": {"rat": 1, "theta": {"steps": -1}},
        "data": {"resident": 3, "memory": "none"},
        "transforms": {"flow": {"kind": "sin"}},
    }
    lines = refusal(data).splitlines()[1:]
    keys = {line.removeprefix("  - ").partition(":")[0] for line in lines}
    assert keys == {
        *("store", "seed", "fit.rat", "fit.theta.steps", "data.resident", "data.memory", "transforms.flow.kind")
    }
    assert len(lines) == len(keys)


@pytest.mark.parametrize("data", [[], "store", 3, None])
def test_what_is_no_mapping_is_refused(data: Any) -> None:
    assert refusal(data).startswith("mine.yaml: expected a mapping with the keys store, output, ")


@pytest.mark.parametrize("value", [{(1, 2): 3}, {1, 2}, b"bytes", 10**5000], ids=["key", "set", "bytes", "number"])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    assert "mine.yaml holds what a configuration cannot" in refusal({"store": "s.zarr", "transforms": value})


def test_a_mapping_that_holds_itself_is_refused() -> None:
    data: dict[str, Any] = {"store": "s.zarr"}
    data["fit"] = data
    assert "Circular" in refusal(data)


def test_a_key_that_is_given_leaves_the_others_of_its_place_alone() -> None:
    # δ's defaults are not those of any other process, and the features of η are not those of δ.
    default = ModelSettings()
    config = Config.parse(nested("model.delta.features.features", 40))
    assert config.model == replace(default, delta=replace(default.delta, features=replace(DELTA, features=40)))
    config = Config.parse(nested("model.eta.features.features", 40))
    assert config.model.eta.features == FeatureSettings(features=40, frequencies="learned")
    config = Config.parse(nested("model.delta.features.constant", None))
    assert config.model.delta.features == replace(DELTA, constant=None)


DELTA = ModelSettings().delta.features


@pytest.mark.parametrize("section", ["model", "model.eta", "fit", "fit.emulator", "data", "transforms", "generate"])
def test_a_section_that_holds_nothing_is_left_out(section: str) -> None:
    # So YAML reads a heading whose lines are all commented out.
    assert Config.parse(nested(section, None)) == Config(store="s.zarr")


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        ("fit.rho", 1, 1.0),
        ("model.eta.hidden", [8, 8], (8, 8)),
        ("fit.emulator.samples", [4, 2], Samples(4, 2)),
        ("fit.emulator.samples", {"hidden": 3}, Samples(1, 3)),
        ("fit.emulator.epochs", 2, 2.0),
        ("data.memory", 10**9, 10**9),
        ("data.memory", "512 MiB", "512 MiB"),
        ("data.resident", False, False),
        ("data.scheduler", "tcp://10.0.0.1:8786", "tcp://10.0.0.1:8786"),
        ("data.scheduler", "synchronous", "synchronous"),
        ("devices.devices", 2, 2),
        ("checkpoints.every_seconds", None, None),
        ("transforms.flow", {"kind": "boxcox", "power": 0.5}, TransformSettings(kind="boxcox", power=0.5)),
    ],
)
def test_values_that_are_accepted(key: str, value: Any, parsed: Any) -> None:
    found: Any = Config.parse(nested(key, value))
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == parsed
    assert type(found) is type(parsed)


def test_settings_do_not_change_afterwards() -> None:
    config = Config(store="s.zarr")
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1  # type: ignore[misc]


# --- written down and read again ------------------------------------------------------------------------------------

positive = st.floats(1e-6, 1e6)
count = st.integers(1, 10**9)
seed = st.integers(0, 2**63 - 1)
text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def word(literal: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(get_args(literal))


features = st.builds(
    FeatureSettings,
    kernel=word(Kernel),
    features=st.integers(1, 500).map(lambda half: 2 * half),
    lengthscales=word(Lengthscales),
    orthogonal=st.booleans(),
    quasi=st.booleans(),
    frequencies=word(Frequencies),
    constant=maybe(positive),
    linear=maybe(positive),
)
processes = st.builds(
    GPSettings,
    features=features,
    lengthscale=maybe(positive),
    amplitude=positive,
    hidden=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    hidden_features=features,
    mean=st.sampled_from(["identity", "linear", "zero"]),
)
likelihoods = st.builds(
    LikelihoodSettings,
    kind=word(LikelihoodKind),
    noise=st.floats(1e-3, 10),
    floor=st.floats(1e-9, 1e-4),
    learn_noise=st.booleans(),
    degrees=st.floats(2.5, 50),
)
models = st.builds(
    ModelSettings,
    eta=processes,
    discrepancy=word(Discrepancy),
    delta=processes,
    likelihood_z=likelihoods,
    likelihood_y=likelihoods,
    seed=st.integers(0, 2**31),
)
stages = st.builds(
    StageSettings,
    epochs=maybe(st.floats(0, 100)),
    rate=maybe(positive),
    batch_runs=maybe(count),
    samples=maybe(st.builds(Samples, st.integers(1, 9), st.integers(1, 9))),
)
fits = st.builds(FitSettings, weights=word(Family), emulator=stages, rho=st.floats(0.001, 1), starts=count)
transforms = st.sampled_from([TransformSettings(kind="log"), TransformSettings(kind="boxcox", power=-0.5)])
configs = st.builds(
    Config,
    store=text,
    output=maybe(text),
    seed=seed,
    generate=maybe(st.builds(Generate, runs=count, observations=count, seed=seed)),
    model=models,
    transforms=st.dictionaries(st.text(max_size=5), transforms, max_size=2),
    fit=fits,
    data=st.builds(
        DataSettings,
        memory=st.sampled_from(["1 GB", "300 MiB", 10**8]),
        resident=st.sampled_from(["auto", True, False]),
        holdout=st.floats(0, 0.5),
    ),
    devices=st.builds(DeviceSettings, devices=st.just("auto") | count, threads=maybe(count)),
    checkpoints=st.builds(CheckpointSettings, every_steps=maybe(count), every_seconds=maybe(positive)),
    record_every=count,
)
SCHEMA = Config.schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


@settings(max_examples=100, deadline=None)
@given(configs)
def test_a_configuration_survives_json(config: Config) -> None:
    plain = config.plain()
    again = Config.parse(json.loads(json.dumps(plain)))
    assert again == config
    assert again.plain() == plain
    VALIDATOR.validate(plain)


def test_numbers_given_as_integers_are_written_without_complaint() -> None:
    config = Config(store="s.zarr", model=ModelSettings(delta=GPSettings(features=FeatureSettings(constant=1))))
    assert Config.parse(config.plain()) == config


def test_keys_stand_in_the_order_of_their_declaration() -> None:
    shuffled = {"seed": 1, "fit": {"starts": 2, "weights": "fullrank"}, "store": "s.zarr"}
    plain = Config.parse(shuffled).plain()
    assert list(plain) == list(Config.model_fields)
    assert list(plain["fit"])[:2] == ["weights", "emulator"]


# --- the schema -----------------------------------------------------------------------------------------------------


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sed", 1),
        ("fit.emulator.rat", 0.1),
        ("fit.weights", "colapsed"),
        ("seed", "3"),
        ("seed", -1),
        ("fit.emulator.steps", True),
        ("model.eta.hidden", [8, 8.5]),
        ("transforms.flow.kind", "lgo"),
        ("data.holdout", 0.6),
        ("devices.devices", "al"),
        ("fit.theta.samples", {"thta": 2}),
        ("generate", 5),
    ],
)
def test_the_schema_refuses_what_parsing_refuses(key: str, value: Any) -> None:
    assert not VALIDATOR.is_valid(nested(key, value))
    assert refusal(nested(key, value))


@pytest.mark.parametrize("samples", [[4, 2], [4], {"theta": 4}, None])
def test_the_schema_accepts_samples_as_a_list_and_by_name(samples: Any) -> None:
    assert VALIDATOR.is_valid(nested("fit.emulator.samples", samples))
    assert Config.parse(nested("fit.emulator.samples", samples))


def test_the_schema_describes_sections_and_keys() -> None:
    assert all(part["description"] for part in SCHEMA["$defs"].values())
    assert SCHEMA["properties"]["store"]["description"] == "path or URL of the Zarr store"
    described = SCHEMA["$defs"]["FitSettings"]["properties"]["free_emulator"]["description"]
    assert described == "whether η's features move in the joint stage"
    assert ">>>" not in json.dumps(SCHEMA)


def test_the_schema_states_the_defaults_that_parsing_uses() -> None:
    defaults = {name: key["default"] for name, key in SCHEMA["properties"].items() if "default" in key}
    assert set(defaults) == set(Config.model_fields) - {"store", "transforms"}
    assert Config.parse({"store": "s.zarr"} | defaults) == Config(store="s.zarr")
    # Features of η are learned and those of δ fixed: neither is the default of features.
    assert "default" not in SCHEMA["$defs"]["FeatureSettings"]["properties"]["frequencies"]
    assert SCHEMA["$defs"]["FeatureSettings"]["properties"]["kernel"]["default"] == "gaussian"


def test_memory_means_what_it_means_to_the_stream() -> None:
    assert parse_memory(Config(store="s.zarr").data.memory) == 10**9
    assert parse_memory(" 2 GiB\n") == 2 * 2**30
