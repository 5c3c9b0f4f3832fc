"""Sends and receives: what is posted, the states of each, the sink that is told of its end, and what it raises.

A change of state is a plain store. Tests check each against tables (`tests/kits/message_states.py`), and show that all
occur.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from asyncdist.arrays.host import Array
from asyncdist.errors import CollectiveTimeoutError, DistError, GroupAbortedError, PeerLostError


class Sink(Protocol):
    """Is told what became of a send or a receive.

    `token` is what the poster chose. Each operation gets exactly one of sent, received or failed, unless its post
    said that it was complete already, it was withdrawn, or its group was dropped. Calls come from inside the
    transport's `post_*`, `flush` and `buffer_updated`; they may post, withdraw and drop, and must not raise.
    """

    def message_sent(self, token: Any) -> None:
        """The send's buffer may be reused."""

    def message_received(self, token: Any, receive: Receive) -> None:
        """The data is in place; `receive.source`, `.nbytes` and `.meta` are set."""

    def message_failed(self, token: Any, error: BaseException) -> None:
        """The operation ended without success."""

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Return a writable contiguous view of format 'B' and exactly `nbytes` bytes, for a receive without a target.

        Called once the message is known. If it raises, the receive fails with that error and the message is
        discarded.
        """


class SendState(enum.IntEnum):
    """Where a send stands: the table at the top of `sender.py` says what each state means.

    From SENT on the send has ended: its payload is free, and its sink hears nothing more.
    """

    POSTED = 0
    EAGER = 1
    HELD = 2
    OFFERED = 3
    STREAMING = 4
    EXPOSED = 5
    SENT = 6
    FAILED = 7
    WITHDRAWN = 8
    DROPPED = 9


class ReceiveState(enum.IntEnum):
    """Where a receive stands: the table at the top of `receiver.py` says what each state means.

    From RECEIVED on the receive has ended: nothing is written into its memory any more.
    """

    POSTED = 0
    PULLED_EARLY = 1
    STREAMING = 2
    RECEIVED = 3
    FAILED = 4
    WITHDRAWN = 5
    DROPPED = 6


class StreamState(enum.IntEnum):
    """How the bytes of a message come to a receive."""

    TRAVELS = 0
    """In frames."""
    COPYING = 1
    """The sender has exposed them: this rank copies them out of the sender's memory."""
    COPIED = 2
    """They are copied, and the sender is to say that they are the message."""
    REFUSED = 3
    """They could not be read, so they travel after all."""


@dataclass(slots=True, eq=False)
class SendOp:
    """A posted send: `payload` is a contiguous view of format 'B', `meta` at most MAX_META_BYTES.

    An object is posted once. `payload` must not change until the send is complete. `bulk`: it belongs to an operation
    that moves much, so that its receiver pulls it early if it exceeds EARLY_PULL_BYTES.
    """

    key: bytes
    payload: memoryview
    meta: bytes
    sink: Sink
    token: Any
    fingerprint: int = 0
    bulk: bool = field(default=False, kw_only=True)
    state: SendState = field(default=SendState.POSTED, init=False)
    _id: int = field(default=0, init=False)  # under which it is offered or streams
    _offset: int = field(default=0, init=False)  # of the next fragment

    def complete(self) -> None:
        """Tell the sink that the payload is free, unless the send has ended already."""
        if self.state < SendState.SENT:
            self.state = SendState.SENT
            self.sink.message_sent(self.token)

    def drop(self) -> None:
        """End it without telling the sink."""
        if self.state < SendState.SENT:
            self.state = SendState.DROPPED


@dataclass(slots=True, eq=False)
class Receive:
    """A posted receive.

    `target` is a writable contiguous view of format 'B', or None to have `sink.allocate` called. With a target, a
    message of any other length fails the receive with CollectiveMismatchError. Once received, `source` is the global
    rank it came from, `nbytes` its length, `meta` and `fingerprint` what its sender attached. An object is posted once.

    Without a target, `expects` and `view` spare the question: an eager message with exactly that meta and as long as
    `view` goes there at once, and `allocate` is not called. Most messages are such.

    `bulk` says that it belongs to an operation that moves much, as `SendOp.bulk` does; both ends should say the same.

    `fold`, if given, is asked to take what the sender has exposed, part by part, in place of a copy to `target`: with
    the octets and where in the message they begin. It must not raise. What it took may come to `target` all the same.
    """

    key: bytes
    target: memoryview | None
    sink: Sink
    token: Any
    expects: bytes = b""
    view: memoryview | None = None
    bulk: bool = field(default=False, kw_only=True)
    fold: Callable[[Array, int], None] | None = field(default=None, kw_only=True)
    source: int | None = field(default=None, init=False)
    nbytes: int = field(default=0, init=False)
    meta: bytes = field(default=b"", init=False)
    fingerprint: int = field(default=0, init=False)
    ranks: Collection[int] = field(default=(), init=False)  # whom a receive from any source may come from
    state: ReceiveState = field(default=ReceiveState.POSTED, init=False)
    _order: int = field(default=0, init=False)

    def fail(self, error: BaseException) -> None:
        """Tell the sink an error."""
        self.state = ReceiveState.FAILED
        self.sink.message_failed(self.token, error)

    def drop(self) -> None:
        """End it without telling the sink."""
        if self.state < ReceiveState.RECEIVED:
            self.state = ReceiveState.DROPPED


