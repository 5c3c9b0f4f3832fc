"""Completions: tells the event loop when work on a GPU has ended, without ever blocking it.

Events of one stream end in the order they were added, so the loop looks only at the oldest event of each stream, once a
turn. For work that takes longer than POLL_S a thread per stream sleeps in the driver, and wakes the loop once for all
that has ended. If such work ended soon after, the loop looks for longer the next time. The driver never calls Python: a
callback in the driver's thread that takes Python's lock can deadlock with a thread that holds Python's lock and waits
for the driver's.

A small operation may end before the loop has turned once. So a task that awaits one looks at the GPU first
(`EventSpinner`), as `transport.spin` looks at shared memory, as long as that has helped lately: for at most
ASYNCDIST_SPIN_US (20), or five times that where ranks have to hear from each other between two events.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any, Final, Protocol

from asyncdist.concurrency.loop import place_of
from asyncdist.concurrency.spin import CATCH, MeshSpins, Pending, Persistence
from asyncdist.cuda.interface import Event
from asyncdist.gpu.threads import close_all

POLL_S: Final = 100e-6
"""How long the loop looks at every turn before a thread waits: about twice what the thread needs to wake the loop."""

LONGER_POLL_S: Final = 1e-3
"""The same for a stream whose last wait in the thread took no longer: to wake the loop takes a good part of that."""

Callback = Callable[[BaseException | None], object]


class Entry(Protocol):
    """One operation's end. An entry refers to what must not be freed before."""

    events: Sequence[Event]
    """The operation's last events."""


@dataclass(slots=True, eq=False)
class _Told:
    """An entry with a callback of its own."""

    events: Sequence[Event]
    callback: Callback
    keep_alive: object

    def tell(self, error: BaseException | None) -> None:
        self.callback(error)


@dataclass(slots=True, eq=False)
class StreamQueue:
    """The entries of one stream, or of several that are used together, oldest first. They end in that order.

    `ended(entry, None)` is called on the loop once all events of an entry are done, or `ended(entry, error)` if a look
    at the events fails.
    """

    ended: Callable[[Any, BaseException | None], object]
    entries: deque[Entry] = field(default_factory=deque)
    looked_since_s: float = 0.0
    poll_s: float = field(default_factory=lambda: POLL_S)
    waiting: bool = False
    """Whether the thread waits for the entries. The loop does not look then."""
    waiter: _Waiter | None = None
    """The thread, once there is one. The thread stays: to start one costs as much as several operations."""


class Completions:
    """The queues of one event loop and one GPU. All methods are called on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, set_device: Callable[[int], object]) -> None:
        """`set_device` is the runtime's. By default a thread's device is the first, perhaps another rank's."""
        self.loop = loop
        self._set_device = set_device
        self._queues: dict[object, StreamQueue] = {}
        self._looking = False
        self._polled: set[StreamQueue] = set()

    def queue(self, name: object, ended: Callable[[Any, BaseException | None], object]) -> StreamQueue:
        """Make a queue, for `watch` and, by its name, for `drop`."""
        queue = self._queues[name] = StreamQueue(ended)
        return queue

    def add(self, name: object, events: Sequence[Event], callback: Callback, keep_alive: object = None) -> None:
        """Add an entry with a callback of its own to the queue of that name, which is made if there is none.

        `keep_alive` is referenced until the callback is called.
        """
        self.watch(self._queues.get(name) or self.queue(name, _Told.tell), _Told(events, callback, keep_alive))

    def watch(self, queue: StreamQueue, entry: Entry) -> None:
        """Add an entry to a queue."""
        entries = queue.entries
        entries.append(entry)
        if queue.waiting:
            assert queue.waiter is not None
            queue.waiter.add(entry)
        elif len(entries) == 1:
            queue.looked_since_s = time.perf_counter()
            self._polled.add(queue)
            if not self._looking:
                self._looking = True
                self.loop.call_soon(self._look)

    def close(self) -> None:
        """Forget all queues."""
        for queue in list(self._queues):
            self.drop(queue)

    @property
    def pending(self) -> int:
        """Entries that have not ended."""
        return sum(len(queue.entries) for queue in self._queues.values())

    def drop(self, name: object) -> None:
        """Forget a queue without calling back, and let its thread end.

        What the entries keep alive is kept until the entries are done. Then their events are closed.
        """
        found = self._queues.pop(name, None)
        if found is None:
            return
        self._polled.discard(found)
        kept = tuple(found.entries)
        found.entries.clear()
        if found.waiter is not None:
            found.waiter.stop(kept)
        elif kept:
            arguments = kept, self._set_device
            threading.Thread(target=_keep, args=arguments, name="asyncdist gpu keeper", daemon=True).start()

    # Looking from the loop.

    def look(self) -> None:
        """Look once at all queues that no thread waits for, and call back for the entries that have ended."""
        for queue in tuple(self._polled):
            entries = queue.entries
            ended = False
            while entries and not queue.waiting:
                try:
                    if not _is_done(entries[0]):
                        break
                except Exception as error:
                    queue.ended(entries.popleft(), error)
                else:
                    queue.ended(entries.popleft(), None)
                ended = True
            if not entries:  # or a callback has dropped it
                self._polled.discard(queue)
            else:
                now_s = time.perf_counter()
                if ended:
                    queue.looked_since_s = now_s
                elif now_s - queue.looked_since_s > queue.poll_s:
                    self._wait_for(queue)

    def _look(self) -> None:
        self.look()
        if self._polled:
            self.loop.call_soon(self._look)
        else:
            self._looking = False

    # Waiting in a thread.

    def _wait_for(self, queue: StreamQueue) -> None:
        queue.poll_s = POLL_S
        self._polled.discard(queue)
        queue.waiting = True
        if queue.waiter is None:
            own = partial(self._set_device, queue.entries[0].events[0].device)
            queue.waiter = _Waiter(self.loop, own, partial(self._waited, queue))
        for entry in queue.entries:
            queue.waiter.add(entry)

    @staticmethod
    def _waited(queue: StreamQueue, ended: Sequence[tuple[Entry, BaseException | None]]) -> None:
        """On the loop: these entries have ended, in order."""
        if time.perf_counter() - queue.looked_since_s < LONGER_POLL_S:
            queue.poll_s = LONGER_POLL_S
        for entry, error in ended:
            if not queue.entries:
                return  # it was dropped, by a callback perhaps
            queue.entries.popleft()
            queue.ended(entry, error)
        if not queue.entries:
            queue.waiting = False  # the next operation may be a short one


