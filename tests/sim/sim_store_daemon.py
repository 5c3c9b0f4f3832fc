"""The simulated daemon: the real one on a host that can be killed, cut off, and started again."""

from __future__ import annotations

from sim_store_client import PORT, TOKEN
from sim_store_disk import SimulatedDisk
from sim_store_scenario import StoreScenario

from asyncdist.testing.network import SimulatedNetwork
from asyncdist_server.engine.engine import StoreEngine
from asyncdist_server.serving.config import ServerConfig
from asyncdist_server.serving.daemon import StoreServer

__all__ = ["SimulatedDaemon"]


class SimulatedDaemon:
    """The daemon's host, and the daemon that runs on it."""

    def __init__(self, network: SimulatedNetwork, scenario: StoreScenario) -> None:
        self.network = network
        self.host = network.host("daemon")
        self.config = ServerConfig(self.host.address, PORT, token=TOKEN, limits=scenario.limits)
        self.disk = SimulatedDisk(scenario.seed) if scenario.mode == "durable" else None
        self.server: StoreServer | None = None
        self.started_at = 0.0
        self.killed_at: list[float] = []

    @property
    def up(self) -> bool:
        """Whether the daemon runs, or is paused."""
        return self.server is not None and self.host.process.alive

    @property
    def engine(self) -> StoreEngine:
        """Its engine; only while it is up."""
        assert self.server is not None
        return self.server.engine

    @property
    def incarnation(self) -> str:
        """As clients show it."""
        return self.engine.incarnation.hex()[:8]

    async def start(self) -> None:
        """Start it, unless it runs."""
        if not self.up:
            self.host.restart()
            if self.disk is not None:
                self.disk.fail_next = False  # it was to fail for the process before: who wanted that waits for its end
            persistence = None if self.disk is None else self.disk.persistence()
            self.server = self.host.run(StoreServer, self.config, persistence)
            self.started_at = self.network.loop.time()
            await self.network.outcome(self.host.spawn(self.server.start(), "daemon starts"))

    async def stop(self) -> None:
        """Stop it as SIGTERM does."""
        if self.up:
            server, self.server = self.server, None
            assert server is not None
            await self.network.outcome(self.host.spawn(server.stop(), "daemon stops"))

    def end(self, host_too: bool) -> None:
        """Kill it, or cut its host's power."""
        if self.up:
            self.server = None
            self.killed_at.append(self.network.loop.time())
            if host_too:
                self.host.vanish()
            else:
                self.host.kill()
