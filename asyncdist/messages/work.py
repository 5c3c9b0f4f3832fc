"""Point-to-point operations: Works that the transport reports to directly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from asyncdist.arrays.host import Array, Flat, decode_meta, describe, encode_meta, human_bytes
from asyncdist.arrays.objects import GPU_META, OBJECT_META
from asyncdist.concurrency.integers import spell_ranks
from asyncdist.errors import ClosedError, CollectiveMismatchError, CollectiveTimeoutError, DistStoreError, PeerLostError
from asyncdist.inspect.recorder import NBYTES, PEER, SHAPE
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.protocol.frame import unpack_key
from asyncdist.transport.protocol.operations import Receive, SendOp
from asyncdist.work import Work

ANY_SOURCE: Final = -1

NOTHING: Final = np.empty(0, np.uint8)
"""The array of a receive that makes room once its message comes."""


class PairWorkOwner(Protocol):
    """What issued a Work: the group's `Pairs`."""

    mesh: BaseMesh

    def where(self, operation: str, peer: int) -> str:
        """The beginning of every message about an operation with global rank `peer`."""

    def ended(self, work: PairWork) -> None:
        """The Work has ended, well or not."""

    def untold(self, work: PairWork) -> None:
        """This Work has failed, and its waiters were cancelled before they were told."""

    def refuse_gpu_array(self, source: int, meta: bytes) -> None:
        """Tell the sender of a GPU array that a receive of host arrays has met its announcement."""


class _Over:
    """Takes the transport's reports once a Work has ended, and ignores them."""

    def message_sent(self, token: object) -> None:
        pass

    def message_received(self, token: object, receive: Receive) -> None:
        pass

    def message_failed(self, token: object, error: BaseException) -> None:
        pass

    def allocate(self, token: object, source: int, nbytes: int, meta: bytes) -> memoryview:
        raise ClosedError("the receive has ended")


OVER: Final = _Over()
"""Takes the place of a Work at its message: a cycle of the two would keep arrays for the garbage collector."""


class PairWork(Work[Any]):
    """A send or a receive, with a deadline of its own, whose expiry concerns no other message.

    `peer` is the other global rank or ANY_SOURCE. `withdrawable`: whether cancelling the last waiter withdraws it.
    """

    __slots__ = ("_owner", "_timer", "_withdrawable", "message", "peer")

    message: SendOp | Receive

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        operation: str,
        nbytes: int,
        owner: PairWorkOwner,
        peer: int,
        withdrawable: bool,
    ) -> None:
        super().__init__(loop, operation, nbytes)
        self._owner = owner
        self._withdrawable = withdrawable
        self._spinner = owner.mesh.spinner
        self._timer: asyncio.TimerHandle | None = None
        self.peer = peer

    @property
    def where(self) -> str:
        """The beginning of every message about this operation."""
        return self._owner.where(self.operation, self.peer)

    def expire_after(self, timeout_s: float) -> None:
        """Bound the operation; called once, right after posting."""
        if not self._done:
            self._timer = self._loop.call_later(timeout_s, self._expire, timeout_s)

    def _expire(self, timeout_s: float) -> None:
        raise NotImplementedError

    def _timeout_error(self, timeout_s: float, why: str) -> CollectiveTimeoutError:
        missing = () if self.peer == ANY_SOURCE else (self.peer,)
        return CollectiveTimeoutError(f"{self.where}: did not end within {timeout_s:g} s: {why}", missing)

    @property
    def _tag(self) -> int:
        return unpack_key(self.message.key).tag

    @property
    def _described_message(self) -> str:
        return f"the message ({human_bytes(self.nbytes)}, tag {self._tag})"

    def _withdraw(self) -> bool:
        """Take the message back if its other end has not matched it, as far as this rank knows."""
        return False

    def cancel(self) -> bool:
        """Withdraw the message if it has not matched; True if it was withdrawn. No other message is lost."""
        if self._done or not self._withdraw():
            return False
        self._retrieved = True
        self._fail(ClosedError(f"{self.where}: was withdrawn"))
        return True

    def _abandoned(self) -> None:
        if self._withdrawable:
            self.cancel()

    def _end(self) -> None:
        super()._end()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.message.sink = OVER
        self._owner.ended(self)

    def _untold(self) -> None:
        self._owner.untold(self)

    def message_sent(self, token: object) -> None:
        """A send's buffer may be reused."""
        raise AssertionError("a receive sends nothing")

    def message_received(self, token: object, receive: Receive) -> None:
        """A receive's message is in its place."""
        raise AssertionError("a send receives nothing")

    def allocate(self, token: object, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Where a receive's message goes."""
        raise AssertionError("a send receives nothing")

    def message_failed(self, token: object, error: BaseException) -> None:
        """The transport gave the message up."""
        if self._done:
            return
        if isinstance(error, PeerLostError):
            explained = PeerLostError(f"{self.where}: {error}", error.rank, error.left)
            explained.__cause__ = error.__cause__
            error = explained
        elif isinstance(error, CollectiveTimeoutError):
            error = CollectiveTimeoutError(f"{self.where}: {error}", error.missing)
        elif isinstance(error, DistStoreError):  # it is not known where the peer listens
            error = DistStoreError(f"{self.where}: {error}")
        self._fail(error)


class SendWork(PairWork):
    """A send; done when its buffer may be reused."""

    __slots__ = ()

    message: SendOp

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        operation: str,
        array: Array,
        key: bytes,
        owner: PairWorkOwner,
        peer: int,
        withdrawable: bool,
    ) -> None:
        octets = array.ravel().view(np.uint8).data  # of a copy, where the array is not contiguous
        super().__init__(loop, operation, octets.nbytes, owner, peer, withdrawable)
        self.message = SendOp(key, octets, encode_meta(array.dtype, array.shape), self, None)

    def message_sent(self, token: object) -> None:
        """The buffer may be reused."""
        if not self._done:
            self._finish(None)

    def _withdraw(self) -> bool:
        return self._owner.mesh.withdraw_send(self.peer, self.message)

    def _expire(self, timeout_s: float) -> None:
        mesh, peer, message = self._owner.mesh, self.peer, self._described_message
        if self._withdraw():
            known = peer == mesh.rank or mesh.is_connected(peer)
            why = f"rank {peer} has posted no receive for it" if known else f"rank {peer} is not connected yet"
            self._fail(self._timeout_error(timeout_s, f"{why}; {message} is withdrawn"))
        elif mesh.give_up(peer, self.message):
            why = f"rank {peer} had received only a part; the rest of {message} is not sent"
            self._fail(self._timeout_error(timeout_s, why))
        else:
            self._finish(None)


