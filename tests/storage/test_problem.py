"""The problem file: what is accepted, and what an error says."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest

from storage.errors import ProblemError
from storage.priors import Beta, Gamma, LogNormal, Normal, TruncatedNormal, Uniform
from storage.problem import Problem, load_problem, parse_problem
from tests.storage.conftest import places, replaced

GOOD: dict[str, Any] = {
    "name": "toy",
    "control_inputs": [{"name": "depth", "unit": "m", "bounds": [0, 10]}],
    "calibration_inputs": [{"name": "rw", "bounds": [0.05, 0.15]}],
    "outputs": [{"name": "flow"}],
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one entry replaced or added."""
    data: Any = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    inner = data
    for key in parents:
        inner = inner[int(key)] if key.isdigit() else inner[key]
    inner[last] = value
    return data


PRIORS = [
    ({"family": "normal", "mean": 0.1, "sd": 0.02}, Normal),
    ({"family": "uniform", "low": 0.06, "high": 0.14}, Uniform),
    ({"family": "lognormal", "mu": -2.3, "sigma": 0.2}, LogNormal),
    ({"family": "beta", "a": 2, "b": 3}, Beta),
    ({"family": "truncated_normal", "mean": 0.1, "sd": 0.02}, TruncatedNormal),
    ({"family": "gamma", "shape": 10, "rate": 100}, Gamma),
]


@pytest.mark.parametrize(("prior", "kind"), PRIORS, ids=[kind.__name__ for _, kind in PRIORS])
def test_each_prior_family_survives_a_round_trip(prior: dict[str, Any], kind: type) -> None:
    problem = parse_problem(changed("calibration_inputs.0.prior", prior))
    assert isinstance(problem.calibration_inputs[0].prior, kind)
    assert Problem.model_validate(problem.model_dump(mode="json")) == problem
    assert str(problem.calibration_inputs[0].prior)


def test_limits_and_prior_come_from_the_bounds() -> None:
    assert parse_problem(GOOD).calibration_inputs[0].prior == Uniform(low=0.05, high=0.15)
    beta = parse_problem(changed("calibration_inputs.0.prior", {"family": "beta", "a": 1, "b": 1}))
    assert beta.calibration_inputs[0].prior == Beta(a=1, b=1, low=0.05, high=0.15)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("nmae", "x", ["nmae", "unknown key", "did you mean 'name'"]),
        ("control_inputs", [], ["control_inputs", "at least one"]),
        ("control_inputs.0.bounds", [3, 1], ["depth", "low < high", "[3, 1]"]),
        ("control_inputs.0.bounds", [0, "deep"], ["control_inputs[0].bounds[1]", "depth", "'deep'", "number"]),
        ("control_inputs.0.bounds", [0, float("inf")], ["control_inputs[0].bounds[1]", "finite", "inf"]),
        ("control_inputs.0.units", "m", ["control_inputs[0].units", "did you mean 'unit'"]),
        ("control_inputs.0.name", "a/b", ["control_inputs[0].name", "'a/b'"]),
        ("calibration_inputs.0.prior", {"family": "normall", "mean": 1, "sd": 1}, ["normall", "'normal'", "gamma"]),
        (
            "calibration_inputs.0.prior",
            {"family": "normal", "mean": 0.1, "sd": -1},
            ["prior.sd", "greater than 0", "-1"],
        ),
        ("calibration_inputs.0.prior", {"family": "normal", "mean": 0.1}, ["prior.sd", "missing"]),
        ("calibration_inputs.0.prior", {"family": "normal", "mean": 0.1, "std": 1}, ["prior.std", "unknown", "'sd'"]),
        ("calibration_inputs.0.prior", {"family": "uniform", "low": 0}, ["rw", "outside its bounds", "[0.05, 0.15]"]),
        ("calibration_inputs.0.prior", {"family": "gamma", "shape": 1, "rate": 1}, ["rw", "centred at 1", "units"]),
        ("calibration_inputs.0.prior", {"mean": 1}, ["prior", "family"]),
        ("outputs.0.name", "rw", ["differ", "rw"]),
        ("outputs", [{"name": "q"}, {"name": "q_noise"}], ["differ", "q_noise"]),
    ],
)
def test_an_error_names_key_value_and_what_is_accepted(path: str, value: Any, said: list[str]) -> None:
    with pytest.raises(ProblemError) as caught:
        parse_problem(changed(path, value), source="p.yaml")
    assert str(caught.value).startswith("p.yaml")
    for word in said:
        assert word in str(caught.value)


def test_all_mistakes_are_reported_at_once() -> None:
    bad = changed("outputs.0.untit", "l/s") | {"control_inputs": [{"name": "depth"}]}
    with pytest.raises(ProblemError) as caught:
        parse_problem(bad)
    assert "outputs[0].untit" in str(caught.value)
    assert "control_inputs[0].bounds" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [(": : :", "not valid YAML"), ("- a\n- b", "expected a mapping"), ("", "is empty")],
)
def test_files_that_are_not_problems(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "problem.yaml"
    path.write_text(text)
    with pytest.raises(ProblemError, match=said):
        load_problem(path)


def test_a_missing_file_and_a_binary_file(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"nothing\.yaml"):
        load_problem(tmp_path / "nothing.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ProblemError, match="UTF-8"):
        load_problem(tmp_path / "binary.yaml")


def test_a_problem_file_cannot_run_code(tmp_path: Path) -> None:
    path = tmp_path / "problem.yaml"
    path.write_text("name: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ProblemError, match="not valid YAML"):
        load_problem(path)


HOSTILE = (
    *(
        None,
        True,
        -1,
        0,
        10**400,
        1.5,
        -1e308,
        float("nan"),
        float("inf"),
        "",
        "x",
        "1e-3",
        "a\x1b[2J",
        "\ud800",
        "x" * 999,
    ),
    *([], [[]], [True, False], [1] * 500, {}, {"name": "x"}, {"a": {"b": {"c": 1}}}),
)


def test_any_value_in_any_place_is_read_or_refused() -> None:
    priors = [{"name": f"p{i}", "bounds": [0, 1], "prior": prior} for i, (prior, _) in enumerate(PRIORS[:-1])]
    whole = GOOD | {"calibration_inputs": priors, "outputs": [{"name": "flow", "bounds": [-5, 5], "missing": True}]}
    whole = parse_problem(whole).model_dump(mode="json")
    read = 0
    for path in places(whole):
        for value in HOSTILE:
            with contextlib.suppress(ProblemError):
                found = parse_problem(replaced(whole, path, value))
                assert Problem.model_validate(found.model_dump(mode="json")) == found
                assert all(0 <= v.prior.cdf(0.3) <= 1 and str(v.prior) for v in found.calibration_inputs)
                read += 1
    assert 20 < read < 300
