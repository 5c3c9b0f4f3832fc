"""Team: the surviving ranks of a group, whose all_reduce goes on without the others and says who took part.

An operation is issued in the group itself, which keeps its place in the order and finds ranks that differ. Then its
ranks hold a barrier, in a group of the team's own: so a rank that returns knows that all others have the result. When a
rank is lost, the survivors shrink the team's group and exchange how many operations they have done. What all have done
stands, although the lost rank's values are in it. What one of them has not done, none has returned: all
begin it anew in the smaller group, with the copies that they keep of their arrays.

A rank takes part in that whether it calls anything or not, as others may wait in a barrier that it has passed. One that
gives the group up, or closes it, has the others go on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from asyncdist.arrays.host import Array, host_array
from asyncdist.arrays.reduce_op import ReduceOpLike
from asyncdist.collectives.arguments import call
from asyncdist.concurrency.deadline import Deadline, Timeout, timeout_seconds
from asyncdist.concurrency.integers import spell_ranks
from asyncdist.concurrency.tasks import start_task
from asyncdist.errors import ClosedError, CollectiveTimeoutError, DistError, GroupAbortedError, PeerLostError
from asyncdist.group.abort_reasons import FAILED, SHRUNK, explain
from asyncdist.group.misuse import watch
from asyncdist.group.point_to_point import check_tag
from asyncdist.group.process_group import ProcessGroup
from asyncdist.work import Work

if TYPE_CHECKING:
    from asyncdist.group.core import GroupCore

OPERATION: Final = "all_reduce"
DETAIL: Final = "the survivors (on_lost='continue')"

CLOSE_AGREEMENT_S: Final = 5.0
"""How long closing waits for an agreement on the survivors: those who need this rank's answer get it within a second,
unless their loops are busy."""


class Reduced(NamedTuple):
    """The array, and the global ranks whose values are in it: the same on all survivors."""

    array: Any
    ranks: tuple[int, ...]


class _Operation:
    """An all_reduce under way, issued as `issued` in `group` of the team, or not yet. `own` are this rank's values.

    It was `refused` if the call has raised that; it has its turn, so that the others hear of it.
    """

    __slots__ = ("array", "deadline", "group", "issued", "number", "op", "own", "refused", "tensor", "work")

    work: Work[Reduced]
    array: Array
    deadline: Deadline

    def __init__(self, number: int, tensor: Any, op: ReduceOpLike) -> None:
        self.number = number
        self.tensor = tensor
        self.op = op
        self.own: Array | None = None
        self.group: ProcessGroup | None = None
        self.issued: Work[Any] | None = None
        self.refused: Exception | None = None

    def bind(self) -> call.Call:
        """Check the arguments. The array holds this rank's values then, also if it was reduced before."""
        if self.refused is not None:
            raise self.refused
        if self.own is not None:
            self.array[...] = self.own
        bound = call.all_reduce(self.tensor, self.op)
        if bound.device is not None:
            raise TypeError("on_lost='continue' takes arrays in host memory, not a GPU's: copy it to the host first")
        if self.own is None:
            self.array = host_array(self.tensor)
            self.own = self.array.copy()
        return replace(bound, detail=DETAIL)


