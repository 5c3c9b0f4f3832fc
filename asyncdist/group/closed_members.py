"""Closings: members that have closed a group, or will never make it, so that no message comes from there any more.

Who closes a group tells nobody, as most need not know. So who has waited `ASK_S` for a message asks the other end,
once, to say when it has closed the group, or the one that it is to be made of; and who waits for a collective asks
those that say that they have not made its group. Closing waits until all that was sent is written, so the answer comes
behind it: what has not met a message by then never will.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Final

from asyncdist.group.creation_order import ASK_S
from asyncdist.group.deadlines import MAX_PROBE_DIALS
from asyncdist.messages.work import ANY_SOURCE
from asyncdist.world.world import World

__all__ = ["Closings"]

MAX_ANY_DIALS: Final = 32
"""Other members up to which a receive from any source connects to all, to ask them: each may wait for any."""


class Closings:
    """Of one group, made of the one with id `parent_id`.

    `waited_for()` gives the global ranks, or ANY_SOURCE, that messages wait for; `asking(ranks)` hears who is asked.
    """

    __slots__ = ("_asked", "_asking", "_group_id", "_others", "_parent_id", "_timer", "_waited_for", "_world", "askers")

    def __init__(
        self,
        world: World,
        group_id: int,
        parent_id: int,
        ranks: tuple[int, ...],
        waited_for: Callable[[], set[int]],
        asking: Callable[[set[int]], None],
    ) -> None:
        self._world = world
        self._group_id = group_id
        self._parent_id = parent_id
        self._others = frozenset(ranks) - {world.rank}
        self._waited_for = waited_for
        self._asking = asking
        self._asked: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.askers: set[int] = set()
        """Members that are to be told when this group is closed here."""

    def watch(self, peer: int) -> None:
        """A message waits for global rank `peer`, or for any."""
        if self._timer is None and peer not in self._asked:
            self._timer = self._world.loop.call_later(ASK_S, self._ask_those_waited_for)

    def ask(self, ranks: Iterable[int]) -> None:
        """Have `ranks` say when they have closed the group, unless they were asked before."""
        self._ask(set(ranks), dial=len(self._others) < MAX_PROBE_DIALS)

    def stop(self) -> None:
        """Ask nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ask_those_waited_for(self) -> None:
        self._timer = None
        ranks = self._waited_for()
        if ANY_SOURCE in ranks:
            ranks.remove(ANY_SOURCE)
            self._asked.add(ANY_SOURCE)
            if len(self._others) <= MAX_ANY_DIALS:
                ranks |= self._others
            else:
                self._ask(self._others, dial=False)
        self._asking(ranks - self._asked)
        self.ask(ranks)

    def _ask(self, ranks: AbstractSet[int], *, dial: bool) -> None:
        message = ["closed", self._group_id, self._parent_id, True]
        self._asked.update(self._world.tell(tuple(ranks - self._asked), message, dial=dial))
