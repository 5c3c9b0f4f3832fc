"""What a rank says of the network: it passes the check of whoever asks, and dials only what its job advertises."""

from __future__ import annotations

import asyncio

import pytest

import asyncdist as dist
from asyncdist.inspect.dumps import document
from asyncdist.inspect.job import checked
from asyncdist.world import network
from asyncdist.world.network import network_of


async def test_what_a_rank_says_passes_the_check() -> None:
    store = dist.HashStore()

    async def rank(number: int) -> None:
        async with dist.init_process_group(store=store, rank=number, world_size=2) as group:
            look = await asyncio.to_thread(network_of, group.world)
            assert checked(document(number, "asked") | {"network": look})["network"] == look
            (peer,) = look["peers"]
            assert (peer["rank"], peer["state"], peer["why"]) == (1 - number, "not connected", "")
            assert peer["dials"]
            assert all(0 <= dial["rtt_s"] < 2 for dial in peer["dials"])
            await group.barrier()

    await asyncio.gather(rank(0), rank(1))


async def test_no_address_is_dialed_that_no_rank_of_the_job_advertises(monkeypatch: pytest.MonkeyPatch) -> None:
    dialed = []

    async def speed_of(endpoint: object, token: str | None) -> dict[str, float]:
        dialed.append(endpoint)
        return {"bytes_per_s": 1.0}

    monkeypatch.setattr(network, "speed_of", speed_of)
    async with dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1) as group:
        for ip in ("203.0.113.9", "localhost", "0.0.0.0", "127.0.0.2"):
            said = await asyncio.to_thread(network_of, group.world, b"speed %s 22" % ip.encode())
            assert said == {"error": f"no rank advertises {ip}"}
        assert not dialed
        said = await asyncio.to_thread(network_of, group.world, b"speed 127.0.0.1 22")
        assert said == {"bytes_per_s": 1.0}
