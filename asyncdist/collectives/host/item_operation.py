"""ItemOperation: a collective of items of the `aio` backend, from its arguments to its result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np

from asyncdist.arrays.host import Array, decode_meta, describe, human_bytes
from asyncdist.arrays.objects import OBJECT_META
from asyncdist.collectives.arguments.items import ItemCall
from asyncdist.collectives.backend import CollectiveWork, OnEnd
from asyncdist.collectives.executor.items import Item, ItemExecution
from asyncdist.collectives.executor.sliced import run_sliced
from asyncdist.collectives.host.operation import Recipe
from asyncdist.errors import CollectiveMismatchError
from asyncdist.transport.protocol.frame import key_prefix

if TYPE_CHECKING:
    from asyncdist.collectives.host.backend import AioBackend

__all__ = ["ItemOperation"]


class ItemOperation(ItemExecution):
    """One call under way. `on_end(work, error)` is called once, unless the backend forgets the operation first."""

    __slots__ = ("_backend", "_call", "_on_end", "_received_bytes", "_work")

    def __init__(
        self,
        backend: AioBackend,
        call: ItemCall,
        recipe: Recipe,
        work: CollectiveWork,
        on_end: OnEnd,
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
        super().__init__(
            backend.loop,
            recipe.program,
            () if in_place else call.contributed,
            outputs,
            backend.peers,
            key_prefix(backend.group_id, work.tag, work.number),
            recipe.fingerprint,
            backend.pool,
        )

    def begin(self) -> None:
        """Start."""
        self.start()

    def check(self, source: int, nbytes: int, meta: bytes) -> None:
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
        return self.items[1]

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
            if self._wanted():
                copy[start:stop] = source[start:stop]

        run_sliced(self._loop, source.size, 1, copy_slice, lambda: self._copy_own(indices))

    def _deliver(self) -> None:
        if not self._wanted():
            return
        error: Exception | None = None
        try:
            self._work.value = self._call.finish(cast("list[Item]", self._outputs))
        except Exception as failure:  # RemoteProtocolError: only we cannot use it; else memory is short, perhaps
            error = failure
        self._backend.forget(self._work)
        self._on_end(self._work, error)

    def _wanted(self) -> bool:
        """Whether the backend still knows this operation: it forgets those that were aborted or refused."""
        return self._backend.knows(self, self._work)


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
