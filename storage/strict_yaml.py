"""Every YAML file is read and written here: problems, configurations, sweeps and the records of runs.

Plain YAML 1.1 has traps for people (`010` is 8, `1:30` is 90, the last of two equal keys wins) and for machines: ten
lines of aliases stand for a billion values. What has two readings is refused with both, and what a file stands for
is counted while it is read, before memory is taken for it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from storage.errors import VcalError
from storage.regular import open_regular
from storage.room import because

MOST_BYTES = 1 << 20  # of a file: some seconds of reading
MOST_VALUES = 50_000  # that a file stands for, with every alias written out; 64 characters of a text count as one more
MOST_LEVELS = 64
MOST_DIGITS = 100  # of a number: more have no float64, and Python does not print some thousands
TAG = "tag:yaml.org,2002:"
PLAIN_TAGS = ("null", "bool", "int", "float", "str", "seq", "map")  # what JSON has too
EXPONENT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
OCTAL = re.compile(r"[-+]?0[0-7_]+$")


class _Loader(yaml.SafeLoader):
    """Safe YAML without dates, in which 1e-3 is a number (PyYAML wants 1.0e-3) and a key is a text that stands once."""

    yaml_constructors = {  # noqa: RUF012 - as in the base class
        tag: made
        for tag, made in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.removeprefix(TAG) in PLAIN_TAGS
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.level = self.values = 0
        self.weights: dict[int, int] = {}  # values of complete nodes with aliases written out, by identity

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self.level += 1
        self.values += 1
        if self.level > MOST_LEVELS:
            raise _fault(f"there are more than {MOST_LEVELS} levels of lists and mappings", event.start_mark)
        node = super().compose_node(parent, index)
        self.level -= 1
        if isinstance(event, yaml.AliasEvent):
            if id(node) not in self.weights:
                raise _fault(f"what '&{event.anchor}' names contains itself", event.start_mark)
        else:
            self.weights[id(node)] = self._weight(node)
        if max(self.weights[id(node)], self.values) > MOST_VALUES:
            raise _fault(f"this stands for more than {MOST_VALUES:,} values, aliases written out", event.start_mark)
        return node

    def _weight(self, node: Any) -> int:
        if isinstance(node, yaml.ScalarNode):
            _refuse_scalar(node)
            return 1 + len(node.value) // 64
        if isinstance(node, yaml.MappingNode):
            _refuse_keys(node)
            return 1 + sum(self.weights[id(part)] for pair in node.value for part in pair)
        return 1 + sum(self.weights[id(part)] for part in node.value)


def _refuse_scalar(node: yaml.ScalarNode) -> None:
    """What a person did not mean, or no file can hold."""
    text = node.value
    if node.tag in (TAG + "int", TAG + "float"):
        if len(text) > MOST_DIGITS:
            raise _fault(f"a number of {len(text)} characters; accepted: {MOST_DIGITS}", node.start_mark)
        sign = "-" if text.startswith("-") else ""
        if ":" in text:
            number = 0.0
            for part in text.lstrip("-+").replace("_", "").split(":"):
                number = 60 * number + float(part)
            cure = f"write {sign}{number:g}"
            raise _fault(f"'{text}' would be read as the number {sign}{number:g}; {cure}{QUOTES}", node.start_mark)
        if OCTAL.match(text) and text.strip("-+0_"):
            digits = text.lstrip("-+").replace("_", "")
            octal, decimal = f"{sign}{int(digits, 8)}", f"{sign}{int(digits)}"
            cure = f"write {octal} or {decimal}"
            raise _fault(f"'{text}' would be read as the number {octal}; {cure}{QUOTES}", node.start_mark)
    if any("\ud800" <= character <= "\udfff" for character in text):
        try:  # JSON writes a character beyond 16 bits as two halves, and is YAML
            node.value = text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            what = "a text has half of a character (a lone surrogate); write the character itself"
            raise _fault(what, node.start_mark) from None


QUOTES = ", or put it in quotes if it is a text"


def _refuse_keys(node: yaml.MappingNode) -> None:
    seen = set()
    for key, _ in node.value:
        if key.tag not in (TAG + "str", TAG + "merge"):
            shown = f"'{key.value}'" if isinstance(key, yaml.ScalarNode) else "that is a list or a mapping"
            raise _fault(f"the key {shown} is no text; put it in quotes", key.start_mark)
        if key.value in seen:
            raise _fault(f"the key '{key.value}' stands twice", key.start_mark)
        seen.add(key.value)


def _fault(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


class _Dumper(yaml.SafeDumper):
    """Safe YAML that the reader above reads back to the letter."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # written out where they stand: people read these files

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # Unless they are escaped, some rare ends of lines come back as others.
        return self.represent_scalar(TAG + "str", data, style=None if data.isprintable() else '"')


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag.removeprefix(TAG) != "timestamp"]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(TAG + "float", EXPONENT, list("-+.0123456789"))
_Dumper.add_implicit_resolver(TAG + "float", EXPONENT, list("-+.0123456789"))  # so that the text '1e-3' gets quotes
_Dumper.add_representer(str, _Dumper.represent_str)


def read(path: str | Path, error: type[VcalError], what: str = "the file") -> Any:
    """What a YAML file holds, None if nothing; whatever is wrong with it is an `error` that names it."""
    try:
        with open_regular(path) as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as fault:
        raise error(f"cannot read {what} {path}: {because(fault)}") from fault
    except ValueError as fault:  # a path with a NUL byte, or with half of a character
        raise error(f"cannot read {what} {str(path)!r}: {fault}") from None
    if len(data) > MOST_BYTES:
        raise error(f"{path} has more than {MOST_BYTES >> 20} MiB, which no YAML file of ours has; is it another file?")
    try:
        text = data.decode()
    except UnicodeDecodeError as fault:
        raise error(f"{path} is not a text file in UTF-8 ({fault}); {what} is YAML") from None
    return parse(text, str(path), error)


def parse(text: str, name: str, error: type[VcalError]) -> Any:
    """What a YAML text holds; `name` is where it comes from."""
    try:
        loader = _Loader(text)
        loader.name = name  # for the place in messages
        return loader.get_single_data()
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as fault:
        # Beside its own errors, PyYAML lets through those of int() and float() for a text such as `!!int x`.
        raise error(f"{name} is not valid YAML: {fault}") from None


def dump(plain: Any) -> str:
    """Plain data as a YAML text that `parse` reads back."""
    text: str = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text
