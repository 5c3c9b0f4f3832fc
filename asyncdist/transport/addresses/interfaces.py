"""Network interfaces of this host, and which of them `ASYNCDIST_SOCKET_IFNAME` chooses.

The list comes from getifaddrs(3) through ctypes: the standard library lists names only, and the older ioctl knows
neither IPv6 nor a second address of one interface.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from asyncdist_server.serving.sockets import is_loopback

__all__ = ["Interface", "is_local_ip", "list_interfaces", "select_ips"]

_IFF_UP: Final = 0x1
_FAMILY_OFFSET: Final = 1 if sys.platform == "darwin" else 0
"""BSD's sockaddr starts with its own length; Linux's with a 16-bit family."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of one network interface."""

    name: str
    ip: str


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = [
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("netmask", ctypes.c_void_p),
    ("destination", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def _ip_at(address: int) -> str | None:
    """Text of the IP address in the C sockaddr at `address`, or None for another family."""
    if sys.platform == "darwin":
        family = ctypes.c_uint8.from_address(address + _FAMILY_OFFSET).value
    else:
        family = ctypes.c_uint16.from_address(address).value
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(address + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(address + 8, 16))
    return None


def list_interfaces() -> list[Interface]:
    """Addresses of the interfaces that are up, in the kernel's order.

    IPv6 link-local addresses are left out: they mean nothing without an interface of the peer's. Raises OSError.
    """
    libc: Any = ctypes.CDLL(None, use_errno=True)  # what the process has loaded: looking for it would start programs
    libc.getifaddrs.argtypes = [ctypes.POINTER(ctypes.POINTER(_Ifaddrs))]
    libc.freeifaddrs.argtypes = [ctypes.POINTER(_Ifaddrs)]
    libc.freeifaddrs.restype = None
    head = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    found = []
    try:
        node = head
        while node:
            entry = node.contents
            if entry.flags & _IFF_UP and entry.address:
                ip = _ip_at(entry.address)
                if ip is not None and not (ipaddress.ip_address(ip).version == 6 and ip.startswith("fe80")):
                    found.append(Interface(entry.name.decode(errors="replace"), ip))
            node = entry.next
    finally:
        libc.freeifaddrs(head)
    return found


def select_ips(spec: str, interfaces: Sequence[Interface]) -> tuple[str, ...]:
    """Addresses of `interfaces` that `spec` chooses, e.g. `"eth0"`, `"eth,ib0"`, `"^docker,veth"`.

    Items are interface names; an item that is nobody's name is a prefix. `^` excludes, and at the front of `spec`
    excludes all that follows, as NCCL_SOCKET_IFNAME does. Loopback has to be asked for by name. Raises ValueError when
    nothing is left, listing what is there.
    """
    items = [item.strip() for item in spec.split(",") if item.strip()]
    all_excluded = bool(items) and items[0].startswith("^")
    included = [] if all_excluded else [item for item in items if not item.startswith("^")]
    excluded = items if all_excluded else [item for item in items if item.startswith("^")]
    names = {interface.name for interface in interfaces}

    def matches(name: str, item: str) -> bool:
        return name == item if item in names else name.startswith(item)

    banned = {name for name in names for item in excluded if matches(name, item.removeprefix("^"))}
    if included:
        chosen = [i for item in included for i in interfaces if matches(i.name, item)]
    else:
        chosen = [i for i in interfaces if not is_loopback(i.ip)]
    ips = tuple(dict.fromkeys(i.ip for i in chosen if i.name not in banned))
    if not ips:
        there = ", ".join(f"{i.name} ({i.ip})" for i in interfaces) or "none"
        raise ValueError(f"no network interface matches {spec!r}; interfaces that are up: {there}")
    return ips


def is_local_ip(ip: str) -> bool:
    """Whether this host owns `ip`: binding to it is the one question the kernel answers truthfully."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True
