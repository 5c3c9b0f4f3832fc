"""GroupCore: some ranks of a world, what they issue in which order, and what becomes of an operation that fails.

It owns everything that is issued: the order (sequence numbers per tag), the deadlines, and the handles under way.
"""

from __future__ import annotations

import asyncio
from asyncio import current_task
from collections.abc import Callable, Collection, Sequence
from threading import get_ident
from typing import Any

from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import Backend, BackendNames, CollectiveWork, WorkKey
from asyncdist.collectives.shared.operation import different
from asyncdist.concurrency.deadline import INHERIT, Timeout, timeout_seconds
from asyncdist.concurrency.integers import SubgroupNames
from asyncdist.errors import (
    ClosedError,
    CollectiveMismatchError,
    DistStoreError,
    GroupAbortedError,
    PeerLostError,
)
from asyncdist.group.abort_reasons import FAILED, explain, failed_on, kind_of
from asyncdist.group.backends import GroupBackends
from asyncdist.group.deadlines import NOT_HEARD_FROM, Deadlines, timeout_error
from asyncdist.group.membership import CreationOrder
from asyncdist.group.methods import Operations
from asyncdist.group.methods.issuer import check_rank, rank_number
from asyncdist.group.mismatch import MismatchFinder, StrayMessages
from asyncdist.group.overlap_warning import OverlapWatch
from asyncdist.group.point_to_point import Pairs, check_tag
from asyncdist.group.rejected_calls import RejectedCalls
from asyncdist.group.unretrieved import UnretrievedErrors, watch, watches
from asyncdist.work import Work
from asyncdist.world.world import CLOSED, NOT_MADE, World

__all__ = ["GroupCore"]


