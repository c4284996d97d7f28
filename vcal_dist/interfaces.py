"""The network interface through which the processes of a training reach each other.

gloo listens at the address that the host's own name resolves to. On Debian and Ubuntu that is loopback, where no other
host can connect. So the interface is chosen here, as the one from which this host reaches the meeting point.
"""

from __future__ import annotations

import ipaddress
import os
import socket

import psutil

# By backend: the variable, and how it names one interface and no other that begins alike.
VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
ELSEWHERE = "192.0.2.1"  # never assigned (RFC 5737): the way there is the default route


def use_interface(meeting: str, *, nodes: int = 1) -> None:
    """Tells gloo and NCCL the interface of this host towards a meeting point, unless the user has chosen one.

    `meeting` is the name or address of the host where the processes meet. Where no interface can be told, the
    libraries make their own choice.
    """
    name = _interface(meeting, nodes)
    if name is not None:
        for variable, form in VARIABLES.items():
            os.environ.setdefault(variable, form.format(name))


def _interface(meeting: str, nodes: int) -> str | None:
    own = _address_towards(meeting)
    if nodes > 1 and (own is None or own.is_loopback):  # the first host may know its own name as loopback's
        own = _address_towards(ELSEWHERE) or _only_address()
    return None if own is None else _names().get(own)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def _address_towards(host: str) -> Address | None:
    """This host's address on the route to another one. Connecting a datagram socket sends nothing."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, target in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                return _parse(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _only_address() -> Address | None:
    """The address of the one interface that is up and leads out of this host."""
    states = psutil.net_if_stats()
    leading_out = {
        name: address
        for address, name in _names().items()
        if not address.is_loopback and not address.is_link_local and states[name].isup
    }
    return next(iter(leading_out.values())) if len(leading_out) == 1 else None


def _names() -> dict[Address, str]:
    """Interfaces by their addresses."""
    return {
        _parse(one.address): name
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6)
    }


def _parse(address: str) -> Address:
    return ipaddress.ip_address(address.partition("%")[0])  # without the zone of a link-local address
