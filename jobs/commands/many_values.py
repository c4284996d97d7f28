"""Options that take several values after one flag: `--runs a.csv b.csv` as well as `--runs a.csv --runs b.csv`."""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand


class ManyValuesCommand(TyperCommand):
    """A command whose repeatable options take every value up to the next option.

    The parser under Typer gives an option a fixed number of values, so the arguments are spread out before it
    reads them. Positional arguments therefore come before such an option, or after another option's value.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse `args` after spreading the values of repeatable options."""
        flags = {flag for param in self.params if getattr(param, "multiple", False) for flag in param.opts}
        return super().parse_args(ctx, spread(args, flags))


def spread(args: Iterable[str], flags: set[str]) -> list[str]:
    """Repeat each of `flags` before every one of its values.

    >>> spread(["p.yaml", "--runs", "a", "b", "-o", "out"], {"--runs"})
    ['p.yaml', '--runs', 'a', '--runs', 'b', '-o', 'out']
    """
    result: list[str] = []
    flag: str | None = None  # the flag whose values are being read
    fresh = False  # it has no value yet
    remaining = iter(args)
    for word in remaining:
        name, equals, value = word.partition("=")
        if word == "--":  # what follows is positional, whatever it looks like
            return [*result, word, *remaining]
        if name in flags:
            flag, fresh = name, not equals
            result += [name, value] if equals else [name]
        elif word.startswith("-") and word != "-":
            flag = None
            result.append(word)
        elif flag is not None and not fresh:
            result += [flag, word]
        else:
            fresh = False
            result.append(word)
    return result
