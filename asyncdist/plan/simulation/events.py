"""Events: runs plans of several ranks together on a model of their CPUs, ports and network cards, and says how long.

Every step starts as soon as the steps it waits for are done, as the executor starts them. What it then needs:

- Send: its rank's thread for the overhead and the copying, its port (between hosts: the host's card, which all ranks
  there share) for the bytes.
- Receive: the latency later, the receiver's port (card) for the bytes; once all are there and the step has started, its
  thread for the copying, the overhead and the reduction.
- Reduce, Copy: the thread.
- Publish: the thread, for the copying. Fetch: the thread, for copying or reducing, once the item is there; a rank that
  has nothing else to do then must be woken first. Memory for items is taken to be enough.

A rank that asks first is served first; of those that ask at the same time, the lower rank. So that the same time is the
same number however it came about, time is counted in whole femtoseconds here. A message occupies both ports at once,
the later one by the latency, so alone it takes what `Constants` says. Messages that come before their receive has
started wait without holding up others.

This is LogGP with a thread and ports of its own: Alexandrov, Ionescu, Schauser and Scheiman, "LogGP: incorporating
long messages into the LogP model", SPAA 1995.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from asyncdist.plan.cost.constants import COPY_SHARE, Constants
from asyncdist.plan.cost.load import RETURNED_S
from asyncdist.plan.records import SINGLE_COPY_BYTES
from asyncdist.plan.steps import Copy, Fetch, FetchReduce, Plan, Publish, Recv, RecvReduce, Reduce, Send, Step

Feeds = Sequence[Sequence[int]]
"""By step number: the receives that get what a send sends, the fetches of what is published. Steps are numbered through
all simulated ranks."""

TICKS: Final = 10**15
"""Ticks of the clock in a second: femtoseconds. A byte takes thousands of them, so that nothing is lost."""

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
PUBLISHES: Final = 3
FETCHES: Final = 4
ALONE: Final = (LOCAL, PUBLISHES)
AWAITING: Final = (RECEIVES, FETCHES)

# Tuples: a union would be built anew at every isinstance.
MESSAGES: Final = (Send, Recv, RecvReduce)
RECEIVING: Final = (Recv, RecvReduce)
FETCHING: Final = (Fetch, FetchReduce)
OUTGOING: Final = (Send, Publish)
SHARED: Final = (Publish, *FETCHING)


class Hosts(NamedTuple):
    """Where ranks are: `ranks_per_host` consecutive ones share a host, or those of one number in `numbers`."""

    constants: Constants
    ranks_per_host: int
    slowness: float = 1.0
    """Of copies and reductions in shared memory, as `slowness_of` says."""
    numbers: tuple[int, ...] = ()
    """As `Problem.hosts`."""

    def of(self, rank: int) -> int:
        """The host of a rank."""
        return self.numbers[rank] if self.numbers else rank // self.ranks_per_host

    @property
    def most(self) -> int:
        """Ranks of the host that has most."""
        return max(Counter(self.numbers).values(), default=self.ranks_per_host)


def feeds_of(plans: Sequence[Plan]) -> Feeds:
    """Match sends and receives, items and fetches, of the plans of ranks 0, 1, ... of a whole world.

    Raises ValueError for a receive whose message no rank sends, KeyError for a send that no rank receives.
    """
    receives: dict[tuple[int, int, int], int] = {}
    fetches: dict[tuple[int, int], list[int]] = {}
    number = 0
    for plan in plans:
        for step in plan.steps:
            if isinstance(step, RECEIVING):
                receives[step.peer, plan.rank, step.slot] = number
            elif isinstance(step, FETCHING):
                fetches.setdefault((step.peer, step.item), []).append(number)
            number += 1
    feeds: list[Sequence[int]] = []
    for plan in plans:
        for step in plan.steps:
            if isinstance(step, Send):
                feeds.append((receives.pop((plan.rank, step.peer, step.slot)),))
            else:
                feeds.append(fetches.pop((plan.rank, step.item), ()) if isinstance(step, Publish) else ())
    if fetches:
        raise ValueError(f"never published: (rank, item) {sorted(fetches)[:3]}")
    if receives:
        raise ValueError(f"never sent: (source, destination, slot) {sorted(receives)[:3]}")
    return feeds


def run(plans: Sequence[Plan], feeds: Feeds, itemsize: int, hosts: Hosts) -> float:
    """Return the seconds until every step of `plans` is done. Raises ValueError where they wait for each other."""
    return _Simulation(plans, feeds, itemsize, hosts).run()


class _Cost(NamedTuple):
    """What a step needs; all times in femtoseconds."""

    kind: int
    cpu_fs: int
    """Of a send: overhead and copying. Of a receive: all it does from the first copy on. Else: the work."""
    copied_fs: int
    """Of a receive: how much of that can be done while the bytes still come."""
    wire_fs: int
    latency_fs: int


class _Costs:
    """Costs of steps, worked out once for all that are alike."""

    def __init__(self, hosts: Hosts, itemsize: int, *, shared: bool, single_copy: bool) -> None:
        constants = hosts.constants
        self._constants = constants
        self._crowding = constants.crowding(hosts.most)
        self._slowness = hosts.slowness if shared else 1.0
        self._itemsize = itemsize
        self._known: dict[tuple[type[Step], int, bool], _Cost] = {}
        self._single_copy = single_copy
        self.overhead_fs = round(constants.overhead_s * TICKS)
        self._wake_fs = round(constants.shared.wake_s * self._crowding * TICKS)
        self._reduce_s = constants.shared.reduce_s if shared else constants.gamma_s
        self._copy_s = constants.shared.copy_s if shared else constants.gamma_s * COPY_SHARE

    def of(self, step: Step, *, remote: bool) -> _Cost:
        """Return the cost of a step, a message to another host if `remote`."""
        length = step.source.length if isinstance(step, OUTGOING) else step.target.length
        key = (type(step), length, remote)
        cost = self._known.get(key)
        if cost is None:
            cost = self._known[key] = self._cost(step, length * self._itemsize, remote)
        return cost

    def _cost(self, step: Step, nbytes: int, remote: bool) -> _Cost:
        constants = self._constants
        reduces = isinstance(step, Reduce | FetchReduce | RecvReduce)
        work_fs = round(nbytes * self._slowness * (self._reduce_s if reduces else self._copy_s) * TICKS)
        if isinstance(step, Copy | Reduce):
            return _Cost(LOCAL, work_fs, 0, 0, 0)
        if isinstance(step, SHARED):
            kind = PUBLISHES if isinstance(step, Publish) else FETCHES
            if self._single_copy and nbytes >= SINGLE_COPY_BYTES:
                read_s = constants.shared.read_s + (self._reduce_s if reduces else 0.0)
                work_s = 0.0 if isinstance(step, Publish) else read_s
                work_fs = round(nbytes * work_s * TICKS)
            return _Cost(kind, round(constants.shared.step_s * TICKS) + work_fs, 0, 0, self._wake_fs)
        beta_s, latency_s = constants.beta_s, constants.latency_s * self._crowding
        if remote and constants.between is not None:
            beta_s, latency_s = constants.between.beta_s, constants.between_latency_s
        wire_fs, copy_fs = round(nbytes * beta_s * TICKS), round(nbytes * constants.copy_s * TICKS)
        cpu_fs = self.overhead_fs + copy_fs + (work_fs if reduces else 0)
        kind = SENDS if isinstance(step, Send) else RECEIVES
        return _Cost(kind, cpu_fs, min(copy_fs, wire_fs), wire_fs, round(latency_s * TICKS))


class _Simulation:
    """One run. Lists are indexed by step number, by thread (simulated rank) or by port."""

    def __init__(self, plans: Sequence[Plan], feeds: Feeds, itemsize: int, hosts: Hosts) -> None:
        constants = hosts.constants
        shared = any(isinstance(step, SHARED) for plan in plans for step in plan.steps)
        self._single_copy = single_copy = any(plan.single_copy for plan in plans)
        costs = _Costs(hosts, itemsize, shared=shared, single_copy=single_copy)
        self._returned_fs = round(RETURNED_S * TICKS) if single_copy else 0
        self._feeds = feeds
        self._overhead_fs = costs.overhead_fs
        self._events: list[tuple[int, int]] = []
        self._finish_fs = 0
        self._remaining = 0
        self._kinds: list[int] = []
        self._threads: list[int] = []
        self._pending: list[int] = []
        self._followers: list[list[int]] = []
        self._cpu_fs: list[int] = []
        self._copied_fs: list[int] = []
        self._wire_fs: list[int] = []
        self._latency_fs: list[int] = []
        self._ports: list[int] = []
        self._arrived: list[bool] = []
        self._load(plans, hosts, costs)
        limited = 0 < constants.cores < hosts.most
        self._core_of = [hosts.of(plan.rank) for plan in plans]
        first = min(self._core_of, default=0)
        self._core_of = [host - first for host in self._core_of]
        self._cores = [[0] * constants.cores for _ in range(max(self._core_of, default=0) + 1)] if limited else None
        self._thread_free_fs = [0] * len(plans)
        if shared and plans[0].collective != "barrier":  # which goes by records
            for thread in range(len(plans)):
                self._work(thread, 0, round(constants.shared.begin_s * TICKS))

    def run(self) -> float:
        """Process events in order of time until there are none."""
        for number, count in enumerate(self._pending):
            if not count:
                self._start(number, 0)
        events = self._events
        while events:
            time_fs, code = heappop(events)
            number, phase = divmod(code, PHASES)
            if phase == ARRIVED:
                self._arrived[number] = True
                if not self._pending[number]:
                    self._receive(number, time_fs, time_fs - self._copied_fs[number])
            elif phase == ARRIVAL and self._kinds[number] == FETCHES:
                busy = self._thread_free_fs[self._threads[number]] > time_fs  # a rank that works looks by itself
                heappush(events, (time_fs + (0 if busy else self._latency_fs[number]), number * PHASES + ARRIVED))
            elif phase == ARRIVAL:
                port = self._ports[number]
                start_fs = max(time_fs, self._in_free_fs[port])
                end_fs = self._in_free_fs[port] = start_fs + self._wire_fs[number]
                heappush(events, (end_fs, number * PHASES + ARRIVED))
            elif phase == DEPARTURE:
                self._depart(number, time_fs)
            else:
                for follower in self._followers[number]:
                    self._pending[follower] -= 1
                    if not self._pending[follower]:
                        self._start(follower, time_fs)
        if self._remaining:
            raise ValueError(f"{self._remaining} steps wait for each other")
        return (self._finish_fs + self._returned_fs) / TICKS

    def _load(self, plans: Sequence[Plan], hosts: Hosts, costs: _Costs) -> None:
        remote_links = hosts.constants.between is not None
        cards: dict[int, int] = {}
        for thread, plan in enumerate(plans):
            base, host = len(self._kinds), hosts.of(plan.rank)
            card = cards.setdefault(host, len(plans) + len(cards))
            for step in plan.steps:
                remote = remote_links and isinstance(step, MESSAGES) and hosts.of(step.peer) != host
                cost = costs.of(step, remote=remote)
                self._kinds.append(cost.kind)
                self._threads.append(thread)
                self._pending.append(len(step.after))
                self._cpu_fs.append(cost.cpu_fs)
                self._copied_fs.append(cost.copied_fs)
                self._wire_fs.append(cost.wire_fs)
                self._latency_fs.append(cost.latency_fs)
                self._ports.append(card if remote else thread)
                self._followers.append([])
                for earlier in step.after:
                    self._followers[base + earlier].append(len(self._kinds) - 1)
        self._remaining = len(self._kinds)
        self._arrived = [False] * len(self._kinds)
        self._first_card = len(plans)
        self._in_free_fs = [0] * (len(plans) + len(cards))
        self._out_free_fs = [0] * (len(plans) + len(cards))

    def _work(self, thread: int, earliest_fs: int, duration_fs: int) -> int:
        """Give a thread work; return when it starts."""
        start_fs = max(earliest_fs, self._thread_free_fs[thread])
        if self._cores is not None and duration_fs:
            cores = self._cores[self._core_of[thread]]
            free = [free_fs for free_fs in cores if free_fs <= start_fs]
            taken_fs = max(free) if free else min(cores)  # the one that idled least; else the one that is free first
            start_fs = max(start_fs, taken_fs)
            cores[cores.index(taken_fs)] = start_fs + duration_fs
        self._thread_free_fs[thread] = start_fs + duration_fs
        return start_fs

    def _start(self, number: int, time_fs: int) -> None:
        """Everything that step waited for is done."""
        kind = self._kinds[number]
        if kind in AWAITING:
            if self._arrived[number]:
                self._receive(number, time_fs, time_fs)
            return
        cpu_fs = self._cpu_fs[number]
        if kind == PUBLISHES and self._single_copy:  # goes before all that the rank could do meanwhile
            start_fs = time_fs
        else:
            start_fs = self._work(self._threads[number], time_fs, cpu_fs)
        if kind in ALONE:
            for fetch in self._feeds[number]:
                heappush(self._events, (start_fs + cpu_fs, fetch * PHASES + ARRIVAL))
            self._finish(number, start_fs + cpu_fs)
            return
        start_fs += self._overhead_fs
        if self._ports[number] < self._first_card:
            self._depart(number, start_fs)
        else:  # ranks share the card: which is first is not known yet
            heappush(self._events, (start_fs, number * PHASES + DEPARTURE))

    def _depart(self, number: int, time_fs: int) -> None:
        """The first byte may leave."""
        port, wire_fs = self._ports[number], self._wire_fs[number]
        start_fs = max(time_fs, self._out_free_fs[port])
        self._out_free_fs[port] = start_fs + wire_fs
        arrival_fs = start_fs + self._latency_fs[number]
        for receive in self._feeds[number]:
            heappush(self._events, (arrival_fs, receive * PHASES + ARRIVAL))
        self._finish(number, max(start_fs + wire_fs, time_fs + self._cpu_fs[number] - self._overhead_fs))

    def _receive(self, number: int, time_fs: int, earliest_fs: int) -> None:
        """The message is here and expected; copying may have begun before the last byte came."""
        cpu_fs = self._cpu_fs[number]
        start_fs = self._work(self._threads[number], earliest_fs, cpu_fs)
        self._finish(number, max(start_fs + cpu_fs, time_fs))

    def _finish(self, number: int, time_fs: int) -> None:
        self._remaining -= 1
        if time_fs > self._finish_fs:
            self._finish_fs = time_fs
        if self._followers[number]:
            heappush(self._events, (time_fs, number * PHASES + DONE))
