"""MismatchProbe: asks other ranks, in a group with GPU arrays, whether they run the same collective.

A host array here and a GPU array there take separate ways: no message of one meets a message of the other. So a rank
whose operation takes long asks a few times a second: the ranks that it waits for where they are known, else its
neighbors, one after the other. A waiting rank must ask by itself: a rank that only sends may have ended the operation
while others wait for what never comes. A rank that cannot be asked any more has left.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork, GroupBackend, OnEnd

ASK_AFTER_S: Final = 0.25
"""How old an operation gets before another rank is asked what it runs there: a difference shows within a second, and a
step of training seldom asks."""

ASK_GROWTH: Final = 2.0
"""By how much later the next question about the same operation comes: a late rank is asked a few times."""

MAX_AT_ONCE: Final = 8
"""Most ranks asked at a time: one at first, then twice as many. One late rank is not worth more connections."""

LEFT_GRACE_S: Final = 5.0
"""How long an operation may take after a rank was found to have left: that rank is through with it, or never came. NCCL
moves what is under way in far less."""

LOOK_S: Final = 0.1
"""How often operations on host arrays are looked at while any is under way."""

Key = tuple[int, int]
"""Tag and sequence number of an operation."""


@dataclass(slots=True)
class _Asked:
    """The questions about one operation: when the next is due, to how many ranks, and from which neighbor on."""

    count: int = 1
    due_s: float = field(default_factory=lambda: ASK_AFTER_S)
    position: int = 0


class MismatchProbe:
    """Asks for one group. `waiting_for(tag, sequence)` gives global ranks, if they are known.

    `ask(tag, sequence, rank)` asks one rank, and returns whether that rank could be asked.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        waiting_for: Callable[[int, int], Sequence[int]],
        ask: Callable[[int, int, int], bool],
    ) -> None:
        self._others = ranks[rank + 1 :] + ranks[:rank]
        self._waiting_for = waiting_for
        self._ask = ask
        self._asked: dict[Key, _Asked] = {}
        self._left: dict[int, float] = {}  # ranks that could not be asked, and since when

    def look(self, now_s: float, under_way: Iterable[tuple[Key, float]]) -> None:
        """Ask about the oldest operation of each tag: later ones wait for it. Each comes with the time of its issue.

        Forgets the questions about operations that are not under way any more.
        """
        if not self._others:
            return
        oldest: dict[int, tuple[Key, float]] = {}
        for key, started_s in under_way:
            oldest.setdefault(key[0], (key, started_s))
        self._asked = {key: self._asked.get(key) or _Asked() for key, _ in oldest.values()}
        for key, started_s in oldest.values():
            asked = self._asked.get(key)
            if asked is not None and now_s - started_s >= asked.due_s:
                for rank in self._next(key, asked):
                    if not self._ask(*key, rank):
                        self._left.setdefault(rank, now_s)

    def waits_in_vain(self, now_s: float, moved_s: float) -> int | None:
        """A rank that left so long ago that an operation unmoved since `moved_s` will not end; None without such a
        rank."""
        return next((rank for rank, at_s in self._left.items() if now_s - max(at_s, moved_s) > LEFT_GRACE_S), None)

    def _next(self, key: Key, asked: _Asked) -> Sequence[int]:
        """The ranks to ask now."""
        count = min(asked.count, len(self._others), MAX_AT_ONCE)
        asked.count *= 2
        asked.due_s *= ASK_GROWTH
        known = self._waiting_for(*key)
        among, position = (known, 0) if known else (self._others, asked.position)
        asked.position = (asked.position + count) % len(self._others)
        return [among[(position + index) % len(among)] for index in range(min(count, len(among)))]


class HostWatch:
    """Asks about the operations on host arrays of `host`, once the group takes GPU arrays too."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, host: GroupBackend, ask: Callable[[int, int, int], bool]
    ) -> None:
        self._loop = loop
        self._probe = MismatchProbe(host.ranks, host.rank, host.waiting_for, ask)
        self._works: dict[Key, tuple[weakref.ref[CollectiveWork], float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        begin = host.start

        def start(call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
            begin(call, work, on_end)
            if not work.done():
                self._add(work)

        host.start = start  # type: ignore[method-assign]  # in this group alone: others' operations count nanoseconds

    def stop(self) -> None:
        """The group has ended."""
        self._works.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _add(self, work: CollectiveWork) -> None:
        self._works[work.tag, work.number] = weakref.ref(work), self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        for key, (reference, _) in list(self._works.items()):
            work = reference()
            if work is None or work.done():
                del self._works[key]
        self._probe.look(self._loop.time(), [(key, started_s) for key, (_, started_s) in self._works.items()])
        if self._works and self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)
