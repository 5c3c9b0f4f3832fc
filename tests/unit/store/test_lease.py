"""Leases whose daemon does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from asyncdist.errors import DistStoreError
from asyncdist.store.lease import Lease, LeaseKeeper
from asyncdist.testing.loop import VirtualTimeLoop
from asyncdist_server.wire import messages


class SlowDaemon:
    """Answers nothing until it is told to; keeps what it was asked and when."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float, asyncio.Future[Any]]] = []
        self.keeper = LeaseKeeper(asyncio.get_running_loop, self.ask)
        self.answers_at_once = True

    def ask(self, operation: int, arguments: tuple[Any, ...], timeout_s: float | None) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        self.asked.append((operation, loop.time(), loop.create_future()))
        if self.answers_at_once:
            self.answer()
        return self.asked[-1][2]

    def answer(self) -> None:
        """Answer all that was asked, as what is lost with a connection is asked again on the next one."""
        for operation, _, reply in self.asked:
            if not reply.done():
                reply.set_result([] if operation == messages.KEEP_ALIVE else None)

    async def grant(self, ttl_s: float, bound: bool = False) -> Lease:
        return await self.keeper.granted(ttl_s, bound, None)


def in_virtual_time(check: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(check)


@pytest.mark.parametrize("outage_s", [1.0, 15.0, 19.9])
@pytest.mark.parametrize("anew", [False, True])
def test_a_lease_by_time_outlives_outages_that_are_shorter(outage_s: float, anew: bool) -> None:
    async def check() -> None:
        daemon = SlowDaemon()
        lease = await daemon.grant(30.0)
        daemon.answers_at_once = False
        await asyncio.sleep(10.0 + outage_s)  # it was to be renewed after a third
        assert [operation for operation, _, _ in daemon.asked] == [messages.GRANT, messages.KEEP_ALIVE]
        daemon.answers_at_once = True
        if anew:
            daemon.keeper.connection_lost()
            daemon.keeper.connected()
        daemon.answer()
        await asyncio.sleep(1.0)
        daemon.answers_at_once = False
        await asyncio.sleep(20.0)
        assert not lease.lost, "the store was reached 20 s ago"
        daemon.answers_at_once = True
        daemon.answer()
        await asyncio.sleep(100.0)
        assert not lease.lost
        daemon.keeper.close()

    in_virtual_time(check())


def test_an_answer_that_takes_long_counts_from_when_it_was_asked_for() -> None:
    async def check() -> None:
        daemon = SlowDaemon()
        daemon.answers_at_once = False
        granting = asyncio.ensure_future(daemon.grant(30.0))
        await asyncio.sleep(25.0)
        daemon.answer()
        lease = await granting
        await asyncio.sleep(4.9)
        assert [round(at, 1) for _, at, _ in daemon.asked] == [0.0, 25.0], "a third of its time is over"
        assert not lease.lost
        await asyncio.sleep(0.2)
        assert lease.lost
        daemon.keeper.close()

    in_virtual_time(check())


def test_a_bound_lease_that_was_asked_for_after_others_were_renewed_survives_a_reconnect() -> None:
    async def check() -> None:
        daemon = SlowDaemon()
        await daemon.grant(300.0)
        daemon.answers_at_once = False
        await asyncio.sleep(100.0)
        granting = asyncio.ensure_future(daemon.grant(10.0, bound=True))
        await asyncio.sleep(1.0)
        daemon.keeper.connection_lost()
        daemon.keeper.connected()
        daemon.answer()
        bound = await granting
        daemon.answers_at_once = True
        daemon.answer()
        await asyncio.sleep(50.0)
        assert not bound.lost
        renewals = [reply for operation, _, reply in daemon.asked if operation == messages.KEEP_ALIVE]
        assert renewals[0].cancelled(), "else they would gather where connections break before they are of use"
        daemon.keeper.close()

    in_virtual_time(check())


def test_a_renewal_that_fails_at_once_is_not_tried_again_and_again() -> None:
    async def check() -> None:
        daemon = SlowDaemon()
        lease = await daemon.grant(30.0)
        ask = daemon.ask

        def fails(operation: int, arguments: tuple[Any, ...], timeout_s: float | None) -> asyncio.Future[Any]:
            daemon.answers_at_once = False
            reply = ask(operation, arguments, timeout_s)
            reply.set_exception(DistStoreError("nothing listens there"))
            return reply

        daemon.keeper._ask = fails
        assert await lease.wait_lost() == "the store could not be reached for 30 s"
        assert [round(at, 1) for _, at, _ in daemon.asked] == [0.0, 10.0, 20.0]
        daemon.keeper.close()

    in_virtual_time(check())


def test_a_lease_by_time_ends_here_while_its_renewal_waits_for_an_answer() -> None:
    asked: list[int] = []

    def ask(operation: int, arguments: tuple[Any, ...], timeout_s: float | None) -> asyncio.Future[Any]:
        asked.append(operation)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if operation == messages.GRANT:
            reply.set_result(None)
        return reply

    async def check() -> None:
        keeper = LeaseKeeper(asyncio.get_running_loop, ask)
        lease = await keeper.granted(0.05, False, None)
        async with asyncio.timeout(60):
            assert await lease.wait_lost() == "the store could not be reached for 0.05 s"
        assert asked == [messages.GRANT, messages.KEEP_ALIVE]
        keeper.close()

    in_virtual_time(check())


@pytest.mark.parametrize("bound", [False, True])
def test_a_lease_that_outlives_outages_ends_when_the_daemon_says_so(bound: bool) -> None:
    async def check() -> None:
        daemon = SlowDaemon()
        lease = await daemon.grant(30.0, bound)
        lease.outlive_outages()
        daemon.answers_at_once = False
        daemon.keeper.connection_lost()
        await asyncio.sleep(1000.0)
        assert not lease.lost
        assert len(daemon.asked) < 3, "asks again and again"
        daemon.keeper.connected()
        _, _, reply = daemon.asked[-1]
        reply.set_result([lease.id])
        await asyncio.sleep(0.1)
        assert lease.lost
        daemon.keeper.close()

    in_virtual_time(check())
