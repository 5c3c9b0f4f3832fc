"""Where the launchers' own store listens, and what they find out by it when a host is cut off."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from asyncdist.errors import DistStoreError, LaunchError
from asyncdist.launch.rendezvous import links as links_module
from asyncdist.launch.rendezvous.links import CUT_OFF, LinkHost, LinkPlace, Links, beside, open_link
from asyncdist.store import HashStore
from asyncdist.transport import addresses
from asyncdist.transport.addresses import LocalAddress

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


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address on Linux only")
@pytest.mark.parametrize("other", ["127.0.0.2", "::1"])
async def test_launchers_of_several_interfaces_are_reached_by_each(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    if not addresses.is_local_ip(other):
        pytest.skip(f"this host has no {other}")

    async def two(*_: object) -> LocalAddress:
        return LocalAddress(("127.0.0.1", other), (), 2)

    monkeypatch.setattr(addresses, "local_address", two)
    links = host()
    try:
        place = await links.place()
        assert place.host == f"127.0.0.1,{other}"
        async with asyncio.timeout(60), await links.open(place) as store:
            client: Any = store
            used = set()
            for _ in range(2):
                await store.set("k", "v")
                used.add(client._connection._socket.getpeername()[0])
                client._connection._socket.shutdown(socket.SHUT_RDWR)
            assert used == {"127.0.0.1", other}
    finally:
        await links.close()


class Trio:
    """The launchers of three nodes, with the store of node 0; `cut` hosts answer nobody."""

    def __init__(self) -> None:
        first = HashStore()
        self.cut: set[int] = set()
        self.links = [self._link(node, first if node == 0 else first.clone()) for node in range(3)]
        self.heard: list[asyncio.Queue[tuple[int | None, str]]] = [asyncio.Queue() for _ in range(3)]

    def _link(self, node: int, store: HashStore) -> Links:
        async def connect(place: LinkPlace) -> HashStore:
            if (node in self.cut) != (place.port in self.cut):
                raise LaunchError("no answer")
            return HashStore()

        places = [LinkPlace("h", port, "key") for port in range(3)]
        return Links(store, node, 3, grace_s=60.0, lost_after_s=0.15, places=places, open=connect)

    def cut_off(self, node: int) -> None:
        """No request of the host gets an answer any more, nor does one of others at a store that it hosts."""
        self.cut.add(node)
        for number, links in enumerate(self.links):
            store: Any = links.store
            if (number == node) != (node == 0):
                store.lease_keeper._ask = lambda *_: asyncio.get_running_loop().create_future()
                store.check = self._no_answer

    async def _no_answer(self, keys: list[str]) -> bool:
        raise DistStoreError("no answer")

    async def watched(self, stack: AsyncExitStack, victim: int | None = None) -> None:
        """All have met, and watch; who is about to be cut off from the store will see nothing there."""
        await asyncio.gather(*(links.meet() for links in self.links))
        for number, (links, heard) in enumerate(zip(self.links, self.heard, strict=True)):

            async def on_gone(node: int | None, why: str, heard: Any = heard) -> None:
                heard.put_nowait((node, why))

            sees_nothing = number != 0 and victim in (0, number)
            watch = links._watch_own(on_gone) if sees_nothing else links.watch(on_gone)
            await stack.enter_async_context(beside(watch))


@pytest.mark.parametrize("victim", [0, 1, 2])
async def test_a_host_that_is_cut_off_knows_it_and_the_others_name_it(victim: int) -> None:
    trio = Trio()
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        await trio.watched(stack, victim)
        trio.cut_off(victim)
        for node in range(3):
            gone, why = await trio.heard[node].get()
            if node == victim:
                assert (gone, why, trio.links[node].cut_off) == (None, CUT_OFF, True)
            else:
                assert (gone, why) == (None if victim == 0 else victim, "no sign of life for 0.15 s")
                assert not trio.links[node].cut_off
        for _ in range(20):
            await asyncio.sleep(0)
        assert trio.heard[victim].empty()  # the others are not named one by one


async def test_a_host_that_was_only_silent_learns_that_it_was_given_up() -> None:
    trio = Trio()
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        await trio.watched(stack)
        silent: Any = trio.links[1].store
        silent.lease_keeper._ask = lambda *_: asyncio.get_running_loop().create_future()
        assert await trio.heard[2].get() == (1, "no sign of life for 0.15 s")
        assert await trio.heard[1].get() == (1, "was silent for 0.15 s, and the others gave it up")


async def test_all_launchers_hear_which_ranks_of_any_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "_LOOK_S", 0.01)
    links = Trio().links
    stopped: list[list[int]] = [[], [2, 3], []]
    heard: list[asyncio.Queue[list[int]]] = [asyncio.Queue() for _ in range(3)]

    def share(node: int) -> Coroutine[Any, Any, None]:
        return links[node].share_stopped(lambda: list(stopped[node]), heard[node].put_nowait)

    async with asyncio.timeout(60):
        async with beside(share(0), share(1)):
            assert await heard[0].get() == await heard[1].get() == [2, 3]
            async with beside(share(2)):
                assert await heard[2].get() == [2, 3]
                stopped[2] = [5]
                for each in heard:
                    assert await each.get() == [2, 3, 5]
                stopped[1] = []
                for each in heard:
                    assert await each.get() == [5]
        stopped[2] = []  # another attempt begins
        async with beside(*map(share, range(3))):
            while await heard[0].get():
                pass


async def test_launchers_that_cannot_reach_the_store_share_nothing() -> None:
    links = Trio().links[1]
    await links.store.close()
    await asyncio.wait_for(links.share_stopped(lambda: [1], pytest.fail), 60)


async def test_no_leave_is_taken_of_a_launcher_that_is_gone() -> None:
    trio = Trio()
    await asyncio.gather(*(links.meet() for links in trio.links))
    trio.links[1].store.set = pytest.fail  # type: ignore[method-assign]
    await trio.links[1].leave({0}, last=False)
