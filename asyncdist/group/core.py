"""GroupCore: some ranks of a world, what they issue in which order, what fails of it, and the end of the group.

It owns everything that is issued: the order (sequence numbers per tag), the deadlines, and the handles under way.
Users hold a `ProcessGroup`, whose methods call it.
"""

from __future__ import annotations

import asyncio
from asyncio import current_task
from collections.abc import Callable, Collection, Sequence
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncdist.arrays.host import Array
from asyncdist.arrays.reduce_op import ReduceOpLike
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import BackendNames, CollectiveWork, WorkKey
from asyncdist.concurrency.deadline import INHERIT, Deadline, Timeout, timeout_seconds
from asyncdist.concurrency.loop import place_of
from asyncdist.concurrency.tasks import start_task, uninterrupted
from asyncdist.errors import ClosedError, CollectiveMismatchError, DistStoreError, GroupAbortedError, PeerLostError
from asyncdist.group.abort_reasons import (
    CONSEQUENCES,
    FAILED,
    SHRUNK,
    abort_cause,
    aborted_by,
    explain,
    failed_on,
    first_cause,
    kind_of,
    named,
)
from asyncdist.group.backends import GroupBackends
from asyncdist.group.deadlines import NOT_HEARD_FROM, Deadlines, timeout_error
from asyncdist.group.membership import EndedGroup, Lineage, Origin
from asyncdist.group.methods.streams import ChunkStream
from asyncdist.group.mismatch import MismatchFinder, StrayMessages
from asyncdist.group.misuse import OverlapWatch, UnretrievedErrors, watch_issued, watches
from asyncdist.group.point_to_point import Pairs, check_tag
from asyncdist.group.rejected_calls import RejectedCalls
from asyncdist.group.survivors import Losses, Survivors
from asyncdist.group.team import Reduced, Team
from asyncdist.inspect.dumps import dump_aborted
from asyncdist.inspect.recorder import RECORDER, Entry
from asyncdist.work import Work, until_ended
from asyncdist.world import control as messages
from asyncdist.world.world import CLOSED, NOT_MADE, World

if TYPE_CHECKING:
    from asyncdist.group.process_group import ProcessGroup

CLOSE_SENDS_S: Final = 30.0
"""How long a closing group waits for sends nobody receives; collectives have deadlines of their own."""


