"""StagedMessages: the data of messages of GPU arrays through page-locked memory, in chunks.

A chunk travels while the next is copied. Each transfer is a task of its own, which ends with its work. A buffer of
page-locked memory has holders: the transfer, a copy on the GPU's queue, and the message that leaves from the buffer or
arrives in it. A transfer may fail long before the other two have ended, so the last holder gives the buffer back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from asyncdist.concurrency.tasks import start_task
from asyncdist.cuda import Pinned, Runtime, Stream
from asyncdist.errors import ClosedError, DistError
from asyncdist.gpu.messages import DeviceRecvWork, DeviceSendWork
from asyncdist.gpu.path import Surroundings
from asyncdist.gpu.streams import tail_of
from asyncdist.gpu.threads import Helpers, close_all, close_behind, made_in_thread
from asyncdist.transport.protocol.frame import pack_key
from asyncdist.transport.protocol.operations import Receive, SendOp

__all__ = ["STAGE_BYTES", "StagedMessages", "Stages"]

STAGE_BYTES: Final = 4 << 20
"""Bytes of a chunk: long enough that copies run at full speed, short enough that they overlap with what travels."""

STAGES_KEPT: Final = 8
"""Buffers kept for later messages: 32 MiB of page-locked memory at most."""

TRANSFERS: Final = 2
"""Messages to, or from, one rank whose data is under way at once: one is copied while the other travels. Both ends take
them in the order of the answers, so that neither waits for one that the other has not begun."""

_CHANNEL: Final = 0

AnyWork = DeviceSendWork | DeviceRecvWork
Transfer = Callable[[], Coroutine[Any, Any, None]]


class StagedMessages:
    """Of one group."""

    def __init__(self, around: Surroundings, group_id: int, helpers: Helpers) -> None:
        self._around = around
        self._id = group_id
        self._stages = Stages(around.loop, around.runtime, helpers, STAGE_BYTES)
        self._streams: dict[tuple[int, bool], Stream] = {}
        self._turns: dict[tuple[int, bool], asyncio.Semaphore] = {}
        self._tasks: dict[AnyWork, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def send(self, work: DeviceSendWork) -> None:
        """Send the data of a message that was answered."""
        self._run(work, partial(self._send, work), work.peer, sending=True)

    def receive(self, work: DeviceRecvWork, number: int, nbytes: int, source: int) -> None:
        """Receive the data of message `number` of global rank `source`."""
        self._run(work, partial(self._receive, work, number, nbytes, source), source, sending=False)

    def forget(self, work: AnyWork) -> None:
        """A work has ended."""
        task = self._tasks.pop(work, None)
        if task is not None and not task.done() and asyncio.current_task(self._around.loop) is not task:
            task.cancel()

    def _run(self, work: AnyWork, transfer: Transfer, peer: int, *, sending: bool) -> None:
        turn = self._turns.setdefault((peer, sending), asyncio.Semaphore(TRANSFERS))
        task = start_task(self._around.loop, self._until_ended(work, transfer, turn), name="GPU message")
        self._tasks[work] = task
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _until_ended(self, work: AnyWork, transfer: Transfer, turn: asyncio.Semaphore) -> None:
        try:
            async with turn:
                await transfer()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            work.complete(error)
        else:
            work.complete(None)

    async def _send(self, work: DeviceSendWork) -> None:
        array, stages = work.array, self._stages
        stream = self._stream(array.device, sending=True)
        for event in work.ready:
            stream.wait_event(event)
        leaving: deque[tuple[asyncio.Future[None], Pinned]] = deque()
        taken: list[Pinned] = []
        try:
            for index, start in enumerate(range(0, array.nbytes, STAGE_BYTES)):
                nbytes = min(STAGE_BYTES, array.nbytes - start)
                if len(taken) < 2:
                    taken.append(await stages.take())
                    buffer = taken[-1]
                else:
                    buffer = await _oldest(leaving)
                await self._copy(buffer.pointer, array.pointer + start, nbytes, stream, work, buffer)
                leaving.append((self._post(work.peer, work.number, index, buffer, nbytes), buffer))
            while leaving:
                await _oldest(leaving)
        finally:
            for buffer in taken:
                stages.drop(buffer)

    async def _receive(self, work: DeviceRecvWork, number: int, nbytes: int, source: int) -> None:
        array, stages = work.array, self._stages
        stream = self._stream(array.device, sending=False)
        for event in work.ready:
            stream.wait_event(event)
        copied: deque[tuple[asyncio.Future[None], Pinned]] = deque()
        taken: list[Pinned] = []
        try:
            for index, start in enumerate(range(0, nbytes, STAGE_BYTES)):
                size = min(STAGE_BYTES, nbytes - start)
                if len(taken) < 2:
                    taken.append(await stages.take())
                    buffer = taken[-1]
                else:
                    buffer = await _oldest(copied)
                await self._fetch(source, number, index, buffer, size)
                last = start + size == nbytes
                reached = self._copy(array.pointer + start, buffer.pointer, size, stream, work, buffer, last=last)
                copied.append((reached, buffer))
            while copied:
                await _oldest(copied)
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
        """Queue a copy to or from a buffer; done once the GPU has come so far. Streams may wait for the `last`.

        If it fails, nothing says when the GPU is through with the buffer, which is held until the stream's end then.
        """
        around = self._around
        self._stages.hold(buffer)
        around.runtime.copy(target, source, nbytes, stream)
        event = around.events.recorded(stream)
        if last:
            tail_of(work).queued((event,))
        reached: asyncio.Future[None] = around.loop.create_future()
        reached.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps nobody asks

        def ended(error: BaseException | None) -> None:
            around.events.give((event,))
            self._stages.drop(buffer)
            if reached.done():
                return
            if error is None:
                reached.set_result(None)
            else:
                reached.set_exception(error)

        around.completions.add(stream, (event,), ended, (work, buffer))
        return reached

    def _post(self, peer: int, number: int, index: int, buffer: Pinned, nbytes: int) -> asyncio.Future[None]:
        sink = _Sink(self._around.loop, self._stages, buffer)
        key = pack_key(self._id, 1 + index, number, 0, _CHANNEL)
        op = SendOp(key, buffer.array.data[:nbytes], b"", sink, None)
        try:
            if self._around.mesh.post_send(peer, op):
                sink.message_sent(None)
        except DistError as error:
            sink.message_failed(None, error)
        return sink.ended

    def _fetch(self, source: int, number: int, index: int, buffer: Pinned, nbytes: int) -> asyncio.Future[None]:
        sink = _Sink(self._around.loop, self._stages, buffer)
        key = pack_key(self._id, 1 + index, number, 0, _CHANNEL)
        receive = Receive(key, buffer.array.data[:nbytes], sink, None)
        try:
            if self._around.mesh.post_receive(source, receive):
                sink.message_received(None, receive)
        except DistError as error:
            sink.message_failed(None, error)
        return sink.ended

    def _stream(self, device: int, *, sending: bool) -> Stream:
        self._stages.device = device
        stream = self._streams.get((device, sending))
        if stream is None:
            stream = self._streams[device, sending] = self._around.runtime.new_stream(device)
        return stream

    def close(self, *, dropped: bool) -> None:
        """End what is under way, and free buffers once the GPU is through with them.

        `dropped`: the transport has dropped the group of `group_id`, and uses none of them. Idempotent.
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


