"""DevicePath: one way to carry out a group's operations on GPU arrays, the same one on all its ranks.

The group's `DeviceBackend` finds out with the other ranks which path it takes, and hands the operations over in order.

What a path is given in a `Call` on GPU arrays: `inputs` and `outputs` are one-dimensional `DeviceArray`s, all
on `Call.device`; `pieces` hold such arrays too. `ready` are events, recorded on the caller's streams at the call: the
first thing a path does on a stream of its own is to wait for them. A call with `members` is several in one (the
coalesced and the multi-device forms): each member is a complete Call of its own, with arrays on its own `device`, and
they are carried out together; the outer call's `inputs` and `outputs` are empty.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from asyncdist.arrays.reduce_op import ReduceOpLike
from asyncdist.collectives.arguments.call import Call
from asyncdist.collectives.backend import CollectiveWork
from asyncdist.collectives.executor.scratch import ScratchPool
from asyncdist.cuda import Nccl, Provider, Runtime
from asyncdist.gpu.cuda_events import Completions
from asyncdist.gpu.host_exchange import HostExchange
from asyncdist.gpu.streams import EventPool
from asyncdist.plan.selection.tuning import Tuning
from asyncdist.transport.base_mesh import BaseMesh

__all__ = ["DevicePath", "Member", "OnEnd", "Surroundings", "have_own_devices"]

OnEnd = Callable[[CollectiveWork, BaseException | None], None]


class Member(NamedTuple):
    """What a rank says of itself when the path is chosen."""

    host: str
    """Equal for ranks that are on one host."""
    device_ids: tuple[str, ...]
    """The GPUs of its first call's arrays, by UUID; one but for the multi-device forms."""
    nccl: int
    """NCCL's version there, 0 without."""
    wish: str
    """The path it wants, empty if it has none: what its backend or ASYNCDIST_CUDA_PATH says."""
    bound: bool = False
    """Whether it was bound to its GPU when the group was made."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a path works with. `rank` is our place among `ranks`, the members' global ranks in group order."""

    loop: asyncio.AbstractEventLoop
    mesh: BaseMesh
    group_id: int
    ranks: tuple[int, ...]
    rank: int
    pool: ScratchPool
    tuning: Tuning
    runtime: Runtime
    nccl: Nccl | None
    device: int
    """The GPU of this rank's arrays; calls on others are refused before they come here, but for multi-device ones."""
    members: tuple[Member, ...]
    completions: Completions
    events: EventPool
    """Events to be recorded. The caller gives those of `Call.ready` back once the call has ended."""
    exchange: HostExchange
    """Small messages among the group, and host collectives (`host_backend`) that no operation of the group meets."""
    timeout_s: float | None
    give_up: Callable[[int, int, str], None]
    """`give_up(tag, sequence, why)`: fail an operation under way, here and on all other ranks; the group goes on."""
    differs: Callable[[int, int, int], None]
    """`differs(tag, sequence, rank)`: that global rank runs something else there, though it has ended well here."""
    watch_parts: Callable[[int, int], None]
    """`watch_parts(group_id, tag)`: messages with that id are parts of operations of `tag`, whose number is their tag.
    Those left when an operation has ended show that another rank runs something else."""


class DevicePath(ABC):
    """See the module. Made by `open` once all ranks have chosen it; all methods are called on the loop's thread."""

    name: ClassVar[str]

    hears_who_leaves: ClassVar[bool] = True
    """Whether an operation fails by itself once a rank has left that it waits for."""

    takes_messages: ClassVar[bool] = True
    """Whether messages of other ranks move operations on."""

    @classmethod
    @abstractmethod
    async def open(cls, around: Surroundings) -> Self:
        """Make the path of a group, on all its ranks at about the same time.

        Raises DistError when it cannot be, which aborts the group. Cancelling leaves nothing behind.
        """

    def warm_up(self) -> None:
        """Make what the first operation needs before there is one: all ranks are bound to their GPUs."""
        return

    @classmethod
    @abstractmethod
    def refusal(
        cls, provider: Provider, device: int, collective: str, dtype: np.dtype[Any], op: ReduceOpLike | None
    ) -> str:
        """Why this path cannot carry out a collective, for a TypeError; empty if it can.

        Asked at the call, before the path is open too, so it must say the same on all ranks whose `device` is alike.
        """

    @abstractmethod
    def start(self, call: Call, work: CollectiveWork, on_end: OnEnd) -> None:
        """Begin `call`; `on_end(work, None)` on the loop once results are complete on the GPU, or with an error.

        It must not block the loop for a millisecond. `on_end` may be called before this returns, and is not called
        for operations forgotten by `drop` and `abort`. Arrays and events are kept until then. Where results will be on
        a stream before the host knows, `work.on_device.queued(events)` is told the events recorded after them.
        """

    @abstractmethod
    def drop(self, tag: int, sequence: int) -> None:
        """Forget one operation: it was refused, here or elsewhere, perhaps before it was started here. Others go on."""

    @abstractmethod
    def waiting_for(self, tag: int, sequence: int) -> tuple[int, ...]:
        """Global ranks that an operation under way has not heard from, as far as is known."""

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Forget everything under way, and make what runs on the GPU end, from threads if that may block."""

    @abstractmethod
    def close(self) -> None:
        """The group is closed, nothing is under way: give back what outlives that. Idempotent, also after abort."""

    async def wait_closed(self) -> None:
        """Wait, bounded, until threads of `abort` and `close` have ended; called after one of them."""
        return

    def failure(self) -> str:
        """What has gone wrong meanwhile without an operation noticing, if anything; asked a few times a second."""
        return ""

    def describe(self) -> str:
        """The path's name and what is worth knowing about it, for the group's repr."""
        return self.name


def have_own_devices(members: Sequence[Member]) -> bool:
    """Whether no two ranks use the same GPU."""
    used = [(member.host, device) for member in members for device in member.device_ids]
    return len(set(used)) == len(used)
