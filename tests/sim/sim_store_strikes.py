"""What goes wrong in a simulated store: how each kind of fault strikes, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Final

from sim_store_client import SimulatedClient
from sim_store_daemon import SimulatedDaemon
from sim_store_scenario import Fault, StoreScenario

from asyncdist.testing.hosts import SimulatedHost
from asyncdist.testing.network import SimulatedNetwork

__all__ = ["Strikes"]

TAKER_S: Final = 20.0
"""How long somebody is looked for who is about to pop an item."""

RESTORED_S: Final = 1.0
"""Between two looks for such that a daemon knows from before its start."""


class Strikes:
    """The faults of one run; a base of the world that they strike."""

    network: SimulatedNetwork
    scenario: StoreScenario
    dice: random.Random
    daemon: SimulatedDaemon
    clients: list[SimulatedClient]
    faults: Counter[str]
    took: asyncio.Event
    """Set when the daemon notes that a client takes an item."""

    def add_client(self, index: int) -> None:
        """Start one more client."""
        raise NotImplementedError

    async def strike(self, fault: Fault) -> None:
        """Wait for the time of a fault, let it happen, and undo it where it ends by itself."""
        await asyncio.sleep(fault.at_s)
        living = [client for client in self.clients if client.alive]
        if not living:
            return
        client = living[fault.client % len(living)]
        struck = await self._strike(fault, client, self.network, self.daemon.host)
        if struck:
            self.faults[fault.kind] += 1

    async def _strike(
        self, fault: Fault, client: SimulatedClient, network: SimulatedNetwork, daemon: SimulatedHost
    ) -> bool:
        kind = fault.kind
        if kind == "reset":
            return bool(network.reset(client.host, daemon))
        if kind == "reset in the handshake":
            network.reset(client.host, daemon)
            for _ in range(8):
                await asyncio.sleep(self.dice.random() * 4 * max(network.typical_latency_s, 0.01))
                network.reset(client.host, daemon)
        elif kind == "lose answers":
            for _ in range(12):
                for end in client.process.endpoints:
                    end.peer.fuse = self.dice.choice((1, 1, 2, 5))
                await asyncio.sleep(self.dice.random() * self.scenario.pace_s)
        elif kind.startswith("cut"):
            sides = (daemon, client.host) if kind == "cut to the client" else (client.host, daemon)
            network.cut(*sides, both_ways=kind == "cut")
            try:
                await asyncio.sleep(fault.length_s)
            finally:
                network.heal(*sides)
        elif kind == "pause client":
            client.process.pause()
            try:
                await asyncio.sleep(fault.length_s)
            finally:
                if client.alive:
                    client.resumed_at = network.loop.time()
                    client.process.resume()
        elif kind in ("kill client", "vanish client"):
            self.end_client(client, host_too=kind == "vanish client")
        elif kind == "kill taker":
            return await self._strike_taker()
        else:
            return await self._strike_daemon(fault, network, daemon)
        return True

    def end_client(self, client: SimulatedClient, host_too: bool) -> None:
        """Kill a client, or cut its host's power; another one comes instead."""
        client.ended_at = min(client.ended_at, self.network.loop.time())
        (client.host.vanish if host_too else client.host.kill)()
        self.add_client(client.index)

    async def _strike_taker(self) -> bool:
        """Kill who has an item on its way, soon the daemon too if that is not its end; False if nobody pops."""
        until = self.network.loop.time() + TAKER_S
        while self.network.loop.time() < until:
            takers = [each for each in self.daemon.engine.state.clients if each.taken] if self.daemon.up else ()
            for taker in takers:
                for client in self.clients:
                    if client.alive and taker.address.startswith(f"{client.host.address}:"):
                        self.end_client(client, host_too=False)
                        if self.daemon.disk is not None and self.dice.random() < 0.7:
                            await asyncio.sleep(self.dice.random() * 0.1)
                            self.daemon.end(host_too=False)
                            await self.daemon.start()
                        return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESTORED_S):
                    await self.took.wait()
            self.took.clear()
            await asyncio.sleep(self.dice.random() * 0.004)
        return False

    async def _strike_daemon(self, fault: Fault, network: SimulatedNetwork, daemon: SimulatedHost) -> bool:
        if not self.daemon.up:
            return False
        if fault.kind in ("kill daemon", "vanish daemon", "stop daemon"):
            if fault.kind == "stop daemon":
                await self.daemon.stop()
            else:
                self.daemon.end(host_too=fault.kind == "vanish daemon")
            await asyncio.sleep(fault.length_s)
            await self.daemon.start()
        elif fault.kind == "pause daemon":
            process = daemon.process
            process.pause()
            try:
                await asyncio.sleep(fault.length_s)
            finally:
                if process.alive:
                    process.resume()
        elif fault.kind in ("slow disk", "disk error"):
            return await self._strike_disk(fault)
        elif fault.kind == "refuse":
            daemon.refusing = True
            for client in self.clients:
                network.reset(client.host, daemon)
            try:
                await asyncio.sleep(fault.length_s)
            finally:
                daemon.refusing = False
        else:
            network.slow_factor = 60.0
            try:
                await asyncio.sleep(fault.length_s)
            finally:
                network.slow_factor = 1.0
        return True

    async def _strike_disk(self, fault: Fault) -> bool:
        disk, server = self.daemon.disk, self.daemon.server
        if disk is None or server is None:
            return False
        if fault.kind == "slow disk":
            disk.slow = True
            try:
                await asyncio.sleep(fault.length_s)
            finally:
                disk.slow = False
            return True
        disk.fail_next = True
        try:
            async with asyncio.timeout(30):
                await server.failed.wait()
        except TimeoutError:
            return False
        finally:
            disk.fail_next = False
        if self.daemon.server is server:
            self.daemon.end(host_too=False)
        await asyncio.sleep(fault.length_s)
        await self.daemon.start()
        return True
