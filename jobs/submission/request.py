"""What is asked to run elsewhere: `vcal train CONFIG …` or `vcal sweep CONFIG …`.

The command line is checked here and now, as the command itself would, and the configuration is frozen: overrides
applied, paths absolute. What travels is that file and options of ours, so that no name, path or value of the user's
meets a shell on the way, and an edit of the file does not change what waits in a queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import typer

from storage import strict_yaml
from vcal_dist.errors import ConfigError

COMMANDS = ("train", "sweep")
EXAMPLE = "as in: vcal submit ray -- train config.yaml"
ON_RAY = ("--on", "ray")
NAME_LENGTH = 40  # queues have names of their own to add, and columns to show them in


@dataclass(frozen=True)
class Request:
    """One command with its configuration."""

    command: Literal["train", "sweep"]
    plain: dict[str, Any]  # the configuration: texts, numbers, lists, mappings
    options: tuple[str, ...]  # of the command, in its own spelling

    @property
    def output(self) -> str:
        """Where the result will lie."""
        return str(self.plain["output"])

    @property
    def name(self) -> str:
        """A name for queues, from the output's: ASCII letters, digits, `-`, `_` and `.`, and not too long."""
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", PurePosixPath(self.output).name)[:NAME_LENGTH].strip("-.")
        return f"vcal-{plain or self.command}"

    @property
    def text(self) -> str:
        """The configuration as a file."""
        return strict_yaml.dump(self.plain)

    def arguments(self, config: str) -> list[str]:
        """What follows `vcal`, with the configuration at a path."""
        return [self.command, config, *self.options]

    def on_ray(self) -> Request:
        """The same on the Ray cluster that it will run in, unless it says where: a sweep is there anyway."""
        if self.command == "sweep" or "--on" in self.options:
            return self
        return Request(self.command, self.plain, (*ON_RAY, *self.options))


def request(arguments: Sequence[str]) -> Request:
    """The request in a command line without `vcal`; mistakes in it are told as the command itself would tell them."""
    from jobs.cli import app

    if not arguments or arguments[0] not in COMMANDS:
        given = f"'{arguments[0]}'" if arguments else "nothing"
        raise ConfigError(f"cannot submit {given}; accepted: {' or '.join(COMMANDS)}, {EXAMPLE}")
    name, *rest = arguments
    command: Any = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined] # of a group
    context = command.make_context(f"vcal {name}", rest)
    values = context.params
    if values.get("schema"):
        raise ConfigError("--schema prints the schema here, there is nothing to submit: run it as vcal train --schema")
    if values["config"] is None:
        raise ConfigError(f"{name} needs a configuration file, {EXAMPLE}")
    options = tuple(word for parameter in command.params for word in _spelled(parameter, context))
    config, overrides = Path(values["config"]), values["overrides"] or []
    trust = bool(values.get("trust_locations"))
    if name == "sweep":
        from jobs.sweeps.settings import load as load_sweep

        return Request("sweep", load_sweep(config, overrides, trust_locations=trust).plain(), options)
    from jobs.config import load

    return Request("train", load(config, overrides, trust_locations=trust).plain(), options)


def _spelled(parameter: Any, context: Any) -> Iterator[str]:
    """An option as it was given; one that was not is left to the command, also where its default is another."""
    source = context.get_parameter_source(parameter.name)
    if parameter.param_type_name != "option" or source is None or source.name != "COMMANDLINE":
        return
    value = context.params[parameter.name]
    if isinstance(value, bool):
        yield max(parameter.opts if value else parameter.secondary_opts, key=len)
        return
    for one in value if isinstance(value, list | tuple) else [value]:
        yield from (max(parameter.opts, key=len), str(one))
