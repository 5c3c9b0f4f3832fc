"""Ranks that find another gone, which they never met, hear why it aborted their group before they hear that it left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from typing import Any

import numpy as np
import pytest
from group_kit import Group, outcome
from jobs import free_port
from mesh_world import Done
from punctual import assert_within, punctual
from socket_world import socket_world, turns
from waiting import PATIENCE_S, eventually

import asyncdist as dist
from asyncdist.group.core import core_of
from asyncdist.store import HashStore
from asyncdist.transport.addresses import PeerAddress
from asyncdist.transport.protocol.frame import EAGER_BYTES, pack_key
from asyncdist.transport.protocol.operations import SendOp
from asyncdist.world.attempts import WORDS_LIMIT_S

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "unix", "tcp"])
NAMED_S = 1.0
"""Within which a rank that is gone is named."""


def expire(group: Group) -> None:
    """What a deadline does."""
    error = dist.CollectiveTimeoutError("all_reduce #0 took too long", [2])
    core_of(group)._abort(error, "timeout", str(error), missing=[2])


def differ(group: Group) -> None:
    """What a difference does, whoever finds it."""
    core_of(group)._differ((0, 0), dist.CollectiveMismatchError("ranks differ: rank 0 runs this, rank 1 runs that"))


def fail(group: Group) -> None:
    """What an operation does that cannot go on."""
    core_of(group)._abort(dist.DistError("no memory"), "failed", "no memory", group.world.rank)


ENDS: list[tuple[Callable[[Group], None], type[Exception], str]] = [
    (
        lambda group: group.abort("the disk is full"),
        dist.GroupAbortedError,
        "rank 1 aborted the group: the disk is full",
    ),
    (expire, dist.CollectiveTimeoutError, "took too long"),
    (differ, dist.CollectiveMismatchError, "rank 0 runs this, rank 1 runs that"),
    (fail, dist.GroupAbortedError, "no memory"),
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Chooses a transport."""
    return lambda transport: monkeypatch.setenv("ASYNCDIST_TRANSPORT", transport)


@TRANSPORTS
@pytest.mark.parametrize(("end", "kind", "text"), ENDS, ids=["abort", "timeout", "mismatch", "failed"])
async def test_who_comes_when_the_rank_is_gone(
    transport: str, end: Callable[[Group], None], kind: type[Exception], text: str, quick: Callable[[str], None]
) -> None:
    quick(transport)
    async with socket_world(3) as (_, gone, late):
        end(gone)
        await gone.close()
        error = await outcome(late.all_reduce(np.zeros(4)))
        assert type(error) is kind, error
        assert text in str(error)


@TRANSPORTS
async def test_who_comes_while_the_rank_is_leaving(transport: str, quick: Callable[[str], None]) -> None:
    quick(transport)
    async with socket_world(3) as (holder, gone, late):
        gone.abort("the disk is full")
        op = SendOp(pack_key(1, 0, 0, 0, 0), memoryview(bytes(EAGER_BYTES + 1)), b"", Done(), None)
        gone.world.mesh.post_send(0, op)  # as long as nobody receives it, rank 1 is leaving
        closing = asyncio.ensure_future(gone.close())
        await eventually(lambda: gone.world.mesh.closing)
        error = await outcome(late.recv(np.zeros(1), 1))
        assert isinstance(error, dist.GroupAbortedError), error
        assert "the disk is full" in str(error)
        assert not closing.done()
        holder.world.mesh.abort()
        await closing


