"""IpcMessages: messages of GPU arrays between two ranks on one GPU, through device memory that both can read.

A message is a broadcast among the two ranks, in the order of the receiver's answers. Where one rank cannot open the
other's memory, messages go through the host: those that wait already, and all later ones.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from asyncdist.arrays.device import DeviceArray, device_flat
from asyncdist.collectives.arguments.call import NO_BLOCKS, Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.concurrency.integers import derive_group_id
from asyncdist.concurrency.tasks import start_task
from asyncdist.errors import DistError
from asyncdist.gpu.host_exchange import HostExchange
from asyncdist.gpu.ipc.channel import IpcChannel, open_channel
from asyncdist.gpu.messages import DeviceRecvWork, DeviceSendWork
from asyncdist.gpu.path import Surroundings
from asyncdist.gpu.streams import tail_of
from asyncdist.gpu.threads import Helpers

__all__ = ["IpcMessages"]

CLOSE_LIMIT_S: Final = 5.0
"""How long the sender waits for what its last messages' works have waited for already: that they are read."""

_BYTE: Final = np.dtype(np.uint8)
_TAG: Final = 0

AnyWork = DeviceSendWork | DeviceRecvWork


class IpcMessages:
    """One direction of a pair. `otherwise(work)` moves a message in another way; both ends do for the same ones."""

    def __init__(
        self, around: Surroundings, sender: int, receiver: int, helpers: Helpers, otherwise: Callable[[AnyWork], object]
    ) -> None:
        ranks = (sender, receiver)
        rank = ranks.index(around.mesh.rank)
        group_id = derive_group_id(around.group_id, "ipc messages", sender, receiver)
        self._exchange = HostExchange(
            around.mesh, group_id, ranks, rank, loop=around.loop, pool=around.pool, tuning=around.tuning
        )
        self._around = dataclasses.replace(
            around, group_id=group_id, ranks=ranks, rank=rank, exchange=self._exchange, members=()
        )
        self.broken = False
        """Whether messages take the other way."""
        self._helpers = helpers
        self._otherwise = otherwise
        self._held: deque[tuple[AnyWork, DeviceArray]] = deque()
        self._channel: IpcChannel | None = None
        self._count = 0
        self._opening: asyncio.Task[None] | None = start_task(around.loop, self._open(), name="open memory of messages")

    def add(self, work: AnyWork, array: DeviceArray) -> None:
        """Move a message; `array` is as long as it."""
        if self.broken:
            self._otherwise(work)
        elif self._channel is None:
            self._held.append((work, array))
        else:
            self._start(self._channel, work, array)

    def _start(self, channel: IpcChannel, work: AnyWork, array: DeviceArray) -> None:
        if work.done():  # given up meanwhile, and with it the pair
            return
        flat: Any = device_flat(array, writable=False)
        call = Call("broadcast", _BYTE, array.nbytes, NO_BLOCKS, (flat,), None, device=array.device, ready=work.ready)
        part = CollectiveWork(self._around.loop, work.operation, array.nbytes, _TAG, self._count, None)
        part.on_device = tail_of(work)
        self._count += 1
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
        """Move nothing more; the works have failed, or fail by other hands."""
        self._exchange.abort(error)
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
            await channel.shut(self._helpers, CLOSE_LIMIT_S)
        self._exchange.close()
