"""ProcessGroup: a group as users have it: what it hears of the world, and its end, by `close` or by `abort`.

A group is made by `init_process_group` (all ranks of a world) or `new_group` (some of them).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any, Final, Self

from asyncdist.collectives.backend import BackendNames
from asyncdist.concurrency.tasks import start_task, uninterrupted
from asyncdist.errors import CollectiveMismatchError, DistError, PeerLostError
from asyncdist.group.abort_reasons import CONSEQUENCES, abort_cause, aborted_by, explain, first_cause, named
from asyncdist.group.closed_group import EndedGroup
from asyncdist.group.issuer import GroupCore
from asyncdist.work import until_ended

__all__ = ["ProcessGroup"]

CLOSE_SENDS_S: Final = 30.0
"""How long a closing group waits for sends nobody receives; collectives have deadlines of their own."""


class ProcessGroup(GroupCore):
    """Some ranks of a world, in an order of their own.

    Methods take and return group ranks (0 .. `size` - 1); errors name global ranks. All operations must be called from
    the event loop the group was made on. `async with group:` closes it at the end, or aborts it on an exception.
    """

    # News from the world.

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        """A member is gone: collectives fail and the group is aborted; point-to-point between survivors goes on."""
        self.pairs.peer_lost(rank, error)
        self._abort(error, "lost", str(error), rank)

    def peer_left(self) -> None:
        """A member has left: of those that a message may come from any, it might have been the last."""
        self.pairs.fail_vain_receives()

    def control(self, sender: int, message: list[Any]) -> None:
        """A control message of another member: its kind, this group's id, and what `world` checks of that kind."""
        match message:
            case ["abort", _, kind, text, rank, missing]:
                cause = abort_cause(kind, text, rank, missing, self.world.rank)
                if isinstance(cause, PeerLostError) and not cause.left:
                    self.world.lost_elsewhere(cause.rank, cause)  # concerns all groups of that rank
                self._abort(cause, kind, text, rank, missing)
            case ["refused", _, *refusal]:
                self._rejected.heard(*refusal)
            case ["probe", _, tag, sequence]:
                self._askers[sender] = tag
                self._mismatches.tell(sender, tag, sequence)
                self._deadlines.tell(sender, tag, sequence, self._sequences.get(tag, 0) > sequence)
            case ["status", _, tag, sequence, state]:
                if not self._deadlines.answered(sender, tag, sequence, state):
                    self._heard_late(sender, tag, sequence, state)
            case ["mismatch", _, *difference]:
                self._mismatches.heard(sender, *difference)
            case ["ran", _, words]:
                self._mismatches.heard_last(sender, words)
            case ["check", _, *report]:
                self._mismatches.reported(sender, *report)
            case ["made", _, *made]:
                self._order.heard(sender, *made)
            case ["closed", _, *closing]:
                self._heard_closed(sender, *closing)

    def bind_device(self, device: int | None) -> None:
        """Open communicators for arrays on that GPU at once, if all ranks do; None does nothing."""
        self._backends.bind(device)

    # The end.

    def abort(self, reason: str = "") -> None:
        """Give up now: every operation under way raises `GroupAbortedError` here and on all connected members.

        Later calls raise it too. Returns at once; arrays of operations under way are free when it returns.
        """
        self.world.check_thread(self.where("abort"))
        text = reason or "abort() was called"
        self._abort(aborted_by(self.world.rank, text), "abort", text, self.world.rank)

    def _abort(
        self, error: BaseException, kind: str, text: str, rank: int | None = None, missing: Sequence[int] = ()
    ) -> None:
        first = self._aborted is None
        also_pairs = kind == "abort" and not self.pairs.aborted  # even where collectives have ended already
        if self.closed or self.world.forked or not (first or also_pairs):
            return
        self._aborted = error if first else self._aborted
        self._verdict.set()
        self.usable = False
        # Before messages under way are broken off: who receives those is to know the reason by then.
        self.world.tell_aborted(self.ranks, ["abort", self.group_id, kind, text, rank, list(missing)])
        if first:
            self._deadlines.stop()
            self._strays.stop()
            differences = self._mismatches.stop(told=isinstance(error, CollectiveMismatchError))
            self._backends.abort(error)
            works = dict(self._works)
            self._works.clear()
            for key, work in works.items():
                self._fail(work, explain(work.where, differences.get(key, error)))
        if also_pairs:
            self.pairs.abort(error)

    async def close(self) -> None:
        """Wait for everything under way (receives that nothing matched are withdrawn), then leave; issue no more.

        The world's group closes all others first, then says goodbye to all peers and to the store. Raises, once, the
        first failure of a work that nobody asked about. Cancelling aborts what is under way, and lets the bounded end
        finish first. May be called again, also meanwhile.
        """
        self.world.check_thread(self.where("close"))
        if self._closing is None:
            if self.closed or self.world.forked:
                return
            if asyncio.get_running_loop() is not self._loop:
                raise RuntimeError(f"{self.where('close')}: called from another event loop than the group was made on")
            self.usable = False
            self._closing = start_task(self._loop, self._close(), name=f"close group {self.name}")
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            for group in [self, *self._inner()]:
                if group._works or group._differing or group.pairs.pending():
                    group.abort("closing it was cancelled")
            if self._is_world:
                self.world.hurry()
            await uninterrupted(asyncio.wait([self._closing]))
            raise
        unasked, self._unasked = self._unasked, None
        try:
            if unasked is not None:
                raise unasked
        finally:
            del unasked  # it refers to this frame, and so to the arrays of its callers

    async def _close(self) -> None:
        self.world.leaving |= self._is_world
        self.pairs.withdraw_receives()
        self._backends.host.closing()
        try:
            failures = await asyncio.gather(*(group.close() for group in self._inner()), return_exceptions=True)
            await until_ended(self._works.values())
            self._backends.host.settle()
            if self._differing:
                await self._verdict.wait()
            async with asyncio.timeout(CLOSE_SENDS_S):
                await until_ended(self.pairs.pending())
        except TimeoutError:
            self.abort(f"closed with sends that nobody received for {CLOSE_SENDS_S:g} s")
        except asyncio.CancelledError:  # the event loop ends
            self.abort("the event loop ended before it was closed")
            self.closed = True
            if self._is_world:
                await self.world.abandon()
            raise
        await self._leave()
        found = explain(self.where("close"), self._aborted) if self._differing and self._aborted is not None else None
        unasked = self._unretrieved.take_unasked(found, aborted=self._aborted is not None)
        self._unasked = next(filter(None, [unasked, *failures]), None)

    def _inner(self) -> list[ProcessGroup]:
        """Groups that end with this one: all others of the world, if this is the world's."""
        groups = self.world.groups.values() if self._is_world else ()
        return [group for group in groups if isinstance(group, ProcessGroup) and group is not self]

    async def _leave(self) -> None:
        self.closed = True
        self._deadlines.stop()
        self._strays.stop()
        self._mismatches.stop()
        if self.world.leaving and self._aborted is None:
            self._mismatches.say_last_words()
        self._backends.close()
        await self.pairs.close()
        await self._backends.wait_closed()
        if self._is_world:
            await self.world.close()
        else:  # where the world ends, senders hear that we have left
            self.pairs.drop_unmatched()
        words = self._mismatches.last_words()
        ended = EndedGroup(self.world, self.group_id, self.ranks, self._sequences, self._order, words)
        self.world.unregister(self.group_id, ended)
        for rank, tag in self._askers.items():  # who wait, perhaps, for what comes no more
            ended.tell_issued(rank, tag, self._sequences.get(tag, 0))
        for rank in self.pairs.closed_members.askers if self.pairs.closed_members is not None else ():
            ended.tell_closed(rank)

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()  # awaiting a group gives the group at once
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
            return
        cause = first_cause(error)
        why = f"rank {self.world.rank} left with {named(cause)}"
        if not (isinstance(cause, CONSEQUENCES) and self._is_known(cause)):
            self.abort(why)
        for group in self._inner():  # others' operations on those must not wait for this rank either
            group.abort(why)
        with contextlib.suppress(DistError):  # the exception that ended the block is the one to raise
            await self.close()

    def _is_known(self, cause: BaseException) -> bool:
        """Whether the other members hear by themselves of what this rank leaves with.

        Not of a message that timed out here, nor of the end of another group. Who leaves the world because another has
        left it in order does so in order as well; that somebody leaves another group nobody sees.
        """
        return self._aborted is not None or (self._is_world and isinstance(cause, PeerLostError) and cause.left)

    def make_subgroup(
        self,
        ranks: Sequence[int],
        timeout_s: float | None,
        name: str | None,
        backend_names: BackendNames | None = None,
        *,
        members_only: bool = False,
    ) -> ProcessGroup | None:
        """Make the group of `ranks` (global); None where this rank is not a member.

        Called on members and, unless `members_only`, on all others, in the same order.
        """
        self.world.check_thread(self.where("new_group"))
        group_id, label, number = self._subgroups.next(ranks, members_only=members_only)
        made = None
        if self.world.rank in ranks:
            origin = None if members_only else (self._order, number)
            made = ProcessGroup(
                self.world,
                group_id,
                tuple(ranks),
                timeout_s,
                name or label,
                backend_names or self._backends.names,
                origin=origin,
                parent=(self.group_id, self.name),
            )
        if not members_only:
            self._order.made(number, group_id, tuple(ranks))
        return made
