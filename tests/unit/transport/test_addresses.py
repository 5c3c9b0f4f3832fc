"""What a rank advertises, and what it believes of others."""

from __future__ import annotations

import contextlib
import socket
from types import SimpleNamespace
from typing import Any

import msgpack
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdist.errors import DistNetworkError, RemoteProtocolError
from asyncdist.transport import addresses as address_module
from asyncdist.transport.addresses import (
    MAX_ADDRESS_BYTES,
    MAX_ENDPOINTS,
    Interface,
    PeerAddress,
    host_id,
    is_local_ip,
    list_interfaces,
    local_address,
    select_ips,
)

INTERFACES = [
    Interface("lo", "127.0.0.1"),
    Interface("lo", "::1"),
    Interface("eth0", "10.0.0.5"),
    Interface("eth0", "fd00::5"),
    Interface("eth10", "10.1.0.5"),
    Interface("docker0", "172.17.0.1"),
]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("eth0", ("10.0.0.5", "fd00::5")),
        ("eth1", ("10.1.0.5",)),  # nobody's name, so a prefix
        ("eth", ("10.0.0.5", "fd00::5", "10.1.0.5")),
        ("eth10,eth0", ("10.1.0.5", "10.0.0.5", "fd00::5")),
        ("^docker", ("10.0.0.5", "fd00::5", "10.1.0.5")),
        ("^docker,eth10", ("10.0.0.5", "fd00::5")),
        ("eth,^eth10", ("10.0.0.5", "fd00::5")),
        (" lo ", ("127.0.0.1", "::1")),
    ],
)
def test_interface_specs(spec: str, expected: tuple[str, ...]) -> None:
    assert select_ips(spec, INTERFACES) == expected


@pytest.mark.parametrize("spec", ["ib", "^eth,docker", "eth0,^eth"])
def test_spec_that_matches_nothing_lists_what_is_there(spec: str) -> None:
    with pytest.raises(ValueError, match=r"docker0 \(172\.17\.0\.1\)"):
        select_ips(spec, INTERFACES)


def test_listed_interfaces_are_ours() -> None:
    interfaces = list_interfaces()
    assert "127.0.0.1" in {interface.ip for interface in interfaces}
    assert {interface.name for interface in interfaces} <= {name for _index, name in socket.if_nameindex()}
    assert all(is_local_ip(interface.ip) for interface in interfaces)
    assert not is_local_ip("192.0.2.213")


