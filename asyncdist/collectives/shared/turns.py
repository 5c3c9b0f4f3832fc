"""Turns: which operations of a lane each member has begun and finished, and who waits for whom to go on.

The part of a lane that does not depend on how data travels: operations are numbered in the order in which every member
begins them, and none may be more than RECORDS ahead of the slowest.

A member says that it has finished an operation only once all others have begun it, and their records stay until then.
So each member reads every record of the others once, also of those that it takes nothing from, and notes who differs.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncdist.collectives.shared.layout import (
    DESCRIPTORS_AT,
    FINISHED,
    ISSUED,
    MAX_LANE_ITEMS,
    MAX_LANE_RANKS,
    RECORD,
    RECORD_STRIDE,
    RECORD_WORDS,
    RECORDS,
    RECORDS_AT,
    SKIPPED,
    TURN,
    WANTING,
    WORDS_BYTES,
    Differs,
    LaneFault,
    LaneOperation,
    Member,
)
from asyncdist.transport.shared_memory.fence import ORDERED, PAIR, fence, order


class Turns:
    """One member's side. `segments` are all members' in the order of the group, our own writable, each longer than
    LANE_HEAD_BYTES.
    """

    __slots__ = (
        "awaited",
        "differences",
        "finished",
        "finished_seen",
        "heeded",
        "issued",
        "late_news",
        "members",
        "news",
        "next_item",
        "open",
        "others",
        "own",
        "own_records",
        "own_words",
        "rank",
        "wanting",
    )

    def __init__(self, rank: int, segments: Sequence[memoryview]) -> None:
        if not 2 <= len(segments) <= MAX_LANE_RANKS:
            raise ValueError(f"a lane has 2 to {MAX_LANE_RANKS} members, not {len(segments)}")
        self.rank = rank
        self.own = segments[rank]
        self.own_words = self.own[:WORDS_BYTES].cast("Q")
        self.own_records = self.own[RECORDS_AT:DESCRIPTORS_AT].cast("Q")
        self.members = [None if index == rank else Member(index, segment) for index, segment in enumerate(segments)]
        self.others = [(index, member) for index, member in enumerate(self.members) if member is not None]
        self.heeded = self.others  # all but those that have left
        self.awaited = rank
        """Who had not begun the first operation under way when last looked for; ourselves, if all had."""
        self.issued = 0
        self.next_item = 0
        self.open: dict[int, LaneOperation] = {}
        """Begun, and somebody's part in it not retired."""
        self.wanting = 0
        self.finished_seen = 0
        self.finished = 0
        self.news = False
        """Something was consumed or finished that another member may wait for; to be reset by the caller."""
        self.late_news = False
        """The same, but of zcopy items of which more is to be read: the others need not hear before this rank waits."""
        self.differences: list[tuple[int, int]] = []
        """Operation and member, where a member was found to run something else; to be emptied by the caller."""

    def least_finished(self) -> list[int]:
        """Members that have finished the fewest operations."""
        finished = {index: peer.words[FINISHED] for index, peer in self.others}
        least = min(finished.values())
        return [index for index, count in finished.items() if count == least]

    def left(self, member: int) -> None:
        """A member has left: nothing is kept for it any more."""
        self.heeded = [(index, peer) for index, peer in self.heeded if index != member]

    @property
    def waiting(self) -> bool:
        """Whether there is anything to look after: operations to retire, or news to tell."""
        return bool(self.open) or self.news

    def behind(self, number: int) -> list[int]:
        """Members that have not begun operation `number`."""
        return [index for index, peer in self.others if not self.look_for(peer, number)]

    def wanted_by(self) -> list[int]:
        """Members that wait for room, or for us to catch up: all of them where one waits for all to catch up.

        For we may be waiting ourselves, to finish, for a third to begin.
        """
        with PAIR:  # a fence, without its call
            pass
        if not ORDERED:
            with PAIR:
                pass
        wanted, members = 0, []
        for index, peer in self.others:
            wanting = peer.words[WANTING]
            wanted |= wanting
            if wanting:
                members.append(index)
        return [index for index, _ in self.others] if wanted & TURN else members

    def look_for(self, peer: Member, number: int) -> bool:
        """Whether `peer` has begun operation `number`, by what it says now."""
        issued = peer.words[ISSUED]
        if issued != peer.issued:
            if not peer.issued < issued <= self.issued + RECORDS:
                raise LaneFault(peer.index, f"{issued} operations were begun, {self.issued} are here")
            peer.issued = issued
        if issued > number:
            return True
        self.awaited = peer.index
        return False

    def catch_up(self, number: int, ahead: int = RECORDS) -> bool:
        """Whether every member has finished enough for us to begin operation `number`, less than `ahead` of it."""
        for _ in range(2):
            self._look_who_finished(number)
            if number - self.finished_seen < ahead:
                self.content(TURN)
                return True
            self.want(TURN)
        return False

    def _look_who_finished(self, number: int) -> None:
        """Take note of how many operations every member has finished; all before `number` if none is left."""
        for _, member in self.heeded:
            finished = member.words[FINISHED]
            if finished < number:
                number = finished
        self.finished_seen = number

    def add(self, operation: LaneOperation) -> None:
        """Look after `operation` until no member's part in it is needed any more."""
        if not self.open:
            for _, peer in self.others:
                peer.retired = self.finished
        self.open[operation.number] = operation

    def finish(self) -> None:
        oldest = min(peer.retired for _, peer in self.others)
        if oldest > self.finished:
            for number in range(self.finished, oldest):
                self.open.pop(number, None)
            if not ORDERED:
                order()  # read before we say so
            self.finished = self.own_words[FINISHED] = oldest
            self.news = True

    def look_up_items(self, peer: Member, operation: LaneOperation) -> tuple[int, int] | None:
        """Where the items of `peer` in `operation` begin and end; None if it has not begun it, or skips it."""
        found = self.look_up(peer, operation.number)
        if found is None:
            return None
        at = RECORDS_AT + operation.number % RECORDS * RECORD_STRIDE
        fingerprint = RECORD.unpack_from(peer.segment, at)[1]
        if fingerprint == SKIPPED:
            return None
        if fingerprint != operation.fingerprint:
            raise Differs(peer.index)
        known = operation.begun[peer.index] = found[0], found[0] + found[1]
        return known

    def look_up(self, peer: Member, number: int) -> tuple[int, int] | None:
        """First item and number of items of `peer` in operation `number`; None if it has not begun it."""
        found = peer.records.get(number)
        if found is not None:
            return found
        if number >= peer.issued:
            if not self.look_for(peer, number):
                return None
            if not ORDERED:
                order()  # the count before the record
        at = RECORDS_AT + number % RECORDS * RECORD_STRIDE
        theirs, fingerprint, first, count, _payload = RECORD.unpack_from(peer.segment, at)
        if theirs != number or count > MAX_LANE_ITEMS or first >= 1 << 62:
            raise LaneFault(peer.index, f"operation {theirs} ({count} items) is described in place of {number}")
        if fingerprint != self.own_records[number % RECORDS * RECORD_WORDS + 1]:
            self.note(number, peer.index, fingerprint)
        peer.records[number] = first, count
        return first, count

    def note(self, number: int, member: int, fingerprint: int) -> None:
        """A member has begun `number` with another fingerprint than ours."""
        if SKIPPED not in (fingerprint, self.own_records[number % RECORDS * RECORD_WORDS + 1]):
            self.differences.append((number, member))

    def want(self, what: int) -> None:
        """From now on the others say when they have consumed (ROOM) or finished (TURN) something."""
        if not self.wanting & what:
            self.wanting |= what
            self.own_words[WANTING] = self.wanting
        fence()  # before looking once more

    def content(self, what: int) -> None:
        """What this rank waited for has come: the others need not say more."""
        if self.wanting & what:
            self.wanting &= ~what
            self.own_words[WANTING] = self.wanting
