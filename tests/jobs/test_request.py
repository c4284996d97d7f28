"""What is to run elsewhere is checked here, frozen, and spelled so that it says the same there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jobs.cli import main
from jobs.config import load
from jobs.submission.request import Request, request
from storage import strict_yaml
from tests.vcal_dist.training_kit import settings
from vcal_dist.errors import ConfigError

Written = Callable[..., Path]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    """A configuration in the directory that the command runs in."""
    monkeypatch.chdir(tmp_path)

    def write(name: str = "mine.yaml", **sections: Any) -> Path:
        path = tmp_path / name
        path.write_text(yaml.safe_dump(settings("data.zarr", "out", **sections)), encoding="utf-8")
        return path

    return write


def test_the_configuration_is_frozen_with_overrides_and_absolute_paths(written: Written, tmp_path: Path) -> None:
    path = written()
    asked = request(["train", str(path), "fit.emulator.steps=9", "output=elsewhere"])
    path.write_text("store: another.zarr", encoding="utf-8")
    frozen = tmp_path / "frozen.yaml"
    frozen.write_text(asked.text, encoding="utf-8")
    config = load(frozen)
    assert (config.store, config.output) == (str(tmp_path / "data.zarr"), str(tmp_path / "elsewhere"))
    assert config.plain()["fit"]["emulator"]["steps"] == 9
    assert config.plain() == asked.plain
    assert asked.output == str(tmp_path / "elsewhere")


def test_options_keep_their_spelling_wherever_they_stand(written: Written) -> None:
    path = str(written())
    asked = request(["train", "--workers", "2:4", path, "--json", "record_every=2", "--gpus-per-worker=0.5"])
    assert asked.arguments("c.yaml") == [
        *("train", "c.yaml", "--json", "--workers", "2:4", "--gpus-per-worker", "0.5")  # in the command's own order
    ]
    assert asked.plain["record_every"] == 2
    assert asked.on_ray().options == ("--on", "ray", *asked.options)


@pytest.mark.parametrize("place", ["here", "ray"])
def test_where_to_train_is_kept_if_it_was_said(place: str, written: Written) -> None:
    asked = request(["train", str(written()), "--on", place])
    assert asked.on_ray().options == asked.options == ("--on", place)


def test_a_sweep_keeps_its_section_and_needs_no_word_for_ray(written: Written, tmp_path: Path) -> None:
    space = {"fit.emulator.rate": {"loguniform": [0.01, 0.1]}}
    path = written(sweep={"trials": 2, "space": space})
    asked = request(["sweep", str(path), "sweep.trials=3", "--collect"])
    assert (asked.command, asked.options, asked.output) == ("sweep", ("--collect",), str(tmp_path / "out"))
    assert asked.on_ray() == asked
    frozen = tmp_path / "frozen.yaml"
    frozen.write_text(asked.text, encoding="utf-8")
    again = request(["sweep", str(frozen)])
    assert again.plain == asked.plain
    assert again.plain["sweep"]["trials"] == 3
    assert list(again.plain["sweep"]["space"]) == list(space)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "cannot submit nothing"),
        (["predict", "x"], "cannot submit 'predict'; accepted: train or sweep"),
        (["train"], "train needs a configuration file"),
        (["train", "--schema"], "--schema prints"),
        (["train", "nowhere.yaml"], "cannot read the configuration nowhere.yaml"),
        (["train", "mine.yaml", "fit.emulater.steps=3"], "emulater"),
    ],
)
def test_what_cannot_be_submitted(arguments: list[str], message: str, written: Written) -> None:
    written()
    with pytest.raises(ConfigError, match=re.escape(message)):
        request(arguments)


@pytest.mark.parametrize("option", [["--worker", "2"], ["--retries", "-1"], ["--on", "moon"]])
def test_wrong_options_are_wrong_usage_of_that_command(
    option: list[str], written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["submit", "ray", "--dry-run", "--", "train", str(written()), *option])
    captured = capsys.readouterr()
    assert end.value.code == 2
    assert captured.out == ""
    assert option[0] in captured.err
    assert "Usage: vcal train" in captured.err


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("/runs/borehole", "vcal-borehole"),
        ("s3://bucket/deep/run_1.a", "vcal-run_1.a"),
        ("/runs/a b;$(touch x)`'\"\nü", "vcal-a-b-touch-x"),
        ("/", "vcal-train"),
        ("/runs/..-", "vcal-train"),
        ("/runs/" + "x" * 200, "vcal-" + "x" * 40),
    ],
)
def test_a_name_is_safe_in_any_queue(output: str, name: str) -> None:
    assert Request("train", {"output": output}, ()).name == name


texts = st.text() | st.sampled_from(["1e-3", "-1E5", "no", "2020-01-01", "~", "a: b\n  c\n", "*x", "1:30", "0o7"])


@given(st.dictionaries(texts, texts | st.floats(allow_nan=False) | st.integers() | st.booleans() | st.lists(texts)))
def test_every_text_and_number_comes_back_from_the_file(plain: dict[str, Any]) -> None:
    assert strict_yaml.parse(Request("train", plain, ()).text, "the file", ConfigError) == plain


def test_what_stands_twice_is_written_twice() -> None:
    shared = {"steps": 3}
    assert "&" not in Request("train", {"a": shared, "b": shared}, ()).text
