"""How long a store may be away."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from asyncdist.errors import DistStoreError, LaunchError
from asyncdist.launch.config import parse_outage
from asyncdist.launch.rendezvous.job_store import Outage


class FakeStore:
    """Answers while it is `there`; or says nothing at all."""

    def __init__(self) -> None:
        self.there = True
        self.silent = False

    async def check(self, keys: list[str]) -> bool:
        if self.silent:
            await asyncio.Event().wait()
        if not self.there:
            raise DistStoreError("gone")
        return False


def outage(limit_s: float) -> Outage:
    return Outage("h:1", limit_s, lambda text: None, look_s=0.01)


@pytest.mark.parametrize("silent", [False, True])
async def test_the_limit_is_the_longest_that_it_may_be_away(silent: bool) -> None:
    store: Any = FakeStore()
    store.there, store.silent = False, silent
    over: asyncio.Queue[str] = asyncio.Queue()
    begun_s = asyncio.get_running_loop().time()
    async with asyncio.timeout(60):
        await outage(0.1).watch(store, over.put_nowait)
    assert asyncio.get_running_loop().time() - begun_s > 0.1
    assert "the store at h:1 has been away for 0 s, which --store-outage forbids" in over.get_nowait()


async def test_a_store_that_comes_back_ends_the_outage() -> None:
    store: Any = FakeStore()
    said: asyncio.Queue[str] = asyncio.Queue()
    mine = Outage("h:1", math.inf, said.put_nowait, look_s=0.01)
    store.there = False
    waiting = asyncio.create_task(mine.wait(store, 60.0))
    async with asyncio.timeout(60):
        assert await said.get() == "the store at h:1 does not answer; without it the nodes cannot meet: waiting"
        store.there = True
        await waiting
        assert await mine.answers(store)
    assert said.get_nowait().startswith("the store at h:1 answers again, after")


async def test_a_decision_waits_no_longer_than_nodes_for_each_other() -> None:
    store: Any = FakeStore()
    store.there = False
    with pytest.raises(LaunchError, match=r"the store at h:1 has not answered for 0 s\. Hint"):
        await outage(math.inf).wait(store, 0.05, ". Hint")
    with pytest.raises(LaunchError, match="has not answered"):
        await outage(0.05).wait(store, 60.0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("forever", math.inf), ("0", 0.0), ("2.5", 2.5), (" Forever ", math.inf)]
)
def test_what_the_option_takes(text: str, seconds: float) -> None:
    assert parse_outage(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "never", "10s"])
def test_what_the_option_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number of seconds, 0 or more, nor forever"):
        parse_outage(text)
