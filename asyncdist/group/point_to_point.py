"""The sends and receives of one group."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np

from asyncdist.arrays.device import PLAIN, DeviceArray, any_array
from asyncdist.arrays.objects import GPU_META
from asyncdist.concurrency.deadline import Timeout, timeout_seconds
from asyncdist.concurrency.integers import as_int
from asyncdist.concurrency.loop import place_of
from asyncdist.concurrency.tasks import start_task
from asyncdist.concurrency.trace import info, shows_info, warn
from asyncdist.errors import DistError, GroupAbortedError
from asyncdist.group.abort_reasons import explain
from asyncdist.group.membership import ClosedMembers
from asyncdist.inspect.dumps import site_of, slow_s_from_environ
from asyncdist.inspect.recorder import ENDED, RECORDER, GroupFacts
from asyncdist.messages.objects import RecvObjectsWork, SendObjectsWork
from asyncdist.messages.work import ANY_SOURCE, OVER, PairWork, RecvArrayWork, RecvWork, SendWork
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.protocol.frame import pack_key
from asyncdist.work import Work
from asyncdist.world.world import World

if TYPE_CHECKING:
    from asyncdist.gpu.messages import DeviceSendWork
    from asyncdist.gpu.pairs import DevicePairs

__all__ = ["Pairs", "check_tag"]

MAX_TAG: Final = 2**32 - 1
"""Largest tag: it travels as 32 bits."""
POINT_TO_POINT_MARK: Final = 0x5C5C_5C5C_5C5C_5C5C
"""Set apart from the group's own id, so that aborting its collectives leaves messages between survivors alone."""
POINT_TO_POINT_CHANNEL: Final = 0
MAX_HELD: Final = 1024
"""Messages held back for a rank that end the answers to its sends: it does not read the answers that it has."""
FORGOTTEN_NAMED: Final = 10
"""Receives that a warning names: a program has forgotten one or two, or all those of a loop."""
KEYS_KEPT: Final = 1024
"""Match keys kept by tag: a program has a few tags; one with more pays for packing keys."""


Number: TypeAlias = Callable[[int], int]


class PairOwner(Protocol):
    """What the group does for its pairs."""

    usable: bool
    """False once it is being closed, is closed, aborted or another process's."""

    def check_usable(self, operation: str) -> None:
        """Raise unless operations may be issued."""

    def where(self, operation: str, sequence: int | None = None) -> str:
        """The beginning of every message."""

    def aborted_error(self, operation: str, cause: BaseException) -> GroupAbortedError:
        """What a call raises once the group was aborted because of `cause`."""

    def ask_origin(self, ranks: Collection[int]) -> None:
        """Ask `ranks`, which messages wait for, whether they have made another group in place of this one."""

    def untold(self, work: Work[object]) -> None:
        """Keep a failed Work after all: its waiters were cancelled before they were told."""

    def remember_failure(self, work: Work[object]) -> None:
        """Keep a failed Work until the program asks about it."""


