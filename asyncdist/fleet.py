"""Fleets: process groups of the members that are there, formed anew as members come and go.

Each round of a membership (`asyncdist.store.member`) makes a world, whose ranks meet in the job's own keys. Whoever
knows first that a world must end says why under `worlds/<epoch>`, among those keys, and all others hear it:

    lost <text>      a member is gone, as its connection to another one broke or as the store tells
    left <text>      a member has left in order
    joined <text>    newcomers have waited for as long as rounds settle, and there is room for them
    ended <text>     a member has come to the end of its turn and asks for the next world
    late <text>      the world did not form
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from asyncdist.concurrency import trace as events
from asyncdist.concurrency.tasks import ended, start_task, telling, uninterrupted
from asyncdist.errors import DistError
from asyncdist.group.default_group import register_world
from asyncdist.group.process_group import ProcessGroup
from asyncdist.init import GroupOpening, init_process_group
from asyncdist.store.base import decoded_key, encoded_key

if TYPE_CHECKING:
    from asyncdist.store.member import Membership

FORM_S: Final = 1.0
"""How long members wait for one that does not come to a new world: it may have been killed on the way. All have met in
the store just before. Twice as long after each world that did not form, up to `MAX_FORM_S`: a process may be busy."""
MAX_FORM_S: Final = 60.0
SAY_S: Final = 2.0
"""How long a member tries to tell the others why a world ends. They find out without it, later."""


class Worlds(AsyncIterator[ProcessGroup]):
    """The worlds of a membership, one after the other. Made by `Membership.worlds`, which see."""

    def __init__(self, member: Membership, finish_s: float | None, **options: Any) -> None:
        self._member = member
        self._options = options
        self._finish_s = finish_s
        self._epoch = 0
        self._form_s = FORM_S
        self._world: _World | None = None

    @property
    def changing(self) -> str:
        """Why a new world forms, naming members; empty while the present one lasts."""
        return "" if self._world is None else self._world.changing

    async def __anext__(self) -> ProcessGroup:
        member = self._member
        await self.end()
        while not self._left():
            await self._meet()
            self._world = world = _World(member, self._finish_s)
            group = await world.form(self._opening(), self._form_s)
            if self._left():  # meanwhile, from another task
                await world.end(None, for_good=True)
            elif group is not None:
                self._form_s = FORM_S
                register_world(group)
                return group
            else:
                self._form_s = min(2 * self._form_s, MAX_FORM_S)
                await self.end()
        raise StopAsyncIteration

    def _left(self) -> bool:
        return self._member.left

    def _opening(self) -> GroupOpening:
        member = self._member
        return init_process_group(
            store=member.store,
            rank=member.rank,
            world_size=len(member.members),
            group_name=f"{member.job}, epoch {member.epoch}",
            **self._options,
        )

    async def _meet(self) -> None:
        """Wait for the next round, unless the member has just come out of one."""
        member = self._member
        if member.epoch == self._epoch:
            try:
                with telling(self._tell_of_the_wait):
                    await member.rejoin(None, settle=0)  # newcomers have had their time before
            except DistError:
                if member.left:
                    raise StopAsyncIteration from None
                raise
            if member.rank == 0:  # all have left that world
                await member.store.delete_key(_why_key(self._epoch))
        self._epoch = member.epoch

    async def _tell_of_the_wait(self) -> None:
        events.warn("%r: waiting for the other members of a new world, each of which must end its turn", self._member)

    async def end(self, error: BaseException | None = None, *, for_good: bool = False) -> None:
        """End the present world, because of `error` or in order; with `for_good` this member asks for no other."""
        world, self._world = self._world, None
        if world is not None:
            await world.end(error, for_good=for_good)


class _World:
    """One world, and what ends it."""

    def __init__(self, member: Membership, finish_s: float | None) -> None:
        self._member = member
        self._members = tuple(member.members)
        self._key = _why_key(member.epoch)
        self._finish_s = finish_s
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._formed = asyncio.Event()
        self._group: ProcessGroup | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.changing = ""
        self._tasks = [
            start_task(self._loop, self._hear(None), name="hears why a world ends"),
            start_task(self._loop, self._follow_members(), name="follows members"),
        ]

    async def form(self, opening: GroupOpening, patience_s: float) -> ProcessGroup | None:
        """Meet the others; None if all must meet again. Raises DistError where this member cannot be in a world."""
        forming = start_task(self._loop, _opened(opening), name="forms a world")
        over = start_task(self._loop, self._over.wait(), name="waits for the end of a world")
        try:
            await asyncio.wait([forming, over], timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if not forming.done() and not self._over.is_set():
                await self._say("late", "not all members came to the one before")
        except asyncio.CancelledError:
            await uninterrupted(self._say("left", f"{self._member.name} left"))
            raise
        finally:
            over.cancel()
            forming.cancel()
            try:
                await uninterrupted(ended(forming, over))
            finally:
                if not forming.cancelled() and forming.exception() is None:
                    self._group = forming.result()
        if self._group is not None and not self.changing:
            self._formed.set()
            self._tasks.append(start_task(self._loop, self._follow_ranks(self._group), name="follows ranks"))
            return self._group
        if not forming.cancelled() and (error := forming.exception()) is not None:
            await self._hear(0)  # of what another member said before it gave up
            if not (self.changing and isinstance(error, DistError)):
                await self._say("lost", f"{self._member.name} could not be in the one before: {error}")
                raise error
        return None

    async def end(self, error: BaseException | None, *, for_good: bool) -> None:
        """Leave the group: at once because of `error`, else in order, so that all finish what this member has."""
        self._over.set()
        try:
            try:
                if not for_good:
                    await self._say("ended", f"{self._member.name} has ended its turn")
            except asyncio.CancelledError as cancelled:
                error = error or cancelled
                raise
            finally:
                if self._group is not None:
                    await self._group.__aexit__(None if error is None else type(error), error, None)
        except DistError:
            if not self.changing:
                raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in self._tasks:
                task.cancel()
            await uninterrupted(ended(*self._tasks))

    # ---- what ends it

    async def _say(self, kind: str, text: str) -> None:
        """Tell all members why this world ends, unless that is known; never raises DistError."""
        word = f"{kind} {text}"
        if not self.changing:
            with contextlib.suppress(DistError, TimeoutError):
                async with asyncio.timeout(SAY_S):
                    word = decoded_key(await self._member.store.compare_set(self._key, b"", encoded_key(word)))
            self._change(word)

    async def _hear(self, timeout_s: float | None) -> None:
        with contextlib.suppress(DistError):  # the watch of the members fails as well
            self._change(decoded_key(await self._member.store.get(self._key, timeout=timeout_s)))

    def _change(self, word: str) -> None:
        if not self.changing:
            kind, _, self.changing = word.partition(" ")
            events.info("%r: a new world forms: %s", self._member, self.changing)
            self._over.set()
            if kind == "lost":
                self._abort()
            elif self._finish_s is not None:
                self._timer = self._loop.call_later(self._finish_s, self._abort)

    def _abort(self) -> None:
        if self._group is not None:
            self._group.abort(f"a new world forms: {self.changing}")

    async def _follow_members(self) -> None:
        joining: set[str] = set()
        due_s: float | None = None
        room = self._member.most - len(self._members)
        try:
            while True:
                try:
                    async with asyncio.timeout_at(due_s):
                        event = await anext(self._member)
                except TimeoutError:
                    await self._formed.wait()  # a world that newcomers keep from forming would never form
                    return await self._say("joined", f"{', '.join(sorted(joining))} joined")
                if event.kind == "joined":
                    joining.add(event.member)
                elif event.member in self._members:
                    return await self._gone(event.member, left=event.kind == "left")
                else:
                    joining.discard(event.member)
                if not joining or room <= 0:
                    due_s = None
                elif due_s is None:
                    due_s = self._loop.time() + self._member.settle_s
        except StopAsyncIteration:
            return None
        except DistError as error:
            return self._change(f"lost {error}")

    async def _follow_ranks(self, group: ProcessGroup) -> None:
        async for loss in group.membership():
            return await self._gone(self._members[loss.rank], left=loss.left)

    async def _gone(self, name: str, *, left: bool) -> None:
        await self._say("left" if left else "lost", f"{name} {'left' if left else 'was lost'}")


def _why_key(epoch: int) -> str:
    """Where it is said why the world of that epoch ends."""
    return f"worlds/{epoch}"


async def _opened(opening: GroupOpening) -> ProcessGroup:
    return await opening
