"""Pydantic's errors in the words of the file's author: key, value, what is accepted, the nearest right word."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError

UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")  # of a model, of a dataclass
ACCEPTED = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "a text",
    "tuple_type": "a list",
    "list_type": "a list",
    "named_tuple_type": "a list or a mapping",
    "dict_type": "a mapping",
}
MAPPING = ("model_type", "model_attributes_type", "dataclass_type")
SHOULD_BE = "Input should be "


def explain(error: ValidationError, model: type[BaseModel], data: Any) -> str:
    """One line for every mistake that `model` found in `data`."""
    places: dict[tuple[Any, ...], list[Any]] = {}  # a union has an error for each of its members in one place
    for item in error.errors():
        places.setdefault(tuple(_keys(item, model, data)), []).append(item)
    return "\n".join(f"  - {_line(items, keys, model, data)}" for keys, items in places.items())


def _line(items: list[Any], keys: Sequence[Any], model: type[BaseModel], data: Any) -> str:
    """What is wrong in one place."""
    item = items[0]
    value, message = item["input"], item["msg"].removeprefix("Value error, ")
    match item["type"]:
        case "missing":
            wrong = "required, but missing"
        case kind if kind in UNKNOWN_KEY:
            accepted = [name for owner in _owners(model, item["loc"][:-1]) for name in _annotations(owner)]
            wrong = f"unknown key{_nearest(str(keys[-1]), accepted)}"
        case "union_tag_invalid":
            tag, accepted = item["ctx"]["tag"], item["ctx"]["expected_tags"].replace("'", "").split(", ")
            wrong = f"{item['ctx']['discriminator']} is {show(tag)}{_nearest(tag, accepted)}"
        case "union_tag_not_found":
            wrong = f"needs a {item['ctx']['discriminator']}, got {show(value)}"
        case "value_error":
            wrong = message
            name = re.split(r"\W", message, maxsplit=1)[0]
            if any(name in _annotations(owner) for owner in _owners(model, item["loc"])):
                keys = [*keys, name]  # the check of a whole names the key that it is about
        case _:
            wrong = _not_accepted(items, keys, model)
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in keys).lstrip(".")
    key += _named(keys, data)
    return f"{key}: {wrong}" if key else wrong


def _not_accepted(items: list[Any], keys: Sequence[Any], model: type[BaseModel]) -> str:
    """A value of the wrong type or out of range; with several items, none of a union's members takes it."""
    value = items[0]["input"]
    accepted, meant = [], ""
    for item in items:
        kind, said = item["type"], item["msg"]
        if kind == "literal_error":
            words = re.findall(r"'([^']*)'", item["ctx"]["expected"])
            accepted.append(", ".join(words))
            meant = meant or _meant(str(value), words)
        elif kind in MAPPING:
            known = [name for owner in _owners(model, item["loc"]) for name in _annotations(owner)]
            accepted.append(f"a mapping with the keys {', '.join(dict.fromkeys(known))}")
        elif kind == "greater_than_equal":
            accepted.append(f"{item['ctx']['ge']:g} or more")
        elif kind == "less_than_equal":
            accepted.append(f"{item['ctx']['le']:g} or less")
        elif kind == "too_long":
            accepted.append(f"{item['ctx']['max_length']} values at most")
        elif kind in ACCEPTED:
            accepted.append(ACCEPTED[kind])
            if ACCEPTED[kind] == "a whole number" and isinstance(value, float) and value.is_integer():
                meant = f" (did you mean {int(value)}?)"
        elif said.startswith(SHOULD_BE):
            accepted.append(said.removeprefix(SHOULD_BE))
        else:
            return f"{said[0].lower()}{said[1:]}, got {show(value)}"
    if keys and any(NoneType in get_args(_annotations(owner).get(keys[-1])) for owner in _owners(model, keys[:-1])):
        accepted.append("null")
    return f"got {show(value)}{meant}; accepted: {', or '.join(accepted)}"


def _keys(item: Any, model: type[BaseModel], data: Any) -> list[Any]:
    """The path as it stands in the file: pydantic adds the name of a union's member, which the file does not have."""
    keys = []
    for i, part in enumerate(item["loc"]):
        try:
            data, found = data[part], True
        except (KeyError, IndexError, TypeError):
            found = any(part in _annotations(owner) for owner in _owners(model, item["loc"][:i]))
            data = None if found else data
        keys += [part] if found else []
    return keys


def _named(keys: Sequence[Any], data: Any) -> str:
    """Says which member of a list a position means, if it has a name."""
    if len(keys) >= 2 and isinstance(keys[1], int):
        try:
            return f" ('{data[keys[0]][keys[1]]['name']}')"
        except (KeyError, IndexError, TypeError):
            return ""
    return ""


def _owners(model: type, loc: Sequence[Any]) -> list[Any]:
    """The models that may stand at a path; a union's member is named by its tag."""
    found: list[Any] = [model]
    for part in loc:
        if isinstance(part, int):
            continue
        inner = [get_args(owner)[1] for owner in found if get_origin(owner) is dict]
        inner += [_annotations(owner)[part] for owner in found if part in _annotations(owner)]
        if inner:
            found = [owner for annotation in inner for owner in _structures(annotation)]
        else:
            found = [owner for owner in found if _is_tagged(owner, part)] or found
    return found


def _is_tagged(owner: type, tag: Any) -> bool:
    return issubclass(owner, BaseModel) and any(field.default == tag for field in owner.model_fields.values())


def _structures(annotation: Any) -> Iterator[Any]:
    """The models, dataclasses, named tuples and dictionaries in a type."""
    if get_origin(annotation) is dict or _annotations(annotation):
        yield annotation
    else:
        for argument in get_args(annotation):
            yield from _structures(argument)


def _annotations(owner: Any) -> dict[str, Any]:
    """The keys of a model, dataclass or named tuple with their types; none of anything else."""
    if not isinstance(owner, type):
        return {}
    if issubclass(owner, BaseModel):
        return {name: field.annotation for name, field in owner.model_fields.items()}
    names = [field.name for field in fields(owner)] if is_dataclass(owner) else getattr(owner, "_fields", ())
    hints = get_type_hints(owner) if names else {}
    return {name: hints[name] for name in names}


def _nearest(word: str, accepted: Iterable[str]) -> str:
    """What would have been accepted, the most likely first."""
    accepted = list(dict.fromkeys(accepted))
    return f"{_meant(word, accepted)}; accepted: {', '.join(accepted)}"


def _meant(word: str, accepted: Sequence[str]) -> str:
    match = difflib.get_close_matches(word, accepted, n=1, cutoff=0.6)
    return f" (did you mean '{match[0]}'?)" if match else ""


def show(value: Any) -> str:
    """A value, cut to fit a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
