"""Configuration files: YAML, overrides, paths, and the one that comes with the package."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from jobs.config import load, resolve
from vcal_dist.calibration import ModelSettings
from vcal_dist.config import Config, Generate
from vcal_dist.errors import ConfigError
from vcal_dist.plan import COLLAPSED, FitSettings, StageSettings, Totals
from vcal_dist.run_directory import begin
from vcal_dist.transforms import TransformSettings

BOREHOLE = Path(str(files("jobs") / "configs" / "borehole.yaml"))


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(text: str) -> Path:
    path = Path("mine.yaml")
    path.write_text(text, encoding="utf-8")
    return path


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(written(text), overrides)
    return str(caught.value)


# --- the file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "value"),
    [("1e-3", 1e-3), ("1E3", 1e3), ("-2.5e2", -2.5e2), (".5e1", 5.0), ("1_0e+1", 100.0), ("1.0e-3", 1e-3), ("2", 2.0)],
)
def test_numbers_as_people_write_them(directory: Path, number: str, value: float) -> None:
    config = load(written(f"store: s\ntransforms: {{flow: {{kind: boxcox, power: {number}}}}}"))
    assert config.transforms == {"flow": TransformSettings(kind="boxcox", power=value)}


def test_a_quoted_number_is_a_text(directory: Path) -> None:
    assert "fit.rho: got '1e-3'; accepted: a number" in refusal("store: s\nfit: {rho: '1e-3'}")


@pytest.mark.parametrize("name", ["2024-01-31", "2024-01-31 10:00:00", "1e", "e5", "1e5x"])
def test_dates_and_half_numbers_are_texts(directory: Path, name: str) -> None:
    assert load(written(f"store: {name}")).store == str(directory / name)


def test_a_key_that_stands_twice_is_refused_with_its_line(directory: Path) -> None:
    said = refusal("store: s\nfit:\n  rho: 0.1\n  starts: 2\n  rho: 0.2\n")
    assert "the key 'rho' stands twice" in said
    assert 'in "mine.yaml", line 5' in said


def test_anchors_and_merges_share_settings(directory: Path) -> None:
    config = load(
        written(
            """
store: s
fit:
  emulator: &stage {rate: 0.5, steps: 7}
  theta: *stage
  joint: {<<: *stage, steps: 9}
