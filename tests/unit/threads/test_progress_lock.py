"""The progress lock: who waits runs the loop, else the communication thread does, and signals come in between."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import Context
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from socket_world import LIMIT_S
from thread_worlds import nothing_left, wait_without_loop

from asyncdist.concurrency import loop as loops
from asyncdist.threads import held_signals
from asyncdist.threads import progress_lock as module
from asyncdist.threads.bridge import complete
from asyncdist.threads.thread import CommunicationThread, Reply, acquire, release


@pytest.fixture(params=["uvloop", "asyncio", "unwatched"])
def thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommunicationThread]:
    """The thread on each kind of loop, and on one of which nobody can say when it has something to do."""
    if request.param == "asyncio":
        monkeypatch.setattr(loops, "loop_factory", lambda: asyncio.new_event_loop)
    if request.param == "unwatched":
        monkeypatch.setattr(module, "watched", lambda _loop: -1)
    loops._lendable_class.cache_clear()
    with nothing_left():
        thread = acquire()
        yield thread
        release(thread)
    loops._lendable_class.cache_clear()


async def who_runs(seconds: float = 0.01) -> int:
    await asyncio.sleep(seconds)
    return get_ident()


def test_who_waits_runs_the_loop(thread: CommunicationThread) -> None:
    complete(thread, who_runs, Context())  # the thread has begun, and leaves the lock to us from now on
    for _ in range(3):
        assert complete(thread, who_runs, Context()) == get_ident()
        assert thread.call(get_ident) == get_ident()
    assert not thread.is_current()
    wait_without_loop(lambda: not thread.loop.is_running())


def test_what_nobody_waits_for_goes_on(thread: CommunicationThread) -> None:
    ran: list[int] = []
    thread.call(lambda: thread.start_task(who_runs(0.03), Context(), lambda task: ran.append(task.result())))
    wait_without_loop(lambda: bool(ran))
    assert ran == [thread._thread.ident]


def test_what_is_called_without_a_turn_of_the_loop_has_one_soon(thread: CommunicationThread) -> None:
    complete(thread, who_runs, Context())
    called = threading.Event()
    thread.ask(thread.loop.call_soon, called.set)
    assert called.wait(LIMIT_S)
    called.clear()
    thread.loop.call_soon_threadsafe(called.set)
    assert called.wait(LIMIT_S)


@pytest.mark.parametrize("begun", [False, True])
def test_what_comes_waits_for_who_had_the_lock_unless_something_was_begun(
    thread: CommunicationThread, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """A peer that calls first is heard just before we call: that call must find the lock free."""
    lock = thread.progress_lock
    if module.watched(thread.loop) < 0:
        pytest.skip("the thread runs such a loop as long as nobody asks for the lock")
    ours, theirs = socket.socketpair()
    heard: list[int] = []
    with ours, theirs:
        complete(thread, who_runs, Context())
        wait_without_loop(lambda: lock._watching and lock._seen == lock._taken)  # the thread has begun
        thread.ask(thread.loop.add_reader, ours.fileno(), lambda: heard.append(len(ours.recv(1))))
        if begun:
            lock.take()
            lock.owe()
            lock.give()
        wait_without_loop(lambda: lock._watching and lock._seen == lock._taken)
        monkeypatch.setattr(module, "GRACE_S", LIMIT_S)
        theirs.send(b"x")
        if begun:
            wait_without_loop(lambda: bool(heard))
        else:
            wait_without_loop(lambda: not lock._watching)
            monkeypatch.setattr(lock, "_ask", lambda: False)
            assert thread.take()
            assert not heard
            lock.run_once()
            assert heard
            lock.give()
            lock.call_background()
        thread.call(thread.loop.remove_reader, ours.fileno())


@pytest.mark.parametrize("hurried", ["by the next", "by a callback"])
def test_one_short_operation_wakes_nobody(
    thread: CommunicationThread, monkeypatch: pytest.MonkeyPatch, hurried: str
) -> None:
    """Who began it waits for it soon, as a rule, and would find the lock taken."""
    lock = thread.progress_lock

    def begin(short: Any) -> None:
        assert lock.take()
        lock.owe(short)
        lock.give()

    complete(thread, who_runs, Context())
    monkeypatch.setattr(module, "GRACE_S", LIMIT_S)
    thread.ask(bool)
    wait_without_loop(lambda: lock._resting)
    first, ended = SimpleNamespace(_done=False), SimpleNamespace(_done=True)
    for short in (ended, first):
        begin(short)
        assert not lock._called_since
        assert lock._put_off is short
    if hurried == "by a callback":
        lock.hurry()
    else:
        begin(ended)
    wait_without_loop(lambda: lock._put_off is None)
    lock.hurry()  # of nothing
    assert not lock._urgent


def test_what_was_put_off_goes_on_by_itself(thread: CommunicationThread) -> None:
    complete(thread, who_runs, Context())
    lock, called = thread.progress_lock, threading.Event()
    thread.ask(bool)
    wait_without_loop(lambda: lock._resting or lock._watching or module.watched(thread.loop) < 0)
    assert lock.take()
    thread.loop.call_soon(called.set)
    lock.owe(SimpleNamespace(_done=False))
    lock.give()
    assert called.wait(LIMIT_S)


def test_the_loop_runs_now_and_then_though_others_always_come_back(thread: CommunicationThread) -> None:
    complete(thread, who_runs, Context())
    called: list[int] = []
    thread.ask(thread.loop.call_later, 0.005, lambda: called.append(get_ident()))
    end_s = time.monotonic() + LIMIT_S
    while not thread.ask(bool, called) and time.monotonic() < end_s:
        pass
    assert called


def test_who_is_found_with_the_lock_is_to_run_the_loop_next(thread: CommunicationThread) -> None:
    complete(thread, who_runs, Context())
    lock, end_s = thread.progress_lock, time.monotonic() + LIMIT_S
    assert lock.take()
    while not lock.turn_due and time.monotonic() < end_s:
        lock.give()
        assert lock.take()
    assert lock.turn_due
    called: list[int] = []
    thread.loop.call_soon(called.append, 1)
    lock.give()
    assert thread.ask(bool, called)


@pytest.mark.parametrize("others", [module.DENSE - 1, module.DENSE])
def test_where_others_come_often_the_lock_is_left_alone(others: int) -> None:
    lock = module.ProgressLock()
    lock._taken = 1

    def rest(timeout: float) -> bool:
        lock._taken += others
        return False

    lock._alarm = SimpleNamespace(acquire=rest)
    assert lock._may_take() == (others < module.DENSE)
    assert lock.turn_due == (others >= module.DENSE)
    lock.end()


def test_the_next_who_waits_goes_on_where_one_ends(thread: CommunicationThread) -> None:
    """Both need the loop; the second, which finds it taken, has to run it once the first has its answer."""
    found: list[int] = []
    complete(thread, who_runs, Context())
    first = threading.Thread(target=lambda: found.append(complete(thread, lambda: who_runs(0.05), Context())))
    first.start()
    wait_without_loop(lambda: thread.progress_lock._place.thread == first.ident)
    assert complete(thread, lambda: who_runs(0.3), Context()) == get_ident()
    first.join()
    assert found == [first.ident]


def test_many_threads_at_once(thread: CommunicationThread) -> None:
    def waits(number: int) -> None:
        for turn in range(20):
            answer = functools.partial(asyncio.sleep, 0.0003 * (number % 3), (number, turn))
            assert complete(thread, answer, Context()) == (number, turn)
            done.append(thread.call(int))

    done: list[int] = []
    threads = [threading.Thread(target=waits, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(LIMIT_S)
    assert len(done) == 160


def test_nobody_is_busy_when_there_is_nothing_to_do(
    thread: CommunicationThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(thread, who_runs, Context())
    reply: Reply[None] = Reply(thread)
    waiting = threading.Thread(target=reply.wait)
    waiting.start()
    wait_without_loop(
        lambda: (
            thread.progress_lock._place.thread != 0
            and (thread.progress_lock._sleeping or thread.progress_lock._watching)
        )
    )
    tries: list[object] = []
    take = thread.progress_lock._may_take
    monkeypatch.setattr(thread.progress_lock, "_may_take", lambda: (tries.append(None), take())[1])
    threading.Event().wait(0.1)
    assert len(tries) <= 3  # hundred times the grace
    thread.call(reply.set)
    waiting.join(LIMIT_S)


def test_ctrl_c_comes_when_the_world_is_whole(thread: CommunicationThread) -> None:
    whole: list[str] = []

    def change() -> None:
        whole.append("begun")
        signal.raise_signal(signal.SIGINT)
        whole.append("done")

    async def changes() -> None:
        await asyncio.sleep(0)
        change()
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        thread.call(change)
    assert whole == ["begun", "done"]
    with pytest.raises(KeyboardInterrupt):
        complete(thread, changes, Context())
    assert whole == ["begun", "done"] * 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert complete(thread, who_runs, Context())


def test_a_signal_whose_handler_returns_ends_no_waiting(
    thread: CommunicationThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[tuple[int, bool]] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: came.append((number, thread.is_current())))
    try:
        main = threading.main_thread().ident
        timer = threading.Timer(0.02, signal.pthread_kill, (main, signal.SIGUSR1))
        timer.start()
        complete(thread, lambda: who_runs(0.1), Context())
        assert came == [(signal.SIGUSR1, False)]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("below", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_an_event_loop_below_hears_of_signals(thread: CommunicationThread, below: Callable[[], Any]) -> None:
    """As where torch waits inside a running loop: ours runs in its place, and is told in its place."""

    async def main() -> None:
        loop, heard, times = asyncio.get_running_loop(), asyncio.Event(), []
        loop.add_signal_handler(signal.SIGUSR1, lambda: (heard.set(), times.append(1)))
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        asyncio._set_running_loop(None)
        try:
            complete(thread, lambda: who_runs(0.1), Context())
        finally:
            asyncio._set_running_loop(loop)
        async with asyncio.timeout(LIMIT_S):
            await heard.wait()
        await asyncio.sleep(0.05)
        assert times == [1]

    with asyncio.Runner(loop_factory=below) as runner:
        runner.run(main())


def test_a_handler_that_raises_as_it_is_put_back_leaves_the_others_working(thread: CommunicationThread) -> None:
    held = thread.progress_lock._held
    put_back = signal.signal

    def raises(number: int, handler: Any) -> Any:
        if number == signal.SIGTERM and handler is terminated:
            raise SystemExit
        return put_back(number, handler)

    def terminated(*_: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, terminated)
    try:
        held.hold()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(held_signals._signal, "signal", raises)
            with pytest.raises(SystemExit):
                held.release()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert complete(thread, who_runs, Context())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_another_handler_raises_ends_what_was_begun(thread: CommunicationThread) -> None:
    """As Ctrl-C does: a receive that goes on would write into the caller's array."""

    def late(*_: Any) -> None:
        raise TimeoutError("by the alarm")

    ended = threading.Event()

    async def begun() -> None:
        try:
            await asyncio.sleep(LIMIT_S)
        finally:
            ended.set()

    before = signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(TimeoutError, match="by the alarm"):
            complete(thread, begun, Context())
        assert ended.wait(LIMIT_S / 2)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_handler_that_is_changed_meanwhile_stays(thread: CommunicationThread) -> None:
    def handler(*_: Any) -> None:
        return

    thread.call(signal.signal, signal.SIGINT, handler)
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_another_thread_forks_has_its_signals(thread: CommunicationThread) -> None:
    statuses: list[int] = []

    def forks() -> None:
        wait_without_loop(lambda: signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
        child = os.fork()
        if child == 0:
            os._exit(signal.getsignal(signal.SIGINT) is not signal.default_int_handler)
        statuses.append(os.waitpid(child, 0)[1])

    other = threading.Thread(target=forks)
    other.start()
    complete(thread, lambda: who_runs(0.2), Context())
    other.join()
    assert statuses == [0]


def test_what_exits_is_reported_and_the_waiting_goes_on(thread: CommunicationThread) -> None:
    reported: list[Any] = []
    thread.loop.set_exception_handler(lambda _loop, context: reported.append(context["exception"]))

    async def exits() -> int:
        asyncio.get_running_loop().call_soon(exit, 3)
        return await who_runs()

    assert complete(thread, exits, Context())
    assert [type(error) for error in reported] == [SystemExit]
