"""The communication thread: its start, its end, its switch interval, and waiting for it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from contextvars import Context
from typing import Any

import pytest
from socket_world import LIMIT_S
from thread_worlds import nothing_left

from asyncdist.errors import ClosedError
from asyncdist.threads import thread as module
from asyncdist.threads.thread import SWITCH_INTERVAL_S, acquire, release


def test_it_lives_as_long_as_somebody_needs_it() -> None:
    with nothing_left():
        first, second = acquire(), acquire()
        assert first is second
        assert first.call(first.is_current)
        assert not first.is_current()
        assert first.call(first.call, first.is_current)  # does not wait for itself
        release(first)
        assert first.alive
        release(second)
        assert not first.alive
        for use in (first.submit, first.call, first.submit, first.call):  # each of them, not the first alone
            with pytest.raises(ClosedError, match="has ended"):
                use(int)
        third = acquire()
        assert third is not first
        release(third)


def test_calls_raise_here_and_keep_their_order() -> None:
    with nothing_left():
        thread = acquire()
        try:
            with pytest.raises(ZeroDivisionError):
                thread.call(divmod, 1, 0)
            seen: list[int] = []
            for number in range(1000):
                thread.submit(seen.append, number)
            thread.call(int)
            assert seen == list(range(1000))
        finally:
            release(thread)


def test_a_failing_submission_is_reported_and_the_next_runs() -> None:
    with nothing_left():
        thread = acquire()
        reported: list[dict[str, object]] = []
        thread.loop.set_exception_handler(lambda loop, context: reported.append(context))
        entered, go = threading.Event(), threading.Event()
        thread.submit(lambda: (entered.set(), go.wait(10)))
        assert entered.wait(10)
        thread.submit(divmod, 1, 0)
        seen: list[int] = []
        thread.submit(seen.append, 1)
        go.set()
        thread.call(int)
        release(thread)
        assert seen == [1]
        assert [type(context["exception"]) for context in reported] == [ZeroDivisionError]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_what_exits_in_the_thread_ends_neither_it_nor_what_comes_next(kind: type[BaseException]) -> None:
    with nothing_left():
        thread = acquire()
        reported: list[dict[str, object]] = []
        thread.loop.set_exception_handler(lambda loop, context: reported.append(context))
        seen: list[int] = []

        def leave() -> None:
            raise kind(3)

        async def leaving() -> None:
            leave()

        def several() -> None:
            thread.loop.call_soon(leave)
            thread.loop.call_soon(seen.append, 1)
            thread.start_task(leaving(), Context(), lambda task: seen.append(2 if task.exception() else 0))
            thread.submit(leave)
            thread.submit(seen.append, 3)

        thread.call(several)
        while len(seen) < 3:
            thread.call(int)
        release(thread)
        assert sorted(seen) == [1, 2, 3]
        assert {type(context["exception"]) for context in reported} == {kind}


def test_what_exits_while_the_thread_ends_does_not_keep_it() -> None:
    with nothing_left():
        thread = acquire()
        thread.loop.set_exception_handler(lambda loop, context: None)
        thread.submit(lambda: (release(thread), thread.loop.call_soon(sys.exit)))
        thread._thread.join(LIMIT_S / 10)
        assert not thread.alive


def test_it_may_be_stopped_again_while_it_ends() -> None:
    """As where Ctrl-C ends the waiting for the last world to close, and the program ends then."""
    with nothing_left():
        thread = acquire()
        ending, go = threading.Event(), threading.Event()

        async def slow_to_end() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                while not go.is_set():  # noqa: ASYNC110 - it is set in another thread
                    await asyncio.sleep(0)

        thread.submit(lambda: thread.start_task(slow_to_end(), Context(), lambda task: None))
        thread.submit(release, thread)
        assert ending.wait(LIMIT_S)
        thread.loop.call_soon_threadsafe(go.set)
        thread.stop()
        assert not thread.alive
        assert thread.loop.is_closed()


def test_a_submission_that_is_interrupted_keeps_no_later_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come wherever the interpreter looks for it, as within asyncio's function here."""
    thread = acquire()

    class Interrupted:
        def call_soon_threadsafe(self, _callback: Any, **_options: Any) -> None:
            raise KeyboardInterrupt

    loop = thread.loop
    monkeypatch.setattr(thread, "loop", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        thread.submit(print)
    monkeypatch.setattr(thread, "loop", loop)
    done = threading.Event()
    thread.submit(done.set)
    assert done.wait(LIMIT_S)
    release(thread)


def test_the_switch_interval_is_short_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    before_s = sys.getswitchinterval()
    for text, expected_s in (("", SWITCH_INTERVAL_S), ("0", before_s), ("0.002", 0.002), ("1", before_s)):
        monkeypatch.setenv("ASYNCDIST_SWITCH_INTERVAL", text)
        thread = acquire()
        assert sys.getswitchinterval() == pytest.approx(expected_s)
        release(thread)
        assert sys.getswitchinterval() == before_s
    monkeypatch.delenv("ASYNCDIST_SWITCH_INTERVAL")
    thread = acquire()
    sys.setswitchinterval(0.003)  # the program's own wish stays
    release(thread)
    assert sys.getswitchinterval() == pytest.approx(0.003)
    sys.setswitchinterval(before_s)


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_a_wrong_switch_interval_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ASYNCDIST_SWITCH_INTERVAL", text)
    with nothing_left(), pytest.raises(ValueError, match="ASYNCDIST_SWITCH_INTERVAL"):
        acquire()


def test_forgotten_tasks_are_cancelled_at_its_end() -> None:
    with nothing_left():
        thread = acquire()
        ended: list[str] = []

        async def forgotten() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

        thread.call(lambda: thread.loop.create_task(forgotten()))
        thread.call(int)
        release(thread)
        assert ended == ["cancelled"]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_none_and_may_start_its_own() -> None:
    with nothing_left():
        thread = acquire()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for use in (thread.submit, thread.call):
                    with pytest.raises(ClosedError, match="forked"):
                        use(int)
                release(thread)
                own = acquire()
                assert own.call(os.getpid) == os.getpid()
                release(own)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert thread.call(os.getpid) == os.getpid()
        release(thread)
        assert module._current is None
