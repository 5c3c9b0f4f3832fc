"""Messages of GPU arrays: their announcement, which matches as any message does, and the works that wait for the data.

The sender announces the array in a message without content, in its place among the pair's messages of that tag. Whoever
receives it answers how the data is to come, or why it is refused; only then does anything happen on a GPU. So receives
can be withdrawn, tags and any source work, and no kernel waits for a rank that does not come.
"""

from __future__ import annotations

import asyncio
import contextlib
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

__all__ = [
    "IPC",
    "MAX_ANSWER_BYTES",
    "NCCL",
    "REFUSED",
    "STAGED",
    "UNWANTED",
    "Announcement",
    "DeviceMessages",
    "DeviceRecvWork",
    "DeviceSendWork",
    "answer_message",
    "messages_id",
    "refuse_message",
]

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
        mesh.post_send(source, SendOp(key, memoryview(answer), b"", _Unasked(), None))


def refuse_message(mesh: BaseMesh, group_id: int, source: int, number: int, why: str) -> None:
    """Tell a sender that its message is not wanted."""
    answer_message(mesh, group_id, source, number, REFUSED + why[:MAX_REASON].encode())


class Announcement(NamedTuple):
    """What a sender says of its message. `number` counts those to that rank; `nccl` whether it could use that."""

    number: int
    host: str
    device_id: str
    nccl: bool
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size

    def encode(self) -> bytes:
        """As it travels, beside an empty message."""
        array = encode_meta(self.dtype, self.shape)
        return GPU_META + bytes(msgpack.packb([self.number, self.host, self.device_id, self.nccl, array]))

    @classmethod
    def decode(cls, meta: bytes) -> Announcement:
        """Raises ValueError for anything malformed."""
        try:
            number, host, device_id, nccl, array = msgpack.unpackb(meta[len(GPU_META) :])
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise ValueError("malformed announcement of a GPU array") from error
        if type(number) is not int or not 0 <= number < 1 << 32:
            raise ValueError("malformed announcement of a GPU array")
        if not (isinstance(nccl, bool) and isinstance(array, bytes)):
            raise ValueError("malformed announcement of a GPU array")
        return cls(number, str(host), str(device_id), nccl, *decode_meta(array))


class DeviceMessages(Protocol):
    """What moves the data: `DevicePairs`."""

    runtime: Runtime

    def answered(self, work: DeviceSendWork, answer: bytes) -> None:
        """The receiver says how."""

    def matched(self, work: DeviceRecvWork, announcement: Announcement, source: int) -> None:
        """A receive has met a message."""

    def refuse(self, source: int, number: int, why: str) -> None:
        """Tell a sender that its message is not wanted."""

    def ended(self, work: DeviceSendWork | DeviceRecvWork) -> None:
        """A work has ended, well or not."""


class DeviceSendWork(PairWork):
    """A send of a GPU array; done when it may be written again."""

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
        why = f"{self._described_message} is on a GPU, which cannot be stopped: the connection to rank {self.peer} ends"
        _break_pair(self, self._timeout_error(timeout_s, why))

    def _end(self) -> None:
        super()._end()
        self.reply.sink = OVER
        self._messages.ended(self)


class DeviceRecvWork(RecvWork):
    """A receive into a GPU array; its result is the source rank, as `number` numbers it."""

    __slots__ = ("_announced", "_messages", "array", "ready")

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
        """Where the data goes, as one dimension."""
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
            raise CollectiveMismatchError(
                f"{self.where}: rank {source} sent {describe(dtype, shape)} from the host, but the receive buffer is "
                "on a GPU; the message is dropped, the pair stays usable",
                source,
            )
        try:
            announced = Announcement.decode(meta)
        except ValueError as error:
            raise CollectiveMismatchError(f"{self.where}: rank {source} sent a {error}", source) from error
        if announced.dtype != self.array.dtype or announced.nbytes > self.array.nbytes:
            own = describe(self.array.dtype, self.array.shape)
            sent = describe(announced.dtype, announced.shape)
            self._messages.refuse(source, announced.number, f"it sent {sent}, but the receive buffer is {own}")
            raise CollectiveMismatchError(
                f"{self.where}: rank {source} sent {sent}, but the receive buffer is {own}; the message is dropped, "
                "the pair stays usable",
                source,
            )
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
        self.nbytes = announced.nbytes
        self._source = source if self._number is None else self._number(source)
        self._messages.matched(self, announced, source)

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
        why = f"{self._described_message} is on a GPU, which cannot be stopped: the connection to rank {self.peer} ends"
        _break_pair(self, self._timeout_error(timeout_s, why))

    def give_back(self) -> bool:
        """What has come to a GPU cannot be put back among the messages."""
        return False

    def _end(self) -> None:
        super()._end()
        self._messages.ended(self)


def _fail(work: DeviceSendWork | DeviceRecvWork, error: BaseException) -> None:
    """End a message whose data was under way. The other end knows, if the end came from there."""
    if isinstance(error, DistError) and not isinstance(error, DistBackendError):
        work.message_failed(None, error)
    else:
        what = f"{error}" if isinstance(error, DistBackendError) else f"{type(error).__name__}: {error}"
        failure = DistBackendError(f"{work.where}: {what}")
        failure.__cause__ = error
        _break_pair(work, failure)


def _break_pair(work: DeviceSendWork | DeviceRecvWork, error: DistError) -> None:
    """A GPU cannot be stopped in the middle of a message, nor wait for one that does not come.

    So the connection to the other rank ends with it, which is how that hears of it.
    """
    work._fail(error)
    work._owner.mesh.break_pair(work.peer, error)


class _Unasked:
    """The sink of answers: nothing waits for an answer to have left."""

    def message_sent(self, token: Any) -> None:
        """It has left."""

    def message_received(self, token: Any, receive: Receive) -> None:
        """Never: it is a send."""

    def message_failed(self, token: Any, error: BaseException) -> None:
        """The rank is gone; its waiters hear of that."""

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Never: it is a send."""
        raise AssertionError("a send receives nothing")
