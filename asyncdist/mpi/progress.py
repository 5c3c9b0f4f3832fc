"""Progress: MPI makes none by itself, so the event loop asks it, often while something is about to happen.

| what is under way | how often MPI is asked |
| --- | --- |
| something began or came within `SPIN_S`, or large arrays move | at each turn of the loop, which sleeps not at all |
| an operation that takes long, or a receive | after 1 ms, 2 ms and so on up to `PAUSE_S` |
| nothing | each `IDLE_S`, for what other ranks say: that one sends to us, asks for us, or has aborted a group |

Whoever awaits a Work looks first, for ASYNCDIST_SPIN_US (`look`).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final, TypeAlias

from asyncdist.concurrency.loop import place_of
from asyncdist.concurrency.spin import Pending, Persistence
from asyncdist.mpi.library import is_over

SPIN_S: Final = 300e-6
"""How long the loop does not sleep after the last event: ten times what it takes to wake it."""
SPIN_S_PER_BYTE: Final = 2e-9
"""The same for each byte that moves: MPI moves no byte between two questions, and 500 MB/s is slow for it."""
PAUSE_S: Final = 8e-3
"""Longest sleep while something is under way: some 2 % of a core, by `python -m bench.mpi`."""
IDLE_S: Final = 40e-3
"""Longest sleep while nothing is."""
_FIRST_PAUSE_S: Final = 1e-3

Ended: TypeAlias = Callable[[Exception | None], None]
"""Hears that requests have ended, with MPI's error if one has failed."""

_give_core_away = getattr(os, "sched_yield", lambda: None)


class Progress(Persistence):
    """The requests of one mesh. `messages()` takes messages that have come; whether there were any. `awaited()` says
    whether one is waited for. Both are called from here, and so is whoever waits for requests."""

    def __init__(
        self,
        mpi: Any,
        loop: asyncio.AbstractEventLoop,
        spin_us: float,
        messages: Callable[[], bool],
        awaited: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._mpi = mpi
        self._test_all = mpi.Request.Testall
        self._exception: type[Exception] = mpi.Exception
        self._loop = loop
        self._limit_s = spin_us * 1e-6
        self._messages = messages
        self._awaited = awaited
        self._place = place_of(loop)
        self._pid = os.getpid()
        self._requests: dict[object, tuple[list[Any], Ended, list[Any] | None]] = {}
        self._next: asyncio.Handle | None = None
        self._sleeps = False
        self._spin_until_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._polling = False
        self._stopped = False
        self.crowded = False
        """Whether ranks share cores: then one gives its core away before it asks again."""

    def wait(
        self, key: object, requests: list[Any], ended: Ended, nbytes: int = 0, statuses: list[Any] | None = None
    ) -> None:
        """Call `ended` once all `requests` have; MPI fills `statuses`. `key` is what `forget` takes."""
        self._requests[key] = requests, ended, statuses
        self.stir(nbytes)

    def forget(self, key: object) -> bool:
        """Do not wait for the requests of `key` any more. False if they have ended."""
        return self._requests.pop(key, None) is not None

    def stir(self, nbytes: int = 0) -> None:
        """Something is about to happen: ask MPI often, for a while."""
        until_s = perf_counter() + SPIN_S + nbytes * SPIN_S_PER_BYTE
        if until_s > self._spin_until_s:
            self._spin_until_s = until_s
        self._pause_s = _FIRST_PAUSE_S
        if self._sleeps and self._next is not None:
            self._next.cancel()
            self._next = None
        if self._next is None and not self._stopped:
            self._sleeps = False
            self._next = self._loop.call_soon(self._turn)

    def stop(self) -> list[list[Any]]:
        """Ask no more. Returns the requests that have not ended, with which MPI keeps what they read and write."""
        if not self._loop.is_closed():
            self.poll()
        self._stopped = True
        left = [requests for requests, _, _ in self._requests.values() if not self.is_over(requests)]
        self._requests.clear()
        if self._next is not None:
            self._next.cancel()
            self._next = None
        return left

    def is_over(self, requests: list[Any]) -> bool:
        """Whether all have ended, well or not; nobody is told."""
        return is_over(self._mpi, requests)

    def poll(self) -> bool:
        """Ask MPI once, and tell whoever waits for what has ended. Returns whether anything has."""
        if self._polling or self._stopped:  # called from what is told of an end
            return False
        self._polling = True
        try:
            came = self._messages()
            for key, (requests, ended, statuses) in list(self._requests.items()):
                failure: Exception | None = None
                try:
                    if not self._test_all(requests, statuses):
                        continue
                except self._exception as error:
                    failure = error
                if self._requests.pop(key, None) is not None:
                    came = True
                    ended(failure)
            return came
        finally:
            self._polling = False

    def _turn(self) -> None:
        self._next = None
        if os.getpid() != self._pid:  # a forked child must not call MPI
            return
        came = True
        try:
            came = self.poll()
        finally:  # whoever is told of an end may raise
            if came:
                self.stir()
            else:
                self._schedule()

    def _schedule(self) -> None:
        if self._next is not None or self._stopped:
            return
        if perf_counter() < self._spin_until_s:
            if self.crowded:
                _give_core_away()
            self._sleeps = False
            self._next = self._loop.call_soon(self._turn)
            return
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, PAUSE_S if self._requests or self._awaited() else IDLE_S)
        self._sleeps = True
        self._next = self._loop.call_later(pause_s, self._turn)

    # What a Work that is awaited calls, as it does of `transport.spin.Spinner`.

    def look(self, work: Pending) -> bool:
        """Ask MPI until `work` is done, for a while after each event; whether it is."""
        if threading.get_ident() != self._place.thread:
            return False
        event_s = perf_counter()
        self.poll()
        while not work._done and perf_counter() - event_s < self._limit_s:
            if self.crowded:
                _give_core_away()
            if self.poll():
                event_s = perf_counter()
        if not work._done:
            self.stir()
        return work._done

    def glance(self, work: Pending) -> None:
        """Ask MPI once."""
        self.poll()

    def catch_up(self) -> None:
        """Between calls: take what has come."""
        self.poll()

    def woken(self) -> None:
        """The work of the last look has ended."""
