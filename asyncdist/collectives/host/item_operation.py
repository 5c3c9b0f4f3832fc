"""ItemOperation: a collective of items, from its arguments to its result.

A message says before its payload what the item is (`meta`). Memory for the item is allocated then. An item is passed on
from the memory that received it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from asyncdist.arrays.host import Array, decode_meta, describe, human_bytes
from asyncdist.arrays.objects import OBJECT_META
from asyncdist.collectives.arguments.items import Item, ItemCall
from asyncdist.collectives.backend import CollectiveWork, OnEnd
from asyncdist.collectives.executor.buffers import NO_BUFFER
from asyncdist.collectives.executor.program import RECV, SEND, Instruction
from asyncdist.collectives.executor.runner import Execution, mismatch, run_sliced
from asyncdist.collectives.host.operation import Recipe
from asyncdist.errors import CollectiveMismatchError
from asyncdist.transport.protocol.frame import key_prefix
from asyncdist.transport.protocol.operations import Receive, SendOp

if TYPE_CHECKING:
    from asyncdist.collectives.host.backend import HostBackend


class ItemOperation(Execution):
    """One call under way: a plan of `one_by_one`, run on lists of items, one list per buffer of the plan.

    `on_end(work, error)` is called once, unless the backend forgets the operation first.
    """

    __slots__ = ("_arriving", "_backend", "_call", "_items", "_on_end", "_received_bytes", "_work")

    def __init__(
        self, backend: HostBackend, call: ItemCall, recipe: Recipe, work: CollectiveWork, on_end: OnEnd
    ) -> None:
        self._backend = backend
        self._call = call
        self._work = work
        self._on_end = on_end
        self._received_bytes = 0
        in_place = call.collective == "broadcast"
        outputs: list[Item | None] = [None] * (1 if call.collective in ("broadcast", "scatter") else call.terms.size)
        if in_place and call.contributed:
            outputs = list(call.contributed)
        prefix = key_prefix(backend.group_id, work.tag, work.number)
        super().__init__(backend.resources, recipe.program, (NO_BUFFER,) * 3, prefix, recipe.fingerprint)
        self._arriving: dict[int, memoryview] = {}
        inputs: list[Item | None] = [] if in_place else list(call.contributed)
        passed_on: list[Item | None] = [None] * recipe.plan.scratch_count
        self._items = (inputs, outputs, passed_on)

    def begin(self) -> None:
        """Start."""
        self.start()

    def stop(self) -> None:
        """See Execution.stop; nothing is kept of what had arrived."""
        super().stop()
        self._arriving.clear()

    def _issue(self, index: int, step: Instruction) -> bool:
        """Start a step; True if it is done already."""
        items = self._items[step.buffer]
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
            items[step.start] = self._items[step.source][step.source_start]
            return True
        if not done:
            self.waiting.add(index)
        return done

    def _place(self, index: int, receive: Receive) -> None:
        """An item is here, whole."""
        octets = self._arriving.pop(index)
        if receive.fingerprint != self._fingerprint:
            raise mismatch(receive)
        step = self._program.instructions[index]
        self._items[step.buffer][step.start] = Item(receive.meta, octets)

    def message_received(self, token: Any, receive: Receive) -> None:
        """An item is here, whole."""
        if self._stopped:
            return
        try:
            self._place(token, receive)
        except Exception as error:
            self.message_failed(token, error)
            return
        self.waiting.discard(token)
        self._complete(token)

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Make room for an item."""
        self._check(source, nbytes, meta)
        octets = self._arriving[token] = np.empty(nbytes, np.uint8).data
        return octets

    def _check(self, source: int, nbytes: int, meta: bytes) -> None:
        """Raise CollectiveMismatchError for what is no item of this operation, or too large."""
        terms, what = self._call.terms, "an object"
        if self._call.detail != "arrays":
            if meta != OBJECT_META:
                raise _no_item(source)
        else:
            what = _described(source, nbytes, meta)
        if nbytes > terms.item_bytes:
            raise CollectiveMismatchError(
                f"rank {source} sent {what} of {human_bytes(nbytes)}, above max_bytes={human_bytes(terms.item_bytes)}"
            )
        if self._received_bytes + nbytes > terms.total_bytes:
            raise CollectiveMismatchError(
                f"rank {source} sent {what} of {human_bytes(nbytes)}, {human_bytes(self._received_bytes + nbytes)} "
                f"with what came before, above max_total_bytes={human_bytes(terms.total_bytes)}"
            )
        self._received_bytes += nbytes

    def ended(self, error: BaseException | None) -> None:
        """Every step is done, or one has failed."""
        if error is not None:
            self._backend.drop(self._work.tag, self._work.number)
            self._on_end(self._work, error)
        elif self._call.copies_own:
            own = set(map(id, self._call.contributed))
            self._copy_own(iter([index for index, item in enumerate(self._outputs) if id(item) in own]))
        else:
            self._deliver()

    @property
    def _outputs(self) -> list[Item | None]:
        return self._items[1]

    def _copy_own(self, indices: Iterator[int]) -> None:
        """Give the result copies of what the caller lent us, slice by slice."""
        index = next(indices, None)
        if index is None:
            self._deliver()
            return
        item = self._outputs[index]
        assert item is not None
        source: Array = np.frombuffer(item.octets, np.uint8)
        copy = np.empty_like(source)
        self._outputs[index] = Item(item.meta, copy.data)

        def copy_slice(start: int, stop: int) -> None:
            if self._is_running():
                copy[start:stop] = source[start:stop]

        run_sliced(self._loop, source.size, 1, copy_slice, lambda: self._copy_own(indices))

    def _deliver(self) -> None:
        if not self._is_running():
            return
        error: Exception | None = None
        try:
            self._work.value = self._call.finish(cast("list[Item]", self._outputs))
        except Exception as failure:  # RemoteProtocolError: only we cannot use it; else memory is short, perhaps
            error = failure
        self._backend.forget(self._work)
        self._on_end(self._work, error)

    def _is_running(self) -> bool:
        """Whether the backend still knows this operation: it forgets those that were aborted or refused."""
        return self._backend.running.get(self._work.key) is self


def _described(source: int, nbytes: int, meta: bytes) -> str:
    try:
        dtype, shape = decode_meta(meta)
    except ValueError:
        raise _no_item(source) from None
    elements = 1
    for extent in shape:
        elements *= extent
    if elements * dtype.itemsize != nbytes:
        raise CollectiveMismatchError(f"rank {source} describes {describe(dtype, shape)}, but sent {nbytes} bytes")
    return describe(dtype, shape)


def _no_item(source: int) -> CollectiveMismatchError:
    return CollectiveMismatchError(
        f"rank {source} runs something else in this place of the order, or what it sent is malformed: another "
        "collective, arrays where objects are expected, or the reverse",
        source,
    )
