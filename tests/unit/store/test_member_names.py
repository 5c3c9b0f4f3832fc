"""Joining under the name of a member that lives: waiting, and a word about it when that takes long."""

from __future__ import annotations

import asyncio

import pytest

from asyncdist.concurrency.tasks import PATIENCE_S
from asyncdist.errors import StoreTimeoutError
from asyncdist.store import HashStore
from asyncdist.testing.loop import VirtualTimeLoop

WAITS = "join('j'): waiting for another process that is the member trainer to go"


def test_a_long_wait_for_a_name_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with HashStore() as a, a.clone() as b:
            first = await a.join("j", 1, name="trainer", settle=0)
            waiting = asyncio.ensure_future(b.join("j", 1, name="trainer", settle=0))
            await asyncio.sleep(PATIENCE_S - 1)
            assert WAITS not in caplog.messages
            await asyncio.sleep(2)
            assert caplog.messages.count(WAITS) == 1
            await first.leave()
            second = await waiting
            assert second.members == ("trainer",)
            with pytest.raises(StoreTimeoutError, match=r"timed out after 100 s: another process is the member"):
                await a.join("j", 1, name="trainer", settle=0, timeout=100)
            await second.leave()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(check())


def test_a_long_wait_for_others_is_none_for_a_name(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        async with HashStore() as a:
            with pytest.raises(StoreTimeoutError, match="1 more members"):
                await a.join("j", 2, name="trainer", timeout=100)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(check())
    assert not caplog.messages
