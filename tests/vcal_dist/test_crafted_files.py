"""Files that somebody made up: a posterior, a checkpoint or a record is refused in one line, before memory is taken."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.vcal_dist.test_checkpoints import At, Interruption, interrupt
from tests.vcal_dist.test_posterior import inputs, posterior, replaced
from tests.vcal_dist.training_kit import config, make_store
from vcal_dist import tensorfile
from vcal_dist.errors import ConfigError, ModelError
from vcal_dist.posterior import FILE, Posterior
from vcal_dist.training import train

F64 = torch.float64


def forge(path: Path, text: str, tensors: dict[str, Tensor]) -> None:
    """A file with a digest that fits, whatever its tree says."""
    metadata = {tensorfile.TREE: text, tensorfile.DIGEST: tensorfile._digest(text, tensors)}
    path.write_bytes(safetensors.torch.save(tensors, metadata))


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"tensor": "7"}', []),
        ('{"tensor": ["0"]}', ["0"]),
        ('[{"tensor": "0"}, {"tensor": "0"}]', ["0"]),  # one tensor in a thousand places is a thousand tensors
        ("1", ["0"]),
        ('{"dict": 3}', []),
        ('{"dict": {}, "more": 1}', []),
        ('{"float": "abc"}', []),
        ('{"float": [1]}', []),
        ('{"other": 1}', []),
        ("{}", []),
        ("NaN", []),
        ("[1,", []),
        ("1" * 5000, []),
        ("[" * 100_000, []),
        ("[" * 5000 + "]" * 5000, []),
    ],
)
def test_a_tree_that_was_made_up_is_refused_by_the_files_name(tmp_path: Path, text: str, names: list[str]) -> None:
    forge(tmp_path / "crafted", text, {name: torch.ones(2) for name in names})
    with pytest.raises(ModelError, match=r"crafted holds a tree that vcal-dist never writes") as caught:
        tensorfile.read(tmp_path / "crafted")
    assert "\n" not in str(caught.value)


@given(
    data=st.recursive(
        st.none() | st.text(max_size=5) | st.floats(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from(["dict", "tensor", "float", "x"]), inner, max_size=2)
        ),
    )
)
@settings(max_examples=100, deadline=None)
def test_no_tree_ends_in_another_error(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "made-up"
    forge(path, json.dumps(data), {})
    with contextlib.suppress(ModelError):
        tensorfile.read(path)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match=r"cannot read .*pipe: it is not a regular file"):
        tensorfile.read(tmp_path / "pipe")


def test_a_file_that_memory_cannot_hold_is_refused_before_it_is_read(tmp_path: Path) -> None:
    size = 2**43  # a hole takes no disk, and would take all memory
    header = json.dumps({"0": {"dtype": "F64", "shape": [size // 8], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "huge").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        try:
            file.truncate(8 + len(header) + size)
        except OSError:
            pytest.skip("the file system holds no file of that size")
    with pytest.raises(ModelError, match=r"huge has 8,192\.0 GiB, more than the .* GiB of memory that are free"):
        tensorfile.read(tmp_path / "huge")


# --- posteriors -------------------------------------------------------------------------------------------------------


def first_tensor(part: str) -> Callable[[Any], Tensor]:
    def chosen(tree: Any) -> Tensor:
        found: Tensor
        if part == "model":
            found = next(v for v in tree["model"]["state"].values() if v.is_floating_point())
        elif part == "component":
            found = tree["components"][0]["tensors"]["mean"]
        else:
            found = tree["log_weights"] if part == "log_weights" else tree["scaling"][part]
        return found

    return chosen


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["model", "component", "log_weights", "mean", "sd"])
def test_a_posterior_with_a_weight_that_is_no_number_is_refused(
    kit: Any, tmp_path: Path, part: str, value: float
) -> None:
    tree = posterior(kit)._tree()
    first_tensor(part)(tree).view(-1)[0] = value
    tensorfile.write(tmp_path / FILE, tree)
    with pytest.raises(ModelError, match=r"not finite|positive") as caught:
        Posterior.load(tmp_path)
    assert str(tmp_path / FILE) in str(caught.value)


def test_a_posterior_whose_numbers_overflow_is_refused(kit: Any, tmp_path: Path) -> None:
    tree = posterior(kit)._tree()
    for name, value in tree["model"]["state"].items():
        if name.endswith("log_amplitude"):
            value.fill_(1e5)
    tensorfile.write(tmp_path / FILE, tree)
    with pytest.raises(ModelError, match="predicts what is not finite"):
        Posterior.load(tmp_path)


def test_a_posterior_that_asks_for_a_huge_model_is_refused_before_it_is_built(kit: Any, tmp_path: Path) -> None:
    for keys, value in (
        (("features", "features"), 10**10),
        (("hidden",), [2] * 100_000),
        (("hidden",), [10**9, 10**9]),
    ):
        tree = posterior(kit)._tree()
        replaced(value, "model", "settings", "eta", *keys)(tree)
        tensorfile.write(tmp_path / FILE, tree)
        with pytest.raises(ModelError, match=r"settings ask for a model of .* numbers, the file holds"):
            Posterior.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("", [1]),
        ("rows", {"runs": "many", "observations": 3}),
        ("rows", {"runs": 3}),
        ("rows", [3, 4]),
        ("seconds", "long"),
        ("assessment", {"runs": {"rows": 3}}),
        ("assessment", "good"),
        ("theta", "refined"),
        ("theta", {"family": "collapsed"}),
        ("theta", {"starts": [{}]}),
        ("config", ["store"]),
        ("versions", {"torch": {"a": 1}}),
        ("bound", "high"),
        ("runs", "few"),
        ("design", [{"kind": "constant"}]),
        ("design", "bad"),
    ],
)
def test_a_record_of_another_shape_is_refused_by_its_key(kit: Any, tmp_path: Path, key: str, value: Any) -> None:
    tree = posterior(kit)._tree()
    tree["record"] = value if not key else tree["record"] | {key: value}
    tensorfile.write(tmp_path / FILE, tree)
    with pytest.raises(ModelError, match=rf"its record.*{key}") as caught:
        Posterior.load(tmp_path)
    assert "\n" not in str(caught.value)


PARTS = (
    ("format",), ("schema",), ("problem",), ("problem", "outputs"), ("problem", "name"), ("scaling",),
    ("scaling", "transforms"), ("scaling", "mean"), ("scaling", "sd"), ("model",), ("model", "settings"),
    ("model", "settings", "eta"), ("model", "settings", "seed"), ("model", "dtype"), ("model", "state"),
    ("components",), ("components", 0), ("components", 0, "shape"), ("components", 0, "absorbed"),
    ("components", 0, "tensors"), ("components", 0, "tensors", "precision_theta"), ("log_weights",), ("record",),
    ("validation",),
)  # fmt: skip
VALUES = (None, -1, 10**30, "text", [], {"a": 1}, torch.ones(0, 3), torch.ones(2, 2, dtype=torch.complex64))


@pytest.mark.parametrize("part", PARTS, ids=lambda part: ".".join(map(str, part)))
def test_a_posterior_with_a_part_of_another_kind_loads_and_predicts_or_is_refused(
    kit: Any, tmp_path: Path, part: tuple[Any, ...]
) -> None:
    for value in VALUES:
        tree = posterior(kit)._tree()
        replaced(value, *part)(tree)
        tensorfile.write(tmp_path / FILE, tree)
        with contextlib.suppress(ModelError):
            found = Posterior.load(tmp_path)
            assert np.isfinite(found.predict(inputs(), samples=2).mean).all()
            found.summary()


# --- the files beside it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["rows.json", "versions.json", "config.yaml"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        bytes(range(256)),
        b"[" * 100_000,
        b'"x"',
        b'{"runs": null, "observations": {}}',
        b'{"runs": ' + b"9" * 5000,
    ],
    ids=["empty", "nul", "bytes", "deep", "text", "nulls", "digits"],
)
def test_a_file_beside_the_posterior_that_was_made_up_is_told_as_damage(
    stopped: Path, tmp_path: Path, file: str, content: bytes
) -> None:
    from jobs.inspect_run import inspect_run

    shutil.copytree(stopped / "run", tmp_path / "run")
    (tmp_path / "run" / file).write_bytes(content)
    damage = inspect_run(tmp_path / "run", json=False)
    assert file in " ".join(damage) or (file, content[:8]) == ("versions.json", b'{"runs":')
    with contextlib.suppress(ConfigError, Interruption):
        train(config(stopped / "s.zarr", tmp_path / "run"), progress=False, callbacks=[At(5, interrupt)])


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and a run that was stopped in its first stage."""
    folder = tmp_path_factory.mktemp("stopped")
    make_store(folder / "s.zarr")
    with pytest.raises(Interruption):
        train(config(folder / "s.zarr", folder / "run", checkpoints={"every_steps": 1}), callbacks=[At(3, interrupt)])
    return folder


