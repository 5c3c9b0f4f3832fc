"""Events: runs plans of several ranks together on a model of their CPUs, ports and network cards, and says how long.

Every step starts as soon as the steps it waits for are done, as the executor starts them. What it then needs:

- Send: its rank's thread for the overhead and the copying, its port (between hosts: the host's card, which all ranks
  there share) for the bytes.
- Receive: the latency later, the receiver's port (card) for the bytes; once all are there and the step has started, its
  thread for the copying, the overhead and the reduction.
- Reduce, Copy: the thread.

Who asks first is served first. A message occupies both ports at once, the later one by the latency, so alone it takes
what `Constants` says. Messages that come before their receive has started wait without holding up others.

This is LogGP with a thread and ports of its own: Alexandrov, Ionescu, Schauser and Scheiman, "LogGP: incorporating
long messages into the LogP model", SPAA 1995.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from asyncdist.plan.constants import COPY_SHARE, Constants
from asyncdist.plan.steps import Copy, Plan, Recv, RecvReduce, Reduce, Send

__all__ = ["Feeds", "Hosts", "feeds_of", "run"]

Feeds = Sequence[Sequence[int]]
"""By step number: the receives that get what a send sends. Steps are numbered through all simulated ranks."""

NOBODY: Final = -1

# What an event is about; its code is the step's number times PHASES plus one of these, so that of two events at one
# time that of the earlier step comes first.
DEPARTURE: Final = 0
ARRIVAL: Final = 1
ARRIVED: Final = 2
DONE: Final = 3
PHASES: Final = 4

SENDS: Final = 0
RECEIVES: Final = 1
LOCAL: Final = 2


class Hosts(NamedTuple):
    """Where ranks are: `ranks_per_host` consecutive ones share a host."""

    constants: Constants
    ranks_per_host: int


def feeds_of(plans: Sequence[Plan]) -> Feeds:
    """Match sends and receives of the plans of ranks 0, 1, ... of a whole world.

    Raises ValueError for a receive whose message nobody sends, KeyError for a send that nobody receives.
    """
    receives: dict[tuple[int, int, int], int] = {}
    number = 0
    for plan in plans:
        for step in plan.steps:
            if isinstance(step, Recv | RecvReduce):
                receives[step.peer, plan.rank, step.slot] = number
            number += 1
    feeds = [
        (receives.pop((plan.rank, step.peer, step.slot)),) if isinstance(step, Send) else ()
        for plan in plans
        for step in plan.steps
    ]
    if receives:
        raise ValueError(f"never sent: (source, destination, slot) {sorted(receives)[:3]}")
    return feeds


def run(plans: Sequence[Plan], feeds: Feeds, itemsize: int, hosts: Hosts) -> float:
    """Return the seconds until every step of `plans` is done. Raises ValueError where they wait for each other."""
    return _Simulation(plans, feeds, itemsize, hosts).run()


class _Simulation:
    """One run. Lists are indexed by step number, by thread (simulated rank) or by port."""

    def __init__(self, plans: Sequence[Plan], feeds: Feeds, itemsize: int, hosts: Hosts) -> None:
        constants = hosts.constants
        self._feeds = feeds
        self._overhead_s = constants.overhead_s
        self._events: list[tuple[float, int]] = []
        self._finish_s = 0.0
        self._remaining = 0
        self._kinds: list[int] = []
        self._threads: list[int] = []
        self._pending: list[int] = []
        self._followers: list[list[int]] = []
        self._cpu_s: list[float] = []
        """Of a send: overhead and copying. Of a receive: all it does from the first copy on. Else: the work."""
        self._copied_s: list[float] = []
        """Of a receive: how much of that can be done while the bytes still come."""
        self._wire_s: list[float] = []
        self._latency_s: list[float] = []
        self._ports: list[int] = []
        self._arrived: list[bool] = []
        self._load(plans, itemsize, hosts)
        limited = 0 < constants.cores < hosts.ranks_per_host
        self._core_of = [plan.rank // hosts.ranks_per_host for plan in plans]
        first = min(self._core_of, default=0)
        self._core_of = [host - first for host in self._core_of]
        self._cores = [[0.0] * constants.cores for _ in range(max(self._core_of, default=0) + 1)] if limited else None
        self._thread_free_s = [0.0] * len(plans)

    def run(self) -> float:
        """Process events in order of time until there are none."""
        for number, count in enumerate(self._pending):
            if not count:
                self._start(number, 0.0)
        events = self._events
        while events:
            time_s, code = heappop(events)
            number, phase = divmod(code, PHASES)
            if phase == ARRIVED:
                self._arrived[number] = True
                if not self._pending[number]:
                    self._receive(number, time_s, time_s - self._copied_s[number])
            elif phase == ARRIVAL:
                port = self._ports[number]
                start_s = max(time_s, self._in_free_s[port])
                end_s = self._in_free_s[port] = start_s + self._wire_s[number]
                heappush(events, (end_s, number * PHASES + ARRIVED))
            elif phase == DEPARTURE:
                self._depart(number, time_s)
            else:
                for follower in self._followers[number]:
                    self._pending[follower] -= 1
                    if not self._pending[follower]:
                        self._start(follower, time_s)
        if self._remaining:
            raise ValueError(f"{self._remaining} steps wait for each other")
        return self._finish_s

    def _load(self, plans: Sequence[Plan], itemsize: int, hosts: Hosts) -> None:
        constants, per_host = hosts.constants, hosts.ranks_per_host
        between = constants.between
        beta_s, copy_s = constants.beta_s * itemsize, constants.copy_s * itemsize
        gamma_s, overhead_s = constants.gamma_s * itemsize, constants.overhead_s
        cards: dict[int, int] = {}
        for thread, plan in enumerate(plans):
            base, host = len(self._kinds), plan.rank // per_host
            card = cards.setdefault(host, len(plans) + len(cards))
            for step in plan.steps:
                local = isinstance(step, Copy | Reduce)
                kind = LOCAL if isinstance(step, Copy | Reduce) else SENDS if isinstance(step, Send) else RECEIVES
                length = step.target.length if not isinstance(step, Send) else step.source.length
                wire_s, latency_s, port = length * beta_s, constants.latency_s, thread
                if between is not None and not isinstance(step, Copy | Reduce) and step.peer // per_host != host:
                    wire_s, latency_s, port = length * between.beta_s * itemsize, constants.between_latency_s, card
                cpu_s = overhead_s + length * copy_s
                if local:
                    cpu_s = length * gamma_s * (COPY_SHARE if isinstance(step, Copy) else 1)
                elif isinstance(step, RecvReduce):
                    cpu_s += length * gamma_s
                self._kinds.append(kind)
                self._threads.append(thread)
                self._pending.append(len(step.after))
                self._cpu_s.append(cpu_s)
                self._copied_s.append(min(length * copy_s, wire_s))
                self._wire_s.append(wire_s)
                self._latency_s.append(latency_s)
                self._ports.append(port)
                self._followers.append([])
                for earlier in step.after:
                    self._followers[base + earlier].append(len(self._kinds) - 1)
        self._remaining = len(self._kinds)
        self._arrived = [False] * len(self._kinds)
        self._first_card = len(plans)
        self._in_free_s = [0.0] * (len(plans) + len(cards))
        self._out_free_s = [0.0] * (len(plans) + len(cards))

    def _work(self, thread: int, earliest_s: float, seconds: float) -> float:
        """Give a thread work; return when it starts."""
        start_s = max(earliest_s, self._thread_free_s[thread])
        if self._cores is not None and seconds:
            cores = self._cores[self._core_of[thread]]
            free = [free_s for free_s in cores if free_s <= start_s]
            taken_s = max(free) if free else min(cores)  # the one that idled least; else the one that is free first
            start_s = max(start_s, taken_s)
            cores[cores.index(taken_s)] = start_s + seconds
        self._thread_free_s[thread] = start_s + seconds
        return start_s

    def _start(self, number: int, time_s: float) -> None:
        """Everything that step waited for is done."""
        kind = self._kinds[number]
        if kind == RECEIVES:
            if self._arrived[number]:
                self._receive(number, time_s, time_s)
            return
        cpu_s = self._cpu_s[number]
        start_s = self._work(self._threads[number], time_s, cpu_s)
        if kind == LOCAL:
            self._finish(number, start_s + cpu_s)
            return
        start_s += self._overhead_s
        if self._ports[number] < self._first_card:
            self._depart(number, start_s)
        else:  # ranks share the card: who is first is not known yet
            heappush(self._events, (start_s, number * PHASES + DEPARTURE))

    def _depart(self, number: int, time_s: float) -> None:
        """The first byte may leave."""
        port, wire_s = self._ports[number], self._wire_s[number]
        start_s = max(time_s, self._out_free_s[port])
        self._out_free_s[port] = start_s + wire_s
        arrival_s = start_s + self._latency_s[number]
        for receive in self._feeds[number]:
            heappush(self._events, (arrival_s, receive * PHASES + ARRIVAL))
        self._finish(number, max(start_s + wire_s, time_s + self._cpu_s[number] - self._overhead_s))

    def _receive(self, number: int, time_s: float, earliest_s: float) -> None:
        """The message is here and expected; copying may have begun before the last byte came."""
        cpu_s = self._cpu_s[number]
        start_s = self._work(self._threads[number], earliest_s, cpu_s)
        self._finish(number, max(start_s + cpu_s, time_s))

    def _finish(self, number: int, time_s: float) -> None:
        self._remaining -= 1
        if time_s > self._finish_s:
            self._finish_s = time_s
        if self._followers[number]:
            heappush(self._events, (time_s, number * PHASES + DONE))
