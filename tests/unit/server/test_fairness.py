"""Whose turn it is: one job after the other, and in each the client that has waited longest."""

from __future__ import annotations

from collections.abc import Callable

from asyncdist_server.serving.fairness import Turns


class Client:
    def __init__(self, world: World, job: str, turns: int) -> None:
        self.world = world
        self.job = job
        self.left = turns
        world.turns.ask(self)

    def take_turn(self) -> None:
        self.world.taken.append(self)
        self.left -= 1
        if self.left:
            self.world.turns.ask(self)


class World:
    def __init__(self) -> None:
        self.next_pass: list[Callable[[], None]] = []
        self.turns = Turns(self.next_pass.append)
        self.taken: list[Client] = []

    def passes(self) -> int:
        """Run the loop until nobody wants a turn; return how many passes that took."""
        count = 0
        while self.next_pass:
            calls, self.next_pass[:] = list(self.next_pass), []
            assert len(calls) == 1
            calls[0]()
            count += 1
        return count


def test_each_pass_gives_one_turn_and_no_job_waits_for_all_clients_of_another() -> None:
    world = World()
    crowd = [Client(world, "crowd", 2) for _ in range(100)]
    alone = Client(world, "alone", 3)
    assert world.passes() == 203
    assert [number for number, client in enumerate(world.taken) if client is alone] == [1, 3, 5]
    assert [client for client in world.taken if client is not alone] == crowd * 2


def test_asking_again_changes_nothing() -> None:
    world = World()
    client = Client(world, "job", 1)
    world.turns.ask(client)
    assert world.passes() == 1


def test_a_turn_that_fails_takes_none_from_others() -> None:
    world = World()
    broken, other = Client(world, "job", 0), Client(world, "job", 1)
    broken.world = None  # type: ignore[assignment]
    try:
        world.next_pass.pop()()
    except AttributeError:
        world.passes()
    assert world.taken == [other]
