"""A durable daemon that is killed every few seconds: what nobody vouches for ends all the same, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sim_store_client import PORT, TOKEN
from sim_store_disk import SimulatedDisk

from asyncdist.store import TCPStore
from asyncdist.testing.network import SimulatedNetwork, run_simulated
from asyncdist_server.engine.history import HISTORY_LINGER_S
from asyncdist_server.engine.membership import JOB_LINGER_S
from asyncdist_server.journal.journal import decode
from asyncdist_server.serving.config import ServerConfig
from asyncdist_server.serving.daemon import StoreServer
from asyncdist_server.wire.messages import CLIENT_LINGER_S


class Town:
    """A daemon whose disk outlives it, and some hosts."""

    def __init__(self, network: SimulatedNetwork) -> None:
        self.network = network
        self.host = network.host("daemon")
        self.disk = SimulatedDisk(1)
        self.server: StoreServer | None = None

    async def start(self) -> StoreServer:
        self.host.restart()
        config = ServerConfig(self.host.address, PORT, token=TOKEN)
        self.server = self.host.run(StoreServer, config, self.disk.persistence())
        await self.network.outcome(self.host.spawn(self.server.start()))
        return self.server

    async def lives(self, life_s: float, lived_s: float) -> StoreServer:
        """Kill the daemon and start it again after every `life_s`, until it has run for `lived_s`; it runs then."""
        for _ in range(round(lived_s / life_s)):
            self.host.kill()
            await self.start()
            await asyncio.sleep(life_s)
        assert self.server is not None
        return self.server


def run(main: Callable[[Town], Awaitable[Any]]) -> None:
    async def whole(network: SimulatedNetwork) -> None:
        town = Town(network)
        await town.start()
        await main(town)

    run_simulated(whole, 1)


def held(server: StoreServer) -> dict[str, int]:
    """Everything in the store that ends by itself."""
    spaces = server.engine.namespaces.values()
    found = {name: server.engine.statistics()[name] for name in ("keys", "leases", "clients_away")}
    return found | {
        "holds": sum(len(space.holds) for space in spaces),
        "histories": sum(len(space.histories) for space in spaces),
    }


LONGEST_S = 20 + JOB_LINGER_S + max(CLIENT_LINGER_S, HISTORY_LINGER_S)
"""For how long at most daemons run until nothing is left of what `hold_everything` leaves behind."""


async def hold_everything(address: str) -> None:
    """What a client does that is about to vanish."""
    store = await TCPStore.connect(address, PORT, token=TOKEN, namespace="job")
    bound, by_time = await store.lease(10, bound=True), await store.lease(20)
    await store.set("bound", "x", lease=bound)
    await store.set("by time", "x", lease=by_time)
    await store.watch("watched/").__aenter__()
    assert (await store.join("job", 1)).epoch == 1


async def leave_everything(town: Town) -> None:
    lost = town.network.host("lost")
    await town.network.outcome(lost.spawn(hold_everything(town.host.address)))
    lost.vanish()


@pytest.mark.parametrize("life_s", [3.0, 11.0])
def test_what_nobody_vouches_for_ends_however_short_the_daemons_lives_are(life_s: float) -> None:
    async def main(town: Town) -> None:
        await leave_everything(town)
        found = held(await town.lives(life_s, life_s))
        assert all(found.values()), found
        assert not any(held(await town.lives(life_s, 2 * LONGEST_S)).values())

    run(main)


def test_what_nobody_vouches_for_ends_although_nobody_comes_after_a_restart() -> None:
    async def main(town: Town) -> None:
        await leave_everything(town)
        assert not any(held(await town.lives(LONGEST_S + 1, LONGEST_S + 1)).values())

    run(main)


def test_times_go_on_as_soon_as_the_daemon_is_back() -> None:
    async def main(town: Town) -> None:
        async def grant() -> None:
            await (await TCPStore.connect(town.host.address, PORT, token=TOKEN, namespace="job")).lease(0.4)

        lost = town.network.host("lost")
        await town.network.outcome(lost.spawn(grant()))
        lost.vanish()
        assert held(await town.lives(0.3, 0.3))["leases"] == 1
        assert held(await town.lives(0.5, 0.5))["leases"] == 0

    run(main)


def test_who_comes_back_in_every_life_keeps_what_it_has() -> None:
    async def stay(address: str, for_s: float) -> None:
        store = await TCPStore.connect(address, PORT, token=TOKEN, namespace="job")
        bound, by_time = await store.lease(10, bound=True), await store.lease(10)
        await store.set("bound", "x", lease=bound)
        await store.set("by time", "x", lease=by_time)
        async with store.watch("watched/") as watching:
            reading = asyncio.ensure_future(anext(watching))
            await asyncio.sleep(for_s)
            assert await store.check(["bound", "by time"])
            await store.set("watched/key", "x")
            assert (await reading).key == "watched/key"
        assert not bound.lost
        assert not by_time.lost

    async def main(town: Town) -> None:
        staying = town.network.host("staying").spawn(stay(town.host.address, 2 * LONGEST_S))
        await town.lives(5.0, 2 * LONGEST_S + 10)
        await town.network.outcome(staying)

    run(main)


def test_a_daemon_writes_seldom_for_how_long_it_has_run() -> None:
    """Not at all where nothing ends by itself; else so often that at least half of a life is noted when it ends."""

    async def main(town: Town) -> None:
        await asyncio.sleep(3600)
        assert town.disk.writes == 0
        await leave_everything(town)
        before = town.disk.writes
        await town.lives(3600, 3600)
        rows = [decode(row)[2] for number, row in sorted(town.disk.rows.items()) if number > before]
        began = rows[0][0][2][0][1]
        lived = [sections[0][2][0][0] - began for sections in rows]
        assert lived[0] < 1.01
        assert all(later < 2 * earlier + 1.01 for earlier, later in itertools.pairwise([*lived, 3600]))
        assert sum(len(sections) == 1 for sections in rows) <= 12

    run(main)
