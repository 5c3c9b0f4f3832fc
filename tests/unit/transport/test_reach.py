"""Dialing what listens, or does not: what is reached, and how what is not fails, all at once and in bounded time."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack

import pytest

from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.connections.dialer import Target
from asyncdist.transport.connections.reach import reach
from asyncdist.world.network import DIALED, _dialed


def target(address: object, source: str = "") -> Target:
    family = socket.AF_UNIX if isinstance(address, bytes) else socket.AF_INET
    return Target(family, address, f"to {address!r}", source=source)


def listening(stack: ExitStack, address: object, backlog: int = 8) -> socket.socket:
    sock = stack.enter_context(socket.socket(target(address).family, socket.SOCK_STREAM))
    sock.bind(address)  # type: ignore[arg-type]
    sock.listen(backlog)
    return sock


@pytest.mark.slow("waits for what does not answer")
def test_each_is_reached_or_fails_in_its_own_way_and_nothing_is_left_open() -> None:
    name = b"\0reach-%d" % os.getpid()
    with ExitStack() as stack:
        tcp, full = (listening(stack, ("127.0.0.1", 0), backlog).getsockname() for backlog in (8, 0))
        unix, full_unix = listening(stack, name), listening(stack, name + b"-full", 0)
        for where, times in ((full, 2), (name + b"-full", 1)):
            for _ in range(times):
                client = stack.enter_context(socket.socket(target(where).family, socket.SOCK_STREAM))
                client.setblocking(False)
                client.connect_ex(where)
        with socket.create_server(("127.0.0.1", 0)) as gone:
            closed = gone.getsockname()
        descriptors = len(os.listdir("/proc/self/fd"))
        began_s = time.monotonic()
        asked = [tcp, closed, full, unix.getsockname(), full_unix.getsockname(), name + b"-not"]
        found = reach([*map(target, asked), target(tcp, "203.0.113.7")], 0.5)
        assert time.monotonic() - began_s < 5
        assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [one["to"] for one in found[:6]] == [f"to {where!r}" for where in asked]
    errors = [one.get("error") for one in found]
    assert errors == [None, "ECONNREFUSED", "ETIMEDOUT", None, None, "ECONNREFUSED", "EADDRNOTAVAIL"]
    assert all(0 <= one["rtt_s"] < 0.5 for one in found if "error" not in one)


def test_of_many_ranks_each_dials_one_of_each_host_and_all_are_dialed() -> None:
    few = {rank: PeerAddress(str(rank)) for rank in range(DIALED + 1)}
    assert _dialed(0, few) == list(range(1, DIALED + 1))
    ranks_per_host, hosts = 8, 2 * DIALED
    known = {rank: PeerAddress(str(rank // ranks_per_host)) for rank in range(ranks_per_host * hosts)}
    dialed = {rank: _dialed(rank, known) for rank in known}
    assert all(len(others) == DIALED and rank not in others for rank, others in dialed.items())
    assert all(len({other // ranks_per_host for other in others}) == DIALED for others in dialed.values())
    assert set().union(*dialed.values()) == set(known)
