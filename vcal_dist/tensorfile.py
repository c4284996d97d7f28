"""One file for a tree of tensors and plain values, which nothing in it can turn into code.

A tree is made of dictionaries with string keys, lists (tuples come back as lists), tensors, strings, numbers, truth
values and None. The tensors lie in a safetensors file under the names "0", "1", …; the tree without them stands as JSON
in the header's metadata. safetensors notices a file that is cut off, but not one whose numbers have changed: a digest
over everything does.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from storage.errors import StoreError
from storage.places import LocalPlace
from vcal_dist.errors import ModelError

TREE, DIGEST = "vcal_dist.tree", "vcal_dist.digest"  # keys of the metadata
PLAIN = (str, int, float, bool, type(None))


def write(path: str | Path, tree: Any) -> None:
    """Replaces the file in one step by one that is on disk: a crash at any moment leaves the old or the new one."""
    import safetensors.torch

    path, tensors = Path(path), dict[str, Tensor]()
    text = json.dumps(_encode(tree, tensors, "the tree"), allow_nan=False)
    metadata = {TREE: text, DIGEST: _digest(text, tensors)}
    try:
        LocalPlace(path.parent).replace(path.name, safetensors.torch.save(tensors, metadata), "")
    except StoreError as error:
        raise ModelError(f"{error}; choose another path") from error


def read(path: str | Path, device: str | torch.device = "cpu") -> Any:
    """The tree in a file that `write` made, its tensors on a device and independent of the file."""
    import safetensors

    try:
        # Opened here first: safetensors calls a directory a missing device, and a file without rights missing.
        with Path(path).open("rb"), safetensors.safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            # A copy: tensors that safetensors maps would change, or end the process, with the file below them.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except safetensors.SafetensorError as error:
        raise ModelError(
            f"{path} is not a whole safetensors file ({error}); take it from where it was made once more"
        ) from error
    if TREE not in metadata or DIGEST not in metadata:
        raise ModelError(f"{path} is a safetensors file, but not one of vcal-dist: its metadata has no '{TREE}'")
    text = metadata[TREE]
    if _digest(text, tensors) != metadata[DIGEST]:
        raise ModelError(
            f"{path} is not what was written: its digest differs; take it from where it was made once more"
        )
    return _decode(json.loads(text), {name: tensor.to(device) for name, tensor in tensors.items()})


def _encode(tree: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """The tree as strict JSON; objects have one key that says what they stand for."""
    match tree:
        case Tensor():
            if tree.layout != torch.strided or tree.dtype == torch.complex128:
                raise ModelError(f"{where} is a {tree.layout} tensor of {tree.dtype}, which the file cannot hold")
            name = str(len(tensors))
            # Own memory for each: safetensors refuses tensors that share it, or that have gaps.
            tensors[name] = tree.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            return {"tensor": name}
        case dict():
            for key in tree:
                if not isinstance(key, str):
                    raise ModelError(f"{where} has the key {key!r}; accepted: keys that are strings")
            return {"dict": {key: _encode(value, tensors, f"{where}[{key!r}]") for key, value in tree.items()}}
        case list() | tuple():
            return [_encode(value, tensors, f"{where}[{i}]") for i, value in enumerate(tree)]
        case float() if not math.isfinite(tree):
            return {"float": str(float(tree))}
        case _ if isinstance(tree, PLAIN):
            return tree
    raise ModelError(
        f"{where} is of type {type(tree).__name__}; accepted: dictionaries, lists, tensors, strings, numbers, True, "
        "False and None"
    )


def _decode(tree: Any, tensors: dict[str, Tensor]) -> Any:
    match tree:
        case {"tensor": name}:
            return tensors[name]
        case {"dict": entries}:
            return {key: _decode(value, tensors) for key, value in entries.items()}
        case {"float": value}:
            return float(value)
        case list():
            return [_decode(value, tensors) for value in tree]
    return tree


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    """A hash of the tree and of what each tensor is."""
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
