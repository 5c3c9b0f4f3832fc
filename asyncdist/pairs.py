"""Pairs: the point-to-point operations of one group."""

from __future__ import annotations

from typing import Any, Final, Protocol

from asyncdist.arrays import Flat, encode_meta, host_array
from asyncdist.backend.point_to_point import ANY_SOURCE, RecvArrayWork, RecvWork, SendWork
from asyncdist.deadline import Timeout, timeout_seconds
from asyncdist.errors import DistError, PeerLostError
from asyncdist.executor.work import Work
from asyncdist.transport.frame import pack_key
from asyncdist.transport.matching import Receive, SendOp
from asyncdist.world import World

__all__ = ["PairOwner", "Pairs"]

POINT_TO_POINT_MARK: Final = 0x5C5C_5C5C_5C5C_5C5C
"""Set apart from the group's own id, so that aborting its collectives leaves messages between survivors alone."""
POINT_TO_POINT_CHANNEL: Final = 0


class PairOwner(Protocol):
    """What the group does for its pairs."""

    _aborted: BaseException | None

    def check_usable(self, operation: str) -> None:
        """Raise unless operations may be issued."""

    def where(self, operation: str, sequence: int | None = None) -> str:
        """The beginning of every message."""

    def remember_failure(self, work: Work[Any]) -> None:
        """Keep a failed work until somebody asks about it."""


class Pairs:
    """Sends and receives under way. Ranks in arguments are group ranks."""

    def __init__(self, world: World, group_id: int, ranks: tuple[int, ...], owner: PairOwner) -> None:
        self._world = world
        self._mesh = world.mesh
        self._id = group_id ^ POINT_TO_POINT_MARK
        self._ranks = ranks
        self._group_rank = {rank: index for index, rank in enumerate(ranks)}
        self._owner = owner
        self._works: set[SendWork | RecvWork] = set()
        self._aborted: BaseException | None = None

    def send(self, tensor: object, dst: int, tag: int, timeout: Timeout) -> SendWork:
        """Issue a send of `tensor` to group rank `dst`."""
        self._check("isend")
        array = host_array(tensor)
        timeout_s = timeout_seconds(timeout, None)
        flat = Flat(array, writable=False)
        peer = self._ranks[dst]
        work = SendWork(
            self._world.loop, "isend", flat.octets.nbytes, self._mesh, peer, self._where("isend", dst), self._ended
        )
        work.flat = flat
        meta = encode_meta(array.dtype, array.shape)
        operation = SendOp(self._key(tag), flat.octets, meta, work, None)
        try:
            complete = self._mesh.post_send(peer, operation)
        except PeerLostError as error:
            work.message_failed(None, error)
            return work
        if complete:
            work._finish(None)
        else:
            self._started(work, timeout_s)
        return work

    def receive(
        self,
        tensor: object,
        src: int | None,
        tag: int,
        timeout: Timeout,
        *,
        abandon: bool,
        in_global_ranks: bool = False,
    ) -> RecvWork:
        """Issue a receive into `tensor` from group rank `src`, or from any.

        `abandon`: whether cancelling the last waiter withdraws it. `in_global_ranks`: how its source is numbered.
        """
        name = "recv" if abandon else "irecv"
        self._check(name)
        array = host_array(tensor)
        work = RecvWork(
            self._world.loop, name, array.nbytes, self._mesh, self._source(src), self._where(name, src), self._ended
        )
        work.bind(array, _same if in_global_ranks else self._number, abandon)
        self._post(work, src, tag, timeout_seconds(timeout, None))
        return work

    def receive_array(
        self, src: int | None, tag: int, max_bytes: int, timeout: Timeout, *, in_global_ranks: bool = False
    ) -> RecvArrayWork:
        """Issue a receive of an array not known beforehand."""
        self._check("recv_array")
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}")
        work = RecvArrayWork(
            self._world.loop,
            "recv_array",
            0,
            self._mesh,
            self._source(src),
            self._where("recv_array", src),
            self._ended,
        )
        work.bind_new(max_bytes, _same if in_global_ranks else self._number)
        self._post(work, src, tag, timeout_seconds(timeout, None))
        return work

    def pending(self) -> list[SendWork | RecvWork]:
        """Everything under way."""
        return list(self._works)

    def withdraw_receives(self) -> None:
        """Withdraw receives that nothing matched."""
        for work in self.pending():
            if isinstance(work, RecvWork):
                work.cancel()

    def abort(self, error: BaseException) -> None:
        """Fail everything under way; arrays are free when this returns."""
        if self._aborted is None:
            self._aborted = error
            self._mesh.drop_group(pack_key(self._id, 0, 0, 0, 0)[:8], error)
            for work in self.pending():
                work._fail(error)

    def _check(self, operation: str) -> None:
        self._owner.check_usable(operation)
        if self._aborted is not None:
            raise self._aborted

    def _post(self, work: RecvWork, src: int | None, tag: int, timeout_s: float | None) -> None:
        receive = work.receive = Receive(self._key(tag), None, work, None)
        try:
            if src is None:
                complete = self._mesh.post_receive_any(self._ranks, receive)
            else:
                complete = self._mesh.post_receive(self._ranks[src], receive)
        except DistError as error:
            work.message_failed(None, error)
            return
        if complete:
            work.complete(receive)
        else:
            self._started(work, timeout_s)

    def _started(self, work: SendWork | RecvWork, timeout_s: float | None) -> None:
        if work.done():
            return
        self._works.add(work)
        if timeout_s is not None:
            work.expire_after(timeout_s)

    def _ended(self, work: Any) -> None:
        self._works.discard(work)
        if work._error is not None:
            self._owner.remember_failure(work)

    def _key(self, tag: int) -> bytes:
        return pack_key(self._id, tag, 0, 0, POINT_TO_POINT_CHANNEL)

    def _source(self, src: int | None) -> int:
        return ANY_SOURCE if src is None else self._ranks[src]

    def _number(self, rank: int) -> int:
        return self._group_rank[rank]

    def _where(self, operation: str, peer: int | None) -> str:
        other = "any source" if peer is None else f"rank {self._ranks[peer]}"
        return f"{self._owner.where(operation)} ({other})"


def _same(rank: int) -> int:
    return rank
