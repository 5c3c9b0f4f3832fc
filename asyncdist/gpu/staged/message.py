"""StagedMessages: the data of messages of GPU arrays through page-locked memory, in chunks.

A chunk travels while the next chunk is copied. Each transfer is a task of its own, which ends with its work. A buffer
of page-locked memory has holders: the transfer, a copy in a stream, and the message that leaves from the buffer or
arrives in the buffer. A transfer may fail long before the other two have ended, so the last holder gives the buffer
back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from asyncdist.concurrency.tasks import start_task
from asyncdist.cuda import Pinned, Stream
from asyncdist.errors import ClosedError, DistError
from asyncdist.gpu.messages import DeviceRecvWork, DeviceSendWork
from asyncdist.gpu.path import Surroundings
from asyncdist.gpu.streams import tail_of
from asyncdist.gpu.threads import Helpers, close_all, close_behind, made_in_thread, settle
from asyncdist.transport.protocol.frame import pack_key
from asyncdist.transport.protocol.operations import Receive, SendOp

__all__ = ["STAGE_BYTES", "StagedMessages", "Stages"]

STAGE_BYTES: Final = 4 << 20
"""Bytes of a chunk: long enough that copies run at full speed, short enough that they overlap with what travels."""

STAGES_KEPT: Final = 8
"""Buffers kept for later messages: 32 MiB of page-locked memory at most."""

TRANSFERS: Final = 2
"""Messages to, or from, one rank whose data is under way at once: one is copied while the other travels. Both ends take
the messages in the order of the answers, so that no end waits for a message that the other has not begun."""

_CHANNEL: Final = 0

AnyWork = DeviceSendWork | DeviceRecvWork


class StagedMessages:
    """Of one group."""

    def __init__(self, around: Surroundings, group_id: int, helpers: Helpers) -> None:
        self._around = around
        self._id = group_id
        self._stages = Stages(helpers, STAGE_BYTES)
        self._streams: dict[tuple[int, bool], Stream] = {}
        self._turns: dict[tuple[int, bool], asyncio.Semaphore] = {}
        self._tasks: dict[AnyWork, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def move(self, work: AnyWork) -> None:
        """Send, or receive, the data of a message that has met its receive."""
        task = start_task(self._around.loop, self._transfer(work), name="GPU message")
        self._tasks[work] = task
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def forget(self, work: AnyWork) -> None:
        """A work has ended."""
        task = self._tasks.pop(work, None)
        if task is not None and not task.done() and asyncio.current_task(self._around.loop) is not task:
            task.cancel()

    async def _transfer(self, work: AnyWork) -> None:
        sending = isinstance(work, DeviceSendWork)
        try:
            async with self._turns.setdefault((work.peer, sending), asyncio.Semaphore(TRANSFERS)):
                await self._move(work, sending=sending)
        except Exception as error:
            work.complete(error)
        else:
            work.complete(None)

    async def _move(self, work: AnyWork, *, sending: bool) -> None:
        stages, nbytes = self._stages, work.nbytes
        stream = self._stream(work.array.device, sending=sending)
        for event in work.ready:
            stream.wait_event(event)
        under_way: deque[tuple[asyncio.Future[None], Pinned]] = deque()
        taken: list[Pinned] = []
        try:
            for index, start in enumerate(range(0, nbytes, STAGE_BYTES)):
                size = min(STAGE_BYTES, nbytes - start)
                if len(taken) < 2:
                    taken.append(await stages.take())
                    buffer = taken[-1]
                else:
                    buffer = await _oldest(under_way)
                place = work.array.pointer + start
                key = pack_key(self._id, 1 + index, work.number, 0, _CHANNEL)
                if sending:
                    await self._copy(buffer.pointer, place, size, stream, work, buffer)
                    ended = self._post(key, work.peer, buffer, size, sending=True)
                else:
                    await self._post(key, work.peer, buffer, size, sending=False)
                    last = start + size == nbytes
                    ended = self._copy(place, buffer.pointer, size, stream, work, buffer, last=last)
                under_way.append((ended, buffer))
            while under_way:
                await _oldest(under_way)
        finally:
            for buffer in taken:
                stages.drop(buffer)

    def _copy(
        self,
        target: int,
        source: int,
        nbytes: int,
        stream: Stream,
        work: AnyWork,
        buffer: Pinned,
        *,
        last: bool = False,
    ) -> asyncio.Future[None]:
        """Queue a copy to or from a buffer. The future ends once the GPU has come so far; streams may wait for `last`.

        If queueing fails, nothing says when the GPU is through with the buffer, which is held until the stream's end.
        """
        around = self._around
        self._stages.hold(buffer)
        around.runtime.copy(target, source, nbytes, stream)
        event = around.events.recorded(stream)
        if last:
            tail_of(work).queued((event,))
        reached = _quiet_future(around.loop)

        def ended(error: BaseException | None) -> None:
            around.events.give((event,))
            self._stages.drop(buffer)
            settle(reached, None, error)

        around.completions.add(stream, (event,), ended, (work, buffer))
        return reached

    def _post(self, key: bytes, peer: int, buffer: Pinned, nbytes: int, *, sending: bool) -> asyncio.Future[None]:
        """Send a chunk from a buffer, or receive one into the buffer."""
        mesh, view = self._around.mesh, buffer.array.data[:nbytes]
        sink = _Sink(self._around.loop, self._stages, buffer)
        try:
            if sending:
                complete = mesh.post_send(peer, SendOp(key, view, b"", sink, None))
            else:
                complete = mesh.post_receive(peer, Receive(key, view, sink, None))
        except DistError as error:
            sink.message_failed(None, error)
        else:
            if complete:
                sink.message_sent(None)
        return sink.ended

    def _stream(self, device: int, *, sending: bool) -> Stream:
        self._stages.device = device
        stream = self._streams.get((device, sending))
        if stream is None:
            stream = self._streams[device, sending] = self._around.runtime.new_stream(device)
        return stream

    def close(self, *, dropped: bool) -> None:
        """End what is under way, and free buffers once the GPU is through with them. Idempotent.

        `dropped`: the transport has dropped the group of `group_id`, and uses no buffer.
        """
        for task in list(self._tasks.values()):
            task.cancel()
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            self._around.completions.drop(stream)
        self._stages.close(streams, dropped=dropped)

    async def wait_closed(self) -> None:
        """Wait for the tasks that were cancelled."""
        if self._ending:
            await asyncio.wait(set(self._ending))


async def _oldest(under_way: deque[tuple[asyncio.Future[None], Pinned]]) -> Pinned:
    """The buffer of the oldest chunk, once that chunk has ended."""
    future, buffer = under_way.popleft()
    await future
    return buffer


def _quiet_future(loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
    """A future whose failure needs no reader."""
    future: asyncio.Future[None] = loop.create_future()
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return future


class _Sink:
    """Turns the end of one message into a future's, and holds the buffer until then, also without a waiter."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stages: Stages, buffer: Pinned) -> None:
        stages.hold(buffer, posted=True)
        self._stages = stages
        self._buffer = buffer
        self.ended = _quiet_future(loop)

    def message_sent(self, token: Any) -> None:
        self._end(None)

    def message_received(self, token: Any, receive: Receive) -> None:
        self._end(None)

    def message_failed(self, token: Any, error: BaseException) -> None:
        self._end(error)

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        raise AssertionError("the chunk has a place")

    def _end(self, error: BaseException | None) -> None:
        self._stages.told(self._buffer)
        settle(self.ended, None, error)