"""
        ),
        ["fit.emulator.rate=0.25"],
    )
    assert config.fit.emulator == StageSettings(rate=0.25, steps=7)
    assert config.fit.theta == StageSettings(rate=0.5, steps=7)  # an override changes one place only
    assert config.fit.joint == StageSettings(rate=0.5, steps=9)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "mine.yaml is empty; a configuration has the keys store, output, "),
        ("# nothing\n", "mine.yaml is empty"),
        ("- store\n- s", "mine.yaml: expected a mapping with the keys store, output, "),
        ("store", "mine.yaml: expected a mapping"),
        ("store: [", "mine.yaml is not valid YAML"),
        ("store: s\n---\nstore: t", "mine.yaml is not valid YAML"),
        ("store: !!python/object/apply:os.system ['true']", "mine.yaml is not valid YAML"),
        ("store: !!timestamp 2024-01-31", "mine.yaml is not valid YAML"),
        ("store: !!int x", "mine.yaml is not valid YAML"),
        ("store: !!float ''", "mine.yaml is not valid YAML"),
        ("[1, 2]: s", "mine.yaml is not valid YAML"),
        ("store: &a [*a]", "contains itself"),
        ("store: " + 5000 * "[", "mine.yaml is not valid YAML"),
        ("stroe: s", "  - stroe: unknown key (did you mean 'store'?)"),
    ],
)
def test_files_that_are_no_configuration(directory: Path, text: str, said: str) -> None:
    assert said in refusal(text)


def test_a_missing_file_a_directory_and_a_binary_file(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration nothing\.yaml: No such file"):
        load("nothing.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(directory)
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="UTF-8"):
        load("binary.yaml")


# --- overrides ------------------------------------------------------------------------------------------------------


def test_overrides_replace_and_add_keys_and_the_last_one_wins(directory: Path) -> None:
    overrides = [
        "fit.emulator.steps=200",
        "fit.emulator.steps = 300",
        "model.eta.hidden=[8, 8]",
        "model.delta.features.constant=null",
        "transforms.flow.kind=log",
        "transforms={flow: {kind: sqrt}, depth: {kind: log}}",
        "transforms.depth.kind=none",
        "fit.rho=1e-2",
        "store=s3://bucket/a=b.zarr",
        "generate.runs=500",
    ]
    config = load(written("store: s\nfit: {emulator: {rate: 0.5}}\ngenerate:"), overrides)
    assert config.fit.emulator == StageSettings(steps=300, rate=0.5)
    assert config.model.eta.hidden == (8, 8)
    assert config.model.delta.features.constant is None
    assert config.model.delta.amplitude == ModelSettings().delta.amplitude
    assert config.transforms == {"flow": TransformSettings(kind="sqrt"), "depth": TransformSettings()}
    assert config.fit.rho == 0.01
    assert config.store == "s3://bucket/a=b.zarr"
    assert config.generate == Generate(runs=500)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("other.yaml", "the override 'other.yaml' is no key=value"),
        ("=3", "the override '=3' is no key=value"),
        ("fit..steps=3", "the override 'fit..steps=3' is no key=value"),
        ("seed.x=1", "goes inside seed, which is 4 and no mapping"),
        ("model.eta.hidden.0=8", "goes inside model.eta.hidden, which is [1] and no mapping"),
    ],
)
def test_an_override_that_cannot_be_applied_is_answered_with_an_example(
    directory: Path, override: str, said: str
) -> None:
    answer = refusal("store: s\nseed: 4\nmodel: {eta: {hidden: [1]}}", override)
    assert said in answer
    assert "fit.emulator.steps=200" in answer


def test_an_override_without_a_value_is_answered_with_its_own_key(directory: Path) -> None:
    answer = refusal("store: s", "fit.theta.steps")
    assert "the override 'fit.theta.steps' has no value; write it as fit.theta.steps=VALUE" in answer
    assert "fit.emulator" not in answer


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("fit.rho=[", "the override 'fit.rho=[' is not valid YAML"),
        ("fit.emulator={rate: 1, rate: 2}", "the key 'rate' stands twice"),
        ("fit.roh=1", "mine.yaml with fit.roh=1 is not a valid configuration:\n  - fit.roh: unknown key"),
    ],
)
def test_the_value_of_an_override_is_checked_as_a_file_is(directory: Path, override: str, said: str) -> None:
    assert said in refusal("store: s", override)


# --- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        ("data/s.zarr", "{here}/data/s.zarr"),
        ("/data/s.zarr", "/data/s.zarr"),
        ("~/s.zarr", "{home}/s.zarr"),
        ("s3://bucket/s.zarr", "s3://bucket/s.zarr"),
        ("file:///data/s.zarr", "file:///data/s.zarr"),
    ],
)
def test_paths_become_absolute_and_urls_stay(
    directory: Path, monkeypatch: pytest.MonkeyPatch, store: str, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    (directory / "deep").mkdir()
    path = directory / "deep" / "mine.yaml"
    path.write_text(f"store: {store}\noutput: {store}", encoding="utf-8")
    config = load(path)  # the file's own directory does not matter
    assert config.store == config.output == expected.format(here=directory, home="/home/somebody")


def test_the_home_of_nobody_is_refused(directory: Path) -> None:
    assert "cannot tell where '~no-such-user/s' is" in refusal("store: ~no-such-user/s")


def test_the_run_directory_is_named_after_the_file_or_the_store(directory: Path) -> None:
    assert load(written("store: other.zarr")).output == str(directory / "runs" / "mine")
    assert resolve(Config(store="s3://bucket/other.zarr")).output == str(directory / "runs" / "other")


# --- written and read again -----------------------------------------------------------------------------------------


def test_the_configuration_in_a_run_directory_is_loaded_again(directory: Path) -> None:
    overrides = ["model.eta.hidden=[3]", "fit.emulator.samples=[2, 1]", "data.memory=12345", "fit.emulator.rate=1e-5"]
    config = load(BOREHOLE, [*overrides, "transforms.flow={kind: boxcox, power: 1e-3}"])
    begin(config, directory / "run", (1, 1))
    assert load("run/config.yaml") == config
    assert list(yaml.safe_load(Path("run/config.yaml").read_text(encoding="utf-8"))) == list(Config.model_fields)


# --- the file that comes with the package ---------------------------------------------------------------------------


def test_the_borehole_is_the_papers(directory: Path) -> None:
    config = load(BOREHOLE)
    assert config.generate == Generate(example="borehole", runs=10**6, observations=10**5)
    assert config.model.eta.features.features == config.model.delta.features.features == 100
    assert (config.store, config.output) == (f"{directory}/runs/borehole.zarr", f"{directory}/runs/borehole")


def test_the_values_in_the_borehole_file_are_the_defaults(directory: Path) -> None:
    config = load(BOREHOLE)
    default = Config(store=config.store, output=config.output, generate=config.generate, transforms=config.transforms)
    totals = Totals(10**6, 10**5)
    for name in COLLAPSED:
        stated, left_out = (
            fit.choose(name, totals, 1, 1, runs=True, observations=True) for fit in (config.fit, default.fit)
        )
        assert stated == left_out
    stages: dict[str, Any] = {name: getattr(config.fit, name) for name in COLLAPSED}
    assert config == default.model_copy(update={"fit": FitSettings(**stages)})


def test_the_borehole_file_satisfies_the_schema() -> None:
    validator = jsonschema.Draft202012Validator(Config.schema())
    assert list(validator.iter_errors(yaml.safe_load(BOREHOLE.read_text(encoding="utf-8")))) == []
