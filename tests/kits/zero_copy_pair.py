"""Two connection cores that lend each other memory, without sockets."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from transport_pair import Pair, Recorder, send

from asyncdist.transport.fork import SocketSet
from asyncdist.transport.protocol.peer import PeerCore
from asyncdist.transport.protocol.zero_copy import COPY_BYTES, ZeroCopy
from asyncdist.transport.shared_memory.arrays import SharedArrays
from asyncdist.transport.shared_memory.process_memory import OwnMemory
from asyncdist.transport.shared_memory.segment import ARENA, Parcel

FDS = SocketSet(lambda: None)
LARGE = 2 * COPY_BYTES + 1000


class FakeLoop:
    def call_soon_threadsafe(self, callback: Any) -> None:
        callback()


class Side:
    """One end: its arrays, and what a ShmConnection does for its zero_copy. Both are of one process."""

    peer_process = os.getpid()

    def __init__(self, core: PeerCore, own: OwnMemory | None = None) -> None:
        self.core = core
        self.other: Side
        self.deaf = False
        self.forsaken: list[int] = []
        loop: Any = FakeLoop()
        numbers = iter(range(1, 1 << 30))
        self.arrays = SharedArrays(loop, FDS, lambda: next(numbers), lambda number: self.zero_copy.release(number))
        self.own = own
        self.zero_copy = ZeroCopy(self, self.arrays, own)

    def offer(self, number: int) -> None:
        segment = self.arrays.segment(number)
        fds = () if self.other.deaf else (os.dup(segment.fd),)
        self.other.zero_copy.attach(Parcel(ARENA, number, segment.size, fds))

    def tell(self, frame: bytes) -> None:
        self.core.send_frame(frame)

    def detach(self, number: int) -> None:
        self.forsaken.append(number)

    def array(self, nbytes: int) -> memoryview:
        made = self.arrays.empty((nbytes,), np.dtype(np.uint8))
        assert made is not None
        made[...] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        return made.data


class ZeroCopyPair(Pair):
    """Two cores whose arrays the other can map. Those of `reading` let their process be read, and read."""

    def __init__(self, rng: random.Random | None = None, reading: Sequence[int] = ()) -> None:
        super().__init__(rng, opened=False)
        own_a, own_b = (OwnMemory() if rank in reading else None for rank in range(2))
        self.sides = Side(self.a, own_a), Side(self.b, own_b)
        self.sides[0].other, self.sides[1].other = self.sides[1], self.sides[0]
        for wire, side in zip((self.ab, self.ba), self.sides, strict=True):
            wire.source.open(wire._write, wire._arm, side.zero_copy)
        for side in self.sides:
            side.zero_copy.open()

    def copy(self) -> bool:
        """One turn of copying on both sides."""
        busy = False
        for side in self.sides:
            if side.zero_copy.copies:
                busy = True
                side.zero_copy.advance()
                side.core.kick()
        return busy

    def run(self) -> None:
        for _ in range(1000):
            super().run()
            if not self.copy():
                return
        raise AssertionError("copying never ends")

    def mapped(self, array: memoryview) -> None:
        """Have the peer of `a` map where `array` is."""
        assert self.sides[0].zero_copy.expose(array) is None
        self.run()
        assert self.sides[0].zero_copy.expose(array) is not None

    def close(self) -> None:
        for side in self.sides:
            side.zero_copy.close()
            side.arrays.close()


def post(core: PeerCore, sink: Recorder, key: bytes, data: memoryview, token: Any = None, meta: bytes = b"") -> None:
    send(core, sink, key, data, token, meta)  # type: ignore[arg-type]
