"""A rank's messages to itself: the same core and matching rules, without a socket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from asyncdist.transport.protocol.frame import MAX_CALL_BYTES
from asyncdist.transport.protocol.peer import PeerCore

__all__ = ["LoopbackConnection"]

MAX_QUEUED_BYTES: Final = 2 * MAX_CALL_BYTES
"""Bytes on their way to ourselves before the writer says it is full, as a socket's buffer would."""


class LoopbackConnection:
    """Feeds what `core` writes back to it, in later turns of the loop and at most 1 MiB in each."""

    __slots__ = ("_chunks", "_core", "_handle", "_loop", "_queued", "_wants_flush")

    def __init__(self, loop: asyncio.AbstractEventLoop, core: PeerCore) -> None:
        self._loop = loop
        self._core = core
        self._chunks: deque[memoryview] = deque()
        self._queued = 0
        self._handle: asyncio.Handle | None = None
        self._wants_flush = False

    def start(self) -> None:
        """Let messages flow."""
        self._core.open(self._write, self._arm)

    def close(self) -> None:
        """Drop what is on its way. Idempotent."""
        self._chunks.clear()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _write(self, buffers: Sequence[bytes | memoryview]) -> int:
        if self._queued >= MAX_QUEUED_BYTES:
            return 0
        data = b"".join(buffers)
        self._chunks.append(memoryview(data))
        self._queued += len(data)
        self._schedule()
        return len(data)

    def _arm(self) -> None:
        self._wants_flush = True
        self._schedule()

    def _schedule(self) -> None:
        if self._handle is None:
            self._handle = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._handle = None
        budget = MAX_CALL_BYTES
        while self._chunks and budget > 0:
            chunk = self._chunks.popleft()
            buffer = self._core.get_buffer()
            nbytes = min(len(chunk), len(buffer))
            buffer[:nbytes] = chunk[:nbytes]
            if nbytes < len(chunk):
                self._chunks.appendleft(chunk[nbytes:])
            self._queued -= nbytes
            budget -= nbytes
            self._core.buffer_updated(nbytes)
        if self._wants_flush and self._queued < MAX_QUEUED_BYTES:
            self._wants_flush = False
            self._core.flush()
        if self._chunks or self._wants_flush:
            self._schedule()
