"""One strict reader for every YAML file: nothing is read as something else, and no file takes more than its size."""

from __future__ import annotations

import ast
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.config import load
from jobs.sweeps.settings import load as load_sweep
from storage import strict_yaml
from storage.errors import ProblemError
from storage.problem import load_problem
from vcal_dist.errors import ConfigError

HERE = Path(__file__).parents[2]
PROBLEM = """
name: {name}
control_inputs: [{{name: depth, unit: {unit}, bounds: [{low}, {high}]}}]
calibration_inputs: [{{name: rw, bounds: [0, 1], prior: {{family: normal, mean: {mean}, sd: 0.1}}}}]
outputs: [{{name: flow, missing: {missing}}}]
"""
GOOD = {"name": "toy", "unit": "m", "low": "0", "high": "1e3", "mean": "0.5", "missing": "true"}
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))


def problem(folder: Path, **changed: str) -> Path:
    path = folder / "problem.yaml"
    path.write_text(PROBLEM.format(**GOOD | changed), encoding="utf-8")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ProblemError) as caught:
        load_problem(path)
    return str(caught.value)


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    found = load_problem(problem(tmp_path))
    assert found.control_inputs[0].bounds == (0.0, 1000.0)
    assert found.outputs[0].missing is True


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"low": "false"}, "bounds[0] ('depth'): got False; accepted: a number"),
        ({"high": "true"}, "bounds[1] ('depth'): got True; accepted: a number"),
        ({"high": "'10'"}, "got '10'; accepted: a number"),
        ({"high": "1:30"}, "'1:30' would be read as the number 90; write 90, or put it in quotes if it is a text"),
        ({"high": "1:30.5"}, "would be read as the number 90.5"),
        ({"high": "010"}, "'010' would be read as the number 8; write 8 or 10, or put it in quotes"),
        ({"high": "!!int '010'"}, "'010' would be read as the number 8"),
        ({"high": "-010"}, "'-010' would be read as the number -8; write -8 or -10"),
        ({"high": 200 * "9"}, "a number of 200 characters"),
        ({"high": "1e400"}, "finite"),
        ({"high": "0x_"}, "not valid YAML"),
        ({"mean": "yes"}, "got True; accepted: a number"),
        ({"missing": "1"}, "got 1; accepted: true or false"),
        ({"missing": "'on'"}, "got 'on'; accepted: true or false"),
        ({"name": '"a\\x07b"'}, "name: has the control character '\\x07'"),
        ({"name": '"a\\eb"'}, "control character '\\x1b'"),
        ({"name": '"a\\u2028b"'}, "control character '\\u2028'"),
        ({"name": '"a\\x85b"'}, "control character '\\x85'"),
        ({"unit": '"a\\e[2Jb"'}, "control character '\\x1b'"),
        ({"name": '"a\\ud800b"'}, "half of a character"),
        ({"name": "no"}, "name: got False; accepted: a text"),
        ({"name": "toy\nname: toy"}, "the key 'name' stands twice"),
        ({"name": "toy\n1: toy"}, "the key '1' is no text; put it in quotes"),
        ({"name": "toy\non: toy"}, "the key 'on' is no text; put it in quotes"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(tmp_path: Path, changed: dict[str, str], said: str) -> None:
    assert said in refusal(problem(tmp_path, **changed))


@pytest.mark.parametrize("text", [BOMB, BOMB.replace("[", "{k: [").replace("]", "]}")], ids=["lists", "mappings"])
def test_aliases_of_aliases_end_at_once(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    for reader, error in ((load_problem, ProblemError), (load, ConfigError), (load_sweep, ConfigError)):
        began = time.monotonic()
        with pytest.raises(error, match="more than 50,000 values"):
            reader(path)  # type: ignore[operator]
        assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &a [*a]", "contains itself"),
        ("a: &a {b: {c: *a}}", "contains itself"),
        ("a: *b", "undefined alias"),
        ("a: " + "[" * 5000, "more than 64 levels"),
        ("- " * 5000, "more than 64 levels"),
        ("{a: " * 100, "more than 64 levels"),
        ("a: &x " + "y" * 600_000 + "\nb: [" + "*x, " * 20 + "]", "more than 50,000 values"),
        ("a: [" + "1, " * 60_000 + "]", "more than 50,000 values"),
        ("#" * (1 << 20) + "\na: 1", "more than 1 MiB"),
        ("a: 1\n---\nb: 2", "not valid YAML"),
        ("a: !!python/name:os.system ''", "not valid YAML"),
        ("a: !!binary aGk=", "not valid YAML"),
        ("a: 2020-01-01\n? [1, 2]\n: 3", "is no text"),
    ],
)
def test_depth_size_and_kinds_are_bounded(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "some.yaml"
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=said):
        strict_yaml.read(path, ConfigError)
    assert time.monotonic() - began < 10


def test_a_path_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.yaml", Path("a\0b"), tmp_path / ("x" * 300), Path("a\ud800b")):
        with pytest.raises(ConfigError, match="cannot read"):
            strict_yaml.read(path, ConfigError)


texts = st.text() | st.sampled_from(["1e-3", "010", "1:30", "no", "2020-01-01", "~", "<<", "=", "0o7", "1_0", "- a"])
plain = st.recursive(
    texts | st.floats(allow_nan=False) | st.integers(-(2**64), 2**64) | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(plain)
def test_what_is_written_is_read_again(value: Any) -> None:
    assert strict_yaml.parse(strict_yaml.dump(value), "the file", ConfigError) == value


@settings(max_examples=300)
@given(st.text(st.sampled_from("ab01:-[]{},&*!|>'\"\\#?%@\n\t .ex_~<\u2028\x7f\ud800")))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):
        strict_yaml.parse(text, "the file", ConfigError)


def test_there_is_no_other_reader_of_yaml() -> None:
    """Kubernetes' and Ray's own files are not ours to restrict."""
    others = {"jobs/submission/kubernetes.py", "jobs/ray_cluster.py"}
    found = {
        str(path.relative_to(HERE))
        for package in ("storage", "vcal_dist", "jobs")
        for path in (HERE / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import) and any(name.name == "yaml" for name in node.names)
    }
    assert found == others | {"storage/strict_yaml.py"}


def test_json_is_yaml_with_characters_in_two_halves() -> None:
    plain = {"a": "\U0001f600", "b": ["x\U0001f600y"]}
    assert strict_yaml.parse(json.dumps(plain), "here", ConfigError) == plain
