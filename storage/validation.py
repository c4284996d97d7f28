"""Pydantic's errors in the words of the file's author: key, value, what is accepted, the nearest right word."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, model: type[BaseModel], data: Any) -> str:
    """One line for every mistake that `model` found in `data`."""
    return "\n".join(f"  - {_line(item, model, data)}" for item in error.errors())


def _line(item: Any, model: type[BaseModel], data: Any) -> str:
    """What is wrong in one place."""
    keys = _keys(item["loc"], data)
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in keys).lstrip(".")
    key += _named(keys, data)
    value, message = item["input"], item["msg"].removeprefix("Value error, ")
    match item["type"]:
        case "missing":
            return f"{key}: required, but missing"
        case "extra_forbidden":
            accepted = {name for owner in _owners(model, item["loc"][:-1]) for name in owner.model_fields}
            return f"{key}: unknown key{_nearest(str(keys[-1]), accepted)}"
        case "union_tag_invalid":
            tag, accepted = item["ctx"]["tag"], item["ctx"]["expected_tags"].replace("'", "").split(", ")
            return f"{key}: {item['ctx']['discriminator']} is {show(tag)}{_nearest(tag, set(accepted))}"
        case "union_tag_not_found":
            return f"{key}: needs a {item['ctx']['discriminator']}, got {show(value)}"
        case "value_error":
            return f"{key}: {message}" if key else message
    return f"{key}: {message[0].lower()}{message[1:]}, got {show(value)}"


def _keys(loc: Sequence[Any], data: Any) -> list[Any]:
    """The path as it stands in the file: pydantic adds the name of a union's member, which the file does not have."""
    keys: list[Any] = []
    for i, part in enumerate(loc):
        last = i == len(loc) - 1
        if isinstance(data, dict) and part not in data and not last:
            continue
        keys.append(part)
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            data = None
    return keys


def _named(keys: Sequence[Any], data: Any) -> str:
    """Says which member of a list a position means, if it has a name."""
    if len(keys) >= 2 and isinstance(keys[1], int):
        try:
            return f" ('{data[keys[0]][keys[1]]['name']}')"
        except (KeyError, IndexError, TypeError):
            return ""
    return ""


def _owners(model: type[BaseModel], loc: Sequence[Any]) -> list[type[BaseModel]]:
    """The models that may stand at a path; a union's member is named by its tag."""
    found = [model]
    for part in loc:
        if isinstance(part, int):
            continue
        fields = [m.model_fields[part].annotation for m in found if part in m.model_fields]
        tagged = [m for m in found if part in {field.default for field in m.model_fields.values()}]
        found = tagged or [m for annotation in fields for m in _models(annotation)] or found
    return found


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _nearest(word: str, accepted: set[str]) -> str:
    """What would have been accepted, the most likely first."""
    match = difflib.get_close_matches(word, sorted(accepted), n=1, cutoff=0.6)
    return (f" (did you mean '{match[0]}'?)" if match else "") + f"; accepted: {', '.join(sorted(accepted))}"


def show(value: Any) -> str:
    """A value, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
