"""Whether an address is of this host only."""

from __future__ import annotations

import ipaddress


def is_loopback(ip: str) -> bool:
    """Whether `ip` (text, with or without a scope) can only be reached from its own host; ValueError if it is none."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
