"""EndedGroup: what a rank that has closed a group still says of it to those that use it."""

from __future__ import annotations

from collections.abc import Mapping

from asyncdist.collectives.backend import WorkKey
from asyncdist.group.membership import CreationOrder
from asyncdist.world.control import Closed, GroupMessage, Made, Mismatch, Probe, Status
from asyncdist.world.world import CLOSED, CLOSED_SINCE, ISSUED, World

__all__ = ["EndedGroup"]


class EndedGroup:
    """In the place of a group that was closed here, so that nobody waits for what will never come.

    `issued` says how many collectives of each tag it had, `order` what was made of it, `words` what the last ones were.
    Where the world ends with the group, its goodbye says all there is to say.
    """

    __slots__ = ("_group_id", "_issued", "_order", "_words", "_world", "ranks")

    def __init__(
        self,
        world: World,
        group_id: int,
        ranks: tuple[int, ...],
        issued: Mapping[int, int],
        order: CreationOrder,
        words: Mapping[WorkKey, tuple[str, str]],
    ) -> None:
        self.ranks = ranks
        self._world = world
        self._group_id = group_id
        self._issued = issued
        self._order = order
        self._words = words

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
