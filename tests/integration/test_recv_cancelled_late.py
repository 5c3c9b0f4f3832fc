"""A receive whose message comes in the very turn of the loop in which its last waiter is cancelled loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from socket_world import LIMIT_S, socket_world, turns

import asyncdist as dist
from asyncdist.messages.work import PairWork


class Canceller:
    """Cancels the tasks that wait for a receive when it ends, just before or just after they are woken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before = False
        self.tasks: dict[Any, list[asyncio.Task[Any]]] = {}
        original = PairWork._end

        def end(work: PairWork) -> None:
            if not self.before:
                original(work)
            for task in self.tasks.pop(work, ()):
                task.cancel()
            if self.before:
                original(work)

        monkeypatch.setattr(PairWork, "_end", end)

    async def run(self, work: dist.Work[Any], send: Callable[[], object], waiters: int = 1) -> list[asyncio.Task[Any]]:
        """Wait for `work` in so many tasks, `send` its message, and see the tasks cancelled."""
        tasks = self.tasks[work] = [asyncio.create_task(awaited(work)) for _ in range(waiters)]
        await asyncio.sleep(0)
        send()
        await asyncio.wait(tasks)
        return tasks


@pytest.fixture
def canceller(monkeypatch: pytest.MonkeyPatch) -> Canceller:
    """One for the test."""
    return Canceller(monkeypatch)


async def awaited(work: dist.Work[Any]) -> Any:
    """What the work gives."""
    return await work


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("waiters", [1, 3])
@pytest.mark.parametrize("kind", ["recv", "any", "recv_array", "objects"])
async def test_the_next_receive_gets_the_message(canceller: Canceller, kind: str, waiters: int, before: bool) -> None:
    canceller.before = before
    async with socket_world(2) as (sender, receiver):
        got, objects = np.zeros(3), [None]

        def post() -> dist.Work[Any]:
            if kind == "recv_array":
                return receiver.recv_array(0, 5)
            if kind == "objects":
                return receiver.recv_object_list(objects, 0, 5)
            return receiver.recv(got, 0 if kind == "recv" else None, 5)

        def send() -> None:
            for number in range(2):
                if kind == "objects":
                    sender.send_object_list([number], 1, 5)
                else:
                    sender.isend(np.full(3, float(number)), 1, 5)

        await asyncio.gather(sender.barrier(), receiver.barrier())
        work = post()
        tasks = await canceller.run(work, send, waiters)
        assert all(task.cancelled() for task in tasks)
        with pytest.raises(dist.ClosedError, match="withdrawn"):
            work.result()
        for number in range(2):
            result = await post()
            value = result[0] if kind == "recv_array" else objects[0] if kind == "objects" else got[0]
            assert value == number


async def test_what_somebody_has_heard_of_is_not_given_to_another(canceller: Canceller) -> None:
    async with socket_world(2) as (sender, receiver):
        await asyncio.gather(sender.barrier(), receiver.barrier())
        got = np.zeros(3)

        def send() -> None:
            sender.isend(np.ones(3), 1)

        heard: list[dist.Work[Any]] = []
        work = receiver.recv(got, 0)
        work.add_done_callback(heard.append)
        await canceller.run(work, send)
        await asyncio.sleep(0)
        assert heard == [work]
        assert work.result() == 0
        # One waiter of two has it.
        other = receiver.recv(got, 0)
        waiting = asyncio.create_task(awaited(other))
        await asyncio.sleep(0)
        await canceller.run(other, send)
        assert await waiting == 0
        # An irecv is withdrawn by nobody but its owner.
        third = receiver.irecv(got, 0)
        await canceller.run(third, send)
        assert third.result() == 0
        fourth = receiver.recv(got, 0)
        await turns(40)
        assert not fourth.done()
        assert fourth.cancel()


async def test_who_waited_for_a_while_and_gave_up_has_not_heard_of_it(canceller: Canceller) -> None:
    async with socket_world(2) as (sender, receiver):
        await asyncio.gather(sender.barrier(), receiver.barrier())
        got = np.zeros(3)
        work = receiver.recv(got, 0)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await work.wait(timeout=0.001)
        await canceller.run(work, lambda: sender.isend(np.ones(3), 1))
        assert await receiver.recv(got, 0) == 0
        assert (got == 1).all()


async def test_who_waits_for_a_while_is_a_waiter_too() -> None:
    async with socket_world(2) as (sender, receiver):
        got = np.zeros(3)
        work = receiver.recv(got, 0)
        waiting = asyncio.create_task(work.wait(timeout=LIMIT_S))
        cancelled = asyncio.create_task(awaited(work))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        sender.isend(np.ones(3), 1)
        assert await waiting
        assert (got == 1).all()


@pytest.mark.parametrize("others", [0, 1])
async def test_a_receive_that_had_ended_when_it_was_awaited(others: int) -> None:
    """Its task may be cancelled while it lets the loop turn, and then has not been told either."""
    async with socket_world(2) as (sender, receiver):
        await asyncio.gather(sender.barrier(), receiver.barrier())
        got = np.zeros(3)
        work = receiver.recv(got, 0)
        waiting = [asyncio.create_task(awaited(work)) for _ in range(others)]
        await turns(1)
        sender.isend(np.ones(3), 1)
        for _ in range(1000):
            if not work.done():
                await asyncio.sleep(0)
        assert work.done()
        work._spinner = SimpleNamespace(turn_due=lambda: True)  # type: ignore[assignment]
        late = asyncio.create_task(awaited(work))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.wait([late])
        assert late.cancelled()
        again = receiver.recv(got, 0)
        if others:
            assert [await task for task in waiting] == [0]
            await turns(40)
            assert again.cancel(), "the message has been delivered"
        else:
            assert await again == 0
            assert (got == 1).all()
