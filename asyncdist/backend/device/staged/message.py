"""StagedMessages: the data of messages of GPU arrays through page-locked memory, in chunks.

A chunk travels while the next is copied. Each transfer is a task of its own, which ends with its work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from asyncdist.backend.device.messages import DeviceRecvWork, DeviceSendWork
from asyncdist.backend.device.path import Surroundings
from asyncdist.backend.device.tail import tail_of
from asyncdist.backend.device.threads import Helpers, in_thread
from asyncdist.cuda import Pinned, Runtime, Stream
from asyncdist.errors import DistBackendError, DistError
from asyncdist.tasks import start_task
from asyncdist.transport.protocol.frame import pack_key
from asyncdist.transport.protocol.matching import Receive, SendOp

__all__ = ["STAGE_BYTES", "StagedMessages"]

STAGE_BYTES: Final = 4 << 20
"""Bytes of a chunk: long enough that copies run at full speed, short enough that they overlap with what travels."""

TRANSFERS: Final = 2
"""Messages to, or from, one rank whose data is under way at once: one is copied while the other travels. Both ends take
them in the order of the answers, so that neither waits for one that the other has not begun."""

STAGES_KEPT: Final = 8
"""Buffers kept for later messages: 32 MiB of page-locked memory at most."""

_CHANNEL: Final = 0

AnyWork = DeviceSendWork | DeviceRecvWork
Transfer = Callable[[], Coroutine[Any, Any, None]]


class StagedMessages:
    """Of one group."""

    def __init__(self, around: Surroundings, group_id: int, helpers: Helpers) -> None:
        self._around = around
        self._id = group_id
        self._helpers = helpers
        self._free: list[Pinned] = []
        self._device = 0
        """A GPU that is used here: other ones must not be touched."""
        self._streams: dict[tuple[int, bool], Stream] = {}
        self._turns: dict[tuple[int, bool], asyncio.Semaphore] = {}
        self._tasks: dict[AnyWork, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

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
            work.complete(error if isinstance(error, DistError) else DistBackendError(str(error)))
        else:
            work.complete(None)
            self._around.events.give(work.ready)

    async def _send(self, work: DeviceSendWork) -> None:
        array, runtime = work.array, self._around.runtime
        stream = self._stream(array.device, sending=True)
        for event in work.ready:
            stream.wait_event(event)
        leaving: list[tuple[asyncio.Future[None], Pinned]] = []
        try:
            for index, start in enumerate(range(0, array.nbytes, STAGE_BYTES)):
                nbytes = min(STAGE_BYTES, array.nbytes - start)
                buffer = await self._buffer() if len(leaving) < 2 else await self._left(leaving)
                runtime.copy(buffer.pointer, array.pointer + start, nbytes, stream)
                await self._reached(stream, (work, buffer))
                leaving.append((self._post(work.peer, work.number, index, buffer, nbytes), buffer))
            while leaving:
                self._give(await self._left(leaving))
        except BaseException:
            # The transport and the GPU may still use these; both are through with them before the group is.
            del leaving
            raise

    async def _receive(self, work: DeviceRecvWork, number: int, nbytes: int, source: int) -> None:
        runtime, array = self._around.runtime, work.array
        stream = self._stream(array.device, sending=False)
        for event in work.ready:
            stream.wait_event(event)
        copied: list[tuple[asyncio.Future[None], Pinned]] = []
        for index, start in enumerate(range(0, nbytes, STAGE_BYTES)):
            size = min(STAGE_BYTES, nbytes - start)
            buffer = await self._buffer() if len(copied) < 2 else await self._left(copied)
            await self._fetch(source, number, index, buffer, size)
            runtime.copy(array.pointer + start, buffer.pointer, size, stream)
            copied.append((self._reached(stream, (work, buffer)), buffer))
        if copied:
            tail_of(work).queued((self._around.events.recorded(stream),))
        while copied:
            self._give(await self._left(copied))

    @staticmethod
    async def _left(under_way: list[tuple[asyncio.Future[None], Pinned]]) -> Pinned:
        """The buffer of the oldest once it is free."""
        future, buffer = under_way[0]
        await future
        del under_way[0]
        return buffer

    def _reached(self, stream: Stream, keep_alive: object) -> asyncio.Future[None]:
        """Done once the GPU has done what is queued on `stream` so far."""
        around = self._around
        reached: asyncio.Future[None] = around.loop.create_future()
        reached.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps nobody asks
        event = around.events.recorded(stream)

        def ended(error: BaseException | None) -> None:
            around.events.give((event,))
            if reached.done():
                return
            if error is None:
                reached.set_result(None)
            else:
                reached.set_exception(error)

        around.completions.add(stream, (event,), ended, keep_alive)
        return reached

    def _post(self, peer: int, number: int, index: int, buffer: Pinned, nbytes: int) -> asyncio.Future[None]:
        sink = _Sink(self._around.loop)
        payload = buffer.array.data[:nbytes]
        key = pack_key(self._id, 1 + index, number, 0, _CHANNEL)
        if self._around.mesh.post_send(peer, SendOp(key, payload, b"", sink, None)):
            sink.message_sent(None)
        return sink.ended

    async def _fetch(self, source: int, number: int, index: int, buffer: Pinned, nbytes: int) -> None:
        sink = _Sink(self._around.loop)
        key = pack_key(self._id, 1 + index, number, 0, _CHANNEL)
        receive = Receive(key, buffer.array.data[:nbytes], sink, None)
        if not self._around.mesh.post_receive(source, receive):
            await sink.ended

    async def _buffer(self) -> Pinned:
        if self._free:
            return self._free.pop()
        return await in_thread(
            self._around.loop, _allocate, self._around.runtime, self._device, on=(self._around.runtime, self._device)
        )

    def _give(self, buffer: Pinned) -> None:
        if self._closed or len(self._free) >= STAGES_KEPT:
            self._helpers.start(_end, self._around.runtime, self._device, [], [buffer])
        else:
            self._free.append(buffer)

    def _stream(self, device: int, *, sending: bool) -> Stream:
        self._device = device
        stream = self._streams.get((device, sending))
        if stream is None:
            stream = self._streams[device, sending] = self._around.runtime.new_stream(device)
        return stream

    def close(self) -> None:
        """End what is under way, and give buffers back once the GPU is through with them. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for task in list(self._tasks.values()):
            task.cancel()
        kept = [self._around.completions.drop(stream) for stream in self._streams.values()]
        streams = list(self._streams.values())
        self._helpers.start(_end, self._around.runtime, self._device, streams, self._free, keep_alive=kept)
        self._streams.clear()
        self._free = []

    async def wait_closed(self) -> None:
        """Wait for the tasks that were cancelled."""
        if self._ending:
            await asyncio.wait(set(self._ending))


def _allocate(runtime: Runtime, device: int) -> Pinned:
    """In a thread of its own, whose current device would be the first: CUDA would open a context there as well."""
    runtime.set_device(device)
    return runtime.pinned(STAGE_BYTES)


def _end(runtime: Runtime, device: int, streams: list[Stream], buffers: list[Pinned]) -> None:
    """In a thread of its own, as `_allocate`."""
    runtime.set_device(device)
    for stream in streams:
        stream.synchronize()
        stream.close()
    for buffer in buffers:
        buffer.close()


class _Sink:
    """Turns the end of one message into a future's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # perhaps nobody asks

    def message_sent(self, token: Any) -> None:
        """The chunk's buffer is free."""
        if not self.ended.done():
            self.ended.set_result(None)

    def message_received(self, token: Any, receive: Receive) -> None:
        """The chunk is here."""
        self.message_sent(token)

    def message_failed(self, token: Any, error: BaseException) -> None:
        """The other end is gone."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def allocate(self, token: Any, source: int, nbytes: int, meta: bytes) -> memoryview:
        """Never: there is a target."""
        raise AssertionError("the chunk has a place")
