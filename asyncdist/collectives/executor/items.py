"""ItemExecution: one collective of items under way on this rank; see `plan.algorithms.items`.

An item's message says before its payload what it is (`meta`), and memory for it is allocated when that is known. What
has been received is passed on from the memory it was received into.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from asyncdist.collectives.executor.buffers import NO_BUFFER
from asyncdist.collectives.executor.program import RECV, SEND, Instruction, Program
from asyncdist.collectives.executor.runner import Execution, mismatch
from asyncdist.collectives.executor.scratch import ScratchPool
from asyncdist.transport.protocol.operations import Receive, SendOp
from asyncdist.transport.protocol.peer import PeerCore

__all__ = ["Item", "ItemExecution"]


class Item(NamedTuple):
    """Something whole: its bytes, and what they are."""

    meta: bytes
    octets: memoryview


class ItemExecution(Execution):
    """One rank's program of `plan.algorithms.items` on lists of items, one list per buffer of the plan.

    `check`, for subclasses to say, is asked before memory for an incoming item is allocated.
    """

    __slots__ = ("_arriving", "items")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        program: Program,
        inputs: Sequence[Item],
        outputs: list[Item | None],
        peers: Sequence[PeerCore | None],
        prefix: bytes,
        fingerprint: int,
        pool: ScratchPool,
    ) -> None:
        super().__init__(loop, program, _NO_BUFFERS, peers, prefix, fingerprint, 1, None, pool)
        self._arriving: dict[int, memoryview] = {}
        self.items: tuple[list[Item | None], ...] = (
            list(inputs),
            outputs,
            [None] * program.plan.scratch_count,
        )

    def check(self, source: int, nbytes: int, meta: bytes) -> None:
        """Raise unless an item of `nbytes` bytes from global rank `source` is welcome."""
        raise NotImplementedError

    def stop(self) -> None:
        """See Execution.stop; nothing is kept of what had arrived."""
        super().stop()
        self._arriving.clear()

    def _issue(self, index: int, step: Instruction) -> bool:
        """Start a step; True if it is done already."""
        items = self.items[step.buffer]
        peer: Any = self._peers[step.peer] if step.peer >= 0 else None
        if step.kind == SEND:
            item = items[step.start]
            assert item is not None, "a plan sends what is not there"
            done: bool = peer.post_send(
                SendOp(self._prefix + step.suffix, item.octets, item.meta, self, index, self._fingerprint)
            )
        elif step.kind == RECV:
            receive = Receive(self._prefix + step.suffix, None, self, index)
            done = peer.post_receive(receive)
            if done:
                self._place(index, receive)
        else:
            items[step.start] = self.items[step.source][step.source_start]
            return True
        if not done:
            self._waiting.add(index)
        return done

    def _place(self, index: int, receive: Receive) -> None:
        """An item is here, whole."""
        octets = self._arriving.pop(index)
        if receive.fingerprint != self._fingerprint:
            raise mismatch(receive)
        step = self._program.instructions[index]
        self.items[step.buffer][step.start] = Item(receive.meta, octets)

    def message_received(self, token: Any, receive: Receive) -> None:
        """An item is here, whole."""
        if self._stopped:
            return
        try:
            self._place(token, receive)
        except Exception as error:
            self.message_failed(token, error)
            return
        self._waiting.discard(token)
        self._complete(token)

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Make room for an item."""
        self.check(source, nbytes, meta)
        octets = self._arriving[token] = np.empty(nbytes, np.uint8).data
        return octets


_NO_BUFFERS: Final = (NO_BUFFER, NO_BUFFER, NO_BUFFER)