class LateGoodbyes(HashStore):
    """Takes goodbyes once `may_leave` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.leaving = asyncio.Event()
        self.may_leave = asyncio.Event()

    async def set(self, key: str, value: str | bytes, *, lease: dist.Lease | None = None) -> None:
        if "/left/" in key:
            self.leaving.set()
            await self.may_leave.wait()
        await super().set(key, value, lease=lease)


@TRANSPORTS
async def test_who_comes_while_the_store_hears_of_the_leaving(transport: str, quick: Callable[[str], None]) -> None:
    """All connections have ended by then, but the store does not say yet that the rank has left."""
    quick(transport)
    store = LateGoodbyes()
    async with socket_world(2, lambda: store) as (late, gone):
        closing = asyncio.ensure_future(gone.close())
        await store.leaving.wait()
        error = await outcome(late.recv(np.zeros(1), 1))
        store.may_leave.set()
        await closing
        assert isinstance(error, dist.PeerLostError)
        assert error.left
        assert not late.world.lost


@pytest.mark.parametrize("transport", ["unix", "tcp"])
async def test_the_reason_comes_before_a_message_breaks_off(transport: str, quick: Callable[[str], None]) -> None:
    quick(transport)
    async with socket_world(2) as (receiver, sender):
        pending = receiver.irecv(np.zeros(8_000_000), 1)
        sending = sender.isend(np.zeros(8_000_000), 0)
        while receiver.world.mesh.statistics()["bytes_received"] < 1_000_000:
            await turns(1)
        sender.abort("the disk is full")
        for work in (pending, sending):
            error = await outcome(work)
            assert isinstance(error, dist.GroupAbortedError)
            assert "the disk is full" in str(error)


@TRANSPORTS
async def test_what_a_block_left_with_an_exception_says(transport: str, quick: Callable[[str], None]) -> None:
    quick(transport)
    async with socket_world(3) as (_, gone, late):
        with pytest.raises(ZeroDivisionError):
            async with gone:
                raise ZeroDivisionError("by nothing")
        error = await outcome(late.recv(np.zeros(1), 1))
        assert isinstance(error, dist.GroupAbortedError)
        assert "left with ZeroDivisionError: by nothing" in str(error)


@TRANSPORTS
@punctual
async def test_who_left_in_order_is_named_at_once(transport: str, quick: Callable[[str], None]) -> None:
    quick(transport)
    async with socket_world(3) as (_, gone, late):
        await gone.close()
        start = time.monotonic()
        error = await outcome(late.all_reduce(np.zeros(4)))
        assert isinstance(error, dist.PeerLostError)
        assert error.rank == 1
        assert error.left
        assert_within(NAMED_S, time.monotonic() - start)


@pytest.mark.parametrize("aborts", [False, True])
@punctual
async def test_who_left_on_another_host_is_named_at_once(
    aborts: bool, quick: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody listens any more, a refusal is no proof, and there may be no answer at all."""
    quick("tcp")
    async with socket_world(3) as (_, gone, late):
        if aborts:
            gone.abort("the disk is full")
        await gone.close()
        monkeypatch.setattr(PeerAddress, "loopback", property(lambda self: False))
        object.__setattr__(late.world.mesh._context, "host_id", "elsewhere")
        start = time.monotonic()
        error = await outcome(late.recv(np.zeros(4), 1))
        assert_within(NAMED_S, time.monotonic() - start)
        if aborts:
            assert isinstance(error, dist.GroupAbortedError), error
            assert "the disk is full" in str(error)
        else:
            assert isinstance(error, dist.PeerLostError), error
            assert error.rank == 1
            assert error.left


async def test_a_survivor_that_has_gone_too_says_who_left_first_though_that_one_hosts_the_store(
    quick: Callable[[str], None],
) -> None:
    """None of them has met another, so that all they know of each other is in the store of the first to leave."""
    quick("unix")
    where = f"tcp://127.0.0.1:{free_port()}"

    async def join(rank: int) -> Group:
        return await dist.init_process_group(init_method=where, rank=rank, world_size=3, timeout=10)

    joining = [asyncio.create_task(join(rank), context=Context()) for rank in range(3)]
    host, survivor, late = await asyncio.gather(*joining)
    host.abort("the disk is full")
    leaving = asyncio.create_task(host.close())  # it ends when the others have left
    try:
        await eventually(lambda: not host.world.mesh.statistics()["sockets"])
        for group, peer in ((survivor, 0), (late, 1)):
            error = await outcome(group.recv(np.zeros(1), peer))
            assert isinstance(error, dist.GroupAbortedError), error
            assert "rank 0 aborted the group: the disk is full" in str(error)
            await group.close()
    finally:
        await asyncio.gather(survivor.close(), late.close(), leaving)


@punctual
async def test_a_store_that_does_not_answer_holds_nobody_up(quick: Callable[[str], None]) -> None:
    quick("unix")

    class Silent(HashStore):
        silent = False

        def check(self, keys: Any) -> Any:
            return asyncio.Event().wait() if self.silent else super().check(keys)

    store = Silent()
    async with socket_world(3, lambda: store) as (_, gone, late):
        gone.abort("nobody hears this")
        await gone.close()
        store.silent = True
        start = time.monotonic()
        error = await outcome(late.all_reduce(np.zeros(4)))
        took_s = time.monotonic() - start
        assert isinstance(error, dist.PeerLostError)
        assert error.rank == 1
        assert took_s >= WORDS_LIMIT_S * 0.9
        assert_within(NAMED_S, took_s)
        store.silent = False


async def test_closing_does_not_wait_for_words(quick: Callable[[str], None]) -> None:
    """Whoever is asking when its own world ends asks no more."""
    quick("unix")

    class Silent(HashStore):
        asked: asyncio.Event
        silent = False

        def check(self, keys: Any) -> Any:
            if not self.silent:
                return super().check(keys)
            self.asked.set()
            return asyncio.Event().wait()

    store = Silent()
    store.asked = asyncio.Event()
    async with socket_world(3, lambda: store) as (_, gone, late):
        await gone.close()
        store.silent = True
        pending = late.isend(np.zeros(1), 1)
        async with asyncio.timeout(PATIENCE_S):
            await store.asked.wait()
        late.world.mesh.abort()
        assert isinstance(await outcome(pending), dist.ClosedError)
        store.silent = False
