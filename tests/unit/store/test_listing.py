"""Listings of more keys than one answer has: asked for in parts, and given as one list."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncdist.errors import ClosedError, DistStoreError
from asyncdist.store.reply import Listing


class Parts:
    """Answers given by the test."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, asyncio.Future[Any]]] = []
        self.listing = Listing(asyncio.get_running_loop(), self._ask)

    def _ask(self, start: bytes) -> asyncio.Future[Any]:
        self.asked.append((start, asyncio.get_running_loop().create_future()))
        return self.asked[-1][1]

    async def answer(self, *answer: Any) -> None:
        self.asked[-1][1].set_result(answer)
        await asyncio.sleep(0)


async def test_parts_become_one_list() -> None:
    parts = Parts()
    await parts.answer(b"c", ["a", "b"])
    await parts.answer(b"d", ["c"])
    assert not parts.listing.done()
    await parts.answer(None, ["d"])
    assert await parts.listing == ["a", "b", "c", "d"]
    assert [start for start, _ in parts.asked] == [b"", b"c", b"d"]


async def test_cancelling_withdraws_the_part_under_way() -> None:
    parts = Parts()
    await parts.answer(b"c", ["a"])
    assert parts.listing.cancel()
    assert parts.asked[-1][1].cancelled()
    assert not parts.listing.cancel()
    await asyncio.sleep(0)
    assert len(parts.asked) == 2


async def test_a_cancelled_listing_takes_no_part_that_has_come() -> None:
    parts = Parts()
    parts.asked[-1][1].set_result((b"c", ["a"]))
    assert parts.listing.cancel()
    await asyncio.sleep(0)
    assert parts.listing.cancelled()
    assert len(parts.asked) == 1


@pytest.mark.parametrize("error", [DistStoreError("no answer"), ClosedError("closed")])
async def test_a_part_that_fails(error: Exception) -> None:
    parts = Parts()
    await parts.answer(b"c", ["a"])
    parts.asked[-1][1].set_exception(error)
    with pytest.raises(type(error)) as raised:
        await parts.listing
    assert raised.value is error


async def test_a_part_that_is_withdrawn_or_refused() -> None:
    parts = Parts()
    parts.asked[-1][1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await parts.listing

    def refuse(start: bytes) -> asyncio.Future[Any]:
        if not start:
            return first
        raise ClosedError("closed meanwhile")

    first: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    listing = Listing(asyncio.get_running_loop(), refuse)
    first.set_result((b"c", ["a"]))
    with pytest.raises(ClosedError, match="closed meanwhile"):
        await listing