class RecvWork(PairWork):
    """A receive into an array; its result is the source rank, as `number` numbers it."""

    __slots__ = ("_array", "_copy", "_number", "_octets")

    message: Receive

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        operation: str,
        array: Array,
        key: bytes,
        owner: PairWorkOwner,
        peer: int,
        number: Callable[[int], int] | None,
        withdrawable: bool,
    ) -> None:
        flat = None if array.flags.carray else Flat(array, writable=True)
        octets = array.reshape(-1).view(np.uint8).data if flat is None else flat.octets
        super().__init__(loop, operation, octets.nbytes, owner, peer, withdrawable)
        self._array = array
        self._octets = octets
        self._copy = flat  # of an array that is not contiguous
        self._number = number
        self.message = Receive(key, None, self, None, encode_meta(array.dtype, array.shape), octets)

    def allocate(self, token: object, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Return the bytes that the message goes to, or refuse the message."""
        dtype, shape = self._described(source, meta, nbytes)
        array = self._array
        if dtype != array.dtype or nbytes > array.nbytes:
            buffer = describe(array.dtype, array.shape)
            raise self._dropped(source, f"{describe(dtype, shape)}, but the receive buffer is {buffer}")
        return self._octets[:nbytes]

    def message_failed(self, token: object, error: BaseException) -> None:
        """The transport gave the receive up."""
        if isinstance(error, PeerLostError) and error.left:  # in order, so that no message was under way
            self._retrieved = True  # had this rank closed first, nothing would be said of it either
        super().message_failed(token, error)

    def _dropped(self, source: int, what: str) -> CollectiveMismatchError:
        """The error of a message that does not fit this receive."""
        text = f"{self.where}: rank {source} sent {what}; the message is dropped, the pair stays usable"
        return CollectiveMismatchError(text, source)

    def _described(self, source: int, meta: bytes, nbytes: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
        try:
            dtype, shape = decode_meta(meta)
        except ValueError as error:
            if meta.startswith(GPU_META):
                self._owner.refuse_gpu_array(source, meta)
                raise self._dropped(source, "an array on a GPU, but it is received on the host") from None
            if meta == OBJECT_META:
                raise self._dropped(source, "objects, which recv_object_list receives") from None
            raise CollectiveMismatchError(f"{self.where}: rank {source} sent a message with {error}", source) from error
        elements = 1
        for extent in shape:
            elements *= extent
        if elements * dtype.itemsize != nbytes:
            raise CollectiveMismatchError(
                f"{self.where}: rank {source} describes {describe(dtype, shape)}, but sent {nbytes} bytes", source
            )
        return dtype, shape

    def message_received(self, token: object, receive: Receive) -> None:
        """The message is in its place."""
        if self._done:
            return
        source = receive.source
        assert source is not None  # the transport sets it before it reports
        if self._copy is not None:
            try:
                self._copy.write_back()
            except ValueError as error:  # its owner has changed it meanwhile
                self._fail(ValueError(f"{self.where}: the array cannot be written any more: {error}"))
                return
        self.nbytes = receive.nbytes
        entry = self.entry
        if entry is not None and (receive.meta is not receive.expects or source != self.peer):
            entry[PEER], entry[NBYTES], entry[SHAPE] = source, receive.nbytes, receive.meta
        self._source = source if self._number is None else self._number(source)
        self._finish(self._source)

    def _withdraw(self) -> bool:
        return self._owner.mesh.withdraw(self.message)

    def is_unasked(self) -> bool:
        """Whether the program has never asked about its outcome."""
        return not self._retrieved and (self._waiters, self._callbacks, self._listener) == (None, None, None)

    @property
    def call(self) -> str:
        """The call, for messages, and its line where that is known."""
        source = "any rank" if self.peer == ANY_SOURCE else f"rank {self.peer}"
        place = getattr(self, "_issued_at", None)
        at = f", issued at {Path(place[0]).name}:{place[1]}" if place is not None else ""
        return f"{self.operation} of tag {self._tag} from {source}{at}"

    def never_sent(self, closed: Sequence[int]) -> None:
        """Fail, unless a message has matched: the ranks that could send one `closed` the group, or left."""
        if not self._owner.mesh.withdraw(self.message):
            return
        self._retrieved = True  # as where a rank has left
        ranks = spell_ranks(closed)
        why = f"rank {ranks} has closed the group without sending this"
        if self.peer == ANY_SOURCE:
            why = f"nobody can send this any more: rank {ranks} closed the group, and all others are gone"
        self._fail(CollectiveMismatchError(f"{self.where}: {why}", closed[0]))

    def _unnoticed(self) -> None:
        if self.give_back():
            self._source = None
            self._retrieved = True
            self._error = ClosedError(f"{self.where}: was withdrawn")

    def give_back(self) -> bool:
        """Undo a receive that has ended well, if its last waiter was cancelled before it was told.

        True if it was undone: the message goes to the next receive, as if this one had been withdrawn in time.
        """
        if not self._withdrawable or not self._done or self._error is not None:
            return False
        self._owner.mesh.put_back(self.message, bytes(self._octets[: self.message.nbytes]))
        return True

    def _expire(self, timeout_s: float) -> None:
        if self._withdraw():
            sender = "no rank has sent a" if self.peer == ANY_SOURCE else f"rank {self.peer} has sent no"
            why = f"{sender} message of tag {self._tag} for it; the receive is withdrawn"
            self._fail(self._timeout_error(timeout_s, why))
        else:
            assert self.message.source is not None  # it has matched
            self.peer = self.message.source
            self._give_up(timeout_s)

    def _give_up(self, timeout_s: float) -> None:
        """End a message that is coming in; its sender is told, and all else goes on."""
        self._owner.mesh.give_up(self.peer, self.message)
        why = f"only a part of a message of tag {self._tag} has come from rank {self.peer}; it is thrown away"
        self._fail(self._timeout_error(timeout_s, why))


class RecvArrayWork(RecvWork):
    """A receive of an array of the sender's shape and dtype, at most `max_bytes` large; its result is the array."""

    __slots__ = ("_max_bytes",)

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        key: bytes,
        owner: PairWorkOwner,
        peer: int,
        number: Callable[[int], int] | None,
        max_bytes: int,
    ) -> None:
        super().__init__(loop, "recv_array", NOTHING, key, owner, peer, number, withdrawable=True)
        self.message.view = None  # always ask
        self._max_bytes = max_bytes

    def allocate(self, token: object, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Allocate the array the message describes."""
        dtype, shape = self._described(source, meta, nbytes)
        if nbytes > self._max_bytes:
            size = f"{human_bytes(nbytes)}, above max_bytes={human_bytes(self._max_bytes)}"
            raise self._dropped(source, f"{describe(dtype, shape)}, {size}")
        try:
            self._array = np.empty(shape, dtype)
        except ValueError as error:  # without elements, but with extents no array has
            raise CollectiveMismatchError(f"{self.where}: rank {source} describes {shape}: {error}", source) from error
        self._octets = self._array.reshape(-1).view(np.uint8).data
        return self._octets

    def _finish(self, result: Any) -> None:
        super()._finish(self._array)
