"""Whether all members have made a group alike, and which of them have closed it.

Groups are made without a message, and all ranks count them alike: group 3 of a group is the same group everywhere.
Where it is not, its members wait for ranks that will never be in it. So a rank that has waited `ASK_S` tells the ranks
that it waits for which group it made, and they compare, at once or when they have made a group of that number. Two
groups that differ can never meet, so no rank is blamed that is only late. Where no rank waits, nothing is sent.

A rank that closes a group tells no other rank, as most need not know. So a rank that has waited `ASK_S` for a message
asks the sender, once, to say when it has closed the group, or the group that this one is to be made of. A rank that
waits for a collective asks those that say that they have not made its group. Closing waits until all that was sent is
written, so the answer comes behind it: a receive that has not met a message by then never will. An `EndedGroup` stays
in the place of a closed group and answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple, TypeAlias

from asyncdist.collectives.backend import WorkKey
from asyncdist.concurrency.integers import SubgroupNames, spell_ranks
from asyncdist.errors import CollectiveMismatchError
from asyncdist.group.deadlines import ASK_S, MAX_PROBE_DIALS
from asyncdist.group.survivors import Survivors
from asyncdist.messages.work import ANY_SOURCE
from asyncdist.world.control import Closed, GroupMessage, Made, Mismatch, Probe, Shrink, Status
from asyncdist.world.world import CLOSED, CLOSED_SINCE, ISSUED, World

MADE_KEPT: Final = 256
"""The newest groups are remembered, closed ones included: as many as ranks may lag behind with first operations."""

QUESTIONS_KEPT: Final = 256
"""Groups not made here yet that others ask about: ranks run ahead of each other by a few `new_group` calls at most."""


class _Made(NamedTuple):
    group_id: int
    ranks: tuple[int, ...]


class _Said(NamedTuple):
    group_id: int
    shown: str


class CreationOrder:
    """The groups that were made of group `group_id` by calls of all its ranks, by number."""

    __slots__ = ("_group_id", "_latest", "_made", "_name", "_questions", "_world")

    def __init__(self, world: World, group_id: int, name: str) -> None:
        self._world = world
        self._group_id = group_id
        self._name = name
        self._latest = 0
        self._made: dict[int, _Made] = {}
        self._questions: dict[int, dict[int, _Said]] = {}

    def made(self, number: int, group_id: int, ranks: tuple[int, ...]) -> None:
        """This rank has made group `number`, of which it may be no member."""
        self._latest = number
        self._made[number] = _Made(group_id, ranks)
        if len(self._made) > MADE_KEPT:
            del self._made[next(iter(self._made))]
        for sender, said in self._questions.pop(number, {}).items():
            self._compare(sender, number, said, asked=True)

    def heard(self, sender: int, number: int, group_id: int, shown: str, asked: bool) -> None:
        """Another rank says what it made as group `number`, and perhaps asks for ours."""
        said = _Said(group_id, shown)
        if number in self._made:
            self._compare(sender, number, said, asked)
        elif asked and number > self._latest and (number in self._questions or len(self._questions) < QUESTIONS_KEPT):
            self._questions.setdefault(number, {})[sender] = said

    def ask(self, ranks: Collection[int], number: int) -> None:
        """Tell `ranks` what this rank has made as group `number`, if it is remembered, and ask for theirs."""
        if number in self._made:
            for rank in ranks:
                self._tell(rank, number, asked=True)

    def _tell(self, rank: int, number: int, *, asked: bool) -> None:
        own = self._made[number]
        message = Made(self._group_id, number, own.group_id, spell_ranks(own.ranks), asked)
        self._world.tell((rank,), message, dial=True)

    def _compare(self, sender: int, number: int, said: _Said, asked: bool) -> None:
        own = self._made[number]
        if own.group_id == said.group_id:
            return
        if asked:
            self._tell(sender, number, asked=False)
        group = self._world.groups.get(own.group_id)
        if group is not None and sender in group.ranks:
            sides = sorted([(self._world.rank, spell_ranks(own.ranks)), (sender, said.shown)])
            shown = ", ".join(f"rank {rank} of [{ranks}]" for rank, ranks in sides)
            group.made_differently(
                CollectiveMismatchError(
                    f"ranks made group {number} of group {self._name} differently: {shown}; make the same groups in "
                    "the same order on all ranks",
                    sender,
                )
            )


Origin: TypeAlias = tuple[CreationOrder, int]
"""The order of the group that a group was made of, by calls of all its ranks, and its number there."""


class Lineage:
    """What a group was made of, and in which order others are made of it. `parent` is the id and name of the first."""

    __slots__ = ("_names", "_origin", "_parent", "order")

    def __init__(
        self, world: World, group_id: int, name: str, origin: Origin | None, parent: tuple[int, str] | None
    ) -> None:
        self.order = CreationOrder(world, group_id, name)
        self._names = SubgroupNames(group_id, name)
        self._origin = origin
        self._parent = parent

    def ask_origin(self, ranks: Collection[int]) -> None:
        """Ask `ranks` what they have made in place of this group."""
        if self._origin is not None:
            order, number = self._origin
            order.ask(ranks, number)

    def never_made_by(self, sender: int) -> CollectiveMismatchError | None:
        """The error of a group that `sender`, which has closed the parent, never makes."""
        if self._parent is None:
            return None
        what = f"rank {sender} has closed group {self._parent[1]} without making this one of it"
        return CollectiveMismatchError(what, sender)

    def next(self, ranks: Sequence[int], *, members_only: bool) -> tuple[int, str, Origin | None]:
        """Id, name and origin of the next group of `ranks`; called on members and, unless `members_only`, others."""
        group_id, name, number = self._names.next(ranks, members_only=members_only)
        return group_id, name, None if members_only else (self.order, number)


MAX_ANY_DIALS: Final = 32
"""Other members up to which a receive from any source connects to all of them, to ask: each may wait for any."""


class ClosedMembers:
    """Finds members that have closed a group, made of the group with id `parent_id`, or will never make it.

    `waited_for()` gives the global ranks, or ANY_SOURCE, that messages wait for. `asking(ranks)` hears which are asked.
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
        """Members to be told when this group is closed here."""

    def watch(self, peer: int) -> None:
        """A message waits for global rank `peer`, or for ANY_SOURCE."""
        if self._timer is None and peer not in self._asked:
            self._timer = self._world.loop.call_later(ASK_S, self._ask_those_waited_for)

    def ask(self, ranks: Iterable[int]) -> None:
        """Have `ranks` say when they have closed the group, unless they were asked before."""
        self._ask(set(ranks), dial=len(self._others) < MAX_PROBE_DIALS)

    def stop(self) -> None:
        """Stop asking."""
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
        message = Closed(self._group_id, self._parent_id, True)
        self._asked.update(self._world.tell(tuple(ranks - self._asked), message, dial=dial))


