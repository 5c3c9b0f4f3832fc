"""torchrun's --local-addr: an address of this node, as the network interface that the workers are to use."""

from __future__ import annotations

import socket

from asyncdist.transport.addresses import list_interfaces

__all__ = ["interface_with"]


def interface_with(host: str) -> str:
    """The name of the interface that has the address `host`, or one that the name `host` stands for.

    Resolves names, so it may block. Raises ValueError if there is none, listing what is there.
    """
    interfaces = list_interfaces()
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{host!r} is no address and no name that resolves: {error}") from error
    addresses = {str(entry[4][0]) for entry in found}
    for interface in interfaces:
        if interface.ip in addresses:
            return interface.name
    there = ", ".join(f"{each.name} ({each.ip})" for each in interfaces) or "none"
    raise ValueError(f"no network interface here has {host!r}; interfaces that are up: {there}")
