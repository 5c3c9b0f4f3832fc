"""Who is left of a group: all agree, whoever dies when, in thousands of orders of messages and deaths."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
from fewer_cases import examples

from asyncdist.group.consensus import Consensus, Step

SEEDS = examples(60)


class Simulation:
    """Members, messages under way between each two in order, and news of deaths behind the messages of the dead."""

    def __init__(self, size: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.members = range(2, size + 2)  # not from 0: ranks are global
        self.alive = set(self.members)
        self.broken: set[frozenset[int]] = set()
        self.wires: dict[tuple[int, int], deque[Step | None]] = {}  # None: the other one is lost
        self.crash_after: dict[int, int] = {}  # a rank dies once it has sent so much more
        self.agreements = {rank: Consensus(rank, self.members, self.sender(rank)) for rank in self.members}
        self.waiting = list(self.members)  # to begin
        self.gone: dict[int, set[int]] = {rank: set() for rank in self.members}  # what a rank knows to be lost

    def sender(self, rank: int) -> Callable[[int, Step], None]:
        def send(other: int, step: Step) -> None:
            assert other != rank
            if rank in self.crash_after:
                self.crash_after[rank] -= 1
                if self.crash_after[rank] < 0:
                    self.die(rank)
            if rank in self.alive and other in self.alive and frozenset((rank, other)) not in self.broken:
                self.wires.setdefault((rank, other), deque()).append(step)

        return send

    def die(self, rank: int) -> None:
        if rank in self.alive:
            self.alive.discard(rank)
            self.waiting = [other for other in self.waiting if other != rank]
            for other in self.alive:
                if frozenset((rank, other)) not in self.broken:
                    self.wires.setdefault((rank, other), deque()).append(None)

    def cut(self, one: int, other: int) -> None:
        """Both are alive, and lose each other."""
        if frozenset((one, other)) not in self.broken:
            self.broken.add(frozenset((one, other)))
            for pair in ((one, other), (other, one)):
                wire = self.wires.setdefault(pair, deque())
                for _ in range(self.chance.randrange(len(wire) + 1)):
                    wire.pop()
                wire.append(None)

    def step(self) -> bool:
        """One thing happens; false if nothing can."""
        ready = [pair for pair, wire in self.wires.items() if wire and pair[1] in self.alive]
        choice = self.chance.randrange(len(ready) + len(self.waiting)) if ready or self.waiting else -1
        if choice < 0:
            return False
        if choice < len(ready):
            sender, receiver = ready[choice]
            step = self.wires[sender, receiver].popleft()
            if step is None:
                self.gone[receiver].add(sender)
                if receiver not in self.waiting:
                    self.agreements[receiver].lose(sender)
            else:
                self.agreements[receiver].hear(sender, step)
        else:
            rank = self.waiting.pop(choice - len(ready))
            self.agreements[rank].begin(self.gone[rank])
        return True

    def decisions(self) -> dict[int, tuple[int, ...]]:
        found = {rank: agreement.decided for rank, agreement in self.agreements.items()}
        return {rank: ranks for rank, ranks in found.items() if ranks is not None}


@pytest.mark.parametrize("deaths", range(4))
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_all_that_are_left_agree(size: int, deaths: int) -> None:
    """Deaths at any step, also in the middle of telling the others; a dead rank's decision counts too."""
    for seed in range(SEEDS):
        simulation = Simulation(size, seed)
        chance = simulation.chance
        for rank in chance.sample(simulation.members, min(deaths, size - 1)):
            simulation.crash_after[rank] = chance.randrange(3 * size)
        late = chance.sample(simulation.members, min(deaths, size - 1))
        while simulation.step():
            if late and chance.random() < 0.05 and len(simulation.alive) > 1:
                simulation.die(late.pop())
            if len(simulation.alive) == 1:
                simulation.crash_after.clear()
        decisions = simulation.decisions()
        assert set(decisions) >= simulation.alive, f"seed {seed}: {simulation.alive} are left"
        assert len(set(decisions.values())) == 1, f"seed {seed}: {decisions}"
        (ranks,) = set(decisions.values())
        assert set(ranks) >= simulation.alive, f"seed {seed}: {ranks} without {simulation.alive}"


def test_who_died_before_is_not_among_those_who_stay() -> None:
    for seed in range(SEEDS):
        simulation = Simulation(5, seed)
        dead = simulation.chance.sample(simulation.members, 2)
        for rank in dead:
            simulation.die(rank)
        while simulation.step():
            pass
        left = tuple(rank for rank in simulation.members if rank not in dead)
        assert simulation.decisions() == dict.fromkeys(left, left), f"seed {seed}"


@pytest.mark.parametrize("size", [3, 4, 6, 8])
def test_where_a_link_breaks_all_hear_one_decision(size: int) -> None:
    """Both of its ends are alive: the one that goes is told so by another."""
    for seed in range(3 * SEEDS):
        simulation = Simulation(size, seed)
        chance = simulation.chance
        link = chance.sample(simulation.members, 2)
        cut = False
        while simulation.step():
            if not cut and chance.random() < 0.1:
                cut = True
                simulation.cut(*link)
        decisions = simulation.decisions()
        assert set(decisions) == simulation.alive, f"seed {seed}: {decisions}"
        assert len(set(decisions.values())) == 1, f"seed {seed}: {decisions}"


def test_who_has_not_begun_is_awaited() -> None:
    simulation = Simulation(3, 0)
    simulation.waiting.remove(3)
    while simulation.step():
        pass
    assert [simulation.agreements[rank].awaited for rank in (2, 4)] == [[3], [2]]
    assert not simulation.decisions()
    simulation.agreements[3].begin([])
    while simulation.step():
        pass
    assert simulation.decisions() == dict.fromkeys((2, 3, 4), (2, 3, 4))
