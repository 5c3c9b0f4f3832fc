"""Deadlines of collectives on real event loops, which know timers that are due at once, and may be busy."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from group_kit import outcome
from socket_world import socket_world

import asyncdist as dist
from asyncdist.group.deadlines import PROBE_S, Deadlines
from asyncdist.transport.config import LATE_S

AT_ONCE_S = 1e-4
"""Less than an event loop may tell apart from now."""


async def test_deadlines_that_pass_at_once_do_so_one_after_the_other() -> None:
    async with socket_world(2) as (group, other):
        await asyncio.gather(group.barrier(), other.barrier())
        works = [group.all_reduce(np.ones(3), tag=tag, timeout=AT_ONCE_S / (tag + 1)) for tag in range(4)]
        for work in works:
            error = await outcome(work)
            assert isinstance(error, dist.CollectiveTimeoutError)
            assert error.missing == (1,)


async def test_a_later_deadline_does_not_wait_for_an_earlier_one_that_is_due_at_once() -> None:
    async with socket_world(2) as (group, other):
        await asyncio.gather(group.barrier(), other.barrier())
        arrays = [np.ones(3) for _ in range(40)]
        works = []
        for array in arrays:
            works += [group.all_reduce(array, timeout=60), other.all_reduce(array.copy(), timeout=60)]
            # As a check does that finds one due next.
            group._core._deadlines._restart(asyncio.get_running_loop().time())
        for work in works:
            await work


async def test_a_loop_that_was_busy_blames_nobody_whose_answer_it_has_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCDIST_TRANSPORT", "tcp")
    probe = Deadlines._probe
    busy: list[tuple[int, int]] = []

    def ask(self: Deadlines, key: tuple[int, int]) -> None:
        probe(self, key)
        if not busy:
            busy.append(key)
            time.sleep(PROBE_S + 2 * LATE_S)

    monkeypatch.setattr(Deadlines, "_probe", ask)
    async with socket_world(3) as groups:
        await asyncio.gather(*(group.barrier() for group in groups))
        works = [groups[0].all_reduce(np.ones(3), timeout=0.01), groups[1].all_reduce(np.ones(3), timeout=60)]
        for work in works:
            error = await outcome(work)
            assert isinstance(error, dist.CollectiveTimeoutError)
            assert error.missing == (2,)
        assert busy
