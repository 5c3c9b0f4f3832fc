"""The floor: the least an honest program does to move a message on bare sockets and await it.

uvloop, one non-blocking socket a pair with `add_reader`, a 24-byte header (tag, length, two spare words as any real
protocol has), a dictionary of posted receives matched by tag, one future awaited a message. No flow control, no
errors, no credit, no cancellation, no groups: what a library adds to these figures is the price of being one.
all_reduce is recursive doubling (powers of two only), the barrier is a dissemination of empty messages. TCP over
loopback, or Unix sockets.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.adapters import Adapter, Start
from bench.model import RankContext
from bench.operations import Array, Buffers, bytes_of

HEADER = struct.Struct("<QQII")
READ_BYTES = 64 << 10
"""The most one read asks for; larger reads measured slower on loopback (the socket buffer leaves the cache)."""
LONG_READ_BYTES = 256 << 10
"""The same for messages longer than this: what counts is how many calls there are."""
READS_PER_CALLBACK = 16
MESSAGE_TAGS = 1 << 62
"""Tags of messages start here, those of collectives at 0."""
CONNECT_TIMEOUT_S = 30.0
LOCALHOST = "127.0.0.1"


class Link:
    """One connected socket to one rank: sends, posted receives, messages that came early."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        sock.setblocking(False)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_CONGESTION"):  # BBR would wait for timers
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        self._sock = sock
        self._loop = loop
        self._posted: dict[int, tuple[memoryview, asyncio.Future[None]]] = {}
        self._early: dict[int, bytes] = {}
        self._scratch = bytearray(READ_BYTES + HEADER.size)
        self._view = memoryview(self._scratch)
        self._filled = 0
        self._paused = False
        self._target: memoryview | None = None
        self._received = 0
        self._done: asyncio.Future[None] | None = None
        self._unsent: memoryview | None = None
        self._sent: asyncio.Future[None] | None = None
        loop.add_reader(sock.fileno(), self._readable)

    def send(self, tag: int, payload: memoryview) -> asyncio.Future[None] | None:
        """Send; None when the kernel took everything at once, else a future (one such send at a time)."""
        length = len(payload)
        sent = self._sock.sendmsg((HEADER.pack(tag, length, 0, 0), payload)) - HEADER.size
        if sent == length:
            return None
        self._unsent = payload[sent:]
        self._sent = self._loop.create_future()
        self._loop.add_writer(self._sock.fileno(), self._writable)
        return self._sent

    def receive(self, tag: int, target: memoryview) -> asyncio.Future[None]:
        """Post a receive of exactly ``len(target)`` bytes."""
        future = self._loop.create_future()
        early = self._early.pop(tag, None)
        if early is not None:
            target[:] = early
            future.set_result(None)
        else:
            self._posted[tag] = (target, future)
            if self._paused:
                self._resume()
        return future

    def _resume(self) -> None:
        """Look again whether the message the reader stopped at has its receive now."""
        self._parse()
        if self._target is not None or self._filled < len(self._scratch):
            self._paused = False
            self._loop.add_reader(self._sock.fileno(), self._readable)

    def close(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()

    def _writable(self) -> None:
        assert self._unsent is not None
        assert self._sent is not None
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            return
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())
            self._sent.set_result(None)

    def _readable(self) -> None:
        try:
            for _ in range(READS_PER_CALLBACK):
                if not self._read_once():
                    return
        except BlockingIOError:
            return

    def _read_once(self) -> bool:
        """Read once, into the array when a large message is under way; whether another read may find more."""
        target = self._target
        if target is not None:
            offset, most = self._received, LONG_READ_BYTES if len(target) > LONG_READ_BYTES else READ_BYTES
            count = self._sock.recv_into(target[offset : offset + most])
            self._received = offset + count
            if self._received == len(target):
                assert self._done is not None
                self._target = None
                self._done.set_result(None)
            return count > 0
        count = self._sock.recv_into(self._view[self._filled :])
        if count == 0:
            self._loop.remove_reader(self._sock.fileno())
            return False
        self._filled += count
        self._parse()
        return self._target is not None

    def _parse(self) -> None:
        """Hand out every whole message in the scratch buffer and the beginning of a large one."""
        position, filled, view = 0, self._filled, self._view
        while filled - position >= HEADER.size:
            tag, length, _, _ = HEADER.unpack_from(view, position)
            begin = position + HEADER.size
            posted = self._posted.pop(tag, None) if filled - begin >= length or tag in self._posted else None
            if filled - begin >= length:
                position = begin + length
                if posted is None:
                    self._early[tag] = bytes(view[begin:position])
                else:
                    posted[0][:] = view[begin:position]
                    posted[1].set_result(None)
            elif posted is not None:
                self._target, self._done = posted
                self._received = filled - begin
                self._target[: self._received] = view[begin:filled]
                position = filled
            else:
                if filled - position == len(view):  # a large message without a receive yet: stop reading
                    self._paused = True
                    self._loop.remove_reader(self._sock.fileno())
                break
        if position:
            rest = filled - position
            if rest:
                view[:rest] = bytes(view[position:filled])
            self._filled = rest