class Team:
    """The team of the group of `core`. `ended` says why this rank takes no part any more."""

    def __init__(self, core: GroupCore) -> None:
        self.core = core
        self.ended: BaseException | None = None
        self._called: dict[int, int] = {}
        self._done: dict[int, int] = {}
        """Operations by tag: called, and those whose result is here."""
        self._done_by_all: dict[int, int] = {}
        self._pending: dict[int, deque[_Operation]] = {}
        self._workers: dict[int, asyncio.Task[None]] = {}
        self._agreement: asyncio.Task[None] | None = None
        self._groups: list[ProcessGroup] = []
        first = core._aborted
        if isinstance(first, GroupAbortedError) and first.rank == core.world.rank and first.reason != SHRUNK:
            self.ended = first  # this rank gave the group up
        made = core.subgroup(core.ranks, core.timeout_s, None, members_only=True)
        assert made is not None, "this rank is one of them"
        self._enter(ProcessGroup(made))

    @property
    def busy(self) -> bool:
        """Whether operations are under way."""
        return bool(self._workers)

    def all_reduce(self, tensor: Any, op: ReduceOpLike, tag: int, timeout: Timeout) -> Work[Reduced]:
        """See `Collectives.all_reduce`."""
        core, group = self.core, _core(self._groups[-1])
        self._check_usable(core if len(self._groups) == 1 else group, group)
        tag = check_tag(tag)
        number = self._called[tag] = self._called.get(tag, 0) + 1
        operation = _Operation(number, tensor, op)
        if core.usable:
            operation.issued = core.issue(OPERATION, tag, timeout, operation.bind)
            operation.group = self._groups[-1]
        else:
            try:
                timeout_seconds(timeout, None)
                operation.bind()
            except Exception as error:
                operation.refused = error
                self._add(operation, tag, None)
                operation.work._retrieved = True
                raise
        self._add(operation, tag, timeout_seconds(timeout, core.timeout_s))
        return watch(operation.work) if core.watches else operation.work

    def _check_usable(self, *cores: GroupCore) -> None:
        self.core.check_usable(OPERATION)
        causes = [self.ended, *(core._aborted for core in cores if not _by_loss(core._aborted))]
        for cause in filter(None, causes):
            raise self.core.aborted_error(OPERATION, cause)

    def _add(self, operation: _Operation, tag: int, timeout_s: float | None) -> None:
        loop = self.core.world.loop
        nbytes = 0 if operation.own is None else operation.own.nbytes
        operation.deadline = Deadline.after(timeout_s, loop.time())
        sequence = None if operation.issued is None else operation.issued.sequence
        operation.work = Work(loop, OPERATION, nbytes, sequence)
        pending = self._pending.setdefault(tag, deque())
        pending.append(operation)
        if tag not in self._workers:
            name = f"all_reduce of the survivors of group {self.core.name}, tag {tag}"
            self._workers[tag] = start_task(loop, self._work(tag, pending), name=name)

    # ---- one operation after the other, for each tag

    async def _work(self, tag: int, pending: deque[_Operation]) -> None:
        try:
            while pending:
                try:
                    result = await self._complete(tag, pending[0])
                except Exception as error:
                    self._fail(pending.popleft(), error)
                else:
                    pending.popleft().work._finish(result)
                    del result
        finally:
            del self._workers[tag]
            while pending:  # the event loop ends
                self._fail(pending.popleft(), ClosedError("the event loop ended before the operation"))

    def _fail(self, operation: _Operation, error: Exception) -> None:
        operation.work._fail(error)
        self.core.remember_failure(operation.work)
        core = _core(self._groups[-1])
        if core._aborted is not None or (len(self._groups) == 1 and not self.core.usable):
            self.resign(error)

    async def _complete(self, tag: int, operation: _Operation) -> Reduced:
        while True:
            group = self._groups[-1]
            try:
                if operation.group is not group:
                    self._forget(operation)
                    left_s = operation.deadline.remaining_s(self.core.world.loop.time())
                    operation.issued = _core(group).issue(OPERATION, tag, left_s, operation.bind)
                    operation.group = group
                assert operation.issued is not None, "it is issued in that group"
                await operation.issued
                self._done[tag] = operation.number
                await group.barrier(tag=tag, timeout=operation.deadline.remaining_s(self.core.world.loop.time()))
            except (PeerLostError, GroupAbortedError) as error:
                if not _by_loss(error):
                    raise
                await self._agreed(group, operation)
                if self._done_by_all.get(tag, 0) < operation.number:  # nobody can have passed the barrier
                    self._done[tag] = operation.number - 1
                    continue
            return Reduced(operation.tensor, group.ranks)

    def _forget(self, operation: _Operation) -> None:
        """Drop the result of the operation's last try: that try failed, or holds values of lost ranks."""
        if operation.issued is not None:
            operation.issued._retrieved = True

    # ---- who survives

    def _enter(self, group: ProcessGroup) -> None:
        self._groups.append(group)
        self._agreement = None
        core = _core(group)
        core.team = self
        if core._aborted is not None or core._survivors.awaited is not None:
            self._agree()

    def aborted(self, core: GroupCore, error: BaseException, *how: Any) -> None:
        """The group, or a group of the team, was aborted; `how` is as for `GroupCore._abort`."""
        current = _core(self._groups[-1])
        if core is current:
            if _by_loss(error):
                self._agree()
        elif core is self.core and not _by_loss(error):
            current._abort(error, *how)  # who waits in a barrier there is to hear of it

    def agreement_begun(self, core: GroupCore) -> None:
        """Another rank has begun an agreement on the survivors of the group of `core`."""
        if core is _core(self._groups[-1]):
            self._agree()

    def _agree(self) -> None:
        if self._agreement is None and self.ended is None:
            name = f"survivors of group {self.core.name}"
            self._agreement = start_task(self.core.world.loop, self._agree_on(self._groups[-1]), name=name)

    async def _agree_on(self, group: ProcessGroup) -> None:
        try:
            if self.core.usable:  # nothing more is issued there, on any rank
                cause = _core(group)._aborted or GroupAbortedError("others ask who survives")
                self.core._abort(cause, FAILED, str(cause), getattr(cause, "rank", None))
            while True:
                group = await group.shrink()
                done: list[Any] = [None] * group.size
                with contextlib.suppress(PeerLostError, GroupAbortedError):
                    await group.all_gather_object(done, list(self._done.items()))
                    break
        except Exception as error:
            self.resign(error)
        else:
            self._done_by_all = {tag: min(dict(one).get(tag, 0) for one in done) for tag in self._done}
            self._enter(group)

    async def _agreed(self, group: ProcessGroup, operation: _Operation) -> None:
        """Wait for the agreement on the survivors of `group`."""
        loop, deadline = self.core.world.loop, operation.deadline
        where = self.core.where(OPERATION, operation.work.sequence)
        while group is self._groups[-1] and self.ended is None:
            self._agree()
            assert self._agreement is not None, "it was begun, or was under way"
            await asyncio.wait([self._agreement], timeout=deadline.remaining_s(loop.time()))
            if deadline.expired(loop.time()) and group is self._groups[-1] and self.ended is None:
                missing = _core(group)._survivors.awaited or ()
                text = f"{where}: the survivors have not agreed within {deadline.given_s:g} s who they are"
                raise CollectiveTimeoutError(
                    text + (f"; no answer from rank {spell_ranks(missing)}" if missing else ""), missing
                )
        if self.ended is not None:
            raise explain(where, self.ended)

    # ---- the end

    def resign(self, error: BaseException) -> None:
        """This rank takes no part any more, because of `error`: the others go on without it."""
        if self.ended is None:
            self.ended = error
            for group in self._groups:
                _core(group)._survivors.close()
            _core(self._groups[-1]).abort(f"rank {self.core.world.rank} gave up: {error}")
            if self._agreement is not None and self._agreement is not asyncio.current_task(self.core.world.loop):
                self._agreement.cancel()

    async def close(self) -> None:
        """Wait for what is under way; then answer no more."""
        while self._workers:
            await asyncio.wait(self._workers.values())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_AGREEMENT_S):
                while self._agreement is not None and not self._agreement.done():
                    await asyncio.wait([self._agreement])
        self.ended = self.ended or ClosedError("the group is closed")
        if self._agreement is not None:
            self._agreement.cancel()
        for group in self._groups:
            with contextlib.suppress(DistError):
                await group.close()


def _core(group: ProcessGroup) -> GroupCore:
    return cast("GroupCore", group._core)


def _by_loss(error: BaseException | None) -> bool:
    """Whether a group was aborted as a rank is gone, or gave it up; not by a time-out, say. True if it was not."""
    if isinstance(error, GroupAbortedError) and error.__cause__ is not None:
        error = error.__cause__
    return isinstance(error, PeerLostError | GroupAbortedError | None)
