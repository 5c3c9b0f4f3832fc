"""NcclPath: collectives through NCCL, for ranks that have a GPU each.

Each tag has communicators of its own (`NcclChannel`). The first operation of a tag opens them. The unique id goes
through the group's exchange, so only over authenticated connections. Opening begins once all ranks have come, so that
no rank blocks in NCCL for a rank that does not come.

A refused operation never starts on some ranks, while other ranks may have queued it on the GPU already, where only an
abort of the communicator ends it. So a refusal ends the tag's channel. Earlier operations still go through that
channel. Later operations that this rank has queued behind the refused one fail on all ranks. All others go through a
new channel.
"""

from __future__ import annotations

import asyncio
import os
from bisect import insort
from typing import ClassVar, Final

import msgpack

from asyncdist.arrays.reduce_op import CustomOp
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.concurrency.tasks import start_task
from asyncdist.cuda import Provider
from asyncdist.errors import CollectiveMismatchError, DistBackendError, DistError, RemoteProtocolError
from asyncdist.gpu.nccl.calls import ISSUE
from asyncdist.gpu.nccl.channel import NcclChannel, NcclOperation
from asyncdist.gpu.path import DevicePath, OnEnd, Surroundings
from asyncdist.gpu.streams import devices_of_call
from asyncdist.gpu.threads import in_thread

MAX_TAGS: Final = 16
"""Most tags of a group with collectives on GPU arrays: each has a communicator, tens of MiB of every GPU."""

REFUSED_KEPT: Final = 256
"""Refusals that are remembered per tag, for later channels: ranks that refuse can be so far ahead."""

ENDING_S: Final = 10.0
"""How long a closing group waits until NCCL has given communicators back: an abort may take seconds."""

EXCHANGE: Final = "nccl"

SHARED_GPUS: Final = "NCCL_MULTI_RANK_GPU_ENABLE"
"""NCCL's own variable, from 2.30 on: several ranks may use one GPU."""

OTHER_HOST: Final = "NCCL_HOSTID"
"""NCCL's own variable, which makes NCCL see another host. NCCL says itself whether two ranks on one GPU then work."""


