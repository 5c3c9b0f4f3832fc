"""PeerCore: everything one connection does except I/O.

The shell owns a non-blocking socket. It reads into `get_buffer()` and reports with `buffer_updated(n)`; it hands over
two functions with `open(writer, arm)` and calls `flush()` when the socket is writable after `arm()` was called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from asyncdist.transport.matching import AnySourceTable, DroppedGroups, Receive, SendOp

__all__ = ["Arm", "PeerCore", "Writer"]

Writer: TypeAlias = Callable[[Sequence[bytes | memoryview]], int]
"""Non-blocking gather write: takes buffers, returns how many bytes the OS accepted (0 when it would block).
With one buffer use send, with several sendmsg. Raising OSError is fine: the core lets it through to the shell's caller;
better to record it, return 0 and fail the core from the loop."""

Arm: TypeAlias = Callable[[], None]
"""Called when output is left over: `flush()` must be called once the socket is writable (idempotent)."""


class PeerCore:
    """The protocol with one remote rank. Not thread-safe; all calls come from the loop's thread.

    `on_control(peer_rank, payload)` gets CONTROL payloads. `any_source` and `dropped` are shared by a mesh's cores.
    """

    rank: int
    peer_rank: int
    left: bool  # the peer's GOODBYE came: EOF now means left, not lost
    goodbye_sent: bool  # our GOODBYE was accepted by the OS: shutdown(SHUT_WR) now
    error: BaseException | None  # set by fail()

    def __init__(
        self,
        rank: int,
        peer_rank: int,
        on_control: Callable[[int, bytes], None],
        *,
        any_source: AnySourceTable | None = None,
        dropped: DroppedGroups | None = None,
    ) -> None: ...

    def open(self, writer: Writer, arm: Arm) -> None:
        """The handshake is done: queued output flows from now on."""

    def post_send(self, op: SendOp) -> bool:
        """True: complete, sink not called. False: the sink hears later. Raises `error` once failed, ClosedError after goodbye()."""
        raise NotImplementedError

    def post_receive(self, receive: Receive) -> bool:
        """True: complete, sink not called. False: the sink hears later.

        Raises `error` once failed; and, when the message is here already but does not suit (length, or allocate raised), that error.
        """
        raise NotImplementedError

    def withdraw(self, receive: Receive) -> bool:
        """Forget a receive posted here; False if it was matched."""
        raise NotImplementedError

    def send_control(self, payload: bytes) -> None:
        """Send a CONTROL frame ahead of everything queued."""

    def get_buffer(self) -> memoryview:
        """Where the next bytes belong; never empty."""
        raise NotImplementedError

    def buffer_updated(self, nbytes: int) -> int:
        """`nbytes` were read into the buffer. Returns the number of frames handled, so that a shell can end its callback after a few hundred.

        Raises RemoteProtocolError; the shell then closes the connection and calls `fail`.
        """
        raise NotImplementedError

    def flush(self) -> bool:
        """Write what is queued, at most 1 MiB. True: nothing is left (disarm the writer)."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """The connection is gone: every pending send and receive fails with `error`, once. Idempotent.

        Receives from any source are the mesh's: it calls `any_source.fail_source(rank, error)` when a peer is lost.
        """

    def drop_group(self, group: bytes, error: BaseException) -> None:
        """Forget everything of the group whose id's 8 bytes are `group`, telling no sink."""

    def goodbye(self) -> None:
        """Send GOODBYE once everything posted is sent. Later sends raise ClosedError."""
