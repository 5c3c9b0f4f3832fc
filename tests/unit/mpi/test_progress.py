"""How often MPI is asked."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncdist.mpi.progress import IDLE_S, PAUSE_S, SPIN_S, Progress
from asyncdist.testing.loop import VirtualTimeLoop


class Asked:
    """A request of MPI, that has ended when a test says so."""

    def __init__(self) -> None:
        self.ended = False
        self.error: Exception | None = None


class Mpi:
    Exception = RuntimeError

    class Request:
        @staticmethod
        def Testall(requests: list[Asked], statuses: object = None) -> bool:
            for request in requests:
                if request.error is not None:
                    raise request.error
            return all(request.ended for request in requests)


class Counted:
    """A progress, how often it has asked, and whether a message is awaited."""

    def __init__(self) -> None:
        self.asked = 0
        self.awaited = False
        self.progress = Progress(Mpi, asyncio.get_running_loop(), 20.0, self._messages, lambda: self.awaited)

    def _messages(self) -> bool:
        self.asked += 1
        return False


def virtually(main: Any) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(main)


def test_it_asks_seldom_when_nothing_is_under_way_and_more_often_while_something_is() -> None:
    async def main() -> None:
        counted = Counted()
        counted.progress.wait("key", [Asked()], lambda error: None)
        await asyncio.sleep(1)  # what follows has no real time in it
        counted.asked = 0
        await asyncio.sleep(10)
        assert 0.9 * 10 / PAUSE_S < counted.asked < 1.1 * 10 / PAUSE_S
        assert counted.progress.forget("key")
        assert not counted.progress.forget("key")
        counted.asked = 0
        await asyncio.sleep(10)
        assert counted.asked <= 10 / IDLE_S + 3
        counted.awaited = True
        counted.asked = 0
        await asyncio.sleep(10)
        assert counted.asked >= 0.9 * 10 / PAUSE_S
        counted.progress.stop()
        counted.asked = 0
        await asyncio.sleep(10)
        assert not counted.asked

    virtually(main())


async def test_the_loop_does_not_sleep_right_after_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("asyncdist.mpi.progress.perf_counter", lambda: now_s)
    counted = Counted()
    large, small = Asked(), Asked()
    ended: list[Exception | None] = []
    counted.progress.wait("small", [small], ended.append)

    async def asked_in_turns(turns: int) -> int:
        counted.asked = 0
        for _ in range(turns):
            await asyncio.sleep(0)
        return counted.asked

    assert await asked_in_turns(20) >= 19
    small.ended = True
    assert await asked_in_turns(20) >= 19
    assert ended == [None]
    now_s = 1.1 * SPIN_S
    assert await asked_in_turns(3) <= 1
    counted.progress.wait("large", [large], ended.append, nbytes=1 << 20)
    now_s += 3 * SPIN_S  # the same again for each 150 KB
    assert await asked_in_turns(20) >= 19
    counted.progress.stop()


async def test_errors_of_mpi_are_told_and_those_of_others_are_not_caught() -> None:
    counted = Counted()
    request = Asked()
    request.error = RuntimeError("truncated")
    told: list[Exception | None] = []
    counted.progress.wait("key", [request], told.append)
    assert counted.progress.poll()
    assert told == [request.error]
    request.error = ValueError("a mistake")
    counted.progress.wait("key", [request], told.append)
    with pytest.raises(ValueError, match="a mistake"):
        counted.progress.poll()
    request.error = None
    counted.progress.stop()


async def test_it_goes_on_though_who_is_told_raises() -> None:
    loop = asyncio.get_running_loop()
    raised: list[object] = []
    loop.set_exception_handler(lambda _loop, context: raised.append(context["exception"]))
    counted = Counted()
    first, second = Asked(), Asked()
    ended = asyncio.Event()

    def fail(error: Exception | None) -> None:
        raise KeyError("mine")

    counted.progress.wait("first", [first], fail)
    counted.progress.wait("second", [second], lambda error: ended.set())
    first.ended = second.ended = True
    await ended.wait()
    assert [repr(error) for error in raised] == ["KeyError('mine')"]
    counted.progress.stop()


async def test_what_has_not_ended_when_it_stops_is_returned() -> None:
    counted = Counted()
    first, second, third = Asked(), Asked(), Asked()
    third.error = RuntimeError("failed")
    told: list[str] = []
    counted.progress.wait("first", [first, second], lambda error: told.append("first"))
    counted.progress.wait("second", [third], lambda error: told.append("second"))
    first.ended = True
    assert counted.progress.stop() == [[first, second]]
    assert told == ["second"]
    assert counted.progress.stop() == []
    assert not counted.progress.poll()


async def test_what_is_told_may_ask_again_and_forget_others() -> None:
    counted = Counted()
    first, second = Asked(), Asked()
    first.ended = second.ended = True
    told: list[str] = []

    def ended(error: Exception | None) -> None:
        told.append("first")
        assert not counted.progress.poll()  # it is asking
        counted.progress.forget("second")

    counted.progress.wait("first", [first], ended)
    counted.progress.wait("second", [second], lambda error: told.append("second"))
    assert counted.progress.poll()
    assert told == ["first"]
    counted.progress.stop()


async def test_who_awaits_looks_for_a_while() -> None:
    class Pending:
        _done = False

    counted = Counted()
    request, work = Asked(), Pending()
    assert not counted.progress.look(work)
    assert counted.asked >= 1
    request.ended = True

    def ended(error: Exception | None) -> None:
        work._done = True

    counted.progress.wait("key", [request], ended)
    assert counted.progress.look(work)
    assert not await asyncio.to_thread(counted.progress.look, Pending())  # not from elsewhere
    counted.progress.stop()
