"""Consensus: the surviving ranks of a group agree on who they are, also when more of them die meanwhile.

The lowest rank that is left leads. It calls all others, and each reports which ranks it has lost, and what it has
accepted before. Once all survivors have reported, the leader proposes who stays: what a report says was accepted
from an earlier leader, else all that no member has lost. When all survivors have accepted that, the leader decides.

When a leader dies, the next rank leads. Its ballots are higher, as ballots begin with the leader's rank and lost ranks
never come back. What the leader before it may have decided was accepted by all survivors, so a report has it, and
it is proposed again: no two ranks hear different decisions. A rank that one member has lost is lost to all: where the
link between two ranks broke and both are alive, one of them is told that the others go on without it. Where many links
break and no rank is connected to all, the parts may decide apart: no quorum keeps them, as most ranks may have died.

No input and no output here: `send` passes messages on, in order and once, or never if one of both dies. This is
single-decree Paxos with a leader that all ranks know (Lamport, "Paxos Made Simple", 2001) and a quorum of all that are
left, which is what MPI's user-level failure mitigation asks of its agreement.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

CALL: Final = "call"
REPORT: Final = "report"
PROPOSE: Final = "propose"
ACCEPT: Final = "accept"
DECIDE: Final = "decide"
STEPS: Final = (CALL, REPORT, PROPOSE, ACCEPT, DECIDE)
"""The leader asks for reports; a report; the leader proposes; a member accepts; what was decided."""

BALLOTS_OF_A_LEADER: Final = 1 << 20


class Step(NamedTuple):
    """What one member tells another. `ranks` stay, as accepted, proposed or decided; `lost` are the sender's."""

    kind: str
    ballot: int = 0
    ranks: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


class Consensus:
    """One member's part. `decided` is what all survivors agree on, None until then."""

    def __init__(self, rank: int, members: Sequence[int], send: Callable[[int, Step], None]) -> None:
        self.decided: tuple[int, ...] | None = None
        self._rank = rank
        self._members = tuple(members)
        self._send = send
        self._lost: set[int] = set()
        self._begun = False
        self._resigned = False
        self._leader = -1  # to which we have reported
        self._accepted = Step(PROPOSE)  # of another leader, the last one
        # The leader's:
        self._reports: dict[int, Step] = {}
        self._proposal: Step | None = None
        self._accepts: set[int] = set()
        self._proposals = 0
        self._inherited = Step(REPORT)  # what was accepted from another leader, under the highest ballot

    @property
    def leader(self) -> int:
        """Who leads now, as far as this rank knows."""
        return min(rank for rank in self._members if rank not in self._lost)

    @property
    def awaited(self) -> list[int]:
        """From whom this rank needs an answer."""
        if self.decided is not None:
            return []
        if self.leader != self._rank:
            return [self.leader]
        heard: Collection[int] = self._reports if self._proposal is None else self._accepts
        return [rank for rank in self._left() if rank not in heard]

    def begin(self, lost: Collection[int]) -> None:
        """Take part, having lost these ranks. Before that nothing is sent, and nothing is accepted."""
        self._begun = True
        self._lost.update(self._members_but_us(lost))
        self._go_on()

    def lose(self, rank: int) -> None:
        """Another rank is lost."""
        if rank in self._members_but_us([rank]) and rank not in self._lost:
            self._lost.add(rank)
            self._leader = -1  # tell it
            self._go_on()

    def hear(self, sender: int, step: Step) -> None:
        """A message of another member."""
        if step.kind == DECIDE:
            if self.decided is None:
                self._decide(step.ranks)
        elif self.decided is not None:
            self._send(sender, Step(DECIDE, 0, self.decided))
        elif step.kind == CALL:
            if sender > self._rank:
                self.resign()
            elif sender >= self.leader:  # it has lost all before it, and so they are lost to all
                self._lost.update(rank for rank in self._members if rank < sender)
                self._go_on()
        elif step.kind == REPORT:
            self._reports[sender] = step
            self._lost.update(self._members_but_us(step.lost))
            self._go_on()
        elif step.kind == ACCEPT:
            if self._proposal is not None and step.ballot == self._proposal.ballot:
                self._accepts.add(sender)
                self._go_on()
        elif step.kind == PROPOSE and sender == self.leader and not self._resigned:
            self._accepted = step
            self._send(sender, Step(ACCEPT, step.ballot))

    def resign(self) -> None:
        """Another rank has lost this one, or it stays out by itself: it is lost to all, and hears what they decide."""
        if not self._resigned:
            self._resigned = True
            for rank in self._members_but_us(self._members):
                self._send(rank, Step(REPORT, lost=(self._rank,)))

    # ---- what follows

    def _members_but_us(self, ranks: Collection[int]) -> list[int]:
        return [rank for rank in ranks if rank in self._members and rank != self._rank]

    def _left(self) -> list[int]:
        return [rank for rank in self._members if rank not in self._lost]

    def _go_on(self) -> None:
        if not self._begun or self._resigned or self.decided is not None:
            return
        leader = self.leader
        if leader != self._leader:
            self._leader = leader
            report = Step(REPORT, self._accepted.ballot, self._accepted.ranks, tuple(sorted(self._lost)))
            if leader == self._rank:
                self._reports[leader] = report
                self._tell(Step(CALL))
            else:
                self._send(leader, report)
        if leader == self._rank and all(rank in self._reports for rank in self._left()):
            self._lead()

    def _lead(self) -> None:
        """All survivors have reported: propose, or decide what they have all accepted."""
        own = (self._rank + 1) * BALLOTS_OF_A_LEADER
        others = (report for report in self._reports.values() if report.ballot < own)
        self._inherited = max(self._inherited, *others, key=lambda report: report.ballot)
        ranks = self._inherited.ranks if self._inherited.ballot else tuple(self._left())
        if self._proposal is None or self._proposal.ranks != ranks:
            self._proposals += 1
            self._proposal = Step(PROPOSE, own + self._proposals, ranks)
            self._accepts = {self._rank}
            self._tell(self._proposal)
        if all(rank in self._accepts for rank in self._left()):
            self._decide(ranks)

    def _tell(self, step: Step) -> None:
        for rank in self._members_but_us(self._left()):
            self._send(rank, step)

    def _decide(self, ranks: tuple[int, ...]) -> None:
        """The leader tells all others; every other member those that it has lost, as the leader may not reach them."""
        leads = self._leader == self._rank
        self.decided = ranks
        for rank in self._members_but_us(self._members):
            if leads or rank in self._lost or rank not in ranks:
                self._send(rank, Step(DECIDE, 0, ranks))