class NcclPath(DevicePath):
    """See the module."""

    name: ClassVar[str] = "nccl"
    hears_who_leaves: ClassVar[bool] = False
    takes_messages: ClassVar[bool] = False

    def __init__(self, around: Surroundings) -> None:
        assert around.nccl is not None, "chosen only where every rank has it"
        super().__init__(around)
        self._nccl = around.nccl
        self._channels: dict[int, list[NcclChannel]] = {}
        self._refused: dict[int, list[int]] = {}
        """By tag, in order, refused operations: no later channel may carry them."""
        self._issued: dict[int, int] = {}
        """By tag, the last operation that was started here."""
        self._opening: dict[NcclChannel, asyncio.Task[None]] = {}

    @classmethod
    def refusal(cls, provider: Provider, call: Call) -> str:
        """Refuse reductions that NCCL lacks, and collectives that NCCL has no form for."""
        collective, dtype, op = call.collective, call.dtype, call.op
        if collective not in ISSUE:
            return f"{collective} of arrays on a GPU is not supported: copy them to the host"
        if op is None:
            return ""
        if isinstance(op, CustomOp):
            return f"{op!r} cannot be used on arrays on a GPU: NCCL has no operations of one's own"
        assert call.device is not None
        why = "" if provider.nccl is None else provider.nccl.refusal(dtype, op, call.device)
        return why and f"{collective} with {op!r} of {dtype.name} arrays on a GPU: {why}"

    def warm_up(self) -> None:
        """Open the communicator of tag 0."""
        if not self._channels.get(0):
            self._channel(0, 0, (self._around.device,))

    # Operations.

    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        """Queue it in the channel of its tag, making one if there is none."""
        tag = work.tag
        devices = devices_of_call(call) if call.members else (call.device,)
        self._issued[tag] = work.number
        channels = self._channels.get(tag, ())
        channel = channels[0] if len(channels) == 1 else None
        if channel is None or channel.limit is not None or channel.devices != devices:
            for spent in list(channels):
                self._retire(spent)
            channel = self._channel(tag, work.number, devices)
        channel.add(NcclOperation(call, work, on_end))

    def _channel(self, tag: int, number: int, devices: tuple[int, ...]) -> NcclChannel:
        channels = self._channels.setdefault(tag, [])
        for channel in channels:
            if channel.devices == devices and channel.carries(number):
                return channel
        if not channels and len([one for one in self._channels.values() if one]) >= MAX_TAGS:
            del self._channels[tag]
            raise DistBackendError(
                f"more than {MAX_TAGS} tags with collectives on GPU arrays: each has a communicator of its own. Use "
                "fewer tags, or groups"
            )
        channel = NcclChannel(self._around, self._nccl, tag, number, devices, self._retire)
        refused = self._refused[tag] = [one for one in self._refused.get(tag, ()) if one > number]
        channel.limit = refused[0] if refused else None
        channels.append(channel)
        task = start_task(self._around.loop, self._open(channel), name="open NCCL communicators")
        self._opening[channel] = task
        task.add_done_callback(lambda _task: self._opening.pop(channel, None))
        return channel

    async def _open(self, channel: NcclChannel) -> None:
        try:
            await self._join(channel)
        except Exception as error:
            failure = error if isinstance(error, DistError) else DistBackendError(f"NCCL cannot be opened: {error}")
            for number, operation in list(channel.operations.items()):
                if channel.forget(number) is not None:  # the end of the first one may end the group
                    operation.on_end(operation.work, failure)

    async def _join(self, channel: NcclChannel) -> None:
        around = self._around
        ids = [around.runtime.device_id(device) for device in channel.devices]
        unique = b""
        if around.rank == 0:
            unique = await in_thread(around.loop, self._nccl.unique_id, on=around.on)
        message = msgpack.packb([around.members[around.rank].host, ids, unique])
        told = await around.exchange.all_gather(EXCHANGE, channel.tag, channel.first, message)
        joined = [_joined(rank, one) for rank, one in zip(around.ranks, told, strict=True)]
        used: dict[tuple[str, str], int] = {}
        for rank, (host, theirs, _) in zip(around.ranks, joined, strict=True):
            if len(theirs) != len(ids):
                raise CollectiveMismatchError(
                    f"this rank gave arrays on {len(ids)} GPUs, but rank {rank} on {len(theirs)}", rank
                )
            for device in theirs:
                if used.setdefault((host, device), rank) != rank and not _may_share():
                    raise DistBackendError(f"rank {used[host, device]} and rank {rank} use the same GPU {device}")
        await channel.open(joined[0][2])

    # Refused operations.

    def drop(self, tag: int, sequence: int) -> None:
        """End the channel that the operation goes through, or would, from there on."""
        refused = self._refused.setdefault(tag, [])
        if sequence not in refused:
            insort(refused, sequence)
            del refused[:-REFUSED_KEPT]
        for channel in list(self._channels.get(tag, ())):
            channel.forget(sequence)
            if channel.carries(sequence):
                channel.limit = sequence
                self._give_up_from(channel, sequence)
            self._retire(channel)

    def _give_up_from(self, channel: NcclChannel, sequence: int) -> None:
        for number in [number for number in channel.operations if number > sequence]:
            operation = channel.operations.get(number)
            if operation is None:
                continue
            if operation.launched:  # behind an operation that never ends: it goes with the communicator
                why = f"it was on the GPU behind #{sequence}, which was refused"
                self._around.owner.give_up(channel.tag, number, why)
            else:
                channel.forget(number)
                self._channel(channel.tag, number, channel.devices).add(operation)

    def _retire(self, channel: NcclChannel) -> None:
        """End a channel that was cut short and whose last operation has ended."""
        channels = self._channels.get(channel.tag, [])
        if channel.limit is None or channel.operations or channel not in channels:
            return
        if self._issued.get(channel.tag, -1) < channel.limit:
            return  # operations that go through it are still to come
        channels.remove(channel)
        task = self._opening.get(channel)
        if task is not None:
            task.cancel()
        channel.end(self._helpers, in_order=False)

    # The rest of a path.

    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """Known while the communicator is being opened; NCCL does not say."""
        for channel in self._channels.get(tag, ()):
            if sequence in channel.operations and not channel.is_open:
                return self._around.exchange.waiting_for(EXCHANGE, tag, channel.first)
        return ()

    def failure(self) -> str:
        """What NCCL reports of communicators with operations under way."""
        busy = (channel for channels in self._channels.values() for channel in channels if channel.operations)
        why = next(filter(None, (channel.async_error() for channel in busy)), "")
        return why and f"NCCL reports: {why}"

    def abort(self, error: BaseException) -> None:
        """Abort all communicators, each in a thread."""
        self._end(in_order=False)

    def close(self) -> None:
        """Destroy all communicators, each in a thread."""
        self._end(in_order=True)

    def _end(self, *, in_order: bool) -> None:
        for task in list(self._opening.values()):
            task.cancel()
        channels, self._channels = self._channels, {}
        for of_tag in channels.values():
            for channel in of_tag:
                channel.end(self._helpers, in_order=in_order and channel.limit is None)

    async def wait_closed(self) -> None:
        """Wait for NCCL, at most ENDING_S."""
        opening = list(self._opening.values())
        if opening:
            await asyncio.wait(opening)
        await self._helpers.wait(ENDING_S)


def _may_share() -> bool:
    """Whether NCCL is to be tried although ranks share a GPU."""
    return os.environ.get(SHARED_GPUS) == "1" or bool(os.environ.get(OTHER_HOST))


def _joined(rank: int, message: bytes) -> tuple[str, list[str], bytes]:
    try:
        host, ids, unique = msgpack.unpackb(message)
        if not (isinstance(host, str) and isinstance(ids, list) and isinstance(unique, bytes)):
            raise ValueError("unexpected types")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"rank {rank} says what cannot be understood: {error}") from error
    return host, [str(one) for one in ids], unique
