"""Reader: cuts the incoming bytes into frames, and says where to read them, so that payload is read where it belongs.

Small frames are read many at a time into scratch, where eager payload waits to be copied once. Bulk payload is read
straight into the receiver's array; between two fragments no more than a header is read, so that none of the next
fragment's payload lands in scratch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.protocol.flow_control import RETURN_CREDIT_BYTES
from asyncdist.transport.protocol.frame import (
    COLLECTIVE,
    EAGER_BYTES,
    FRAGMENT_BYTES,
    HEADER,
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_META_BYTES,
    MAX_READ_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    POINT_TO_POINT,
    Flag,
    Header,
    Kind,
)
from asyncdist.transport.protocol.operations import Receive, ReceiveState, Stream
from asyncdist.transport.protocol.receiver import Receiver
from asyncdist.transport.protocol.sender import Sender

GATHER_BYTES: Final = 64 << 10
"""Longest eager payload that may wait in scratch until it is whole, where no receive is posted for it."""

SCRATCH_BYTES: Final = 68 << 10
"""Holds the largest frame that is handled whole (header, meta, 64 KiB) with room to spare."""

DIRECT_BYTES: Final = 4 << 10
"""From so much missing payload on, the rest of an eager message is read into its array instead of scratch."""

_unpack = struct.Struct("<II24sQ").unpack_from
"""Of a header, what the fast path looks at: kind, flags and meta_bytes as one word, for one comparison."""
_OFFSET: Final = struct.Struct("<Q")
_KIND_AND_FLAGS: Final = 0xFFFF
_DATA: Final = Kind.DATA
_RECEIVED: Final = ReceiveState.RECEIVED


class Reader:
    """See the module. `left`: the peer's GOODBYE came, and nothing may follow."""

    def __init__(
        self, peer_rank: int, receiver: Receiver, sender: Sender, on_control: Callable[[int, bytes], None]
    ) -> None:
        self._peer_rank = peer_rank
        self._receiver = receiver
        self._sender = sender
        self._on_control = on_control
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._end = 0  # bytes in scratch: the beginning of a frame
        self._need = 0  # how much of scratch the next read may fill; 0: all
        self._stream: Stream | None = None
        self._left_bytes = 0  # of the payload being read into _stream
        self._entries = receiver.entries
        self._any_entries = receiver.any_entries
        self._windows = receiver.windows
        self.left = False
        self.max_read_bytes = MAX_READ_BYTES

    def get_buffer(self) -> memoryview:
        """The memory that the next bytes belong into; never empty, valid until the next call of anything."""
        left = self._left_bytes
        if left:
            stream = self._stream
            if left > self.max_read_bytes and (stream is None or stream.total <= FRAGMENT_BYTES):
                left = self.max_read_bytes
            if stream is None or stream.view is None:
                return self._scratch[:left]
            offset = stream.offset
            return stream.view[offset : offset + left]
        if self._need:
            return self._scratch[self._end : self._need]
        if self._end:
            return self._scratch[self._end :]
        return self._scratch

    def buffer_updated(self, nbytes: int) -> int:
        """Handle what `nbytes` more bytes in the buffer complete; returns how many frames that were.

        Raises RemoteProtocolError; the shell then closes the connection and fails the core.
        """
        left = self._left_bytes
        if left > nbytes:  # bulk, and the fragment goes on: nothing to decide
            self._left_bytes = left - nbytes
            if self._stream is not None:
                self._stream.offset += nbytes
            return 0
        sender = self._sender
        sender.corked = True
        try:
            frames = self._end_payload(nbytes) if left else self._read_frames(nbytes)
        finally:
            sender.corked = False
        if sender.queue.urgent or sender.leaving:
            sender.kick()
        return frames

    def _end_payload(self, nbytes: int) -> int:
        """The last `nbytes` of a payload came."""
        if nbytes > self._left_bytes:
            raise ValueError("more bytes reported than the buffer has")
        stream = self._stream
        assert stream is not None
        stream.offset += nbytes
        self._left_bytes = 0
        self._stream = self._receiver.partial = None
        self._need = HEADER_BYTES if self._receiver.pulls.begun else 0
        if stream.offset == stream.total:
            self._receiver.finish(stream)
        return 1

    def _read_frames(self, nbytes: int) -> int:
        """Handle all whole frames in scratch, and begin a payload of which only the front is there."""
        if self.left:
            raise RemoteProtocolError(f"rank {self._peer_rank} sent something after its goodbye")
        end = self._end + nbytes
        self._end = end
        self._need = 0
        scratch = self._scratch
        entries = self._entries
        any_entries = self._any_entries
        receiver = self._receiver
        start = frames = 0
        while end - start >= HEADER_BYTES and receiver.error is None:
            word, fingerprint, key, length = _unpack(scratch, start)
            meta_bytes = word >> 16
            head = start + HEADER_BYTES
            body = head + meta_bytes
            if (
                word & _KIND_AND_FLAGS == _DATA
                and length <= GATHER_BYTES
                and body + length <= end
                and key not in any_entries
            ):
                entry = entries.pop(key, None)
                if entry.__class__ is Receive:
                    view = entry.target
                    meta = entry.expects
                    if view is None:
                        view = entry.view
                        if view is None:  # of any length
                            meta = self._meta(meta_bytes, body)
                            view = receiver.target_or_fail(entry, length, meta)
                            if view is None:
                                self._windows[key[20]].owe(length + meta_bytes + MESSAGE_OVERHEAD_BYTES)
                                start = body + length
                                frames += 1
                                continue
                    if len(view) == length and scratch[head:body] == meta:
                        start = body + length
                        view[:] = scratch[body:start]
                        entry.nbytes = length
                        entry.meta = meta
                        entry.fingerprint = fingerprint
                        entry.state = _RECEIVED
                        window = self._windows[key[20]]
                        window.owed += length + meta_bytes + MESSAGE_OVERHEAD_BYTES
                        if window.owed > RETURN_CREDIT_BYTES:
                            window.owe(0)
                        frames += 1
                        entry.sink.message_received(entry.token, entry)
                        continue
                if entry is None:
                    start = body + length
                    receiver.on_early(self._meta(meta_bytes, body), fingerprint, key, scratch[body:start])
                    frames += 1
                    continue
                entries[key] = entry
            size = self._frame(Header._make(HEADER.unpack_from(scratch, start)), start, end)
            start += size
            if not size or self.left:
                break
            frames += 1
        rest = end - start
        if start and rest:
            scratch[:rest] = scratch[start:end]
        self._end = rest
        if rest >= HEADER_BYTES:
            self._need = 0
        if rest and self.left:
            raise RemoteProtocolError(f"rank {self._peer_rank} sent something after its goodbye")
        return frames

    def _frame(self, header: Header, start: int, end: int) -> int:
        """Handle one frame that the fast path does not. Returns the bytes it took, 0 if more must come first."""
        kind = header.kind
        if kind == _DATA:
            return self._data(header, start, end)
        if kind == Kind.OFFER:
            return self._offer(header, start, end)
        if header.meta_bytes:
            raise RemoteProtocolError(f"rank {self._peer_rank} sent meta with a frame of kind {kind}")
        if kind == Kind.FRAGMENT:
            return self._fragment(header, start, end)
        if kind == Kind.CONTROL:
            return self._control(header.length, start, end)
        if kind == Kind.EXPOSED and self._receiver.zero_copy is not None:
            self._receiver.on_exposed(header)
        else:
            self._signal(header)
        return HEADER_BYTES

    def _signal(self, header: Header) -> None:
        """A frame that is only a header."""
        kind, flags, _, _, key, length, credit, message_id = header
        sender, receiver = self._sender, self._receiver
        if kind == Kind.PULL:
            sender.on_pull(key, length, message_id)
        elif kind == Kind.DISCARD:
            sender.on_discard(message_id, ended=bool(flags & Flag.ABORT))
        elif kind == Kind.CREDIT:
            sender.on_credit(COLLECTIVE if flags & Flag.CREDIT_COLLECTIVE else POINT_TO_POINT, credit)
        elif kind == Kind.ASK:
            sender.on_ask(key, message_id, anew=bool(flags & Flag.END))
        elif kind == Kind.STALLED:
            receiver.on_stalled(key, length, message_id)
        elif kind == Kind.GOODBYE:
            self.left = True
            sender.peer_left()
        elif kind == Kind.WITHDRAW:
            receiver.on_withdraw(message_id)
        elif (zero_copy := receiver.zero_copy) is not None and Kind.RELEASED <= kind <= Kind.MEMORY:
            if kind == Kind.RELEASED:
                copied = not flags & Flag.ABORT
                if sender.on_released(message_id, copied=copied) and not copied:
                    zero_copy.stop_exposing_process()
            elif kind == Kind.MAPPED:
                zero_copy.on_mapped(length)
            elif kind == Kind.UNMAP:
                zero_copy.on_unmap(length)
            else:
                zero_copy.on_memory(key)
        else:
            raise RemoteProtocolError(f"rank {self._peer_rank} sent a frame of unknown kind {kind}")

    def _data(self, header: Header, start: int, end: int) -> int:
        length = header.length
        if length > EAGER_BYTES:
            raise RemoteProtocolError(f"rank {self._peer_rank} sent {length} bytes without having offered them")
        body = start + HEADER_BYTES + header.meta_bytes
        stop = body + length
        if body > end:
            self._check_meta(header.meta_bytes)
            return 0
        if stop <= end:
            self._receiver.on_data(header, self._meta(header.meta_bytes, body), self._scratch[body:stop])
            return stop - start
        fits = length <= GATHER_BYTES
        if fits and stop - end < DIRECT_BYTES:
            return 0
        stream = self._receiver.begin_data(header, self._meta(header.meta_bytes, body), fits=fits)
        if stream is None:
            return 0
        self._begin_payload(stream, body, end, length)
        return end - start

    def _offer(self, header: Header, start: int, end: int) -> int:
        body = start + HEADER_BYTES + header.meta_bytes
        if body > end:
            self._check_meta(header.meta_bytes)
            return 0
        self._receiver.on_offer(header, self._meta(header.meta_bytes, body))
        return body - start

    def _fragment(self, header: Header, start: int, end: int) -> int:
        stream = self._receiver.on_fragment(header, _OFFSET.unpack_from(header.key)[0])
        if stream is None:
            return HEADER_BYTES
        body = start + HEADER_BYTES
        self._begin_payload(stream, body, min(end, body + header.length), header.length)
        if self._left_bytes:
            return end - start
        self._need = HEADER_BYTES if self._receiver.pulls.begun else 0
        if stream.offset == stream.total:
            self._receiver.finish(stream)
        return HEADER_BYTES + header.length

    def _begin_payload(self, stream: Stream, body: int, end: int, length: int) -> None:
        """Put the payload in scratch[body:end] in place; what is missing of `length` is read there directly."""
        here = end - body
        offset = stream.offset
        if here and stream.view is not None:
            stream.view[offset : offset + here] = self._scratch[body:end]
        stream.offset = offset + here
        if here < length:
            self._stream = self._receiver.partial = stream
            self._left_bytes = length - here

    def _control(self, length: int, start: int, end: int) -> int:
        if length > MAX_CONTROL_BYTES:
            raise RemoteProtocolError(f"rank {self._peer_rank} sent {length} bytes of control")
        body = start + HEADER_BYTES
        if body + length > end:
            return 0
        self._on_control(self._peer_rank, bytes(self._scratch[body : body + length]))
        return HEADER_BYTES + length

    def _meta(self, meta_bytes: int, body: int) -> bytes:
        self._check_meta(meta_bytes)
        return bytes(self._scratch[body - meta_bytes : body]) if meta_bytes else b""

    def _check_meta(self, meta_bytes: int) -> None:
        if meta_bytes > MAX_META_BYTES:
            raise RemoteProtocolError(f"rank {self._peer_rank} sent {meta_bytes} bytes of meta")
