"""Items and streams over real sockets: large ones, slow and cancelled consumers, peers that die in the middle."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from punctual import assert_within, punctual
from socket_world import socket_world

import asyncdist as dist
from asyncdist.collectives.arguments.stream import STREAM_WINDOW

MEBIBYTE = 1 << 20
PROMPTLY_S = 1.0
"""Failures reach every rank within a second."""


async def everywhere(groups: list[dist.ProcessGroup], main: Callable[[dist.ProcessGroup], Awaitable[Any]]) -> list[Any]:
    """Run `main` on every rank; results, or the errors of asyncdist."""

    async def guarded(group: dist.ProcessGroup) -> Any:
        try:
            return await main(group)
        except dist.DistError as error:
            return error

    async with asyncio.timeout(60):
        return await asyncio.gather(*(guarded(group) for group in groups))


async def consume(stream: dist.ChunkStream) -> int:
    count = 0
    async for _ in stream:
        count += 1
    return count


async def test_items_of_every_size() -> None:
    async with socket_world(4) as groups:

        async def main(group: dist.ProcessGroup) -> None:
            rank = group.rank
            for scale in (0, 1, 1000, 20_000, 300_000):
                arrays = await group.all_gather_array(np.full(scale * rank, rank, "f4"))
                assert [array.size for array in arrays] == [scale * other for other in range(4)]
                assert all((array == other).all() for other, array in enumerate(arrays))
                whole = await group.broadcast_array(np.arange(scale) if rank == 3 else None, 3)
                assert np.array_equal(whole, np.arange(scale))
                values: list[Any] = [None] * 4
                await group.all_gather_object(values, {"rank": rank, "data": b"x" * scale * rank, "a": arrays[3]})
                assert [value["rank"] for value in values] == list(range(4))
                assert [len(value["data"]) for value in values] == [scale * other for other in range(4)]

        assert await everywhere(groups, main) == [None] * 4


async def test_many_operations_at_once() -> None:
    async with socket_world(3) as groups:

        async def main(group: dist.ProcessGroup) -> None:
            lists: list[list[Any]] = [[None] * 3 for _ in range(200)]
            works = [group.all_gather_object(values, (index, group.rank)) for index, values in enumerate(lists)]
            await asyncio.gather(*works)
            assert all(values == [(index, rank) for rank in range(3)] for index, values in enumerate(lists))

        assert await everywhere(groups, main) == [None] * 3


async def test_a_cancelled_waiter_ends_only_its_waiting() -> None:
    async with socket_world(2) as groups:
        slow, quick = groups
        values: list[Any] = [None, None]
        work = quick.all_gather_object(values, "quick")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await work
        others: list[Any] = [None, None]
        await slow.all_gather_object(others, "slow")
        assert await work == others == ["slow", "quick"]


async def test_streams_of_megabytes() -> None:
    async with socket_world(3) as groups:

        async def main(group: dist.ProcessGroup) -> None:
            x = np.full(16 * MEBIBYTE, group.rank, np.uint8)
            assert await consume(group.broadcast_stream(x, 1)) == 16
            assert (x == 1).all()
            output = np.zeros((3, 4 * MEBIBYTE), np.uint8)
            source = np.full(4 * MEBIBYTE, group.rank + 1, np.uint8)
            assert await consume(group.all_gather_stream(output, source, chunk_bytes=MEBIBYTE // 2)) == 24
            assert all((output[rank] == rank + 1).all() for rank in range(3))

        assert await everywhere(groups, main) == [None] * 3


async def test_small_chunks_run_ahead_no_further_than_credit_allows() -> None:
    """Below 64 KiB chunks are sent without being asked for, so the source is ahead by what may be under way."""
    async with socket_world(2) as groups:
        source, slow = groups
        chunk_bytes, count = 16 << 10, 1000
        received = np.full(chunk_bytes * count, 7, np.uint8)
        sending = source.broadcast_stream(np.zeros_like(received), 0, chunk_bytes=chunk_bytes)
        stream = slow.broadcast_stream(received, 0, chunk_bytes=chunk_bytes)
        sent = quiet = 0
        while quiet < 3:  # once may be this process not having got a core
            try:
                async with asyncio.timeout(0.1):
                    await anext(sending)
                sent, quiet = sent + 1, 0
            except TimeoutError:
                quiet += 1
        assert STREAM_WINDOW <= sent <= MEBIBYTE // chunk_bytes + 2 * STREAM_WINDOW
        assert (received[STREAM_WINDOW * chunk_bytes :] == 7).all()
        assert await consume(stream) == count
        assert sent + await consume(sending) == count
        assert (received == 0).all()


@punctual
@pytest.mark.parametrize("kind", ["items", "objects", "broadcast_stream", "all_gather_stream"])
async def test_a_peer_that_dies_in_the_middle_is_named_promptly(kind: str) -> None:
    async with socket_world(3) as groups:
        await everywhere(groups, lambda group: group.barrier())
        died_s = 0.0
        size = 64 * MEBIBYTE

        async def main(group: dist.ProcessGroup) -> float:
            nonlocal died_s
            if kind == "items":
                work: Any = group.all_gather_array(np.zeros(size, np.uint8))
            elif kind == "objects":
                work = group.all_gather_object([None] * 3, b"x" * size)
            elif kind == "broadcast_stream":
                work = consume(group.broadcast_stream(np.zeros(size, np.uint8), 0))
            else:
                work = consume(group.all_gather_stream(np.zeros(3 * size, np.uint8), np.zeros(size, np.uint8)))
            if group.rank == 1:
                await asyncio.sleep(0)
                if isinstance(work, dist.Work):
                    work.add_done_callback(lambda done: done.exception())
                else:
                    work.close()
                died_s = time.monotonic()
                group.world.mesh.abort()
                return 0.0
            with pytest.raises(dist.PeerLostError) as lost:
                await work
            assert lost.value.rank == 1
            return time.monotonic() - died_s

        took_s = await everywhere(groups, main)
        assert all(isinstance(one, float) for one in took_s), took_s
        assert_within(PROMPTLY_S, max(took_s))


async def test_what_cannot_be_sent_on_one_rank_is_refused_and_the_group_goes_on() -> None:
    async with socket_world(3) as groups:

        async def main(group: dist.ProcessGroup) -> str:
            values: list[Any] = [None] * 3
            if group.rank == 2:
                with pytest.raises(TypeError, match=r"the object\['loop'\]"):
                    group.all_gather_object(values, {"loop": asyncio.get_running_loop()})
            else:
                with pytest.raises(dist.CollectiveMismatchError, match=r"rank 2 refused .*the object\['loop'\]"):
                    await group.all_gather_object(values, {"loop": None})
            await group.all_gather_object(values, group.rank)
            return str(values)

        assert await everywhere(groups, main) == ["[0, 1, 2]"] * 3


async def test_pickle_by_agreement() -> None:
    async with socket_world(2, allow_pickle=True) as groups:

        async def main(group: dist.ProcessGroup) -> list[Any]:
            values: list[Any] = [None] * 2
            return await group.all_gather_object(values, ValueError(group.rank))

        for values in await everywhere(groups, main):
            assert [type(value) for value in values] == [ValueError, ValueError]
    async with socket_world(2) as groups:
        with pytest.raises(TypeError, match="ValueError"):
            groups[0].send_object_list([ValueError()], 1)


async def test_the_last_waiter_of_a_receive_of_objects_withdraws_it() -> None:
    async with socket_world(2) as (one, two):
        places: list[Any] = [None]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await one.recv_object_list(places, 1)
        await two.send_object_list(["kept"], 0)
        assert await one.recv_object_list(places) == 1
        assert places == ["kept"]