class _Sink:
    """Turns the end of one message into a future's; holds the buffer until then, even if the waiter is gone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, stages: Stages, buffer: Pinned) -> None:
        stages.hold(buffer, posted=True)
        self._stages = stages
        self._buffer = buffer
        self.ended: asyncio.Future[None] = loop.create_future()
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps nobody asks

    def message_sent(self, token: Any) -> None:
        """The chunk has left."""
        self._stages.told(self._buffer)
        if not self.ended.done():
            self.ended.set_result(None)

    def message_received(self, token: Any, receive: Receive) -> None:
        """The chunk is here."""
        self.message_sent(token)

    def message_failed(self, token: Any, error: BaseException) -> None:
        """The other end is gone."""
        self._stages.told(self._buffer)
        if not self.ended.done():
            self.ended.set_exception(error)

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Never: there is a target."""
        raise AssertionError("the chunk has a place")


class Stages:
    """Buffers of `nbytes`. All methods are called on the loop's thread; page-locking and freeing happen in others."""

    def __init__(self, loop: asyncio.AbstractEventLoop, runtime: Runtime, helpers: Helpers, nbytes: int) -> None:
        self.device = 0
        """A GPU that is used here: other ones must not be touched."""
        self._loop = loop
        self._runtime = runtime
        self._helpers = helpers
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
        """A buffer that the caller holds. Cancelling loses none, also if it is being made."""
        if self._free:
            buffer = self._free.pop()
        else:
            on = self._runtime, self.device
            buffer = await made_in_thread(self._loop, self._runtime.pinned, self._nbytes, on=on, discard=close_all)
        self._holders[buffer] = 1
        return buffer

    def hold(self, buffer: Pinned, *, posted: bool = False) -> None:
        """Add a holder of a buffer; with `posted` the transport, which reports its end unless its group is dropped.

        Raises ClosedError once the buffer was freed, as the group has ended.
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
        """Close `streams` once the GPU is through with them, and then free buffers.

        What the transport uses is freed when that tells of its end; now, if its group was `dropped`. Idempotent.
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
