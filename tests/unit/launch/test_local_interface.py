"""Addresses of this node, and the interfaces that have them."""

from __future__ import annotations

import pytest

from asyncdist.launch.config import interface_with
from asyncdist.transport import addresses
from asyncdist.transport.addresses import Interface, list_interfaces


def test_every_address_of_this_host_is_found() -> None:
    interfaces = list_interfaces()
    assert interfaces
    for interface in interfaces:
        assert interface_with(interface.ip) in {each.name for each in interfaces if each.ip == interface.ip}
    assert interface_with("localhost") == interface_with("127.0.0.1")


def test_addresses_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "list_interfaces", lambda: [Interface("eth0", "10.0.0.1")])
    assert interface_with("10.0.0.1") == "eth0"
    with pytest.raises(ValueError, match=r"no network interface here has '10\.0\.0\.2'.*eth0 \(10\.0\.0\.1\)"):
        interface_with("10.0.0.2")
    with pytest.raises(ValueError, match="is no address"):
        interface_with("x" * 64 + ".invalid")