class GroupCore(Operations):
    """See the module; `ProcessGroup` is what users have."""

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
        origin: tuple[CreationOrder, int] | None = None,
        parent: tuple[int, str] | None = None,
    ) -> None:
        """`parent` are id and name of the group that this one is made of."""
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
        self._thread = get_ident()
        self._backends = GroupBackends(world, group_id, ranks, backend_names, self)
        self._backend = self._backends.host  # asked without a detour: small operations count nanoseconds
        self.pairs = Pairs(world, group_id, ranks, self, self._backends.gpu_pairs, parent and parent[0])
        self._overlap = OverlapWatch(self, world.loop)
        self._last_task = self._overlap.last_task
        self._sequences: dict[int, int] = {}
        self._works: dict[WorkKey, CollectiveWork] = {}
        self._deadlines = Deadlines(world, group_id, ranks, self._works, self._expired)
        self._unretrieved = UnretrievedErrors()
        self._mismatches = MismatchFinder(world, group_id, ranks, self._backend, self._works, self._differ)
        self._strays = StrayMessages(world.mesh, group_id, self._works, self._sequences, self.differs)
        self._early = self._strays.early
        self._differing: dict[WorkKey, int] = {}
        """Places of the order where another rank, and which, was found to run something else: nothing ends well now."""
        self._verdict = asyncio.Event()
        """Set once the group is aborted."""
        self.watches = watches(world.loop, world.options)
        """Whether to warn of Works that nobody asks about."""
        if self.watches:
            self._watch_all()
        self._askers: dict[int, int] = {}
        """Members that have waited long for a collective, and its tag: they are told when this group is closed here."""
        self._rejected = RejectedCalls(
            world, group_id, ranks, self._backends.drop, self._works, self._sequences, self._fail_refused, self._abort
        )
        self._subgroups = SubgroupNames(group_id, name)
        self._order = CreationOrder(world, group_id, name)
        self._origin = origin
        """Where this group stands among those made of one group by calls of all its ranks, if it is one."""
        self._parent = parent
        self._aborted: BaseException | None = None
        self._closing: asyncio.Task[None] | None = None
        self._unasked: BaseException | None = None
        self.closed = False
        self.usable = True
        """False once it is being closed, is closed, aborted or another process's."""
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
        if get_ident() != self._thread or not self._loop.is_running():
            raise RuntimeError(f"{self.where(operation)}: called from another event loop than the group was made on")

    def where(self, operation: str, sequence: int | None = None) -> str:
        """`group default, rank 3, all_reduce #17`, the beginning of every message."""
        number = "" if sequence is None else f" #{sequence}"
        return f"group {self.name}, rank {self.world.rank}, {operation}{number}"

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """Global ranks a collective under way has not heard from, as far as known."""
        return self._backends.waiting_for(tag, sequence)

    def ask_origin(self, ranks: Collection[int]) -> None:
        """Ask `ranks` what they have made in place of this group."""
        if self._origin is not None:
            order, number = self._origin
            order.ask(ranks, number)

    def made_differently(self, error: CollectiveMismatchError) -> None:
        """Another rank has made another group in place of this one, which can never be used."""
        self._abort_by_mismatch(error)
        self.pairs.abort(error)

    def _collective(
        self, operation: str, tag: int, timeout: Timeout, prepare: Callable[..., Call], *arguments: Any
    ) -> CollectiveWork:
        # Small operations count nanoseconds, and a call costs fifty of them: what rarely holds is looked at here.
        if not self.usable or get_ident() != self._thread or not self._loop.is_running():
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
            last = self._last_task.get(tag)
            if last is None or last() is not current_task(self._loop):
                self._overlap.issue(tag, operation)
        except Exception as error:  # wrong, as a rule; or a function of the user's fails, or a warning is an error
            self._rejected.tell(tag, sequence, error)
            raise
        work = CollectiveWork(self._loop, operation, call.nbytes, tag, sequence, call.result, self)
        work._spinner = self.world.mesh.spinner
        key = work.key
        if self._rejected.early and key in self._rejected.early:
            self._fail(work, explain(self.where(operation, sequence), self._rejected.early.pop(key)))
            return work
        self._works[key] = work
        self._mismatches.issued((key, operation, call.recipe_key, ""))
        try:
            backend.start(call, work, self._ended)
        except BaseException as error:  # out of memory, or the mesh is gone: nobody else may wait for us either
            del self._works[key]
            self._rejected.tell(tag, sequence, error)
            raise
        if not work._done:
            self._deadlines.watch(work, timeout_s)
        return work

    def _watch_all(self) -> None:
        """Replace what issues operations, so that it costs nothing where nothing is watched."""

        def watched(issue: Callable[..., Work[Any]]) -> Callable[..., Work[Any]]:
            return lambda *arguments, **options: watch(issue(*arguments, **options))

        messages = "send", "send_objects", "receive", "receive_array", "receive_objects"
        for owner, name in (self, "_collective"), *((self.pairs, name) for name in messages):
            setattr(owner, name, watched(getattr(owner, name)))

    def refuse(self, operation: str, tag: int, error: Exception) -> None:
        """A collective's arguments are wrong: it takes its place in the order, and the others are told."""
        self.check_usable(operation)
        if self._aborted is None:
            sequence = self._sequences.get(tag, 0)
            self._sequences[tag] = sequence + 1
            self._rejected.tell(tag, sequence, error)

    def _ended(self, work: CollectiveWork, error: BaseException | None) -> None:
        if error is None:
            if self._early and self._strays.left_over(work.key):
                return
            if self._differing:
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
        if self._aborted is None and not self.closed:
            if not self._differing:
                self._loop.call_soon(self._inquire)
            self._differing.setdefault((tag, sequence), rank)

    def _inquire(self) -> None:
        """Ask about the first difference that was found: the others may be its consequences."""
        key, rank = next(iter(self._differing.items()))
        if self._aborted is None and not self.closed:
            error = self._mismatches.inquire(key, None, different(rank))
            if error is not None:
                self._differ(key, error)

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
            self._backends.host.look_up_again()
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
        """Keep one that somebody waited for after all: all who did were cancelled before they were told."""
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
        elif self._parent is not None:
            what = f"rank {sender} has closed group {self._parent[1]} without making this one of it"
            self.made_differently(CollectiveMismatchError(what, sender))

    def _expired(self, work: CollectiveWork, missing: dict[int, str]) -> None:
        missing = missing or dict.fromkeys(work.waiting_for(), NOT_HEARD_FROM)
        error = timeout_error(work, self.world.rank, missing)
        self._abort(error, "timeout", str(error), missing=error.missing)

    # What ProcessGroup adds.

    def peer_lost(self, rank: int, error: PeerLostError) -> None:
        """A member is gone."""
        raise NotImplementedError

    def peer_left(self) -> None:
        """A member has left."""
        raise NotImplementedError

    def control(self, sender: int, message: list[Any]) -> None:
        """A control message of another member."""
        raise NotImplementedError

    def abort(self, reason: str = "") -> None:
        """Give up now."""
        raise NotImplementedError

    def _abort(
        self, error: BaseException, kind: str, text: str, rank: int | None = None, missing: Sequence[int] = ()
    ) -> None:
        raise NotImplementedError
