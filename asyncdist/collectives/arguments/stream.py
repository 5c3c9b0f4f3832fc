"""StreamCall: a broadcast or all_gather whose chunks are handed over one by one, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from asyncdist.arrays.host import Array, Flat, host_array
from asyncdist.collectives.arguments.call import NO_BLOCKS, Call, blocks_like, check_same_dtype
from asyncdist.concurrency.integers import as_int

STREAM_WINDOW: Final = 4
"""Chunks a rank has under way, and chunks it receives ahead of its consumer: one on the wire, one being passed on, one
waiting to be consumed, and one for when the loop pauses."""

MAX_CHUNKS: Final = 1 << 16
"""Chunks of a stream. Their numbers and those of a plan's messages share 32 bits; and a stream of smaller chunks than
that is all overhead."""


class Progress:
    """How far a stream is: what its operation and its consumer share. `advance` is told when the consumer goes on."""

    __slots__ = ("_ahead", "_waiter", "advance", "count", "ready", "released", "taken")

    def __init__(self) -> None:
        self.count = 0
        self.ready = 0
        """Chunks that are complete, and all before them."""
        self.taken = 0
        """Chunks handed to the consumer."""
        self.released = False
        """Whether the consumer takes no more: the rest comes without waiting for it."""
        self.advance: Callable[[], None] | None = None
        self._ahead: set[int] = set()
        self._waiter: asyncio.Future[None] | None = None

    def chunk_done(self, index: int) -> None:
        """A chunk is complete here, and passed on."""
        self._ahead.add(index)
        while self.ready in self._ahead:
            self._ahead.remove(self.ready)
            self.ready += 1
        self.wake()

    def take(self) -> int:
        """Hand the next chunk to the consumer."""
        self.taken += 1
        if self.advance is not None:
            self.advance()
        return self.taken - 1

    def release(self) -> None:
        """The consumer takes no more."""
        if not self.released:
            self.released = True
            self.wake()
            if self.advance is not None:
                self.advance()

    def wake(self) -> None:
        """Wake the consumer: something has happened that it should look at."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def change(self) -> None:
        """Wait until something happens. Raises RuntimeError if another task does."""
        if self._waiter is not None:
            raise RuntimeError("another task is iterating over this stream")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


@dataclass(slots=True)
class StreamCall(Call):
    """A collective in chunks; `counts` are those of one chunk, `length` the elements of the vector or of a block.

    `own` is what this rank contributes to an all_gather, `blocks` is where everybody's go; a broadcast has one block.
    """

    length: int = 0
    own: Array | None = None
    blocks: Sequence[Array] = ()
    progress: Progress | None = None

    def __post_init__(self) -> None:
        Call.__post_init__(self)
        self.nbytes = self.length * self.dtype.itemsize

    @property
    def chunk_length(self) -> int:
        """Elements of every chunk but the last."""
        assert isinstance(self.counts, int)
        return self.counts


def broadcast_stream(
    tensor: object, root: int, chunk_bytes: int, rank: int, size: int, progress: Progress
) -> StreamCall:
    """Any shape, contiguous; in place on every rank but the root, which only reads."""
    array = _contiguous(tensor, "tensor", writable=rank != root)
    call = _call("broadcast", array, tensor, chunk_bytes, progress, root)
    call.blocks = (array,)
    # Chunks follow one another down a chain, which every rank leaves as fast as its link is; if there are enough.
    call.algorithm = "chain" if progress.count >= size else None
    return call


def all_gather_stream(
    output: object, tensor: object, chunk_bytes: int, rank: int, size: int, progress: Progress
) -> StreamCall:
    """`output`: one array per rank, shaped like `tensor`, or one array of `size` times its elements; contiguous."""
    own = _contiguous(tensor, "input", writable=False)
    if isinstance(output, list | tuple):
        blocks_like(output, "output", size, host_array(tensor), writable=True)
        blocks = [_contiguous(block, f"output[{index}]", writable=True) for index, block in enumerate(output)]
    else:
        whole = _contiguous(output, "output", writable=True)
        check_same_dtype(own, whole, "input", "output")
        if whole.size != size * own.size:
            raise ValueError(f"output must hold {size} times the {own.size} elements of input, but holds {whole.size}")
        blocks = [whole[start : start + own.size] for start in range(0, whole.size, own.size)] if own.size else []
    if any(np.may_share_memory(own, block) and not _same(own, blocks[rank]) for block in blocks):
        own = own.copy()
    call = _call("all_gather", own, output, chunk_bytes, progress)
    call.own, call.blocks = own, blocks
    call.algorithm = "ring"  # every rank sends every byte once, and receives blocks where they belong
    return call


def _call(
    collective: str, array: Array, result: Any, chunk_bytes: int, progress: Progress, root: int = 0
) -> StreamCall:
    chunk_bytes = as_int(chunk_bytes, "chunk_bytes must be an int")
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be positive, got {chunk_bytes}")
    chunk_length = max(1, min(chunk_bytes // array.itemsize, array.size))
    progress.count = -(-array.size // chunk_length)
    if progress.count > MAX_CHUNKS:
        raise ValueError(
            f"{array.nbytes} bytes in chunks of {chunk_bytes} are {progress.count} chunks, at most {MAX_CHUNKS} are "
            "allowed: give a larger chunk_bytes"
        )
    return StreamCall(
        collective=collective,
        dtype=array.dtype,
        counts=chunk_length,
        inputs=NO_BLOCKS,
        outputs=NO_BLOCKS,
        result=result,
        root=root,
        detail=f"stream of {array.size}",
        length=array.size,
        progress=progress,
    )


def _contiguous(value: object, name: str, *, writable: bool) -> Array:
    array = host_array(value, name)
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not C-contiguous, so that its chunks would not be parts of it; copy it first")
    return Flat(array, writable=writable, name=name).elements


def _same(left: Array, right: Array) -> bool:
    return left.ctypes.data == right.ctypes.data and left.nbytes == right.nbytes