def test_only_interfaces_that_are_up_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface that is up counts with nothing plugged in, and under each of its names; link-local ones never do."""

    def address(family: int, ip: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=ip)

    monkeypatch.setattr(
        psutil,
        "net_if_addrs",
        lambda: {
            "eth0": [address(socket.AF_INET, "10.0.0.5"), address(socket.AF_INET6, "fd00::5")],
            "eth0:1": [address(socket.AF_INET, "10.0.0.6")],
            "eth1": [address(socket.AF_INET, "10.1.0.5"), address(socket.AF_INET6, "fe80::5%eth1")],
            "eth2": [address(socket.AF_INET, "10.2.0.5"), address(psutil.AF_LINK, "02:fc:00:00:00:01")],
            "gone": [address(socket.AF_INET, "10.3.0.5")],
        },
    )
    flags = {"eth0": "up,broadcast,running", "eth1": "up,broadcast", "eth2": "broadcast,noarp,lower_up"}
    stats = {name: SimpleNamespace(isup="running" in each, flags=each) for name, each in flags.items()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    assert list_interfaces() == [
        Interface("eth0", "10.0.0.5"),
        Interface("eth0:1", "10.0.0.6"),
        Interface("eth1", "10.1.0.5"),
        Interface("eth0", "fd00::5"),
    ]


async def test_named_interface_wins() -> None:
    found = await local_address("192.0.2.1", 80, {"ASYNCDIST_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "nonsense"})
    assert "127.0.0.1" in found.ips
    assert found.loopback
    assert "127.0.0.1" in (await local_address("192.0.2.1", 80, {"GLOO_SOCKET_IFNAME": "lo"})).ips


@pytest.mark.parametrize(
    ("spec", "ips", "interfaces"),
    [
        ("eth0,eth1", ("10.0.0.5", "10.1.0.5", "fd00::5"), 2),
        ("eth1,eth0", ("10.1.0.5", "10.0.0.5", "fd00::5"), 2),
        ("eth", ("10.0.0.5", "10.1.0.5", "10.0.0.6", "fd00::5"), 2),
        ("eth0", ("10.0.0.5", "fd00::5"), 1),
        ("^lo", ("10.0.0.5", "10.0.0.6", "10.1.0.5", "fd00::5"), 1),
        ("eth,^eth1", ("10.0.0.5", "10.0.0.6", "fd00::5"), 1),
    ],
)
async def test_interfaces_that_are_named_are_all_used(
    monkeypatch: pytest.MonkeyPatch, spec: str, ips: tuple[str, ...], interfaces: int
) -> None:
    there = [
        Interface("eth0", "10.0.0.5"),
        Interface("eth0:1", "10.0.0.6"),
        Interface("eth1", "10.1.0.5"),
        Interface("eth0", "fd00::5"),
    ]
    monkeypatch.setattr("asyncdist.transport.addresses.list_interfaces", lambda: there)
    found = await local_address("192.0.2.1", 80, {"GLOO_SOCKET_IFNAME": spec})
    assert (found.ips, found.interfaces) == (ips, interfaces)
    other_side = {"GLOO_SOCKET_IFNAME": spec, "ASYNCDIST_ADVERTISE": "192.0.2.7"}
    assert (await local_address("192.0.2.1", 80, other_side)).interfaces == 1


@pytest.mark.parametrize(
    ("text", "advertised"),
    [
        ("192.0.2.7", (("192.0.2.7", 0),)),
        ("192.0.2.7:31000", (("192.0.2.7", 31_000),)),
        (" 192.0.2.7 , [2001:db8::1]:5 ", (("192.0.2.7", 0), ("2001:db8::1", 5))),
        ("2001:db8::1", (("2001:db8::1", 0),)),
        ("", ()),
    ],
)
async def test_what_is_advertised_can_be_said(text: str, advertised: tuple[tuple[str, int], ...]) -> None:
    found = await local_address(None, 0, {"ASYNCDIST_ADVERTISE": text})
    assert found.advertised == advertised
    assert found.ips == ("127.0.0.1",)
    assert found.loopback is not bool(advertised)


async def test_an_advertised_name_is_resolved_here() -> None:
    ((ip, port),) = (await local_address(None, 0, {"ASYNCDIST_ADVERTISE": "localhost:31000"})).advertised
    assert ip in ("127.0.0.1", "::1")
    assert port == 31_000
    with pytest.raises(DistNetworkError, match=r"ASYNCDIST_ADVERTISE: cannot resolve 'nobody\.invalid'"):
        await local_address(None, 0, {"ASYNCDIST_ADVERTISE": "nobody.invalid"})


@pytest.mark.parametrize("text", ["192.0.2.7:0", "192.0.2.7:x", "192.0.2.7:65536", ":5", "[::1]:"])
async def test_what_cannot_be_advertised_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no host:port with a port of 1 to 65535"):
        await local_address(None, 0, {"ASYNCDIST_ADVERTISE": text})


async def test_unknown_interface_names_the_variable() -> None:
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME: no network interface matches 'nonsense'"):
        await local_address("127.0.0.1", 80, {"GLOO_SOCKET_IFNAME": "nonsense"})


async def test_route_to_the_store_decides() -> None:
    assert (await local_address("127.0.0.1", 80, {})).ips == ("127.0.0.1",)
    assert (await local_address("localhost", 80, {})).loopback
    assert (await local_address(None, 0, {})).loopback


async def test_store_on_loopback_means_what_master_addr_resolves_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
        return socket.AF_INET, ({"node0": "10.0.0.5", "node1": "10.0.0.6"}.get(host, host), port)

    monkeypatch.setattr(address_module, "_resolve", resolve)
    monkeypatch.setattr(address_module, "is_local_ip", "10.0.0.5".__eq__)
    assert (await local_address("127.0.0.1", 80, {"MASTER_ADDR": "node0"})).ips == ("10.0.0.5",)
    assert (await local_address("127.0.0.1", 80, {"MASTER_ADDR": "node1"})).loopback  # another host's address
    assert (await local_address("127.0.0.1", 80, {"MASTER_ADDR": "127.0.0.1"})).loopback
    assert (await local_address("127.0.0.1", 80, {"MASTER_ADDR": "[node0]"})).ips == ("10.0.0.5",)


async def test_unresolvable_store() -> None:
    with pytest.raises(DistNetworkError, match=r"cannot resolve 'no\.such\.host\.invalid'"):
        await local_address("no.such.host.invalid", 80, {})


def test_host_id_is_stable() -> None:
    assert host_id() == host_id() != ""


endpoints = st.tuples(st.ip_addresses().map(str), st.integers(1, 65535))
addresses = st.builds(
    PeerAddress,
    st.text(max_size=256),
    st.lists(endpoints, max_size=MAX_ENDPOINTS).map(tuple),
    st.binary(max_size=256),
)


@given(addresses)
def test_round_trip(address: PeerAddress) -> None:
    assert PeerAddress.from_bytes(address.to_bytes()) == address


@given(
    st.binary(max_size=200) | st.recursive(st.none() | st.integers(-9, 70000) | st.text(), st.lists).map(msgpack.packb)
)
def test_hostile_bytes(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        PeerAddress.from_bytes(data)


def test_limits() -> None:
    endpoint = ("10.0.0.1", 1)
    assert PeerAddress.from_bytes(PeerAddress("h", (endpoint,) * MAX_ENDPOINTS).to_bytes())
    with pytest.raises(RemoteProtocolError, match="endpoints"):
        PeerAddress.from_bytes(PeerAddress("h", (endpoint,) * (MAX_ENDPOINTS + 1)).to_bytes())
    with pytest.raises(RemoteProtocolError, match="malformed"):
        PeerAddress.from_bytes(bytes(MAX_ADDRESS_BYTES))
    with pytest.raises(RemoteProtocolError, match="exceeds"):
        PeerAddress.from_bytes(bytes(MAX_ADDRESS_BYTES + 1))
    for port in (0, 65536):
        with pytest.raises(RemoteProtocolError, match="endpoint"):
            PeerAddress.from_bytes(PeerAddress("h", (("10.0.0.1", port),)).to_bytes())
    with pytest.raises(RemoteProtocolError, match="malformed"):
        PeerAddress.from_bytes(PeerAddress("h", (("some.host", 80),)).to_bytes())
