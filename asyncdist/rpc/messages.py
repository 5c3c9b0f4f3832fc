"""What two ranks say to each other about calls: heads, keys, and objects whose large arrays travel apart.

A call is a message from caller to callee. Its meta is a head (kind, number of the call, an argument), its payload the
object that `arrays.objects` makes of `[name, args, kwargs]`. Notes, which follow under the same key and so in order,
are heads alone. The caller posts a receive for each answer, whose key has the number of the call, so that the
transport finds the call, and fails it where the callee is lost. Arrays above APART_BYTES follow as messages of their
own, straight from array to array.

| kind | from | argument | payload | answered by |
| --- | --- | --- | --- | --- |
| CALL | caller | id of an object, 0 for a registered function | name, args, kwargs | RESULT or FAILURE |
| CREATE | caller | as CALL | as CALL | RESULT, as the object stays; or FAILURE |
| STREAM | caller | as CALL | as CALL | ITEMs, then RESULT or FAILURE |
| CANCEL | caller | | | |
| MORE | caller | how many more ITEMs may come | | |
| RELEASE | caller | of a CREATE by number: its object is not needed any more | | |
| RESULT, ITEM | callee | | the value | |
| FAILURE | callee | | kind of exception, its text, traceback | |
| GONE | callee | it serves no more | | |

A trace context may follow the kwargs.

Every CALL, CREATE and STREAM has exactly one answer that is no ITEM, be it cancelled or not, while both ranks live. So
both know which calls are under way.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import numpy as np

from asyncdist.arrays.host import Array, Flat
from asyncdist.errors import DistError
from asyncdist.transport.base_mesh import BaseMesh
from asyncdist.transport.protocol.frame import POINT_TO_POINT, pack_key
from asyncdist.transport.protocol.operations import Receive, ReceiveState, SendOp, SendState
from asyncdist.work import Work

CALL, CREATE, STREAM, CANCEL, MORE, RELEASE = range(6)
RESULT, ITEM, FAILURE, GONE = range(6, 10)
CALLS: Final = (CALL, CREATE, STREAM)
ANSWERS: Final = (RESULT, ITEM, FAILURE, GONE)

HEAD: Final = struct.Struct("<BIQ")
"""Kind, number of the call, argument."""
NO_PAYLOAD: Final = memoryview(b"")

RPC_MARK: Final = 0x7A7A_7A7A_7A7A_7A7A
"""Sets keys apart from those of the group's collectives and messages."""


class Tracing(Protocol):
    """Who makes spans of calls."""

    def called(self, name: str, rank: int) -> tuple[dict[str, str], Callable[[Work[Any]], object]]:
        """A function of `rank` is called: what travels to it, and what is to be called once the call has ended."""

    def served(self, carried: dict[Any, Any]) -> AbstractContextManager[object]:
        """In it a call runs here with which this came; whatever that is, it is no error."""


tracing: Tracing | None = None
"""That of this process."""


class Keys:
    """The match keys of the calls of one group, the `generation`th time it serves."""

    def __init__(self, group_id: int, generation: int) -> None:
        group = ((group_id ^ RPC_MARK) + generation) & 0xFFFF_FFFF_FFFF_FFFF
        kinds = [pack_key(group, kind, 0, 0, POINT_TO_POINT) for kind in range(4)]
        self.group = kinds[0][:8]
        self.requests = kinds[0]
        self._answer, self._request_arrays, self._answer_arrays = (key[:12] for key in kinds[1:])
        self._end = kinds[0][16:]

    def answer(self, number: int) -> bytes:
        """Of the answers to a call."""
        return self._answer + number.to_bytes(4, "little") + self._end

    def request_arrays(self, number: int) -> bytes:
        """Of the arrays of a call, in their order."""
        return self._request_arrays + number.to_bytes(4, "little") + self._end

    def answer_arrays(self, number: int) -> bytes:
        """Of the arrays of its answers, in their order."""
        return self._answer_arrays + number.to_bytes(4, "little") + self._end


class Listener:
    """A sink that hears of what it is made for: sends, or receives."""

    __slots__ = ()

    def message_sent(self, token: Any) -> None:
        """See `Sink`."""
        raise AssertionError("it has sent nothing")

    def message_received(self, token: Any, receive: Receive) -> None:
        """See `Sink`."""
        raise AssertionError("it receives nothing")

    def message_failed(self, token: Any, error: BaseException) -> None:
        """See `Sink`."""
        raise NotImplementedError

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        """See `Sink`."""
        raise AssertionError("it receives nothing without a target")