class GroupCore:
    """See the module. It is called from the thread of its event loop only."""

    face: ProcessGroup
    """The group as users hold it: they may keep it nowhere, while the world's sockets keep this object."""

    def __init__(
        self,
        world: World,
        group_id: int,
        ranks: tuple[int, ...],
        timeout_s: float | None,
        name: str,
        backend_names: BackendNames,
        *,
        is_world: bool = False,
        origin: Origin | None = None,
        parent: tuple[int, str] | None = None,
    ) -> None:
        """`parent` are id and name of the group that this one is made of."""
        self.world = world
        self.is_world = is_world
        self.group_id = group_id
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(world.rank)
        self.name = name
        self.timeout_s = timeout_s
        self._place = place_of(world.loop)
        self._backends = GroupBackends(world, group_id, ranks, backend_names, self)
        self._backend = self._backends.host  # asked without a detour: small operations count nanoseconds
        clocks = world.clocks.compared
        facts = RECORDER.made(world.rank, group_id, name, ranks, self._backends, clocks, is_world=is_world)
        self.pairs = Pairs(world, facts, self, self._backends.gpu_pairs, parent and parent[0])
        self._overlap = OverlapWatch(self, world.loop)
        self._sequences: dict[int, int] = {}
        self._works: dict[WorkKey, CollectiveWork] = {}
        self._deadlines = Deadlines(world, group_id, ranks, self._works, self._expired)
        self._unretrieved = UnretrievedErrors()
        self._mismatches = MismatchFinder(world, group_id, ranks, self._backend, self._works, self._differ)
        self._strays = StrayMessages(world.mesh, group_id, self._works, self._sequences, self.differs)
        self.watches = watches(world.loop, world.options)
        """Whether to warn of Works that nobody asks about."""
        if self.watches and not hasattr(world.loop, "place"):  # else the Works that users get are watched
            watch_issued(self, self.pairs)
        self._rejected = RejectedCalls(
            world, group_id, ranks, self._backends.drop, self._works, self._sequences, self._fail_refused, self._abort
        )
        self._lineage = Lineage(world, group_id, name, origin, parent)
        self._survivors = Survivors(world, group_id, ranks)
        self.team: Team | None = None
        """That of this group, or the one that this group serves."""
        self._aborted: BaseException | None = None
        self._closing: asyncio.Task[None] | None = None
        self.closed = False
        self.usable = True
        """False once it is being closed, is closed, aborted or another process's."""
        world.register(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "aborted" if self._aborted is not None else "open"
        return f"<ProcessGroup {self.name} rank {self.rank} of {self.size} backend {self._backends.describe()} {state}>"

    @property
    def backend_names(self) -> BackendNames:
        """What carries out its operations on each kind of array."""
        return self._backends.names

    # Issuing.

    def check_usable(self, operation: str) -> None:
        """Raise unless the group is open and this is its event loop."""
        if self._closing is not None or self.closed or self.world.forked:
            why = "belongs to the process that this one was forked from"
            if not self.world.forked:
                why = "is closed" if self.closed else "is being closed"
            raise ClosedError(f"{self.where(operation)}: the group {why}")
        # A thread runs one loop at a time, and asking for the running one costs a system call.
        if get_ident() != self._place.thread or not self.world.loop.is_running():
            raise RuntimeError(f"{self.where(operation)}: called from another event loop than the group was made on")

    def where(self, operation: str, sequence: int | None = None) -> str:
        """`group default, rank 3, all_reduce #17`, the beginning of every message."""
        return f"group {self.name}, rank {self.world.rank}, {operation}" + ("" if sequence is None else f" #{sequence}")

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """Global ranks a collective under way has not heard from, as far as known."""
        return self._backends.waiting_for(tag, sequence)

    def ask_origin(self, ranks: Collection[int]) -> None:
        """Ask `ranks` what they have made in place of this group."""
        self._lineage.ask_origin(ranks)

    def made_differently(self, error: CollectiveMismatchError) -> None:
        """Another rank has made another group in place of this one, which can never be used."""
        self._abort_by_mismatch(error)
        self.pairs.abort(error)

    def issue(
        self, operation: str, tag: int, timeout: Timeout, prepare: Callable[..., Call], *arguments: Any
    ) -> CollectiveWork:
        """Issue a collective: `prepare(*arguments)` checks and binds them."""
        # Small operations count nanoseconds, and a call costs fifty of them: what rarely holds is looked at here.
        world = self.world
        loop = world.loop
        if not self.usable or get_ident() != self._place.thread or not loop.is_running():
            self.check_usable(operation)
            assert self._aborted is not None, "it is neither closed nor aborted"
            raise self.aborted_error(operation, self._aborted)
        sequence = self._sequences.get(tag) if type(tag) is int else None
        if sequence is None:
            tag = check_tag(tag)
            sequence = self._sequences.get(tag, 0)
        self._sequences[tag] = sequence + 1
        try:
            timeout_s = self.timeout_s if timeout is INHERIT else timeout_seconds(timeout, self.timeout_s)
            call = prepare(*arguments)
            backend = self._backend
            if call.device is not None:
                backend = devices = self._backends.devices or self._backends.on_gpus()
                devices.check(call)
                self._backends.host.elsewhere(tag, sequence)
            last = self._overlap.last_task.get(tag)
            if last is None or last() is not current_task(loop):
                last = self._overlap.issue(tag, operation)
        except Exception as error:  # wrong, as a rule; or a function of the user's fails, or a warning is an error
            self._rejected.tell(tag, sequence, error)
            raise
        work = CollectiveWork(loop, operation, call.nbytes, tag, sequence, call.result, self)
        work._spinner = world.mesh.spinner
        key = work.key
        if not RECORDER.on:
            entry: Entry = [key, operation, call.recipe_key]
        else:
            facts, site = self.pairs.facts, RECORDER.caller() if RECORDER.sites else None
            entry = [key, operation, call.recipe_key, facts, site, last, monotonic(), None, None]
            work.entry = entry
            RECORDER.entries.append(entry)
        if self._rejected.early and key in self._rejected.early:
            self._fail(work, explain(self.where(operation, sequence), self._rejected.early.pop(key)))
            return work
        self._works[key] = work
        self._mismatches.issued(entry)
        try:
            backend.start(call, work, self._ended)
        except BaseException as error:  # out of memory, or the mesh is gone: nobody else may wait for us either
            del self._works[key]
            self._rejected.tell(tag, sequence, error)
            raise
        if not work._done:
            self._deadlines.watch(work, timeout_s)
        return work

    def refuse(self, operation: str, tag: int, error: Exception) -> None:
        """A collective's arguments are wrong: it takes its place in the order, and the others are told."""
        self.check_usable(operation)
        if self._aborted is None:
            sequence = self._sequences.get(tag, 0)
            self._sequences[tag] = sequence + 1
            self._rejected.tell(tag, sequence, error)

    def _ended(self, work: CollectiveWork, error: BaseException | None) -> None:
        if error is None:
            strays = self._strays
            if strays.early and strays.left_over(work.key):
                return
            if self._mismatches.differing:
                return
            del self._works[work.key]
            work.finish()
            return
        if isinstance(error, CollectiveMismatchError):
            error = self._mismatches.inquire(work.key, work, error)
        elif isinstance(error, PeerLostError) and error.left:
            error = self._mismatches.why_left(work.key, error)
        if error is not None:
            self._ended_badly(work, error)

    def watch_parts(self, group_id: int, tag: int) -> None:
        """Messages with that id are parts of operations of `tag`, whose number is their tag."""
        if self._aborted is None and not self.closed:
            self._strays.watch_parts(group_id, tag)

    def dropped(self, tag: int, sequence: int) -> None:
        """That operation was refused or given up: what still comes of it shows nothing."""
        self._strays.forget((tag, sequence))

    def differs(self, tag: int, sequence: int, rank: int) -> None:
        """Global rank `rank` runs something else in that place of the order, where all may have ended here."""
        self._mismatches.differs((tag, sequence), rank)

    def _differ(self, key: WorkKey, error: CollectiveMismatchError) -> None:
        """Ranks run different collectives in that place."""
        work = self._works.get(key)
        if work is None:
            self._abort_by_mismatch(error)
        else:
            self._backends.drop(*key)
            self._ended_badly(work, error)

    def _ended_badly(self, work: CollectiveWork, error: BaseException) -> None:
        del self._works[work.key]
        self._fail(work, explain(work.where, error))
        if isinstance(error, DistStoreError):  # where a rank listens is not known, which is no reason to end the group
            self._rejected.tell(*work.key, error)
        elif isinstance(error, CollectiveMismatchError):
            self._abort_by_mismatch(error)
        elif kind := kind_of(error):  # others wait for what we cannot do, and may know nothing of the reason
            if kind == FAILED:
                error = failed_on(self.world.rank, f"{work.operation} #{work.sequence}", error)
            self._abort(error, kind, str(error), getattr(error, "rank", self.world.rank))

    def _abort_by_mismatch(self, error: CollectiveMismatchError) -> None:
        self._abort(error, "mismatch", str(error), error.peer, [self.world.rank])

    def give_up(self, tag: int, sequence: int, why: str) -> None:
        """A collective under way cannot be carried out any more: it fails here and on all others; the group goes on."""
        error = CollectiveMismatchError(f"rank {self.world.rank} gave the operation up: {why}", self.world.rank)
        self._rejected.tell(tag, sequence, error)
        self._fail_refused((tag, sequence), error)

    def ask(self, tag: int, sequence: int, rank: int) -> bool:
        """Ask `rank` what it runs in a place of the order; a difference fails the operation. False if it is gone."""
        return self._deadlines.ask(rank, tag, sequence)

    def _fail_refused(self, key: WorkKey, error: CollectiveMismatchError) -> None:
        work = self._works.pop(key, None)
        if work is not None:
            self._fail(work, explain(work.where, error))

    def _fail(self, work: Work[Any], error: BaseException) -> None:
        work._fail(error)
        self._unretrieved.keep(work)

    def remember_failure(self, work: Work[Any]) -> None:
        """Keep a failed work until somebody asks about it, so that closing the group can raise it."""
        self._unretrieved.keep(work)

    def untold(self, work: Work[Any]) -> None:
        """Keep a failed Work after all: all its waiters were cancelled before they were told."""
        self._unretrieved.untold(work)

    def aborted_error(self, operation: str, cause: BaseException) -> GroupAbortedError:
        """What a call raises once the group was aborted because of `cause`."""
        self._unretrieved.abort_seen = True
        rank = getattr(cause, "rank", None)
        text = str(cause) if "aborted the group" in str(cause) else f"the group was aborted: {cause}"
        reason = cause.reason if isinstance(cause, GroupAbortedError) else str(cause)
        error = GroupAbortedError(f"{self.where(operation)}: {text}", reason, rank)
        error.__cause__ = cause
        return error

    def _heard_late(self, sender: int, tag: int, sequence: int, state: str) -> None:
        """A member says whether it has issued a collective that we have waited long for."""
        if state == NOT_MADE:
            self.ask_origin((sender,))
            if self.pairs.closed_members is not None:
                self.pairs.closed_members.ask((sender,))
        elif state == CLOSED:  # that one is the first it has not issued, and will not
            late = (key for key in self._works if key[0] == tag and key[1] >= sequence)
            work = self._works.get(next(late, (tag, -1)))
            if work is not None:
                what = f"rank {sender} has closed the group without running {work.operation} #{work.sequence}"
                self._differ(work.key, CollectiveMismatchError(what, sender))

    def _heard_closed(self, sender: int, parent_id: int, asked: bool) -> None:
        """A member has closed this group, or its parent without making this one; or asks whether we have."""
        if asked:
            if self.pairs.closed_members is not None:
                self.pairs.closed_members.askers.add(sender)
        elif not parent_id:
            self.pairs.member_closed(sender)
        elif (error := self._lineage.never_made_by(sender)) is not None:
            self.made_differently(error)

    def _expired(self, work: CollectiveWork, missing: dict[int, str], why: str) -> None:
        missing = missing or dict.fromkeys(work.waiting_for(), NOT_HEARD_FROM)
        error = timeout_error(work, self.world.rank, missing, why)
        self._abort(error, "timeout", str(error), missing=error.missing)

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        """A member is gone: collectives fail and the group is aborted; point-to-point between survivors goes on."""
        RECORDER.event(self.pairs.facts, "rank lost", rank, error)
        self.pairs.peer_lost(rank, error)
        self._abort(error, "lost", str(error), rank)
        self._survivors.lose(rank, error)

    def peer_left(self, rank: int) -> None:
        """A member has left: of those that a message may come from any, it might have been the last."""
        RECORDER.event(self.pairs.facts, "rank left", rank)
        self.pairs.fail_vain_receives()
        self._survivors.lose(rank, None)

    def control(self, sender: int, message: messages.GroupMessage) -> None:
        """A control message of another member."""
        match message:
            case messages.Abort(_, kind, text, rank, missing):
                cause = abort_cause(kind, text, rank, missing, self.world.rank)
                if isinstance(cause, PeerLostError) and not cause.left:
                    self.world.lost_elsewhere(cause.rank, cause)  # concerns all groups of that rank
                self._abort(cause, kind, text, rank, missing)
            case messages.Refused(_, tag, sequence, rank, text):
                self._rejected.heard(tag, sequence, rank, text)
            case messages.Probe(_, tag, sequence):
                self._mismatches.tell(sender, tag, sequence)
                self._deadlines.answer_probe(sender, tag, sequence, self._sequences.get(tag, 0) > sequence)
            case messages.Status(_, tag, sequence, state):
                if not self._deadlines.answered(sender, tag, sequence, state):
                    self._heard_late(sender, tag, sequence, state)
            case messages.Mismatch(_, tag, sequence, text, asked):
                self._mismatches.heard(sender, tag, sequence, text, asked)
            case messages.Ran(_, words):
                self._mismatches.heard_last(sender, words)
            case messages.Check(_, tag, sequence, terms, shown):
                self._mismatches.reported(sender, tag, sequence, terms, shown)
            case messages.Made(_, number, made_id, ranks, asked):
                self._lineage.order.heard(sender, number, made_id, ranks, asked)
            case messages.Closed(_, parent_id, asked):
                self._heard_closed(sender, parent_id, asked)
            case messages.Shrink():
                self._survivors.hear(sender, message)
                if self.team is not None:
                    self.team.agreement_begun(self)

    def bind_device(self, device: int | None) -> None:
        """Open communicators for arrays on that GPU at once, if all ranks do; None does nothing."""
        self._backends.bind(device)

    def all_reduce_of_the_left(self, tensor: Any, op: ReduceOpLike, tag: int, timeout: Timeout) -> Work[Reduced]:
        """An all_reduce with `on_lost="continue"`."""
        self.check_usable("all_reduce")
        if self.team is None:
            self.team = Team(self)
        return self.team.all_reduce(tensor, op, tag, timeout)

    def stream(self, operation: str, *arguments: Any) -> ChunkStream:
        """See `ChunkStream.issue`."""
        return ChunkStream.issue(self, operation, *arguments)

    def shared_array(self, extents: tuple[int, ...], dtype: np.dtype[Any]) -> Array | None:
        """An array in memory that the other ranks of this host can read; None where there is none."""
        memory = self.world.mesh.memory
        return None if memory is None else memory.arrays.empty(extents, dtype)

    # The end.

    def abort(self, reason: str = "") -> None:
        """See `ProcessGroup.abort`."""
        self.world.check_thread(self.where("abort"))
        text = reason or "abort() was called"
        error = aborted_by(self.world.rank, text)
        self._abort(error, "abort", text, self.world.rank)
        if self.team is not None and self.team.core is self:
            self.team.resign(error)

    def _abort(
        self, error: BaseException, kind: str, text: str, rank: int | None = None, missing: Sequence[int] = ()
    ) -> None:
        first = self._aborted is None
        also_pairs = kind == "abort" and not self.pairs.aborted  # even where collectives have ended already
        if self.closed or self.world.forked or not (first or also_pairs):
            return
        self._aborted = error if first else self._aborted
        self.usable = False
        # Before messages under way are broken off: who receives those is to know the reason by then.
        self.world.tell_aborted(self.ranks, messages.Abort(self.group_id, kind, text, rank, list(missing)))
        if first:
            dump_aborted(self.pairs.facts, rank, text)
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
        if first and self.team is not None:
            self.team.aborted(self, error, kind, text, rank, missing)

    async def close(self) -> None:
        """See `ProcessGroup.close`."""
        self.world.check_thread(self.where("close"))
        if self._closing is None:
            if self.closed or self.world.forked:
                return
            if asyncio.get_running_loop() is not self.world.loop:
                raise RuntimeError(f"{self.where('close')}: called from another event loop than the group was made on")
            self.usable = False
            self._closing = start_task(self.world.loop, self._close(), name=f"close group {self.name}")
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            for group in [self, *self.inner()]:
                if group._is_busy():
                    group.abort("closing it was cancelled")
            if self.is_world:
                self.world.hurry()
            await uninterrupted(asyncio.wait([self._closing]))
            raise
        unasked = self._unretrieved.take_at_close()
        try:
            if unasked is not None:
                raise unasked
        finally:
            del unasked  # it refers to this frame, and so to the arrays of its callers

    async def _close(self) -> None:
        self.world.leaving |= self.is_world
        self.pairs.withdraw_receives()
        self._backends.host.closing()
        try:
            if self.team is not None and self.team.core is self:
                await self.team.close()
            failures = await asyncio.gather(*(group.close() for group in self.inner()), return_exceptions=True)
            await until_ended(self._works.values())
            self._backends.host.settle()
            if self._mismatches.differing:
                await self._mismatches.stopped.wait()
            async with asyncio.timeout(CLOSE_SENDS_S):
                await until_ended(self.pairs.pending())
        except TimeoutError:
            self.abort(f"closed with sends that nobody received for {CLOSE_SENDS_S:g} s")
        except asyncio.CancelledError:  # the event loop ends
            self.abort("the event loop ended before it was closed")
            self.closed = True
            if self.is_world:
                await self.world.abandon()
            raise
        await self._leave()
        found = None
        if self._mismatches.differing and self._aborted is not None:
            found = explain(self.where("close"), self._aborted)
        unasked = self._unretrieved.take_unasked(found, aborted=self._aborted is not None)
        self._unretrieved.at_close = next(filter(None, [unasked, *failures]), None)

    def _is_busy(self) -> bool:
        """Whether something is under way that closing waits for."""
        busy = self._works or self._mismatches.differing or self.pairs.pending()
        return bool(busy) or (self.team is not None and self.team.busy)

    def inner(self) -> list[GroupCore]:
        """Groups that end with this one: all others of the world, if this is the world's."""
        groups = self.world.groups.values() if self.is_world else ()
        cores = (group for group in groups if isinstance(group, GroupCore) and group is not self)
        return [core for core in cores if core.team is None or core.team.core is core]

    async def _leave(self) -> None:
        self.closed = True
        RECORDER.closed(self.pairs.facts)
        self._survivors.close()
        self._deadlines.stop()
        self._strays.stop()
        self._mismatches.stop()
        if self.world.leaving and self._aborted is None:
            self._mismatches.say_last_words()
        self._backends.close()
        await self.pairs.close()
        await self._backends.wait_closed()
        if self.is_world:
            await self.world.close()
        else:  # where the world ends, senders hear that we have left
            self.pairs.drop_unmatched()
        words, order = self._mismatches.last_words(), self._lineage.order
        ended = EndedGroup(self.world, self.group_id, self.ranks, self._sequences, order, words, self._survivors)
        self.world.unregister(self.group_id, ended)
        for rank, tag in self._deadlines.askers.items():  # who wait, perhaps, for what comes no more
            ended.tell_issued(rank, tag, self._sequences.get(tag, 0))
        for rank in self.pairs.closed_members.askers if self.pairs.closed_members is not None else ():
            ended.tell_closed(rank)

    def leave_with(self, error: BaseException) -> None:
        """The block of this group ends with `error`: abort the groups whose members do not hear of it by themselves."""
        cause = first_cause(error)
        why = f"rank {self.world.rank} left with {named(cause)}"
        if not (isinstance(cause, CONSEQUENCES) and self._is_known(cause)):
            self.abort(why)
        for group in self.inner():  # others' operations on those must not wait for this rank either
            group.abort(why)

    def _is_known(self, cause: BaseException) -> bool:
        """Whether the other members notice by themselves why this rank leaves.

        They do not notice that a message timed out here, or that another group ended. A rank that leaves the world
        because another rank left in order does so in order, too. That a rank leaves another group goes unseen.
        """
        return self._aborted is not None or (self.is_world and isinstance(cause, PeerLostError) and cause.left)

    async def survivors(self, timeout_s: float | None) -> tuple[int, ...]:
        """Abort the group, and return the surviving global ranks, as all of them agree. See `shrink`."""
        self.check_usable("shrink")
        self._abort(aborted_by(self.world.rank, SHRUNK), "abort", SHRUNK, self.world.rank)
        return await self._survivors.agree(self.where("shrink"), Deadline.after(timeout_s, self.world.loop.time()))

    def losses(self) -> Losses:
        """See `ProcessGroup.membership`."""
        self.check_usable("membership")
        return Losses(self._survivors)

    def subgroup(
        self,
        ranks: Sequence[int],
        timeout_s: float | None,
        name: str | None,
        backend_names: BackendNames | None = None,
        *,
        members_only: bool = False,
    ) -> GroupCore | None:
        """See `ProcessGroup.make_subgroup`."""
        self.world.check_thread(self.where("new_group"))
        group_id, label, origin = self._lineage.next(ranks, members_only=members_only)
        made = None
        if self.world.rank in ranks:
            made = GroupCore(
                self.world,
                group_id,
                tuple(ranks),
                timeout_s,
                name or label,
                backend_names or self.backend_names,
                origin=origin,
                parent=(self.group_id, self.name),
            )
        if origin is not None:
            order, number = origin
            order.made(number, group_id, tuple(ranks))
        return made


def core_of(group: ProcessGroup) -> GroupCore:
    """The core of a group of this event loop."""
    core = group._core
    assert isinstance(core, GroupCore), "it is not in another thread"
    return core
