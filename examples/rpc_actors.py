"""Reinforcement learning: actors play on their ranks, and rank 0 chooses all their moves in one batch, and learns.

    asyncdist run --nproc-per-node 4 examples/rpc_actors.py

An actor asks for a move and waits. Rank 0 answers when all have asked: one evaluation of the policy for all of them.
The game: on a line of five places, go to the right end. The policy has two weights for each place, and learns by
REINFORCE.
"""

from __future__ import annotations

import asyncio

import numpy as np

import asyncdist as dist
from asyncdist import rpc

PLACES = 5
MOVES = 12  # of a game
GAMES = 60
RATE = 0.2


class Learner:
    """The policy, and those who wait for a move."""

    def __init__(self, actors: int) -> None:
        self.actors = actors
        self.policy = np.zeros((PLACES, 2))
        self.waiting: dict[int, tuple[int, asyncio.Future[int]]] = {}
        self.games: list[tuple[list[tuple[int, int]], float]] = []
        self.batches = 0
        self.random = np.random.default_rng(0)

    async def move(self, actor: int, place: int) -> int:
        """Where `actor` goes from `place`: 0 is left, 1 right. Decided once all have asked."""
        decided = asyncio.get_running_loop().create_future()
        self.waiting[actor] = place, decided
        if len(self.waiting) == self.actors:
            self.decide()
        chosen: int = await decided
        return chosen

    def decide(self) -> None:
        """One evaluation of the policy for all."""
        asked, self.waiting = sorted(self.waiting.items()), {}
        scores = np.exp(self.policy[[place for _, (place, _) in asked]])
        right = scores[:, 1] / scores.sum(axis=1)
        for (_, (_, decided)), chosen in zip(asked, self.random.random(len(asked)) < right, strict=True):
            decided.set_result(int(chosen))
        self.batches += 1

    def learn(self, game: list[tuple[int, int]], reward: float) -> None:
        """A game has ended; once all have, the policy changes."""
        self.games.append((game, reward))
        if len(self.games) == self.actors:
            mean = sum(reward for _, reward in self.games) / self.actors
            for played, reward in sorted(self.games):
                for place, chosen in played:
                    scores = np.exp(self.policy[place])
                    gradient = np.eye(2)[chosen] - scores / scores.sum()
                    self.policy[place] += RATE * (reward - mean + 0.05) * gradient
            self.games = []


learner = Learner(0)


@rpc.register
async def move(actor: int, place: int) -> int:
    """On rank 0, for the actors."""
    return await learner.move(actor, place)


@rpc.register
def learn(game: list[tuple[int, int]], reward: float) -> None:
    """The same."""
    learner.learn(game, reward)


@rpc.register
async def play() -> None:
    """On an actor: a game. Its rank calls back the one that asks for it."""
    place, game, reward = 0, [], 0.0
    for _ in range(MOVES):
        chosen = await rpc.call(0, "move", dist.get_rank(), place)
        game.append((place, chosen))
        place = min(max(place + 2 * chosen - 1, 0), PLACES - 1)
        reward += place == PLACES - 1
    await rpc.call(0, "learn", game, reward / MOVES)


async def main() -> None:
    """Rank 0 has all actors play, game after game."""
    global learner
    async with dist.init_process_group() as group, rpc.serve():
        if group.rank == 0:
            learner = Learner(group.size - 1)
            for _ in range(GAMES):
                for work in [rpc.call(actor, "play") for actor in range(1, group.size)]:
                    await work
            learned = (learner.policy[:, 1] > learner.policy[:, 0]).all()
            print(
                f"actors: {GAMES} games, {learner.batches} batches, learned to go right: {'yes' if learned else 'no'}"
            )


if __name__ == "__main__":
    dist.run(main())
