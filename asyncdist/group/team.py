"""Team: an all_reduce that goes on without the ranks that are lost, and says who took part."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import numpy as np

from asyncdist.arrays.reduce_op import ReduceOp, ReduceOpLike
from asyncdist.concurrency.deadline import INHERIT, Deadline, Timeout, timeout_seconds
from asyncdist.errors import GroupAbortedError, PeerLostError
from asyncdist.group.process_group import ProcessGroup

__all__ = ["Reduced", "Team"]


class Reduced(NamedTuple):
    """The array, and the global ranks whose values are in it: the same on all ranks that are left."""

    array: Any
    ranks: tuple[int, ...]


class Team:
    """The ranks of a group that are left, whoever dies.

        team = asyncdist.Team(group)
        for gradient in gradients:
            mean, ranks = await team.all_reduce(gradient, asyncdist.ReduceOp.AVG)

    All ranks of `group` make one and call the same operations in the same order, one at a time. Each costs a barrier
    more than the group's own, and keeps a copy of the array: without the one a rank could not know that all others
    have its result, and without the other it could not begin anew. `group` is the group of those that are left by now,
    as `shrink` made it, for other operations between those of the team.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._done = 0  # operations whose result this rank has

    async def all_reduce(self, tensor: Any, op: ReduceOpLike = ReduceOp.SUM, *, timeout: Timeout = INHERIT) -> Reduced:
        """Reduce `tensor` in place, as `all_reduce` does, over all ranks that are left.

        `timeout` bounds the whole. Raises what `shrink` raises, and CollectiveTimeoutError where a rank does not come.
        """
        loop = asyncio.get_running_loop()
        deadline = Deadline.after(timeout_seconds(timeout, self.group.timeout_s), loop.time())
        own, number = tensor.copy(), self._done + 1
        while True:
            ranks = self.group.ranks
            try:
                await self.group.all_reduce(tensor, op, timeout=deadline.remaining_s(loop.time()))
                self._done = number
                await self.group.barrier(timeout=deadline.remaining_s(loop.time()))
            except (PeerLostError, GroupAbortedError):
                if await self._done_by_all(deadline) < number:  # nobody can have passed the barrier
                    self._done = number - 1
                    tensor[...] = own
                    continue
            return Reduced(tensor, ranks)

    async def _done_by_all(self, deadline: Deadline) -> int:
        """Shrink the group; return how many operations all that are left have done."""
        loop = asyncio.get_running_loop()
        while True:
            self.group = await self.group.shrink(deadline.remaining_s(loop.time()))
            done = np.array([self._done])
            try:
                await self.group.all_reduce(done, ReduceOp.MIN, timeout=deadline.remaining_s(loop.time()))
            except (PeerLostError, GroupAbortedError):
                continue
            return int(done[0])
