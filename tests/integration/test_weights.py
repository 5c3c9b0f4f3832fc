"""Weights in the memory of real processes that are killed, and through stores that restart."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from weights_kit import model, serving, version_of

from asyncdist import TCPStore, weights
from asyncdist.errors import DistError
from asyncdist_server import ServerConfig, StoreServer

sys.path.insert(0, str(Path(__file__).parents[1] / "soak"))

from weights_soak import main


@pytest.mark.slow("a fleet comes and goes for six seconds")
def test_servers_and_trainers_that_are_killed_leave_whole_versions(capsys: pytest.CaptureFixture[str]) -> None:
    """`make soak` does so for minutes."""
    seconds = 6
    options = ["--minutes", str(seconds / 60), "--servers", "5", "--every", "0.2", "--pause", "0.3", "--ready", "20"]
    assert main(options) == 0, capsys.readouterr().out
    assert "PROBLEM" not in capsys.readouterr().out


async def test_a_store_that_restarts_without_its_data_changes_nothing_that_is_served() -> None:
    first, second = {}, {}
    server = StoreServer(ServerConfig(port=0))
    await server.start()
    port = server.port
    async with (
        asyncio.timeout(60),
        TCPStore("127.0.0.1", port) as store,
        TCPStore("127.0.0.1", port) as other,
        serving(other, first),
        serving(store, second),
        weights.publish("policy", store=store) as publisher,
    ):
        await publisher.commit(1, model(1))
        await weights.wait_ready("policy", 1, count=2, store=store)
        await server.stop()
        assert version_of(first) == version_of(second) == 1
        server = StoreServer(ServerConfig(port=port))
        await server.start()
        version = 2
        while True:
            try:
                await publisher.commit(version, model(version))
                await weights.wait_ready("policy", version, count=2, store=store)
                break
            except DistError:
                assert version_of(first) == version_of(second) == 1
                await asyncio.sleep(0.05)
        assert version_of(first) == version_of(second) == version
    await server.stop()
