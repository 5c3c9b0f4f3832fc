"""Spinning: looking at shared memory, and at sockets of this host, for some microseconds before going to sleep.

Being woken costs a rank 10 to 20 microseconds, most of an exchange between two that share a host. So a task that awaits
a work looks first, for at most ASYNCDIST_SPIN_US (20), and only while that can pay: not many more ranks than cores are
on the host, none of them lives in this process, and looking has helped lately. Where two ranks answer each other at
once, the task looks longer (see `CATCH`): as long as a wait takes in which both have to be woken, which on slow
virtual machines is several times as long as on others. Ranks of this host that are reached through sockets are
`Neighbors`: their sockets are read as well.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Final

from asyncdist.concurrency.loop import place_of
from asyncdist.concurrency.spin import CATCH, TURN_S, Pending, Persistence
from asyncdist.transport.host_memory import HostMemory
from asyncdist.transport.protocol.hello import Identity
from asyncdist.transport.shared_memory.doorbell import Doorbell

RANKS_PER_CORE: Final = 4
"""Ranks per core up to which a rank looks. Where cores are shared, the rank gives its core away before each look, so
that the rank it waits for runs there: cheaper than sleeping, which costs both a wake-up, and through sockets a turn of
the loop."""
NEAR: Final = 1.25
"""A wait hardly longer than the shortest that ended asleep may have been two wake-ups and nothing else."""
FARTHEST: Final = 15
"""How much longer than the limit a look may take at most, where wake-ups take long."""
ALONE_S: Final = 5e-6
"""How long a rank looks before it gives its core away all the same, where every rank could have a core of its own. The
system may have put two ranks on one core, and then the one that looks keeps the other from answering. The system moves
one of them when it sees both ready to run for a while, which they never are where one always sleeps."""


_give_core_away = getattr(os, "sched_yield", lambda: time.sleep(0))

MAX_NEIGHBORS: Final = 4
"""Sockets that are looked at: each costs a system call, so with more of them a round would take too long to pay."""
_residents: Counter[tuple[bytes, int]] = Counter()


class Spinner(Persistence):
    """Looks on behalf of one mesh. Calls come from tasks of its loop."""

    def __init__(self, memory: HostMemory, neighbors: Neighbors, limit_us: float, local_ranks: int = 1) -> None:
        super().__init__()
        self._memory = memory
        self._neighbors = neighbors
        self._limit_s = limit_us * 1e-6
        self._local_ranks = local_ranks
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
        # Bound to one core, as benchmarks do, a rank is not told where the others are: take it that they are elsewhere.
        self._cores = affinity if affinity > 1 else os.cpu_count() or 1
        self._place = place_of(memory.loop)
        self._catch = False
        self._least_s = math.inf  # of waits that ended asleep
        # How long a wait or a look may have taken for the next look to take as long:
        self._window_s = CATCH * self._limit_s
        self._bell: Doorbell | None = None  # once a peer shares memory
        self._began_s = 0.0
        self._shared_cores = False
        self._fit = False
        self._ranks_fit = -1  # with how many ranks here, and no sockets, it was found

    def look(self, work: Pending) -> bool:
        """Look until `work` is done, for a while; whether it is. If not, `woken` is to be called when it is."""
        self._began_s = 0.0
        if not self._worth_it() or get_ident() != self._place.thread:  # elsewhere asyncio refuses to wait
            return False
        if self._skip and self._skips():
            return False
        self._began_s = began_s = perf_counter()
        until_s = began_s + (self._window_s if self._catch else self._limit_s)
        self._catch = False
        poll = self._poller()
        if not self._shared_cores:
            poll(work)
            while not work._done and perf_counter() - began_s < ALONE_S:
                poll(work)
        if not work._done:
            self._take_turns(work, poll, until_s)
        if work._done:
            self._misses = self._skip = 0
            self._catch = perf_counter() - began_s > self._limit_s  # the next may take as long
            return True
        return self._missed()

    def _take_turns(self, work: Pending, poll: Callable[[Pending], object], until_s: float) -> None:
        """Give the core away before each look. What others use it for meanwhile is not counted, within bounds."""
        away_s, longest_s = 0.0, (CATCH - 1) * self._limit_s
        while True:
            left_s = perf_counter()
            _give_core_away()
            away_s += perf_counter() - left_s
            poll(work)
            if work._done or perf_counter() >= until_s + min(away_s, longest_s):
                return

    def glance(self, work: Pending) -> None:
        """Look once, if that can pay: for a waiter that looks elsewhere too."""
        if self._worth_it():
            self._poller()(work)

    def _poller(self) -> Callable[[Pending], object]:
        """What looks once; until the loop turns no peer need ring."""
        sockets = self._neighbors.pollers
        if not self._memory.ranks_here:
            return self._poll_sockets
        bell = self._bell
        if bell is None:
            bell = self._bell = self._memory.doorbell
        if not bell.awake:
            bell.stay_awake()
        return self._poll_all if sockets else bell.poll_for

    def woken(self) -> None:
        """The work of the last look came after the look: learn whether a longer look would have paid."""
        if not self._began_s:
            return
        elapsed_s, limit_s = perf_counter() - self._began_s, self._limit_s
        if elapsed_s < self._least_s:
            self._least_s = elapsed_s
            self._window_s = max(CATCH * limit_s, min(NEAR * elapsed_s, FARTHEST * limit_s))
        if elapsed_s < self._window_s:
            self._catch = True

    def _worth_it(self) -> bool:
        """Whether the ranks that we could hear from have cores to run on while we look."""
        memory, neighbors = self._memory, self._neighbors
        if memory.ranks_here == self._ranks_fit and not (neighbors.pollers or memory.crowded):
            return self._fit
        sockets = len(neighbors.pollers)
        ranks = max((memory.ranks_here or 1) + sockets, self._local_ranks if sockets or memory.ranks_here else 1)
        self._shared_cores = ranks > self._cores
        fit = 1 < ranks <= RANKS_PER_CORE * self._cores and sockets <= MAX_NEIGHBORS
        self._fit = fit and not (memory.crowded or neighbors.crowded)
        self._ranks_fit = -1 if sockets or memory.crowded else memory.ranks_here
        return self._fit

    def catch_up(self) -> None:
        """Between calls: take what has come from this host for receives that are posted, and send what had no room."""
        if len(self._neighbors.pollers) <= MAX_NEIGHBORS:
            for catch_up in list(self._neighbors.pollers.values()):
                catch_up()

    def _poll_sockets(self, _work: Pending) -> None:
        for poller in tuple(self._neighbors.pollers):
            poller()

    def _poll_all(self, work: Pending) -> None:
        self._memory.doorbell.poll()
        self._poll_sockets(work)

    def turn_due(self) -> bool:
        """Whether the task that has just been served should let the loop turn before it goes on.

        The task will look again, so until then no peer need ring.
        """
        bell = self._bell
        if bell is not None and not bell.awake and self._memory.ranks_here and self._worth_it():
            bell.stay_awake()
        now_s = perf_counter()  # as Persistence does: small operations count calls
        if now_s - self._last_turn_s < TURN_S:
            return False
        self._last_turn_s = now_s
        return True


class Neighbors:
    """`pollers` read one socket each, if there is something; whether there was. Their values do so between calls."""

    def __init__(self) -> None:
        self.pollers: dict[Callable[[], bool], Callable[[], object]] = {}
        self.crowded = False
        """Whether one of them lives in this process: while we look, it cannot do anything."""

    def add(self, poller: Callable[[], bool], catch_up: Callable[[], object], *, crowded: bool) -> None:
        """Another connection of this host is open."""
        self.pollers[poller] = catch_up
        self.crowded |= crowded

    def remove(self, poller: Callable[[], bool]) -> None:
        """It has ended. Idempotent."""
        self.pollers.pop(poller, None)


def settle(identity: Identity) -> None:
    """This rank lives in this process, from now on."""
    _residents[identity.world_id, identity.rank] += 1


def vacate(identity: Identity) -> None:
    """This rank lives here no more."""
    place = identity.world_id, identity.rank
    _residents[place] -= 1
    if _residents[place] <= 0:
        del _residents[place]


def lives_here(world_id: bytes, rank: int) -> bool:
    """Whether that rank lives in this process too."""
    return (world_id, rank) in _residents


def on_this_host(sock: socket.socket) -> bool:
    """Whether the other end of a connected socket is on this host."""
    if sock.family == socket.AF_UNIX:
        return True
    try:
        own, peer = sock.getsockname(), sock.getpeername()
    except OSError:
        return False
    return bool(own[0] == peer[0])
