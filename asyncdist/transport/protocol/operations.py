"""Sends and receives: what is posted, who is told of its end, and what it raises."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, Protocol, TypeVar

from asyncdist.errors import CollectiveTimeoutError, DistError, GroupAbortedError, PeerLostError
from asyncdist.transport.protocol.frame import MAX_LENGTH, MAX_META_BYTES

__all__ = [
    "COPIED",
    "COPYING",
    "NOT_COPIED",
    "NOT_LENT",
    "NO_GOODBYE",
    "EarlyStream",
    "Receive",
    "SendOp",
    "Sink",
    "Stream",
    "anew",
    "fail_all",
    "given_up",
    "nobody_left",
    "not_received",
]


class Sink(Protocol):
    """Who is told what became of a send or a receive.

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


class SendOp:
    """A posted send: `payload` is a contiguous view of format 'B', `meta` at most MAX_META_BYTES.

    An object is posted once. `payload` must not change until the send is complete. `bulk`: it belongs to an operation
    that moves much, so that its receiver pulls it early if it exceeds EARLY_PULL_BYTES.
    """

    __slots__ = ("_id", "_offset", "_settled", "bulk", "fingerprint", "key", "meta", "payload", "sink", "token")

    def __init__(
        self,
        key: bytes,
        payload: memoryview,
        meta: bytes,
        sink: Sink,
        token: Any,
        fingerprint: int = 0,
        *,
        bulk: bool = False,
    ) -> None:
        self.key = key
        self.bulk = bulk
        self.payload = payload
        self.meta = meta
        self.sink = sink
        self.token = token
        self.fingerprint = fingerprint
        self._settled = False  # its sink was told, or never will be
        self._id = 0
        self._offset = 0

    def check_size(self) -> None:
        """Raise ValueError for what no frame says."""
        if len(self.meta) > MAX_META_BYTES:
            raise ValueError(f"meta of {len(self.meta)} bytes exceeds {MAX_META_BYTES}")
        if len(self.payload) > MAX_LENGTH:
            raise ValueError(f"message of {len(self.payload)} bytes exceeds {MAX_LENGTH}")


class Receive:
    """A posted receive.

    `target` is a writable contiguous view of format 'B', or None to have `sink.allocate` called. With a target, a
    message of any other length fails the receive with CollectiveMismatchError. Once received, `source` is the global
    rank it came from, `nbytes` its length, `meta` and `fingerprint` what its sender attached. An object is posted once.

    Without a target, `expects` and `view` spare the question: an eager message with exactly that meta and as long as
    `view` goes there at once, and `allocate` is not called. That is the usual message, so it is worth it.

    `bulk` says that it belongs to an operation that moves much, as `SendOp.bulk` does; both ends should say the same.
    """

    __slots__ = (
        "_order",
        "bulk",
        "expects",
        "fingerprint",
        "key",
        "meta",
        "nbytes",
        "ranks",
        "sink",
        "source",
        "target",
        "token",
        "view",
    )

    def __init__(
        self,
        key: bytes,
        target: memoryview | None,
        sink: Sink,
        token: Any,
        expects: bytes = b"",
        view: memoryview | None = None,
        *,
        bulk: bool = False,
    ) -> None:
        self.key = key
        self.target = target
        self.bulk = bulk
        self.expects = expects
        self.view = target if view is None else view
        self.sink = sink
        self.token = token
        self.source: int | None = None
        self.nbytes = 0
        self.meta = b""
        self.fingerprint = 0
        self.ranks: Collection[int] = ()  # whom a receive from any source may come from
        self._order = 0


NOT_LENT: Final = 0
COPYING: Final = 1
COPIED: Final = 2
NOT_COPIED: Final = 3  # it could not be read, and travels
"""Where a message stands that its sender may have lent."""


class Stream:
    """A message on its way into `view`: pulled, or eager and only partly here.

    `receive` and `view` are None once nobody wants it: the rest is thrown away. `early_key` is set while it is an early
    pull without an answer.
    """

    __slots__ = ("early_key", "lent", "offset", "receive", "total", "view")

    def __init__(
        self, receive: Receive | None, view: memoryview | None, total: int, early_key: bytes | None = None
    ) -> None:
        self.receive = receive
        self.view = view
        self.total = total
        self.offset = 0
        self.lent = NOT_LENT
        self.early_key = early_key

    def abandon(self) -> None:
        """Write nowhere any more."""
        self.receive = None
        self.view = None

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
        if not op._settled:
            op._settled = True
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


def not_received(rank: int) -> PeerLostError:
    """What a send raises whose group its receiver has closed."""
    return PeerLostError(f"rank {rank} has closed the group without receiving the message", rank, left=True)


def nobody_left(own: int, ranks: Collection[int], gone: Mapping[int, bool]) -> PeerLostError:
    """What a receive from any of `ranks` raises when all others than `own` are gone: one of them, a lost one if any."""
    others = sorted(rank for rank in ranks if rank != own)
    blamed = next((rank for rank in others if not gone[rank]), others[0])
    text = ", ".join(map(str, others[:20])) + (", ..." if len(others) > 20 else "")
    return PeerLostError(f"nobody can send this any more: rank {text} left or was lost", blamed, left=gone[blamed])
