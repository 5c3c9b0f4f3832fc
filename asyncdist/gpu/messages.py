"""Messages of GPU arrays: the announcement, which matches as any message does, and the works that wait for the data.

The sender announces the array in a message without content, in order with the pair's messages of that tag. The receiver
answers how the data is to come, or why it refuses the message. Only then does anything happen on a GPU. So receives can
be withdrawn, tags and any source work, and no kernel waits for a rank that does not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import msgpack
import numpy as np

from asyncdist.arrays.device import DeviceArray, device_flat
from asyncdist.arrays.host import decode_meta, describe, encode_meta
from asyncdist.arrays.objects import GPU_META
from asyncdist.concurrency.integers import derive_group_id
from asyncdist.cuda import Event, Runtime
from asyncdist.errors import CollectiveMismatchError, DistBackendError, DistError
from asyncdist.gpu.streams import Tail
from asyncdist.messages.work import OVER, PairWork, PairWorkOwner, RecvWork
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.protocol.frame import pack_key
from asyncdist.transport.protocol.operations import Receive, SendOp

STAGED: Final = b"s"
"""How the data is to come: through the host."""
IPC: Final = b"i"
"""Through device memory that both ends can read."""
NCCL: Final = b"n"
"""Through NCCL; the unique id follows."""
REFUSED: Final = b"r"
"""Not at all; why follows."""
UNWANTED: Final = b"u"
"""Not at all, since the group is closed there."""

MAX_ANSWER_BYTES: Final = 4096
"""Longest answer: a unique id, or why the message is refused."""

MAX_REASON: Final = 1000
"""Characters of a refusal's reason."""

_NOTHING: Final = np.empty(0, np.uint8)
_CHANNEL: Final = 0


def messages_id(group_id: int) -> int:
    """The id of what belongs to a group's messages of GPU arrays, apart from the messages themselves."""
    return derive_group_id(group_id, "gpu messages")


def answer_message(mesh: BaseMesh, group_id: int, source: int, number: int, answer: bytes) -> None:
    """Answer message `number` of global rank `source`."""
    key = pack_key(messages_id(group_id), 0, number, 0, _CHANNEL)
    with contextlib.suppress(DistError):  # the rank is gone, and its waiters hear of that
        mesh.post_send(source, SendOp(key, memoryview(answer), b"", OVER, None))


def refuse_message(mesh: BaseMesh, group_id: int, source: int, number: int, why: str) -> None:
    """Tell a sender that its message is not wanted."""
    answer_message(mesh, group_id, source, number, REFUSED + why[:MAX_REASON].encode())


class Announcement(NamedTuple):
    """What a sender says of its message. `number` counts the messages to that rank; `nccl`: whether it has NCCL."""

    number: int
    host: str
    device_id: str
    nccl: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape, start=self.dtype.itemsize)

    def encode(self) -> bytes:
        """The announcement as it travels, beside an empty message."""
        array = encode_meta(self.dtype, self.shape)
        return GPU_META + bytes(msgpack.packb([self.number, self.host, self.device_id, self.nccl, array]))

    @classmethod
    def decode(cls, meta: bytes) -> Announcement:
        """Raises ValueError for anything malformed."""
        try:
            number, host, device_id, nccl, array = msgpack.unpackb(meta[len(GPU_META) :])
            if not (
                type(number) is int and 0 <= number < 1 << 32 and isinstance(nccl, bool) and isinstance(array, bytes)
            ):
                raise ValueError("unexpected types")
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError("malformed announcement of a GPU array") from error
        return cls(number, str(host), str(device_id), nccl, *decode_meta(array))


class DeviceMessages(Protocol):
    """What moves the data: `DevicePairs`."""

    runtime: Runtime

    def answered(self, work: DeviceSendWork, answer: bytes) -> None:
        """The receiver has said how the data is to come."""

    def matched(self, work: DeviceRecvWork, announced: Announcement) -> None:
        """A receive has met a message of `work.peer`."""

    def refuse(self, source: int, number: int, why: str) -> None:
        """Tell a sender that its message is not wanted."""

    def ended(self, work: DeviceSendWork | DeviceRecvWork) -> None:
        """A work has ended, well or not."""