@dataclass(slots=True, eq=False)
class Stream:
    """A message on its way into `view`: pulled, or eager and only partly here.

    `receive` and `view` are None once the message is given up: the rest is thrown away. `early_key` is set while the
    stream is an early pull without an answer.
    """

    receive: Receive | None
    view: memoryview | None
    total: int
    early_key: bytes | None = None
    offset: int = 0
    state: StreamState = StreamState.TRAVELS

    def abandon(self) -> None:
        """Write nowhere any more."""
        self.receive = None
        self.view = None

    def drop(self) -> None:
        """The same, as its receive has been given up."""
        if self.receive is not None:
            self.receive.drop()
        self.abandon()

    def belongs_to(self, group: bytes) -> bool:
        """Whether someone of `group` still wants it."""
        return self.receive is not None and self.receive.key.startswith(group)


class EarlyStream(Stream):
    """An eager message that no receive waits for, on its way into memory of its own."""

    __slots__ = ("envelope",)

    def __init__(self, meta: bytes, fingerprint: int, key: bytes, length: int) -> None:
        super().__init__(None, memoryview(bytearray(length)), length)
        self.envelope = meta, fingerprint, key


def fail_all(ops: Iterable[SendOp], error: BaseException) -> None:
    """Tell the sinks of those that have not been told anything yet."""
    for op in ops:
        if op.state < SendState.SENT:
            op.state = SendState.FAILED
            op.sink.message_failed(op.token, error)


NO_GOODBYE: Final = (
    "the connection was closed without a goodbye (it failed, was killed, broke off, or ended without "
    "destroy_process_group(): see its own output)"
)
"""What is known of a peer that is lost, and where to look for more."""


E = TypeVar("E", bound=BaseException)


def anew(error: E) -> E:
    """An exception like `error`, to be raised in its place.

    Whenever an exception is raised it takes hold of the frames it passes, with all that their variables refer to, and
    never lets go: one that is raised for every message to a rank that is lost would keep every array.
    """
    kind = type(error)
    fresh: E = (OSError if isinstance(error, OSError) else kind).__new__(kind)
    fresh.args = error.args
    fresh.__dict__.update(error.__dict__)
    fresh.__cause__ = error.__cause__
    return fresh


def given_up(source: int, *, late: bool) -> DistError:
    """What a receive raises whose message its sender did not send to the end, or whose group ended there."""
    if late:
        text = f"rank {source} gave this message up before it was sent: its send timed out or was cancelled"
        return CollectiveTimeoutError(text, (source,))
    text = f"rank {source} aborted the group while it sent this message"
    return GroupAbortedError(text, "aborted by the sender", source)


def left_world(rank: int) -> PeerLostError:
    """What operations with a rank raise that has said goodbye."""
    return PeerLostError(f"rank {rank} has left the world (it closed its group and said goodbye)", rank, left=True)


def not_received(rank: int) -> PeerLostError:
    """What a send raises whose group its receiver has closed."""
    return PeerLostError(f"rank {rank} has closed the group without receiving the message", rank, left=True)


def nobody_left(own: int, ranks: Collection[int], gone: Mapping[int, bool]) -> PeerLostError:
    """What a receive from any of `ranks` raises when all others than `own` are gone: one of them, a lost one if any."""
    others = sorted(rank for rank in ranks if rank != own)
    blamed = next((rank for rank in others if not gone[rank]), others[0])
    text = ", ".join(map(str, others[:20])) + (", ..." if len(others) > 20 else "")
    return PeerLostError(f"nobody can send this any more: rank {text} left or was lost", blamed, left=gone[blamed])