class Pairs:
    """Sends and receives under way. Peers are global ranks of members; None is any of them.

    `number` says how a receive numbers its source: None as a global rank, `group_rank` as a rank of the group.
    """

    def __init__(
        self,
        world: World,
        facts: GroupFacts,
        owner: PairOwner,
        gpu_pairs: Callable[[], DevicePairs],
        parent_id: int | None,
    ) -> None:
        """`gpu_pairs()` makes what moves GPU arrays; TypeError without a GPU. `parent_id` of a world is None."""
        self.mesh = world.mesh
        self.facts = facts
        group_id, ranks = facts.group_id, facts.ranks
        self._loop = world.loop
        self._place = place_of(world.loop)
        self._allow_pickle = world.allow_pickle
        self._group_id = group_id
        self._id = group_id ^ POINT_TO_POINT_MARK
        self._make_gpu_pairs = gpu_pairs
        self._gpu_pairs: DevicePairs | None = None
        self._ranks = ranks
        self.group_rank: Number = {rank: index for index, rank in enumerate(ranks)}.__getitem__
        self._owner = owner
        self._works: set[PairWork] = set()
        self._keys: dict[int, bytes] = {}
        self._aborted: BaseException | None = None
        self.closed_members: ClosedMembers | None = None
        """None for a world: a rank that closes it leaves, and says goodbye to all."""
        if parent_id is not None:
            self.closed_members = ClosedMembers(world, group_id, parent_id, ranks, self._waited_for, owner.ask_origin)
        self._closed_by: set[int] = set()
        self._slow_s = slow_s_from_environ(os.environ, world.loop)
        self._slow_timer: asyncio.TimerHandle | None = None
        self._seen: weakref.WeakSet[PairWork] = weakref.WeakSet()
        """Those that were under way when last looked for slow ones."""
        self._told: weakref.WeakSet[PairWork] = weakref.WeakSet()
        self._doing = world.doing
        self._telling: asyncio.Task[None] | None = None

    def send(self, tensor: object, peer: int, tag: int, timeout: Timeout, *, abandon: bool) -> PairWork:
        """Issue a send of `tensor` to `peer`. `abandon`: whether cancelling the last waiter withdraws it."""
        name = "send" if abandon else "isend"
        # A call costs fifty nanoseconds, and small messages count them: what rarely holds is looked at here.
        if not self._owner.usable or get_ident() != self._place.thread or not self._loop.is_running():
            self._check(name)
        timeout_s = None if timeout is None else timeout_seconds(timeout, None)
        array = tensor if type(tensor) is np.ndarray and tensor.dtype in PLAIN else any_array(tensor)
        key = self._keys.get(tag) or self._key(tag)
        if type(array) is DeviceArray:
            return self._post_announcement(self._gpu().send(name, array, key, self, peer), tag, timeout_s)
        return self._post_send(SendWork(self._loop, name, array, key, self, peer, abandon), tag, timeout_s)

    def send_objects(self, values: Sequence[object], peer: int, tag: int, timeout: Timeout) -> SendWork:
        """Issue a send of a list of objects to `peer`."""
        self._check("send_object_list")
        timeout_s = None if timeout is None else timeout_seconds(timeout, None)
        key = self._key(tag)
        work = SendObjectsWork(self._loop, values, self._allow_pickle, key, self, peer)
        return self._post_send(work, tag, timeout_s)

    def receive(
        self,
        tensor: object,
        peer: int | None,
        tag: int,
        timeout: Timeout,
        *,
        abandon: bool,
        number: Number | None = None,
    ) -> RecvWork:
        """Issue a receive into `tensor`. `abandon`: whether cancelling the last waiter withdraws it."""
        name = "recv" if abandon else "irecv"
        if not self._owner.usable or get_ident() != self._place.thread or not self._loop.is_running():
            self._check(name)
        timeout_s = None if timeout is None else timeout_seconds(timeout, None)
        source = ANY_SOURCE if peer is None else peer
        array = tensor if type(tensor) is np.ndarray and tensor.dtype in PLAIN else any_array(tensor)
        key = self._keys.get(tag) or self._key(tag)
        work: RecvWork
        if type(array) is DeviceArray:
            work = self._gpu().receive(name, array, key, self, source, number, abandon)
        else:
            work = RecvWork(self._loop, name, array, key, self, source, number, abandon)
        self._post(work, tag, timeout_s)
        return work

    def receive_array(
        self, peer: int | None, tag: int, max_bytes: int, timeout: Timeout, *, number: Number | None = None
    ) -> RecvArrayWork:
        """Issue a receive of an array not known beforehand."""
        timeout_s = self._check_bounded("recv_array", max_bytes, timeout)
        source = ANY_SOURCE if peer is None else peer
        work = RecvArrayWork(self._loop, self._key(tag), self, source, number, max_bytes)
        self._post(work, tag, timeout_s)
        return work

    def receive_objects(
        self,
        places: list[object],
        peer: int | None,
        tag: int,
        max_bytes: int,
        timeout: Timeout,
        *,
        number: Number | None = None,
    ) -> RecvObjectsWork:
        """Issue a receive of as many objects as there are `places`."""
        timeout_s = self._check_bounded("recv_object_list", max_bytes, timeout)
        source = ANY_SOURCE if peer is None else peer
        key = self._key(tag)
        work = RecvObjectsWork(self._loop, places, self._allow_pickle, key, self, source, number, max_bytes)
        self._post(work, tag, timeout_s)
        return work

    def pending(self) -> list[PairWork]:
        """Return all sends and receives under way."""
        return list(self._works)

    def withdraw_receives(self) -> None:
        """Withdraw receives that nothing matched, as the group closes; warn of those never asked about."""
        forgotten = []
        for work in self.pending():
            if isinstance(work, RecvWork):
                unasked = work.is_unasked()
                if work.cancel() and unasked:
                    forgotten.append(work)
        if forgotten:
            named = ", ".join(work.call for work in forgotten[:FORGOTTEN_NAMED])
            more = len(forgotten) - FORGOTTEN_NAMED
            text = (
                f"{self._owner.where('close')}: never awaited, and dropped as the group closes: {named}"
                + (f" and {more} more" if more > 0 else "")
                + "; await each Work, or cancel() it"
                + (
                    ""
                    if "issued at" in named
                    else " (python -X dev and ASYNCDIST_CHECK=full show the lines of the calls)"
                )
            )
            # Later: where warnings are errors, the group is to be closed all the same.
            self._loop.call_soon(warnings.warn_explicit, text, RuntimeWarning, "asyncdist", 0)

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted is not None

    def abort(self, error: BaseException) -> None:
        """Fail everything under way; arrays are free when this returns."""
        if self._aborted is None:
            self._aborted = error
            self._stop_asking()
            self.mesh.drop_group(self._key(0)[:8])
            if self._gpu_pairs is not None:
                self._gpu_pairs.abort()
            for work in self.pending():
                work._fail(explain(work.where, error))

    def drop_unmatched(self) -> None:
        """Throw away messages that were not received, those still to come too, as the group is closed.

        Else they would take up memory, and their senders' credit, for as long as the world lasts.
        """
        discarded = partial(_discarded, self.mesh, self._group_id)
        self.mesh.drop_group(self._key(0)[:8], discarded)

    def where(self, operation: str, peer: int) -> str:
        """The beginning of every message about an operation with global rank `peer`."""
        other = "any source" if peer == ANY_SOURCE else f"rank {peer}"
        return f"{self._owner.where(operation)} ({other})"

    def ended(self, work: PairWork) -> None:
        """A Work has ended, well or not."""
        self._works.discard(work)
        if work._error is not None:
            self._owner.remember_failure(work)

    def untold(self, work: PairWork) -> None:
        """A Work has failed, and its waiters were cancelled before they were told."""
        self._owner.untold(work)

    def refuse_gpu_array(self, source: int, meta: bytes) -> None:
        """Tell the sender of a GPU array that a receive of host arrays has met its announcement."""
        from asyncdist.gpu.messages import Announcement, refuse_message

        with contextlib.suppress(ValueError):  # malformed: no sender waits for an answer
            number = Announcement.decode(meta).number
            refuse_message(self.mesh, self._group_id, source, number, "it is received on the host")

    def peer_lost(self, rank: int, error: BaseException) -> None:
        """A rank is gone: the transport fails its messages, but not those of GPU arrays."""
        if self._gpu_pairs is not None:
            self._gpu_pairs.peer_lost(rank, error)

    def member_closed(self, rank: int) -> None:
        """A member has closed the group: all that it sent is here, or on its way to a receive."""
        self._closed_by.add(rank)
        self.fail_vain_receives()

    def fail_vain_receives(self) -> None:
        """Fail receives whose message will never be sent."""
        if self._closed_by:
            for work in self.pending():
                self._fail_if_vain(work)

    def _fail_if_vain(self, work: PairWork) -> None:
        others = [rank for rank in self._ranks if rank != self.mesh.rank] if work.peer == ANY_SOURCE else [work.peer]
        to_itself = work.peer == ANY_SOURCE and self.mesh.cores[self.mesh.rank] is not None
        open_there = [rank for rank in others if rank not in self._closed_by and not self.mesh.is_gone(rank)]
        closed = [rank for rank in others if rank in self._closed_by]
        if closed and not open_there and not to_itself and isinstance(work, RecvWork):
            work.never_sent(closed)

    def _waited_for(self) -> set[int]:
        return {work.peer for work in self._works}

    def _stop_asking(self) -> None:
        if self._slow_timer is not None:
            self._slow_timer.cancel()
        if self._telling is not None:
            self._telling.cancel()
        if self.closed_members is not None:
            self.closed_members.stop()

    async def close(self) -> None:
        """Release what the messages of GPU arrays went through; nothing is under way."""
        self._stop_asking()
        if self._gpu_pairs is not None:
            await self._gpu_pairs.close()

    def _gpu(self) -> DevicePairs:
        if self._gpu_pairs is None:
            self._gpu_pairs = self._make_gpu_pairs()
        return self._gpu_pairs

    def _check(self, operation: str) -> None:
        self._owner.check_usable(operation)
        if self._aborted is not None:
            raise self._owner.aborted_error(operation, self._aborted)

    def _check_bounded(self, operation: str, max_bytes: int, timeout: Timeout) -> float | None:
        """Check what a receive of anything up to `max_bytes` is given; return its time-out."""
        self._check(operation)
        timeout_s = timeout_seconds(timeout, None)
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}")
        return timeout_s

    def _post_send(self, work: SendWork, tag: int, timeout_s: float | None) -> SendWork:
        if RECORDER.on:
            RECORDER.message(self.facts, tag, work, work.message.meta, self._loop)
        try:
            core = self.mesh.cores[work.peer]
            complete = (self.mesh.peer(work.peer) if core is None else core).post_send(work.message)
        except DistError as error:
            work.message_failed(None, error)
            return work
        if complete:
            work._done = True  # no task can be waiting for it yet
            if work.entry is not None:
                work.entry[ENDED] = monotonic()
            work.message.sink = OVER
        else:
            self._started(work, timeout_s)
        return work

    def _post_announcement(self, work: DeviceSendWork, tag: int, timeout_s: float | None) -> DeviceSendWork:
        if RECORDER.on:
            RECORDER.message(self.facts, tag, work, work.message.meta, self._loop)
        self._works.add(work)
        try:
            self.mesh.post_receive(work.peer, work.reply)
            self.mesh.post_send(work.peer, work.message)
        except DistError as error:
            work.message_failed(None, error)
        else:
            self._started(work, timeout_s)
        return work

    def _post(self, work: RecvWork, tag: int, timeout_s: float | None) -> None:
        receive = work.message
        if RECORDER.on:
            RECORDER.message(self.facts, tag, work, receive.expects, self._loop)
        try:
            if work.peer == ANY_SOURCE:
                complete = self.mesh.post_receive_any(self._ranks, receive)
            else:
                core = self.mesh.cores[work.peer]
                complete = (self.mesh.peer(work.peer) if core is None else core).post_receive(receive)
        except DistError as error:
            work.message_failed(None, error)
            return
        if complete:
            work.message_received(None, receive)
        elif timeout_s is None and self.closed_members is None and not work._done:
            self._add(work)  # nothing else is to be watched
        else:
            self._started(work, timeout_s)

    def _started(self, work: PairWork, timeout_s: float | None) -> None:
        if work._done:
            return
        self._add(work)
        if timeout_s is not None:
            work.expire_after(timeout_s)
        if self.closed_members is not None:
            self.closed_members.watch(work.peer)
            if self._closed_by:
                self._fail_if_vain(work)

    def _add(self, work: PairWork) -> None:
        self._works.add(work)
        if self._slow_timer is None and self._slow_s < math.inf:
            self._slow_timer = self._loop.call_later(self._slow_s, self._look_for_slow)

    def _look_for_slow(self) -> None:
        """Say once in the log which messages were under way all the time since the last look, or since before it."""
        self._slow_timer = None
        slow = [work for work in self._works if work in self._seen and work not in self._told]
        if slow:
            telling = self._tell_slow(slow[:FORGOTTEN_NAMED])
            self._telling = start_task(self._loop, telling, name="asks whom messages wait for")
        self._told.update(slow)
        self._seen = weakref.WeakSet(self._works)
        if len(self._told) < len(self._works):
            self._slow_timer = self._loop.call_later(self._slow_s, self._look_for_slow)

    async def _tell_slow(self, slow: Sequence[PairWork]) -> None:
        """Say in the log whom these wait for and, of those that are shown, what the other rank does."""
        # A server may wait long for its clients.
        says = {work: info if isinstance(work, RecvWork) else warn for work in slow}
        shown = [work.peer for work, say in says.items() if work.peer != ANY_SOURCE and (say is warn or shows_info())]
        does: dict[int, str] = {}
        try:
            does = await self._doing(list(dict.fromkeys(shown)))
        finally:
            for work, say in says.items():
                what = f" for rank {work.peer}: {does[work.peer]}" if work.peer in does else ""
                site = "" if work.entry is None else site_of(work.entry)
                at = f"; called at {site}" if site else ""
                say("%s: waits for at least %g s%s%s", work.where, self._slow_s, what, at)

    def _key(self, tag: int) -> bytes:
        key = self._keys.get(tag)
        if key is None:
            key = pack_key(self._id, check_tag(tag), 0, 0, POINT_TO_POINT_CHANNEL)
            if len(self._keys) < KEYS_KEPT:
                self._keys[tag] = key
        return key


def _discarded(mesh: BaseMesh, group_id: int, source: int, meta: bytes) -> None:
    """Answer the sender of a GPU array whose message is thrown away, as its group is closed here."""
    if not meta.startswith(GPU_META):
        return
    from asyncdist.gpu.messages import UNWANTED, Announcement, answer_message

    with contextlib.suppress(DistError, ValueError):  # this rank leaves; malformed: nobody waits for an answer
        if mesh.peer(source).statistics()["held"] < MAX_HELD:  # perhaps only the sender has connected until now
            answer_message(mesh, group_id, source, Announcement.decode(meta).number, UNWANTED)


def check_tag(tag: int) -> int:
    """Return `tag` as an int. Raises TypeError for anything but a whole number, ValueError outside 0 .. MAX_TAG."""
    tag = as_int(tag, "tag must be an int")
    if not 0 <= tag <= MAX_TAG:
        raise ValueError(f"tag must be between 0 and {MAX_TAG}, got {tag}")
    return tag