class Stages:
    """Buffers of `nbytes`. Methods are called on the loop's thread; other threads page-lock and free."""

    def __init__(self, helpers: Helpers, nbytes: int) -> None:
        self.device = 0
        """A GPU that is used here. Other GPUs must not be touched."""
        self._helpers = helpers
        self._runtime = helpers.on[0]
        self._nbytes = nbytes
        self._free: list[Pinned] = []
        self._holders: dict[Pinned, int] = {}
        self._posted: set[Pinned] = set()
        self._closed = False

    @property
    def used(self) -> int:
        """Buffers that have a holder."""
        return len(self._holders)

    async def take(self) -> Pinned:
        """A buffer that the caller holds. Cancelling loses no buffer, also none that is being made."""
        if self._free:
            buffer = self._free.pop()
        else:
            loop, on = self._helpers.loop, (self._runtime, self.device)
            buffer = await made_in_thread(loop, self._runtime.pinned, self._nbytes, on=on, discard=close_all)
        self._holders[buffer] = 1
        return buffer

    def hold(self, buffer: Pinned, *, posted: bool = False) -> None:
        """Add a holder of a buffer. `posted`: the transport, which reports its end unless the group is dropped.

        Raises ClosedError once the buffer was freed because the group has ended.
        """
        if buffer not in self._holders:
            raise ClosedError("the group's messages have ended")
        self._holders[buffer] += 1
        if posted:
            self._posted.add(buffer)

    def told(self, buffer: Pinned) -> None:
        """The transport is through with a buffer."""
        self._posted.discard(buffer)
        self.drop(buffer)

    def drop(self, buffer: Pinned) -> None:
        """A holder releases a buffer; the last one gives it back."""
        holders = self._holders.get(buffer)
        if holders is None:  # it was freed as the group ended
            return
        if holders > 1:
            self._holders[buffer] = holders - 1
            return
        del self._holders[buffer]
        self._give(buffer)

    def close(self, streams: list[Stream], *, dropped: bool) -> None:
        """Close `streams` once the GPU is through with them, and then free buffers. Idempotent.

        A buffer that the transport uses is freed when the transport reports its end; now, if the group was `dropped`.
        """
        self._closed = True
        buffers, self._free = self._free, []
        for buffer in list(self._holders):
            if dropped or buffer not in self._posted:
                del self._holders[buffer]
                self._posted.discard(buffer)
                buffers.append(buffer)
        if streams or buffers:
            self._helpers.start(close_behind, self._runtime, self.device, streams, buffers)

    def _give(self, buffer: Pinned) -> None:
        if self._closed or len(self._free) >= STAGES_KEPT:
            self._helpers.start(close_behind, self._runtime, self.device, (), (buffer,))
        else:
            self._free.append(buffer)
