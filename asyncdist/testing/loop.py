"""VirtualTimeLoop: an event loop whose clock jumps to the next timer instead of waiting for it.

A simulated hour takes as long as its callbacks. When nothing is ready and no timer is set, nothing can ever happen
again: the program is deadlocked, and the loop says so instead of hanging. Threads, executors and sockets would wake the
loop from outside its time, so executors run inline, and registering a file descriptor is refused.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import selectors
import socket
from collections.abc import Callable, Mapping
from contextvars import Context
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, TypeVarTuple, Unpack

__all__ = ["DeadlockError", "VirtualTimeLoop"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


_INTERNAL: Final = tuple(f"{folder}{os.sep}" for folder in (Path(asyncio.__file__).parent, Path(__file__).parents[1]))
"""Where the lines are that people who test a program of theirs cannot do anything about."""


class DeadlockError(RuntimeError):
    """Every task waits for something that nothing brings about; the message lists the tasks."""


class _VirtualSelector(selectors.BaseSelector):
    """Waits by moving the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.idle: Callable[[], NoReturn] | None = None
        self.turns = 0
        self.max_turns = math.inf
        self.expire: Callable[[], None]
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Take note of the loop's own wake-up socket; refuse any other."""
        if self._keys:
            raise RuntimeError("file descriptors cannot be waited for in virtual time; use the in-memory transport")
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fd] = key = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Move the clock by `timeout`; None means that nothing is left to wait for."""
        self.turns += 1
        if self.turns >= self.max_turns:
            self.expire()
        if timeout is None and self.idle is not None:
            self.idle()
        elif timeout is not None and timeout > 0:
            self.now_s += timeout
        return []

    def close(self) -> None:
        self._keys.clear()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """See the module. `time()` starts at 0 and is exact: a sleep of an hour ends 3600 seconds later."""

    virtual_time = True

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)
        self._virtual.idle = self._deadlocked

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual.now_s

    def limit_idle_turns(self, turns: int, progress: Callable[[], object]) -> None:
        """Raise DeadlockError once `progress()` has given the same for so many turns of the loop, and some more."""
        seen = progress()

        def expire() -> None:
            nonlocal seen
            self._virtual.turns = 0
            before, seen = seen, progress()
            if seen == before:
                self._virtual.max_turns = math.inf  # what is cancelled now is to end
                raise DeadlockError(
                    f"no message between ranks in {turns} turns of the event loop, at {self.time():g} s now: one of "
                    "these tasks repeats itself for ever: " + self._waiting()
                )

        self._virtual.turns, self._virtual.max_turns, self._virtual.expire = 0, turns, expire

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def set_default_executor(self, executor: concurrent.futures.Executor) -> None:
        """Refused: work in threads takes no virtual time."""
        raise RuntimeError("executors run inline in virtual time")

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As `call_soon`: there is no other thread to be woken for."""
        return self.call_soon(callback, *args, context=context)

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there is no network in virtual time."""
        raise RuntimeError("there is no network in virtual time; use the in-memory transport")

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Refused: there is no network in virtual time."""
        raise RuntimeError("there is no network in virtual time; use the in-memory transport")

    def _deadlocked(self) -> NoReturn:
        raise DeadlockError(
            f"nothing can happen any more at {self.time():g} s, and these tasks wait: " + self._waiting()
        )

    def _waiting(self) -> str:
        """Where each task waits; those that run no line of the program only if there are no others."""
        tasks = [task for task in asyncio.all_tasks(self) if not task.done()]
        places = [(task.get_name(), *_where(task.get_coro())) for task in tasks]
        shown = [place for place in places if place[2]] or places
        return "; ".join(sorted(f"{name}: {place}" for name, place, _ in shown))


def _where(awaited: Any) -> tuple[str, bool]:
    """Where a coroutine waits, in which call and for what if that says so itself; and whether that is in the program.

    It is the innermost line that is neither asyncio's nor asyncdist's, if there is one.
    """
    place, called, ours = repr(awaited), "", False
    while frame := getattr(awaited, "cr_frame", None):
        internal = frame.f_code.co_filename.startswith(_INTERNAL)
        if internal and ours:
            called = called or f" in {awaited.__qualname__}"
        else:
            place = f"{awaited.__qualname__} at {frame.f_code.co_filename}:{frame.f_lineno}"
            called, ours = "", not internal
        awaited = awaited.cr_await
    frame = getattr(awaited, "gi_frame", None)  # of an __await__
    waited_for = frame.f_locals.get("self") if frame is not None else None
    return place + called + ("" if waited_for is None else f" for {waited_for!r}"), ours
