"""A tree of tensors and plain values comes back from its file as it was, or with an error that says what is wrong."""

from __future__ import annotations

import contextlib
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import storage.places
from vcal_dist import tensorfile
from vcal_dist.errors import ModelError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def same(found: Any, expected: Any) -> bool:
    """Equal to the last bit, also -0.0 and NaN, with tuples as lists."""
    match expected:
        case Tensor():
            return (
                isinstance(found, Tensor)
                and (found.dtype, found.shape) == (expected.dtype, expected.shape)
                and bits(found) == bits(expected)
            )
        case dict():
            return (
                isinstance(found, dict)
                and list(found) == list(expected)
                and same([*found.values()], [*expected.values()])
            )
        case list() | tuple():
            return isinstance(found, list) and len(found) == len(expected) and all(map(same, found, expected))
        case float():
            return type(found) is float and (
                struct.pack("d", found) == struct.pack("d", expected) or (math.isnan(found) and math.isnan(expected))
            )
    return type(found) is type(expected) and bool(found == expected)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return (100 * torch.randn(shape, generator=generator)).to(dtype)


leaves = st.one_of(
    tensors(), st.text(), st.integers(-(2**200), 2**200), st.floats(allow_nan=True), st.booleans(), st.none()
)
trees = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4))
)


@given(tree=trees)
@settings(max_examples=150, deadline=None)
def test_any_tree_comes_back_as_it_was(tree: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    tensorfile.write(path, tree)
    assert same(tensorfile.read(path), tree)


def test_tensors_that_share_memory_or_have_gaps_are_written_one_by_one(tmp_path: Path) -> None:
    whole = torch.arange(12.0, dtype=torch.float64).reshape(3, 4).requires_grad_()
    tree = {
        "whole": whole,
        "again": whole,
        "transposed": whole.mT,
        "row": whole[1],
        "strided": whole[:, ::2],
        "expanded": whole[:1].expand(5, -1),
        "scalar": whole[0, 1],
        "none": whole[:0],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    tensorfile.write(tmp_path / "shared", tree)
    found = tensorfile.read(tmp_path / "shared")
    assert same(found, tree)
    found["whole"][0, 1] = 77
    assert found["again"][0, 1] == found["scalar"] == 1
    assert not found["whole"].requires_grad


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tensorfile.write(path, torch.arange(1000))
    found = tensorfile.read(path)
    path.write_bytes(b"")
    assert torch.equal(found, torch.arange(1000))


def test_keys_that_look_like_the_files_own_words_are_only_keys(tmp_path: Path) -> None:
    tree = {"tensor": "0", "dict": {"dict": 1, "float": "nan"}, "": {"tensor": torch.ones(1)}, "__metadata__": [[]]}
    tensorfile.write(tmp_path / "words", tree)
    assert same(tensorfile.read(tmp_path / "words"), tree)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1, {2: 3}]}, r"the tree\['a'\]\[1\] has the key 2"),
        ({"a": np.int64(3)}, r"the tree\['a'\] is of type int64; accepted"),
        ([{1, 2}], r"the tree\[0\] is of type set"),
        ({"a": torch.eye(2).to_sparse()}, r"the tree\['a'\] is a torch.sparse_coo tensor"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, r"the tree\['a'\] is a .* tensor of torch.complex128"),
    ],
)
def test_what_the_file_cannot_hold_is_refused_by_its_place(tmp_path: Path, tree: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tensorfile.write(tmp_path / "file", tree)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    tensorfile.write(path, {"a": torch.arange(5.0), "b": [torch.ones(2, 2), "text", 1.5]})
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"whole is not a whole safetensors file"):
            tensorfile.read(path)


def test_a_file_with_one_bit_turned_is_refused_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    tree = {"a": torch.arange(3.0), "b": ["text", 1.5]}
    tensorfile.write(path, tree)
    data = path.read_bytes()
    for place in range(len(data)):
        for bit in (1, 128):
            path.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            found = tree  # blanks of the header may change, values never
            with contextlib.suppress(ModelError):
                found = tensorfile.read(path)
            assert same(found, tree), place


@pytest.mark.parametrize("content", [b"", b"not a file of ours, only text that is long enough", b"\x80\x04K\x01."])
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.bin"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"foreign\.bin is not a whole safetensors file"):
        tensorfile.read(path)


def test_a_safetensors_file_of_others_is_refused_by_name(tmp_path: Path) -> None:
    for metadata in (None, {"format": "pt"}):
        safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "other", metadata)
        with pytest.raises(ModelError, match=r"other is a safetensors file, but not one of vcal-dist"):
            tensorfile.read(tmp_path / "other")


def test_a_missing_file_and_a_directory_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*nothing: No such file"):
        tensorfile.read(tmp_path / "nothing")
    with pytest.raises(ModelError, match=r"cannot read .*: Is a directory"):
        tensorfile.read(tmp_path)


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_crash_while_writing_leaves_the_old_file(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    tensorfile.write(path, {"old": torch.ones(3)})

    def crash(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if moment == "fsync":
        monkeypatch.setattr(storage.places.os, "fsync", crash)
    else:
        monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(ModelError, match="No space left on device"):
        tensorfile.write(path, {"new": torch.ones(3)})
    monkeypatch.undo()
    assert same(tensorfile.read(path), {"old": torch.ones(3)})
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
