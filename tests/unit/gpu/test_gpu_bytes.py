"""What ranks tell each other about GPU arrays: limits, and bytes that nobody should have sent."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgpack
import numpy as np
import pytest

import asyncdist as dist
from asyncdist.arrays.host import encode_meta
from asyncdist.arrays.objects import GPU_META
from asyncdist.errors import CollectiveMismatchError, PeerLostError, RemoteProtocolError
from asyncdist.gpu import path
from asyncdist.gpu.messages import MAX_ANSWER_BYTES, Announcement, DeviceSendWork
from asyncdist.gpu.nccl import path as nccl
from asyncdist.gpu.nccl.path import REFUSED_KEPT, NcclPath, _joined
from asyncdist.gpu.path import MAX_MESSAGE_BYTES, HostExchange
from asyncdist.testing import run_world

GOOD = Announcement(7, "host", "GPU-1", True, np.dtype(np.float32), (2, 3))


def exchange_of(group: Any) -> HostExchange:
    world = group.world
    return HostExchange(
        world.mesh,
        group.group_id,
        group.ranks,
        group.rank,
        loop=world.loop,
        pool=world.pool,
        tuning=world.tuning,
    )


def test_announcements_travel_as_they_are() -> None:
    assert Announcement.decode(GOOD.encode()) == GOOD
    assert GOOD.nbytes == 24
    longest = Announcement(2**32 - 1, "h" * 100, "d" * 100, False, np.dtype(bool), (1,) * 64)
    assert Announcement.decode(longest.encode()) == longest
    assert len(longest.encode()) <= 1 << 10


@pytest.mark.parametrize(
    "fields",
    [
        3,
        [],
        [1, "h", "d", True],
        [-1, "h", "d", True, encode_meta(np.dtype(np.int8), ())],
        [2**32, "h", "d", True, encode_meta(np.dtype(np.int8), ())],
        [True, "h", "d", True, encode_meta(np.dtype(np.int8), ())],
        [1, "h", "d", 1, encode_meta(np.dtype(np.int8), ())],
        [1, "h", "d", True, "text"],
        [1, "h", "d", True, b"\x03abc"],
    ],
)
def test_malformed_announcements(fields: Any) -> None:
    with pytest.raises(ValueError, match=r"malformed|dtype"):
        Announcement.decode(GPU_META + msgpack.packb(fields))


def test_any_bytes_are_an_announcement_or_a_value_error() -> None:
    generator = random.Random(6)
    good = GOOD.encode()
    for _ in range(3000):
        octets = bytearray(good)
        for _ in range(generator.randrange(1, 4)):
            octets[generator.randrange(len(GPU_META), len(octets))] = generator.randrange(256)
        octets = octets[: generator.randrange(len(GPU_META), len(octets) + 1)]
        try:
            found = Announcement.decode(bytes(octets))
        except ValueError:
            continue
        assert 0 <= found.number < 2**32


@pytest.mark.parametrize(
    "message", [b"", b"\xc1", msgpack.packb(3), msgpack.packb([1, [], b""]), msgpack.packb(["h", 3, b""])]
)
def test_malformed_news_of_a_communicator(message: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="rank 3"):
        _joined(3, message)


def test_answers_are_bounded() -> None:
    work = DeviceSendWork.__new__(DeviceSendWork)
    work._owner = type("Owner", (), {"where": staticmethod(lambda *_: "here")})()  # type: ignore[assignment]
    work.operation, work.peer = "isend", 1
    assert work.allocate(None, 1, MAX_ANSWER_BYTES, b"").nbytes == MAX_ANSWER_BYTES
    with pytest.raises(CollectiveMismatchError, match=f"{MAX_ANSWER_BYTES + 1} bytes"):
        work.allocate(None, 1, MAX_ANSWER_BYTES + 1, b"")


def test_exchanged_messages_are_bounded() -> None:
    async def main(group: dist.ProcessGroup) -> None:
        exchange = exchange_of(group)
        longest = bytes([group.rank]) * MAX_MESSAGE_BYTES
        assert await exchange.all_gather("test", 0, 0, longest) == [
            bytes([rank]) * MAX_MESSAGE_BYTES for rank in (0, 1)
        ]
        with pytest.raises(ValueError, match="at most"):
            await exchange.all_gather("test", 0, 1, longest + b"x")
        await exchange.barrier("test", 0, 2)
        exchange.close()

    run_world(2, main)


def test_a_message_that_is_too_long_ends_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(group: dist.ProcessGroup) -> None:
        exchange = exchange_of(group)
        await group.barrier()
        monkeypatch.setattr(path, "MAX_MESSAGE_BYTES", 1 << 30)
        talk = asyncio.create_task(exchange.all_gather("test", 0, 0, bytes(1 + group.rank * MAX_MESSAGE_BYTES)))
        if group.rank == 0:
            with pytest.raises(CollectiveMismatchError, match="above max_bytes"):
                await talk
        else:
            await asyncio.sleep(1)
            talk.cancel()
            await asyncio.wait([talk])
        exchange.close()

    run_world(2, main)


def test_exchanges_can_be_cancelled_and_fail_with_a_lost_rank() -> None:
    async def main(group: dist.ProcessGroup, world: Any) -> None:
        exchange = exchange_of(group)
        if group.rank == 0:
            waiting = asyncio.create_task(exchange.all_gather("test", 5, 1, b"x"))
            await asyncio.sleep(0.1)
            assert exchange.waiting_for("test", 5, 1) == (1,)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert exchange.waiting_for("test", 5, 1) == ()
            waiting = asyncio.create_task(exchange.all_gather("test", 5, 2, b"x"))
            await asyncio.sleep(0.1)
            world.kill(1)
            with pytest.raises(PeerLostError):
                await waiting
        else:
            await asyncio.sleep(1)
        assert not exchange.waiting_for("never", 0, 0)

    run_world(2, main, pass_world=True)


def test_refusals_are_remembered_within_bounds() -> None:
    around = type("Around", (), {"nccl": object(), "loop": None, "on": (None, 0)})()
    path = NcclPath(around)  # type: ignore[arg-type]
    for number in range(REFUSED_KEPT + 1):
        path.drop(0, number)
        path.drop(0, number)
    assert path._refused[0] == list(range(1, REFUSED_KEPT + 1))
    assert nccl.MAX_TAGS == 16