class DeviceSendWork(PairWork):
    """A send of a GPU array; done when the array may be written again."""

    __slots__ = ("_answer", "_messages", "array", "number", "ready", "reply")

    message: SendOp

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        operation: str,
        array: DeviceArray,
        announcement: Announcement,
        key: bytes,
        group_id: int,
        owner: PairWorkOwner,
        messages: DeviceMessages,
        peer: int,
        ready: tuple[Event, ...],
    ) -> None:
        super().__init__(loop, operation, array.nbytes, owner, peer, withdrawable=False)
        self._messages = messages
        self._answer = bytearray()
        self.array = array
        self.number = announcement.number
        self.ready = ready
        self.on_device = Tail(messages.runtime, f"{self.operation} to rank {peer}")
        self.message = SendOp(key, memoryview(b""), announcement.encode(), self, None)
        reply_key = pack_key(messages_id(group_id), 0, self.number, 0, _CHANNEL)
        self.reply = Receive(reply_key, None, self, None)

    def message_sent(self, token: object) -> None:
        """The announcement has left."""

    def allocate(self, token: object, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Room for the answer."""
        if nbytes > MAX_ANSWER_BYTES:
            raise CollectiveMismatchError(f"{self.where}: an answer of {nbytes} bytes, at most {MAX_ANSWER_BYTES}")
        self._answer = bytearray(nbytes)
        return memoryview(self._answer)

    def message_received(self, token: object, receive: Receive) -> None:
        """The answer is here."""
        if not self._done:
            self._messages.answered(self, bytes(self._answer))

    def complete(self, error: BaseException | None) -> None:
        """The data has left, or never will."""
        if self._done:
            return
        if error is None:
            self._finish(None)
        else:
            _fail(self, error)

    def _expire(self, timeout_s: float) -> None:
        _expire(self, timeout_s)

    def _end(self) -> None:
        super()._end()
        self.reply.sink = OVER
        self._messages.ended(self)


class DeviceRecvWork(RecvWork):
    """A receive into a GPU array. The result is the source: `number` of the global rank."""

    __slots__ = ("_announced", "_messages", "array", "number", "ready")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        operation: str,
        array: DeviceArray,
        key: bytes,
        owner: PairWorkOwner,
        messages: DeviceMessages,
        peer: int,
        number: Callable[[int], int] | None,
        withdrawable: bool,
        ready: tuple[Event, ...],
    ) -> None:
        self.array = device_flat(array, writable=True)
        """Where the data goes, in one dimension."""
        super().__init__(loop, operation, _NOTHING, key, owner, peer, number, withdrawable)
        self.message.view = None  # always ask
        self.nbytes = array.nbytes
        self.ready = ready
        self.on_device = Tail(messages.runtime, operation)
        self._messages = messages
        self._announced: Announcement | None = None

    def allocate(self, token: object, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Take an announcement that fits, and answer one that does not."""
        if not meta.startswith(GPU_META):
            dtype, shape = self._described(source, meta, nbytes)
            raise self._dropped(source, f"{describe(dtype, shape)} from the host, but the receive buffer is on a GPU")
        try:
            announced = Announcement.decode(meta)
        except ValueError as error:
            raise CollectiveMismatchError(f"{self.where}: rank {source} sent a {error}", source) from error
        if announced.dtype != self.array.dtype or announced.nbytes > self.array.nbytes:
            own = describe(self.array.dtype, self.array.shape)
            sent = describe(announced.dtype, announced.shape)
            self._messages.refuse(source, announced.number, f"it sent {sent}, but the receive buffer is {own}")
            raise self._dropped(source, f"{sent}, but the receive buffer is {own}")
        self._announced = announced
        return memoryview(bytearray())

    def message_received(self, token: object, receive: Receive) -> None:
        """A message is announced: have the data sent."""
        source, announced = receive.source, self._announced
        assert source is not None, "the transport sets it before it reports"
        assert announced is not None, "allocate comes before"
        if self._done:
            self._messages.refuse(source, announced.number, "its receive has ended")
            return
        self.peer = source
        self.number, self.nbytes = announced.number, announced.nbytes
        self._source = source if self._number is None else self._number(source)
        self._messages.matched(self, announced)

    def complete(self, error: BaseException | None) -> None:
        """The data is in place, or never will be."""
        if self._done:
            return
        if error is None:
            self._finish(self._source)
        else:
            self._source = None
            _fail(self, error)

    def _give_up(self, timeout_s: float) -> None:
        _expire(self, timeout_s)

    def give_back(self) -> bool:
        """A message that has come to a GPU cannot be put back among the messages."""
        return False

    def _end(self) -> None:
        super()._end()
        self._messages.ended(self)


def _fail(work: DeviceSendWork | DeviceRecvWork, error: BaseException) -> None:
    """End a message whose data was under way. The other end knows already if the end came from there."""
    if isinstance(error, DistError) and not isinstance(error, DistBackendError):
        work.message_failed(None, error)
    else:
        what = f"{error}" if isinstance(error, DistBackendError) else f"{type(error).__name__}: {error}"
        failure = DistBackendError(f"{work.where}: {what}")
        failure.__cause__ = error
        _break_pair(work, failure)


def _expire(work: DeviceSendWork | DeviceRecvWork, timeout_s: float) -> None:
    why = f"{work._described_message} is on a GPU, which cannot be stopped: the connection to rank {work.peer} ends"
    _break_pair(work, work._timeout_error(timeout_s, why))


def _break_pair(work: DeviceSendWork | DeviceRecvWork, error: DistError) -> None:
    """End the connection to the other rank together with the message, so that the other rank hears of the end.

    A GPU cannot be stopped in the middle of a message, nor wait for a message that does not come.
    """
    work._fail(error)
    work._owner.mesh.break_pair(work.peer, error)
