"""Where the launchers' own store listens, and where the others are told that it does."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdist.errors import LaunchError
from asyncdist.launch.rendezvous.links import LinkHost, LinkPlace, open_link

LOOPBACK = SimpleNamespace(endpoint=SimpleNamespace(host="127.0.0.1", port=1), interface=None)


def host(**variables: str) -> LinkHost:
    job: Any = LOOPBACK
    return LinkHost(job, job, {f"ASYNCDIST_{name}": value for name, value in variables.items()})


async def test_the_launchers_store_takes_a_port_that_is_open_in_a_firewall() -> None:
    """A rank has the only one there is: the launcher says so, and takes that port once the rank is gone."""
    with socket.create_server(("127.0.0.1", 0)) as rank:
        port = rank.getsockname()[1]
        links = host(PORT_RANGE=str(port))
        with pytest.raises(LaunchError, match=f"every port of ASYNCDIST_PORT_RANGE={port}-{port} is in use"):
            await links.place()
    try:
        place = await links.place()
        assert place.port == port
        await (await links.open(place)).close()
    finally:
        await links.close()


async def test_the_others_are_told_the_advertised_address() -> None:
    links = host(ADVERTISE="192.0.2.7:31000")
    try:
        place = await links.place()
        assert place.host == "192.0.2.7"
        await (await open_link(LinkPlace("127.0.0.1", place.port, place.key))).close()
    finally:
        await links.close()