def octets_of(arrays: Iterable[Array]) -> list[memoryview]:
    """Arrays as they travel: from where they are, those that are not contiguous from a copy.

    Raises MemoryError: before the message that says that they follow.
    """
    return [Flat(array, writable=False).octets for array in arrays]


class Outbox(Listener):
    """Sends messages, and knows which of them the transport still has."""

    def __init__(self, mesh: BaseMesh) -> None:
        self._mesh = mesh
        self._posted = 0
        self.sending: dict[int, SendOp] = {}
        self.emptied: Callable[[], object] = bool
        """Is called whenever nothing is left."""

    def post(self, rank: int, key: bytes, head: bytes, payload: memoryview = NO_PAYLOAD) -> SendOp:
        """Send a message. Raises PeerLostError and ClosedError as the transport does."""
        self._posted = token = self._posted + 1
        op = SendOp(key, payload, head, self, token)
        if not self._mesh.post_send(rank, op):
            self.sending[token] = op
        return op

    def post_arrays(self, rank: int, key: bytes, arrays: Iterable[memoryview]) -> list[SendOp]:
        """Send what `octets_of` gave."""
        return [self.post(rank, key, b"", octets) for octets in arrays]

    def withdraw(self, rank: int, ops: Iterable[SendOp]) -> None:
        """Send nothing more of `ops`: their arrays are free when this returns."""
        for op in ops:
            if op.state < SendState.SENT:
                if not self._mesh.withdraw_send(rank, op):
                    self._mesh.give_up(rank, op)
                self.message_sent(op.token)

    def message_sent(self, token: int) -> None:
        """The transport has it no more."""
        self.sending.pop(token, None)
        if not self.sending:
            self.emptied()

    def message_failed(self, token: int, error: BaseException) -> None:
        """The other rank is lost. Whoever waits for an answer hears that from its receive."""
        self.message_sent(token)


class Inbox(Listener):
    """Receives messages of one key from one rank, one each time that `post_receive` is called."""

    __slots__ = ()

    octets: memoryview
    """The payload of the last one."""

    def post_receive(self, mesh: BaseMesh, rank: int, key: bytes) -> None:
        """Receive a message, which may be here already."""
        receive = Receive(key, None, self, None)
        try:
            complete = mesh.post_receive(rank, receive)
        except DistError as error:
            self.message_failed(None, error)
        else:
            if complete:
                self.message_received(None, receive)

    def allocate(self, token: object, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Room for a message."""
        self.octets = np.empty(nbytes, np.uint8).data  # type: ignore[misc] # a slot of those that have slots
        return self.octets


class Arrivals(Listener):
    """Receives the arrays of an object straight into their memory.

    Once all are there, `then(None)` is called; `then(error)` if one cannot come, as its sender gave it up or is lost.
    """

    def __init__(
        self, mesh: BaseMesh, rank: int, arrays: Sequence[Array], then: Callable[[BaseException | None], None]
    ) -> None:
        self._mesh = mesh
        self._rank = rank
        self._arrays = arrays
        self._left = len(arrays)
        self._receives: list[Receive] = []
        self._then: Callable[[BaseException | None], None] | None = then

    def begin(self, key: bytes) -> None:
        """Post the receives."""
        receives = [Receive(key, Flat(array, writable=True).octets, self, None) for array in self._arrays]
        for receive in receives:
            if self._then is None:
                return
            self._receives.append(receive)
            try:
                if self._mesh.post_receive(self._rank, receive):
                    self.message_received(None, receive)
            except DistError as error:  # the rank is lost, or has sent something of another size
                receive.state = ReceiveState.FAILED
                self.message_failed(None, error)

    def cancel(self) -> None:
        """Receive nothing more, and do not call `then`."""
        self._then = None
        receives, self._receives = self._receives, []  # they refer to us, and hold arrays
        for receive in receives:
            if receive.state < ReceiveState.RECEIVED and not self._mesh.withdraw(receive, self._rank):
                self._mesh.give_up(self._rank, receive)

    def message_received(self, token: object, receive: Receive) -> None:
        """An array is there."""
        self._left -= 1
        if not self._left:
            self._end(None)

    def message_failed(self, token: object, error: BaseException) -> None:
        """An array will not come."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        then = self._then
        if then is not None:
            self.cancel()
            then(error)
