"""Calls that meet a rank that is lost raise, again and again, and keep nothing of what they were given."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
from group_kit import outcome
from socket_world import descriptors, socket_world

import asyncdist as dist
from asyncdist.transport.protocol.operations import anew


async def test_no_array_is_kept() -> None:
    async with socket_world(2) as (group, other):
        await asyncio.gather(group.barrier(), other.barrier())
        pending = group.irecv(np.zeros(1), 1)
        other.world.mesh.abort()
        assert isinstance(await outcome(pending), dist.PeerLostError)
        arrays: list[weakref.ref[np.ndarray[tuple[int], np.dtype[np.float64]]]] = []
        for number in range(60):
            array = np.zeros(1000 if number % 2 else 200_000)
            arrays.append(weakref.ref(array))
            calls = (
                lambda given=array: group.isend(given, 1),
                lambda given=array: group.irecv(given, 1),
                lambda given=array: group.recv(given, None),
                lambda given=array: group.all_reduce(given),
                lambda given=array: group.send_object_list([given], 1),
            )
            for call in calls:
                try:
                    work = call()
                except dist.GroupAbortedError:
                    continue
                error = await outcome(work)
                assert isinstance(error, dist.PeerLostError)
                assert error.rank == 1
                del work, error
            del array, calls, call
        gc.collect()
        kept = sum(array() is not None for array in arrays)
        assert kept <= 2, "the group keeps the last failed work until the next"


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is mapped from /proc")
async def test_no_ring_is_kept_by_a_group_that_the_context_remembers() -> None:
    def mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:asyncdist")

    before, open_before = mapped(), descriptors()
    async with socket_world(2) as (group, other):
        await asyncio.gather(group.barrier(), other.barrier())
        works = [group.isend(np.ones(100_000), 1) for _ in range(8)] + [group.all_reduce(np.ones(300_000), tag=1)]
        await asyncio.sleep(0)
        other.world.mesh.abort()
        for work in works:
            await outcome(work)
        assert group.world.lost
    assert mapped() == before
    assert descriptors() <= open_before + 1  # the default executor's


@pytest.mark.parametrize(
    "error",
    [
        dist.PeerLostError("gone", 3, left=True),
        dist.ClosedError("closed"),
        dist.CollectiveTimeoutError("late", [1, 2]),
        dist.ConnectTimeoutError("no"),
        OSError(2, "no such file"),
        ConnectionResetError(104, "reset"),
        KeyError("x"),
    ],
)
def test_an_error_raised_anew_is_the_same_but_for_its_frames(error: BaseException) -> None:
    error.__cause__ = ValueError("why")
    error.add_note("a note")
    for _ in range(3):
        with pytest.raises(type(error)) as caught:
            raise anew(error)
        fresh = caught.value
        assert fresh is not error
        assert str(fresh.args) == str(error.args)
        assert fresh.__dict__ == error.__dict__
        assert fresh.__cause__ is error.__cause__
    assert error.__traceback__ is None