CHECKPOINT_PARTS = (
    ("schema",), ("orders",), ("orders", "runs"), ("lowest",), ("schedule",), ("schedule", "name"),
    ("schedule", "number"), ("schedule", "leg"), ("schedule", "batch"), ("schedule", "steps"), ("schedule", "model"),
    ("schedule", "model", "kappa"), ("schedule", "found"), ("schedule", "found", "components"), ("schedule", "phase"),
    ("schedule", "phase", "done"), ("schedule", "phase", "adam"), ("schedule", "phase", "adam", "0"),
    ("schedule", "phase", "adam", "0", "exp_avg"), ("schedule", "phase", "groups"),
    ("schedule", "phase", "groups", 0, "betas"), ("schedule", "phase", "cycle"),
)  # fmt: skip


@pytest.mark.parametrize("part", CHECKPOINT_PARTS, ids=lambda part: ".".join(map(str, part)))
def test_a_checkpoint_with_a_part_of_another_kind_is_refused(
    stopped: Path, tmp_path: Path, part: tuple[Any, ...]
) -> None:
    for value in (-1, torch.ones(3, 1)):
        with pytest.raises(ConfigError, match=r"cannot go on|another version") as caught:
            go_on(stopped, tmp_path, replaced(value, *part))
        assert "last.safetensors" in str(caught.value)


def test_a_checkpoint_with_weights_that_are_no_numbers_is_refused(stopped: Path, tmp_path: Path) -> None:
    def spoil(state: Any) -> None:
        state["schedule"]["phase"]["adam"]["0"]["exp_avg"].view(-1)[0] = float("nan")

    with pytest.raises(ConfigError, match=r"last\.safetensors.*not finite"):
        go_on(stopped, tmp_path, spoil)


def test_a_checkpoint_as_it_was_goes_on(stopped: Path, tmp_path: Path) -> None:
    go_on(stopped, tmp_path, lambda _: None)


def go_on(stopped: Path, folder: Path, change: Callable[[Any], None]) -> None:
    """Trains two more steps from a checkpoint that was changed."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(stopped / "run", run)
    path = run / "checkpoints" / "last.safetensors"
    state = tensorfile.read(path)
    change(state)
    tensorfile.write(path, state)
    asked = config(stopped / "s.zarr", run, checkpoints={"every_steps": 1})
    with contextlib.suppress(Interruption):
        train(asked, callbacks=[At(5, interrupt)])