class EndedGroup:
    """Stands in the place of a group that was closed here, so that no rank waits for what will never come.

    `issued` is how many collectives of each tag the group had, `order` what was made of the group, `words` what its
    last collectives were. `survivors` hear who asks who survives. Where the world ends with the group, its goodbye says
    all there is to say.
    """

    __slots__ = ("_group_id", "_issued", "_order", "_survivors", "_words", "_world", "ranks")

    def __init__(
        self,
        world: World,
        group_id: int,
        ranks: tuple[int, ...],
        issued: Mapping[int, int],
        order: CreationOrder,
        words: Mapping[WorkKey, tuple[str, str]],
        survivors: Survivors,
    ) -> None:
        self.ranks = ranks
        self._world = world
        self._group_id = group_id
        self._issued = issued
        self._order = order
        self._words = words
        self._survivors = survivors

    def control(self, sender: int, message: GroupMessage) -> None:
        """A control message of another member."""
        match message:
            case Probe(_, tag, sequence):
                self.tell_issued(sender, tag, sequence)
            case Mismatch(group_id, tag, sequence, _, True):
                _, text = self._words.get((tag, sequence), ("", CLOSED_SINCE))
                self._world.tell((sender,), Mismatch(group_id, tag, sequence, text, False), dial=False)
            case Made(_, number, made_id, ranks, asked):
                self._order.heard(sender, number, made_id, ranks, asked)
            case Closed(_, _, True):
                self.tell_closed(sender)
            case Shrink():
                self._survivors.hear(sender, message)

    def tell_issued(self, rank: int, tag: int, sequence: int) -> None:
        """Tell a member whether that collective was issued here; else it never will be."""
        issued = self._issued.get(tag, 0) > sequence
        if issued or not self._world.leaving:
            state = ISSUED if issued else CLOSED
            self._world.tell((rank,), Status(self._group_id, tag, sequence, state), dial=False)

    def tell_closed(self, rank: int) -> None:
        """Tell a member that nothing more is sent from here: what was is ahead of this."""
        if not self._world.leaving:
            self._world.tell((rank,), Closed(self._group_id, 0, False), dial=False)
