"""Presence: which rank is here, which left in order, and which is gone without a word."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asyncdist.store import FileStore, HashStore, Store
from asyncdist.transport.context import Absence
from asyncdist.world.attempts import LEFT, RESIGNED, Presence


def presence(store: Store, rank: int, size: int = 4) -> Presence:
    return Presence(store, rank, size, f"rank {rank}", lambda name: f"world/{name}")


async def test_who_is_here_who_left_and_who_is_gone() -> None:
    async with HashStore() as store:
        ranks = [presence(store, rank) for rank in range(4)]
        for rank in ranks:
            await rank.vouch()
            await asyncio.gather(*rank.arrive())
        await store.set("world/left/1", LEFT)
        await store.set("world/left/2", RESIGNED)
        for rank in ranks[1:]:
            rank.disappear()
        await store.set("world/words/3", b"why")
        asked = [await ranks[0].words_of(rank) for rank in range(4)]
        assert asked == [
            (b"", Absence.NONE),
            (b"", Absence.LEFT),
            (b"", Absence.RESIGNED),
            (b"why", Absence.CUT_OFF),
        ]


async def test_those_gone_before_are_told_first_then_each_as_it_goes() -> None:
    async with HashStore() as store:
        ranks = [presence(store, rank) for rank in range(4)]
        for rank in ranks[1:]:
            await rank.vouch()
            await asyncio.gather(*rank.arrive())
        told = ranks[1].absences()
        assert await anext(told) == 0
        coming = asyncio.ensure_future(anext(told))
        await ranks[0].vouch()
        await asyncio.gather(*ranks[0].arrive())  # is no absence
        ranks[3].disappear()
        assert await coming == 3
        ranks[2].disappear()
        assert await anext(told) == 2
        await told.aclose()


async def test_a_store_without_leases_knows_nothing(tmp_path: Path) -> None:
    async with FileStore(str(tmp_path / "store")) as store:
        rank = presence(store, 0)
        await rank.vouch()
        await asyncio.gather(*rank.arrive())
        assert await rank.words_of(1) == (b"", Absence.NONE)
        with pytest.raises(NotImplementedError):
            await anext(rank.absences())
        rank.disappear()