class _Waiter:
    """A thread that waits for entries, in order; `ended` is called on the loop with the entries that have ended.

    The thread calls `set_device` first. Otherwise CUDA would open a context on GPU 0, in every process.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        set_device: Callable[[], object],
        ended: Callable[[Sequence[tuple[Entry, BaseException | None]]], None],
    ) -> None:
        self._loop = loop
        self._set_device = set_device
        self._ended = ended
        self._entries: deque[Entry] = deque()
        self._wake = threading.Event()
        self._stopped = False
        self._kept: Sequence[Entry] = ()
        threading.Thread(target=self._run, name="asyncdist gpu waiter", daemon=True).start()

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._wake.set()

    def stop(self, kept: Sequence[Entry]) -> None:
        """End the thread once it is through with its wait and with `kept`. It reports nothing more."""
        self._kept = kept
        self._stopped = True
        self._wake.set()

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # waiting says what is wrong
            self._set_device()
        while not self._stopped:
            if not self._entries:
                self._wake.wait()
                self._wake.clear()
                continue
            ended = [self._wait_for(self._entries.popleft())]
            while self._entries and _has_ended(self._entries[0]):
                ended.append(self._wait_for(self._entries.popleft()))
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended, ended)
            del ended  # what they keep alive must not live until the next ones come
        self._entries.clear()
        kept, self._kept = self._kept, ()
        _keep(kept)

    @staticmethod
    def _wait_for(entry: Entry) -> tuple[Entry, BaseException | None]:
        try:
            _synchronize(entry)
        except Exception as error:
            return entry, error
        return entry, None


def _keep(entries: Sequence[Entry], set_device: Callable[[int], object] | None = None) -> None:
    """In a thread: keep entries until the GPU is through with them, and close their events."""
    if set_device is not None:
        with contextlib.suppress(Exception):
            set_device(entries[0].events[0].device)
    for entry in entries:
        with contextlib.suppress(Exception):  # of a broken GPU: it does nothing any more
            _synchronize(entry)
        close_all(*entry.events)


def _is_done(entry: Entry) -> bool:
    for event in entry.events:  # noqa: SIM110 - one, as a rule, and a generator costs more than asking it
        if not event.done():
            return False
    return True


def _synchronize(entry: Entry) -> None:
    for event in entry.events:
        event.synchronize()


def _has_ended(entry: Entry) -> bool:
    try:
        return _is_done(entry)
    except Exception:
        return True  # waiting for it says what is wrong


class EventSpinner(Persistence):
    """Looks at the events of one `Completions`, for tasks of its loop.

    `messages` looks for messages of other ranks, where operations wait for messages too.
    """

    __slots__ = ("_completions", "_limit_s", "_messages", "_place")

    def __init__(self, completions: Completions, limit_us: float, messages: MeshSpins | None = None) -> None:
        super().__init__()
        self._completions = completions
        self._messages = messages
        self._limit_s = (limit_us if messages is None else CATCH * limit_us) * 1e-6
        self._place = place_of(completions.loop)

    def look(self, work: Pending) -> bool:
        """Look for a while until `work` is done; return whether it is done."""
        if get_ident() != self._place.thread:  # elsewhere asyncio refuses to wait
            return False
        if self._skip and self._skips():
            return False
        look, messages = self._completions.look, self._messages
        look()
        until_s = 0.0
        while not work._done:
            now_s = perf_counter()
            if not until_s:
                until_s = now_s + self._limit_s
            elif now_s >= until_s:
                return self._missed()
            if messages is not None:
                messages.glance(work)
            look()
        self._misses = self._skip = 0
        return True

    def woken(self) -> None:
        """The operation of the last look has ended since."""