class FloorMesh:
    """One rank's links to all others, and the operations on them."""

    def __init__(self, rank: int, size: int, directory: str, *, unix: bool) -> None:
        self._rank = rank
        self._size = size
        self._directory = Path(directory)
        self._unix = unix
        self._links: dict[int, Link] = {}
        self._sequence = 0

    async def open(self) -> None:
        """Connect every pair: the higher rank dials, addresses travel through files."""
        if self._size & (self._size - 1):
            raise ValueError(f"recursive doubling needs a power of two of ranks, not {self._size}")
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX if self._unix else socket.AF_INET) as listener:
            listener.bind(str(self._directory / f"socket.{self._rank}") if self._unix else (LOCALHOST, 0))
            listener.listen(self._size)
            partial = self._directory / f"partial.{self._rank}"
            partial.write_text("" if self._unix else str(listener.getsockname()[1]))
            partial.rename(self._directory / f"address.{self._rank}")
            listener.settimeout(CONNECT_TIMEOUT_S)
            for rank in range(self._rank):
                sock = await self._dial(rank)
                sock.sendall(self._rank.to_bytes(4, "little"))
                self._links[rank] = Link(sock, loop)
            for _ in range(self._rank + 1, self._size):
                sock = listener.accept()[0]
                sock.settimeout(CONNECT_TIMEOUT_S)
                rank = int.from_bytes(sock.recv(4, socket.MSG_WAITALL), "little")
                self._links[rank] = Link(sock, loop)

    async def _dial(self, rank: int) -> socket.socket:
        path = self._directory / f"address.{rank}"
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while not path.exists():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"rank {rank} published no address within {CONNECT_TIMEOUT_S} s")
            await asyncio.sleep(0.002)
        sock = socket.socket(socket.AF_UNIX if self._unix else socket.AF_INET)
        sock.settimeout(CONNECT_TIMEOUT_S)
        sock.connect(str(self._directory / f"socket.{rank}") if self._unix else (LOCALHOST, int(path.read_text())))
        return sock

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    async def barrier(self) -> None:
        """Dissemination: ceil(log2 p) rounds of empty messages."""
        self._sequence += 1
        distance, step = 1, 0
        empty = memoryview(b"")
        while distance < self._size:
            tag = self._sequence << 8 | step
            arrived = self._links[(self._rank - distance) % self._size].receive(tag, memoryview(bytearray()))
            self._links[(self._rank + distance) % self._size].send(tag, empty)
            await arrived
            distance, step = distance * 2, step + 1

    async def all_reduce(self, array: Array, scratch: Array) -> None:
        """Recursive doubling in place: log2 p exchanges of the whole array, each followed by one addition."""
        self._sequence += 1
        mask, step = 1, 0
        mine, theirs = bytes_of(array), bytes_of(scratch)
        while mask < self._size:
            tag = self._sequence << 8 | step
            link = self._links[self._rank ^ mask]
            arrived = link.receive(tag, theirs)
            sent = link.send(tag, mine)
            await arrived
            if sent is not None:
                await sent
            np.add(array, scratch, out=array)
            mask, step = mask * 2, step + 1

    def send(self, payload: memoryview, peer: int, number: int) -> asyncio.Future[None] | None:
        """Send message ``number`` to ``peer``; None when the kernel took everything."""
        return self._links[peer].send(MESSAGE_TAGS + number, payload)

    def receive(self, target: memoryview, peer: int, number: int) -> asyncio.Future[None]:
        """Post the receive of message ``number`` from ``peer``."""
        return self._links[peer].receive(MESSAGE_TAGS + number, target)


class Floor(Adapter):
    """One rank of the least honest program. Option ``family``: unix, else TCP over loopback."""

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._mesh = FloorMesh(self.rank, self.size, context.directory, unix=context.options.get("family") == "unix")
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    async def open(self) -> None:
        await self._mesh.open()

    async def close(self) -> None:
        self._mesh.close()

    def barrier(self) -> Any:
        return self._mesh.barrier()

    def prepare(self, operation: str, buffers: Buffers) -> Start:
        if operation == "barrier":
            return self._mesh.barrier
        return partial(self._mesh.all_reduce, buffers.output, np.empty_like(buffers.output))

    def message(self, array: Array) -> Any:
        """Messages are views of bytes."""
        return bytes_of(array)

    def send(self, array: Any, peer: int) -> Any:
        """Send under the next tag; both sides count alike."""
        number = self._sent[peer] = self._sent.get(peer, 0) + 1
        return self._mesh.send(array, peer, number)

    def receive(self, array: Any, peer: int) -> Any:
        """Post a receive under the next tag."""
        number = self._received[peer] = self._received.get(peer, 0) + 1
        return self._mesh.receive(array, peer, number)


class Memcpy(Floor):
    """Raw copies: every rank copies as many bytes as the case's size once, at the same time as the others.

    A message is one copy by its receiver. Nothing travels, so there is nothing to verify; it bounds from below what any
    program can do that leaves the result where its user wants it.
    """

    verifies = False

    def allocate(self, elements: int) -> Array:
        """Return an array that has its pages."""
        return np.zeros(elements, np.float32)

    def prepare(self, operation: str, buffers: Buffers) -> Start:
        larger = max(buffers.input, buffers.output, key=lambda array: array.size)
        source, target = np.ones_like(larger), larger
        return partial(np.copyto, target, source)

    def message(self, array: Array) -> Any:
        """A message is where it goes and what is copied there."""
        return array, np.ones_like(array)

    def send(self, array: Any, peer: int) -> Any:
        """Nothing: the receiver copies."""

    def receive(self, array: Any, peer: int) -> Any:
        """Return the copy, made when it is awaited."""
        return _copy(*array)


async def _copy(target: Array, source: Array) -> None:
    np.copyto(target, source)
    await asyncio.sleep(0)
