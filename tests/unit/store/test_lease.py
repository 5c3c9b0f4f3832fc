"""Leases whose daemon does not answer."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncdist.store.lease import LeaseKeeper
from asyncdist_server import messages


async def test_a_lease_by_time_ends_here_while_its_renewal_waits_for_an_answer() -> None:
    asked: list[int] = []

    def ask(operation: int, arguments: tuple[Any, ...], timeout_s: float | None) -> asyncio.Future[Any]:
        asked.append(operation)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if operation == messages.GRANT:
            reply.set_result(None)
        return reply

    keeper = LeaseKeeper(asyncio.get_running_loop, ask)
    lease = await keeper.granted(0.05, False, None)
    async with asyncio.timeout(60):
        assert await lease.wait_lost() == "the store could not be reached for 0.05 s"
    assert asked == [messages.GRANT, messages.KEEP_ALIVE]
    keeper.close()
