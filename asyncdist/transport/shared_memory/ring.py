"""A byte stream through shared memory, one writer and one reader, as a core: it neither waits nor wakes anybody.

Each side of a pair owns a half: control words and the ring of the stream it writes. Neither writes into the other's.

| offset in a half | word | written by its owner |
| --- | --- | --- |
| 0 | sent | bytes put into this half's ring since the beginning |
| 64 | taken | bytes taken from the other half's ring since the beginning |
| 128 | wanting | 1: waits for room in this half's ring |
| PAGE | | the ring |

A word is 8 bytes, aligned, in this machine's order, and stands alone on its cache line. `sent - taken` bytes are in
the ring. Both are read from memory the peer writes, so they are checked: a peer that counts wrongly breaks only its own
connection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from asyncdist.errors import RemoteProtocolError
from asyncdist.transport.shared_memory.fence import ORDERED, fence, order

HALF_CONTROL_BYTES: Final = 4096
PART_BYTES: Final = 128 << 10
"""Bytes after which the other side is told, in either direction: some 10 us of copying."""
SENT: Final = 0 // 8
"""Where among its words a half says how many bytes were put into its ring."""
_TAKEN: Final = 64 // 8
_WANTING: Final = 128 // 8


def half_bytes(ring_bytes: int) -> int:
    """Size of one half with a ring of `ring_bytes`."""
    return HALF_CONTROL_BYTES + ring_bytes


class RingWriter:
    """Our half of a pair, as the writer of its ring. `peer` is the other half, which tells what was taken."""

    def __init__(self, own: memoryview, peer: memoryview) -> None:
        self._own = own[:HALF_CONTROL_BYTES].cast("Q")
        self._peer = peer[:HALF_CONTROL_BYTES].cast("Q")
        self._ring = own[HALF_CONTROL_BYTES:]
        self._size = len(self._ring)
        self._sent = 0
        self._taken = 0
        self._wanting = False

    def write(self, buffers: Sequence[bytes | memoryview], tell: Callable[[], None]) -> int:
        """Copy as much of `buffers` as there is room for and return how much that was. Raises RemoteProtocolError.

        `tell` is called whenever PART_BYTES more may be read, but not at the end: so the reader copies what we have
        written while we copy the next.
        """
        size, ring, sent = self._size, self._ring, self._sent
        wanted = sum(map(len, buffers))
        room = size - (sent - self._taken)
        if room < wanted:
            room = self._room(wanted)
        start = sent
        for buffer in buffers:
            length = len(buffer)
            if length > room:
                buffer, length = memoryview(buffer)[:room], room
            at = sent % size
            end = at + length
            if end <= size:
                ring[at:end] = buffer
            else:
                cut = size - at
                whole = memoryview(buffer)
                ring[at:] = whole[:cut]
                ring[: end - size] = whole[cut:]
            sent += length
            room -= length
            if not room:
                break
            if sent - self._sent >= PART_BYTES:
                if not ORDERED:
                    order()
                self._sent = self._own[SENT] = sent
                tell()
        if sent != self._sent:
            if not ORDERED:
                order()  # the bytes before their count
            self._sent = self._own[SENT] = sent
        return sent - start

    def wait_for_room(self) -> bool:
        """Ask the reader to say when it has made room. True: there is some already, and it need not."""
        self._wanting = True
        self._own[_WANTING] = 1
        fence()  # before looking once more: either we see the room, or the reader sees that we want it
        return self._room(1) > 0

    def has_room(self) -> bool:
        """Whether a byte can be written. Raises RemoteProtocolError."""
        return self._room(1) > 0

    def _room(self, enough: int) -> int:
        """Free bytes of the ring; looks at the reader's count only if those known of are not enough."""
        room = self._size - (self._sent - self._taken)
        if room < enough:
            taken = self._peer[_TAKEN]
            if not self._taken <= taken <= self._sent:
                raise RemoteProtocolError(f"a peer took {taken} bytes of {self._sent} that were sent")
            self._taken = taken
            room = self._size - (self._sent - taken)
            if room and self._wanting:
                self._wanting = False
                self._own[_WANTING] = 0
        return room


class RingReader:
    """The other half of a pair, as the reader of its ring. `own` is our half, where we say what was taken."""

    def __init__(self, own: memoryview, peer: memoryview) -> None:
        self._own = own[:HALF_CONTROL_BYTES].cast("Q")
        self.words = peer[:HALF_CONTROL_BYTES].cast("Q")
        self._ring = peer[HALF_CONTROL_BYTES:]
        self._size = len(self._ring)
        self._sent = 0
        self.taken = 0
        """Bytes read since the beginning; there are more if `words[SENT]` differs."""

    @property
    def sent(self) -> int:
        """Bytes that the writer says it has put in."""
        return self.words[SENT]

    def read_into(self, buffer: memoryview) -> int:
        """Fill `buffer` as far as there are bytes, and return how many. Raises RemoteProtocolError."""
        taken = self.taken
        length = self._sent - taken
        if not length:
            sent = self.words[SENT]
            length = sent - taken
            if not length:
                return 0
            if not 0 < length <= self._size:
                raise RemoteProtocolError(f"a peer sent {sent} bytes of which {taken} were taken: the ring is smaller")
            if not ORDERED:
                order()  # the count before the bytes
            self._sent = sent
        if length > len(buffer):
            length = len(buffer)
        at = taken % self._size
        end = at + length
        if end <= self._size:
            buffer[:length] = self._ring[at:end]
        else:
            cut = self._size - at
            buffer[:cut] = self._ring[at:]
            buffer[cut:length] = self._ring[: end - self._size]
        if not ORDERED:
            order()  # read before we say so
        self.taken = self._own[_TAKEN] = taken + length
        return length

    def writer_waits(self) -> bool:
        """Whether the writer waits for room and there is enough of it to be worth waking it: half a ring.

        To be asked whenever reading stops, which it does at the latest when the ring is empty.
        """
        fence()  # what was taken before this look: either the writer sees the room, or we see that it wants it
        return self.words[_WANTING] == 1 and 2 * (self._sent - self.taken) <= self._size
