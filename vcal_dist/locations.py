"""Network locations in files that may be a stranger's: they are shown, and used only with the user's word.

A run is sent around with a record of its configuration, which names a store and perhaps a Dask scheduler. To open a
store on the network sends a signed request to whoever the record names; what a Dask scheduler answers is unpickled,
which runs code. So what a record says of where to compute is left aside, and a store on the network is opened if it is
given on the command line (`--store`), or if the record is trusted as a whole (`--trust-locations`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KEYS = ("store", "data.scheduler", "output")  # of a configuration, that may be addresses


def is_remote(location: str) -> bool:
    """Whether to use it means to ask another machine, as far as can be told from its form."""
    return "://" in location.removeprefix("file://") or "::" in location


def remote_locations(config: Mapping[str, Any]) -> dict[str, str]:
    """The network locations in plain data of a configuration, by their keys."""
    found = {}
    for key in KEYS:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        # A scheduler's address may also be written host:port.
        if isinstance(value, str) and (is_remote(value) or (key == "data.scheduler" and ":" in value)):
            found[key] = value
    return found


def refusal(source: str, found: Mapping[str, str], cure: str) -> str:
    """What to tell a user, instead of asking those places."""
    named = " and ".join(f"{key} {value}" for key, value in found.items())
    return (
        f"{source} names a location on the network that you did not: {named}; if you trust it, {cure}, or add "
        "--trust-locations"
    )
