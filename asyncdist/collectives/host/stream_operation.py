"""StreamOperation: a collective carried out chunk by chunk, no further ahead of its consumer than a window.

Every chunk is a small collective of its own whose messages are numbered apart. A rank that waits for its consumer posts
no receives, so its sources' messages stay where they are and those ranks stop as well, a window later each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from asyncdist.arrays.host import Array
from asyncdist.collectives.arguments.stream import STREAM_WINDOW, Progress, StreamCall
from asyncdist.collectives.backend import CollectiveWork, OnEnd
from asyncdist.collectives.executor.buffers import NO_BUFFER, BlockBuffer, Bound, FlatBuffer
from asyncdist.collectives.executor.program import Program
from asyncdist.collectives.executor.runner import Execution
from asyncdist.collectives.host.operation import Recipe
from asyncdist.transport.protocol.frame import key_prefix

if TYPE_CHECKING:
    from asyncdist.collectives.host.backend import HostBackend


class StreamOperation:
    """One call under way. `on_end(work, error)` is called once, unless the backend forgets the operation first."""

    __slots__ = (
        "_advancing",
        "_finished",
        "_gated",
        "_last",
        "_next",
        "_on_end",
        "_progress",
        "_stopped",
        "_under_way",
        "_work",
        "backend",
        "call",
        "prefix",
        "recipe",
    )

    def __init__(
        self, backend: HostBackend, call: StreamCall, recipe: Recipe, work: CollectiveWork, on_end: OnEnd
    ) -> None:
        assert call.progress is not None
        self.backend = backend
        self.call = call
        self.recipe = recipe
        self.prefix = key_prefix(backend.group_id, work.tag, work.number)
        self._progress: Progress = call.progress
        self._work = work
        self._on_end = on_end
        self._next = 0
        self._finished = 0
        self._under_way: dict[int, _Chunk] = {}
        self._advancing = False
        self._stopped = False
        # Who only sends has nothing to protect from a slow consumer: its receivers hold it back.
        self._gated = call.collective != "broadcast" or backend.rank != call.root
        rest = call.length % call.chunk_length
        self._last = backend.recipe_for(replace(call, counts=rest)).program if rest else recipe.program

    def begin(self) -> None:
        """Start."""
        self._progress.advance = self.advance
        if self._progress.count:
            self.advance()
        else:
            self._end()

    def advance(self) -> None:
        """Start chunks as far as the window and the consumer allow, letting the loop run between windows."""
        if self._advancing:
            return
        self._advancing = True
        started = 0
        while self._may_start():
            if started == STREAM_WINDOW:
                self.backend.loop.call_soon(self.advance)
                break
            started += 1
            index = self._next
            self._next += 1
            try:
                chunk = self._under_way[index] = _Chunk(self, index, self._program(index))
            except Exception as error:  # memory is short
                self.chunk_ended(index, error)
                break
            chunk.start()
        self._advancing = False

    def release(self) -> None:
        """Wait for the consumer no longer."""
        self._progress.release()

    def stop(self) -> None:
        """Forget the operation: no array is read or written any more."""
        self._stopped = True
        self._progress.advance = None
        chunks = list(self._under_way.values())
        self._under_way.clear()
        for chunk in chunks:
            chunk.stop()

    def waiting_for(self) -> tuple[int, ...]:
        """Group ranks that have not sent or taken what is under way."""
        return tuple(sorted({rank for chunk in self._under_way.values() for rank in chunk.waiting_for()}))

    def chunk_ended(self, index: int, error: BaseException | None) -> None:
        """A chunk is complete, or the stream has failed with it."""
        if self._stopped:
            return
        if error is not None:
            self.backend.drop(self._work.tag, self._work.number)  # stops us
            self._on_end(self._work, error)
            return
        del self._under_way[index]
        self._finished += 1
        self._progress.chunk_done(index)
        if self._finished == self._progress.count:
            self._end()
        else:
            self.advance()

    def _end(self) -> None:
        self._stopped = True
        self._progress.advance = None
        self.backend.forget(self._work)
        self._on_end(self._work, None)

    def _may_start(self) -> bool:
        progress = self._progress
        if self._stopped or self._next == progress.count or len(self._under_way) >= STREAM_WINDOW:
            return False
        return not self._gated or progress.released or self._next < progress.taken + STREAM_WINDOW

    def _program(self, index: int) -> Program:
        count = self._progress.count
        program = self._last if index == count - 1 else self.recipe.program
        return program.renumbered(count, index)


class _Chunk(Execution):
    """One chunk on its way."""

    __slots__ = ("_index", "_owner", "_scratch")

    def __init__(self, owner: StreamOperation, index: int, program: Program) -> None:
        self._owner = owner
        self._index = index
        self._scratch: Array | None = None
        call, backend = owner.call, owner.backend
        start = index * call.chunk_length
        stop = min(start + call.chunk_length, call.length)
        if call.own is None:
            source: Bound = NO_BUFFER
            target: Bound = FlatBuffer(call.blocks[0][start:stop])
        else:
            source = FlatBuffer(call.own[start:stop])
            target = BlockBuffer([block[start:stop] for block in call.blocks])
        staging: Bound = NO_BUFFER
        if program.plan.scratch_count:
            self._scratch = backend.resources.pool.take(program.plan.scratch_count * call.dtype.itemsize)
            staging = FlatBuffer(self._scratch.view(call.dtype))
        buffers, fingerprint = (source, target, staging), owner.recipe.fingerprint
        super().__init__(backend.resources, program, buffers, owner.prefix, fingerprint, call.dtype.itemsize)

    def ended(self, error: BaseException | None) -> None:
        """Every step is done, or one has failed."""
        self._give_scratch()
        self._owner.chunk_ended(self._index, error)

    def stop(self) -> None:
        """See Execution.stop."""
        super().stop()
        self._give_scratch()

    def _give_scratch(self) -> None:
        if self._scratch is not None:
            self.pool.give(self._scratch)
            self._scratch = None
