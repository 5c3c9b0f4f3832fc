"""DevicePairs: moves the data of messages of GPU arrays: through NCCL, shared device memory, or the host's memory.

NCCL, where both ends have NCCL and are on different GPUs. Each direction of a pair has a communicator of its own, which
its first message opens; a message is a broadcast from one end to the other. Both ends take the order of the receiver's
answers, and opposite directions do not wait for each other.

Device memory, where both ranks are on one GPU. Each direction of a pair has memory that both can read, and a message is
a broadcast there. If one rank cannot open the other's memory, waiting and later messages go through the host.

The host's memory otherwise. A message is a broadcast through page-locked memory, as `staged.pipeline` carries it out.
Each direction of a pair has a pipeline; what is idle of its buffers serves the other pipelines of the group.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any, Final

import numpy as np

from asyncdist.arrays.device import DeviceArray, device_flat
from asyncdist.collectives.arguments.call import NO_BLOCKS, Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.concurrency.integers import derive_group_id
from asyncdist.concurrency.tasks import start_task
from asyncdist.errors import CollectiveMismatchError, DistBackendError, DistError
from asyncdist.gpu.ipc.channel import IpcChannel, open_channel
from asyncdist.gpu.messages import (
    IPC,
    NCCL,
    REFUSED,
    STAGED,
    UNWANTED,
    Announcement,
    DeviceRecvWork,
    DeviceSendWork,
    answer_message,
    messages_id,
    refuse_message,
)
from asyncdist.gpu.nccl.channel import NcclChannel, NcclOperation
from asyncdist.gpu.path import Surroundings
from asyncdist.gpu.staged.pipeline import Spares, StagedPipeline
from asyncdist.gpu.streams import ready_after, tail_of
from asyncdist.gpu.threads import Helpers, close_all, in_thread, stay_on
from asyncdist.messages.work import PairWorkOwner
from asyncdist.transport.protocol.frame import key_prefix
from asyncdist.transport.protocol.operations import not_received

WATCH_S: Final = 0.1
"""How often NCCL is asked for errors while messages are under way."""

ENDING_S: Final = 10.0
"""How long closing waits until NCCL has given communicators back."""

CLOSE_LIMIT_S: Final = 5.0
"""How long a closing sender waits until its last messages are read, for which their works have waited already."""

SPARES: Final = 8
"""Buffers kept for later messages through the host: 32 MiB of page-locked memory at most."""

_BYTE: Final = np.dtype(np.uint8)
_TAG: Final = 0

AnyWork = DeviceSendWork | DeviceRecvWork


class DevicePairs:
    """Moves the messages of one group. `host` and `path` are this rank's, as in `Member`."""

    def __init__(self, around: Surroundings, host: str, path: str) -> None:
        self.runtime = around.runtime
        self._around = around
        self._host = host
        self._nccl = around.nccl if path in ("", "nccl") else None
        self._id = messages_id(around.group_id)
        self._numbers: dict[int, int] = {}
        self._shares_memory = path in ("", "ipc")
        self._nccl_messages: dict[tuple[int, bool], _NcclMessages] = {}
        self._ipc: dict[tuple[int, bool], _IpcMessages] = {}
        self._staged: dict[tuple[int, bool], _StagedMessages] = {}
        self._spares = Spares(SPARES), Spares(SPARES)
        self._host_helpers: dict[int, Helpers] = {}
        """By GPU, the threads of messages through the host."""
        self._helpers = Helpers(around.loop, around.on)
        self._works: dict[AnyWork, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def send(self, operation: str, array: DeviceArray, key: bytes, owner: PairWorkOwner, peer: int) -> DeviceSendWork:
        """A send to global rank `peer`, for the caller to post. Raises ValueError for an array not contiguous."""
        flat = device_flat(array, writable=False)
        stay_on(self.runtime, array.device)
        number = self._numbers.get(peer, 0)
        self._numbers[peer] = (number + 1) & 0xFFFF_FFFF
        device_id = self.runtime.device_id(array.device)
        announcement = Announcement(number, self._host, device_id, self._nccl is not None, array.dtype, array.shape)
        ready = ready_after(self.runtime, self._around.events, [array])
        return DeviceSendWork(
            self._around.loop, operation, flat, announcement, key, self._around.group_id, owner, self, peer, ready
        )

    def receive(
        self,
        operation: str,
        array: DeviceArray,
        key: bytes,
        owner: PairWorkOwner,
        peer: int,
        number: Callable[[int], int] | None,
        withdrawable: bool,
    ) -> DeviceRecvWork:
        """A receive into `array`, for the caller to post. Raises ValueError if it is read-only or not contiguous."""
        stay_on(self.runtime, array.device)
        ready = ready_after(self.runtime, self._around.events, [array])
        return DeviceRecvWork(self._around.loop, operation, array, key, owner, self, peer, number, withdrawable, ready)

    # The receiver.

    def refuse(self, source: int, number: int, why: str) -> None:
        """See DeviceMessages."""
        refuse_message(self._around.mesh, self._around.group_id, source, number, why)

    def matched(self, work: DeviceRecvWork, announced: Announcement) -> None:
        """See DeviceMessages."""
        self._works[work] = work.peer
        self._watch()
        try:
            self._receive(work, announced, work.peer)
        except Exception as error:  # the caller is the transport
            work.complete(error)

    def _receive(self, work: DeviceRecvWork, announced: Announcement, source: int) -> None:
        """Choose the way of the data, tell the sender, and receive the data that way."""
        device = work.array.device
        apart = (announced.host, announced.device_id) != (self._host, self.runtime.device_id(device))
        if self._nccl is not None and announced.nccl and apart and announced.nbytes:
            messages = self._nccl_messages.get((source, False))
            if messages is None:
                messages = _NcclMessages(self, source, device, announced.device_id, None)
                self._nccl_messages[source, False] = messages
            if messages.fits(device, announced.device_id):
                messages.receive(work)
                return
        if self._shares_memory and not apart and announced.nbytes and source != self._around.mesh.rank:
            shared = self._ipc_messages(source, sending=False)
            if not shared.broken:
                self._answer(source, announced.number, IPC)
                shared.add(work, _received(work))
                return
        self._answer(source, announced.number, STAGED)
        self._through_host(work, _received(work))

    def _ipc_messages(self, peer: int, *, sending: bool) -> _IpcMessages:
        messages = self._ipc.get((peer, sending))
        if messages is None:
            messages = self._ipc[peer, sending] = _IpcMessages(self, peer, sending=sending)
        return messages

    def _through_host(self, work: AnyWork, array: DeviceArray) -> None:
        """Move a message through the host's memory; `array` is as long as the message."""
        way = work.peer, isinstance(work, DeviceSendWork)
        messages = self._staged.get(way)
        if messages is None:
            messages = self._staged[way] = _StagedMessages(self, work.peer, sending=way[1])
        try:
            messages.add(work, array)
        except Exception as error:  # the driver refuses a stream
            work.complete(error)

    def _apart(self, name: str, peer: int, *, sending: bool) -> Surroundings:
        """What one direction of a pair works with: the sender is rank 0 of the two, the receiver rank 1."""
        around = self._around
        ranks, rank = ((around.mesh.rank, peer), 0) if sending else ((peer, around.mesh.rank), 1)
        group_id = derive_group_id(around.group_id, name, *ranks)
        exchange = around.exchange.among(group_id, ranks, rank)
        return replace(around, group_id=group_id, ranks=ranks, rank=rank, exchange=exchange, members=())

    def _answer(self, source: int, number: int, answer: bytes) -> None:
        answer_message(self._around.mesh, self._around.group_id, source, number, answer)

    # The sender.

    def answered(self, work: DeviceSendWork, answer: bytes) -> None:
        """See DeviceMessages."""
        self._works[work] = work.peer
        self._watch()
        how = answer[:1]
        if how == STAGED:
            self._through_host(work, work.array.flat())
        elif how == IPC and self._shares_memory:
            self._ipc_messages(work.peer, sending=True).add(work, work.array.flat())
        elif how == NCCL and self._nccl is not None:
            messages = self._nccl_messages.get((work.peer, True))
            if messages is None:
                messages = _NcclMessages(self, work.peer, work.array.device, "", answer[1:])
                self._nccl_messages[work.peer, True] = messages
            messages.send(work, work.array.flat())
        elif how == UNWANTED:
            work.complete(not_received(work.peer))
        else:
            why = answer[1:].decode(errors="replace") if how == REFUSED else "it cannot be understood"
            text = f"{work.where}: rank {work.peer} refused the message: {why}; the pair stays usable"
            work.complete(CollectiveMismatchError(text, work.peer))

    # Both.

    def ended(self, work: AnyWork) -> None:
        """See DeviceMessages."""
        self._works.pop(work, None)
        self._around.events.give(work.ready)

    def _watch(self) -> None:
        """Ask NCCL now and then whether it has failed. NCCL does not say so by itself."""
        if self._timer is None and self._works:
            self._timer = self._around.loop.call_later(WATCH_S, self._look)

    def _look(self) -> None:
        self._timer = None
        for (peer, _), messages in list(self._nccl_messages.items()):
            why = messages.failure()
            if why:
                error = DistBackendError(f"messages with rank {peer}: NCCL reports: {why}")
                self.peer_lost(peer, error)
                self._around.mesh.break_pair(peer, error)  # the other end cannot know
        self._watch()

    def peer_lost(self, rank: int, error: BaseException) -> None:
        """A rank is gone: no message with that rank will end by itself."""
        for key in [key for key in self._nccl_messages if key[0] == rank]:
            self._nccl_messages.pop(key).end(in_order=False)
        for way in self._ways():
            if way.peer == rank:
                way.end(error)
        for work in [work for work, peer in self._works.items() if peer == rank]:
            work.complete(error)

    def _ways(self) -> tuple[_IpcMessages | _StagedMessages, ...]:
        return *self._ipc.values(), *self._staged.values()

    def abort(self) -> None:
        """The group's messages are aborted; their works have failed, or are about to."""
        self._around.mesh.drop_group(key_prefix(self._id, 0, 0)[:8])
        self._end(in_order=False)

    def _end(self, *, in_order: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        given_up, self._nccl_messages = self._nccl_messages, {}
        for messages in given_up.values():
            messages.end(in_order=in_order)
        if not in_order:
            for way in self._ways():
                way.end(DistBackendError("the group's messages were aborted"))
        for staged in self._staged.values():
            staged.shut()
        for helpers in tuple(self._host_helpers.values())[:1]:
            helpers.start(close_all, *self._spares[0].close(), *self._spares[1].close())

    async def close(self) -> None:
        """Give everything back, bounded; nothing is under way."""
        if not self._closed:
            self._closed = True
            self._end(in_order=True)
            await asyncio.gather(*(ipc.close() for ipc in self._ipc.values()))
            await asyncio.gather(*(helpers.wait(ENDING_S) for helpers in (self._helpers, *self._host_helpers.values())))


class _NcclMessages:
    """One direction of a pair through NCCL: its sender is rank 0 of the communicator, its receiver rank 1.

    `unique_id` is what the receiver has answered; None on the receiver, which makes the id.
    """

    def __init__(self, pairs: DevicePairs, peer: int, device: int, peer_device: str, unique_id: bytes | None) -> None:
        around, nccl = pairs._around, pairs._nccl
        assert nccl is not None, "asked before"
        self._pairs = pairs
        self._loop = around.loop
        self._peer = peer
        self._device = device
        self._peer_device = peer_device
        self._nccl = nccl
        self._unanswered: deque[int] = deque()
        self._unique_id = b""
        self._numbers = count(1)
        ranks = (peer, around.mesh.rank) if unique_id is None else (around.mesh.rank, peer)
        pair = replace(around, ranks=ranks, rank=int(unique_id is None))
        self._channel = NcclChannel(pair, nccl, 0, 0, (device,), lambda _never: None)
        self._opening = start_task(self._loop, self._open(unique_id), name="open NCCL for messages")

    def fits(self, device: int, peer_device: str) -> bool:
        """Whether messages between these GPUs go this way."""
        return device == self._device and peer_device == self._peer_device

    def receive(self, work: DeviceRecvWork) -> None:
        """Queue a message and answer it, in order."""
        self._unanswered.append(work.number)
        self._answer_all()
        self.send(work, _received(work))

    def send(self, work: AnyWork, array: DeviceArray) -> None:
        """Queue a message that was answered, or is about to be."""
        call, part = _as_broadcast(self._loop, work, array, next(self._numbers))
        self._channel.add(NcclOperation(call, part, lambda _part, error: work.complete(error)))

    async def _open(self, unique_id: bytes | None) -> None:
        channel, around = self._channel, self._pairs._around
        try:
            if unique_id is None:
                unique_id = self._unique_id = await in_thread(self._loop, self._nccl.unique_id, on=around.on)
                self._answer_all()
            await channel.open(unique_id)
        except Exception as error:
            failure = error if isinstance(error, DistError) else DistBackendError(f"NCCL cannot be opened: {error}")
            for operation in list(channel.operations.values()):
                operation.on_end(operation.work, failure)

    def _answer_all(self) -> None:
        while self._unique_id and self._unanswered:
            self._pairs._answer(self._peer, self._unanswered.popleft(), NCCL + self._unique_id)

    def failure(self) -> str:
        """What NCCL says has gone wrong."""
        return self._channel.async_error()

    def end(self, *, in_order: bool) -> None:
        """Give the communicator up."""
        self._opening.cancel()
        self._pairs._helpers.keep(self._opening)
        self._channel.end(self._pairs._helpers, in_order=in_order)


class _IpcMessages:
    """One direction of a pair through device memory. Both ends stage the same messages if that fails."""

    def __init__(self, pairs: DevicePairs, peer: int, *, sending: bool) -> None:
        self.peer = peer
        self._around = pairs._apart("ipc messages", peer, sending=sending)
        self.broken = False
        """Whether messages go through the host."""
        self._pairs = pairs
        self._held: deque[tuple[AnyWork, DeviceArray]] = deque()
        self._channel: IpcChannel | None = None
        self._numbers = count()
        self._opening: asyncio.Task[None] | None = start_task(
            pairs._around.loop, self._open(), name="open memory of messages"
        )

    def add(self, work: AnyWork, array: DeviceArray) -> None:
        """Move a message; `array` is as long as the message."""
        channel = self._channel
        if work.done():  # given up meanwhile, and the pair with it
            return
        if self.broken:
            self._pairs._through_host(work, array)
        elif channel is None:
            self._held.append((work, array))
        else:
            call, part = _as_broadcast(self._around.loop, work, array, next(self._numbers))
            channel.start(call, part, lambda _part, error: work.complete(error), array.nbytes & 0xFFFF_FFFF)

    async def _open(self) -> None:
        failure: DistError | None = None
        try:
            self._channel = await open_channel(self._around, _TAG, first=False)
        except DistError as error:
            failure = error
        self.broken = self._channel is None
        self._opening = None
        held, self._held = self._held, deque()
        for work, array in held:
            if failure is not None:
                work.complete(failure)
            else:
                self.add(work, array)

    def end(self, error: BaseException) -> None:
        """Move nothing more. The works have failed, or the caller fails them."""
        self._around.exchange.abort(error)
        if self._opening is not None:
            self._opening.cancel()
        if self._channel is not None:
            self._channel.stop()

    async def close(self) -> None:
        """Give the memory back, bounded."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.shut(self._pairs._helpers, CLOSE_LIMIT_S)
        self._around.exchange.close()


class _StagedMessages:
    """One direction of a pair through the host's memory: a pipeline for each GPU of ours that has had a message."""

    def __init__(self, pairs: DevicePairs, peer: int, *, sending: bool) -> None:
        self._pairs = pairs
        self.peer = peer
        self._around = pairs._apart("staged messages", peer, sending=sending)
        self._pipelines: dict[int, StagedPipeline] = {}

    def add(self, work: AnyWork, array: DeviceArray) -> None:
        """Move a message; `array` is as long as the message."""
        if work.done():  # given up meanwhile, and the pair with it
            return
        pipeline = self._pipelines.get(array.device) or self._pipeline(array.device)
        call, part = _as_broadcast(self._around.loop, work, array, work.number)
        pipeline.start(call, part, lambda _part, error: work.complete(error))

    def _pipeline(self, device: int) -> StagedPipeline:
        around, known = replace(self._around, device=device), self._pairs._host_helpers
        helpers = known.setdefault(device, Helpers(around.loop, around.on))
        made = self._pipelines[device] = StagedPipeline(around, _TAG, helpers, spares=self._pairs._spares)
        return made

    def end(self, error: BaseException) -> None:
        """Move nothing more. The works have failed, or the caller fails them."""
        self._around.exchange.abort(error)
        for pipeline in self._pipelines.values():
            pipeline.stop()
        self.shut()

    def shut(self) -> None:
        """Give everything back once the GPU is through with it. Nothing is under way. Idempotent."""
        for pipeline in self._pipelines.values():
            pipeline.shut()
        self._pipelines.clear()
        self._around.exchange.close()


def _received(work: DeviceRecvWork) -> DeviceArray:
    """The part of the receive's array that the message fills."""
    return work.array[: work.nbytes // max(1, work.array.itemsize)]


def _as_broadcast(
    loop: asyncio.AbstractEventLoop, work: AnyWork, array: DeviceArray, number: int
) -> tuple[Call, CollectiveWork]:
    """The broadcast between the two ranks that moves a message, and the broadcast's Work."""
    flat: Any = device_flat(array, writable=False)
    call = Call("broadcast", _BYTE, array.nbytes, NO_BLOCKS, (flat,), None, device=array.device, ready=work.ready)
    part = CollectiveWork(loop, work.operation, array.nbytes, _TAG, number, None)
    part.on_device = tail_of(work)
    return call, part
