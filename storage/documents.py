"""JSON documents that decide something: bounded in size, strict, and with a checksum of all that they say.

A checksum finds what a disk, an editor or a careless program has changed. It is no signature: who writes a document can
write its checksum, so that what it says is checked as well.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NoReturn

from storage.errors import VcalError
from storage.regular import open_regular
from storage.room import because

MOST_BYTES = 32 << 20
CHECKSUM = "checksum"


def parse(data: bytes, name: str, error: type[VcalError], cure: str) -> Any:
    """What a document holds; a key that stands twice, NaN and too much of anything are errors."""
    if len(data) > MOST_BYTES:
        raise error(f"{name} has more than {MOST_BYTES >> 20} MiB, which is no such document; {cure}")
    try:
        found = json.loads(data, object_pairs_hook=_once, parse_constant=_refuse)
        checksum(found)  # also refuses 1e999 and halves of characters, which JSON can say and nobody can write again
    except (ValueError, RecursionError) as fault:
        raise error(f"{name} is damaged ({fault}); {cure}") from None
    return found


def checksum(plain: Any) -> str:
    """Of what a document says, however it is written down."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def sealed(plain: dict[str, Any]) -> dict[str, Any]:
    """The document with its checksum."""
    inner = {key: value for key, value in plain.items() if key != CHECKSUM}
    return {**inner, CHECKSUM: checksum(inner)}


def unsealed(found: dict[str, Any], name: str, error: type[VcalError], cure: str) -> dict[str, Any]:
    """The document without its checksum, which must be right; earlier versions wrote none."""
    inner = {key: value for key, value in found.items() if key != CHECKSUM}
    if CHECKSUM in found and found[CHECKSUM] != checksum(inner):
        raise error(f"{name} does not match its checksum: it was changed after it was written; {cure}")
    return inner


def read(path: Path, error: type[VcalError], cure: str) -> dict[str, Any]:
    """The mapping in a file, which must match its checksum where it has one."""
    try:
        with open_regular(path) as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as fault:
        raise error(f"cannot read {path}: {because(fault)}") from fault
    found = parse(data, str(path), error, cure)
    if not isinstance(found, dict):
        raise error(f"{path} is damaged (it holds no mapping); {cure}")
    return unsealed(found, str(path), error, cure)


def to_bytes(plain: dict[str, Any]) -> bytes:
    """The document with its checksum, as it is written."""
    return (json.dumps(sealed(plain), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key '{next(key for key in keys if keys.count(key) > 1)}' stands twice")
    return found


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")
