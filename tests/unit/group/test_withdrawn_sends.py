"""Sends that end before their time: they are withdrawn as receives are, and what was acknowledged is delivered."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from group_kit import Group

import asyncdist as dist
from asyncdist.testing import run_world

LARGE = 1 << 20
"""Elements of an array that is offered, not sent."""


async def receive_three(group: Group) -> None:
    for number in range(3):
        got = np.zeros(4)
        assert await group.recv(got, 0) == 0
        assert got.tolist() == [number] * 4


@pytest.mark.parametrize("how", ["expired", "cancelled work", "cancelled waiter"])
@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("tagged", [False, True])
def test_what_is_sent_after_a_send_that_nobody_received_is_delivered(how: str, leaves: bool, tagged: bool) -> None:
    async def main(group: Group) -> None:
        if group.rank == 1:
            await asyncio.sleep(4)
            await receive_three(group)
            if not leaves:
                await group.barrier()
            return
        large = np.zeros(LARGE)
        tag = 5 if tagged else 0
        work = group.send(large, 1, tag, timeout=1 if how == "expired" else None)
        if how == "expired":
            with pytest.raises(dist.CollectiveTimeoutError, match=r", send \(rank 1\): did not end within 1 s"):
                await work
        elif how == "cancelled work":
            await asyncio.sleep(1)
            assert work.cancel()
            assert not work.cancel()
            with pytest.raises(dist.ClosedError, match="withdrawn"):
                await work
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(work, 1)
            assert isinstance(work.exception(), dist.ClosedError)
        for number in range(3):
            await group.send(np.full(4, float(number)), 1)
        if not leaves:
            await group.barrier()

    for seed in (None, 1):
        run_world(2, main, seed=seed)


def test_an_isend_outlives_its_waiter() -> None:
    async def main(group: Group) -> None:
        if group.rank == 1:
            await asyncio.sleep(4)
            got = np.zeros(LARGE)
            await group.recv(got, 0)
            assert (got == 7).all()
            return
        work = group.isend(np.full(LARGE, 7.0), 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work, 1)
        assert not work.done()
        await work

    run_world(2, main)


def test_a_receive_that_waits_meets_what_comes_after_a_withdrawn_send() -> None:
    """It was held back, or is offered but not received: no receive hears of it."""

    async def main(group: Group) -> None:
        if group.rank == 0:
            large = np.zeros(LARGE)
            works = [group.isend(large, 1) for _ in range(1100)]
            await asyncio.sleep(1)
            assert all(work.cancel() for work in works)
            await group.send(np.full(4, 2.0), 1)
        else:
            await asyncio.sleep(2)
            got = np.zeros(4)
            await group.recv(got, 0)
            assert got.tolist() == [2.0] * 4

    run_world(2, main)


def test_closing_withdraws_no_send() -> None:
    async def main(group: Group) -> None:
        if group.rank == 0:
            group.isend(np.full(LARGE, 3.0), 1)
        else:
            await asyncio.sleep(1)
            got = np.zeros(LARGE)
            await group.recv(got, 0)
            assert (got == 3).all()

    run_world(2, main)
