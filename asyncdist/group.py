"""ProcessGroup: some ranks of a world, the order of their operations, and what becomes of those when something fails.

A group is made by `init_process_group` (all ranks of a world) or `new_group` (some of them). It owns everything that
was issued on it: the order (sequence numbers per tag), the deadlines, and the end - `close`, or `abort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Final, Self

from asyncdist.backend.base import Backend, Backends, CollectiveWork
from asyncdist.backend.call import Call
from asyncdist.causes import CONSEQUENCES, FAILED, abort_cause, aborted_by, explain, first_cause, kind_of
from asyncdist.consistency import Consistency
from asyncdist.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.errors import ClosedError, CollectiveMismatchError, DistError, GroupAbortedError, PeerLostError
from asyncdist.executor.work import Work, until_ended
from asyncdist.expiry import Expiry, timeout_error
from asyncdist.failures import Failures
from asyncdist.group_backends import GroupBackends
from asyncdist.operations.issuer import check_rank, rank_number
from asyncdist.operations.operations import Operations
from asyncdist.overlap import OverlapWatch
from asyncdist.pairs import Pairs
from asyncdist.refusals import Refusals
from asyncdist.subgroup import SubgroupNames
from asyncdist.world import World

__all__ = ["WORLD", "ProcessGroup"]

WORLD: Final = None
"""`asyncdist.group.WORLD`, as torch scripts write it: the default group, wherever a `group=` is taken."""

CLOSE_SENDS_S: Final = 30.0
"""How long a closing group waits for sends nobody receives; collectives have deadlines of their own."""


class ProcessGroup(Operations):
    """Some ranks of a world, in an order of their own.

    Methods take and return group ranks (0 .. `size` - 1); errors name global ranks. All operations must be called from
    the event loop the group was made on. `async with group:` closes it at the end, or aborts it on an exception.
    """

    def __init__(
        self,
        world: World,
        group_id: int,
        ranks: tuple[int, ...],
        timeout_s: float | None,
        name: str,
        backends: Backends,
        *,
        is_world: bool = False,
    ) -> None:
        self.world = world
        self._is_world = is_world
        self.group_id = group_id
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(world.rank)
        self._group_rank = {rank: index for index, rank in enumerate(ranks)}
        self.name = name
        self.timeout_s = timeout_s
        self._loop = world.loop
        self._thread = threading.get_ident()
        self._backends = GroupBackends(world, group_id, ranks, backends, self)
        self._backend = self._backends.host  # asked without a detour: small operations count nanoseconds
        self.pairs = Pairs(world, group_id, ranks, self, self._backends.gpu_pairs)
        self._overlap = OverlapWatch(self, world.loop)
        self._sequences: dict[int, int] = {}
        self._works: dict[tuple[int, int], CollectiveWork] = {}
        self._expiry = Expiry(world, group_id, ranks, self._works, self._expired)
        self._failures = Failures()
        self._consistency = Consistency(world, group_id, ranks, self._backends, self._works, self._differ)
        self._refusals = Refusals(
            world, group_id, ranks, self._backends, self._works, self._sequences, self._fail_refused, self._abort
        )
        self._subgroups = SubgroupNames(group_id, name)
        self._aborted: BaseException | None = None
        self._closing: asyncio.Task[None] | None = None
        self._unasked: BaseException | None = None
        self.closed = False
        world.register(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "aborted" if self._aborted is not None else "open"
        return f"<ProcessGroup {self.name} rank {self.rank} of {self.size} backend {self._backends.describe()} {state}>"

    @property
    def backend_name(self) -> Backend:
        """Name of the backend that carries out collectives on host arrays, or on GPU arrays if on those alone."""
        return self._backends.names.main

    def group_rank_of(self, rank: int, name: str = "rank") -> int:
        """The group rank of global rank `rank`. Raises ValueError if it is not a member, TypeError if it is no int."""
        if self._is_world:
            return check_rank(rank, self.size, name)
        rank = rank_number(rank, name)
        if rank not in self._group_rank:
            raise ValueError(f"{name}={rank} is not in group {self.name}: its global ranks are {list(self.ranks)}")
        return self._group_rank[rank]

    # Issuing.

    def check_usable(self, operation: str) -> None:
        """Raise unless the group is open and this is its event loop."""
        if self._closing is not None or self.closed or self.world.forked:
            why = "belongs to the process that this one was forked from"
            if not self.world.forked:
                why = "is closed" if self.closed else "is being closed"
            raise ClosedError(f"{self.where(operation)}: the group {why}")
        # A thread runs one loop at a time, and asking for the running one costs a system call.
        if threading.get_ident() != self._thread or not self._loop.is_running():
            raise RuntimeError(f"{self.where(operation)}: called from another event loop than the group was made on")

    def where(self, operation: str, sequence: int | None = None) -> str:
        """`group default, rank 3, all_reduce #17`, the beginning of every message."""
        number = "" if sequence is None else f" #{sequence}"
        return f"group {self.name}, rank {self.world.rank}, {operation}{number}"

    def _collective(
        self, operation: str, tag: int, timeout: Timeout, prepare: Callable[..., Call], *arguments: Any
    ) -> CollectiveWork:
        self.check_usable(operation)
        if self._aborted is not None:
            raise self.aborted_error(operation, self._aborted)
        sequence = self._sequences.get(tag, 0)
        self._sequences[tag] = sequence + 1
        try:
            timeout_s = self.timeout_s if timeout is INHERIT else timeout_seconds(timeout, self.timeout_s)
            call = prepare(*arguments)
            backend = self._backend if call.device is None else self._backends.of_call(call)
        except Exception as error:  # wrong, as a rule; or a function of the user's fails, or memory is short
            self._refusals.tell(tag, sequence, error)
            raise
        work = CollectiveWork(self._loop, operation, call.nbytes, tag, sequence, call.result)
        work._spinner = self.world.mesh.spinner
        key = (tag, sequence)
        refusal = self._refusals.take(key)
        if refusal is not None:
            self._fail(work, explain(self.where(operation, sequence), refusal))
            return work
        self._overlap.issue(tag, operation)
        self._works[key] = work
        self._consistency.issued(key, operation, call)
        try:
            backend.start(call, work, self._ended)
        except BaseException as error:  # out of memory, or the mesh is gone: nobody else may wait for us either
            del self._works[key]
            self._refusals.tell(tag, sequence, error)
            raise
        if timeout_s is not None and not work._done:
            self._expiry.watch(work, timeout_s)
        return work

    def refuse(self, operation: str, tag: int, error: Exception) -> None:
        """A collective's arguments are wrong: it takes its place in the order, and the others are told."""
        self.check_usable(operation)
        if self._aborted is None:
            sequence = self._sequences.get(tag, 0)
            self._sequences[tag] = sequence + 1
            self._refusals.tell(tag, sequence, error)

    def _ended(self, work: CollectiveWork, error: BaseException | None) -> None:
        if error is None:
            del self._works[work.tag, work.number]
            work._finish(work.value)
        elif not isinstance(error, CollectiveMismatchError) or not self._consistency.inquire(work, error):
            self._ended_badly(work, error)

    def _differ(self, key: tuple[int, int], error: CollectiveMismatchError) -> None:
        """Ranks run different collectives in that place."""
        work = self._works.get(key)
        if work is None:
            self._abort(error, "mismatch", str(error))
        else:
            self._backends.drop(*key)
            self._ended_badly(work, error)

    def _ended_badly(self, work: CollectiveWork, error: BaseException) -> None:
        del self._works[work.tag, work.number]
        explained = explain(self.where(work.operation, work.sequence), error)
        self._fail(work, explained)
        kind = kind_of(error)
        if kind:  # others wait for what we cannot do, and may know nothing of the reason
            cause = explained if kind == FAILED else error
            self._abort(cause, kind, str(cause), getattr(error, "rank", self.world.rank))

    def _fail(self, work: Work[Any], error: BaseException) -> None:
        work._fail(error)
        self._failures.keep(work)

    def remember_failure(self, work: Work[Any]) -> None:
        """Keep a failed work until somebody asks about it, so that closing the group can raise it."""
        self._failures.keep(work)

    def aborted_error(self, operation: str, cause: BaseException) -> GroupAbortedError:
        """What a call raises once the group was aborted because of `cause`."""
        self._failures.abort_seen = True
        rank = getattr(cause, "rank", None)
        error = GroupAbortedError(f"{self.where(operation)}: the group was aborted: {cause}", str(cause), rank)
        error.__cause__ = cause
        return error

    def _expired(self, work: CollectiveWork, missing: list[int]) -> None:
        missing = missing or list(self._backends.waiting_for(work.tag, work.number))
        error = timeout_error(work, self.world.rank, missing)
        self._abort(error, "timeout", str(error), missing=missing)

    # News from the world.

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        """A member is gone: collectives fail and the group is aborted; point-to-point between survivors goes on."""
        self.pairs.peer_lost(rank, error)
        self._abort(error, "lost", str(error), rank)

    def control(self, sender: int, message: list[Any]) -> None:
        """A control message of another member."""
        kind = message[0]
        if kind == "abort":
            _, _, kind, text, rank, missing = message
            cause = abort_cause(kind, text, rank, missing)
            if isinstance(cause, PeerLostError) and not cause.left:
                self.world.lost_elsewhere(cause.rank, cause)  # concerns all groups of that rank
            self._abort(cause, kind, text, rank, missing)
        elif kind == "refused":
            self._refusals.heard(*message[2:])
        elif kind == "probe":
            tag, sequence = message[2:]
            self._consistency.tell(sender, tag, sequence)
            self._expiry.tell(sender, tag, sequence, self._sequences.get(tag, 0) > sequence)
        elif kind == "mismatch":
            self._consistency.heard(sender, *message[2:])
        elif kind == "check":
            self._consistency.reported(sender, *message[2:])
        else:
            self._expiry.answered(sender, *message[2:])

    def bind_device(self, device: int | None) -> None:
        """Open communicators for arrays on that GPU at once, if all ranks do; None does nothing."""
        self._backends.bind(device)

    def give_up(self, tag: int, sequence: int, why: str) -> None:
        """A collective under way cannot be carried out any more: it fails here and on all others; the group goes on."""
        error = CollectiveMismatchError(f"rank {self.world.rank} gave the operation up: {why}", self.world.rank)
        self._refusals.tell(tag, sequence, error)
        self._fail_refused((tag, sequence), error)

    def ask(self, tag: int, sequence: int, rank: int) -> bool:
        """Ask `rank` what it runs in a place of the order; a difference fails the operation. False if it is gone."""
        return self._expiry.ask(rank, tag, sequence)

    def _fail_refused(self, key: tuple[int, int], error: CollectiveMismatchError) -> None:
        work = self._works.pop(key, None)
        if work is not None:
            self._fail(work, explain(self.where(work.operation, work.sequence), error))

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
        # Before messages under way are broken off: who receives those is to know the reason by then.
        self.world.tell_aborted(self.group_id, self.ranks, ["abort", self.group_id, kind, text, rank, list(missing)])
        if first:
            self._expiry.stop()
            differences = self._consistency.stop()
            if isinstance(error, CollectiveMismatchError):
                differences.clear()  # who says so knows as much
            self._backends.abort(error)
            works = dict(self._works)
            self._works.clear()
            for key, work in works.items():
                self._fail(work, explain(self.where(work.operation, work.sequence), differences.get(key, error)))
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
            self._closing = self._loop.create_task(self._close(), name=f"close group {self.name}")
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            for group in [self, *self._inner()]:
                if group._works or group.pairs.pending():
                    group.abort("closing it was cancelled")
            await asyncio.wait([self._closing])
            raise
        unasked, self._unasked = self._unasked, None
        if unasked is not None:
            raise unasked

    async def _close(self) -> None:
        self.pairs.withdraw_receives()
        self._backends.closing()
        try:
            failures = await asyncio.gather(*(group.close() for group in self._inner()), return_exceptions=True)
            await until_ended(self._works.values())
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
        unasked = self._failures.take_unasked(aborted=self._aborted is not None)
        self._unasked = next(filter(None, [unasked, *failures]), None)

    def _inner(self) -> list[ProcessGroup]:
        """Groups that end with this one: all others of the world, if this is the world's."""
        groups = self.world.groups.values() if self._is_world else ()
        return [group for group in groups if isinstance(group, ProcessGroup) and group is not self]

    async def _leave(self) -> None:
        self.closed = True
        self._expiry.stop()
        self._consistency.stop()
        self._backends.close()
        await self.pairs.close()
        await self._backends.wait_closed()
        if self._is_world:
            await self.world.close()
        else:  # where the world ends, senders hear that we have left
            self.pairs.drop_unmatched()
        self.world.unregister(self.group_id, self._sequences)

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
        why = f"rank {self.world.rank} left with {type(cause).__name__}: {cause}"
        if not isinstance(cause, CONSEQUENCES):
            self.abort(why)
        for group in self._inner():  # others' operations on those must not wait for this rank either
            group.abort(why)
        with contextlib.suppress(DistError):  # the exception that ended the block is the one to raise
            await self.close()

    def make_subgroup(
        self,
        ranks: Sequence[int],
        timeout_s: float | None,
        name: str | None,
        backends: Backends | None = None,
        *,
        members_only: bool = False,
    ) -> ProcessGroup | None:
        """Make the group of `ranks` (global); None where this rank is not a member.

        Called on members and, unless `members_only`, on all others, in the same order.
        """
        self.world.check_thread(self.where("new_group"))
        group_id, label = self._subgroups.next(ranks, members_only=members_only)
        if self.world.rank not in ranks:
            return None
        backends = backends or self._backends.names
        return ProcessGroup(self.world, group_id, tuple(ranks), timeout_s, name or label, backends)
