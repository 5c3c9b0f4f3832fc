"""PeerCore: everything one connection does except I/O.

The shell owns a non-blocking socket. It reads into `get_buffer()` and reports with `buffer_updated(n)`; it hands over
two functions with `open(writer, arm)`, and calls `flush()` when the socket is writable after `arm()` was called.

    post_send ───> sender ───> output queue ──> writer     (shell: send, sendmsg)
                     ^ pulls, credit, asks
    post_receive ─> receiver <── reader <─── buffer_updated (shell: recv_into)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncdist.transport.protocol.frame import FRAGMENT_BYTES
from asyncdist.transport.protocol.matching import AnySourceTable, DroppedGroups, UnexpectedWatcher
from asyncdist.transport.protocol.operations import Receive, SendOp
from asyncdist.transport.protocol.output_queue import Arm, Writer
from asyncdist.transport.protocol.reader import Reader
from asyncdist.transport.protocol.receiver import Receiver
from asyncdist.transport.protocol.sender import Sender
from asyncdist.transport.protocol.zero_copy import ZeroCopy

__all__ = ["Arm", "PeerCore", "Writer"]


class PeerCore:
    """The protocol with one remote rank. Not thread-safe; all calls come from the loop's thread.

    `on_control(peer_rank, payload)` gets CONTROL payloads. `any_source`, `dropped` and `watchers` (see
    `BaseMesh.watch`) are shared by a mesh's cores. Sinks and `on_control` are called from inside the methods here,
    and may call any of them except `get_buffer`, `buffer_updated` and `flush`.

    Most methods are attributes, bound to the part that does the work and says what they promise.
    """

    def __init__(
        self,
        rank: int,
        peer_rank: int,
        on_control: Callable[[int, bytes], None],
        *,
        any_source: AnySourceTable | None = None,
        dropped: DroppedGroups | None = None,
        watchers: Mapping[bytes, UnexpectedWatcher] | None = None,
        write_bytes: int = FRAGMENT_BYTES,
    ) -> None:
        self.rank = rank
        self.peer_rank = peer_rank
        dropped = DroppedGroups() if dropped is None else dropped
        any_source = AnySourceTable() if any_source is None else any_source
        watchers = {} if watchers is None else watchers
        self._sender = sender = Sender(peer_rank, dropped)
        sender.queue.write_bytes = write_bytes
        self._receiver = receiver = Receiver(
            peer_rank, sender, any_source, dropped, {} if watchers is None else watchers
        )
        self.reader = Reader(peer_rank, receiver, sender, on_control)
        self.post_send = sender.post_send
        self.send_control = sender.send_control
        self.flush = sender.flush
        self.kick = sender.kick
        self.goodbye = sender.goodbye
        self.post_receive = receiver.post_receive
        self.put_back = receiver.put_back
        self.tell_unexpected = receiver.tell_unexpected
        self.get_buffer = self.reader.get_buffer
        self.buffer_updated = self.reader.buffer_updated

    @property
    def left(self) -> bool:
        """Whether the peer's GOODBYE came: the end of the stream then means left, not lost."""
        return self.reader.left

    @property
    def expects(self) -> bool:
        """Whether to read for a receive that waits: what comes without one is stored, and copied when one is posted.

        Not while input is handled: what the reader has in hand comes first.
        """
        receiver = self._receiver
        return not self._sender.corked and bool(receiver.entries or receiver.any_entries or receiver.pulls.by_id)

    @property
    def goodbye_sent(self) -> bool:
        """Whether our GOODBYE was accepted by the OS: the sending side may be shut down."""
        return self._sender.goodbye_sent

    @property
    def has_output(self) -> bool:
        """Whether anything posted or queued is still to be delivered to the peer."""
        return self._sender.has_output

    @property
    def error(self) -> BaseException | None:
        """What `fail` was called with."""
        return self._sender.error

    def open(self, writer: Writer, arm: Arm, zero_copy: ZeroCopy | None = None) -> None:
        """The handshake is done: write what is queued, and from now on whatever comes.

        With `zero_copy`, payloads in shared memory are exposed to the peer; the shell calls `zero_copy.advance`.
        """
        self._sender.zero_copy = self._receiver.zero_copy = zero_copy
        if zero_copy is not None:
            self.reader.max_read_bytes = FRAGMENT_BYTES  # no system call to keep short
        self._sender.queue.open(writer, arm)
        self._sender.flush()

    def send_frame(self, frame: bytes) -> None:
        """Send a frame of the shell's own, behind the messages posted so far."""
        self._sender.queue.push_data(frame)
        self._sender.kick()

    def withdraw(self, message: SendOp | Receive) -> bool:
        """Forget a receive, or a point-to-point send, posted here, telling its sink nothing; False if it was matched.

        No other point-to-point message is lost by it. A collective message that is pulled early may be: the sender was
        told at the post to send it at once. Of a send, the peer may have matched it without our knowing: then the
        receive fails with CollectiveTimeoutError. The peer takes the messages behind it in its place otherwise.
        """
        if isinstance(message, SendOp):
            return self._sender.withdraw(message)
        return self._receiver.withdraw(message)

    def give_up(self, message: SendOp | Receive) -> bool:
        """End a point-to-point message that cannot be withdrawn before its time, telling its sink nothing.

        When this returns its array is not read or written any more, except that a peer may still be copying from one
        that is exposed to it: it throws away what it copied. The other end hears of it: a sender stops, and a receive
        fails with CollectiveTimeoutError. False: so much of a send is under way that the rest goes from a copy, and it
        is complete.
        """
        if isinstance(message, SendOp):
            return self._sender.give_up(message)
        self._receiver.give_up(message)
        return True

    def drop_group(self, group: bytes) -> None:
        """Forget everything of the group whose id's 8 bytes are `group`, telling no sink.

        When this returns no array of the group is read or written any more, except that a peer may still be copying
        from one that is exposed to it: it will throw away what it copied. Late messages of the group are drained.
        """
        self._receiver.drop_group(group)
        self._sender.drop_group(group)

    def fail(self, error: BaseException) -> None:
        """The connection is gone: every pending send and receive fails with `error`, once. Idempotent.

        Eager messages that arrived before may still be received. Receives from any source are the mesh's to fail.
        """
        self._sender.fail(error)
        self._receiver.fail(error)

    def statistics(self) -> dict[str, Any]:
        """Counts of what is held for this peer, for tests of the bounds and for the curious."""
        return {**self._sender.statistics(), **self._receiver.statistics()}
