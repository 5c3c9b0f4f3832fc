"""A launcher tells the ranks of its host which ranks are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from asyncdist.launch.losses import Losses
from asyncdist.world.host_losses import hear_losses


@pytest.fixture
async def losses() -> AsyncIterator[Losses]:
    found = Losses()
    yield found
    found.close()


class Rank:
    """Rank 1 of 6, which the launcher has started."""

    def __init__(self, address: str, rank: str = "1", world_size: str = "6") -> None:
        self.environ = {"RANK": rank, "WORLD_SIZE": world_size, "ASYNCDIST_LOSSES": address}
        self.heard: asyncio.Queue[tuple[range, str]] = asyncio.Queue()
        self.stopped: asyncio.Queue[frozenset[int]] = asyncio.Queue()
        self.transport: asyncio.BaseTransport | None = None

    async def __aenter__(self) -> Rank:
        self.transport = await hear_losses(
            1, 6, self.environ, lambda ranks, why: self.heard.put_nowait((ranks, why)), self.stopped.put_nowait
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.transport is not None:
            self.transport.close()


async def test_all_ranks_hear_of_losses_also_those_that_come_later(losses: Losses) -> None:
    async with asyncio.timeout(60), Rank(losses.address) as rank:
        losses.tell([(2, 4)], "gone")
        assert await rank.heard.get() == (range(2, 4), "gone")
        losses.tell([(0, 0), (4, 6)], "this one")
        async with Rank(losses.address) as late:
            for each in (rank, late):
                while (await each.heard.get())[0] != range(4, 6):
                    pass


async def test_all_ranks_hear_which_are_stopped_and_which_are_no_more(losses: Losses) -> None:
    async with asyncio.timeout(60), Rank(losses.address) as rank:
        losses.tell([(4, 5)], "gone")
        losses.tell_stopped([2, 3])
        assert await rank.stopped.get() == {2, 3}
        async with Rank(losses.address) as late:
            assert await late.stopped.get() == {2, 3}
            assert await late.heard.get() == await rank.heard.get() == (range(4, 5), "gone")
        losses.tell_stopped([])
        assert await rank.stopped.get() == set()
    losses.tell_stopped([2])
    losses.forget()
    async with asyncio.timeout(60), Rank(losses.address) as rank:
        losses.tell([(4, 5)], "gone")
        assert await rank.heard.get() == (range(4, 5), "gone")
        assert rank.stopped.empty()


async def test_what_was_lost_before_does_not_concern_another_attempt(losses: Losses) -> None:
    async with asyncio.timeout(60):
        losses.tell([(2, 4)], "then")
        losses.forget()
        async with Rank(losses.address) as rank:
            losses.tell([(4, 5)], "now")
            assert await rank.heard.get() == (range(4, 5), "now")


@pytest.mark.parametrize(("rank", "world_size"), [("0", "6"), ("1", "8")])
async def test_a_world_with_numbers_of_its_own_asks_no_launcher(losses: Losses, rank: str, world_size: str) -> None:
    async with Rank(losses.address, rank, world_size) as other:
        assert other.transport is None


async def test_without_a_launcher_a_world_forms_all_the_same(losses: Losses) -> None:
    async with Rank("") as alone:
        assert alone.transport is None
    async with Rank("@asyncdist-nobody-listens-here") as left_alone:
        assert left_alone.transport is None


async def test_a_rank_that_has_gone_keeps_no_other_from_hearing(losses: Losses) -> None:
    async with asyncio.timeout(60), Rank(losses.address) as rank:
        async with Rank(losses.address):
            pass
        losses.tell([(2, 3)], "gone")
        assert await rank.heard.get() == (range(2, 3), "gone")
