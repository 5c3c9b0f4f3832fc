"""Collectives whose result is used while it is still coming: chunk k while chunk k+1 is in flight."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from asyncdist.arrays.host import Array
from asyncdist.collectives.arguments import stream as call_stream
from asyncdist.collectives.arguments.stream import Progress, StreamCall
from asyncdist.concurrency.deadline import INHERIT, Timeout
from asyncdist.group.methods.issuer import Core, Issuer
from asyncdist.work import Work

DEFAULT_CHUNK_BYTES: Final = 1 << 20
"""A chunk unless told otherwise: about half a millisecond on the wire, ten times what its messages cost by existing."""


class StreamChunk(NamedTuple):
    """A piece of a stream that is complete here.

    `data` is a one-dimensional numpy view of the array that was given, from element `start` of it (all_gather: of the
    source's block) on. `source` is the rank it is from, numbered as in the call.
    """

    data: Array
    start: int
    source: int


class ChunkStream:
    """A collective under way, to be iterated over once, by one task: `async for chunk in stream`.

    The operation was issued when the call returned. `work` is its Work; the arrays belong to the operation until it is
    done, except the chunks that were handed over.

    A rank receives at most 4 chunks ahead of its consumer, and has at most 4 under way. So a slow consumer holds back
    the ranks that send to it, and these hold back others. Chunks of up to 64 KiB may run ahead by a further MiB. The
    source of a broadcast is held back by its receivers only.

    A loop may be left early: once the stream is closed (`aclose`, `async with`) or forgotten, or the group is closed,
    the rest comes in the background. But a stream that is neither iterated over nor closed makes the others wait, until
    the operation's time-out.

    Iterating raises what ended the operation, at the next chunk. Cancelling ends only the waiting: no chunk is lost.
    """

    def __init__(self, work: Work[Any], call: StreamCall, sources: Sequence[int]) -> None:
        assert call.progress is not None
        self.work = work
        self._progress = call.progress
        self._call = call
        self._sources = sources
        self._pending: deque[StreamChunk] = deque()
        self._ended = False
        progress = self._progress
        work.add_done_callback(lambda _work: progress.wake())

    @classmethod
    def issue(
        cls,
        core: Core,
        operation: str,
        tag: int,
        timeout: Timeout,
        make: Callable[..., StreamCall],
        sources: Sequence[int],
        *arguments: Any,
    ) -> Self:
        """Issue a collective whose chunks are handed over one by one, as they come."""
        made: list[StreamCall] = []

        def prepare() -> StreamCall:
            made.append(make(*arguments, core.rank, core.size, Progress()))
            return made[0]

        work = core.issue(operation, tag, timeout, prepare)
        return cls(work, made[0], sources)

    def __repr__(self) -> str:
        return f"<ChunkStream {self._progress.taken} of {self._progress.count} chunks, {self.work!r}>"

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamChunk:
        """The next chunk, in order; of an all_gather every rank's, in rank order, before the next ones."""
        progress = self._progress
        while not self._ended:
            if self.work.done() and not self.work.is_success():
                self.work.result()  # raises
            if self._pending:
                return self._pending.popleft()
            if progress.taken < progress.ready:
                self._pending.extend(self._chunks(progress.take()))
            elif progress.taken == progress.count:
                self._ended = True
            else:
                await progress.change()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Take no more chunks: the rest comes in the background, until `work` is done. Returns at once."""
        self._ended = True
        self._pending.clear()
        self._progress.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        progress = getattr(self, "_progress", None)
        if progress is not None and not progress.released and not self.work.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed; and whoever collects us may be any thread
                self.work._loop.call_soon_threadsafe(progress.release)

    def _chunks(self, index: int) -> list[StreamChunk]:
        start = index * self._call.chunk_length
        stop = start + self._call.chunk_length
        return [
            StreamChunk(block[start:stop], start, source)
            for block, source in zip(self._call.blocks, self._sources, strict=True)
        ]


class Streams(Issuer):
    """broadcast_stream and all_gather_stream."""

    ranks: tuple[int, ...]

    def broadcast_stream(
        self,
        tensor: Any,
        root: int,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
        in_global_ranks: bool = False,
    ) -> ChunkStream:
        """Copy the root's `tensor` into everybody's, handing over each chunk of `chunk_bytes` once it is complete.

        `tensor` is as for `broadcast`, and C-contiguous; `chunk_bytes` is the same on all ranks. See `ChunkStream`. On
        the root a chunk is complete when it may be written again. The time-out bounds the whole operation.
        """
        root = self._root("broadcast_stream", root, tag)
        sources = [self.ranks[root] if in_global_ranks else root]
        arguments = (tensor, root, chunk_bytes)
        return self._core.stream("broadcast_stream", tag, timeout, call_stream.broadcast_stream, sources, *arguments)

    def all_gather_stream(
        self,
        output: Any,
        input: Any,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        tag: int = 0,
        timeout: Timeout = INHERIT,
        in_global_ranks: bool = False,
    ) -> ChunkStream:
        """Gather everybody's `input` in `output`, handing over each chunk of each rank's once it is complete.

        `output` is one array of `size` times the elements of `input`, or a list of `size` arrays shaped like it; all
        are C-contiguous. `chunk_bytes`, of one rank's block, is the same on all ranks. See `ChunkStream`. The time-out
        bounds the whole operation.
        """
        sources = self.ranks if in_global_ranks else range(self.size)
        arguments = (output, input, chunk_bytes)
        return self._core.stream("all_gather_stream", tag, timeout, call_stream.all_gather_stream, sources, *arguments)
