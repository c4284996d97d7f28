"""One file for a tree of tensors and plain values, which nothing in it can turn into code.

A tree is made of dictionaries with string keys, lists (tuples come back as lists), tensors, strings, numbers, truth
values and None. The tensors lie in a safetensors file under the names "0", "1", …; the tree without them stands as JSON
in the header's metadata. safetensors notices a file that is cut off, but not one whose numbers have changed: a digest
over everything does. Anybody can compute a digest, so that a tree is read as strictly as if there were none: every
tensor stands in one place, and memory is taken for no more than the file has.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from storage.errors import StoreError
from storage.places import LocalPlace
from storage.regular import check_regular, open_regular
from storage.room import because
from vcal_dist.errors import Malformed, ModelError

GIB = 2**30
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
        raise ModelError(str(error)) from error


def read(path: str | Path, device: str | torch.device = "cpu") -> Any:
    """The tree in a file that `write` made, its tensors on a device and independent of the file."""
    import safetensors

    path = Path(path)
    try:
        _check_size(path)
        # Opened here first: safetensors calls a directory a missing device, and a file without rights missing.
        with open_regular(path), safetensors.safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            # A copy: tensors that safetensors maps would change, or end the process, with the file below them.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
    except OSError as error:
        raise ModelError(f"cannot read {path}: {because(error)}") from error
    except RuntimeError as error:  # where safetensors itself cannot open it
        raise ModelError(f"cannot read {path}: {error}; run the command again") from error
    except safetensors.SafetensorError as error:
        raise Malformed(
            f"{path} is not a whole safetensors file ({error}); take it from where it was made once more"
        ) from error
    if TREE not in metadata or DIGEST not in metadata:
        raise Malformed(f"{path} is a safetensors file, but not one of vcal-dist: its metadata has no '{TREE}'")
    text = metadata[TREE]
    if _digest(text, tensors) != metadata[DIGEST]:
        raise Malformed(f"{path} is not what was written: its digest differs; take it from where it was made once more")
    unused = {name: tensor.to(device) for name, tensor in tensors.items()}
    try:
        tree = _decode(json.loads(text, parse_constant=_no_number), unused)
    except RecursionError:
        raise _crafted(path, "it is nested too deeply") from None
    except ValueError as error:
        raise _crafted(path, str(error)) from error
    if unused:
        raise _crafted(path, f"it has no place for {len(unused)} of its tensors")
    return tree


def _check_size(path: Path) -> None:
    """Raises for what is no file, or would not fit into memory: a hole in a file takes no room on a disk."""
    import psutil

    check_regular(path)
    size, free = path.stat().st_size, psutil.virtual_memory().available
    if size > free:
        raise ModelError(
            f"{path} has {size / GIB:,.1f} GiB, more than the {free / GIB:,.1f} GiB of memory that are free; "
            "read it on a larger machine"
        )


def _crafted(path: Path, why: str) -> Malformed:
    return Malformed(f"{path} holds a tree that vcal-dist never writes ({why}); do not use it")


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


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


def _decode(tree: Any, unused: dict[str, Tensor]) -> Any:
    """The tree that `_encode` made this of, and nothing else; takes its tensors out of those that are not used yet."""
    match tree:
        case list():
            return [_decode(value, unused) for value in tree]
        case {"tensor": str(name)} if len(tree) == 1:
            if name not in unused:
                raise ValueError(f"tensor {name!r} is not there, or stands in two places")
            return unused.pop(name)
        case {"dict": dict(entries)} if len(tree) == 1:
            return {key: _decode(value, unused) for key, value in entries.items()}
        case {"float": "nan" | "inf" | "-inf" as word} if len(tree) == 1:
            return float(word)
        case dict():
            raise ValueError(f"an object has the keys {', '.join(map(repr, list(tree)[:3])) or 'of nothing'}")
    return tree


def leaves(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree of dictionaries and lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value)


def is_finite(tree: Any) -> bool:
    """Whether all tensors of a tree hold numbers only."""
    return all(bool(tensor.isfinite().all()) for tensor in leaves(tree))


def check_form(own: Any, found: Any, where: str) -> None:
    """Raises unless `found` is built like `own`: keys, kinds of values, shapes of tensors.

    What is empty or None in `own` may be anything of its kind: it was not there yet.
    """
    match own:
        case None:
            return
        case Tensor():
            right = isinstance(found, Tensor) and found.shape == own.shape and found.dtype == own.dtype
        case dict():
            right = isinstance(found, dict) and (not own or found.keys() == own.keys())
        case list() | tuple():
            right = isinstance(found, list | tuple) and (not own or len(found) == len(own))
        case float() | int() if not isinstance(own, bool):
            right = isinstance(found, float | int) and not isinstance(found, bool)
        case _:
            right = type(found) is type(own)
    if not right:
        raise Malformed(f"{where} is {_form(found)}; expected: {_form(own)}")
    if isinstance(own, dict):
        for key, value in own.items():
            check_form(value, found[key], f"{where}.{key}")
    elif isinstance(own, list | tuple):
        for i, value in enumerate(own):
            check_form(value, found[i], f"{where}[{i}]")


def _form(value: Any) -> str:
    """What a value is, in a word or two."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, dict):
        return f"a mapping of {', '.join(map(str, list(value)[:5])) or 'nothing'}"
    return f"of type {type(value).__name__}"


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    """A hash of the tree and of what each tensor is."""
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
