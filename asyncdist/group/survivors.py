"""Survivors: what becomes known of a group's lost ranks, and the agreements of the survivors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final, Self

from asyncdist.concurrency.deadline import Deadline
from asyncdist.concurrency.integers import spell_ranks
from asyncdist.errors import CollectiveTimeoutError, DistError, GroupAbortedError
from asyncdist.group.consensus import Consensus, Step
from asyncdist.world.control import Shrink
from asyncdist.world.world import World

AGREEMENTS_KEPT: Final = 8
"""The newest ones: others may ask for what was decided, and be ahead by a few."""


@dataclass(frozen=True, slots=True)
class RankLost:
    """Global rank `rank` is gone: it has left in order, or `error` says how it was lost. `ranks` survive."""

    rank: int
    left: bool
    error: DistError | None
    ranks: tuple[int, ...]


class Survivors:
    """The survivors of one group, as this rank knows them."""

    def __init__(self, world: World, group_id: int, ranks: tuple[int, ...]) -> None:
        self._world = world
        self._group_id = group_id
        self._ranks = ranks
        self._losses: list[RankLost] = []
        self._waiting: set[asyncio.Future[None]] = set()
        self._agreements: dict[int, Consensus] = {}
        self._ended = 0
        self._closed = False

    # ---- who is lost

    def lose(self, rank: int, error: DistError | None) -> None:
        """`rank` is lost, or has left if there is no `error`."""
        if all(loss.rank != rank for loss in self._losses):
            gone = {rank, *(loss.rank for loss in self._losses)}
            ranks = tuple(one for one in self._ranks if one not in gone)
            self._losses.append(RankLost(rank, error is None, error, ranks))
        for agreement in list(self._agreements.values()):
            agreement.lose(rank)
        self._wake()

    def close(self) -> None:
        """The group is closed: iterators end, and the others go on without this rank."""
        self._closed = True
        for agreement in self._agreements.values():
            if agreement.decided is None:
                agreement.resign()
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _woken(self) -> None:
        waiter = self._world.loop.create_future()
        self._waiting.add(waiter)
        try:
            await waiter
        finally:
            self._waiting.discard(waiter)

    async def loss(self, number: int) -> RankLost:
        """Wait for that loss. Raises StopAsyncIteration once the group is closed."""
        while len(self._losses) <= number:
            if self._closed:
                raise StopAsyncIteration
            await self._woken()
        return self._losses[number]

    # ---- who survives

    async def agree(self, where: str, deadline: Deadline) -> tuple[int, ...]:
        """Return the surviving global ranks, once all of them have called this. See `ProcessGroup.shrink`."""
        agreement = self._agreement(self._ended + 1)  # the one that was given up before, if any
        agreement.begin([rank for rank in self._ranks if self._world.mesh.is_gone(rank) or rank in self._world.lost])
        loop = self._world.loop
        try:
            async with asyncio.timeout_at(deadline.at_s):
                while agreement.decided is None:
                    await self._woken()
        except TimeoutError:
            if deadline.at_s is None or loop.time() < deadline.at_s:
                raise
            awaited = agreement.awaited
            raise CollectiveTimeoutError(
                f"{where}: the survivors have not agreed within {deadline.given_s:g} s; no answer from rank "
                f"{spell_ranks(awaited)}: all survivors must call shrink",
                awaited,
            ) from None
        self._ended += 1
        if self._world.rank not in agreement.decided:
            text = (
                f"rank {spell_ranks(agreement.decided)} go on without rank {self._world.rank}, which one of them lost"
            )
            raise GroupAbortedError(f"{where}: {text}", text, self._world.rank)
        return agreement.decided

    @property
    def awaited(self) -> list[int] | None:
        """From whom this rank needs an answer in an agreement that is under way; None if there is none."""
        return next((one.awaited for one in self._agreements.values() if one.decided is None), None)

    def hear(self, sender: int, message: Shrink) -> None:
        """What another member says in an agreement, which this rank may not have come to yet."""
        if self._ended - AGREEMENTS_KEPT < message.number <= self._ended + AGREEMENTS_KEPT:
            step = Step(message.step, message.ballot, tuple(message.ranks), tuple(message.lost))
            agreement = self._agreement(message.number)
            if self._closed and agreement.decided is None:
                agreement.resign()
            agreement.hear(sender, step)
            self._wake()

    def _agreement(self, number: int) -> Consensus:
        if number not in self._agreements:
            self._agreements[number] = Consensus(
                self._world.rank, self._ranks, lambda rank, step: self._send(number, rank, step)
            )
            self._agreements.pop(number - AGREEMENTS_KEPT, None)
        return self._agreements[number]

    def _send(self, number: int, rank: int, step: Step) -> None:
        message = Shrink(self._group_id, number, step.kind, step.ballot, list(step.ranks), list(step.lost))
        if not self._world.tell((rank,), message, dial=True) and self._world.mesh.is_gone(rank):
            self._world.loop.call_soon(self.lose, rank, self._world.lost.get(rank))  # not in the middle of a step


class Losses(AsyncIterator[RankLost]):
    """See `ProcessGroup.membership`."""

    def __init__(self, survivors: Survivors) -> None:
        self._survivors = survivors
        self._number = 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RankLost:
        loss = await self._survivors.loss(self._number)
        self._number += 1
        return loss

    async def aclose(self) -> None:
        """End the iteration; losses go on to be known."""
